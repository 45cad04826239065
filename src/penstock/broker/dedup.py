"""The ids of messages that were stored not long ago, so that one sent again is not stored again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from penstock.errors import PenstockError

# The oldest are forgotten first, even within the window: it bounds memory to some 20 MB a topic.
ENTRIES_MAX: Final = 100_000

# Called with the offset of a message, and why it is not stored after all.
Done = Callable[[int, PenstockError | None], None]


class Dedup:
    """Times are those of the messages, in µs; they must not go back."""

    __slots__ = ("_offsets", "_on_the_way", "_order", "checked", "entries_max", "found", "window_us")

    def __init__(self, window_us: int, entries_max: int = ENTRIES_MAX) -> None:
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
