"""The one way to read stored messages: a cursor has an offset in a partition, and reads from there.

    cursor = partition.cursor(offset, pattern=b"orders.*")
    part = await cursor.read()            the next messages that match, from memory or from disk; None: not now
    cursor.offset = part.following        only the reader knows how far it has come
    await cursor.wait()                   until there is more

A subscription that is behind is a cursor for each partition, read in the order of the trail; one that was unsubscribed
is the same with an end. A group, a replay, a fetch, a pipe and the broker's own topics are cursors too: they differ in
what they do with the messages.

A cursor reads ahead: the second time that it continues where it stopped, it takes many batches from the disk, and
keeps those that its reader has no room for yet. All cursors share one budget for that. Batches in memory (`log/
tail.py`) are read where they are.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.opened import is_large
from penstock.errors import OffsetOutOfRange
from penstock.health import Usage
from penstock.log.appender import LogState
from penstock.log.policy import OnDamage
from penstock.model.batch import Batch
from penstock.model.run import Run
from penstock.model.subject import matches

if TYPE_CHECKING:
    from penstock.broker.partition import Partition

# What one cursor reads at once, and what all of them keep.
AHEAD_BYTES: Final = 256 << 10
AHEAD_BYTES_MAX: Final = 8 << 20
# A large batch is handed out in parts of about this size: other readers wait for a part, not for the whole batch.
_PART_MESSAGES: Final = 8192
_PART_BYTES: Final = 1 << 20
# An offset that no message has.
_NOWHERE: Final = -1


class Part(NamedTuple):
    """The result of one read of a cursor."""

    # The messages to deliver. It may be empty: compaction left none, they expired, or none of them matches.
    run: Run
    # The offset to continue at.
    following: int
    # Messages that match and are left out of `run`, because their TTL has ended.
    expired: Run

    def first(self, count: int) -> Part:
        """Return the first messages of it."""
        if len(self.run) <= count:
            return self
        following = self.run.offset(count)
        return Part(self.run.select(range(count)), following, self.expired.below(following))


class ReadAhead:
    """The budget for batches that cursors have read ahead: the cursor that read longest ago drops its own first."""

    def __init__(self, bytes_max: int = AHEAD_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._cursors: dict[Cursor, int] = {}

    def hold(self, cursor: Cursor, size: int) -> None:
        self.release(cursor)
        self._cursors[cursor] = size
        self._bytes += size
        while self._bytes > self._bytes_max and len(self._cursors) > 1:
            next(iter(self._cursors)).drop_ahead()

    def release(self, cursor: Cursor) -> None:
        self._bytes -= self._cursors.pop(cursor, 0)

    @property
    def usage(self) -> Usage:
        return Usage(self._bytes, self._bytes_max)


class Cursor:
    __slots__ = ("_ahead", "_ahead_from", "_read_to", "_rewrites", "end", "offset", "partition", "pattern")

    def __init__(
        self, partition: Partition, offset: int, *, pattern: bytes | None = None, end: int | None = None
    ) -> None:
        """`pattern`: of the subjects that are read; None: all. `end`: where it stops; None: nowhere."""
        self.partition = partition
        self.offset = offset
        self.pattern = pattern
        self.end = end
        # Batches that were read and not passed yet; there is nothing between `_ahead_from` and the first of them.
        self._ahead: deque[Batch] = deque()
        self._ahead_from = 0
        # How often segments of the log had been rewritten then, and where the last read ended.
        self._rewrites = 0
        self._read_to = _NOWHERE

    async def read(self, until: int | None = None) -> Part | None:
        """Return the next messages, below `until`; None if there is nothing to read now. Nothing is awaited then.

        A large batch comes in parts. What retention dropped is skipped.
        """
        ends = [end for end in (self.end, until) if end is not None]
        end = min(ends, default=None)
        if end is not None and self.offset >= end:
            return None
        found = await self.read_stored()
        if found is None:
            return None
        run, following = found
        if end is not None and following > end:
            run, following = run.below(end), end
        run, expired = run.split_expired(self.partition.clock.now_us())
        if self.pattern is not None:
            run, expired = select_matching(run, self.pattern), select_matching(expired, self.pattern)
        return Part(run, following, expired)

    async def read_stored(self) -> tuple[Run, int] | None:
        """Return all messages of the next batch from the offset on, expired ones too, and the offset to continue at."""
        partition, log = self.partition, self.partition.log
        offset = max(self.offset, log.start)
        if offset >= partition.served or log.state is LogState.CLOSED:
            return None
        served = partition.served
        run = partition.opened.large_at(partition.place, offset) or await self._open(offset)
        if run is None:
            # These offsets were reserved when the broker crashed, and never given out.
            return Run([], []), served
        batch = run.batch
        assert batch is not None, "it was opened"
        if not is_large(batch):
            return run.at_least(offset), batch.end
        part = run.window(offset, max(1, min(_PART_MESSAGES, batch.count * _PART_BYTES // batch.plain_length)))
        if part.values and part.end < run.end:
            return part, part.end
        partition.opened.drop_large()
        return part, batch.end

    async def read_batches(self, bytes_max: int, on_damage: OnDamage | None = None) -> list[Batch]:
        """Return whole batches as they are stored, from the one that holds the offset: at least one if there is any,
        then as many as fit. They need not be served yet, only committed. `on_damage` as in `Log.read_disk`."""
        partition = self.partition
        return await partition.store.read(partition.log, self.offset, bytes_max, on_damage)

    async def read_message(self) -> Run | None:
        """Return the message at the offset, expired or not; None if there is none, or no longer."""
        partition, offset = self.partition, self.offset
        if not partition.start <= offset < partition.served or partition.is_closed:
            return None
        run = None
        with suppress(OffsetOutOfRange):  # retention was faster
            run = await self._open(offset)
        if run is None:
            return None
        index = bisect_left(run.all_offsets(), offset)
        return run.select([index]) if index < len(run) and run.offset(index) == offset else None

    async def append_time(self) -> int | None:
        """Return when the next batch was appended; None if there is none. To read it then costs nothing more."""
        offset = max(self.offset, self.partition.start)
        if offset >= self.partition.served:
            return None
        batch = await self._batch(offset)
        return None if batch is None else batch.append_time

    async def seek_time(self, time_us: int) -> None:
        """Move to the first message that was appended then (µs since 1970) or later."""
        log = self.partition.log
        if log.start == log.committed:
            # An empty log needs no other thread: the first message of a new topic waits for this.
            self.offset = log.committed
        else:
            self.offset = await asyncio.get_running_loop().run_in_executor(None, log.offset_at, time_us)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is something to read, or the topic is deleted; for at most so long. Return whether it is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.partition.grown(self.offset)
        except TimeoutError:
            return False
        return True

    def drop_ahead(self) -> None:
        self._ahead.clear()
        self.partition.read_ahead.release(self)

    async def _open(self, offset: int) -> Run | None:
        """Open the next batch from `offset` on; None if there is none."""
        partition, opened = self.partition, self.partition.opened
        batch = await self._batch(offset)
        if batch is None:
            return None
        if not is_large(batch):
            return opened.open(partition.place, batch, partition.name)
        # Many may wait for their turn: they do not keep the batch meanwhile.
        del batch
        self.drop_ahead()
        async with opened.lock:
            run = opened.large_at(partition.place, offset)
            if run is None and (batches := await partition.store.read(partition.log, offset, 1)):
                run = await opened.open_large(partition.place, batches[0], partition.name)
            return run

    async def _batch(self, offset: int) -> Batch | None:
        """Return the next batch from `offset` on: from memory, from what was read ahead, or from disk."""
        log = self.partition.log
        in_memory = log.read_tail(offset, 1)
        if in_memory is not None:
            if self._ahead:
                self.drop_ahead()
            return in_memory[0] if in_memory else None
        if self._rewrites != log.rewrites or offset < self._ahead_from:
            self._ahead.clear()
        while self._ahead and self._ahead[0].end <= offset:
            self._ahead_from = self._ahead.popleft().end
        if not self._ahead:
            await self._fill(offset)
        return self._ahead[0] if self._ahead else None

    async def _fill(self, offset: int) -> None:
        partition, rewrites = self.partition, self.partition.log.rewrites
        bytes_max = AHEAD_BYTES if offset == self._read_to else 1
        batches = await partition.store.read(partition.log, offset, bytes_max)
        self._ahead = deque(batches)
        self._ahead_from, self._rewrites = offset, rewrites
        self._read_to = batches[-1].end if batches else _NOWHERE
        partition.read_ahead.hold(self, sum(len(batch.data) for batch in batches))


def select_matching(run: Run, pattern: bytes) -> Run:
    """Return the messages whose subject matches."""
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
