"""Dead letters: listed, looked at, chosen, purged."""

from __future__ import annotations

import contextlib
import errno

import pytest

from penstock.broker import dead_letter_writer
from penstock.broker.cursor import Cursor
from penstock.broker.deadletters import DeadLetterFilter
from penstock.errors import PenstockError, ReadFailed
from penstock.model.run import Run
from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder, in_loop
from tests.support.letters import DEADLINE, SETTINGS, die

# ---- listed and looked at


@in_loop
async def test_dead_letters_are_listed_oldest_first_with_where_they_came_from() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"orders.us", b"b"), headers=b"Colour: red\r\n")
        first, second = await life.letters()
        assert (first.value, second.value) == (b"a", b"b")
        assert (first.subject, first.topic, first.origin_partition, first.origin_offset) == (
            b"orders.eu",
            b"orders",
            0,
            0,
        )
        assert (first.group, first.reason, first.attempts) == (b"orders", b"not acknowledged", 1)
        assert (first.headers, first.is_redriven) == (b"Colour: red\r\n", False)
        assert [letter.value for letter in await life.letters(b"*.us")] == [b"b"]


@in_loop
async def test_what_somebody_published_there_is_no_dead_letter() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"))
        await life.stored(b"DLQ.orders.eu", b"b")
        assert [letter.value for letter in await life.letters()] == [b"a"]
        assert await life.redrive() == 1


@pytest.mark.parametrize("name", [b"Offset", b"Partition", b"Attempts", b"Subject"])
@in_loop
async def test_headers_that_somebody_made_up_do_no_harm(name: bytes) -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"))
        forged = b"Dead-Letter-Subject: orders.us\r\n" if name != b"Subject" else b""
        await life.stored(
            b"DLQ.orders.us", b"forged", headers=forged + b"Dead-Letter-" + name + b": not a .. number\r\n"
        )
        assert b"a" in [letter.value for letter in await life.letters()]
        await life.redrive(b"orders.eu")
        await life.settle()
        assert life.in_log(b"orders").count(b"a") == 2


@pytest.mark.parametrize("subject", [b"$delayed", b"$delayed.x", b"$new", b"_INBOX.x"])
@in_loop
async def test_nothing_is_redriven_to_where_nobody_may_publish(subject: bytes) -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await life.do(life.broker.dead_letter_topic())
        forged = b"Dead-Letter-Subject: " + subject + b"\r\nPenstock-Due: x\r\n"
        await life.stored(b"DLQ." + subject, b"forged", headers=forged)
        with contextlib.suppress(PenstockError):
            await life.redrive()
        await life.settle()
        assert life.in_log(b"$delayed") == []
        assert [topic.name for topic in life.store.topics] == ["$delayed", "DLQ"]
        await life.stored(b"orders", b"others are served")
    async with Life(disk, settings=SETTINGS) as life:
        await life.settle()


@in_loop
async def test_a_message_that_had_such_headers_before_it_died_is_listed_as_what_it_is() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), headers=b"Dead-Letter-Subject: bills\r\nDead-Letter-Attempts: x\r\n")
        [letter] = await life.letters()
        assert (letter.subject, letter.attempts) == (b"orders.eu", 1)
        await life.redrive()
        assert life.in_log(b"orders") == [b"a", b"a"]
        assert life.in_log(b"bills") == []


# ---- large ones


@in_loop
async def test_more_than_a_batch_can_hold_die_together_and_are_redriven_together() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        values = [bytes([number]) * 2_000_000 for number in range(35)]
        await life.do(life.broker.groups.create(b"orders", b"orders.>"))
        for value in values:
            await life.publish(b"orders.eu", value)
        group, member = await life.join(b"orders", b"orders.>", Recorder())
        await life.advance(DEADLINE)
        life.broker.groups.leave(group, member)
        assert (life.log(b"DLQ").end, group.lag()) == (35, 0)
        assert await life.redrive() == 35
        assert life.in_log(b"orders")[35:] == values
        assert await life.letters() == []
        assert life.store.health.problems == {}


@in_loop
async def test_letters_are_listed_until_they_are_redriven() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"orders.eu", b"b"), (b"bills.eu", b"c"))
        disk.fail("write", errno.ENOSPC, times=3, path_suffix=str(life.log(b"orders").segments[0].path))
        done = await life.redrive_some()
        assert (done.count, done.skipped) == (1, 2)
        assert "No space" in str(done.reason)
        assert [letter.value for letter in await life.letters()] == [b"a", b"b"]
        with pytest.raises(PenstockError, match="No space"):
            await life.redrive()
        assert [letter.value for letter in await life.letters()] == [b"a", b"b"]
        assert life.in_log(b"bills") == [b"c", b"c"]
        assert await life.redrive(b"bills.>") == 0
        await life.kill()
    async with Life(disk, settings=SETTINGS) as life:
        assert [letter.value for letter in await life.letters()] == [b"a", b"b"]
        assert await life.redrive() == 2
        assert life.in_log(b"orders") == [b"a", b"b"] * 2
        assert await life.letters() == []
    async with Life(disk, settings=SETTINGS) as life:
        assert await life.letters() == []


@in_loop
async def test_a_message_that_has_no_room_in_a_dead_letter_leaves_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_writer, "BATCH_BYTES_MAX", 5000)
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", bytes(4000)), (b"orders.eu", bytes(4900)), (b"orders.eu", b"c"))
        assert [letter.value for letter in await life.letters()] == [bytes(4000), b"", b"c"]
        empty = (await life.letters())[1]
        assert b"4900 bytes" in empty.reason
        assert (empty.topic, empty.origin_partition, empty.origin_offset) == (b"orders", 0, 1)
        done = await life.redrive_some()
        assert (done.count, done.skipped) == (2, 1)
        assert "too large" in str(done.reason)
        assert life.in_log(b"orders")[3:] == [bytes(4000), b"c"]
        assert await life.letters() == [empty]
        assert life.broker.groups[b"orders"].lag() == 2


@in_loop
async def test_a_message_that_cannot_be_read_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await life.do(life.broker.groups.create(b"orders", b"orders"))
        await life.stored(b"orders", b"a", b"b", b"c")
        partition = life.partition(b"orders")
        read_message = Cursor.read_message

        async def damaged(cursor: Cursor) -> Run | None:
            if cursor.partition is partition and cursor.offset == 1:
                raise ReadFailed("damaged")
            return await read_message(cursor)

        monkeypatch.setattr(Cursor, "read_message", damaged)
        await life.join(b"orders", b"orders", Recorder())
        await life.advance(DEADLINE)
        assert life.in_log(b"DLQ") == [b"a", b"c"]
        assert list(life.store.health.problems) == ["dead letters of group orders"]
        monkeypatch.undo()
        await life.advance(DEADLINE)
        assert life.in_log(b"DLQ") == [b"a", b"c", b"b"]
        assert life.store.health.problems == {}


@in_loop
async def test_an_unexpected_error_is_counted_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        with monkeypatch.context() as patched:
            patched.setattr(dead_letter_writer.DeadLetterWriter, "_letter", lambda *_: 1 / 0)
            await die(life, (b"orders.eu", b"a"))
            assert life.store.health.faults["dead letters"]
            assert list(life.store.health.problems) == ["dead letters of group orders"]
        await life.advance(SECOND)
        assert life.in_log(b"DLQ") == [b"a"]
        assert life.store.health.problems == {}


@in_loop
async def test_a_problem_of_a_group_is_forgotten_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_writer.DeadLetterWriter, "_letter", lambda *_: 1 / 0)
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"))
        assert life.store.health.problems
        await life.do(life.broker.groups.delete(b"orders"))
        assert life.store.health.problems == {}


@in_loop
async def test_a_redrive_goes_on_while_the_topic_of_dead_letters_is_altered() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"bills.eu", b"b"))
        before = await life.do(life.broker.dead_letters())
        await life.do(life.broker.changes.alter(b"DLQ", partitions=2))
        assert await life.do(life.broker.dead_letters()) is before
        assert await life.redrive() == 2
        assert (life.in_log(b"orders"), life.in_log(b"bills")) == ([b"a", b"a"], [b"b", b"b"])


# ---- chosen


@pytest.mark.parametrize(
    ("wanted", "values"),
    [
        (DeadLetterFilter(), b"abcd"),
        (DeadLetterFilter(b"*.us"), b"c"),
        (DeadLetterFilter(group=b"bills"), b"b"),
        (DeadLetterFilter(group=b"nobody"), b""),
        (DeadLetterFilter(reason="BANK"), b"ab"),
        (DeadLetterFilter(reason="bank is away", group=b"orders"), b"a"),
        (DeadLetterFilter(partition=0, offsets=frozenset({1, 3, 9})), b"bd"),
        (DeadLetterFilter(partition=1), b""),
        (DeadLetterFilter(since_us=1), b"abcd"),
        (DeadLetterFilter(until_us=1), b""),
    ],
)
@in_loop
async def test_letters_are_chosen_by_every_condition(wanted: DeadLetterFilter, values: bytes) -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        for name, subject, value, reason in (
            (b"orders", b"orders.eu", b"a", "The bank is away"),
            (b"bills", b"bills.eu", b"b", "the BANK is closed"),
            (b"orders", b"orders.us", b"c", "TypeError: x"),
            (b"orders", b"orders.eu", b"d", ""),
        ):
            member = Recorder()
            group, joined = await life.join(name, name + b".>", member)
            await life.stored(subject, value)
            [message] = member.take()
            assert group.reject(message.place, message.offset, reason=reason)
            await life.settle()
            life.broker.groups.leave(group, joined)
        letters = await life.broker.dead_letters()
        assert letters is not None
        assert b"".join([letter.value async for letter in letters.list(wanted)]) == values
        times = {letter.value: letter.time_us for letter in await life.letters()}
        since = DeadLetterFilter(since_us=times[b"c"], until_us=times[b"d"] + 1)
        assert [letter.value async for letter in letters.list(since)] == [
            value for value, time_us in times.items() if time_us >= times[b"c"]
        ]


# ---- purged


@in_loop
async def test_a_purged_letter_is_gone_for_good() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"orders.us", b"b"), (b"orders.eu", b"c"))
        letters = await life.broker.dead_letters()
        assert letters is not None
        assert await life.do(letters.purge(DeadLetterFilter(b"*.eu"), 1)) == 1
        assert [letter.value for letter in await life.letters()] == [b"b", b"c"]
    async with Life(disk, settings=SETTINGS) as life:
        assert [letter.value for letter in await life.letters(redriven=True)] == [b"b", b"c"]
        assert await life.redrive() == 2
        assert life.in_log(b"orders")[3:] == [b"b", b"c"]
        assert [letter.value for letter in await life.letters(redriven=True)] == [b"b", b"c"]


@in_loop
async def test_it_is_remembered_which_letters_were_purged_and_which_redriven_however_many() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, *((b"orders.eu", b"%d" % number) for number in range(70)))
        letters = await life.broker.dead_letters()
        assert letters is not None
        for number in range(70):
            await life.do(letters.purge(count=1) if number % 2 else letters.redrive(count=1))
    async with Life(disk, settings=SETTINGS) as life:
        assert await life.letters() == []
        redriven = [int(letter.value) for letter in await life.letters(redriven=True)]
        assert redriven == list(range(0, 70, 2))
