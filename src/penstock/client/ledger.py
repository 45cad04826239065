"""A count of the messages in flight, so that `flush` waits for everything that began before it, and nothing later."""

from __future__ import annotations


class Ledger:
    __slots__ = ("_now", "_open")

    def __init__(self) -> None:
        # Marks are numbered; the count of messages in flight since each, the earliest first.
        self._now = 0
        self._open: dict[int, int] = {}

    def enter(self, since: int | None = None) -> int:
        """Begin something, or continue it since an earlier mark. Return the mark to pass to `leave`."""
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
        """Return a mark between everything that has begun and everything that will."""
        self._now += 1
        return self._now

    def is_done(self, mark: int) -> bool:
        """Return whether nothing that began before the mark is still in flight."""
        return not self._open or min(self._open) >= mark
