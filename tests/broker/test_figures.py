"""What is counted on the way of messages: how long deliveries and rounds took, and what failed."""

from __future__ import annotations

import errno
import random
from bisect import bisect_left

import pytest

from penstock.broker.start import Start
from penstock.store.histogram import SECONDS, Histogram
from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder, in_loop


def test_a_histogram_counts_what_is_not_above_each_bound() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    values = [chance.choice([*SECONDS, chance.expovariate(1), 0.0, 99.0]) for _ in range(1000)]
    histogram = Histogram(SECONDS)

    for value in values:
        histogram.observe(value)

    assert histogram.cumulative() == [*(sum(value <= bound for value in values) for bound in SECONDS), 1000]
    assert histogram.total == pytest.approx(sum(values))


@in_loop
async def test_a_delivery_is_timed_from_when_its_message_was_appended() -> None:
    async with Life(FaultyFiles()) as life:
        sink = Recorder()
        subscription, _ = life.subscribe(b"orders", sink)
        await life.stored(b"orders", b"at once")
        sink.is_open = False
        await life.stored(b"orders", b"later", b"with it")
        await life.advance(2 * SECOND)
        sink.is_open = True
        subscription.wake()
        await life.settle()

        seconds = life.broker.figures.delivery_seconds

        assert sink.values == [b"at once", b"later", b"with it"]
        # One for each run.
        assert seconds.cumulative()[-1] == 2
        assert seconds.cumulative()[bisect_left(SECONDS, 2.0) - 1] == 1
        assert seconds.total == 2.0


@in_loop
async def test_what_is_older_than_its_reader_and_what_comes_again_is_not_timed() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        await life.advance(SECOND)
        sink = Recorder()
        await life.do(life.broker.groups.create(b"clerks", b"orders", start=Start.EARLIEST))
        group, _ = await life.join(b"clerks", b"orders", sink)
        assert sink.values == [b"old"]
        assert life.broker.figures.delivery_seconds.cumulative()[-1] == 0

        await life.advance(10 * SECOND)
        [position] = group.positions.values()
        assert (position.failed, position.retried, position.sent) == (1, 1, 2)
        assert life.broker.figures.delivery_seconds.cumulative()[-1] == 0

        await life.stored(b"orders", b"new")
        assert life.broker.figures.delivery_seconds.cumulative()[-1] == 1


@in_loop
async def test_what_a_reader_is_spared_is_counted() -> None:
    async with Life(FaultyFiles()) as life:
        sink = Recorder()
        life.subscribe(b"_inbox", sink)
        sink.is_open = False
        await life.publish(b"_inbox", b"a", b"b")

        assert life.broker.figures.dropped == 2
        assert (life.broker.live.received, life.broker.live.sent) == (2, 0)


@in_loop
async def test_rounds_are_counted_with_their_messages() -> None:
    async with Life(FaultyFiles()) as life:
        before = life.store.rounds.sync_seconds.cumulative()[-1], life.store.rounds.round_messages.total
        await life.stored(b"orders", b"a", b"b", b"c")
        partition = life.broker.topics.named(b"orders").partitions[0]

        # The topic itself is a message of the state topic.
        assert life.store.rounds.sync_seconds.cumulative()[-1] > before[0]
        assert life.store.rounds.round_messages.total >= before[1] + 3
        assert life.store.rounds.write_seconds.cumulative()[-1] == life.store.rounds.round_messages.cumulative()[-1]
        assert (partition.received, partition.log.flusher.stored_messages) == (3, 3)
        assert partition.log.flusher.stored_bytes > 0


@in_loop
async def test_a_topic_whose_sync_failed_is_named_until_it_is_deleted() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"a")
        await life.stored(b"refunds", b"a")
        assert life.broker.failed == []
        path = life.broker.topics.named(b"orders").partitions[0].log.segments[0].path
        disk.fail("sync", errno.EIO, path_suffix=str(path))

        assert (await life.publish(b"orders", b"b")).error is not None

        assert life.broker.failed == [f"orders ({path}: fsync failed: Input/output error)"]
        await life.do(life.broker.changes.delete(b"orders"))
        assert life.broker.failed == []


@in_loop
async def test_the_broker_s_own_state_can_fail_too() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"a")
        path = life.store.log(0).segments[0].path
        disk.fail("sync", errno.EIO, path_suffix=str(path))

        assert (await life.publish(b"refunds", b"a")).error is not None

        assert life.broker.failed == ["the broker's own state"]
