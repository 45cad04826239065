"""A batch comes back as it went in, damage is noticed, and hostile bytes are refused at no cost."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BatchTooLarge, CorruptBatch, UnsupportedBatch
from penstock.model.batch import (
    BATCH_BYTES_MAX,
    HEADER_BYTES,
    NO_SEGMENT,
    OFFSET_MAX,
    PLAIN_BYTES_MAX,
    Batch,
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
    I64,
    REFUSALS,
    U64,
    Lists,
    bytes_allowed,
    every_combination,
    expected,
    forge,
    i32s,
    lists_of_columns,
    made_up,
    mutated,
    pack,
    packed_body,
    padded,
    peak_bytes,
    read,
    sign,
    stored,
)

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

# What a producer sends, small enough to try every bit and every length of, and worth packing.
SMALL: Lists = {
    "values": [b"spam and eggs, " * 10, b"", b"spam and eggs, " * 10],
    "keys": [b"one", None, b""],
    "timestamps": [-1, 0, 1],
    "tombstones": [False, True, False],
    "timestamp": 7,
    "producer": 3,
    "sequence": 4,
}


def small(compression: Compression) -> bytearray:
    data = stored(SMALL, compression)
    assert parse(data).compression is compression
    return data


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
