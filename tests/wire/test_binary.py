"""The frames of the binary protocol: the same bytes give the same frames however they are cut."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadFrame
from penstock.model.batch import BATCH_BYTES_MAX, Buffer
from penstock.wire.binary import (
    FRAME_BYTES_MAX,
    HEAD,
    JSON_BYTES_MAX,
    NAME_BYTES_MAX,
    SCRATCH_BYTES,
    Frame,
    FrameReader,
    Messages,
    Read,
    Type,
    Verb,
    batch_frame,
    batch_record,
    frame,
    head,
    messages_frame,
    names,
    read_names,
    read_read,
)
from tests.support.batches import peak_bytes
from tests.support.binary_frames import (
    BYTES,
    DRAWN,
    NUMBER,
    OFFSET,
    PARTITION,
    SCRATCH,
    U8,
    U8_MAX,
    U16_MAX,
    U32_MAX,
    U64,
    Drawn,
    reader_of,
)


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


# ---- the bytes as drawn

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
