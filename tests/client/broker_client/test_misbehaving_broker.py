"""The Python broker's client with a broker that misbehaves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from penstock import BrokerClient
from penstock.client.qb import BrokerMessage
from penstock.errors import ConnectionLost, TimedOut
from penstock.wire import prefixed
from penstock.wire import qb as wire_qb
from penstock.wire.qb import Kind, QbMessage
from tests.support.process import PATIENCE_S


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
