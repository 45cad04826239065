"""Hostile clients of NATS over WebSocket: frames that hurt, and the attacks on the text door in messages."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Final

from penstock.wire.websocket import Opcode
from tests.hostile.pieces import dribble
from tests.hostile.siege import Attack, Door, Step, Target
from tests.hostile.text import NATS
from tests.support.server import pub
from tests.support.websocket import DEFLATE, deflate, encode, request

BINARY: Final = Opcode.BINARY
_DEFLATED: Final = 4
_NO_MASK: Final = bytes(4)


@functools.cache
def _bomb(megabytes: int) -> bytes:
    payload = deflate(pub("_hostile.x", bytes(1 << 20)) * megabytes)
    return encode(BINARY, payload, reserved=_DEFLATED)


def _message(source: random.Random, data: bytes) -> bytes:
    """One message or several, some compressed."""
    if len(data) < 1 << 16 and source.random() < 0.3:
        return encode(BINARY, deflate(data), reserved=_DEFLATED)
    at = source.randint(0, len(data))
    final = source.random() < 0.5
    begin = encode(BINARY, data[:at], mask=_NO_MASK, final=final)
    return begin + encode(BINARY if final else 0, data[at:], mask=_NO_MASK)


def _in_messages(attack: Attack) -> Attack:
    @functools.wraps(attack.steps)
    def steps(source: random.Random, target: Target) -> Iterator[Step]:
        for step in attack.steps(source, target):
            yield _message(source, step) if isinstance(step, bytes) else step

    return attack._replace(steps=steps)


def frames_that_are_none(source: random.Random, _: Target) -> Iterator[Step]:
    yield source.randbytes(4096)


def heads_that_are_none(source: random.Random, _: Target) -> Iterator[Step]:
    """Any opcode, bits and length, with a payload that may fit."""
    for _number in range(20):
        yield encode(
            source.randrange(16),
            source.randbytes(source.randrange(200)),
            final=source.random() < 0.8,
            reserved=source.choice((0, 0, 0, 4, 2, 1)),
            mask=source.choice((None, b"abcd", b"abcd")),
        )


def lengths_that_lie(source: random.Random, _: Target) -> Iterator[Step]:
    length = source.choice((1 << 20, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1))
    yield encode(BINARY, b"PING\r\n" * 100, length=length)
    for _number in range(16):
        yield b"\r\n" * (32 << 10)
    yield 1.0


def half_a_frame(source: random.Random, _: Target) -> Iterator[Step]:
    frame = encode(BINARY, pub("hostile.x", bytes(500_000)))
    yield frame[: source.choice((1, 2, 5, 9, 13, 14, 200, 499_999))]
    yield 1.0


def dribbled_frames(_: random.Random, __: Target) -> Iterator[Step]:
    yield from dribble(
        encode(BINARY, b"PING\r\n") + encode(Opcode.PING, b"?") + encode(BINARY, b"PING\r\n", final=False)
    )


def flood_of_empty_messages(_: random.Random, __: Target) -> Iterator[Step]:
    for _number in range(16):
        yield encode(BINARY) * 20_000


def flood_of_small_messages(_: random.Random, __: Target) -> Iterator[Step]:
    """A byte in each."""
    for _number in range(8):
        yield b"".join(encode(BINARY, bytes([byte]), mask=_NO_MASK) for byte in b"PING\r\n" * 2000)


def message_without_end(_: random.Random, __: Target) -> Iterator[Step]:
    yield encode(BINARY, b"PING\r\n", final=False)
    for _number in range(64):
        yield encode(0, b"PING\r\n" * 100, final=False) * 20


def flood_of_pings(_: random.Random, __: Target) -> Iterator[Step]:
    """It never reads the answers."""
    for _number in range(100):
        yield encode(Opcode.PING, bytes(125)) * 500


def bomb(_: random.Random, __: Target) -> Iterator[Step]:
    yield _bomb(64)


def bombs_in_one_message(_: random.Random, __: Target) -> Iterator[Step]:
    """Nothing but line ends, a thousand times as many as bytes are sent."""
    packed = deflate(b"\r\n" * (8 << 20))
    yield encode(BINARY, packed, reserved=_DEFLATED, final=False)
    yield encode(0, packed)


def garbage_to_inflate(source: random.Random, _: Target) -> Iterator[Step]:
    data = bytearray(deflate(b"PING\r\n" * 1000))
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    yield encode(BINARY, bytes(data), reserved=_DEFLATED)


def closes(source: random.Random, _: Target) -> Iterator[Step]:
    status = source.choice((b"", b"\x03", b"\x03\xe8", b"\x03\xed", b"\xff\xff", b"\x03\xe8" + b"\xff" * 123))
    yield encode(BINARY, b"PUB hostile.x 5\r\nhe", final=source.random() < 0.5) + encode(Opcode.CLOSE, status)
    yield encode(BINARY, b"llo\r\n") * 100


_FRAMES: Final = (
    Attack(frames_that_are_none, connections=5),
    Attack(heads_that_are_none, connections=20),
    Attack(lengths_that_lie, connections=20),
    Attack(half_a_frame, connections=100),
    Attack(dribbled_frames, connections=20),
    Attack(flood_of_empty_messages),
    Attack(flood_of_small_messages),
    Attack(message_without_end),
    Attack(flood_of_pings, connections=5, reads=False),
    Attack(bomb, connections=10),
    Attack(bombs_in_one_message, connections=10),
    Attack(garbage_to_inflate, connections=5),
    Attack(closes, connections=5),
)

assert NATS.login is not None
WEBSOCKET: Final = Door(
    "WebSocket",
    "http",
    _FRAMES + tuple(map(_in_messages, NATS.attacks)),
    encode(BINARY, NATS.login),
    opening=request(0, host="localhost", sec_websocket_extensions=DEFLATE),
)
