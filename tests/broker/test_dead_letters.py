"""Dead letters: listed, looked at, and sent to their subject again, each once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import errno

import pytest

from penstock.broker import dead_letter_writer, sources
from penstock.broker.broker import Settings
from penstock.broker.cursor import Cursor
from penstock.broker.deadletters import DeadLetterFilter
from penstock.errors import BadRequest, PenstockError, ReadFailed, UnknownGroup
from penstock.log.policy import Policy
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.brokers import SECOND, Life, Recorder, each_cut, in_loop, refuse
from tests.support.sampling import covered

DEADLINE = 5 * SECOND
SETTINGS = Settings(policy=Policy(deliveries_max=1))
# Two groups, one on each topic. Both let everything die.
GROUPS = {b"orders": b"orders.>", b"bills": b"bills.>"}


async def die(life: Life, *messages: tuple[bytes, bytes], headers: bytes = b"") -> None:
    """Publish (subject, value), and let nobody acknowledge it."""
    for name, pattern in GROUPS.items():
        if name not in life.broker.groups:
            await life.do(life.broker.groups.create(name, pattern))
    for subject, value in messages:
        await life.stored(subject, value, headers=headers)
    for name, pattern in GROUPS.items():
        group, member = await life.join(name, pattern, Recorder())
        await life.advance(DEADLINE)
        life.broker.groups.leave(group, member)
    await life.settle()


# Listed and looked at


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
async def test_one_is_looked_at_by_its_place() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"orders.us", b"b"))
        letters = await life.broker.dead_letters()
        assert letters is not None
        for letter in await life.letters():
            assert await life.do(letters.peek(letter.partition, letter.offset)) == letter
        assert await life.do(letters.peek(0, 99)) is None


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
        await life.stored(b"DLQ.x", b"forged", headers=forged + b"Dead-Letter-" + name + b": not a .. number\r\n")
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
        await life.stored(b"DLQ.x", b"forged", headers=forged)
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


# Redriven


@in_loop
async def test_a_redriven_message_is_as_it_was_published() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        ann = Recorder()
        life.subscribe(b"orders.>", ann)
        await die(life, (b"orders.eu", b"a"), headers=b"Colour: red\r\nPenstock-Key: k\r\n")
        assert await life.redrive() == 1
        await life.settle()
        first, again = ann.got
        assert (again.subject, again.value, again.headers, again.key) == (
            b"orders.eu",
            b"a",
            b"Colour: red\r\nPenstock-Key: k\r\n",
            b"k",
        )
        assert again == first._replace(offset=again.offset)
        assert await life.letters() == []
        [letter] = await life.letters(redriven=True)
        assert letter.is_redriven


@in_loop
async def test_each_is_redriven_once() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"orders.us", b"b"))
        assert await life.redrive() == 2
        assert await life.redrive() == 0
        assert life.in_log(b"orders") == [b"a", b"b"] * 2
    async with Life(disk, settings=SETTINGS) as life:
        assert await life.letters() == []
        assert await life.redrive() == 0
        assert life.in_log(b"orders") == [b"a", b"b"] * 2


@in_loop
async def test_some_are_redriven_by_pattern_and_by_count() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        letters = [b"%c" % letter for letter in b"abcdef"]
        await die(life, *zip([b"orders.eu", b"orders.us"] * 3, letters, strict=True))
        assert await life.redrive(b"orders.us", 2) == 2
        assert life.in_log(b"orders")[6:] == [b"b", b"d"]
        assert await life.redrive(b"*.us") == 1
        assert await life.redrive(b"nothing.>") == 0
        assert await life.redrive(count=0) == 0
        assert [letter.value for letter in await life.letters()] == [b"a", b"c", b"e"]
        assert await life.redrive(count=99) == 3
        assert sorted(life.in_log(b"orders")[6:]) == letters


@in_loop
async def test_a_redriven_message_that_dies_again_is_a_dead_letter_again() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"))
        for _ in range(3):
            assert await life.redrive() == 1
            await die(life)
        assert len(life.in_log(b"DLQ")) == len(life.in_log(b"orders")) == 4
        assert len(await life.letters()) == 1


@in_loop
async def test_many_redrives_are_folded_and_nothing_is_forgotten() -> None:
    disk = FaultyFiles()
    many = 300
    values = [b"%d" % number for number in range(many)]
    kept = [values[3], *values[many - 20 :]]
    async with Life(disk, settings=SETTINGS) as life:
        await life.do(life.broker.groups.create(b"orders", b"orders.>"))
        for value in kept:
            await life.stored(b"orders.kept", value)
        await life.stored(b"orders.eu", *(value for value in values if value not in kept))
        await life.join(b"orders", b"orders.>", Recorder())
        await life.advance(DEADLINE)
        for _ in range(many - len(kept)):
            assert await life.redrive(b"orders.eu", count=1) == 1
        assert len(life.store.state.items("moved")) < 256
        await life.kill()
    async with Life(disk, settings=SETTINGS) as life:
        assert [letter.value for letter in await life.letters()] == kept
        assert await life.redrive() == len(kept)
        assert sorted(life.in_log(b"orders")[many:]) == sorted(values)


@in_loop
async def test_two_redrives_at_once_lose_nothing_and_double_nothing() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"orders.us", b"b"))
        await asyncio.gather(life.redrive(b"orders.eu"), life.redrive(b"orders.us"))
        await life.settle()
        assert sorted(life.in_log(b"orders")) == [b"a", b"a", b"b", b"b"]


@in_loop
async def test_the_same_redrive_twice_at_once_doubles_nothing() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"orders.us", b"b"))
        await asyncio.gather(life.redrive(), life.redrive())
        await life.settle()
        assert sorted(life.in_log(b"orders")) == [b"a", b"a", b"b", b"b"]


@in_loop
async def test_a_redrive_that_the_disk_refused_is_done_by_the_next() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"bills.eu", b"b"))
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        with pytest.raises(PenstockError):
            await life.redrive()
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
        done = await life.redrive_some()
        assert (done.count, done.skipped) == (1, 1)
        await life.redrive()
        assert life.in_log(b"orders") == [b"a", b"a"]
        assert life.in_log(b"bills") == [b"b", b"b"]


@in_loop
async def test_one_that_cannot_be_sent_anywhere_does_not_hold_up_the_others() -> None:
    """Its topic is gone, and none is made by itself."""
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"bills.eu", b"b"))
        await life.do(life.broker.changes.delete(b"orders"))
    async with Life(disk, settings=Settings(policy=Policy(deliveries_max=1), auto_create=False)) as life:
        with pytest.raises(PenstockError):
            await life.redrive(b"orders.>")
        await life.redrive(b"bills.>")
        assert life.in_log(b"bills") == [b"b", b"b"]


@in_loop
async def test_redriving_to_a_topic_that_is_refused_says_why() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"))
        refused = life.log(b"orders").segments[0].path
    refuse(disk, refused)
    async with Life(disk, settings=SETTINGS) as life:
        assert life.broker.refused == ["orders"]
        with pytest.raises(PenstockError, match=r"notes\.txt"):
            await life.redrive()


@in_loop
async def test_a_redrive_to_several_partitions_doubles_nothing_after_a_restart() -> None:
    """The last move is made once more at the next start, and must find its messages where it put them."""
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        await life.do(life.broker.groups.create(b"g", b"orders"))
        for value in (b"a", b"b"):
            await life.stored(b"orders", value)
        await life.join(b"g", b"orders", Recorder())
        await life.advance(DEADLINE)
        # Nobody takes them again, and lets them die once more.
        await life.do(life.broker.groups.delete(b"g"))
        assert await life.redrive() == 2
    async with Life(disk, settings=SETTINGS) as life:
        await life.redrive()
        stored = [value for number in range(3) for value in life.in_log(b"orders", number)]
        assert sorted(stored) == [b"a", b"a", b"b", b"b"]


@in_loop
async def test_a_redrive_doubles_nothing_when_partitions_are_added_afterwards() -> None:
    disk = FaultyFiles()
    values = [b"%d" % number for number in range(20)]
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, *((b"orders.%s" % value, value) for value in values))
        await life.redrive()
        await life.do(life.broker.changes.alter(b"orders", partitions=3))
    async with Life(disk, settings=SETTINGS) as life:
        await life.redrive()
        stored = [value for number in range(3) for value in life.in_log(b"orders", number)]
        assert sorted(stored) == sorted(values * 2)


@in_loop
async def test_a_redriven_message_does_not_come_back_from_a_topic_that_was_deleted() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"))
        await life.redrive()
        await life.do(life.broker.changes.delete(b"orders"))
    async with Life(disk, settings=SETTINGS) as life:
        await life.redrive()
        assert life.in_log(b"orders") == []


# Large ones


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


# Chosen


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


# Purged


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


# Back to their group


@in_loop
async def test_a_letter_that_goes_to_its_group_reaches_nobody_else() -> None:
    disk = FaultyFiles()
    async with Life(disk, settings=SETTINGS) as life:
        everybody, other = Recorder(), Recorder()
        await die(life, (b"orders.eu", b"a"), (b"orders.us", b"b"))
        life.subscribe(b"orders.>", everybody)
        await life.join(b"other", b"orders.>", other)
        assert await life.redrive(b"*.eu", to_group=True) == 1
        assert [letter.value for letter in await life.letters()] == [b"b"]
        assert [letter.value for letter in await life.letters(redriven=True)] == [b"a", b"b"]
    async with Life(disk, settings=SETTINGS) as life:
        ann = Recorder()
        group, _ = await life.join(b"orders", b"orders.>", ann)
        [message] = ann.take()
        assert (message.value, message.attempts, message.offset) == (b"a", 1, 0)
        assert group.ack(message.place, message.offset, Outcome())
        await life.settle()
        assert (group.lag(), life.in_log(b"orders")) == (0, [b"a", b"b"])
        assert (everybody.got, other.got) == ([], [])
        assert await life.redrive(b"*.eu", to_group=True) == 0


@in_loop
async def test_one_that_fails_again_after_it_went_to_its_group_is_a_dead_letter_again() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"))
        assert await life.redrive(to_group=True) == 1
        await die(life)
        [letter] = await life.letters()
        assert (letter.offset, letter.value, letter.attempts) == (1, b"a", 1)


@in_loop
async def test_a_letter_cannot_go_to_a_group_that_is_gone_or_a_message_that_is_another_one() -> None:
    async with Life(FaultyFiles(), settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"bills.eu", b"b"))
        await life.do(life.broker.changes.delete(b"orders"))
        with pytest.raises(BadRequest, match="not a shared group that reads orders"):
            await life.redrive(b"orders.>", to_group=True)
        await life.stored(b"orders.eu", b"another one")
        with pytest.raises(BadRequest, match="not in its topic any more"):
            await life.redrive(b"orders.>", to_group=True)
        await life.do(life.broker.groups.delete(b"bills"))
        with pytest.raises(UnknownGroup):
            await life.redrive(b"bills.>", to_group=True)
        assert len(await life.letters()) == 2
        assert await life.redrive() == 2


@in_loop
async def test_giving_letters_back_that_is_cut_anywhere_loses_nothing() -> None:
    """A letter is listed still, or its group has its message again: never neither."""

    async def give_back(life: Life) -> None:
        await life.redrive(to_group=True)

    given_back = 0
    async for disk, clock, cut in each_cut(prepare_letters, give_back, settings=SETTINGS):
        print(f"cut {cut}, which is the seed too")
        async with Life(disk, clock=clock, settings=SETTINGS) as life:
            listed = {letter.value for letter in await life.letters()}
            back = [
                await life.do(position.partition.cursor(offset).read_message())
                for group in life.broker.groups
                for position in group.positions.values()
                for offset in position.inflight.back(life.clock.monotonic_us(), 10)
            ]
            pending = {value for run in back if run is not None for value in run.values}
            assert (listed | pending, listed & pending) == ({b"a", b"b", b"c"}, set())
            given_back += bool(pending)
    assert covered(given_back)


# Interrupted


async def prepare_letters(disk: FaultyFiles, clock: ManualClock) -> None:
    async with Life(disk, clock=clock, settings=SETTINGS) as life:
        await die(life, (b"orders.eu", b"a"), (b"bills.eu", b"b"), (b"orders.us", b"c"))
        assert len(await life.letters()) == 3


async def redrive_all(life: Life) -> None:
    await life.redrive()


async def redrive_one_by_one(life: Life) -> None:
    for _ in range(3):
        await life.redrive(count=1)


@pytest.mark.parametrize("work", [redrive_all, redrive_one_by_one])
@in_loop
async def test_a_redrive_that_is_cut_anywhere_and_called_again_loses_nothing_and_doubles_nothing(work: object) -> None:
    assert work in (redrive_all, redrive_one_by_one)
    chosen = redrive_all if work is redrive_all else redrive_one_by_one
    redriven_by_the_first = 0
    async for disk, clock, cut in each_cut(prepare_letters, chosen, settings=SETTINGS):
        print(f"cut {cut}, which is the seed too")
        async with Life(disk, clock=clock, settings=SETTINGS) as life:
            redriven_by_the_first += len(life.in_log(b"orders")) + len(life.in_log(b"bills")) > 3
            await life.redrive()
            assert life.in_log(b"bills") == [b"b", b"b"]
            assert sorted(life.in_log(b"orders")) == [b"a", b"a", b"c", b"c"]
            assert await life.letters() == []
    assert covered(redriven_by_the_first)


@in_loop
async def test_a_redrive_that_is_cut_again_and_again_comes_to_its_end() -> None:
    """Each life gets a little further than the last one, and is cut again."""
    for step in (1, 2, 3, 5):
        clock = ManualClock()
        disk = FaultyFiles(seed=step)
        await prepare_letters(disk, clock)
        lives = 0
        while True:
            lives += 1
            disk.cut_after = disk.calls + step * lives
            try:
                async with Life(disk, clock=clock, settings=SETTINGS) as life:
                    await life.redrive()
                break
            except PowerCut:
                disk = disk.power_cut()
        print(f"seed and step {step}: {lives} lives")
        assert lives > 3
        disk.heal()
        async with Life(disk, clock=clock, settings=SETTINGS) as life:
            assert life.in_log(b"bills") == [b"b", b"b"]
            assert sorted(life.in_log(b"orders")) == [b"a", b"a", b"c", b"c"]


@in_loop
async def test_a_redrive_that_is_killed_anywhere_loses_nothing_and_doubles_nothing() -> None:
    """The process ends after so many calls to the disk, which has what was written."""
    calls = 0
    while True:
        clock = ManualClock()
        disk = FaultyFiles(seed=calls)
        await prepare_letters(disk, clock)
        async with Life(disk, clock=clock, settings=SETTINGS) as life:
            before = disk.calls
            work = asyncio.create_task(life.redrive())
            while disk.calls < before + calls and not work.done():
                await asyncio.sleep(0)
            is_done = work.done()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await life.kill()
        async with Life(disk, clock=clock, settings=SETTINGS) as life:
            await life.redrive()
            assert life.in_log(b"bills") == [b"b", b"b"], calls
            assert sorted(life.in_log(b"orders")) == [b"a", b"a", b"c", b"c"], calls
        if is_done:
            break
        calls += 1
    assert calls > 3


async def prepare_dying(disk: FaultyFiles, clock: ManualClock) -> None:
    async with Life(disk, clock=clock, settings=SETTINGS) as life:
        await life.do(life.broker.groups.create(b"orders", b"orders.>"))
        for value in (b"a", b"b", b"c"):
            await life.stored(b"orders.eu", value)


async def let_die(life: Life) -> None:
    ann = Recorder()
    group, _ = await life.join(b"orders", b"orders.>", ann)
    second = ann.got[1]
    assert group.reject(second.place, second.offset)
    await life.settle()
    await life.advance(DEADLINE)


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({}, id="one batch"),
        pytest.param({"DECISION_BYTES_MAX": 1}, id="several decisions"),
        pytest.param({"PART_BYTES": 1}, id="one decision in parts"),
    ],
)
@in_loop
async def test_dying_that_is_cut_anywhere_leaves_each_dead_letter_once(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(sources, name, value)
    some = 0
    async for disk, clock, cut in each_cut(prepare_dying, let_die, settings=SETTINGS):
        print(f"cut {cut}, which is the seed too")
        async with Life(disk, clock=clock, settings=SETTINGS) as life:
            some += bool(life.in_log(b"DLQ"))
            ann = Recorder()
            await life.join(b"orders", b"orders.>", ann)
            await life.advance(DEADLINE)
            assert sorted(letter.value for letter in await life.letters()) == [b"a", b"b", b"c"]
            await life.advance(100 * DEADLINE)
            assert len(life.in_log(b"DLQ")) == 3
    assert some
