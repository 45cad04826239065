"""The order in which partitions were served, kept while a subscription is behind.

A subscription that keeps up receives messages in the order in which `broker/order.py` serves the partitions. One that
is behind reads the partitions itself, so it needs to know that order. The trail is a list of steps: this partition was
served up to this offset, then that one. It is kept only while a subscription is behind, and has a limited number of
steps: for a subscription that is further behind than that, only the order within each partition is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

from penstock.clock import Clock
from penstock.health import Usage

if TYPE_CHECKING:
    from penstock.broker.partition import Partition

# A step takes about 120 bytes.
STEPS_MAX: Final = 1 << 15
# Subscriptions that are behind read for so long in one turn of the event loop, all of them together.
TURN_US: Final = 5_000


class CatchUpTurns:
    """Shares each turn of the event loop among the subscriptions that are behind, so that nobody else waits for them.

    A step of the trail can be a single message, which costs 0.1 ms to read: dozens of readers with thousands of steps
    would block the loop for seconds.
    """

    def __init__(self, clock: Clock, turn_us: int = TURN_US) -> None:
        self._clock = clock
        self._turn_us = turn_us
        # When reading ends in this turn; None: it has not begun.
        self._until_us: int | None = None

    async def take(self) -> None:
        """Wait for a later turn of the loop while this one has read enough."""
        while True:
            now_us = self._clock.monotonic_us()
            if self._until_us is None:
                self._until_us = now_us + self._turn_us
                asyncio.get_running_loop().call_soon(self._end)
            if now_us < self._until_us:
                return
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._until_us = None


class Trail:
    def __init__(self, steps_max: int = STEPS_MAX) -> None:
        self._steps_max = steps_max
        self._steps: list[tuple[Partition, int]] = []
        # The number of the first step that is kept.
        self.first = 0
        # How far each partition had been served by the steps that are not kept any more.
        self._dropped: dict[Partition, int] = {}
        self._readers: set[Hashable] = set()
        # Whether the last step may still grow: not if a reader begins behind it.
        self._is_open = False

    @property
    def end(self) -> int:
        """The number that the next step gets."""
        return self.first + len(self._steps)

    def join(self, reader: Hashable) -> int:
        """Keep the steps from now on for a reader. Return the number of the first of them."""
        self._readers.add(reader)
        self._is_open = False
        return self.end

    def leave(self, reader: Hashable) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self.first = self.end
            self._is_open = False
            self._steps.clear()
            self._dropped.clear()

    def note(self, partition: Partition) -> None:
        """The partition was served, up to its `served`."""
        if not self._readers:
            return
        if self._is_open and self._steps[-1][0] is partition:
            self._steps[-1] = (partition, partition.served)
            return
        self._steps.append((partition, partition.served))
        self._is_open = True
        if len(self._steps) > self._steps_max:
            # Many at once: to remove the first one of a list moves all the others.
            count = len(self._steps) // 2
            self._dropped.update(self._steps[:count])
            del self._steps[:count]
            self.first += count

    def step(self, number: int) -> tuple[Partition, int]:
        """Return a step: a partition, and up to where it was served. The last step may still grow."""
        return self._steps[number - self.first]

    def dropped(self, partition: Partition) -> int:
        """Return up to where steps that are not kept any more had served a partition."""
        return self._dropped.get(partition, 0)

    @property
    def usage(self) -> Usage:
        return Usage(len(self._steps), self._steps_max)
