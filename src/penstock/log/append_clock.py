"""The append times of a log: they never descend, though the wall clock may be set back."""

from __future__ import annotations

from penstock.clock import Clock


class AppendClock:
    __slots__ = ("_clock", "last")

    def __init__(self, clock: Clock, last: int) -> None:
        self._clock = clock
        # The time of the last batch.
        self.last = last

    def next(self) -> int:
        """Return the time of the next batch: now, or that of the last one if that is later."""
        self.last = max(self._clock.now_us(), self.last)
        return self.last
