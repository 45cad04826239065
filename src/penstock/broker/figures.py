"""Counters of delivery, updated once per run, not per message."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.model.run import Run
from penstock.store.histogram import SECONDS, Histogram


class Figures:
    """Counted since the start, in the event loop."""

    __slots__ = ("_clock", "delivery_seconds", "dropped", "expired")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # From the append of a message, or its producer's timestamp, to its delivery to a connection.
        self.delivery_seconds = Histogram(SECONDS)
        # Messages dropped for slow consumers.
        self.dropped = 0
        # Messages not delivered because they had expired, counted for each reader.
        self.expired = 0

    def delivered(self, run: Run, since_us: int = 0) -> None:
        """Count the first delivery of messages of `run`, by its first message.

        A message that is older than its reader (`since_us`) does not count: it was not waiting to be delivered. A
        message that is not stored has no time.
        """
        stored_us = run.time_us(0)
        if stored_us and stored_us >= since_us:
            # The producer's clock may be ahead.
            self.delivery_seconds.observe(max(0, self._clock.now_us() - stored_us) / 1e6)
