"""The IDs of messages that were stored recently, so that duplicates are not stored again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final
from weakref import WeakSet

from penstock.errors import PenstockError
from penstock.health import Usage
from penstock.outcome import Outcome

# The oldest IDs are forgotten first, even within the window: in a topic, and in the topic that has the most.
ENTRIES_MAX: Final = 100_000
BYTES_MAX: Final = 128 << 20
# What an entry takes: an ID of at most 65 bytes, an offset and a time, in a dict and a deque.
ENTRY_BYTES: Final = 300
# The topics are counted again after this many new IDs.
_UNCOUNTED_MAX: Final = 1000


class DedupBudget:
    """Limits the memory of the IDs of all topics together."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # A topic is removed when it is deleted, or needs no IDs any more.
        self._topics: WeakSet[DedupWindow] = WeakSet()
        self._uncounted = 0

    def join(self, dedup: DedupWindow) -> None:
        self._topics.add(dedup)

    def grow(self) -> None:
        """Count a new ID."""
        self._uncounted += 1
        if self._uncounted < _UNCOUNTED_MAX:
            return
        self._uncounted = 0
        excess = self.usage.used - self._bytes_max
        while excess > 0:
            excess -= ENTRY_BYTES * max(self._topics, key=len).shrink()

    @property
    def usage(self) -> Usage:
        return Usage(ENTRY_BYTES * sum(map(len, self._topics)), self._bytes_max)


class DedupWindow:
    """Times are those of the messages, in µs. They must not decrease."""

    __slots__ = (
        "__weakref__",
        "_budget",
        "_offsets",
        "_on_the_way",
        "_order",
        "checked",
        "entries_max",
        "found",
        "window_us",
    )

    def __init__(self, window_us: int, entries_max: int = ENTRIES_MAX, budget: DedupBudget | None = None) -> None:
        self._budget = budget or DedupBudget()
        self._budget.join(self)
        self.window_us = window_us
        self.entries_max = entries_max
        self.checked = 0
        self.found = 0
        self._offsets: dict[bytes, int] = {}
        # When each ID was stored, oldest first.
        self._order: deque[tuple[int, bytes]] = deque()
        # The IDs of messages that wait for the disk, and the outcomes of their duplicates.
        self._on_the_way: dict[bytes, list[Outcome]] = {}

    def __len__(self) -> int:
        return len(self._offsets)

    def find(self, identity: bytes, now_us: int) -> int | None:
        """Return the offset of the message with this ID, if it was stored within the window."""
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
        else:
            self._budget.grow()

    def shrink(self) -> int:
        """Forget the oldest eighth of the IDs, and return their number."""
        count = len(self._order) // 8 + 1
        for _ in range(count):
            self._offsets.pop(self._order.popleft()[1], None)
        return count

    def place(self, identity: bytes, offset: int) -> None:
        """Set the offset of a message that was added before its offset was known."""
        if identity in self._offsets:
            self._offsets[identity] = offset

    def get(self, identity: bytes) -> int | None:
        """As `find`, without counting."""
        return self._offsets.get(identity)

    def expect(self, identities: Iterable[bytes]) -> None:
        """Note that messages with these IDs, which were added, wait for the disk until `settle` is called."""
        for identity in identities:
            self._on_the_way.setdefault(identity, [])

    def wait(self, identity: bytes, outcome: Outcome) -> bool:
        """Settle `outcome` together with the message that has this ID. Return False if it is stored already."""
        waiting = self._on_the_way.get(identity)
        if waiting is None:
            return False
        waiting.append(outcome)
        return True

    def settle(self, identities: Iterable[bytes], error: PenstockError | None) -> None:
        """Settle the duplicates of messages that are stored, or failed."""
        for identity in identities:
            waiting = self._on_the_way.pop(identity, [])
            if error is not None:
                self._forget(identity)
            for outcome in waiting:
                outcome.settle(error)

    def _forget(self, identity: bytes) -> None:
        if self._offsets.pop(identity, None) is not None:
            # It is most likely one of the last.
            for place in range(len(self._order) - 1, -1, -1):
                if self._order[place][1] == identity:
                    del self._order[place]
                    break

    def _expire(self, now_us: int) -> None:
        order = self._order
        while order and order[0][0] <= now_us - self.window_us:
            self._offsets.pop(order.popleft()[1], None)
