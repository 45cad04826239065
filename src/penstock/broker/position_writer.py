"""Writes the positions of one group to the state topic.

An acknowledgement is confirmed when the position that contains it is stored. So after a crash only messages are
redelivered whose acknowledgement was not confirmed. All changes of one turn of the loop, and of the time that a write
takes, share a write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from penstock.awaiting import settled
from penstock.broker.partition import Partition
from penstock.broker.position import Position
from penstock.broker.subscription import Loop
from penstock.errors import PenstockError
from penstock.outcome import Outcome
from penstock.store.meta import Change
from penstock.store.state import Addition, StoreState

logger = logging.getLogger(__name__)

_KIND: Final = "position"
# How long a change that nobody waits for may remain unwritten, and the pause after a failed write.
_LATER_US: Final = 1_000_000


class PositionWriter:
    def __init__(self, group: bytes | None, state: StoreState, loop: Loop) -> None:
        """Of a group without a name nothing is written."""
        self._group = group
        self._state = state
        self._loop = loop
        self._unsaved: dict[Position[Partition], None] = {}
        self._waiting: list[Outcome] = []
        # Whether a write is in progress or scheduled.
        self._is_writing = False

    def key(self, partition: Partition) -> str:
        """Return the key of a position in the state topic."""
        assert self._group is not None
        return f"{self._group.decode()}/{partition.topic_id}/{partition.number}"

    def snapshots(self, positions: Iterable[Position[Partition]]) -> list[Change]:
        """Return the whole positions. The caller writes them in this turn of the loop, together with something else:
        later changes must be stored behind them."""
        now_us = self._loop.clock.monotonic_us()
        return [Change(_KIND, self.key(position.partition), position.to_json(now_us)) for position in positions]

    def removals(self, partitions: Iterable[Partition]) -> list[Change]:
        """Return what removes the positions in these partitions."""
        return [] if self._group is None else [Change(_KIND, self.key(each), None) for each in partitions]

    def is_unsaved(self, position: Position[Partition]) -> bool:
        """Return whether changes of a position may not be stored yet."""
        return self._is_writing or position in self._unsaved

    def save(self, position: Position[Partition], outcome: Outcome | None = None) -> None:
        """Write a position, together with all others that change in this turn of the loop."""
        if self._group is None:
            if outcome is not None:
                outcome.settle()
            return
        if outcome is not None:
            self._waiting.append(outcome)
        self._unsaved[position] = None
        if not self._is_writing:
            self._is_writing = True
            asyncio.get_running_loop().call_soon(self._write)

    async def saved(self, position: Position[Partition]) -> None:
        """Write a position, and wait until it is stored."""
        outcome = Outcome()
        self.save(position, outcome)
        await settled(outcome)

    def save_later(self, position: Position[Partition]) -> None:
        """Write a position that moved though nobody has acknowledged anything."""
        if self._group is not None and position not in self._unsaved:
            if not self._unsaved:
                self._loop.call_at(self._loop.clock.monotonic_us() + _LATER_US, self._write_later)
            self._unsaved[position] = None

    def forget(self, position: Position[Partition]) -> None:
        """Write nothing more of a position."""
        self._unsaved.pop(position, None)

    def _write_later(self) -> None:
        if self._unsaved and not self._is_writing:
            self._is_writing = True
            self._write()

    def _write(self) -> None:
        now_us = self._loop.clock.monotonic_us()
        positions = {position: None for position in self._unsaved if position.is_attached}
        self._unsaved = {}
        waiting, self._waiting = self._waiting, []
        changes: list[Change | Addition] = []
        for position in positions:
            record, is_whole = position.save(now_us)
            changes.append((Change if is_whole else Addition)(_KIND, self.key(position.partition), record))

        def written(error: PenstockError | None) -> None:
            for outcome in waiting:
                outcome.settle(error)
            if error is not None:
                logger.error("group %s: positions are not written, tried again: %s", self._group, error)
                self._unsaved = positions | self._unsaved
                for position in positions:
                    position.unsave()
            if self._waiting or (self._unsaved and error is None):
                self._write()
                return
            self._is_writing = False
            if self._unsaved:
                self._loop.call_at(self._loop.clock.monotonic_us() + _LATER_US, self._write_later)

        if not changes:
            written(None)
            return
        try:
            self._state.write(changes, Outcome(written))
        except PenstockError as error:
            written(error)
