"""Batches that are damaged, hostile, or refused; control batches."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptBatch, UnsupportedBatch
from penstock.model.batch import (
    BATCH_BYTES_MAX,
    HEADER_BYTES,
    NO_SEGMENT,
    OFFSET_MAX,
    Columns,
    Compression,
    Control,
    accept,
    encode,
    encode_control,
    parse,
    size_at,
)
from tests.support.batches import (
    BOMBS,
    COLUMN_READERS,
    COMPRESSIONS,
    REFUSALS,
    U64,
    bytes_allowed,
    forge,
    made_up,
    mutated,
    pack,
    packed_body,
    peak_bytes,
    read,
    sign,
)
from tests.support.small_batches import small

# ---- damage


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_flipped_bit_is_noticed_in_a_stored_batch(compression: Compression) -> None:
    data = small(compression)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBatch):
            parse(data).columns()
        data[bit // 8] ^= 1 << bit % 8
    parse(data).columns().check()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_flipped_bit_outside_the_stamp_is_noticed_in_a_sent_batch(compression: Compression) -> None:
    data = small(compression)
    accepted = accept(data).data
    for bit in range(8 * len(data)):
        at = bit // 8
        data[at] ^= 1 << bit % 8
        if 4 <= at < 8 or 16 <= at < 20 or at >= 56:  # length, span, the producer's part
            with pytest.raises(CorruptBatch):
                accept(data)
        else:
            assert accept(data).data == accepted
        data[at] ^= 1 << bit % 8


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("reader", [lambda data: parse(data).columns(), accept], ids=["parse", "accept"])
def test_a_batch_cut_short_anywhere_is_noticed(reader: Callable[[bytes], object], compression: Compression) -> None:
    data = bytes(small(compression))
    for end in range(len(data)):
        with pytest.raises(CorruptBatch):
            reader(data[:end])
    reader(data)


def test_a_batch_cut_short_behind_another_is_noticed() -> None:
    data = bytes(small(Compression.NONE))
    for end in range(len(data)):
        with pytest.raises(CorruptBatch):
            parse(data + data[:end], position=len(data))


def test_the_size_is_known_as_soon_as_the_header_is_there() -> None:
    data = small(Compression.NONE)
    for end in range(len(data)):
        assert size_at(data[:end]) == (len(data) if end >= HEADER_BYTES else 0)


@pytest.mark.parametrize("length", [0, 80, 84, 92, BATCH_BYTES_MAX, (1 << 32) - 8, (1 << 32) - 1])
def test_a_length_that_no_batch_has_is_refused_before_the_batch_is_there(length: int) -> None:
    header = bytearray(HEADER_BYTES)
    struct.pack_into("<I", header, 4, length)
    with pytest.raises(CorruptBatch):
        size_at(sign(header))


def test_an_offset_that_no_log_reaches_is_refused() -> None:
    batch = encode([b"a"], timestamp=0)
    batch.stamp(OFFSET_MAX + 1, append_time=0, durable_bytes=0)
    with pytest.raises(CorruptBatch):
        parse(batch.data)


# ---- what accept refuses beside damage


@pytest.mark.parametrize("size", [0, HEADER_BYTES - 8, BATCH_BYTES_MAX + 8])
def test_bytes_that_no_batch_can_be_are_not_accepted(size: int) -> None:
    data = bytes(size)
    with pytest.raises(CorruptBatch):
        accept(data)
    assert peak_bytes(lambda: accept(data)) < 1 << 16


def test_a_batch_with_something_behind_it_is_not_accepted() -> None:
    with pytest.raises(CorruptBatch):
        accept(small(Compression.NONE) + bytes(8))


def test_a_batch_with_holes_is_not_accepted() -> None:
    with pytest.raises(CorruptBatch):
        accept(encode([b"a", b"b"], timestamp=0, deltas=[0, 1], span=2).data)


def test_a_batch_that_asks_for_more_offsets_than_messages_is_not_accepted() -> None:
    data = small(Compression.NONE)
    struct.pack_into("<I", data, 16, 4)
    with pytest.raises(CorruptBatch):
        accept(sign(data))


@pytest.mark.parametrize("version", [2, (1 << 16) - 1])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_newer_version_says_to_upgrade(compression: Compression, version: int) -> None:
    data = small(compression)
    struct.pack_into("<H", data, 64, version)
    sign(data)
    with pytest.raises(UnsupportedBatch, match=f"version {version} .* upgrade"):
        parse(data).columns()
    with pytest.raises(UnsupportedBatch, match=f"version {version} .* upgrade"):
        accept(data)


# ---- control batches

CONTROLS = st.builds(Control, U64, U64, U64, st.binary(max_size=40))


def stored_control(control: Control) -> bytearray:
    batch = encode_control(control)
    batch.stamp(5, append_time=6, durable_bytes=5)
    assert isinstance(batch.data, bytearray)
    return batch.data


@given(CONTROLS)
def test_a_control_batch_comes_back(control: Control) -> None:
    batch = parse(stored_control(control))

    assert batch.control() == control
    assert (batch.count, batch.span, batch.end) == (0, 0, 5)


def test_a_control_batch_has_no_messages() -> None:
    with pytest.raises(CorruptBatch):
        parse(stored_control(Control(1, NO_SEGMENT))).columns()


def test_a_producer_cannot_send_a_control_batch() -> None:
    with pytest.raises(CorruptBatch, match="at least one message"):
        accept(encode_control(Control(1, NO_SEGMENT)).data)


def test_every_flipped_bit_is_noticed_in_a_control_batch() -> None:
    data = stored_control(Control(1, NO_SEGMENT, snapshot=b"snapshot!"))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBatch):
            parse(data).control()
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(("size", "length"), [(0, 0), (8, 8), (16, 8), (16, 17), (24, 16), (16, (1 << 32) - 1)])
def test_a_control_batch_of_the_wrong_size_is_refused(size: int, length: int) -> None:
    data = forge(bytes(size), count=0, plain_length=length)
    with pytest.raises(CorruptBatch):
        parse(data).control()


def test_a_control_batch_that_takes_offsets_is_refused() -> None:
    data = forge(bytes(16), count=0, span=1)
    with pytest.raises(CorruptBatch):
        parse(data).control()


def test_a_control_batch_of_a_newer_version_says_to_upgrade() -> None:
    data = stored_control(Control(1, NO_SEGMENT))
    struct.pack_into("<H", data, 64, 2)
    with pytest.raises(UnsupportedBatch, match="upgrade"):
        parse(sign(data)).control()


# ---- hostile bytes


def readers_of(data: bytes) -> list[Callable[[], object]]:
    """Everything that can be asked of bytes that came from outside."""

    def reader(read_column: Callable[[Columns], object]) -> Callable[[], object]:
        return lambda: read_column(parse(data).columns())

    return [lambda: accept(data), *map(reader, COLUMN_READERS)]


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptBatch):
        parse(data)
    with pytest.raises(CorruptBatch):
        accept(data)


@given(mutated() | made_up())
@settings(max_examples=800, deadline=None)
def test_forged_bytes_are_read_or_refused_and_cost_no_more_than_they_may(data: bytes) -> None:
    for reader in readers_of(data):
        assert peak_bytes(reader) <= bytes_allowed(data)


@given(mutated() | made_up())
@settings(max_examples=500, deadline=None)
def test_every_column_of_a_checked_batch_can_be_built(data: bytes) -> None:
    try:
        columns = parse(data).columns()
        columns.check()
    except REFUSALS:
        return
    count = columns.batch.count
    assert all(len(column) == count for column in read(columns).values() if column is not None)
    assert len(columns.offsets()) == count


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused(bomb: bytes) -> None:
    with pytest.raises(CorruptBatch):
        accept(bomb)
    with pytest.raises(CorruptBatch):
        parse(bomb).columns().check()


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_costs_no_more_than_its_size_justifies(bomb: bytes) -> None:
    for reader in readers_of(bomb):
        assert peak_bytes(reader) <= bytes_allowed(bomb)


def test_very_many_empty_messages_cost_no_more_than_their_size_justifies() -> None:
    count = (1 << 18) - 1
    packed = pack(bytes(4 * (count + 1)), Compression.LZ4)
    data = forge(packed_body(packed), count=count, flags=Compression.LZ4, plain_length=4 * (count + 1))
    for reader in readers_of(data):
        assert peak_bytes(reader) <= bytes_allowed(data)


@pytest.mark.parametrize("column", ["keys", "subjects", "replies", "headers"])
def test_the_largest_message_counts_value_key_and_headers(column: str) -> None:
    items = {column: [None, b"longest", b"x"]}
    assert encode([b"", b"abc", b"ab"], timestamp=0).columns().largest() == 3
    largest = 10 if column in ("keys", "headers") else 3
    assert encode([b"", b"abc", b"ab"], timestamp=0, **items).columns().largest() == largest  # type: ignore[arg-type]
