"""What one connection publishes is delivered in that order, whatever it is, and wherever it is stored."""

from __future__ import annotations

import asyncio
import errno
from random import Random
from typing import Final

import pytest

from penstock.broker.intake import Receipt
from penstock.broker.order import Order, Publisher
from penstock.broker.trail import CatchUpTurns
from penstock.errors import Overloaded
from penstock.log.policy import Durability, Policy
from penstock.model.run import Run
from penstock.model.subject import matches
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import Life, Recorder, in_loop
from tests.support.sampling import examples

FLUSH: Final = Policy(durability=Durability.FLUSH)
TOPICS: Final = {b"a": Policy(), b"b": Policy(), b"quick": FLUSH}
INBOX: Final = b"_INBOX.x"
SUBJECTS: Final = (b"a", b"a.x", b"b", b"b.x", b"quick", b"quick.x", INBOX)


async def make_topics(life: Life) -> None:
    for name, policy in TOPICS.items():
        await life.do(life.broker.changes.create(name, policy=policy))


def publish(life: Life, publisher: Publisher, *messages: tuple[bytes, bytes]) -> asyncio.Future[Receipt]:
    decided: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
    run = Run([subject for subject, _ in messages], [value for _, value in messages])
    receipt = life.broker.intake.publish(run, None, publisher)
    receipt.outcome.then(lambda _: decided.set_result(receipt))
    return decided


def listen(life: Life, *patterns: bytes) -> Recorder:
    sink = Recorder()
    for pattern in patterns:
        life.subscribe(pattern, sink, sid=pattern)
    return sink


@in_loop
async def test_what_needs_no_sync_waits_for_what_does() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        everything, one = listen(life, b">"), listen(life, b"quick")
        publisher = Publisher()
        publish(life, publisher, (b"a", b"1"))
        publish(life, publisher, (b"quick", b"2"))
        publish(life, publisher, (INBOX, b"3"))
        publish(life, publisher, (b"b", b"4"), (b"quick", b"5"), (INBOX, b"6"), (b"b", b"7"))
        assert everything.values == []
        await life.settle()
        assert everything.values == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
        assert one.values == [b"2", b"5"]


@in_loop
async def test_a_request_that_nothing_precedes_waits_for_nothing() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        sink = listen(life, b">")
        publisher, other = Publisher(), Publisher()
        publish(life, other, (b"a", b"event"))
        assert publish(life, publisher, (INBOX, b"question"), (b"_INBOX.y", b"question")).done()
        assert sink.values == [b"question", b"question"]
        await life.settle()
        # And when what preceded it is delivered.
        publish(life, other, (INBOX, b"reply"))
        assert sink.values == [b"question", b"question", b"event", b"reply"]


@in_loop
async def test_what_waits_is_looked_at_once_for_each_round_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    serve = Order._serve_in_order

    def count(order: Order) -> None:
        nonlocal looked
        looked += 1
        serve(order)

    monkeypatch.setattr(Order, "_serve_in_order", count)
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        sink = listen(life, b">")
        publisher = Publisher()
        for number in range(500):
            publish(life, publisher, (b"a", b"%d" % (2 * number)))
            publish(life, publisher, (INBOX, b"%d" % (2 * number + 1)))
        await life.settle()
        assert sink.values == [b"%d" % number for number in range(1000)]
        assert looked < 20


@in_loop
async def test_messages_that_are_spread_over_partitions_arrive_in_order() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"spread", partitions=4))
        sink = listen(life, b">")
        publisher = Publisher()
        for first in range(0, 1000, 100):
            publish(life, publisher, *((b"spread", b"%d" % number) for number in range(first, first + 100)))
        await life.settle()
        assert sink.values == [b"%d" % number for number in range(1000)]


@in_loop
async def test_nobody_waits_for_what_cannot_be_stored() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await make_topics(life)
        sink = listen(life, b">")
        publisher = Publisher()
        disk.fail("write", errno.EIO, path_suffix=f"/{life.partition(b'a').topic_id}/0/{0:020}.log")
        receipt = publish(life, publisher, (b"a", b"1"), (b"b", b"2"), (b"quick", b"3"), (INBOX, b"4"))
        await life.settle()
        assert list(receipt.result().failed) == [0]
        assert sink.values == [b"2", b"3", b"4"]


@in_loop
async def test_nobody_waits_for_a_log_that_a_transaction_holds() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        sink = listen(life, b">")
        publisher = Publisher()
        life.log(b"a").hold()
        receipt = publish(life, publisher, (b"a", b"1"), (b"quick", b"2"), (INBOX, b"3"))
        await life.settle()
        assert (sink.values, receipt.done()) == ([b"2", b"3"], False)
        life.log(b"a").release()
        assert (sink.values, receipt.done()) == ([b"2", b"3", b"1"], True)


@in_loop
async def test_nobody_waits_for_a_topic_that_is_deleted() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        sink = listen(life, b">")
        publisher = Publisher()
        receipt = publish(life, publisher, (b"a", b"1"), (b"quick", b"2"), (INBOX, b"3"))
        await life.do(life.broker.changes.delete(b"a"))
        await life.settle()
        assert receipt.done()
        assert sink.values[-2:] == [b"2", b"3"]


@in_loop
async def test_who_leaves_gets_what_waits_and_who_comes_does_not() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        leaving, staying = Recorder(), listen(life, INBOX)
        subscription, member = life.subscribe(INBOX, leaving)
        publisher = Publisher()
        publish(life, publisher, (b"a", b"1"), (INBOX, b"2"))
        newcomer = listen(life, INBOX)
        ended: list[bool] = []
        life.broker.subscriptions.finish(subscription, member, lambda: ended.append(True))
        assert (leaving.values, ended) == ([], [])
        await life.settle()
        assert (leaving.values, ended) == ([b"2"], [True])
        assert (staying.values, newcomer.values) == ([b"2"], [])
        publish(life, publisher, (INBOX, b"3"))
        assert (leaving.values, staying.values, newcomer.values) == ([b"2"], [b"2", b"3"], [b"3"])


@in_loop
@pytest.mark.parametrize("other", [None, b"_INBOX.*", b"_INBOX.>"])
async def test_who_leaves_a_queue_changes_the_order_of_nobody(other: bytes | None) -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        everything, leaving, staying = listen(life, b">"), Recorder(), Recorder()
        subscription, member = life.subscribe(INBOX, leaving, queue=b"q")
        if other is not None:
            life.subscribe(other, staying, queue=b"q")
        publisher = Publisher()
        publish(life, publisher, (b"a", b"1"), (INBOX, b"2"))
        newcomer = Recorder()
        life.subscribe(b"*.x", newcomer, queue=b"q")
        life.broker.subscriptions.finish(subscription, member, lambda: None)
        publish(life, publisher, (b"a", b"3"), (INBOX, b"4"))
        await life.settle()
        assert everything.values == [b"1", b"2", b"3", b"4"]
        # Somebody of the queue who was there when it was published gets each message, once.
        wanted = ([b"2"], [], [b"4"]) if other is None else ([], [b"2", b"4"], [])
        assert (leaving.values, staying.values, newcomer.values) == wanted


@in_loop
@pytest.mark.parametrize(("after", "count"), [(1, 3), (3, 3), (4, 4), (6, 6), (9, 7)])
async def test_a_maximum_changes_the_order_of_nobody_and_counts_what_waits(after: int, count: int) -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        everything, limited = listen(life, b">"), Recorder()
        subscription, member = life.subscribe(b">", limited)
        publisher = Publisher()
        publish(life, publisher, (b"a", b"1"), (INBOX, b"2"), (b"b", b"3"))
        life.broker.subscriptions.finish(subscription, member, lambda: None, after=after)
        publish(life, publisher, (INBOX, b"4"), (b"a", b"5"), (INBOX, b"6"), (b"a", b"7"))
        await life.settle()
        assert everything.values == [b"%d" % number for number in range(1, 8)]
        assert limited.values == everything.values[:count]


@in_loop
@pytest.mark.parametrize(("after", "unstored"), [(1, 0), (2, 0), (3, 1), (4, 2), (9, 5)])
async def test_what_others_publish_meanwhile_and_is_not_stored_does_not_exceed_a_maximum(
    after: int, unstored: int
) -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        limited = Recorder()
        subscription, member = life.subscribe(b">", limited)
        publish(life, Publisher(), (b"a", b"1"), (b"b", b"2"))
        life.broker.subscriptions.finish(subscription, member, lambda: None, after=after)
        others = [Publisher(), Publisher()]
        publish(life, others[0], (INBOX, b"3"))
        publish(life, others[1], (INBOX, b"4"), (INBOX, b"5"))
        publish(life, others[0], (INBOX, b"6"), (INBOX, b"7"))
        await life.settle()
        # What was stored before the maximum was set counts first, although it is delivered last.
        assert limited.values == [*[b"3", b"4", b"5", b"6", b"7"][:unstored], b"1", b"2"]
        assert (subscription.members == []) == (after < 9)


@in_loop
async def test_what_waits_and_is_not_stored_counts_with_what_waits_for_the_disk() -> None:
    async with Life(FaultyFiles(), unflushed_bytes_max=10_000) as life:
        await make_topics(life)
        sink = listen(life, b">")
        publisher = Publisher()
        publish(life, publisher, (b"a", b"1"))
        publish(life, publisher, (INBOX, bytes(6000)))
        more = Run([INBOX], [bytes(6000)])
        assert life.broker.intake.is_ready(more)
        assert not life.broker.intake.is_ready(more, publisher)
        refused = publish(life, publisher, (INBOX, bytes(6000)))
        assert isinstance(refused.result().failed[0], Overloaded)
        await life.do(life.broker.intake.make_ready(more, publisher))
        assert publish(life, publisher, (INBOX, b"2")).done()
        assert sink.values == [b"1", bytes(6000), b"2"]
        assert life.store.rounds.unflushed.used == 0


@in_loop
async def test_a_large_run_does_not_keep_the_others_waiting() -> None:
    async with Life(FaultyFiles()) as life:
        await make_topics(life)
        sink = listen(life, b">")
        publisher = Publisher()
        publish(life, publisher, *[(b"a", b"x")] * 20_000)
        publish(life, publisher, (b"quick", b"2"), (INBOX, b"3"))
        await life.settle()
        assert sorted(sink.values) == [b"2", b"3", *[b"x"] * 20_000]


@pytest.mark.parametrize("is_faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("seed", range(examples(20)))
@in_loop
async def test_each_connection_receives_the_messages_of_another_in_order(seed: int, is_faulty: bool) -> None:
    """All that is stored arrives, in order unless the disk fails."""
    random = Random(seed)
    disk = FaultyFiles(seed=seed)
    async with Life(disk) as life:
        await make_topics(life)
        sinks = [
            (patterns, listen(life, *patterns))
            for patterns in ([b">"], [b"a.>", b"b.>"], [b"*", INBOX], [b"quick", INBOX, b"*.x"], [b"a", b"b.x"])
        ]
        publishers = [Publisher() for _ in range(3)]
        offered: list[tuple[asyncio.Future[Receipt], list[tuple[bytes, bytes]]]] = []
        numbers = [0] * len(publishers)
        for _ in range(random.randrange(5, 60)):
            at = random.randrange(len(publishers))
            messages = []
            for _ in range(random.choice((1, 1, 1, 2, 5))):
                messages.append((random.choice(SUBJECTS), b"%d:%d" % (at, numbers[at])))
                numbers[at] += 1
            offered.append((publish(life, publishers[at], *messages), messages))
            if random.random() < 0.2:
                await asyncio.sleep(0)
            if random.random() < 0.1:
                await life.settle()
            if is_faulty and random.random() < 0.05:
                disk.fail("write", errno.EIO)
        await life.settle()
        disk.heal()
        stored = [
            message
            for receipt, messages in offered
            for index, message in enumerate(messages)
            if index not in receipt.result().failed
        ]
        for patterns, sink in sinks:
            for at in range(0 if is_faulty else len(publishers)):
                got = [value for value in sink.values if value.startswith(b"%d:" % at)]
                assert got == sorted(got, key=lambda value: int(value.partition(b":")[2])), patterns
            if patterns == [b">"]:
                assert sorted(sink.values) == sorted(value for _, value in stored)


@pytest.mark.parametrize("seed", range(examples(30)))
@in_loop
async def test_a_subscription_that_falls_behind_receives_the_messages_of_a_connection_in_order(seed: int) -> None:
    """Connections take messages, or none for a while; small segments and a small tail let them read from the disk."""
    random = Random(seed)
    async with Life(FaultyFiles(seed=seed), tail_bytes_max=random.choice((0, 2000, 1 << 20))) as life:
        await make_topics(life)
        await life.do(life.broker.changes.create(b"spread", partitions=3))
        readers = []
        for pattern in (b">", b"*", b"*.x", b"a.>", b"spread.*"):
            sink = Recorder()
            subscription, _ = life.subscribe(pattern, sink, sid=pattern)
            readers.append((pattern, sink, subscription))
        publishers = [Publisher() for _ in range(3)]
        offered = []
        numbers = [0] * len(publishers)
        for _ in range(random.randrange(20, 120)):
            at = random.randrange(len(publishers))
            messages = []
            for _ in range(random.choice((1, 1, 1, 2, 5))):
                subject = random.choice((b"a", b"a.x", b"b", b"b.x", b"quick", b"quick.x", b"spread", b"spread.x"))
                messages.append((subject, b"%d:%d" % (at, numbers[at])))
                numbers[at] += 1
            publish(life, publishers[at], *messages)
            offered += messages
            for _, sink, subscription in readers:
                if random.random() < 0.3:
                    sink.is_open = not sink.is_open
                    if sink.is_open:
                        subscription.wake()
            if random.random() < 0.2:
                await asyncio.sleep(0)
            if random.random() < 0.2:
                await life.settle()
        for _, sink, subscription in readers:
            sink.is_open = True
            subscription.wake()
        await life.settle()
        for pattern, sink, subscription in readers:
            wanted = [value for subject, value in offered if matches(pattern, subject)]
            assert sorted(sink.values) == sorted(wanted), pattern
            for at in range(len(publishers)):
                got = [value for value in sink.values if value.startswith(b"%d:" % at)]
                assert got == sorted(got, key=lambda value: int(value.partition(b":")[2])), pattern
            assert not subscription.behind
        assert life.broker.trail.usage.used == 0, "nobody is behind"


@in_loop
async def test_beyond_the_steps_of_the_trail_each_partition_is_in_order_and_nothing_is_missing() -> None:
    async with Life(FaultyFiles()) as life:
        life.broker.trail._steps_max = 10
        await make_topics(life)
        sink = Recorder()
        subscription, _ = life.subscribe(b">", sink)
        sink.is_open = False
        publisher = Publisher()
        for number in range(100):
            publish(life, publisher, (b"a" if number % 2 else b"b", b"%d" % number))
            await life.settle()
        assert life.broker.trail.usage.used <= 10
        sink.is_open = True
        subscription.wake()
        await life.settle()
        assert sorted(sink.values, key=int) == [b"%d" % number for number in range(100)]
        for remainder in (0, 1):
            got = [int(value) for value in sink.values if int(value) % 2 == remainder]
            assert got == sorted(got)
        # The last steps are still known.
        assert sink.values[-5:] == [b"95", b"96", b"97", b"98", b"99"]


def test_subscriptions_that_catch_up_share_the_turns_of_the_loop() -> None:
    clock = ManualClock()
    turns = CatchUpTurns(clock, turn_us=5)
    seen: list[str] = []

    async def catch_up() -> None:
        for _ in range(20):
            await turns.take()
            clock.advance(1)
            seen.append("read")

    async def main() -> None:
        readers = [asyncio.create_task(catch_up()) for _ in range(10)]
        while not all(reader.done() for reader in readers):
            seen.append("turn")
            await asyncio.sleep(0)

    asyncio.run(main())
    assert seen.count("read") == 200
    assert max(map(len, "".join(word[0] for word in seen).split("t"))) == 5
