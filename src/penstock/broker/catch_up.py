"""The partitions in which a subscription is behind, and the order in which it reads them.

It reads them in the order in which they were served (`broker/trail.py`). Messages that are not on the trail, because it
has dropped its first steps or because they were published before the subscription, come first, one partition after the
other: those below the partition's floor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.broker.cursor import Cursor
from penstock.broker.flow import Backlog
from penstock.broker.partition import Partition
from penstock.broker.trail import CatchUpTurns, Trail

# Delivers the next batch up to an offset, and returns whether to continue.
ReadNext = Callable[[Cursor, int], Awaitable[bool]]


class CatchUp:
    __slots__ = ("_floors", "_step", "_trail", "_turns", "backlogs", "cursors")

    def __init__(self, trail: Trail, turns: CatchUpTurns) -> None:
        self._trail = trail
        self._turns = turns
        # Where the subscription stopped.
        self.cursors: dict[Partition, Cursor] = {}
        # For a member that drops or sheds: the messages that it skips.
        self.backlogs: dict[Partition, Backlog] = {}
        self._floors: dict[Partition, int] = {}
        # The next step on the trail, after the floors.
        self._step = 0

    def add(self, cursor: Cursor) -> None:
        if not self.cursors:
            self._step = self._trail.join(self)
        self.cursors[cursor.partition] = cursor

    def raise_floor(self, partition: Partition, floor: int) -> None:
        self._floors[partition] = max(self._floors.get(partition, 0), floor)

    def forget(self, partition: Partition) -> None:
        self.cursors.pop(partition, None)
        self.backlogs.pop(partition, None)
        self._floors.pop(partition, None)
        if not self.cursors:
            self.end()

    def end(self) -> None:
        """The subscription is not behind any more."""
        for cursor in self.cursors.values():
            cursor.drop_ahead()
        self.cursors.clear()
        self.backlogs.clear()
        self._floors.clear()
        self._trail.leave(self)

    async def read_all(self, read_next: ReadNext) -> bool:
        """Read in the order in which the partitions were served. Return whether everything is delivered."""
        trail = self._trail
        while await self._read_floors(read_next):
            if self._step < trail.first:
                continue
            if self._step == trail.end:
                return True
            await self._turns.take()
            if self._step < trail.first:
                continue
            step = trail.step(self._step)
            if not await self._read_to(*step, read_next):
                return False
            # Meanwhile steps may have been dropped, and the last one may have grown.
            if self._step >= trail.first and trail.step(self._step) == step:
                if self._step + 1 == trail.end:
                    return True
                self._step += 1
        return False

    async def _read_floors(self, read_next: ReadNext) -> bool:
        """Read the messages that are not on the trail. Return whether all of them are delivered."""
        if self._step < self._trail.first:
            self._step = self._trail.first
            for partition in self.cursors:
                self.raise_floor(partition, self._trail.dropped(partition))
        for partition, floor in list(self._floors.items()):
            if not await self._read_to(partition, floor, read_next):
                return False
            if self._floors.get(partition) == floor:
                del self._floors[partition]
        return True

    async def _read_to(self, partition: Partition, until: int, read_next: ReadNext) -> bool:
        """Deliver the messages of a partition below an offset. Return whether all of them are delivered."""
        while (cursor := self.cursors.get(partition)) is not None:
            if cursor.offset >= (until if cursor.end is None else min(until, cursor.end)):
                return True
            if not await read_next(cursor, until):
                return False
        return True
