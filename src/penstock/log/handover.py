"""Passes committed runs and batches to the server of a log, as they were appended.

Readers come first: on a connection that publishes and subscribes, messages precede the acknowledgement that covers
them. So the server of a log calls `Marks.confirm` after it has delivered. Without a server, a commit confirms at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from penstock.log.marks import Marks
from penstock.model.batch import Batch
from penstock.model.run import Run

# While a log is held, this much is kept in memory for `on_commit`; readers find the rest on the disk.
HELD_BYTES: Final = 16 << 20

OnCommit = Callable[[list[Batch | Run]], None]
OnReject = Callable[[int], None]


class Handover:
    __slots__ = ("_announce", "_held_bytes", "_marks", "_on_commit", "_on_reject", "_written")

    def __init__(self, marks: Marks, announce: Callable[[], None]) -> None:
        """`announce` is called after `on_commit` and `on_reject`."""
        self._marks = marks
        self._announce = announce
        self._on_commit: OnCommit | None = None
        self._on_reject: OnReject | None = None
        # Written and not yet committed.
        self._written: deque[Batch | Run] = deque()
        self._held_bytes = 0

    def attach(self, on_commit: OnCommit, on_reject: OnReject) -> None:
        """Serve the log: `on_commit` is called with what was committed, not all of it if the log was held; `on_reject`
        with the first offset of what was rejected, which will be given out again."""
        self._on_commit = on_commit
        self._on_reject = on_reject

    def detach(self) -> None:
        self._on_commit = self._on_reject = None
        self._marks.confirm(self._marks.committed)

    def add(self, written: Sequence[Batch | Run]) -> None:
        if self._on_commit is None:
            return
        if self._marks.held_at is None:
            self._written += written
            return
        for item in written:
            self._held_bytes += item.size
            if self._held_bytes <= HELD_BYTES:
                self._written.append(item)

    def commit(self) -> None:
        """Move `committed` as far as the commit rule allows, and hand over what it passed."""
        marks = self._marks
        if not marks.advance():
            return
        committed = marks.committed
        if self._on_commit is None:
            marks.confirm(committed)
            return
        written = self._written
        passed = []
        while written and written[0].end <= committed:
            passed.append(written.popleft())
        self._on_commit(passed)
        self._announce()

    def hold(self) -> None:
        """Commit nothing that is appended from now on before `release`."""
        assert self._marks.held_at is None, "the log is held already"
        self._marks.held_at = self._marks.end

    def release(self) -> None:
        """Let `committed` move again, with the next `commit`."""
        self._marks.held_at = None
        self._held_bytes = 0

    def take_back(self, offset: int) -> None:
        """Drop what was written from `offset` on."""
        while self._written and self._written[-1].end > offset:
            self._written.pop()
        if self._on_reject is not None:
            self._on_reject(offset)
            self._announce()
