"""Batches that are stored as their producers made them, and where each message of a run went."""

from __future__ import annotations

import asyncio
import errno
from typing import Any, Final

import pytest

from penstock.awaiting import settled
from penstock.broker.intake import Receipt, Stored
from penstock.broker.opened import Opened
from penstock.broker.topic import check_lines, check_stored_lines
from penstock.errors import BadHeader, OutOfSequence, PenstockError, StaleLayout, UnknownTopic
from penstock.log.policy import Dedup, Policy
from penstock.model.batch import Batch, accept, encode
from penstock.model.headers import hash_key
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder, in_loop, run_of

LOG: Final = "topics/2/0/" + "0" * 20 + ".log"


def made(*values: bytes, **columns: Any) -> Batch:
    return accept(encode(values, timestamp=1, **columns).data)


async def append(life: Life, topic_id: int, batch: Batch, *, number: int = 0, partitions: int = 1) -> tuple[int, bool]:
    """Its offset, once it is stored, and whether it was there."""
    outcome = Outcome()
    appended = life.broker.intake.append(topic_id, number, partitions, batch, outcome)
    await life.do(settled(outcome))
    return appended


async def made_topic(life: Life, name: bytes = b"orders", **options: Any) -> int:
    return (await life.do(life.broker.changes.create(name, **options))).id


# Broker.append


@in_loop
async def test_a_batch_is_stored_once_and_delivered_to_who_waits_for_it() -> None:
    async with Life(FaultyFiles()) as life:
        topic_id = await made_topic(life)
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"orders", ann)
        await life.join(b"g", b"orders", bob)
        assert await append(life, topic_id, made(b"a", b"b", producer=7)) == (0, False)
        assert await append(life, topic_id, made(b"a", b"b", producer=7)) == (0, True)
        assert await append(life, topic_id, made(b"c", producer=7, sequence=1)) == (2, False)
        await life.settle()
        assert ann.values == bob.values == [b"a", b"b", b"c"]
        assert life.in_log(b"orders") == [b"a", b"b", b"c"]


@in_loop
async def test_batches_and_runs_are_stored_in_the_order_in_which_they_came() -> None:
    async with Life(FaultyFiles()) as life:
        topic_id = await made_topic(life)
        receipts = []
        for number in range(0, 40, 2):
            receipts.append(life.offer(run_of(b"orders", b"%d" % number)))
            life.broker.intake.append(topic_id, 0, 1, made(b"%d" % (number + 1)), Outcome())
        await asyncio.gather(*receipts)
        await life.settle()
        assert life.in_log(b"orders") == [b"%d" % number for number in range(40)]


@in_loop
async def test_what_is_not_taken_is_told_at_once_and_leaves_no_trace() -> None:
    async with Life(FaultyFiles()) as life:
        topic_id = await made_topic(life, partitions=2)
        with pytest.raises(UnknownTopic):
            await append(life, topic_id + 1, made(b"a"))
        for number, partitions in ((0, 1), (0, 3), (2, 2), (2, 3)):
            with pytest.raises(StaleLayout):
                await append(life, topic_id, made(b"a", producer=7), number=number, partitions=partitions)
        with pytest.raises(OutOfSequence):
            await append(life, topic_id, made(b"a", producer=7, sequence=1), partitions=2)
        assert await append(life, topic_id, made(b"a", producer=7), partitions=2) == (0, False)
        assert life.in_log(b"orders") == [b"a"]


@in_loop
async def test_a_repetition_is_one_also_after_the_topic_has_more_partitions() -> None:
    async with Life(FaultyFiles()) as life:
        topic_id = await made_topic(life)
        await append(life, topic_id, made(b"a", producer=7))
        await life.do(life.broker.changes.alter(b"orders", partitions=2))
        assert await append(life, topic_id, made(b"a", producer=7)) == (0, True)
        with pytest.raises(StaleLayout):
            await append(life, topic_id, made(b"b", producer=7, sequence=1))
        assert await append(life, topic_id, made(b"b", producer=7, sequence=1), partitions=2) == (1, False)


@in_loop
async def test_a_repetition_of_what_waits_for_the_disk_is_answered_with_it() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        topic_id = await made_topic(life)
        disk.fail("write", errno.ENOSPC, path_suffix=LOG)
        told: list[PenstockError | None] = []
        for _ in range(2):
            life.broker.intake.append(topic_id, 0, 1, made(b"a", producer=7), Outcome(told.append))
        await life.settle()
        assert len(told) == 2
        assert None not in told
        # Nothing was stored, so it is not a repetition.
        assert await append(life, topic_id, made(b"a", producer=7)) == (0, False)


@pytest.mark.parametrize(
    ("dedup", "asks", "expected"),
    [
        (Dedup.ID, False, True),
        (Dedup.ID, True, False),
        (Dedup.OFF, False, True),
        (Dedup.OFF, True, False),
        (Dedup.PAYLOAD, False, False),
        (Dedup.PAYLOAD, True, False),
    ],
)
@in_loop
async def test_a_batch_is_stored_as_it_came_unless_someone_must_look_into_it(
    dedup: Dedup, asks: bool, expected: bool
) -> None:
    async with Life(FaultyFiles()) as life:
        topic = life.broker.topics.public(await made_topic(life, policy=Policy(dedup=dedup)))
        assert topic.takes_opaque(asks=asks) is expected


@in_loop
async def test_partitions_are_found_by_topic_and_number() -> None:
    async with Life(FaultyFiles()) as life:
        topic_id = await made_topic(life, partitions=2)
        found = [life.broker.topics.partition(topic_id, number) for number in range(2)]
        assert found == [life.partition(b"orders", number) for number in range(2)]
        assert life.broker.topics.partition(topic_id, 2) is None
        assert life.broker.topics.partition(topic_id + 1, 0) is None
        assert len(life.broker.topics.public(topic_id).partitions) == 2
        with pytest.raises(UnknownTopic):
            life.broker.topics.public(topic_id + 1)


# Receipts


def stored(receipt: Receipt) -> list[Stored]:
    found = receipt.stored()
    assert all(isinstance(each, Stored) for each in found), found
    return [each for each in found if isinstance(each, Stored)]


@in_loop
async def test_a_receipt_says_where_each_message_is() -> None:
    async with Life(FaultyFiles()) as life:
        await made_topic(life, partitions=3)
        subjects = [b"orders.%d" % (number % 5) for number in range(20)] + [b"bills"]
        run = Run(subjects, [b"%d" % number for number in range(21)])
        found = stored(await life.publish_run(run))
        for number, place in enumerate(found[:20]):
            assert place.topic == b"orders"
            assert place.partition == hash_key(subjects[number]) % 3
            assert life.in_log(b"orders", place.partition)[place.offset] == b"%d" % number
        assert found[20] == (b"bills", 0, 0, False)


@pytest.mark.parametrize("restart", [False, True])
@in_loop
async def test_a_repetition_is_where_the_first_one_is(restart: bool) -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await made_topic(life, partitions=4)
        first = {}
        for number in range(12):
            block = b"Msg-ID: %d\r\n" % number
            [first[number]] = stored(await life.publish(b"orders", b"x", headers=block, key=b"%d" % number))
        assert len({(place.partition, place.offset) for place in first.values()}) == 12
        if restart:
            await life.stop()
            life = await Life(disk, clock=life.clock).__aenter__()
        for number, place in first.items():
            [again] = stored(await life.publish(b"orders", b"y", headers=b"Msg-ID: %d\r\n" % number, key=b"z"))
            assert again == place._replace(is_duplicate=True)
        if restart:
            await life.stop()


@in_loop
async def test_a_repetition_in_the_same_run_is_where_the_first_one_is() -> None:
    async with Life(FaultyFiles()) as life:
        found = stored(await life.publish(b"orders", b"a", b"b", b"c", headers=b"Msg-ID: 1\r\n"))
        assert found == [(b"orders", 0, 0, False), (b"orders", 0, 0, True), (b"orders", 0, 0, True)]
        assert life.in_log(b"orders") == [b"a"]


@in_loop
async def test_a_delayed_message_is_nowhere_yet() -> None:
    async with Life(FaultyFiles()) as life:
        block = b"Delay: 5s\r\nMsg-ID: 1\r\n"
        assert stored(await life.publish(b"orders", b"a", headers=block)) == [(b"orders", -1, -1, False)]
        assert stored(await life.publish(b"orders", b"a", headers=block)) == [(b"orders", -1, -1, True)]
        await life.advance(6 * SECOND)
        assert life.in_log(b"orders") == [b"a"]


@in_loop
async def test_what_is_refused_has_its_reason_in_its_place() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await made_topic(life)
        await made_topic(life, b"bills")
        run = Run([b"orders", b"bills", b"orders", b"bills"], [b"a", b"b", b"c", b"d"])
        run.headers[1] = b"Delay: x\r\n"
        disk.fail("write", errno.ENOSPC, path_suffix=LOG)
        found = (await life.publish_run(run)).stored()
        assert [each.code if isinstance(each, PenstockError) else each for each in found] == [
            "APPEND_FAILED",
            "BAD_HEADER",
            "APPEND_FAILED",
            (b"bills", 0, 0, False),
        ]


# Partition


@in_loop
async def test_who_waits_for_more_is_woken_by_it_and_only_by_it() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a")
        partition = life.partition(b"orders")
        await life.do(partition.grown(0))
        waiting = asyncio.create_task(partition.grown(1))
        further = asyncio.create_task(partition.grown(2))
        await life.settle()
        assert not waiting.done()
        await life.stored(b"orders", b"b")
        assert waiting.done()
        assert not further.done()
        further.cancel()
        await asyncio.gather(further, return_exceptions=True)
        assert partition.groups == {}


@in_loop
async def test_who_waits_for_more_of_a_topic_that_is_deleted_is_woken() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a")
        waiting = asyncio.create_task(life.partition(b"orders").grown(1))
        await life.settle()
        await life.do(life.broker.changes.delete(b"orders"))
        await life.do(asyncio.wait_for(waiting, 20))


def batch_at(offset: int, *values: bytes) -> Batch:
    batch = encode(values, timestamp=1)
    batch.stamp(offset, append_time=1)
    return batch


@in_loop
async def test_a_batch_that_was_opened_is_not_opened_again() -> None:
    opened = Opened()
    batch = batch_at(10, b"a", b"b", b"c")
    whole = opened.open((1, 0), batch, b"orders")
    assert (whole.values, whole.subjects) == ([b"a", b"b", b"c"], [b"orders"] * 3)
    assert opened.open((1, 0), batch, b"orders") is whole


@in_loop
async def test_another_batch_at_the_same_place_is_another_one() -> None:
    """Compaction writes batches anew, and a topic may be made again."""
    opened = Opened()
    opened.open((1, 0), batch_at(0, b"a", b"b"), b"orders")
    assert opened.open((1, 0), batch_at(0, b"b"), b"orders").values == [b"b"]
    assert opened.open((1, 1), batch_at(0, b"c"), b"orders").values == [b"c"]
    assert opened.open((2, 0), batch_at(0, b"d"), b"bills").subjects == [b"bills"]


@in_loop
async def test_what_is_kept_opened_is_bounded_and_the_oldest_use_goes_first() -> None:
    size = batch_at(0, bytes(1000)).size
    opened = Opened(bytes_max=3 * size + size // 2)
    batches = [batch_at(number, bytes(1000)) for number in range(4)]
    runs = [opened.open((1, 0), batch, b"orders") for batch in batches[:3]]
    assert opened.open((1, 0), batches[0], b"orders") is runs[0]
    opened.open((1, 0), batches[3], b"orders")
    assert opened.open((1, 0), batches[0], b"orders") is runs[0]
    assert opened.open((1, 0), batches[2], b"orders") is runs[2]
    assert opened.open((1, 0), batches[1], b"orders") is not runs[1]


@in_loop
async def test_what_is_forgotten_takes_no_room() -> None:
    size = batch_at(0, bytes(1000)).size
    opened = Opened(bytes_max=2 * size + size // 2)
    kept = batch_at(0, bytes(1000))
    run = opened.open((1, 0), kept, b"orders")
    opened.open((2, 0), kept, b"bills")
    opened.forget((2, 0))
    opened.open((3, 0), kept, b"notes")
    assert opened.open((1, 0), kept, b"orders") is run


@in_loop
async def test_one_batch_is_kept_however_large_it_is() -> None:
    opened = Opened(bytes_max=1)
    batch = batch_at(0, bytes(1000))
    assert opened.open((1, 0), batch, b"orders") is opened.open((1, 0), batch, b"orders")


@in_loop
async def test_readers_with_little_room_do_not_open_a_batch_again_and_again() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", *(b"%d" % number for number in range(100)))
        partition = life.partition(b"orders")
        whole = await life.do(partition.cursor(0).read())
        for offset in range(1, 100):
            found = await life.do(partition.cursor(offset).read())
            assert found is not None
            assert found[0].values[0] == b"%d" % offset
        again = await life.do(partition.cursor(0).read())
        assert whole is not None
        assert again is not None
        assert again[0] is whole[0]


def test_a_batch_with_a_key_beyond_the_limit_is_refused_unless_another_broker_stored_it() -> None:
    for size, is_refused in ((65_536, False), (65_537, True)):
        batch = encode([b"a", b"b"], timestamp=0, keys=[b"k" * size, None])
        if is_refused:
            with pytest.raises(BadHeader, match="key of 65537 bytes: at most 65536"):
                check_lines(batch, b"orders")
        else:
            check_lines(batch, b"orders")
        check_stored_lines(batch, b"orders")
