"""A copy: segments of records, and an index of them.

    <copy>/index.db
    <copy>/<partition>/segment-<n>.log      records, nothing else; n counts through all partitions

Records are written and synced first, then the index is committed: then they are stored. Whatever lies behind the bytes
that the index knows was never acknowledged. The next record is written over it; and when the copy is opened, what of it
is whole is taken in, and the rest cut off.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.clock import Clock
from penstock.errors import BadDirectory, LogDamaged
from penstock.moments import iso
from penstock.replica.disk import Disk
from penstock.replica.index import Index, Place, Row, Segment, Topic, Totals
from penstock.replica.record import BadRecord, Record, Scan, decode, encode

logger = logging.getLogger(__name__)

INDEX: Final = "index.db"
# So much is taken in at once when a copy is opened.
_CATCH_UP_BYTES: Final = 4 << 20


class Copy:
    """One thread at a time appends, others may read meanwhile."""

    def __init__(self, directory: Path, *, disk: Disk, clock: Clock, segment_bytes_max: int) -> None:
        """Opens what is there, after whatever happened to it. Raises LogDamaged if something is gone that was stored
        and acknowledged."""
        self.directory = directory
        self._disk = disk
        self._clock = clock
        self._segment_bytes_max = segment_bytes_max
        # Of each partition the segment that grows, and the offset that is wanted next.
        self._active: dict[int, Segment] = {}
        self._next: dict[int, int] = {}
        self._last_id = -1
        disk.make_directory(directory)
        self._index = _open_index(directory / INDEX)
        try:
            self.topic = self._index.topic()
            self._recover()
            self._index.complete()
        except BaseException:
            self._index.close()
            raise

    def close(self) -> None:
        self._index.close()

    # Writing.

    def append(self, topic: Topic, records: Mapping[int, Sequence[Record]]) -> int:
        """Store those of each partition that are not here yet; how many. Durable when it returns.

        Raises OSError or sqlite3.Error: then none of them is stored.
        """
        added = _Addition(self._last_id)
        for partition, several in records.items():
            self._write(partition, several, added)
        if not added.rows:
            return 0
        self._index.add(added.segments.values(), added.rows, added.latest, None if topic == self.topic else topic)
        self.topic = topic
        self._take(added)
        return len(added.rows)

    def next_offset(self, partition: int) -> int:
        return self._next.get(partition, 0)

    def _write(self, partition: int, records: Sequence[Record], added: _Addition) -> None:
        segment = self._active.get(partition)
        wanted = self.next_offset(partition)
        parts: list[bytes] = []
        size = 0
        for record in records:
            if record.offset < wanted:
                continue  # it has come before
            wanted = record.offset + 1
            data = encode(record)
            if segment is None or self._is_full(segment.bytes + size, len(data)):
                self._flush(segment, parts, added)
                parts, size = [], 0
                segment = self._begin(partition, record.offset, added)
            added.note(record, segment, segment.bytes + size, len(data))
            parts.append(data)
            size += len(data)
        self._flush(segment, parts, added)

    def _is_full(self, size: int, more: int) -> bool:
        """A record that is larger than a segment may be has one to itself."""
        return size > 0 and size + more > self._segment_bytes_max

    def _begin(self, partition: int, offset: int, added: _Addition) -> Segment:
        added.last_id += 1
        self._disk.make_directory(self.directory / str(partition))
        file = f"{partition}/segment-{added.last_id}.log"
        return Segment(added.last_id, file, offset, offset - 1, 0, self._now(), partition, 0)

    def _flush(self, segment: Segment | None, parts: list[bytes], added: _Addition) -> None:
        """Write what was noted of a segment."""
        if segment is None or not parts:
            return
        data = b"".join(parts)
        self._disk.write(self.directory / segment.file, data, segment.bytes)
        added.grown(segment, len(parts), len(data))

    def _take(self, added: _Addition) -> None:
        """It is stored."""
        self._last_id = added.last_id
        for segment in added.segments.values():
            self._active[segment.partition] = segment
            self._next[segment.partition] = segment.end + 1

    def _now(self) -> str:
        return iso(self._clock.now_us())

    # Reading.

    def find(self, partition: int, offset: int) -> Record | None:
        return self._found(self._index.find(partition, offset))

    def find_key(self, key: bytes) -> tuple[int, Record] | None:
        """Its latest message, and the partition of that."""
        place = self._index.find_key(key)
        return None if place is None else (place.partition, self._read(place))

    def find_range(
        self, partition: int, first: int, last: int, *, limit: int, bytes_max: int
    ) -> tuple[list[Record], int | None]:
        """Records from one offset to another, both included; and the offset at which the rest of them begins, if there
        are more than `limit`, or than `bytes_max` bytes of them. At least one, if there is one."""
        places = self._index.find_range(partition, first, last, limit + 1)
        found: list[Record] = []
        size = 0
        for place in places:
            size += place.length
            if found and (len(found) == limit or size > bytes_max):
                return found, place.offset
            found.append(self._read(place))
        return found, None

    def keys(self, prefix: bytes, after: bytes | None, limit: int) -> list[bytes]:
        return self._index.keys(prefix, after, limit)

    def segments(self, partition: int | None, limit: int) -> list[Segment]:
        return self._index.segments(partition, limit)

    def totals(self) -> dict[int, Totals]:
        return self._index.totals()

    def index_bytes(self) -> int:
        return self._index.size()

    def _found(self, place: Place | None) -> Record | None:
        return None if place is None else self._read(place)

    def _read(self, place: Place) -> Record:
        path = self.directory / place.file
        with path.open("rb") as file:
            file.seek(place.position)
            data = file.read(place.length)
        try:
            record = decode(data)
        except BadRecord as error:
            raise LogDamaged(path, place.position, place.offset, place.offset + 1, str(error)) from None
        if record.offset != place.offset:
            reason = f"there is the record of offset {record.offset}"
            raise LogDamaged(path, place.position, place.offset, place.offset + 1, reason)
        return record

    # Opening.

    def _recover(self) -> None:
        known = {segment.file: segment for segment in self._index.segments()}
        self._last_id = max((segment.id for segment in known.values()), default=-1)
        for segment in known.values():
            self._check(segment)
            self._active[segment.partition] = segment
            self._next[segment.partition] = segment.end + 1
        for partition, numbers in self._files().items():
            self._recover_partition(partition, numbers, known)

    def _files(self) -> dict[int, list[int]]:
        """The numbers of the segments of each partition, ascending."""
        found: dict[int, list[int]] = defaultdict(list)
        for path in self.directory.glob("*/segment-*.log"):
            try:
                found[int(path.parent.name)].append(int(path.stem.removeprefix("segment-")))
            except ValueError:
                raise BadDirectory(f"{path} does not belong there: move it away") from None
        return {partition: sorted(numbers) for partition, numbers in sorted(found.items())}

    def _check(self, segment: Segment) -> None:
        path = self.directory / segment.file
        size = path.stat().st_size if path.exists() else 0
        if size < segment.bytes:
            reason = (
                f"the file has {size} bytes, and {segment.bytes} were stored:"
                " remove the data directory, and all that the broker has comes again"
            )
            raise LogDamaged(path, size, segment.start, segment.end + 1, reason)

    def _recover_partition(self, partition: int, numbers: list[int], known: Mapping[str, Segment]) -> None:
        last_known = self._active[partition].id if partition in self._active else -1
        is_cut = False
        for number in numbers:
            path = self.directory / f"{partition}/segment-{number}.log"
            segment = known.get(f"{partition}/{path.name}")
            if number < last_known:
                if segment is None:
                    raise BadDirectory(f"{path} is a segment that the index does not know: move it away")
                self._cut(path, segment.bytes)
            elif is_cut:
                # Nobody was told of what stands there: it was written together with what is cut off.
                self._disk.remove(path)
            else:
                end = self._catch_up(path, number, segment)
                is_cut = end < path.stat().st_size
                if is_cut and self._index.is_new and number != numbers[-1]:
                    raise LogDamaged(path, end, self.next_offset(partition), None, "no record is there")
                self._cut(path, end)
            self._last_id = max(self._last_id, number)

    def _catch_up(self, path: Path, number: int, segment: Segment | None) -> int:
        """Take in whole records behind those that are known; where they end."""
        partition = int(path.parent.name)
        with Scan(path, segment.bytes if segment is not None else 0) as scan:
            for records in self._scanned(scan, partition):
                if segment is None:
                    file = f"{partition}/{path.name}"
                    segment = Segment(number, file, records[0][0].offset, -1, 0, self._now(), partition, 0)
                segment = self._take_in(path, segment, records)
        return segment.bytes if segment is not None else 0

    def _take_in(self, path: Path, segment: Segment, records: list[tuple[Record, bytes]]) -> Segment:
        added = _Addition(self._last_id)
        position = segment.bytes
        for record, data in records:
            added.note(record, segment, position, len(data))
            position += len(data)
        # Once more: if a sync failed before, Linux has these bytes in memory, marked clean, and not on the disk.
        self._disk.write(path, b"".join(data for _, data in records), segment.bytes)
        grown = added.grown(segment, len(records), position - segment.bytes)
        self._index.add([grown], added.rows, added.latest, None)
        self._take(added)
        return grown

    def _scanned(self, scan: Scan, partition: int) -> Iterator[list[tuple[Record, bytes]]]:
        """Records that follow on those that are stored, some at a time."""
        wanted = self.next_offset(partition)
        found: list[tuple[Record, bytes]] = []
        size = 0
        while (one := scan.next()) is not None and one[0].offset >= wanted:
            wanted = one[0].offset + 1
            found.append(one)
            size += len(one[1])
            if size >= _CATCH_UP_BYTES:
                yield found
                found, size = [], 0
        if found:
            yield found

    def _cut(self, path: Path, size: int) -> None:
        surplus = path.stat().st_size - size
        if surplus:
            logger.warning("%s: %d bytes behind the last whole record are cut off", path, surplus)
        if not size:
            self._disk.remove(path)
        elif surplus:
            self._disk.truncate(path, size)


class _Addition:
    """What one append adds to the index."""

    def __init__(self, last_id: int) -> None:
        self.last_id = last_id
        self.segments: dict[int, Segment] = {}
        self.rows: list[Row] = []
        self.latest: dict[bytes, tuple[int, int] | None] = {}
        self._end = -1

    def note(self, record: Record, segment: Segment, position: int, length: int) -> None:
        self.rows.append((segment.partition, record.offset, segment.id, position, length))
        self._end = record.offset
        if record.key is not None:
            self.latest[record.key] = None if record.deleted else (segment.partition, record.offset)

    def grown(self, segment: Segment, records: int, size: int) -> Segment:
        """A segment has got what was noted of it."""
        grown = replace(segment, end=self._end, records=segment.records + records, bytes=segment.bytes + size)
        self.segments[segment.id] = grown
        return grown


def _open_index(path: Path) -> Index:
    """One that is none is made anew from the segments, as one that is gone is."""
    try:
        return Index(path)
    except sqlite3.OperationalError:
        raise  # the disk's fault, not the file's
    except sqlite3.DatabaseError as error:
        logger.warning("%s: %s: it is made anew from the segments", path, error)
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return Index(path)
