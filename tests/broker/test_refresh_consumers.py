"""Refreshes whose consumers are slow, leave, or take no part."""

from __future__ import annotations

import errno

import pytest

from penstock.broker.broker import Settings
from penstock.broker.member import RefreshSignal as Signal
from penstock.broker.refresh import RefreshState as State
from penstock.errors import AppendFailed, RefreshAborted, RefreshConflict
from penstock.log.policy import Policy
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder, in_loop
from tests.support.refreshes import STATE_LOG, VALUES, WAIT, Consumer, begin, course, state_of, stocked, to

# ---- consumers that do not do well


@in_loop
async def test_one_that_never_answers_is_named_and_the_group_goes_on_from_where_it_was() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        await stocked(life, ann, bob)
        await life.stored(b"prices.a", b"not acknowledged")
        refresh = await begin(life)
        await ann.answer(life)
        await life.advance(WAIT - 1)
        assert state_of(refresh) is State.WAITING_FOR_ACKS
        await life.advance(1)
        assert (refresh.state, refresh.reason) == (
            State.ABORTED,
            "group shop: bob (here) did not answer RESET within 60 s",
        )
        for consumer in (ann, bob):
            [error] = consumer.errors
            assert isinstance(error, RefreshAborted), "who may have forgotten all is told that it does not come"
            consumer.take()
        carl = Consumer("carl")
        await carl.join(life)
        await life.stored(b"prices.a", b"live")
        assert (carl.values, carl.words) == ([b"not acknowledged", b"live"], [])
        bob.heard[0].answered()
        await life.settle()
        assert state_of(refresh) is State.ABORTED, "too late"


@in_loop
async def test_what_is_held_does_not_come_to_its_deadline_meanwhile() -> None:
    async with Life(FaultyFiles(), settings=Settings(policy=Policy(deliveries_max=1))) as life:
        ann = Consumer()
        await ann.join(life)
        await life.stored(b"prices.a", *VALUES)
        await begin(life)
        await life.advance(WAIT // 2)
        await ann.ack_all(life)
        await ann.answer(life)
        await ann.ack_all(life)
        await ann.answer(life)
        assert (course(life).state, list(ann.copy.values())) == (State.COMPLETED, VALUES)
        assert ann.group is not None
        assert ann.group.state.dead_lettered == 0


@in_loop
async def test_how_long_is_waited_is_a_policy_of_the_topic() -> None:
    async with Life(FaultyFiles(), settings=Settings(policy=Policy(refresh_wait_ms=200))) as life:
        ann = Consumer()
        await stocked(life, ann)
        refresh = await begin(life)
        await life.advance(200_000)
        assert state_of(refresh) is State.ABORTED


@in_loop
async def test_one_that_disappears_is_named_and_told_again_when_it_is_back() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        await stocked(life, ann, bob)
        refresh = await begin(life)
        await ann.answer(life)
        await bob.leave(life)
        await life.advance(WAIT // 2)
        assert (refresh.state, course(life).waits_for()) == (State.WAITING_FOR_ACKS, ["bob (here)"])
        carl = Consumer("carl")
        await carl.join(life)
        await carl.answer(life)
        assert course(life).waits_for() == ["bob (here)"], "another one is not it"
        await bob.join(life)
        assert bob.words == [Signal.RESET, Signal.RESET]
        await bob.answer(life)
        assert state_of(refresh) is State.REPLAYING


@in_loop
async def test_one_that_disappears_during_the_replay_is_told_ready_when_it_is_back() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        await stocked(life, ann, bob)
        refresh = await begin(life)
        await ann.answer(life)
        await bob.answer(life)
        await bob.leave(life)
        assert course(life).waits_for() == ["bob (here)"]
        await ann.ack_all(life)
        await ann.answer(life)
        assert (refresh.state, course(life).waits_for()) == (State.READY_SENT, ["bob (here)"])
        await bob.join(life)
        assert bob.words == [Signal.RESET, Signal.READY]
        await bob.answer(life)
        assert state_of(refresh) is State.COMPLETED


@in_loop
async def test_a_replay_that_nobody_takes_is_given_up_and_goes_on_with_who_comes_back() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Consumer()
        await stocked(life, ann)
        refresh = await to(State.REPLAYING, life, ann)
        assert ann.group is not None
        await life.ack(ann.group, *ann.take()[:1])
        await ann.leave(life)
        await life.advance(WAIT)
        assert (refresh.state, refresh.reason) == (State.ABORTED, "group shop: no member was connected for 60 s")
        await life.kill()
    async with Life(disk) as life:
        assert course(life).state is State.ABORTED
        await ann.join(life)
        assert (course(life).state, ann.words, ann.values) == (
            State.REPLAYING,
            [Signal.RESET],
            VALUES[1:],
        )
        await ann.ack_all(life)
        await ann.answer(life)
        assert (course(life).state, course(life).reason) == (State.COMPLETED, "")


@in_loop
async def test_one_that_never_answers_ready_is_named_and_keeps_its_messages_coming() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Consumer()
        await stocked(life, ann)
        refresh = await to(State.READY_SENT, life, ann)
        await life.advance(WAIT)
        assert refresh.reason == "group shop: ann (here) did not answer READY within 60 s"
        assert (refresh.state, ann.errors) == (State.ABORTED, [])
        await life.stored(b"prices.a", b"live")
        assert ann.values == [b"live"]
        assert await begin(life) is not refresh, "another one can begin"


@in_loop
async def test_a_group_that_nobody_is_in_is_waited_for_if_its_members_understood() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Consumer()
        await stocked(life, ann)
        await life.do(life.broker.groups.create(b"never joined", b">"))
        await life.stop()
    async with Life(disk) as life:
        refresh = await begin(life)
        assert list(refresh.groups) == [b"shop"]
        assert course(life).waits_for() == ["any member of the group"]
        await ann.join(life)
        await ann.answer(life)
        assert state_of(refresh) is State.REPLAYING
        await ann.leave(life)
        await life.advance(WAIT)
        assert state_of(refresh) is State.ABORTED


# ---- members that do not take part


@in_loop
async def test_a_group_in_which_some_do_not_understand_is_refused_with_their_names() -> None:
    async with Life(FaultyFiles()) as life:
        ann, plain = Consumer(), Recorder()
        plain.name, plain.address = "old", "there"
        await stocked(life, ann)
        await life.join(b"shop", b"prices.>", plain)
        with pytest.raises(RefreshConflict, match=r"these do not: old \(there\); let"):
            await begin(life)
        assert (life.broker.refreshes.of(life.broker.topics.named(b"prices")), ann.words, plain.got) == (None, [], [])


@in_loop
async def test_a_group_in_which_nobody_understands_is_left_alone() -> None:
    async with Life(FaultyFiles()) as life:
        ann, plain = Consumer(), Recorder()
        await life.join(b"workers", b"prices.>", plain)
        await stocked(life, ann)
        plain.take()
        refresh = await to(State.COMPLETED, life, ann)
        assert (list(refresh.groups), plain.got) == ([b"shop"], [])


@in_loop
async def test_who_would_not_understand_cannot_join_meanwhile() -> None:
    async with Life(FaultyFiles()) as life:
        ann, plain = Consumer(), Recorder()
        await stocked(life, ann)
        await to(State.READY_SENT, life, ann)
        with pytest.raises(RefreshConflict, match="is being refreshed"):
            await life.join(b"shop", b"prices.>", plain)
        await ann.answer(life)
        await life.join(b"shop", b"prices.>", plain)


# ---- what else may happen


@in_loop
async def test_it_ends_with_its_topic() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Consumer()
        await stocked(life, ann)
        await begin(life)
        await life.do(life.broker.changes.delete(b"prices"))
        await life.stored(b"prices.a", b"of another topic")
        assert life.broker.refreshes.of(life.broker.topics.named(b"prices")) is None
        assert ann.values == [b"of another topic"]
        assert life.store.state.items("refresh") == []


@in_loop
async def test_it_goes_on_without_a_group_that_is_deleted() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        await stocked(life, ann)
        await bob.join(life, b"depot")
        refresh = await begin(life)
        await ann.answer(life)
        await life.do(life.broker.groups.delete(b"depot"))
        await life.settle()
        assert (refresh.state, list(refresh.groups)) == (State.REPLAYING, [b"shop"])
        assert [key.partition("/")[2] for key, _ in life.store.state.items("refresh")] == ["", "shop"]


@in_loop
async def test_one_that_cannot_be_written_has_not_begun() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Consumer()
        await stocked(life, ann)
        disk.fail("write", errno.ENOSPC, path_suffix=STATE_LOG)
        with pytest.raises(AppendFailed):
            await begin(life)
        assert (life.broker.refreshes.of(life.broker.topics.named(b"prices")), ann.words) == (None, [])
        await begin(life)
        assert ann.words == [Signal.RESET]


@pytest.mark.parametrize("state", [State.WAITING_FOR_ACKS, State.REPLAYING])
@in_loop
async def test_a_state_that_cannot_be_written_is_not_acted_upon_before_it_is(state: State) -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Consumer()
        await stocked(life, ann)
        await to(state, life, ann)
        got = ann.take()
        disk.fail("write", errno.ENOSPC, path_suffix=STATE_LOG)
        if state is State.WAITING_FOR_ACKS:
            await ann.answer(life)
        else:
            assert ann.group is not None
            ann.group.ack_many(got[0].place, [each.offset for each in got], Outcome())
            await life.settle()
        assert (course(life).state, ann.words, ann.got) == (state, [Signal.RESET], [])
        for _ in range(3):
            await life.advance(SECOND)
        await ann.ack_all(life)
        await ann.answer(life)
        assert (course(life).state, list(ann.copy.values())) == (State.COMPLETED, VALUES)
