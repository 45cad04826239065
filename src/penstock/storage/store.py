"""The store: a data directory with all its logs.

    <data>/LOCK                             who has the directory open
    <data>/FORMAT                           the version of all that follows
    <data>/meta.db                          a projection for queries
    <data>/topics/<topic id>/<partition>/   a log; topic 0 is the state topic
    <data>/snapshots/<id>/                  second names of segments, while somebody copies them

A store and its logs belong to one thread. Alone it is driven by `flush` and `upkeep`, in the calling thread; in an
event loop by `run`. It is made of:

    rounds      what waits for the disk, and the writes and syncs of all logs together
    catalogue   the topics and their logs, and how they are changed
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

from penstock.batch import Batch
from penstock.clock import Clock, SystemClock
from penstock.errors import LogDamaged, Overloaded, PenstockError
from penstock.health import Health, Usage
from penstock.storage import witness
from penstock.storage.catalogue import Catalogue
from penstock.storage.changes import Changes
from penstock.storage.files import Files, OsFiles
from penstock.storage.format import claim_format
from penstock.storage.log import Done, Log
from penstock.storage.maintenance import Maintenance
from penstock.storage.meta import Change, Meta, SegmentRow
from penstock.storage.policy import Cleanup, OnDamage, Policy, Topic
from penstock.storage.producers import SOURCES_MAX
from penstock.storage.rounds import Round, Rounds
from penstock.storage.segment import OpenSegments, Reader
from penstock.storage.snapshot import Snapshot, Snapshots, clear_all
from penstock.storage.space import DiskSpace, is_disk_full
from penstock.storage.state import STATE_TOPIC, State
from penstock.storage.tail import TailBudget
from penstock.storage.witness import STATE_PLACE, Place, Witness

_OPEN_SEGMENTS_MAX: Final = 1024
_STATE_SEGMENTS_OPEN: Final = 8
_SPACE_EVERY_S: Final = 1.0

# Small segments, so that most of the state topic can be compacted at any time. Nobody but the state itself reads it, so
# tombstones need not stay.
_STATE_POLICY: Final = Policy(cleanup=Cleanup.COMPACT, segment_bytes=1 << 20, tombstone_ms=0)
_STATE_REMEDY: Final = "it holds topics, groups and positions: restore the file from a copy, or run penstock log repair"


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
        self._tail_budget = TailBudget(self.settings.tail_bytes_max)
        self.rounds = Rounds(
            self._files,
            self._clock,
            self.health,
            unflushed_bytes_max=self.settings.unflushed_bytes_max,
            unsynced_max=max(1, segments_max // 2),
            flush_messages=self.settings.flush_messages,
            flush_ms=self.settings.flush_ms,
            finished=self._note_round,
        )
        # It opens and removes the files of topics for `run`.
        self._worker = ThreadPoolExecutor(1, "penstock-topics")
        self._readers: ThreadPoolExecutor | None = None
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
        self.snapshots = Snapshots(self._files, directory, self._clock)
        # None until the state topic is open.
        self._catalogue: Catalogue | None = None
        try:
            self._open()
        except BaseException:
            self._let_go()
            raise

    def _open(self) -> None:
        # How far each log once reached.
        self._witnesses: Mapping[Place, Witness] = {STATE_PLACE: witness.of_state_topic(self._meta)}
        try:
            state_log = self._state_log = self._open_log(STATE_PLACE, _STATE_POLICY, piped=False)
            self.state = State(state_log, self._meta)
        except LogDamaged as damage:
            raise damage.with_remedy(_STATE_REMEDY) from None
        self._witnesses = witness.of_topics(self._meta, self.state.everything())
        settings = self.settings
        self.catalogue = self._catalogue = Catalogue(
            self.directory / "topics",
            self._files,
            self.state,
            state_log,
            self.rounds,
            self.space,
            self._open_segments,
            self.health,
            self._open_log,
            partitions_max=settings.partitions_max,
            retain_bytes=settings.retain_bytes,
        )
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
            self.health,
            retain_bytes=settings.retain_bytes,
        )

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Topics and the state. What is awaited is done by `run`, after all that was asked before. The others wait for the
    # disk.

    @property
    def topics(self) -> list[Topic]:
        return self.catalogue.topics

    def log(self, topic_id: int, partition: int = 0) -> Log:
        """Return the log of a partition; raise why it was refused, if it could not be opened."""
        return self.catalogue.log(topic_id, partition)

    def create_topic(
        self, name: str, *, partitions: int = 1, policy: Policy | None = None, origin: str | None = None
    ) -> Topic:
        """Create a topic with its logs. It is in the state topic before there is any file of it."""
        return self._changes.now(self.catalogue.create(name, partitions, policy or Policy(), origin))

    async def create_topic_async(
        self, name: str, *, partitions: int = 1, policy: Policy | None = None, origin: str | None = None
    ) -> Topic:
        return await self._changes.in_turn(self.catalogue.create(name, partitions, policy or Policy(), origin))

    def alter_topic(self, topic: Topic) -> None:
        """Change a topic's name or policy, or give it more partitions; never fewer. Those that are refused are
        opened again. An empty one can become one that is piped."""
        self._changes.now(self.catalogue.alter(topic))

    async def alter_topic_async(self, topic: Topic) -> None:
        await self._changes.in_turn(self.catalogue.alter(topic))

    def delete_topic(self, topic_id: int) -> None:
        """Forget a topic and remove its files. Interrupted, it is finished at the next start."""
        self._changes.now(self.catalogue.delete(topic_id))

    async def delete_topic_async(self, topic_id: int) -> None:
        await self._changes.in_turn(self.catalogue.delete(topic_id))

    def purge_topic(self, topic_id: int, offsets: Mapping[int, int]) -> None:
        """Let nothing below these offsets be read any more, by partition. Upkeep removes whole segments."""
        self._changes.now(self.catalogue.purge(topic_id, offsets))

    async def purge_topic_async(self, topic_id: int, offsets: Mapping[int, int]) -> None:
        await self._changes.in_turn(self.catalogue.purge(topic_id, offsets))

    async def identity(self) -> str:
        """Return what tells this store from all others, for ever: drawn when somebody first asks."""
        if self.state.get("store", "identity") is None:
            await self._changes.in_turn(self.catalogue.identify())
        found: str = self.state.get("store", "identity")
        return found

    async def snapshot(self) -> Snapshot:
        """Return all logs as they are now, to be read until the snapshot is closed."""
        async with self.maintenance.lock:
            return await self._changes.in_turn(self.snapshots.take(self.catalogue, self._open_segments))

    def snapshot_now(self) -> Snapshot:
        """As `snapshot`, of a store that nobody drives. All of it must be flushed."""
        return self._changes.now(self.snapshots.take(self.catalogue, self._open_segments))

    async def write_state(self, changes: Sequence[Change]) -> None:
        """Set and delete values, all or none of them, and wait until they are committed."""
        settled, done = outcome()
        self.state.write(changes, done)
        await settled

    def _write_state(self, changes: list[Change]) -> None:
        if self._state_log.busy:
            raise Overloaded("the state topic is being written: try again")
        errors: list[PenstockError] = []
        self.state.write(changes, lambda _, error: errors.append(error) if error else None)
        self.rounds.flush_log(self._state_log)
        if errors:
            raise errors[0]

    def usage(self) -> dict[str, Usage]:
        """Return how full each limited table is, by name."""
        limit = self.settings.retain_bytes
        return {
            **({} if limit is None else {"store_bytes": Usage(self.maintenance.store_bytes, limit)}),
            "unflushed_bytes": Usage(self.rounds.unflushed_bytes, self.settings.unflushed_bytes_max),
            "tail_bytes": self._tail_budget.usage,
            "open_segments": self._open_segments.files_usage,
            "index_bytes": self._open_segments.index_usage,
            "partitions": Usage(self.catalogue.partitions, self.settings.partitions_max),
            # Of the partition that has most.
            "sources": Usage(max(log.sources for log in self.catalogue.logs.values()), SOURCES_MAX),
            **self.space.usage,
        }

    # Reading and writing.

    def flush(self) -> None:
        """Write and sync all that was appended, here and now."""
        self.rounds.flush()

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
        self.maintenance.now()
        self.space.check()

    def segments(self) -> list[SegmentRow]:
        """Return the segments of every log, as of the last upkeep."""
        return self._meta.segments()

    # Running, and the end.

    async def run(self) -> None:
        """Drive the rounds and the upkeep, until cancelled; `close` does the rest."""
        self.maintenance.begin()
        with ThreadPoolExecutor(1, "penstock-upkeep") as worker:
            lanes = self.rounds.start()
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.maintenance.run(worker, self.settings.upkeep_ms / 1000))
                    group.create_task(self.maintenance.compact_state(worker))
                    group.create_task(self._watch_space())
                    group.create_task(self._changes.run(lanes))
                    # Shielded: cancelling who waits for it does not end the lanes.
                    await asyncio.shield(lanes.end)
            finally:
                self.maintenance.end()
                await self.rounds.stop()

    async def _watch_space(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SPACE_EVERY_S)
            await loop.run_in_executor(self._worker, self.space.check)
            for snapshot in self.snapshots.to_drop(is_full=self.space.is_full):
                await loop.run_in_executor(self._worker, self.snapshots.end, snapshot)

    def close(self) -> None:
        """Make everything durable and let go of the directory. `run` must have ended."""
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

    # For the logs: see `log.Owner`.

    def appended(self, log: Log, size: int) -> None:
        if log is not self._state_log:
            self.space.admit()
        self.rounds.append(log, size)

    def settled(self, size: int) -> None:
        self.rounds.settled(size)

    def announce(self) -> None:
        self.rounds.announce()

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        self.rounds.fault(seam, log, error)

    def damaged(self, log: Log) -> None:
        # While the store is being opened, the catalogue asks each log itself.
        if self._catalogue is not None:
            self._catalogue.note_damage(log)

    def _note_round(self, round_: Round) -> None:
        if any(is_disk_full(write.error) for write in round_.writes):
            self.space.note_full()
        if self.rounds.is_running:
            self.maintenance.look_at_state()

    def _open_log(self, place: Place, policy: Policy, *, piped: bool) -> Log:
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


def _open_segments_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_OPEN_SEGMENTS_MAX, max(1, soft // 2)) if soft >= 0 else _OPEN_SEGMENTS_MAX


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
