"""Writing an archive: `.write` and `.writeStream` with the option `archive`.

Tasks write files that nobody reads yet. The driver's commit names them in the manifest, all files of a batch or none,
and a repeated batch adds nothing. Files that a killed task or driver leaves behind are named nowhere; `Archive.sweep`
removes them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from penstock.errors import BadDirectory
from penstock.spark import columns, manifest, options, parquet, row
from penstock.spark.archive import delta_manifest, format_of
from penstock.spark.archive_place import ArchivePlace, open_place
from penstock.spark.manifest import ArchivedFile, ArchiveManifest, Entry
from penstock.spark.versions import StreamArrowWriter
from penstock.topic_schema.flatten import Flattener

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from penstock.spark.delta import DeltaManifest

STREAM: Final = ("archive", "archiveFormat", "archivePartition", "archiveGaps", "archiveSchema")
BATCH: Final = (*STREAM, "txnId", "txnVersion")
SPARK_TYPES: Final = row.COLUMNS | row.HEADERS
_REQUIRED: Final = (*parquet.PLACE, "value")


def writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """Return the writer of a batch. With `txnId` and `txnVersion` a repeated write adds nothing."""
    return _ArchiveWriter(_batch_target(options, schema, overwrite))


def stream_writer(options: Mapping[str, str], schema: StructType) -> StreamArrowWriter:
    """Return the writer of a stream. Each batch is added once, as long as the query keeps its checkpoint."""
    return _ArchiveStreamWriter(_target(options, schema, STREAM))


@dataclass(frozen=True, slots=True)
class _ArchiveTarget:
    """The options of a write. `writer` is only set for a batch; for a stream it is the query."""

    archive: str
    columns: tuple[str, ...]
    unit: parquet.Unit
    is_delta: bool
    gaps: bool
    # Adds columns for the fields of values.
    flattener: Flattener | None
    writer: str = ""
    number: int = 0

    @property
    def schema(self) -> pyarrow.Schema:
        """Return the columns of the files, in the order of `columns`."""
        fields = [pyarrow.field(name, columns.TYPES[name]) for name in self.columns]
        return pyarrow.schema([*fields, *([] if self.flattener is None else self.flattener.schema)])

    def manifest(self, place: ArchivePlace) -> ArchiveManifest | DeltaManifest:
        return delta_manifest(place) if self.is_delta else ArchiveManifest(place)


class _WrittenFiles(WriterCommitMessage):
    """The files that a task wrote."""

    def __init__(self, writer: str, files: Sequence[ArchivedFile]) -> None:
        self.writer = writer
        self.files = tuple(files)


class _ArchiveWriter(DataSourceArrowWriter):
    def __init__(self, target: _ArchiveTarget) -> None:
        self._target = target

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return _write(self._target, self._target.writer, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _commit(self._target, self._target.number, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _abort(self._target, messages)


class _ArchiveStreamWriter(StreamArrowWriter):
    def __init__(self, target: _ArchiveTarget) -> None:
        self._target = target

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        from pyspark import TaskContext

        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        if not query:
            raise RuntimeError("Spark did not pass sql.streaming.queryId to this task: use PySpark 4.0 or newer")
        return _write(self._target, f"spark:{query}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        _commit(self._target, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        _abort(self._target, messages)


def _write(target: _ArchiveTarget, writer: str, batches: Iterator[pyarrow.RecordBatch]) -> _WrittenFiles:
    place = open_place(target.archive)
    if not place.exists():
        raise BadDirectory(f"{place} does not exist: driver and executors must share the directory of an archive")
    # A Delta table has the topic as a partition column, not in its files.
    left_out = ("topic",) if target.is_delta else ()
    rows = batches if target.flattener is None else map(target.flattener.add_to, batches)
    return _WrittenFiles(writer, parquet.write(rows, place, target.schema, target.unit, left_out=left_out))


def _commit(target: _ArchiveTarget, number: int, messages: Sequence[WriterCommitMessage | None]) -> None:
    done = [message for message in messages if isinstance(message, _WrittenFiles)]
    files = tuple(file for message in done for file in message.files)
    if not files:
        return
    place = open_place(target.archive)
    for file in files:
        _check_exists(place, file)
    found = target.manifest(place)
    if not found.commit(Entry(done[0].writer, number, target.columns, files), gaps=target.gaps):
        place.remove(found.unnamed(file.path for file in files))


def _abort(target: _ArchiveTarget, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Remove the files of a batch that failed. The commit may have succeeded before: named files are kept."""
    paths = [file.path for message in messages if isinstance(message, _WrittenFiles) for file in message.files]
    if paths:
        place = open_place(target.archive)
        place.remove(target.manifest(place).unnamed(paths))


def _check_exists(place: ArchivePlace, file: ArchivedFile) -> None:
    try:
        size = place.size(file.path)
    except FileNotFoundError:
        size = -1
    if size != file.bytes:
        raise BadDirectory(
            f"{place.location(file.path)}, written by a task, does not exist: driver and executors must share the"
            " directory of an archive"
        )


def _batch_target(given: Mapping[str, str], schema: StructType, overwrite: bool) -> _ArchiveTarget:
    if overwrite:
        raise ValueError("an archive can only be appended to: write with .mode('append'), or to another directory")
    name, number = options.text(given, "txnId"), options.number(given, "txnVersion", least=0)
    if name is None and number is not None:
        raise ValueError("txnVersion needs txnId: it is the number of a write under that name")
    writer = manifest.ONCE + uuid.uuid4().hex if name is None else f"spark:{name}"
    return _target(given, schema, BATCH, writer=writer, number=number or 0)


def _target(
    given: Mapping[str, str], schema: StructType, known: Sequence[str], *, writer: str = "", number: int = 0
) -> _ArchiveTarget:
    options.check_known(given, known)
    path = options.text(given, "archive")
    assert path is not None  # the option selects this sink
    schema_text = options.text(given, "archiveSchema")
    target = _ArchiveTarget(
        archive=str(open_place(path)),
        columns=_columns(schema),
        unit="day" if options.choice(given, "archivePartition", ("hour", "day")) == "day" else "hour",
        is_delta=options.choice(given, "archiveFormat", ("parquet", "delta")) == "delta",
        gaps=options.flag(given, "archiveGaps", default=False),
        flattener=None if schema_text is None else Flattener(schema_text, tuple(SPARK_TYPES)),
        writer=writer,
        number=number,
    )
    _prepare(target)
    return target


def _columns(schema: StructType) -> tuple[str, ...]:
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name in _REQUIRED:
        if name not in types:
            raise ValueError(f"an archive needs the column {name}: write the columns of the source, {_expected()}")
    for name, given in types.items():
        if name not in SPARK_TYPES:
            raise ValueError(f"an archive has no column {name}: write the columns of the source, {_expected()}")
        if given != SPARK_TYPES[name]:
            raise ValueError(f"column {name} is {given}, but an archive needs {SPARK_TYPES[name]}: cast it")
    return tuple(name for name in SPARK_TYPES if name in types)


def _expected() -> str:
    return ", ".join(f"{name} {given}" for name, given in SPARK_TYPES.items())


def _prepare(target: _ArchiveTarget) -> None:
    """Create the archive if its place is empty. Refuse a place with anything else."""
    place = open_place(target.archive)
    found = format_of(place)
    wanted = "delta" if target.is_delta else "parquet"
    if found not in (None, wanted):
        raise ValueError(f"{place} is an archive in another format: write with archiveFormat={found}")
    if found is None and any(not name.startswith(("_", ".")) for name in place.top_names()):
        raise ValueError(f"{place} has other files and is not an archive: choose an empty or a new directory")
    books = target.manifest(place)
    if isinstance(books, ArchiveManifest):
        books.create()
    else:
        books.create(target.schema, target.unit)
