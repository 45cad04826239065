"""The position of a shared group in a partition: nothing delivered is forgotten before it is done."""

from __future__ import annotations

import pytest

from penstock.broker.inflight import Inflight
from tests.support.inflights import ANN, BOB, LONG, check, took


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
    assert (inflight.floor, inflight.next, inflight.held()) == (0, 9, {ANN: 2, BOB: 3})
    assert inflight.release_all(BOB, 5) == 3
    assert inflight.held() == {ANN: 2}
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
