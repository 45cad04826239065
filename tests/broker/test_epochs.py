"""Epochs of producers: once a newer one has published, nothing more is stored of an older one."""

from __future__ import annotations

import asyncio

import pytest

from penstock.broker import epochs
from penstock.broker.epochs import PRODUCER_BYTES_MAX
from penstock.errors import BadRequest, LogFailed, PenstockError, StaleEpoch
from penstock.store.meta import Change
from penstock.testing import FaultyFiles
from tests.support.brokers import Life, in_loop


async def publish(life: Life, producer: str, epoch: int, topic_id: int = 1) -> None:
    async with life.broker.epochs.publishing(topic_id, producer, epoch):
        pass


async def refused(life: Life, producer: str, epoch: int) -> bool:
    try:
        await life.do(publish(life, producer, epoch))
    except StaleEpoch:
        return True
    return False


@in_loop
async def test_an_epoch_is_taken_over_when_what_was_under_way_before_it_has_ended() -> None:
    async with Life(FaultyFiles()) as life:
        may_end, begun = asyncio.Event(), asyncio.Event()
        ended: list[int] = []

        async def publish_slowly(epoch: int) -> None:
            async with life.broker.epochs.publishing(1, "p", epoch):
                begun.set()
                await may_end.wait()
                ended.append(epoch)

        first = asyncio.create_task(publish_slowly(1))
        await begun.wait()
        begun.clear()
        second, third = asyncio.create_task(publish_slowly(2)), asyncio.create_task(publish_slowly(3))
        await life.settle()

        assert not begun.is_set(), "the first is not over"
        assert await refused(life, "p", 1)
        assert await refused(life, "p", 2)
        may_end.set()
        await asyncio.gather(first, second, third)
        assert ended == [1, 2, 3]


@in_loop
async def test_an_epoch_is_on_the_disk_before_anything_is_published_under_it() -> None:
    async with Life(FaultyFiles()) as life, life.broker.epochs.publishing(1, "p", 2):
        assert life.store.state.get("epoch", "1/p") == 2


@in_loop
async def test_an_epoch_that_could_not_be_stored_is_stored_by_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(FaultyFiles()) as life:

        async def fail(_changes: list[Change]) -> None:
            raise LogFailed("no")

        with monkeypatch.context() as patch:
            patch.setattr(life.store, "write_state", fail)
            with pytest.raises(PenstockError, match="no"):
                await publish(life, "p", 2)
        await life.do(publish(life, "p", 2))
        assert life.store.state.get("epoch", "1/p") == 2


@in_loop
async def test_thousands_of_epochs_that_could_not_be_stored_are_no_burden(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: list[Change]) -> None:
        raise LogFailed("disk")

    async with Life(FaultyFiles()) as life:
        with monkeypatch.context() as patch:
            patch.setattr(life.broker.store, "write_state", fail)
            for number in range(3000):
                with pytest.raises(LogFailed):
                    await publish(life, "p", number)

        await life.do(publish(life, "p", 3000))
        assert await refused(life, "p", 2999)


@in_loop
async def test_the_producer_that_is_silent_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "PRODUCERS_MAX", 3)
    disk = FaultyFiles()
    async with Life(disk) as life:
        for producer in ("a", "b", "c", "a", "d"):
            await life.do(publish(life, producer, 2))
        assert sorted(key for key, _ in life.store.state.items("epoch")) == ["1/a", "1/c", "1/d"]
        assert life.broker.usage()["producer_epochs"] == (3, 3)
    async with Life(disk) as life:
        assert [await refused(life, producer, 1) for producer in "acdb"] == [True, True, True, False]


@in_loop
async def test_a_producer_has_a_short_name() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(publish(life, "p" * PRODUCER_BYTES_MAX, 1))
        with pytest.raises(BadRequest, match="257 bytes is too long: 256 are allowed"):
            await publish(life, "p" * (PRODUCER_BYTES_MAX + 1), 1)
