"""Messages that become dead letters of a group."""

from __future__ import annotations

import asyncio
import errno

import pytest

from penstock.broker.broker import Settings
from penstock.broker.member import Deliveries
from penstock.log.policy import Policy
from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder, in_loop, refuse
from tests.support.ends import DEADLINE, End, attempts, by_kill, ends


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
