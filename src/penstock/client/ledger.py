"""What is under way, so that `flush` can wait for all that was begun before it, and for nothing that came later."""

from __future__ import annotations


class Ledger:
    __slots__ = ("_now", "_open")

    def __init__(self) -> None:
        # Moments are counted by `mark`; so much is under way since each, the earliest first.
        self._now = 0
        self._open: dict[int, int] = {}

    def enter(self, since: int | None = None) -> int:
        """Something begins, or goes on in another shape since an earlier moment; the moment, for `leave`."""
        moment = self._now if since is None else since
        self._open[moment] = self._open.get(moment, 0) + 1
        return moment

    def leave(self, since: int) -> None:
        left = self._open[since] - 1
        if left:
            self._open[since] = left
        else:
            del self._open[since]

    def mark(self) -> int:
        """A moment between all that has begun and all that will."""
        self._now += 1
        return self._now

    def is_done(self, mark: int) -> bool:
        """Whether nothing that began before the mark is still under way."""
        return not self._open or min(self._open) >= mark
