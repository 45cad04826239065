"""Taking stored messages from one partition to where they belong, each once, whatever happens in between.

A move has a number, and says which message goes to which partition. That is written to the state topic first; then the
messages are appended to their targets under that number, which each target's log knows again. So whatever was
interrupted is simply done once more, and finds its messages where it put them. Moves that are done are folded into one
record now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Final, Protocol

from penstock.broker.partition import Partition
from penstock.broker.sources import append_once, source_number
from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.run import Run
from penstock.storage.meta import Change
from penstock.storage.store import Store

logger = logging.getLogger(__name__)

_KIND: Final = "moved"
# Moves that are kept one by one, before they are folded.
_MOVES_MAX: Final = 64

Place = tuple[int, int]  # the id of a topic, and a partition


class Host(Protocol):
    clock: Clock
    store: Store

    def partition(self, topic_id: int, number: int) -> Partition | None:
        """None if it is there no more."""
        ...


class Mover:
    def __init__(
        self,
        name: str,
        partition: Partition,
        host: Host,
        route: Callable[[Run], Awaitable[Partition]],
        shape: Callable[[Run], Run],
    ) -> None:
        """`name` is that of the mover in the state topic, for ever.

        `route` says where the one message of a run belongs, `shape` what it looks like there.
        """
        self.partition = partition
        self._name = name
        self._host = host
        self._route = route
        self._shape = shape
        self._source = source_number(_KIND, name)
        self._lock = asyncio.Lock()
        folded = host.store.state.get(_KIND, name) or {"number": 0, "floor": 0, "ranges": []}
        # All below the floor were moved, and these above it.
        self.floor: int = folded["floor"]
        self._moved: set[int] = {offset for first, last in folded["ranges"] for offset in range(first, last + 1)}
        self._number: int = folded["number"]
        # Moves that are not folded yet.
        self._numbers: list[int] = []
        # What is not known to have arrived, by target: number and offsets, in order.
        self._unfinished: dict[Place, list[tuple[int, list[int]]]] = {}
        self._restore()

    def _restore(self) -> None:
        prefix = f"{self._name}/"
        found = [(key, value) for key, value in self._host.store.state.items(_KIND) if key.startswith(prefix)]
        moves = {int(key.removeprefix(prefix)): value for key, value in found}
        for number in sorted(moves):
            self._begin(number, {(topic_id, partition): offsets for topic_id, partition, offsets in moves[number]})

    @property
    def is_finished(self) -> bool:
        """Whether all that was moved has arrived."""
        return not self._unfinished

    def is_moved(self, offset: int) -> bool:
        return offset < self.floor or offset in self._moved

    async def finish(self) -> None:
        """Do once more what may have been interrupted."""
        async with self._lock:
            for place in list(self._unfinished):
                await self._append(place)

    async def move(self, offsets: Sequence[int]) -> dict[int, PenstockError]:
        """Move these messages, in this order, unless they were before; those that cannot be, and why."""
        async with self._lock:
            failed: dict[int, PenstockError] = {}
            targets: dict[Place, list[int]] = {}
            for offset in dict.fromkeys(offsets):
                if self.is_moved(offset):
                    continue
                try:
                    run = await self._read(offset)
                    if run is not None:
                        target = await self._route(run)
                        place = (target.topic_id, target.number)
                        await self._append(place)
                        targets.setdefault(place, []).append(offset)
                except PenstockError as error:
                    failed[offset] = error
            if targets:
                await self._move(targets, failed)
            if len(self._numbers) >= _MOVES_MAX and not self._unfinished:
                await self._fold()
            return failed

    async def _move(self, targets: dict[Place, list[int]], failed: dict[int, PenstockError]) -> None:
        number = self._number + 1
        value = [[topic_id, partition, offsets] for (topic_id, partition), offsets in targets.items()]
        await self._host.store.write_state([Change(_KIND, f"{self._name}/{number}", value)])
        self._begin(number, targets)
        for place, offsets in targets.items():
            try:
                await self._append(place)
            except PenstockError as error:
                failed.update(dict.fromkeys(offsets, error))

    def _begin(self, number: int, targets: dict[Place, list[int]]) -> None:
        """From here on the messages count as moved: they will be."""
        self._number = number
        self._numbers.append(number)
        for place, offsets in targets.items():
            self._unfinished.setdefault(place, []).append((number, offsets))
            self._moved.update(offsets)
        while self.floor in self._moved:
            self._moved.remove(self.floor)
            self.floor += 1

    async def _append(self, place: Place) -> None:
        """Append what has not arrived at a target. Raises where the disk refuses; then it is tried again later."""
        unfinished = self._unfinished.get(place, [])
        while unfinished:
            number, offsets = unfinished[0]
            target = self._host.partition(*place)
            runs = [run for offset in offsets if (run := await self._read(offset)) is not None]
            # Gone with its topic, if that was deleted.
            if target is not None and runs:
                together = self._shape(runs[0])
                for run in runs[1:]:
                    together.extend(self._shape(run))
                await append_once(self._host, target, together, self._source, number)
            unfinished.pop(0)
        self._unfinished.pop(place, None)

    async def _read(self, offset: int) -> Run | None:
        """The message there; None if it is gone."""
        found = await self.partition.read(offset)
        if found is None or not found[0].values or found[0].offset(0) != offset:
            logger.warning("offset %d of %s is gone, and cannot be moved", offset, self.partition.name.decode())
            return None
        return found[0].select([0])

    async def _fold(self) -> None:
        """One record in place of many."""
        changes = [Change(_KIND, f"{self._name}/{number}", None) for number in self._numbers]
        folded = {"number": self._number, "floor": self.floor, "ranges": _ranges(self._moved)}
        await self._host.store.write_state([Change(_KIND, self._name, folded), *changes])
        self._numbers.clear()


def _ranges(offsets: set[int]) -> list[tuple[int, int]]:
    """First and last of each stretch without a gap."""
    found = []
    for _, stretch in groupby(enumerate(sorted(offsets)), key=lambda pair: pair[1] - pair[0]):
        members = [offset for _, offset in stretch]
        found.append((members[0], members[-1]))
    return found
