"""How Cursus clients pack frames, envelopes and batches."""

from __future__ import annotations

import gzip
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final

import cramjam
import lz4.frame
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadFrame, BadRequest, PeerError
from penstock.model.run import Run
from penstock.wire.cursus import (
    PLAIN_BYTES_LEAST,
    PLAIN_BYTES_MAX,
    RECORDS_MAX,
    VERBS,
    Packing,
    Record,
    Records,
    batch,
    is_batch,
    open_envelope,
    pack,
    read_batch,
    run_batch,
    unpack,
)
from penstock.wire.prefixed import PrefixedReader, frame
from penstock.wire.qb import PROPERTIES_MAX, read_properties
from tests.support.prefixed_frames import BATCH, BYTES, MIB, U32_MAX, U64, peak_bytes

U16_MAX: Final = (1 << 16) - 1
I32: Final = st.integers(-(1 << 31), (1 << 31) - 1)
I64: Final = st.integers(-(1 << 63), (1 << 63) - 1)

# ---- how Cursus packs its frames

PACKED: Final = [Packing.GZIP, Packing.LZ4, Packing.SNAPPY]
each_packing = pytest.mark.parametrize("packing", PACKED, ids=lambda packing: packing.name)
PAYLOADS: Final = [b"", b"LIST", BATCH, bytes(100_000), Random(1).randbytes(300_000)]


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_a_frame_is_unpacked_as_it_was_packed(packing: Packing, payload: bytes) -> None:
    packed = pack(payload, packing)

    assert packed.startswith(packing.value)
    assert unpack(packed) == (payload, packing)


@given(st.binary(max_size=2000), st.sampled_from(PACKED))
@settings(max_examples=100)
def test_any_bytes_are_unpacked_as_they_were_packed(payload: bytes, packing: Packing) -> None:
    assert unpack(pack(payload, packing)) == (payload, packing)


@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_others_can_unpack_it_and_their_packing_is_unpacked(payload: bytes) -> None:
    assert gzip.decompress(pack(payload, Packing.GZIP)) == payload
    assert lz4.frame.decompress(pack(payload, Packing.LZ4)) == payload
    assert unpack(gzip.compress(payload, 1)) == (payload, Packing.GZIP)
    for options in ({"store_size": False}, {"content_checksum": True}, {"block_linked": False}, {"block_size": 5}):
        assert unpack(lz4.frame.compress(payload, **options)) == (payload, Packing.LZ4)


@pytest.mark.parametrize("payload", [b"", b"\x1f", b"\x04\x22\x4d", b"LIST", b"\xff\x06\0\0sNaPpY", b"\x82SNAPP"])
def test_what_is_not_packed_is_left_alone(payload: bytes) -> None:
    assert unpack(payload) == (payload, Packing.NONE)


PACKERS: Final[dict[Packing, Callable[[bytes], bytes]]] = {
    Packing.GZIP: lambda payload: gzip.compress(payload, 1),
    Packing.LZ4: lz4.frame.compress,
}


@pytest.mark.parametrize("packing", PACKERS, ids=lambda packing: packing.name)
def test_so_much_is_unpacked_and_no_more(packing: Packing) -> None:
    """A little in any case; else 64 bytes for each packed one; and a limit above all."""
    rough = Random(1).randbytes(PLAIN_BYTES_MAX // 32)
    for size, whole in ((PLAIN_BYTES_LEAST, b""), (PLAIN_BYTES_MAX, rough)):
        most, more = (PACKERS[packing](whole + bytes(count - len(whole))) for count in (size, size + 1))
        assert len(unpack(most)[0]) == size
        with pytest.raises(BadFrame, match=f"more than {size} bytes"):
            unpack(more)


@pytest.mark.parametrize("packing", PACKERS, ids=lambda packing: packing.name)
def test_a_bomb_is_not_unpacked_beyond_the_limit(packing: Packing) -> None:
    for bomb in (PACKERS[packing](bytes(64 * MIB)), PACKERS[packing](Random(1).randbytes(MIB // 2) + bytes(64 * MIB))):
        with pytest.raises(BadFrame, match="unpacks to more than"):
            unpack(bomb)
        assert peak_bytes(lambda bomb=bomb: unpack(bomb)) < 40 * MIB  # type: ignore[misc]


def _block(payload: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(payload))


@pytest.mark.parametrize(
    "payload",
    [
        *(b"PUBLISH t %s" % bytes(size) for size in (0, 1, 20, 49, 50, 51, 118, 200, 15_920, 70_000)),
        *(f"{verb} a".encode() for verb in VERBS),
        b"DELETE ab",  # packed, it is the same text behind blanks
        b"LIST",
        BATCH,
        batch(b"t", 0, [Record(0, bytes(15_930 - 56))]),
        b"\0\x06orders" + bytes(100),
    ],
    ids=len,
)
def test_a_block_of_snappy_is_known_by_what_is_in_it(payload: bytes) -> None:
    assert unpack(_block(payload)) == (payload, Packing.SNAPPY)


@pytest.mark.parametrize(
    "payload", [b"  CREATE orders 4", b"FLY somewhere, whatever that may be", BATCH, b"\0\x04LIST"]
)
def test_text_that_looks_like_a_block_is_left_alone(payload: bytes) -> None:
    assert unpack(payload) == (payload, Packing.NONE)


def test_so_much_snappy_is_unpacked_and_no_more() -> None:
    """The 1 MiB that any frame may unpack to, or 64 times its size, which snappy never reaches; and the upper limit."""
    rough = b"PUBLISH t " + Random(1).randbytes(MIB)
    for size in (PLAIN_BYTES_MAX, PLAIN_BYTES_MAX + 1):
        payload = rough + bytes(size - len(rough))
        blocks = [payload[at : at + (32 << 10)] for at in range(0, size, 32 << 10)]
        marked = Packing.SNAPPY.value + bytes(8) + b"".join(frame(_block(block)) for block in blocks)
        for packed in (_block(payload), marked):
            if size <= PLAIN_BYTES_MAX:
                assert unpack(packed) == (payload, Packing.SNAPPY)
            else:
                with pytest.raises(BadFrame, match=f"more than {PLAIN_BYTES_MAX} bytes"):
                    unpack(packed)


def test_a_length_that_snappy_claims_allocates_nothing() -> None:
    bomb = b"\xff\xff\xff\xff\x0f" + _block(b"PUBLISH t x")[1:]
    many = Packing.SNAPPY.value + bytes(8) + frame(bomb) * 3
    for packed in (bomb, many):
        with pytest.raises(BadFrame, match="unpacks to more than"):
            unpack(packed)
        assert peak_bytes(lambda packed=packed: unpack(packed)) < MIB  # type: ignore[misc]


@pytest.mark.parametrize(
    "blocks", [b"\0", frame(b""), frame(b"\5\x10PUB")[:-1], frame(b"\5\x10PUB"), frame(_block(b"x")) * 16_385]
)
def test_blocks_of_snappy_that_are_none_are_refused(blocks: bytes) -> None:
    with pytest.raises(BadFrame, match="a frame that cannot be unpacked"):
        unpack(Packing.SNAPPY.value + bytes(8) + blocks)


def test_without_its_library_snappy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [pack(b"LIST", Packing.SNAPPY), _block(b"CREATE orders 4")]
    text = _block(b"DELETE ab")
    monkeypatch.setitem(sys.modules, "cramjam", None)
    for payload in packed:
        with pytest.raises(BadFrame, match=r"install penstock\[snappy\]"):
            unpack(payload)
    assert unpack(text) == (text, Packing.NONE)


def test_a_batch_has_so_many_messages_and_no_more() -> None:
    most, more = (batch(b"t", 0, [Record(0, b"")] * count) for count in (RECORDS_MAX, RECORDS_MAX + 1))
    assert len(read_batch(most).records) == RECORDS_MAX
    with pytest.raises(BadFrame, match=f"a batch of {RECORDS_MAX + 1} messages, {RECORDS_MAX} are allowed"):
        read_batch(more)


def test_a_message_has_so_many_properties_and_no_more() -> None:
    most, more = (b"".join(b"%d=x\0" % name for name in range(count)) for count in (PROPERTIES_MAX, PROPERTIES_MAX + 1))
    assert len(read_properties(most)) == PROPERTIES_MAX
    with pytest.raises(BadRequest, match=f"{PROPERTIES_MAX + 1} of them, {PROPERTIES_MAX} are allowed"):
        read_properties(more)


def test_a_reader_may_take_some_frames_at_a_time() -> None:
    reader = PrefixedReader(frames_max=3)
    data = b"".join(frame(b"%d" % number) for number in range(8))
    found = [reader.feed(data[:-3])]
    while reader.has_more:
        found.append(reader.feed(b""))
    found.append(reader.feed(data[-3:]))
    assert found == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6"], [b"7"]]
    assert not reader.has_more


@each_packing
@pytest.mark.parametrize("payload", [b"", b"LIST", bytes(2000), Random(2).randbytes(200)], ids=len)
def test_what_is_cut_off_is_not_unpacked(packing: Packing, payload: bytes) -> None:
    packed = pack(payload, packing)
    # Snappy's framing says of each block where it ends, and of the frame it does not.
    whole = {16, len(packed)} if packing is Packing.SNAPPY else {len(packed)}
    for end in set(range(len(packing.value), len(packed))) - whole:
        with pytest.raises(BadFrame, match="a frame that"):
            unpack(packed[:end])


@each_packing
def test_what_is_damaged_is_not_unpacked(packing: Packing) -> None:
    packed = pack(b"PUBLISH orders hello", packing)
    for data in (packing.value + b"garbage", packing.value + bytes(100), packed[:12] + b"\xff" * 20):
        with pytest.raises(BadFrame):
            unpack(data)


def test_a_wrong_checksum_is_refused() -> None:
    packed = pack(b"PUBLISH orders hello", Packing.GZIP)

    with pytest.raises(BadFrame, match="cannot be unpacked"):
        unpack(packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:])


@each_packing
@pytest.mark.parametrize("behind", [b"x", b"garbage", bytes(8)])
def test_what_goes_on_behind_its_end_is_refused(packing: Packing, behind: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(pack(b"LIST", packing) + behind)


@each_packing
def test_what_is_packed_behind_its_end_is_not_lost(packing: Packing) -> None:
    """Refused, or unpacked too."""
    two = pack(b"PUBLISH orders one", packing) + pack(b" and two", packing)
    try:
        payload, _ = unpack(two)
    except BadFrame:
        return
    assert payload == b"PUBLISH orders one and two"


@given(st.sampled_from([*(packing.value for packing in Packing), b"\x1f\x8b\x08"]), st.binary(max_size=99))
@settings(max_examples=300)
def test_whatever_comes_packed_is_unpacked_or_refused(begin: bytes, rest: bytes) -> None:
    with suppress(BadFrame):
        payload, packing = unpack(begin + rest)
        assert packing is not Packing.NONE or payload == begin + rest


# ---- envelopes

ENVELOPES: Final[dict[bytes, tuple[bytes, bytes]]] = {
    b"": (b"", b""),
    b"LIST": (b"", b"LIST"),
    b" LIST": (b"", b" LIST"),
    b"\tLIST": (b"", b"\tLIST"),
    b"\r\nLIST": (b"", b"\r\nLIST"),
    b"\nLIST": (b"", b"\nLIST"),
    b"\xffLIST": (b"", b"\xffLIST"),
    b"\0\0": (b"", b""),
    b"\0\0LIST": (b"", b"LIST"),
    b"\0\x01a": (b"a", b""),
    b"\0\x06ordersPUBLISH orders hello": (b"orders", b"PUBLISH orders hello"),
    b"\0\x06orders\0\x06orders": (b"orders", b"\0\x06orders"),
    b"\0\x02\xff\0\xfe": (b"\xff\0", b"\xfe"),
    b"\x01\x02" + b"t" * 258 + b"LIST": (b"t" * 258, b"LIST"),
    b"\x1f\xff" + b"t" * 0x1FFF: (b"t" * 0x1FFF, b""),
}


@pytest.mark.parametrize(("payload", "parts"), ENVELOPES.items(), ids=lambda given: repr(given)[:40])
def test_an_envelope_is_opened(payload: bytes, parts: tuple[bytes, bytes]) -> None:
    assert open_envelope(payload) == parts


@pytest.mark.parametrize("payload", [b"\0", b"\x01", b"\x1f", b"\0\x01", b"\0\x06order", b"\x1f\xffLIST"])
def test_an_envelope_that_is_cut_off_is_refused(payload: bytes) -> None:
    with pytest.raises(BadFrame, match="longer than its frame"):
        open_envelope(payload)


@given(st.binary(max_size=200), st.binary(max_size=60))
@settings(max_examples=200)
def test_a_topic_and_what_is_sent_to_it_are_told_apart(topic: bytes, payload: bytes) -> None:
    assert open_envelope(len(topic).to_bytes(2, "big") + topic + payload) == (topic, payload)


# ---- batches

RECORDS: Final = st.lists(st.builds(Record, U64, BYTES, BYTES, BYTES, I64, U64), max_size=6)
ACKS: Final = ["", "0", "1", "-1", "all", "é", "a" * 255]


def test_a_batch_lies_on_the_wire_as_drawn() -> None:
    records = [Record(3, b"one", b"key", b"me", -1, 5), Record(4, b"", b"", b"", 2, 9)]

    made = batch(b"orders", -1, records, "all", is_idempotent=True)

    parts = [
        b"\xba\x7c" + bytes.fromhex("0006") + b"orders" + bytes.fromhex("ffffffff 03") + b"all",
        bytes.fromhex("01 0000000000000005 0000000000000009 00000002"),
        bytes.fromhex("0000000000000003 0000000000000005 0002") + b"me" + bytes.fromhex("0003") + b"key",
        bytes.fromhex("ffffffffffffffff 00000003") + b"one",
        bytes.fromhex("0000000000000004 0000000000000009 0000 0000 0000000000000002 00000000"),
    ]
    assert made == b"".join(parts)
    assert is_batch(made)
    assert read_batch(made) == Records(b"orders", -1, records, "all", is_idempotent=True)


def test_a_batch_may_be_of_nothing() -> None:
    made = batch(b"", 0, [])

    assert made == b"\xba\x7c" + bytes(2 + 5 + 21)
    assert read_batch(made) == Records(b"", 0, [], "", is_idempotent=False)


@given(BYTES, I32, RECORDS, st.sampled_from(ACKS), st.booleans())
@settings(max_examples=150)
def test_a_batch_is_read_as_it_was_written(
    topic: bytes, partition: int, records: list[Record], acks: str, is_idempotent: bool
) -> None:
    made = batch(topic, partition, records, acks, is_idempotent=is_idempotent)

    assert read_batch(made) == Records(topic, partition, records, acks, is_idempotent)


def test_the_longest_fields_fit() -> None:
    record = Record(0, bytes(U16_MAX + 1), b"k" * U16_MAX, b"p" * U16_MAX)

    assert read_batch(batch(b"t" * U16_MAX, 0, [record])) == Records(b"t" * U16_MAX, 0, [record], "")


def test_only_what_has_the_mark_is_a_batch() -> None:
    assert not any(map(is_batch, (b"", b"\xba", b"\x7c\xba", b"LIST", b"\xba\x7d" + BATCH[2:])))


def test_a_run_is_sent_with_its_offsets_and_keys() -> None:
    run = Run([b"orders.eu", b"orders"], [b"one", b"\0\xff"])
    run.base_offset = 41
    run.keys = {1: b"\xffkey"}

    assert read_batch(run_batch(b"orders", 2, run)) == Records(
        b"orders", 2, [Record(41, b"one"), Record(42, b"\0\xff", b"\xffkey")], ""
    )


def test_a_run_with_holes_is_sent_with_the_offsets_that_are_left() -> None:
    run = Run([b"orders"] * 3, [b"one", b"two", b"three"])
    run.base_offset = 7
    run.offsets = [7, 10, 1 << 40]
    run.keys = {0: b"a", 2: b"c"}

    assert read_batch(run_batch(b"orders", 0, run)).records == [
        Record(7, b"one", b"a"),
        Record(10, b"two"),
        Record(1 << 40, b"three", b"c"),
    ]


@pytest.mark.parametrize(("key_bytes", "is_sent"), [(U16_MAX, True), (U16_MAX + 1, False), (1 << 20, False)])
def test_a_key_that_a_batch_has_no_room_for_is_left_out(key_bytes: int, is_sent: bool) -> None:
    run = Run([b"orders"], [b"one"])
    run.keys = {0: b"k" * key_bytes}

    assert read_batch(run_batch(b"orders", 0, run)).records == [Record(0, b"one", b"k" * key_bytes if is_sent else b"")]


LONG: Final = batch(
    b"orders", 1, [Record(7, b"value", b"key", b"me", 1, 2), Record(8, b""), Record(9, b"", b"k")], "all"
)


@pytest.mark.parametrize("whole", [BATCH, LONG, batch(b"orders", 0, []), batch(b"", 0, [Record(0, b"")])], ids=len)
def test_a_batch_that_is_cut_off_anywhere_is_refused(whole: bytes) -> None:
    read_batch(whole)
    for end in range(len(whole)):
        with pytest.raises(BadFrame, match="a batch"):
            read_batch(whole[:end])


@pytest.mark.parametrize("behind", [b"\0", b"x", bytes(32), BATCH])
def test_bytes_behind_the_last_message_are_refused(behind: bytes) -> None:
    for whole in (LONG, batch(b"orders", 0, [])):
        with pytest.raises(BadFrame, match=f"{len(behind)} bytes behind its last message"):
            read_batch(whole + behind)


def batch_of(number: int, behind: bytes = b"", acks: bytes = b"1") -> bytes:
    """One that says that it has so many messages."""
    head = b"\xba\x7c\0\x01t" + struct.pack(">iB", 0, len(acks)) + acks
    return head + struct.pack(">BQQi", 0, 0, 0, number) + behind


def record_of(producer_bytes: int = 0, key_bytes: int = 0, value_bytes: int = 0) -> bytes:
    """A message of a batch with these lengths, and nothing behind any of them."""
    return struct.pack(">QQHHqI", 0, 0, producer_bytes, key_bytes, 0, value_bytes)


BAD_BATCHES: Final[dict[str, bytes]] = {
    "fewer than there are": batch_of(1, record_of() * 2),
    "none, but there is one": batch_of(0, record_of()),
    "a producer beyond the end": batch_of(1, record_of(producer_bytes=U16_MAX)),
    "a key beyond the end": batch_of(1, record_of(key_bytes=U16_MAX)),
    "a value beyond the end": batch_of(1, record_of(value_bytes=1)),
    "a value of 4 GiB": batch_of(1, record_of(value_bytes=U32_MAX)),
    "a topic beyond the end": b"\xba\x7c\xff\xff" + bytes(100),
    "acks beyond the end": b"\xba\x7c\0\x01t" + struct.pack(">iB", 0, 255) + bytes(40),
}


@pytest.mark.parametrize("data", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_batch_whose_numbers_are_wrong_is_refused_before_they_cost_anything(data: bytes) -> None:
    def refuse() -> None:
        with pytest.raises(BadFrame, match="a batch"):
            read_batch(data)

    refuse()
    assert peak_bytes(refuse) < 1 << 16


@pytest.mark.parametrize("number", [-(1 << 31), -1, 1, 3, (1 << 31) - 1])
def test_a_batch_that_is_too_short_for_its_count_is_refused_at_once(number: int) -> None:
    def refuse(behind: bytes) -> None:
        with pytest.raises(BadFrame, match=f"says it has {number} messages, and is too short"):
            read_batch(batch_of(number, behind))

    refuse(b"")
    refuse(record_of()[:-1])
    if number != 1:
        refuse(record_of() * 2)
    assert peak_bytes(lambda: refuse(b"")) < 1 << 16


def test_a_batch_that_is_made_by_hand_is_read() -> None:
    assert read_batch(batch_of(2, record_of() * 2)) == Records(b"t", 0, [Record(0, b"")] * 2, "1")
    assert read_batch(batch_of(0)) == Records(b"t", 0, [], "1")


def test_acks_that_are_not_text_are_refused() -> None:
    with pytest.raises(PeerError):
        read_batch(batch_of(0, acks=b"\xff"))


@given(st.integers(0, len(LONG)), st.integers(0, 8), st.binary(max_size=8))
@settings(max_examples=300)
def test_whatever_comes_as_a_batch_is_read_or_refused(at: int, removed: int, put: bytes) -> None:
    with suppress(BadFrame, BadRequest):
        read_batch(LONG[:at] + put + LONG[at + removed :])
