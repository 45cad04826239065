"""A group without I/O: what members say, and what is kept. No loop, no clock."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock.broker import delivery
from penstock.broker.delivery import Dispatch, Save
from penstock.broker.flow import Flow
from penstock.broker.group_state import GroupState, Mode
from penstock.broker.inflight import PositionRecord
from penstock.broker.member import Deliveries, Member
from penstock.broker.position import DeadMessage, Position
from penstock.broker.position_budget import PositionBudget
from penstock.errors import OffsetOutOfRange, StaleCommit
from penstock.log.policy import Policy
from penstock.model.run import Run
from tests.support.group_states import DEADLINE, KEY, Connection, Given, Log, outline, run_of

# Members.


@pytest.mark.parametrize(
    ("mode", "members", "owners"),
    [
        (Mode.SHARED, 0, [[], [], []]),
        (Mode.SHARED, 2, [[1, 2], [1, 2], [1, 2]]),
        (Mode.PARTITIONED, 0, [[], [], []]),
        (Mode.PARTITIONED, 1, [[1], [1], [1]]),
        (Mode.PARTITIONED, 2, [[1], [2], [1]]),
        (Mode.PARTITIONED, 4, [[1], [2], [3]]),
    ],
)
def test_partitions_are_assigned_to_members(mode: Mode, members: int, owners: list[list[int]]) -> None:
    given = Given(mode=mode, members=members, logs=3)
    assert [[member.number for member in given.state.owners(each)] for each in given.positions] == owners


def test_the_generation_changes_with_the_members_and_with_a_reset() -> None:
    given = Given(members=2)
    assert given.state.generation == 2
    given.state.leave(given.members[0], 0)
    assert given.state.generation == 3
    given.state.leave(given.members[0], 0)
    assert given.state.generation == 3, "it had left"
    given.reset(0)
    assert (given.state.generation, given.position.since) == (4, 4)


def test_a_restored_position_raises_the_generation() -> None:
    given = Given(members=0)
    given.state.reset({given.position: 0})
    stored = given.position.to_json(0)
    other = GroupState[Log](Mode.SHARED, 0, PositionBudget(1000), 100)
    other.attach(Log(), 5, [stored | {"since": 77}], 0)
    assert other.generation == 77


def test_what_a_member_of_a_shared_group_had_is_redelivered_when_it_leaves() -> None:
    given = Given(members=2)
    assert outline(given.deliver(until=4)) == [(1, [0, 2], None), (2, [1, 3], None)]
    given.state.leave(given.members[0], 0)
    assert outline(given.redeliver()) == [(2, [0, 2], [2, 2])]


def test_the_next_owner_of_a_partition_begins_at_what_was_committed() -> None:
    given = Given(mode=Mode.PARTITIONED)
    given.deliver(until=6)
    given.state.commit(KEY, 2, given.state.generation)
    given.state.join(Member(b"x", Connection(), Flow()), 0)
    assert outline(given.deliver(until=4)) == [(1, [2, 3], None)]


@pytest.mark.parametrize(
    ("limits", "has_left", "expected"),
    [
        ([None], False, 4),
        ([2, 7], False, 7),
        ([2, 0], False, 0),
        ([7], True, 7),
    ],
)
def test_the_most_patient_member_decides_how_often_a_message_is_delivered(
    limits: list[int | None], has_left: bool, expected: int
) -> None:
    given = Given(members=len(limits))
    for member, limit in zip(given.members, limits, strict=True):
        member.deliveries = Deliveries(limit)
    if has_left:
        given.state.leave(given.members[0], 0)
    assert given.state.deliveries_max(given.log.policy) == expected


# What members say. Each verb for a message in each state: whether it is accepted.


def _new(_given: Given) -> None: ...


def _out(given: Given) -> None:
    given.deliver(until=1)


def _back(given: Given) -> None:
    _out(given)
    given.state.fail(KEY, 0, None, "", 0)


def _dead(given: Given) -> None:
    _out(given)
    given.state.fail(KEY, 0, None, "", None)


def _done(given: Given) -> None:
    _out(given)
    given.state.ack(given.position, [0])


def _dead_lettered(given: Given) -> None:
    _dead(given)
    given.position.decision = [DeadMessage(0, 1)]
    given.position.finish_decision()


VERBS: dict[str, Callable[[Given, Member], bool]] = {
    "ack": lambda given, _: not given.state.ack(given.position, [0]).refused,
    "nack": lambda given, member: given.state.fail(KEY, 0, member, "", 0) is not None,
    "reject": lambda given, member: given.state.fail(KEY, 0, member, "", None) is not None,
    "release": lambda given, member: given.state.release(KEY, 0, member, 0) is not None,
    "extend": lambda given, member: given.state.extend(KEY, 0, member, 0),
}


@pytest.mark.parametrize(
    ("prepare", "by_its_member", "by_another"),
    [
        (_new, set(), set()),
        (_out, {"ack", "nack", "reject", "release", "extend"}, {"ack"}),
        (_back, {"ack", "nack", "reject"}, {"ack", "nack", "reject"}),
        (_dead, set(), set()),
        (_done, {"ack"}, {"ack"}),
        (_dead_lettered, set(), set()),
    ],
)
def test_what_may_be_said_of_a_message(
    prepare: Callable[[Given], None], by_its_member: set[str], by_another: set[str]
) -> None:
    for member, expected in ((0, by_its_member), (1, by_another)):
        accepted = set()
        for name, verb in VERBS.items():
            given = Given(members=2)
            prepare(given)
            if verb(given, given.members[member]):
                accepted.add(name)
        assert accepted == expected


def test_of_several_messages_only_those_that_cannot_be_acknowledged_are_refused() -> None:
    given = Given()
    given.deliver(until=4)
    given.state.ack(given.position, [1])
    given.state.fail(KEY, 2, None, "", None)
    assert given.state.ack(given.position, [0, 1, 2, 9]) == (1, [2, 9])
    assert (given.position.acked, given.position.failed) == (2, 1)


@pytest.mark.parametrize("verb", list(VERBS))
def test_a_member_has_one_message_less_once_it_has_spoken(verb: str) -> None:
    given = Given()
    given.deliver(until=3)
    given.state.recount()
    assert given.members[0].out == 3
    VERBS[verb](given, given.members[0])
    assert given.members[0].out == (3 if verb == "extend" else 2)


def test_a_deadline_in_one_partition_is_counted_without_a_look_at_the_others() -> None:
    given = Given(logs=2)
    given.deliver(until=3)
    given.positions[1].inflight.take([0, 1], 2, given.members[0].number, 2 * DEADLINE)
    given.state.recount()
    assert given.members[0].out == 5

    del given.positions[1].inflight
    delivery.review(given.state, given.position, DEADLINE, dead_letters=True)
    assert given.members[0].out == 2


def test_a_commit_needs_the_current_generation_an_offset_that_exists_and_a_partition_that_is_read() -> None:
    given = Given(mode=Mode.PARTITIONED)
    for key, offset, generation, error in (
        (KEY, 1, 0, StaleCommit),
        (KEY, 11, 1, OffsetOutOfRange),
        ((9, 0), 1, 1, StaleCommit),
    ):
        with pytest.raises(error):
            given.state.commit(key, offset, generation)
    assert given.state.commit(KEY, 10, 1).inflight.floor == 10, "though nothing was delivered"


# What is dead.


def test_after_the_last_attempt_a_message_is_dead() -> None:
    given = Given(policy=Policy(deliveries_max=2))
    given.deliver(until=2)
    assert not given.position.has_dead()
    given.redeliver(at_us=DEADLINE)
    given.state.ack(given.position, [0])
    assert given.redeliver(at_us=2 * DEADLINE) == Dispatch()
    assert given.position.inflight.dead() == [(1, 2)]
    assert given.position.has_dead()


@pytest.mark.parametrize(
    ("policy", "dead_letters", "mode"),
    [
        (Policy(deliveries_max=1, dead_letters=False), True, Mode.SHARED),
        (Policy(deliveries_max=1), False, Mode.SHARED),
        (Policy(deliveries_max=1), True, Mode.PARTITIONED),
    ],
)
def test_where_there_are_no_dead_letters_no_message_dies(policy: Policy, dead_letters: bool, mode: Mode) -> None:
    given = Given(policy=policy, mode=mode)
    given.deliver(until=2)
    delivery.review(given.state, given.position, 2 * DEADLINE, dead_letters=dead_letters)
    assert not given.position.has_dead()


def test_before_a_member_has_joined_no_message_dies() -> None:
    given = Given(members=0, policy=Policy(deliveries_max=1))
    given.position.inflight.take([0], 1, 7, 0)
    delivery.review(given.state, given.position, DEADLINE, dead_letters=True)
    assert not given.position.has_dead()


def test_messages_of_a_decision_are_done_when_their_letters_are_stored() -> None:
    given = Given()
    given.deliver(until=2)
    given.state.fail(KEY, 1, None, "bad", None)
    position = given.position
    position.decision = [DeadMessage(1, 1)]
    assert position.finish_decision() == 1
    assert position.decision_number == 1
    assert not position.has_dead()
    assert given.state.ack(position, [1]).refused == [1]
    position.requeue([1], 0)
    assert outline(given.redeliver()) == [(1, [1], [1])]


# What is lost, and what expires.


def test_what_retention_drops_is_lost_unless_it_was_done() -> None:
    given = Given()
    given.deliver(until=3)
    given.state.ack(given.position, [1])
    given.log.start = 5
    assert delivery.review(given.state, given.position, 0, dead_letters=True) == (4, True)
    assert (given.position.lost, given.position.inflight.floor) == (4, 5)
    assert delivery.review(given.state, given.position, 0, dead_letters=True) == (0, False)


def test_expired_messages_are_passed_over_up_to_the_first_that_is_not() -> None:
    given = Given()
    given.deliver(until=2)
    position = given.position
    delivery.review(given.state, position, DEADLINE, dead_letters=True)
    dispatches = []
    while (offset := delivery.next_check(position, DEADLINE, 100)) is not None:
        run = run_of(*(each for each in (1, 4) if each >= offset))
        run.ttls, run.append_time = {0: 50}, 90
        dispatches.append((offset, delivery.skip_expired(given.state, position, offset, (run, 10, run_of(0, 2, 3)))))
    assert dispatches == [
        (0, Dispatch(is_more=True, save=Save.NOW, expired=1)),
        (1, Dispatch(is_more=True)),
        (2, Dispatch(is_more=True, save=Save.LATER, expired=3)),
    ]
    assert (position.inflight.floor, position.inflight.next) == (1, 4)
    assert delivery.next_check(position, DEADLINE, 139) is None, "both are known to be there until 140"
    assert delivery.next_check(position, DEADLINE, 140) == 1


def test_a_check_changes_nothing_if_the_message_was_acknowledged_meanwhile() -> None:
    given = Given()
    given.deliver(until=2)
    delivery.review(given.state, given.position, DEADLINE, dead_letters=True)
    assert delivery.next_check(given.position, DEADLINE, 0) == 0
    given.state.ack(given.position, [0])
    assert delivery.skip_expired(given.state, given.position, 0, (Run([], []), 10, run_of(0))) == Dispatch(is_more=True)
    assert given.position.expired == 0


# What is written.


def as_json(record: PositionRecord) -> PositionRecord:
    found: PositionRecord = json.loads(json.dumps(record))
    return found


def test_first_the_whole_position_is_written_then_changes_until_they_outweigh_it() -> None:
    given = Given(buffer=1000)
    given.log.served = 1000
    given.deliver(until=1000)
    for offset in range(0, 1000, 2):
        given.state.ack(given.position, [offset])
    records: list[PositionRecord] = []
    wholes = []
    for offset in range(1, 101, 2):
        record, is_whole = given.position.save(0)
        wholes.append(is_whole)
        records = [as_json(record)] if is_whole else [*records, as_json(record)]
        restored = Position.from_json(given.log, records, 0)
        assert restored.to_json(0) == given.position.to_json(0)
        given.state.ack(given.position, [offset])
    assert wholes[0]
    assert 1 < sum(wholes) < len(wholes) / 5
    given.position.unsave()
    assert given.position.save(0)[1], "a write failed: what is stored is unknown"


def test_a_decision_and_what_it_rests_upon_survive_a_restart() -> None:
    given = Given()
    given.deliver(until=3)
    given.state.fail(KEY, 1, None, "bad", None)
    given.position.decision = [DeadMessage(1, 1)]
    restored = Position.from_json(given.log, [as_json(given.position.to_json(0))], 0)
    assert restored.decision == [DeadMessage(1, 1)]
    assert restored.inflight.reason(1) == (1, "bad")
    restored.finish_decision()
    again = Position.from_json(given.log, [as_json(restored.to_json(0))], 0)
    assert (again.decision, again.decision_number, list(again.dead_lettered)) == (None, 1, [1])
    assert not again.is_done(1)
