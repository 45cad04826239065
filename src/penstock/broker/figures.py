"""What the broker counts on the way of messages: run by run, never one by one."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.run import Run
from penstock.storage.histogram import SECONDS, Histogram


class Figures:
    """Since the start; they belong to the event loop."""

    __slots__ = ("_clock", "delivery_seconds", "dropped", "expired")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # From when a message was appended, or published by a producer that says when, to when it went to a connection.
        self.delivery_seconds = Histogram(SECONDS)
        # Messages that were skipped for readers that do not want to wait.
        self.dropped = 0
        # Messages that were not delivered because their TTL had ended, once for each reader.
        self.expired = 0

    def delivered(self, run: Run, since_us: int = 0) -> None:
        """Messages of `run`, the first among them, went to connections, and not for the second time.

        One that is older than its reader (`since_us`) is history: it was not on its way all that time. One that is
        not stored has no time.
        """
        stored_us = run.time_us(0)
        if stored_us and stored_us >= since_us:
            # The clock of a producer may be ahead of ours.
            self.delivery_seconds.observe(max(0, self._clock.now_us() - stored_us) / 1e6)
