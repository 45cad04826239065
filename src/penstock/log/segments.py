"""The segments of one log, oldest first. The last one is active and grows; the others are sealed.

The tuple `all` is replaced as a whole, under a lock, so any thread may read it without one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from penstock.log import log_files
from penstock.log.damage import KnownDamage
from penstock.log.files import Files
from penstock.log.marks import Marks
from penstock.log.open_segments import OpenSegments
from penstock.log.segment import ReadMode, Segment
from penstock.log.segment_writer import SegmentWriter
from penstock.model.batch import NO_SEGMENT, Control


class Segments:
    def __init__(
        self,
        directory: Path,
        files: Files,
        open_segments: OpenSegments,
        read_mode: ReadMode,
        *,
        number: int,
        found: Sequence[Segment],
        marked: int | None,
        marks: Marks,
        damage: KnownDamage,
    ) -> None:
        """`found` are the segments on the disk, and `marked` is the offset of the `.start` file, if there is one."""
        self.directory = directory
        # Stamped into every batch of the log.
        self.number = number
        # Where the log begins, as its `.start` file says; None: it has none yet.
        self.marked = marked
        self._files = files
        self._open_segments = open_segments
        self._read_mode: ReadMode = read_mode
        self._marks = marks
        self._damage = damage
        self._lock = threading.Lock()
        self.all: tuple[Segment, ...] = ()
        # How often segments were rewritten or cut.
        self.rewrites = 0
        for segment in found:
            segment.log = number
        self._set(tuple(found))

    @property
    def active(self) -> Segment:
        return self.all[-1]

    @property
    def previous_base(self) -> int:
        """Return where the segment before the active one begins."""
        return self.all[-2].base if len(self.all) > 1 else NO_SEGMENT

    def create(self, base: int, control: Control, append_time: int) -> Segment:
        """Create a segment, durably. It is not one of `all` yet."""
        segment = Segment(self._files, self._open_segments, self.directory, base, 0, self._read_mode)
        SegmentWriter(segment).create(control, self.number, append_time)
        return segment

    def prepend(self, segment: Segment) -> None:
        self._set((segment, *self.all))

    def append(self, created: Sequence[Segment]) -> None:
        """Seal the active segment, and continue in the last one of `created`."""
        sealed = (self.active, *created[:-1])
        with self._lock:
            self._set((*self.all, *created))
        for segment in sealed:
            segment.sealed = True
            self._open_segments.touch(segment)

    def replace(self, old: Segment, new: Segment) -> None:
        with self._lock:
            self._set(tuple(new if segment is old else segment for segment in self.all))
        self.rewrites += 1
        self._open_segments.drop(old)

    def replace_group(self, group: Sequence[Segment], merged: Segment) -> None:
        with self._lock:
            at = self.all.index(group[0])
            self._set((*self.all[:at], merged, *self.all[at + len(group) :]))
        for segment in group:
            self._open_segments.drop(segment)

    def cut(self, place: int, active: Segment) -> tuple[Segment, ...]:
        """Continue in `active` after the segment at `place`; return the segments that are no longer part of the log."""
        cut = self.all[place + 1 :]
        self.all[place].sealed = True
        self._set((*self.all[: place + 1], active))
        self.rewrites += 1
        return cut

    def drop(self, count: int) -> int:
        """Drop this many of the oldest segments; return their bytes."""
        if not count:
            return 0
        # Durably, before the first file goes: otherwise dropped segments would look like lost ones.
        self.mark_start(self.all[count].base)
        self._files.sync_directory(self.directory)
        return sum(self._drop_first() for _ in range(count))

    def _drop_first(self) -> int:
        with self._lock:
            segment = self.all[0]
            self._set(self.all[1:])
        try:
            self._files.remove(segment.path)
        except OSError:
            # The file is still there. Without it in the list, the log would have a gap when it is opened again.
            with self._lock:
                self._set((segment, *self.all))
            raise
        self._forget(segment)
        return segment.size

    def remove(self, segment: Segment) -> None:
        """Remove the files of a segment that is no longer in the list."""
        self._files.remove(segment.path)
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        """Make the removal of a segment's file durable before the next one is removed, so that no gap is left."""
        self._open_segments.drop(segment)
        self._files.sync_directory(self.directory)
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(segment.index_path)
        self._damage.forget(segment)

    def mark_start(self, start: int) -> None:
        """Move the `.start` file. The directory is not synced."""
        log_files.mark_start(self._files, self.directory, self.marked, start)
        self.marked = start

    def let_go(self, segments: Sequence[Segment]) -> None:
        """Close segments whose sync nobody waits for any more."""
        for segment in segments:
            segment.is_given_up = True
            self._open_segments.drop(segment)

    def _set(self, segments: tuple[Segment, ...]) -> None:
        if segments:
            self._marks.first = segments[0].base
        self.all = segments
