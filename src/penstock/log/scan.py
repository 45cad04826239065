"""Walks over the bytes of a segment, and finds the batches in them, or damage where a batch should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import CorruptBatch, LogDamaged
from penstock.log.index import INDEX_EVERY_BYTES, OffsetIndex
from penstock.model.batch import HEADER_BYTES, Batch, parse, size_at

if TYPE_CHECKING:
    from penstock.log.segment import Segment

_WINDOW_BYTES: Final = 1 << 20
_TIME_MIN: Final = -(1 << 63)


class Found(NamedTuple):
    position: int
    batch: Batch


class Damage(NamedTuple):
    """No batch is from `position` to `stop`: offsets `first` to `last` are lost, or everything from `first` on."""

    position: int
    stop: int
    first: int
    last: int | None
    reason: str

    def error(self, path: Path, following: int | None = None) -> LogDamaged:
        """Return the damage as an error. `following` is where the next segment begins, if there is one."""
        last = following if self.last is None else self.last
        return LogDamaged(path, self.position, self.first, last, self.reason)


def scan(segment: Segment, position: int, *, check: bool) -> Iterator[Found | Damage]:
    """Yield what a segment holds, as `Segment.scan` says."""
    if foreign := segment.foreign():
        yield foreign
        return
    size = segment.size
    window = _SegmentWindow(segment, size)
    log = segment.log
    expected = segment.base
    append_time = 0
    while position < size:
        beyond = position + 8
        try:
            batch = window.batch_at(position)
            if batch.base_offset < expected or batch.append_time < append_time:
                raise CorruptBatch(f"a batch at offset {batch.base_offset} where {expected} is next")
            if batch.log != log is not None:
                raise CorruptBatch("a batch of another log")
            if check and not batch.is_whole():
                # The header is sound, and says where the next batch begins.
                beyond = position + len(batch.data)
                raise CorruptBatch("checksum of the batch is wrong")
        except CorruptBatch as error:
            found = window.find(beyond, log, expected, append_time)
            last = found.batch.base_offset if found else None
            stop = found.position if found else size
            yield Damage(position, stop, expected, last, str(error))
            position = stop
            continue
        yield Found(position, batch)
        position += len(batch.data)
        log = batch.log
        expected = batch.end
        append_time = batch.append_time


def read_batches(segment: Segment, position: int, expected: int | None, offset: int, bytes_max: int) -> list[Batch]:
    """Return the batches from the one with `offset` on, as `Segment.read` does, walking from `position`.

    `expected` is the offset that the index gives for the batch there. Raises CorruptBatch if the first batch that is
    wanted, or the way to it, is damaged; damage behind it ends the list.

    This is one long loop because it runs for every batch that is read from the disk.
    """
    limit = segment.size
    log = segment.log
    batches: list[Batch] = []
    # The index may lead to a place a few batches early: read that much more.
    length = max(HEADER_BYTES, bytes_max + INDEX_EVERY_BYTES)
    taken = 0
    while position < limit:
        chunk = segment.content(position, min(length, limit - position))
        available = len(chunk)
        at = 0
        while at < available:
            try:
                batch = Batch.at(chunk, at)
                if batch is None:
                    break
                if batch.log != log is not None:
                    raise CorruptBatch("a batch of another log")
            except CorruptBatch:
                if batches:
                    return batches
                raise
            if expected is not None:
                if batch.base_offset != expected:
                    raise CorruptBatch("the index leads to another batch")
                expected = None
            size = len(batch.data)
            at += size
            if not batch.count or batch.base_offset + batch.span <= offset:
                continue
            taken += size
            if taken > bytes_max and batches:
                return batches
            # 64 KiB take 3 µs, so every batch that is read from the disk is checked.
            if not batch.is_whole():
                if batches:
                    return batches
                raise CorruptBatch("checksum of the batch is wrong")
            batches.append(batch)
        if batches:
            return batches
        if not at:
            # One batch is larger than the chunk.
            length = size_at(chunk)
            if not available < length <= limit - position:
                raise CorruptBatch("the batch is cut short")
        position += at
    return batches


def build_index(segment: Segment, *, check: bool = False) -> OffsetIndex:
    index = OffsetIndex()
    for found in segment.scan(check=check):
        if isinstance(found, Damage):
            index.interrupt()
        else:
            index.add(found.batch, found.position)
    return index


def first_batch(segment: Segment) -> Batch:
    """Return the batch at the beginning. Raises CorruptBatch if its header is damaged."""
    return _SegmentWindow(segment, segment.size).batch_at(0)


def position_of(segment: Segment, offset: int) -> int:
    """Return the position of the batch that holds `offset`, or of the next one if none does."""
    for found in segment.scan(segment.index.floor(offset)[0]):
        if isinstance(found, Found) and found.batch.end > offset:
            return found.position
    return segment.size


def end_of_log(segment: Segment) -> int:
    """Return where the last batch of the segment's log ends, wherever in the file that is: a foreign file can show up
    to where offsets were given out."""
    window = _SegmentWindow(segment, segment.size)
    end = position = 0
    while found := window.find(position, segment.log, 0, _TIME_MIN):
        end = max(end, found.batch.end)
        position = found.position + len(found.batch.data)
    return end


def is_sound_at(segment: Segment, position: int, offset: int) -> bool:
    """Return whether a whole batch of the log with this offset is at a position."""
    try:
        batch = _SegmentWindow(segment, segment.size).batch_at(position)
    except CorruptBatch:
        return False
    return segment.foreign() is None and offset == batch.base_offset and batch.is_whole()


def holds_batches(segment: Segment) -> bool:
    """Return whether a whole batch is anywhere in the file, of any log and offset."""
    window = _SegmentWindow(segment, segment.size)
    return segment.size > 0 and window.find(0, None, 0, _TIME_MIN) is not None


class _SegmentWindow:
    """The bytes of a segment, read a megabyte at a time."""

    def __init__(self, segment: Segment, size: int) -> None:
        self._segment = segment
        self._size = size
        self._start = 0
        self._chunk = memoryview(b"")

    def batch_at(self, position: int) -> Batch:
        self._bytes(position, HEADER_BYTES)
        batch = Batch.at(self._chunk, position - self._start)
        if batch is not None:
            return batch
        size = size_at(self._chunk, position - self._start)
        if not size or position + size > self._size:
            raise CorruptBatch("the batch is cut short")
        return parse(self._bytes(position, size))

    def find(self, position: int, log: int | None, expected: int, append_time: int) -> Found | None:
        """Return the next whole batch that may follow in this log. Messages can contain batches too, but those belong
        to other logs, or are older."""
        while position + HEADER_BYTES <= self._size:
            try:
                batch = self.batch_at(position)
                follows = batch.base_offset >= expected and batch.append_time >= append_time
                if follows and batch.log == (batch.log if log is None else log) and batch.is_whole():
                    return Found(position, batch)
            except CorruptBatch:
                pass
            position += 8
        return None

    def _bytes(self, position: int, length: int) -> memoryview:
        at = position - self._start
        if at < 0 or at + length > len(self._chunk):
            self._chunk = self._segment.content(position, min(max(length, _WINDOW_BYTES), self._size - position))
            self._start = position
            at = 0
        return self._chunk[at : at + length]
