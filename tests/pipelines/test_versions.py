"""The versions of a pipeline file that have run, and how one is restored."""

from __future__ import annotations

from pathlib import Path

from penstock.pipelines.versions import FileVersions


def test_the_last_version_that_ran_is_restored_then_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    versions = FileVersions.of(file)
    for content in ("one", "two", "two"):
        versions.accept(content)
    file.write_text("three")

    kept = versions.roll_back()
    assert (file.read_text(), kept.read_text()) == ("two", "three")
    versions.roll_back()
    assert (file.read_text(), kept.read_text()) == ("one", "two")
    versions.roll_back()
    assert file.read_text() == "two"


def test_a_removed_file_is_restored(tmp_path: Path) -> None:
    versions = FileVersions.of(tmp_path / "a.toml", tmp_path / "elsewhere")
    versions.accept("one")
    versions.roll_back()
    assert (tmp_path / "a.toml").read_text() == "one"
    assert not (tmp_path / "data").exists()
