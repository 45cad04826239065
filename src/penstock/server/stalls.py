"""How long the event loop keeps its callbacks waiting.

A timer records how late it runs. Anything that holds the loop, be it a parser, an encoder or the garbage collector,
shows as that delay, less the time until the timer was due. That time is at most 10 ms while the loop is busy, and
grows to 50 ms while the timer is punctual: 100 ticks a second cost an idle broker 1 % of a core, 20 cost 0.2 %.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from penstock.clock import Clock
from penstock.store.histogram import Histogram

INTERVAL_US: Final = 10_000
INTERVAL_US_MAX: Final = 50_000
# A loop that has nothing to do is late by the millisecond that its timers are rounded to.
_PUNCTUAL_US: Final = 2_000
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# `/varz` counts stalls of more than these milliseconds. Each is one of the bounds.
_SHOWN_MS: Final = (10, 100, 1000)


class Stalls:
    def __init__(self, clock: Clock) -> None:
        self.seconds = Histogram(BOUNDS)
        self.longest_us = 0
        self._clock = clock
        self._interval_us = INTERVAL_US
        self._due_us = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure the running loop."""
        self._due_us = self._clock.monotonic_us() + self._interval_us
        self._timer = asyncio.get_running_loop().call_later(self._interval_us / 1e6, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def observe(self, late_us: int) -> None:
        self.longest_us = max(self.longest_us, late_us)
        self.seconds.observe(max(late_us, 0) / 1e6)

    def figures(self) -> dict[str, Any]:
        *counts, total = self.seconds.cumulative()
        above = {f"above_{ms}ms": total - counts[BOUNDS.index(ms / 1000)] for ms in _SHOWN_MS}
        return {"longest_ms": self.longest_us / 1000, **above}

    def _tick(self) -> None:
        late_us = self._clock.monotonic_us() - self._due_us
        self.observe(late_us)
        self._interval_us = min(2 * self._interval_us, INTERVAL_US_MAX) if late_us < _PUNCTUAL_US else INTERVAL_US
        self.start()
