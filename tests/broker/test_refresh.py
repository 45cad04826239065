"""Refreshes, in a broker in this process: state by state, through restarts."""

from __future__ import annotations

import errno
import json

import pytest

from penstock.broker import refresh as refreshes
from penstock.broker.broker import Settings
from penstock.broker.group_state import Mode
from penstock.broker.member import RefreshSignal as Signal
from penstock.broker.refresh import RefreshState as State
from penstock.errors import UnknownTopic
from penstock.log.policy import Policy
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import Life, each_cut, in_loop
from tests.support.refreshes import STATE_LOG, VALUES, WAIT, Consumer, begin, course, state_of, stocked, to
from tests.support.sampling import covered


@in_loop
async def test_its_record_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refreshes, "MEMBERS_MAX", 15)
    disk = FaultyFiles()
    async with Life(disk) as life:
        consumers = [Consumer(f"{number} " + "n" * 10_000) for number in range(30)]
        await stocked(life, *consumers)
        await begin(life)
        for consumer in consumers:
            await consumer.leave(life)
        assert len(course(life).waits_for()) == 15
        await life.kill()
    async with Life(disk) as life:
        assert len(course(life).waits_for()) == 15
        await consumers[0].join(life)
        assert len(course(life).waits_for()) == 15, "it is there again, and is to answer"
        await life.advance(WAIT)
        assert course(life).state is State.ABORTED
        assert "and 5 more did not answer" in course(life).reason
        assert all(len(json.dumps(value)) < 10_000 for _, value in life.store.state.items("refresh"))


# ---- its way


@in_loop
async def test_a_consumer_is_reset_given_all_again_and_told_when_that_is_done() -> None:
    """DE-20, DE-23"""
    async with Life(FaultyFiles()) as life:
        ann = Consumer()
        await stocked(life, ann)
        assert life.broker.refreshes.of(life.broker.topics.named(b"prices")) is None

        refresh = await begin(life)
        assert (refresh.state, ann.words) == (State.WAITING_FOR_ACKS, [Signal.RESET])
        assert course(life).waits_for() == ["ann (here)"]
        await life.stored(b"prices.a", b"while it waits")
        assert ann.got == [], "nothing of the topic comes before it has answered"

        await ann.answer(life)
        assert (refresh.state, ann.values, course(life).left) == (
            State.REPLAYING,
            [*VALUES, b"while it waits"],
            5,
        )
        await life.stored(b"prices.a", b"behind it")
        assert ann.group is not None
        await life.ack(ann.group, *ann.got[:4])
        assert (refresh.state, ann.words, course(life).left) == (State.REPLAYING, [Signal.RESET], 1)
        await life.ack(ann.group, ann.got[4])
        assert (refresh.state, ann.words) == (State.READY_SENT, [Signal.RESET, Signal.READY])
        assert ann.values[5:] == [b"behind it"]

        ann.heard[0].answered()
        await life.settle()
        assert refresh.state is State.READY_SENT, "that was the answer to RESET"
        await ann.answer(life)
        assert (refresh.state, refresh.reason, course(life).waits_for()) == (State.COMPLETED, "", [])


@in_loop
async def test_all_members_of_a_group_must_answer_and_share_what_is_replayed() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        await stocked(life, ann, bob)
        refresh = await begin(life)
        await ann.answer(life)
        assert (refresh.state, course(life).waits_for()) == (State.WAITING_FOR_ACKS, ["bob (here)"])
        await bob.answer(life)
        assert state_of(refresh) is State.REPLAYING
        assert sorted(ann.values + bob.values) == VALUES
        await ann.ack_all(life)
        await bob.ack_all(life)
        await bob.answer(life)
        assert (refresh.state, course(life).waits_for()) == (State.READY_SENT, ["ann (here)"])
        await ann.answer(life)
        assert state_of(refresh) is State.COMPLETED


@in_loop
async def test_a_partitioned_group_is_refreshed_too() -> None:
    async with Life(FaultyFiles(), settings=Settings(partitions=3)) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        for consumer in (ann, bob):
            await consumer.join(life, mode=Mode.PARTITIONED)
        for number in range(12):
            await life.stored(b"prices.%d" % number, b"%d" % number)
        refresh = await begin(life)
        for consumer in (ann, bob):
            consumer.take()
            await consumer.answer(life)
        assert state_of(refresh) is State.REPLAYING
        assert len({*ann.copy.values(), *bob.copy.values()}) == 12
        group = ann.group
        assert group is not None
        for place, position in group.positions.items():
            group.commit(place, position.partition.served, group.state.generation, Outcome())
        await life.settle()
        for consumer in (ann, bob):
            await consumer.answer(life)
        assert state_of(refresh) is State.COMPLETED


@in_loop
async def test_nothing_of_another_topic_is_held_or_replayed() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Consumer()
        await life.stored(b"other", b"done before")
        await stocked(life)
        await ann.join(life, pattern=b">")
        await ann.ack_all(life)
        await begin(life)
        await life.stored(b"other", b"live")
        assert [got.value for got in await ann.ack_all(life)] == [b"live"]
        await ann.answer(life)
        assert sorted(ann.values) == VALUES


@in_loop
async def test_a_partition_that_is_added_meanwhile_is_held_as_well() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Consumer()
        await stocked(life, ann)
        await begin(life)
        await life.do(life.broker.changes.alter(b"prices", partitions=8))
        for number in range(30):
            await life.stored(b"prices.%d" % number, b"new")
        assert ann.got == []
        await ann.answer(life)
        assert len(ann.got) == 34


@in_loop
async def test_what_retention_has_dropped_is_not_waited_for() -> None:
    async with Life(FaultyFiles(), settings=Settings(policy=Policy(segment_bytes=4096, retain_bytes=1))) as life:
        ann = Consumer()
        for _ in range(20):
            await life.stored(b"prices.a", b"x" * 1000)
        await ann.join(life)
        await ann.ack_all(life)
        life.store.upkeep()
        start = life.partition(b"prices").start
        assert start > 0
        refresh = await begin(life)
        await ann.answer(life)
        assert [got.offset for got in ann.got] == list(range(start, 20))
        await ann.ack_all(life)
        await ann.answer(life)
        assert (refresh.state, ann.group and ann.group.lost) == (State.COMPLETED, 0)


@in_loop
async def test_of_an_empty_topic_there_is_nothing_to_replay() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Consumer()
        await life.do(life.broker.changes.create(b"prices"))
        await ann.join(life)
        refresh = await begin(life)
        await ann.answer(life)
        assert (refresh.state, ann.words) == (State.READY_SENT, [Signal.RESET, Signal.READY])


@in_loop
async def test_one_that_nobody_consumes_is_done_at_once() -> None:
    async with Life(FaultyFiles()) as life:
        await stocked(life)
        assert ((await begin(life)).state, (await begin(life)).groups) == (State.COMPLETED, {})
        with pytest.raises(UnknownTopic):
            await life.do(life.broker.refresh_topic(b"nothing"))


@in_loop
async def test_who_asks_while_one_is_under_way_is_given_that_and_afterwards_another() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Consumer()
        await stocked(life, ann)
        refresh = await to(State.READY_SENT, life, ann)
        assert await begin(life) is refresh
        await ann.answer(life)
        assert await begin(life) is not refresh
        assert ann.words == [Signal.RESET, Signal.READY, Signal.RESET]


@in_loop
async def test_groups_go_side_by_side_and_the_topic_is_where_the_last_one_is() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        await stocked(life, ann)
        await bob.join(life, b"depot")
        await bob.ack_all(life)
        refresh = await begin(life)
        await ann.answer(life)
        await ann.ack_all(life)
        await ann.answer(life)
        assert (course(life).state, course(life, b"depot").state) == (
            State.COMPLETED,
            State.WAITING_FOR_ACKS,
        )
        assert state_of(refresh) is State.WAITING_FOR_ACKS
        await life.advance(WAIT)
        assert (course(life).state, course(life, b"depot").state) == (State.COMPLETED, State.ABORTED)
        assert state_of(refresh) is State.ABORTED
        assert refresh.reason == "group depot: bob (here) did not answer RESET within 60 s"


# ---- restarts


@pytest.mark.parametrize("state", [State.WAITING_FOR_ACKS, State.REPLAYING, State.READY_SENT, State.COMPLETED])
@in_loop
async def test_after_a_kill_it_goes_on_in_the_state_that_it_was_in(state: State) -> None:
    disk = FaultyFiles()
    ann = Consumer()
    life = Life(disk)
    async with life:
        await stocked(life, ann)
        await to(state, life, ann)
        if state is State.REPLAYING:
            assert ann.group is not None
            await life.ack(ann.group, *ann.take()[:2])
        await life.kill()
    ann.heard.clear()
    ann.take()
    async with Life(disk) as life:
        assert course(life).state is state
        assert course(life).waits_for() == ([] if state is State.COMPLETED else ["ann (here)"])
        await ann.join(life)
        words = {State.WAITING_FOR_ACKS: [Signal.RESET], State.READY_SENT: [Signal.READY]}
        assert ann.words == words.get(state, []), "it is told again, but never RESET once it was given messages"
        if state is State.WAITING_FOR_ACKS:
            assert ann.got == []
            await ann.answer(life)
        values = {State.WAITING_FOR_ACKS: VALUES, State.REPLAYING: VALUES[2:]}
        assert ann.values == values.get(state, [])
        await ann.ack_all(life)
        if state is not State.COMPLETED:
            await ann.answer(life)
        assert course(life).state is State.COMPLETED
        assert list(ann.copy.values()) == VALUES
        await life.stored(b"prices.a", b"live")
        assert ann.values == [b"live"]


@in_loop
async def test_a_power_cut_at_any_moment_loses_nothing_of_the_copy() -> None:
    ann = Consumer()

    async def prepare(disk: FaultyFiles, clock: ManualClock) -> None:
        async with Life(disk, clock=clock) as life:
            ann.__init__()  # type: ignore[misc]
            await stocked(life, ann)

    async def refresh(life: Life) -> None:
        await ann.join(life)
        await to(State.COMPLETED, life, ann)

    met: set[State | None] = set()
    async for disk, clock, cut in each_cut(prepare, refresh):
        async with Life(disk, clock=clock) as life:
            met.add(course(life).state if life.broker.refreshes.of(life.broker.topics.named(b"prices")) else None)
            ann.heard.clear()
            ann.take()
            await ann.join(life)
            for _ in range(4):
                if ann.heard:
                    ann.heard.pop().answered()
                await life.settle()
                await ann.ack_all(life)
            assert list(ann.copy.values()) == VALUES, f"cut {cut}"
            assert (
                life.broker.refreshes.of(life.broker.topics.named(b"prices")) is None
                or course(life).state is State.COMPLETED
            ), f"cut {cut}"
    every = {
        State.RESET_SENT,
        State.WAITING_FOR_ACKS,
        State.REPLAYING,
        State.READY_SENT,
        State.COMPLETED,
    }
    assert covered(every - {State.COMPLETED} | {None} <= met)


@in_loop
async def test_after_a_restart_all_who_were_there_are_waited_for() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        await stocked(life, ann, bob)
        await begin(life)
        await ann.answer(life)
        await life.kill()
    async with Life(disk) as life:
        assert course(life).waits_for() == ["ann (here)", "bob (here)"]
        await ann.join(life)
        await ann.answer(life)
        assert (course(life).state, course(life).waits_for()) == (State.WAITING_FOR_ACKS, ["bob (here)"])
        await bob.join(life)
        await bob.answer(life)
        assert course(life).state is State.REPLAYING


@in_loop
async def test_who_is_waited_for_is_remembered_from_the_first_state_on() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann, bob = Consumer("ann"), Consumer("bob")
        await stocked(life, ann, bob)
        disk.fail("write", errno.ENOSPC, after=1, path_suffix=STATE_LOG)
        assert (await begin(life)).state is State.RESET_SENT, "the next one cannot be written"
        await life.kill()
    async with Life(disk) as life:
        assert course(life).waits_for() == ["ann (here)", "bob (here)"]


@in_loop
async def test_what_is_said_of_messages_from_before_the_reset_does_not_count_after_a_restart_either() -> None:
    disk = FaultyFiles()
    async with Life(disk, clock=ManualClock(now_us=10**15)) as life:
        ann = Consumer()
        await stocked(life, ann)
        assert ann.group is not None
        before = ann.group.state.generation
        await to(State.REPLAYING, life, ann)
        place = (life.partition(b"prices").topic_id, 0)
        assert ann.group.is_stale(place, before)
        assert not ann.group.is_stale(place, ann.group.state.generation)
        await life.kill()
    # Though the clock was set back meanwhile.
    async with Life(disk, clock=ManualClock(now_us=10**14)) as life:
        await ann.join(life)
        assert ann.group.is_stale(place, before)
        assert not ann.group.is_stale(place, ann.group.state.generation)
