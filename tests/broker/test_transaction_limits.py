"""Transactions that are refused, delayed, aborted or forgotten."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from penstock.awaiting import settled
from penstock.broker import changes, transactions
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
from penstock.log.policy import Policy
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import SECOND, Life, in_loop
from tests.support.transactions import FSYNC, JOB, _path, batch_of, commit, make_topics, opened, stage

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
