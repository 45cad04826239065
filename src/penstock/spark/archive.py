"""The archive of topics: history as Parquet, which is there when the log has let it go.

Written by `.write` and `.writeStream` with the option `archive`, read by the source with the same option. Tasks write
files that nobody sees yet; the driver's commit names them in the manifest, all of a batch or none, and a batch that is
repeated adds nothing. What a task or a driver leaves behind when it is killed is named nowhere: `sweep` removes it.

    <archive>/_manifest/                                   what is in it: see manifest.py
              data/topic=orders/day=2026-11-16/hour=05/3f….parquet

Other programs read the files that `Archive(path).files()` lists: `pyarrow.dataset.dataset(Archive(path).files())`. A
file in the directory that is not in the list may hold rows a second time. With `archiveFormat=delta` the directory is
a Delta table, and its log says what is in it.
"""

from __future__ import annotations

import datetime
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)

from penstock.errors import BadDirectory
from penstock.spark import columns, manifest, options, parquet
from penstock.spark.manifest import ArchivedFile, Entry, Manifest

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from penstock.spark.delta import DeltaManifest

STREAM: Final = ("archive", "archiveFormat", "archivePartition", "archiveGaps")
BATCH: Final = (*STREAM, "txnId", "txnVersion")
SPARK_TYPES: Final = columns.COLUMNS | columns.HEADERS
_REQUIRED: Final = (*parquet.PLACE, "value")
# One task reads about so many rows.
SLICE_ROWS: Final = 500_000
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """What a batch write adds is there once for each `txnId` and `txnVersion`, if it is given them."""
    return _BatchWriter(_batch_target(options, schema, overwrite))


def stream_writer(options: Mapping[str, str], schema: StructType) -> DataSourceStreamArrowWriter:
    """Each batch of a query is there once, for as long as the query keeps its checkpoint."""
    return _StreamWriter(_target(options, schema, STREAM))


@dataclass(frozen=True)
class ArchiveSlice(InputPartition):
    """Offsets of a topic partition, the end not included, and the files that hold them."""

    root: str
    topic: str
    partition: int
    start: int
    end: int
    files: tuple[ArchivedFile, ...]


class Archive:
    """An archive that is read. Each call sees what is committed by then."""

    def __init__(self, path: str) -> None:
        self.root = directory(path)
        self._books = _books(self.root)

    def topics(self) -> list[str]:
        return sorted({topic for topic, _ in self._books.ranges()})

    def ranges(self, topic: str) -> dict[int, tuple[int, int]]:
        """Of each partition the first offset and the end, not included. Within it an offset may have no row."""
        found = self._books.ranges().items()
        return {partition: known for (name, partition), known in found if name == topic}

    def files(self) -> list[str]:
        """The path of every file that is in it."""
        return [str(parquet.place_of(self.root, file.path)) for file in self._books.files()]

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[ArchiveSlice]:
        """Parts, one behind the other, that together hold the rows with start <= offset < end."""
        files = sorted(
            (file for file in self._books.files() if _is_within(file, topic, partition, start, end)),
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
        """Its rows, ascending by offset, with the columns of the schema."""
        root = Path(slice.root)
        files = [(parquet.place_of(root, file.path), file) for file in slice.files]
        return parquet.read(files, slice.start, slice.end, schema)

    def sweep(self, older_than: datetime.timedelta = datetime.timedelta(days=7)) -> list[str]:
        """Remove files that no commit names, and which ones. `older_than` spares those that a running batch writes."""
        if not isinstance(self._books, Manifest):
            raise ValueError(
                f"{self.root} is a Delta table: DeltaTable.vacuum(full=True) removes what it does not name"
            )
        before = time.time() - older_than.total_seconds()
        # First the files, then the manifest: what is committed in between is named.
        old = [
            path.relative_to(self.root).as_posix()
            for path in sorted((self.root / "data").rglob("*.parquet"))
            if path.stat().st_mtime <= before
        ]
        return _remove(self.root, self._books.unnamed(old))


def directory(path: str) -> Path:
    """Where an archive is. A directory that the driver and the executors share: local, or mounted by all of them."""
    if _URL.match(path):
        raise ValueError(
            f"archive is {path!r}: it must be a directory that the driver and the executors share, not an address"
        )
    return Path(os.path.abspath(path))


@dataclass(frozen=True, slots=True)
class _Target:
    """What a write was told. `writer`: of a batch write; a stream's is its query."""

    root: Path
    columns: tuple[str, ...]
    unit: parquet.Unit
    is_delta: bool
    gaps: bool
    writer: str = ""
    number: int = 0

    def books(self) -> Manifest | DeltaManifest:
        if not self.is_delta:
            return Manifest(self.root)
        from penstock.spark.delta import DeltaManifest

        return DeltaManifest(self.root)


class _Message(WriterCommitMessage):
    """What a task did."""

    def __init__(self, writer: str, files: Sequence[ArchivedFile]) -> None:
        self.writer = writer
        self.files = tuple(files)


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, target: _Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return _write(self._target, self._target.writer, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _commit(self._target, self._target.number, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _abort(self._target, messages)


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, target: _Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        from pyspark import TaskContext

        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        if not query:
            raise RuntimeError("this task does not know its query: Spark gave it no sql.streaming.queryId")
        return _write(self._target, f"spark:{query}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        _commit(self._target, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        _abort(self._target, messages)


def _write(target: _Target, writer: str, batches: Iterator[pyarrow.RecordBatch]) -> _Message:
    if not target.root.is_dir():
        raise BadDirectory(f"{target.root} is not there: driver and executors must share the directory of an archive")
    # A Delta table has the topic as a column of its partitions, and not in its files.
    left_out = ("topic",) if target.is_delta else ()
    return _Message(writer, parquet.write(batches, target.root, target.columns, target.unit, left_out=left_out))


def _commit(target: _Target, number: int, messages: Sequence[WriterCommitMessage | None]) -> None:
    done = [message for message in messages if isinstance(message, _Message)]
    files = tuple(file for message in done for file in message.files)
    if not files:
        return
    for file in files:
        _check_there(target.root, file)
    books = target.books()
    if not books.commit(Entry(done[0].writer, number, target.columns, files), gaps=target.gaps):
        _remove(target.root, books.unnamed(file.path for file in files))


def _abort(target: _Target, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Also called when the commit failed, which may have been after the batch was in."""
    paths = [file.path for message in messages if isinstance(message, _Message) for file in message.files]
    if paths:
        _remove(target.root, target.books().unnamed(paths))


def _remove(root: Path, paths: Sequence[str]) -> list[str]:
    removed = [parquet.place_of(root, path) for path in paths]
    for path in removed:
        path.unlink(missing_ok=True)
    return [str(path) for path in removed]


def _check_there(root: Path, file: ArchivedFile) -> None:
    path = parquet.place_of(root, file.path)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        size = -1
    if size != file.bytes:
        raise BadDirectory(
            f"{path}, which a task wrote, is not there: driver and executors must share the directory of an archive"
        )


def _batch_target(given: Mapping[str, str], schema: StructType, overwrite: bool) -> _Target:
    if overwrite:
        raise ValueError("an archive is only added to: write with .mode('append'), or to another directory")
    name, number = options.text(given, "txnId"), options.number(given, "txnVersion", least=0)
    if name is None and number is not None:
        raise ValueError("txnVersion counts the writes of a txnId: give both")
    writer = manifest.ONCE + uuid.uuid4().hex if name is None else f"spark:{name}"
    return _target(given, schema, BATCH, writer=writer, number=number or 0)


def _target(
    given: Mapping[str, str], schema: StructType, known: Sequence[str], *, writer: str = "", number: int = 0
) -> _Target:
    options.check_known(given, known)
    path = options.text(given, "archive")
    assert path is not None  # it is what brought us here
    target = _Target(
        root=directory(path),
        columns=_columns(schema),
        unit="day" if options.choice(given, "archivePartition", ("hour", "day")) == "day" else "hour",
        is_delta=options.choice(given, "archiveFormat", ("parquet", "delta")) == "delta",
        gaps=options.flag(given, "archiveGaps", default=False),
        writer=writer,
        number=number,
    )
    _prepare(target)
    return target


def _columns(schema: StructType) -> tuple[str, ...]:
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name in _REQUIRED:
        if name not in types:
            raise ValueError(f"an archive needs the column {name}: it takes the columns of the source, {_expected()}")
    for name, given in types.items():
        if name not in SPARK_TYPES:
            raise ValueError(f"an archive has no column {name}: it takes the columns of the source, {_expected()}")
        if given != SPARK_TYPES[name]:
            raise ValueError(f"column {name} is {given}, and an archive takes {SPARK_TYPES[name]}: cast it")
    return tuple(name for name in SPARK_TYPES if name in types)


def _expected() -> str:
    return ", ".join(f"{name} {given}" for name, given in SPARK_TYPES.items())


def _prepare(target: _Target) -> None:
    """Make the archive where there is nothing yet; refuse what is something else."""
    root = target.root
    if root.exists() and not root.is_dir():
        raise ValueError(f"archive is {root}, a file: it must be a directory")
    found = _kind(root)
    wanted = "delta" if target.is_delta else "parquet"
    if found not in (None, wanted):
        raise ValueError(f"{root} is an archive in another format: write with archiveFormat={found}")
    if found is None and root.is_dir() and any(not name.startswith(("_", ".")) for name in os.listdir(root)):
        raise ValueError(
            f"{root} has other files and is no archive: choose an empty directory, or one that is not there"
        )
    books = target.books()
    if isinstance(books, Manifest):
        books.create()
    else:
        books.create(target.columns, target.unit)


def _kind(root: Path) -> str | None:
    if (root / manifest.DIRECTORY).is_dir():
        return "parquet"
    return "delta" if (root / "_delta_log").is_dir() else None


def _books(root: Path) -> Manifest | DeltaManifest:
    """For reading."""
    match _kind(root):
        case "parquet":
            return Manifest(root)
        case "delta":
            from penstock.spark.delta import DeltaManifest

            return DeltaManifest(root)
    raise ValueError(f"{root} is no archive: write one with .writeStream.format('penstock').option('archive', …)")


def _is_within(file: ArchivedFile, topic: str, partition: int, start: int, end: int) -> bool:
    return file.topic == topic and file.partition == partition and file.first < end and file.last >= start
