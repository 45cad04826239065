"""A sparse index of one segment: where a batch begins, at least every 4 KiB.

It is kept in memory while the segment is written, and saved beside it when the segment is sealed:

    "PIDX" · u16 version · u16 0 · u32 crc32c of what follows · u32 entries · u64 bytes of the log it speaks of
    i64 offset[entries] · i64 position[entries] · i64 append time[entries]

It is never trusted: a file that does not fit its log is not loaded, and a reader that does not find at a
position what the index promised has it built again from the log.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from typing import Final

from crc32c import crc32c

from penstock.model.batch import Batch

INDEX_EVERY_BYTES: Final = 4096
_HEADER: Final = struct.Struct("<4sHHIIQ")
_CRC: Final = slice(12, None)
_MAGIC: Final = b"PIDX"
_VERSION: Final = 1
_ENTRY_BYTES: Final = 24


class OffsetIndex:
    __slots__ = ("_next_position", "_offsets", "_positions", "_times")

    def __init__(self) -> None:
        self._offsets: array[int] = array("q")
        self._positions: array[int] = array("q")
        self._times: array[int] = array("q")
        self._next_position = 0

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def memory_bytes(self) -> int:
        return _ENTRY_BYTES * len(self._offsets)

    def add(self, batch: Batch, position: int) -> None:
        """Add the next batch of the log. It gets an entry if the last one is far enough back."""
        if position >= self._next_position:
            self._next_position = position + INDEX_EVERY_BYTES
            self._positions.append(position)
            self._times.append(batch.append_time)
            # Last: a reader in another thread searches the offsets, then takes the same place of the other columns.
            self._offsets.append(batch.base_offset)

    def interrupt(self) -> None:
        """Give the next batch an entry, because nobody can walk over the bytes before it."""
        self._next_position = 0

    def floor(self, offset: int) -> tuple[int, int | None]:
        """Return a position from which walking forward finds the batch with `offset`, and the offset of the batch
        there, or None if it is not known."""
        place = bisect_right(self._offsets, offset) - 1
        return (self._positions[place], self._offsets[place]) if place >= 0 else (0, None)

    def ceiling(self, position: int) -> int | None:
        """Return the offset of the first indexed batch at or behind `position`."""
        place = bisect_left(self._positions, position)
        return self._offsets[place] if place < len(self._offsets) else None

    def position_at(self, append_time: int) -> int:
        """Return a position from which walking forward finds the first batch of this time or later."""
        place = bisect_left(self._times, append_time) - 1
        return self._positions[place] if place >= 0 else 0

    def last_position(self) -> int:
        return self._positions[-1] if self._positions else 0

    def encode(self, log_bytes: int) -> bytes:
        columns = b"".join((self._offsets.tobytes(), self._positions.tobytes(), self._times.tobytes()))
        data = bytearray(_HEADER.size) + columns
        _HEADER.pack_into(data, 0, _MAGIC, _VERSION, 0, 0, len(self), log_bytes)
        _HEADER.pack_into(data, 0, _MAGIC, _VERSION, 0, crc32c(memoryview(data)[_CRC]), len(self), log_bytes)
        return bytes(data)

    @classmethod
    def decode(cls, data: bytes, log_bytes: int) -> OffsetIndex | None:
        """Return the saved index, or None if it is damaged or belongs to other bytes."""
        if len(data) < _HEADER.size:
            return None
        magic, version, _, crc, entries, indexed_bytes = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or indexed_bytes != log_bytes:
            return None
        if len(data) != _HEADER.size + _ENTRY_BYTES * entries or crc32c(memoryview(data)[_CRC]) != crc:
            return None
        index = cls()
        columns = (index._offsets, index._positions, index._times)
        for number, column in enumerate(columns):
            at = _HEADER.size + 8 * entries * number
            column.frombytes(data[at : at + 8 * entries])
        return index if index._is_in_order(log_bytes) else None

    def _is_in_order(self, log_bytes: int) -> bool:
        for column in (self._offsets, self._positions, self._times):
            entries = column.tolist()
            if entries != sorted(entries):
                return False
        return not self or (self._positions[0] == 0 and self._positions[-1] < log_bytes)
