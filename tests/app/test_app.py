"""Consumers as functions, with a real broker: what is called, and with what."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from penstock.app import App
from penstock.client.message import Message
from penstock.embedded import Broker
from penstock.errors import NoBroker
from tests.support.handlers import Seen, publish, until, wait

# ---- what is called, and with what


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


# ---- what is refused before anything runs


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
