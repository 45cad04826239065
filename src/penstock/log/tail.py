"""Keeps the last batches in memory, so that a reader that keeps up never touches the disk.

All logs share one budget: the batch that was written first is dropped first, whichever log it belongs to.

Batches are here as they were appended, so `compacted` keeps readers from those that compaction has reached.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

from penstock.health import Usage
from penstock.model.batch import Batch

# The memory of a batch beside its bytes: objects, and entries in two lists and a deque.
_ENTRY_BYTES: Final = 400


class TailBudget:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        # The batches of all logs, oldest first: the tail, how often it had been cleared, and the size.
        self._order: deque[tuple[Tail, int, int]] = deque()

    def add(self, tail: Tail, clears: int, size: int) -> None:
        self._order.append((tail, clears, size))
        self._bytes += size
        while self._bytes > self._bytes_max:
            tail, clears, size = self._order.popleft()
            self._bytes -= size
            tail.drop(clears)

    @property
    def usage(self) -> Usage:
        return Usage(self._bytes, self._bytes_max)


class Tail:
    """The last batches of one log. Only the thread that appends may read it."""

    def __init__(self, budget: TailBudget) -> None:
        self._budget = budget
        self._clears = 0
        # Below this offset, compaction may have rewritten the segments.
        self.compacted = 0
        # Batches are dropped from the front: those before `_first` are gone.
        self._batches: list[Batch] = []
        self._offsets: list[int] = []
        self._first = 0

    def add(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._offsets.append(batch.base_offset)
        self._budget.add(self, self._clears, _ENTRY_BYTES + len(batch.data))

    def read(self, offset: int, bytes_max: int, committed: int) -> list[Batch] | None:
        """Read as `LogReader.read` does; None if the batch with `offset` is not here."""
        if offset < self.compacted:
            return None
        batches = self._batches
        place = bisect_right(self._offsets, offset, self._first) - 1
        if place < self._first:
            return None
        if batches[place].end <= offset:
            # `offset` is in a gap: the next batch follows it.
            place += 1
        found: list[Batch] = []
        taken = 0
        while place < len(batches):
            batch = batches[place]
            taken += len(batch.data)
            if batch.end > committed or (taken > bytes_max and found):
                break
            found.append(batch)
            place += 1
        return found

    def drop(self, clears: int) -> None:
        """Drop the oldest batch, unless `clear` did."""
        if clears != self._clears:
            return
        self._first += 1
        # The list is cut now and then: cutting it each time would move everything that is left.
        if self._first * 2 > len(self._batches):
            del self._batches[: self._first]
            del self._offsets[: self._first]
            self._first = 0

    def clear(self) -> None:
        self._clears += 1
        self._batches.clear()
        self._offsets.clear()
        self._first = 0
