"""Delivery is limited in what it does at once, and in what one reader can do to the others."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping

import pytest

from penstock.broker import cursor, opened
from penstock.broker import member as members
from penstock.broker.broker import Broker
from penstock.broker.member import Member, Place
from penstock.errors import PenstockError
from penstock.model.batch import encode
from penstock.model.run import Run, batch_bytes
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import Life, Recorder, in_loop, run_of


class Broken(Recorder):
    """Raises what nobody expects when it is given something."""

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        raise RuntimeError("a bug")


@in_loop
async def test_a_reader_that_raises_is_ended_and_the_others_get_everything() -> None:
    async with Life(FaultyFiles()) as life:
        broken, sound, late = Broken(), Recorder(), Recorder()
        life.subscribe(b"orders", broken)
        life.subscribe(b"orders", sound)
        receipt = await life.stored(b"orders", b"a")
        assert not receipt.failed
        life.subscribe(b"orders", late)
        await life.stored(b"orders", b"b")
        await life.settle()
        assert sound.values == [b"a", b"b"]
        assert late.values == [b"b"]
        assert [str(error) for error in broken.errors[:1]] == ["internal error"]
        assert life.broker.health.faults["deliver"] >= 1


@in_loop
async def test_a_group_member_that_raises_is_told_and_other_groups_go_on() -> None:
    async with Life(FaultyFiles()) as life:
        broken, sound = Broken(), Recorder()
        await life.join(b"broken", b"orders", broken)
        await life.join(b"sound", b"orders", sound)
        await life.stored(b"orders", b"a")
        await life.settle()
        assert sound.values == [b"a"]
        assert broken.errors
        assert life.broker.health.faults["deliver"] == 1


@in_loop
async def test_a_timer_and_a_task_that_raise_end_alone() -> None:
    async with Life(FaultyFiles()) as life:

        def callback() -> None:
            raise RuntimeError("a bug")

        async def task() -> None:
            raise RuntimeError("a bug")

        Broker.call_at(life.broker, 0, callback)
        life.broker.spawn(task())
        while not life.broker.health.faults["timer"]:
            await asyncio.sleep(0.001)
        assert life.broker.health.faults == {"timer": 1, "task": 1}
        await life.stored(b"orders", b"a")


@in_loop
async def test_a_large_batch_is_delivered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "LARGE_MESSAGES", 100)
    monkeypatch.setattr(cursor, "_PART_MESSAGES", 64)
    parts: list[int] = []

    class Counting(Recorder):
        def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
            parts.append(len(run))
            super().send(member, place, run, attempts)

    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"first")
        everything, some = Counting(), Recorder()
        life.subscribe(b"orders.>", everything)
        life.subscribe(b"orders.even", some)
        values = [b"%d" % number for number in range(1000)]
        subjects = [b"orders.odd" if number % 2 else b"orders.even" for number in range(1000)]
        settled: list[PenstockError | None] = []
        batch = encode(values, timestamp=1, subjects=subjects)
        life.partition(b"orders").append_batch(batch, 0, 0, Outcome(settled.append))
        await life.settle()
        await life.publish_run(Run(list(subjects), list(values)))
        await life.settle()
        await life.stored(b"orders.even", b"last")
        await life.settle()
        assert settled == [None]
        assert everything.values == [*values, *values, b"last"]
        assert some.values == [*values[::2], *values[::2], b"last"]
        assert max(parts) <= 64


@in_loop
async def test_a_run_that_is_larger_than_a_delivery_arrives_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers stay open, so nobody but they themselves wakes them."""
    monkeypatch.setattr(members, "DELIVERY_BYTES_MAX", 2000)
    parts: list[int] = []

    class Counting(Recorder):
        def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
            parts.append(batch_bytes(run))
            super().send(member, place, run, attempts)

    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"first")
        plain, grouped = Counting(), Counting()
        life.subscribe(b"orders", plain)
        await life.join(b"audit", b"orders", grouped)
        values = [b"%d" % number + bytes(300) for number in range(50)]
        await life.publish_run(Run([b"orders"] * len(values), list(values)))
        await life.settle()
        await life.stored(b"orders", b"last")
        await life.settle()
        assert plain.values == [*values, b"last"]
        assert grouped.values == [*values, b"last"]
        assert max(parts) <= 2000


# ---- the end of a subscription


@in_loop
async def test_a_subscription_that_ends_gets_what_is_on_its_way_and_nothing_behind_it() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"before")
        sink, done = Recorder(), asyncio.Event()
        subscription, member = life.subscribe(b"orders", sink)
        first = life.offer(run_of(b"orders", b"a", b"b"))
        life.broker.subscriptions.finish(subscription, member, done.set)
        second = life.offer(run_of(b"orders", b"c"))
        assert not done.is_set()
        assert not life.broker.is_served(b"orders")
        await first
        await second
        await life.settle()
        assert done.is_set()
        assert sink.values == [b"a", b"b"]
        assert not subscription.members
        assert not life.partition(b"orders").groups


@in_loop
async def test_a_subscription_that_ends_does_not_wait_for_what_is_taken_back() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"before")
        sink, done = Recorder(), asyncio.Event()
        subscription, member = life.subscribe(b"orders", sink)
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
        refused = life.offer(run_of(b"orders", b"a"))
        life.broker.subscriptions.finish(subscription, member, done.set)
        assert (await refused).failed
        await life.stored(b"orders", b"b")  # at the offset that was a's
        assert done.is_set()
        assert sink.values == []


@in_loop
async def test_a_subscription_that_ends_does_not_wait_for_a_topic_that_is_deleted() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"before")
        sink, done = Recorder(), asyncio.Event()
        subscription, member = life.subscribe(b"orders", sink)
        sink.is_open = False
        await life.stored(b"orders", b"a")
        life.broker.subscriptions.finish(subscription, member, done.set)
        await life.settle()
        assert not done.is_set()
        await life.do(life.broker.changes.delete(b"orders"))
        sink.is_open = True
        subscription.wake()
        await life.settle()
        assert done.is_set()
        assert sink.values == []


@in_loop
async def test_a_connection_that_is_lost_ends_its_subscriptions_at_once() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"before")
        sink, done = Recorder(), asyncio.Event()
        subscription, member = life.subscribe(b"orders", sink)
        sink.is_open = False
        await life.stored(b"orders", b"a")
        life.broker.subscriptions.finish(subscription, member, done.set)
        life.broker.subscriptions.unsubscribe(subscription, member)
        assert done.is_set()
        assert not life.broker.usage()["subscriptions"].used


@in_loop
async def test_a_member_that_wants_so_many_gets_no_more_when_another_one_does_too() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"before")
        sinks, ended = [Recorder() for _ in range(3)], []
        subscription, first = life.subscribe(b"orders", sinks[0], queue=b"q")
        on_the_way = life.offer(run_of(b"orders", b"a"))
        life.broker.subscriptions.finish(subscription, first, lambda: ended.append(1), after=3)
        _, second = life.subscribe(b"orders", sinks[1], queue=b"q")
        life.subscribe(b"orders", sinks[2], queue=b"q")
        life.broker.subscriptions.finish(subscription, second, lambda: ended.append(2), after=2)
        await on_the_way
        await life.stored(b"orders", *(b"%d" % number for number in range(20)))
        await life.settle()
        assert sorted(ended) == [1, 2]
        assert [len(sink.got) for sink in sinks] == [3, 2, 16]


@in_loop
async def test_others_go_on_when_a_member_that_wants_so_many_is_lost() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"before")
        lost, other, done = Recorder(), Recorder(), asyncio.Event()
        subscription, member = life.subscribe(b"orders", lost, queue=b"q")
        lost.is_open = False
        await life.stored(b"orders", b"a")
        life.broker.subscriptions.finish(subscription, member, done.set, after=5)
        life.subscribe(b"orders", other, queue=b"q")
        life.broker.subscriptions.unsubscribe(subscription, member)
        assert done.is_set()
        await life.stored(b"orders", b"b", b"c")
        await life.settle()
        assert other.values == [b"a", b"b", b"c"]
