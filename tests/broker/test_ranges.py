"""Sets of offsets as ranges, against a plain set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.ranges import Ranges

_OFFSETS = st.integers(0, 40)


@given(st.lists(st.tuples(_OFFSETS, st.integers(0, 5)), max_size=20), _OFFSETS)
def test_they_are_what_was_added(added: list[tuple[int, int]], floor: int) -> None:
    ranges, model = Ranges(), set[int]()
    for first, count in added:
        ranges.add(first, first + count)
        model |= set(range(first, first + count + 1))
    found = list(ranges)
    assert [offset for first, last in found for offset in range(first, last + 1)] == sorted(model)
    assert all(after[0] > before[1] + 1 for before, after in pairwise(found)), "none touch"
    assert all((offset in ranges) == (offset in model) for offset in range(50))
    assert list(Ranges(found)) == found
    free = next(offset for offset in range(floor, 60) if offset not in model)
    assert ranges.pop_below(floor) == free
    assert [offset for first, last in ranges for offset in range(first, last + 1)] == sorted(
        offset for offset in model if offset > free
    )
