"""Messages for later: stored at once, in a topic of the broker's own, and appended to theirs when they are due."""

from __future__ import annotations

import asyncio
import logging
from heapq import heappop, heappush
from typing import Final, Protocol

from penstock import headers
from penstock.broker.mover import Mover
from penstock.broker.partition import Partition
from penstock.broker.subscription import Loop
from penstock.broker.topic import ServedTopic
from penstock.errors import Overloaded, PenstockError
from penstock.run import Run
from penstock.storage.store import Store

logger = logging.getLogger(__name__)

DELAYED_TOPIC: Final = b"$delayed"
# Each takes some memory until it is due.
DELAYED_MAX: Final = 100_000
# Those that are due within so short a time go together.
_TOGETHER_US: Final = 5_000
_MOVE_MAX: Final = 1000
_RETRY_US: Final = 1_000_000
_DUE: Final = b"Penstock-Due"


class Host(Loop, Protocol):
    store: Store

    async def owner(self, subject: bytes) -> ServedTopic:
        """The topic that stores a subject, made if need be."""
        ...

    def partition(self, topic_id: int, number: int) -> Partition | None: ...


class Delays:
    def __init__(self, partition: Partition, host: Host) -> None:
        self.partition = partition
        self._host = host
        self._mover = Mover(f"delayed {partition.topic_id}", partition, host, self._route, self._shape)
        self._next = max(self._mover.floor, partition.start)
        # When each is due, and where it is stored.
        self._due: list[tuple[int, int]] = []
        self._woken = asyncio.Event()
        partition.groups[self._woken.set] = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._due) + self.partition.end - self._next

    def refusal(self) -> PenstockError | None:
        """Why no more can be delayed, if so."""
        if len(self) >= DELAYED_MAX:
            return Overloaded(f"{len(self)} messages are delayed: no more than {DELAYED_MAX} can be")
        return None

    def delayed(self, run: Run, index: int, due_us: int) -> Run:
        """The message as it is stored until then."""
        late = run.select([index])
        block = headers.without(run.headers[index], b"delay", b"deliver-at", _DUE.lower())
        late.headers[0] = block + headers.lines(penstock_due=due_us)
        return late

    async def run(self) -> None:
        while True:
            # Whoever wakes us from here on is heard.
            self._woken.clear()
            wait_us = _RETRY_US
            try:
                await self._mover.finish()
                await self._look()
                wait_us = await self._move()
            except PenstockError as error:
                logger.error("delayed messages that are due cannot be stored, tried again: %s", error)
            moment_us = self._host.clock.monotonic_us() + max(wait_us, _TOGETHER_US)
            timer = self._host.call_at(moment_us, self._woken.set)
            await self._woken.wait()
            timer.cancel()

    async def _look(self) -> None:
        """Take note of those that were stored since the last time."""
        while (found := await self.partition.read(self._next)) is not None:
            run, self._next = found
            for index in range(len(run)):
                due = headers.value_of(run.headers.get(index, b""), _DUE)
                if due is not None and due.isdigit() and not self._mover.is_moved(run.offset(index)):
                    heappush(self._due, (int(due), run.offset(index)))

    async def _move(self) -> int:
        """Move those that are due; how long until the next is."""
        while self._due:
            now_us = self._host.clock.now_us()
            if self._due[0][0] > now_us:
                wait_us = self._due[0][0] - now_us
                return wait_us if self._mover.is_finished else min(wait_us, _RETRY_US)
            due: dict[int, int] = {}
            while self._due and self._due[0][0] <= now_us and len(due) < _MOVE_MAX:
                due_us, offset = heappop(self._due)
                due[offset] = due_us
            try:
                failed = await self._mover.move(list(due))
            except PenstockError:
                for offset, due_us in due.items():
                    heappush(self._due, (due_us, offset))
                raise
            for offset, error in failed.items():
                logger.error("a delayed message that is due cannot be stored, tried again: %s", error)
                if not self._mover.is_moved(offset):
                    heappush(self._due, (now_us + _RETRY_US, offset))
        return 3600 * 1_000_000 if self._mover.is_finished else _RETRY_US

    async def _route(self, run: Run) -> Partition:
        topic = await self._host.owner(run.subjects[0])
        topic.turn()
        return topic.choose(run.subjects[0], run.keys.get(0))

    def _shape(self, run: Run) -> Run:
        """The message as it was published, but for what delayed it."""
        shaped = Run(run.subjects, run.values)
        shaped.keys, shaped.replies, shaped.tombstones = run.keys, run.replies, run.tombstones
        block = headers.without(run.headers[0], _DUE.lower())
        if block:
            shaped.headers[0] = block
        return shaped
