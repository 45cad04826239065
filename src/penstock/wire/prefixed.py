"""Frames that begin with their length, four bytes in network order. Two protocols share this framing.

`wire/qb.py` and `wire/cursus.py` describe them. The bytes after the first length distinguish them: every QB message has
three zero bytes there, and no command or batch of Cursus does.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from penstock.errors import BadFrame
from penstock.wire.qb import FIXED_BYTES, HEAD, LENGTH, QbMessage, Style

# Cursus' limit, used for both protocols.
FRAME_BYTES_MAX: Final = 64 << 20


class PrefixedDialect(Enum):
    QB = "QB"
    CURSUS = "Cursus"


def frame(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def find_dialect(data: bytes) -> PrefixedDialect | None:
    """Return the protocol of a client from its first bytes; None if they are too few. Seven are enough."""
    if len(data) < LENGTH.size:
        return None
    needed = LENGTH.size + min(LENGTH.unpack_from(data)[0], 3)
    if len(data) < needed:
        return None
    return PrefixedDialect.QB if data[LENGTH.size : needed] == b"\0\0\0" else PrefixedDialect.CURSUS


class PrefixedReader:
    """Split bytes into frames: QB messages, or payloads of Cursus. `refusal` is the reason why no more can be read."""

    __slots__ = (
        "_frames_max",
        "_has_layout",
        "_has_total",
        "_have",
        "_needed",
        "_parts",
        "bytes_max",
        "dialect",
        "has_more",
        "refusal",
        "style",
    )

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX, *, frames_max: int | None = None) -> None:
        """`frames_max` limits the frames that one `feed` returns."""
        self.bytes_max = bytes_max
        self._frames_max = frames_max
        self.dialect: PrefixedDialect | None = None
        # The style of the peer, and whether its total and its layout are known. They do not change.
        self.style = Style()
        self._has_total = self._has_layout = False
        self.refusal: BadFrame | None = None
        # Pieces of an incomplete frame, joined when there are enough bytes.
        self._parts: list[bytes] = []
        self._have = 0
        self._needed = LENGTH.size
        # Whether complete frames are left, which another `feed`, also of no bytes, returns.
        self.has_more = False

    @property
    def expected(self) -> int:
        """Return the size of the frame being received; 0 if there is none, or it is not known yet."""
        return self._needed if self._have < self._needed and self.refusal is None else 0

    def clear(self) -> None:
        """Drop an incomplete frame: the connection has ended."""
        self._parts, self._have = [], 0

    def feed(self, data: bytes) -> list[QbMessage | bytes]:
        """Return the complete frames, up to `frames_max`: see `has_more`."""
        self.has_more = False
        if self.refusal is not None:
            return []
        if data:
            self._parts.append(data)
            self._have += len(data)
        if self._have < self._needed or not self._parts:
            return []
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        frames: list[QbMessage | bytes] = []
        at = 0
        try:
            while (size := self._size(data, at)) is not None:
                is_qb = self.dialect is PrefixedDialect.QB
                frames.append(self._message(data, at, size) if is_qb else data[at + LENGTH.size : at + size])
                at += size
                if len(frames) == self._frames_max:
                    self.has_more = True
                    self._needed = LENGTH.size
                    break
        except BadFrame as error:
            # Without the traceback, whose frames would keep the bytes alive.
            self.refusal = error.with_traceback(None)
            at = len(data)
        rest = data[at:]
        self._parts, self._have = [rest] if rest else [], len(rest)
        return frames

    def _size(self, data: bytes, at: int) -> int | None:
        """Return the size of the frame at `at`; None if it is incomplete, and then set `_needed`."""
        available = len(data) - at
        if available < LENGTH.size:
            self._needed = LENGTH.size
            return None
        length: int = LENGTH.unpack_from(data, at)[0]
        if self.dialect is None:
            self._needed = LENGTH.size + min(length, 3)
            self.dialect = find_dialect(data)
        if length > self.bytes_max:
            raise BadFrame(f"a frame of {length} bytes, {self.bytes_max} are allowed")
        if self.dialect is None:
            return None
        if self.dialect is PrefixedDialect.QB:
            return self._size_of_message(data, at, length)
        self._needed = LENGTH.size + length
        return self._needed if available >= self._needed else None

    def _size_of_message(self, data: bytes, at: int, total: int) -> int | None:
        if total < HEAD.size:
            raise BadFrame(f"a message of {total} bytes: {FIXED_BYTES} are the least")
        available = len(data) - at
        if available < HEAD.size:
            self._needed = HEAD.size
            return None
        properties: int = LENGTH.unpack_from(data, at + HEAD.size - 4)[0]
        if properties > total - HEAD.size:
            raise BadFrame("a message whose lengths do not agree")
        if available == HEAD.size:
            self._needed = HEAD.size + 1
            return None
        # A property name begins with a letter, and an allowed length with a byte below a blank.
        lengths_first = data[at + HEAD.size] < 0x20 if properties else self.style.lengths_first
        # The position of the body's length.
        place = HEAD.size + (0 if lengths_first else properties)
        if available < place + 4:
            self._needed = place + 4
            return None
        size: int = FIXED_BYTES + properties + LENGTH.unpack_from(data, at + place)[0]
        if size - total not in (0, LENGTH.size):
            raise BadFrame("a message whose lengths do not agree")
        style = Style(size == total, lengths_first)
        if (self._has_total and style.counts_itself != self.style.counts_itself) or (
            self._has_layout and style.lengths_first != self.style.lengths_first
        ):
            raise BadFrame("a message whose lengths do not agree")
        self.style, self._has_total, self._has_layout = style, True, self._has_layout or bool(properties)
        self._needed = size
        return size if available >= size else None

    def _message(self, data: bytes, at: int, size: int) -> QbMessage:
        _, kind, sequence, timestamp_ms, length = HEAD.unpack_from(data, at)
        begin = at + (FIXED_BYTES if self.style.lengths_first else HEAD.size)
        return QbMessage(
            kind, sequence, timestamp_ms, data[begin : begin + length], data[at + FIXED_BYTES + length : at + size]
        )
