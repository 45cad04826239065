"""Stored batches back to back, as a pipe carries them: taken from bytes as they come, and checked."""

from __future__ import annotations

from typing import Final

from penstock.batch import OFFSET_MAX, Batch, Buffer, size_at
from penstock.broker.topic import check_stored_lines
from penstock.errors import CorruptBatch

CONTENT_TYPE: Final = "application/vnd.penstock.batches"


class BatchReader:
    """It holds one batch that is not complete, at the most: no more than a batch may have."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Batch]:
        """The batches that are complete now, each with bytes of its own, their headers checked."""
        buffer = self._buffer
        buffer += data
        found: list[Batch] = []
        at = 0
        while (size := size_at(buffer, at)) and size <= len(buffer) - at:
            found.append(Batch(buffer[at : at + size]))
            at += size
        del buffer[:at]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left over."""
        return not self._buffer


def check_stored(batch: Batch, topic: bytes) -> None:
    """Raise unless a batch that another broker stored in this topic can be stored and opened here."""
    if not batch.count or batch.end > OFFSET_MAX:
        raise CorruptBatch(f"a batch of {batch.count} messages at offset {batch.base_offset}")
    batch.columns().check()
    check_stored_lines(batch, topic)


def joined(batches: list[Batch]) -> bytes:
    parts: list[Buffer] = [batch.data for batch in batches]
    return b"".join(parts)
