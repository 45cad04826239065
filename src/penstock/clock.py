"""The only module that reads the time. All others take a Clock, so that tests can control it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Return microseconds since 1970 by the wall clock, which may jump."""
        ...

    def monotonic_us(self) -> int:
        """Return microseconds since an arbitrary point; never decreases."""
        ...


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000
