"""Move stored messages from one partition to their targets, each once, whatever happens in between.

A move is a decision: a record in the state topic names its messages and their targets. `broker/sources.py` describes
how its messages reach each target once, in several batches if they are too large for one. A decision that was
interrupted is completed later. Finished ones are folded into one record now and then.

A target that cannot take its messages delays only those: it is tried again after a while, and until it has taken what
was decided nothing more is decided for it.

Messages that are not to be moved any more are decided to go to a target that does not exist: they are dropped, or what
becomes of them is written together with the decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from penstock.broker import sources
from penstock.broker.partition import Partition
from penstock.broker.ranges import Ranges
from penstock.broker.sources import Completion, Source
from penstock.clock import Clock
from penstock.errors import BrokerError, Overloaded, PenstockError
from penstock.run import Run, message_bytes
from penstock.storage.meta import Change
from penstock.storage.store import Store

logger = logging.getLogger(__name__)

_KIND: Final = "moved"
# Finished moves that are kept one by one before they are folded. With many ranges to write, it takes more moves.
_MOVES_MAX: Final = 64
_RANGES_PER_MOVE: Final = 64
# A limit on the size of the folded record, about 10 MiB.
RANGES_MAX: Final = 400_000
# How long a target that could not take its messages is left alone: twice as long after each further failure.
RETRY_US: Final = 1_000_000
RETRY_US_MAX: Final = 30_000_000

Place = tuple[int, int]  # the id of a topic, and a partition
# Targets that do not exist: of messages that were dropped, and of those that something else was done with.
_DROPPED: Final[Place] = (-1, 0)
_ELSEWHERE: Final[Place] = (-1, 1)


class Host(Protocol):
    clock: Clock
    store: Store

    def partition(self, topic_id: int, number: int) -> Partition | None:
        """Return a partition, or None if it was deleted. Raises if it cannot be served."""
        ...


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
        host: Host,
        route: Callable[[Run], Awaitable[Partition]],
        shape: Callable[[Run, Partition], Run],
    ) -> None:
        """`name` identifies the mover in the state topic, for ever.

        `route` returns the target of the one message of a run, `shape` the message as it is stored there.
        """
        self.partition = partition
        self._name = name
        self._host = host
        self._route = route
        self._shape = shape
        self._source = Source(_KIND, name)
        self._lock = asyncio.Lock()
        folded = host.store.state.get(_KIND, name) or {"number": 0, "floor": 0, "ranges": []}
        # All messages below the floor were moved or are gone, and these above it. Moved means decided.
        self.floor: int = folded["floor"]
        self._moved = Ranges((first, last) for first, last in folded["ranges"])
        # Those of them that were dropped.
        self._dropped = Ranges((first, last) for first, last in folded.get("dropped", ()))
        self._number: int = folded["number"]
        # Moves that are not folded yet.
        self._numbers: list[int] = []
        # Messages that are not known to have arrived: by target the number and offsets of each decision, in order;
        # and the target of each.
        self._unfinished: dict[Place, list[tuple[int, list[int]]]] = {}
        self._on_the_way: dict[int, Place] = {}
        self._stuck: dict[Place, _Stuck] = {}
        self._restore()

    def _restore(self) -> None:
        prefix = f"{self._name}/"
        found = [(key, value) for key, value in self._host.store.state.items(_KIND) if key.startswith(prefix)]
        moves = {int(key.removeprefix(prefix)): value for key, value in found}
        for number in sorted(moves):
            targets = {(topic_id, partition): offsets for topic_id, partition, offsets in moves[number]}
            self._begin(number, targets)
            for place, offsets in targets.items():
                if self._has_arrived(place, number, len(offsets)):
                    self._end_first(place)

    def _has_arrived(self, place: Place, number: int, count: int) -> bool:
        try:
            target = self._host.partition(*place)
        except PenstockError:
            return False
        return target is None or Completion(self._host, self._source, number).arrived(target) >= count

    @property
    def needed_from(self) -> int:
        """The lowest offset that may have to be read again."""
        return min(self.floor, *self._on_the_way, self.floor)

    @property
    def waiting(self) -> int:
        """The number of messages that are decided and have not arrived."""
        return len(self._on_the_way)

    @property
    def problem(self) -> PenstockError | None:
        """Why a target cannot take its messages, if there is one that cannot."""
        return next((stuck.error for stuck in self._stuck.values()), None)

    def is_moved(self, offset: int) -> bool:
        """Return whether it is decided: the message will arrive, or has."""
        return offset < self.floor or offset in self._moved

    def has_arrived(self, offset: int) -> bool:
        return self.is_moved(offset) and offset not in self._on_the_way

    def is_dropped(self, offset: int) -> bool:
        return offset in self._dropped

    def skip(self, first: int, last: int) -> None:
        """There is nothing to move from offset `first` to `last`."""
        self._moved.add(first, last)
        self._raise_floor()

    async def finish(self) -> None:
        """Complete what was decided, where the targets can take it now."""
        async with self._lock:
            await self._finish_all()

    async def move(self, offsets: Sequence[int], *, retry: bool = False) -> dict[int, PenstockError]:
        """Move these messages, in this order, unless they were moved before. Return those that have not arrived, and
        why. `retry`: also try targets again that failed a moment ago."""
        async with self._lock:
            await self._finish_all(retry=retry)
            self._check_ranges()
            failed: dict[int, PenstockError] = {}
            targets: dict[Place, list[int]] = {}
            count = size = 0
            for index, offset in enumerate(dict.fromkeys(offsets)):
                await sources.pause(index)
                if self.is_moved(offset):
                    continue
                try:
                    found = await self._plan(offset)
                except Exception as error:  # noqa: BLE001  a bug of ours delays this message only
                    failed[offset] = self._expected(error, f"offset {offset}")
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
            late = {offset: self._on_the_way[offset] for offset in offsets if offset in self._on_the_way}
            return failed | {offset: self._stuck[place].error for offset, place in late.items()}

    async def drop(self, offsets: Sequence[int]) -> list[int]:
        """Never move these messages. Return them, without those that were moved or dropped before."""
        return await self._end(offsets, _DROPPED, lambda _: [])

    async def replace(self, offsets: Sequence[int], changes: Callable[[Sequence[int]], list[Change]]) -> None:
        """Count these messages as moved, unless they were before. `changes` does with some of them what is done
        instead, and returns what of it is written together with that decision."""
        await self._end(offsets, _ELSEWHERE, changes)

    async def _end(
        self, offsets: Sequence[int], place: Place, changes: Callable[[Sequence[int]], list[Change]]
    ) -> list[int]:
        async with self._lock:
            self._check_ranges()
            left = [offset for offset in dict.fromkeys(offsets) if not self.is_moved(offset)]
            for begin in range(0, len(left), sources.DECISION_MESSAGES_MAX):
                part = left[begin : begin + sources.DECISION_MESSAGES_MAX]
                number = self._number + 1
                decision = Change(_KIND, f"{self._name}/{number}", [[*place, part]])
                await self._host.store.write_state([decision, *changes(part)])
                self._begin(number, {place: part})
                self._end_first(place)
            await self._fold()
            return left

    def _check_ranges(self) -> None:
        count = len(self._moved) + len(self._dropped)
        if count > RANGES_MAX:
            raise Overloaded(
                f"messages of {self.partition.name.decode()} were moved from {count} separate ranges of"
                f" offsets, the limit is {RANGES_MAX}: move the oldest ones first"
            )

    async def _plan(self, offset: int) -> tuple[Place, int] | None:
        """Return the target of a message and its size there, or None if it is gone. Raises if it cannot be moved now:
        all that can go wrong with it alone does so here, before it is decided."""
        run = await self._read(offset)
        if run is None:
            return None
        target = await self._route(run)
        place = (target.topic_id, target.number)
        if place in self._stuck:
            raise self._stuck[place].error
        return place, message_bytes(self._shape(run, target), 0)

    async def _move(self, targets: dict[Place, list[int]]) -> None:
        number = self._number + 1
        value = [[topic_id, partition, offsets] for (topic_id, partition), offsets in targets.items()]
        await self._host.store.write_state([Change(_KIND, f"{self._name}/{number}", value)])
        self._begin(number, targets)
        for place in targets:
            await self._finish(place)

    def _begin(self, number: int, targets: dict[Place, list[int]]) -> None:
        """From here on the messages count as moved: they will be."""
        self._number = max(self._number, number)
        self._numbers.append(number)
        for place, offsets in targets.items():
            self._unfinished.setdefault(place, []).append((number, offsets))
            for offset in offsets:
                self._on_the_way[offset] = place
                self._moved.add(offset, offset)
                if place == _DROPPED:
                    self._dropped.add(offset, offset)
        self._raise_floor()

    def _end_first(self, place: Place) -> None:
        """The first unfinished decision for a target is complete."""
        _, offsets = self._unfinished[place].pop(0)
        for offset in offsets:
            self._on_the_way.pop(offset, None)
        if not self._unfinished[place]:
            del self._unfinished[place]
            self._stuck.pop(place, None)

    async def _finish_all(self, *, retry: bool = False) -> None:
        for place in list(self._unfinished):
            await self._finish(place, retry=retry)

    async def _finish(self, place: Place, *, retry: bool = True) -> None:
        """Complete what was decided for a target. If that fails, the target is stuck until the next try."""
        now_us = self._host.clock.monotonic_us()
        stuck = self._stuck.get(place)
        if stuck is not None and now_us < stuck.retry_us and not retry:
            return
        try:
            while place in self._unfinished:
                await self._append(place, *self._unfinished[place][0])
                self._end_first(place)
        except Exception as error:  # noqa: BLE001  a bug of ours delays this target only
            expected = self._expected(error, f"topic {place[0]} partition {place[1]}")
            delay_us = RETRY_US if stuck is None else min(2 * stuck.delay_us, RETRY_US_MAX)
            self._stuck[place] = _Stuck(expected, now_us + delay_us, delay_us)

    async def _append(self, place: Place, number: int, offsets: list[int]) -> None:
        target = self._host.partition(*place)
        if target is None:
            return  # the messages are gone with their topic
        completion = Completion(self._host, self._source, number)
        for index in range(await completion.begin(target), len(offsets)):
            await sources.pause(index)
            run = await self._read(offsets[index])
            if run is not None:
                await completion.add(target, index, self._shape(run, target))
        await completion.end()

    async def _read(self, offset: int) -> Run | None:
        """Return the message there, or None if it is gone."""
        run = await self.partition.message(offset)
        if run is None:
            logger.warning("offset %d of %s is gone and cannot be moved", offset, self.partition.name.decode())
        return run

    def _expected(self, error: Exception, where: str) -> PenstockError:
        """Return an error as one that a client can be told. An unexpected one is a fault of ours."""
        if isinstance(error, PenstockError):
            return error
        self._host.store.health.fault("mover", f"{self._name}, {where}", error)
        return BrokerError(f"internal error while messages of {self.partition.name.decode()} are moved: {error!r}")

    def _raise_floor(self) -> None:
        self.floor = self._moved.pop_below(max(self.floor, self.partition.start))
        self._dropped.drop_below(self.partition.start)

    async def _fold(self) -> None:
        """Write one record in place of many."""
        unfinished = {number for decisions in self._unfinished.values() for number, _ in decisions}
        finished = [number for number in self._numbers if number not in unfinished]
        if len(finished) < _MOVES_MAX + len(self._moved) // _RANGES_PER_MOVE:
            return
        changes = [Change(_KIND, f"{self._name}/{number}", None) for number in finished]
        folded = {
            "number": self._number,
            "floor": self.floor,
            "ranges": list(self._moved),
            "dropped": list(self._dropped),
        }
        try:
            await self._host.store.write_state([Change(_KIND, self._name, folded), *changes])
        except PenstockError as error:
            logger.warning("finished moves of %s are folded later: %s", self._name, error)
            return
        self._numbers = sorted(unfinished)
