"""From stored batches to the columns of Spark: many messages at a time, and only the requested columns.

Everything here works on whole columns. Work per message in Python would cost more than all of this together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow
from pyarrow import compute

from penstock.client.values import read_headers
from penstock.model.subject import matches
from penstock.spark.row import COLUMNS, HEADERS

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# Rows per batch, which share the cost that Spark has for each batch. More gain nothing.
ROWS: Final = 20_000
ROWS_MAX: Final = 50_000
BYTES: Final = 16 << 20

TYPES: Final = {
    "topic": pyarrow.string(),
    "partition": pyarrow.int32(),
    "offset": pyarrow.int64(),
    "timestamp": pyarrow.timestamp("us", tz="UTC"),
    "key": pyarrow.binary(),
    "value": pyarrow.binary(),
    "subject": pyarrow.string(),
    "headers": pyarrow.map_(pyarrow.string(), pyarrow.string()),
}
# Columns that may be null.
_ABSENT: Final = ("key", "value")

# The stored columns that each column needs.
_STORED: Final = {
    "topic": (),
    "partition": (),
    "offset": ("offset",),
    "timestamp": ("timestamp",),
    "key": ("key",),
    "value": ("value", "tombstone"),
    "subject": ("subject",),
    "headers": ("headers",),
}


def schema(wanted: StructType) -> pyarrow.Schema:
    """Return the requested columns as an Arrow schema. Raise ValueError for unknown ones."""
    known = COLUMNS | HEADERS
    fields = []
    for each in wanted.fields:
        if each.name not in known:
            raise ValueError(f"unknown column {each.name!r}: there are {', '.join(known)}")
        if each.dataType.simpleString() != known[each.name]:
            raise ValueError(f"column {each.name} is {known[each.name]}, not {each.dataType.simpleString()}")
        if not each.nullable and each.name in _ABSENT:
            raise ValueError(f"column {each.name} is null in some messages: it cannot be NOT NULL")
        fields.append(pyarrow.field(each.name, TYPES[each.name], nullable=each.nullable))
    if not fields:
        raise ValueError(f"the schema has no columns: there are {', '.join(known)}")
    return pyarrow.schema(fields)


@dataclass(frozen=True, slots=True)
class Condition:
    """Selects messages: the subject matches a pattern and is one of `subjects`, and the time passes all comparisons.

    None selects all. `times` are names of comparisons in `pyarrow.compute`, each with a time.
    """

    patterns: tuple[bytes, ...] | None = None
    subjects: frozenset[bytes] | None = None
    times: tuple[tuple[str, Any], ...] = ()
    # Subjects that were decided before.
    _known: dict[bytes, bool] = field(default_factory=dict, compare=False, repr=False)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that the condition needs."""
        by_subject = self.patterns is not None or self.subjects is not None
        return (("subject",) if by_subject else ()) + (("timestamp",) if self.times else ())

    def select(self, rows: pyarrow.RecordBatch, topic: str) -> pyarrow.RecordBatch:
        for comparison, moment in self.times:
            rows = rows.filter(compute.call_function(comparison, [rows.column("timestamp"), moment]))
        if "subject" in self.columns and rows.num_rows:
            rows = self._select_subjects(rows, topic.encode())
        return rows

    def _select_subjects(self, rows: pyarrow.RecordBatch, topic: bytes) -> pyarrow.RecordBatch:
        column = rows.column("subject")
        found = column.cast(pyarrow.binary()).unique()
        wanted = [self._is_wanted(topic if subject is None else subject) for subject in found.to_pylist()]
        if all(wanted):
            return rows
        if not any(wanted):
            return rows.slice(0, 0)
        chosen = found.filter(pyarrow.array(wanted)).cast(column.type)
        # A null is a subject like any other here: it means the name of the topic.
        return rows.filter(compute.is_in(column, value_set=chosen))

    def _is_wanted(self, subject: bytes) -> bool:
        known = self._known.get(subject)
        if known is None:
            known = (self.patterns is None or any(matches(pattern, subject) for pattern in self.patterns)) and (
                self.subjects is None or subject in self.subjects
            )
            self._known[subject] = known
        return known


@dataclass(frozen=True, slots=True)
class SparkColumns:
    """Turns fetched columns into those that Spark gets."""

    schema: pyarrow.Schema
    condition: Condition

    @property
    def stored(self) -> tuple[str, ...]:
        """Return the columns to fetch."""
        found = [stored for name in self.schema.names for stored in _STORED[name]] + [*self.condition.columns]
        # At least one column is needed to count the rows; offsets are the cheapest.
        return tuple(dict.fromkeys(found or ["offset"]))

    def shape(self, parts: Iterable[pyarrow.RecordBatch], topic: str, partition: int) -> Iterator[pyarrow.RecordBatch]:
        """Yield record batches for Spark, each with many rows."""
        gathered = _gather(parts)
        if self.condition.columns:
            gathered = _gather(self.condition.select(each, topic) for each in gathered)
        for rows in gathered:
            for first in range(0, rows.num_rows, ROWS_MAX):
                yield self._build(rows.slice(first, ROWS_MAX), topic, partition)

    def archived(self, parts: Iterable[pyarrow.RecordBatch], topic: str) -> Iterator[pyarrow.RecordBatch]:
        """Yield record batches from rows of an archive, which have the columns of Spark already."""
        for rows in parts:
            chosen = self.condition.select(rows, topic).select(self.schema.names)
            if chosen.num_rows:
                arrays = [_without_nulls(each) if pyarrow.types.is_map(each.type) else each for each in chosen.columns]
                yield pyarrow.RecordBatch.from_arrays(arrays, schema=self.schema)

    @property
    def archived_schema(self) -> pyarrow.Schema:
        """Return the columns to read from an archive."""
        more = [name for name in self.condition.columns if name not in self.schema.names]
        return pyarrow.schema([*self.schema, *(pyarrow.field(name, TYPES[name]) for name in more)])

    def _build(self, rows: pyarrow.RecordBatch, topic: str, partition: int) -> pyarrow.RecordBatch:
        arrays = [_column(name, rows, topic, partition) for name in self.schema.names]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self.schema)


def _gather(parts: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    gathered: list[pyarrow.RecordBatch] = []
    rows = size = 0
    for part in parts:
        if not part.num_rows:
            continue
        gathered.append(part)
        rows += part.num_rows
        # The size of whole buffers. `nbytes` would be exact for slices, and takes twenty times as long.
        size += part.get_total_buffer_size()
        if rows >= ROWS or size >= BYTES:
            yield _joined(gathered)
            gathered = []
            rows = size = 0
    if gathered:
        yield _joined(gathered)


def _joined(parts: Sequence[pyarrow.RecordBatch]) -> pyarrow.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    (whole,) = pyarrow.Table.from_batches(parts).combine_chunks().to_batches()
    return whole


def _column(name: str, rows: pyarrow.RecordBatch, topic: str, partition: int) -> pyarrow.Array:
    match name:
        case "topic":
            return _constant(topic, name).slice(0, rows.num_rows)
        case "partition":
            return _constant(partition, name).slice(0, rows.num_rows)
        case "value":
            return _values(rows.column("value"), rows.column("tombstone"))
        case "subject":
            return _subjects(rows.column("subject"), topic)
        case "headers":
            return headers(rows.column("headers"))
    return rows.column(name)


@lru_cache(64)
def _constant(value: str | int, name: str) -> pyarrow.Array:
    """Return a column with one value. Arrays are immutable, so all batches share it."""
    return pyarrow.repeat(pyarrow.scalar(value, TYPES[name]), ROWS_MAX)


def _values(values: pyarrow.Array, tombstones: pyarrow.Array) -> pyarrow.Array:
    """Return the values, null for tombstones."""
    if not tombstones.true_count:
        return values
    return compute.if_else(tombstones, pyarrow.scalar(None, values.type), values)


def _subjects(subjects: pyarrow.Array, topic: str) -> pyarrow.Array:
    """Return the subjects. A message without one has the name of its topic."""
    if subjects.null_count == len(subjects):
        return _constant(topic, "topic").slice(0, len(subjects))
    named = subjects.cast(pyarrow.string())
    return compute.fill_null(named, topic) if subjects.null_count else named


def headers(blocks: pyarrow.Array) -> pyarrow.Array:
    """Return header lines (`Name: value`) as maps. The first of a repeated name counts.

    A message without headers has an empty map, as in the Python client, and never null: when Spark passes rows to a
    Python sink, each null map costs it time proportional to the nulls before it in the batch (100 µs a row).
    """
    kind = TYPES["headers"]
    if blocks.null_count == len(blocks):
        return _empty_maps(len(blocks))
    try:
        texts = compute.fill_null(blocks.cast(pyarrow.string()), "")
    except pyarrow.ArrowInvalid:
        # Bytes that are not UTF-8 are rare, and Arrow cannot replace them.
        return pyarrow.array([list(read_headers(block or b"").items()) for block in blocks.to_pylist()], kind)
    lines_of = compute.split_pattern(texts, "\n")
    lines = lines_of.flatten()
    # A line that begins with a blank continues the one before, and is not a header; nor is one without a name.
    is_header = compute.match_substring_regex(lines, r"\A[^ \t:][^:]*:")
    pairs = compute.split_pattern(lines.filter(is_header), ":", max_splits=1)
    names = compute.utf8_rtrim(compute.list_element(pairs, 0), " \t")
    values = compute.utf8_trim(compute.list_element(pairs, 1), " \t\r")
    # The number of headers before each line, and so before each message.
    edges = _count_before(is_header).take(lines_of.offsets)
    names, values, edges = _first_of_each(names, values, edges)
    return pyarrow.MapArray.from_arrays(edges, names, values, type=kind)


def _without_nulls(maps: pyarrow.Array) -> pyarrow.Array:
    """Replace null maps, which earlier versions archived, by empty ones."""
    if not maps.null_count:
        return maps
    if maps.null_count == len(maps):
        return _empty_maps(len(maps))
    return compute.if_else(maps.is_valid(), maps, pyarrow.scalar([], maps.type))


@lru_cache(64)
def _empty_maps(count: int) -> pyarrow.Array:
    nothing = pyarrow.array([], pyarrow.string())
    edges = pyarrow.repeat(pyarrow.scalar(0, pyarrow.int32()), count + 1)
    return pyarrow.MapArray.from_arrays(edges, nothing, nothing, type=TYPES["headers"])


def _first_of_each(
    names: pyarrow.Array, values: pyarrow.Array, edges: pyarrow.Array
) -> tuple[pyarrow.Array, pyarrow.Array, pyarrow.Array]:
    """Drop headers whose name occurred before in the same message."""
    known = names.dictionary_encode()
    owners = compute.list_parent_indices(pyarrow.ListArray.from_arrays(edges, names)).cast(pyarrow.int64())
    # A number for each name in each message.
    codes = compute.add(compute.multiply(owners, len(known.dictionary)), known.indices)
    if compute.count_distinct(codes).as_py() == len(codes):
        return names, values, edges
    table = pyarrow.table({"code": codes, "at": pyarrow.array(range(len(codes)), pyarrow.int64())})
    firsts = table.group_by("code").aggregate([("at", "min")])["at_min"].combine_chunks()
    is_first = compute.is_in(table["at"].combine_chunks(), value_set=firsts)
    return names.filter(is_first), values.filter(is_first), _count_before(is_first).take(edges)


def _count_before(flags: pyarrow.Array) -> pyarrow.Array:
    """Return the number of set flags before each position, and at the end the total."""
    counts = compute.cumulative_sum(flags.cast(pyarrow.int32()))
    return pyarrow.concat_arrays([pyarrow.array([0], pyarrow.int32()), counts])
