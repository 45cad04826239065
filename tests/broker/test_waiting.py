"""Requests that wait at many positions."""

from __future__ import annotations

import asyncio

import pytest

from penstock.broker import waiting
from penstock.broker.broker import Broker
from penstock.errors import Overloaded
from penstock.server.calls import CALLS
from penstock.server.requests import Wait
from penstock.testing import FaultyFiles
from tests.support.brokers import Life, in_loop


def begin(broker: Broker, *positions: tuple[int, int, int]) -> asyncio.Task[dict[str, bool]]:
    asked = Wait(positions=list(positions), wait_ms=10_000)
    return asyncio.ensure_future(CALLS["wait"].function(broker, asked))


@in_loop
async def test_a_request_that_waits_costs_one_task_however_many_positions_it_names() -> None:
    async with Life(FaultyFiles()) as life:
        topic = await life.do(life.broker.changes.create(b"orders", partitions=2))
        before = len(asyncio.all_tasks())
        request = begin(life.broker, *[(topic.id, number % 2, 1 + number) for number in range(1000)])
        await life.settle()
        assert len(asyncio.all_tasks()) == before + 1
        partitions = [life.partition(b"orders", number) for number in range(2)]
        assert [len(partition.groups) for partition in partitions] == [1, 1]
        await life.stored(b"orders", b"a", b"b", b"c", b"d")
        assert await request == {"grown": True}
        assert [partition.groups for partition in partitions] == [{}, {}]


@in_loop
async def test_the_smallest_offset_of_a_partition_counts() -> None:
    async with Life(FaultyFiles()) as life:
        topic = await life.do(life.broker.changes.create(b"orders"))
        request = begin(life.broker, (topic.id, 0, 9), (topic.id, 0, 1), (topic.id, 0, 5))
        await life.stored(b"orders", b"a")
        await life.settle()
        assert not request.done()
        await life.stored(b"orders", b"b")
        assert await request == {"grown": True}


@in_loop
async def test_a_request_ends_when_its_topic_is_deleted() -> None:
    async with Life(FaultyFiles()) as life:
        topic = await life.do(life.broker.changes.create(b"orders"))
        request = begin(life.broker, (topic.id, 0, 0))
        await life.settle()
        await life.do(life.broker.changes.delete(b"orders"))
        assert await request == {"grown": True}


@in_loop
async def test_too_many_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POSITIONS_MAX", 3)
    async with Life(FaultyFiles()) as life:
        topic = await life.do(life.broker.changes.create(b"orders"))
        position = (topic.id, 0, 0)
        request = begin(life.broker, position, position)
        await life.settle()
        with pytest.raises(Overloaded, match="wait at 2 positions, the limit is 3"):
            await begin(life.broker, position, position)
        assert life.broker.usage()["waiting_positions"] == (2, 3)
        await life.stored(b"orders", b"a")
        assert await request == {"grown": True}
        assert life.broker.usage()["waiting_positions"] == (0, 3)
