"""Which messages were moved: what is decided counts at once, and arrives in the order of the decisions. No loop."""

from __future__ import annotations

import pytest

from penstock.broker import moves
from penstock.broker.moves import DROPPED, Moves
from penstock.errors import Overloaded

A, B = (1, 0), (2, 0)


def decided(*decisions: dict[tuple[int, int], list[int]]) -> Moves:
    found = Moves(None)
    for number, targets in enumerate(decisions, 1):
        found.begin(number, targets, 0)
    return found


def test_a_message_counts_as_moved_when_that_is_decided_and_has_arrived_when_its_decision_is_finished() -> None:
    found = decided({A: [3, 5], B: [4]}, {A: [6]})
    assert [offset for offset in range(9) if found.is_moved(offset)] == [3, 4, 5, 6]
    arrived = []
    for target in (A, B, A):
        found.finish_first(target)
        arrived.append([offset for offset in range(9) if found.has_arrived(offset)])
    assert arrived == [[3, 5], [3, 4, 5], [3, 4, 5, 6]]
    assert not found.unfinished


def test_the_floor_rises_over_what_was_moved_skipped_or_removed() -> None:
    found = decided({A: [1, 2]})
    assert (found.floor, found.needed_from) == (0, 0)
    found.skip(0, 0, 0)
    assert (found.floor, found.needed_from) == (3, 1), "1 and 2 have not arrived"
    found.finish_first(A)
    assert found.needed_from == 3
    found.skip(7, 8, 7)
    assert (found.floor, found.range_count) == (9, 0), "retention removed all below 7"


def test_dropped_messages_are_known_until_retention_removes_them() -> None:
    found = decided({DROPPED: [1]}, {A: [0]})
    assert (found.is_moved(1), found.is_dropped(1), found.is_dropped(0)) == (True, True, False)
    found.skip(2, 2, 2)
    assert not found.is_dropped(1)


def test_finished_decisions_are_folded_into_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "_MOVES_MAX", 2)
    found = decided({A: [1]}, {B: [3]}, {DROPPED: [5]})
    found.finish_first(A)
    assert found.finished() == []
    found.finish_first(DROPPED)
    assert found.finished() == [1, 3]
    again = Moves(found.fold())
    again.begin(2, {B: [3]}, 0)
    found.folded()
    for each in (found, again):
        assert (each.number, each.floor, each.range_count, each.finished()) == (3, 0, 4, [])
        assert [offset for offset in range(7) if each.has_arrived(offset)] == [1, 5]
        assert each.is_dropped(5)


def test_there_is_a_limit_of_separate_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "RANGES_MAX", 2)
    found = decided({A: [1, 3]})
    found.check_ranges("orders")
    found.begin(2, {A: [5]}, 0)
    with pytest.raises(
        Overloaded, match="messages of orders were moved from 3 separate ranges of offsets, the limit is 2"
    ):
        found.check_ranges("orders")
