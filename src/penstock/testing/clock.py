"""A manual clock."""

from __future__ import annotations


class ManualClock:
    """A clock that stands still until the test moves it. It starts at an ordinary time, not at zero."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self._monotonic_us = 0

    def now_us(self) -> int:
        return self._now_us

    def monotonic_us(self) -> int:
        return self._monotonic_us

    def advance(self, us: int) -> None:
        """Let time pass, on the wall clock too."""
        if us < 0:
            raise ValueError(f"invalid step {us} µs: time does not go back, set_wall moves the wall clock alone")
        self._now_us += us
        self._monotonic_us += us

    def set_wall(self, us: int) -> None:
        """Set the wall clock, forward or back, while no time passes."""
        self._now_us = us
