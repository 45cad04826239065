"""Transactions in the broker: all of one can be read, or nothing, whatever happens to the disk and the power."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Sequence
from typing import Any, Final

import pytest

from penstock.awaiting import settled
from penstock.broker import changes, dedup_windows, transactions
from penstock.broker import opened as opened_batches
from penstock.broker.partition import Partition
from penstock.errors import (
    AppendFailed,
    BadRequest,
    BrokerError,
    LogFailed,
    Overloaded,
    PenstockError,
    StageLost,
    UnknownTopic,
)
from penstock.log import handover
from penstock.log.policy import Durability, Policy
from penstock.model.batch import Batch, accept, encode
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.brokers import SECOND, Life, Recorder, each_cut, in_loop
from tests.support.sampling import covered

JOB: Final = b"job"
FSYNC, FLUSH = Policy(), Policy(durability=Durability.FLUSH)


def batch_of(*values: bytes, headers: bytes | None = None) -> Batch:
    lines = None if headers is None else [headers] * len(values)
    return accept(encode(values, timestamp=1, headers=lines, asks=headers is not None).data)


def opened(life: Life) -> transactions.Transactions:
    assert life.broker.transactions is not None
    return life.broker.transactions


async def make_topics(life: Life, **policies: Policy) -> None:
    await life.do(life.broker.open_transactions())
    for name, policy in policies.items():
        await life.do(life.broker.changes.create(name.encode(), policy=policy))


async def stage(
    life: Life, topic: bytes, *values: bytes, name: bytes = JOB, number: int = 0, partition: int = 0
) -> int:
    return await stage_batch(life, topic, batch_of(*values), name=name, number=number, partition=partition)


async def stage_batch(
    life: Life, topic: bytes, batch: Batch, *, name: bytes = JOB, number: int = 0, partition: int = 0
) -> int:
    served = life.broker.topics.named(topic)
    outcome = Outcome()
    offset = opened(life).stage((served.topic.id, partition, len(served.partitions)), name, number, batch, outcome)
    await life.do(settled(outcome))
    return offset


async def commit(life: Life, offsets: Sequence[int], *, name: bytes = JOB, number: int = 0) -> bool:
    return await life.do(opened(life).commit(name, number, offsets))


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


# What goes wrong


@in_loop
async def test_one_of_too_many_batches_is_refused_before_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        offsets = [await stage(life, b"orders", b"%d" % number) for number in range(4)]
        monkeypatch.setattr(transactions, "PARTS_MAX", 3)
        with pytest.raises(BadRequest, match="4 batches, the limit is 3"):
            await commit(life, offsets)
        with pytest.raises(BadRequest, match="has 3 batches, the limit"):
            await stage(life, b"orders", b"x")
        assert not opened(life).is_decided(JOB, 0)
        await commit(life, offsets[:3])
        assert life.in_log(b"orders") == [b"0", b"1", b"2"]


@in_loop
async def test_so_many_batches_are_staged_and_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "STAGED_MAX", 3)
    disk = FaultyFiles()
    async with Life(disk) as life:
        await make_topics(life, orders=FSYNC)
        for name in (b"a", b"b", b"b"):
            await stage(life, b"orders", b"x", name=name)
        with pytest.raises(Overloaded, match="abort"):
            await stage(life, b"orders", b"x", name=b"c")
        opened(life).abort(b"b", 0)
        assert life.broker.usage()["staged_batches"] == (1, 3)
        disk.fail("write", errno.ENOSPC, path_suffix=_path(life, transactions.STAGED_TOPIC))
        with pytest.raises(AppendFailed):
            await stage(life, b"orders", b"x", name=b"c")
        assert life.broker.usage()["staged_batches"] == (1, 3)
        await commit(life, [await stage(life, b"orders", b"x", name=b"c")], name=b"c")
        assert life.broker.usage()["staged_batches"] == (1, 3)
    async with Life(disk) as life:
        # Nobody wanted what was aborted, but that is not remembered.
        assert life.broker.usage()["staged_batches"] == (3, 3)


@in_loop
async def test_what_is_staged_and_damaged_must_be_staged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_OWN_POLICY", Policy(segment_bytes=4096))
    disk = FaultyFiles()
    async with Life(disk) as life:
        await make_topics(life, orders=FSYNC)
        offsets = [await stage(life, b"orders", b"%d" % number * 900) for number in range(9)]
        damaged = life.log(transactions.STAGED_TOPIC).segments[0].path
    content = bytearray(disk.content(damaged))
    content[len(content) // 2] ^= 1
    disk.set_content(damaged, content)
    async with Life(disk) as life:
        with pytest.raises(StageLost):
            await commit(life, offsets)
        await commit(life, [await stage(life, b"orders", b"again")])
        assert life.in_log(b"orders") == [b"again"]


@in_loop
async def test_there_are_so_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "NAMES_MAX", 2)
    monkeypatch.setattr(transactions, "ONCE_MAX", 2)
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        for name in (b"a", b"b"):
            await commit(life, [], name=name)
        with pytest.raises(Overloaded, match="2 transaction names"):
            await commit(life, [], name=b"c")
        await commit(life, [], name=b"b", number=1)
        for number in range(5):
            await life.do(opened(life).commit(b"once-%d" % number, 0, [], once=True))
            await life.settle()
        names = [name for name, _ in life.store.state.items("transaction")]
        assert names == ["a", "b", "once-3", "once-4"]


@in_loop
async def test_an_unexpected_error_delays_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC, bills=FSYNC)
        broken = life.partition(b"orders")
        append = type(broken).append_batch

        def append_batch(self: Partition, *args: Any) -> int:
            if self is broken:
                raise ZeroDivisionError
            return append(self, *args)

        with monkeypatch.context() as patched:
            patched.setattr(type(broken), "append_batch", append_batch)
            with pytest.raises(BrokerError, match="internal error"):
                await commit(life, [await stage(life, b"orders", b"1")])
            await commit(life, [await stage(life, b"bills", b"x", name=b"other")], name=b"other")
            assert life.in_log(b"bills") == [b"x"]
            await life.advance(transactions.RETRY_US)
            assert life.store.health.faults["transactions"] >= 2
            assert "1 committed" in life.store.health.problems["transactions"]
        await life.advance(transactions.RETRY_US)
        assert life.in_log(b"orders") == [b"1"]
        assert life.store.health.problems == {}


def _path(life: Life, topic: bytes) -> str:
    return f"topics/{life.partition(topic).topic_id}/0/00000000000000000000.log"


@in_loop
async def test_while_one_log_is_full_the_others_wait_for_it() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await make_topics(life, orders=FSYNC, bills=FSYNC)
        offsets = [await stage(life, b"orders", b"1"), await stage(life, b"bills", b"x")]
        disk.fail("write", errno.ENOSPC, times=2, path_suffix=_path(life, b"bills"))

        with pytest.raises(AppendFailed):
            await commit(life, offsets)

        await life.settle()
        assert (life.in_log(b"orders"), life.in_log(b"bills")) == ([], [])
        published = asyncio.ensure_future(life.publish(b"orders", b"behind"))
        await life.advance(transactions.RETRY_US)
        assert life.in_log(b"orders") == []
        await life.advance(transactions.RETRY_US)
        assert (life.in_log(b"orders"), life.in_log(b"bills")) == ([b"1", b"behind"], [b"x"])
        assert (await published).error is None
        assert not await commit(life, offsets)


@in_loop
async def test_what_a_broken_log_cannot_take_is_there_after_a_restart() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await make_topics(life, orders=FSYNC, bills=FSYNC)
        offsets = [await stage(life, b"orders", b"1"), await stage(life, b"bills", b"x")]
        disk.fail("sync", errno.EIO, path_suffix=_path(life, b"bills"))

        with pytest.raises(LogFailed):
            await commit(life, offsets)

        assert life.in_log(b"orders") == []
        with pytest.raises(LogFailed):
            await commit(life, [await stage(life, b"bills", b"y", name=b"other")], name=b"other")
        await life.kill()
    async with Life(disk) as life:
        assert (life.in_log(b"orders"), life.in_log(b"bills")) == ([b"1"], [b"x"])


@pytest.mark.parametrize("is_decided", [False, True])
@in_loop
async def test_a_topic_that_is_deleted(is_decided: bool) -> None:
    """Before it is decided nothing is done; after that, the rest is."""
    disk = FaultyFiles()
    async with Life(disk) as life:
        await make_topics(life, orders=FSYNC, bills=FSYNC)
        offsets = [await stage(life, b"orders", b"1"), await stage(life, b"bills", b"x")]
        if is_decided:
            disk.fail("write", errno.ENOSPC, path_suffix=_path(life, b"bills"))
            with pytest.raises(AppendFailed):
                await commit(life, offsets)
        await life.do(life.broker.changes.delete(b"bills"))
        if is_decided:
            await life.advance(transactions.RETRY_US)
            assert life.in_log(b"orders") == [b"1"]
        else:
            with pytest.raises(UnknownTopic):
                await commit(life, offsets)
            assert life.in_log(b"orders") == []


@in_loop
async def test_what_was_aborted_cannot_be_committed() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        offset = await stage(life, b"orders", b"1")
        opened(life).abort(JOB, 0)
        with pytest.raises(StageLost, match=f"staged at {offset} is not stored"):
            await commit(life, [offset])
        assert await commit(life, [await stage(life, b"orders", b"2")])
        assert life.in_log(b"orders") == [b"2"]


@in_loop
async def test_a_later_number_drops_what_earlier_ones_staged() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        early = await stage(life, b"orders", b"early", number=0)
        other = await stage(life, b"orders", b"other", name=b"other")
        assert await commit(life, [await stage(life, b"orders", b"late", number=1)], number=1)
        assert not await commit(life, [early], number=0)
        assert await commit(life, [other], name=b"other")
        assert life.in_log(b"orders") == [b"late", b"other"]


@in_loop
async def test_what_is_not_on_the_disk_yet_or_named_twice_cannot_be_committed() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        first = await stage(life, b"orders", b"1")
        topic = life.broker.topics.named(b"orders").topic
        outcome = Outcome()
        assert opened(life).stage((topic.id, 0, 1), JOB, 0, batch_of(b"2"), outcome) == first + 1
        with pytest.raises(StageLost):
            await opened(life).commit(JOB, 0, [first, first + 1])
        await life.do(settled(outcome))
        with pytest.raises(BadRequest, match="twice"):
            await commit(life, [first, first])
        assert await commit(life, [first, first + 1])
        assert life.in_log(b"orders") == [b"1", b"2"]


@in_loop
async def test_a_stage_is_of_one_transaction() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        offset = await stage(life, b"orders", b"1")
        for name, number in ((b"other", 0), (JOB, 1)):
            with pytest.raises(StageLost):
                await commit(life, [offset], name=name, number=number)


@pytest.mark.parametrize("days", [6, 8])
@in_loop
async def test_what_nobody_commits_is_forgotten_after_a_week(days: int) -> None:
    disk, clock = FaultyFiles(), ManualClock()
    async with Life(disk, clock=clock) as life:
        await make_topics(life, orders=FSYNC)
        offset = await stage(life, b"orders", b"1")
    clock.advance(days * 24 * 3600 * SECOND)
    async with Life(disk, clock=clock) as life:
        await stage(life, b"orders", b"x", name=b"other")
        if days < 7:
            assert await commit(life, [offset])
        else:
            with pytest.raises(StageLost):
                await commit(life, [offset])


@in_loop
async def test_what_is_not_needed_any_more_is_dropped_from_the_disk() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        log = life.log(transactions.STAGED_TOPIC)
        open_ = await stage(life, b"orders", b"open", name=b"open")
        big = bytes(1 << 20)
        for number in range(70):
            await commit(life, [await stage(life, b"orders", big, number=number)], number=number)
        await life.settle()
        assert log.upkeep.unneeded <= open_
        life.store.upkeep()
        assert log.start <= open_
        assert await commit(life, [open_], name=b"open")
        await life.settle()
        life.store.upkeep()
        assert log.start > open_
        assert sum(segment.size for segment in log.segments) < 9 << 20


@in_loop
async def test_names_of_those_that_nobody_comes_back_to_are_forgotten() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        for name in (b"once-1", b"once-2"):
            offset = await stage(life, b"orders", name, name=name)
            await life.do(opened(life).commit(name, 0, [offset], once=True))
            await life.settle()
            life.clock.advance(transactions.ONCE_US + 1)
        assert [name for name, _ in life.store.state.items("transaction")] == ["once-2"]


@pytest.mark.parametrize("name", [b"", b"\xff", b"n" * 257])
@in_loop
async def test_a_name_that_cannot_be(name: bytes) -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        with pytest.raises(BadRequest):
            await stage(life, b"orders", b"1", name=name)
        with pytest.raises(BadRequest):
            await commit(life, [], name=name)


@in_loop
async def test_a_partition_that_is_not_there() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life, orders=FSYNC)
        with pytest.raises(PenstockError, match="invalid partition 7: topic orders has 1"):
            await stage(life, b"orders", b"1", partition=7)
