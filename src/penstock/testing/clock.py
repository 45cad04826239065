"""A clock that is turned by hand."""

from __future__ import annotations


class ManualClock:
    """Time stands still until the test moves it. The moment it begins with is an ordinary one, never zero."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self._monotonic_us = 0

    def now_us(self) -> int:
        return self._now_us

    def monotonic_us(self) -> int:
        return self._monotonic_us

    def advance(self, us: int) -> None:
        """Let time pass, on the wall as well."""
        if us < 0:
            raise ValueError(f"time does not go back ({us} µs): set_wall turns the wall clock alone")
        self._now_us += us
        self._monotonic_us += us

    def set_wall(self, us: int) -> None:
        """Let the wall clock jump, back too, while no time passes."""
        self._now_us = us
