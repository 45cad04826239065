"""Messages for later: stored at once, appended to their topic when they are due, once, whatever happens meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from penstock.broker import delay
from penstock.broker.broker import Settings
from penstock.broker.delay import Delayed, DelayedFilter
from penstock.errors import BadHeader, Overloaded, PenstockError
from penstock.log.policy import Durability, Policy
from penstock.model.run import Run
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.brokers import SECOND, Life, Recorder, each_cut, in_loop, refuse, run_of
from tests.support.sampling import covered

# What ManualClock begins with, as a time of day.
START_ISO = "2023-11-14T22:13:20"
MILLISECOND = 1000
HOUR = 3600 * SECOND


# When


@pytest.mark.parametrize(
    ("header", "due_us"),
    [
        ("Delay: 5", 5 * SECOND),
        ("Delay: 5s", 5 * SECOND),
        ("Delay: 0.5s", SECOND // 2),
        ("delay:500ms", 500 * MILLISECOND),
        ("DELAY: 2m  ", 120 * SECOND),
        ("Delay: 1h", HOUR),
        ("Delay: 1d", 24 * HOUR),
        ("Deliver-At: 1700000010", 10 * SECOND),
        ("Deliver-At: 1700000000.25", SECOND // 4),
        (f"Deliver-At: {START_ISO[:-2]}30Z", 10 * SECOND),
        (f"Deliver-At: {START_ISO[:-2]}30", 10 * SECOND),
        ("Deliver-At: 2023-11-15T00:13:30+02:00", 10 * SECOND),
    ],
)
@in_loop
async def test_a_message_is_appended_when_it_is_due_and_not_before(header: str, due_us: int) -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a", headers=header.encode() + b"\r\n")
        await life.advance(due_us - 1)
        assert life.in_log(b"orders") == []
        # What is due within 5 ms goes together.
        await life.advance(5 * MILLISECOND)
        assert life.in_log(b"orders") == [b"a"]
        await life.advance(1000 * HOUR)
        assert life.in_log(b"orders") == [b"a"]


@pytest.mark.parametrize(
    "header",
    ["Delay: 0", "Deliver-At: 1", f"Deliver-At: {START_ISO}Z", "Deliver-At: 1970-01-01", "Deliver-At: -5"],
)
@in_loop
async def test_what_is_due_already_is_appended_at_once(header: str) -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a", headers=header.encode() + b"\r\n")
        assert life.in_log(b"orders") == [b"a"]


@pytest.mark.parametrize(
    "header",
    [
        "Delay: soon",
        "Delay:",
        "Delay: -5s",
        "Delay: 5 s",
        "Delay: 5w",
        "Delay: 1e3",
        "Delay: 367d",
        "Delay: 999999999999d",
        "Deliver-At: tomorrow",
        "Deliver-At:",
        "Deliver-At: nan",
        "Deliver-At: inf",
        "Deliver-At: 1e300",
        "Deliver-At: 9999-12-31T23:59:59Z",
        "Deliver-At: 2024-13-01",
        "Deliver-At: 1700000010000",
    ],
)
@in_loop
async def test_a_time_that_is_none_or_too_far_away_is_refused(header: str) -> None:
    async with Life(FaultyFiles()) as life:
        receipt = await life.publish(b"orders", b"a", headers=header.encode() + b"\r\n")
        assert isinstance(receipt.error, BadHeader)
        assert len(life.broker.delays or ()) == 0
        assert life.in_log(b"orders") == []


@in_loop
async def test_they_are_appended_in_the_order_in_which_they_are_due() -> None:
    async with Life(FaultyFiles()) as life:
        for value in (b"3", b"1", b"2"):
            await life.stored(b"orders", value, headers=b"Delay: %ss\r\n" % value)
        for _ in range(4):
            await life.advance(SECOND)
        assert life.in_log(b"orders") == [b"1", b"2", b"3"]


@in_loop
async def test_those_that_are_overdue_are_appended_in_the_order_in_which_they_were_due() -> None:
    """As after a restart, or when the loop was busy for a moment."""
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock) as life:
        for value in (b"3", b"1", b"2"):
            await life.stored(b"orders", value, headers=b"Delay: %ss\r\n" % value)
    clock.advance(HOUR)
    async with Life(disk, clock=clock) as life:
        await life.settle()
        assert life.in_log(b"orders") == [b"1", b"2", b"3"]


# What


@in_loop
async def test_nobody_gets_it_before_it_is_due() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob, everything = Recorder(), Recorder(), Recorder()
        life.subscribe(b"orders", ann)
        life.subscribe(b">", everything)
        await life.join(b"g", b">", bob)
        await life.stored(b"orders", b"a", headers=b"Delay: 5s\r\n")
        assert (ann.got, bob.got, everything.got) == ([], [], [])
        await life.advance(5 * SECOND)
        assert ann.values == bob.values == everything.values == [b"a"]


@in_loop
async def test_it_is_as_it_was_published_but_for_the_header_that_delayed_it() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        life.subscribe(b"orders.>", ann)
        block = b"Colour: red\r\nDelay: 5s\r\nPenstock-Key: k\r\nDelayed-By: nobody\r\nPenstock-Due-Date: never\r\n"
        run = run_of(b"orders.eu", b"a", headers=block)
        run.replies[0] = b"_INBOX.1"
        await life.publish_run(run)
        await life.settle()
        await life.advance(5 * SECOND)
        message = ann.got[-1]
        assert (message.subject, message.value, message.key) == (b"orders.eu", b"a", b"k")
        assert message.headers.splitlines() == [
            b"Colour: red",
            b"Penstock-Key: k",
            b"Delayed-By: nobody",
            b"Penstock-Due-Date: never",
        ]


@pytest.mark.parametrize("due", [b"x", b"1", b"99999999999999999999"])
@in_loop
async def test_a_header_of_the_brokers_own_that_somebody_sends_does_no_harm(due: bytes) -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock) as life:
        await life.stored(b"orders", b"a", headers=b"Penstock-Due: " + due + b"\r\nDelay: 5s\r\n")
        await life.stored(b"orders", b"b", headers=b"Delay: 5s\r\n")
        assert life.in_log(b"orders") == []
    async with Life(disk, clock=clock) as life:
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == [b"a", b"b"]


@in_loop
async def test_one_run_may_have_messages_for_now_and_for_later() -> None:
    async with Life(FaultyFiles()) as life:
        run = Run([b"orders", b"orders.eu", b"bills", b"orders"], [b"a", b"b", b"c", b"d"])
        run.headers = {1: b"Delay: 1s\r\n", 2: b"Delay: 1s\r\n"}
        receipt = await life.publish_run(run)
        await life.settle()
        assert receipt.error is None
        assert (life.in_log(b"orders"), life.in_log(b"bills")) == ([b"a", b"d"], [])
        await life.advance(SECOND)
        assert (life.in_log(b"orders"), life.in_log(b"bills")) == ([b"a", b"d", b"b"], [b"c"])


@in_loop
async def test_it_is_stored_before_its_publisher_is_told() -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock) as life:
        receipt = await life.publish(b"orders", b"a", headers=b"Delay: 5s\r\n")
        assert receipt.error is None
        disk = await life.power_cut()
    async with Life(disk, clock=clock) as life:
        assert len(life.broker.delays or ()) == 1
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == [b"a"]


@in_loop
async def test_its_publisher_is_told_if_it_cannot_be_stored() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        delays = life.broker.delays
        assert delays is not None
        disk.fail("write", errno.ENOSPC, path_suffix=str(delays.partition.log.segments[0].path))
        receipt = await life.publish(b"orders", b"a", headers=b"Delay: 5s\r\n")
        assert receipt.error is not None
        assert len(delays) == 0
        await life.stored(b"orders", b"b", headers=b"Delay: 5s\r\n")
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == [b"b"]


@in_loop
async def test_no_more_than_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay, "DELAYED_MAX", 3)
    async with Life(FaultyFiles()) as life:
        for number in range(3):
            await life.stored(b"orders", b"%d" % number, headers=b"Delay: 5s\r\n")
        receipt = await life.publish(b"orders", b"x", headers=b"Delay: 5s\r\n")
        assert isinstance(receipt.error, Overloaded)
        await life.stored(b"orders", b"now", headers=b"Colour: red\r\n")
        await life.advance(5 * SECOND)
        await life.stored(b"orders", b"y", headers=b"Delay: 5s\r\n")
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == [b"now", b"0", b"1", b"2", b"y"]


@in_loop
async def test_more_than_go_together_are_all_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay, "_MOVE_MAX", 7)
    async with Life(FaultyFiles()) as life:
        values = [b"%d" % number for number in range(50)]
        await life.stored(b"orders", *values, headers=b"Delay: 5s\r\n")
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == values
        assert len(life.broker.delays or ()) == 0


@in_loop
async def test_one_that_is_stored_while_others_are_moved_is_not_late() -> None:
    """Whoever is woken while he is busy must look again."""
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"first", headers=b"Delay: 1s\r\n")
        delays = life.broker.delays
        assert delays is not None
        life.clock.advance(SECOND)
        run = run_of(b"orders", b"second", headers=b"Delay: 1s\r\n")
        move = delays._mover.move

        async def move_slowly(offsets: Sequence[int], *, retry: bool = False) -> dict[int, PenstockError]:
            failed = await move(offsets, retry=retry)
            await life.offer(run)
            return failed

        delays._mover.move = move_slowly  # type: ignore[method-assign]
        delays._woken.set()
        await life.settle()
        delays._mover.move = move  # type: ignore[method-assign]
        assert life.in_log(b"orders") == [b"first"]
        await life.advance(SECOND + 5 * MILLISECOND)
        assert life.in_log(b"orders") == [b"first", b"second"]


# Where


@in_loop
async def test_one_that_cannot_be_appended_does_not_hold_up_the_others() -> None:
    """Its topic was deleted, and none is made by itself."""
    async with Life(FaultyFiles(), settings=Settings(auto_create=False)) as life:
        for name in (b"gone", b"orders"):
            await life.do(life.broker.changes.create(name))
            await life.stored(name, b"a", headers=b"Delay: 5s\r\n")
        await life.do(life.broker.changes.delete(b"gone"))
        for _ in range(10):
            await life.advance(SECOND)
        assert life.in_log(b"orders") == [b"a"]


@in_loop
async def test_one_for_a_topic_that_is_refused_waits_and_does_not_hold_up_the_others() -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock) as life:
        for name in (b"damaged", b"orders"):
            await life.stored(name, b"a")
            await life.stored(name, b"b", headers=b"Delay: 5s\r\n")
        refused = life.log(b"damaged").segments[0].path
    stray = refuse(disk, refused)
    async with Life(disk, clock=clock) as life:
        assert life.broker.refused == ["damaged"]
        await life.advance(5 * SECOND)
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == [b"a", b"b"]
    disk.remove(stray)
    async with Life(disk, clock=clock) as life:
        await life.advance(5 * SECOND)
        assert life.in_log(b"damaged") == [b"a", b"b"]


@in_loop
async def test_one_that_was_appended_is_not_appended_to_another_partition_after_a_restart() -> None:
    """The last move is made once more at the next start, and must find its messages where it put them."""
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        await life.stored(b"orders", b"a")
        await life.stored(b"orders", b"b", headers=b"Delay: 5s\r\n")
        await life.advance(5 * SECOND)
    for _ in range(3):
        async with Life(disk) as life:
            await life.settle()
            stored = [value for number in range(3) for value in life.in_log(b"orders", number)]
            assert sorted(stored) == [b"a", b"b"]


@in_loop
async def test_one_that_was_appended_does_not_come_back_after_its_topic_was_deleted() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"a", headers=b"Delay: 5s\r\n")
        await life.advance(5 * SECOND)
        await life.do(life.broker.changes.delete(b"orders"))
    async with Life(disk) as life:
        await life.settle()
        assert life.in_log(b"orders") == []


@in_loop
async def test_while_the_disk_is_full_they_wait() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"now")
        await life.stored(b"orders", b"a", b"b", headers=b"Delay: 5s\r\n")
        for suffix in ("topics/0/0/" + "0" * 20 + ".log", str(life.log(b"orders").segments[0].path)):
            disk.fail("write", errno.ENOSPC, times=2, path_suffix=suffix)
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == [b"now"]
        for _ in range(6):
            await life.advance(SECOND)
        assert life.in_log(b"orders") == [b"now", b"a", b"b"]


# Interrupted


async def prepare_delayed(disk: FaultyFiles, clock: ManualClock) -> None:
    async with Life(disk, clock=clock) as life:
        await life.stored(b"orders", b"now")
        for number in range(4):
            await life.stored(b"orders.eu", b"%d" % number, headers=b"Delay: %ds\r\n" % (number // 2 + 1))
        await life.stored(b"bills", b"x", headers=b"Delay: 1s\r\nColour: red\r\n")


async def let_pass(life: Life) -> None:
    await life.advance(SECOND)
    await life.advance(SECOND)


@in_loop
async def test_they_are_appended_once_wherever_the_power_is_cut() -> None:
    some = 0
    async for disk, clock, cut in each_cut(prepare_delayed, let_pass):
        print(f"cut {cut}, which is the seed too")
        async with Life(disk, clock=clock) as life:
            some += len(life.in_log(b"orders")) > 1
            await life.advance(HOUR)
            assert life.in_log(b"orders") == [b"now", b"0", b"1", b"2", b"3"]
            assert life.in_log(b"bills") == [b"x"]
            await life.kill()
        async with Life(disk, clock=clock) as life:
            await life.advance(HOUR)
            assert life.in_log(b"orders") == [b"now", b"0", b"1", b"2", b"3"]
            assert life.in_log(b"bills") == [b"x"]
    assert covered(some)


@in_loop
async def test_they_are_appended_once_though_the_power_is_cut_again_and_again() -> None:
    for step in (1, 2, 3, 5):
        clock = ManualClock()
        disk = FaultyFiles(seed=step)
        await prepare_delayed(disk, clock)
        clock.advance(HOUR)
        lives = 0
        while True:
            lives += 1
            disk.cut_after = disk.calls + step * lives
            try:
                async with Life(disk, clock=clock) as life:
                    await life.advance(SECOND)
                break
            except PowerCut:
                disk = disk.power_cut()
        print(f"seed and step {step}: {lives} lives")
        assert lives > 2
        disk.heal()
        async with Life(disk, clock=clock) as life:
            await life.advance(SECOND)
            assert sorted(life.in_log(b"orders")) == [b"0", b"1", b"2", b"3", b"now"]
            assert life.in_log(b"bills") == [b"x"]


@in_loop
async def test_a_delayed_message_that_was_told_stored_is_there_wherever_the_power_is_cut() -> None:
    cuts = told = 0
    while True:
        clock = ManualClock()
        disk = FaultyFiles(seed=cuts)
        async with Life(disk, clock=clock):
            pass
        disk.cut_after = disk.calls + cuts
        stored: list[bytes] = []
        try:
            async with Life(disk, clock=clock) as life:
                for number in range(5):
                    await life.stored(b"orders", b"%d" % number, headers=b"Delay: 1s\r\n")
                    stored.append(b"%d" % number)
            break
        except PowerCut:
            disk = disk.power_cut()
        async with Life(disk, clock=clock) as life:
            await life.advance(SECOND + 5 * MILLISECOND)
            there = life.in_log(b"orders")
            assert there[: len(stored)] == stored, cuts
            assert len(there) <= len(stored) + 1
        told += bool(stored)
        cuts += 1
    assert cuts > told > 3


@in_loop
async def test_under_flush_they_are_appended_once_after_a_kill() -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    settings = Settings(policy=Policy(durability=Durability.FLUSH))
    async with Life(disk, clock=clock, settings=settings) as life:
        await life.stored(b"orders", b"a", headers=b"Delay: 1s\r\n")
        await life.advance(SECOND)
        assert life.in_log(b"orders") == [b"a"]
        await life.kill()
    async with Life(disk, clock=clock, settings=settings) as life:
        await life.advance(SECOND)
        assert life.in_log(b"orders") == [b"a"]


# Listed and cancelled


async def waiting(life: Life, *wanted: DelayedFilter) -> list[Delayed]:
    async def find() -> list[Delayed]:
        assert life.broker.delays is not None
        return [message async for message in life.broker.delays.find(*wanted)]

    return await life.do(find())


async def cancel(life: Life, wanted: DelayedFilter) -> int:
    assert life.broker.delays is not None
    return await life.do(life.broker.delays.cancel(wanted))


@in_loop
async def test_what_waits_is_listed_in_the_order_in_which_it_is_due() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders.eu", b"late", headers=b"Delay: 2h\r\nColour: red\r\nPenstock-Key: k\r\n")
        await life.stored(b"orders.us", b"soon", headers=b"Delay: 1h\r\nMsg-ID: 7\r\n")
        soon, late = await waiting(life)
        assert (soon.value, soon.subject, soon.message_id, soon.key) == (b"soon", b"orders.us", b"7", None)
        assert (late.value, late.key, late.headers) == (b"late", b"k", b"Colour: red\r\nPenstock-Key: k\r\n")
        assert late.due_us - soon.due_us == HOUR
        assert await waiting(life, DelayedFilter(b"*.eu")) == [late]
        assert await waiting(life, DelayedFilter(message_id=b"7")) == [soon]
        assert await waiting(life, DelayedFilter(offsets=frozenset({late.offset, 99}))) == [late]
        await life.advance(HOUR + SECOND)
        assert await waiting(life) == [late]


@in_loop
async def test_a_cancelled_message_is_never_published_also_not_after_a_restart() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        for value in (b"a", b"b", b"c"):
            await life.stored(b"orders", value, headers=b"Delay: 1h\r\nMsg-ID: %b\r\n" % value)
        assert await cancel(life, DelayedFilter(message_id=b"b")) == 1
        assert await cancel(life, DelayedFilter(message_id=b"b")) == 0
        assert life.broker.delays is not None
        assert len(life.broker.delays) == 2
    async with Life(disk) as life:
        assert [message.value for message in await waiting(life)] == [b"a", b"c"]
        assert await cancel(life, DelayedFilter(b"bills")) == 0
        await life.advance(HOUR + SECOND)
        assert life.in_log(b"orders") == [b"a", b"c"]
        assert await cancel(life, DelayedFilter()) == 0


@in_loop
async def test_a_cancellation_that_is_cut_anywhere_cancels_all_or_nothing() -> None:
    async def prepare(disk: FaultyFiles, clock: ManualClock) -> None:
        async with Life(disk, clock=clock) as life:
            for value in (b"a", b"b"):
                await life.stored(b"orders", value, headers=b"Delay: 1h\r\n")

    async def work(life: Life) -> None:
        await cancel(life, DelayedFilter())

    outcomes = set()
    async for disk, clock, cut in each_cut(prepare, work):
        print(f"cut {cut}, which is the seed too")
        async with Life(disk, clock=clock) as life:
            left = [message.value for message in await waiting(life)]
            outcomes.add(len(left))
            await life.advance(HOUR + SECOND)
            assert life.in_log(b"orders") == left
    assert outcomes <= {0, 2}
    assert covered(2 in outcomes)
