"""A batch comes back as it went in, and nothing is encoded that could not."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BatchTooLarge
from penstock.model.batch import (
    BATCH_BYTES_MAX,
    OFFSET_MAX,
    PLAIN_BYTES_MAX,
    Batch,
    Compression,
    accept,
    encode,
    parse,
    size_at,
)
from tests.support.batches import (
    COMPRESSIONS,
    I64,
    U64,
    Lists,
    every_combination,
    expected,
    i32s,
    lists_of_columns,
    padded,
    peak_bytes,
    read,
    stored,
)
from tests.support.small_batches import small

U32 = st.integers(0, (1 << 32) - 1)
OFFSET = st.integers(0, OFFSET_MAX)
STAMPS = st.fixed_dictionaries(
    {
        "base_offset": OFFSET,
        "append_time": I64,
        "log": U32,
        "durable_bytes": U32,
        "epoch": U32,
        "source": U64,
        "position": U64,
    }
)

# ---- round trip


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("count", [1, 8, 9])
def test_every_combination_of_columns_comes_back(count: int, compression: Compression) -> None:
    for lists in every_combination(count):
        batch = parse(stored(lists, compression))
        assert batch.compression is compression
        assert read(batch.columns()) == expected(lists)


@given(lists_of_columns(), st.sampled_from(COMPRESSIONS), OFFSET)
@settings(max_examples=200, deadline=None)
def test_any_columns_come_back(lists: Lists, compression: Compression, base_offset: int) -> None:
    columns = parse(stored(lists, compression, base_offset)).columns()

    assert read(columns) == expected(lists)
    deltas = lists.get("deltas", range(len(lists["values"])))
    assert list(columns.offsets()) == [base_offset + delta for delta in deltas]


@given(lists_of_columns(holes=st.just(False)), st.sampled_from(COMPRESSIONS))
@settings(max_examples=100, deadline=None)
def test_what_a_producer_made_is_accepted(lists: Lists, compression: Compression) -> None:
    sent = bytes(encode(**lists, compression=compression).data)

    batch = accept(sent)

    assert read(batch.columns()) == expected(lists)
    assert bytes(batch.data[56:]) == sent[56:]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_absent_key_is_not_an_empty_one(compression: Compression) -> None:
    keys = [None, b"", b"key", None]

    columns = encode([b"value"] * 4, keys=keys, timestamp=0, compression=compression).columns()

    assert columns.keys() == keys


@given(U64, U64, I64)
def test_the_header_comes_back(producer: int, sequence: int, timestamp: int) -> None:
    made = encode([b"a", b"b"], timestamp=timestamp, producer=producer, sequence=sequence)

    batch = accept(made.data)

    assert (batch.producer, batch.sequence, batch.timestamp) == (producer, sequence, timestamp)
    assert (batch.count, batch.span) == (2, 2)


def test_a_batch_shows_where_it_is() -> None:
    assert repr(Batch(small(Compression.NONE))).startswith("<Batch 1000+3, 3 messages")


def test_the_bytes_are_as_drawn() -> None:
    batch = encode(
        [b"ab", b""],
        timestamp=7,
        keys=[b"k", b""],
        subjects=[None, b"s"],
        replies=[b"", b"reply"],
        headers=[b"h", None],
        timestamps=[-1, 2],
        tombstones=[False, True],
        deltas=[0, 8],
        span=9,
        producer=3,
        sequence=4,
    )
    batch.stamp(10, append_time=11, log=8, durable_bytes=9, epoch=1, source=5, position=6)

    columns = b"".join(
        [
            struct.pack("<qq", -1, 2),
            struct.pack("<II", 0, 8),
            padded(b"\x02"),
            i32s(0, 2, 2) + padded(b"ab"),
            i32s(0, 1, 1) + padded(b"k"),
            padded(b"\x02") + i32s(0, 0, 1) + padded(b"s"),
            i32s(0, 0, 5) + padded(b"reply"),
            padded(b"\x01") + i32s(0, 1, 1) + padded(b"h"),
        ]
    )
    flags = 0b1_0101_1111_1100
    broker = struct.pack("<QIIqQQII", 10, 9, 1, 11, 5, 6, 8, 9)
    producer = struct.pack("<IHHIQQq", 2, 1, flags, len(columns), 3, 4, 7) + columns
    header_crc, crc = 0x635857E0, 0x5F430E43  # computed by another program
    length = len(broker) + 4 + len(producer)
    assert batch.data == struct.pack("<II", header_crc, length) + broker + struct.pack("<I", crc) + producer


@pytest.mark.parametrize(
    ("columns", "flags"),
    [
        ({}, 0),
        ({"timestamps": [0]}, 1 << 2),
        ({"deltas": [0], "span": 1}, 1 << 3),
        ({"tombstones": [True]}, 1 << 4),
        ({"keys": [b""]}, 1 << 5),
        ({"subjects": [b""]}, 1 << 6),
        ({"replies": [b""]}, 1 << 7),
        ({"headers": [b""]}, 1 << 8),
        ({"keys": [None]}, 1 << 5 | 1 << 9),
        ({"subjects": [None]}, 1 << 6 | 1 << 10),
        ({"replies": [None]}, 1 << 7 | 1 << 11),
        ({"headers": [None]}, 1 << 8 | 1 << 12),
        ({"asks": True}, 1 << 13),
        ({"asks": True, "headers": [b""]}, 1 << 13 | 1 << 8),
    ],
)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_each_column_has_its_flag(columns: Lists, flags: int, compression: Compression) -> None:
    batch = encode([b"packs well " * 20], timestamp=0, compression=compression, **columns)

    assert batch.flags == flags | compression


@given(st.lists(st.tuples(lists_of_columns(), st.sampled_from(COMPRESSIONS)), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_batches_are_found_one_behind_the_other(batches: list[tuple[Lists, Compression]]) -> None:
    log = b"".join(bytes(stored(lists, compression)) for lists, compression in batches) + b"trailing"

    position = 0
    for lists, _ in batches:
        batch = parse(log, position)
        assert read(batch.columns()) == expected(lists)
        assert size_at(log, position) == len(batch.data)
        assert len(batch.data) % 8 == 0
        position += len(batch.data)
    assert log[position:] == b"trailing"
    assert size_at(log, position) == 0


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_what_packing_does_not_shrink_stays_plain(compression: Compression) -> None:
    batch = encode([b"short"], timestamp=0, compression=compression)

    assert batch.compression is Compression.NONE
    assert batch.columns().values() == [b"short"]


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
@pytest.mark.parametrize("values", [[bytes(1 << 20)], [b""] * 100_000], ids=["zeros", "empty messages"])
def test_what_packs_very_tightly_is_padded_until_a_reader_believes_it(
    values: list[bytes], compression: Compression
) -> None:
    batch = encode(values, timestamp=0, compression=compression)

    assert batch.compression is compression
    assert len(batch.data) < batch.plain_length / 3
    assert accept(batch.data).columns().values() == values


# ---- what encode refuses


def test_a_batch_without_messages_is_not_made() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        encode([], timestamp=0)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("keys", b""),
        ("keys", None),
        ("subjects", b""),
        ("replies", b""),
        ("headers", b""),
        ("timestamps", 0),
        ("tombstones", False),
        ("deltas", 0),
    ],
)
def test_a_column_of_another_length_than_the_values_is_refused(name: str, item: object, count: int) -> None:
    lists: Lists = {name: [item] * count}
    with pytest.raises(ValueError, match=f"{count} in the .* column for 2 values"):
        encode([b"a", b"b"], timestamp=0, span=2 if name == "deltas" else None, **lists)


def test_deltas_and_span_go_together() -> None:
    with pytest.raises(ValueError, match="go together"):
        encode([b"a", b"b"], timestamp=0, deltas=[0, 5])
    with pytest.raises(ValueError, match="go together"):
        encode([b"a", b"b"], timestamp=0, span=6)


def test_the_largest_batch_is_accepted() -> None:
    value = bytes(PLAIN_BYTES_MAX - len(i32s(0, 0)))

    batch = accept(encode([value], timestamp=0).data)

    assert len(batch.data) == BATCH_BYTES_MAX
    assert batch.columns().values() == [value]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_larger_batch_is_not_made_however_it_would_pack(compression: Compression) -> None:
    value = bytes(PLAIN_BYTES_MAX - len(i32s(0, 0)) + 1)
    with pytest.raises(BatchTooLarge, match="fewer messages"):
        encode([value], timestamp=0, compression=compression)


def test_columns_that_are_too_large_together_are_refused() -> None:
    half = [bytes(PLAIN_BYTES_MAX // 2)]
    with pytest.raises(BatchTooLarge):
        encode(half, keys=half, timestamp=0)


def test_what_is_too_large_is_refused_before_it_is_put_together() -> None:
    values = [bytes(1 << 20)] * 1000

    assert peak_bytes(lambda: encode(values, timestamp=0)) < 1 << 20


# ---- the stamp


@given(lists_of_columns(holes=st.just(False)), st.sampled_from(COMPRESSIONS), STAMPS)
@settings(max_examples=100, deadline=None)
def test_a_stamp_leaves_the_producers_part_alone(lists: Lists, compression: Compression, stamp: dict[str, int]) -> None:
    batch = encode(**lists, compression=compression)
    made = bytes(batch.data)

    batch.stamp(**stamp)

    assert bytes(batch.data[56:]) == made[56:]
    assert accept(batch.data).data == accept(made).data


@given(STAMPS, STAMPS)
@settings(deadline=None)
def test_the_last_stamp_counts(first: dict[str, int], last: dict[str, int]) -> None:
    batch = encode([b"a", b"b", b"c"], timestamp=0)

    batch.stamp(**first)
    batch.stamp(**last)

    for found in (batch, parse(batch.data)):
        assert {name: getattr(found, name) for name in last} == last
        assert found.end == last["base_offset"] + 3
    assert list(parse(batch.data).columns().offsets()) == [last["base_offset"] + i for i in range(3)]


@given(STAMPS)
@settings(deadline=None)
def test_a_producer_does_not_choose_the_stamp(stamp: dict[str, int]) -> None:
    batch = encode([b"a"], timestamp=0)
    batch.stamp(**stamp)
    sent = bytes(batch.data)

    accepted = accept(batch.data)

    assert {name: getattr(parse(accepted.data), name) for name in stamp} == dict.fromkeys(stamp, 0)
    assert batch.data == sent


# ---- what its headers ask for


@given(lists_of_columns(holes=st.just(False)), st.sampled_from(COMPRESSIONS), st.booleans())
@settings(max_examples=100, deadline=None)
def test_whether_a_batch_asks_is_known_without_opening_it(lists: Lists, compression: Compression, asks: bool) -> None:
    batch = accept(encode(**lists, compression=compression, asks=asks).data)

    batch.stamp(10, append_time=0)

    assert parse(batch.data).asks is asks
    assert read(batch.columns()) == expected(lists)


def test_a_batch_asks_for_nothing_unless_it_is_said() -> None:
    assert not encode([b"a"], headers=[b"Msg-ID: 1\r\n"], timestamp=0).asks


# ---- the producer's number


@given(lists_of_columns(holes=st.just(False)), st.sampled_from(COMPRESSIONS), U64, U64)
@settings(max_examples=100, deadline=None)
def test_a_batch_that_is_numbered_is_as_if_made_so(
    lists: Lists, compression: Compression, producer: int, sequence: int
) -> None:
    batch = encode(**lists, compression=compression, producer=1, sequence=2)

    batch.number(producer, sequence)

    made = encode(**lists, compression=compression, producer=producer, sequence=sequence)
    assert batch.data == made.data
    assert (batch.producer, batch.sequence, batch.crc) == (producer, sequence, made.crc)
    assert batch.is_whole()


def test_the_last_number_counts() -> None:
    batch = encode([b"a", b"b"], timestamp=7)
    batch.number(1, 2)
    batch.number(3, 4)

    accepted = accept(batch.data)

    assert (accepted.producer, accepted.sequence) == (3, 4)
    assert accepted.columns().values() == [b"a", b"b"]
