"""Move stored messages from one partition to their targets, each exactly once.

A move is a decision: a record in the state topic names its messages and their targets. `broker/sources.py` describes
how its messages reach each target once, in several batches if they are too large for one. A decision that was
interrupted is completed later. Finished ones are folded into one record now and then.

A target that cannot take its messages delays only those: it is retried with backoff, and nothing more is decided for it
until it has taken them.

A decision can also drop messages, or do something else with them that is written together with it. Their target does
not exist then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from penstock.broker import sources
from penstock.broker.moves import DROPPED, ELSEWHERE, Moves
from penstock.broker.partition import Partition
from penstock.broker.position import PartitionId
from penstock.broker.sources import DecisionAppender, DecisionSource, expected
from penstock.broker.topic import Topics
from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.model.run import Run, message_bytes
from penstock.store.meta import Change
from penstock.store.store import Store

logger = logging.getLogger(__name__)

_KIND: Final = "moved"
# How long to wait after a target could not take its messages; it doubles with each further failure, up to a maximum.
RETRY_US: Final = 1_000_000
RETRY_US_MAX: Final = 30_000_000


class MoverHost(Protocol):
    """The broker, as far as messages are moved in it."""

    clock: Clock
    store: Store
    topics: Topics


class _Stuck(NamedTuple):
    """Why a target could not take its messages, and when to try again."""

    error: PenstockError
    retry_us: int
    delay_us: int


class Mover:
    def __init__(
        self,
        name: str,
        partition: Partition,
        host: MoverHost,
        route: Callable[[Run], Awaitable[Partition]],
        shape: Callable[[Run, Partition], Run],
    ) -> None:
        """`name` identifies the mover in the state topic. It must never change.

        `route` returns the target of the one message of a run, `shape` the message as it is stored there.
        """
        self.partition = partition
        self._name = name
        self._host = host
        self._route = route
        self._shape = shape
        self._source = DecisionSource(_KIND, name)
        self._lock = asyncio.Lock()
        self.moves = Moves(host.store.state.get(_KIND, name))
        self._stuck: dict[PartitionId, _Stuck] = {}
        self._restore()

    def _restore(self) -> None:
        prefix = f"{self._name}/"
        found = [(key, value) for key, value in self._host.store.state.items(_KIND) if key.startswith(prefix)]
        moves = {int(key.removeprefix(prefix)): value for key, value in found}
        for number in sorted(moves):
            targets = {(topic_id, partition): offsets for topic_id, partition, offsets in moves[number]}
            self.moves.begin(number, targets, self.partition.start)
            for place, offsets in targets.items():
                if self._has_arrived(place, number, len(offsets)):
                    self._end_first(place)

    def _has_arrived(self, place: PartitionId, number: int, count: int) -> bool:
        try:
            target = self._host.topics.partition(*place)
        except PenstockError:
            return False
        return target is None or self._appender(number).arrived(target) >= count

    @property
    def problem(self) -> PenstockError | None:
        """Why a target cannot take its messages, if one cannot."""
        return next((stuck.error for stuck in self._stuck.values()), None)

    def skip(self, first: int, last: int) -> None:
        """Count the offsets from `first` to `last` as moved: there is nothing to move."""
        self.moves.skip(first, last, self.partition.start)

    async def finish(self) -> None:
        """Complete what was decided, where the targets can take it now."""
        async with self._lock:
            await self._finish_all()

    async def move(self, offsets: Sequence[int], *, retry: bool = False) -> dict[int, PenstockError]:
        """Move these messages, in this order, unless they were moved before. Return why some have not arrived, by
        offset. `retry`: do not wait for the backoff of targets that failed."""
        async with self._lock:
            await self._finish_all(retry=retry)
            self.moves.check_ranges(self.partition.name.decode())
            failed: dict[int, PenstockError] = {}
            targets: dict[PartitionId, list[int]] = {}
            count = size = 0
            for index, offset in enumerate(dict.fromkeys(offsets)):
                await sources.pause(index)
                if self.moves.is_moved(offset):
                    continue
                try:
                    found = await self._plan(offset)
                except Exception as error:  # noqa: BLE001  a bug of ours delays this message only
                    failed[offset] = expected(error, self._host.store.health, "mover", f"{self._name}, offset {offset}")
                    continue
                if found is None:
                    self.skip(offset, offset)
                    continue
                place, added = found
                if count and (count >= sources.DECISION_MESSAGES_MAX or size + added > sources.DECISION_BYTES_MAX):
                    await self._move(targets)
                    targets, count, size = {}, 0, 0
                    if place in self._stuck:
                        failed[offset] = self._stuck[place].error
                        continue
                targets.setdefault(place, []).append(offset)
                count, size = count + 1, size + added
            if targets:
                await self._move(targets)
            await self._fold()
            late = {offset: self.moves.targets[offset] for offset in offsets if offset in self.moves.targets}
            return failed | {offset: self._stuck[place].error for offset, place in late.items()}

    async def drop(self, offsets: Sequence[int]) -> list[int]:
        """Drop these messages instead of moving them. Return those that were not moved or dropped before."""
        return await self._end(offsets, DROPPED, lambda _: [])

    async def replace(self, offsets: Sequence[int], changes: Callable[[Sequence[int]], list[Change]]) -> None:
        """Count these messages as moved, unless they were before. `changes` is called with some of them after the
        other, does something else with them, and returns what to write together with that decision."""
        await self._end(offsets, ELSEWHERE, changes)

    async def _end(
        self, offsets: Sequence[int], place: PartitionId, changes: Callable[[Sequence[int]], list[Change]]
    ) -> list[int]:
        async with self._lock:
            self.moves.check_ranges(self.partition.name.decode())
            left = [offset for offset in dict.fromkeys(offsets) if not self.moves.is_moved(offset)]
            for begin in range(0, len(left), sources.DECISION_MESSAGES_MAX):
                part = left[begin : begin + sources.DECISION_MESSAGES_MAX]
                number = self.moves.number + 1
                decision = Change(_KIND, f"{self._name}/{number}", [[*place, part]])
                await self._host.store.write_state([decision, *changes(part)])
                self.moves.begin(number, {place: part}, self.partition.start)
                self._end_first(place)
            await self._fold()
            return left

    async def _plan(self, offset: int) -> tuple[PartitionId, int] | None:
        """Return the target of a message and its size there, or None if it is gone. Raises if it cannot be moved now,
        before that is decided."""
        run = await self._read(offset)
        if run is None:
            return None
        target = await self._route(run)
        place = (target.topic_id, target.number)
        if place in self._stuck:
            raise self._stuck[place].error
        return place, message_bytes(self._shape(run, target), 0)

    async def _move(self, targets: dict[PartitionId, list[int]]) -> None:
        number = self.moves.number + 1
        value = [[topic_id, partition, offsets] for (topic_id, partition), offsets in targets.items()]
        await self._host.store.write_state([Change(_KIND, f"{self._name}/{number}", value)])
        self.moves.begin(number, targets, self.partition.start)
        for place in targets:
            await self._finish(place)

    def _end_first(self, place: PartitionId) -> None:
        """Finish the first decision for a target."""
        self.moves.finish_first(place)
        if place not in self.moves.unfinished:
            self._stuck.pop(place, None)

    async def _finish_all(self, *, retry: bool = False) -> None:
        for place in list(self.moves.unfinished):
            await self._finish(place, retry=retry)

    async def _finish(self, place: PartitionId, *, retry: bool = True) -> None:
        """Complete what was decided for a target. If that fails, the target is stuck until the next attempt."""
        now_us = self._host.clock.monotonic_us()
        stuck = self._stuck.get(place)
        if stuck is not None and now_us < stuck.retry_us and not retry:
            return
        try:
            while place in self.moves.unfinished:
                await self._append(place, *self.moves.unfinished[place][0])
                self._end_first(place)
        except Exception as error:  # noqa: BLE001  a bug of ours delays this target only
            what = f"{self._name}, topic {place[0]} partition {place[1]}"
            known = expected(error, self._host.store.health, "mover", what)
            delay_us = RETRY_US if stuck is None else min(2 * stuck.delay_us, RETRY_US_MAX)
            self._stuck[place] = _Stuck(known, now_us + delay_us, delay_us)

    async def _append(self, place: PartitionId, number: int, offsets: list[int]) -> None:
        target = self._host.topics.partition(*place)
        if target is None:
            return  # the messages are gone with their topic
        appender = self._appender(number)
        for index in range(await appender.begin(target), len(offsets)):
            await sources.pause(index)
            run = await self._read(offsets[index])
            if run is not None:
                await appender.add(target, index, self._shape(run, target))
        await appender.end()

    def _appender(self, number: int) -> DecisionAppender:
        return DecisionAppender(self._host.store, self._host.clock, self._source, number)

    async def _read(self, offset: int) -> Run | None:
        """Return the message there, or None if it is gone."""
        run = await self.partition.cursor(offset).read_message()
        if run is None:
            logger.warning("offset %d of %s is gone and cannot be moved", offset, self.partition.name.decode())
        return run

    async def _fold(self) -> None:
        """Write one record in place of many."""
        finished = self.moves.finished()
        if not finished:
            return
        changes = [Change(_KIND, f"{self._name}/{number}", None) for number in finished]
        try:
            await self._host.store.write_state([Change(_KIND, self._name, self.moves.fold()), *changes])
        except PenstockError as error:
            logger.warning("the records of finished moves of %s are compacted later: %s", self._name, error)
            return
        self.moves.folded()
