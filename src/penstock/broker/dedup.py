"""The ids of messages that were stored not long ago, so that one sent again is not stored again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final
from weakref import WeakSet

from penstock.errors import PenstockError
from penstock.health import Usage

# The oldest are forgotten first, even within the window: in a topic, and in the topics that have most of all.
ENTRIES_MAX: Final = 100_000
BYTES_MAX: Final = 128 << 20
# Of an entry: an ID of at most 65 bytes, where it is, when it came, and their places in a dict and a deque.
ENTRY_BYTES: Final = 300
# The topics are counted again when so many IDs are new.
_UNCOUNTED_MAX: Final = 1000

# Called with the offset of a message, and why it is not stored after all.
Done = Callable[[int, PenstockError | None], None]


class DedupBudget:
    """What the IDs of all topics may take together."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # A topic that is deleted, or needs no IDs any more, drops out by itself.
        self._topics: WeakSet[Dedup] = WeakSet()
        self._uncounted = 0

    def join(self, dedup: Dedup) -> None:
        self._topics.add(dedup)

    def grow(self) -> None:
        """One more ID."""
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


class Dedup:
    """Times are those of the messages, in µs; they must not go back."""

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
        # When each id was stored, oldest first.
        self._order: deque[tuple[int, bytes]] = deque()
        # The ids of messages that wait for the disk, and who waits for the same: repetitions of them.
        self._on_the_way: dict[bytes, list[Done]] = {}

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
        else:
            self._budget.grow()

    def shrink(self) -> int:
        """Forget the oldest eighth; how many those are."""
        count = len(self._order) // 8 + 1
        for _ in range(count):
            self._offsets.pop(self._order.popleft()[1], None)
        return count

    def place(self, identity: bytes, offset: int) -> None:
        """Where a message that was added lies, now that it is known."""
        if identity in self._offsets:
            self._offsets[identity] = offset

    def get(self, identity: bytes) -> int | None:
        """As `find`, for who has asked already."""
        return self._offsets.get(identity)

    def expect(self, identities: Iterable[bytes]) -> None:
        """Messages with these ids, which were added, wait for the disk; `settle` tells what became of them."""
        for identity in identities:
            self._on_the_way.setdefault(identity, [])

    def wait(self, identity: bytes, done: Done) -> bool:
        """Call `done` with what becomes of the message that has this id; False if it is stored already."""
        waiting = self._on_the_way.get(identity)
        if waiting is None:
            return False
        waiting.append(done)
        return True

    def settle(self, identities: Iterable[bytes], error: PenstockError | None) -> None:
        """The messages with these ids are stored, or were taken back."""
        for identity in identities:
            waiting = self._on_the_way.pop(identity, [])
            if error is not None:
                self._forget(identity)
            for done in waiting:
                done(self._offsets.get(identity, 0), error)

    def _forget(self, identity: bytes) -> None:
        if self._offsets.pop(identity, None) is not None:
            # The last ones, most likely.
            for place in range(len(self._order) - 1, -1, -1):
                if self._order[place][1] == identity:
                    del self._order[place]
                    break

    def _expire(self, now_us: int) -> None:
        order = self._order
        while order and order[0][0] <= now_us - self.window_us:
            self._offsets.pop(order.popleft()[1], None)
