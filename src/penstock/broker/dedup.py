"""The ids of messages that were stored not long ago, so that one sent again is not stored again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

# The oldest are forgotten first, even within the window: it bounds memory to some 20 MB a partition.
ENTRIES_MAX: Final = 100_000


class Dedup:
    """Times are those of the messages, in µs; they must not go back."""

    __slots__ = ("_offsets", "_order", "checked", "entries_max", "found", "window_us")

    def __init__(self, window_us: int, entries_max: int = ENTRIES_MAX) -> None:
        self.window_us = window_us
        self.entries_max = entries_max
        self.checked = 0
        self.found = 0
        self._offsets: dict[bytes, int] = {}
        # When each id was stored, oldest first.
        self._order: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._offsets)

    def find(self, identity: bytes, now_us: int) -> int | None:
        """Where a message with this id is stored, if it came within the window."""
        self._expire(now_us)
        self.checked += 1
        offset = self._offsets.get(identity)
        self.found += offset is not None
        return offset

    def add(self, identity: bytes, offset: int, now_us: int) -> None:
        self._expire(now_us)
        if identity in self._offsets:
            return
        self._offsets[identity] = offset
        self._order.append((now_us, identity))
        if len(self._order) > self.entries_max:
            self._offsets.pop(self._order.popleft()[1], None)

    def forget(self, identities: Iterable[bytes]) -> None:
        """The messages with these ids were taken back."""
        gone = {identity for identity in identities if self._offsets.pop(identity, None) is not None}
        if gone:
            self._order = deque(entry for entry in self._order if entry[1] not in gone)

    def _expire(self, now_us: int) -> None:
        order = self._order
        while order and order[0][0] <= now_us - self.window_us:
            self._offsets.pop(order.popleft()[1], None)
