"""The Python broker's client against a real server; a broker that misbehaves is played by hand."""

from __future__ import annotations

import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

import penstock
from penstock import BrokerClient
from penstock.client.qb import RESERVED, BrokerMessage
from penstock.client.sync import Client
from penstock.errors import BadRequest, ConnectionLost, NoBroker, TimedOut, Unauthorized
from penstock.wire import prefixed
from penstock.wire import qb as wire_qb
from penstock.wire.qb import Kind, QbMessage
from tests.support.server import PATIENCE_S, Serve, clean_environment

# Nobody listens there: it is never given out.
NOBODY: Final = 1
# Of the topics of `quick` and `patient`.
DELIVERIES: Final = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all tests here; each has topics of its own."""
    with Serve(tmp_path_factory.mktemp("server")) as server:
        yield server


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


@pytest.fixture(scope="module")
def observer(server: Serve) -> Iterator[Client]:
    """Looks what came of it, through another door."""
    with Client(f"127.0.0.1:{server.port}") as client:
        yield client


_NUMBERS: Final = count()


@pytest.fixture
def name() -> str:
    """Of a topic, and of what else a test makes."""
    return f"name{next(_NUMBERS)}"


@pytest.fixture
def connect(server: Serve) -> Iterator[Callable[..., BrokerClient]]:
    """Clients that are disconnected with the test."""
    with ExitStack() as stack:

        def made(client_id: str | None = None, *, to: Serve = server, **options: Any) -> BrokerClient:
            return stack.enter_context(BrokerClient(port=to.ports["quiet"], client_id=client_id, **options))

        yield made


Connect = Callable[..., BrokerClient]


class Inbox:
    """A handler that keeps what it is given."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[BrokerMessage] = queue.SimpleQueue()

    def __call__(self, message: BrokerMessage) -> None:
        self._messages.put(message)

    def next(self) -> BrokerMessage:
        return self._messages.get(timeout=PATIENCE_S)

    def texts(self, count: int) -> list[str]:
        return [self.next().text() for _ in range(count)]

    @property
    def is_empty(self) -> bool:
        return self._messages.empty()


def eventually(holds: Callable[[], object]) -> None:
    """For what another process does in its own time."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it does not come true"


# ---- the connection


def test_it_connects_once_and_disconnects(connect: Connect) -> None:
    client = connect("me")
    client.connect()
    assert client.is_connected
    assert not client.wait(0)
    client.disconnect()
    client.disconnect()
    assert not client.is_connected
    assert client.wait(0)
    client.connect()
    assert client.is_connected


def test_it_is_what_the_package_exports() -> None:
    assert penstock.BrokerClient is BrokerClient
    first, second = BrokerClient(), BrokerClient()
    assert (first.host, first.port) == ("127.0.0.1", 9999)
    assert re.fullmatch("client-[0-9a-f]{16}", first.client_id)
    assert first.client_id != second.client_id
    assert first.wait(0)


def test_without_a_broker_it_says_so() -> None:
    with pytest.raises(NoBroker, match=r"no broker at 127\.0\.0\.1:1 .*penstock serve --quiet-port 1"):
        BrokerClient(port=NOBODY).connect()


def test_before_it_is_connected_nothing_can_be_asked(name: str) -> None:
    client = BrokerClient(port=NOBODY)
    client.disconnect()
    for ask in (
        lambda: client.create_topic(name),
        lambda: client.publish_text(name, "x"),
        lambda: client.subscribe(name),
        lambda: client.unsubscribe(name),
        lambda: client.unsubscribe_from_subscription(name),
        lambda: client.receive(0),
        client.check,
    ):
        with pytest.raises(ConnectionLost, match=r"call connect\(\) first"):
            ask()


def test_after_it_is_disconnected_nothing_can_be_asked(connect: Connect, name: str) -> None:
    client = connect()
    client.disconnect()
    with pytest.raises(ConnectionLost, match=r"call connect\(\) again"):
        client.create_topic(name)


def test_a_port_that_speaks_first_is_told_from_a_broker(server: Serve) -> None:
    with pytest.raises(ConnectionLost, match="does not speak the protocol"):
        BrokerClient(port=server.ports["text"]).connect()


def test_a_broker_that_wants_to_know_who_asks_is_told(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_user="me", auth_password="secret", auth_token="word") as server:
        port = server.ports["quiet"]
        wrong: list[dict[str, Any]] = [{}, {"user": "me", "password": "wrong"}, {"token": "wrong"}]
        for who in wrong:
            client = BrokerClient(port=port, **who)
            with pytest.raises(Unauthorized):
                client.connect()
            assert not client.is_connected
        right: list[dict[str, Any]] = [{"user": "me", "password": "secret"}, {"token": "word"}]
        for number, who in enumerate(right):
            with BrokerClient(port=port, **who) as client:
                assert client.create_topic(f"topic{number}")


def test_a_broker_that_is_gone_is_noticed_and_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Serve(tmp_path) as server:
        client, inbox = BrokerClient(port=server.ports["quiet"]), Inbox()
        client.connect()
        assert client.create_topic("topic")
        assert client.create_and_subscribe("sub", "topic", handler=inbox)
        server.kill()
        assert client.wait(PATIENCE_S)
        assert not client.is_connected
        with pytest.raises(ConnectionLost, match=f"127.0.0.1:{server.ports['quiet']}"):
            client.publish_text("topic", "x")
        # A subscriber asks nothing, so it is told by a warning.
        assert "127.0.0.1" in caplog.text
        server.restart()
        client.connect()
        assert client.subscribe_to_subscription("sub", inbox)
        assert client.publish_text("topic", "back")
        assert inbox.next().text() == "back"
        client.disconnect()


def test_a_fork_has_no_connection_and_leaves_that_of_its_parent(server: Serve, name: str) -> None:
    program = f"""
import os
from penstock import BrokerClient
from penstock.errors import ConnectionLost
client = BrokerClient(port={server.ports["quiet"]})
client.connect()
assert client.create_topic("{name}")
child = os.fork()
if not child:
    assert not client.is_connected
    try:
        client.publish_text("{name}", "child")
    except ConnectionLost:
        client.disconnect()
        client.connect()
        assert client.publish_text("{name}", "child")
        client.disconnect()
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert client.publish_text("{name}", "parent")
client.disconnect()
"""
    run_program(program)


def run_program(text: str) -> str:
    command = [sys.executable, "-W", "error", "-c", text]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=clean_environment(), timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# ---- topics, subscriptions, publishing


def test_a_topic_is_made_as_it_is_asked_for(connect: Connect, observer: Client, name: str) -> None:
    assert connect().create_topic(name, partitions=3, retention_hours=24)
    topic = observer.topic(name)
    assert (topic.partitions, topic.policy["retain_ms"]) == (3, 24 * 3_600_000)


def test_what_exists_is_refused_and_the_broker_says_why(
    connect: Connect, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    assert client.last_error is None
    assert client.create_topic(name)
    assert client.create_subscription(name, name)
    caplog.clear()
    assert not client.create_topic(name)
    assert client.last_error == f"Topic '{name}' already exists"
    assert not client.create_subscription(name, name)
    assert client.last_error == f"Subscription '{name}' already exists"
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert client.is_connected


def test_what_does_not_exist_is_refused(connect: Connect, name: str) -> None:
    client = connect()
    assert not client.create_subscription(name, name)
    assert not client.subscribe_to_subscription(name)
    assert not client.delete_subscription(name)
    assert not client.publish(name, b"")
    assert client.last_error == f"Topic '{name}' does not exist"
    assert not client.subscribe(name)
    assert not client.unsubscribe(name)
    assert not client.create_and_subscribe(name, name)


def test_a_message_arrives_as_it_was_published(connect: Connect, name: str) -> None:
    client, inbox, before = connect("me"), Inbox(), time.time()
    assert client.create_topic(topic=name)
    assert client.create_subscription(name=name, topic=name, start_offset=0)
    assert client.publish_text(topic=name, text="héllo")
    custom: dict[str, Any] = {"colour": "rot grün", "number": 7, "content-type": "x/y=z"}
    assert client.publish(topic=name, data=b"\xff\0", **custom)
    assert client.subscribe_to_subscription(name=name, handler=inbox)
    plain, binary = inbox.next(), inbox.next()
    assert (plain.topic, plain.subscription, plain.partition) == (name, name, 0)
    assert (plain.text(), plain.sequence_number, plain.offset) == ("héllo", 0, 0)
    # The protocol has milliseconds.
    assert before - 0.001 <= plain.timestamp <= time.time()
    assert plain.properties.keys() <= RESERVED
    assert (binary.body, binary.offset) == (b"\xff\0", 1)
    assert {key: value for key, value in binary.properties.items() if key not in RESERVED} == custom | {"number": "7"}


def test_a_message_goes_to_the_partition_that_it_is_given(connect: Connect, observer: Client, name: str) -> None:
    client = connect()
    assert client.create_topic(name, 3)
    assert client.publish_text(name, "one", 2)
    assert client.publish_text(name, "two", partition=2)
    assert not client.publish_text(name, "none", partition=3)
    assert [position.committed for position in observer.topic(name).positions] == [0, 0, 2]


@pytest.mark.parametrize("taken", sorted(RESERVED - {"topic", "partition"}))
def test_a_property_of_the_protocol_cannot_be_given(connect: Connect, name: str, taken: str) -> None:
    with pytest.raises(ValueError, match=f"^{taken}: "):
        connect().publish(name, b"", None, **{taken: "x"})


def test_what_cannot_be_sent_is_refused_before_it_is(connect: Connect, name: str) -> None:
    client = connect()
    assert client.create_topic(name)
    with pytest.raises(BadRequest, match="'a=b'"):
        client.publish(name, b"", None, **{"a=b": "x"})
    with pytest.raises(BadRequest, match="are allowed"):
        client.publish(name, bytes(prefixed.FRAME_BYTES_MAX))
    assert client.publish(name, b"")


def test_many_threads_publish_at_once(connect: Connect, observer: Client, name: str) -> None:
    client = connect()
    assert client.create_topic(name)
    with ThreadPoolExecutor(8) as pool:
        texts = [str(number) for number in range(400)]
        assert all(pool.map(lambda text: client.publish_text(name, text), texts))
    assert sorted(message.value.decode() for message in observer.fetch(name)) == sorted(texts)


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


# ---- when the program ends


def test_a_program_that_just_ends_leaves_its_subscriptions(connect: Connect, observer: Client, name: str) -> None:
    client = connect()
    assert client.create_topic(name)
    assert client.create_subscription(name, name)
    assert client.publish_text(name, "one")
    program = f"""
import threading
from penstock import BrokerClient
begun = threading.Event()
def take(message):
    begun.set()
    print(message.text())
client = BrokerClient(port={client.port}, client_id="{name}")
client.connect()
assert client.subscribe("{name}", handler=lambda message: None)
assert client.subscribe_to_subscription("{name}", take)
begun.wait()
"""
    assert run_program(program) == "one\n"
    assert observer.group(name).lag == 0
    assert [group.name for group in observer.groups() if group.name.startswith(name)] == [name]


# ---- a broker that misbehaves


class Played:
    """A broker that does as the test says."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        peer.settimeout(PATIENCE_S)
        self._reader = prefixed.PrefixedReader()
        self._messages: list[QbMessage] = []

    def next(self, kind: Kind) -> QbMessage:
        """What it is asked next, which must be this; heartbeats are answered."""
        while True:
            while not self._messages:
                data = self._socket.recv(1 << 16)
                assert data, "the client ended the connection"
                self._messages += [each for each in self._reader.feed(data) if isinstance(each, QbMessage)]
            message = self._messages.pop(0)
            if message.kind == kind:
                return message
            assert message.kind == Kind.HEARTBEAT
            self.send(Kind.HEARTBEAT, message.sequence)

    def agree(self, kind: Kind) -> None:
        message = self.next(kind)
        self.send(Kind.HEARTBEAT if kind is Kind.HEARTBEAT else Kind.ACK, message.sequence, status="success")

    def send(self, kind: Kind, sequence: int, body: bytes = b"", **properties: object) -> None:
        self._socket.sendall(wire_qb.message(kind, sequence, 0, wire_qb.properties(properties), body))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def played(**options: Any) -> Iterator[tuple[BrokerClient, Played]]:
    """A client that is connected to one."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        client = BrokerClient(port=listener.getsockname()[1], **options)
        connecting = pool.submit(client.connect)
        peer, _ = listener.accept()
        broker = Played(peer)
        try:
            broker.agree(Kind.HEARTBEAT)
            connecting.result(PATIENCE_S)
            yield client, broker
        finally:
            broker.close()
            client.disconnect()


def test_requests_are_what_the_protocol_says() -> None:
    with played(client_id="me") as (client, broker), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.publish, "t", b"body", 2, colour="red")
        message = broker.next(Kind.PUBLISH)
        properties = wire_qb.read_properties(message.properties)
        assert float(properties.pop("created_at")) * 1000 == pytest.approx(message.timestamp_ms)
        assert properties == {"topic": "t", "partition": "2", "client_id": "me", "version": "1.0", "colour": "red"}
        assert message.body == b"body"
        # What was not asked for changes nothing, nor does what is not known.
        broker.send(Kind.ACK, message.sequence + 1, status="error", error="somebody else's")
        broker.send(Kind.HEARTBEAT, 0)
        broker._socket.sendall(wire_qb.message(99, message.sequence, 0))  # type: ignore[arg-type]
        assert not asked.done()
        broker.send(Kind.ACK, message.sequence, status="success")
        assert asked.result(PATIENCE_S) is True


def test_answers_may_come_in_any_order() -> None:
    with played() as (client, broker), ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.create_topic, "a")
        a = broker.next(Kind.CREATE_TOPIC)
        second = pool.submit(client.create_topic, "b")
        b = broker.next(Kind.CREATE_TOPIC)
        broker.send(Kind.ACK, b.sequence, status="success")
        assert second.result(PATIENCE_S) is True
        broker.send(Kind.ACK, a.sequence, status="error", error="no")
        assert first.result(PATIENCE_S) is False
        assert client.last_error == "no"


def test_a_message_is_acknowledged_in_its_own_words() -> None:
    with played(client_id="me") as (client, broker), ThreadPoolExecutor(1) as pool:
        joined = pool.submit(client.subscribe_to_subscription, "s", lambda _: None)
        asked = broker.next(Kind.SUBSCRIBE)
        properties = wire_qb.read_properties(asked.properties)
        assert (properties["subscriber_id"], properties["auto_ack"]) == ("me", "false")
        place = {"subscription_id": "s", "topic": "t.below", "partition": 3}
        # It may come before the answer.
        broker.send(Kind.DATA, 17, b"x", **place, colour="red")
        broker.send(Kind.ACK, asked.sequence, status="success")
        assert joined.result(PATIENCE_S)
        ack = broker.next(Kind.ACK)
        assert ack.sequence == 17
        assert wire_qb.read_properties(ack.properties) == {name: str(value) for name, value in place.items()}


def test_what_comes_again_while_it_waits_is_handled_once() -> None:
    handled, go_on = [], threading.Event()

    def take(message: BrokerMessage) -> None:
        assert go_on.wait(PATIENCE_S)
        handled.append(message.offset)

    with played() as (client, broker), ThreadPoolExecutor(1) as pool:
        joined = pool.submit(client.subscribe_to_subscription, "s", take)
        broker.agree(Kind.SUBSCRIBE)
        assert joined.result(PATIENCE_S)
        for offset in (0, 1, 0, 1, 2):
            broker.send(Kind.DATA, offset, subscription_id="s", topic="t", partition=0)
        # When this is answered all of them have been read.
        asked = pool.submit(client.create_topic, "t")
        broker.agree(Kind.CREATE_TOPIC)
        assert asked.result(PATIENCE_S)
        go_on.set()
        assert [broker.next(Kind.ACK).sequence for _ in range(3)] == [0, 1, 2]
        assert handled == [0, 1, 2]


def test_the_broker_is_told_of_what_waits_until_it_is_done() -> None:
    go_on = threading.Event()
    with played() as (client, broker), ThreadPoolExecutor(1) as pool:
        joined = pool.submit(client.subscribe_to_subscription, "s", lambda _: go_on.wait(PATIENCE_S))
        broker.send(Kind.ACK, broker.next(Kind.SUBSCRIBE).sequence, status="success", ack_deadline_ms=30)
        assert joined.result(PATIENCE_S)
        for offset in (0, 1):
            broker.send(Kind.DATA, offset, subscription_id="s", topic="t", partition=0)
        # One is being handled, one waits.
        told: set[int] = set()
        while told != {0, 1}:
            message = broker.next(Kind.ACK)
            assert wire_qb.read_properties(message.properties)["status"] == "pending"
            told.add(message.sequence)
        go_on.set()
        done: list[int] = []
        while len(done) < 2:
            message = broker.next(Kind.ACK)
            if "status" not in wire_qb.read_properties(message.properties):
                done.append(message.sequence)
        assert done == [0, 1]


def test_an_answer_that_does_not_come_is_not_waited_for_too_long() -> None:
    with played(request_timeout=0.5) as (client, broker):
        with pytest.raises(TimedOut, match="CREATE_TOPIC"):
            client.create_topic("t")
        with pytest.raises(TimedOut, match="SUBSCRIBE"):
            client.subscribe_to_subscription("s", lambda _: None)
        broker.next(Kind.CREATE_TOPIC)
        late = broker.next(Kind.SUBSCRIBE)
        # Nobody takes its messages, so it is left should it be joined yet.
        broker.next(Kind.UNSUBSCRIBE)
        broker.send(Kind.ACK, late.sequence, status="success")
        assert client.is_connected


def test_heartbeats_are_sent_and_a_broker_that_does_not_answer_them_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with played(heartbeat_interval=0.01, request_timeout=1) as (client, broker), ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            broker.agree(Kind.HEARTBEAT)
        joined = pool.submit(client.subscribe_to_subscription, "s")
        broker.agree(Kind.SUBSCRIBE)
        assert joined.result(PATIENCE_S)
        with pytest.raises(ConnectionLost, match="HEARTBEAT: no answer"):
            client.receive()
        assert client.wait(PATIENCE_S)
        assert "HEARTBEAT: no answer" in caplog.text


def test_requests_that_wait_when_the_connection_is_lost_raise_and_say_why() -> None:
    with played() as (client, broker), ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(client.create_topic, "t") for _ in range(3)]
        for _ in waiting:
            broker.next(Kind.CREATE_TOPIC)
        broker.send(Kind.ACK, 0, status="error", error="the broker is tired")
        broker.close()
        for each in waiting:
            with pytest.raises(ConnectionLost, match="the broker is tired"):
                each.result(PATIENCE_S)


def test_bytes_that_are_no_frames_end_the_connection() -> None:
    with played() as (client, broker):
        broker._socket.sendall(b"\xff" * 64)
        assert client.wait(PATIENCE_S)
        with pytest.raises(ConnectionLost, match="does not speak the protocol"):
            client.check()
