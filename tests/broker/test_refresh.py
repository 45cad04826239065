"""Refreshes, in a broker in this process: state by state, through restarts, and with consumers that do not do well."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from typing import Final

import pytest

from penstock.broker import refresh as refreshes
from penstock.broker.broker import Settings
from penstock.broker.flow import Flow
from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.member import Member, Place, RefreshNotice
from penstock.broker.member import RefreshSignal as Signal
from penstock.broker.refresh import GroupRefresh, TopicRefresh
from penstock.broker.refresh import RefreshState as State
from penstock.broker.start import Start
from penstock.errors import AppendFailed, PenstockError, RefreshAborted, RefreshConflict, UnknownTopic
from penstock.log.policy import Policy
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import SECOND, Got, Life, Recorder, each_cut, in_loop
from tests.support.sampling import covered

WAIT: Final = 60 * SECOND
VALUES: Final = [b"0", b"1", b"2", b"3"]
STATE_LOG: Final = "topics/0/0/" + "0" * 20 + ".log"


class Consumer(Recorder):
    """A member that understands a refresh. It keeps a copy of what it got, as one does that is refreshed."""

    def __init__(self, name: str = "ann") -> None:
        super().__init__()
        self.name, self.address = name, "here"
        self.heard: list[RefreshNotice] = []
        self.copy: dict[tuple[int, int, int], bytes] = {}
        self.group: Group | None = None
        self.member = self._new()

    def _new(self) -> Member:
        member = Member(b"1", self, Flow(buffer=1000))
        member.on_refresh = self._hear
        return member

    def _hear(self, notice: RefreshNotice) -> None:
        self.heard.append(notice)
        if notice.signal is Signal.RESET:
            self.copy.clear()

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        before = len(self.got)
        super().send(member, place, run, attempts)
        self.copy |= {(*got.place, got.offset): got.value for got in self.got[before:]}

    def fail(self, member: Member, error: PenstockError) -> None:
        """As a session does it: it is no member any more."""
        super().fail(member, error)
        assert self.group is not None
        self.group.leave(member)

    @property
    def words(self) -> list[Signal]:
        return [notice.signal for notice in self.heard]

    async def join(
        self, life: Life, group: bytes = b"shop", pattern: bytes = b"prices.>", mode: Mode = Mode.SHARED
    ) -> Group:
        """On a connection of its own, each time."""
        self.member = self._new()
        joining = life.broker.groups.join(group, pattern, self.member, mode, start=Start.EARLIEST)
        self.group = await life.do(joining)
        await life.settle()
        return self.group

    async def leave(self, life: Life) -> None:
        assert self.group is not None
        life.broker.groups.leave(self.group, self.member)
        await life.settle()

    async def answer(self, life: Life) -> None:
        """The last that it was told."""
        self.heard[-1].answered()
        await life.settle()

    async def ack_all(self, life: Life) -> list[Got]:
        """What it got since the last time, acknowledged."""
        assert self.group is not None
        got = self.take()
        await life.ack(self.group, *got)
        return got


async def begin(life: Life) -> TopicRefresh:
    refresh = await life.do(life.broker.refresh_topic(b"prices"))
    await life.settle()
    return refresh


def course(life: Life, group: bytes = b"shop") -> GroupRefresh:
    refresh = life.broker.refreshes.of(life.broker.topics.named(b"prices"))
    assert refresh is not None
    return refresh.groups[group]


def state_of(refresh: TopicRefresh) -> State:
    return refresh.state


async def stocked(life: Life, *consumers: Consumer) -> None:
    """A topic with messages, that its consumers have done."""
    await life.stored(b"prices.a", *VALUES)
    for consumer in consumers:
        await consumer.join(life)
        await consumer.ack_all(life)


async def to(state: State, life: Life, ann: Consumer) -> TopicRefresh:
    """A refresh of one consumer, in a state."""
    refresh = await begin(life)
    if state is not State.WAITING_FOR_ACKS:
        await ann.answer(life)
    if state in (State.READY_SENT, State.COMPLETED):
        await ann.ack_all(life)
    if state is State.COMPLETED:
        await ann.answer(life)
    assert state_of(refresh) is state
    return refresh


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
