"""Delayed messages: stored at once in an internal topic, and appended to their topics when they are due.

Upkeep removes the segments of the internal topic whose messages were all moved. One message that is due in a year would
keep all segments behind its own. So when the topic has grown to a multiple of the messages that wait in it, those in
the oldest segment are stored again at its end. They have new offsets then.

A message that is cancelled is dropped by the mover: see `mover.py`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable
from heapq import heapify, heappop, heappush, merge
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.broker.mover import RETRY_US, RETRY_US_MAX, Mover
from penstock.broker.partition import Partition
from penstock.broker.sources import pause
from penstock.broker.subscription import Loop
from penstock.broker.topic import Topics
from penstock.errors import LogDamaged, Overloaded, PenstockError
from penstock.health import Usage
from penstock.model import headers
from penstock.model.run import Run, message_bytes
from penstock.model.subject import matches
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.broker.changes import TopicChanges

DELAYED_TOPIC: Final = b"$delayed"
# Each takes some memory until it is due.
DELAYED_MAX: Final = 100_000
# Messages that are due within this time are moved together.
_TOGETHER_US: Final = 5_000
_MOVE_MAX: Final = 1000
# How many are sorted at once, in about a millisecond.
_SORT_MAX: Final = 2000
# How large the log may be, beyond twice the bytes that wait.
_SLACK_BYTES: Final = 64 << 20
_FOREVER_US: Final = 3600 * 1_000_000
# The name of problems in the health report.
_NAME: Final = "delayed messages"
_DUE: Final = b"Penstock-Due"


class DelaysHost(Loop, Protocol):
    """The broker, as far as messages are delayed in it."""

    store: Store
    topics: Topics
    changes: TopicChanges


class _Waiting(NamedTuple):
    """A message to move at a moment: when it is due, or when to retry."""

    moment_us: int
    due_us: int
    offset: int
    size: int


class Delayed(NamedTuple):
    """A message that waits: its offset in the internal topic, and when it is due, in µs since 1970."""

    offset: int
    due_us: int
    subject: bytes
    key: bytes | None
    message_id: bytes | None
    headers: bytes
    value: bytes


class DelayedFilter(NamedTuple):
    """Selects the delayed messages that meet every condition that is not None."""

    pattern: bytes = b">"
    message_id: bytes | None = None
    offsets: frozenset[int] | None = None

    def meets(self, message: Delayed) -> bool:
        return matches(self.pattern, message.subject) and self.message_id in (None, message.message_id)


_ALL: Final = DelayedFilter()


class Delays:
    def __init__(self, partition: Partition, host: DelaysHost) -> None:
        self.partition = partition
        self._host = host
        self._mover = Mover(f"delayed {partition.topic_id}", partition, host, self._route, self._shape)
        self._next = max(self._mover.moves.floor, partition.start)
        self._cursor = partition.cursor(self._next)
        # Held while new messages are read.
        self._looking = asyncio.Lock()
        # A heap of the messages that wait, and their bytes.
        self._due: list[_Waiting] = []
        self._bytes = 0
        # The attempts for each message that is due and cannot be moved, and why the last one failed.
        self._tries: dict[int, int] = {}
        self._error: PenstockError | None = None
        # The damage that was met last, if any.
        self._damage: PenstockError | None = None
        # Whether the mover stores messages again in the internal topic.
        self._is_trimming = False
        self._woken = asyncio.Event()
        partition.groups[self._woken.set] = None

    def __len__(self) -> int:
        """Return how many messages wait."""
        return len(self._due) + self.partition.end - self._next

    def refusal(self) -> PenstockError | None:
        """Return why no more messages can be delayed, if so."""
        if len(self) >= DELAYED_MAX:
            return Overloaded(f"{len(self)} messages are delayed, the limit is {DELAYED_MAX}")
        return None

    def usage(self) -> dict[str, Usage]:
        """Return how full each limited table is, by name."""
        return {"delayed_messages": Usage(len(self), DELAYED_MAX)}

    def delayed(self, run: Run, index: int, due_us: int) -> Run:
        """Return the message as it is stored until it is due."""
        late = run.select([index])
        block = headers.without(run.headers[index], b"delay", b"deliver-at", _DUE.lower())
        late.headers[0] = block + headers.lines(penstock_due=due_us)
        return late

    async def find(self, wanted: DelayedFilter = _ALL) -> AsyncIterator[Delayed]:
        """Yield messages that wait, in the order in which they are due."""
        await self._look()
        unsorted = self._due.copy()
        parts = []
        for begin in range(0, len(unsorted), _SORT_MAX):
            parts.append(sorted(unsorted[begin : begin + _SORT_MAX]))
            await asyncio.sleep(0)
        for index, waiting in enumerate(merge(*parts)):
            await pause(index)
            if wanted.offsets is not None and waiting.offset not in wanted.offsets:
                continue
            if self._mover.moves.is_moved(waiting.offset):
                continue
            run = await self.partition.cursor(waiting.offset).read_message()
            if run is not None and wanted.meets(message := _delayed(run, waiting)):
                yield message

    async def cancel(self, wanted: DelayedFilter) -> int:
        """Drop messages that wait, and return how many. A message that is being moved is not cancelled."""
        chosen = [message.offset async for message in self.find(wanted)]
        dropped = set(await self._mover.drop(chosen))
        self._due = [waiting for waiting in self._due if waiting.offset not in dropped]
        heapify(self._due)
        self._bytes = sum(waiting.size for waiting in self._due)
        for offset in dropped:
            self._tries.pop(offset, None)
        self._woken.set()
        return len(dropped)

    async def run(self) -> None:
        while True:
            # A wake-up from here on is not missed.
            self._woken.clear()
            errors = [await self._attempt(step) for step in (self._look, self._move, self._trim)]
            wait_us = self._report(next(filter(None, errors), None))
            moment_us = self._host.clock.monotonic_us() + max(wait_us, _TOGETHER_US)
            timer = self._host.call_at(moment_us, self._woken.set)
            await self._woken.wait()
            timer.cancel()

    async def _attempt(self, step: Callable[[], Awaitable[None]]) -> Exception | None:
        """Do one step, and return its error. An error in one step does not prevent the others."""
        try:
            await step()
        except PenstockError as error:
            return error
        except Exception as error:  # noqa: BLE001  a bug of ours must not end the timer
            self._host.store.health.fault("delays", step.__name__, error)
            return error
        return None

    def _report(self, error: Exception | None) -> int:
        """Report what prevents messages from being moved, and return how long to wait until the next attempt."""
        health = self._host.store.health
        reason = error or self._mover.problem or (self._error if self._tries else None)
        if self._damage is not None:
            path = self.partition.log.directory
            health.report(f"{_NAME}, damaged", f"{path}: {self._damage}: restore the file, and restart")
        if reason is None:
            health.clear(_NAME)
            return max(0, self._due[0].moment_us - self._host.clock.now_us()) if self._due else _FOREVER_US
        stuck = len(self._tries) + len(self._mover.moves.targets)
        health.report(_NAME, f"{stuck} that are due cannot be stored yet, and are retried: {reason}")
        return RETRY_US

    async def _look(self) -> None:
        """Read messages that were stored since the last time."""
        async with self._looking:
            while (found := await self._read()) is not None:
                run, following = found
                for index in range(len(run)):
                    await pause(index)
                    offset = run.offset(index)
                    self._skip(offset)
                    due = headers.value_of(run.headers.get(index, b""), _DUE)
                    if due is not None and due.isdigit() and not self._mover.moves.is_moved(offset):
                        self._wait(_Waiting(int(due), int(due), offset, message_bytes(run, index)))
                        self._next = offset + 1
                self._skip(following)

    async def _read(self) -> tuple[Run, int] | None:
        """Return the next messages, without damaged ones: those do not count as moved, so their segment remains."""
        while True:
            try:
                self._cursor.offset = self._next
                return await self._cursor.read_stored()
            except LogDamaged as error:
                if error.last is None:
                    raise
                self._damage, self._next = error, max(self._next, error.last)

    def _skip(self, offset: int) -> None:
        """Read on at `offset`: before it there is nothing else to move."""
        if offset > self._next:
            self._mover.skip(self._next, offset - 1)
            self._next = offset

    def _wait(self, waiting: _Waiting) -> None:
        heappush(self._due, waiting)
        self._bytes += waiting.size

    async def _move(self) -> None:
        """Move the messages that are due."""
        await self._mover.finish()
        while self._due and self._due[0].moment_us <= (now_us := self._host.clock.now_us()):
            due: list[_Waiting] = []
            while self._due and self._due[0].moment_us <= now_us and len(due) < _MOVE_MAX:
                due.append(heappop(self._due))
                self._bytes -= due[-1].size
            await self._hand_over(due)

    async def _hand_over(self, chosen: list[_Waiting]) -> None:
        """Move messages that were taken out of the heap. Those that cannot be moved are put back."""
        failed: dict[int, PenstockError] = {}
        try:
            failed = await self._mover.move([waiting.offset for waiting in chosen])
        finally:
            for waiting in chosen:
                if self._mover.moves.is_moved(waiting.offset):
                    self._tries.pop(waiting.offset, None)
                else:
                    self._wait(self._later(waiting, failed.get(waiting.offset)))

    def _later(self, waiting: _Waiting, error: PenstockError | None) -> _Waiting:
        """Return when to retry a message: with backoff, if there was an error for it alone."""
        if error is None:
            return waiting
        self._error = error
        tries = self._tries[waiting.offset] = self._tries.get(waiting.offset, 0) + 1
        retry_us = self._host.clock.now_us() + min(RETRY_US << min(tries - 1, 10), RETRY_US_MAX)
        return waiting._replace(moment_us=max(waiting.due_us, retry_us))

    async def _trim(self) -> None:
        """Let upkeep remove what was moved."""
        log = self.partition.log
        log.upkeep.unneeded = self._mover.moves.needed_from
        while oldest := self._oldest():
            moved = set(oldest)
            self._due = [waiting for waiting in self._due if waiting not in moved]
            heapify(self._due)
            self._bytes -= sum(waiting.size for waiting in oldest)
            self._is_trimming = True
            try:
                await self._hand_over(oldest)
            finally:
                self._is_trimming = False
            log.upkeep.unneeded = self._mover.moves.needed_from

    def _oldest(self) -> list[_Waiting]:
        """Return what to store again, so that the oldest segment can be removed; nothing if it may remain."""
        segments = self.partition.log.segments
        first = max(0, bisect_right(segments, self.partition.log.upkeep.unneeded, key=lambda segment: segment.base) - 1)
        size = sum(segment.size for segment in segments[first:])
        if first + 1 == len(segments) or size <= 2 * self._bytes + _SLACK_BYTES:
            return []
        return sorted(waiting for waiting in self._due if waiting.offset < segments[first + 1].base)

    async def _route(self, run: Run) -> Partition:
        if self._is_trimming:
            return self.partition
        topic = await self._host.changes.owner(run.subjects[0])
        return topic.choose(run.subjects[0], run.keys.get(0))

    def _shape(self, run: Run, target: Partition) -> Run:
        """Return the message as it was published, without what delayed it."""
        shaped = Run(run.subjects, run.values)
        shaped.keys, shaped.replies, shaped.tombstones = run.keys, run.replies, run.tombstones
        # The TTL begins when the message is due.
        shaped.ttls = run.ttls
        block = run.headers[0] if target is self.partition else headers.without(run.headers[0], _DUE.lower())
        if block:
            shaped.headers[0] = block
        return shaped


def _delayed(run: Run, waiting: _Waiting) -> Delayed:
    block = run.headers[0]
    own = headers.without(block, _DUE.lower())
    key = run.keys.get(0)
    return Delayed(waiting.offset, waiting.due_us, run.subjects[0], key, headers.identity(block), own, run.values[0])
