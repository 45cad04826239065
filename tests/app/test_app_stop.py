"""How an app starts and stops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.app import App, Consumer, Retry
from penstock.app.threads import Threads
from penstock.client.message import Message
from penstock.embedded import Broker
from penstock.errors import GroupConflict, UnknownGroup
from tests.support.handlers import Seen, make_topic, publish, stopping, until, wait
from tests.support.process import PATIENCE_S


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
