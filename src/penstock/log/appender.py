"""Takes messages into memory: gives them offsets, recognises duplicates, and keeps them until a write takes them.

One thread, the owner of the log, appends. `Flusher` takes what is pending.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import Closed, LogFailed, OriginConflict, PenstockError, ReadOnlyTopic
from penstock.log.handover import Handover
from penstock.log.marks import Marks
from penstock.log.producers import Producers
from penstock.log.terms import LogTerms
from penstock.model.batch import BATCH_BYTES_MAX, Batch
from penstock.model.run import Run, batch_bytes, check_size
from penstock.outcome import Outcome

if TYPE_CHECKING:
    from penstock.log.log import Log

# Gather runs into batches of about this size. A reader must open a whole batch to get at one message.
GATHER_BYTES: Final = 1 << 20


class LogOwner(Protocol):
    """Runs the rounds of a log."""

    def appended(self, log: Log, size: int) -> None:
        """Batches wait to be written. Raises Overloaded, before anything is changed, if too many do."""
        ...

    def settled(self, size: int) -> None:
        """Batches of this many bytes no longer wait."""
        ...

    def announce(self) -> None:
        """`on_commit` or `on_reject` was called."""
        ...

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        """Report an unexpected exception that the log survived."""
        ...

    def damaged(self, log: Log) -> None:
        """The known damage has changed. Called in any thread."""
        ...


class LogState(Enum):
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class Appender:
    __slots__ = (
        "_directory",
        "_handover",
        "_log",
        "_marks",
        "_owner",
        "_pending_bytes",
        "_terms",
        "failure",
        "is_roll_pending",
        "pending",
        "producers",
        "state",
    )

    def __init__(
        self,
        log: Log,
        directory: Path,
        owner: LogOwner,
        terms: LogTerms,
        marks: Marks,
        handover: Handover,
        producers: Producers,
    ) -> None:
        """`log` is the handle by which `owner` knows this log."""
        self._log = log
        self._directory = directory
        self._owner = owner
        self._terms = terms
        self._marks = marks
        self._handover = handover
        self.producers = producers
        self.state = LogState.OPEN
        # Why the log takes no more appends, if it failed.
        self.failure: LogFailed | None = None
        self.pending: list[Batch | Run] = []
        self._pending_bytes = 0
        # Whether the next write begins a new segment.
        self.is_roll_pending = False

    def append(self, batch: Batch, *, source: int = 0, position: int = 0, outcome: Outcome | None = None) -> int:
        """Append a batch, which the log owns from now on; return the offset of its first message.

        `outcome` is settled when the batch is committed or rejected. A duplicate is not stored again: this returns
        the offset of the original, and `outcome` may be settled before that.
        """
        assert isinstance(batch.data, bytearray), "a batch is stamped in place: take it from `encode` or `accept`"
        self._check_writable()
        seen = self.producers.find(batch, source, position)
        if seen is not None:
            # The original may still be pending, so wait for everything appended so far.
            if outcome is not None:
                self._marks.when_committed(outcome)
            return seen
        self._owner.appended(self._log, len(batch.data))
        offset = batch.base_offset = self._marks.end
        batch.source = source
        batch.position = position
        if batch.producer or source:
            self.producers.note(batch)
        self._add(batch, outcome)
        return offset

    def append_at(self, batch: Batch, outcome: Outcome | None = None) -> bool:
        """Append a batch to a piped log at the offset that it has; return whether it is new.

        `outcome` is settled as in `append`. Raises OriginConflict if only a part of the batch is there already: then
        its origin is another one.
        """
        assert self._terms.is_piped, "other logs number their batches themselves"
        assert isinstance(batch.data, bytearray), "a batch is stamped in place"
        self.check_open()
        end = self._marks.end
        if batch.end <= end:
            if outcome is not None:
                self._marks.when_committed(outcome)
            return False
        if batch.base_offset < end:
            raise OriginConflict(
                f"{self._directory}: a batch has offsets {batch.base_offset} to {batch.end}, but {end} is next: "
                f"it comes from another origin"
            )
        self._owner.appended(self._log, len(batch.data))
        batch.source = batch.position = 0
        self._add(batch, outcome)
        return True

    def _add(self, batch: Batch, outcome: Outcome | None) -> None:
        self._marks.end = batch.end
        self.pending.append(batch)
        self._pending_bytes += len(batch.data)
        if outcome is not None:
            self._marks.when_committed(outcome)

    def gather(self, run: Run, outcome: Outcome | None = None) -> int:
        """Append a run, which the log owns from now on; return the offset of its first message.

        The run shares a batch with its neighbours, which a worker encodes. `outcome` is settled as in `append`. Raises
        BatchTooLarge if the run does not fit in a batch.
        """
        # Called for every published run, so the checks are inlined: each call would add 4 %.
        if self.state is not LogState.OPEN or self._terms.is_piped:
            self._check_writable()
        size = batch_bytes(run)
        if size > BATCH_BYTES_MAX:
            check_size(run)
        count = len(run)
        self._owner.appended(self._log, size)
        marks = self._marks
        offset = marks.end
        pending = self.pending
        last = pending[-1] if pending else None
        if isinstance(last, Run) and last.size + size <= GATHER_BYTES and offset != marks.held_at:
            last.extend(run)
            last.size += size
        else:
            run.base_offset = offset
            # It may have been selected from another run, or opened from a batch.
            run.offsets = run.timestamps = run.batch = None
            run.append_time = 0
            run.size = size
            pending.append(run)
        marks.end = offset + count
        self._pending_bytes += size
        if outcome is not None:
            marks.when_committed(outcome)
        return offset

    def check_open(self) -> None:
        """Raise if the log takes no appends."""
        if self.state is not LogState.OPEN:
            raise self.failure or Closed(f"{self._directory}: the log is closed")

    def _check_writable(self) -> None:
        self.check_open()
        if self._terms.is_piped:
            raise ReadOnlyTopic(f"{self._directory}: the log is piped from another broker: publish there")

    @property
    def has_pending(self) -> bool:
        """Whether anything waits to be written: batches, or a new segment."""
        return bool(self.pending) or self.is_roll_pending

    def take(self) -> int:
        """Leave what is pending to the caller; return its bytes."""
        size, self._pending_bytes = self._pending_bytes, 0
        self.pending = []
        self.is_roll_pending = False
        return size

    def reject(self, offset: int, error: PenstockError) -> None:
        """Take back everything appended from `offset` on. Its offsets are given out again."""
        self._owner.settled(self.take())
        self.producers.forget(offset)
        rejected = self._marks.take_back(offset)
        self._handover.take_back(offset)
        for outcome in rejected:
            self._marks.settle(outcome, error)

    def stop(self, state: LogState, error: PenstockError) -> None:
        """Take no more appends, and reject what is not committed."""
        self.state = state
        if isinstance(error, LogFailed):
            self.failure = error
        self.reject(self._marks.committed, error)
