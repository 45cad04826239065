"""The binary door: the same bytes give the same frames however they are cut, and a field is read as it was written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import BadFrame, BadRequest
from penstock.model.batch import BATCH_BYTES_MAX, Buffer, encode, parse
from penstock.wire.binary import (
    FRAME_BYTES_MAX,
    HEAD,
    JSON_BYTES_MAX,
    JSON_VALUES_MAX,
    NAME_BYTES_MAX,
    SCRATCH_BYTES,
    SETTLE_MAX,
    Append,
    Fetch,
    Frame,
    FrameReader,
    Messages,
    Read,
    Settle,
    StageTarget,
    Type,
    Verb,
    append_frame,
    batch_frame,
    batch_record,
    batches_head,
    credit_frame,
    end_frame,
    fetch_frame,
    frame,
    head,
    json_frame,
    messages_frame,
    names,
    read_append,
    read_batches,
    read_credit,
    read_end,
    read_fetch,
    read_frame,
    read_json,
    read_messages,
    read_names,
    read_read,
    read_request,
    read_settle,
    read_stage,
    settle_frame,
    stage_frame,
)
from tests.support.batches import peak_bytes

U8_MAX: Final = (1 << 8) - 1
U16_MAX: Final = (1 << 16) - 1
U32_MAX: Final = (1 << 32) - 1
U64_MAX: Final = (1 << 64) - 1
U8: Final = st.integers(0, U8_MAX)
U32: Final = st.integers(0, U32_MAX)
U64: Final = st.integers(0, U64_MAX)
BYTES: Final = st.binary(max_size=40)

# Small, so that a few bytes are a large frame.
SCRATCH: Final = 64


def reader_of(scratch_bytes: int = SCRATCH, bytes_max: int = FRAME_BYTES_MAX) -> FrameReader:
    return FrameReader(bytearray(scratch_bytes), bytes_max)


def receive(reader: FrameReader, data: bytes) -> list[Frame]:
    """One read from a socket on which no more is waiting than the reader has room for."""
    buffer = reader.buffer()
    buffer[: len(data)] = data
    return reader.filled(len(data))


def feed(reader: FrameReader, pieces: Iterable[bytes]) -> list[Frame]:
    return [found for piece in pieces for found in reader.feed(piece)]


def one_by_one(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def payload_of(data: bytes, kind: Type, number: int) -> bytes | bytearray:
    """The payload of the only frame in `data`, which is of this type and number."""
    [found] = reader_of(SCRATCH_BYTES).feed(data)
    assert (found.type, found.id) == (kind, number)
    return found.payload


# ---- the bytes as drawn


class Drawn(NamedTuple):
    """A frame as it is made, and as it lies on the wire: its head and its payload."""

    made: bytes
    head: str
    payload: bytes


def spelled(digits: str, text: bytes = b"") -> bytes:
    return bytes.fromhex(digits) + text


NUMBER: Final = 0x0102030405060708
TOPIC_ID: Final = 0xA1A2A3A4A5A6A7A8
PARTITION: Final = 0xB1B2B3B4
OFFSET: Final = 0xC1C2C3C4C5C6C7C8
LAST: Final = 0xD1D2D3D4D5D6D7D8

# The head is [type 1][id 8][length 4].
DRAWN: Final[dict[Type, Drawn]] = {
    Type.DATA: Drawn(json_frame(Type.DATA, NUMBER, {"topic": "a"}), "01 0102030405060708 0000000d", b'{"topic":"a"}'),
    Type.ACK: Drawn(json_frame(Type.ACK, NUMBER, {"offset": 1}), "02 0102030405060708 0000000c", b'{"offset":1}'),
    Type.SUBSCRIBE: Drawn(json_frame(Type.SUBSCRIBE, 1, {"a": [1, 2]}), "03 0000000000000001 0000000b", b'{"a":[1,2]}'),
    Type.COMMIT_OFFSET: Drawn(json_frame(Type.COMMIT_OFFSET, 2, {}), "04 0000000000000002 00000002", b"{}"),
    Type.RESET: Drawn(json_frame(Type.RESET, 3, {}), "05 0000000000000003 00000002", b"{}"),
    Type.READY: Drawn(json_frame(Type.READY, 4, {}), "06 0000000000000004 00000002", b"{}"),
    Type.DISCONNECT: Drawn(
        json_frame(Type.DISCONNECT, 0, {"reason": "é"}), "07 0000000000000000 00000013", b'{"reason":"\\u00e9"}'
    ),
    Type.HEARTBEAT: Drawn(frame(Type.HEARTBEAT, U64_MAX), "08 ffffffffffffffff 00000000", b""),
    Type.BATCH_HEADER: Drawn(
        batch_frame(NUMBER, [], b"orders", b"g"),
        "09 0102030405060708 0000001b",
        spelled("00000000 0000000000000000 00000006", b"orders") + spelled("00000001", b"g"),
    ),
    Type.BATCH_ACK: Drawn(
        frame(Type.BATCH_ACK, NUMBER, names(b"orders", b"g")),
        "0a 0102030405060708 0000000f",
        spelled("00000006", b"orders") + spelled("00000001", b"g"),
    ),
    Type.RESET_ACK: Drawn(frame(Type.RESET_ACK, 5), "0b 0000000000000005 00000000", b""),
    Type.READY_ACK: Drawn(frame(Type.READY_ACK, 6), "0c 0000000000000006 00000000", b""),
    Type.HELLO: Drawn(json_frame(Type.HELLO, 1, {"version": 1}), "10 0000000000000001 0000000d", b'{"version":1}'),
    Type.PUBLISH: Drawn(frame(Type.PUBLISH, 258, b"bat", b"ch"), "11 0000000000000102 00000005", b"batch"),
    Type.APPEND: Drawn(
        append_frame(2, Append(TOPIC_ID, PARTITION, 0x01020304), b"batch"),
        "12 0000000000000002 00000015",
        spelled("a1a2a3a4a5a6a7a8 b1b2b3b4 01020304", b"batch"),
    ),
    Type.STAGE: Drawn(
        stage_frame(2, StageTarget(Append(TOPIC_ID, PARTITION, 0x01020304), b"name", OFFSET), b"batch"),
        "1a 0000000000000002 00000023",
        spelled("a1a2a3a4a5a6a7a8 b1b2b3b4 01020304 c1c2c3c4c5c6c7c8 0004", b"namebatch"),
    ),
    Type.FETCH: Drawn(
        fetch_frame(3, Fetch(TOPIC_ID, PARTITION, 0x01020304, OFFSET, LAST, 0x05060708)),
        "13 0000000000000003 00000024",
        spelled("a1a2a3a4a5a6a7a8 b1b2b3b4 01020304 c1c2c3c4c5c6c7c8 d1d2d3d4d5d6d7d8 05060708"),
    ),
    Type.OPEN: Drawn(
        json_frame(Type.OPEN, 4, {"group": None, "credit": 9}),
        "14 0000000000000004 00000019",
        b'{"group":null,"credit":9}',
    ),
    Type.END: Drawn(end_frame(5, NUMBER), "15 0000000000000005 00000008", spelled("0102030405060708")),
    Type.CREDIT: Drawn(
        credit_frame(NUMBER, PARTITION), "17 0000000000000000 0000000c", spelled("0102030405060708 b1b2b3b4")
    ),
    Type.SETTLE: Drawn(
        settle_frame(6, Settle(NUMBER, Verb.REJECT, OFFSET, 1_000_000, TOPIC_ID, PARTITION, [LAST, OFFSET], "é")),
        "18 0000000000000006 0000003d",
        spelled(
            "0102030405060708 03 c1c2c3c4c5c6c7c8 00000000000f4240"
            "a1a2a3a4a5a6a7a8 b1b2b3b4 00000002 0002 d1d2d3d4d5d6d7d8 c1c2c3c4c5c6c7c8",
            "é".encode(),
        ),
    ),
    Type.CALL: Drawn(json_frame(Type.CALL, 7, {"call": "x"}), "19 0000000000000007 0000000c", b'{"call":"x"}'),
    Type.SNAPSHOT: Drawn(json_frame(Type.SNAPSHOT, 7, {"end": 1}), "1b 0000000000000007 00000009", b'{"end":1}'),
    Type.READ: Drawn(
        read_frame(7, Read(NUMBER, PARTITION, OFFSET, 0x05060708)),
        "1c 0000000000000007 00000018",
        spelled("0102030405060708 b1b2b3b4 c1c2c3c4c5c6c7c8 05060708", b""),
    ),
    Type.BYTES: Drawn(frame(Type.BYTES, 7, b"bytes"), "25 0000000000000007 00000005", b"bytes"),
    Type.RESULT: Drawn(json_frame(Type.RESULT, 8, {"ok": True}), "20 0000000000000008 0000000b", b'{"ok":true}'),
    Type.ERROR: Drawn(json_frame(Type.ERROR, 9, {"code": "X"}), "21 0000000000000009 0000000c", b'{"code":"X"}'),
    Type.BATCHES: Drawn(
        batches_head(10, OFFSET, LAST, 7) + b"batches",
        "22 000000000000000a 00000017",
        spelled("c1c2c3c4c5c6c7c8 d1d2d3d4d5d6d7d8", b"batches"),
    ),
    Type.MESSAGES: Drawn(
        messages_frame(NUMBER, Messages(TOPIC_ID, PARTITION, OFFSET, b"orders", {1: 2, 0x01020304: 3}, b"batch")),
        "23 0102030405060708 00000035",
        spelled("a1a2a3a4a5a6a7a8 b1b2b3b4 c1c2c3c4c5c6c7c8 0006 00000002", b"orders")
        + spelled("00000001 00000002 01020304 00000003", b"batch"),
    ),
    Type.ENDED: Drawn(json_frame(Type.ENDED, NUMBER, {"code": "X"}), "24 0102030405060708 0000000c", b'{"code":"X"}'),
}
EVERY_FRAME: Final = b"".join(drawn.made for drawn in DRAWN.values())
EVERY_FRAME_READ: Final = [
    Frame(kind, int.from_bytes(drawn.made[1:9], "big"), drawn.payload) for kind, drawn in DRAWN.items()
]


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=lambda drawn: Type(drawn.made[0]).name)
def test_a_frame_lies_on_the_wire_as_drawn(drawn: Drawn) -> None:
    assert drawn.made == bytes.fromhex(drawn.head) + drawn.payload


def test_a_read_is_read_as_it_was_made() -> None:
    assert read_read(DRAWN[Type.READ].payload) == Read(NUMBER, PARTITION, OFFSET, 0x05060708)


def test_the_table_above_has_every_type() -> None:
    assert set(DRAWN) == set(Type)
    assert [found.type for found in EVERY_FRAME_READ] == [drawn.made[0] for drawn in DRAWN.values()]


@pytest.mark.parametrize("kind", Type, ids=lambda kind: kind.name)
def test_a_head_is_that_of_the_frame_whose_payload_follows(kind: Type) -> None:
    assert head(kind, NUMBER, 5) + b"hello" == frame(kind, NUMBER, b"he", b"", b"llo")


@pytest.mark.parametrize("first", [b"\x16", *(bytes([letter]) for letter in b"CPSUIcpsui+-{\r\n ")])
def test_what_a_client_sends_first_is_not_taken_for_tls_or_text(first: bytes) -> None:
    # BATCH_ACK is a newline, and never the first frame: a batch comes before it.
    assert first[0] not in {kind for kind in Type if kind < Type.RESULT and kind != Type.BATCH_ACK}


def test_records_follow_a_batch_header_without_a_frame_of_their_own() -> None:
    records = [
        batch_record(b"AAPL", b"189", 0x0102030405060708, is_delete=False),
        batch_record(b"", b"", 1, is_delete=True),
    ]
    assert batch_frame(1, records, b"t", b"") == (
        bytes.fromhex("09 0000000000000001 00000015 00000002 000000000000 0029 00000001")
        + b"t"
        + bytes.fromhex("00000000 00000004")
        + b"AAPLM"
        + bytes.fromhex("00000003")
        + b"189"
        + bytes.fromhex("0102030405060708 00000000")
        + b"D"
        + bytes.fromhex("00000000 0000000000000001")
    )


@pytest.mark.parametrize(("topic", "group"), [(b"", b""), (b"orders", b"g"), (b"t" * NAME_BYTES_MAX, "é".encode())])
def test_names_are_read_as_they_were_written(topic: bytes, group: bytes) -> None:
    assert read_names(names(topic, group)) == (topic, group)
    for cut in {0, 3, len(topic) + 4, len(names(topic, group)) - 1} - {len(names(topic, group))}:
        with pytest.raises(BadFrame):
            read_names(names(topic, group)[:cut])


def test_the_verbs_are_numbered_as_said() -> None:
    assert [verb.name for verb in sorted(Verb)] == ["ACK", "NACK", "EXTEND", "REJECT", "COMMIT", "RELEASE"]
    assert sorted(Verb) == list(range(6))


def test_the_largest_batch_fits_into_a_frame_with_what_stands_before_it() -> None:
    before = messages_frame(1, Messages(0, 0, 0, bytes(U16_MAX), {}, b""))

    assert len(before) - HEAD.size + BATCH_BYTES_MAX <= FRAME_BYTES_MAX


# ---- bytes to frames


def test_every_frame_is_read_whole() -> None:
    assert reader_of(SCRATCH_BYTES).feed(EVERY_FRAME) == EVERY_FRAME_READ


@pytest.mark.parametrize("scratch_bytes", [HEAD.size, HEAD.size + 1, SCRATCH, len(EVERY_FRAME), SCRATCH_BYTES])
def test_every_frame_is_read_byte_by_byte(scratch_bytes: int) -> None:
    assert feed(reader_of(scratch_bytes), one_by_one(EVERY_FRAME)) == EVERY_FRAME_READ


@pytest.mark.parametrize("scratch_bytes", [SCRATCH, SCRATCH_BYTES])
def test_every_frame_is_read_cut_in_two_anywhere(scratch_bytes: int) -> None:
    for place in range(len(EVERY_FRAME) + 1):
        assert feed(reader_of(scratch_bytes), cut(EVERY_FRAME, [place])) == EVERY_FRAME_READ


def test_one_read_gives_all_the_frames_that_it_completes_and_keeps_the_rest() -> None:
    reader = reader_of()
    first, second, third = frame(Type.CALL, 1, b"one"), frame(Type.CALL, 2), frame(Type.CALL, 3, b"three")

    assert receive(reader, first + second + third[:-1]) == [Frame(Type.CALL, 1, b"one"), Frame(Type.CALL, 2, b"")]
    assert receive(reader, third[-1:]) == [Frame(Type.CALL, 3, b"three")]


# Payloads below, at and above what scratch holds with a head.
PAYLOADS: Final = st.binary(max_size=8) | st.integers(SCRATCH - HEAD.size - 2, 3 * SCRATCH).map(bytes) | BYTES
FRAMES: Final = st.lists(st.builds(Frame, U8, U64, PAYLOADS), max_size=8)
PLACES: Final = st.lists(st.integers(0, 1 << 16), max_size=20)


def bytes_of(frames: Iterable[Frame]) -> bytes:
    """As `frame` makes them, but of any type, and by another way."""
    return b"".join(struct.pack(">BQL", *found[:2], len(found.payload)) + found.payload for found in frames)


@given(FRAMES, PLACES)
@settings(max_examples=300, deadline=None)
def test_frames_are_the_same_however_they_are_cut(frames: list[Frame], places: list[int]) -> None:
    assert feed(reader_of(), cut(bytes_of(frames), places)) == frames


@given(FRAMES, st.lists(st.integers(0, 2 * SCRATCH), max_size=20))
@settings(max_examples=300, deadline=None)
def test_frames_are_the_same_however_the_buffer_is_filled(frames: list[Frame], counts: list[int]) -> None:
    reader, left = reader_of(), bytes_of(frames)
    seen: list[Frame] = []
    while left:
        room = len(reader.buffer())
        assert room, "there is always room for more"
        count = min(room, counts.pop() if counts else room)
        seen += receive(reader, left[:count])
        left = left[count:]

    assert seen == frames


@given(FRAMES, PLACES, st.binary(max_size=HEAD.size - 1))
@settings(max_examples=100, deadline=None)
def test_a_beginning_that_trails_the_frames_is_none(frames: list[Frame], places: list[int], trailing: bytes) -> None:
    assert feed(reader_of(), cut(bytes_of(frames) + trailing, places)) == frames


@pytest.mark.parametrize("size", [1, SCRATCH - HEAD.size, SCRATCH - HEAD.size + 1, 3 * SCRATCH])
def test_a_frame_comes_with_its_last_byte_and_not_before(size: int) -> None:
    data = frame(Type.CALL, 1, bytes(size))
    reader = reader_of()

    assert feed(reader, one_by_one(data[:-1])) == []
    assert reader.feed(data[-1:]) == [Frame(Type.CALL, 1, bytes(size))]


def test_a_read_of_nothing_changes_nothing() -> None:
    reader = reader_of()
    data = frame(Type.CALL, 1, b"hello")

    assert receive(reader, b"") == []
    assert receive(reader, data[:7]) == []
    assert receive(reader, b"") == []
    assert receive(reader, data[7:]) == [Frame(Type.CALL, 1, b"hello")]


def test_frames_that_were_given_out_do_not_change_when_more_are_read() -> None:
    reader = reader_of()
    [first] = receive(reader, frame(Type.CALL, 1, b"first"))
    [second] = receive(reader, frame(Type.CALL, 2, b"other"))

    assert (first.payload, second.payload) == (b"first", b"other")


@pytest.mark.parametrize("kind", [0x00, 0x16, 0x99, U8_MAX])
def test_a_frame_of_a_type_that_is_not_known_is_given_out_too(kind: int) -> None:
    assert reader_of().feed(bytes_of([Frame(kind, 1, b"x")])) == [Frame(kind, 1, b"x")]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_can_be_fed(kind: Callable[[bytes], Buffer]) -> None:
    assert reader_of().feed(kind(frame(Type.CALL, 1, b"hello"))) == [Frame(Type.CALL, 1, b"hello")]


# ---- frames that are larger than scratch


def test_a_large_frame_is_filled_in_its_own_memory() -> None:
    scratch = bytearray(SCRATCH)
    reader = FrameReader(scratch)
    payload = bytes(range(200))
    data = frame(Type.PUBLISH, 7, payload)
    assert receive(reader, data[:SCRATCH]) == []
    held = bytes(scratch)

    own = reader.buffer()
    assert len(own) == len(data) - SCRATCH
    own[:] = data[SCRATCH:]
    [found] = reader.filled(len(own))

    assert found == Frame(Type.PUBLISH, 7, payload)
    assert own.obj is found.payload
    assert scratch == held


def test_a_large_frame_that_comes_in_pieces_stays_in_the_same_memory() -> None:
    reader = reader_of()
    payload = bytes(range(200))
    data = frame(Type.PUBLISH, 7, payload)
    receive(reader, data[: HEAD.size])
    own = reader.buffer().obj

    for at in range(HEAD.size, len(data), 50):
        buffer = reader.buffer()
        assert buffer.obj is own
        assert len(buffer) == len(data) - at
        frames = receive(reader, data[at : at + 50])

    assert frames == [Frame(Type.PUBLISH, 7, payload)]
    assert frames[0].payload is own


def test_behind_a_large_frame_the_next_is_read_into_scratch_again() -> None:
    scratch = bytearray(SCRATCH)
    reader = FrameReader(scratch)

    assert len(reader.feed(frame(Type.PUBLISH, 1, bytes(SCRATCH)))) == 1
    assert reader.buffer().obj is scratch
    assert len(reader.buffer()) == SCRATCH
    assert reader.feed(frame(Type.CALL, 2, b"x")) == [Frame(Type.CALL, 2, b"x")]


def test_a_frame_that_fills_scratch_needs_no_memory_of_its_own() -> None:
    scratch = bytearray(SCRATCH)
    reader = FrameReader(scratch)
    payload = bytes(range(SCRATCH - HEAD.size))
    data = frame(Type.CALL, 1, payload)

    assert receive(reader, data[:-1]) == []
    assert reader.buffer().obj is scratch
    assert receive(reader, data[-1:]) == [Frame(Type.CALL, 1, payload)]


def test_a_large_frame_may_begin_behind_others() -> None:
    reader = reader_of()
    small, large = Frame(Type.CALL, 1, b"small"), Frame(Type.PUBLISH, 2, bytes(range(150)))
    data = bytes_of([small, large])

    assert receive(reader, data[:40]) == [small]
    assert receive(reader, data[40:]) == [large]


def test_a_large_frame_is_in_memory_once() -> None:
    size = 8 << 20
    reader = reader_of(SCRATCH_BYTES)
    piece = bytes(SCRATCH_BYTES)

    def read() -> None:
        assert reader.feed(head(Type.PUBLISH, 1, size)) == []
        for _ in range(size // len(piece) - 1):
            assert reader.feed(piece) == []
        [found] = reader.feed(piece)
        assert len(found.payload) == size

    assert peak_bytes(read) < 1.1 * size


# ---- a scratch that is shared


@given(FRAMES, FRAMES, PLACES, PLACES, st.lists(st.booleans(), max_size=60))
@settings(max_examples=200, deadline=None)
def test_two_readers_can_use_one_scratch_in_turn(
    ones: list[Frame], others: list[Frame], places: list[int], other_places: list[int], turns: list[bool]
) -> None:
    scratch = bytearray(SCRATCH)
    readers = FrameReader(scratch), FrameReader(scratch)
    pieces = cut(bytes_of(ones), places), cut(bytes_of(others), other_places)
    seen: tuple[list[Frame], list[Frame]] = [], []

    for which in [*turns, *[False] * len(pieces[0]), *[True] * len(pieces[1])]:
        if pieces[which]:
            seen[which].extend(readers[which].feed(pieces[which].pop(0)))

    assert seen == (ones, others)


def test_what_one_reader_has_kept_is_safe_from_the_other() -> None:
    scratch = bytearray(SCRATCH)
    one, other = FrameReader(scratch), FrameReader(scratch)
    data = frame(Type.CALL, 1, b"hello")

    assert receive(one, data[:-2]) == []
    assert receive(other, b"\xff" * (HEAD.size - 1)) == []
    assert receive(one, data[-2:]) == [Frame(Type.CALL, 1, b"hello")]


# ---- the limit


@pytest.mark.parametrize("bytes_max", [0, 5, SCRATCH - HEAD.size, SCRATCH, 3 * SCRATCH])
def test_a_payload_at_the_limit_is_read_and_one_above_it_refused(bytes_max: int) -> None:
    allowed = frame(Type.CALL, 1, bytes(bytes_max))

    assert reader_of(bytes_max=bytes_max).feed(allowed) == [Frame(Type.CALL, 1, bytes(bytes_max))]
    with pytest.raises(BadFrame, match=f"a frame of {bytes_max + 1} bytes, {bytes_max} are allowed"):
        reader_of(bytes_max=bytes_max).feed(frame(Type.CALL, 1, bytes(bytes_max + 1)))


@pytest.mark.parametrize("bytes_max", [5, JSON_BYTES_MAX, FRAME_BYTES_MAX])
@pytest.mark.parametrize("excess", [1, U32_MAX])
def test_a_length_above_the_limit_is_refused_with_the_last_byte_of_the_head(bytes_max: int, excess: int) -> None:
    reader = reader_of(bytes_max=bytes_max)
    lie = head(Type.PUBLISH, 1, min(bytes_max + excess, U32_MAX))

    assert reader.feed(lie[:-1]) == []
    with pytest.raises(BadFrame):
        reader.feed(lie[-1:])


@pytest.mark.parametrize("bytes_max", [5, JSON_BYTES_MAX, FRAME_BYTES_MAX])
def test_a_length_above_the_limit_costs_nothing(bytes_max: int) -> None:
    reader = reader_of(bytes_max=bytes_max)

    def refuse() -> None:
        with pytest.raises(BadFrame):
            reader.feed(head(Type.PUBLISH, 1, bytes_max + 1))

    assert peak_bytes(refuse) < 1 << 16


def test_the_limit_is_that_of_a_batch_unless_told_otherwise() -> None:
    reader = FrameReader(bytearray(SCRATCH))

    assert reader.bytes_max == FRAME_BYTES_MAX > BATCH_BYTES_MAX > JSON_BYTES_MAX == 2 * 1024 * 1024


def test_another_limit_counts_from_the_next_frame_on() -> None:
    reader = reader_of(bytes_max=5)
    reader.feed(frame(Type.HELLO, 1, b"hello"))

    reader.bytes_max = 100

    assert reader.feed(frame(Type.PUBLISH, 2, bytes(100))) == [Frame(Type.PUBLISH, 2, bytes(100))]
    with pytest.raises(BadFrame):
        reader.feed(head(Type.PUBLISH, 3, 101))


def read_all(reader: FrameReader, pieces: Iterable[bytes], seen: list[Frame]) -> None:
    for piece in pieces:
        seen += reader.feed(piece)
        reader.check()


@pytest.mark.parametrize("places", [[], [HEAD.size + 2], [HEAD.size + 5]], ids=["at once", "between", "within"])
def test_frames_before_one_that_is_too_large_are_given_out_however_they_are_cut(places: list[int]) -> None:
    reader = reader_of(bytes_max=5)
    data = frame(Type.CALL, 1, b"{}") + head(Type.CALL, 2, 6)
    seen: list[Frame] = []

    with pytest.raises(BadFrame):
        read_all(reader, cut(data, places), seen)

    assert seen == [Frame(Type.CALL, 1, b"{}")]


# ---- JSON


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS: Final = st.dictionaries(st.text(), JSON, max_size=5)


@given(st.sampled_from(Type), U64, OBJECTS)
@settings(deadline=None)
def test_an_object_comes_back_as_it_was(kind: Type, number: int, value: dict[str, Any]) -> None:
    assert read_json(payload_of(json_frame(kind, number, value), kind, number)) == value


@given(OBJECTS)
@settings(deadline=None)
def test_an_object_that_another_wrote_is_read(value: dict[str, Any]) -> None:
    assert read_json(json.dumps(value, indent=2, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(
    ("text", "value"),
    [(b"", {}), (b"{}", {}), (b' \t{"a" : 1}\r\n', {"a": 1}), ('{"é":"→"}'.encode(), {"é": "→"})],
)
def test_an_object_is_read_from_any_bytes_and_nothing_is_an_empty_one(
    kind: Callable[[bytes], Buffer], text: bytes, value: dict[str, Any]
) -> None:
    assert read_json(kind(text)) == value


@pytest.mark.parametrize("text", [b"[]", b"[{}]", b"1", b"1.5", b'"{}"', b"null", b"true", b"false"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest, match="a JSON object"):
        read_json(text)


NOT_JSON: Final = {
    "nothing but a blank": b" ",
    "cut short": b'{"a":1',
    "two": b"{}{}",
    "something behind it": b"{} x",
    "a zero": b"\0",
    "a comma too many": b'{"a":1,}',
    "a key without quotes": b"{a:1}",
    "a line end in a text": b'{"a":"\n"}',
    "bytes that begin no character": b'{"a":"\xff"}',
    "a character cut short": b'{"a":"\xc3"}',
    "a character in too many bytes": b'{"a":"\xc0\x80"}',
    "half of a pair": b'{"a":"\xed\xa0\x80"}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"a":1}'.encode("utf-16-be"),
    "UTF-32": '{"a":1}'.encode("utf-32"),
    "no number": b'{"a":NaN}',
    "infinity": b'{"a":-Infinity}',
    "a number of very many digits": b'{"a":' + b"9" * 100_000 + b"}",
    "deep lists": b'{"a":' + b"[" * 100_000,
    "deep lists that are closed": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_json_in_utf_8_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest, match="what must be JSON is not"):
        read_json(text)


@pytest.mark.parametrize("text", [b'{"a":"\\ud800"}', b'{"\\udfff":1}', b'{"a":[{"b":"x\\ud83d"}]}'])
def test_a_text_that_cannot_be_written_as_utf_8_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest):
        read_json(text)


@given(st.binary(max_size=60) | st.text('{}[]":,0123456789.eE+-truefalsn\\ud8 ').map(str.encode))
@example(b"[")
@settings(max_examples=500, deadline=None)
def test_whatever_comes_as_json_an_object_is_read_or_the_request_refused(text: bytes) -> None:
    try:
        assert isinstance(read_json(text), dict)
    except BadRequest:
        pass


# ---- each payload comes back as it went in


@given(U64, st.builds(Append, U64, U32, U32), BYTES)
def test_an_append_comes_back(number: int, to: Append, batch: bytes) -> None:
    found, carried = read_append(payload_of(append_frame(number, to, batch), Type.APPEND, number))

    assert found == to
    assert bytes(carried) == batch


@given(U64, st.builds(StageTarget, st.builds(Append, U64, U32, U32), BYTES, U64), BYTES)
def test_a_stage_comes_back(number: int, stage: StageTarget, batch: bytes) -> None:
    found, carried = read_stage(payload_of(stage_frame(number, stage, batch), Type.STAGE, number))

    assert found == stage
    assert bytes(carried) == batch


@given(U64, st.builds(Fetch, U64, U32, U32, U64, U64, U32))
def test_a_fetch_comes_back(number: int, fetch: Fetch) -> None:
    assert read_fetch(payload_of(fetch_frame(number, fetch), Type.FETCH, number)) == fetch


@given(U64, U64)
def test_an_end_comes_back(number: int, subscription: int) -> None:
    assert read_end(payload_of(end_frame(number, subscription), Type.END, number)) == subscription


@given(U64, U32)
def test_a_credit_comes_back_and_asks_for_no_answer(subscription: int, messages: int) -> None:
    assert read_credit(payload_of(credit_frame(subscription, messages), Type.CREDIT, 0)) == (subscription, messages)


OFFSETS: Final = st.lists(U64, min_size=1, max_size=20).map(tuple)
SETTLES: Final = st.builds(Settle, U64, st.sampled_from(Verb), U64, U64, U64, U32, OFFSETS, st.text(max_size=20))


@given(U64, SETTLES)
def test_a_settle_comes_back(number: int, settle: Settle) -> None:
    assert read_settle(payload_of(settle_frame(number, settle), Type.SETTLE, number)) == settle


@given(U64, U64, U64, BYTES)
def test_batches_come_back(number: int, start: int, committed: int, batches: bytes) -> None:
    data = batches_head(number, start, committed, len(batches)) + batches

    *offsets, carried = read_batches(payload_of(data, Type.BATCHES, number))

    assert offsets == [start, committed]
    assert bytes(carried) == batches


ATTEMPTS: Final = st.dictionaries(U32, U32, max_size=10)
MESSAGES: Final = st.builds(Messages, U64, U32, U64, BYTES, ATTEMPTS, BYTES)


@given(U64, MESSAGES)
@example(1, Messages(1, 2, 3, bytes(U16_MAX), {}, b""))
def test_messages_come_back(subscription: int, messages: Messages) -> None:
    assert read_messages(payload_of(messages_frame(subscription, messages), Type.MESSAGES, subscription)) == messages


def test_a_batch_within_a_frame_can_be_opened_where_it_lies() -> None:
    batch = encode([b"a", b"b"], timestamp=7)
    batch.stamp(40, append_time=8)
    payload = payload_of(messages_frame(1, Messages(1, 0, 0, b"orders", {1: 2}, batch.data)), Type.MESSAGES, 1)

    carried = read_messages(payload).batch

    assert isinstance(carried, memoryview)
    assert carried.obj is payload
    assert parse(carried).columns().values() == [b"a", b"b"]


@pytest.mark.parametrize("read", [lambda data: read_append(data)[1], lambda data: read_batches(data)[2]])
def test_what_follows_the_fields_is_not_copied(read: Callable[[bytes], memoryview]) -> None:
    payload = bytes(100)

    assert read(payload).obj is payload


# ---- payloads that do not fit


class Payload(NamedTuple):
    """A good payload, who reads it, and where its fields end; behind that anything may follow, if `is_open`."""

    data: bytes
    read: Callable[[Buffer], object]
    fields_bytes: int
    is_open: bool


def payload(kind: Type, read: Callable[[Buffer], object], followed_by: int | None = None) -> Payload:
    data = DRAWN[kind].payload
    return Payload(data, read, len(data) - (followed_by or 0), followed_by is not None)


READERS: Final = {
    "append": payload(Type.APPEND, read_append, followed_by=len(b"batch")),
    "stage": payload(Type.STAGE, read_stage, followed_by=len(b"batch")),
    "fetch": payload(Type.FETCH, read_fetch),
    "read": payload(Type.READ, read_read),
    "end": payload(Type.END, read_end),
    "credit": payload(Type.CREDIT, read_credit),
    "settle": payload(Type.SETTLE, read_settle),
    "batches": payload(Type.BATCHES, read_batches, followed_by=len(b"batches")),
    "messages": payload(Type.MESSAGES, read_messages, followed_by=len(b"batch")),
}
each_reader = pytest.mark.parametrize("case", READERS.values(), ids=READERS)


@each_reader
def test_a_payload_that_is_cut_short_anywhere_is_refused(case: Payload) -> None:
    for end in range(case.fields_bytes):
        with pytest.raises(BadFrame, match="do not fit its length"):
            case.read(case.data[:end])
    for end in range(case.fields_bytes, len(case.data) + 1):
        case.read(case.data[:end])


@each_reader
@pytest.mark.parametrize("count", [1, 4, 8, 16, 1000])
def test_a_payload_that_goes_on_is_refused_unless_a_batch_ends_it(case: Payload, count: int) -> None:
    longer = case.data + bytes(count)
    if case.is_open:
        case.read(longer)
    else:
        with pytest.raises(BadFrame, match="do not fit its length"):
            case.read(longer)


@each_reader
@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_a_payload_is_read_from_any_bytes(case: Payload, kind: Callable[[bytes], Buffer]) -> None:
    assert case.read(kind(case.data)) == case.read(case.data)


@each_reader
@given(st.binary(max_size=120))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_as_a_payload_is_read_or_refused(case: Payload, data: bytes) -> None:
    try:
        case.read(data)
    except BadFrame:
        pass


@given(st.tuples(U64, U8, U64, U64, U64, U32), st.integers(0, 6) | U32, st.lists(U64, max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_settle_whose_count_is_wrong_is_refused(fields: Sequence[int], count: int, offsets: list[int]) -> None:
    data = struct.pack("!QBQQQIIH", *fields, count, 0) + struct.pack(f"!{len(offsets)}Q", *offsets)
    if count == len(offsets) > 0 and fields[1] <= max(Verb):
        assert read_settle(data) == (*fields, tuple(offsets), "")
    else:
        with pytest.raises(BadFrame):
            read_settle(data)


@pytest.mark.parametrize(("count", "is_allowed"), [(0, False), (1, True), (SETTLE_MAX, True), (SETTLE_MAX + 1, False)])
def test_a_settle_is_of_so_many_messages_at_most_and_not_of_none(count: int, is_allowed: bool) -> None:
    settle = Settle(1, Verb.ACK, 0, 0, 2, 3, tuple(range(count)))
    data = settle_frame(1, settle)[HEAD.size :]
    if is_allowed:
        assert read_settle(data) == settle
    else:
        with pytest.raises(BadFrame):
            read_settle(data)


@pytest.mark.parametrize("verb", [Verb.RELEASE + 1, U8_MAX])
def test_a_verb_that_is_not_known_is_refused(verb: int) -> None:
    with pytest.raises(BadFrame):
        read_settle(settle_frame(1, Settle(1, verb, 0, 0, 2, 3, [4]))[HEAD.size :])


@given(U64, U32, U64, st.integers(0, 60) | st.integers(0, U16_MAX), st.integers(0, 8) | U32, st.binary(max_size=100))
@settings(max_examples=300, deadline=None)
def test_messages_whose_lengths_are_wrong_are_refused(
    topic_id: int, partition: int, generation: int, name_bytes: int, again: int, rest: bytes
) -> None:
    data = struct.pack("!QIQHI", topic_id, partition, generation, name_bytes, again) + rest
    begin = name_bytes + 8 * again
    if begin <= len(rest):
        found = read_messages(data)
        assert found[:4] == (topic_id, partition, generation, rest[:name_bytes])
        assert found.attempts == {
            int.from_bytes(rest[at : at + 4], "big"): int.from_bytes(rest[at + 4 : at + 8], "big")
            for at in range(name_bytes, begin, 8)
        }
        assert found.batch == rest[begin:]
    else:
        with pytest.raises(BadFrame):
            read_messages(data)


@pytest.mark.parametrize(
    ("read", "data"),
    [
        (read_settle, struct.pack("!QBQQQIIH", 1, 0, 0, 0, 1, 0, U32_MAX, 0) + bytes(80)),
        (read_messages, struct.pack("!QIQHI", 1, 0, 0, U16_MAX, 0) + bytes(80)),
        (read_messages, struct.pack("!QIQHI", 1, 0, 0, 0, U32_MAX) + bytes(80)),
    ],
    ids=["settle: count", "messages: name", "messages: again"],
)
def test_a_length_within_a_payload_is_checked_before_it_costs_anything(
    read: Callable[[Buffer], object], data: bytes
) -> None:
    def refuse() -> None:
        with pytest.raises(BadFrame):
            read(data)

    assert peak_bytes(refuse) < 1 << 16


def test_a_frame_without_a_batch_may_have_a_limit_of_its_own() -> None:
    reader = FrameReader(bytearray(SCRATCH), 1000, json_bytes_max=10)
    assert reader.feed(frame(Type.CALL, 1, bytes(10)) + frame(Type.PUBLISH, 2, bytes(1000)))
    with pytest.raises(BadFrame, match="a frame of 11 bytes, 10 are allowed"):
        reader.feed(frame(Type.CALL, 1, bytes(11)))


@pytest.mark.parametrize(
    "text",
    [
        '{"a":[%s0]}' % ("0," * JSON_VALUES_MAX),
        '{"a":[%s0]}' % ("[]," * JSON_VALUES_MAX),
        '{"a":%s}' % ("[" * 900 + "0," * JSON_VALUES_MAX + "]" * 900),
        '{"a":[%s0]}' % ('"",' * JSON_VALUES_MAX),
        '{"a":[%s0]}' % ('"\\\\","\\"",' * (JSON_VALUES_MAX // 2)),
    ],
)
def test_a_request_has_so_many_values_and_no_more(text: str) -> None:
    with pytest.raises(BadRequest, match=f"more than {JSON_VALUES_MAX} values"):
        read_request(text.encode())


def test_what_is_in_a_string_of_a_request_is_no_value() -> None:
    for text in ("a,b:[" * 100_000, 'a,\\"[{' * 100_000, "\\" * 100_001 + "," * 100_000):
        assert read_request(json.dumps({"data": text}).encode()) == {"data": text}
