"""Groups: which member gets which message, and when an acknowledgement counts."""

from __future__ import annotations

import asyncio

import pytest

from penstock.broker import dispatcher
from penstock.broker.start import Start
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import Life, Recorder, in_loop, run_of

# ---- shared: who gets what


@in_loop
async def test_each_message_goes_to_one_member_in_turn() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        await life.join(b"g", b"orders", ann)
        await life.join(b"g", b"orders", bob)
        for number in range(10):
            await life.stored(b"orders", b"%d" % number)
        assert sorted(ann.values + bob.values) == [b"%d" % number for number in range(10)]
        assert len(ann.values) == len(bob.values) == 5
        assert ann.values == sorted(ann.values)


@in_loop
async def test_a_run_is_shared_out_too_each_part_in_order() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        await life.join(b"g", b"orders", ann)
        await life.join(b"g", b"orders", bob)
        await life.stored(b"orders", *(b"%d" % number for number in range(9)))
        assert {len(ann.values), len(bob.values)} == {4, 5}
        for sink in (ann, bob):
            assert sink.values == sorted(sink.values)


@in_loop
async def test_others_use_the_loop_while_a_group_looks_at_many_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_SLICE_S", 0)
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=50))
        group, _ = await life.join(b"g", b"orders", Recorder())
        draining = asyncio.create_task(group.drain())
        turns = 0
        while not draining.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 50


@in_loop
async def test_two_groups_are_independent() -> None:
    """GR-09"""
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        first, _ = await life.join(b"first", b"orders", ann)
        second, _ = await life.join(b"second", b"orders", bob)
        await life.stored(b"orders", *(b"%d" % number for number in range(6)))
        await life.ack(first, *ann.got[:5])
        await life.ack(second, *bob.got[:3])
        assert (first.lag(), second.lag()) == (1, 3)


@in_loop
async def test_a_group_reads_only_the_subjects_that_match() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders.*.new", ann)
        for subject in (b"orders.eu.new", b"orders.eu.old", b"orders.new", b"orders.us.new", b"bills.eu.new"):
            await life.stored(subject, subject)
        assert ann.values == [b"orders.eu.new", b"orders.us.new"]
        await life.ack(group, *ann.got)
        assert group.lag() == 0


@in_loop
async def test_a_new_group_begins_with_what_comes_next_or_with_the_first_message() -> None:
    """GR-05"""
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        latest, earliest = Recorder(), Recorder()
        await life.join(b"latest", b"orders", latest)
        await life.do(life.broker.groups.create(b"earliest", b"orders", start=Start.EARLIEST))
        await life.join(b"earliest", b"orders", earliest)
        await life.stored(b"orders", b"new")
        assert latest.values == [b"new"]
        assert earliest.values == [b"old", b"new"]


@in_loop
async def test_a_member_gets_no_more_than_its_buffer_until_it_acknowledges() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann, buffer=3)
        await life.stored(b"orders", *(b"%d" % number for number in range(8)))
        assert ann.values == [b"0", b"1", b"2"]
        assert member.out == 3
        await life.ack(group, ann.got[1])
        assert ann.values == [b"0", b"1", b"2", b"3"]
        await life.ack(group, ann.got[0], ann.got[2], ann.got[3])
        assert ann.values == [b"%d" % number for number in range(7)]


@in_loop
async def test_no_more_than_pending_max_are_in_flight() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"first")
        [position] = group.positions.values()
        position.inflight.pending_max = 4
        await life.stored(b"orders", *(b"%d" % number for number in range(8)))
        assert ann.values == [b"first", b"0", b"1", b"2"]
        # A hole makes room though the floor stays.
        await life.ack(group, ann.got[2], ann.got[3])
        assert ann.values == [b"first", b"0", b"1", b"2", b"3", b"4"]
        assert position.inflight.floor == 0


@in_loop
async def test_a_connection_that_takes_nothing_leaves_the_messages_to_the_others() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.join(b"g", b"orders", bob)
        ann.is_open = False
        await life.stored(b"orders", b"a", b"b")
        assert bob.values == [b"a", b"b"]
        bob.is_open = False
        await life.stored(b"orders", b"c")
        ann.is_open = True
        group.wake()
        await life.settle()
        assert ann.values == [b"c"]


@in_loop
async def test_what_is_only_on_disk_is_delivered_in_order() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=1) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann, buffer=2)
        for number in range(20):
            await life.stored(b"orders", b"%d" % number)
        seen = []
        while messages := ann.take():
            seen += [message.value for message in messages]
            await life.ack(group, *messages)
        assert seen == [b"%d" % number for number in range(20)]


# ---- shared: acknowledgements


@in_loop
async def test_an_acknowledgement_counts_when_the_position_is_durable() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        committed = life.store._state_log.committed
        seen: list[int] = []
        for message in ann.got:
            assert group.ack(
                message.place, message.offset, Outcome(lambda error: seen.append(life.store._state_log.committed))
            )
        assert not seen, "not before the disk has it"
        await life.settle()
        assert seen == [committed + 1] * 2, "one write for both"
        key = group.writer.key(life.partition(b"orders"))
        assert life.store.state.get("position", key)["floor"] == 2


@in_loop
async def test_what_is_done_or_was_never_delivered_cannot_be_given_back() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        [message] = ann.got
        await life.ack(group, message)
        for place, offset in ((message.place, 0), (message.place, 1), ((99, 0), 0)):
            assert group.ack(place, offset, Outcome()) == ((place, offset) == (message.place, 0))
            assert not group.nack(place, offset, 0)
            assert not group.extend(place, offset)
            assert not group.reject(place, offset)


@in_loop
async def test_an_acknowledgement_that_is_repeated_waits_for_the_first() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        [message] = ann.got
        answers: list[str] = []
        assert group.ack(message.place, message.offset, Outcome(lambda _: answers.append("first")))
        assert group.ack(message.place, message.offset, Outcome(lambda _: answers.append("second")))
        assert not answers
        await life.settle()
        assert answers == ["first", "second"]


@in_loop
async def test_what_was_delivered_before_a_restart_and_not_acknowledged_must_come_again_first() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        [message] = ann.got
        disk = await life.power_cut()
    async with Life(disk) as life:
        group = life.broker.groups[b"g"]
        assert not group.ack(message.place, message.offset, Outcome())
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.settle()
        assert ann.values == [b"a"]


@in_loop
async def test_whoever_joins_a_group_that_is_being_made_waits_until_it_is_stored() -> None:
    async with Life(FaultyFiles()) as life:
        joins = [asyncio.create_task(life.join(b"g", b"orders", Recorder())) for _ in range(2)]
        while not any(join.done() for join in joins):
            await asyncio.sleep(0)
        assert life.store.state.get("group", "g") is not None
        (first, _), (second, _) = [await join for join in joins]
        assert first is second
        assert len(first.members) == 2


# ---- echo


@in_loop
async def test_a_member_without_echo_that_publishes_to_its_own_group_harms_nobody() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder(echo=False)
        await life.join(b"g", b"orders", ann)
        run = run_of(b"orders", b"mine")
        await life.stored(b"orders", b"first")
        receipt = life.offer(run)
        [(target, offset, _)] = life.broker.intake.publish(run_of(b"orders", b"mine too")).places
        ann.published |= {(target.topic_id, target.number, offset - 1), (target.topic_id, target.number, offset)}
        await receipt
        await life.settle()
        await life.stored(b"orders", b"somebody's")
        assert ann.values == [b"first", b"somebody's"]


@in_loop
async def test_what_comes_back_to_a_group_in_which_nobody_wants_it_harms_nobody() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder(echo=False)
        group, member = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"bob's")
        bob.published.add((*ann.got[0].place, 0))
        await life.join(b"g", b"orders", bob)
        life.broker.groups.leave(group, member)
        await life.settle()
        assert not bob.got
