"""The Python broker's client: its connection, topics, and publishing."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

import penstock
from penstock import BrokerClient
from penstock.client.qb import RESERVED
from penstock.client.sync import Client
from penstock.errors import BadRequest, ConnectionLost, NoBroker, Unauthorized
from penstock.wire import prefixed
from tests.support.broker_clients import Connect, Inbox
from tests.support.process import PATIENCE_S
from tests.support.server import Serve, clean_environment

# Nobody listens there: it is never given out.
NOBODY: Final = 1

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
