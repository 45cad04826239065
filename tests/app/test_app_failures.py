"""Handlers that fail, take long, or are paused."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.app import App, Retry
from penstock.client.aio import AsyncClient
from penstock.client.message import Message
from penstock.embedded import Broker
from tests.support.handlers import NUMBERS, SOON, Seen, make_partitioned, make_topic, publish, stopping, until, wait
from tests.support.process import PATIENCE_S

# Short enough to wait until it is over, long enough that a busy machine extends it in time.
DEADLINE_MS = 1000


def deadline_passes(broker: Broker, topic: str) -> None:
    """Until a message of the topic that was delivered just now, and which nobody extends, is delivered again."""
    with broker.subscribe(topic, group=f"clock {next(NUMBERS)}", start="earliest") as clock:
        while clock.get(timeout=PATIENCE_S).attempts == 1:
            pass


# ---- failures in a shared group


def test_a_message_that_fails_comes_again_and_the_broker_counts(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()

    @app.consumer(topic, group=topic, retry=SOON)
    def handle(message: Message) -> None:
        seen.put((message.value, message.attempts))
        if message.attempts < 3:
            raise ValueError("not yet")

    with app.running():
        publish(broker, topic, b"x")
        assert seen.some(3) == [(b"x", 1), (b"x", 2), (b"x", 3)]
    assert broker.lag(topic) == 0
    consumer = app.consumers[0]
    assert (consumer.handled, consumer.failed, consumer.retried, consumer.rejected) == (1, 2, 2, 0)


def test_while_a_message_waits_to_come_again_others_are_handled(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()

    @app.consumer(topic, group=topic, retry=Retry.exponential(initial=3600, maximum=3600))
    def handle(message: Message) -> None:
        seen.put(message.value)
        if message.value == b"bad":
            raise ValueError(message.value)

    with app.running():
        publish(broker, topic, b"bad", b"1", b"2")
        assert seen.some(3) == [b"bad", b"1", b"2"]
    assert broker.lag(topic) == 1


def test_after_the_last_delivery_of_the_topic_it_is_a_dead_letter(broker: Broker, app: App) -> None:
    topic = make_topic(broker, deliveries_max=2)

    @app.consumer(topic, group=topic, retry=SOON)
    def handle(message: Message) -> None:
        raise ValueError("never")

    with app.running():
        publish(broker, topic, b"x")
        until(lambda: bool(broker.dead_letters(f"{topic}")))
    (letter,) = broker.dead_letters(topic)
    assert (letter.value, letter.group, letter.attempts, letter.reason) == (b"x", topic, 2, "ValueError: never")
    assert app.consumers[0].failed == 2
    assert broker.lag(topic) == 0


def test_forever_is_forever_whatever_the_topic_says(broker: Broker, app: App) -> None:
    topic, seen = make_topic(broker, deliveries_max=1), Seen()

    @app.consumer(topic, group=topic, retry=Retry.forever(initial=0.001, maximum=0.01))
    def handle(message: Message) -> None:
        seen.put(message.value)
        if message.attempts < 6:
            raise ValueError("not yet")

    with app.running():
        publish(broker, topic, b"x")
        assert seen.some(6) == [b"x"] * 6
        until(lambda: broker.lag(topic) == 0)
    assert broker.dead_letters(topic) == []


def test_more_attempts_than_the_topic_has_deliveries_are_made(broker: Broker, app: App) -> None:
    topic = make_topic(broker, deliveries_max=1)

    @app.consumer(topic, group=topic, retry=Retry.exponential(initial=0.001, attempts=3))
    def handle(message: Message) -> None:
        raise ValueError("never")

    with app.running():
        publish(broker, topic, b"x")
        until(lambda: bool(broker.dead_letters(topic)))
    (letter,) = broker.dead_letters(topic)
    assert (letter.value, letter.attempts, app.consumers[0].failed) == (b"x", 3, 3)


def test_after_the_last_attempt_of_the_policy_it_is_a_dead_letter_at_once(broker: Broker, app: App, topic: str) -> None:
    @app.consumer(topic, group=topic, retry=Retry.exponential(initial=0.01, attempts=2))
    def handle(message: Message) -> None:
        raise ValueError("never")

    with app.running():
        publish(broker, topic, b"x")
        until(lambda: bool(broker.dead_letters(topic)))
    (letter,) = broker.dead_letters(topic)
    assert (letter.value, letter.attempts, letter.reason) == (b"x", 2, "ValueError: never")
    consumer = app.consumers[0]
    assert (consumer.failed, consumer.retried, consumer.rejected) == (2, 1, 1)


def test_what_is_skipped_counts_as_done(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()

    @app.consumer(topic, group=topic, retry=Retry.skip())
    def handle(message: Message) -> None:
        seen.put(message.value)
        if message.value == b"bad":
            raise ValueError("bad")

    with app.running():
        publish(broker, topic, b"bad", b"good")
        assert seen.some(2) == [b"bad", b"good"]
    assert broker.lag(topic) == 0
    assert broker.dead_letters(topic) == []
    consumer = app.consumers[0]
    assert (consumer.handled, consumer.failed, consumer.skipped) == (1, 1, 1)


@pytest.mark.parametrize("is_async", [False, True])
def test_on_error_hears_of_each_failure(broker: Broker, app: App, topic: str, is_async: bool) -> None:
    errors = Seen()

    def tell(message: Message, error: Exception) -> None:
        errors.put((message.value, message.attempts, str(error)))

    async def tell_async(message: Message, error: Exception) -> None:
        tell(message, error)

    @app.consumer(topic, group=topic, retry=SOON, on_error=tell_async if is_async else tell)
    async def handle(message: Message) -> None:
        if message.attempts < 3:
            raise ValueError(f"attempt {message.attempts}")

    with app.running():
        publish(broker, topic, b"x")
        assert errors.some(2) == [(b"x", 1, "attempt 1"), (b"x", 2, "attempt 2")]
        until(lambda: app.consumers[0].handled == 1)


def test_a_failure_is_logged_once_with_its_traceback(
    broker: Broker, app: App, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    @app.consumer(topic, group=topic, retry=Retry.skip())
    def handle(message: Message) -> None:
        raise ValueError("just so")

    with app.running():
        publish(broker, topic, b"x")
        until(lambda: app.consumers[0].skipped == 1)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage() == f"consumer handle: failed for {topic} (offset 0 of {topic}/0)"
    assert record.exc_info is not None
    assert repr(record.exc_info[1]) == "ValueError('just so')"


def test_an_on_error_that_fails_is_logged_and_the_message_fares_as_without_it(
    broker: Broker, app: App, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    def tell(message: Message, error: Exception) -> None:
        raise LookupError("no telephone")

    @app.consumer(topic, group=topic, retry=Retry.skip(), on_error=tell)
    def handle(message: Message) -> None:
        raise ValueError("just so")

    with app.running():
        publish(broker, topic, b"x")
        until(lambda: app.consumers[0].skipped == 1)
    [record] = [each for each in caplog.records if each.getMessage() == "consumer handle: on_error failed too"]
    assert record.exc_info is not None
    assert repr(record.exc_info[1]) == "LookupError('no telephone')"
    assert broker.lag(topic) == 0


async def wait_for_what_is_cancelled() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def raise_stop_iteration() -> None:
    next(iter(()))


@pytest.mark.parametrize("fail", [wait_for_what_is_cancelled, raise_stop_iteration])
def test_whatever_ends_a_handler_but_its_return_is_a_failure(
    broker: Broker, app: App, topic: str, fail: Callable[[], object]
) -> None:
    """Some exceptions mean something to the loop itself: they must not end it, nor be taken for success."""
    app.consumer(topic, group=topic, retry=Retry.skip(), name="it")(lambda message: fail())
    with app.running():
        publish(broker, topic, b"x", b"y")
        until(lambda: app.consumers[0].skipped == 2)
    assert app.consumers[0].failed == 2


@pytest.mark.parametrize("is_stopping", [False, True])
def test_what_the_broker_refuses_to_hear_of_a_message_is_logged(
    broker: Broker, app: App, topic: str, caplog: pytest.LogCaptureFixture, is_stopping: bool
) -> None:
    """Here because the handler itself has acknowledged it before it failed."""
    refusal = "consumer handle: too late for 1 message"

    @app.consumer(topic, group=topic)
    def handle(message: Message) -> None:
        message.ack()
        until(lambda: broker.lag(topic) == 0)
        if is_stopping:
            app.stop()
            until(lambda: stopping(app))
        raise ValueError("too late")

    with app.running():
        publish(broker, topic, b"x")
        until(lambda: is_stopping or refusal in caplog.text)
        until(lambda: app.consumers[0].failed == 1)
    assert refusal in caplog.text


# ---- deadlines


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_has_all_the_time_it_takes(
    broker: Broker, app: App, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    topic = make_topic(broker, ack_deadline_ms=DEADLINE_MS, deliveries_max=1000)
    begun, over, seen = threading.Event(), threading.Event(), Seen()

    def handle(message: Message) -> None:
        seen.put((message.value, message.attempts))
        if message.value == b"long":
            begun.set()
            wait(over)

    async def handle_async(message: Message) -> None:
        await asyncio.to_thread(handle, message)

    app.consumer(topic, group=topic, name="it")(handle_async if is_async else handle)
    with app.running():
        publish(broker, topic, b"short", b"long")
        wait(begun)
        deadline_passes(broker, topic)
        over.set()
    assert seen.rest() == [(b"short", 1), (b"long", 1)]
    assert broker.group(topic).redelivered == 0
    assert broker.lag(topic) == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], (
        "nothing is extended too late"
    )


def test_messages_that_wait_behind_a_busy_handler_keep_their_place_too(broker: Broker, app: App) -> None:
    """Those of a topic of which none was handled yet, too."""
    name = make_topic(broker)
    topics = [f"{name}x.{letter}" for letter in "ab"]
    for topic in topics:
        broker.create_topic(topic, ack_deadline_ms=DEADLINE_MS, deliveries_max=1000)
    begun, over, seen = threading.Event(), threading.Event(), Seen()

    @app.consumer(f"{name}x.>", group=name)
    def handle(message: Message) -> None:
        seen.put((message.subject, message.value, message.attempts))
        begun.set()
        wait(over)

    with app.running():
        publish(broker, topics[0], b"1")
        wait(begun)
        publish(broker, topics[0], b"2")
        publish(broker, topics[1], b"3")
        deadline_passes(broker, topics[1])
        over.set()
        found = seen.some(3)
    assert found == [(topics[0], b"1", 1), (topics[0], b"2", 1), (topics[1], b"3", 1)]
    assert broker.group(name).redelivered == 0


def test_a_message_may_be_extended_and_done_in_one_breath(broker: Broker, topic: str) -> None:
    """As it happens when a deadline is extended while a handler ends: the broker hears both in this order."""
    publish(broker, topic, b"1", b"2")

    async def main() -> None:
        async with AsyncClient(broker) as client:
            subscription = await client.subscribe(topic, group=topic, start="earliest")
            first, second = await subscription.get(PATIENCE_S), await subscription.get(PATIENCE_S)
            first.ack()
            second.extend()
            second.ack()
            await subscription.flush()

    asyncio.run(main())
    assert broker.lag(topic) == 0


def test_a_consumer_of_a_whole_topic(broker: Broker, app: App) -> None:
    topic = make_topic(broker)
    seen = Seen()

    @app.consumer(topic=topic, group=topic)
    def handle(message: Message) -> None:
        seen.put(message.subject)

    for subject in (topic, f"{topic}.eu"):
        broker.publish(subject, b"x")
    with app.running():
        assert set(seen.some(2)) == {topic, f"{topic}.eu"}
    with pytest.raises(ValueError, match="either a pattern of subjects or a topic"):
        app.consumer(group="neither")


# ---- pauses


def test_a_paused_consumer_takes_up_with_the_message_that_failed(broker: Broker, app: App) -> None:
    topic = make_topic(broker, ack_deadline_ms=DEADLINE_MS, deliveries_max=1000)
    seen, is_bad = Seen(), True

    @app.consumer(topic, group=topic, retry=Retry.pause())
    def handle(message: Message) -> None:
        seen.put((message.value, message.attempts))
        if is_bad:
            raise ValueError("bad")

    with app.running():
        publish(broker, topic, b"1", b"2", b"3")
        assert seen.next() == (b"1", 1)
        until(lambda: app.consumers[0].is_paused)
        deadline_passes(broker, topic)
        assert seen.rest() == []
        is_bad = False
        app.resume("handle")
        assert seen.some(3) == [(b"1", 1), (b"2", 1), (b"3", 1)]
    assert broker.lag(topic) == 0
    assert broker.group(topic).redelivered == 0
    consumer = app.consumers[0]
    assert (consumer.handled, consumer.failed, consumer.paused, consumer.is_paused) == (3, 1, 1, False)


def test_a_paused_consumer_can_be_stopped_and_its_message_comes_again(
    broker: Broker, app: App, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen, is_bad = Seen(), True

    @app.consumer(topic, group=topic, retry=Retry.pause())
    def handle(message: Message) -> None:
        seen.put((message.value, message.attempts))
        if is_bad:
            raise ValueError("bad")

    with app.running():
        publish(broker, topic, b"x")
        assert seen.next() == (b"x", 1)
        until(lambda: app.consumers[0].is_paused)
    assert "did not finish within" not in caplog.text
    assert broker.lag(topic) == 1
    is_bad = False
    app.resume("handle")
    with app.running():
        assert seen.next() == (b"x", 2)
    assert broker.lag(topic) == 0


@pytest.mark.parametrize("mode", ["shared", "partitioned"])
def test_a_consumer_that_is_paused_by_hand_begins_nothing_until_it_is_resumed(
    broker: Broker, app: App, mode: Any
) -> None:
    topic, keys = make_partitioned(broker, 2)
    begun, over, seen = threading.Event(), threading.Event(), Seen()

    @app.consumer(topic, group=topic, mode=mode)
    def handle(message: Message) -> None:
        begun.set()
        wait(over)
        seen.put(message.value)

    others = Seen()
    app.consumer(topic, group=f"{topic} others", name="others")(lambda message: others.put(message.value))
    with app.running():
        publish(broker, topic, b"1", key=keys[0])
        wait(begun)
        publish(broker, topic, b"2", key=keys[1])
        assert others.some(2) == [b"1", b"2"]
        app.pause("handle")
        over.set()
        assert seen.next() == b"1", "what ran was finished"
        publish(broker, topic, b"3", key=keys[1])
        assert others.next() == b"3"
        assert seen.rest() == []
        app.resume("handle")
        assert seen.some(2) == [b"2", b"3"]
