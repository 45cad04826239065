"""Exponential backoff with jitter."""

from __future__ import annotations

import random
from typing import Final

FIRST_S: Final = 0.1
LONGEST_S: Final = 5.0
_FACTOR: Final = 3.0
# So that many children of one parent do not reconnect at the same time.
_JITTER: Final = 0.25


class Backoff:
    __slots__ = ("_next_s",)

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def reset(self) -> None:
        """Start over after a success."""
        self._next_s = FIRST_S

    def failed(self) -> float:
        """Return the seconds to wait after a failure."""
        delay_s, self._next_s = self._next_s, min(self._next_s * _FACTOR, LONGEST_S)
        return delay_s * random.uniform(1 - _JITTER, 1)
