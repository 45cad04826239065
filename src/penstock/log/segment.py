"""A segment: one file of batches, named by the offset it begins with, and the sparse index beside it.

It begins with a control batch, the head, which is durable before anything else is written. The last segment of a log is
active and grows (`segment_writer.py`). The others are sealed: they end with another control batch, the foot, and are
synced, indexed, and never written again. Any thread may read a segment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.errors import CorruptBatch, LogDamaged
from penstock.log import scan
from penstock.log.files import File, Files
from penstock.log.index import OffsetIndex
from penstock.log.open_segments import OpenSegments
from penstock.log.scan import Damage, Found
from penstock.model.batch import Batch, Control

logger = logging.getLogger(__name__)

# How sealed segments are read.
ReadMode = Literal["pread", "mmap"]


def log_name(base: int) -> str:
    return f"{base:020d}.log"


def base_of(segment: Segment) -> int:
    return segment.base


class SegmentOrigin(NamedTuple):
    """The log and the offset of the first batch in a file."""

    log: int
    offset: int


class Segment:
    """`synced` bytes are durable, `size` bytes are visible to readers, and the writer stands at `written`. In a sealed
    segment all three are equal."""

    __slots__ = (
        "_file",
        "_index",
        "_name",
        "_origin",
        "_pinned",
        "_read_mode",
        "_view",
        "base",
        "directory",
        "files",
        "head_time",
        "is_given_up",
        "is_writing",
        "log",
        "open_segments",
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
        read_mode: ReadMode,
        name: str | None = None,
    ) -> None:
        """Describe a segment on the disk, or one that is created next. `name` is that of its file, if it has not its
        own. Nothing is opened before it is needed."""
        self._name = name
        self.files = files
        self.open_segments = open_segments
        self.directory = directory
        self._read_mode: ReadMode = read_mode
        self._file: File | None = None
        self._view: memoryview | None = None
        self._index: OffsetIndex | None = None
        self.base = base
        self.size = self.written = self.synced = size
        self.sealed = True
        self._pinned = False
        # Whether it was read since `OpenSegments` last looked.
        self.used = True
        # Whether a write is in progress, and whether the log failed, so that no sync is awaited any more.
        self.is_writing = False
        self.is_given_up = False
        # The number of the log that its batches must have; None: that of the first batch.
        self.log: int | None = None
        # Of the first batch, None if it is not whole; an empty tuple until it was read.
        self._origin: tuple[SegmentOrigin | None, ...] = ()
        # When the head was written, once anyone asked.
        self.head_time: int | None = None

    def __repr__(self) -> str:
        return f"<Segment {self.path.name}, {self.size} bytes>"

    @property
    def path(self) -> Path:
        # Not stored: a Path takes more memory than everything else of a segment that nobody reads.
        return self.directory / (self._name or log_name(self.base))

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(".index")

    # The active segment.

    def begin(self, file: File, head: Batch) -> None:
        """Become the active segment, with a new file that has only a head."""
        self._file = file
        self._index = OffsetIndex()
        self._index.add(head, 0)
        self._origin = (SegmentOrigin(head.log, self.base),)
        self.head_time = head.append_time
        self.size = self.written = self.synced = len(head.data)
        self.sealed = False
        self.log = head.log
        self.open_segments.touch(self)

    def resume(self, index: OffsetIndex, size: int) -> None:
        """Become the active segment again, with the end that recovery found."""
        self._index = index
        self.size = self.written = self.synced = size
        self.unseal()

    def unseal(self) -> None:
        # A view would not see what is written from now on.
        self.sealed = False
        self._view = None

    # The file and the index.

    @property
    def file(self) -> File:
        self.used = True
        file = self._file
        if file is not None:
            return file
        file = self.open_segments.attempt(lambda: self.files.open(self.path))
        if self._pinned and self._file is not None:
            return self._file  # another file may have the name now
        self._file = file
        self.open_segments.touch(self)
        return file

    @property
    def is_closable(self) -> bool:
        return not self.is_writing and (self.synced == self.written or self.is_given_up)

    @property
    def index_bytes(self) -> int:
        """Return the memory that `release` frees."""
        return 0 if self._index is None or not self.sealed else self._index.memory_bytes

    @property
    def index(self) -> OffsetIndex:
        index = self._index
        if index is None:
            index = self._index = _load_index(self) or scan.build_index(self)
            self.open_segments.touch(self)
        return index

    def save_index(self) -> None:
        try:
            file = self.open_segments.attempt(lambda: self.files.create(self.index_path))
            try:
                file.write(self.index.encode(self.written), 0)
            finally:
                file.close()
        except OSError as error:
            # It is built from the log when it is needed.
            logger.warning("%s: cannot save the index: %s", self.index_path, error.strerror)

    def replaced(self, index: OffsetIndex, size: int) -> Segment:
        """Return the segment that has been put in place of this one."""
        segment = Segment(self.files, self.open_segments, self.directory, self.base, size, self._read_mode)
        segment.log = self.log
        segment._index = index
        return segment

    def release(self) -> None:
        """Close the file, and drop the index if it can be loaded again."""
        if not self._pinned:
            self._file = None
            self._view = None
            if self.sealed:
                self._index = None

    def pin(self, file: File | None = None) -> None:
        """Keep the file open, because another one has or will have its name: readers continue with this one."""
        if self._file is None:
            self._file = file or self.open_segments.attempt(lambda: self.files.open(self.path))
        self._pinned = True

    def unpin(self) -> None:
        """Let the file be closed: its name is its own again."""
        self._pinned = False
        self.open_segments.touch(self)

    def content(self, position: int, length: int) -> memoryview:
        if self._read_mode == "mmap" and self.sealed:
            view = self._view
            if view is None:
                view = self._view = self.file.view()
            return view[position : position + length]
        return memoryview(self.file.read(length, position))

    # The batches.

    def read(self, offset: int, bytes_max: int, following: int | None = None) -> list[Batch]:
        """Return batches from the one with `offset` on, or the next one if there is none: at least one if there is any,
        then as many as fit in `bytes_max`. Control batches are left out. The next segment begins at `following`."""
        if foreign := self.foreign():
            raise foreign.error(self.path, following)
        try:
            return scan.read_batches(self, *self.index.floor(offset), offset, bytes_max)
        except CorruptBatch:
            # The index is wrong, or the log is damaged: an index that is built again leads around damage.
            index = scan.build_index(self, check=True)
            self._index = index
        position, expected = index.floor(offset)
        try:
            return scan.read_batches(self, position, expected, offset, bytes_max)
        except CorruptBatch:
            for found in self.scan(position, check=True):
                if isinstance(found, Damage):
                    raise found.error(self.path, following) from None
            raise

    def offset_at(self, append_time: int) -> int | None:
        """Return the first offset appended at `append_time` or later; None if all are older."""
        damaged_at = None
        for found in self.scan(self.index.position_at(append_time)):
            if isinstance(found, Damage):
                damaged_at = found.first  # it may be there: reading there raises
            elif found.batch.count:
                if found.batch.append_time >= append_time:
                    return found.batch.base_offset if damaged_at is None else damaged_at
                damaged_at = None
        return damaged_at

    def scan(self, position: int = 0, *, check: bool = False) -> Iterator[Found | Damage]:
        """Yield everything from `position` on: batches, and damage where a batch should be.

        Headers are always checked, columns only with `check`. Damage ends where the next whole batch begins. A whole
        batch of a newer version is a batch like any other. A foreign file is damaged as a whole. Bytes that are
        written meanwhile are not looked at.
        """
        return scan.scan(self, position, check=check)

    def head(self) -> Control:
        """Return what the head says. Raises LogDamaged if it is not whole."""
        try:
            head = scan.first_batch(self)
            if head.base_offset != self.base or head.count or head.log != (head.log if self.log is None else self.log):
                raise CorruptBatch("it does not begin with the head of this segment")
            control = head.control()
        except CorruptBatch as error:
            raise LogDamaged(self.path, 0, self.base, None, str(error)) from error
        self.head_time = head.append_time
        self.log = head.log
        return control

    @property
    def origin(self) -> SegmentOrigin | None:
        """Return the origin of the first batch; None if it is not whole."""
        if not self._origin:
            try:
                first = scan.first_batch(self)
                self._origin = (SegmentOrigin(first.log, first.base_offset) if first.is_whole() else None,)
            except CorruptBatch:
                self._origin = (None,)
        return self._origin[0]

    def foreign(self) -> Damage | None:
        """Return what is wrong if the file is another segment, of this log or of another: then no batch in it belongs
        to this segment, regardless of its offset."""
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

    def end(self) -> int:
        """Return where the last batch ends. In a sealed segment that is the foot, at the offset where the next segment
        begins: if it ends earlier, the file was cut short."""
        end = self.base
        for found in self.scan(self.index.last_position()):
            if isinstance(found, Found):
                end = found.batch.end
        return end

    def begun_at(self) -> int:
        """Return the append time of the head."""
        if self.head_time is None:
            try:
                self.head()
            except LogDamaged:
                # The batch behind the head is not much younger.
                times = (found.batch.append_time for found in self.scan() if isinstance(found, Found))
                self.head_time = next(times, None)
                if self.head_time is None:
                    raise
        assert self.head_time is not None
        return self.head_time


def _load_index(segment: Segment) -> OffsetIndex | None:
    if segment.foreign():
        return None
    try:
        file = segment.open_segments.attempt(lambda: segment.files.open(segment.index_path))
    except OSError:
        return None
    try:
        return OffsetIndex.decode(file.read(file.size(), 0), segment.size)
    except OSError:
        return None
    finally:
        file.close()
