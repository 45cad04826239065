"""Taking stored messages from one partition to where they belong, each once, whatever happens in between.

A move has a number and says which messages it takes. That is written to the state topic first; then the messages are
appended to their targets under that number, which each target's log knows again; so a move that was interrupted
is simply done once more. What was moved is folded into one record now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any, Final, Protocol

from penstock.broker.partition import Partition
from penstock.broker.sources import append_once, source_number
from penstock.clock import Clock
from penstock.run import Run
from penstock.storage.meta import Change
from penstock.storage.store import Store

logger = logging.getLogger(__name__)

_KIND: Final = "moved"
# Moves that are kept one by one, before they are folded.
_MOVES_MAX: Final = 256

# Where the one message of a run belongs, and what it is to look like there.
Target = Callable[[Run], Awaitable[tuple[Partition, Run]]]


class Host(Protocol):
    clock: Clock
    store: Store


class Mover:
    def __init__(self, name: str, partition: Partition, host: Host, target: Target) -> None:
        """`name` is that of the mover in the state topic, for ever."""
        self.partition = partition
        self._name = name
        self._host = host
        self._target = target
        self._source = source_number(_KIND, name)
        folded = host.store.state.get(_KIND, name) or {"number": 0, "floor": 0, "ranges": []}
        # All below the floor were moved, and these above it.
        self.floor: int = folded["floor"]
        self._moved: set[int] = {offset for first, last in folded["ranges"] for offset in range(first, last + 1)}
        self._number: int = folded["number"]
        self._moves: dict[int, list[int]] = {}
        self._unfinished: int | None = None
        self._restore()

    def _restore(self) -> None:
        prefix = f"{self._name}/"
        for key, offsets in self._host.store.state.items(_KIND):
            if key.startswith(prefix):
                self._moves[int(key.removeprefix(prefix))] = offsets
        for number in sorted(self._moves):
            self._number = number
            self._note(self._moves[number])
        if self._moves:
            # Of the last one nobody knows how far it came.
            self._unfinished = self._number

    def is_moved(self, offset: int) -> bool:
        return offset < self.floor or offset in self._moved

    async def finish(self) -> None:
        """Do once more what was interrupted."""
        if self._unfinished is not None:
            await self._append(self._unfinished, self._moves[self._unfinished])
            self._unfinished = None

    async def move(self, offsets: Sequence[int]) -> None:
        """Raises where the disk refuses; then nothing is lost, and the next call goes on with it."""
        await self.finish()
        fresh = sorted(offset for offset in set(offsets) if not self.is_moved(offset))
        if not fresh:
            return
        number = self._number + 1
        await self._host.store.write_state([Change(_KIND, f"{self._name}/{number}", fresh)])
        self._number = number
        self._moves[number] = fresh
        self._note(fresh)
        self._unfinished = number
        await self.finish()
        if len(self._moves) >= _MOVES_MAX:
            await self._fold()

    async def _append(self, number: int, offsets: list[int]) -> None:
        runs: dict[Partition, Run] = {}
        for offset in offsets:
            found = await self.partition.read(offset)
            if found is None or not found[0].values or found[0].offset(0) != offset:
                logger.warning("offset %d of %s is gone, and cannot be moved", offset, self.partition.name.decode())
                continue
            run = found[0].select([0])
            target, moved = await self._target(run)
            if target in runs:
                runs[target].extend(moved)
            else:
                runs[target] = moved
        for target, run in runs.items():
            await append_once(self._host, target, run, self._source, number)

    async def _fold(self) -> None:
        """One record in place of many."""
        changes = [Change(_KIND, f"{self._name}/{number}", None) for number in self._moves]
        folded = {"number": self._number, "floor": self.floor, "ranges": _ranges(self._moved)}
        await self._host.store.write_state([Change(_KIND, self._name, folded), *changes])
        self._moves.clear()

    def _note(self, offsets: list[int]) -> None:
        self._moved.update(offsets)
        while self.floor in self._moved:
            self._moved.remove(self.floor)
            self.floor += 1


def _ranges(offsets: set[int]) -> list[list[Any]]:
    """First and last of each stretch without a gap."""
    found = []
    for _, stretch in groupby(enumerate(sorted(offsets)), key=lambda pair: pair[1] - pair[0]):
        members = [offset for _, offset in stretch]
        found.append([members[0], members[-1]])
    return found
