"""WebSocket (RFC 6455) and its compression (RFC 7692), without I/O: frames in, parts of messages and controls out.

    byte 0                  byte 1          2 or 8 bytes         4 bytes   ...
    FIN RSV1 0 0 opcode:4   MASK length:7   length from 126 on   mask      payload

NATS takes the messages of a connection as one stream of bytes: a message may hold many lines, or a part of one. So a
payload is handed on as it arrives and never gathered, and nothing is allocated for the length that a frame announces.
What is compressed is inflated to so many bytes at a time as the caller asks for.

Both sides compress each message by itself ("no context takeover"), so a connection keeps no window between messages.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from typing import Final, NamedTuple

from penstock.errors import BadFrame

VERSION: Final = "13"
DEFLATE: Final = "permessage-deflate; server_no_context_takeover; client_no_context_takeover"

# A message of ours has at most so many bytes.
MESSAGE_BYTES_MAX: Final = 64 << 10
# Shorter ones are not worth it. Longer ones would hold the loop: 64 KiB that do not compress take 3 ms.
_DEFLATED_BYTES: Final = range(64, MESSAGE_BYTES_MAX + 1)
_CONTROL_BYTES_MAX: Final = 125
# Compressed bytes that are given to zlib at once, which copies those that it does not take.
_PACKED_BYTES_MAX: Final = 16 << 10
# What a sender leaves out at the end of a compressed message.
_TAIL: Final = b"\x00\x00\xff\xff"
_KEY_SUFFIX: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

_FINAL: Final = 0x80
_DEFLATED: Final = 0x40
_RESERVED: Final = 0x30
_MASKED: Final = 0x80


class Opcode(IntEnum):
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class Status(IntEnum):
    """Why a connection is closed."""

    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    POLICY_VIOLATION = 1008


class Control(NamedTuple):
    opcode: Opcode
    payload: bytes


# The handshake.


def accept(key: str) -> str | None:
    """Return the answer to a client's Sec-WebSocket-Key; None if that is no key."""
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return None
    return base64.b64encode(hashlib.sha1(key.encode() + _KEY_SUFFIX).digest()).decode() if is_key else None


def offers_deflate(extensions: str) -> bool:
    """Return whether a Sec-WebSocket-Extensions header has an offer that DEFLATE accepts."""
    return any(map(_is_accepted, extensions.split(",")))


def _is_accepted(offer: str) -> bool:
    name, *parameters = (part.strip().lower() for part in offer.split(";"))
    # A smaller window of ours has to be confirmed, and of the client's may be ignored.
    return name == "permessage-deflate" and all(
        parameter.partition("=")[0].strip()
        in ("server_no_context_takeover", "client_no_context_takeover", "client_max_window_bits")
        for parameter in parameters
    )


# Frames of ours.


def frame(opcode: Opcode, payload: bytes) -> bytes:
    return _head(_FINAL | opcode, len(payload)) + payload


def close(status: Status, reason: str) -> bytes:
    return frame(Opcode.CLOSE, status.to_bytes(2, "big") + reason.encode()[: _CONTROL_BYTES_MAX - 2])


def answer_close(payload: bytes) -> bytes:
    """Return the answer to a CLOSE: the same, unless it is invalid."""
    status = int.from_bytes(payload[:2], "big")
    is_status = status in range(3000, 5000) or (status in range(1000, 1015) and status not in (1004, 1005, 1006))
    if not payload or (len(payload) > 1 and is_status):
        return frame(Opcode.CLOSE, payload)
    return close(Status.PROTOCOL_ERROR, "invalid status")


def messages(data: bytes, *, deflates: bool) -> Iterator[bytes]:
    """Yield the frames of binary messages that hold this data."""
    if deflates and len(data) in _DEFLATED_BYTES:
        packer = zlib.compressobj(zlib.Z_BEST_SPEED, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = (packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)).removesuffix(_TAIL)
        if len(packed) < len(data):
            yield _head(_FINAL | _DEFLATED | Opcode.BINARY, len(packed)) + packed
            return
    for at in range(0, len(data), MESSAGE_BYTES_MAX):
        yield frame(Opcode.BINARY, data[at : at + MESSAGE_BYTES_MAX])


def _head(first: int, length: int) -> bytes:
    if length < 126:
        return bytes((first, length))
    if length < 1 << 16:
        return bytes((first, 126)) + length.to_bytes(2, "big")
    return bytes((first, 127)) + length.to_bytes(8, "big")


# Frames of a client.


class Parser:
    def __init__(self, *, deflates: bool) -> None:
        self._deflates = deflates
        # Bytes of control frames and of the heads of others, since the begin.
        self.overhead = 0
        # What has come, and how much of it is taken.
        self._data = b""
        self._at = 0
        # The frame whose payload is being taken: how much is still to come of it, and its mask from there on.
        self._left = 0
        self._mask = b""
        self._is_final = True
        # Whether a message has begun and its last frame has not.
        self._is_continued = False
        # Of a compressed message: what is not inflated yet, and whether more may come out of what is.
        self._inflater: zlib._Decompress | None = None
        self._packed = b""
        self._is_full = False

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def read(self, bytes_max: int) -> bytes | Control | None:
        """Return the next part of a message, at most so many bytes, which may be none; or a control frame. None: more
        bytes are needed. Raise BadFrame on a protocol error; nothing must be read after that."""
        assert bytes_max > 0, "zlib takes 0 for no limit"
        if self._packed or self._is_full:
            return self._inflate(bytes_max)
        if not self._left:
            found = self._take_head()
            if not isinstance(found, bool):
                return found
            if not found:
                return None
        elif self._at == len(self._data):
            return None
        return self._take_payload(bytes_max)

    @property
    def is_inflating(self) -> bool:
        """Whether more may come out of what was taken of a compressed message."""
        return bool(self._packed) or self._is_full

    def clear(self) -> None:
        self._data, self._at, self._inflater, self._packed = b"", 0, None, b""

    def _take_head(self) -> Control | bool:
        """Take the head of a data frame, or a whole control frame. Return whether it has come, or the control frame."""
        data, at = self._data, self._at
        if len(data) < at + 2:
            return False
        first, second = data[at], data[at + 1]
        length, at = second & ~_MASKED, at + 2
        opcode = _check_head(first, second)
        if length >= 126:
            size = 2 if length == 126 else 8
            if len(data) < at + size:
                return False
            length, at = int.from_bytes(data[at : at + size], "big"), at + size
        if length >> 63:
            raise BadFrame("a frame of 2^63 bytes or more")
        if len(data) < at + 4:
            return False
        mask, at = data[at : at + 4], at + 4
        if opcode >= Opcode.CLOSE:
            if len(data) < at + length:
                return False
            self.overhead += at + length - self._at
            self._at = at + length
            return Control(opcode, _unmask(data[at : at + length], mask))
        self._begin(opcode, first)
        self.overhead += at - self._at
        self._at, self._left, self._mask = at, length, mask
        return True

    def _begin(self, opcode: Opcode, first: int) -> None:
        """Begin a message, or the next frame of one."""
        is_deflated = bool(first & _DEFLATED)
        if (opcode is Opcode.CONTINUATION) != self._is_continued:
            raise BadFrame("a message within a message" if self._is_continued else "a message without a begin")
        if is_deflated and (self._is_continued or not self._deflates):
            raise BadFrame("a compressed frame, which was not agreed upon")
        self._is_final = bool(first & _FINAL)
        if not self._is_continued:
            self._inflater = zlib.decompressobj(-zlib.MAX_WBITS) if is_deflated else None
        self._is_continued = not self._is_final

    def _take_payload(self, bytes_max: int) -> bytes:
        size = min(self._left, bytes_max if self._inflater is None else _PACKED_BYTES_MAX)
        part = self._data[self._at : self._at + size]
        self._at += len(part)
        self._left -= len(part)
        plain = _unmask(part, self._mask)
        turn = len(part) % 4
        self._mask = self._mask[turn:] + self._mask[:turn]
        if self._inflater is None:
            return plain
        self._packed = plain if self._left or not self._is_final else plain + _TAIL
        return self._inflate(bytes_max)

    def _inflate(self, bytes_max: int) -> bytes:
        inflater = self._inflater
        assert inflater is not None
        if inflater.eof:
            # Behind the end there is nothing but the tail, and zlib would keep it.
            self._packed = b""
            return b""
        try:
            data = inflater.decompress(self._packed, bytes_max)
        except zlib.error:
            raise BadFrame("a compressed message that cannot be inflated") from None
        self._packed = inflater.unconsumed_tail
        self._is_full = len(data) == bytes_max and not inflater.eof
        return data


def _check_head(first: int, second: int) -> Opcode:
    try:
        opcode = Opcode(first & 0x0F)
    except ValueError:
        raise BadFrame(f"unknown opcode {first & 0x0F}") from None
    if first & _RESERVED:
        raise BadFrame("a frame with reserved bits")
    if not second & _MASKED:
        raise BadFrame("a frame without a mask")
    if opcode >= Opcode.CLOSE:
        if second & ~_MASKED > _CONTROL_BYTES_MAX:
            raise BadFrame(f"a control frame of more than {_CONTROL_BYTES_MAX} bytes")
        if not first & _FINAL or first & _DEFLATED:
            raise BadFrame("a control frame in parts, or compressed")
    return opcode


def _unmask(data: bytes, mask: bytes) -> bytes:
    if not data or mask == b"\x00\x00\x00\x00":
        return data
    plain = bytearray(data)
    for at in range(4):
        plain[at::4] = plain[at::4].translate(_xor(mask[at]))
    return bytes(plain)


@cache
def _xor(byte: int) -> bytes:
    return bytes(byte ^ other for other in range(256))
