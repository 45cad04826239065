"""The log of one partition: an endless row of batches, of which segments hold a stretch each.

Offsets go

    start ............ committed ... written ... end
      │ may be read        │            │         └ the next batch gets this one
      │                    │            └ with the operating system
      │                    └ as durable as the policy promises: acknowledged, may be read
      └ older ones were dropped

A piped log is a copy of another one: its batches have the offsets that they have there, with gaps where there are
gaps, so where it goes on is its own `end`, and nothing is published to it.

A log can be held: then what is appended from there on is made durable as ever, and `committed` stays where it is until
the log is released. So several logs can let their readers see something at the same moment.

One thread owns a log: it appends, and it alone moves these marks. What waits for the disk is handed to a worker
and back, so neither ever waits for the other:

    write = log.begin_write()       the owner: all that was appended since the last time
    write.run()                     a worker: stamps, rolls, writes; touches only the active segment's writing side
    log.finish_write(write)         the owner: readers may see it, `written` moves
    sync = log.begin_sync() …       the same three steps for making it durable

`storage/store.py` does this for all logs together, in rounds. `read_disk`, `retain`, `compact` and `verify` may be
called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol, TypeVar

from penstock.batch import NO_SEGMENT, Batch, Control
from penstock.clock import Clock
from penstock.errors import (
    AppendFailed,
    Closed,
    LogDamaged,
    LogFailed,
    OffsetOutOfRange,
    OriginConflict,
    OutOfSequence,
    PenstockError,
    ReadFailed,
    ReadOnlyTopic,
)
from penstock.run import Run, batch_bytes, check_size
from penstock.storage import compaction, recovery, retention
from penstock.storage.files import Files
from penstock.storage.flush import Part, Sync, Write
from penstock.storage.policy import Cleanup, Durability, OnDamage, Policy
from penstock.storage.producers import Producers
from penstock.storage.segment import Found, OpenSegments, Reader, Segment
from penstock.storage.tail import Tail, TailBudget
from penstock.storage.witness import NOBODY, Witness

logger = logging.getLogger(__name__)

# Under `flush`, offsets that readers saw can be lost with the power. So they are reserved durably, this many
# ahead, before they are given out; after an unclean stop the log goes on behind the reservation.
RESERVE_AHEAD: Final = 1 << 20
# Where a reservation may be among what is damaged, the log goes on this far behind all that it knows of. That is beyond
# any reservation: those are ahead of all that waited for the disk, and so many messages never do.
RESERVATION_LOST_AHEAD: Final = 1 << 27
# Runs are gathered into batches of about this size: what a reader must open to get at one message.
GATHER_BYTES: Final = 1 << 20

# Of what a held log will give to `on_commit` so much is kept in memory; readers find the rest on the disk.
HELD_BYTES: Final = 16 << 20

# What to do about damage, for those who are told of it.
DAMAGE_REMEDY: Final = (
    "restore the file from a copy, or stop the broker and run penstock log repair; "
    "with on_damage=skip the topic's readers go on behind it"
)
# So much damage of one log is remembered, for those who ask what is wrong with it.
_DAMAGE_MAX: Final = 100

T = TypeVar("T")

# Called with the offset of a batch: it is committed, or why it was refused after all.
Done = Callable[[int, PenstockError | None], None]


class Owner(Protocol):
    """Who runs the rounds of this log."""

    def appended(self, log: Log, size: int) -> None:
        """Batches wait to be written; raises Overloaded, before anything is changed, if too many do."""
        ...

    def settled(self, size: int) -> None:
        """Batches of that many bytes do not wait any more."""
        ...

    def announce(self) -> None:
        """Something was given to `on_commit`, or taken back."""
        ...

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        """Take note of an unexpected exception, which the log survived."""
        ...

    def damaged(self, log: Log) -> None:
        """What is known to be damaged has changed. Called in any thread."""
        ...


class State(Enum):
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class Log:
    def __init__(
        self,
        directory: Path,
        *,
        policy: Policy,
        files: Files,
        clock: Clock,
        owner: Owner,
        open_segments: OpenSegments,
        tail_budget: TailBudget,
        reader: Reader = "pread",
        piped: bool = False,
        witness: Witness = NOBODY,
        strict: bool = False,
    ) -> None:
        """Open the log in `directory`, recover it if need be, or begin it if there is none.

        `witness`: how far it once reached, whatever the files say. If it is `strict` then damage in the last
        segment, or a segment that is gone, is raised, and left as it is; else the log goes on behind it.
        """
        self.directory = directory
        self.policy = policy
        self.is_piped = piped
        self.state = State.OPEN
        # Why it takes nothing more, once it failed.
        self.failure: LogFailed | None = None
        self._files = files
        self._clock = clock
        self._owner = owner
        self._open_segments = open_segments
        self._reader: Reader = reader
        self._tail = Tail(tail_budget)
        files.make_directory(directory)
        found = recovery.recover(files, open_segments, directory, reader, witness=witness, piped=piped, strict=strict)
        # Replaced as a whole, under the lock, so that any thread may read it without.
        self._segments: tuple[Segment, ...] = tuple(found.segments)
        self._segments_lock = threading.Lock()
        # Who may send what again is the origin's business.
        self._producers = Producers() if piped else found.producers
        self._closed_cleanly = found.closed
        self._opened_at = found.end
        self._reached = found.reached
        self.end = self.written = self.durable = self.committed = found.end
        # Offsets below are durably reserved, or will be when what is written is synced.
        self._reserved = self.reserved_written = found.reserved
        self._append_time = found.append_time
        # When the oldest message of the active segment was appended; None: it has no message.
        self._oldest_us = found.oldest_us
        # Whether the next write begins a new segment.
        self._rolls = False
        # Bytes that the whole store retains, if that is limited and this log may be shortened for it.
        self.store_limit: int | None = None
        self.number = secrets.randbits(32) if found.log is None else found.log
        self._pending: list[Batch | Run] = []
        self._pending_bytes = 0
        # For who serves the log: the subject of messages that say none, and to whom what was committed is given; of
        # what was held not all may be. Those who appended it are told by `tell`, or at once if nobody serves the log.
        self.subject = b""
        self.on_commit: Callable[[list[Batch | Run]], None] | None = None
        # Told when what was appended from an offset on is taken back: these offsets will be given out again.
        self.on_reject: Callable[[int], None] | None = None
        # What is written and not yet given to `on_commit`, as it was appended.
        self._fresh: deque[Batch | Run] = deque()
        # A log has one sync under way at the most: of two, only one would be told that it failed.
        self._writing: Write | None = None
        self._syncing: Sync | None = None
        # Who waits for `committed` to reach the end of a batch: that end, the offset to tell, and whom.
        self._waiting: deque[tuple[int, int, Done]] = deque()
        # The same for `durable`; and where the log is held, if it is.
        self._enduring: deque[tuple[int, int, Done]] = deque()
        self._held_at: int | None = None
        self._held_bytes = 0
        # Below this offset nobody needs anything any more: for a log of the broker's own.
        self.unneeded = 0
        # Below this offset nothing may be read any more.
        self._purged = 0
        # What was written since it was opened.
        self.stored_messages = self.stored_bytes = 0
        self._unsynced_messages = 0
        self._unsynced_since_us: int | None = None
        # Where the segment begins that was the active one at the last compaction: all below it is compacted.
        self._compacted_base = -1
        # What is left to do of a merge.
        self._unfinished: Callable[[], None] | None = None
        # Whoever retains or compacts has it: a log is either kept up or removed.
        self.upkeep_lock = threading.Lock()
        # What is known to be damaged, by the file and the position in it; and how many offsets readers have skipped.
        self._damage: dict[tuple[str, int], LogDamaged] = {}
        self.skipped_offsets = 0
        for segment in self._segments:
            segment.log = self.number
        # The mark of its start; None: it has none.
        self._marked = found.start
        self._begin()
        if found.damage or self._reached < found.witnessed:
            self._leave_behind(found)
        if self._marked is not None and self._marked < self._segments[0].base:
            self._restore_first(self._marked)
        for damage in found.known_damage:
            self._remember(damage)

    def _begin(self) -> None:
        """Have a segment, and the mark of where the log begins."""
        if self._segments:
            if self._marked is None:
                # Until it is synced, the log may be one without a mark once more.
                self._mark_start(self._segments[0].base)
            return
        if self._marked is None:
            # The segment that is created next is synced, and with it the directory.
            self._mark_start(0)
        assert self._marked is not None
        self._segments = (self._create_first(self._marked, self.next_append_time()),)
        self.end = self.written = self.durable = self.committed = self._opened_at = self._reached = self._marked

    def _mark_start(self, start: int) -> None:
        recovery.mark_start(self._files, self.directory, self._marked, start)
        self._marked = start

    def _restore_first(self, start: int) -> None:
        """Have a segment with a head and nothing else where the first ones are missing: who reads there is told."""
        following = self._segments[0]
        first = self._create_first(start, retention.begun_at(self._segments, 0))
        first.sealed = True
        self._segments = (first, *self._segments)
        reason = f"all that was before {following.path.name} is missing, and retention did not drop it"
        lost = LogDamaged(first.path, first.size, start, following.base, reason)
        recovery.note_damage(self._files, self.directory, first.base, [lost])
        self._remember(lost)

    def _create_first(self, base: int, append_time: int) -> Segment:
        return self.create_segment(base, Control(base, NO_SEGMENT), append_time)

    @property
    def witnessed(self) -> int:
        """Return where the last batch ends that is on the disk: what `meta.db` may bear witness to."""
        return self.durable if self.durable > self._opened_at else self._reached

    @property
    def start(self) -> int:
        # A piped log can lose its end with the power. What comes again below the purge is not read either.
        return max(self._segments[0].base, min(self._purged, self.end))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._segments

    @property
    def damage(self) -> list[LogDamaged]:
        """What is known to be damaged. For any thread."""
        with self._segments_lock:
            return sorted(self._damage.values(), key=lambda damage: damage.first)

    @property
    def busy(self) -> bool:
        """Whether a worker has something of this log."""
        return self._writing is not None or self._syncing is not None

    @property
    def has_pending(self) -> bool:
        """Whether something waits to be written: batches, or a new segment."""
        return bool(self._pending) or self._rolls

    @property
    def is_syncing(self) -> bool:
        return self._syncing is not None

    # In.

    def append(self, batch: Batch, *, source: int = 0, position: int = 0, done: Done | None = None) -> int:
        """Take a batch that is the log's from now on, and return the offset of its first message.

        `done` is called once, as soon as that is decided. A batch that is in the log already is not stored
        again; its offset is that of the first time, and `done` may be called before this returns.
        """
        assert isinstance(batch.data, bytearray), "a batch is stamped in place: take it from `encode` or `accept`"
        self._check_writable()
        seen = self._producers.find(batch, source, position)
        if seen is not None:
            # It waits behind all that was appended so far, the first one among them.
            self._when_committed(self.end, seen, done)
            return seen
        size = len(batch.data)
        self._owner.appended(self, size)
        offset = batch.base_offset = self.end
        batch.source = source
        batch.position = position
        self.end = offset + batch.span
        if batch.producer or source:
            self._producers.note(batch)
        self._pending.append(batch)
        self._pending_bytes += size
        self._when_committed(self.end, offset, done)
        return offset

    def append_at(self, batch: Batch, done: Done | None = None) -> bool:
        """Take a batch of a piped log, which is the log's from now on, at the offset that it has; whether it is new.

        One that is there already is not stored again. `done` as in `append`. Raises OriginConflict if a part of it is
        there: then it is not of the same origin.
        """
        assert self.is_piped, "other logs number their batches themselves"
        assert isinstance(batch.data, bytearray), "a batch is stamped in place"
        self.check_open()
        offset = batch.base_offset
        if batch.end <= self.end:
            self._when_committed(self.end, offset, done)
            return False
        if offset < self.end:
            raise OriginConflict(
                f"{self.directory}: a batch of offsets {offset} to {batch.end}, where {self.end} is next: "
                f"it is not of the same origin"
            )
        size = len(batch.data)
        self._owner.appended(self, size)
        batch.source = batch.position = 0
        self.end = batch.end
        self._pending.append(batch)
        self._pending_bytes += size
        self._when_committed(self.end, offset, done)
        return True

    def pipe(self) -> None:
        """From now on it is piped. It must be empty."""
        assert self.is_empty, "it has messages of its own"
        self.is_piped = True

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever appended, and nobody is about to."""
        return self.end == 0 and self._held_at is None

    def holds(self, batch: Batch) -> bool:
        """Whether a producer's batch was appended before, as far as is known."""
        try:
            return self._producers.find(batch, 0, 0) is not None
        except OutOfSequence:
            return False

    def position(self, source: int) -> int:
        """The last position of a source from which something was appended; 0 if nothing was."""
        return self._producers.position(source)

    @property
    def sources(self) -> int:
        """How many sources the log remembers."""
        return self._producers.sources

    def forget_source(self, source: int) -> None:
        """Forget a source that will never send anything again. It is remembered again after a restart, until the next
        segment begins."""
        self._producers.forget_source(source)

    def gather(self, run: Run, done: Done | None = None) -> int:
        """Take a run that is the log's from now on, and return the offset of its first message.

        It shares a batch with the runs around it, which the worker encodes. `done` as in `append`. Raises BatchTooLarge
        if it cannot be one batch.
        """
        self._check_writable()
        check_size(run)
        size, count = batch_bytes(run), len(run)
        self._owner.appended(self, size)
        offset = self.end
        open_run = self._pending[-1] if self._pending else None
        if isinstance(open_run, Run) and open_run.size + size <= GATHER_BYTES and offset != self._held_at:
            open_run.extend(run)
            open_run.size += size
        else:
            run.base_offset = offset
            # Where it was chosen from another or opened from a batch, that is over.
            run.offsets = run.timestamps = run.batch = None
            run.append_time = 0
            run.size = size
            self._pending.append(run)
        self.end = offset + count
        self._pending_bytes += size
        self._when_committed(self.end, offset, done)
        return offset

    def when_committed(self, offset: int, done: Done) -> None:
        """Call `done` once the message at `offset`, which was appended, is committed or taken back."""
        self._when_committed(self.end, offset, done)

    def hold(self) -> None:
        """What is appended from now on is not committed before `release`."""
        assert self._held_at is None, "who holds it releases it first"
        self._held_at = self.end

    @property
    def is_held(self) -> bool:
        return self._held_at is not None

    def release(self) -> None:
        self._held_at = None
        self._held_bytes = 0
        self._commit()

    def when_durable(self, done: Done) -> None:
        """Call `done` once all that was appended so far is on the disk, or taken back."""
        if self.end <= self.durable:
            done(self.end, None)
        else:
            self._enduring.append((self.end, self.end, done))

    def check_open(self) -> None:
        """Raise if it takes no appends."""
        if self.state is not State.OPEN:
            raise self.failure or Closed(f"{self.directory}: the log is closed")

    def _check_writable(self) -> None:
        self.check_open()
        if self.is_piped:
            raise ReadOnlyTopic(f"{self.directory}: the log is piped from another broker: publish there")

    def is_roll_due(self) -> bool:
        """Return whether the active segment spans a large part of the time that is retained."""
        if self._oldest_us is None:
            return False
        if self._purged >= self.end:
            return True
        span_us = retention.segment_span_us(self.policy)
        return span_us is not None and self._clock.now_us() - self._oldest_us >= span_us

    def roll(self) -> None:
        """Have the next write begin a new segment, unless the active one has no messages. Without new messages it
        writes only that."""
        self._rolls = self.state is State.OPEN and self._oldest_us is not None

    def begin_write(self) -> Write | None:
        """All that waits, for a worker to write; None if nothing does, or not now."""
        if not self.has_pending or self._writing or self.state is not State.OPEN:
            return None
        parts = self._plan(self._pending)
        if len(parts) > 1 and self._syncing:
            return None
        self._pending = []
        self._rolls = False
        size, self._pending_bytes = self._pending_bytes, 0
        control = None
        if self._reserves and self.end + RESERVE_AHEAD // 2 > self.reserved_written:
            control = Control(self.end + RESERVE_AHEAD, self.previous_base())
        self._writing = Write(self, parts, size, control)
        return self._writing

    def finish_write(self, write: Write) -> None:
        assert write is self._writing
        self._writing = None
        self._owner.settled(write.size)
        if self.state is not State.OPEN:
            # It failed or was deleted meanwhile, and whoever waits was told.
            self._let_go(write.created)
            return
        self._publish(write)
        self.written = write.end
        if write.control is not None and write.error is None:
            self.reserved_written = write.control.reserved
        self._note_unsynced(write)
        if write.fault is not None:
            self._owner.fault("write", self, write.fault)
        if isinstance(write.error, LogFailed):
            self.fail(write.error)
        elif write.error is not None:
            self._reject(write.end, write.error)
        self._commit()

    def begin_sync(self) -> Sync | None:
        """What is written and not yet durable, for a worker to sync; None if there is nothing, or not now."""
        if self.durable == self.written and self._reserved == self.reserved_written:
            return None
        if self.state is not State.OPEN or self._syncing or (self._writing and self._writing.syncs):
            return None
        self._unsynced_messages = 0
        self._unsynced_since_us = None
        active = self._segments[-1]
        self._syncing = Sync(self, active, active.size, self.written, self.reserved_written)
        return self._syncing

    def finish_sync(self, sync: Sync, error: OSError | None) -> None:
        if sync is self._syncing:
            self._syncing = None
        if error is not None:
            self.fail(LogFailed(f"{sync.segment.path}: fsync failed: {error.strerror}"))
        elif self.state is State.OPEN:
            sync.segment.synced = max(sync.segment.synced, sync.position)
            self.durable = max(self.durable, sync.written)
            self._reserved = max(self._reserved, sync.reserved)
            if self.durable == self.written:
                self._unsynced_messages = 0
                self._unsynced_since_us = None
        self._commit()

    def sync_due_us(self, messages: int, interval_us: int) -> int | None:
        """When what is written must be synced, on the monotonic clock (0: now); None if all of it is."""
        if self._unsynced_since_us is None or self.state is not State.OPEN:
            return None
        if self._unsynced_messages >= messages or self.committed < self.written:
            return 0
        return self._unsynced_since_us + interval_us

    @property
    def _reserves(self) -> bool:
        """Whether it reserves offsets. Those of a piped log are its origin's, which never gives them out again: what
        the power takes is fetched once more."""
        return self.policy.durability is Durability.FLUSH and not self.is_piped

    # For a write, in its worker.

    def previous_base(self) -> int:
        return self._segments[-2].base if len(self._segments) > 1 else NO_SEGMENT

    def create_segment(self, base: int, control: Control, append_time: int) -> Segment:
        segment = Segment(self._files, self._open_segments, self.directory, base, 0, self._reader)
        segment.create(control, self.number, append_time)
        return segment

    @property
    def append_time(self) -> int:
        """When the last batch was appended."""
        return self._append_time

    def next_append_time(self) -> int:
        """Now, or when the last batch was appended: a clock that was set back does not put them out of order."""
        self._append_time = max(self._clock.now_us(), self._append_time)
        return self._append_time

    # Out.

    def read(self, offset: int, bytes_max: int) -> list[Batch]:
        """Committed batches, from the one that holds `offset` (it may begin earlier): at least one if there is
        any, then as many as fit in `bytes_max`; an empty list at the end.

        Where `offset` is damaged the policy's `on_damage` decides: LogDamaged, or the batches behind it.
        """
        batches = self.read_tail(offset, bytes_max)
        return self.read_disk(offset, bytes_max) if batches is None else batches

    def read_tail(self, offset: int, bytes_max: int) -> list[Batch] | None:
        """As `read`, from memory only: None if `offset` must be read from disk. For the owner's thread."""
        if not self.start <= offset <= self.end:
            raise OffsetOutOfRange(offset, self.start, self.end)
        if offset >= self.committed:
            return []
        # Compaction has rewritten these segments, and does not know what of them is in memory.
        if offset < self._compacted_base:
            return None
        return self._tail.read(offset, bytes_max, self.committed)

    def read_disk(self, offset: int, bytes_max: int, on_damage: OnDamage | None = None) -> list[Batch]:
        """As `read`, from disk only. For any thread, and for a reader that must not follow the policy's `on_damage`."""
        while True:
            try:
                return self._look(partial(self._read_segments, offset=offset, bytes_max=bytes_max))
            except LogDamaged as damage:
                self._note_damage(damage)
                if offset < damage.first:
                    # Nothing is between the two: so this is where the reader stands.
                    damage = LogDamaged(damage.path, damage.position, offset, damage.last, damage.reason)
                rule = on_damage or self.policy.on_damage
                if rule is OnDamage.STOP or damage.last is None or not damage.holds(offset):
                    raise damage.with_remedy(DAMAGE_REMEDY) from None
                if on_damage is None:
                    self.skipped_offsets += damage.last - offset
                offset = damage.last

    def offset_at(self, append_time: int) -> int:
        """The first offset that was appended at that time (µs since 1970) or later; the end if there is none."""
        return self._look(lambda segments: self._offset_at(segments, append_time))

    def offset_after(self, offset: int, size: int) -> int:
        """An offset at which a batch begins, at least `size` bytes behind the one that holds `offset`, and as near to
        that as the indexes know; the end of what is committed if there is none."""
        return self._look(lambda segments: self._offset_after(segments, offset, size))

    def _look(self, into: Callable[[Sequence[Segment]], T]) -> T:
        """Look into the segments, again if they changed meanwhile."""
        while True:
            segments = self._segments
            try:
                return into(segments)
            except FileNotFoundError as error:
                # Retention was faster, unless someone else took the file away.
                if segments == self._segments:
                    raise ReadFailed(f"{self.directory}: cannot be read: {error}") from error
            except OSError as error:
                raise ReadFailed(f"{self.directory}: cannot be read: {error}") from error

    def _read_segments(self, segments: Sequence[Segment], offset: int, bytes_max: int) -> list[Batch]:
        committed = self.committed
        place = bisect_right(segments, offset, key=_base) - 1
        if place < 0 or not self.start <= offset <= self.end:
            raise OffsetOutOfRange(offset, self.start, self.end)
        while offset < committed:
            segment = segments[place]
            following = segments[place + 1] if place + 1 < len(segments) else None
            found = segment.read(offset, bytes_max, following.base if following else committed)
            if found:
                if following and found[-1].end > following.base:
                    raise recovery.overlap(segment, following, found[-1].end)
                return found if found[-1].end <= committed else [batch for batch in found if batch.end <= committed]
            if following is None:
                break
            # The offsets from here to the next segment were never given out, unless a segment is missing.
            if wrong := recovery.misplaced(segment, following, offset):
                raise wrong
            place += 1
        return []

    def _offset_at(self, segments: Sequence[Segment], append_time: int) -> int:
        places = range(len(segments))
        place = max(0, bisect_left(places, append_time, key=partial(retention.begun_at, segments)) - 1)
        for segment in segments[place:]:
            offset = segment.offset_at(append_time)
            if offset is not None and offset < self.committed:
                return offset
        return self.committed

    def _offset_after(self, segments: Sequence[Segment], offset: int, size: int) -> int:
        place = bisect_right(segments, offset, key=_base) - 1
        if place < 0 or not self.start <= offset <= self.end:
            raise OffsetOutOfRange(offset, self.start, self.end)
        position = segments[place].position_of(offset) + size
        for segment in segments[place:]:
            found = segment.index.ceiling(position)
            if found is not None:
                return min(found, self.committed)
            position = max(0, position - segment.size)
        return self.committed

    # Damage.

    def _leave_behind(self, found: recovery.Recovered) -> None:
        """Seal the last segment, which is damaged or cut short, as it is, and go on in a new one."""
        damaged = self._segments[-1]
        witnessed, damage = found.witnessed, found.damage
        # Without a foot it stays one that is cut short, up to where the next one begins.
        is_cut = self._reached < witnessed
        if is_cut and not any(each.last == witnessed for each in damage):
            damage = [*damage, recovery.cut_short(damaged, self._reached, witnessed)]
        base = max(self.end, witnessed)
        if base == damaged.base:
            if self.is_piped:
                raise damage[0]  # the next offset is the origin's to say
            base += 1  # two segments cannot have one name
        is_unknown = found.is_reservation_lost or is_cut
        self.end = base + RESERVATION_LOST_AHEAD if is_unknown and not self.is_piped else base
        if not is_cut:
            base = self.end
        for each in damage:
            self._remember(each)
        append_time = self._append_time  # of the last message, as retention wants it
        try:
            recovery.note_damage(self._files, self.directory, damaged.base, damage)
            if not is_cut:
                damaged.write_control(Control(base, self.previous_base()), base, append_time)
        except OSError as error:
            raise AppendFailed(f"{damaged.path}: cannot be sealed: {error.strerror}") from error
        control = Control(self.end, damaged.base, snapshot=self._producers.snapshot(self.end))
        active = self.create_segment(base, control, append_time)
        damaged.size = damaged.written
        damaged.sealed = True
        self._segments = (*self._segments, active)
        self._reached = base
        self.written = self.durable = self.committed = self._opened_at = self.end
        self._reserved = self.reserved_written = self.end
        self._closed_cleanly = False
        self._oldest_us = None

    def _note_damage(self, damage: LogDamaged) -> None:
        """Remember what a reader found, and note it for the next start."""
        if not self._remember(damage):
            return
        base = next((segment.base for segment in self._segments if segment.path == damage.path), None)
        if base is None or base == self._segments[-1].base:
            return  # recovery looks there by itself
        noted = [each for each in self.damage if each.path == damage.path]
        try:
            recovery.note_damage(self._files, self.directory, base, noted)
        except OSError as error:
            logger.warning("%s: cannot note that it is damaged: %s", damage.path, error.strerror)

    def _remember(self, damage: LogDamaged) -> bool:
        """Whether it is new, or more than was known of the same place, and there is room for it."""
        key = (damage.path.name, damage.position)
        with self._segments_lock:
            known = self._damage.get(key)
            if known.covers(damage) if known is not None else len(self._damage) >= _DAMAGE_MAX:
                return False
            self._damage[key] = damage
        logger.error("%s", damage)
        self._owner.damaged(self)
        return True

    # Upkeep.

    def retain(self) -> int:
        """Drop the segments that the policy does not keep, oldest first; how many it were."""
        self._finish_merge()
        segments = self._segments
        committed = self.committed
        # What nobody could read yet stays.
        complete = sum(following.base <= committed for following in segments[1:])
        unneeded = sum(following.base <= max(self.unneeded, self._purged) for following in segments[1:])
        expired = min(max(retention.expired(segments, self.policy, self._clock.now_us()), unneeded), complete)
        self._drop(expired)
        return expired

    def purge(self, offset: int) -> None:
        """Let nothing below `offset` be read any more. Whoever calls this remembers it, and says so after a restart;
        `retain` removes the segments."""
        self._purged = max(self._purged, offset)

    def oldest_segment_time(self) -> int | None:
        """Return when the last message of the oldest segment was appended; None if no message can be dropped."""
        segments = self._segments
        if len(segments) > 1:
            return retention.begun_at(segments, 1) if segments[1].base <= self.committed else None
        return self._append_time if self._oldest_us is not None and self.state is State.OPEN else None

    def drop_oldest(self) -> int:
        """Drop the oldest sealed segment, whatever the policy says; return its bytes."""
        self._finish_merge()
        return self._drop(1)

    def _drop(self, count: int) -> int:
        """Drop so many of the oldest segments; return their bytes."""
        if not count:
            return 0
        # Durably, before the first of them goes: or what retention dropped would look like a loss.
        self._mark_start(self._segments[count].base)
        self._files.sync_directory(self.directory)
        return sum(self._drop_first() for _ in range(count))

    def _drop_first(self) -> int:
        with self._segments_lock:
            segment, self._segments = self._segments[0], self._segments[1:]
        try:
            self._files.remove(segment.path)
        except OSError:
            # It is still there, so it is not dropped: or the log would have a gap when it is opened again.
            with self._segments_lock:
                self._segments = (segment, *self._segments)
            raise
        self._forget(segment)
        return segment.size

    def compact(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Keep the latest message of each key; how many messages were dropped. Then merge small segments.

        Raises Closed when the log is deleted meanwhile, or `stopped` says so.
        """
        self._finish_merge()

        def gives_up() -> bool:
            return self.state is State.CLOSED or stopped()

        segments = self._segments
        dropped = compaction.compact(
            segments, self.policy, self.durable, self._clock.now_us(), self._files, self._replace, gives_up
        )
        compacted = self._segments
        following = dict(pairwise(compacted))
        for group in compaction.small_neighbours(compacted, self.policy, self.store_limit):
            self._merge(group, following[group[-1]], gives_up)
        self._compacted_base = segments[-1].base
        return dropped

    def _merge(self, group: Sequence[Segment], following: Segment, gives_up: Callable[[], bool]) -> None:
        merge = compaction.Merge(group, following, self._files)
        self._unfinished = merge.undo
        try:
            merged = merge.write(gives_up)
        except LogDamaged as error:
            logger.error("%s; the segment is not merged", error)
            self._finish_merge()
            return
        except (AppendFailed, Closed):
            with contextlib.suppress(OSError):
                self._finish_merge()
            raise
        with self._segments_lock:
            at = self._segments.index(group[0])
            self._segments = (*self._segments[:at], merged, *self._segments[at + len(group) :])
        for segment in group:
            self._open_segments.drop(segment)
        self._unfinished = merge.settle
        self._finish_merge()

    def _finish_merge(self) -> None:
        """Finish what an error interrupted: until then no other segment may be removed or rewritten."""
        if self._unfinished is not None:
            self._unfinished()
            self._unfinished = None

    @property
    def compaction_due(self) -> bool:
        """Whether the policy asks for compaction, and segments were sealed since the last one."""
        return self.policy.cleanup is Cleanup.COMPACT and self._compacted_base != self._segments[-1].base

    def verify(self) -> recovery.Report:
        return recovery.verify(self._segments)

    def truncate(self, offset: int) -> None:
        """Drop the batches that reach beyond `offset`. Their offsets are not given out again.

        If it is interrupted some of them may come back: call it again.
        """
        self.flush()
        if self.failure is not None:
            raise self.failure
        self._finish_merge()
        if not self.start <= offset <= self.end:
            raise OffsetOutOfRange(offset, self.start, self.end)
        segments = self._segments
        place = bisect_right(segments, offset, key=_base) - 1
        cut = segments[place]
        kept, producers = _keep_below(cut, offset)
        if kept == cut.written and place == len(segments) - 1:
            return
        if segments[-1].base == self.end:
            self.end += 1  # two segments cannot have one name
        # From here on the log goes `cut`, `active`: recovery removes what is between them.
        control = Control(
            reserved=max(self.end, self.reserved_written),
            previous=cut.base,
            dropped=segments[-1].base,
            snapshot=producers.snapshot(offset),
        )
        active = self.create_segment(self.end, control, self.next_append_time())
        self.written = self.durable = self.committed = self.end
        self._closed_cleanly = self._rolls = False
        self._oldest_us = None
        self._producers = producers
        self._segments = (*segments[: place + 1], active)
        cut.sealed = True
        self._tail.clear()
        try:
            for segment in segments[place + 1 :]:
                self._files.remove(segment.path)
                self._forget(segment)
            compaction.rewrite(cut, _batches_until(cut, kept), self._files, self._replace)
        except (OSError, AppendFailed) as error:
            # Only the head of the active segment knows what is to go: it must stay the active one.
            self.fail(LogFailed(f"{self.directory}: a truncation is not finished, restart and call it again: {error}"))
            raise self.failure or error from error

    # Both ways at once, in the calling thread; and the end.

    def flush(self) -> None:
        """Write and sync all that was appended. What failed was told to those who wait for it."""
        write = self.begin_write()
        if write is not None:
            write.run()
            self.finish_write(write)
        sync = self.begin_sync()
        if sync is not None:
            [error] = self._files.sync([sync.file])
            self.finish_sync(sync, error)

    def close(self) -> None:
        """Make everything durable, note that it is, and let go of the files."""
        if self.state is State.CLOSED:
            return
        self.flush()
        if self.state is State.OPEN:
            self._note_close()
        self.state = State.CLOSED
        self._reject(self.committed, Closed(f"{self.directory}: the log is closed"))
        self._let_go(self._segments)

    def _let_go(self, segments: Sequence[Segment]) -> None:
        """Close segments whose sync nobody waits for any more."""
        for segment in segments:
            segment.is_given_up = True
            self._open_segments.drop(segment)

    def abandon(self) -> None:
        """Take nothing more, because the log is being deleted. A worker may still be writing to it."""
        self.state = State.CLOSED
        self._reject(self.committed, Closed(f"{self.directory}: the log is deleted"))

    def _note_close(self) -> None:
        if self._closed_cleanly and self.end == self._opened_at:
            return
        try:
            self._segments[-1].write_control(Control(self.end, self.previous_base()), self.end, self._append_time)
        except (AppendFailed, LogFailed) as error:
            logger.warning("%s: cannot note a clean stop, the next start recovers: %s", self.directory, error)

    def _when_committed(self, end: int, offset: int, done: Done | None) -> None:
        if done is None:
            return
        if end <= self.committed:
            done(offset, None)
        else:
            self._waiting.append((end, offset, done))

    def _commit(self) -> None:
        if self.state is not State.OPEN:
            return
        self._tell(self._enduring, self.durable)
        committed = self.durable
        if self.policy.durability is Durability.FLUSH and (self.is_piped or self.written <= self._reserved):
            committed = self.written
        if self._held_at is not None:
            committed = min(committed, self._held_at)
        if committed <= self.committed:
            return
        self.committed = committed
        # Readers first: on a connection that does both, the messages come before the answer that covers them. So who
        # serves them calls `tell`.
        if self.on_commit is not None:
            fresh = []
            while self._fresh and self._fresh[0].end <= committed:
                fresh.append(self._fresh.popleft())
            self.on_commit(fresh)
            self._owner.announce()
        else:
            self.tell(committed)

    def tell(self, offset: int) -> None:
        """Tell those who appended below `offset`, up to where it is committed, that it is."""
        self._tell(self._waiting, offset)

    def _tell(self, waiting: deque[tuple[int, int, Done]], mark: int) -> None:
        """Tell those who wait for a mark that has come so far."""
        while waiting and waiting[0][0] <= mark:
            _, offset, done = waiting.popleft()
            self._call(done, offset, None)

    def _call(self, done: Done, offset: int, error: PenstockError | None) -> None:
        try:
            done(offset, error)
        except Exception as fault:  # noqa: BLE001 - one who waits must not keep the others waiting
            self._owner.fault("finish", self, fault)

    def _reject(self, offset: int, error: PenstockError) -> None:
        """Take back all that was appended from `offset` on, and tell why."""
        self._owner.settled(self._pending_bytes)
        self._pending = []
        self._pending_bytes = 0
        self._rolls = False
        while self._fresh and self._fresh[-1].end > offset:
            self._fresh.pop()
        self._producers.forget(offset)
        self.end = offset
        if self._held_at is not None:
            self._held_at = min(self._held_at, offset)
        rejected = []
        for waiting in (self._enduring, self._waiting):
            while waiting and waiting[-1][0] > offset:
                rejected.append(waiting.pop())
        if self.on_reject is not None:
            self.on_reject(offset)
            self._owner.announce()
        for _, appended_at, done in reversed(rejected):
            self._call(done, appended_at, error)

    def fail(self, error: LogFailed) -> None:
        """Take nothing more until a restart, and tell those who wait. What is committed can still be read."""
        if self.state is State.OPEN:
            logger.error("%s: takes no more appends until a restart: %s", self.directory, error)
            self.state = State.FAILED
            self.failure = error
            self._segments[-1].is_given_up = True
            self._reject(self.committed, error)

    def _plan(self, batches: Sequence[Batch | Run]) -> list[Part]:
        """Which batches go to the active segment, and which to new ones: each with what its head must know."""
        size = self._segments[-1].written
        base = self._segments[-1].base
        segment_bytes = retention.segment_bytes(self.policy, self.store_limit)
        part = Part(None, [])
        parts = [part]
        first = batches[0].base_offset if batches else self.end
        if self._rolls and first > base:
            base = first
            part = Part(self._producers.snapshot(base), [])
            parts.append(part)
            size = 0
        for batch in batches:
            if size + batch.size > segment_bytes and batch.base_offset > base:
                base = batch.base_offset
                part = Part(self._producers.snapshot(base), [])
                parts.append(part)
                size = 0
            part.batches.append(batch)
            size += batch.size
        return parts

    def _publish(self, write: Write) -> None:
        """Let readers see what was written. The order matters to those in other threads."""
        for segment in (self._segments[-1], *write.created):
            segment.size = segment.written
        if write.created:
            with self._segments_lock:
                sealed = self._segments[-1]
                self._segments = (*self._segments, *write.created)
            self._oldest_us = None
            self._rolls = self._closed_cleanly = False
            for segment in (sealed, *write.created[:-1]):
                segment.sealed = True
                self._open_segments.touch(segment)
        if self.on_commit is not None:
            self._fresh += write.fresh if self._held_at is None else self._held(write.fresh)
        if self._oldest_us is None:
            base = self._segments[-1].base
            self._oldest_us = next((batch.append_time for batch in write.done if batch.base_offset >= base), None)
        for batch in write.done:
            self._tail.add(batch)
            if batch.producer or batch.source:
                self._producers.settle(batch)

    def _held(self, fresh: Sequence[Batch | Run]) -> list[Batch | Run]:
        """What is kept of these while the log is held: who holds it may have more than fits into memory."""
        kept = []
        for item in fresh:
            self._held_bytes += item.size
            if self._held_bytes <= HELD_BYTES:
                kept.append(item)
        return kept

    def _note_unsynced(self, write: Write) -> None:
        if not write.done:
            return
        count = sum(batch.count for batch in write.done)
        self.stored_messages += count
        self.stored_bytes += sum(batch.size for batch in write.done)
        self._unsynced_messages += count
        if self._unsynced_since_us is None:
            self._unsynced_since_us = self._clock.monotonic_us()

    def _replace(self, old: Segment, new: Segment) -> None:
        with self._segments_lock:
            self._segments = tuple(new if segment is old else segment for segment in self._segments)
        self._open_segments.drop(old)

    def _forget(self, segment: Segment) -> None:
        """Make it durable that a segment's file was removed, before the next one is, so that no gap is left."""
        self._open_segments.drop(segment)
        self._files.sync_directory(self.directory)
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(segment.index_path)
        name = segment.path.name
        with self._segments_lock:
            known = [key for key in self._damage if key[0] == name]
            for key in known:
                del self._damage[key]
        if known:
            self._owner.damaged(self)
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(self.directory / recovery.damaged_name(segment.base))


def _base(segment: Segment) -> int:
    return segment.base


def _keep_below(segment: Segment, offset: int) -> tuple[int, Producers]:
    """Where the first batch begins that reaches beyond `offset`, and what is known of producers up to there."""
    producers = Producers.restore(segment.head().snapshot)
    for found in segment.scan():
        if isinstance(found, Found):
            if found.batch.end > offset:
                return found.position, producers
            if found.batch.count:
                producers.note(found.batch)
                producers.settle(found.batch)
    return segment.written, producers


def _batches_until(segment: Segment, position: int) -> Iterator[Batch]:
    for found in segment.scan():
        if isinstance(found, Found) and found.position < position:
            yield found.batch
