"""A set of offsets, stored as ranges: its memory grows with the number of gaps, not of offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Ranges:
    """Each range is (first, last), both included. Ranges neither overlap nor touch."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._firsts)

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._firsts, offset) - 1
        return at >= 0 and offset <= self._lasts[at]

    def add(self, first: int, last: int) -> None:
        """Add the offsets from `first` to `last`."""
        # Ranges that overlap or touch become one.
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first = min(first, self._firsts[begin])
            last = max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def drop_below(self, floor: int) -> None:
        """Remove the ranges that are entirely below `floor`."""
        count = bisect_left(self._lasts, floor)
        del self._firsts[:count]
        del self._lasts[:count]

    def pop_below(self, floor: int) -> int:
        """Find the first offset from `floor` on that is not in the set, remove all offsets below it, and return it."""
        count = bisect_right(self._firsts, floor)
        if count:
            floor = max(floor, self._lasts[count - 1] + 1)
        del self._firsts[:count]
        del self._lasts[:count]
        return floor
