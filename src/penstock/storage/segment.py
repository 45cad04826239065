"""A segment: one file of batches, named by the offset it begins with, and the sparse index beside it.

It begins with a control batch, the head, that is durable before anything else is written. The last segment of
a log is the active one and grows; all others are sealed: they end with another control batch, the foot, and are
synced, indexed, and never written again.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar

from penstock.batch import HEADER_BYTES, Batch, Control, encode_control, parse, size_at
from penstock.errors import AppendFailed, CorruptBatch, LogDamaged, LogFailed
from penstock.health import Usage
from penstock.storage.files import File, Files
from penstock.storage.index import INDEX_EVERY_BYTES, Index
from penstock.storage.space import is_disk_full

logger = logging.getLogger(__name__)

Reader = Literal["pread", "mmap"]
T = TypeVar("T")

_WINDOW_BYTES: Final = 1 << 20
_U32_MAX: Final = (1 << 32) - 1
_INDEX_BYTES_MAX: Final = 64 << 20
_TIME_MIN: Final = -(1 << 63)


class Found(NamedTuple):
    position: int
    batch: Batch


class Damage(NamedTuple):
    """From `position` to `stop` there is no batch: offsets `first` to `last` are lost, or all from `first` on."""

    position: int
    stop: int
    first: int
    last: int | None
    reason: str

    def error(self, path: Path, following: int | None = None) -> LogDamaged:
        """`following`: where the next segment begins, if this one is not the last."""
        last = following if self.last is None else self.last
        return LogDamaged(path, self.position, self.first, last, self.reason)


def log_name(base: int) -> str:
    return f"{base:020d}.log"


class Origin(NamedTuple):
    """Of which log the first batch of a file is, and its offset."""

    log: int
    offset: int


class OpenSegments:
    """The segments with an open file, active ones included. Above the limit, those that were not used for longest are
    closed; they are opened again when they are needed.

    A segment is closed only while all that was written to it is synced: an error of the sync is reported to the files
    that were open when the bytes were written. A reader that holds the file of a closed segment keeps it open until
    it is done.
    """

    def __init__(self, segments_max: int = 256, release: Callable[[], bool] = lambda: False) -> None:
        """`release` is called when the disk is full; whether it made some room."""
        # Least recently used first, with the bytes of an index that can be loaded again.
        self._segments: OrderedDict[Segment, int] = OrderedDict()
        self._segments_max = segments_max
        self._index_bytes = 0
        self._release = release
        self._lock = threading.Lock()

    @property
    def files_usage(self) -> Usage:
        return Usage(len(self._segments), self._segments_max)

    @property
    def index_usage(self) -> Usage:
        return Usage(self._index_bytes, _INDEX_BYTES_MAX)

    def touch(self, segment: Segment) -> None:
        """The segment has opened its file, or has loaded its index."""
        with self._lock:
            self._forget(segment)
            self._segments[segment] = size = segment.index_bytes
            self._index_bytes += size
            # Each is looked at twice at the most: used, and then not used any more.
            for _ in range(2 * len(self._segments)):
                if len(self._segments) <= self._segments_max and self._index_bytes <= _INDEX_BYTES_MAX:
                    break
                oldest = next(iter(self._segments))
                if oldest is segment or oldest.used or not oldest.is_closable:
                    oldest.used = False
                    self._segments.move_to_end(oldest)
                else:
                    self._forget(oldest)
                    oldest.release()

    def hold(self, segment: Segment) -> None:
        """Keep its file open: it will be written to. It can be closed again when all of that is synced."""
        with self._lock:
            segment.is_writing = True

    def drop(self, segment: Segment) -> None:
        """Close a segment, now if it is not written to, else with the last who has it."""
        with self._lock:
            self._forget(segment)
            if segment.is_closable:
                segment.release()

    def attempt(self, call: Callable[[], T]) -> T:
        """Make a call to the disk. If it lacks a file descriptor or room that can be had, make it once more."""
        try:
            return call()
        except OSError as error:
            if not self._makes_way(error):
                raise
        return call()

    def _makes_way(self, error: OSError) -> bool:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return is_disk_full(error) and self._release()
        with self._lock:
            for segment in list(self._segments):
                if segment.is_closable:
                    self._forget(segment)
                    segment.release()
        return True

    def _forget(self, segment: Segment) -> None:
        self._index_bytes -= self._segments.pop(segment, 0)


class Segment:
    """`synced` bytes are durable, `size` is what readers may look at, `written` where the one writer stands; in a
    sealed one all three are equal."""

    __slots__ = (
        "_directory",
        "_file",
        "_files",
        "_index",
        "_name",
        "_open",
        "_origin",
        "_pinned",
        "_reader",
        "_view",
        "base",
        "head_time",
        "is_given_up",
        "is_writing",
        "log",
        "sealed",
        "size",
        "synced",
        "used",
        "written",
    )

    def __init__(
        self,
        files: Files,
        open_segments: OpenSegments,
        directory: Path,
        base: int,
        size: int,
        reader: Reader,
        name: str | None = None,
    ) -> None:
        """A segment that is on disk, under another name than its own if one is given; nothing is opened before it is
        needed."""
        self._name = name
        self._files = files
        self._open = open_segments
        self._reader = reader
        self._file: File | None = None
        self._view: memoryview | None = None
        self._index: Index | None = None
        self._directory = directory
        self.base = base
        self.size = self.written = self.synced = size
        self.sealed = True
        self._pinned = False
        # Whether someone looked into it since `OpenSegments` last did.
        self.used = True
        # Whether the writer has its file; and whether its log failed, so that nobody waits for a sync any more.
        self.is_writing = False
        self.is_given_up = False
        # Which log its batches must be of; None: of whichever the first is of.
        self.log: int | None = None
        # What its first batch tells, None if that is not whole; empty until it was read.
        self._origin: tuple[Origin | None, ...] = ()
        # When the head was written, once someone needed to know.
        self.head_time: int | None = None

    def __repr__(self) -> str:
        return f"<Segment {self.path.name}, {self.size} bytes>"

    @property
    def path(self) -> Path:
        # A Path costs more than all the rest of a segment that nobody reads.
        return self._directory / (self._name or log_name(self.base))

    @property
    def file(self) -> File:
        self.used = True
        file = self._file
        if file is not None:
            return file
        file = self._open.attempt(lambda: self._files.open(self.path))
        if self._pinned and self._file is not None:
            return self._file  # what has the name now may be another file
        self._file = file
        self._open.touch(self)
        return file

    @property
    def is_closable(self) -> bool:
        return not self.is_writing and (self.synced == self.written or self.is_given_up)

    @property
    def index_bytes(self) -> int:
        """Memory that `release` gives back."""
        return 0 if self._index is None or not self.sealed else self._index.memory_bytes

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(".index")

    # Writing: one thread at a time, and only to the active segment.

    def create(self, control: Control, log: int, append_time: int) -> None:
        """Make the file with its head, all of it durable."""
        head = encode_control(control)
        head.stamp(self.base, append_time=append_time, log=log)
        try:
            file = self._file = self._open.attempt(lambda: self._files.create(self.path))
            self._open.attempt(lambda: file.write(head.data, 0))
            file.sync()
            self._open.attempt(lambda: self._files.sync_directory(self._directory))
        except OSError as error:
            self._remove_unborn()
            raise AppendFailed(f"{self.path}: cannot be created: {error.strerror}") from error
        self._index = Index()
        self._index.add(head, 0)
        self._origin = (Origin(log, self.base),)
        self.head_time = append_time
        self.size = self.written = self.synced = len(head.data)
        self.sealed = False
        self.log = log
        self._open.touch(self)

    def resume(self, index: Index, size: int) -> None:
        """Go on writing where recovery found the end."""
        self._index = index
        self.size = self.written = self.synced = size
        self.unseal()

    def unseal(self) -> None:
        """Make it the active one. A view would not see what is written from now on."""
        self.sealed = False
        self._view = None

    def write(self, batches: Sequence[Batch]) -> None:
        """Write all of them, or nothing: a part that was written is taken back before AppendFailed is raised."""
        self._open.hold(self)
        try:
            self._write(batches)
        finally:
            # Last: from here on it stays open because `written` is beyond `synced`.
            self.is_writing = False

    def _write(self, batches: Sequence[Batch]) -> None:
        try:
            file = self.file
        except OSError as error:
            raise AppendFailed(f"{self.path}: cannot be opened: {error.strerror}") from error
        try:
            self._open.attempt(lambda: file.write_all([batch.data for batch in batches], self.written))
        except OSError as error:
            self._take_back(file, self.written)
            raise AppendFailed(f"{self.path}: cannot write {len(batches)} batches: {error.strerror}") from error
        index = self.index
        position = self.written
        for batch in batches:
            index.add(batch, position)
            position += len(batch.data)
        self.written = position

    def write_control(self, control: Control, offset: int, append_time: int) -> None:
        """Write a note of the log's own, and sync all that was written."""
        note = encode_control(control)
        assert self.log is not None
        note.stamp(offset, append_time=append_time, log=self.log, durable_bytes=self.durable_bytes)
        self.write([note])
        try:
            self.file.sync()
        except OSError as error:
            raise LogFailed(f"{self.path}: fsync failed: {error.strerror}") from error
        self.synced = self.written

    @property
    def durable_bytes(self) -> int:
        """`synced`, as a batch can tell it."""
        return min(self.synced, _U32_MAX)

    def save_index(self) -> None:
        try:
            index_file = self._open.attempt(lambda: self._files.create(self.index_path))
            try:
                index_file.write(self.index.encode(self.written), 0)
            finally:
                index_file.close()
        except OSError as error:
            # It will be built from the log when it is needed.
            logger.warning("%s: cannot save the index: %s", self.index_path, error.strerror)

    def replaced(self, index: Index, size: int) -> Segment:
        """The segment that stands now where this one did."""
        segment = Segment(self._files, self._open, self._directory, self.base, size, self._reader)
        segment.log = self.log
        segment._index = index
        return segment

    def _remove_unborn(self) -> None:
        # Durably: found again behind batches that were written meanwhile, it would look like an overlap.
        # Closed here, not with its last reference: the error that is raised has one.
        if self._file is not None:
            self._file.close()
            self._file = None
        try:
            if self.path.name in self._files.sizes(self._directory):
                self._files.remove(self.path)
            self._files.sync_directory(self._directory)
        except OSError as error:
            raise LogFailed(f"{self.path}: cannot be created, nor removed: {error.strerror}") from error

    def _take_back(self, file: File, length: int) -> None:
        # Synced, so that what was refused does not come back after a power cut in place of what is written next.
        try:
            file.truncate(length)
            file.sync()
        except OSError as error:
            raise LogFailed(f"{self.path}: a write failed and cannot be taken back: {error.strerror}") from error

    # Reading: any thread.

    @property
    def index(self) -> Index:
        index = self._index
        if index is None:
            index = self._index = self._load_index() or self._build_index()
            self._open.touch(self)
        return index

    def read(self, offset: int, bytes_max: int, following: int | None = None) -> list[Batch]:
        """Batches from the one with `offset` on, or the next one if there is none: at least one if there is any,
        then as many as fit in `bytes_max`. Control batches are left out. The next segment begins at `following`."""
        if foreign := self.foreign():
            raise foreign.error(self.path, following)
        try:
            return self._read(*self.index.floor(offset), offset, bytes_max)
        except CorruptBatch:
            # The index led astray, or the log is damaged: an index built again leads around damage.
            index = self._build_index(check=True)
            self._index = index
        position, expected = index.floor(offset)
        try:
            return self._read(position, expected, offset, bytes_max)
        except CorruptBatch:
            for found in self.scan(position, check=True):
                if isinstance(found, Damage):
                    raise found.error(self.path, following) from None
            raise

    def offset_at(self, append_time: int) -> int | None:
        """The first offset that was appended at `append_time` or later, None if all are older."""
        damaged_at = None
        for found in self.scan(self.index.position_at(append_time)):
            if isinstance(found, Damage):
                damaged_at = found.first  # it may be there: whoever reads there is told
            elif found.batch.count:
                if found.batch.append_time >= append_time:
                    return found.batch.base_offset if damaged_at is None else damaged_at
                damaged_at = None
        return damaged_at

    def position_of(self, offset: int) -> int:
        """Where the batch is that holds `offset`, or the next one if none does."""
        for found in self.scan(self.index.floor(offset)[0]):
            if isinstance(found, Found) and found.batch.end > offset:
                return found.position
        return self.size

    def scan(self, position: int = 0, *, check: bool = False) -> Iterator[Found | Damage]:
        """All that the segment holds from `position` on: batches, and damage where there should be one.

        Headers are always checked, what is behind them if `check` is set. Damage is passed over, up to the
        next place where a whole batch begins. A whole batch of a newer version is a batch like any other.
        What is written meanwhile is not looked at. A foreign file is damaged as a whole.
        """
        if foreign := self.foreign():
            yield foreign
            return
        size = self.size
        window = _Window(self, size)
        log = self.log
        expected = self.base
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
                    # Its header is sound, and knows where the next batch begins.
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

    def head(self) -> Control:
        """What the head says; LogDamaged if it is not whole."""
        try:
            head = _Window(self, self.size).batch_at(0)
            if head.base_offset != self.base or head.count or head.log != (head.log if self.log is None else self.log):
                raise CorruptBatch("it does not begin with the head of this segment")
            control = head.control()
        except CorruptBatch as error:
            raise LogDamaged(self.path, 0, self.base, None, str(error)) from error
        self.head_time = head.append_time
        self.log = head.log
        return control

    @property
    def origin(self) -> Origin | None:
        """Return what its first batch tells; None if that is not whole."""
        if not self._origin:
            try:
                first = _Window(self, self.size).batch_at(0)
                self._origin = (Origin(first.log, first.base_offset) if first.is_whole() else None,)
            except CorruptBatch:
                self._origin = (None,)
        return self._origin[0]

    def foreign(self) -> Damage | None:
        """Return what is wrong if the file is another segment, of this log or of another: then no batch in it is
        this segment's, whatever its offset."""
        origin = self.origin
        if origin is None:
            return None
        if self.log not in (None, origin.log):
            reason = "the file is a segment of another log"
        elif origin.offset != self.base:
            reason = f"the file is another segment, which begins at offset {origin.offset}"
        else:
            return None
        return Damage(0, self.size, self.base, None, reason)

    def end_of_log(self) -> int:
        """Return where the last batch of its log ends, wherever in the file that is: a foreign file can show up to
        where offsets were given out."""
        window = _Window(self, self.size)
        end = position = 0
        while found := window.find(position, self.log, 0, _TIME_MIN):
            end = max(end, found.batch.end)
            position = found.position + len(found.batch.data)
        return end

    def is_sound_at(self, position: int, offset: int) -> bool:
        """Whether there is a whole batch of the log with this offset at a position."""
        try:
            batch = _Window(self, self.size).batch_at(position)
        except CorruptBatch:
            return False
        return self.foreign() is None and offset == batch.base_offset and batch.is_whole()

    def holds_batches(self) -> bool:
        """Whether there is a whole batch anywhere, of whatever log and offset."""
        window = _Window(self, self.size)
        return self.size > 0 and window.find(0, None, 0, _TIME_MIN) is not None

    def end(self) -> int:
        """Where the last thing in it ends. In one that is sealed that is a note, the foot, at the offset with which
        the next segment begins: if it ends earlier the file was cut short."""
        end = self.base
        for found in self.scan(self.index.last_position()):
            if isinstance(found, Found):
                end = found.batch.end
        return end

    def begun_at(self) -> int:
        if self.head_time is None:
            try:
                self.head()
            except LogDamaged:
                # What is behind the head is not much younger.
                times = (found.batch.append_time for found in self.scan() if isinstance(found, Found))
                self.head_time = next(times, None)
                if self.head_time is None:
                    raise
        assert self.head_time is not None
        return self.head_time

    def release(self) -> None:
        """Close the file, and let go of the index if it can be loaded again."""
        if not self._pinned:
            self._file = None
            self._view = None
            if self.sealed:
                self._index = None

    def pin(self, file: File | None = None) -> None:
        """Keep the file open, because its name is or will be that of another: readers go on with this one."""
        if self._file is None:
            self._file = file or self._open.attempt(lambda: self._files.open(self.path))
        self._pinned = True

    def unpin(self) -> None:
        """The name is its own again."""
        self._pinned = False
        self._open.touch(self)

    def content(self, position: int, length: int) -> memoryview:
        if self._reader == "mmap" and self.sealed:
            view = self._view
            if view is None:
                view = self._view = self.file.view()
            return view[position : position + length]
        return memoryview(self.file.read(length, position))

    def _read(self, position: int, expected: int | None, offset: int, bytes_max: int) -> list[Batch]:
        limit = self.size
        log = self.log
        batches: list[Batch] = []
        # The index may lead to a place a few batches early: read that much more.
        length = max(HEADER_BYTES, bytes_max + INDEX_EVERY_BYTES)
        taken = 0
        while position < limit:
            chunk = self.content(position, min(length, limit - position))
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
                # 64 KiB take 3 µs: whoever gets a batch from the disk gets what was written, or is told.
                if not batch.is_whole():
                    if batches:
                        return batches
                    raise CorruptBatch("checksum of the batch is wrong")
                batches.append(batch)
            if batches:
                return batches
            if not at:
                # One batch that is larger than the chunk.
                length = size_at(chunk)
                if not available < length <= limit - position:
                    raise CorruptBatch("the batch is cut short")
            position += at
        return batches

    def _load_index(self) -> Index | None:
        if self.foreign():
            return None
        try:
            file = self._open.attempt(lambda: self._files.open(self.index_path))
        except OSError:
            return None
        try:
            return Index.decode(file.read(file.size(), 0), self.size)
        except OSError:
            return None
        finally:
            file.close()

    def _build_index(self, *, check: bool = False) -> Index:
        index = Index()
        for found in self.scan(check=check):
            if isinstance(found, Damage):
                index.interrupt()
            else:
                index.add(found.batch, found.position)
        return index


class _Window:
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
        """The next whole batch that may follow in this log, body and all. Messages can hold batches as well, but
        those are of other logs, or old."""
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
