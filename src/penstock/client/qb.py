"""`BrokerClient`: a client of the Python broker's protocol, with the names that its users know."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from penstock.address import bare, join
from penstock.client.qb_connection import BrokerConnection, is_refusal
from penstock.client.qb_deliveries import BrokerMessage, HandledSubscription, Handler, next_wait
from penstock.errors import ConnectionLost, NoBroker, Unauthorized
from penstock.times import check_seconds
from penstock.tls.blocking import BlockingTls
from penstock.tls.options import TlsOptions
from penstock.wire.qb import Kind

__all__ = ["RESERVED", "BrokerClient", "BrokerMessage"]

HOST: Final = "127.0.0.1"
PORT: Final = 9999
TIMEOUT_S: Final = 30.0
HEARTBEAT_S: Final = 30.0
# The properties that the protocol itself sets.
RESERVED: Final = frozenset(
    ("topic", "partition", "subscription_id", "client_id", "publisher_id", "created_at", "version")
)

logger = logging.getLogger(__name__)


class BrokerClient:
    """A connection to a broker. Any thread may call its methods, including a handler.

    A request that the broker refuses returns False, and `last_error` says why. A lost connection raises ConnectionLost,
    a missing answer TimedOut.
    """

    def __init__(
        self,
        host: str = HOST,
        port: int = PORT,
        client_id: str | None = None,
        *,
        request_timeout: float = TIMEOUT_S,
        heartbeat_interval: float = HEARTBEAT_S,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        tls: TlsOptions | None = None,
    ) -> None:
        """Times are in seconds. `client_id`: a random one by default. `tls`: use TLS, with these options."""
        self.host = bare(host)
        self.port = port
        self.client_id = f"client-{secrets.token_hex(8)}" if client_id is None else client_id
        self.last_error: str | None = None
        self._timeout_s = request_timeout
        check_seconds("heartbeat_interval", heartbeat_interval)
        check_seconds("request_timeout", request_timeout)
        self._heartbeat_s = heartbeat_interval
        who = {"user": user, "password": password, "token": token}
        self._credentials = {name: value for name, value in who.items() if value is not None}
        self._tls = tls if tls is not None else TlsOptions.from_environment() or None
        self._lock = threading.Lock()
        self._connection: BrokerConnection | None = None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def connect(self) -> None:
        """Connect. Raise NoBroker if no broker answers, Unauthorized if it refuses the credentials."""
        with self._lock:
            if self.is_connected:
                return
            address = join(self.host, self.port)
            try:
                dialled = socket.create_connection((self.host, self.port), self._timeout_s)
            except OSError as error:
                raise NoBroker(
                    f"no broker at {address} ({error}): start one with `penstock serve --quiet-port {self.port}`, or "
                    "name another with host= and port="
                ) from None
            secured = self._secure(dialled, address)
            connection = BrokerConnection(secured, address, self.client_id, self._timeout_s, self._heartbeat_s)
            try:
                # The broker waits only so long for the first frame, and may need credentials.
                answer = connection.ask(Kind.HEARTBEAT, self._credentials)
            except BaseException:
                connection.close()
                raise
            if is_refusal(answer):
                connection.close()
                raise Unauthorized(answer.get("error", "the broker refused the connection"))
            self._connection = connection

    def _secure(self, dialled: socket.socket, address: str) -> socket.socket | BlockingTls:
        """Return the connection with TLS, if it is used."""
        if self._tls is None:
            return dialled
        try:
            return BlockingTls(dialled, self._tls.context(), self.host, address)
        except BaseException as error:
            dialled.close()
            if isinstance(error, OSError):
                raise NoBroker(f"no TLS with {address} ({error}): check that the port speaks TLS") from None
            raise

    def disconnect(self) -> None:
        """Leave the subscriptions and end the connection. In a handler: after its message is acknowledged."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def check(self) -> None:
        """Raise ConnectionLost, with the reason, if there is no connection."""
        self._connected()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the connection is closed or lost. Return False if the timeout passes first."""
        connection = self._connection
        until = None if timeout is None else time.monotonic() + timeout
        while connection is not None and not connection.ended.wait(next_wait(until)):
            if until is not None and time.monotonic() >= until:
                return False
        return True

    def create_topic(self, topic: str, partitions: int = 1, retention_hours: int | None = None) -> bool:
        """Create a topic."""
        fields: dict[str, object] = {"topic": topic, "partitions": partitions}
        if retention_hours is not None:
            fields["retention_hours"] = retention_hours
        return self._ask(Kind.CREATE_TOPIC, fields)

    def create_subscription(self, name: str, topic: str, start_offset: int = 0) -> bool:
        """Create a subscription. It has a position in its topic, which its subscribers share."""
        fields = {"subscription_id": name, "topic": topic, "start_offset": start_offset}
        return self._ask(Kind.CREATE_SUBSCRIPTION, fields)

    def delete_subscription(self, name: str) -> bool:
        """Delete a subscription and its position."""
        return self._ask(Kind.DELETE_SUBSCRIPTION, {"subscription_id": name})

    def publish(self, /, topic: str, data: bytes, partition: int | None = None, **properties: object) -> bool:
        """Publish a message. Return when it is as durable as its topic requires."""
        taken = sorted(RESERVED & properties.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)}: the protocol itself sets this property, choose another name")
        fields: dict[str, object] = {"topic": topic}
        if partition is not None:
            fields["partition"] = partition
        return self._ask(Kind.PUBLISH, fields | properties, data)

    def publish_text(self, /, topic: str, text: str, partition: int | None = None, **properties: object) -> bool:
        """Publish text, encoded as UTF-8."""
        return self.publish(topic, text.encode(), partition, **properties)

    def subscribe_to_subscription(self, name: str, handler: Handler | None = None) -> bool:
        """Join a subscription. Its messages go to its subscribers in turn.

        `handler` is called with one message at a time, in a thread of the client. Returning acknowledges the message;
        raising redelivers it, and dead-letters it after the last attempt. Without a handler, messages wait for
        `receive`.
        """
        return self._join(name, HandledSubscription(handler))

    def unsubscribe_from_subscription(self, name: str) -> bool:
        """Leave a subscription, after its handler has finished.

        If the handler itself calls this, its message goes to another subscriber.
        """
        self._connected().deliveries.remove([name])
        return self._ask(Kind.UNSUBSCRIBE, self._membership(name))

    def create_and_subscribe(
        self, name: str, topic: str, start_offset: int = 0, handler: Handler | None = None
    ) -> bool:
        """Create a subscription unless it exists, and join it."""
        self.create_subscription(name, topic, start_offset)
        return self.subscribe_to_subscription(name, handler)

    def subscribe(
        self,
        topic: str,
        partition: int = 0,
        offset: int = 0,
        auto_ack: bool = True,
        handler: Handler | None = None,
    ) -> bool:
        """Receive the messages of a partition from an offset on, through a subscription of this client alone.

        `unsubscribe` and `disconnect` delete it. Without `auto_ack`, acknowledge messages with `acknowledge`.
        """
        name = f"{self.client_id}-{secrets.token_hex(8)}"
        try:
            if not self.create_subscription(name, topic, offset):
                return False
            if self._join(name, HandledSubscription(handler, auto_ack, (topic, partition))):
                return True
        except BaseException:
            # After an interrupt or a timeout it may exist, and nobody else knows its name.
            with suppress(ConnectionLost):
                self._connected().send(Kind.DELETE_SUBSCRIPTION, {"subscription_id": name})
            raise
        self.delete_subscription(name)
        return False

    def unsubscribe(self, topic: str, partition: int = 0) -> bool:
        """End what `subscribe` began. Return False if there is no such subscription."""
        subscriptions = self._connected().deliveries.subscriptions
        ended = []
        for name in [name for name, each in subscriptions.items() if each.own == (topic, partition)]:
            is_left = self.unsubscribe_from_subscription(name)
            ended.append(self.delete_subscription(name) and is_left)
        return bool(ended) and all(ended)

    def receive(self, timeout: float | None = None) -> BrokerMessage | None:
        """Return the next message of the subscriptions without a handler, and acknowledge it.

        Return None if none arrives in time, or the client disconnects.
        """
        return self._connected().deliveries.receive(timeout)

    def acknowledge(self, message: BrokerMessage) -> None:
        """Acknowledge a message of `subscribe` without `auto_ack`."""
        self._connected().deliveries.acknowledge(message)

    def _join(self, name: str, subscription: HandledSubscription) -> bool:
        connection = self._connected()
        is_new = connection.deliveries.add(name, subscription)
        try:
            answer = self._answer(Kind.SUBSCRIBE, self._membership(name) | {"auto_ack": "false"})
        except BaseException:
            # The broker may have added the subscriber, or may do so later, and nobody would take its messages.
            if is_new:
                connection.deliveries.remove([name])
                with suppress(ConnectionLost):
                    connection.send(Kind.UNSUBSCRIBE, self._membership(name))
            raise
        if answer is None:
            if is_new:
                connection.deliveries.remove([name])
            return False
        connection.extend_within(answer.get("ack_deadline_ms", ""))
        return True

    def _membership(self, name: str) -> dict[str, object]:
        return {"subscription_id": name, "subscriber_id": self.client_id}

    def _ask(self, kind: Kind, fields: Mapping[str, object], body: bytes = b"") -> bool:
        return self._answer(kind, fields, body) is not None

    def _answer(self, kind: Kind, fields: Mapping[str, object], body: bytes = b"") -> dict[str, str] | None:
        """Send a request, and return the properties of the answer; None if the broker refuses it."""
        answer = self._connected().ask(kind, fields, body)
        if not is_refusal(answer):
            return answer
        self.last_error = answer.get("error", "the broker refused it without a reason")
        logger.warning("%s: %s", kind.name, self.last_error)
        return None

    def _connected(self) -> BrokerConnection:
        connection = self._connection
        if connection is None:
            raise ConnectionLost("not connected: call connect() first")
        connection.check()
        return connection
