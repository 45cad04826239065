"""A copy of a topic: the broker's stored batches in logs of a store, and an index of them.

Each partition is a piped log (see log/log.py), so messages have the same offsets as at the broker. Messages are
stored once their log is synced. The index is updated by reading the logs, and is rebuilt from them if it is missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from penstock.client.values import read_headers
from penstock.errors import LogDamaged, OffsetOutOfRange
from penstock.log.log import Log
from penstock.log.policy import Topic
from penstock.log.segment import Segment
from penstock.model.batch import Batch
from penstock.model.run import Run, open_batch, split
from penstock.outcome import Outcome
from penstock.replica.index import CopiedSegment, ReplicaIndex, Totals
from penstock.store.store import Store
from penstock.times import iso

# Bytes to read at once, to update the index and to answer a range.
_READ_BYTES: Final = 1 << 20
# Small, because a reader opens a whole batch to get one message.
_BATCH_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRecord:
    """One message of a copy."""

    offset: int
    value: bytes
    key: bytes | None = None
    deleted: bool = False
    timestamp_us: int = 0
    subject: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Copy:
    """Only the thread that owns the store appends; others may read at the same time."""

    def __init__(self, store: Store, topic: Topic, index_path: Path) -> None:
        """Open a copy. Raises LogDamaged if a log has lost messages that the index knows."""
        self._store = store
        self._topic = topic
        self._index = ReplicaIndex.open(index_path)
        try:
            for partition in range(topic.partitions):
                self._check(partition)
                self._feed_index(partition)
        except BaseException:
            self._index.close()
            raise

    @property
    def id(self) -> int:
        return self._topic.id

    def close(self) -> None:
        self._index.close()

    def remove_index(self) -> None:
        self._index.remove()

    # Writing.

    def append(self, name: str, runs: Mapping[int, Run]) -> int:
        """Store durably the messages of each partition that are not stored yet; return their number.

        `name` is the name of the topic at the broker. Raises DiskError or sqlite3.Error; then some may be stored.
        """
        self._make_partitions(1 + max(runs, default=0))
        outcomes: list[Outcome] = []
        count = 0
        for partition, run in runs.items():
            log = self._log(partition)
            wanted = run.at_least(log.end)
            count += len(wanted)
            for part in split(wanted, _BATCH_BYTES) if wanted.values else ():
                outcomes.append(Outcome())
                log.append_at(_stored(part, name), outcomes[-1])
        self._store.flush()
        for outcome in outcomes:
            outcome.check()
        for partition in runs:
            self._feed_index(partition)
        return count

    def next_offset(self, partition: int) -> int:
        return self._log(partition).end if partition < self._topic.partitions else 0

    def _make_partitions(self, count: int) -> None:
        if count > self._topic.partitions:
            self._store.alter_topic(replace(self._topic, partitions=count))
            self._topic = replace(self._topic, partitions=count)

    # Reading.

    def find(self, partition: int, offset: int) -> CopiedRecord | None:
        found = next(self._records(partition, offset, offset, read_bytes=1), None)
        return None if found is None else found[0]

    def find_key(self, key: bytes) -> tuple[int, CopiedRecord] | None:
        """Return the latest message of a key, and its partition."""
        place = self._index.find_key(key)
        if place is None:
            return None
        record = self.find(*place)
        return None if record is None else (place[0], record)

    def find_range(
        self, partition: int, first: int, last: int, *, limit: int, bytes_max: int
    ) -> tuple[list[CopiedRecord], int | None]:
        """Return the records from one offset to another, inclusive, and the first offset of the rest if there are more
        than `limit` records or `bytes_max` bytes. At least one record is returned if there is one."""
        found: list[CopiedRecord] = []
        size = 0
        for record, record_bytes in self._records(partition, first, last):
            size += record_bytes
            if found and (len(found) == limit or size > bytes_max):
                return found, record.offset
            found.append(record)
        return found, None

    def keys(self, prefix: bytes, after: bytes | None, limit: int) -> list[bytes]:
        return self._index.keys(prefix, after, limit)

    def segments(self, partition: int | None, limit: int) -> list[CopiedSegment]:
        return self._index.segments(partition, limit)

    def totals(self) -> dict[int, Totals]:
        return self._index.totals()

    def index_bytes(self) -> int:
        return self._index.size()

    def _records(
        self, partition: int, first: int, last: int, *, read_bytes: int = _READ_BYTES
    ) -> Iterator[tuple[CopiedRecord, int]]:
        """Yield the records from one offset to another, inclusive, each with its size."""
        if partition >= self._topic.partitions:
            return
        for batch in _batches(self._log(partition), first, read_bytes):
            if batch.base_offset > last:
                return
            run = open_batch(batch, b"")
            for index, offset in enumerate(run.all_offsets()):
                if first <= offset <= last:
                    yield _record(run, index)

    def _log(self, partition: int) -> Log:
        return self._store.log(self._topic.id, partition)

    # The index.

    def _check(self, partition: int) -> None:
        log, known = self._log(partition), self._index.position(partition)
        if known > log.end:
            reason = (
                f"messages up to offset {known} were stored, and the log ends at {log.end}: "
                "remove the data directory, and the replica copies the topic again"
            )
            active = log.segments[-1]
            raise LogDamaged(active.path, active.size, log.end, known, reason)

    def _feed_index(self, partition: int) -> None:
        log = self._log(partition)
        batches: list[Batch] = []
        size = 0
        for batch in _batches(log, self._index.position(partition)):
            batches.append(batch)
            size += batch.size
            if size >= _READ_BYTES:
                self._index_batches(partition, log, batches)
                batches, size = [], 0
        if batches:
            self._index_batches(partition, log, batches)

    def _index_batches(self, partition: int, log: Log, batches: Sequence[Batch]) -> None:
        segments = log.segments
        latest: dict[bytes, int | None] = {}
        grown: dict[int, CopiedSegment] = {}
        for batch in batches:
            run = open_batch(batch, b"")
            for index, key in run.keys.items():
                latest[key] = None if index in run.tombstones else run.offset(index)
            segment = segments[bisect_right(segments, batch.base_offset, key=lambda each: each.base) - 1]
            before = grown.get(segment.base) or self._copied(partition, segment, run.offset(0))
            grown[segment.base] = before._replace(end=run.end - 1, records=before.records + len(run))
        self._index.add(partition, batches[-1].end, list(grown.values()), latest)

    def _copied(self, partition: int, segment: Segment, first: int) -> CopiedSegment:
        """Return the segment from the index, with its current size."""
        known = self._index.segment(partition, segment.base)
        if known is not None:
            return known._replace(bytes=segment.size)
        file = str(segment.path.relative_to(self._store.directory))
        created_at = iso(segment.begun_at())
        return CopiedSegment(None, partition, segment.base, file, first, first, 0, created_at, segment.size)


def _batches(log: Log, offset: int, read_bytes: int = _READ_BYTES) -> Iterator[Batch]:
    """Yield the stored batches from an offset on, reading `read_bytes` at once."""
    while True:
        try:
            batches = log.read_disk(offset, read_bytes)
        except OffsetOutOfRange:
            return
        if not batches:
            return
        yield from batches
        offset = batches[-1].end


def _stored(run: Run, name: str) -> Batch:
    """Return a batch with the offsets of the messages."""
    return Batch(bytearray(run.stored(name.encode())))


def _record(run: Run, index: int) -> tuple[CopiedRecord, int]:
    value, key, headers = run.values[index], run.keys.get(index), run.headers.get(index)
    record = CopiedRecord(
        offset=run.offset(index),
        value=value,
        key=key,
        deleted=index in run.tombstones,
        timestamp_us=run.time_us(index),
        subject=run.subjects[index].decode(errors="replace"),
        headers={} if headers is None else read_headers(headers),
    )
    return record, len(value) + len(key or b"") + len(headers or b"")
