"""The columns that Spark gets of stored batches, against what plain Python makes of the same messages."""

from __future__ import annotations

from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.client.values import read_headers
from penstock.model import arrow, batch
from penstock.model.batch import Compression
from penstock.model.subject import matches
from penstock.spark import columns, row
from penstock.spark.columns import Condition, SparkColumns, headers

_TOPIC = "orders"
_BLOCKS = st.lists(
    st.sampled_from([b"Name", b"name", b":", b": ", b" ", b"\t", b"\r\n", b"\n", b"\r", b"x", "é".encode(), b"\xff"]),
    max_size=12,
).map(b"".join)
_SUBJECTS = st.sampled_from([None, b"orders.eu", b"orders.us", b"orders.eu.new", b"orders.us.old.x"])
_PATTERNS = st.sampled_from([b"orders", b"orders.*", b"orders.>", b"orders.eu.>", b"*", b"orders.*.new", b"other"])
_MESSAGES = st.fixed_dictionaries(
    {
        "value": st.binary(max_size=8),
        "key": st.none() | st.binary(max_size=4),
        "subject": _SUBJECTS,
        "headers": st.none() | _BLOCKS,
        "tombstone": st.booleans(),
        "timestamp": st.integers(0, 1 << 50),
        "hole": st.integers(0, 3),
    }
)
_BATCHES = st.lists(st.lists(_MESSAGES, min_size=1, max_size=6), max_size=5)


_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "binary": BinaryType(),
    "map<string,string>": MapType(StringType(), StringType()),
}


def _ddl(text: str) -> StructType:
    """Spark's own reader of these needs a session."""
    fields = []
    for column in text.split(", "):
        name, kind, *more = column.split()
        fields.append(StructField(name, _TYPES[kind], nullable=not more))
    return StructType(fields)


_ALL = _ddl(row.ddl(has_headers=True))


def _stored(batches: list[list[dict[str, Any]]], compression: Compression) -> list[batch.Batch]:
    """Batches as a log has them after compaction: with holes between the offsets."""
    found, base = [], 0
    for messages in batches:
        deltas, delta = [], 0
        for message in messages:
            delta += message["hole"]
            message["offset"] = base + delta
            deltas.append(delta)
            delta += 1
        made = batch.encode(
            [b"" if each["tombstone"] else each["value"] for each in messages],
            timestamp=0,
            timestamps=[each["timestamp"] for each in messages],
            keys=_column(messages, "key"),
            subjects=_column(messages, "subject"),
            headers=_column(messages, "headers"),
            tombstones=[each["tombstone"] for each in messages]
            if any(each["tombstone"] for each in messages)
            else None,
            deltas=deltas,
            span=delta,
            compression=compression,
        )
        made.stamp(base, append_time=0)
        found.append(made)
        base += delta
    return found


def _column(messages: list[dict[str, Any]], name: str) -> list[bytes | None] | None:
    column = [each[name] for each in messages]
    return None if column.count(None) == len(column) else column


def _rows(shape: SparkColumns, stored: list[batch.Batch]) -> list[dict[str, Any]]:
    parts = [arrow.decode(each, shape.stored) for each in stored]
    rows: list[dict[str, Any]] = []
    for found in shape.shape(parts, _TOPIC, 3):
        found.validate(full=True)
        assert found.schema.equals(shape.schema)
        rows += found.to_pylist()
    return rows


def _expected(message: dict[str, Any]) -> dict[str, Any]:
    block = message["headers"]
    return {
        "topic": _TOPIC,
        "partition": 3,
        "offset": message["offset"],
        "timestamp": pyarrow.scalar(message["timestamp"], pyarrow.timestamp("us", tz="UTC")).as_py(),
        "key": message["key"],
        "value": None if message["tombstone"] else message["value"],
        "subject": (message["subject"] or _TOPIC.encode()).decode(),
        "headers": list(read_headers(block or b"").items()),
    }


@given(_BATCHES, st.sampled_from(Compression))
def test_rows_are_the_messages_that_were_stored(batches: list[list[dict[str, Any]]], compression: Compression) -> None:
    stored = _stored(batches, compression)
    shape = SparkColumns(columns.schema(_ALL), Condition())

    assert _rows(shape, stored) == [_expected(message) for messages in batches for message in messages]


@given(_BATCHES, st.lists(_PATTERNS, min_size=1, max_size=3), st.none() | st.frozensets(_SUBJECTS.filter(bool)))
def test_messages_are_chosen_by_their_subjects(
    batches: list[list[dict[str, Any]]], patterns: list[bytes], subjects: frozenset[bytes] | None
) -> None:
    stored = _stored(batches, Compression.NONE)
    # The subject is not among the columns: it is looked at all the same.
    shape = SparkColumns(columns.schema(_ddl("offset bigint")), Condition(patterns=tuple(patterns), subjects=subjects))

    found = [row["offset"] for row in _rows(shape, stored)]

    assert found == [
        message["offset"]
        for messages in batches
        for message in messages
        for subject in [message["subject"] or _TOPIC.encode()]
        if any(matches(pattern, subject) for pattern in patterns) and (subjects is None or subject in subjects)
    ]


@given(_BATCHES, st.sampled_from(["equal", "less", "less_equal", "greater", "greater_equal"]), st.integers(0, 1 << 50))
def test_messages_are_chosen_by_their_time(batches: list[list[dict[str, Any]]], name: str, time_us: int) -> None:
    compare = {"equal": "__eq__", "less": "__lt__", "less_equal": "__le__", "greater": "__gt__"}
    stored = _stored(batches, Compression.NONE)
    moment = pyarrow.scalar(time_us, pyarrow.timestamp("us", tz="UTC"))
    shape = SparkColumns(columns.schema(_ddl("offset bigint")), Condition(times=((name, moment),)))

    found = [row["offset"] for row in _rows(shape, stored)]

    assert found == [
        message["offset"]
        for messages in batches
        for message in messages
        if getattr(message["timestamp"], compare.get(name, "__ge__"))(time_us)
    ]


@given(st.lists(st.none() | _BLOCKS, min_size=1), st.integers(0, 3))
def test_header_lines_become_maps(blocks: list[bytes | None], skipped: int) -> None:
    column = pyarrow.array([b"Skipped: 1"] * skipped + blocks, pyarrow.binary()).slice(skipped)

    found = headers(column)

    found.validate(full=True)
    # Never null: Spark takes 100 µs for each null map that it passes to a Python sink.
    assert found.null_count == 0
    assert found.to_pylist() == [list(read_headers(block or b"").items()) for block in blocks]


@given(st.lists(st.none() | st.dictionaries(st.text(), st.text(), max_size=3)), st.integers(0, 3))
def test_archived_maps_that_are_null_become_empty(maps: list[dict[str, str] | None], skipped: int) -> None:
    kind = columns.TYPES["headers"]
    column = pyarrow.array([None, {"a": "b"}, None][:skipped] + maps, kind).slice(skipped)
    shape = SparkColumns(columns.schema(_ddl("headers map<string,string>")), Condition())

    parts = [*shape.archived([pyarrow.RecordBatch.from_arrays([column], names=["headers"])], _TOPIC)]

    found = [each for part in parts for each in part.column("headers").to_pylist()]
    assert found == [list((each or {}).items()) for each in maps]
    for part in parts:
        part.validate(full=True)


def test_small_batches_are_gathered_and_large_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "ROWS", 10)
    monkeypatch.setattr(columns, "ROWS_MAX", 25)
    columns._constant.cache_clear()
    sizes = [1, 2, 3, 4, 60, 9]
    shape = SparkColumns(columns.schema(_ddl("topic string, value binary")), Condition())
    stored = [batch.encode([b"v"] * size, timestamp=0) for size in sizes]

    parts = [arrow.decode(each, shape.stored) for each in stored]
    found = [each.num_rows for each in shape.shape(parts, _TOPIC, 0)]

    columns._constant.cache_clear()
    assert found == [10, 25, 25, 10, 9]


def test_only_what_is_needed_is_fetched() -> None:
    def stored(ddl: str, **condition: Any) -> tuple[str, ...]:
        return SparkColumns(columns.schema(_ddl(ddl)), Condition(**condition)).stored

    assert stored("key binary") == ("key",)
    assert stored("value binary") == ("value", "tombstone")
    assert stored("topic string, partition int") == ("offset",)
    assert stored("key binary", patterns=(b"a",)) == ("key", "subject")


def test_the_columns_are_just_as_spark_wants_them() -> None:
    assert columns.schema(_ALL).equals(to_arrow_schema(_ALL, timezone="UTC"))
    narrow = _ddl("value binary, offset bigint not null")
    assert columns.schema(narrow).equals(to_arrow_schema(narrow, timezone="UTC"))


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        (
            "valu binary",
            "unknown column 'valu': there are topic, partition, offset, timestamp, key, value, subject",
        ),
        ("value string", "column value is binary, not string"),
        ("key binary not null", "it cannot be NOT NULL"),
    ],
)
def test_columns_that_there_are_not_are_refused(ddl: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        columns.schema(_ddl(ddl))
