"""Upkeep of one log: retention, purges, compaction, merges and truncation. Callers hold `lock`.

`truncate` is for the thread that owns the log, everything else for any thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from penstock.clock import Clock
from penstock.errors import AppendFailed, Closed, LogDamaged, LogFailed, OffsetOutOfRange
from penstock.log import compaction, retention
from penstock.log.appender import Appender, LogState
from penstock.log.files import Files
from penstock.log.flusher import Flusher
from penstock.log.marks import Marks
from penstock.log.policy import Cleanup
from penstock.log.producers import Producers
from penstock.log.scan import Found
from penstock.log.segment import Segment, base_of
from penstock.log.segments import Segments
from penstock.log.tail import Tail
from penstock.log.terms import LogTerms
from penstock.model.batch import Batch, Control

logger = logging.getLogger(__name__)


class Upkeep:
    def __init__(
        self,
        terms: LogTerms,
        marks: Marks,
        segments: Segments,
        appender: Appender,
        flusher: Flusher,
        tail: Tail,
        files: Files,
        clock: Clock,
    ) -> None:
        self._terms = terms
        self._marks = marks
        self._segments = segments
        self._appender = appender
        self._flusher = flusher
        self._tail = tail
        self._files = files
        self._clock = clock
        # A log is either kept up or removed.
        self.lock = threading.Lock()
        # Messages below this offset are needed no more: for a log of the broker's own.
        self.unneeded = 0
        # With `retain_for` in the policy: that group needs the messages from this offset on. All, until it is known.
        self.needed_from = 0
        # The size of the segments that the policy does not keep, and that group needs. As of the last `retain`.
        self.held_bytes = 0
        # Where the segment began that was active at the last compaction.
        self._compacted_base = -1
        # The rest of a merge.
        self._unfinished: Callable[[], None] | None = None

    # Dropping the oldest.

    def retain(self) -> int:
        """Drop the segments that the policy does not keep, oldest first; return how many."""
        self._finish_merge()
        segments = self._segments.all
        marks = self._marks
        # Messages that nobody could read yet stay.
        complete = sum(following.base <= marks.committed for following in segments[1:])
        unneeded = sum(following.base <= max(self.unneeded, marks.purged) for following in segments[1:])
        expired = retention.expired(segments, self._terms.policy, self._clock.now_us())
        processed = sum(following.base <= self._processed for following in segments[1:])
        count = min(max(min(expired, processed), unneeded), complete)
        self.held_bytes = sum(segment.size for segment in segments[max(count, processed) : expired])
        self._segments.drop(count)
        return count

    def purge(self, offset: int) -> None:
        """Let nobody read below `offset`; `retain` removes the segments. The caller stores the offset, and calls this
        again after a restart."""
        self._marks.purged = max(self._marks.purged, offset)

    def oldest_segment_time(self) -> int | None:
        """Return when the last message of the oldest segment was appended; None if no message can be dropped."""
        segments = self._segments.all
        if len(segments) > 1:
            droppable = min(self._processed, self._marks.committed)
            return retention.begun_at(segments, 1) if segments[1].base <= droppable else None
        is_open = self._appender.state is LogState.OPEN and self._processed >= self._marks.committed
        return self._flusher.append_clock.last if is_open and self._flusher.oldest_us is not None else None

    def drop_oldest(self) -> int:
        """Drop the oldest sealed segment, regardless of the policy; return its bytes."""
        self._finish_merge()
        return self._segments.drop(1)

    @property
    def _processed(self) -> int:
        """Return the offset below which retention may drop messages."""
        return self._marks.end if self._terms.policy.retain_for is None else self.needed_from

    # Compaction.

    @property
    def is_compaction_due(self) -> bool:
        """Whether the policy asks for compaction, and segments were sealed since the last one."""
        return self._terms.policy.cleanup is Cleanup.COMPACT and self._compacted_base != self._segments.active.base

    def compact(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Keep the latest message of each key, then merge small segments; return how many messages were dropped.

        Raises Closed if the log is deleted meanwhile, or `stopped` returns true.
        """
        self._finish_merge()

        def gives_up() -> bool:
            return self._appender.state is LogState.CLOSED or stopped()

        segments = self._segments.all
        policy = self._terms.policy
        dropped = compaction.compact(
            segments, policy, self._marks.durable, self._clock.now_us(), self._files, self._segments.replace, gives_up
        )
        compacted = self._segments.all
        following = dict(pairwise(compacted))
        for group in compaction.small_neighbours(compacted, policy, self._terms.store_limit):
            self._merge(group, following[group[-1]], gives_up)
        self._compacted_base = self._tail.compacted = segments[-1].base
        return dropped

    def _merge(self, group: Sequence[Segment], following: Segment, gives_up: Callable[[], bool]) -> None:
        merge = compaction.Merge(group, following, self._files)
        self._unfinished = merge.undo
        try:
            merged = merge.write(gives_up)
        except LogDamaged as error:
            logger.error("%s; the segment is not merged", error)
            self._finish_merge()
            return
        except (AppendFailed, Closed):
            with contextlib.suppress(OSError):
                self._finish_merge()
            raise
        self._segments.replace_group(group, merged)
        self._unfinished = merge.settle
        self._finish_merge()

    def _finish_merge(self) -> None:
        """Finish what an error interrupted. Before that, no other segment may be removed or rewritten."""
        if self._unfinished is not None:
            self._unfinished()
            self._unfinished = None

    # Truncation.

    def truncate(self, offset: int) -> None:
        """Drop the batches that reach beyond `offset`. Their offsets are not given out again.

        If this is interrupted, some of them may come back: call it again.
        """
        self._flusher.flush()
        if self._appender.failure is not None:
            raise self._appender.failure
        self._finish_merge()
        marks = self._marks
        if not marks.start <= offset <= marks.end:
            raise OffsetOutOfRange(offset, marks.start, marks.end)
        segments = self._segments.all
        place = bisect_right(segments, offset, key=base_of) - 1
        cut = segments[place]
        kept, producers = _keep_below(cut, offset)
        if kept == cut.written and place == len(segments) - 1:
            return
        # Two segments cannot have the same name.
        end = marks.end + 1 if segments[-1].base == marks.end else marks.end
        # From here on the log consists of `cut` and `active`: recovery removes the segments between them.
        control = Control(
            reserved=max(end, marks.reserved_written),
            previous=cut.base,
            dropped=segments[-1].base,
            snapshot=producers.snapshot(offset),
        )
        active = self._segments.create(end, control, self._flusher.append_clock.next())
        try:
            for segment in self._flusher.restart(place, active, end, producers):
                self._segments.remove(segment)
            compaction.rewrite(cut, _batches_until(cut, kept), self._files, self._segments.replace)
        except (OSError, AppendFailed) as error:
            # Only the head of the active segment says what must go, so it must stay the active one.
            directory = self._segments.directory
            failure = LogFailed(f"{directory}: a truncation is not finished, restart and call it again: {error}")
            self._flusher.fail(failure)
            raise self._appender.failure or error from error


def _keep_below(segment: Segment, offset: int) -> tuple[int, Producers]:
    """Return where the first batch begins that reaches beyond `offset`, and the producers up to there."""
    producers = Producers.restore(segment.head().snapshot)
    for found in segment.scan():
        if isinstance(found, Found):
            if found.batch.end > offset:
                return found.position, producers
            if found.batch.count:
                producers.note(found.batch)
                producers.settle(found.batch)
    return segment.written, producers


def _batches_until(segment: Segment, position: int) -> Iterator[Batch]:
    for found in segment.scan():
        if isinstance(found, Found) and found.position < position:
            yield found.batch
