"""Partitioned groups: who reads which partition, and which commits count."""

from __future__ import annotations

import asyncio

import pytest

from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.errors import PenstockError, StaleCommit
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import Got, Life, Recorder, in_loop
from tests.support.ends import DEADLINE, End, ends


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
