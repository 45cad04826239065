"""Who gets what is published: live, late, in a queue, or from an inbox."""

from __future__ import annotations

import asyncio
import errno

import pytest

from penstock.broker.broker import Settings
from penstock.broker.flow import Flow, Overflow
from penstock.log.policy import Policy
from penstock.model.run import Run
from penstock.testing import FaultyFiles
from tests.support.broker_logs import NUMBERS
from tests.support.brokers import SECOND, Life, Recorder, in_loop, run_of

# ---- live delivery


@in_loop
async def test_each_subscriber_gets_each_message_with_all_that_belongs_to_it() -> None:
    """RT-10"""
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"orders.eu", ann)
        life.subscribe(b"orders.eu", bob)
        await life.stored(b"orders.eu", b"a", b"b", headers=b"Colour: red\r\n")
        assert ann.got == bob.got
        first, second = ann.got
        assert (first.subject, first.value, first.headers, first.attempts) == (
            b"orders.eu",
            b"a",
            b"Colour: red\r\n",
            1,
        )
        assert second.offset == first.offset + 1


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (b"orders", [b"orders"]),
        (b"orders.eu", [b"orders.eu"]),
        (b"orders.*", [b"orders.eu", b"orders.us"]),
        (b"*.eu", [b"orders.eu", b"bills.eu"]),
        (b"orders.>", [b"orders.eu", b"orders.us", b"orders.eu.new"]),
        (b"*.*.new", [b"orders.eu.new"]),
        (b"*", [b"orders", b"bills"]),
        (b">", [b"orders", b"orders.eu", b"orders.us", b"bills", b"bills.eu", b"orders.eu.new"]),
    ],
)
@in_loop
async def test_a_subscriber_gets_the_subjects_that_match_and_no_others(pattern: bytes, expected: list[bytes]) -> None:
    """RT-07, RT-08, RT-09"""
    subjects = [b"orders", b"orders.eu", b"orders.us", b"bills", b"bills.eu", b"orders.eu.new"]
    async with Life(FaultyFiles(), tail_bytes_max=1) as life:
        live, late = Recorder(), Recorder()
        life.subscribe(pattern, live)
        subscription, _ = life.subscribe(pattern, late)
        late.is_open = False
        for subject in subjects:
            await life.stored(subject, subject)
        await life.publish_run(Run(subjects[:], subjects[:]))
        await life.settle()
        late.is_open = True
        subscription.wake()
        await life.settle()
        assert live.values[: len(expected)] == expected
        assert sorted(live.values) == sorted(expected * 2)
        assert sorted(late.values) == sorted(live.values)


@in_loop
async def test_nothing_that_was_published_before_comes_though_it_is_stored_later() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        before = life.offer(run_of(b"orders", b"on its way"))
        ann = Recorder()
        life.subscribe(b"orders", ann)
        after = life.offer(run_of(b"orders", b"new"))
        await asyncio.gather(before, after)
        await life.settle()
        assert ann.values == [b"new"]
        await life.stored(b"orders", b"next")
        assert ann.values == [b"new", b"next"]


@in_loop
async def test_nor_what_was_published_before_in_a_write_of_its_own() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        log = life.log(b"orders")
        before = life.offer(run_of(b"orders", b"on its way", b"this too"))
        while not log.flusher.is_busy:
            await asyncio.sleep(0)
        ann = Recorder()
        life.subscribe(b"orders", ann)
        assert log.flusher.is_busy
        after = life.offer(run_of(b"orders", b"new"))
        await asyncio.gather(before, after)
        await life.settle()
        assert ann.values == [b"new"]


@in_loop
async def test_what_is_published_after_something_that_could_not_be_stored_comes() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"old")
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
        failed = life.offer(run_of(b"orders", b"x", b"y"))
        ann = Recorder()
        life.subscribe(b"orders", ann)
        assert (await failed).error is not None
        for value in (b"a", b"b", b"c"):
            await life.stored(b"orders", value)
        assert ann.values == [b"a", b"b", b"c"]


@in_loop
async def test_after_it_is_over_a_subscriber_gets_nothing() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        subscription, member = life.subscribe(b"orders", ann)
        life.subscribe(b"orders", bob)
        await life.stored(b"orders", b"a")
        life.broker.subscriptions.unsubscribe(subscription, member)
        await life.stored(b"orders", b"b")
        assert (ann.values, bob.values) == ([b"a"], [b"a", b"b"])


@in_loop
async def test_a_subscriber_gets_no_more_than_it_asked_for() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        _, member = life.subscribe(b"orders", ann)
        member.remaining = 3
        await life.stored(b"orders", b"a", b"b")
        await life.stored(b"orders", b"c", b"d")
        await life.stored(b"orders", b"e")
        assert ann.values == [b"a", b"b", b"c"]


@in_loop
async def test_who_wants_no_echo_gets_what_others_publish() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(echo=False), Recorder()
        life.subscribe(b"orders", ann)
        life.subscribe(b"orders", bob)
        await life.stored(b"orders", b"first")
        receipt = life.broker.intake.publish(run_of(b"orders", b"ann's", b"ann's too"))
        [(target, offset, indices)] = receipt.places
        ann.published |= {(target.topic_id, target.number, offset + index) for index in indices}
        await life.stored(b"orders", b"bob's")
        assert ann.values == [b"first", b"bob's"]
        assert bob.values == [b"first", b"ann's", b"ann's too", b"bob's"]


@in_loop
async def test_nothing_is_delivered_or_acknowledged_that_is_not_stored() -> None:
    """DE-07"""
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"orders", ann)
        await life.join(b"g", b"orders", bob)
        await life.stored(b"orders", b"a")
        for call in ("write", "write"):
            disk.fail(call, errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
            receipt = await life.publish(b"orders", b"x", b"y")
            assert receipt.error is not None
            assert receipt.error.code == "APPEND_FAILED"
        await life.stored(b"orders", b"b")
        disk.fail("sync", errno.EIO, path_suffix=str(life.log(b"orders").segments[0].path))
        receipt = await life.publish(b"orders", b"z")
        assert receipt.error is not None
        assert receipt.error.code == "LOG_FAILED"
        receipt = await life.publish(b"orders", b"z")
        assert receipt.error is not None
        await life.settle()
        assert ann.values == bob.values == [b"a", b"b"]
        await life.stored(b"bills", b"others are served")


@in_loop
async def test_a_run_of_which_a_part_fails_is_told_as_failed() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"a")
        await life.stored(b"bills", b"a")
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
        receipt = await life.publish_run(Run([b"orders", b"bills"], [b"b", b"b"]))
        assert list(receipt.failed) == [0]
        assert life.in_log(b"orders") == [b"a"]


# ---- who falls behind


@pytest.mark.parametrize("tail_bytes", [1, 1 << 20], ids=["from disk", "from memory"])
@in_loop
async def test_who_falls_behind_gets_everything_later_in_order_and_once(tail_bytes: int) -> None:
    async with Life(FaultyFiles(), tail_bytes_max=tail_bytes) as life:
        ann, bob = Recorder(), Recorder()
        subscription, _ = life.subscribe(b"orders.>", ann)
        life.subscribe(b"orders.>", bob)
        for number in NUMBERS[:10]:
            await life.stored(b"orders.x", number)
        ann.is_open = False
        for number in NUMBERS[10:90]:
            await life.publish(b"orders.x" if int(number) % 3 else b"orders", number)
        await life.settle()
        assert bob.values == [number for number in NUMBERS[:90] if int(number) % 3 or int(number) < 10]
        assert ann.values == NUMBERS[:10]
        assert subscription.lag() == 80
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == bob.values
        assert subscription.lag() == 0
        for number in NUMBERS[90:]:
            await life.stored(b"orders.x", number)
        assert ann.values == bob.values
        assert bob.values[-10:] == NUMBERS[90:]


@in_loop
async def test_who_reads_on_while_more_is_published_misses_and_doubles_nothing() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=1) as life:
        ann = Recorder()
        subscription, _ = life.subscribe(b"orders", ann)
        await life.stored(b"orders", b"0")
        for number in NUMBERS[1:]:
            ann.is_open = int(number) % 7 < 3
            if ann.is_open:
                subscription.wake()
            await life.publish(b"orders", number)
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == NUMBERS


@in_loop
async def test_who_is_behind_in_several_partitions_keeps_the_order_of_each() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=1) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        ann = Recorder()
        subscription, _ = life.subscribe(b">", ann)
        ann.is_open = False
        for number in NUMBERS:
            await life.publish(b"orders", number)
            await life.publish(b"bills", number)
        ann.is_open = True
        subscription.wake()
        await life.settle()
        by_place: dict[tuple[int, int], list[bytes]] = {}
        for message in ann.got:
            by_place.setdefault(message.place, []).append(message.value)
        assert len(by_place) == 4
        assert sorted(ann.values) == sorted(NUMBERS * 2)
        for values in by_place.values():
            assert values == sorted(values, key=int)


@in_loop
async def test_what_retention_dropped_before_a_reader_came_to_it_is_counted() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1)
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        ann = Recorder()
        subscription, member = life.subscribe(b"orders", ann)
        await life.stored(b"orders", b"first")
        ann.is_open = False
        for _ in range(5):
            await life.stored(b"orders", bytes(3000))
        life.store.upkeep()
        kept = life.log(b"orders").start
        assert kept > 2
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert [message.offset for message in ann.got] == [0, *range(kept, 6)]
        assert member.dropped == kept - 1


@in_loop
async def test_a_reader_whose_disk_fails_is_told() -> None:
    disk = FaultyFiles()
    async with Life(disk, tail_bytes_max=1) as life:
        ann, bob = Recorder(), Recorder()
        subscription, _ = life.subscribe(b"orders", ann)
        life.subscribe(b"orders", bob)
        ann.is_open = False
        await life.stored(b"orders", b"a")
        disk.fail("read", errno.EIO, times=5)
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert [error.code for error in ann.errors] == ["READ_FAILED"]
        disk.heal()
        await life.stored(b"orders", b"b")
        assert bob.values == [b"a", b"b"]


# ---- flow


@in_loop
async def test_a_token_bucket_lets_a_burst_through_and_then_so_many_a_second() -> None:
    """FC-01, FC-03"""
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"orders", ann, flow=Flow(rate=10, burst=5))
        life.subscribe(b"orders", bob)
        await life.stored(b"orders", *NUMBERS[:20])
        assert len(bob.got) == 20
        assert ann.values == NUMBERS[:5]
        await life.advance(SECOND // 2)
        assert 5 < len(ann.got) <= 10
        for _ in range(20):
            await life.advance(SECOND // 10)
        assert ann.values == NUMBERS[:20]


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [
        (Overflow.BLOCK, NUMBERS[:50]),
        (Overflow.DROP, NUMBERS[:11]),
        (Overflow.SHED, [*NUMBERS[:1], *NUMBERS[40:50]]),
    ],
)
@in_loop
async def test_what_becomes_of_who_is_too_far_behind(overflow: Overflow, expected: list[bytes]) -> None:
    """FC-06"""
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        subscription, member = life.subscribe(b"orders", ann, flow=Flow(buffer=10, overflow=overflow))
        await life.stored(b"orders", NUMBERS[0])
        ann.is_open = False
        for number in NUMBERS[1:50]:
            await life.stored(b"orders", number)
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == expected
        assert member.dropped == 50 - len(expected)
        assert member.delivered == len(expected)
        await life.stored(b"orders", b"next")
        assert ann.values == [*expected, b"next"]


@pytest.mark.parametrize(
    ("overflow", "expected"), [(Overflow.DROP, NUMBERS[:11]), (Overflow.SHED, [*NUMBERS[:1], *NUMBERS[40:50]])]
)
@in_loop
async def test_a_batch_that_is_larger_than_the_buffer_is_cut(overflow: Overflow, expected: list[bytes]) -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        subscription, member = life.subscribe(b"orders", ann, flow=Flow(buffer=10, overflow=overflow))
        await life.stored(b"orders", NUMBERS[0])
        ann.is_open = False
        await life.stored(b"orders", *NUMBERS[1:50])
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == expected
        assert member.dropped == 50 - len(expected)


@in_loop
async def test_who_pulls_gets_what_it_asks_for() -> None:
    """FC-04"""
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        subscription, member = life.subscribe(b"orders", ann)
        member.set_flow(Flow(), 0)
        await life.stored(b"orders", *NUMBERS[:10])
        assert not ann.got
        for count in (3, 4, 5):
            member.credit = count
            await life.do(subscription.drain())
        assert ann.values == NUMBERS[:10]


# ---- queue groups


@in_loop
async def test_of_a_queue_each_message_goes_to_one_member() -> None:
    """GR-11"""
    async with Life(FaultyFiles()) as life:
        sinks = [Recorder() for _ in range(3)]
        other = Recorder()
        for sink in sinks:
            life.subscribe(b"orders", sink, queue=b"q")
        life.subscribe(b"orders", other, queue=b"other")
        for number in NUMBERS[:60]:
            await life.publish(b"orders", number)
        await life.publish(b"orders", *NUMBERS[60:])
        await life.settle()
        assert sorted(value for sink in sinks for value in sink.values) == sorted(NUMBERS)
        assert {len(sink.got) for sink in sinks} == {33, 34}
        assert other.values == NUMBERS


@in_loop
async def test_when_a_member_of_a_queue_leaves_the_others_get_its_share() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        subscription, member = life.subscribe(b"orders", ann, queue=b"q")
        _, last = life.subscribe(b"orders", bob, queue=b"q")
        await life.stored(b"orders", b"a", b"b")
        life.broker.subscriptions.unsubscribe(subscription, member)
        await life.stored(b"orders", b"c", b"d")
        assert bob.values[1:] == [b"c", b"d"]
        life.broker.subscriptions.unsubscribe(subscription, last)
        await life.stored(b"orders", b"gone with its last member")
        again = Recorder()
        life.subscribe(b"orders", again, queue=b"q")
        await life.stored(b"orders", b"e")
        assert again.values == [b"e"]


@in_loop
async def test_a_member_of_a_queue_that_takes_nothing_does_not_hold_up_the_others() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        subscription, _ = life.subscribe(b"orders", ann, queue=b"q")
        life.subscribe(b"orders", bob, queue=b"q")
        ann.is_open = False
        await life.stored(b"orders", *NUMBERS[:10])
        assert bob.values == NUMBERS[:10]
        bob.is_open = False
        await life.stored(b"orders", *NUMBERS[10:20])
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == NUMBERS[10:20]


# ---- inboxes


@in_loop
async def test_inboxes_are_live_only_and_nothing_of_them_is_stored() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"_INBOX.ann.>", ann)
        _, member = life.subscribe(b"_INBOX.bob.>", bob)
        before = disk.calls
        assert (await life.publish(b"_INBOX.ann.1", b"a", headers=b"Colour: red\r\n")).error is None
        assert (await life.publish(b"_INBOX.ann.2", b"b", b"c")).error is None
        assert ann.values == [b"a", b"b", b"c"], "at once"
        assert not bob.got
        bob.is_open = False
        await life.publish(b"_INBOX.bob.1", b"x")
        bob.is_open = True
        assert member.dropped == 1
        await life.publish(b"_INBOX.bob.1", b"y")
        assert bob.values == [b"y"]
        await life.settle()
        assert disk.calls == before
        assert [topic.name for topic in life.store.topics] == ["$delayed"]


@in_loop
async def test_whether_anyone_gets_what_is_published() -> None:
    async with Life(FaultyFiles()) as life:
        assert not life.broker.is_served(b"orders.eu")
        ann = Recorder()
        subscription, member = life.subscribe(b"orders.*", ann)
        assert life.broker.is_served(b"orders.eu")
        assert not life.broker.is_served(b"orders")
        life.broker.subscriptions.unsubscribe(subscription, member)
        assert not life.broker.is_served(b"orders.eu")
        for name in (b"g", None):
            group, joined = await life.join(name, b"orders.>", ann)
            assert life.broker.is_served(b"orders.eu"), name
            life.broker.groups.leave(group, joined)
            assert not life.broker.is_served(b"orders.eu"), name
