"""Which messages a group delivers next, to which member, and when again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker import delivery
from penstock.broker.delivery import Dispatch, Save
from penstock.broker.flow import Flow, Overflow
from penstock.broker.group_state import Mode
from penstock.broker.member import Member
from penstock.broker.position_budget import PENDING_FEW, PositionBudget
from penstock.errors import LogDamaged
from penstock.model.run import Run
from tests.support.group_states import DEADLINE, KEY, SECOND, Connection, Given, outline, run_of

# What is delivered.


def test_a_member_gets_no_more_than_its_buffer_holds() -> None:
    given = Given(buffer=3)
    assert outline(given.deliver()) == [(1, [0, 1, 2], None)]
    given.members[0].out = 3
    assert given.deliver() == Dispatch()
    given.state.ack(given.position, [1])
    assert outline(given.deliver()) == [(1, [3], None)]


def test_messages_of_other_subjects_are_passed_over_and_that_is_written_later() -> None:
    given = Given()
    dispatch = delivery.deliver(given.state, given.position, 0, (Run([], []), 7, run_of(2)), 0)
    assert dispatch == Dispatch(is_more=True, save=Save.LATER, expired=1)
    assert (given.position.inflight.next, given.position.inflight.floor, given.position.expired) == (7, 7, 1)


def test_what_all_members_have_published_themselves_is_done() -> None:
    given = Given(members=0)
    given.state.join(Member(b"x", Connection(echo=False), Flow()), 0)
    dispatch = given.deliver()
    assert (outline(dispatch), dispatch.is_more) == ([], True)
    assert given.position.inflight.floor == 10


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        (lambda given: given.reset(5), Dispatch(is_more=True)),
        (lambda given: given.state.held.add(1), Dispatch()),
        (lambda given: setattr(given.position.inflight, "pending_max", 0), Dispatch()),
        (lambda given: setattr(given.members[0].sink, "is_open", False), Dispatch()),
    ],
)
def test_what_was_read_is_not_delivered_if_things_have_changed(
    meanwhile: Callable[[Given], None], expected: Dispatch
) -> None:
    given = Given()
    found = given.read(0)
    meanwhile(given)
    assert delivery.deliver(given.state, given.position, 0, found, 0) == expected
    assert len(given.position.inflight) == 0


def test_while_room_is_short_few_messages_are_pending() -> None:
    budget = PositionBudget(200)
    given = Given(budget=budget)
    given.log.served = 100
    given.deliver(until=PENDING_FEW + 1)
    assert given.deliver() == Dispatch()
    given.state.ack(given.position, [0, 1])
    assert outline(given.deliver(until=PENDING_FEW + 3)) == [(1, [PENDING_FEW + 1], None)]
    given.state.detach(KEY)
    assert budget.usage.used == 0
    assert not given.position.is_attached


@pytest.mark.parametrize(
    ("overflow", "dropped", "then"),
    [(Overflow.BLOCK, [0], range(10)), (Overflow.SHED, [6], range(6, 10)), (Overflow.DROP, [0, 6], range(4))],
)
def test_what_a_member_that_does_not_wait_is_spared(overflow: Overflow, dropped: list[int], then: range) -> None:
    given = Given(buffer=4, overflow=overflow)
    given.members[0].out = None
    counts = []
    got: list[int] = []
    for _ in dropped:
        counts.append(delivery.drop_overflow(given.state, given.position))
        for _, run, _ in given.deliver().deliveries:
            got += run.all_offsets()
    assert (counts, got) == (dropped, list(then))
    assert given.members[0].dropped == sum(dropped)


# What is delivered again.


def test_a_message_is_redelivered_when_its_deadline_is_over() -> None:
    given = Given()
    given.deliver(until=2, at_us=10)
    assert delivery.next_us(given.state, 10) == 10 + DEADLINE
    assert given.redeliver(at_us=9 + DEADLINE) == Dispatch()
    dispatch = given.redeliver(at_us=10 + DEADLINE)
    assert outline(dispatch) == [(1, [0, 1], [2, 2])]
    assert dispatch.save is Save.NOW
    assert (given.position.failed, given.position.retried, given.state.redelivered) == (2, 2, 2)
    assert delivery.next_us(given.state, 0) == 10 + 2 * DEADLINE


def test_a_message_that_was_refused_is_redelivered_after_its_delay() -> None:
    given = Given()
    given.deliver(until=2)
    given.state.fail(KEY, 1, None, "", 3 * SECOND)
    assert delivery.next_us(given.state, 0) == 3 * SECOND
    assert given.redeliver(at_us=3 * SECOND - 1) == Dispatch()
    assert outline(given.redeliver(at_us=3 * SECOND)) == [(1, [1], [2])]


def test_a_released_delivery_does_not_count() -> None:
    given = Given()
    given.deliver(until=1)
    given.state.release(KEY, 0, given.members[0], 0)
    assert outline(given.redeliver()) == [(1, [0], [1])]


def test_in_a_partitioned_group_there_are_no_deadlines() -> None:
    given = Given(mode=Mode.PARTITIONED)
    given.deliver()
    assert delivery.next_us(given.state, 0) is None


def test_a_topic_that_is_held_is_not_delivered_and_needs_no_timer() -> None:
    given = Given()
    given.deliver(until=2)
    given.state.held.add(1)
    assert delivery.next_us(given.state, 0) is None
    assert (given.redeliver(at_us=DEADLINE), given.deliver()) == (Dispatch(), Dispatch())
    given.state.held.clear()
    assert outline(given.redeliver(at_us=DEADLINE)) == [(1, [0, 1], [2, 2])]


def test_messages_that_are_gone_are_not_redelivered() -> None:
    given = Given()
    given.deliver(until=4)
    given.state.leave(given.members[0], 0)
    given.state.join(given.members[0], 0)
    assert given.redeliver(missing=(0, 2)) == Dispatch(is_more=True, save=Save.NOW)
    assert outline(given.redeliver(missing=(0, 2))) == [(2, [1, 3], [2, 2])]
    assert given.position.inflight.floor == 1


def test_messages_that_were_acknowledged_while_they_were_read_are_not_redelivered() -> None:
    given = Given()
    given.deliver(until=3)
    delivery.review(given.state, given.position, DEADLINE, dead_letters=True)
    first = delivery.next_redelivery(given.state, given.position, DEADLINE)
    assert first == 0
    given.state.ack(given.position, [0, 2])
    dispatch = delivery.redeliver(given.state, given.position, first, given.read(0), DEADLINE)
    assert outline(dispatch) == [(1, [1], [2])]
    given.state.ack(given.position, [1])
    assert delivery.redeliver(given.state, given.position, 0, given.read(0), DEADLINE) == Dispatch()


def test_a_message_that_a_piped_log_does_not_have_yet_is_waited_for() -> None:
    given = Given()
    given.deliver(until=2)
    given.log.served = 0
    assert given.redeliver(at_us=DEADLINE) == Dispatch()
    assert len(given.position.inflight) == 2


def test_nothing_is_delivered_from_where_the_log_is_damaged() -> None:
    given = Given()
    given.deliver(until=2)
    given.position.damage = LogDamaged(Path("x.log"), 0, 1, 4, "checksum")
    assert given.deliver() == Dispatch()
    assert given.position.stopped is not None
    assert given.redeliver(at_us=DEADLINE).deliveries, "0 is readable"
