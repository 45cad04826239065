"""Arrow sees the lists that were encoded, in the batch's own memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BatchTooLarge, CorruptBatch
from penstock.model import arrow
from penstock.model.batch import Batch, Compression, encode, parse
from tests.support.batches import (
    BOMBS,
    COMPRESSIONS,
    REFUSALS,
    Lists,
    bytes_allowed,
    every_combination,
    lists_of_columns,
    made_up,
    mutated,
    peak_bytes,
    read,
    stored,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
# What Python has a datetime for; the format and Arrow go further.
TIMES = st.datetimes(timezones=st.just(UTC)).map(lambda time: (time - EPOCH) // MICROSECOND)
BASE_OFFSET = 1000


def expected(lists: Lists) -> dict[str, list[Any]]:
    count = len(lists["values"])
    nothing = [None] * count
    times = lists.get("timestamps") or [lists["timestamp"]] * count
    return {
        "offset": [BASE_OFFSET + delta for delta in lists.get("deltas", range(count))],
        "timestamp": [EPOCH + time * MICROSECOND for time in times],
        "key": lists.get("keys") or nothing,
        "value": lists["values"],
        "subject": lists.get("subjects") or nothing,
        "reply": lists.get("replies") or nothing,
        "headers": lists.get("headers") or nothing,
        "tombstone": lists.get("tombstones") or [False] * count,
    }


def batch_of(lists: Lists, compression: Compression = Compression.NONE) -> Batch:
    return parse(stored(lists, compression, BASE_OFFSET))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_combination_of_columns_agrees_with_the_lists(compression: Compression) -> None:
    for lists in every_combination(count=9):
        assert arrow.decode(batch_of(lists, compression)).to_pydict() == expected(lists)


@given(lists_of_columns(times=TIMES), st.sampled_from(COMPRESSIONS))
@settings(max_examples=100, deadline=None)
def test_any_columns_agree_with_the_lists(lists: Lists, compression: Compression) -> None:
    decoded = arrow.decode(batch_of(lists, compression))

    decoded.validate(full=True)
    assert decoded.to_pydict() == expected(lists)


@given(lists_of_columns(times=TIMES), st.lists(st.sampled_from(list(arrow.TYPES)), min_size=1, unique=True))
@settings(max_examples=100, deadline=None)
def test_only_the_named_columns_are_decoded_in_their_order(lists: Lists, names: list[str]) -> None:
    decoded = arrow.decode(batch_of(lists), names)

    assert decoded.schema.names == names
    assert decoded.to_pydict() == {name: expected(lists)[name] for name in names}


def test_batches_with_and_without_columns_fit_into_one_table() -> None:
    combinations = list(every_combination(count=2))

    table = pyarrow.Table.from_batches([arrow.decode(batch_of(lists)) for lists in combinations])

    assert table.schema == arrow.schema()
    assert table["value"].to_pylist() == [value for lists in combinations for value in lists["values"]]


def test_a_plain_batch_is_not_copied() -> None:
    *_, lists = every_combination(count=9)
    data = stored(lists)

    decoded = arrow.decode(parse(data))

    batch = pyarrow.py_buffer(data)
    for name in ("value", "key", "subject", "reply", "headers", "timestamp", "tombstone"):
        for buffer in filter(None, decoded.column(name).buffers()):
            assert batch.address + 96 <= buffer.address, name
            assert buffer.address + buffer.size <= batch.address + batch.size, name


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_columns_outlive_the_batch(compression: Compression) -> None:
    lists: Lists = {"values": [b"value " * 100] * 100, "timestamp": 0}

    value = arrow.decode(batch_of(lists, compression), ["value"]).column("value")

    assert value.to_pylist() == lists["values"]


# ---- hostile bytes


@given(mutated() | made_up())
@settings(max_examples=600, deadline=None)
def test_forged_bytes_are_refused_where_the_lists_are_and_agree_where_not(data: bytes) -> None:
    try:
        columns = parse(data).columns()
        columns.check()
    except REFUSALS as refusal:
        with pytest.raises(type(refusal)):
            arrow.decode(parse(data))
        return

    decoded = arrow.decode(parse(data))

    decoded.validate(full=True)
    lists = read(columns)
    count = columns.batch.count
    assert decoded["offset"].to_pylist() == list(columns.offsets())
    assert decoded["timestamp"].cast(pyarrow.int64()).to_pylist() == lists["timestamps"]
    assert decoded["value"].to_pylist() == lists["values"]
    for name, column in {
        "key": "keys",
        "subject": "subjects",
        "reply": "replies",
        "headers": "headers",
    }.items():
        assert decoded[name].to_pylist() == (lists[column] or [None] * count)
    assert decoded["tombstone"].to_pylist() == (lists["tombstones"] or [False] * count)


@pytest.fixture
def pool() -> Iterator[pyarrow.MemoryPool]:
    """Counts what Arrow itself allocates, which tracemalloc does not see."""
    arrow.decode(encode([b"what is made once is made now"], timestamp=0))
    default = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(default)
    pyarrow.set_memory_pool(pool)
    yield pool
    pyarrow.set_memory_pool(default)
    # A buffer does not keep its pool alive: what is kept from this one must go first, or Python crashes at its end.
    arrow._nulls.cache_clear()


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_and_costs_no_more_than_its_size_justifies(bomb: bytes, pool: pyarrow.MemoryPool) -> None:
    with pytest.raises(CorruptBatch):
        arrow.decode(parse(bomb))

    assert peak_bytes(lambda: arrow.decode(parse(bomb))) + pool.max_memory() <= bytes_allowed(bomb)


NAMES = {"values": "value", "keys": "key", "subjects": "subject", "replies": "reply", "headers": "headers"}
NAMES |= {"timestamps": "timestamp", "tombstones": "tombstone"}


def rows_of(lists: Lists, before: int = 0, behind: int = 0) -> pyarrow.RecordBatch:
    """The lists as Arrow columns; with rows before and behind them, a slice of longer ones."""
    columns = {}
    for name, column in NAMES.items():
        if name in lists:
            items = lists[name]
            columns[column] = pyarrow.array([*items[:1] * before, *items, *items[:1] * behind], arrow.TYPES[column])
    return pyarrow.RecordBatch.from_pydict(columns).slice(before, len(lists["values"]))


def worth_storing(lists: Lists) -> Lists:
    """Without the columns that hold nothing."""
    return {
        name: column
        for name, column in lists.items()
        if not isinstance(column, list) or name == "values" or holds(column)
    }


def holds(column: list[Any]) -> bool:
    return any(item is not None and item is not False for item in column)


@given(
    lists_of_columns(times=TIMES, holes=st.just(False)),
    st.integers(0, 9),
    st.integers(0, 2),
    st.sampled_from(COMPRESSIONS),
)
@settings(max_examples=200, deadline=None)
def test_arrow_columns_make_the_same_batch_as_their_lists(
    lists: Lists, before: int, behind: int, compression: Compression
) -> None:
    made = arrow.encode(rows_of(lists, before, behind), timestamp=lists["timestamp"], compression=compression)

    assert made.data == encode(**worth_storing(lists), compression=compression).data


def test_every_combination_of_arrow_columns_makes_the_same_batch() -> None:
    for lists in every_combination(count=9):
        if "deltas" not in lists:
            made = arrow.encode(rows_of(lists, before=3), timestamp=lists["timestamp"], asks=True)
            assert made.data == encode(**worth_storing(lists), asks=True).data


def test_the_bits_of_the_rows_behind_are_not_stored() -> None:
    rows = pyarrow.RecordBatch.from_pydict({"value": [b"v"] * 8, "tombstone": [True] * 8}).slice(0, 3)

    made = arrow.encode(rows, timestamp=0)

    assert made.data == encode([b"v"] * 3, tombstones=[True] * 3, timestamp=0).data


def test_what_lies_under_a_null_is_not_stored() -> None:
    validity, offsets = pyarrow.py_buffer(b"\x02"), pyarrow.array([0, 6, 9], pyarrow.int32()).buffers()[1]
    key = pyarrow.Array.from_buffers(pyarrow.binary(), 2, [validity, offsets, pyarrow.py_buffer(b"secretkey")])
    value = pyarrow.array([b"a", b"b"])

    made = arrow.encode(pyarrow.RecordBatch.from_arrays([value, key], names=["value", "key"]), timestamp=0)

    assert made.data == encode([b"a", b"b"], keys=[None, b"key"], timestamp=0).data


@pytest.mark.parametrize("rows", [{"value": [b"v" * 600] * 2}, {"value": [b""], "key": [b"k" * 900]}])
def test_more_than_a_batch_holds_is_refused(rows: Lists, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "PLAIN_BYTES_MAX", 900)
    monkeypatch.setattr("penstock.model.batch.PLAIN_BYTES_MAX", 900)

    with pytest.raises(BatchTooLarge, match="send fewer messages in each"):
        arrow.encode(pyarrow.RecordBatch.from_pydict(rows), timestamp=0)


def test_a_null_value_is_refused() -> None:
    value = pyarrow.array([None, b"a"], pyarrow.binary())

    with pytest.raises(ValueError, match="use an empty value for a tombstone"):
        arrow.encode(pyarrow.RecordBatch.from_arrays([value], names=["value"]), timestamp=0)
