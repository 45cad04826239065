"""The store: a data directory with all its logs, and the rounds that make them durable together.

    <data>/LOCK                             who has the directory open
    <data>/FORMAT                           the version of all that follows
    <data>/meta.db                          a projection for queries
    <data>/topics/<topic id>/<partition>/   a log; topic 0 is the state topic
    <data>/snapshots/<id>/                  second names of segments, while somebody copies them

A store and its logs belong to one thread. Alone it is driven by `flush`, which writes and syncs in the calling
thread. In an event loop it is driven by `run`: two lanes, each with one round at a time in a worker thread.

    synced    topics with `fsync`: writes and syncs all that is dirty; also the syncs that `flush` topics are due
    written   topics with `flush`: writes only, so that their readers never wait for somebody's fsync; what is small
              on the loop itself

What arrives while a round runs goes into the next: the more is going on, the more messages share a sync.

Topics are changed one at a time, each in the same steps, whoever waits for the disk: the calling thread, or `run`
for those who await:

    create, alter   decide → commit to the state topic → open the new logs → install
    purge           commit the new starts to the state topic → let nobody read below
    delete          commit a mark to the state topic → forget → remove the files → commit that the mark is gone
    snapshot        note the marks of all logs → give their segments second names; upkeep waits as well

The state topic comes first, so the next start finishes what was interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar

from penstock.batch import Batch
from penstock.clock import Clock, SystemClock
from penstock.errors import (
    AppendFailed,
    BadDirectory,
    Closed,
    DiskError,
    LogDamaged,
    LogFailed,
    OffsetOutOfRange,
    Overloaded,
    PenstockError,
    TooManyTopics,
    UnknownTopic,
    UnsupportedBatch,
)
from penstock.health import Health, Usage
from penstock.storage import recovery, retention, witness
from penstock.storage.files import Files, OsFiles
from penstock.storage.flush import Sync, Write
from penstock.storage.format import claim_format
from penstock.storage.histogram import MESSAGES, SECONDS, Histogram
from penstock.storage.limit import trim
from penstock.storage.log import Done, Log
from penstock.storage.log import State as LogState
from penstock.storage.meta import Change, Meta, SegmentRow
from penstock.storage.policy import Cleanup, Durability, OnDamage, Policy, Topic
from penstock.storage.producers import SOURCES_MAX
from penstock.storage.segment import OpenSegments, Reader, Segment
from penstock.storage.snapshot import DIRECTORY as SNAPSHOTS
from penstock.storage.snapshot import Mark, Snapshot, clear_all
from penstock.storage.space import DiskSpace, is_disk_full
from penstock.storage.state import STATE_TOPIC, State
from penstock.storage.tail import TailBudget
from penstock.storage.witness import STATE_PLACE, Place, Witness

logger = logging.getLogger(__name__)

# A round of `flush` topics that is no larger is written on the loop itself: the page cache takes it in some µs, and
# the way to a worker and back costs 100 and more, up to Python's switch interval when the loop is busy.
_QUICK_BYTES: Final = 64 << 10

_OPEN_SEGMENTS_MAX: Final = 1024
_STATE_SEGMENTS_OPEN: Final = 8
_SPACE_EVERY_S: Final = 1.0
# Snapshots at once. One that nobody reads ends after a while: it keeps room on the disk that retention would free.
SNAPSHOTS_MAX: Final = 8
SNAPSHOT_IDLE_US: Final = 3_600_000_000
# The name of the problem that the store is larger than allowed, and nothing can go.
_LIMIT_PROBLEM: Final = "store"

# Small segments, so that most of the state topic can be compacted at any time. Nobody but the state itself reads it, so
# tombstones need not stay.
_STATE_POLICY: Final = Policy(cleanup=Cleanup.COMPACT, segment_bytes=1 << 20, tombstone_ms=0)
# The state topic is compacted when its sealed segments have grown by this much, and by as much as they were.
_STATE_GROWTH_BYTES: Final = 4 << 20

# What to do about a directory of no known topic.
ORPHAN_REMEDY: Final = (
    "of no known topic, nobody can read it: stop the broker and run penstock log repair, with --adopt ID=NAME if it "
    "does not find the name by itself, or move the directory elsewhere"
)
_STATE_REMEDY: Final = "it holds topics, groups and positions: restore the file from a copy, or run penstock log repair"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    reader: Reader = "pread"
    # Bytes that wait for a write, over all logs: what a crash of the process can cost, and a bound on memory.
    unflushed_bytes_max: int = 64 << 20
    tail_bytes_max: int = 64 << 20
    # Segments with an open file. None: half of the file descriptors that the process may have, 1024 at most.
    open_segments_max: int | None = None
    # Partitions of all topics together. Each costs some memory and time at every start, used or not.
    partitions_max: int = 20_000
    # Room on the disk that is kept for the state topic. 0: none, and a full disk is noticed when a write fails.
    disk_reserve_bytes: int = 0
    # Under `flush` a log is synced when this many messages are written, or this long after the first of them.
    flush_messages: int = 500
    flush_ms: int = 100
    upkeep_ms: int = 10_000
    # Bytes of all segments together; above that the oldest go. None: any.
    retain_bytes: int | None = None


class Store:
    def __init__(
        self,
        directory: Path,
        *,
        settings: Settings | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
        meta: Meta | None = None,
    ) -> None:
        self.directory = directory
        self.settings = settings or Settings()
        self.health = Health()
        self._files: Files = files or OsFiles()
        self._clock: Clock = clock or SystemClock()
        segments_max = self.settings.open_segments_max or _open_segments_max()
        # A mapping has a descriptor of its own.
        self._open_segments = OpenSegments(
            max(1, segments_max // 2) if self.settings.reader == "mmap" else segments_max
        )
        # Files with unsynced bytes stay open, so each lane has so many of them at the most.
        self._unsynced_max = max(1, segments_max // 2)
        self._tail_budget = TailBudget(self.settings.tail_bytes_max)
        # Bytes of the sealed segments of the state topic after the last compaction.
        self._state_bytes = 0
        self._logs: dict[Place, Log] = {}
        # Logs that cannot be opened. The others are served all the same.
        self.refused: dict[Place, PenstockError] = {}
        # Logs of which some messages cannot be read. They are served around them.
        self.damage: dict[Log, None] = {}
        # Logs that take nothing more, because a sync of theirs failed.
        self.failed: dict[Log, None] = {}
        self._topics: dict[int, Topic] = {}
        # Directories of topics that the state topic does not know. They are left alone.
        self.orphans: list[Path] = []
        # Logs with batches that no round has taken yet.
        self._dirty: dict[Log, None] = {}
        self.unflushed_bytes = 0
        # Of each round: how long it took to write and to sync, and how many messages were in it.
        self.write_seconds, self.sync_seconds = Histogram(SECONDS), Histogram(SECONDS)
        self.round_messages = Histogram(MESSAGES)
        # Done when there is room for more again, if anyone waits for that.
        self._room: asyncio.Future[None] | None = None
        # Logs with batches that are written and not yet synced.
        self._unsynced: dict[Log, None] = {}
        self._lanes: _Lanes | None = None
        # Called when logs have given what was committed to their `on_commit`; not while a round is being finished.
        self.on_commit: Callable[[], None] | None = None
        # Called after each upkeep that `run` has driven: logs may begin later than before.
        self.on_upkeep: Callable[[], None] | None = None
        self._is_finishing = False
        # Bytes of all segments, as of the last upkeep.
        self.store_bytes = 0
        # Changes of the topics that `run` has not begun, and whether there is one under way.
        self._turns: deque[_Turn] = deque()
        self._changing = False
        # It opens and removes the files of topics for `run`.
        self._worker = ThreadPoolExecutor(1, "penstock-topics")
        # `run` ends: upkeep gives up.
        self._is_ending = False
        self._readers: ThreadPoolExecutor | None = None
        self._snapshots: dict[Snapshot, None] = {}
        # Held by whoever drops or rewrites segments, or needs that nobody does.
        self._upkeeping = asyncio.Lock()
        self._files.make_directory(directory)
        self._lock = self._files.lock(directory / "LOCK")
        try:
            claim_format(self._files, directory)
            clear_all(self._files, directory)
        except BaseException:
            self._lock.close()
            raise
        self.space = DiskSpace(self._files, directory, self.settings.disk_reserve_bytes, self.health)
        # The state topic may use the reserve.
        self._open_state_segments = OpenSegments(_STATE_SEGMENTS_OPEN, self.space.release)
        self._meta = meta or Meta(directory / "meta.db")
        # How far each log once reached.
        self._witnesses: Mapping[Place, Witness] = {STATE_PLACE: witness.of_state_topic(self._meta)}
        try:
            try:
                self._state_log = self._logs[STATE_PLACE] = self._open_log(STATE_PLACE, _STATE_POLICY)
                self._state = State(self._state_log, self._meta)
            except LogDamaged as damage:
                raise damage.with_remedy(_STATE_REMEDY) from None
            self._witnesses = witness.of_topics(self._meta, self._state.everything())
            self._open_topics()
            self._measure()
        except BaseException:
            self._let_go()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Topics and the state. What is awaited is done by `run`, after all that was asked before; it is done, or not
    # begun, though who awaits it goes away. The others wait for the disk.

    @property
    def topics(self) -> list[Topic]:
        return list(self._topics.values())

    @property
    def state(self) -> State:
        return self._state

    def log(self, topic_id: int, partition: int = 0) -> Log:
        """The log of a partition; why it was refused, if it could not be opened."""
        place = (topic_id, partition)
        if place in self.refused:
            raise self.refused[place]
        if place not in self._logs:
            raise UnknownTopic(f"there is no partition {partition} of a topic with id {topic_id}")
        return self._logs[place]

    def create_topic(
        self, name: str, *, partitions: int = 1, policy: Policy | None = None, origin: str | None = None
    ) -> Topic:
        """A new topic with its logs. It is in the state topic before there is any file of it."""
        return self._change_now(partial(self._create, name, partitions, policy or Policy(), origin))

    async def create_topic_async(
        self, name: str, *, partitions: int = 1, policy: Policy | None = None, origin: str | None = None
    ) -> Topic:
        return await self._change_in_turn(partial(self._create, name, partitions, policy or Policy(), origin))

    def alter_topic(self, topic: Topic) -> None:
        """Change a topic's name or policy, or give it more partitions; never fewer. Those that are refused are
        opened again. An empty one can become one that is piped."""
        self._change_now(partial(self._alter, topic))

    async def alter_topic_async(self, topic: Topic) -> None:
        await self._change_in_turn(partial(self._alter, topic))

    def delete_topic(self, topic_id: int) -> None:
        """Forget a topic and remove its files. Interrupted, it is finished at the next start."""
        self._change_now(partial(self._delete, topic_id))

    async def delete_topic_async(self, topic_id: int) -> None:
        await self._change_in_turn(partial(self._delete, topic_id))

    def purge_topic(self, topic_id: int, offsets: Mapping[int, int]) -> None:
        """Let nothing below these offsets be read any more, by partition. Upkeep removes whole segments."""
        self._change_now(partial(self._purge, topic_id, offsets))

    async def purge_topic_async(self, topic_id: int, offsets: Mapping[int, int]) -> None:
        await self._change_in_turn(partial(self._purge, topic_id, offsets))

    async def identity(self) -> str:
        """What tells this store from all others, for ever: drawn when somebody first asks."""
        if self._state.get("store", "identity") is None:
            await self._change_in_turn(self._identify)
        found: str = self._state.get("store", "identity")
        return found

    async def snapshot(self) -> Snapshot:
        """Return all logs as they are now, to be read until the snapshot is closed."""
        if len(self._snapshots) >= SNAPSHOTS_MAX:
            raise Overloaded(f"there are {SNAPSHOTS_MAX} snapshots already: wait until a backup has ended")
        async with self._upkeeping:
            return await self._change_in_turn(self._snapshot)

    def snapshot_now(self) -> Snapshot:
        """As `snapshot`, of a store that nobody drives. All of it must be flushed."""
        return self._change_now(self._snapshot)

    def end_snapshot(self, snapshot: Snapshot) -> None:
        """Let a snapshot go. For any thread."""
        self._snapshots.pop(snapshot, None)
        try:
            snapshot.close()
        except OSError as error:
            logger.warning("a snapshot cannot be removed, the next start tries again: %s", error)

    async def write_state(self, changes: Sequence[Change]) -> None:
        """Set and delete values, all or none of them, and wait until they are committed."""
        settled, done = outcome()
        self._state.write(changes, done)
        await settled

    def usage(self) -> dict[str, Usage]:
        """How full each limited table is, by name."""
        limit = self.settings.retain_bytes
        return {
            **({} if limit is None else {"store_bytes": Usage(self.store_bytes, limit)}),
            "unflushed_bytes": Usage(self.unflushed_bytes, self.settings.unflushed_bytes_max),
            "tail_bytes": self._tail_budget.usage,
            "open_segments": self._open_segments.files_usage,
            "index_bytes": self._open_segments.index_usage,
            "partitions": Usage(self._partitions, self.settings.partitions_max),
            # Of the partition that has most.
            "sources": Usage(max(log.sources for log in self._logs.values()), SOURCES_MAX),
            **self.space.usage,
        }

    # Rounds.

    def appended(self, log: Log, size: int) -> None:
        if log is not self._state_log:
            self.space.admit()
        self.charge(size)
        self._dirty[log] = None
        if self._lanes is not None:
            self._lanes.wake(log)

    def charge(self, size: int) -> None:
        """Count bytes that wait for the disk until they are `settled`. Raises Overloaded if they are too many."""
        # After `room` any batch is taken: one as large as the limit would never fit beside anything else.
        if self.unflushed_bytes + size > self.settings.unflushed_bytes_max and self.is_crowded:
            raise Overloaded(f"{self.unflushed_bytes} bytes wait for the disk: try again later")
        self.unflushed_bytes += size

    def settled(self, size: int) -> None:
        self.unflushed_bytes -= size
        if self._room is not None and not self.is_crowded:
            self._room.set_result(None)
            self._room = None

    @property
    def is_crowded(self) -> bool:
        """Whether half of what may wait for the disk does: whoever can wait with more should."""
        return self.unflushed_bytes > self.settings.unflushed_bytes_max // 2

    async def room(self) -> None:
        """Wait until it is not crowded."""
        while self.is_crowded:
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)

    def flush(self) -> None:
        """Write and sync all that was appended, here and now."""
        while writes := self._take_writes(None):
            self._drive(self._round(writes, [], sync=True))
        self._drive(self._round([], self._take_syncs(None), sync=True))

    async def run(self) -> None:
        """Drive the rounds and the upkeep, until cancelled; `close` does the rest."""
        self._is_ending = False
        with ThreadPoolExecutor(1, "penstock-upkeep") as worker:
            lanes = self._lanes = _Lanes(self, asyncio.get_running_loop())
            for log in list(self._dirty):
                lanes.wake(log)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._keep_up(worker))
                    group.create_task(self._compact_state(worker, lanes))
                    group.create_task(self._watch_space())
                    group.create_task(self._take_turns(lanes))
                    # Shielded: cancelling who waits for it does not end the lanes.
                    await asyncio.shield(lanes.end)
            finally:
                self._lanes = None
                self._is_ending = True
                await lanes.stop()

    async def append(self, log: Log, batch: Batch) -> int:
        """Append, and wait until the batch is committed."""
        settled, done = outcome()
        log.append(batch, done=done)
        return await settled

    async def read(self, log: Log, offset: int, bytes_max: int, on_damage: OnDamage | None = None) -> list[Batch]:
        """Read from memory at once, or from disk in another thread; `on_damage` as in `Log.read_disk`."""
        batches = log.read_tail(offset, bytes_max)
        if batches is not None:
            return batches
        if self._readers is None:
            self._readers = ThreadPoolExecutor(4, "penstock-read")
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, log.read_disk, offset, bytes_max, on_damage
        )

    def upkeep(self) -> None:
        """Drop what the policies do not keep, compact, and bring `meta.db` up to date."""
        self._roll(self._due_to_roll())
        self._upkeep(list(self._logs.values()))
        self._roll(self._trim(self._trimmable()))
        self.space.check()
        self._project(self._take_projection())

    def segments(self) -> list[SegmentRow]:
        """The segments of every log, as of the last upkeep."""
        return self._meta.segments()

    def close(self) -> None:
        """Make everything durable and let go of the directory. `run` must have ended."""
        assert self._lanes is None, "stop `run` first"
        self._worker.shutdown()
        while self._turns:
            self._turns.popleft().refuse(Closed(f"{self.directory}: the store is closed, nothing was changed"))
        try:
            self.flush()
            for log in [log for log in self._logs.values() if log is not self._state_log]:
                log.close()
            self._project(self._take_projection())
            self._state_log.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._worker.shutdown()
        for snapshot in list(self._snapshots):
            self.end_snapshot(snapshot)
        if self._readers is not None:
            self._readers.shutdown()
        self._meta.close()
        self._lock.close()

    def _drive(self, round_: Round) -> None:
        round_.run()
        self._finish(round_)

    def _take_writes(self, durability: Durability | None) -> list[Write]:
        """What waits, of as many logs as may have unsynced bytes. The first that waited are the first to be taken."""
        writes: list[Write] = []
        room = self._unsynced_max
        if durability is Durability.FLUSH:
            room -= len(self._unsynced)
        for log in list(self._dirty):
            if durability not in (None, log.policy.durability):
                continue
            if not log.has_pending:
                del self._dirty[log]  # what waited was taken back
                continue
            is_open = durability is Durability.FLUSH and log in self._unsynced
            if room <= 0 and not is_open:
                continue
            with self._limited_to(log):
                if (write := log.begin_write()) is not None:
                    del self._dirty[log]
                    writes.append(write)
                    room -= not is_open
        return writes

    def _take_syncs(self, now_us: int | None) -> list[Sync]:
        """The syncs that are due by now; None: all."""
        syncs = []
        for log in list(self._unsynced):
            due_us = self._sync_due_us(log)
            if due_us is None:
                del self._unsynced[log]
            elif (now_us is None or due_us <= now_us) and (sync := log.begin_sync()):
                syncs.append(sync)
        return syncs

    def _finish(self, round_: Round) -> None:
        self._is_finishing = True
        try:
            self._finish_logs(round_)
        finally:
            self._is_finishing = False
            self.announce()

    def announce(self) -> None:
        """Have what is committed served: after a round, that of all its logs together."""
        if self.on_commit is not None and not self._is_finishing:
            self.on_commit()

    def _finish_logs(self, round_: Round) -> None:
        for write in round_.writes:
            with self._limited_to(write.log):
                write.log.finish_write(write)
            if is_disk_full(write.error):
                self.space.note_full()
            if self._sync_due_us(write.log) is not None:
                self._unsynced[write.log] = None
            self._note_failure(write.log)
        for sync, error in zip(round_.syncs, round_.errors, strict=True):
            with self._limited_to(sync.log):
                sync.log.finish_sync(sync, error)
            self._note_failure(sync.log)
            if self._sync_due_us(sync.log) is None:
                self._unsynced.pop(sync.log, None)
        if round_.fault is not None:
            self.health.fault("sync", "all that was in the round has failed", round_.fault)
        if self._lanes is not None and self._is_state_overgrown():
            self._lanes.overgrown.set()
        if round_.writes:
            self.write_seconds.observe(round_.write_us / 1e6)
            self.round_messages.observe(sum(batch.count for write in round_.writes for batch in write.done))
        if round_.syncs:
            self.sync_seconds.observe(round_.sync_us / 1e6)

    @contextlib.contextmanager
    def _limited_to(self, log: Log) -> Iterator[None]:
        """Let an unexpected exception fail this log, visibly, and nothing else."""
        try:
            yield
        except Exception as fault:  # noqa: BLE001 - supervises one log of a round
            self.fault("commit", log, fault)
            self._dirty.pop(log, None)
            log.fail(LogFailed(f"{log.directory}: unexpected error: {fault!r}"))
            self._note_failure(log)

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        self.health.fault(seam, str(log.directory), error)

    def damaged(self, log: Log) -> None:
        if log.damage:
            self.damage[log] = None
        else:
            self.damage.pop(log, None)

    def _note_failure(self, log: Log) -> None:
        if log.failure is not None and log.state is LogState.FAILED:
            self.failed[log] = None

    def _sync_due_us(self, log: Log) -> int | None:
        due_us = log.sync_due_us(self.settings.flush_messages, self.settings.flush_ms * 1000)
        is_crowded = due_us is not None and len(self._unsynced) >= self._unsynced_max
        return 0 if is_crowded else due_us

    def _next_sync_us(self) -> int | None:
        """When the next sync of a `flush` topic is due, on the monotonic clock."""
        due = [self._sync_due_us(log) for log in self._unsynced]
        return min((due_us for due_us in due if due_us is not None), default=None)

    def _take_synced_round(self) -> Round | None:
        writes = self._take_writes(Durability.FSYNC)
        syncs = self._take_syncs(self._clock.monotonic_us())
        return self._round(writes, syncs, sync=True) if writes or syncs else None

    def _take_written_round(self) -> Round | None:
        writes = self._take_writes(Durability.FLUSH)
        return self._round(writes, [], sync=False) if writes else None

    def _round(self, writes: list[Write], syncs: list[Sync], *, sync: bool) -> Round:
        return Round(self._files, self._clock, writes, syncs, sync=sync)

    def _write_state(self, changes: list[Change]) -> None:
        if self._state_log.busy:
            raise Overloaded("the state topic is being written: try again")
        errors: list[PenstockError] = []
        self._state.write(changes, lambda _, error: errors.append(error) if error else None)
        self._dirty.pop(self._state_log, None)
        self._state_log.flush()
        if errors:
            raise errors[0]

    # Changes of the topics, in steps. Between two of them there may be anything: a crash, and in a loop other tasks.

    async def _identify(self, disk: _Disk) -> None:
        if self._state.get("store", "identity") is None:
            await disk.commit([Change("store", "identity", secrets.token_hex(16))])

    async def _snapshot(self, disk: _Disk) -> Snapshot:
        # No await before all marks are taken: they must be of one moment.
        time_us, now_us = self._clock.now_us(), self._clock.monotonic_us()
        marks = [self._mark(place, self._logs[place]) for place in sorted(self._logs)]
        places, made = sorted(self.refused), []

        def link() -> None:
            refused = [self._mark_refused(place) for place in places]
            path = self.directory / SNAPSHOTS / secrets.token_hex(8)
            made.append(Snapshot(self._files, path, time_us, [*marks, *refused], now_us))

        await disk.work(link)
        [snapshot] = made
        self._snapshots[snapshot] = None
        return snapshot

    def _mark(self, place: Place, log: Log) -> Mark:
        topic = self._topics.get(place[0])
        segments = [(segment, segment.size) for segment in log.segments]
        name = topic.name if topic else None
        # What is missing at the end of a segment is not in any file, so nobody who copies the files can find it.
        sizes = {segment.path: size for segment, size in segments}
        missing = [str(each) for each in log.damage if each.position >= sizes.get(each.path, 0)]
        problem = "; ".join(missing) or None
        return Mark(place[0], name, place[1], log.number, segments, log.start, log.committed, log.is_piped, problem)

    def _mark_refused(self, place: Place) -> Mark:
        """Of a log that cannot be opened: its files, whatever is in them."""
        topic, reason = self._topics[place[0]], str(self.refused[place])
        path = self.directory / "topics" / str(place[0]) / str(place[1])
        found = recovery.look_around(self._files, self._open_segments, path, "pread")
        segments = [(segment, segment.size) for segment in found.segments]
        start = segments[0][0].base if segments else 0
        return Mark(place[0], topic.name, place[1], None, segments, start, None, topic.origin is not None, reason)

    async def _create(self, name: str, partitions: int, policy: Policy, origin: str | None, disk: _Disk) -> Topic:
        # The record of the next number may be lost, but no topic is to get the files of another.
        taken = [*self._topics, *(int(path.name) for path in self.orphans)]
        number = max(self._state.get("store", "next_topic") or 0, STATE_TOPIC + 1, *(each + 1 for each in taken))
        topic = Topic(number, name, partitions, policy, origin)
        self._check_partitions(topic, partitions)
        self.space.admit()
        await disk.commit([_topic_change(topic), Change("store", "next_topic", number + 1)])
        opening = self._opening(topic)
        await disk.work(opening.run)
        self._note_fault(opening)
        if opening.failure is not None:
            if is_disk_full(opening.failure):
                self.space.note_full()
            await self._take_back(topic, opening, opening.failure, disk)
        self._install(topic, opening)
        return topic

    async def _take_back(self, topic: Topic, opening: _Opening, failure: DiskError, disk: _Disk) -> NoReturn:
        """A topic that is in the state topic, and cannot have its files."""
        try:
            await disk.commit([_deletion(topic.id)])
        except PenstockError as error:
            self._install(topic, opening)
            raise AppendFailed(
                f"topic {topic.name} has partitions that are refused ({failure}), and is not taken back ({error}): "
                f"make room, then alter the topic or restart to open them, or delete it"
            ) from failure
        try:
            await self._remove(topic.id, list(opening.logs.values()), disk)
        except BadDirectory as error:
            logger.error("%s", error)
        raise AppendFailed(
            f"topic {topic.name} is not created: {failure}: look at the disk, then create it again"
        ) from failure

    async def _alter(self, topic: Topic, disk: _Disk) -> None:
        before = self._topic(topic.id)
        if topic.partitions < before.partitions:
            raise ValueError(f"topic {topic.name} cannot have fewer partitions than before")
        if topic.origin != before.origin and (before.origin is not None or not self._is_empty(before)):
            raise ValueError(f"topic {topic.name} cannot be that of {topic.origin}: it has messages of its own")
        self._check_partitions(topic, topic.partitions - before.partitions)
        await disk.commit([_topic_change(topic)])
        opening = self._opening(topic)
        await disk.work(opening.run)
        self._note_fault(opening)
        self._install(topic, opening)
        if opening.failure is not None:
            raise AppendFailed(
                f"topic {topic.name} is altered, but has partitions that are refused: {opening.failure}: "
                f"look at the disk, then alter the topic once more or restart to open them"
            ) from opening.failure

    async def _purge(self, topic_id: int, offsets: Mapping[int, int], disk: _Disk) -> None:
        logs = {partition: self.log(topic_id, partition) for partition in offsets}
        for partition, log in logs.items():
            if offsets[partition] > log.committed:
                raise OffsetOutOfRange(offsets[partition], log.start, log.committed)
        changes = [
            Change("start", f"{topic_id}/{partition}", offsets[partition])
            for partition, log in logs.items()
            if offsets[partition] > log.start
        ]
        if changes:
            await disk.commit(changes)
        for partition, log in logs.items():
            log.purge(offsets[partition])

    async def _delete(self, topic_id: int, disk: _Disk) -> None:
        topic = self._topic(topic_id)
        await disk.commit([_deletion(topic_id)])
        logs = self._uninstall(topic)
        await disk.idle(logs)
        await self._remove(topic_id, logs, disk)

    async def _remove(self, topic_id: int, logs: list[Log], disk: _Disk) -> None:
        """Remove the files of a topic that is marked as deleted, then the mark."""
        await disk.work(partial(self._remove_files, topic_id, logs))
        starts = [key for key, _ in self._state.items("start") if key.startswith(f"{topic_id}/")]
        try:
            await disk.commit([Change("topic", str(topic_id), None), *(Change("start", key, None) for key in starts)])
        except PenstockError as error:
            logger.warning("topic %d is deleted, the next start removes the mark of it: %s", topic_id, error)

    def _change_now(self, change: _Change[T]) -> T:
        if self._changing:
            raise Overloaded("another topic is being changed: try again")
        steps = change(_InThisThread(self))
        try:
            steps.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("it does not wait in this thread, so it does not wait at all")

    async def _change_in_turn(self, change: _Change[T]) -> T:
        if self._state_log.state is LogState.CLOSED:
            raise Closed(f"{self.directory}: the store is closed")
        turn = _Turn(change, asyncio.get_running_loop().create_future())
        self._turns.append(turn)
        if self._lanes is not None:
            self._lanes.asked.set()
        result: T = await turn.answer
        return result

    async def _take_turns(self, lanes: _Lanes) -> None:
        while True:
            while self._turns:
                turn = self._turns.popleft()
                if not turn.answer.done():
                    await self._take_turn(turn, lanes)
            lanes.asked.clear()
            await lanes.asked.wait()

    async def _take_turn(self, turn: _Turn, lanes: _Lanes) -> None:
        """Change a topic, to the end: though `run` is cancelled meanwhile, as a round is."""
        self._changing = True
        task = asyncio.create_task(turn.change(_InRounds(self, lanes)))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                if lanes.end.done():
                    task.cancel()
                    await asyncio.wait([task])
                else:
                    await asyncio.wait([task, lanes.end], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                cancelled = error
        self._changing = False
        turn.tell(task, self.health)
        if cancelled is not None:
            raise cancelled

    @property
    def _partitions(self) -> int:
        return sum(topic.partitions for topic in self._topics.values())

    def _check_partitions(self, topic: Topic, more: int) -> None:
        if more > 0 and self._partitions + more > self.settings.partitions_max:
            raise TooManyTopics(
                f"topic {topic.name} cannot get {more} partitions: there are {self._partitions}, and "
                f"{self.settings.partitions_max} are the most (storage.partitions_max): delete topics, or raise it"
            )

    def _topic(self, topic_id: int) -> Topic:
        try:
            return self._topics[topic_id]
        except KeyError:
            raise UnknownTopic(f"there is no topic with id {topic_id}") from None

    def _is_empty(self, topic: Topic) -> bool:
        logs = [self._logs.get((topic.id, partition)) for partition in range(topic.partitions)]
        return all(log is not None and log.is_empty for log in logs)

    def _open_topics(self) -> None:
        known = {str(STATE_TOPIC)}
        for key, value in sorted(self._state.items("topic"), key=lambda item: int(item[0])):
            if value.get("deleted"):
                self._change_now(partial(self._remove, int(key), []))
            else:
                known.add(key)
                topic = Topic.from_json(int(key), value)
                opening = self._opening(topic)
                opening.run()
                self._note_fault(opening)
                self._install(topic, opening)
        topics = self.directory / "topics"
        unknown = self._files.sizes(topics).keys() - known
        strays = [name for name in unknown if not (name.isdecimal() and str(int(name)) == name)]
        if strays:
            raise BadDirectory(f"{topics / min(strays)} does not belong there: move it elsewhere")
        self.orphans = [topics / name for name in sorted(unknown, key=int)]
        if self.orphans and self._state.get("store", "next_topic") is None:
            raise BadDirectory(
                f"{self.orphans[0]} is of no known topic, and no topic is known: restore {topics / str(STATE_TOPIC)}, "
                f"which names them, or run penstock log repair"
            )
        for path in self.orphans:
            logger.error("%s: %s", path, ORPHAN_REMEDY)

    def _opening(self, topic: Topic) -> _Opening:
        places = [(topic.id, partition) for partition in range(topic.partitions)]
        return _Opening(self._open_log, topic, [place for place in places if place not in self._logs])

    def _note_fault(self, opening: _Opening) -> None:
        if opening.fault is not None:
            self.health.fault("open", str(opening.failure), opening.fault)

    def _install(self, topic: Topic, opening: _Opening) -> None:
        self._topics[topic.id] = topic
        for place in opening.places:
            self.refused.pop(place, None)
        self.refused |= opening.refused
        self._logs |= opening.logs
        for (_, partition), error in opening.refused.items():
            logger.error("partition %d of topic %s is refused: %s", partition, topic.name, error)
        for partition in range(topic.partitions):
            log = self._logs.get((topic.id, partition))
            if log is not None:
                log.policy = topic.policy
                log.store_limit = None if topic.is_internal else self.settings.retain_bytes
                log.purge(self._state.get("start", f"{topic.id}/{partition}") or 0)
                if topic.origin is not None and not log.is_piped:
                    log.pipe()
                # What it has waiting may have woken the lane that its policy asked for until now.
                if self._lanes is not None and log in self._dirty:
                    self._lanes.wake(log)

    def _uninstall(self, topic: Topic) -> list[Log]:
        """Forget a topic. Who waits for its logs is told; a worker may still have something of them."""
        del self._topics[topic.id]
        logs = []
        for partition in range(topic.partitions):
            self.refused.pop((topic.id, partition), None)
            log = self._logs.pop((topic.id, partition), None)
            if log is not None:
                self._dirty.pop(log, None)
                self._unsynced.pop(log, None)
                self.failed.pop(log, None)
                self.damage.pop(log, None)
                log.abandon()
                logs.append(log)
        return logs

    def _open_log(self, place: Place, policy: Policy, *, piped: bool = False) -> Log:
        """For any thread: of what logs share, opening one touches only `OpenSegments`, which has a lock."""
        topic_id, partition = place
        return Log(
            self.directory / "topics" / str(topic_id) / str(partition),
            policy=policy,
            files=self._files,
            clock=self._clock,
            owner=self,
            open_segments=self._open_state_segments if topic_id == STATE_TOPIC else self._open_segments,
            # Nobody reads the state topic while it grows.
            tail_budget=TailBudget(0) if topic_id == STATE_TOPIC else self._tail_budget,
            reader=self.settings.reader,
            piped=piped,
            witness=self._witnesses.get(place, witness.NOBODY),
            # What the state topic lost would be missing, or come back as it was before: people must decide on that.
            strict=topic_id == STATE_TOPIC,
        )

    def _remove_files(self, topic_id: int, logs: list[Log]) -> None:
        """For any thread, when the logs were abandoned."""
        directory = self.directory / "topics" / str(topic_id)
        try:
            for log in logs:
                # Upkeep that runs gives up at its next batch, and none begins.
                with log.upkeep_lock:
                    # A file that is open keeps its room on the disk.
                    for segment in log.segments:
                        self._open_segments.drop(segment)
            for partition in self._files.sizes(directory):
                for name in self._files.sizes(directory / partition):
                    self._files.remove(directory / partition / name)
                self._files.remove_directory(directory / partition)
            if directory.name in self._files.sizes(directory.parent):
                self._files.remove_directory(directory)
                self._files.sync_directory(directory.parent)
        except OSError as error:
            raise BadDirectory(
                f"{directory} is of a deleted topic and cannot be removed, the next start tries again: {error}"
            ) from error

    async def _watch_space(self) -> None:
        while True:
            await asyncio.sleep(_SPACE_EVERY_S)
            await asyncio.get_running_loop().run_in_executor(self._worker, self.space.check)
            await self._drop_snapshots()

    async def _drop_snapshots(self) -> None:
        """End the snapshots that nobody reads, and all of them when the disk is full."""
        horizon_us = self._clock.monotonic_us() - SNAPSHOT_IDLE_US
        for snapshot in list(self._snapshots):
            if self.space.is_full or snapshot.used_us < horizon_us:
                logger.warning("a snapshot ends: %s", "the disk is full" if self.space.is_full else "nobody reads it")
                await asyncio.get_running_loop().run_in_executor(self._worker, self.end_snapshot, snapshot)

    async def _compact_state(self, worker: ThreadPoolExecutor, lanes: _Lanes) -> None:
        """Compact the state topic when it has grown: between two upkeeps it could grow by hundreds of megabytes."""
        loop = asyncio.get_running_loop()
        while True:
            await lanes.overgrown.wait()
            async with self._upkeeping:
                await loop.run_in_executor(worker, self._upkeep, [self._state_log])
            self._state_bytes = self._sealed_state_bytes()
            lanes.overgrown.clear()

    def _is_state_overgrown(self) -> bool:
        log = self._state_log
        return log.compaction_due and self._sealed_state_bytes() > 2 * self._state_bytes + _STATE_GROWTH_BYTES

    def _sealed_state_bytes(self) -> int:
        return sum(segment.size for segment in self._state_log.segments[:-1])

    async def _keep_up(self, worker: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.settings.upkeep_ms / 1000)
            try:
                self._roll(self._due_to_roll())
                async with self._upkeeping:
                    await loop.run_in_executor(worker, self._upkeep, list(self._logs.values()))
                    self._roll(await loop.run_in_executor(worker, self._trim, self._trimmable()))
                projection = self._take_projection()
                if await loop.run_in_executor(worker, self._write_projection, projection):
                    self._state.projected(projection.changes)
                if self.on_upkeep is not None:
                    self.on_upkeep()
            except Exception as fault:  # noqa: BLE001 - it is tried again the next time
                self.health.fault("upkeep", str(self.directory), fault)

    def _due_to_roll(self) -> list[Log]:
        """Return the logs that must begin a new segment, so that retention can drop parts of what they have."""
        return [log for log in self._logs.values() if log.is_roll_due()]

    def _roll(self, logs: list[Log]) -> None:
        """Have these logs begin new segments: in the next rounds, or now if nobody drives any."""
        for log in logs:
            log.roll()
            self._dirty[log] = None
            if self._lanes is not None:
                self._lanes.wake(log)
        if self._lanes is None:
            self._drive(self._round([write for log in logs if (write := log.begin_write())], [], sync=True))

    def _trimmable(self) -> list[Log]:
        """Return the logs that the limit of the store may shorten: all but those that the broker needs itself."""
        if self.settings.retain_bytes is None:
            return []
        internal = {STATE_TOPIC, *(topic.id for topic in self._topics.values() if topic.is_internal)}
        return [log for (topic_id, _), log in self._logs.items() if topic_id not in internal]

    def _trim(self, logs: list[Log]) -> list[Log]:
        """Keep the store within its limit; return the logs that must be rolled for that. For the thread of upkeep."""
        self._measure()
        limit = self.settings.retain_bytes
        if limit is None:
            return []
        excess = self.store_bytes - limit
        unsealed, left = trim(logs, excess, retention.part_bytes(limit))
        if excess > 0:
            self._measure()
            logger.info("the store had %d bytes more than storage.retain_bytes allows: dropped the oldest", excess)
        if left:
            self.health.report(
                _LIMIT_PROBLEM,
                f"the store has {self.store_bytes} bytes, {limit} are allowed (storage.retain_bytes), and all other "
                f"topics are empty: what the broker itself needs takes the rest, allow more",
            )
        else:
            self.health.clear(_LIMIT_PROBLEM)
        return unsealed

    def _measure(self) -> None:
        self.store_bytes = sum(segment.size for log in list(self._logs.values()) for segment in log.segments)

    def _upkeep(self, logs: list[Log]) -> None:
        for log in logs:
            if self._is_ending:
                return
            try:
                with log.upkeep_lock:
                    if log.state is not LogState.CLOSED:
                        self._tell(log, "retention", log.retain(), "segments")
                        if log.compaction_due:
                            self._tell(log, "compaction", log.compact(lambda: self._is_ending), "messages")
            except Closed as error:
                logger.info("%s", error)
            except (PenstockError, OSError) as error:
                logger.error("%s: upkeep failed, tried again later: %s", log.directory, error)
            except Exception as fault:  # noqa: BLE001 - the other logs are kept up all the same
                self.fault("upkeep", log, fault)

    def _tell(self, log: Log, what: str, count: int, of: str) -> None:
        """Log what upkeep did; what it does all the time in the state topic is for whoever looks closely."""
        if count:
            level = logging.DEBUG if log is self._state_log else logging.INFO
            logger.log(level, "%s: %s dropped %d %s, it begins at offset %d", log.directory, what, count, of, log.start)

    def _take_projection(self) -> _Projection:
        changes, offset = self._state.unprojected()
        logs = {place: (log.segments, log.witnessed) for place, log in self._logs.items()}
        # Of these nobody else can tell how far they reached.
        kept = frozenset(self.refused)
        return _Projection(changes, offset, logs, kept, frozenset(int(path.name) for path in self.orphans))

    def _project(self, projection: _Projection) -> None:
        if self._write_projection(projection):
            self._state.projected(projection.changes)

    def _write_projection(self, projection: _Projection) -> bool:
        """Bring `meta.db` up to date; whether that worked. If not it is only behind, and is tried again."""
        try:
            self._meta.apply(projection.changes, projection.offset)
            self._meta.replace_segments(
                list(_segment_rows(projection)),
                lambda topic, partition: topic in projection.orphans or (topic, partition) in projection.refused,
            )
        except sqlite3.Error as error:
            logger.warning("%s: cannot be written, tried again later: %s", self.directory / "meta.db", error)
            return False
        return True


class _Disk(Protocol):
    """How a change of the topics waits for the disk."""

    async def commit(self, changes: list[Change]) -> None:
        """Write to the state topic."""
        ...

    async def work(self, work: Callable[[], None]) -> None: ...

    async def idle(self, logs: list[Log]) -> None:
        """Wait until no worker has anything of these logs, which were abandoned."""
        ...


class _InThisThread:
    """Nothing is awaited: the calling thread waits."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def commit(self, changes: list[Change]) -> None:
        self._store._write_state(changes)

    async def work(self, work: Callable[[], None]) -> None:
        work()

    async def idle(self, logs: list[Log]) -> None:
        pass  # a round that runs is finished by this thread: it cannot wait for it


class _InRounds:
    """The event loop waits for nothing: the rounds write, a worker has the rest."""

    def __init__(self, store: Store, lanes: _Lanes) -> None:
        self._store = store
        self._lanes = lanes

    async def commit(self, changes: list[Change]) -> None:
        await self._store.write_state(changes)

    async def work(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._store._worker, work)

    async def idle(self, logs: list[Log]) -> None:
        while any(log.busy for log in logs):
            self._lanes.finished.clear()
            await self._lanes.finished.wait()


_Change = Callable[[_Disk], Coroutine[Any, Any, T]]


class _Turn(NamedTuple):
    """A change of the topics that someone awaits, unless they went away."""

    change: _Change[Any]
    answer: asyncio.Future[Any]

    def tell(self, task: asyncio.Task[Any], health: Health) -> None:
        """Tell how it went."""
        if task.cancelled():
            self.refuse(Closed("the process ends while a topic is changed: the next start finishes that or undoes it"))
        elif (error := task.exception()) is not None:
            if not isinstance(error, PenstockError | ValueError):
                health.fault("topics", "the next start finishes the change of a topic, or undoes it", error)
            elif self.answer.done():
                logger.warning("a change of a topic failed, and whoever asked for it went away: %s", error)
            self.refuse(error)
            if not isinstance(error, Exception):
                raise error  # it ends the process, and `run` first
        elif not self.answer.done():
            self.answer.set_result(task.result())

    def refuse(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Opening:
    """Logs to be opened, for a worker, and how that went."""

    def __init__(self, open_log: Callable[..., Log], topic: Topic, places: list[Place]) -> None:
        self._open_log = open_log
        self._topic = topic
        self.places = places
        self.logs: dict[Place, Log] = {}
        self.refused: dict[Place, PenstockError] = {}
        # Set if the disk did not do what it was asked. Other logs are refused for what is in them.
        self.failure: DiskError | None = None
        # The unexpected exception behind it, if it was one.
        self.fault: Exception | None = None

    def run(self) -> None:
        for place in self.places:
            try:
                self._open(place)
            except (AppendFailed, LogFailed) as error:
                self.failure = self.refused[place] = error
            except (DiskError, UnsupportedBatch) as error:
                self.refused[place] = error

    def _open(self, place: Place) -> None:
        try:
            self.logs[place] = self._open_log(place, self._topic.policy, piped=self._topic.origin is not None)
        except OSError as error:
            raise AppendFailed(f"partition {place[1]} cannot be opened: {error}") from error
        except PenstockError:
            raise
        except Exception as fault:
            self.fault = fault
            raise AppendFailed(f"partition {place[1]} cannot be opened, unexpected error: {fault!r}") from fault


class _Projection(NamedTuple):
    """What `meta.db` should say."""

    changes: list[Change]
    offset: int
    # Of each log its segments, and up to where it is on the disk.
    logs: dict[Place, tuple[tuple[Segment, ...], int]]
    refused: frozenset[Place]
    orphans: frozenset[int]


def _segment_rows(projection: _Projection) -> Iterator[SegmentRow]:
    for (topic_id, partition), (segments, witnessed) in projection.logs.items():
        for segment, following in zip(segments, [*segments[1:], None], strict=True):
            end = witnessed if following is None else following.base
            try:
                created_us = segment.begun_at()
            except (PenstockError, OSError):
                created_us = 0  # its head is damaged, or the segment is gone
            yield SegmentRow(topic_id, partition, segment.base, end, segment.size, created_us, following is not None)


class Round:
    """Writes and syncs of several logs, for a worker."""

    def __init__(self, files: Files, clock: Clock, writes: list[Write], syncs: list[Sync], *, sync: bool) -> None:
        self._files = files
        self._clock = clock
        self._sync = sync
        self.writes = writes
        self.syncs = syncs
        self.errors: list[OSError | None] = []
        # An unexpected exception in the sync, which may have done anything: all that was to be synced has failed.
        self.fault: Exception | None = None
        # How long it took.
        self.write_us = self.sync_us = 0

    @property
    def is_quick(self) -> bool:
        """Whether it takes no longer than handing it to a worker: a little for the page cache, and no disk in sight."""
        return (
            not self._sync
            and sum(write.size for write in self.writes) <= _QUICK_BYTES
            and not any(write.syncs or write.log.is_syncing for write in self.writes)
        )

    def run(self) -> None:
        begun_us = self._clock.monotonic_us()
        for write in self.writes:
            write.run()
        written_us = self._clock.monotonic_us()
        self.write_us = written_us - begun_us
        if self._sync:
            self.syncs += [
                write.sync() for write in self.writes if write.done and not isinstance(write.error, LogFailed)
            ]
        if self.syncs:
            try:
                self.errors = self._files.sync([sync.file for sync in self.syncs])
            except Exception as fault:  # noqa: BLE001 - it fails the logs of the round
                self.fault = fault
                self.errors = [OSError(errno.EIO, f"unexpected error: {fault!r}") for _ in self.syncs]
            self.sync_us = self._clock.monotonic_us() - written_us


class _Lane:
    """One round at a time, in a thread of its own.

    Callbacks and a queue, where a task and an executor would do: a round trip takes 55 µs instead of 140.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[], Round | None],
        finish: Callable[[Round], None],
        health: Health,
        end: asyncio.Future[None],
    ) -> None:
        self._loop = loop
        self._take = take
        self._finish = finish
        self._health = health
        self._end = end
        self._awake = False
        self._running = False
        # Set once the lane is to stop: when no round runs any more.
        self._stopped: asyncio.Future[None] | None = None
        self._rounds: SimpleQueue[Round | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to take. All that is appended in this turn of the loop goes with it."""
        if not self._awake and not self._running:
            self._awake = True
            self._loop.call_soon(self._start)

    async def stop(self) -> None:
        """Wait for the round that runs, and begin none."""
        self._stopped = self._loop.create_future()
        if self._running:
            await self._stopped
        self._rounds.put(None)
        self._thread.join()

    def _start(self) -> None:
        self._awake = False
        if self._running or self._stopped is not None:
            return
        round_ = self._take()
        if round_ is None:
            return
        self._running = True
        if round_.is_quick:
            self._done(round_, self._run(round_))
        else:
            self._rounds.put(round_)

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one round; return False at the end. Its own call: a waiting lane does not keep its last round."""
        round_ = self._rounds.get()
        if round_ is None:
            return False
        end = self._run(round_)
        self._loop.call_soon_threadsafe(self._done, round_, end)
        return True

    @staticmethod
    def _run(round_: Round) -> BaseException | None:
        try:
            round_.run()
        except BaseException as end:  # noqa: BLE001 - a round lets only that pass which ends the process
            return end
        return None

    def _done(self, round_: Round, end: BaseException | None) -> None:
        self._running = False
        try:
            if end is not None:
                raise end
            self._finish(round_)
            self.wake()
        except Exception as fault:  # noqa: BLE001 - the lane goes on with the next round
            self._health.fault("round", self._thread.name, fault)
            self.wake()
        except BaseException as raised:  # noqa: BLE001 - `run` ends with it
            if not self._end.done():
                self._end.set_exception(raised)
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)


class _Lanes:
    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        # A change of the topics was asked for. A round was finished.
        self.asked = asyncio.Event()
        # The state topic has grown, and should be compacted.
        self.overgrown = asyncio.Event()
        self.finished = asyncio.Event()
        # Done when a round raised what ends the process: no error, and no bug.
        self.end: asyncio.Future[None] = loop.create_future()
        self._synced = _Lane("synced", loop, store._take_synced_round, self._finish, store.health, self.end)
        self._written = _Lane("written", loop, store._take_written_round, self._finish, store.health, self.end)

    def wake(self, log: Log) -> None:
        lane = self._written if log.policy.durability is Durability.FLUSH else self._synced
        lane.wake()

    def _finish(self, round_: Round) -> None:
        self._store._finish(round_)
        self.finished.set()
        # What one lane could not take while the other had the same log.
        for log in self._store._dirty:
            self.wake(log)
        self._await_sync()

    def _await_sync(self) -> None:
        """Sync when the next sync is due. A timer may be early by a millisecond: then it waits again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_us = self._store._next_sync_us()
        if due_us is None:
            return
        wait_us = due_us - self._store._clock.monotonic_us()
        if wait_us > 0:
            self._timer = self._loop.call_later(wait_us / 1e6, self._await_sync)
        else:
            self._synced.wake()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(self._written.stop(), self._synced.stop())


def _open_segments_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_OPEN_SEGMENTS_MAX, max(1, soft // 2)) if soft >= 0 else _OPEN_SEGMENTS_MAX


def _topic_change(topic: Topic) -> Change:
    return Change("topic", str(topic.id), topic.to_json())


def _deletion(topic_id: int) -> Change:
    """The mark of a topic whose files are being removed."""
    return Change("topic", str(topic_id), {"deleted": True})


def outcome() -> tuple[asyncio.Future[int], Done]:
    """A future, and whom to tell that it is settled."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def done(offset: int, error: PenstockError | None) -> None:
        if future.done():
            return  # whoever waited was cancelled
        if error is None:
            future.set_result(offset)
        else:
            future.set_exception(error)

    return future, done
