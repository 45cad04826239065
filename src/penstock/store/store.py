"""The store: a data directory with all its logs.

    <data>/LOCK                             held by the process that has the directory open
    <data>/FORMAT                           the version of the format
    <data>/meta.db                          a projection for queries
    <data>/topics/<topic id>/<partition>/   a log; topic 0 is the state topic
    <data>/snapshots/<id>/                  hard links to segments, while a backup copies them

A store and its logs belong to one thread. `flush` and `upkeep` drive it in the calling thread, `run` in an event loop.
It consists of:

    rounds      the writes and syncs of all logs together
    catalogue   the topics and their logs
    maintenance retention, compaction, the limit of the store, `meta.db`
    snapshots   all logs as of one moment, for backups
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.awaiting import settled
from penstock.clock import Clock, SystemClock
from penstock.errors import LogDamaged, Overloaded
from penstock.health import Health, Usage
from penstock.log.files import File, Files, OsFiles
from penstock.log.log import Log
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Cleanup, OnDamage, Policy, Topic
from penstock.log.producers import SOURCES_MAX
from penstock.log.segment import ReadMode
from penstock.log.tail import TailBudget
from penstock.model.batch import Batch
from penstock.outcome import Outcome
from penstock.store import witnesses
from penstock.store.catalogue import TopicCatalogue
from penstock.store.changes import Changes
from penstock.store.format import claim_format
from penstock.store.log_opener import LogOpener
from penstock.store.maintenance import Maintenance
from penstock.store.meta import Change, Meta
from penstock.store.rounds import Rounds
from penstock.store.snapshot import Snapshot, Snapshots, clear_all
from penstock.store.space import DiskSpace
from penstock.store.state import StoreState
from penstock.store.witnesses import STATE_PARTITION

_OPEN_SEGMENTS_MAX: Final = 1024
# Threads that read from the disk for an event loop.
READERS: Final = 4

# Small segments, so that most of the state topic can be compacted at any time. It has no readers that could miss a
# tombstone.
_STATE_POLICY: Final = Policy(cleanup=Cleanup.COMPACT, segment_bytes=1 << 20, tombstone_ms=0)
_STATE_REMEDY: Final = "it holds topics, groups and positions: restore the file from a copy, or run penstock log repair"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    reader: ReadMode = "pread"
    # Bytes that wait for a write, over all logs: a crash of the process loses at most these, and they bound the memory.
    unflushed_bytes_max: int = 64 << 20
    tail_bytes_max: int = 64 << 20
    # Segments with an open file. None: half of the process's limit of file descriptors, at most 1024.
    open_segments_max: int | None = None
    # Partitions of all topics together. Each costs memory, and time at every start, used or not.
    partitions_max: int = 20_000
    # Room on the disk reserved for the state topic. 0: none, and a full disk is noticed when a write fails.
    disk_reserve_bytes: int = 0
    # Under `flush` a log is synced when this many messages are written, or this long after the first of them.
    flush_messages: int = 500
    flush_ms: int = 100
    upkeep_ms: int = 10_000
    # Bytes of all segments together; above that, the oldest are dropped. None: no limit.
    retain_bytes: int | None = None


class Store:
    """More than 25 methods, because each change of a topic has two forms: for a caller that waits for the disk, and for
    one in an event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        settings: StoreSettings | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
        meta: Meta | None = None,
    ) -> None:
        self.directory = directory
        self.settings = settings = settings or StoreSettings()
        self.health = Health()
        self._files: Files = files or OsFiles()
        self._clock: Clock = clock or SystemClock()
        segments_max = settings.open_segments_max or _open_segments_max()
        # A mapping has a descriptor of its own.
        self._open_segments = OpenSegments(max(1, segments_max // 2) if settings.reader == "mmap" else segments_max)
        self._tail_budget = TailBudget(settings.tail_bytes_max)
        self.rounds = Rounds(
            self._files,
            self._clock,
            self.health,
            unflushed_bytes_max=settings.unflushed_bytes_max,
            unsynced_max=max(1, segments_max // 2),
            flush_messages=settings.flush_messages,
            flush_ms=settings.flush_ms,
        )
        # Opens and removes the files of topics for `run`.
        self._worker = ThreadPoolExecutor(1, "penstock-topics")
        self._readers: ThreadPoolExecutor | None = None
        # Held until the caller has its batches: while the loop is busy, the threads do not read on.
        self._reads = asyncio.Semaphore(READERS)
        self._lock = self._claim()
        self.space = DiskSpace(self._files, directory, settings.disk_reserve_bytes, self.health)
        self._meta = meta or Meta(directory / "meta.db")
        self.snapshots = Snapshots(self._files, directory, self._clock)
        try:
            self._open()
        except BaseException:
            self._let_go()
            raise

    def _claim(self) -> File:
        """Lock the directory, check its format, and remove what a killed process left."""
        self._files.make_directory(self.directory)
        lock = self._files.lock(self.directory / "LOCK")
        try:
            claim_format(self._files, self.directory)
            clear_all(self._files, self.directory)
        except BaseException:
            lock.close()
            raise
        return lock

    def _open(self) -> None:
        opener = LogOpener(
            self.directory / "topics",
            self._files,
            self._clock,
            self.rounds,
            self.space,
            self._open_segments,
            self._tail_budget,
            self.settings.reader,
        )
        opener.witnesses = {STATE_PARTITION: witnesses.of_state_topic(self._meta)}
        try:
            state_log = self._state_log = opener.open(STATE_PARTITION, _STATE_POLICY, piped=False)
            self.state = StoreState(state_log, self._meta)
        except LogDamaged as damage:
            raise damage.with_remedy(_STATE_REMEDY) from None
        opener.witnesses = witnesses.of_topics(self._meta, self.state.everything())
        self.catalogue = TopicCatalogue(
            self.directory / "topics",
            self._files,
            self.state,
            state_log,
            self.rounds,
            self.space,
            self._open_segments,
            self.health,
            opener.open,
            partitions_max=self.settings.partitions_max,
            retain_bytes=self.settings.retain_bytes,
        )
        opener.on_damage = self.catalogue.note_damage
        self._changes = Changes(
            self.directory, self.health, self._worker, commit_now=self._write_state, commit=self.write_state
        )
        self.catalogue.open_all(self._changes)
        self.maintenance = Maintenance(
            self.directory,
            self.catalogue,
            self.rounds,
            self.state,
            self._meta,
            self.space,
            self.snapshots,
            self.health,
            retain_bytes=self.settings.retain_bytes,
        )
        self.rounds.on_finish = self.maintenance.note_round

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Topics and state. `run` makes the changes that are awaited, in order. The other methods wait for the disk.

    @property
    def topics(self) -> list[Topic]:
        return self.catalogue.topics

    def log(self, topic_id: int, partition: int = 0) -> Log:
        """Return the log of a partition. Raises the reason if it could not be opened."""
        return self.catalogue.log(topic_id, partition)

    def create_topic(
        self, name: str, *, partitions: int = 1, policy: Policy | None = None, origin: str | None = None
    ) -> Topic:
        """Create a topic with its logs. It is in the state topic before any of its files exists."""
        return self._changes.now(self.catalogue.create(name, partitions, policy or Policy(), origin))

    async def create_topic_async(
        self, name: str, *, partitions: int = 1, policy: Policy | None = None, origin: str | None = None
    ) -> Topic:
        return await self._changes.in_turn(self.catalogue.create(name, partitions, policy or Policy(), origin))

    def alter_topic(self, topic: Topic) -> None:
        """Change a topic's name or policy, or give it more partitions, never fewer. Refused partitions are opened
        again. An empty topic can become a piped one."""
        self._changes.now(self.catalogue.alter(topic))

    async def alter_topic_async(self, topic: Topic) -> None:
        await self._changes.in_turn(self.catalogue.alter(topic))

    def delete_topic(self, topic_id: int) -> None:
        """Forget a topic and remove its files. The next start finishes an interrupted deletion."""
        self._changes.now(self.catalogue.delete(topic_id))

    async def delete_topic_async(self, topic_id: int) -> None:
        await self._changes.in_turn(self.catalogue.delete(topic_id))

    def purge_topic(self, topic_id: int, offsets: Mapping[int, int]) -> None:
        """Let nobody read below these offsets, by partition. Upkeep removes whole segments."""
        self._changes.now(self.catalogue.purge(topic_id, offsets))

    async def purge_topic_async(self, topic_id: int, offsets: Mapping[int, int]) -> None:
        await self._changes.in_turn(self.catalogue.purge(topic_id, offsets))

    async def identity(self) -> str:
        """Return the unique ID of this store, which is drawn on the first call."""
        if self.state.get("store", "identity") is None:
            await self._changes.in_turn(self.catalogue.identify())
        found: str = self.state.get("store", "identity")
        return found

    async def snapshot(self) -> Snapshot:
        """Return all logs as they are now, to be read until the snapshot is closed."""
        async with self.maintenance.lock:
            return await self._changes.in_turn(self.snapshots.take(self.catalogue, self._open_segments))

    def snapshot_now(self) -> Snapshot:
        """Take a snapshot in the calling thread. Everything must be flushed."""
        return self._changes.now(self.snapshots.take(self.catalogue, self._open_segments))

    async def write_state(self, changes: Sequence[Change]) -> None:
        """Set and delete values atomically, and wait until they are committed."""
        outcome = Outcome()
        self.state.write(changes, outcome)
        await settled(outcome)

    def _write_state(self, changes: list[Change]) -> None:
        if self._state_log.flusher.is_busy:
            raise Overloaded("the state topic is being written: try again")
        outcome = Outcome()
        self.state.write(changes, outcome)
        self.rounds.flush_log(self._state_log)
        outcome.check()

    def usage(self) -> dict[str, Usage]:
        """Return how full each limited table is, by name."""
        limit = self.settings.retain_bytes
        return {
            **({} if limit is None else {"store_bytes": Usage(self.maintenance.store_bytes, limit)}),
            "unflushed_bytes": Usage(self.rounds.unflushed.used, self.settings.unflushed_bytes_max),
            "tail_bytes": self._tail_budget.usage,
            "open_segments": self._open_segments.files_usage,
            "index_bytes": self._open_segments.index_usage,
            "partitions": Usage(self.catalogue.partitions, self.settings.partitions_max),
            # Of the partition with most of them.
            "sources": Usage(max(log.producers.sources for log in self.catalogue.logs.values()), SOURCES_MAX),
            **self.space.usage,
        }

    # Reading and writing.

    def flush(self) -> None:
        """Write and sync everything pending, in the calling thread."""
        self.rounds.flush()

    async def append(self, log: Log, batch: Batch) -> int:
        """Append a batch, and wait until it is committed."""
        outcome = Outcome()
        offset = log.append(batch, outcome=outcome)
        await settled(outcome)
        return offset

    async def read(self, log: Log, offset: int, bytes_max: int, on_damage: OnDamage | None = None) -> list[Batch]:
        """Read from memory at once, or from disk in another thread. `on_damage` overrides the policy."""
        batches = log.read_tail(offset, bytes_max)
        if batches is not None:
            return batches
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, "penstock-read")
        async with self._reads:
            return await asyncio.get_running_loop().run_in_executor(
                self._readers, log.read_disk, offset, bytes_max, on_damage
            )

    def upkeep(self) -> None:
        """Retain, compact, and bring `meta.db` up to date."""
        self.maintenance.now()
        self.space.check()

    # Running, and the end.

    async def run(self) -> None:
        """Drive the rounds and the upkeep until cancelled. `close` flushes the rest."""
        self.maintenance.begin()
        with ThreadPoolExecutor(1, "penstock-upkeep") as worker:
            lanes = self.rounds.start()
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.maintenance.run(worker, self.settings.upkeep_ms / 1000))
                    group.create_task(self.maintenance.compact_state(worker))
                    group.create_task(self.maintenance.watch_space(self._worker))
                    group.create_task(self._changes.run(lanes))
                    # Shielded: cancelling this task does not end the lanes.
                    await asyncio.shield(lanes.end)
            finally:
                self.maintenance.end()
                await self.rounds.stop()

    def close(self) -> None:
        """Make everything durable, and unlock the directory. `run` must have ended."""
        assert not self.rounds.is_running, "stop `run` first"
        self._worker.shutdown()
        self._changes.close()
        try:
            self.flush()
            for log in [log for log in self.catalogue.logs.values() if log is not self._state_log]:
                log.close()
            self.maintenance.project()
            self._state_log.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._worker.shutdown()
        self.snapshots.end_all()
        if self._readers is not None:
            self._readers.shutdown()
        self._meta.close()
        self._lock.close()


def _open_segments_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_OPEN_SEGMENTS_MAX, max(1, soft // 2)) if soft >= 0 else _OPEN_SEGMENTS_MAX
