"""Maintenance of a store: retention, compaction, the limit of the whole store, and `meta.db`.

It runs in a worker, log by log, one at a time. A failure of one log is reported, and tried again the next time.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import Closed, PenstockError
from penstock.health import Health
from penstock.log import retention
from penstock.log.appender import LogState
from penstock.log.files import is_disk_full
from penstock.log.log import Log
from penstock.log.segment import Segment
from penstock.log.witness import PartitionId
from penstock.store.catalogue import TopicCatalogue
from penstock.store.limit import trim
from penstock.store.meta import Change, Meta, SegmentRow
from penstock.store.rounds import Round, Rounds
from penstock.store.snapshot import Snapshots
from penstock.store.space import DiskSpace
from penstock.store.state import STATE_TOPIC, StoreState
from penstock.store.witnesses import STATE_PARTITION

logger = logging.getLogger(__name__)

# The state topic is compacted when its sealed segments have doubled, and grown by this much more.
_STATE_GROWTH_BYTES: Final = 4 << 20
_SPACE_EVERY_S: Final = 1.0
# The name of the problem that the store is too large, and nothing can be dropped.
_LIMIT_PROBLEM: Final = "store"


class Maintenance:
    def __init__(
        self,
        directory: Path,
        catalogue: TopicCatalogue,
        rounds: Rounds,
        state: StoreState,
        meta: Meta,
        space: DiskSpace,
        snapshots: Snapshots,
        health: Health,
        *,
        retain_bytes: int | None,
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._rounds = rounds
        self._state = state
        self._meta = meta
        self._space = space
        self._snapshots = snapshots
        self._health = health
        self._retain_bytes = retain_bytes
        self._state_log = catalogue.logs[STATE_PARTITION]
        # Bytes of the sealed segments of the state topic after the last compaction.
        self._state_bytes = 0
        self._overgrown = asyncio.Event()
        # Held while segments are dropped or rewritten, and while they must not be.
        self.lock = asyncio.Lock()
        # Whether it gives up at the next batch, because the store stops.
        self._is_ending = False
        # Called before each upkeep in the loop, to tell the logs what is still needed.
        self.before_upkeep: Callable[[], None] | None = None
        # Called after each upkeep in the loop, because the start of logs may have moved.
        self.on_upkeep: Callable[[], None] | None = None
        # Bytes of all segments, as of the last upkeep.
        self.store_bytes = 0
        self._measure()

    def now(self) -> None:
        """Keep all logs up, in the calling thread."""
        if self.before_upkeep is not None:
            self.before_upkeep()
        self._rounds.roll(self._due_to_roll())
        self._keep_up(list(self._catalogue.logs.values()))
        self._rounds.roll(self._trim(self._trimmable()))
        self.project()

    async def run(self, worker: Executor, interval_s: float) -> None:
        """Keep all logs up, every `interval_s`."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            try:
                if self.before_upkeep is not None:
                    self.before_upkeep()
                self._rounds.roll(self._due_to_roll())
                async with self.lock:
                    await loop.run_in_executor(worker, self._keep_up, list(self._catalogue.logs.values()))
                    self._rounds.roll(await loop.run_in_executor(worker, self._trim, self._trimmable()))
                projection = self._take_projection()
                if await loop.run_in_executor(worker, self._write_projection, projection):
                    self._state.projected(projection.changes)
                if self.on_upkeep is not None:
                    self.on_upkeep()
            except Exception as fault:  # noqa: BLE001 - it is tried again the next time
                self._health.fault("upkeep", str(self._directory), fault)

    async def compact_state(self, worker: Executor) -> None:
        """Compact the state topic when it has grown: between two upkeeps it could grow by hundreds of megabytes."""
        loop = asyncio.get_running_loop()
        while True:
            await self._overgrown.wait()
            async with self.lock:
                await loop.run_in_executor(worker, self._keep_up, [self._state_log])
            self._state_bytes = self._sealed_state_bytes()
            self._overgrown.clear()

    def _look_at_state(self) -> None:
        """Let the state topic be compacted if it has grown."""
        if (
            self._state_log.upkeep.is_compaction_due
            and self._sealed_state_bytes() > 2 * self._state_bytes + _STATE_GROWTH_BYTES
        ):
            self._overgrown.set()

    async def watch_space(self, worker: Executor) -> None:
        """Look at the room on the disk again and again, and end snapshots that nobody reads."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SPACE_EVERY_S)
            await loop.run_in_executor(worker, self._space.check)
            for snapshot in self._snapshots.to_drop(is_full=self._space.is_full):
                await loop.run_in_executor(worker, self._snapshots.end, snapshot)

    def note_round(self, round_: Round) -> None:
        """Look at the result of a round that is finished."""
        if any(is_disk_full(write.error) for write in round_.writes):
            self._space.note_full()
        if self._rounds.is_running:
            self._look_at_state()

    def begin(self) -> None:
        self._is_ending = False

    def end(self) -> None:
        """Let running upkeep give up at its next batch."""
        self._is_ending = True

    def project(self) -> None:
        """Bring `meta.db` up to date."""
        projection = self._take_projection()
        if self._write_projection(projection):
            self._state.projected(projection.changes)

    def _sealed_state_bytes(self) -> int:
        return sum(segment.size for segment in self._state_log.segments[:-1])

    def _due_to_roll(self) -> list[Log]:
        """Return the logs that must begin a new segment, so that retention can drop a part of them."""
        return [log for log in self._catalogue.logs.values() if log.flusher.is_roll_due()]

    def _keep_up(self, logs: list[Log]) -> None:
        for log in logs:
            if self._is_ending:
                return
            try:
                with log.upkeep.lock:
                    if log.state is not LogState.CLOSED:
                        self._tell(log, "retention", log.upkeep.retain(), "segments")
                        if log.upkeep.is_compaction_due:
                            self._tell(log, "compaction", log.upkeep.compact(lambda: self._is_ending), "messages")
            except Closed as error:
                logger.info("%s", error)
            except (PenstockError, OSError) as error:
                logger.error("%s: upkeep failed, tried again later: %s", log.directory, error)
            except Exception as fault:  # noqa: BLE001 - the other logs are kept up all the same
                self._rounds.fault("upkeep", log, fault)

    def _tell(self, log: Log, what: str, count: int, of: str) -> None:
        """Log what upkeep did. The state topic is kept up all the time, so it is logged at DEBUG."""
        if count:
            level = logging.DEBUG if log is self._state_log else logging.INFO
            logger.log(level, "%s: %s dropped %d %s, it begins at offset %d", log.directory, what, count, of, log.start)

    def _trimmable(self) -> list[Log]:
        """Return the logs that the limit of the store may shorten: all but the broker's own."""
        if self._retain_bytes is None:
            return []
        internal = {STATE_TOPIC, *(topic.id for topic in self._catalogue.topics if topic.is_internal)}
        return [log for (topic_id, _), log in self._catalogue.logs.items() if topic_id not in internal]

    def _trim(self, logs: list[Log]) -> list[Log]:
        """Keep the store within its limit; return the logs that must be rolled for that."""
        self._measure()
        limit = self._retain_bytes
        if limit is None:
            return []
        excess = self.store_bytes - limit
        unsealed, left = trim(logs, excess, retention.part_bytes(limit))
        if excess > 0:
            self._measure()
            logger.info("the store had %d bytes more than storage.retain_bytes allows: dropped the oldest", excess)
        if left:
            self._health.report(
                _LIMIT_PROBLEM,
                f"the store has {self.store_bytes} bytes, {limit} are allowed (storage.retain_bytes), and nothing more "
                f"can be dropped: the broker's own topics and those with retain_for take the rest, raise the limit",
            )
        else:
            self._health.clear(_LIMIT_PROBLEM)
        return unsealed

    def _measure(self) -> None:
        logs = list(self._catalogue.logs.values())
        self.store_bytes = sum(segment.size for log in logs for segment in log.segments)

    def _take_projection(self) -> _Projection:
        changes, offset = self._state.unprojected()
        logs = {place: (log.segments, log.flusher.witnessed) for place, log in self._catalogue.logs.items()}
        # Nobody else knows how far these reached.
        kept = frozenset(self._catalogue.refused)
        return _Projection(changes, offset, logs, kept, frozenset(int(path.name) for path in self._catalogue.orphans))

    def _write_projection(self, projection: _Projection) -> bool:
        """Bring `meta.db` up to date; return whether that worked. If not, it is only behind, and this is tried
        again."""
        try:
            self._meta.apply(projection.changes, projection.offset)
            self._meta.replace_segments(
                list(_segment_rows(projection)),
                lambda topic, partition: topic in projection.orphans or (topic, partition) in projection.refused,
            )
        except sqlite3.Error as error:
            logger.warning("%s: cannot be written, tried again later: %s", self._directory / "meta.db", error)
            return False
        return True


class _Projection(NamedTuple):
    """The rows that `meta.db` should have."""

    changes: list[Change]
    offset: int
    # The segments of each log, and where its last batch on the disk ends.
    logs: dict[PartitionId, tuple[tuple[Segment, ...], int]]
    refused: frozenset[PartitionId]
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
