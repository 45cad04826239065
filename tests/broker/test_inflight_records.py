"""The position of a shared group as it is stored and read again, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.broker.inflight import Inflight
from tests.support.inflights import ANN, BOB, LONG, as_json, check, outline, took


def restarted(inflight: Inflight, now_us: int = 0, then_us: int = 0) -> Inflight:
    return Inflight.restore([as_json(inflight.snapshot(now_us))], then_us)


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
