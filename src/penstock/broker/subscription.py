"""A subscription: a pattern, and the members that get what matches it from now on.

With one member it is a plain subscription, with more a NATS queue group: each message goes to one of them, and is done
when it is handed to its connection. Where patterns with one queue name overlap, the oldest subscription gets what
several match, so each message is delivered once for each queue name.

While the members keep up, a subscription has no position: it is handed what is committed. When they do not, it notes
where it stopped and reads on from there, from memory or disk, as fast as they take it; nobody else waits for it.

A member that leaves first gets what was published before, up to the ends that the logs had when it left: see `stop_at`.
One of a queue is put behind where messages are on their way, so that it can tell which of them are its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.broker.figures import Figures
from penstock.broker.flow import Backlog, Overflow
from penstock.broker.member import Member, share_out
from penstock.broker.partition import LivePartition, Partition, Waiting
from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.health import Health
from penstock.run import Run
from penstock.subject import matches

logger = logging.getLogger(__name__)


class Loop(Protocol):
    """Who runs what cannot be done at once."""

    clock: Clock
    figures: Figures
    health: Health

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def call_at(self, when_us: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """On the monotonic clock."""
        ...


@dataclass(slots=True, eq=False)
class _Wait:
    """A member's wait until it has the messages below these offsets; `done` is called once."""

    member: Member
    marks: dict[Waiting, int]
    done: Callable[[], None]


class Queue:
    """A subscription's place among those with its queue name: what is its own of the messages that it matches.

    While messages are handed out as they are committed, the interest index decides that (`choose_readers`). This is for
    a subscription that is behind: what it reads may have gone to an older one, which may have ended since.
    """

    __slots__ = ("_all", "_heirs", "_match", "_taken", "name", "number")

    def __init__(
        self,
        name: bytes,
        number: int,
        match: Callable[[bytes], tuple[Subscription, ...]],
        all_: Mapping[bytes, Subscription],
    ) -> None:
        """`number` ascends with age; `match` asks the interest index. `all_`: those with this name, by their patterns,
        the oldest first."""
        self.name = name
        self.number = number
        self._match = match
        self._all = all_
        # Of one that is not in the index any more: the patterns of the others at that time, and from where on each of
        # them gets what it matches, in each partition. One that comes later gets nothing that was published before.
        self._heirs: list[tuple[bytes, dict[Partition, int]]] | None = None
        # What older ones had before they ended: their patterns, and up to where in each partition.
        self._taken: list[tuple[bytes, dict[Partition, int]]] = []

    def leave(self, heirs: list[tuple[bytes, dict[Partition, int]]]) -> None:
        self._heirs = heirs

    def take(self, pattern: bytes, ends: dict[Partition, int]) -> None:
        self._taken.append((pattern, ends))

    def pass_on(self, partition: Partition | LivePartition, run: Run) -> None:
        """Give messages that no member wants, because it has published them, to the next that match."""
        younger = [reader for reader in self._all.values() if reader.queue and reader.queue.number > self.number]
        for index, subject in enumerate(run.subjects):
            for reader in younger:
                if matches(reader.pattern, subject):
                    reader.deliver(partition, run.select([index]))
                    break

    def forget(self) -> None:
        """Forget what others had: nothing of that is left to read."""
        self._taken.clear()

    def select(self, partition: Partition, run: Run) -> Run:
        """Return those of the messages that are the subscription's own."""
        indices = [
            index for index, subject in enumerate(run.subjects) if self._owns(partition, subject, run.offset(index))
        ]
        if len(indices) == len(run):
            return run
        return run.select(indices) if indices else Run([], [])

    def _owns(self, partition: Partition, subject: bytes, offset: int) -> bool:
        if any(offset < ends.get(partition, 0) and matches(pattern, subject) for pattern, ends in self._taken):
            return False
        if self._heirs is not None:
            return not any(
                offset >= begins.get(partition, 0) and matches(pattern, subject) for pattern, begins in self._heirs
            )
        others = (reader.queue for reader in self._match(subject) if reader.queue is not self)
        return not any(other is not None and other.name == self.name for other in others)


def choose_readers(found: tuple[Subscription, ...]) -> tuple[Subscription, ...]:
    """Leave out those that share a queue name with an older one."""
    oldest: dict[bytes, int] = {}
    for reader in found:
        if reader.queue is not None:
            oldest[reader.queue.name] = min(reader.queue.number, oldest.get(reader.queue.name, reader.queue.number))
    if not oldest:
        return found
    return tuple(reader for reader in found if reader.queue is None or oldest[reader.queue.name] == reader.queue.number)


class Subscription:
    __slots__ = (
        "_backlogs",
        "_is_ending",
        "_loop",
        "_reading",
        "_since_us",
        "_stops",
        "_turn",
        "_waits",
        "_watched",
        "_woken",
        "behind",
        "members",
        "pattern",
        "queue",
    )

    def __init__(self, pattern: bytes, loop: Loop, queue: Queue | None = None) -> None:
        self.pattern = pattern
        # What it has to know of others with its queue name; None: it is alone.
        self.queue = queue
        self.members: list[Member] = []
        self._loop = loop
        self._since_us = loop.clock.now_us()
        # Where it stopped, in each partition where it is behind.
        self.behind: dict[Partition, int] = {}
        # Of a member that does not want to wait: what it skips where it is behind.
        self._backlogs: dict[Partition, Backlog] = {}
        self._reading = False
        # While it reads, somebody got room: what was passed over for want of it is looked at again.
        self._woken = False
        self._turn = 0
        # Where it stops in each partition, and reads nothing of the others; None: nowhere.
        self._stops: dict[Waiting, int] | None = None
        # Whether that is its end.
        self._is_ending = False
        self._waits: list[_Wait] = []
        # Partitions that tell it what becomes of messages for which somebody waits.
        self._watched: set[Waiting] = set()

    def deliver(self, partition: Partition | LivePartition, run: Run) -> bool:
        """`run` was committed, and all of it matches; whether any of it went to a connection."""
        if self._is_ending and self._stops is not None:
            run = run.below(self._stops.get(partition, 0) if isinstance(partition, Waiting) else 0)
            if not run.values:
                return False
        if self.behind:
            if partition in self.behind:
                return False
            if self._stops is not None and not self._is_ending and isinstance(partition, Partition):
                self.behind[partition] = max(run.offset(0), partition.since.get(self, 0))
                return False
        if partition.since:
            begin = partition.since.get(self, 0)
            if run.end <= begin:
                return False
            if run.offset(0) < begin:
                run = run.select([index for index in range(len(run)) if run.offset(index) >= begin])
        shared = self._share_out(partition, run)
        if shared == len(run):
            return True
        if isinstance(partition, LivePartition):
            self._skipped(len(run) - shared)
        else:
            self.behind[partition] = run.offset(shared)
            self._wait()
            if shared and self._has_room():
                self.wake()
        return shared > 0

    def wake(self) -> None:
        """A member may have room again."""
        if self._reading:
            self._woken = True
        elif self.behind and any(member.sink.is_open for member in self.members):
            self._reading = True
            self._loop.spawn(self._read_on())

    async def drain(self) -> None:
        """Hand out what can be handed out now."""
        if self.behind and not self._reading:
            self._reading = True
            await self._read_on()

    def stop_at(self, member: Member, ends: dict[Waiting, int], done: Callable[[], None], *, is_final: bool) -> None:
        """Deliver what is below these offsets, where it is behind, and then nothing more until `go_on`.

        `done` is called then, or when the member has left; not if there is another `stop_at` meanwhile.
        """
        self._stops = ends
        self._is_ending = is_final

        def reached() -> None:
            if self._stops is ends:
                done()

        self.when_delivered(member, ends, reached)
        self.wake()

    def go_on(self) -> None:
        self._stops = None
        self.wake()

    def when_delivered(self, member: Member, marks: Mapping[Waiting, int], done: Callable[[], None]) -> None:
        """Call `done` once the messages below these offsets are delivered or gone, or the member has left."""
        self._waits.append(_Wait(member, dict(marks), done))
        for partition, mark in marks.items():
            if partition.served < mark:
                self._watched.add(partition)
                partition.groups[self._on_change] = None
        self._settle()

    def undelivered(self) -> Mapping[Waiting, int]:
        """Return up to where it has to deliver in each partition before it has caught up."""
        if self._stops is not None and self._is_ending:
            return self._stops
        stops = self._stops or {}
        return {partition: max(partition.served, stops.get(partition, 0)) for partition in self.behind}

    def leave(self, member: Member) -> None:
        """The member gets no more."""
        self.members.remove(member)
        if not self.members:
            self.behind.clear()
        self._finish([wait for wait in self._waits if wait.member is member])

    def _on_change(self) -> None:
        """Messages of a partition where somebody waits for more were committed, or taken back."""
        for partition in self._watched:
            # The offsets of what was taken back are given out again, for messages that are nobody's here.
            end = partition.end
            tables: list[dict[Any, int]] = [self.behind, self._stops or {}, *(wait.marks for wait in self._waits)]
            for marks in tables:
                if marks.get(partition, 0) > end:
                    marks[partition] = end
        self._settle()
        self.wake()

    def _settle(self) -> None:
        """Look whether somebody has waited long enough."""
        behind: dict[Any, int] = self.behind
        for wait in self._waits:
            for partition, mark in list(wait.marks.items()):
                if partition.is_closed or behind.get(partition, partition.served) >= mark:
                    del wait.marks[partition]
        self._finish([wait for wait in self._waits if not wait.marks])

    def _finish(self, waits: list[_Wait]) -> None:
        self._waits = [wait for wait in self._waits if wait not in waits]
        if not self._waits:
            for partition in self._watched:
                partition.groups.pop(self._on_change, None)
            self._watched.clear()
        for wait in waits:
            wait.done()

    def lag(self) -> int:
        return sum(partition.served - offset for partition, offset in self.behind.items())

    def _share_out(self, partition: Partition | LivePartition, run: Run) -> int:
        shares, shared = share_out(partition, run, self.members, self._turn, self._loop.clock.monotonic_us())
        self._turn += shared
        for share in shares:
            part = share.of(run)
            partition.sent += len(part)
            share.member.gets(partition, part)
        if self.queue is not None and not all(member.sink.echo for member in self.members):
            taken = {index for share in shares for index in (share.indices or range(len(run)))}
            if unwanted := [index for index in range(shared) if index not in taken]:
                self.queue.pass_on(partition, run.select(unwanted))
        return shared

    async def _read_on(self) -> None:
        try:
            self._woken = True
            while self._woken:
                self._woken = False
                for partition in list(self.behind):
                    while partition in self.behind and await self._read_next(partition):
                        pass
        except Exception as error:  # noqa: BLE001 - supervises one reader
            self.fail(error)
        finally:
            self._reading = False
        if self.behind:
            self._wait()
        elif self.queue is not None:
            self.queue.forget()

    def fail(self, error: Exception) -> None:
        """End it: its members are told why, or that it is a fault of the broker."""
        told = error if isinstance(error, PenstockError) else PenstockError("internal error")
        if told is not error:
            self._loop.health.fault("deliver", self.pattern.decode(errors="replace"), error)
        self.behind.clear()
        for member in list(self.members):
            try:
                member.sink.fail(member, told)
            except Exception as fault:  # noqa: BLE001 - the other members are told all the same
                self._loop.health.fault("deliver", member.sink.name, fault)

    async def _read_next(self, partition: Partition) -> bool:
        """Hand out the next batch; whether there is more and room for it."""
        behind = self.behind[partition]
        stop = None if self._stops is None else self._stops.get(partition, 0)
        if stop is not None and behind >= stop:
            return False
        offset = self._skip(partition, behind)
        found = await partition.read(offset)
        if self.behind.get(partition) != behind:
            return False
        if found is None:
            if offset >= partition.served and (stop is None or partition.is_closed):
                del self.behind[partition]
                self._backlogs.pop(partition, None)
                self._settle()
            return False
        run, following, expired = found
        if partition.start > offset:
            self._drop(partition.start - offset)
        until = self._backlogs[partition].until if partition in self._backlogs else None
        until = min((end for end in (until, stop) if end is not None), default=None)
        if until is not None and following > until:
            run, following = run.below(until), until
        run = select_matching(run, self.pattern)
        if self.queue is not None and run.values:
            run = self.queue.select(partition, run)
        shared = self._share_out(partition, run) if run.values else 0
        if shared:
            self._loop.figures.delivered(run, self._since_us)
        if partition in self.behind:  # unless what was handed out was the last that its member wanted
            upto = self.behind[partition] = following if shared == len(run) else run.offset(shared)
            self._loop.figures.expired += len(select_matching(expired.below(upto), self.pattern))
            self._settle()
        return shared == len(run) or (shared > 0 and self._has_room())

    def _skip(self, partition: Partition, offset: int) -> int:
        """Where to read, which is further on for one that is too far behind and does not want to wait."""
        flow = self.members[0].flow if len(self.members) == 1 else None
        if flow is None or flow.overflow is Overflow.BLOCK:
            return offset
        begin = self._backlogs.setdefault(partition, Backlog()).begin(flow, offset, partition.served)
        self._drop(begin - offset)
        return begin

    def _drop(self, count: int) -> None:
        self._skipped(count)
        if count:
            pattern = self.pattern.decode(errors="replace")
            logger.warning("a reader of %s is too slow: %d messages skipped", pattern, count)

    def _skipped(self, count: int) -> None:
        self._loop.figures.dropped += count
        for member in self.members:
            member.dropped += count

    def _has_room(self) -> bool:
        now_us = self._loop.clock.monotonic_us()
        return any(member.has_room(now_us) for member in self.members)

    def _wait(self) -> None:
        """Until a connection takes more, which wakes us, or a member's rate does."""
        now_us = self._loop.clock.monotonic_us()
        moments = [ready_us for member in self.members if (ready_us := member.ready_us(now_us)) is not None]
        if moments:
            self._loop.call_at(min(moments), self.wake)


def select_matching(run: Run, pattern: bytes) -> Run:
    """The messages whose subject matches."""
    if not run.values:
        return run
    subject = run.subject
    if subject is not None:
        return run if matches(pattern, subject) else Run([], [])
    known = {subject: matches(pattern, subject) for subject in set(run.subjects)}
    if all(known.values()):
        return run
    indices = [index for index, subject in enumerate(run.subjects) if known[subject]]
    return run.select(indices) if indices else Run([], [])
