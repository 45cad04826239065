"""A subscription: a pattern, and the members that get the messages that match it from now on.

With one member it is a plain subscription, with more a NATS queue group: each message goes to one of them, and is done
when it is handed to its connection. If patterns with one queue name overlap, the oldest subscription gets the
messages that several match, so each message is delivered once per queue name.

While the members keep up, a subscription has no position: it is handed each committed run. When they do not, it is
behind (`broker/catch_up.py`): it has a cursor for each partition and reads, from memory or disk, as fast as they accept
messages; nobody else waits for it. It is handed no stored messages before it has caught up with all partitions.

A member that leaves first gets the messages that were published before, up to the ends that the logs had when it left:
see `stop_at`. If others have its queue name, it is put behind where messages are not committed yet, so that it can
select its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from penstock.broker.catch_up import CatchUp
from penstock.broker.cursor import Cursor
from penstock.broker.delivery_waits import DeliveryWaits
from penstock.broker.figures import Figures
from penstock.broker.flow import Backlog, Overflow
from penstock.broker.member import Member, share_out
from penstock.broker.partition import LivePartition, Partition, Waiting
from penstock.broker.trail import CatchUpTurns, Trail
from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.health import Health
from penstock.model.run import Run
from penstock.model.subject import matches

logger = logging.getLogger(__name__)


class Loop(Protocol):
    """Runs tasks and timers for subscriptions and groups."""

    clock: Clock
    figures: Figures
    health: Health
    trail: Trail
    catch_up_turns: CatchUpTurns

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def call_at(self, when_us: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """On the monotonic clock."""
        ...


class Queue:
    """A subscription's place among those with its queue name: which of the matching messages are its own.

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
        # them gets what it matches, in each place. One that comes later gets nothing that was published before.
        self._heirs: list[tuple[bytes, dict[Waiting, int]]] | None = None
        # The messages of older ones that have ended: their patterns, and up to where in each partition.
        self._taken: list[tuple[bytes, dict[Waiting, int]]] = []

    def leave(self, heirs: list[tuple[bytes, dict[Waiting, int]]]) -> None:
        self._heirs = heirs

    def take(self, pattern: bytes, ends: dict[Waiting, int]) -> None:
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

    def select(self, place: Waiting, run: Run) -> Run:
        """Return those of the messages that are the subscription's own."""
        indices = [index for index, subject in enumerate(run.subjects) if self._owns(place, subject, run.offset(index))]
        if len(indices) == len(run):
            return run
        return run.select(indices) if indices else Run([], [])

    def _owns(self, place: Waiting, subject: bytes, offset: int) -> bool:
        if any(offset < ends.get(place, 0) and matches(pattern, subject) for pattern, ends in self._taken):
            return False
        if self._heirs is not None:
            return not any(
                offset >= begins.get(place, 0) and matches(pattern, subject) for pattern, begins in self._heirs
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
    """It has more than 25 methods because it implements two interfaces: what the broker and the doors call, and the
    reader that `DeliveryWaits` asks."""

    __slots__ = (
        "_after",
        "_catch_up",
        "_is_ending",
        "_loop",
        "_reading",
        "_since_us",
        "_stopping",
        "_stops",
        "_turn",
        "_waits",
        "_woken",
        "behind",
        "members",
        "pattern",
        "queue",
    )

    def __init__(self, pattern: bytes, loop: Loop, queue: Queue | None = None) -> None:
        self.pattern = pattern
        # Its place among subscriptions with the same queue name; None: it has no queue.
        self.queue = queue
        self.members: list[Member] = []
        self._loop = loop
        self._since_us = loop.clock.now_us()
        self._catch_up = CatchUp(loop.trail, loop.catch_up_turns)
        # Its cursor in each partition where it is behind.
        self.behind = self._catch_up.cursors
        self._reading = False
        # Whether a member got room while it reads: then it reads again.
        self._woken = False
        self._turn = 0
        # Where it stops in each partition, and reads nothing of the others; None: nowhere.
        self._stops: dict[Waiting, int] | None = None
        # The member that this is for.
        self._stopping: Member | None = None
        # Whether that is its end; if not, how many messages this member gets in total.
        self._is_ending = False
        self._after = 0
        self._waits = DeliveryWaits()

    def deliver(self, partition: Partition | LivePartition, run: Run) -> bool:
        """Take a committed run, all of which matches. Return whether any of it went to a connection."""
        if self._stops is None:
            return self._take(partition, run)
        before = run.below(self._stops.get(partition, 0)) if isinstance(partition, Waiting) else Run([], [])
        rest = range(len(before), len(run))
        if self._is_ending and self.queue is not None and isinstance(partition, Waiting):
            before = self.queue.select(partition, before)
        was_sent = self._take(partition, before) if before.values else False
        if self._is_ending or not rest:
            return was_sent
        if isinstance(partition, Partition):
            self.fall_behind(partition, run.offset(rest[0]))
            return was_sent
        # Unstored messages cannot be read later. If what came before them was all that it waited for, it goes on now.
        self._waits.settle(self)
        # Several members share the messages: another one can take what is too much for this one.
        if self._stops is not None and len(self.members) == 1:
            rest = rest[: self._unstored_max(self._stops)]
        return (bool(self.members and rest) and self._take(partition, run.select(rest))) or was_sent

    def _unstored_max(self, stops: Mapping[Waiting, int]) -> int:
        """Return how many unstored messages it may get before it goes on: those that it waits for count first."""
        awaited = (end - max(self.position(place), place.since.get(self, 0)) for place, end in stops.items())
        return max(0, self._after - self.members[0].delivered - sum(count for count in awaited if count > 0))

    def _take(self, partition: Partition | LivePartition, run: Run) -> bool:
        if self.behind and isinstance(partition, Partition):
            self.fall_behind(partition, run.offset(0))
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
            self.fall_behind(partition, run.offset(shared))
            self._wait()
            if shared and self._has_room():
                self.wake()
        return shared > 0

    def fall_behind(self, partition: Partition, offset: int) -> None:
        """Let it read a partition itself from an offset on, unless it does already."""
        if partition in self.behind:
            return
        begin = max(offset, partition.since.get(self, 0))
        end = None if self._stops is None else self._stops.get(partition, 0)
        self._catch_up.add(partition.cursor(begin, pattern=self.pattern, end=end))

    def begin_at(self, partition: Partition, offset: int) -> None:
        """Let it read older messages, from an offset on."""
        self._catch_up.raise_floor(partition, partition.served)
        self.fall_behind(partition, offset)

    def wake(self) -> None:
        """Read on: a member may have room again."""
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

    def stop_at(self, member: Member, ends: dict[Waiting, int], done: Callable[[], None], *, after: int | None) -> None:
        """Deliver what is below these offsets, where it is behind, and then nothing more until `go_on`; but unstored
        messages that others publish meanwhile, if `after`, how many the member gets in total, leaves room for them.
        With None it ends there.

        `done` is called then, or when the member has left; not if there is another `stop_at` meanwhile.
        """
        self._stops, self._stopping = ends, member
        self._is_ending, self._after = after is None, after or 0
        for partition, cursor in self.behind.items():
            cursor.end = ends.get(partition, 0)

        def reached() -> None:
            if self._stops is ends:
                done()

        self.when_delivered(member, ends, reached)
        self.wake()

    def go_on(self, member: Member) -> None:
        """Deliver beyond the offsets of `stop_at`, if it was for this member."""
        if self._stopping is member:
            self._stops = self._stopping = None
            for cursor in self.behind.values():
                cursor.end = None
            self.wake()

    def when_delivered(self, member: Member, marks: Mapping[Waiting, int], done: Callable[[], None]) -> None:
        """Call `done` once the messages below these offsets are delivered or gone, or the member has left."""
        self._waits.add(self, member, marks, done)

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
            self._catch_up.end()
        self._waits.leave(self, member)

    def on_change(self) -> None:
        """Note that messages of a watched partition were committed, or taken back."""
        for partition in self._waits.watched:
            # The offsets of messages that were taken back are reused, for messages that nobody waits for.
            end = partition.end
            self._waits.lower(partition, end)
            if self._stops is not None and self._stops.get(partition, 0) > end:
                self._stops[partition] = end
            cursor = self.behind.get(partition) if isinstance(partition, Partition) else None
            if cursor is not None:
                cursor.offset = min(cursor.offset, end)
                cursor.end = None if cursor.end is None else min(cursor.end, end)
        self._waits.settle(self)
        self.wake()

    def position(self, partition: Waiting) -> int:
        """Return up to where it has delivered what it wants of a partition."""
        cursor = self.behind.get(partition) if isinstance(partition, Partition) else None
        return partition.served if cursor is None else cursor.offset

    def lag(self) -> int:
        return sum(partition.served - cursor.offset for partition, cursor in self.behind.items())

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
                if await self._catch_up.read_all(self._read_next):
                    self._leave_behind()
        except Exception as error:  # noqa: BLE001 - supervises one reader
            self.fail(error)
        finally:
            self._reading = False
        if self.behind:
            self._wait()
        elif self.queue is not None:
            self.queue.forget()

    def _leave_behind(self) -> None:
        """Be handed what comes next, unless it must stop somewhere: it has read everything that there is."""
        for partition in [partition for partition in self.behind if partition.is_closed]:
            self._catch_up.forget(partition)
        if all(cursor.end is None and cursor.offset >= partition.served for partition, cursor in self.behind.items()):
            self._catch_up.end()
        self._waits.settle(self)

    def fail(self, error: Exception) -> None:
        """End it. Its members get the error, or "internal error" for a fault of the broker."""
        told = error if isinstance(error, PenstockError) else PenstockError("internal error")
        if told is not error:
            self._loop.health.fault("deliver", self.pattern.decode(errors="replace"), error)
        self._catch_up.end()
        for member in list(self.members):
            try:
                member.sink.fail(member, told)
            except Exception as fault:  # noqa: BLE001 - the other members must get the error too
                self._loop.health.fault("deliver", member.sink.name, fault)

    async def _read_next(self, cursor: Cursor, until: int) -> bool:
        """Hand out the next batch, up to an offset. Return whether there may be more, and room for it."""
        partition = cursor.partition
        cursor.offset = offset = self._skip(partition, cursor.offset)
        backlog = self._catch_up.backlogs.get(partition)
        if backlog is not None and backlog.until is not None:
            until = min(until, backlog.until)
        found = await cursor.read(until)
        if self.behind.get(partition) is not cursor or cursor.offset != offset:
            return False  # it ended, or messages were taken back
        if found is None:
            if partition.is_closed:
                self._catch_up.forget(partition)
                self._waits.settle(self)
            return True
        if partition.start > offset:
            self._drop(partition.start - offset)
        run = found.run
        if self.queue is not None and run.values:
            run = self.queue.select(partition, run)
        shared = self._share_out(partition, run) if run.values else 0
        if shared:
            self._loop.figures.delivered(run, self._since_us)
        if self.behind.get(partition) is cursor:  # unless that was the last message that its member wanted
            cursor.offset = found.following if shared == len(run) else run.offset(shared)
            self._loop.figures.expired += len(found.expired.below(cursor.offset))
            self._waits.settle(self)
        return shared == len(run) or (shared > 0 and self._has_room())

    def _skip(self, partition: Partition, offset: int) -> int:
        """Return where to read: further on, if it is too far behind and drops or sheds."""
        flow = self.members[0].flow if len(self.members) == 1 else None
        if flow is None or flow.overflow is Overflow.BLOCK:
            return offset
        begin = self._catch_up.backlogs.setdefault(partition, Backlog()).begin(flow, offset, partition.served)
        self._drop(begin - offset)
        return begin

    def _drop(self, count: int) -> None:
        self._skipped(count)
        if count:
            pattern = self.pattern.decode(errors="replace")
            logger.warning("a consumer of %s is too slow: %d messages dropped", pattern, count)

    def _skipped(self, count: int) -> None:
        self._loop.figures.dropped += count
        for member in self.members:
            member.dropped += count

    def _has_room(self) -> bool:
        now_us = self._loop.clock.monotonic_us()
        return any(member.has_room(now_us) for member in self.members)

    def _wait(self) -> None:
        """Set a timer for the member whose rate allows more first. A connection that takes more wakes it by itself."""
        now_us = self._loop.clock.monotonic_us()
        moments = [ready_us for member in self.members if (ready_us := member.ready_us(now_us)) is not None]
        if moments:
            self._loop.call_at(min(moments), self.wake)
