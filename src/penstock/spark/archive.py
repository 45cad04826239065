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
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

import pyarrow

from penstock.errors import ReadFailed
from penstock.spark import manifest, parquet
from penstock.spark.archive_place import ArchivePlace, DirectoryPlace, open_place
from penstock.spark.manifest import ArchivedFile, ArchiveManifest, Entry

if TYPE_CHECKING:
    from penstock.spark.delta import DeltaManifest

# About how many rows one task reads.
SLICE_ROWS: Final = 500_000
# Compaction merges files up to this size.
FILE_BYTES: Final = 128 << 20
KEEP: Final = datetime.timedelta(days=7)


@dataclass(frozen=True)
class ArchiveSlice:
    """Offsets of a topic partition, excluding the end, and the files that hold them."""

    archive: str
    topic: str
    partition: int
    start: int
    end: int
    files: tuple[ArchivedFile, ...]


@dataclass(frozen=True, slots=True)
class MergedFiles:
    """The files that compaction merged, and the one that replaces them."""

    replaced: tuple[ArchivedFile, ...]
    file: ArchivedFile


class Archive:
    """An archive, for reading. Each call sees what is committed at that time."""

    def __init__(self, path: str) -> None:
        """`path` is a directory, or the URL of an object store."""
        self._place = open_place(path)
        self._manifest = open_manifest(self._place)

    def topics(self) -> list[str]:
        return sorted({topic for topic, _ in self._manifest.ranges()})

    def ranges(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return the first offset and the end, excluded, of each partition. Offsets in between may have no row."""
        found = self._manifest.ranges().items()
        return {partition: known for (name, partition), known in found if name == topic}

    def archived_files(self) -> list[ArchivedFile]:
        return self._manifest.files()

    def files(self) -> list[str]:
        """Return the path or URL of every file in the archive."""
        return [self._place.location(file.path) for file in self._manifest.files()]

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
                found.append(ArchiveSlice(str(self._place), topic, partition, first, last, held))
        return found

    @staticmethod
    def read(slice: ArchiveSlice, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
        """Read the rows of a slice, ascending by offset, with the columns of the schema."""
        return parquet.read(open_place(slice.archive), slice.files, slice.start, slice.end, schema)

    def compact(self, file_bytes: int = FILE_BYTES) -> Iterator[MergedFiles]:
        """Merge small files of the same partition and hour, or day, to files of about `file_bytes`.

        Readers see the small files or the merged one. The small files stay until `sweep` removes them.
        """
        if not isinstance(self._manifest, ArchiveManifest):
            raise ValueError(f"{self._place} is a Delta table: only archives in the format parquet are compacted")
        columns = self._manifest.state().columns
        for files in self._alike(_small_files(self._manifest.files(), file_bytes)):
            file = self._merge(files)
            paths = tuple(each.path for each in files)
            entry = Entry(f"{manifest.ONCE}{uuid.uuid4().hex}", 0, columns, (file,), paths, int(time.time()))
            if self._manifest.replace(entry):
                yield MergedFiles(files, file)
            else:
                # Another compaction was faster.
                self._place.remove([file.path])

    def _alike(self, groups: Iterable[tuple[ArchivedFile, ...]]) -> Iterator[tuple[ArchivedFile, ...]]:
        """Split groups where a file has other columns than the one before, and leave out those of one file."""
        for files in groups:
            schemas = ((parquet.schema_of(self._place, file), file) for file in files)
            for _, run in groupby(schemas, key=lambda each: each[0]):
                if len(alike := tuple(file for _, file in run)) > 1:
                    yield alike

    def _merge(self, files: tuple[ArchivedFile, ...]) -> ArchivedFile:
        schema = parquet.schema_of(self._place, files[0])
        rows = parquet.read(self._place, files, 0, max(file.last for file in files) + 1, schema)
        unit: parquet.Unit = "hour" if PurePosixPath(files[0].path).parent.name.startswith("hour=") else "day"
        (file,) = parquet.write(rows, self._place, schema, unit)
        if file.rows != sum(each.rows for each in files):
            self._place.remove([file.path])
            raise ReadFailed(
                f"{self._place}: {', '.join(each.path for each in files)} have not the rows in the manifest"
            )
        return file

    def sweep(self, older_than: datetime.timedelta = KEEP) -> list[str]:
        """Remove files that no commit names, and return their paths. `older_than` spares those of running batches, and
        those that compaction replaced while readers may use them."""
        if not isinstance(self._manifest, ArchiveManifest):
            raise ValueError(f"{self._place} is a Delta table: use DeltaTable.vacuum(full=True) instead")
        before = time.time() - older_than.total_seconds()
        # List files before reading the manifest, so that files committed in between are spared.
        old = self._place.parquet_files(before)
        unneeded = self._manifest.unneeded(old, before)
        self._place.remove(unneeded)
        return [self._place.location(name) for name in unneeded]


def format_of(place: ArchivePlace) -> str | None:
    """Return the format of the archive at a place, `parquet` or `delta`; None if there is none."""
    names = place.top_names()
    if manifest.DIRECTORY in names:
        return "parquet"
    return "delta" if "_delta_log" in names else None


def open_manifest(place: ArchivePlace) -> ArchiveManifest | DeltaManifest:
    """Return the manifest of an existing archive."""
    match format_of(place):
        case "parquet":
            return ArchiveManifest(place)
        case "delta":
            return delta_manifest(place)
    raise ValueError(f"{place} is not an archive: write one with .writeStream.format('penstock').option('archive', …)")


def delta_manifest(place: ArchivePlace) -> DeltaManifest:
    if not isinstance(place, DirectoryPlace):
        raise ValueError(f"{place} cannot be a Delta table: only a directory can, use archiveFormat=parquet")
    from penstock.spark.delta import DeltaManifest

    return DeltaManifest(place.path)


def _small_files(files: Iterable[ArchivedFile], file_bytes: int) -> Iterator[tuple[ArchivedFile, ...]]:
    """Yield files to merge: consecutive ones of the same partition and directory, two or more."""
    groups: dict[tuple[str, int, PurePosixPath], list[ArchivedFile]] = {}
    for file in sorted(files, key=lambda file: file.first):
        if file.bytes < file_bytes:
            groups.setdefault((file.topic, file.partition, PurePosixPath(file.path).parent), []).append(file)
    for group in groups.values():
        run: list[ArchivedFile] = []
        for file in group:
            if run and sum(each.bytes for each in run) + file.bytes > file_bytes:
                yield from [tuple(run)] if len(run) > 1 else []
                run = []
            run.append(file)
        yield from [tuple(run)] if len(run) > 1 else []


def _is_within(file: ArchivedFile, topic: str, partition: int, start: int, end: int) -> bool:
    return file.topic == topic and file.partition == partition and file.first < end and file.last >= start
