"""Messages that a group delivers again: after a deadline, a nack, or when a member leaves."""

from __future__ import annotations

import asyncio

from penstock.errors import PenstockError
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import SECOND, Life, Recorder, in_loop
from tests.support.ends import DEADLINE, attempts, by_power_cut, by_stop

# ---- shared: acknowledgements


@in_loop
async def test_what_is_not_acknowledged_in_time_comes_again_and_says_so() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        await life.ack(group, ann.take()[1])
        await life.advance(DEADLINE - 1)
        assert not ann.got
        await life.advance(1)
        assert attempts(ann) == [(b"a", 2), (b"c", 2)]
        assert group.state.redelivered == 2
        await life.ack(group, *ann.take())
        await life.advance(10 * DEADLINE)
        assert not ann.got


@in_loop
async def test_a_late_acknowledgement_of_what_came_back_and_waits_counts() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        ann.is_open = False
        await life.advance(DEADLINE)
        await life.ack(group, *ann.take())
        ann.is_open = True
        group.wake()
        await life.settle()
        assert not ann.got


@in_loop
async def test_what_is_given_back_comes_again_after_its_delay() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        first, second = ann.take()
        assert group.nack(first.place, first.offset, 0)
        assert group.nack(second.place, second.offset, 2 * SECOND)
        await life.settle()
        assert attempts(ann) == [(b"a", 2)]
        await life.ack(group, *ann.take())
        await life.advance(2 * SECOND - 1)
        assert not ann.got
        await life.advance(1)
        assert attempts(ann) == [(b"b", 2)]


@in_loop
async def test_nobody_speaks_for_a_message_that_another_has() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        group, hers = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        [message] = ann.got
        life.broker.groups.leave(group, hers)
        group, his = await life.join(b"g", b"orders", bob)
        await life.settle()
        assert attempts(bob) == [(b"a", 2)]
        assert not group.nack(message.place, message.offset, 0, hers)
        assert not group.extend(message.place, message.offset, hers)
        assert not group.release(message.place, message.offset, hers)
        assert not group.reject(message.place, message.offset, hers)
        assert group.extend(message.place, message.offset, his)


@in_loop
async def test_what_nobody_looked_at_was_not_delivered() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        first, second = ann.take()
        assert group.release(first.place, first.offset, member)
        assert not group.release(first.place, first.offset, member), "it is not out any more"
        await life.settle()
        assert attempts(ann) == [(b"a", 1)]
        await life.ack(group, second, *ann.take())
        assert group.lag() == 0


@in_loop
async def test_a_message_that_was_given_back_unseen_is_not_done() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        [message] = ann.take()
        ann.is_open = False
        assert group.release(message.place, message.offset, member)
        await life.settle()
        disk = await by_power_cut(life)
    async with Life(disk) as life:
        ann.is_open = True
        await life.join(b"g", b"orders", ann)
        await life.settle()
        assert attempts(ann) == [(b"a", 1)]


@in_loop
async def test_a_dead_letter_cannot_be_acknowledged_then_or_after_a_restart() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        [message] = ann.take()
        assert group.reject(message.place, message.offset)
        await life.settle()
        assert len(await life.letters()) == 1
        assert not group.ack(message.place, message.offset, Outcome())
        disk = await by_stop(life)
    async with Life(disk) as life:
        assert not life.broker.groups[b"g"].ack(message.place, message.offset, Outcome())


@in_loop
async def test_that_a_message_is_refused_is_told_when_it_is_stored() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        first, second = ann.take()
        told: list[PenstockError | None] = []
        assert group.reject(first.place, first.offset, member, Outcome(told.append))
        assert group.nack(second.place, second.offset, 0, member, Outcome(told.append))
        assert not told
        await life.settle()
        assert told == [None, None]


@in_loop
async def test_who_asks_for_more_time_gets_it() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        message = ann.got[0]
        await life.advance(DEADLINE - 1)
        assert group.extend(message.place, message.offset)
        ann.take()
        await life.advance(1)
        assert attempts(ann) == [(b"b", 2)]
        await life.advance(DEADLINE - 1)
        assert (b"a", 2) in attempts(ann)


@in_loop
async def test_what_a_member_had_goes_to_the_others_at_once_when_it_leaves() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        group, member = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        await life.join(b"g", b"orders", bob)
        await life.ack(group, ann.got[0])
        life.broker.groups.leave(group, member)
        await life.settle()
        assert attempts(bob) == [(b"b", 2), (b"c", 2)]


@in_loop
async def test_a_group_of_one_that_comes_back_goes_on_where_it_was() -> None:
    """GR-12"""
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        await life.ack(group, ann.take()[0])
        life.broker.groups.leave(group, member)
        await life.stored(b"orders", b"c")
        assert not ann.got
        await life.join(b"g", b"orders", ann)
        assert attempts(ann) == [(b"b", 2), (b"c", 1)]


@in_loop
async def test_holes_are_kept_and_only_they_come_again() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", *(b"%d" % number for number in range(100)))
        await life.ack(group, *(message for message in ann.take() if message.offset % 7))
        await life.kill()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert ann.values == [b"%d" % number for number in range(0, 100, 7)]


# ---- reading that takes its time


@in_loop
async def test_what_comes_back_while_the_disk_is_read_is_not_taken_for_gone() -> None:
    async with Life(FaultyFiles(), clock=ManualClock(), tail_bytes_max=1) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        for number in range(3):
            await life.stored(b"orders", b"%d" % number)
        first, _, last = ann.take()
        assert group.nack(last.place, last.offset, 0)
        group.dispatcher._cursors.clear()  # with the batch that was read last
        serving = asyncio.create_task(group.drain())
        while not life.store.reads:
            await asyncio.sleep(0)
        assert group.nack(first.place, first.offset, 0)
        await serving
        await life.settle()
        assert sorted(attempts(ann)) == [(b"0", 2), (b"2", 2)]
