"""WebSocket without I/O: what a parser takes out of frames, whole, byte by byte and split anywhere."""

from __future__ import annotations

import base64
import random
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadFrame
from penstock.wire import websocket
from penstock.wire.websocket import ControlFrame, Opcode, Status, WebSocketParser, accept, messages, offers_deflate
from tests.support.websocket import DEFLATE, KEY, Frame, deflate, encode, parse

BINARY, TEXT, CONTINUATION = Opcode.BINARY, Opcode.TEXT, Opcode.CONTINUATION
DEFLATED = 4
ROOM = 1 << 16


def drain(parser: WebSocketParser, room: int = ROOM) -> Iterator[bytes | ControlFrame]:
    while (found := parser.read(room)) is not None:
        assert isinstance(found, ControlFrame) or len(found) <= room
        yield found


def read(
    data: bytes, size: int | None = None, *, deflates: bool = True, room: int = ROOM
) -> tuple[bytes, list[ControlFrame]]:
    """Return the stream and the control frames of frames that come in pieces of one size."""
    parser = WebSocketParser(deflates=deflates)
    stream: list[bytes] = []
    controls: list[ControlFrame] = []
    for at in range(0, len(data), size or len(data)):
        parser.feed(data[at : at + (size or len(data))])
        for found in drain(parser, room):
            if isinstance(found, ControlFrame):
                controls.append(found)
            else:
                stream.append(found)
    return b"".join(stream), controls


LONG = bytes(range(256)) * 300

GOOD = {
    "a message": (encode(BINARY, b"PING\r\n"), b"PING\r\n"),
    "text, which need not be text": (encode(TEXT, b"\xff\xfe"), b"\xff\xfe"),
    "nothing": (encode(BINARY), b""),
    "a mask of zeros": (encode(BINARY, b"hello", mask=bytes(4)), b"hello"),
    "16 bits of length": (encode(BINARY, LONG[:40_000]), LONG[:40_000]),
    "64 bits of length": (encode(BINARY, LONG), LONG),
    "more bits than it needs": (bytes([0x82, 0xFE, 0, 2, 0, 0, 0, 0]) + b"hi", b"hi"),
    "messages": (encode(BINARY, b"one ") + encode(TEXT, b"two"), b"one two"),
    "parts": (encode(BINARY, b"o", final=False) + encode(0, final=False) + encode(0, b"ne") + encode(2, b"!"), b"one!"),
    "compressed": (encode(BINARY, deflate(LONG), reserved=DEFLATED), LONG),
    "compressed nothing": (encode(BINARY, deflate(b""), reserved=DEFLATED) + encode(BINARY, b"!"), b"!"),
    "compressed, and no byte of it": (encode(BINARY, reserved=DEFLATED) + encode(BINARY, b"!"), b"!"),
    "compressed in parts": (
        encode(BINARY, deflate(LONG)[:99], reserved=DEFLATED, final=False) + encode(0, deflate(LONG)[99:]),
        LONG,
    ),
    "compressed and not": (
        encode(BINARY, deflate(b"one "), reserved=DEFLATED) + encode(2, b"two") + encode(2, deflate(b"!"), reserved=4),
        b"one two!",
    ),
    # RFC 7692, 7.2.3.4: "Hello" in a block that is the last, and an empty block behind it.
    "compressed with an end": (
        encode(BINARY, bytes.fromhex("f3 48 cd c9 c9 07 00 00"), reserved=DEFLATED) + encode(BINARY, b"!"),
        b"Hello!",
    ),
    "compressed with something behind its end": (
        encode(BINARY, bytes.fromhex("f3 48 cd c9 c9 07 00") + bytes(100_000), reserved=DEFLATED) + encode(2, b"!"),
        b"Hello!",
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [None, 1, 7, 1000])
@pytest.mark.parametrize("name", GOOD)
def test_the_stream_is_what_the_messages_hold(name: str, size: int | None) -> None:
    data, stream = GOOD[name]
    assert read(data, size) == (stream, [])
    assert read(data, size, room=10) == (stream, [])


BAD = {
    "no mask": encode(BINARY, b"PING\r\n", mask=None),
    "an unknown opcode": encode(3, b"x"),
    "an unknown control": encode(11),
    "a reserved bit": encode(BINARY, b"x", reserved=2),
    "a continuation of nothing": encode(0, b"x"),
    "a message within a message": encode(BINARY, b"x", final=False) + encode(BINARY, b"y"),
    "a long control": encode(Opcode.PING, bytes(126)),
    "a control in parts": encode(Opcode.PING, b"x", final=False),
    "a compressed control": encode(Opcode.PING, b"x", reserved=DEFLATED),
    "a compressed continuation": encode(BINARY, b"", final=False) + encode(0, b"", reserved=DEFLATED),
    "a length with its first bit": encode(BINARY, b"", length=1 << 63),
    "what cannot be inflated": encode(BINARY, b"\xff\xff\xff\xff", reserved=DEFLATED),
}


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("name", BAD)
def test_what_is_not_websocket_is_refused(name: str, size: int | None) -> None:
    with pytest.raises(BadFrame):
        read(BAD[name], size)


def test_compression_that_was_not_agreed_upon_is_refused() -> None:
    with pytest.raises(BadFrame, match="not negotiated"):
        read(encode(BINARY, deflate(b"x"), reserved=DEFLATED), deflates=False)


@pytest.mark.parametrize("size", [None, 1])
def test_controls_come_between_the_parts_of_a_message(size: int | None) -> None:
    data = (
        encode(BINARY, b"one ", final=False)
        + encode(Opcode.PING, b"?")
        + encode(0, b"two")
        + encode(Opcode.PONG, bytes(125))
        + encode(Opcode.CLOSE, b"\x03\xe8bye")
    )
    controls = [(Opcode.PING, b"?"), (Opcode.PONG, bytes(125)), (Opcode.CLOSE, b"\x03\xe8bye")]
    assert read(data, size) == (b"one two", controls)


def test_a_payload_is_handed_on_before_its_frame_is_complete() -> None:
    assert read(encode(BINARY, b"PUB a 5\r\nhel", length=1 << 62)) == (b"PUB a 5\r\nhel", [])
    packed = deflate(LONG)
    begun, _ = read(encode(BINARY, packed[: len(packed) // 2], reserved=DEFLATED, length=1 << 62))
    assert begun
    assert LONG.startswith(begun)


def test_a_bomb_is_inflated_as_far_as_it_is_asked_for() -> None:
    bomb = encode(BINARY, deflate(bytes(64 << 20)), reserved=DEFLATED, mask=bytes(4))
    assert len(bomb) < 70_000
    parser = WebSocketParser(deflates=True)
    parser.feed(bomb)
    tracemalloc.start()
    try:
        parts = [parser.read(1000) for _ in range(5)]
        assert tracemalloc.get_traced_memory()[1] < 100_000
        assert parts == [bytes(1000)] * 5
        total = 5000 + sum(len(part) for part in drain(parser))
        assert tracemalloc.get_traced_memory()[1] < 400_000
    finally:
        tracemalloc.stop()
    assert total == 64 << 20


FRAMES = st.lists(
    st.tuples(st.binary(max_size=300), st.sampled_from([1, 2, 3]), st.booleans(), st.binary(min_size=4, max_size=4)),
    max_size=8,
)


@given(FRAMES, st.integers(1, 400), st.integers(1, 400))
def test_messages_in_any_parts_are_the_same_stream(
    wanted: list[tuple[bytes, int, bool, bytes]], size: int, room: int
) -> None:
    data = b""
    for message, count, is_deflated, mask in wanted:
        payload = deflate(message) if is_deflated else message
        step = len(payload) // count + 1
        pieces = [payload[at : at + step] for at in range(0, count * step, step)]
        for number, piece in enumerate(pieces):
            reserved = DEFLATED if is_deflated and not number else 0
            is_last = number == count - 1
            data += encode(0 if number else BINARY, piece, final=is_last, reserved=reserved, mask=mask)
            data += encode(Opcode.PING, b"!")
    stream, controls = read(data, size, room=room)
    assert stream == b"".join(message for message, *_ in wanted)
    assert controls == [ControlFrame(Opcode.PING, b"!")] * sum(count for _, count, *_ in wanted)


@given(st.binary(max_size=200), st.integers(1, 200))
def test_any_bytes_are_read_or_refused(data: bytes, size: int) -> None:
    try:
        read(data, size)
    except BadFrame:
        pass


def test_overhead_is_all_that_is_not_handed_on() -> None:
    parser = WebSocketParser(deflates=False)
    parser.feed(encode(BINARY, b"hello") + encode(Opcode.PING, b"12"))
    assert [*drain(parser)] == [b"hello", (Opcode.PING, b"12")]
    assert parser.overhead == 6 + 8


# Frames of the server.


def frames(data: bytes) -> list[Frame]:
    found = []
    while data:
        parsed = parse(data)
        assert parsed
        frame, data = parsed
        found.append(frame)
    return found


@pytest.mark.parametrize("count", [1, 63, 125, 126, 65_535, 65_536, 65_537, 300_000])
@pytest.mark.parametrize("deflates", [False, True])
def test_data_is_written_as_binary_messages(count: int, deflates: bool) -> None:
    data = b"x" * count
    written = frames(b"".join(messages(data, deflates=deflates)))
    assert b"".join(frame.message for frame in written) == data
    assert all(frame.opcode == BINARY and frame.is_final for frame in written)
    assert all(frame.is_deflated == (deflates and 64 <= count <= 65_536) for frame in written)
    assert all(len(frame.message) <= 65_536 for frame in written)


def test_what_does_not_become_smaller_is_not_compressed() -> None:
    data = random.Random(1).randbytes(1000)
    [written] = frames(b"".join(messages(data, deflates=True)))
    assert (written.is_deflated, written.payload) == (False, data)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (b"", b""),
        (b"\x03\xe8bye", b"\x03\xe8bye"),
        (b"\x0b\xb8", b"\x0b\xb8"),
        (b"\x03", b"\x03\xeainvalid status"),
        (b"\x03\xed", b"\x03\xeainvalid status"),
        (b"\x00\x00", b"\x03\xeainvalid status"),
    ],
)
def test_a_close_is_answered_with_the_same_if_it_is_valid(given: bytes, answer: bytes) -> None:
    assert frames(websocket.answer_close(given)) == [Frame(Opcode.CLOSE, answer)]


def test_a_reason_is_cut_to_what_fits_into_a_control() -> None:
    [frame] = frames(websocket.close(Status.POLICY_VIOLATION, "x" * 1000))
    assert frame.payload == b"\x03\xf0" + b"x" * 123


# The handshake.


def test_a_key_is_accepted_as_the_rfc_says() -> None:
    assert accept(KEY) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize("key", ["", "x", "é", base64.b64encode(bytes(15)).decode(), "A" * 10_000])
def test_what_is_no_key_is_not_accepted(key: str) -> None:
    assert accept(key) is None


@pytest.mark.parametrize(
    ("offers", "is_accepted"),
    [
        ("", False),
        ("permessage-deflate", True),
        (DEFLATE, True),
        ("x-webkit-deflate-frame, permessage-deflate;client_max_window_bits=10", True),
        ("permessage-deflate; server_no_context_takeover; client_no_context_takeover", True),
        ("permessage-deflate; server_max_window_bits=10", False),
        ("permessage-deflate; server_max_window_bits=10, permessage-deflate", True),
        ("permessage-deflate; something", False),
        ("permessage-bzip2", False),
    ],
)
def test_compression_is_accepted_where_it_is_offered_as_we_have_it(offers: str, is_accepted: bool) -> None:
    assert offers_deflate(offers) == is_accepted
