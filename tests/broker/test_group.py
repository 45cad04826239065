"""Groups: what a member has acknowledged never comes again, and everything else does, whatever happens in between."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

import pytest

from penstock.broker.broker import Settings
from penstock.broker.flow import Flow
from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.member import Deliveries, Member
from penstock.broker.start import Start
from penstock.errors import AppendFailed, BadSubject, GroupConflict, PenstockError, StaleCommit, UnknownGroup
from penstock.log.policy import Policy
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import SECOND, Got, Life, Recorder, in_loop, refuse, run_of

DEADLINE = 5 * SECOND
LARGE = bytes(3000)


# How a life ends. What was acknowledged, and saved, is so after each of them.


async def by_stop(life: Life) -> FaultyFiles:
    await life.stop()
    assert isinstance(life.disk, FaultyFiles)
    return life.disk


async def by_kill(life: Life) -> FaultyFiles:
    await life.kill()
    assert isinstance(life.disk, FaultyFiles)
    return life.disk


async def by_power_cut(life: Life) -> FaultyFiles:
    return await life.power_cut()


End = Callable[[Life], Awaitable[FaultyFiles]]
ends = pytest.mark.parametrize("end", [by_stop, by_kill, by_power_cut])


def attempts(sink: Recorder) -> list[tuple[bytes, int]]:
    return [(message.value, message.attempts) for message in sink.got]


# Shared: who gets what


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


# Shared: acknowledgements


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


# Shared: dead letters


@in_loop
async def test_after_the_last_try_a_message_is_a_dead_letter_with_all_that_is_known_of_it() -> None:
    """DE-12, DE-21"""
    async with Life(FaultyFiles()) as life:
        ann, dead = Recorder(), Recorder()
        life.subscribe(b"DLQ.>", dead)
        group, _ = await life.join(b"g", b"orders.eu", ann)
        await life.stored(b"orders.us", b"not for it")
        await life.stored(b"orders.eu", b"a", headers=b"Colour: red\r\nPenstock-Key: k\r\n")
        for attempt in (1, 2, 3, 4):
            assert [message.attempts for message in ann.take()] == [attempt]
            assert not dead.got
            await life.advance(DEADLINE)
        assert not ann.got
        [letter] = dead.got
        assert (letter.subject, letter.value, letter.key) == (b"DLQ.orders.eu", b"a", b"k")
        assert letter.headers.splitlines() == [
            b"Colour: red",
            b"Penstock-Key: k",
            b"Dead-Letter-Reason: not acknowledged",
            b"Dead-Letter-Attempts: 4",
            b"Dead-Letter-Group: g",
            b"Dead-Letter-Subject: orders.eu",
            b"Dead-Letter-Topic: orders",
            b"Dead-Letter-Partition: 0",
            b"Dead-Letter-Offset: 1",
        ]
        assert (group.state.dead_lettered, group.lag()) == (1, 0)
        await life.advance(100 * DEADLINE)
        assert not ann.got
        assert len(dead.got) == 1


@in_loop
async def test_a_refused_message_is_a_dead_letter_without_further_tries() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        message = ann.take()[0]
        assert group.reject(message.place, message.offset)
        await life.settle()
        [letter] = await life.letters()
        assert (letter.value, letter.reason, letter.attempts) == (b"a", b"refused", 1)
        await life.advance(DEADLINE)
        assert attempts(ann) == [(b"b", 2)]


@pytest.mark.parametrize(
    ("deliveries", "deliveries_max", "delivered"),
    [
        (Deliveries(limit=0), 2, 8),
        (Deliveries(limit=0), None, 8),
        (Deliveries(limit=3), 2, 3),
        (Deliveries(limit=1), 2, 1),
        (Deliveries(default=0), None, 8),
        (Deliveries(default=0), 2, 2),
        (Deliveries(), None, 4),
    ],
)
@in_loop
async def test_a_member_limits_deliveries_before_its_topic_does(
    deliveries: Deliveries, deliveries_max: int | None, delivered: int
) -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", policy=Policy(deliveries_max=deliveries_max)))
        ann = Recorder()
        await life.join(b"g", b"orders", ann, deliveries=deliveries)
        await life.stored(b"orders", b"a")
        for _ in range(7):
            await life.advance(DEADLINE)
        assert [message.attempts for message in ann.got] == list(range(1, delivered + 1))
        assert life.in_log(b"DLQ") == ([b"a"] if delivered < 8 else [])


@in_loop
async def test_what_a_patient_member_gives_back_by_leaving_or_in_a_crash_is_not_dead() -> None:
    disk = FaultyFiles()
    settings = Settings(policy=Policy(deliveries_max=2))
    async with Life(disk, settings=settings) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann, deliveries=Deliveries(limit=0))
        await life.stored(b"orders", b"a")
        for _ in range(3):
            await life.advance(DEADLINE)
        life.broker.groups.leave(group, member)
        await life.advance(DEADLINE)
        assert not life.in_log(b"DLQ")
        disk = await by_kill(life)
    async with Life(disk, settings=settings) as life:
        await life.advance(DEADLINE)
        assert not life.in_log(b"DLQ")
        bob = Recorder()
        # The most patient member decides, and then the next.
        group, member = await life.join(b"g", b"orders", bob, deliveries=Deliveries(limit=0))
        assert attempts(bob) == [(b"a", 5)]
        await life.join(b"g", b"orders", Recorder())
        await life.advance(DEADLINE)
        assert not life.in_log(b"DLQ")
        life.broker.groups.leave(group, member)
        await life.advance(DEADLINE)
        assert life.in_log(b"DLQ") == [b"a"]


@in_loop
async def test_a_dead_letter_says_why_its_last_delivery_failed_also_after_a_restart() -> None:
    disk = FaultyFiles()
    settings = Settings(policy=Policy(deliveries_max=2))
    async with Life(disk, settings=settings) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        for message in ann.take():
            assert group.nack(message.place, message.offset, SECOND, reason="bank\x1b[31m\r\naway")
        await life.settle()
    async with Life(disk, settings=settings) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.advance(SECOND)
        first, second, _ = ann.take()
        assert group.nack(first.place, first.offset, 0, reason="x" * 2000)
        assert group.reject(second.place, second.offset)
        await life.settle()
        await life.advance(DEADLINE)
        letters = {letter.value: letter for letter in await life.letters()}
        assert letters[b"a"].reason == ("x" * 509 + "…").encode()
        assert letters[b"b"].reason == b"not acknowledged; delivery 1 failed: bank [31m away"
        assert letters[b"c"].reason == letters[b"b"].reason
        assert letters[b"a"].time_us == letters[b"b"].time_us < letters[b"c"].time_us


@in_loop
async def test_a_topic_without_dead_letters_delivers_again_for_ever() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", policy=Policy(dead_letters=False, deliveries_max=2)))
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        for _ in range(9):
            await life.advance(DEADLINE)
        assert [message.attempts for message in ann.got] == list(range(1, 11))
        assert life.broker.topics.get(b"DLQ") is None


@in_loop
async def test_dead_letters_are_stored_once_there_is_room() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=Settings(policy=Policy(deliveries_max=1))) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        await life.do(life.broker.dead_letter_topic())
        dead = life.log(b"DLQ")
        disk.fail("write", errno.ENOSPC, times=3, path_suffix=str(dead.directory / ("0" * 20 + ".log")))
        await life.advance(DEADLINE)
        assert not life.in_log(b"DLQ")
        assert group.lag() == 2
        for _ in range(3):
            await life.advance(2 * SECOND)
        assert life.in_log(b"DLQ") == [b"a", b"b"]
        assert (group.lag(), group.state.dead_lettered) == (0, 2)


@ends
@in_loop
async def test_dead_letters_are_stored_once_whenever_the_life_ends(end: End) -> None:
    disk = FaultyFiles()
    settings = Settings(policy=Policy(deliveries_max=1))
    for _ in range(3):
        async with Life(disk, settings=settings) as life:
            ann = Recorder()
            await life.join(b"g", b"orders", ann)
            if not life.in_log(b"orders"):
                await life.stored(b"orders", b"a", b"b")
            await life.advance(DEADLINE)
            assert life.in_log(b"DLQ") == [b"a", b"b"]
            disk = await end(life)


@in_loop
async def test_a_group_that_is_made_again_under_its_name_has_dead_letters_again() -> None:
    async with Life(FaultyFiles(), settings=Settings(policy=Policy(deliveries_max=1))) as life:
        for value in (b"a", b"b"):
            ann = Recorder()
            group, member = await life.join(b"g", b"orders", ann)
            await life.stored(b"orders", value)
            await life.advance(DEADLINE)
            life.broker.groups.leave(group, member)
            await life.do(life.broker.groups.delete(b"g"))
        assert life.in_log(b"DLQ") == [b"a", b"b"]


@in_loop
async def test_dead_letters_that_are_stored_by_two_who_drain_at_once_are_counted_once() -> None:
    async with Life(FaultyFiles(), settings=Settings(policy=Policy(deliveries_max=1))) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        life.clock.advance(DEADLINE)
        await asyncio.gather(group.drain(), group.drain())
        await life.settle()
        assert life.in_log(b"DLQ") == [b"a", b"b"]
        assert group.state.dead_lettered == 2
        [position] = group.positions.values()
        assert position.decision_number == 1


@in_loop
async def test_dead_letters_wait_while_their_topic_is_refused() -> None:
    """The log of the dead letters cannot be opened: the group waits, and everything else is served."""
    disk = FaultyFiles()
    settings = Settings(policy=Policy(deliveries_max=1))
    async with Life(disk, settings=settings) as life:
        await life.do(life.broker.dead_letter_topic())
        await life.join(b"g", b"orders", Recorder())
        await life.stored(b"DLQ.x", b"somebody's")
        refused = life.log(b"DLQ").segments[0].path
    refuse(disk, refused)
    async with Life(disk, settings=settings) as life:
        assert life.broker.refused == ["DLQ"]
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        await life.advance(DEADLINE)
        await life.stored(b"orders", b"b")
        assert ann.values == [b"a", b"b"]
        assert group.lag() == 2


# Shared: topics that come and go


@in_loop
async def test_a_new_topic_that_matches_is_read_from_its_beginning() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        await life.join(b"g", b">", ann)
        await life.stored(b"orders", b"a")
        await life.do(life.broker.changes.create(b"bills", partitions=3))
        await life.stored(b"bills", b"b")
        await life.do(life.broker.changes.alter(b"orders", partitions=2))
        await life.stored(b"orders", b"c")
        await life.stored(b"orders", b"d")
        assert sorted(ann.values) == [b"a", b"b", b"c", b"d"]


@in_loop
async def test_a_group_without_a_name_reads_a_topic_that_is_made_later() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        await life.join(None, b"orders", ann)
        await life.stored(b"orders", b"a")
        assert ann.values == [b"a"]


@in_loop
async def test_a_group_does_not_read_what_the_broker_keeps_for_itself() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        await life.join(b"g", b">", ann)
        await life.stored(b"orders", b"a", headers=b"Delay: 5s\r\n")
        assert not ann.got
        await life.advance(5 * SECOND)
        assert ann.values == [b"a"]


@ends
@in_loop
async def test_a_topic_that_matches_and_was_made_while_the_group_was_away_is_read_after_a_restart(end: End) -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.do(life.broker.groups.create(b"g", b">"))
        await life.stored(b"orders", b"a")
        disk = await end(life)
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b">", ann)
        assert ann.values == [b"a"]


@in_loop
async def test_a_deleted_topic_is_forgotten_by_its_groups_and_made_again_is_another_one() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b">", ann)
        await life.stored(b"orders", b"a", b"b")
        await life.stored(b"bills", b"c")
        await life.ack(group, ann.got[0])
        old = life.partition(b"orders")
        await life.do(life.broker.changes.delete(b"orders"))
        assert life.store.state.get("position", group.writer.key(old)) is None
        await life.stored(b"orders", b"new")
        ann.take()
        await life.advance(DEADLINE)
        assert sorted(attempts(ann)) == [(b"c", 2), (b"new", 2)]
        await life.settle()
        assert life.store.state.get("position", group.writer.key(old)) is None
        await life.kill()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b">", ann)
        assert sorted(ann.values) == [b"c", b"new"]


@in_loop
async def test_an_acknowledgement_on_its_way_when_its_topic_is_deleted_is_answered() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        answers: list[PenstockError | None] = []
        first, second = ann.got
        assert group.ack(first.place, first.offset, Outcome(answers.append))
        await asyncio.sleep(0)  # its write begins
        assert group.ack(second.place, second.offset, Outcome(answers.append))
        await life.do(life.broker.changes.delete(b"orders"))
        await life.settle()
        assert len(answers) == 2


@in_loop
async def test_an_acknowledgement_just_before_its_topic_is_deleted_is_answered() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        answers: list[PenstockError | None] = []
        assert group.ack(ann.got[0].place, ann.got[0].offset, Outcome(answers.append))
        await life.do(life.broker.changes.delete(b"orders"))
        await life.settle()
        assert len(answers) == 1


@in_loop
async def test_what_retention_drops_before_it_is_acknowledged_is_counted_as_lost() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1)
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        for number in range(4):
            await life.stored(b"orders", b"%d" % number + LARGE)
        await life.ack(group, ann.got[1])
        life.store.upkeep()
        kept = life.log(b"orders").start
        assert kept > 2
        group.wake()
        await life.settle()
        assert group.lost == kept - 1
        await life.ack(group, *(message for message in ann.got if message.offset >= kept))
        assert group.lag() == 0
        await life.stored(b"orders", b"next")
        assert ann.values[-1] == b"next"


@in_loop
async def test_what_retention_drops_before_it_is_delivered_is_counted_as_lost() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1)
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        group = await life.do(life.broker.groups.create(b"g", b"orders"))
        for number in range(4):
            await life.stored(b"orders", b"%d" % number + LARGE)
        life.store.upkeep()
        kept = life.log(b"orders").start
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert [message.offset for message in ann.got] == list(range(kept, 4))
        assert group.lost == kept


@ends
@in_loop
async def test_a_group_remembers_how_many_messages_it_lost(end: End) -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1)
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        group = await life.do(life.broker.groups.create(b"g", b"orders"))
        for number in range(4):
            await life.stored(b"orders", b"%d" % number + LARGE)
        life.store.upkeep()
        group.dispatcher.keep_up()
        await life.settle()
        lost = group.lost
        assert lost == life.log(b"orders").start
        disk = await end(life)
    async with Life(disk) as life:
        assert life.broker.groups[b"g"].lost == lost


# Shared: restarts


@ends
@in_loop
async def test_what_is_acknowledged_never_comes_again_and_everything_else_does(end: End) -> None:
    disk = FaultyFiles()
    acknowledged: set[bytes] = set()
    published = [b"%d" % number for number in range(60)]
    floor = 0
    settings = Settings(policy=Policy(deliveries_max=100))
    for life_number in range(5):
        async with Life(disk, settings=settings) as life:
            ann = Recorder()
            group, _ = await life.join(b"g", b"orders", ann)
            if not life_number:
                await life.stored(b"orders", *published)
            assert set(ann.values) == set(published) - acknowledged
            assert len(ann.values) == len(set(ann.values))
            [position] = group.positions.values()
            assert position.inflight.floor >= floor, "the floor never moves back"
            some = [message for message in ann.got if int(message.value) % 5 == life_number]
            await life.ack(group, *some)
            acknowledged |= {message.value for message in some}
            floor = position.inflight.floor
            disk = await end(life)
    assert acknowledged == set(published)


@ends
@in_loop
async def test_attempts_survive(end: End) -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        await life.advance(DEADLINE)
        await life.advance(DEADLINE)
        assert [message.attempts for message in ann.got] == [1, 2, 3]
        disk = await end(life)
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.advance(DEADLINE)
        assert [message.attempts for message in ann.got] == [4]
        assert life.in_log(b"DLQ") == [b"a"]


@in_loop
async def test_a_delay_goes_on_after_a_restart() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        group.nack(ann.got[0].place, 0, 10 * SECOND)
        await life.settle()
        await life.kill()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert not ann.got
        await life.advance(10 * SECOND)
        assert attempts(ann) == [(b"a", 2)]


@in_loop
async def test_an_acknowledgement_that_is_not_saved_says_so_and_is_saved_when_there_is_room() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        answers: list[PenstockError | None] = []
        assert group.ack(ann.got[0].place, 0, Outcome(answers.append))
        await life.settle()
        assert [getattr(answer, "code", None) for answer in answers] == ["APPEND_FAILED"]
        await life.advance(2 * SECOND)
        await life.kill()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert ann.values == [b"b"]


@in_loop
async def test_an_acknowledgement_that_comes_while_another_one_is_refused_by_the_disk_is_answered() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        answers: list[PenstockError | None] = []
        assert group.ack(ann.got[0].place, 0, Outcome(answers.append))
        await asyncio.sleep(0)  # its write begins
        assert group.ack(ann.got[1].place, 1, Outcome(answers.append))
        await life.advance(2 * SECOND)
        assert len(answers) == 2


@in_loop
async def test_an_acknowledgement_that_was_refused_and_is_repeated_counts_when_it_is_stored() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        answers: list[PenstockError | None] = []
        assert group.ack(ann.got[0].place, 0, Outcome(answers.append))
        await life.settle()
        assert [type(answer) for answer in answers] == [AppendFailed]
        assert group.ack(ann.got[0].place, 0, Outcome(answers.append))
        assert len(answers) == 1
        await life.settle()
        assert answers[1:] == [None]
        [(_, stored)] = life.store.state.items("position")
        assert stored["floor"] == 1


# Between publishing and storing


@in_loop
async def test_a_new_group_gets_what_is_published_after_something_that_could_not_be_stored() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"first")
        path = life.log(b"orders").segments[0].path
        disk.fail("write", errno.ENOSPC, path_suffix=str(path))
        failed = life.offer(run_of(b"orders", b"x", b"y"))
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert (await failed).error is not None
        await life.stored(b"orders", b"a", b"b", b"c")
        assert ann.values == [b"a", b"b", b"c"]


@in_loop
async def test_a_new_group_gets_what_is_published_after_a_power_cut_that_took_what_came_before_it() -> None:
    """The group is durable before the messages that were published before it."""
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"first")
        log = life.log(b"orders")
        # The disk is slow with this log: its batches wait.
        log.flusher.begin_write, begin_write = lambda: None, log.flusher.begin_write  # type: ignore[method-assign]
        life.offer(run_of(b"orders", b"x", b"y"))
        assert (log.end, log.committed) == (3, 1)
        await life.do(life.broker.groups.create(b"g", b"orders"))
        log.flusher.begin_write = begin_write  # type: ignore[method-assign]
        life.store.rounds._dirty.clear()
        disk = await life.power_cut()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        assert ann.values == [b"a", b"b", b"c"]


# Echo


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


# Partitioned


async def partitioned(life: Life, partitions: int = 4) -> None:
    await life.do(life.broker.changes.create(b"orders", partitions=partitions))


def by_partition(sink: Recorder) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for message in sink.got:
        found.setdefault(message.place[1], []).append(message.value)
    return found


async def commit(life: Life, group: Group, message: Got, generation: int | None = None) -> None:
    async def saved() -> None:
        outcome: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
        number = group.state.generation if generation is None else generation
        group.commit(message.place, message.offset + 1, number, Outcome(outcome.set_result))
        assert await outcome is None

    await life.do(saved())
    await life.settle()


@in_loop
async def test_partition_p_belongs_to_member_p_modulo_members() -> None:
    """GR-02"""
    async with Life(FaultyFiles()) as life:
        await partitioned(life)
        sinks = [Recorder(), Recorder(), Recorder()]
        for sink in sinks:
            await life.join(b"g", b"orders.>", sink, mode=Mode.PARTITIONED)
        for number in range(40):
            await life.stored(b"orders.%d" % number, b"%d" % number)
        assert [sorted(by_partition(sink)) for sink in sinks] == [[0, 3], [1], [2]]
        for sink in sinks:
            for values in by_partition(sink).values():
                assert values == sorted(values, key=int)


@in_loop
async def test_a_commit_ends_all_below_it_and_is_never_undone_by_time() -> None:
    async with Life(FaultyFiles()) as life:
        await partitioned(life, 1)
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann, mode=Mode.PARTITIONED)
        await life.stored(b"orders", *(b"%d" % number for number in range(5)))
        await commit(life, group, ann.got[2])
        await life.advance(1000 * DEADLINE)
        assert len(ann.got) == 5, "no deadline"
        assert group.lag() == 2


@in_loop
async def test_after_a_rebalance_a_partition_is_read_from_its_committed_offset() -> None:
    async with Life(FaultyFiles()) as life:
        await partitioned(life, 2)
        ann, bob = Recorder(), Recorder()
        group, _ = await life.join(b"g", b"orders", ann, mode=Mode.PARTITIONED)
        for number in range(4):
            await life.stored(b"orders", b"%d" % number)
        assert by_partition(ann) == {0: [b"0", b"2"], 1: [b"1", b"3"]}
        for message in ann.take()[:2]:
            await commit(life, group, message)
        _, member = await life.join(b"g", b"orders", bob, mode=Mode.PARTITIONED)
        assert by_partition(ann) == {0: [b"2"]}
        assert by_partition(bob) == {1: [b"3"]}
        ann.take()
        life.broker.groups.leave(group, member)
        await life.settle()
        assert by_partition(ann) == {0: [b"2"], 1: [b"3"]}


@in_loop
async def test_a_commit_of_an_earlier_generation_is_refused() -> None:
    async with Life(FaultyFiles()) as life:
        await partitioned(life, 1)
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann, mode=Mode.PARTITIONED)
        await life.stored(b"orders", b"a")
        before = group.state.generation
        await life.join(b"g", b"orders", Recorder(), mode=Mode.PARTITIONED)
        with pytest.raises(StaleCommit):
            await commit(life, group, ann.got[0], before)
        assert group.lag() == 1


@in_loop
async def test_a_commit_before_a_reset_does_not_undo_it() -> None:
    async with Life(FaultyFiles()) as life:
        await partitioned(life, 1)
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann, mode=Mode.PARTITIONED)
        await life.stored(b"orders", b"a", b"b")
        await commit(life, group, ann.got[1])
        before = group.state.generation
        message = ann.take()[1]
        group.reset(message.place, 0, Outcome())
        await life.settle()
        assert ann.values == [b"a", b"b"]
        with pytest.raises(StaleCommit):
            await commit(life, group, message, before)


@in_loop
async def test_a_commit_for_a_partition_that_is_not_there_is_refused() -> None:
    async with Life(FaultyFiles()) as life:
        await partitioned(life, 1)
        group, _ = await life.join(b"g", b"orders", Recorder(), mode=Mode.PARTITIONED)
        with pytest.raises(PenstockError):
            group.commit((99, 0), 1, group.state.generation, Outcome())


@ends
@in_loop
async def test_committed_offsets_are_there_after_a_restart(end: End) -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await partitioned(life, 2)
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann, mode=Mode.PARTITIONED)
        for number in range(6):
            await life.stored(b"orders", b"%d" % number)
        await commit(life, group, next(message for message in ann.got if message.value == b"2"))
        disk = await end(life)
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann, mode=Mode.PARTITIONED)
        assert by_partition(ann) == {0: [b"4"], 1: [b"1", b"3", b"5"]}


# Groups by name


@in_loop
async def test_a_group_is_what_it_is() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.groups.create(b"g", b"orders"))
        for pattern, mode in ((b"bills", Mode.SHARED), (b"orders", Mode.PARTITIONED)):
            with pytest.raises(GroupConflict):
                await life.join(b"g", pattern, Recorder(), mode=mode)
        with pytest.raises(GroupConflict):
            await life.do(life.broker.groups.create(b"g", b"orders"))
        with pytest.raises(BadSubject):
            await life.do(life.broker.groups.create(b"h", b"or..ders"))
        with pytest.raises(UnknownGroup):
            await life.do(life.broker.groups.delete(b"h"))
        assert [group.name for group in life.broker.groups] == [b"g"]


@in_loop
async def test_two_who_join_a_new_group_at_once_are_in_one_group() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        ann, bob = Recorder(), Recorder()
        members = [Member(b"1", sink, Flow()) for sink in (ann, bob)]
        first, second = await asyncio.gather(*(life.broker.groups.join(b"g", b"orders", member) for member in members))
        assert first is second
        await life.stored(b"orders", b"a", b"b")
        assert (len(ann.got), len(bob.got)) == (1, 1)


@ends
@in_loop
async def test_a_deleted_group_is_forgotten_with_its_positions(end: End) -> None:
    """GR-06"""
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        await life.ack(group, *ann.got)
        await life.do(life.broker.groups.delete(b"g"))
        await life.stored(b"orders", b"b")
        assert ann.values == [b"a"]
        disk = await end(life)
    async with Life(disk) as life:
        assert not life.broker.groups
        assert life.store.state.items("position") == []
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"c")
        assert ann.values == [b"c"]


@in_loop
async def test_an_acknowledgement_just_before_a_group_is_deleted_leaves_nothing_behind() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        assert group.ack(ann.got[0].place, 0, Outcome())
        await life.do(life.broker.groups.delete(b"g"))
        await life.settle()
        assert life.store.state.items("position") == []


@in_loop
async def test_a_group_that_cannot_be_stored_is_not_there() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"old")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        with pytest.raises(PenstockError):
            await life.join(b"g", b"orders", Recorder())
        assert not life.broker.groups
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        assert ann.values == [b"a"]


@in_loop
async def test_a_group_without_a_name_is_gone_with_its_last_member() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        ann = Recorder()
        group, member = await life.join(None, b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        await life.ack(group, ann.take()[0])
        await life.advance(DEADLINE)
        assert attempts(ann) == [(b"b", 2)]
        life.broker.groups.leave(group, member)
        await life.stored(b"orders", b"c")
        await life.advance(DEADLINE)
        assert len(ann.got) == 1
        assert life.store.state.items("group") == []
        assert not life.partition(b"orders").groups


# Reading that takes its time


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


# Many at once


@in_loop
async def test_of_many_acknowledgements_those_that_cannot_be_are_told_and_the_others_count() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann, buffer=6)
        await life.stored(b"orders", *(b"%d" % number for number in range(10)))
        place = ann.got[0].place
        assert len(ann.take()) == 6
        told: list[PenstockError | None] = []
        assert list(group.ack_many(place, [0, 2, 4, 77], Outcome(told.append))) == [77]
        assert told == []
        await life.settle()
        assert told == [None]
        # It has room again for as many as were done, and no more.
        assert [message.offset for message in ann.take()] == [6, 7, 8]
        assert member.out == 6
        assert group.lag() == 7


@in_loop
async def test_acknowledgements_none_of_which_can_be_are_refused_and_nothing_is_saved() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        place = ann.got[0].place
        told: list[PenstockError | None] = []
        assert list(group.ack_many(place, [5, 6], Outcome(told.append))) == [5, 6]
        assert list(group.ack_many((99, 0), [0], Outcome(told.append))) == [0]
        await life.settle()
        assert told == []
        assert group.lag() == 1


@in_loop
async def test_acknowledgements_that_are_repeated_in_one_breath_are_told_once_and_count_once() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        place = ann.got[0].place
        told: list[PenstockError | None] = []
        assert not group.ack_many(place, [0, 0, 1], Outcome(told.append))
        await life.settle()
        assert not group.ack_many(place, [0, 1], Outcome(told.append))
        await life.settle()
        assert told == [None, None]
        assert (group.lag(), member.out) == (1, 1)


@in_loop
async def test_many_acknowledgements_that_the_disk_refuses_are_told_so() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        told: list[PenstockError | None] = []
        group.ack_many(ann.got[0].place, [0, 1], Outcome(told.append))
        await life.settle()
        [error] = told
        assert isinstance(error, AppendFailed)
