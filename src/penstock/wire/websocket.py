"""WebSocket (RFC 6455) and its compression (RFC 7692), without I/O: frames in, message parts and control frames out.

    byte 0                  byte 1          2 or 8 bytes         4 bytes   ...
    FIN RSV1 0 0 opcode:4   MASK length:7   length from 126 on   mask      payload

NATS reads the messages of a connection as one stream of bytes: a message may hold many lines, or a part of one. So a
payload is passed on as it arrives and never collected, and the announced length of a frame allocates nothing.
Compressed data is inflated in parts of the size that the caller asks for.

Both sides compress each message separately ("no context takeover"), so a connection keeps no window between messages.
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

# The maximum size of a sent message.
MESSAGE_BYTES_MAX: Final = 64 << 10
# Compressing shorter messages does not pay; longer ones would block the loop: 64 KiB of random bytes take 3 ms.
_DEFLATED_BYTES: Final = range(64, MESSAGE_BYTES_MAX + 1)
_CONTROL_BYTES_MAX: Final = 125
# Compressed bytes to pass to zlib at once, because it copies those that it does not consume.
_PACKED_BYTES_MAX: Final = 16 << 10
# The end of a compressed message, which a sender omits.
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


class ControlFrame(NamedTuple):
    opcode: Opcode
    payload: bytes


# ---- the handshake


def accept(key: str) -> str | None:
    """Return the reply to a client's Sec-WebSocket-Key; None if it is invalid."""
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
    # A smaller server window must be confirmed; a smaller client window may be ignored.
    return name == "permessage-deflate" and all(
        parameter.partition("=")[0].strip()
        in ("server_no_context_takeover", "client_no_context_takeover", "client_max_window_bits")
        for parameter in parameters
    )


# ---- encoding


def frame(opcode: Opcode, payload: bytes) -> bytes:
    return _head(_FINAL | opcode, len(payload)) + payload


def close(status: Status, reason: str) -> bytes:
    return frame(Opcode.CLOSE, status.to_bytes(2, "big") + reason.encode()[: _CONTROL_BYTES_MAX - 2])


def answer_close(payload: bytes) -> bytes:
    """Return the reply to a CLOSE: the same, unless it is invalid."""
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


# ---- decoding


class WebSocketParser:
    def __init__(self, *, deflates: bool) -> None:
        self._deflates = deflates
        # Bytes of control frames and of the heads of data frames so far.
        self.overhead = 0
        # The received bytes, and the number of those consumed.
        self._data = b""
        self._at = 0
        # The current data frame: the number of missing payload bytes, and the mask for them.
        self._left = 0
        self._mask = b""
        self._is_final = True
        # Whether a message has begun, but not its last frame.
        self._is_continued = False
        # Of a compressed message: the bytes not inflated yet, and whether zlib may have more output.
        self._inflater: zlib._Decompress | None = None
        self._packed = b""
        self._is_full = False

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def read(self, bytes_max: int) -> bytes | ControlFrame | None:
        """Return the next part of a message, of at most `bytes_max` bytes and possibly empty, or a control frame; None
        if more bytes are needed. Raise BadFrame on a protocol error; nothing must be read after that."""
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
        """Return whether zlib may have more output of the consumed bytes."""
        return bool(self._packed) or self._is_full

    def clear(self) -> None:
        self._data, self._at, self._inflater, self._packed = b"", 0, None, b""

    def _take_head(self) -> ControlFrame | bool:
        """Read a control frame and return it, or the head of a data frame; return whether that is complete."""
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
            return ControlFrame(opcode, _unmask(data[at : at + length], mask))
        self._begin(opcode, first)
        self.overhead += at - self._at
        self._at, self._left, self._mask = at, length, mask
        return True

    def _begin(self, opcode: Opcode, first: int) -> None:
        """Start a message, or its next frame."""
        is_deflated = bool(first & _DEFLATED)
        if (opcode is Opcode.CONTINUATION) != self._is_continued:
            raise BadFrame(
                "a message within a message" if self._is_continued else "a continuation frame without a message"
            )
        if is_deflated and (self._is_continued or not self._deflates):
            raise BadFrame("a compressed frame, but compression was not negotiated")
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
            # Only the tail follows the end, and zlib would keep it.
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
