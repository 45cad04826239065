"""Readers of binary frames, and bytes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from hypothesis import strategies as st

from penstock.model.batch import Buffer
from penstock.wire.binary import (
    FRAME_BYTES_MAX,
    Append,
    Fetch,
    FrameReader,
    Messages,
    Read,
    Settle,
    StageTarget,
    Type,
    Verb,
    append_frame,
    batch_frame,
    batches_head,
    credit_frame,
    end_frame,
    fetch_frame,
    frame,
    json_frame,
    messages_frame,
    names,
    read_frame,
    settle_frame,
    stage_frame,
)

U8_MAX: Final = (1 << 8) - 1
U16_MAX: Final = (1 << 16) - 1
U32_MAX: Final = (1 << 32) - 1
U64_MAX: Final = (1 << 64) - 1
U8: Final = st.integers(0, U8_MAX)
U64: Final = st.integers(0, U64_MAX)
BYTES: Final = st.binary(max_size=40)

# Small, so that a few bytes are a large frame.
SCRATCH: Final = 64


def reader_of(scratch_bytes: int = SCRATCH, bytes_max: int = FRAME_BYTES_MAX) -> FrameReader:
    return FrameReader(bytearray(scratch_bytes), bytes_max)


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


class Payload(NamedTuple):
    """A good payload, who reads it, and where its fields end; behind that anything may follow, if `is_open`."""

    data: bytes
    read: Callable[[Buffer], object]
    fields_bytes: int
    is_open: bool


def payload(kind: Type, read: Callable[[Buffer], object], followed_by: int | None = None) -> Payload:
    data = DRAWN[kind].payload
    return Payload(data, read, len(data) - (followed_by or 0), followed_by is not None)
