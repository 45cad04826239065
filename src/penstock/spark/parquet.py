"""Writing and reading the Parquet files of an archive.

A file has rows of one topic partition and one hour (or day), ascending by offset. Nothing here works on single rows:
Arrow sorts, splits and writes whole batches. Rows in order, as they come from the source, are only split by hour. Rows
in another order are sorted batch by batch, and a new file begins where the order would break. So the offsets of files
may overlap, as they do when timestamps go back, and reading merges them.
"""

from __future__ import annotations

import datetime
import hashlib
import urllib.parse
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow
from pyarrow import compute, parquet

from penstock.errors import BadDirectory, ReadFailed
from penstock.spark.archive_place import ArchivePlace
from penstock.spark.columns import TYPES
from penstock.spark.manifest import ArchivedFile

Unit = Literal["hour", "day"]

# Columns that no row may lack.
PLACE: Final = ("topic", "partition", "offset", "timestamp")

# The size of a row group, the unit in which readers skip rows.
GROUP_ROWS: Final = 100_000
GROUP_BYTES: Final = 32 << 20
# The memory for rows that a task has not written yet, and its open files: a backfill spans many hours.
WAITING_BYTES: Final = 128 << 20
FILES_OPEN: Final = 32
# Rows per batch that is read, and per batch that small ones are gathered to.
READ_ROWS: Final = 32_768
GATHERED_ROWS: Final = 10_000
_NAME_BYTES_MAX: Final = 200


def write(
    batches: Iterable[pyarrow.RecordBatch],
    place: ArchivePlace,
    schema: pyarrow.Schema,
    unit: Unit,
    *,
    left_out: Sequence[str] = (),
) -> list[ArchivedFile]:
    """Write rows to durable files of an archive, without the columns `left_out`. Leave no files if it fails."""
    task = _TaskFiles(place, unit, pyarrow.schema([field for field in schema if field.name not in left_out]))
    try:
        for batch in batches:
            for part in _parts(_rows(batch, schema), unit):
                task.add(part)
        return task.close()
    except BaseException:
        task.abandon()
        raise


def schema_of(place: ArchivePlace, file: ArchivedFile) -> pyarrow.Schema:
    """Return the columns of a file. Values may be flattened, to other columns in each file."""
    with place.open(file.path, file.bytes) as stream, parquet.ParquetFile(stream) as opened:
        return opened.schema_arrow.remove_metadata()


def read(
    place: ArchivePlace, files: Sequence[ArchivedFile], start: int, end: int, schema: pyarrow.Schema
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of one topic partition with start <= offset < end, ascending. Offsets of files may overlap."""
    if not files:
        return
    names = [name for name in schema.names if name not in ("topic", "partition")]
    wanted = names if "offset" in names else [*names, "offset"]
    merged = _merged(place, sorted(files, key=lambda file: file.first), start, end, wanted)
    for rows in _gathered(merged):
        yield _finished(rows, files[0], schema)


@dataclass(frozen=True, slots=True)
class _HourRows:
    """Rows for one file. `hour` is the start of the hour, or day."""

    topic: str
    partition: int
    hour: datetime.datetime
    rows: pyarrow.Table


def _rows(batch: pyarrow.RecordBatch, schema: pyarrow.Schema) -> pyarrow.Table:
    """Cast the columns to the types of an archive. Spark may use large strings, and the time zone of the session."""
    table = pyarrow.Table.from_batches([batch]).select(schema.names)
    for name in PLACE:
        if table[name].null_count:
            raise ValueError(
                f"column {name} is null in {table[name].null_count} rows: an archive needs it in every row"
            )
    return table.cast(schema)


def _parts(table: pyarrow.Table, unit: Unit) -> Iterator[_HourRows]:
    if not table.num_rows:
        return
    hours = compute.floor_temporal(table["timestamp"], unit=unit)
    topics, partitions, spread = (compute.min_max(column) for column in (table["topic"], table["partition"], hours))
    if all(extremes["min"] == extremes["max"] for extremes in (topics, partitions, spread)):
        rows = table if _ascends(table) else _sorted(table, ["offset"])
        yield _HourRows(topics["min"].as_py(), partitions["min"].as_py(), spread["min"].as_py(), rows)
        return
    table = _sorted(table.append_column("hour", hours), ["topic", "partition", "hour", "offset"])
    # Without threads the groups keep the order of the rows.
    groups = table.group_by(["topic", "partition", "hour"], use_threads=False).aggregate([([], "count_all")])
    at = 0
    for group in groups.to_pylist():
        rows = table.slice(at, group["count_all"]).drop_columns(["hour"])
        yield _HourRows(group["topic"], group["partition"], group["hour"], rows)
        at += group["count_all"]


def _sorted(table: pyarrow.Table, names: Sequence[str]) -> pyarrow.Table:
    return table.sort_by([(name, "ascending") for name in names])


def _ascends(table: pyarrow.Table) -> bool:
    offsets, count = table["offset"], table.num_rows
    return count < 2 or bool(compute.all(compute.less(offsets.slice(0, count - 1), offsets.slice(1))).as_py())


class _TaskFiles:
    """The files that one task writes."""

    def __init__(self, place: ArchivePlace, unit: Unit, schema: pyarrow.Schema) -> None:
        self._place = place
        self._unit: Unit = unit
        self._schema = schema
        self._open: dict[tuple[str, int, datetime.datetime], _WrittenFile] = {}  # least recently used first
        self._files: list[_WrittenFile] = []
        self._done: list[ArchivedFile] = []

    def add(self, part: _HourRows) -> None:
        if not _ascends(part.rows):
            raise ValueError(f"an offset of {part.topic} partition {part.partition} is repeated: write each row once")
        key = part.topic, part.partition, part.hour
        file = self._open.pop(key, None)
        if file is not None and file.last >= part.rows["offset"][0].as_py():
            self._done.append(file.close())
            file = None
        if file is None:
            file = _WrittenFile(self._place, _directory(part, self._unit), part, self._schema)
            self._files.append(file)
        self._open[key] = file
        file.add(part.rows)
        if len(self._open) > FILES_OPEN:
            self._done.append(self._open.pop(next(iter(self._open))).close())
        if sum(file.waiting_bytes for file in self._open.values()) > WAITING_BYTES:
            for file in self._open.values():
                file.flush()

    def close(self) -> list[ArchivedFile]:
        self._done += [file.close() for file in self._open.values()]
        self._open = {}
        self._place.sync([file.path for file in self._done])
        return self._done

    def abandon(self) -> None:
        for file in self._files:
            file.abandon()


class _WrittenFile:
    """A file that is being written. Batches are gathered to row groups."""

    def __init__(self, place: ArchivePlace, directory: str, part: _HourRows, schema: pyarrow.Schema) -> None:
        self._name = f"{directory}/{uuid.uuid4().hex}.parquet"
        self._part = part
        self._schema = schema
        self._file = place.begin(self._name)
        self._writer: Any = parquet.ParquetWriter(
            self._file.stream,
            schema,
            compression="zstd",
            # These have few distinct values. Trying the other columns takes time and gains nothing.
            use_dictionary=[name for name in ("topic", "partition", "subject") if name in schema.names],
            # So readers can skip rows by the fields of a flattened value, too.
            write_statistics=[
                field.name
                for field in schema
                if field.name in PLACE or not (field.name in TYPES or pyarrow.types.is_nested(field.type))
            ],
            write_page_checksum=True,
        )
        self._waiting: list[pyarrow.Table] = []
        self._waiting_rows = 0
        self.waiting_bytes = 0
        self._rows = 0
        self._first: int | None = None
        self.last = -1
        self._timestamps: list[int] = []

    def add(self, rows: pyarrow.Table) -> None:
        offsets, times = rows["offset"], compute.min_max(rows["timestamp"])
        self._first = offsets[0].as_py() if self._first is None else self._first
        self.last = offsets[-1].as_py()
        times = [times["min"].value, times["max"].value, *self._timestamps]
        self._timestamps = [min(times), max(times)]
        self._rows += rows.num_rows
        self._waiting.append(rows.select(self._schema.names))
        self._waiting_rows += rows.num_rows
        self.waiting_bytes += rows.nbytes
        if self._waiting_rows >= GROUP_ROWS or self.waiting_bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pyarrow.concat_tables(self._waiting), row_group_size=GROUP_ROWS)
        self._waiting = []
        self._waiting_rows = self.waiting_bytes = 0

    def close(self) -> ArchivedFile:
        self.flush()
        self._writer.close()
        size = self._file.store()
        assert self._first is not None  # a file is only opened for rows
        part, times = self._part, self._timestamps
        return ArchivedFile(
            self._name, part.topic, part.partition, self._rows, size, self._first, self.last, times[0], times[1]
        )

    def abandon(self) -> None:
        try:
            self._writer.close()  # otherwise the garbage collector writes to the closed file
        except (OSError, ValueError):
            pass
        self._file.abandon()


def _directory(part: _HourRows, unit: Unit) -> str:
    """Return a directory name in the style of Hive. Long topic names are cut; the rows have the full name."""
    name = urllib.parse.quote(part.topic, safe="")
    if len(name) > _NAME_BYTES_MAX:
        name = f"{name[:_NAME_BYTES_MAX]}~{hashlib.sha256(part.topic.encode()).hexdigest()[:16]}"
    hour = f"/hour={part.hour:%H}" if unit == "hour" else ""
    return f"data/topic={name}/day={part.hour:%Y-%m-%d}{hour}"


@dataclass(slots=True)
class _ReadFile:
    """A file that is being read. `head` holds rows that were not yielded yet."""

    head: pyarrow.RecordBatch
    rest: Iterator[pyarrow.RecordBatch]

    @property
    def last(self) -> int:
        return int(self.head["offset"][-1].as_py())

    def take(self, last: int) -> pyarrow.RecordBatch:
        count = _count_below(self.head, last + 1)
        taken, self.head = self.head.slice(0, count), self.head.slice(count)
        return taken

    def advance(self) -> bool:
        """Fill `head` if it is empty; return whether there are more rows."""
        while not self.head.num_rows:
            following = next(self.rest, None)
            if following is None:
                return False
            self.head = following
        return True


def _merged(
    place: ArchivePlace, files: Sequence[ArchivedFile], start: int, end: int, names: Sequence[str]
) -> Iterator[pyarrow.RecordBatch]:
    """Merge files by offset. Rows up to the lowest of the last offsets in memory are complete, and are yielded."""
    waiting, streams = deque(files), list[_ReadFile]()
    while waiting or streams:
        last = min((stream.last for stream in streams), default=None)
        while waiting and (last is None or waiting[0].first <= last):
            rest = _file_rows(place, waiting.popleft(), start, end, names)
            head = next(rest, None)
            if head is not None:
                streams.append(_ReadFile(head, rest))
                last = streams[-1].last if last is None else min(last, streams[-1].last)
        if last is None:
            return
        taken = [rows for rows in (stream.take(last) for stream in streams) if rows.num_rows]
        streams = [stream for stream in streams if stream.advance()]
        if len(taken) == 1:
            yield taken[0]
        else:
            yield from pyarrow.Table.from_batches(taken).combine_chunks().sort_by("offset").to_batches()


def _file_rows(
    place: ArchivePlace, file: ArchivedFile, start: int, end: int, names: Sequence[str]
) -> Iterator[pyarrow.RecordBatch]:
    """Read the row groups with requested offsets, and of these only the requested columns."""
    shown = place.location(file.path)
    try:
        if place.size(file.path) != file.bytes:
            raise ReadFailed(f"{shown} does not have the size in the manifest: restore it")
        with (
            place.open(file.path, file.bytes) as stream,
            parquet.ParquetFile(stream, page_checksum_verification=True) as opened,
        ):
            absent = [name for name in names if name not in opened.schema_arrow.names]
            if absent:
                raise ValueError(
                    f"the archive was written without {', '.join(absent)}: read without them, or from the log"
                )
            groups = _groups(opened, start, end)
            for batch in opened.iter_batches(READ_ROWS, row_groups=groups, columns=list(names), use_threads=False):
                low, high = _count_below(batch, start), _count_below(batch, end)
                if low < high:
                    yield batch.select(list(names)).slice(low, high - low)
    except FileNotFoundError as error:
        raise BadDirectory(f"{shown} of the archive is missing: restore it") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise ReadFailed(f"{shown} cannot be read: {error}") from error


def _groups(opened: Any, start: int, end: int) -> list[int]:
    column = opened.schema_arrow.names.index("offset")
    found = []
    for number in range(opened.metadata.num_row_groups):
        # Statistics are indexed by leaf columns. Only headers, and columns behind them, have more than one.
        offsets = opened.metadata.row_group(number).column(column).statistics
        if offsets is None or (offsets.min < end and offsets.max >= start):
            found.append(number)
    return found


def _count_below(batch: pyarrow.RecordBatch, offset: int) -> int:
    """Return how many of the ascending rows are below an offset."""
    offsets = batch["offset"]
    if offsets[-1].as_py() < offset:
        return int(batch.num_rows)
    return int(compute.sum(compute.less(offsets, offset)).as_py() or 0)


def _gathered(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Gather small batches: Spark has a cost per batch."""
    waiting: list[pyarrow.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(part.num_rows for part in waiting) >= GATHERED_ROWS:
            yield pyarrow.concat_batches(waiting)
            waiting = []
    if waiting:
        yield pyarrow.concat_batches(waiting)


def _finished(rows: pyarrow.RecordBatch, place: ArchivedFile, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    """Return rows with the columns of the schema. Topic and partition are the same in all rows."""
    columns = []
    for field in schema:
        if field.name in ("topic", "partition"):
            value = place.topic if field.name == "topic" else place.partition
            columns.append(pyarrow.repeat(pyarrow.scalar(value, field.type), rows.num_rows))
        else:
            column = rows[field.name]
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)
