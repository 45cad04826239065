"""Archives: the history of topics as Parquet files, which stays when the log drops it.

An archive is written by `archive_sink` and read by the source, both with the option `archive`. The manifest names the
files that belong to it.

    <archive>/_manifest/                                   see manifest.py
              data/topic=orders/day=2026-11-16/hour=05/3f….parquet

Other programs read the files that `Archive(path).files()` lists: `pyarrow.dataset.dataset(Archive(path).files())`. A
file in the directory that is not in the list may hold duplicate rows. With `archiveFormat=delta` the directory is a
Delta table, and the log of the table is the manifest.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow
from pyspark.sql.datasource import InputPartition

from penstock.spark import manifest, parquet
from penstock.spark.manifest import ArchivedFile, ArchiveManifest

if TYPE_CHECKING:
    from penstock.spark.delta import DeltaManifest

# About how many rows one task reads.
SLICE_ROWS: Final = 500_000
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True)
class ArchiveSlice(InputPartition):
    """Offsets of a topic partition, excluding the end, and the files that hold them."""

    root: str
    topic: str
    partition: int
    start: int
    end: int
    files: tuple[ArchivedFile, ...]


class Archive:
    """An archive, for reading. Each call sees what is committed at that time."""

    def __init__(self, path: str) -> None:
        self.root = directory(path)
        self._manifest = open_manifest(self.root)

    def topics(self) -> list[str]:
        return sorted({topic for topic, _ in self._manifest.ranges()})

    def ranges(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return the first offset and the end, excluded, of each partition. Offsets in between may have no row."""
        found = self._manifest.ranges().items()
        return {partition: known for (name, partition), known in found if name == topic}

    def files(self) -> list[str]:
        """Return the path of every file in the archive."""
        return [str(parquet.place_of(self.root, file.path)) for file in self._manifest.files()]

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[ArchiveSlice]:
        """Return consecutive slices that together hold the rows with start <= offset < end."""
        files = sorted(
            (file for file in self._manifest.files() if _is_within(file, topic, partition, start, end)),
            key=lambda file: file.first,
        )
        cuts, rows = [start], 0
        for file in files:
            if rows >= SLICE_ROWS and file.first > cuts[-1]:
                cuts.append(file.first)
                rows = 0
            rows += file.rows
        found = []
        for first, last in zip(cuts, [*cuts[1:], end], strict=True):
            held = tuple(file for file in files if _is_within(file, topic, partition, first, last))
            if held:
                found.append(ArchiveSlice(str(self.root), topic, partition, first, last, held))
        return found

    @staticmethod
    def read(slice: ArchiveSlice, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
        """Read the rows of a slice, ascending by offset, with the columns of the schema."""
        root = Path(slice.root)
        files = [(parquet.place_of(root, file.path), file) for file in slice.files]
        return parquet.read(files, slice.start, slice.end, schema)

    def sweep(self, older_than: datetime.timedelta = datetime.timedelta(days=7)) -> list[str]:
        """Remove files that no commit names, and return their paths. `older_than` spares those of running batches."""
        if not isinstance(self._manifest, ArchiveManifest):
            raise ValueError(f"{self.root} is a Delta table: use DeltaTable.vacuum(full=True) instead")
        before = time.time() - older_than.total_seconds()
        # List files before reading the manifest, so that files committed in between are spared.
        old = [
            path.relative_to(self.root).as_posix()
            for path in sorted((self.root / "data").rglob("*.parquet"))
            if path.stat().st_mtime <= before
        ]
        return remove(self.root, self._manifest.unnamed(old))


def directory(path: str) -> Path:
    """Return the directory of an archive. Driver and executors must share it: it is local, or mounted by all."""
    if _URL.match(path):
        raise ValueError(f"invalid archive {path!r}: it must be a directory that driver and executors share, not a URL")
    return Path(os.path.abspath(path))


def format_of(root: Path) -> str | None:
    """Return the format of the archive in a directory, `parquet` or `delta`; None if there is none."""
    if (root / manifest.DIRECTORY).is_dir():
        return "parquet"
    return "delta" if (root / "_delta_log").is_dir() else None


def open_manifest(root: Path) -> ArchiveManifest | DeltaManifest:
    """Return the manifest of an existing archive."""
    match format_of(root):
        case "parquet":
            return ArchiveManifest(root)
        case "delta":
            from penstock.spark.delta import DeltaManifest

            return DeltaManifest(root)
    raise ValueError(f"{root} is not an archive: write one with .writeStream.format('penstock').option('archive', …)")


def remove(root: Path, paths: Sequence[str]) -> list[str]:
    """Remove files, given as in the manifest, and return their paths."""
    removed = [parquet.place_of(root, path) for path in paths]
    for path in removed:
        path.unlink(missing_ok=True)
    return [str(path) for path in removed]


def _is_within(file: ArchivedFile, topic: str, partition: int, start: int, end: int) -> bool:
    return file.topic == topic and file.partition == partition and file.first < end and file.last >= start
