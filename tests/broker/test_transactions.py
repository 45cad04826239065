"""Transactions in the broker: all of one can be read, or nothing, whatever happens to the disk and the power."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import Any

import pytest

from penstock.broker import dedup_windows
from penstock.broker import opened as opened_batches
from penstock.errors import (
    AppendFailed,
)
from penstock.log import handover
from penstock.log.policy import Policy
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.brokers import Life, Recorder, each_cut, in_loop
from tests.support.sampling import covered
from tests.support.transactions import (
    FLUSH,
    FSYNC,
    JOB,
    _path,
    batch_of,
    commit,
    make_topics,
    opened,
    stage,
    stage_batch,
)

# What readers see


@in_loop
async def test_what_is_staged_is_read_when_it_is_committed_and_not_before() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC, bills=FLUSH)
        sink = Recorder()
        life.subscribe(b">", sink)
        offsets = [await stage(life, b"orders", b"1", b"2"), await stage(life, b"bills", b"x")]
        await life.settle()
        assert (life.in_log(b"orders"), life.in_log(b"bills"), sink.values) == ([], [], [])

        assert await commit(life, offsets)

        await life.settle()
        assert (life.in_log(b"orders"), life.in_log(b"bills")) == ([b"1", b"2"], [b"x"])
        assert sorted(sink.values) == [b"1", b"2", b"x"]


@in_loop
async def test_nobody_sees_a_part_of_it() -> None:
    """Looked at in every turn of the loop, with others who publish to the same topics meanwhile."""
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC, bills=FLUSH, notes=FSYNC)
        topics = (b"orders", b"bills", b"notes")
        seen: set[tuple[bool, ...]] = set()
        is_over = False

        async def look() -> None:
            while not is_over:
                seen.add(tuple(b"in" in life.in_log(topic) for topic in topics))
                await asyncio.sleep(0)

        async def disturb() -> None:
            number = 0
            while not is_over:
                number += 1
                await life.publish(topics[number % 3], b"out")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(look())
            tasks.create_task(disturb())
            for number in range(5):
                offsets = [await stage(life, topic, b"in", number=number) for topic in topics]
                assert await commit(life, offsets, number=number)
                if number == 0:
                    assert seen <= {(False, False, False), (True, True, True)}
            is_over = True
        await life.settle()
        assert [life.in_log(topic).count(b"in") for topic in topics] == [5, 5, 5]


@pytest.mark.parametrize("held_bytes", [0, 300, 1 << 20])
@in_loop
async def test_one_that_is_too_large_for_memory_is_delivered_from_the_disk(
    held_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "HELD_BYTES", held_bytes)
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        early, late, other = Recorder(), Recorder(), Recorder()
        life.subscribe(b"orders.>", other)
        life.subscribe(b"orders", early)
        await life.stored(b"orders", b"before")
        offsets = [await stage(life, b"orders", b"%d" % number) for number in range(20)]
        committing = asyncio.ensure_future(commit(life, offsets))
        while not life.log(b"orders").end > 1:
            await asyncio.sleep(0)
        between = asyncio.ensure_future(life.publish(b"orders", b"between"))
        life.subscribe(b"orders", late)
        await committing
        await between
        await life.stored(b"orders", b"after")
        everything = life.in_log(b"orders")
        assert sorted(everything) == sorted([b"before", *(b"%d" % n for n in range(20)), b"between", b"after"])
        assert early.values == everything
        # What was on its way when it came is not for it.
        assert late.values[-2:] == [b"between", b"after"] or late.values == [b"after"]
        assert other.values == []


@in_loop
async def test_in_a_partition_it_has_the_order_that_was_given() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        first, second = await stage(life, b"orders", b"1"), await stage(life, b"orders", b"2")

        await commit(life, [second, first])

        assert life.in_log(b"orders") == [b"2", b"1"]


@in_loop
async def test_what_was_staged_and_not_named_is_not_stored() -> None:
    """A task that failed has staged as well."""
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        await stage(life, b"orders", b"failed")
        offset = await stage(life, b"orders", b"again")

        await commit(life, [offset])

        await life.settle()
        assert life.in_log(b"orders") == [b"again"]


@in_loop
async def test_messages_of_a_transaction_are_known_by_their_ids() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.open_transactions())
        await life.stored(b"orders", b"before", headers=b"Msg-ID: 0\r\n")
        offset = await stage_batch(life, b"orders", batch_of(b"1", headers=b"Msg-ID: 1\r\n"))
        await commit(life, [offset])

        receipt = await life.stored(b"orders", b"again", headers=b"Msg-ID: 1\r\n")

        assert receipt.stored() == [(b"orders", 0, 1, True)]
        assert life.in_log(b"orders") == [b"before", b"1"]


@in_loop
async def test_the_ids_of_a_large_batch_are_read_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    read = dedup_windows._read_identities

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return read(*given)

    monkeypatch.setattr(dedup_windows, "_read_identities", watched)
    monkeypatch.setattr(opened_batches, "LARGE_MESSAGES", 5)
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.open_transactions())
        await life.stored(b"orders", b"before", headers=b"Msg-ID: 0\r\n")
        offset = await stage_batch(life, b"orders", batch_of(*[b"x"] * 10, headers=b"Msg-ID: 1\r\n"))
        threads.clear()
        assert await commit(life, [offset])

        assert [thread is threading.current_thread() for thread in threads] == [False]
        assert (await life.stored(b"orders", b"again", headers=b"Msg-ID: 1\r\n")).duplicates


# Once


@in_loop
async def test_a_number_that_was_committed_is_not_committed_again() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await make_topics(life, orders=FSYNC)
        assert await commit(life, [await stage(life, b"orders", b"1", number=3)], number=3)
        assert await stage(life, b"orders", b"again", number=3) == -1
        assert not await commit(life, [], number=3)
        assert not await commit(life, [], number=2)
    async with Life(disk) as life:
        assert await stage(life, b"orders", b"again", number=3) == -1
        assert not await commit(life, [], number=3)
        assert await commit(life, [await stage(life, b"orders", b"2", number=4)], number=4)
        assert life.in_log(b"orders") == [b"1", b"2"]


@in_loop
async def test_two_who_commit_the_same_at_once_commit_it_once() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        offset = await stage(life, b"orders", b"1")
        both = await asyncio.gather(*(opened(life).commit(JOB, 0, [offset]) for _ in range(2)))
        assert both == [True, True]
        await life.settle()
        assert life.in_log(b"orders") == [b"1"]


@pytest.mark.parametrize("policy", [FSYNC, FLUSH])
@in_loop
async def test_all_or_nothing_though_the_power_is_cut_anywhere(policy: Policy) -> None:
    """And whoever was told that it is committed finds it; who was not commits it again."""
    told: list[bool] = []

    async def prepare(disk: FaultyFiles, clock: ManualClock) -> None:
        told.append(False)
        async with Life(disk, clock=clock) as life:
            await make_topics(life, orders=policy, bills=FSYNC)
            await life.stored(b"orders", b"before")

    async def work(life: Life) -> None:
        offsets = [await stage(life, b"orders", b"1", b"2"), await stage(life, b"bills", b"x")]
        told[-1] = await commit(life, offsets)

    seen = set()
    async for disk, clock, cut in each_cut(prepare, work):
        print(f"cut {cut}, which is the seed too")
        async with Life(disk, clock=clock) as life:
            orders = [value for value in life.in_log(b"orders") if value != b"before"]
            bills = life.in_log(b"bills")
            assert (orders, bills) in (([], []), ([b"1", b"2"], [b"x"]))
            seen.add(bool(bills))
            assert bills or not told[-1]
            offsets = [await stage(life, b"orders", b"1", b"2"), await stage(life, b"bills", b"x")]
            assert await commit(life, [offset for offset in offsets if offset >= 0]) == (not bills)
            await life.settle()
            assert [value for value in life.in_log(b"orders") if value != b"before"] == [b"1", b"2"]
            assert life.in_log(b"bills") == [b"x"]
            await life.kill()
        async with Life(disk, clock=clock) as life:
            assert life.in_log(b"orders")[-2:] == [b"1", b"2"]
            assert life.in_log(b"bills") == [b"x"]
    assert covered(seen == {False, True})


@in_loop
async def test_it_is_done_once_though_the_power_is_cut_again_and_again() -> None:
    for step in (1, 2, 3, 5):
        clock, disk = ManualClock(), FaultyFiles(seed=step)
        async with Life(disk, clock=clock) as life:
            await make_topics(life, orders=FLUSH, bills=FSYNC)
            offsets = [await stage(life, topic, topic) for topic in (b"orders", b"bills") for _ in range(3)]
            await life.settle()
            disk.fail("write", errno.ENOSPC, times=100, path_suffix=_path(life, b"bills"))
            with pytest.raises(AppendFailed):
                await commit(life, offsets)
            disk.heal()
            await life.kill()
        lives = 0
        while True:
            lives += 1
            disk.cut_after = disk.calls + step * lives
            try:
                async with Life(disk, clock=clock) as life:
                    await life.settle()
                break
            except PowerCut:
                disk = disk.power_cut()
        print(f"seed and step {step}: {lives} lives")
        assert lives > 2
        disk.heal()
        async with Life(disk, clock=clock) as life:
            assert life.in_log(b"orders") == [b"orders"] * 3
            assert life.in_log(b"bills") == [b"bills"] * 3
