"""A message that is sent again is stored once, as long as the topic's window goes."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.broker import dedup_windows, opened
from penstock.broker.broker import Settings
from penstock.broker.intake import Receipt
from penstock.log.policy import Dedup, Policy
from penstock.model.batch import Batch
from penstock.model.run import Run
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import SECOND, Life, Recorder, in_loop, run_of

MINUTE = 60 * SECOND
PAYLOAD = Settings(policy=Policy(dedup=Dedup.PAYLOAD))
OFF = Settings(policy=Policy(dedup=Dedup.OFF))


def with_id(identity: bytes, header: bytes = b"Msg-ID") -> bytes:
    return header + b": " + identity + b"\r\n"


async def send(life: Life, identity: bytes, value: bytes = b"a", subject: bytes = b"orders") -> Receipt:
    receipt = await life.publish(subject, value, headers=with_id(identity))
    assert receipt.error is None, receipt.error
    return receipt


async def stop(life: Life) -> FaultyFiles:
    assert isinstance(life.disk, FaultyFiles)
    await life.stop()
    return life.disk


async def power_cut(life: Life) -> FaultyFiles:
    return await life.power_cut()


End = Callable[[Life], Coroutine[Any, Any, FaultyFiles]]
ends = pytest.mark.parametrize("end", [stop, power_cut])


# By id


@pytest.mark.parametrize("header", [b"Msg-ID", b"msg-id", b"Nats-Msg-Id"])
@in_loop
async def test_of_messages_with_one_id_the_first_is_stored(header: bytes) -> None:
    """DD-04"""
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        life.subscribe(b"orders", ann)
        receipts = [
            await life.publish(b"orders", value, headers=with_id(b"1", header)) for value in (b"first", b"second")
        ]
        await life.settle()
        assert [receipt.error for receipt in receipts] == [None, None]
        assert [list(receipt.duplicates) for receipt in receipts] == [[], [0]]
        assert life.in_log(b"orders") == ann.values == [b"first"]


@in_loop
async def test_within_one_run_too() -> None:
    async with Life(FaultyFiles()) as life:
        run = Run([b"orders"] * 5, [b"a", b"b", b"c", b"d", b"e"])
        run.headers = {0: with_id(b"1"), 1: with_id(b"2"), 2: with_id(b"1"), 4: with_id(b"2")}
        receipt = await life.publish_run(run)
        assert list(receipt.duplicates) == [2, 4]
        assert life.in_log(b"orders") == [b"a", b"b", b"d"]


@in_loop
async def test_messages_without_an_id_are_never_repetitions() -> None:
    async with Life(FaultyFiles()) as life:
        for headers in (b"", b"Colour: red\r\n", b"Msg-ID: \r\n"):
            for _ in range(2):
                assert list((await life.publish(b"orders", b"a", headers=headers)).duplicates) == []
        assert life.in_log(b"orders") == [b"a"] * 6


@ends
@in_loop
async def test_an_id_is_known_after_a_restart(end: End) -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock) as life:
        await send(life, b"1")
        await life.stored(b"orders", b"without")
        await send(life, b"2")
        disk = await end(life)
    clock.advance(MINUTE)
    async with Life(disk, clock=clock) as life:
        assert list((await send(life, b"2")).duplicates) == [0]
        assert list((await send(life, b"1")).duplicates) == [0]
        assert list((await send(life, b"3")).duplicates) == []
        assert life.in_log(b"orders") == [b"a", b"without", b"a", b"a"]


@pytest.mark.parametrize("restarts", [False, True])
@in_loop
async def test_an_id_is_forgotten_when_the_window_is_over(restarts: bool) -> None:
    """DD-05"""
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock) as life:
        await send(life, b"1")
        clock.advance(5 * MINUTE - 1)
        assert list((await send(life, b"1")).duplicates) == [0]
        if not restarts:
            clock.advance(1)
            assert list((await send(life, b"1")).duplicates) == []
            assert life.in_log(b"orders") == [b"a", b"a"]
    if restarts:
        clock.advance(1)
        async with Life(disk, clock=clock) as life:
            assert list((await send(life, b"1")).duplicates) == []
            assert life.in_log(b"orders") == [b"a", b"a"]


@in_loop
async def test_the_window_is_the_topics() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", policy=Policy(dedup_window_ms=1000)))
        await send(life, b"1")
        life.clock.advance(SECOND)
        assert list((await send(life, b"1")).duplicates) == []
        await life.do(life.broker.changes.alter(b"orders", policy=Policy(dedup_window_ms=10_000)))
        life.clock.advance(SECOND)
        assert list((await send(life, b"1")).duplicates) == [0]


@in_loop
async def test_topics_are_independent() -> None:
    async with Life(FaultyFiles()) as life:
        await send(life, b"1")
        assert list((await send(life, b"1", subject=b"bills")).duplicates) == []
        assert list((await send(life, b"1", subject=b"orders.eu")).duplicates) == [0]


@in_loop
async def test_in_a_topic_of_several_partitions_too() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        await send(life, b"1")
        assert list((await send(life, b"1")).duplicates) == [0]
        stored = [value for number in range(3) for value in life.in_log(b"orders", number)]
        assert stored == [b"a"]


@in_loop
async def test_when_the_first_cannot_be_stored_the_second_is() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"before")
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
        receipt = await life.publish(b"orders", b"a", headers=with_id(b"1"))
        assert receipt.error is not None
        assert list((await send(life, b"1")).duplicates) == []
        assert life.in_log(b"orders") == [b"before", b"a"]


@in_loop
async def test_a_repetition_of_what_is_on_its_way_fails_with_it() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await send(life, b"0", b"before")
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
        first, second = (life.offer(run_of(b"orders", b"a", headers=with_id(b"1"))) for _ in range(2))
        assert not second.done()
        assert (await first).error is not None
        assert (await second).error is not None
        assert list((await send(life, b"1")).duplicates) == []
        assert life.in_log(b"orders") == [b"before", b"a"]


@in_loop
async def test_a_repetition_is_told_when_the_first_is_durable() -> None:
    async with Life(FaultyFiles()) as life:
        await send(life, b"0")
        first, second = (life.offer(run_of(b"orders", b"a", headers=with_id(b"1"))) for _ in range(2))
        assert not second.done()
        await first
        assert list((await second).duplicates) == [0]


@in_loop
async def test_what_was_stored_of_a_run_that_failed_elsewhere_is_not_stored_again() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await send(life, b"0")
        await send(life, b"0", subject=b"bills")
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"bills").segments[0].path))

        def run() -> Run:
            both = Run([b"orders", b"bills"], [b"x", b"x"])
            both.headers = {0: with_id(b"1"), 1: with_id(b"1")}
            return both

        assert (await life.publish_run(run())).error is not None
        assert (await life.publish_run(run())).error is None
        assert life.in_log(b"bills") == [b"a", b"x"]
        assert life.in_log(b"orders") == [b"a", b"x"]


@in_loop
async def test_two_who_are_the_first_to_send_with_an_id_send_it_once() -> None:
    """Both wait until what is known of the topic is read."""
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"before")
    async with Life(disk) as life:
        await asyncio.gather(*(send(life, b"1") for _ in range(3)))
        assert life.in_log(b"orders") == [b"before", b"a"]


# By payload


@in_loop
async def test_by_payload_equal_messages_are_stored_once_for_half_an_hour() -> None:
    """DD-02, DD-03"""
    async with Life(FaultyFiles(), settings=PAYLOAD) as life:
        receipt = await life.publish(b"orders", b"a", b"b", b"a")
        assert list(receipt.duplicates) == [2]
        life.clock.advance(30 * MINUTE - 1)
        assert list((await life.publish(b"orders", b"b", headers=with_id(b"other"))).duplicates) == [0]
        assert list((await life.publish(b"orders", b"c")).duplicates) == []
        life.clock.advance(1)
        assert list((await life.publish(b"orders", b"a")).duplicates) == []
        assert life.in_log(b"orders") == [b"a", b"b", b"c", b"a"]


@ends
@in_loop
async def test_by_payload_after_a_restart_too(end: End) -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock, settings=PAYLOAD) as life:
        await life.publish(b"orders", b"a", b"b")
        disk = await end(life)
    async with Life(disk, clock=clock, settings=PAYLOAD) as life:
        assert list((await life.publish(b"orders", b"b", b"c")).duplicates) == [0]
        assert life.in_log(b"orders") == [b"a", b"b", b"c"]


@in_loop
async def test_by_payload_from_the_moment_on_that_the_topic_asks_for_it() -> None:
    async with Life(FaultyFiles()) as life:
        await send(life, b"1", b"a")
        await life.do(life.broker.changes.alter(b"orders", policy=Policy(dedup=Dedup.PAYLOAD)))
        assert list((await send(life, b"2", b"a")).duplicates) == [0]
        assert list((await send(life, b"1", b"b")).duplicates) == []


# Off


@in_loop
async def test_off_everything_is_stored() -> None:
    async with Life(FaultyFiles(), settings=OFF) as life:
        for _ in range(2):
            assert list((await send(life, b"1")).duplicates) == []
        assert life.in_log(b"orders") == [b"a", b"a"]


# Later


@pytest.mark.parametrize("restarts", [False, True])
@in_loop
async def test_a_message_for_later_that_is_sent_again_is_stored_once(restarts: bool) -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    headers = with_id(b"1") + b"Delay: 10s\r\n"
    async with Life(disk, clock=clock) as life:
        await life.stored(b"orders", b"a", headers=headers)
        if not restarts:
            assert list((await life.publish(b"orders", b"a", headers=headers)).duplicates) == [0]
    async with Life(disk, clock=clock) as life:
        if restarts:
            assert list((await life.publish(b"orders", b"a", headers=headers)).duplicates) == [0]
        await life.advance(MINUTE)
        assert life.in_log(b"orders") == [b"a"]
        assert list((await life.publish(b"orders", b"a", headers=headers)).duplicates) == [0]


@in_loop
async def test_a_repetition_of_a_message_for_later_that_cannot_be_stored_fails_with_it() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await send(life, b"0")
        delayed = life.log(b"$delayed").segments[0].path
        disk.fail("write", errno.ENOSPC, path_suffix=str(delayed))
        headers = with_id(b"1") + b"Delay: 10s\r\n"
        receipts = [life.offer(run_of(b"orders", b"x", headers=headers)) for _ in range(2)]
        errors = [(await receipt).error for receipt in receipts]
        await life.advance(10 * SECOND)
        told_stored = None in errors
        assert (b"x" in life.in_log(b"orders")) == told_stored


# Sizes


@in_loop
async def test_long_ids_are_told_apart_and_known_again_after_a_restart() -> None:
    long, other = (letter * 100_000 for letter in (b"a", b"b"))
    async with Life(FaultyFiles()) as life:
        for each in (long, other, long):
            await send(life, each)
        assert life.broker.usage()["dedup_bytes"].used == 2 * 300
        disk = await stop(life)
    async with Life(disk) as life:
        assert (await send(life, long)).duplicates
        assert not (await send(life, b"new")).duplicates


@in_loop
async def test_a_key_that_takes_long_to_hash_is_refused_and_the_others_are_stored() -> None:
    async with Life(FaultyFiles()) as life:
        receipt = await life.publish(b"orders", b"a", headers=b"Penstock-Key: " + bytes([107]) * 65_537 + b"\r\n")
        assert "key of 65537 bytes: at most 65536" in str(receipt.error)
        receipt = await life.publish(b"orders", b"b", headers=b"Penstock-Key: " + bytes([107]) * 65_536 + b"\r\n")
        assert receipt.error is None


@pytest.mark.parametrize("settings", [Settings(), PAYLOAD], ids=["id", "payload"])
@in_loop
async def test_a_large_batch_is_read_in_another_thread_after_a_restart(settings: Settings) -> None:
    def numbered() -> Run:
        run = run_of(b"orders", *(b"%d" % number for number in range(10)))
        run.headers = {number: with_id(b"%d" % number) for number in range(10)}
        return run

    threads: dict[int, threading.Thread] = {}
    read = dedup_windows._read_identities

    def watched(batch: Batch, mode: Dedup, number: int | None, ids_max: int) -> Any:
        threads[batch.count] = threading.current_thread()
        return read(batch, mode, number, ids_max)

    async with Life(FaultyFiles(), settings=settings) as life:
        await life.publish_run(numbered())
        await send(life, b"10", b"10")
        disk = await stop(life)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup_windows, "_read_identities", watched)
        patch.setattr(opened, "LARGE_MESSAGES", 5)
        async with Life(disk, settings=settings) as life:
            assert list((await life.publish_run(numbered())).duplicates) == list(range(10))
            assert (await send(life, b"10", b"10")).duplicates
            assert not (await send(life, b"11", b"11")).duplicates
    assert threads[10] is not threading.current_thread()
    assert threads[1] is threading.current_thread()


@in_loop
async def test_of_more_ids_than_are_known_the_newest_are_after_a_restart() -> None:
    clock = ManualClock()
    async with Life(FaultyFiles(), clock=clock) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=2))
        for number in range(40):
            # In turn to each partition, and not in the order of their ids.
            await send(life, b"%d" % (number * 7 % 40), subject=b"orders.%d" % (number % 2))
            clock.advance(1000)
        disk = await stop(life)
    async with Life(disk, clock=clock, settings=Settings(dedup_ids_max=10)) as life:
        for number in range(30, 40):
            assert (await send(life, b"%d" % (number * 7 % 40))).duplicates, number
        assert not (await send(life, b"%d" % (3 * 7 % 40))).duplicates
