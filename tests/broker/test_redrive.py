"""Dead letters that are redriven: to their subject or to their group, each once."""

from __future__ import annotations

import asyncio
import errno

import pytest

from penstock.broker import sources
from penstock.broker.broker import Settings
from penstock.errors import BadRequest, PenstockError, UnknownGroup
from penstock.log.policy import Policy
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.brokers import Life, Recorder, each_cut, in_loop, refuse
from tests.support.letters import DEADLINE, SETTINGS, die
from tests.support.sampling import covered

# ---- redriven


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


# ---- back to their group


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


# ---- interrupted


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
