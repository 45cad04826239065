"""`penstock archive`, run as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.spark import parquet
from penstock.spark.archive_place import DirectoryPlace
from penstock.spark.manifest import ArchiveManifest, Entry
from tests.support.data_directories import penstock
from tests.support.object_writer import COLUMNS, SCHEMA, rows, write


def test_files_of_different_hours_are_shown_and_not_merged(tmp_path: Path) -> None:
    for number in range(4):
        write(str(tmp_path / "archive"), number)

    before = penstock("archive", "describe", tmp_path / "archive")
    assert before.stdout.splitlines()[-1].split()[:6] == ["orders", "0", "0", "40", "40", "8"]
    done = penstock("archive", "compact", tmp_path / "archive", "--keep", "1d")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "merged 0 files into 0, 0 B; removed 0 files\n"


def test_compaction_removes_what_is_older_than_it_keeps(tmp_path: Path) -> None:
    root = DirectoryPlace(tmp_path / "archive")
    manifest = ArchiveManifest(root)
    manifest.create()
    for number in range(3):
        files = parquet.write([rows(0).slice(number, 1)], root, SCHEMA, "hour")
        manifest.commit(Entry("query", number, COLUMNS, tuple(files)))

    kept = penstock("archive", "compact", f"file://{root}", "--json")
    assert json.loads(kept.stdout) | {"bytes": 0} == {"replaced": 3, "merged": 1, "bytes": 0, "removed": 0}
    removed = penstock("archive", "compact", root.path, "--keep", "0")

    assert removed.stdout == "merged 0 files into 0, 0 B; removed 3 files\n"
    (row,) = json.loads(penstock("archive", "describe", root.path, "--json").stdout)
    assert row["bytes"] > 0
    del row["bytes"]
    assert row == {"topic": "orders", "partition": 0, "start": 0, "end": 3, "rows": 3, "files": 1}


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    for command in ("describe", "compact"):
        done = penstock("archive", command, tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {tmp_path} is not an archive")
    write(str(tmp_path), 0)
    done = penstock("archive", "compact", tmp_path, "--keep", "8d")
    assert done.returncode == 2
    assert "it must be at most 7d" in done.stderr
