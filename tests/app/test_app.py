"""Consumers as functions, with a real broker: what is called with what, and what becomes of messages that fail."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from queue import Queue
from typing import Any

import pytest

from penstock.app import App, Consumer, Retry
from penstock.app.threads import Threads
from penstock.client.aio import AsyncClient
from penstock.client.message import Message
from penstock.embedded import Broker
from penstock.errors import GroupConflict, NoBroker, UnknownGroup
from tests.support.server import PATIENCE_S

# Short enough to wait until it is over, long enough that a busy machine extends it in time.
DEADLINE_MS = 1000
SOON = Retry.exponential(initial=0.01, maximum=0.01, then=0.01)
AT_ONCE = Retry.exponential(initial=0, maximum=0, then=0)
_numbers = count()


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(settings={"topic.durability": "flush"}) as broker:
        yield broker


@pytest.fixture
def app(broker: Broker) -> App:
    return App(broker)


@pytest.fixture
def topic(broker: Broker) -> str:
    """One of this test alone, whose messages are not delivered again while it runs."""
    return make_topic(broker)


def make_topic(broker: Broker, *, ack_deadline_ms: int = 3_600_000, **options: Any) -> str:
    name = f"t{next(_numbers)}"
    broker.create_topic(name, ack_deadline_ms=ack_deadline_ms, **options)
    return name


def publish(broker: Broker, topic: str, *values: bytes, key: str | None = None) -> None:
    for value in values:
        broker.publish(topic, value, key=key)


class Seen(Queue[Any]):
    """What a handler was called with; whoever tests it waits for that."""

    def next(self) -> Any:
        return self.get(timeout=PATIENCE_S)

    def some(self, number: int) -> list[Any]:
        return [self.next() for _ in range(number)]

    def rest(self) -> list[Any]:
        return [self.get_nowait() for _ in range(self.qsize())]


def wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S), "what is waited for does not happen"


def until(is_so: Callable[[], bool]) -> None:
    """For what only the app's own figures tell."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it does not become so"
        time.sleep(0.001)


def deadline_passes(broker: Broker, topic: str) -> None:
    """Until a message of the topic that was delivered just now, and which nobody extends, is delivered again."""
    with broker.subscribe(topic, group=f"clock {next(_numbers)}", start="earliest") as clock:
        while clock.get(timeout=PATIENCE_S).attempts == 1:
            pass


# What is called, and with what


def test_the_decorated_function_is_still_the_function(app: App) -> None:
    def bill(message: Message) -> str:
        return f"billed {message}"

    decorated = app.consumer("orders", group="billing")(bill)
    assert decorated is bill
    assert [consumer.name for consumer in app.consumers] == ["bill"]


def test_a_plain_function_is_called_with_each_message_in_a_thread(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()

    @app.consumer(topic, group=topic)
    def handle(message: Message) -> None:
        seen.put((message.value, threading.current_thread().name))

    with app.running():
        publish(broker, topic, b"1", b"2", b"3")
        found = seen.some(3)
    assert [value for value, _ in found] == [b"1", b"2", b"3"]
    assert {thread for _, thread in found} == {"penstock handle-0"}
    assert broker.lag(topic) == 0
    assert app.consumers[0].handled == 3


def test_an_async_function_is_called_in_the_loop(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()

    @app.consumer(topic, group=topic)
    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        seen.put((message.value, threading.current_thread().name))

    with app.running():
        publish(broker, topic, b"1", b"2")
        assert seen.some(2) == [(b"1", "penstock app_0"), (b"2", "penstock app_0")]
    assert broker.lag(topic) == 0


class Awaited:
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    async def __call__(self, message: Message) -> None:
        self.seen.put(message.value)


async def put(seen: Seen, message: Message) -> None:
    seen.put(message.value)


@pytest.mark.parametrize(
    "make",
    [
        Awaited,
        lambda seen: functools.partial(put, seen),
        # It does not look like a coroutine function: only what it returns tells.
        lambda seen: lambda message: put(seen, message),
    ],
    ids=["object", "partial", "lambda"],
)
def test_whatever_can_be_awaited_is(
    broker: Broker, app: App, topic: str, make: Callable[[Seen], Callable[[Message], object]]
) -> None:
    seen = Seen()
    app.consumer(topic, group=topic, name="it")(make(seen))
    with app.running():
        publish(broker, topic, b"1")
        assert seen.next() == b"1"
    assert broker.lag(topic) == 0


def test_a_batch_is_a_list_of_at_most_so_many_messages(broker: Broker, app: App, topic: str) -> None:
    publish(broker, topic, *(b"%d" % number for number in range(10)))
    seen = Seen()

    @app.consumer(topic, group=topic, batch=4)
    def handle(messages: list[Message]) -> None:
        assert type(messages) is list
        seen.put([message.value for message in messages])

    with app.running():
        batches: list[list[bytes]] = []
        while sum(map(len, batches)) < 10:
            batches.append(seen.next())
    assert [value for batch in batches for value in batch] == [b"%d" % number for number in range(10)]
    assert max(map(len, batches)) == 4
    assert broker.lag(topic) == 0
    assert app.consumers[0].handled == 10


def test_a_new_group_begins_with_the_first_message_unless_it_wants_the_latest(
    broker: Broker, app: App, topic: str
) -> None:
    publish(broker, topic, b"old")
    earliest, latest = Seen(), Seen()
    app.consumer(topic, group=f"{topic} earliest", name="earliest")(lambda message: earliest.put(message.value))
    app.consumer(topic, group=f"{topic} latest", start="latest", name="latest")(lambda m: latest.put(m.value))
    with app.running():
        publish(broker, topic, b"new")
        assert earliest.some(2) == [b"old", b"new"]
        assert latest.next() == b"new"


@pytest.mark.parametrize("is_async", [False, True])
def test_as_many_handlers_run_at_once_as_it_says_and_no_more(
    broker: Broker, app: App, topic: str, is_async: bool
) -> None:
    publish(broker, topic, *(b"%d" % number for number in range(12)))
    running, most, together = 0, 0, threading.Event()
    lock = threading.Lock()

    def enter() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                together.set()

    def leave() -> None:
        nonlocal running
        with lock:
            running -= 1

    def handle(message: Message) -> None:
        enter()
        wait(together)
        leave()

    async def handle_async(message: Message) -> None:
        enter()
        while not together.is_set():
            await asyncio.sleep(0)
        leave()

    app.consumer(topic, group=topic, concurrency=3, name="it")(handle_async if is_async else handle)
    with app.running():
        until(lambda: app.consumers[0].handled == 12)
    assert most == 3


# What is refused before anything runs


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"group": ""}, "a consumer needs a group"),
        ({"mode": "sharde"}, "invalid mode 'sharde': it must be one of shared, partitioned"),
        ({"concurrency": 0}, "invalid concurrency 0: it must be at least 1"),
        ({"batch": 0}, "invalid batch 0: it must be at least 1"),
        ({"buffer": 0}, "invalid buffer 0: it must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused_where_they_stand(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        App().consumer("orders", **{"group": "billing", **options})(print)


def test_a_generator_is_refused_for_its_body_would_never_run() -> None:
    def handle(message: Message) -> Iterator[None]:
        yield

    async def tell(message: Message, error: Exception) -> AsyncIterator[None]:
        yield

    with pytest.raises(TypeError, match="handle is a generator"):
        App().consumer("orders", group="billing")(handle)
    with pytest.raises(TypeError, match="tell is a generator"):
        App().consumer("orders", group="billing", on_error=tell)(print)


def test_two_consumers_have_two_names() -> None:
    app = App()
    app.consumer("orders", group="a")(print)
    with pytest.raises(ValueError, match="duplicate consumer print: give this one another name with name="):
        app.consumer("orders", group="b")(print)
    app.consumer("orders", group="b", name="other")(print)
    assert [consumer.name for consumer in app.consumers] == ["print", "other"]


def test_only_a_consumer_that_is_there_can_be_paused_or_resumed() -> None:
    app = App()
    app.consumer("orders", group="a")(print)
    with pytest.raises(LookupError, match="unknown consumer prnit: the app has print"):
        app.resume("prnit")
    with pytest.raises(LookupError, match="unknown consumer prnit: the app has print"):
        app.pause("prnit")


def test_an_app_without_consumers_does_not_run() -> None:
    with pytest.raises(ValueError, match="the app has no consumers"), App().running():
        pass


def test_an_app_does_not_run_twice_at_once(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()
    app.consumer(topic, group=topic, name="it")(lambda message: seen.put(message.value))
    with app.running():
        with pytest.raises(RuntimeError, match="the app is already running"), app.running():
            pass
        publish(broker, topic, b"x")
        assert seen.next() == b"x", "the first goes on"


def test_without_a_broker_it_says_so() -> None:
    app = App("127.0.0.1:1")
    app.consumer("orders", group="a")(print)
    with pytest.raises(NoBroker, match=r"127\.0\.0\.1:1"), app.running():
        pass


# Failures in a shared group


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


# Deadlines


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


# Pauses


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


# Partitioned groups


def make_partitioned(broker: Broker, partitions: int) -> tuple[str, list[str]]:
    """A topic, and a key for each of its partitions."""
    topic = make_topic(broker, partitions=partitions)
    keys: dict[int, str] = {}
    for number in count():
        if len(keys) == partitions:
            break
        keys.setdefault(broker.publish(topic, b"", key=f"{number}").partition, f"{number}")
    broker.delete_topic(topic)
    broker.create_topic(topic, partitions=partitions)
    return topic, [keys[number] for number in range(partitions)]


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


# Batches that fail


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


# How it ends


@pytest.mark.parametrize("mode", ["shared", "partitioned"])
def test_a_stop_lets_the_handler_finish_and_begins_no_other(broker: Broker, app: App, topic: str, mode: Any) -> None:
    begun, over, seen = threading.Event(), threading.Event(), Seen()

    @app.consumer(topic, group=topic, mode=mode)
    def handle(message: Message) -> None:
        begun.set()
        wait(over)
        seen.put(message.value)

    with app.running():
        publish(broker, topic, b"1", b"2")
        wait(begun)
        app.stop()
        until(lambda: stopping(app))
        over.set()
    assert seen.rest() == [b"1"]
    assert broker.lag(topic) == 1


def stopping(app: App) -> bool:
    return app._running is not None and app._running.stop.is_set()


def test_a_handler_that_does_not_finish_in_time_is_cancelled_and_its_message_comes_again(
    broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(broker, stop_timeout=0.01)
    ends = Seen()

    @app.consumer(topic, group=topic)
    async def handle(message: Message) -> None:
        try:
            ends.put("begins")
            if message.attempts == 1:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.put("cancelled")
            raise
        ends.put("returns")

    with app.running():
        publish(broker, topic, b"x")
        assert ends.next() == "begins"
    assert ends.rest() == ["cancelled"]
    assert "consumer handle: 1 handlers did not finish within 0.01 s" in caplog.text
    with app.running():
        assert ends.some(2) == ["begins", "returns"]
    assert broker.lag(topic) == 0


def test_a_thread_that_does_not_finish_in_time_is_not_waited_for(broker: Broker, topic: str) -> None:
    app = App(broker, stop_timeout=0.01)
    begun, over = threading.Event(), threading.Event()

    @app.consumer(topic, group=topic)
    def handle(message: Message) -> None:
        begun.set()
        wait(over)

    with app.running():
        publish(broker, topic, b"x")
        wait(begun)
    assert broker.lag(topic) == 1
    over.set()


def test_a_thread_that_nobody_waits_for_any_more_ends_in_silence() -> None:
    begun, over, complaints = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        wait(over)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        threads = Threads(1, "test")
        call = asyncio.ensure_future(threads.call(work))
        await asyncio.to_thread(wait, begun)
        call.cancel()
        over.set()
        # It is done in the same thread, after the first.
        await threads.call(lambda: None)
        threads.close()

    asyncio.run(main())
    assert complaints == []


def test_one_app_runs_again_and_again(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()
    app.consumer(topic, group=topic, name="it")(lambda message: seen.put(message.value))
    for number in range(3):
        with app.running():
            publish(broker, topic, b"%d" % number)
            assert seen.next() == b"%d" % number
    assert app.consumers[0].handled == 3


def test_served_in_a_loop_that_is_there_it_ends_with_an_event(broker: Broker, app: App, topic: str) -> None:
    seen = Seen()

    async def main() -> None:
        stop = asyncio.Event()

        @app.consumer(topic, group=topic)
        async def handle(message: Message) -> None:
            seen.put(message.value)
            stop.set()

        async with asyncio.timeout(PATIENCE_S):
            await app.serve(stop)

    publish(broker, topic, b"x")
    asyncio.run(main())
    assert seen.rest() == [b"x"]
    assert broker.lag(topic) == 0


def test_a_handler_can_stop_the_app_from_its_thread(broker: Broker, app: App, topic: str) -> None:
    @app.consumer(topic, group=topic)
    def handle(message: Message) -> None:
        app.stop()

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await app.serve()

    publish(broker, topic, b"x")
    asyncio.run(main())
    assert broker.lag(topic) == 0


def test_an_app_that_does_not_run_can_be_stopped(app: App) -> None:
    app.stop()


def test_what_goes_wrong_in_the_block_is_raised_when_the_app_has_stopped(app: App, topic: str) -> None:
    app.consumer(topic, group=topic)(print)
    with pytest.raises(ZeroDivisionError), app.running():
        _ = 1 / 0
    with app.running():
        pass


def test_a_group_that_is_another_one_ends_the_app_with_that_error(broker: Broker, app: App, topic: str) -> None:
    broker.create_group(topic, topic, mode="partitioned")
    app.consumer(topic, group=topic)(print)
    with pytest.raises(GroupConflict, match=f"the group {topic} is partitioned"), app.running():
        pass


def test_a_group_that_is_deleted_ends_the_app_and_running_handlers_finish(
    broker: Broker, app: App, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun, over, seen = threading.Event(), threading.Event(), Seen()

    @app.consumer(topic, group=topic, concurrency=2)
    def deleted(message: Message) -> None:
        begun.set()
        wait(over)
        seen.put("deleted")

    other_begun, other = threading.Event(), make_topic(broker)

    @app.consumer(other, group=other)
    def stays(message: Message) -> None:
        other_begun.set()
        wait(over)
        seen.put("stays")

    with pytest.raises(UnknownGroup, match="was deleted"), app.running():  # noqa: PT012
        publish(broker, topic, b"x")
        publish(broker, other, b"x")
        wait(begun)
        wait(other_begun)
        broker.delete_group(topic)
        until(lambda: stopping(app))
        over.set()
    assert sorted(seen.rest()) == ["deleted", "stays"]
    assert broker.lag(other) == 0
    assert "consumer deleted: the subscription ended" in caplog.text


def test_counters_are_those_of_each_consumer(broker: Broker, app: App, topic: str) -> None:
    app.consumer(topic, group=f"{topic} a", name="a")(lambda message: None)
    app.consumer(topic, group=f"{topic} b", name="b", retry=Retry.skip())(lambda message: 1 / 0)
    with app.running():
        publish(broker, topic, b"1", b"2")
        until(lambda: app.consumers[0].handled == 2 and app.consumers[1].skipped == 2)

    def figures(consumer: Consumer) -> tuple[str, int, int, int, int]:
        return consumer.name, consumer.handled, consumer.failed, consumer.retried, consumer.skipped

    assert [figures(consumer) for consumer in app.consumers] == [("a", 2, 0, 0, 0), ("b", 0, 2, 0, 2)]
