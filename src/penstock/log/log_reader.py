"""Reads the committed batches of one log: from memory for readers that keep up, otherwise from the segments."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from penstock.errors import LogDamaged, OffsetOutOfRange, ReadFailed
from penstock.log import examine, retention
from penstock.log.damage import DAMAGE_REMEDY, KnownDamage
from penstock.log.marks import Marks
from penstock.log.policy import OnDamage
from penstock.log.scan import position_of
from penstock.log.segment import Segment, base_of
from penstock.log.segments import Segments
from penstock.log.tail import Tail
from penstock.log.terms import LogTerms
from penstock.model.batch import Batch

T = TypeVar("T")


class LogReader:
    def __init__(self, terms: LogTerms, marks: Marks, segments: Segments, tail: Tail, damage: KnownDamage) -> None:
        self._terms = terms
        self._marks = marks
        self._segments = segments
        self._tail = tail
        self._damage = damage
        # How many damaged offsets readers have skipped.
        self.skipped_offsets = 0

    def read(self, offset: int, bytes_max: int) -> list[Batch]:
        """Return committed batches, from the one that holds `offset`, which may begin earlier: at least one if there is
        any, then as many as fit in `bytes_max`; an empty list at the end.

        If `offset` is damaged, the policy's `on_damage` decides: raise LogDamaged, or return the batches behind it.
        """
        batches = self.read_tail(offset, bytes_max)
        return self.read_disk(offset, bytes_max) if batches is None else batches

    def read_tail(self, offset: int, bytes_max: int) -> list[Batch] | None:
        """Read as `read` does, from memory only; None if `offset` must be read from disk. For the owner's thread."""
        marks = self._marks
        if not marks.start <= offset <= marks.end:
            raise OffsetOutOfRange(offset, marks.start, marks.end)
        if offset >= marks.committed:
            return []
        return self._tail.read(offset, bytes_max, marks.committed)

    def read_disk(self, offset: int, bytes_max: int, on_damage: OnDamage | None = None) -> list[Batch]:
        """Read as `read` does, from disk only. `on_damage` overrides the policy. For any thread."""
        while True:
            try:
                return self._look(partial(self._read_segments, offset=offset, bytes_max=bytes_max))
            except LogDamaged as damage:
                self._damage.note(damage, self._segments.all)
                if offset < damage.first:
                    # There is nothing between the two, so the reader stands at the damage.
                    damage = LogDamaged(damage.path, damage.position, offset, damage.last, damage.reason)
                rule = on_damage or self._terms.policy.on_damage
                if rule is OnDamage.STOP or damage.last is None or not damage.holds(offset):
                    raise damage.with_remedy(DAMAGE_REMEDY) from None
                if on_damage is None:
                    self.skipped_offsets += damage.last - offset
                offset = damage.last

    def offset_at(self, append_time: int) -> int:
        """Return the first offset appended at this time (µs since 1970) or later; `committed` if there is none."""
        return self._look(partial(self._offset_at, append_time=append_time))

    def offset_after(self, offset: int, size: int) -> int:
        """Return an offset at which a batch begins, at least `size` bytes behind the one that holds `offset`, and as
        near to that as the indexes know; `committed` if there is none."""
        return self._look(partial(self._offset_after, offset=offset, size=size))

    def _look(self, into: Callable[[Sequence[Segment]], T]) -> T:
        """Look into the segments, again if they changed meanwhile."""
        while True:
            segments = self._segments.all
            try:
                return into(segments)
            except FileNotFoundError as error:
                # Retention was faster, unless something else removed the file.
                if segments == self._segments.all:
                    raise ReadFailed(f"{self._segments.directory}: cannot be read: {error}") from error
            except OSError as error:
                raise ReadFailed(f"{self._segments.directory}: cannot be read: {error}") from error

    def _place(self, segments: Sequence[Segment], offset: int) -> int:
        """Return which segment holds `offset`."""
        marks = self._marks
        place = bisect_right(segments, offset, key=base_of) - 1
        if place < 0 or not marks.start <= offset <= marks.end:
            raise OffsetOutOfRange(offset, marks.start, marks.end)
        return place

    def _read_segments(self, segments: Sequence[Segment], offset: int, bytes_max: int) -> list[Batch]:
        committed = self._marks.committed
        place = self._place(segments, offset)
        while offset < committed:
            segment = segments[place]
            following = segments[place + 1] if place + 1 < len(segments) else None
            found = segment.read(offset, bytes_max, following.base if following else committed)
            if found:
                if following and found[-1].end > following.base:
                    raise examine.overlap(segment, following, found[-1].end)
                return found if found[-1].end <= committed else [batch for batch in found if batch.end <= committed]
            if following is None:
                break
            # The offsets from here to the next segment were never given out, unless a segment is missing.
            if wrong := examine.misplaced(segment, following, offset):
                raise wrong
            place += 1
        return []

    def _offset_at(self, segments: Sequence[Segment], append_time: int) -> int:
        places = range(len(segments))
        place = max(0, bisect_left(places, append_time, key=partial(retention.begun_at, segments)) - 1)
        for segment in segments[place:]:
            offset = segment.offset_at(append_time)
            if offset is not None and offset < self._marks.committed:
                return offset
        return self._marks.committed

    def _offset_after(self, segments: Sequence[Segment], offset: int, size: int) -> int:
        place = self._place(segments, offset)
        position = position_of(segments[place], offset) + size
        for segment in segments[place:]:
            found = segment.index.ceiling(position)
            if found is not None:
                return min(found, self._marks.committed)
            position = max(0, position - segment.size)
        return self._marks.committed
