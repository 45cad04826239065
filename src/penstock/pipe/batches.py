"""Read and check the stored batches that a pipe carries back to back."""

from __future__ import annotations

from typing import Final

from penstock.broker.topic import check_stored_lines
from penstock.errors import CorruptBatch
from penstock.model.batch import OFFSET_MAX, Batch, Buffer, size_at

CONTENT_TYPE: Final = "application/vnd.penstock.batches"


class BatchSplitter:
    """Split bytes into batches. It buffers at most one incomplete batch, whose size is limited."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Batch]:
        """Return the batches that are now complete, each with its own bytes and a checked header."""
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
        """Return whether no incomplete batch is buffered."""
        return not self._buffer


def check_stored(batch: Batch, topic: bytes) -> None:
    """Raise unless a batch that another broker stored in this topic can be stored and opened here."""
    if not batch.count or batch.end > OFFSET_MAX:
        raise CorruptBatch(f"invalid batch of {batch.count} messages at offset {batch.base_offset}")
    batch.columns().check()
    check_stored_lines(batch, topic)


def joined(batches: list[Batch]) -> bytes:
    parts: list[Buffer] = [batch.data for batch in batches]
    return b"".join(parts)
