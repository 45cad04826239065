"""How often something was how much: what a histogram of Prometheus is made of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

# From what a page cache takes to what a disk in trouble does.
SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MESSAGES: Final = (1, 10, 100, 1000, 10_000, 100_000)


class Histogram:
    """It belongs to one thread."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """The bounds ascend; a value belongs to the first one that is not below it, or lies above them all."""
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """How many values were not above each bound, and how many there were at all."""
        return list(accumulate(self._counts))
