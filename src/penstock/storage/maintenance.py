"""Maintenance of a store: retention, compaction, the limit of the whole store, and `meta.db`.

It runs in a worker, log by log, and only one runs at a time. If it fails for one log, that is reported and tried again
the next time.
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
from penstock.storage import retention
from penstock.storage.catalogue import Catalogue
from penstock.storage.limit import trim
from penstock.storage.log import Log
from penstock.storage.log import State as LogState
from penstock.storage.meta import Change, Meta, SegmentRow
from penstock.storage.rounds import Rounds
from penstock.storage.segment import Segment
from penstock.storage.state import STATE_TOPIC, State
from penstock.storage.witness import STATE_PLACE, Place

logger = logging.getLogger(__name__)

# The state topic is compacted when its sealed segments have grown by this much, and by as much as they were.
_STATE_GROWTH_BYTES: Final = 4 << 20
# The name of the problem that the store is larger than allowed, and nothing can go.
_LIMIT_PROBLEM: Final = "store"


class Maintenance:
    def __init__(
        self,
        directory: Path,
        catalogue: Catalogue,
        rounds: Rounds,
        state: State,
        meta: Meta,
        health: Health,
        *,
        retain_bytes: int | None,
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._rounds = rounds
        self._state = state
        self._meta = meta
        self._health = health
        self._retain_bytes = retain_bytes
        self._state_log = catalogue.logs[STATE_PLACE]
        # Bytes of the sealed segments of the state topic after the last compaction.
        self._state_bytes = 0
        self._overgrown = asyncio.Event()
        # Held by whoever drops or rewrites segments, or needs that nobody does.
        self.lock = asyncio.Lock()
        # Whether it gives up at the next batch, because the store stops.
        self._is_ending = False
        # Called after each upkeep in the loop: logs may begin later than before.
        self.on_upkeep: Callable[[], None] | None = None
        # Bytes of all segments, as of the last upkeep.
        self.store_bytes = 0
        self._measure()

    def now(self) -> None:
        """Do all of it in the calling thread."""
        self._rounds.roll(self._due_to_roll())
        self._keep_up(list(self._catalogue.logs.values()))
        self._rounds.roll(self._trim(self._trimmable()))
        self.project()

    async def run(self, worker: Executor, interval_s: float) -> None:
        """Do all of it again and again."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            try:
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

    def look_at_state(self) -> None:
        """Have the state topic compacted if it has grown."""
        if self._state_log.compaction_due and self._sealed_state_bytes() > 2 * self._state_bytes + _STATE_GROWTH_BYTES:
            self._overgrown.set()

    def begin(self) -> None:
        self._is_ending = False

    def end(self) -> None:
        """Give up what runs, at its next batch."""
        self._is_ending = True

    def project(self) -> None:
        """Bring `meta.db` up to date."""
        projection = self._take_projection()
        if self._write_projection(projection):
            self._state.projected(projection.changes)

    def _sealed_state_bytes(self) -> int:
        return sum(segment.size for segment in self._state_log.segments[:-1])

    def _due_to_roll(self) -> list[Log]:
        """Return the logs that must begin a new segment, so that retention can drop parts of what they have."""
        return [log for log in self._catalogue.logs.values() if log.is_roll_due()]

    def _keep_up(self, logs: list[Log]) -> None:
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
                self._rounds.fault("upkeep", log, fault)

    def _tell(self, log: Log, what: str, count: int, of: str) -> None:
        """Log what upkeep did; what it does all the time in the state topic is for whoever looks closely."""
        if count:
            level = logging.DEBUG if log is self._state_log else logging.INFO
            logger.log(level, "%s: %s dropped %d %s, it begins at offset %d", log.directory, what, count, of, log.start)

    def _trimmable(self) -> list[Log]:
        """Return the logs that the limit of the store may shorten: all but those that the broker needs itself."""
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
                f"the store has {self.store_bytes} bytes, {limit} are allowed (storage.retain_bytes), and all other "
                f"topics are empty: what the broker itself needs takes the rest, allow more",
            )
        else:
            self._health.clear(_LIMIT_PROBLEM)
        return unsealed

    def _measure(self) -> None:
        logs = list(self._catalogue.logs.values())
        self.store_bytes = sum(segment.size for log in logs for segment in log.segments)

    def _take_projection(self) -> _Projection:
        changes, offset = self._state.unprojected()
        logs = {place: (log.segments, log.witnessed) for place, log in self._catalogue.logs.items()}
        # Of these nobody else can tell how far they reached.
        kept = frozenset(self._catalogue.refused)
        return _Projection(changes, offset, logs, kept, frozenset(int(path.name) for path in self._catalogue.orphans))

    def _write_projection(self, projection: _Projection) -> bool:
        """Bring `meta.db` up to date; whether that worked. If not it is only behind, and is tried again."""
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
