"""The only module that asks the time. Whoever needs `now` takes a Clock, so that tests can turn its hands."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds since 1970, by the wall: may jump."""
        ...

    def monotonic_us(self) -> int:
        """Microseconds since some moment: never goes back."""
        ...


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000
