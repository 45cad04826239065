"""Hands what was appended to a worker that writes and syncs it, and takes it back.

    write = flusher.begin_write()       the owner: everything pending
    write.run()                         a worker: encode, stamp, roll, write
    flusher.finish_write(write)         the owner: readers may see it, `written` moves, and `committed` by its rule
    sync = flusher.begin_sync() …       the same three steps for `durable`

The worker touches only the writing side of the active segment, so neither thread ever waits for the other.
`store/rounds.py` does this for all logs together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.clock import Clock
from penstock.errors import AppendFailed, LogFailed
from penstock.log import retention
from penstock.log.append_clock import AppendClock
from penstock.log.appender import Appender, LogOwner, LogState
from penstock.log.files import Files
from penstock.log.flush import Sync, Write, WritePart
from penstock.log.handover import Handover
from penstock.log.marks import Marks
from penstock.log.producers import Producers
from penstock.log.segment import Segment
from penstock.log.segment_writer import SegmentWriter
from penstock.log.segments import Segments
from penstock.log.tail import Tail
from penstock.log.terms import LogTerms
from penstock.model.batch import Batch, Control
from penstock.model.run import Run

if TYPE_CHECKING:
    from penstock.log.log import Log
    from penstock.log.opening import OpenedLog

logger = logging.getLogger(__name__)

# Under `flush`, a power cut can lose messages that readers saw. So offsets are reserved durably, this many ahead,
# before they are given out. After an unclean stop the log continues after the reservation.
RESERVE_AHEAD: Final = 1 << 20


class Flusher:
    def __init__(
        self,
        log: Log,
        owner: LogOwner,
        terms: LogTerms,
        marks: Marks,
        appender: Appender,
        handover: Handover,
        tail: Tail,
        opened: OpenedLog,
        files: Files,
        clock: Clock,
    ) -> None:
        """`log` is the handle by which `owner` knows this log."""
        self.log = log
        self.terms = terms
        self.marks = marks
        self.segments: Segments = opened.segments
        self.append_clock: AppendClock = opened.append_clock
        self._owner = owner
        self._appender = appender
        self._handover = handover
        self._tail = tail
        self._files = files
        self._clock = clock
        # A log has at most one sync in progress: if there were two, Linux would report a failure to only one of them.
        self._writing: Write | None = None
        self._syncing: Sync | None = None
        # When the oldest message of the active segment was appended; None: it has no message.
        self.oldest_us = opened.oldest_us
        # The end of the log when it was opened, and the end of its last batch on the disk.
        self._opened_at = marks.end
        self._reached = opened.reached
        # Whether the last control batch notes a clean stop.
        self._is_closed_cleanly = opened.is_closed_cleanly
        # What was written since the log was opened.
        self.stored_messages = self.stored_bytes = 0
        self._unsynced_messages = 0
        self._unsynced_since_us: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a worker has a write or a sync of this log."""
        return self._writing is not None or self._syncing is not None

    @property
    def is_syncing(self) -> bool:
        return self._syncing is not None

    @property
    def witnessed(self) -> int:
        """Return where the last batch on the disk ends, for `meta.db`."""
        return self.marks.durable if self.marks.durable > self._opened_at else self._reached

    # Write.

    def begin_write(self) -> Write | None:
        """Return everything pending, for a worker to write; None if nothing is, or it must wait."""
        appender = self._appender
        if not appender.has_pending or self._writing or appender.state is not LogState.OPEN:
            return None
        parts = self._plan(appender.pending)
        if len(parts) > 1 and self._syncing:
            return None
        size = appender.take()
        marks = self.marks
        control = None
        if marks.rule.reserves and marks.end + RESERVE_AHEAD // 2 > marks.reserved_written:
            control = Control(marks.end + RESERVE_AHEAD, self.segments.previous_base)
        self._writing = Write(self, parts, size, control)
        return self._writing

    def _plan(self, batches: Sequence[Batch | Run]) -> list[WritePart]:
        """Assign batches to the active segment and to new ones, each with the producers that its head must know."""
        active = self.segments.active
        size = active.written
        base = active.base
        segment_bytes = retention.segment_bytes(self.terms.policy, self.terms.store_limit)
        part = WritePart(None, [])
        parts = [part]
        first = batches[0].base_offset if batches else self.marks.end
        if self._appender.is_roll_pending and first > base:
            base = first
            part = WritePart(self._appender.producers.snapshot(base), [])
            parts.append(part)
            size = 0
        for batch in batches:
            if size + batch.size > segment_bytes and batch.base_offset > base:
                base = batch.base_offset
                part = WritePart(self._appender.producers.snapshot(base), [])
                parts.append(part)
                size = 0
            part.batches.append(batch)
            size += batch.size
        return parts

    def finish_write(self, write: Write) -> None:
        assert write is self._writing
        self._writing = None
        self._owner.settled(write.size)
        if self._appender.state is not LogState.OPEN:
            # The log failed or was deleted meanwhile, and its outcomes are settled.
            self.segments.let_go(write.created)
            return
        self._publish(write)
        marks = self.marks
        marks.written = write.end
        if write.control is not None and write.error is None:
            marks.reserved_written = write.control.reserved
        if write.done:
            self._count(write)
        if write.fault is not None:
            self._owner.fault("write", self.log, write.fault)
        if isinstance(write.error, LogFailed):
            self.fail(write.error)
        elif write.error is not None:
            self._appender.reject(write.end, write.error)
        self.commit()

    def _publish(self, write: Write) -> None:
        """Let readers see what was written. The order matters to readers in other threads."""
        for segment in (self.segments.active, *write.created):
            segment.size = segment.written
        if write.created:
            self.segments.append(write.created)
            self.oldest_us = None
            self._appender.is_roll_pending = self._is_closed_cleanly = False
        self._handover.add(write.fresh)
        if self.oldest_us is None:
            base = self.segments.active.base
            self.oldest_us = next((batch.append_time for batch in write.done if batch.base_offset >= base), None)
        for batch in write.done:
            self._tail.add(batch)
            if batch.producer or batch.source:
                self._appender.producers.settle(batch)

    def _count(self, write: Write) -> None:
        count = size = 0
        for batch in write.done:
            count += batch.count
            size += batch.size
        self.stored_messages += count
        self.stored_bytes += size
        self._unsynced_messages += count
        if self._unsynced_since_us is None:
            self._unsynced_since_us = self._clock.monotonic_us()

    # Sync.

    def begin_sync(self) -> Sync | None:
        """Return what is written and not durable, for a worker to sync; None if nothing is, or it must wait."""
        marks = self.marks
        if marks.durable == marks.written and marks.reserved == marks.reserved_written:
            return None
        if self._appender.state is not LogState.OPEN or self._syncing or (self._writing and self._writing.syncs):
            return None
        self._unsynced_messages = 0
        self._unsynced_since_us = None
        active = self.segments.active
        self._syncing = Sync(self.log, active, active.size, marks.written, marks.reserved_written)
        return self._syncing

    def finish_sync(self, sync: Sync, error: OSError | None) -> None:
        if sync is self._syncing:
            self._syncing = None
        if error is not None:
            self.fail(LogFailed(f"{sync.segment.path}: fsync failed: {error.strerror}"))
        elif self._appender.state is LogState.OPEN:
            marks = self.marks
            sync.segment.synced = max(sync.segment.synced, sync.position)
            marks.durable = max(marks.durable, sync.written)
            marks.reserved = max(marks.reserved, sync.reserved)
            if marks.durable == marks.written:
                self._unsynced_messages = 0
                self._unsynced_since_us = None
        self.commit()

    def sync_due_us(self, messages: int, interval_us: int) -> int | None:
        """Return when what is written must be synced, on the monotonic clock (0: now); None if all of it is."""
        if self._unsynced_since_us is None or self._appender.state is not LogState.OPEN:
            return None
        if self._unsynced_messages >= messages or self.marks.committed < self.marks.written:
            return 0
        return self._unsynced_since_us + interval_us

    def commit(self) -> None:
        """Move `committed`, unless the log takes no more appends."""
        if self._appender.state is LogState.OPEN:
            self._handover.commit()

    # Segments.

    def is_roll_due(self) -> bool:
        """Return whether the active segment spans a large part of the retention time, or everything in it is purged."""
        if self.oldest_us is None:
            return False
        if self.marks.purged >= self.marks.end:
            return True
        span_us = retention.segment_span_us(self.terms.policy)
        return span_us is not None and self._clock.now_us() - self.oldest_us >= span_us

    def roll(self) -> None:
        """Let the next write begin a new segment, unless the active one has no messages. The write may be empty."""
        self._appender.is_roll_pending = self._appender.state is LogState.OPEN and self.oldest_us is not None

    def restart(self, place: int, active: Segment, end: int, producers: Producers) -> tuple[Segment, ...]:
        """Go on at `end` in a new segment behind the one at `place`; return the segments between them."""
        self.marks.restart(end)
        self._is_closed_cleanly = self._appender.is_roll_pending = False
        self.oldest_us = None
        self._appender.producers = producers
        self._tail.clear()
        return self.segments.cut(place, active)

    # In the calling thread.

    def flush(self) -> None:
        """Write and sync everything pending. Failures settle the outcomes of what failed."""
        write = self.begin_write()
        if write is not None:
            write.run()
            self.finish_write(write)
        sync = self.begin_sync()
        if sync is not None:
            [error] = self._files.sync([sync.file])
            self.finish_sync(sync, error)

    def fail(self, error: LogFailed) -> None:
        """Take no more appends until a restart, and reject what is not committed. The rest can still be read."""
        if self._appender.state is LogState.OPEN:
            logger.error("%s: takes no more appends until a restart: %s", self.segments.directory, error)
            self.segments.active.is_given_up = True
            self._appender.stop(LogState.FAILED, error)

    def note_close(self) -> None:
        """Write down that everything is durable."""
        end = self.marks.end
        if self._is_closed_cleanly and end == self._opened_at:
            return
        try:
            control = Control(end, self.segments.previous_base)
            SegmentWriter(self.segments.active).write_control(control, end, self.append_clock.last)
        except (AppendFailed, LogFailed) as error:
            logger.warning("%s: cannot note a clean stop, the next start recovers: %s", self.segments.directory, error)
