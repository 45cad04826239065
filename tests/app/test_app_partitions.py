"""Handlers of partitioned groups and of batches."""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict

import pytest

from penstock.app import App, Retry
from penstock.client.message import Message
from penstock.embedded import Broker
from tests.support.handlers import SOON, Seen, make_partitioned, publish, until, wait
from tests.support.process import PATIENCE_S

AT_ONCE = Retry.exponential(initial=0, maximum=0, then=0)

# ---- partitioned groups


def test_in_each_partition_one_after_the_other_in_different_ones_at_the_same_time(broker: Broker, app: App) -> None:
    topic, keys = make_partitioned(broker, 3)
    for number in range(60):
        publish(broker, topic, b"%d" % (number // 3), key=keys[number % 3])
    busy: Counter[int] = Counter()
    together, seen, lock = threading.Event(), defaultdict(list), threading.Lock()

    @app.consumer(topic, group=topic, mode="partitioned", concurrency=8)
    def handle(message: Message) -> None:
        with lock:
            busy[message.partition] += 1
            assert busy[message.partition] == 1
            if len(+busy) == 3:
                together.set()
        wait(together)
        with lock:
            seen[message.partition].append(int(message.value))
            busy[message.partition] -= 1

    with app.running():
        until(lambda: app.consumers[0].handled == 60)
    assert seen == {partition: list(range(20)) for partition in range(3)}
    assert app.consumers[0].failed == 0
    assert broker.lag(topic) == 0


def test_of_many_partitions_as_many_are_handled_at_once_as_it_says(broker: Broker, app: App) -> None:
    topic, keys = make_partitioned(broker, 4)
    for key in keys * 3:
        publish(broker, topic, b"x", key=key)
    barrier, running, most, lock = threading.Barrier(2), 0, 0, threading.Lock()

    @app.consumer(topic, group=topic, mode="partitioned", concurrency=2)
    def handle(message: Message) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(PATIENCE_S)
        with lock:
            running -= 1

    with app.running():
        until(lambda: app.consumers[0].handled == 12)
    assert most == 2


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_failure_blocks_its_partition_and_no_other(broker: Broker, app: App, concurrency: int) -> None:
    topic, keys = make_partitioned(broker, 2)
    seen, is_bad = Seen(), True

    @app.consumer(topic, group=topic, mode="partitioned", retry=SOON, concurrency=concurrency)
    def handle(message: Message) -> None:
        if message.value == b"bad" and is_bad:
            raise ValueError("bad")
        seen.put((message.partition, message.value))

    with app.running():
        publish(broker, topic, b"bad", b"behind", key=keys[0])
        publish(broker, topic, b"1", b"2", b"3", key=keys[1])
        assert seen.some(3) == [(1, b"1"), (1, b"2"), (1, b"3")]
        until(lambda: app.consumers[0].retried > 2)
        assert seen.rest() == []
        is_bad = False
        assert seen.some(2) == [(0, b"bad"), (0, b"behind")]
    assert broker.lag(topic) == 0
    assert broker.group(topic).redelivered == 0


def test_attempts_in_a_partition_are_counted_here_and_after_the_last_it_goes_on(
    broker: Broker, app: App, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen, errors = Seen(), Seen()

    @app.consumer(
        topic,
        group=topic,
        mode="partitioned",
        retry=Retry.exponential(initial=0.01, attempts=3),
        on_error=lambda message, error: errors.put(message.value),
    )
    def handle(message: Message) -> None:
        if message.value.startswith(b"bad"):
            raise ValueError("bad")
        seen.put(message.value)

    with app.running():
        publish(broker, topic, b"bad 1", b"bad 2", b"good")
        assert seen.next() == b"good"
    assert errors.rest() == [b"bad 1"] * 3 + [b"bad 2"] * 3
    assert broker.lag(topic) == 0
    consumer = app.consumers[0]
    assert (consumer.handled, consumer.failed, consumer.retried, consumer.skipped) == (1, 6, 4, 2)
    assert f"consumer handle: skipping {topic} (offset 1 of {topic}/0) after 3 failed attempts" in caplog.text


def test_a_partition_is_skipped_through_or_paused_as_a_shared_group_is(broker: Broker, app: App, topic: str) -> None:
    skipping, pausing, is_bad = Seen(), Seen(), True

    def handle(seen: Seen, message: Message) -> None:
        seen.put(message.value)
        if message.value == b"bad" and is_bad:
            raise ValueError("bad")

    for name, seen, retry in (("skips", skipping, Retry.skip()), ("pauses", pausing, Retry.pause())):
        app.consumer(topic, group=f"{topic} {name}", mode="partitioned", retry=retry, name=name)(
            functools.partial(handle, seen)
        )
    with app.running():
        publish(broker, topic, b"bad", b"good")
        assert skipping.some(2) == [b"bad", b"good"]
        assert pausing.next() == b"bad"
        until(lambda: app.consumers[1].is_paused)
        is_bad = False
        app.resume("pauses")
        assert pausing.some(2) == [b"bad", b"good"]
    assert broker.lag(f"{topic} skips") == broker.lag(f"{topic} pauses") == 0


def test_what_was_committed_does_not_come_again(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()
    app.consumer(topic, group=topic, mode="partitioned", name="it")(lambda message: seen.put(message.value))
    for values in ([b"1", b"2"], [b"3"]):
        with app.running():
            publish(broker, topic, *values)
            assert seen.some(len(values)) == values
    assert seen.rest() == []


@pytest.mark.parametrize("still_gets_messages", [True, False])
def test_a_partition_that_another_member_gets_is_not_retried_here(broker: Broker, still_gets_messages: bool) -> None:
    """It is theirs now, and so is the message that failed, and what waited behind it. Messages of other partitions tell
    of that; without them the broker must be asked."""
    topic, keys = make_partitioned(broker, 2)
    first, second = App(broker), App(broker)
    seen, calls = Seen(), Seen()

    @first.consumer(topic, group=topic, mode="partitioned", retry=AT_ONCE)
    def fails(message: Message) -> None:
        if message.partition == 1:
            calls.put(message.value)
            raise ValueError("not here")
        seen.put(message.value)

    @second.consumer(topic, group=topic, mode="partitioned")
    def succeeds(message: Message) -> None:
        seen.put(message.value)

    def go_round(times: int) -> None:
        for _ in range(times):
            publish(broker, topic, b"round", key=keys[0 if still_gets_messages else 1])
            assert seen.next() == b"round"

    with first.running():
        publish(broker, topic, b"bad", b"behind", key=keys[1])
        assert calls.some(3) == [b"bad"] * 3
        with second.running():
            assert seen.some(2) == [b"bad", b"behind"]
            go_round(3)
            calls.rest()  # one that had begun, and one that was about to
            go_round(20)
            assert calls.rest() == []
            until(lambda: broker.lag(topic) == 0)
    assert seen.rest() == []


@pytest.mark.parametrize("is_everything", [True, False])
def test_a_group_that_is_set_back_gets_what_waited_once_and_in_order(
    broker: Broker, app: App, is_everything: bool
) -> None:
    """Of the partitions that are not set back, what was not committed comes again.

    How many the worker begins before it hears of the reset is not said: their commits are refused, and they come again.
    """
    topic, keys = make_partitioned(broker, 2)
    begun, over, seen = threading.Event(), threading.Event(), Seen()

    @app.consumer(topic, group=topic, mode="partitioned")
    def handle(message: Message) -> None:
        begun.set()
        wait(over)
        seen.put((message.partition, message.value))

    with app.running():
        publish(broker, topic, b"1", b"2", b"3", key=keys[1])
        wait(begun)
        broker.reset_group(topic, "earliest", topic=topic, partition=None if is_everything else 0)
        over.set()
        until(lambda: broker.lag(topic) == 0)
    everything = [(1, b"1"), (1, b"2"), (1, b"3")]
    handled = seen.rest()
    begun_before, again = handled[:-3], handled[-3:]
    assert again == everything
    assert begun_before
    assert begun_before == everything[: len(begun_before)]


def test_a_partition_with_a_long_backlog_is_read_through(broker: Broker, app: App, topic: str) -> None:
    """More than the buffer holds, so that it is filled and emptied again."""
    values = [b"%d" % number for number in range(500)]
    broker.publish_many((topic, value) for value in values)
    seen = Seen()

    @app.consumer(topic, group=topic, mode="partitioned", buffer=7)
    async def handle(message: Message) -> None:
        seen.put(message.value)

    with app.running():
        assert seen.some(500) == values
    assert broker.lag(topic) == 0


# ---- batches that fail


def test_of_a_shared_batch_only_the_bad_message_comes_again(broker: Broker, app: App, topic: str) -> None:
    publish(broker, topic, *(b"%d" % number for number in range(8)))
    good, bad = Seen(), Seen()

    @app.consumer(topic, group=topic, batch=8, retry=Retry.exponential(initial=0.01, attempts=2))
    def handle(messages: list[Message]) -> None:
        values = [message.value for message in messages]
        if b"5" in values:
            bad.put(values)
            raise ValueError("5")
        good.put(values)

    with app.running():
        until(lambda: bool(broker.dead_letters(topic)))
    assert [value for values in good.rest() for value in values] == [b"0", b"1", b"2", b"3", b"4", b"6", b"7"]
    assert bad.rest()[-2:] == [[b"5"], [b"5"]]
    (letter,) = broker.dead_letters(topic)
    assert (letter.value, letter.attempts) == (b"5", 2)
    assert broker.lag(topic) == 0
    assert app.consumers[0].handled == 7


def test_in_a_partition_what_is_behind_the_bad_message_waits_for_it(broker: Broker, app: App, topic: str) -> None:
    publish(broker, topic, *(b"%d" % number for number in range(8)))
    good, failures = Seen(), 0

    @app.consumer(topic, group=topic, batch=8, mode="partitioned", retry=SOON)
    def handle(messages: list[Message]) -> None:
        nonlocal failures
        if failures < 8 and any(message.value == b"5" for message in messages):
            failures += 1
            raise ValueError("5")
        for message in messages:
            good.put(message.value)

    with app.running():
        assert good.some(8) == [b"%d" % number for number in range(8)]
    assert failures == 8
    assert broker.lag(topic) == 0


def test_each_bad_message_of_a_batch_has_all_its_attempts(broker: Broker, app: App, topic: str) -> None:
    publish(broker, topic, b"bad 1", b"bad 2", b"good")
    alone: Counter[bytes] = Counter()

    @app.consumer(topic, group=topic, batch=4, mode="partitioned", retry=Retry.exponential(initial=0, attempts=3))
    def handle(messages: list[Message]) -> None:
        if len(messages) == 1:
            alone[messages[0].value] += 1
        if any(message.value.startswith(b"bad") for message in messages):
            raise ValueError("bad")

    with app.running():
        until(lambda: app.consumers[0].handled == 1)
    assert (alone[b"bad 1"], alone[b"bad 2"]) == (3, 3)
    assert app.consumers[0].skipped == 2
    assert broker.lag(topic) == 0


def test_a_bad_message_in_a_batch_is_skipped_alone(broker: Broker, app: App, topic: str) -> None:
    publish(broker, topic, b"1", b"bad", b"2", b"3")
    good, told = Seen(), Seen()

    @app.consumer(topic, group=topic, batch=4, retry=Retry.skip(), on_error=lambda m, _: told.put(m.value))
    async def handle(messages: list[Message]) -> None:
        if any(message.value == b"bad" for message in messages):
            raise ValueError("bad")
        for message in messages:
            good.put(message.value)

    with app.running():
        assert good.some(3) == [b"1", b"2", b"3"]
    assert told.rest()[-1] == b"bad"
    consumer = app.consumers[0]
    assert (consumer.handled, consumer.skipped) == (3, 1)
    assert broker.lag(topic) == 0
