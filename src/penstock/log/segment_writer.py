"""Writes to the active segment of a log: one thread at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.errors import AppendFailed, LogFailed
from penstock.log.files import File
from penstock.log.segment import Segment
from penstock.model.batch import Batch, Control, encode_control

_U32_MAX: Final = (1 << 32) - 1


class SegmentWriter:
    __slots__ = ("segment",)

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    @property
    def durable_bytes(self) -> int:
        """Return `synced` as batches carry it."""
        return min(self.segment.synced, _U32_MAX)

    def create(self, control: Control, log: int, append_time: int) -> None:
        """Create the file with its head, durably."""
        segment = self.segment
        attempt = segment.open_segments.attempt
        head = encode_control(control)
        head.stamp(segment.base, append_time=append_time, log=log)
        file: File | None = None
        try:
            file = created = attempt(lambda: segment.files.create(segment.path))
            attempt(lambda: created.write(head.data, 0))
            created.sync()
            attempt(lambda: segment.files.sync_directory(segment.directory))
        except OSError as error:
            self._remove_unborn(file)
            raise AppendFailed(f"{segment.path}: cannot be created: {error.strerror}") from error
        segment.begin(created, head)

    def write(self, batches: Sequence[Batch]) -> None:
        """Write all of the batches or none: a part that was written is taken back before AppendFailed is raised."""
        segment = self.segment
        segment.open_segments.hold(segment)
        try:
            self._write(batches)
        finally:
            # Last: from here on the file stays open because `written` is beyond `synced`.
            segment.is_writing = False

    def _write(self, batches: Sequence[Batch]) -> None:
        segment = self.segment
        position = segment.written
        try:
            file = segment.file
        except OSError as error:
            raise AppendFailed(f"{segment.path}: cannot be opened: {error.strerror}") from error
        try:
            segment.open_segments.attempt(lambda: file.write_all([batch.data for batch in batches], position))
        except OSError as error:
            self._take_back(file, position)
            raise AppendFailed(f"{segment.path}: cannot write {len(batches)} batches: {error.strerror}") from error
        index = segment.index
        end = position
        for batch in batches:
            index.add(batch, end)
            end += len(batch.data)
        segment.written = end

    def write_control(self, control: Control, offset: int, append_time: int) -> None:
        """Write a control batch, and sync everything that was written."""
        segment = self.segment
        batch = encode_control(control)
        assert segment.log is not None
        batch.stamp(offset, append_time=append_time, log=segment.log, durable_bytes=self.durable_bytes)
        self.write([batch])
        try:
            segment.file.sync()
        except OSError as error:
            raise LogFailed(f"{segment.path}: fsync failed: {error.strerror}") from error
        segment.synced = segment.written

    def _remove_unborn(self, file: File | None) -> None:
        segment = self.segment
        # Closed here, not with its last reference: the error that is raised holds one.
        if file is not None:
            file.close()
        # Durably: found again behind batches that were written meanwhile, it would look like an overlap.
        try:
            if segment.path.name in segment.files.sizes(segment.directory):
                segment.files.remove(segment.path)
            segment.files.sync_directory(segment.directory)
        except OSError as error:
            raise LogFailed(f"{segment.path}: cannot be created, nor removed: {error.strerror}") from error

    def _take_back(self, file: File, length: int) -> None:
        # Synced, so that rejected bytes do not come back after a power cut in place of what is written next.
        try:
            file.truncate(length)
            file.sync()
        except OSError as error:
            raise LogFailed(
                f"{self.segment.path}: a write failed and cannot be taken back: {error.strerror}"
            ) from error
