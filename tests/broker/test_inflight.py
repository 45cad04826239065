"""The position of a shared group in a partition: nothing delivered is forgotten before it is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.broker.inflight import Inflight, PositionRecord

ANN, BOB = 1, 2
LONG = 1 << 60
# Which of the offsets that may be told: numbers, so that they can be drawn before the offsets are known.
REASON = st.sampled_from(("", "x", "y"))
PICK = st.integers(0, 99)
PICKS = st.lists(PICK, min_size=1, max_size=8)
MEMBER = st.integers(0, 2)  # and the next one, where a run is shared
DELAY_US = st.sampled_from((10, 0, 1, 40, -5))


def took(*offsets: int, upto: int | None = None, member: int = ANN, due_us: int = 100) -> Inflight:
    """A group that began at 0 and took `offsets`."""
    inflight = Inflight(0)
    inflight.take(offsets, max(offsets) + 1 if upto is None else upto, member, due_us)
    return inflight


def restarted(inflight: Inflight, now_us: int = 0, then_us: int = 0) -> Inflight:
    return Inflight.restore([as_json(inflight.snapshot(now_us))], then_us)


def as_json(record: PositionRecord | None) -> PositionRecord:
    assert record is not None
    found: PositionRecord = json.loads(json.dumps(record))
    return found


def outline(inflight: Inflight) -> tuple[int, int, dict[int, int], list[tuple[int, int]]]:
    """Return all that must survive a restart, except for delays."""
    attempts = {offset: inflight.attempts(offset) for offset in inflight._lots}
    return inflight.floor, inflight.next, attempts, inflight.dead()


def check(inflight: Inflight) -> None:
    """What holds at any moment, inside too."""
    pending = sorted((*inflight._lots, *inflight._dead))
    assert len(pending) == len(inflight)
    assert all(inflight.floor <= offset < inflight.next for offset in pending)
    assert inflight.floor == min([*pending, inflight.next])
    assert list(inflight._lots) == sorted(inflight._lots)
    assert not inflight._lots.keys() & inflight._dead.keys()
    assert set(pending) <= set(inflight._order)
    assert list(inflight._order) == sorted(set(inflight._order))
    by_member = {(lot, member) for member, lots in inflight._out.items() for lot in lots}
    by_attempts = {(lot, attempts) for attempts, lots in inflight._back.items() for lot in lots}
    lots = set(inflight._lots.values())
    assert {(lot, lot.member) for lot in lots if lot.member is not None} == by_member
    assert {(lot, lot.attempts) for lot in lots if lot.member is None} == by_attempts
    assert all(inflight._out.values())
    assert all(inflight._back.values())
    for lot in lots:
        assert len(inflight._left(lot)) == lot.size
        assert len(lot.offsets) <= max(4 * lot.size, 3), "a lot keeps no more than it needs"
        assert lot.timeline is (inflight._deadlines if lot.member is not None else inflight._delays) or (
            lot.member is None and lot.timeline is None
        )
    for timeline in (inflight._deadlines, inflight._delays):
        on_it = [lot for _, _, lot in timeline._heap if lot.timeline is timeline]
        assert sorted(map(id, on_it)) == sorted(id(lot) for lot in lots if lot.timeline is timeline)
        assert timeline._size == len(on_it)
    assert {offset for offset in inflight._lots if inflight._is_ready(offset)} <= set(inflight._ready)


def test_a_new_group_has_nothing_pending() -> None:
    inflight = Inflight(7)
    assert (inflight.floor, inflight.next, len(inflight), inflight.next_us()) == (7, 7, 0, None)


def test_a_taken_message_is_out_with_its_member_for_the_first_time() -> None:
    inflight = took(0, 1, member=BOB)
    assert (inflight.owner(1), inflight.attempts(1), len(inflight)) == (BOB, 1, 2)


def test_what_was_not_taken_has_no_owner_and_no_attempts() -> None:
    inflight = took(0, 2)
    assert (inflight.owner(1), inflight.attempts(1)) == (None, 0)


def test_messages_that_went_to_several_members_are_out_with_each() -> None:
    inflight = Inflight(0)
    inflight.share([(ANN, [0, 3]), (BOB, [1, 4, 5])], 9, 100)
    check(inflight)
    assert [inflight.owner(offset) for offset in range(6)] == [ANN, BOB, None, ANN, BOB, BOB]
    assert (inflight.floor, inflight.next, inflight.held(ANN), inflight.held(BOB)) == (0, 9, 2, 3)
    assert inflight.release_all(BOB, 5) == 3
    assert (inflight.held(ANN), inflight.held(BOB)) == (2, 0)
    assert inflight.expire(100) == 2


def test_offsets_that_are_not_for_the_group_are_done() -> None:
    inflight = took(3, 8, upto=12)
    assert (inflight.floor, inflight.next) == (3, 12)
    inflight.ack(3)
    assert inflight.floor == 8
    inflight.ack(8)
    assert inflight.floor == 12


def test_taking_nothing_skips() -> None:
    inflight = Inflight(0)
    inflight.take([], 5, ANN, 0)
    assert (inflight.floor, inflight.next, len(inflight)) == (5, 5, 0)


def test_skipping_leaves_the_floor_where_something_is_pending() -> None:
    inflight = took(0)
    inflight.take([], 5, ANN, 0)
    assert (inflight.floor, inflight.next) == (0, 5)


@pytest.mark.parametrize(
    ("offsets", "upto"), [([4], 9), ([5], 5), ([6, 6], 9), ([], 4)], ids=["below", "beyond", "twice", "back"]
)
def test_offsets_out_of_order_are_a_bug_of_the_caller(offsets: list[int], upto: int) -> None:
    inflight = Inflight(5)
    with pytest.raises(AssertionError):
        inflight.take(offsets, upto, ANN, 0)


def test_room_is_what_the_bound_leaves() -> None:
    inflight = Inflight(0, pending_max=3)
    inflight.take([0, 1], 2, ANN, 0)
    assert inflight.room() == 1
    inflight.ack(0)
    assert inflight.room() == 2


def test_what_waits_for_its_dead_letter_takes_room_too() -> None:
    inflight = Inflight(0, pending_max=3)
    inflight.take([0, 1], 2, ANN, 0)
    inflight.kill(0)
    assert inflight.room() == 1


def test_more_than_there_is_room_for_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        Inflight(0, pending_max=1).take([0, 1], 2, ANN, 0)


def test_the_floor_stays_at_the_first_that_is_not_done() -> None:
    inflight = took(0, 1, 2)
    inflight.ack(1)
    assert inflight.floor == 0
    inflight.ack(0)
    assert inflight.floor == 2


def test_an_ack_counts_once() -> None:
    inflight = took(0, 1)
    assert [inflight.ack(1), inflight.ack(1), inflight.ack(7)] == [True, False, False]


def test_ack_many_counts_those_that_were_pending() -> None:
    inflight = took(0, 1, 2, 3)
    inflight.ack(1)
    assert inflight.ack_many([2, 1, 0, 0, 9]) == 2
    assert (inflight.floor, len(inflight)) == (3, 1)


def test_ack_upto_takes_the_offset_itself_and_all_before() -> None:
    inflight = took(0, 1, 2, 3)
    inflight.ack(1)
    assert inflight.ack_upto(2) == 2
    assert (inflight.floor, len(inflight)) == (3, 1)


def test_ack_upto_does_not_move_on_beyond_what_was_read() -> None:
    inflight = took(0, 1)
    assert inflight.ack_upto(50) == 2
    assert (inflight.floor, inflight.next) == (2, 2)


def test_a_late_ack_of_what_is_back_counts() -> None:
    inflight = took(0)
    inflight.expire(100)
    assert inflight.ack(0)
    assert inflight.back(LONG, 10) == []


def test_a_nacked_message_is_back_when_it_is_due() -> None:
    inflight = took(0, 1)
    assert inflight.nack(0, 50)
    assert inflight.owner(0) is None
    assert inflight.back(49, 10) == []
    assert inflight.back(50, 10) == [0]


def test_a_second_nack_sets_another_moment() -> None:
    inflight = took(0)
    inflight.nack(0, 50)
    assert inflight.back(50, 10) == [0]
    inflight.nack(0, 70)
    assert inflight.back(69, 10) == []
    assert inflight.back(70, 10) == [0]


def test_what_is_done_cannot_be_nacked_extended_or_killed() -> None:
    inflight = took(0, 1)
    inflight.ack(0)
    assert not inflight.nack(0, 50)
    assert not inflight.extend(0, 50)
    assert not inflight.kill(0)


def test_what_is_delivered_again_is_counted() -> None:
    inflight = took(0, 1)
    inflight.nack(0, 50)
    inflight.retake(inflight.back(50, 10), BOB, 200)
    assert (inflight.owner(0), inflight.attempts(0)) == (BOB, 2)
    assert (inflight.owner(1), inflight.attempts(1)) == (ANN, 1)
    assert inflight.back(LONG, 10) == []


def test_a_part_of_what_came_back_together_is_delivered_again() -> None:
    inflight = took(0, 1, 2, 3, 4)
    inflight.expire(100)
    inflight.retake(inflight.back(100, 3), BOB, 200)
    assert [inflight.attempts(offset) for offset in range(5)] == [2, 2, 2, 1, 1]
    assert inflight.back(100, 9) == [3, 4]
    inflight.retake([3, 4], ANN, 200)
    check(inflight)
    assert inflight.release_all(BOB, 150) == 3


def test_messages_of_different_attempts_are_delivered_again_together() -> None:
    inflight = took(0, 1)
    inflight.nack(0, 0)
    inflight.retake([0], ANN, 100)
    inflight.release_all(ANN, 5)
    inflight.retake(inflight.back(5, 10), BOB, 200)
    assert [inflight.attempts(offset) for offset in (0, 1)] == [3, 2]


def test_only_what_is_back_can_be_delivered_again() -> None:
    inflight = took(0)
    with pytest.raises(AssertionError):
        inflight.retake([0], BOB, 200)


def test_back_gives_the_first_offsets_and_changes_nothing() -> None:
    inflight = took(0, 1, 2, 3)
    for offset in (3, 1, 2):
        inflight.nack(offset, 10)
    assert inflight.back(10, 2) == [1, 2]
    assert inflight.back(10, 2) == [1, 2]
    assert inflight.back(10, 9) == [1, 2, 3]


def test_back_gives_a_message_once_however_often_it_came_back() -> None:
    inflight = took(0, 1)
    for _ in range(3):
        inflight.nack(0, 10)
        assert inflight.back(10, 5) == [0]
        inflight.retake([0], ANN, 100)
    inflight.release_all(ANN, 10)
    assert inflight.back(10, 5) == [0, 1]


def test_a_deadline_passes_when_its_moment_comes() -> None:
    inflight = took(0, 1, due_us=100)
    assert inflight.expire(99) == 0
    assert inflight.expire(100) == 2
    assert inflight.expire(100) == 0
    assert inflight.back(100, 10) == [0, 1]


def test_only_the_message_that_was_extended_keeps_its_member() -> None:
    inflight = took(0, 1, 2, due_us=100)
    assert inflight.extend(1, 300)
    assert inflight.expire(100) == 2
    assert [inflight.owner(offset) for offset in range(3)] == [None, ANN, None]
    assert inflight.expire(300) == 1


def test_a_message_that_is_extended_was_not_delivered_again() -> None:
    inflight = took(0)
    inflight.nack(0, 0)
    inflight.retake([0], BOB, 100)
    inflight.extend(0, 300)
    assert (inflight.owner(0), inflight.attempts(0)) == (BOB, 2)


def test_a_deadline_can_be_brought_forward() -> None:
    inflight = took(0, due_us=100)
    inflight.extend(0, 50)
    assert inflight.expire(50) == 1


def test_what_is_back_cannot_be_extended() -> None:
    inflight = took(0)
    inflight.nack(0, 50)
    assert not inflight.extend(0, 300)


def test_a_member_that_leaves_gives_back_what_it_has_and_no_more() -> None:
    inflight = took(0, 1, 2, member=ANN)
    inflight.take([3], 4, BOB, 100)
    inflight.ack(0)
    inflight.nack(1, LONG)
    assert inflight.release_all(ANN, 5) == 1
    assert inflight.release_all(ANN, 5) == 0
    assert inflight.back(5, 10) == [2]
    assert inflight.owner(3) == BOB


def test_what_a_member_gave_back_does_not_expire() -> None:
    inflight = took(0, due_us=100)
    inflight.release_all(ANN, 5)
    inflight.retake([0], BOB, 300)
    assert inflight.expire(100) == 0
    assert inflight.owner(0) == BOB


def test_the_last_try_dooms_a_message_that_is_back_due_or_not() -> None:
    inflight = took(0, 1, 2)
    inflight.nack(0, 10)
    inflight.retake([0], ANN, 100)
    inflight.nack(1, 10)
    assert inflight.kill_exhausted(2) == []
    inflight.nack(0, LONG)
    assert inflight.kill_exhausted(2) == [(0, 2)]
    assert inflight.back(LONG, 10) == [1]
    assert inflight.dead() == [(0, 2)]


def test_the_doomed_are_told_in_order_and_once() -> None:
    inflight = took(0, 1, 2)
    for offset in (2, 0, 1):
        inflight.nack(offset, 10)
    inflight.retake([0], ANN, 100)
    inflight.nack(0, 10)
    assert inflight.kill_exhausted(1) == [(0, 2), (1, 1), (2, 1)]
    assert inflight.kill_exhausted(1) == []


def test_a_last_try_that_is_still_out_may_yet_succeed() -> None:
    inflight = took(0)
    assert inflight.kill_exhausted(1) == []
    assert inflight.ack(0)


def test_a_killed_message_is_dead_whatever_its_attempts() -> None:
    inflight = took(0, 1)
    inflight.nack(1, 50)
    assert inflight.kill(1)
    assert inflight.kill(0)
    assert not inflight.kill(0)
    assert inflight.dead() == [(0, 1), (1, 1)]
    assert (inflight.owner(0), inflight.attempts(0), inflight.next_us()) == (None, 1, None)


def test_only_its_stored_letter_ends_a_dead_message() -> None:
    inflight = took(0, 1)
    inflight.kill(0)
    assert not inflight.ack(0)
    assert inflight.ack_many([0]) == 0
    assert inflight.ack_upto(0) == 0
    assert not inflight.nack(0, 0)
    assert not inflight.extend(0, LONG)
    assert inflight.floor == 0
    assert inflight.finish_dead([0, 1]) == 1
    assert (inflight.floor, len(inflight), inflight.dead()) == (1, 1, [])


def test_the_next_moment_is_the_earliest_deadline_or_delay() -> None:
    inflight = took(0, 1, due_us=100)
    inflight.take([2], 3, ANN, 80)
    assert inflight.next_us() == 80
    inflight.nack(0, 60)
    assert inflight.next_us() == 60
    inflight.ack(0)
    assert inflight.next_us() == 80
    inflight.ack(2)
    assert inflight.next_us() == 100
    inflight.ack(1)
    assert inflight.next_us() is None


def test_the_next_moment_is_known_however_many_others_went() -> None:
    inflight = Inflight(0)
    due_us = {offset: offset * 7919 % 1009 for offset in range(400)}
    for offset, moment in due_us.items():
        inflight.take([offset], offset + 1, ANN, moment)
    for offset in sorted(due_us, key=lambda offset: offset * 31 % 400):
        assert inflight.next_us() == min(due_us.values())
        inflight.ack(offset)
        del due_us[offset]
    assert inflight.next_us() is None


def test_what_was_found_due_waits_for_a_member_and_not_for_a_moment() -> None:
    inflight = took(0, 1, due_us=100)
    inflight.nack(0, 60)
    assert inflight.back(60, 0) == []
    assert inflight.next_us() == 100
    inflight.expire(100)
    assert inflight.next_us() == 100, "nobody looked for it yet"
    inflight.back(100, 0)
    assert inflight.next_us() is None


def test_a_reset_goes_anywhere_and_forgets_what_was_pending() -> None:
    inflight = took(5, 6)
    inflight.nack(5, 0)
    inflight.back(0, 10)
    inflight.kill(6)
    inflight.reset(3)
    assert (inflight.floor, inflight.next, len(inflight), inflight.next_us()) == (3, 3, 0, None)
    assert inflight.back(LONG, 10) == []
    assert inflight.dead() == []
    assert inflight.kill_exhausted(0) == []
    assert not inflight.ack(5)
    inflight.take([5], 6, BOB, 100)
    assert (inflight.owner(5), inflight.attempts(5)) == (BOB, 1)


def test_what_retention_dropped_is_lost_and_counted() -> None:
    inflight = took(0, 1, 2, 3, 4)
    inflight.ack(1)
    inflight.kill(2)
    assert inflight.forget_below(3) == 2
    assert (inflight.floor, inflight.next, len(inflight), inflight.dead()) == (3, 5, 2, [])


def test_retention_beyond_what_was_read_moves_the_group_on() -> None:
    inflight = took(0)
    assert inflight.forget_below(9) == 1
    assert (inflight.floor, inflight.next) == (9, 9)


def test_retention_below_the_floor_changes_nothing() -> None:
    inflight = took(5)
    assert inflight.forget_below(5) == 0
    assert (inflight.floor, inflight.next, len(inflight)) == (5, 6, 1)


def test_a_snapshot_says_what_is_pending_and_when_it_is_due() -> None:
    inflight = took(0, 1, 2, 3, upto=9)
    inflight.ack(0)
    inflight.nack(2, 70)
    inflight.kill(3)
    lots = [[1, 0, [0, 1]], [1, 20, [1, 1]], [1, None, [2, 1]]]
    assert inflight.snapshot(50) == {"floor": 1, "next": 9, "lots": lots}
    assert inflight.snapshot(90)["lots"] == [[1, 0, [0, 2]], [1, None, [2, 1]]], "no delay is below 0"


def test_a_snapshot_stores_runs_of_offsets() -> None:
    inflight = took(*range(1000, 11_000))
    inflight.ack_many(range(1000, 11_000, 2))
    assert inflight.snapshot(0)["lots"] == [[1, 0, [0, 1, *[1, 1] * 4999]]]
    inflight.ack_many(range(2001, 10_001))
    assert inflight.snapshot(0)["lots"] == [[1, 0, [0, 1, *[1, 1] * 499, 8001, 1, *[1, 1] * 499]]]


def test_changes_contain_only_what_changed_since_the_mark() -> None:
    inflight = took(*range(1000))
    records = [as_json(inflight.snapshot(50))]
    inflight.mark()
    assert inflight.changes(50) == {"floor": 0, "next": 1000, "lots": [], "done": []}
    inflight.ack(500)
    inflight.nack(600, 70)
    inflight.kill(700)
    inflight.ack_many([2000, 5000])  # never taken
    inflight.take([1003, 1004], 1010, BOB, 200)
    records.append(as_json(inflight.changes(50)))
    assert records[-1] == {
        "floor": 0,
        "next": 1010,
        "lots": [[1, 20, [600, 1]], [1, None, [700, 1]], [1, 0, [1003, 2]]],
        "done": [500, 1],
    }
    inflight.mark()
    inflight.ack_upto(400)
    inflight.finish_dead([700])
    records.append(as_json(inflight.changes(50)))
    assert records[-1] == {"floor": 401, "next": 1010, "lots": [], "done": [299, 1]}, "what is below `floor` is done"
    again = Inflight.restore(records, 1000)
    check(again)
    assert outline(again) == outline(inflight)


def test_changes_are_unknown_after_a_reset_and_without_a_mark() -> None:
    inflight = took(0, 1, 2)
    assert inflight.changes(0) is None
    inflight.mark()
    inflight.unmark()
    assert inflight.changes(0) is None
    inflight.mark()
    inflight.reset(0)
    assert inflight.changes(0) is None


def test_acks_of_messages_that_are_not_pending_are_not_remembered() -> None:
    inflight = took(0, 1)
    inflight.mark()
    for turn in range(100):
        inflight.ack_many([5000 + turn])
        inflight.ack(9000 + turn)
        inflight.finish_dead([1])
    assert inflight._changed == set()


def test_a_record_in_the_old_form_is_still_read() -> None:
    old = {"floor": 1, "next": 9, "pending": [[1, 1, 0], [2, 3, 20]], "dead": [[3, 4]], "buried": 0}
    inflight = Inflight.restore([old], 1000)
    check(inflight)
    assert outline(inflight) == (1, 9, {1: 1, 2: 3}, [(3, 4)])
    assert (inflight.back(1000, 9), inflight.back(1020, 9)) == ([1], [1, 2])
    changed = {"floor": 2, "next": 9, "lots": [], "done": [1, 1]}
    assert outline(Inflight.restore([old, changed], 0)) == (2, 9, {2: 3}, [])


def test_after_a_restart_only_what_was_pending_is_delivered_again() -> None:
    inflight = took(0, 1, 2, 3, 4, upto=9)
    inflight.ack_many([0, 3])
    inflight.nack(2, 70)
    again = restarted(inflight, 50, 1000)
    check(again)
    assert (again.floor, again.next, len(again)) == (1, 9, 3)
    assert again.owner(1) is None
    assert again.back(1000, 10) == [1, 4]
    assert again.back(1020, 10) == [1, 2, 4]
    again.retake([1], BOB, 2000)
    assert again.attempts(1) == 2


def test_what_is_revived_is_delivered_as_if_for_the_first_time_and_the_next_record_is_whole() -> None:
    inflight = took(0, 1, 2, 3)
    inflight.ack_many([0, 1, 2, 3])
    inflight.take([4], 5, ANN, 100)
    inflight.mark()
    inflight.requeue([2, 4, 7], 50)
    check(inflight)
    assert (inflight.floor, inflight.next, inflight.back(50, 9), inflight.owner(4)) == (2, 5, [2], ANN)
    assert inflight.changes(50) is None
    inflight.retake([2], BOB, 100)
    assert inflight.attempts(2) == 1
    inflight.ack_many([2, 4])
    assert inflight.floor == 5


def test_after_a_restart_the_dead_still_wait_for_their_letters() -> None:
    inflight = took(0, 1)
    inflight.kill(0)
    again = restarted(inflight)
    assert again.dead() == [(0, 1)]
    assert again.floor == 0
    again.finish_dead([0])
    assert again.floor == 1


def test_after_a_restart_it_is_still_known_why_messages_failed() -> None:
    inflight = took(0, 1, 2, 3)
    inflight.mark()
    whole = as_json(took(0, 1, 2, 3).snapshot(0))
    inflight.nack(0, 10, "refused by the bank")
    inflight.nack(1, 10, "refused by the bank")
    inflight.kill(2, "no such account")
    changes = as_json(inflight.changes(0))
    assert changes["reasons"] == [[1, "refused by the bank", [0, 2]], [1, "no such account", [2, 1]]]
    again = Inflight.restore([whole, changes], 0)
    assert [again.reason(offset) for offset in range(4)] == [
        (1, "refused by the bank"),
        (1, "refused by the bank"),
        (1, "no such account"),
        None,
    ]


def test_reasons_are_bounded_and_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.inflight.REASONS_MAX", 10)
    inflight = took(0, 1, 2)
    for offset in (0, 1, 2, 2):
        inflight.nack(offset, 10, "12345")
    assert [inflight.reason(offset) for offset in range(3)] == [None, (1, "12345"), (1, "12345")]
    inflight.ack_many([1, 2])
    inflight.nack(0, 10, "1234567890")
    assert inflight.reason(0) == (1, "1234567890")


def test_a_smaller_bound_after_a_restart_leaves_no_room() -> None:
    again = Inflight.restore([took(0, 1, 2).snapshot(0)], 0, 2)
    assert (again.pending_max, again.room(), len(again)) == (2, 0, 3)


def _extend(inflight: Inflight, turn: int) -> None:
    inflight.extend(0, 100 + turn)


def _extend_back_and_forth(inflight: Inflight, turn: int) -> None:
    inflight.extend(0, LONG - turn)


def _nack(inflight: Inflight, turn: int) -> None:
    inflight.nack(1, 100 + turn)


def _redeliver(inflight: Inflight, turn: int) -> None:
    inflight.nack(1, 0)
    inflight.retake(inflight.back(turn, 1), ANN, LONG + turn)


def _flow_past(inflight: Inflight, turn: int) -> None:
    inflight.take([inflight.next], inflight.next + 1, BOB, LONG)
    inflight.ack(inflight.next - 1)


def _flow_past_and_release(inflight: Inflight, turn: int) -> None:
    inflight.take([inflight.next], inflight.next + 1, BOB, LONG)
    inflight.release_all(BOB, turn)
    inflight.ack_many(inflight.back(turn, 10)[:1])


@pytest.mark.parametrize(
    "act", [_extend, _extend_back_and_forth, _nack, _redeliver, _flow_past, _flow_past_and_release]
)
def test_memory_is_bounded_by_what_is_pending(act: Callable[[Inflight, int], None]) -> None:
    inflight = took(0, 1, due_us=LONG)
    for turn in range(1000):
        act(inflight, turn)
    check(inflight)
    for queue in (inflight._order, inflight._ready, inflight._deadlines._heap, inflight._delays._heap):
        assert len(queue) < 100
    assert len(inflight._out) + len(inflight._back) < 5


def test_a_message_that_stays_keeps_no_others_in_memory() -> None:
    inflight = Inflight(0)
    inflight.take(range(500), 500, ANN, LONG)
    inflight.ack_many(range(1, 400))
    for offset in range(400, 500):
        inflight.ack(offset)
    assert len(inflight._lots[0].offsets) == 1
    check(inflight)


@dataclass
class Message:
    """A pending one, as the model has it."""

    attempts: int
    at_us: int
    member: int | None = None
    dead: bool = False
    found_due: bool = False
    failed: tuple[int, str] | None = None

    def turn_back(self, at_us: int) -> None:
        self.member, self.at_us, self.found_due = None, at_us, False

    def go_out(self, at_us: int, member: int) -> None:
        self.attempts, self.at_us, self.member, self.found_due = self.attempts + 1, at_us, member, False

    def fail(self, reason: str) -> None:
        self.failed = (self.attempts, reason) if reason else self.failed


class InflightMachine(RuleBasedStateMachine):
    """One `Inflight` against a dict of all that is pending, searched from end to end for every question."""

    def __init__(self) -> None:
        super().__init__()
        self.inflight: Inflight
        self.pending: dict[int, Message] = {}
        self.records: list[PositionRecord] = []
        self.floor = self.next = self.now_us = 0
        self.taken = self.acked = self.buried = self.lost = 0

    @initialize(floor=st.integers(0, 5), pending_max=st.sampled_from((30, 8, 10_000)))
    def begin(self, floor: int, pending_max: int) -> None:
        self.inflight = Inflight(floor, pending_max)
        self.floor = self.next = floor
        self._take([1, 1, 2, 1, 1], 0, 0, 10)

    def _living(self) -> dict[int, Message]:
        return {offset: message for offset, message in self.pending.items() if not message.dead}

    def _back(self) -> dict[int, Message]:
        return {offset: message for offset, message in self._living().items() if message.member is None}

    def _offset(self, pick: int) -> int:
        """A pending one for the most part, else one that is done or was never taken."""
        around = [self.next, self.next + 3, *range(max(0, self.floor - 1), self.floor + 3)]
        told: list[int] = [*sorted(self.pending), *around]
        return told[pick % len(told)]

    # Out.

    @rule(
        limit=st.sampled_from((20, 5, 1, 0)),
        gaps=st.lists(st.integers(1, 3), max_size=12),
        beyond=st.integers(0, 3),
        member=MEMBER,
        delay_us=DELAY_US,
    )
    def deliver(self, limit: int, gaps: list[int], beyond: int, member: int, delay_us: int) -> None:
        self._take_again(limit, member, delay_us)
        self._take(gaps, beyond, member, delay_us)

    def _take_again(self, limit: int, member: int, delay_us: int) -> None:
        due = {offset: message for offset, message in self._back().items() if message.at_us <= self.now_us}
        found = self.inflight.back(self.now_us, limit)
        assert found == sorted(due)[:limit]
        assert found == self.inflight.back(self.now_us, limit), "asking changes nothing"
        for message in due.values():
            message.found_due = True
        self.inflight.retake(found, member, self.now_us + delay_us)
        for offset in found:
            self.pending[offset].go_out(self.now_us + delay_us, member)

    def _take(self, gaps: list[int], beyond: int, member: int, delay_us: int) -> None:
        room = max(0, self.inflight.pending_max - len(self.pending))
        assert self.inflight.room() == room
        offsets = []
        for gap in gaps[:room]:
            self.next += gap
            offsets.append(self.next - 1)
        self.next += beyond
        shares = {member: offsets}
        if len(offsets) > 3:
            shares = {member: offsets[::2], member + 1: offsets[1::2]}
            self.inflight.share(list(shares.items()), self.next, self.now_us + delay_us)
        else:
            self.inflight.take(offsets, self.next, member, self.now_us + delay_us)
        for owner, share in shares.items():
            self.pending |= {offset: Message(1, self.now_us + delay_us, owner) for offset in share}
        self.taken += len(offsets)

    @rule(picks=PICKS, member=MEMBER, delay_us=DELAY_US)
    def deliver_again_early(self, picks: list[int], member: int, delay_us: int) -> None:
        again = {self._offset(pick) for pick in picks} & self._back().keys()
        self.inflight.retake(again, member, self.now_us + delay_us)
        for offset in again:
            self.pending[offset].go_out(self.now_us + delay_us, member)

    @rule(pick=PICK, delay_us=DELAY_US)
    def extend(self, pick: int, delay_us: int) -> None:
        offset = self._offset(pick)
        message = self.pending.get(offset)
        out = message is not None and message.member is not None
        assert self.inflight.extend(offset, self.now_us + delay_us) == out
        if message is not None and out:
            message.at_us = self.now_us + delay_us

    # Done.

    @rule(picks=PICKS, how=st.sampled_from(("ack", "ack_many", "ack_upto")))
    def ack(self, picks: list[int], how: str) -> None:
        offsets = [self._offset(pick) for pick in picks]
        match how:
            case "ack":
                acked = sum(self.inflight.ack(offset) for offset in offsets)
            case "ack_many":
                acked = self.inflight.ack_many(offsets)
            case _:
                acked = self.inflight.ack_upto(min(offsets))
                offsets = list(range(min(offsets) + 1))
        done = set(offsets) & self._living().keys()
        assert acked == len(done)
        for offset in done:
            del self.pending[offset]
        self.acked += len(done)

    @precondition(lambda self: len(self.pending) > 5)
    @rule(pick=PICK)
    def forget_below(self, pick: int) -> None:
        offset = self._offset(pick)
        kept = {pending: message for pending, message in self.pending.items() if pending >= offset}
        lost = len(self.pending) - len(kept)
        assert self.inflight.forget_below(offset) == lost
        self.pending = kept
        self.lost += lost
        self.next = max(self.next, offset)

    @precondition(lambda self: len(self.pending) > 10)
    @rule(offset=st.integers(0, 60))
    def reset(self, offset: int) -> None:
        self.inflight.reset(offset)
        self.lost += len(self.pending)
        self.pending = {}
        self.floor = self.next = offset

    # Back.

    @rule(picks=PICKS, delay_us=DELAY_US, reason=REASON)
    def nack(self, picks: list[int], delay_us: int, reason: str) -> None:
        for offset in [self._offset(pick) for pick in picks]:
            message = self._living().get(offset)
            assert self.inflight.nack(offset, self.now_us + delay_us, reason) == (message is not None)
            if message is not None:
                message.fail(reason)
                message.turn_back(self.now_us + delay_us)

    @rule(member=st.integers(0, 3))
    def release(self, member: int) -> None:
        had = [message for message in self.pending.values() if message.member == member]
        assert self.inflight.release_all(member, self.now_us) == len(had)
        for message in had:
            message.turn_back(self.now_us)

    @rule(us=st.sampled_from((10, 1, 0, 50)))
    def expire(self, us: int) -> None:
        self.now_us += us
        out = [message for message in self.pending.values() if message.member is not None]
        late = [message for message in out if message.at_us <= self.now_us]
        assert self.inflight.expire(self.now_us) == len(late)
        for message in late:
            message.turn_back(self.now_us)

    # Dead.

    @rule(deliveries_max=st.sampled_from((3, 2, 4, 1)))
    def doom(self, deliveries_max: int) -> None:
        tried = {offset: message for offset, message in self._back().items() if message.attempts >= deliveries_max}
        doomed = self.inflight.kill_exhausted(deliveries_max)
        assert doomed == [(offset, tried[offset].attempts) for offset in sorted(tried)]
        for message in tried.values():
            message.dead = True

    @rule(pick=PICK, reason=REASON)
    def kill(self, pick: int, reason: str) -> None:
        offset = self._offset(pick)
        message = self._living().get(offset)
        assert self.inflight.kill(offset, reason) == (message is not None)
        if message is not None:
            message.fail(reason)
            message.member, message.dead = None, True

    @precondition(lambda self: len(self._living()) < len(self.pending))
    @rule(picks=PICKS, all_dead=st.booleans())
    def bury(self, picks: list[int], all_dead: bool) -> None:
        offsets = [self._offset(pick) for pick in picks]
        if all_dead:
            offsets += [offset for offset, _ in self.inflight.dead()]
        dead = set(offsets) & (self.pending.keys() - self._living().keys())
        assert self.inflight.finish_dead(offsets) == len(dead)
        for offset in dead:
            del self.pending[offset]
        self.buried += len(dead)

    @rule(picks=PICKS)
    def revive(self, picks: list[int]) -> None:
        offsets = [self._offset(pick) for pick in picks]
        self.inflight.requeue(offsets, self.now_us)
        revived = {offset for offset in offsets if offset < self.next and offset not in self.pending}
        self.pending |= {offset: Message(0, self.now_us) for offset in revived}
        self.taken += len(revived)
        self.floor = min([self.floor, *revived])

    # Kept.

    @rule()
    def save(self) -> None:
        changes = self.inflight.changes(self.now_us)
        if changes is None:
            self.records = [as_json(self.inflight.snapshot(self.now_us))]
        else:
            self.records.append(as_json(changes))
        self.inflight.mark()

    @rule()
    def fail_to_save(self) -> None:
        self.inflight.unmark()

    @rule(then_us=st.integers(0, 50), pending_max=st.sampled_from((30, 8)))
    def restart(self, then_us: int, pending_max: int) -> None:
        self.save()
        again = Inflight.restore(self.records, then_us, pending_max)
        check(again)
        self.inflight = Inflight.restore([as_json(self.inflight.snapshot(self.now_us))], then_us, pending_max)
        assert outline(again) == outline(self.inflight)
        assert self.inflight.pending_max == pending_max
        for message in self._living().values():
            delay_us = max(0, message.at_us - self.now_us) if message.member is None else 0
            message.turn_back(then_us + delay_us)
        self.now_us = then_us

    @invariant()
    def it_says_what_the_model_says(self) -> None:
        inflight = self.inflight
        assert inflight.next == self.next
        assert inflight.floor == min([*self.pending, self.next])
        assert len(inflight) == len(self.pending)
        for offset in range(max(0, inflight.floor - 2), self.next + 2):
            message = self.pending.get(offset)
            assert inflight.owner(offset) == (message.member if message else None)
            assert inflight.attempts(offset) == (message.attempts if message else 0)
            assert inflight.reason(offset) == (message.failed if message else None)
        for member in range(4):
            assert inflight.held(member) == sum(message.member == member for message in self.pending.values())
        dead = [(offset, message.attempts) for offset, message in self.pending.items() if message.dead]
        assert inflight.dead() == sorted(dead)
        awaited = [message.at_us for message in self._living().values() if not message.found_due]
        assert inflight.next_us() == min(awaited, default=None)
        check(inflight)

    @invariant()
    def the_floor_goes_up_only(self) -> None:
        assert self.inflight.floor >= self.floor
        self.floor = self.inflight.floor

    @invariant()
    def nothing_taken_is_unaccounted_for(self) -> None:
        assert self.taken == self.acked + self.buried + self.lost + len(self.inflight)


SETTINGS = settings(max_examples=80, stateful_step_count=50, deadline=None, print_blob=True, report_multiple_bugs=False)


@pytest.mark.timeout(600)  # where they disagree, hypothesis makes the example smaller for up to 300 s
@pytest.mark.parametrize("stale_max", [0, 64])
def test_a_position_does_what_a_dict_does(stale_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.inflight._STALE_MAX", stale_max)
    run_state_machine_as_test(InflightMachine, settings=SETTINGS)
