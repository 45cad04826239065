"""The marks of a log, without a disk: what moves `committed`, and the outcomes that wait for it."""

from __future__ import annotations

import pytest

from penstock.errors import AppendFailed, PenstockError
from penstock.log.handover import Handover
from penstock.log.marks import WHEN_COPIED, WHEN_SYNCED, WHEN_WRITTEN, CommitRule, Marks, commit_rule
from penstock.log.policy import Durability, Policy
from penstock.model.run import Run
from penstock.outcome import Outcome


def fail(fault: Exception) -> None:
    raise fault


def make_marks(rule: CommitRule = WHEN_SYNCED, **values: int) -> Marks:
    marks = Marks(rule, fail)
    for name, value in values.items():
        setattr(marks, name, value)
    return marks


def make_run(base: int, *values: bytes) -> Run:
    run = Run([b"orders"] * len(values), list(values))
    run.base_offset = base
    run.size = sum(map(len, values))
    return run


class Recorder:
    """Outcomes that note how they were settled, in order."""

    def __init__(self) -> None:
        self.settled: list[tuple[str, PenstockError | None]] = []

    def outcome(self, name: str) -> Outcome:
        return Outcome(lambda error: self.settled.append((name, error)))


@pytest.mark.parametrize(
    ("durability", "is_piped", "rule"),
    [
        (Durability.FSYNC, False, WHEN_SYNCED),
        (Durability.FSYNC, True, WHEN_SYNCED),
        (Durability.FLUSH, False, WHEN_WRITTEN),
        (Durability.FLUSH, True, WHEN_COPIED),
    ],
)
def test_the_policy_chooses_the_commit_rule(durability: Durability, is_piped: bool, rule: CommitRule) -> None:
    assert commit_rule(Policy(durability=durability), is_piped=is_piped) is rule


@pytest.mark.parametrize(
    ("rule", "reserved", "committed"),
    [
        (WHEN_SYNCED, 100, 3),
        (WHEN_WRITTEN, 100, 7),
        (WHEN_WRITTEN, 7, 7),
        (WHEN_WRITTEN, 6, 3),  # offset 6 could be given out again after a power cut
        (WHEN_COPIED, 0, 7),
    ],
)
def test_the_commit_rule_moves_committed(rule: CommitRule, reserved: int, committed: int) -> None:
    marks = make_marks(rule, end=9, written=7, durable=3, reserved=reserved)
    assert marks.advance()
    assert marks.committed == committed
    assert not marks.advance(), "it moves once"


def test_any_rule_can_move_committed() -> None:
    stored = 0
    marks = make_marks(CommitRule(lambda marks: min(stored, marks.end), reserves=False), end=10, written=10, durable=10)
    assert not marks.advance()
    stored = 4
    assert marks.advance()
    assert marks.committed == 4


def test_committed_never_goes_back() -> None:
    marks = make_marks(WHEN_WRITTEN, end=9, written=9, durable=2, reserved=9)
    marks.advance()
    marks.rule = WHEN_SYNCED
    assert not marks.advance()
    assert marks.committed == 9


def test_a_hold_stops_committed_and_not_durable() -> None:
    recorder = Recorder()
    marks = make_marks(end=5, written=5, durable=5, committed=5, held_at=5)
    marks.end = 8
    marks.when_durable(recorder.outcome("durable"))
    marks.when_committed(recorder.outcome("committed"))
    marks.written = marks.durable = 8
    assert not marks.advance()
    assert recorder.settled == [("durable", None)]
    marks.held_at = None
    assert marks.advance()
    marks.confirm(marks.committed)
    assert recorder.settled == [("durable", None), ("committed", None)]


def test_outcomes_are_settled_in_order_when_the_mark_reaches_them() -> None:
    recorder = Recorder()
    marks = make_marks()
    for end in (2, 5, 9):
        marks.end = end
        marks.when_committed(recorder.outcome(str(end)))
    marks.written = marks.durable = 5
    marks.advance()
    assert recorder.settled == [], "only `confirm` settles them"
    marks.confirm(3)
    assert recorder.settled == [("2", None)]
    marks.confirm(5)
    assert recorder.settled == [("2", None), ("5", None)]


def test_an_outcome_of_what_is_committed_is_settled_at_once() -> None:
    recorder = Recorder()
    marks = make_marks(end=4, written=4, durable=4, committed=4)
    marks.when_committed(recorder.outcome("committed"))
    marks.when_durable(recorder.outcome("durable"))
    assert recorder.settled == [("committed", None), ("durable", None)]


def test_taking_back_moves_end_and_returns_the_outcomes_in_order() -> None:
    marks = make_marks(end=2, written=2, durable=2, committed=2, held_at=6)
    outcomes = []
    for end in (4, 6, 9):
        marks.end = end
        outcomes.append(Outcome())
        marks.when_committed(outcomes[-1])
    on_disk = Outcome()
    marks.when_durable(on_disk)
    assert marks.take_back(4) == [*outcomes[1:], on_disk]
    assert (marks.end, marks.held_at, marks.committed) == (4, 4, 2)
    assert not outcomes[0].is_settled


def test_a_callback_that_raises_does_not_keep_the_others_waiting() -> None:
    faults: list[Exception] = []
    recorder = Recorder()
    marks = Marks(WHEN_SYNCED, faults.append)
    marks.end = marks.written = marks.durable = 1
    marks.when_committed(Outcome(lambda _: fail(RuntimeError("a bug"))))
    marks.when_committed(recorder.outcome("next"))
    marks.advance()
    marks.confirm(1)
    assert [str(fault) for fault in faults] == ["a bug"]
    assert recorder.settled == [("next", None)]


def test_the_start_is_the_first_segment_or_the_purge() -> None:
    marks = make_marks(first=10, end=30)
    assert marks.start == 10
    marks.purged = 20
    assert marks.start == 20
    marks.purged = 99  # a piped log lost its end, and fetches it again
    assert marks.start == 30


def test_a_handover_gives_what_is_committed_and_lets_its_server_confirm() -> None:
    recorder = Recorder()
    marks = make_marks(end=3)
    marks.when_committed(recorder.outcome("three"))
    events: list[object] = []
    handover = Handover(marks, lambda: events.append("announced"))
    handover.attach(lambda runs: events.append([run.base_offset for run in runs]), events.append)
    handover.add([make_run(0, b"a", b"b"), make_run(2, b"c")])
    marks.written = 3
    marks.durable = 2
    handover.commit()
    marks.durable = 3
    handover.commit()
    handover.commit()
    assert events == [[0], "announced", [2], "announced"]
    assert recorder.settled == []
    handover.detach()
    assert recorder.settled == [("three", None)]


def test_a_handover_without_a_server_confirms_at_once() -> None:
    recorder = Recorder()
    marks = make_marks(end=1, written=1, durable=1)
    marks.committed = 0
    marks.when_committed(recorder.outcome("one"))
    Handover(marks, lambda: None).commit()
    assert recorder.settled == [("one", None)]


def test_a_handover_drops_what_is_taken_back() -> None:
    marks = make_marks(end=3)
    events: list[object] = []
    handover = Handover(marks, lambda: None)
    handover.attach(lambda runs: events.append([run.base_offset for run in runs]), events.append)
    handover.add([make_run(0, b"a"), make_run(1, b"b", b"c")])
    for outcome in marks.take_back(1):
        marks.settle(outcome, AppendFailed("no room"))
    handover.take_back(1)
    marks.written = marks.durable = 1
    handover.commit()
    assert events == [1, [0]]
