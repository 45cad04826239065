"""The Python broker's client: its subscriptions."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from penstock import BrokerClient
from penstock.client.qb import BrokerMessage
from penstock.client.sync import Client
from penstock.errors import ConnectionLost
from penstock.wire.qb import Kind
from tests.support.broker_clients import Connect, Inbox
from tests.support.process import PATIENCE_S
from tests.support.server import Serve

# Of the topics of `quick` and `patient`.
DELIVERIES: Final = 2


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One that soon delivers again what is not acknowledged."""
    directory = tmp_path_factory.mktemp("quick")
    with Serve(directory, topic_ack_deadline_ms=1000, topic_deliveries_max=DELIVERIES) as server:
        yield server


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One whose deadlines a client can keep on a busy machine."""
    directory = tmp_path_factory.mktemp("patient")
    with Serve(directory, topic_ack_deadline_ms=3000, topic_deliveries_max=DELIVERIES) as server:
        yield server


def eventually(holds: Callable[[], object]) -> None:
    """For what another process does in its own time."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it does not come true"


# ---- subscriptions


def test_messages_go_to_the_subscribers_in_turn(connect: Connect, name: str) -> None:
    inboxes = [Inbox(), Inbox()]
    first, second = connect("one"), connect("two")
    assert first.create_topic(name)
    assert first.create_and_subscribe(name, name, handler=inboxes[0])
    assert second.subscribe_to_subscription(name, inboxes[1])
    for number in range(10):
        assert first.publish_text(name, str(number))
    shares = [inbox.texts(5) for inbox in inboxes]
    assert sorted(shares) == [[*"02468"], [*"13579"]]


def test_two_subscriptions_have_places_of_their_own(connect: Connect, name: str) -> None:
    client, early, late = connect(), Inbox(), Inbox()
    assert client.create_topic(name)
    for number in range(6):
        assert client.publish_text(name, str(number))
    assert client.create_and_subscribe(f"{name}-a", name, 5, late)
    assert client.create_and_subscribe(f"{name}-b", name, start_offset=3, handler=early)
    assert (late.texts(1), early.texts(3)) == (["5"], ["3", "4", "5"])


def test_a_subscription_goes_on_behind_what_was_handled(connect: Connect, observer: Client, name: str) -> None:
    client, inbox = connect(), Inbox()
    assert client.create_topic(name)
    assert client.publish_text(name, "one")
    assert client.create_and_subscribe(name, name, handler=inbox)
    assert inbox.next().text() == "one"
    assert client.unsubscribe_from_subscription(name)
    assert observer.group(name).lag == 0
    assert client.publish_text(name, "two")
    assert client.create_and_subscribe(name, name, handler=inbox)
    assert inbox.next().text() == "two"


def test_one_client_joins_a_subscription_once(connect: Connect, name: str) -> None:
    client, inbox, other = connect("me"), Inbox(), Inbox()
    assert client.create_topic(name)
    assert client.create_and_subscribe(name, name, handler=inbox)
    assert not client.subscribe_to_subscription(name, other)
    assert "already" in str(client.last_error)
    assert not connect("me").subscribe_to_subscription(name, other)
    assert client.publish_text(name, "x")
    assert inbox.next().text() == "x"
    assert other.is_empty


def test_a_slow_handler_does_not_stop_the_rest(connect: Connect, name: str) -> None:
    client, begun, go_on = connect(heartbeat_interval=0.01), threading.Event(), threading.Event()

    def take(message: BrokerMessage) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    assert client.create_topic(name)
    assert client.create_and_subscribe(name, name, handler=take)
    assert client.publish_text(name, "x")
    assert begun.wait(PATIENCE_S)
    assert client.publish_text(name, "y")
    assert client.is_connected
    go_on.set()


def test_a_handler_may_ask_the_broker(connect: Connect, name: str) -> None:
    client, answers = connect(), Inbox()

    def answer(message: BrokerMessage) -> None:
        assert client.publish_text(f"{name}-answers", message.text().upper())

    for topic in (name, f"{name}-answers"):
        assert client.create_topic(topic)
    assert client.create_and_subscribe(name, name, handler=answer)
    assert client.create_and_subscribe(f"{name}-answers", f"{name}-answers", handler=answers)
    assert client.publish_text(name, "one")
    assert client.publish_text(name, "two")
    assert answers.texts(2) == ["ONE", "TWO"]


def test_a_handler_that_raises_is_given_the_message_again(
    connect: Connect, quick: Serve, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, inbox = connect(to=quick), Inbox()

    def take(message: BrokerMessage) -> None:
        inbox(message)
        if message.text() == "bad":
            raise ValueError("what a handler raises")

    assert client.create_topic(name)
    assert client.create_and_subscribe(name, name, handler=take)
    assert client.publish_text(name, "bad")
    assert client.publish_text(name, "good")
    assert sorted(inbox.texts(1 + DELIVERIES)) == ["bad", "bad", "good"]
    with Client(f"127.0.0.1:{quick.port}") as observer:
        eventually(lambda: observer.group(name).dead_lettered)
        assert (observer.group(name).lag, observer.group(name).dead_lettered) == (0, 1)
    assert "what a handler raises" in caplog.text
    assert inbox.is_empty


def test_what_takes_longer_than_its_deadline_is_not_delivered_again(
    connect: Connect, patient: Serve, name: str
) -> None:
    client, begun, go_on = connect(to=patient), threading.Event(), threading.Event()

    def take(message: BrokerMessage) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    def fail(message: BrokerMessage) -> None:
        raise ValueError("until it is a dead letter")

    clock = f"{name}-clock"
    for topic in (name, clock):
        assert client.create_topic(topic)
    assert client.create_and_subscribe(name, name, handler=take)
    for text in ("is handled", "waits"):
        assert client.publish_text(name, text)
    assert begun.wait(PATIENCE_S)
    other = connect(to=patient)
    assert other.create_and_subscribe(clock, clock, handler=fail)
    assert other.publish_text(clock, "x")
    with Client(f"127.0.0.1:{patient.port}") as observer:
        # By then all deadlines are over, as often as there are deliveries.
        eventually(lambda: observer.group(clock).dead_lettered)
        assert (observer.group(name).redelivered, observer.group(name).dead_lettered) == (0, 0)
        go_on.set()
        eventually(lambda: not observer.group(name).lag)
        assert observer.group(name).dead_lettered == 0


def test_what_was_not_handled_before_the_end_does_not_count_as_delivered(
    connect: Connect, patient: Serve, name: str
) -> None:
    publisher, handled = connect(to=patient), Inbox()
    texts = [str(number) for number in range(2 * DELIVERIES)]
    assert publisher.create_topic(name)
    assert publisher.create_subscription(name, name)
    for text in texts:
        assert publisher.publish_text(name, text)
    for _ in texts:
        client = connect(to=patient)

        def take(message: BrokerMessage, client: BrokerClient = client) -> None:
            handled(message)
            client.disconnect()

        assert client.subscribe_to_subscription(name, take)
        assert client.wait(PATIENCE_S)
    assert handled.texts(len(texts)) == texts


def test_a_handler_that_ends_its_thread_ends_the_connection(connect: Connect, name: str) -> None:
    client = connect()
    assert client.create_topic(name)
    assert client.create_and_subscribe(name, name, handler=lambda _: sys.exit())
    assert client.publish_text(name, "x")
    assert client.wait(PATIENCE_S)
    with pytest.raises(ConnectionLost, match="a handler has ended its thread"):
        client.check()


def test_a_handler_that_disconnects_has_its_message_acknowledged_and_gets_no_more(
    connect: Connect, observer: Client, name: str
) -> None:
    client, handled = connect(), []

    def take(message: BrokerMessage) -> None:
        handled.append(message.text())
        if message.text() == "two":
            client.disconnect()
            assert not client.is_connected

    assert client.create_topic(name)
    for text in ("one", "two", "three", "four"):
        assert client.publish_text(name, text)
    assert client.create_and_subscribe(name, name, handler=take)
    assert client.wait(PATIENCE_S)
    assert handled == ["one", "two"]
    eventually(lambda: not observer.group(name).members)
    assert observer.group(name).lag == 2


@pytest.mark.parametrize("end", ["unsubscribe", "disconnect"])
def test_what_a_handler_has_begun_is_acknowledged_before_the_end(
    connect: Connect, observer: Client, name: str, end: str
) -> None:
    client, begun, go_on = connect(), threading.Event(), threading.Event()

    def take(message: BrokerMessage) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        assert client.publish_text(f"{name}-answers", "it can still ask")

    assert client.create_topic(name)
    assert client.create_topic(f"{name}-answers")
    for text in ("one", "two"):
        assert client.publish_text(name, text)
    assert client.create_and_subscribe(name, name, handler=take)
    assert begun.wait(PATIENCE_S)
    leave = client.disconnect if end == "disconnect" else lambda: client.unsubscribe_from_subscription(name)
    leaves = threading.Thread(target=leave)
    leaves.start()
    go_on.set()
    leaves.join(PATIENCE_S)
    eventually(lambda: not observer.group(name).members)
    assert observer.group(name).lag == 1
    assert [message.value for message in observer.fetch(f"{name}-answers")] == [b"it can still ask"]


def test_without_a_handler_messages_are_received(connect: Connect, observer: Client, name: str) -> None:
    client = connect()
    assert client.create_topic(name)
    assert client.create_and_subscribe(name, name)
    assert client.receive(0) is None
    for text in ("one", "two", "three"):
        assert client.publish_text(name, text)
    received = [client.receive(PATIENCE_S), client.receive()]
    assert [message.text() for message in received if message is not None] == ["one", "two"]
    assert client.unsubscribe_from_subscription(name)
    # Two are acknowledged, and what was not asked for goes to the next subscriber.
    assert observer.group(name).lag == 1
    assert client.receive(0) is None


def test_who_waits_for_a_message_is_woken_at_the_end(connect: Connect) -> None:
    client = connect()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.receive) for _ in range(2)]
        client.disconnect()
        for each in waiting:
            try:
                assert each.result(PATIENCE_S) is None
            except ConnectionLost:
                pass  # it had not begun to wait


# ---- subscriptions of one's own


@pytest.mark.parametrize("step", [Kind.CREATE_SUBSCRIPTION, Kind.SUBSCRIBE])
def test_an_interrupted_subscribe_leaves_no_subscription_behind(
    connect: Connect, observer: Client, name: str, monkeypatch: pytest.MonkeyPatch, step: Kind
) -> None:
    client = connect()
    assert client.create_topic(name)
    answer = BrokerClient._answer

    def interrupted(self: BrokerClient, kind: Kind, *arguments: Any) -> Any:
        answered = answer(self, kind, *arguments)
        if kind is step:
            raise KeyboardInterrupt
        return answered

    with monkeypatch.context() as patch:
        patch.setattr(BrokerClient, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.subscribe(name)
    # Answered in the order of the requests.
    assert client.create_topic(f"{name}-other")
    assert name not in [group.pattern for group in observer.groups()]


def test_an_interrupt_before_a_thread_has_started_leaves_a_client_that_disconnects(
    connect: Connect, observer: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    assert client.create_topic(name)

    def interrupted(_thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.subscribe(name)
    client.disconnect()
    assert name not in [group.pattern for group in observer.groups()]


def test_a_topic_is_subscribed_to_by_a_subscription_of_ones_own(connect: Connect, observer: Client, name: str) -> None:
    client, inbox = connect(name), Inbox()
    assert client.create_topic(name)
    for text in ("one", "two"):
        assert client.publish_text(name, text)
    assert client.subscribe(name, 0, 1, True, inbox)
    assert inbox.next().text() == "two"
    assert [group.pattern for group in observer.groups() if group.name.startswith(name)] == [name]
    assert client.unsubscribe(name)
    assert not client.unsubscribe(name)
    assert [group for group in observer.groups() if group.name.startswith(name)] == []


def test_a_subscription_of_ones_own_is_deleted_at_the_end(connect: Connect, observer: Client, name: str) -> None:
    client = connect(name)
    assert client.create_topic(name)
    assert client.subscribe(name, handler=Inbox())
    assert [group for group in observer.groups() if group.name.startswith(name)]
    client.disconnect()
    assert [group for group in observer.groups() if group.name.startswith(name)] == []


def test_one_partition_is_subscribed_to(connect: Connect, name: str) -> None:
    client, inbox = connect(), Inbox()
    assert client.create_topic(name, 3)
    assert client.subscribe(name, partition=1, handler=inbox)
    for number in range(9):
        assert client.publish_text(name, str(number), number % 3)
    assert inbox.texts(3) == ["1", "4", "7"]
    client.disconnect()
    assert inbox.is_empty


def test_without_automatic_acknowledgement_the_application_acknowledges(
    connect: Connect, observer: Client, name: str
) -> None:
    client, inbox = connect(name), Inbox()
    assert client.create_topic(name)
    for text in ("one", "two"):
        assert client.publish_text(name, text)
    assert client.subscribe(name, auto_ack=False, handler=inbox)
    first, _ = inbox.next(), inbox.next()
    [group] = [group.name for group in observer.groups() if group.name.startswith(name)]
    assert observer.group(group).lag == 2
    client.acknowledge(first)
    # What is asked behind it is answered behind it.
    assert client.publish_text(name, "three")
    eventually(lambda: observer.group(group).positions[0].committed == 1)
