"""The Python broker's client: BrokerClient, with the names that its users know.

Threads serve a connection, a blocking socket. One writes. One reads: answers go to who waits for them, messages into a
queue. One takes them from there and calls handlers, one message at a time, so that a handler may take its time and may
itself ask the broker; which is told meanwhile that what waits is still here. One sends heartbeats, and notices when
they are not answered.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import TracebackType
from typing import Final, NamedTuple, Self

from penstock.address import bare, join
from penstock.clock import SystemClock
from penstock.errors import BadRequest, ConnectionLost, NoBroker, PenstockError, TimedOut, Unauthorized
from penstock.wire import prefixed
from penstock.wire.prefixed import Kind

HOST: Final = "127.0.0.1"
PORT: Final = 9999
TIMEOUT_S: Final = 30.0
HEARTBEAT_S: Final = 30.0
# How long a connection takes to end, at the most: what a handler has begun, and to leave the subscriptions.
CLOSE_S: Final = 5.0
# Properties that the protocol itself gives to a message.
RESERVED: Final = frozenset(
    ("topic", "partition", "subscription_id", "client_id", "publisher_id", "created_at", "version")
)

_VERSION: Final = "1.0"
# What an acknowledgement repeats of its message.
_PLACE: Final = ("subscription_id", "topic", "partition")
_RECEIVE_BYTES: Final = 256 << 10
# A thread that waits looks up so often: a signal that comes just when it begins to wait does not wake it.
_WAIT_S: Final = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerMessage:
    """A message of a subscription."""

    body: bytes
    topic: str
    # Those that its publisher gave it, and the protocol's own.
    properties: dict[str, str]
    # Its offset.
    sequence_number: int
    partition: int
    # Seconds since 1970.
    timestamp: float
    subscription: str

    @property
    def offset(self) -> int:
        return self.sequence_number

    def text(self) -> str:
        return self.body.decode()


Handler = Callable[[BrokerMessage], object]
# Subscription, partition, offset.
_Key = tuple[str, int, int]


class BrokerClient:
    """A connection to a broker. All its methods may be called by any thread, also by a handler.

    What the broker refuses returns False; `last_error` says why. A connection that is lost raises ConnectionLost, an
    answer that does not come TimedOut.
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
    ) -> None:
        """Times are in seconds. Without a `client_id` it is given one of its own."""
        self.host = bare(host)
        self.port = port
        self.client_id = f"client-{secrets.token_hex(8)}" if client_id is None else client_id
        self.last_error: str | None = None
        self._timeout_s = request_timeout
        self._heartbeat_s = heartbeat_interval
        who = {"user": user, "password": password, "token": token}
        self._credentials = {name: value for name, value in who.items() if value is not None}
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

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
        """Raises NoBroker if nobody is there, Unauthorized if the broker wants to know another user or token."""
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
            connection = _Connection(dialled, address, self.client_id, self._timeout_s, self._heartbeat_s)
            try:
                # A broker does not wait for the first word for ever, and may want to know whose it is.
                answer = connection.ask(Kind.HEARTBEAT, self._credentials)
            except BaseException:
                connection.close()
                raise
            if _is_refusal(answer):
                connection.close()
                raise Unauthorized(answer.get("error", "the broker refuses the connection"))
            self._connection = connection

    def disconnect(self) -> None:
        """Leave the subscriptions and end the connection. By a handler: as soon as its message is acknowledged."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def check(self) -> None:
        """Raises ConnectionLost, with the reason, if there is no connection."""
        self._connected()

    def wait(self, timeout: float | None = None) -> bool:
        """Until the connection has ended, by `disconnect` or because it is lost; False if it has not in that time."""
        connection = self._connection
        until = None if timeout is None else time.monotonic() + timeout
        while connection is not None and not connection.ended.wait(_next_wait(until)):
            if until is not None and time.monotonic() >= until:
                return False
        return True

    def create_topic(self, topic: str, partitions: int = 1, retention_hours: int | None = None) -> bool:
        fields: dict[str, object] = {"topic": topic, "partitions": partitions}
        if retention_hours is not None:
            fields["retention_hours"] = retention_hours
        return self._ask(Kind.CREATE_TOPIC, fields)

    def create_subscription(self, name: str, topic: str, start_offset: int = 0) -> bool:
        """A subscription has a place in its topic, which its subscribers move on."""
        fields = {"subscription_id": name, "topic": topic, "start_offset": start_offset}
        return self._ask(Kind.CREATE_SUBSCRIPTION, fields)

    def delete_subscription(self, name: str) -> bool:
        return self._ask(Kind.DELETE_SUBSCRIPTION, {"subscription_id": name})

    def publish(self, /, topic: str, data: bytes, partition: int | None = None, **properties: object) -> bool:
        """Store a message; returns when it is as durable as its topic promises."""
        taken = sorted(RESERVED & properties.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)}: this property is given to a message by the protocol itself")
        fields: dict[str, object] = {"topic": topic}
        if partition is not None:
            fields["partition"] = partition
        return self._ask(Kind.PUBLISH, fields | properties, data)

    def publish_text(self, /, topic: str, text: str, partition: int | None = None, **properties: object) -> bool:
        """As `publish`, of text."""
        return self.publish(topic, text.encode(), partition, **properties)

    def subscribe_to_subscription(self, name: str, handler: Handler | None = None) -> bool:
        """Join a subscription: its messages go to its subscribers in turn.

        `handler` is called with each, in a thread of the client's, one at a time. A message is acknowledged when it
        returns; if it raises, the message is delivered again, after the last try as a dead letter. Without a handler
        messages wait for `receive`.
        """
        return self._join(name, _Subscription(handler))

    def unsubscribe_from_subscription(self, name: str) -> bool:
        """Leave a subscription. Its handler ends what it has begun, and is given no more.

        By the handler itself: then the message that it has goes to another subscriber.
        """
        self._connected().stop_delivery([name])
        return self._ask(Kind.UNSUBSCRIBE, self._membership(name))

    def create_and_subscribe(
        self, name: str, topic: str, start_offset: int = 0, handler: Handler | None = None
    ) -> bool:
        """Join a subscription that is made now, or exists already."""
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
        """Have the messages of a partition from an offset on, by a subscription of one's own.

        It is deleted by `unsubscribe` and `disconnect`. Without `auto_ack` messages are acknowledged by `acknowledge`.
        """
        name = f"{self.client_id}-{secrets.token_hex(8)}"
        try:
            if not self.create_subscription(name, topic, offset):
                return False
            if self._join(name, _Subscription(handler, auto_ack, (topic, partition))):
                return True
        except BaseException:
            # An interrupt or a timeout: it may exist, and nobody else knows its name.
            with suppress(ConnectionLost):
                self._connected().tell(Kind.DELETE_SUBSCRIPTION, {"subscription_id": name})
            raise
        self.delete_subscription(name)
        return False

    def unsubscribe(self, topic: str, partition: int = 0) -> bool:
        """End what `subscribe` began; False if it did not."""
        names = self._connected().names_of((topic, partition))
        ended = [self._end(name) for name in names]
        return bool(ended) and all(ended)

    def receive(self, timeout: float | None = None) -> BrokerMessage | None:
        """The next message of the subscriptions without a handler, which is acknowledged now.

        None if none comes in that time, or `disconnect` is called meanwhile.
        """
        return self._connected().receive(timeout)

    def acknowledge(self, message: BrokerMessage) -> None:
        """It is done; for what came by `subscribe` without `auto_ack`."""
        self._connected().acknowledge(message)

    def _join(self, name: str, subscription: _Subscription) -> bool:
        connection = self._connected()
        is_new = connection.add(name, subscription)
        try:
            answer = self._answer(Kind.SUBSCRIBE, self._membership(name) | {"auto_ack": "false"})
        except BaseException:
            # It may be done, or may be done yet, and nobody would take what comes.
            if is_new:
                connection.stop_delivery([name])
                with suppress(ConnectionLost):
                    connection.tell(Kind.UNSUBSCRIBE, self._membership(name))
            raise
        if answer is None:
            if is_new:
                connection.stop_delivery([name])
            return False
        connection.extend_within(answer.get("ack_deadline_ms", ""))
        return True

    def _end(self, name: str) -> bool:
        is_left = self.unsubscribe_from_subscription(name)
        return self.delete_subscription(name) and is_left

    def _membership(self, name: str) -> dict[str, object]:
        return {"subscription_id": name, "subscriber_id": self.client_id}

    def _ask(self, kind: Kind, fields: Mapping[str, object], body: bytes = b"") -> bool:
        return self._answer(kind, fields, body) is not None

    def _answer(self, kind: Kind, fields: Mapping[str, object], body: bytes = b"") -> dict[str, str] | None:
        """None if it is refused."""
        answer = self._connected().ask(kind, fields, body)
        if not _is_refusal(answer):
            return answer
        self.last_error = answer.get("error", "the broker refused it and did not say why")
        logger.warning("%s: %s", kind.name, self.last_error)
        return None

    def _connected(self) -> _Connection:
        connection = self._connection
        if connection is None:
            raise ConnectionLost("not connected: call connect() first")
        connection.check()
        return connection


class _Subscription(NamedTuple):
    handler: Handler | None
    acknowledges: bool = True
    # Of one that is deleted when it is left: what it was asked for.
    own: tuple[str, int] | None = None

    def wants(self, message: BrokerMessage) -> bool:
        return self.own is None or self.own[1] == message.partition


class _Connection:
    """What belongs to one socket: requests and their answers, subscriptions and their messages, and the threads."""

    def __init__(
        self, dialled: socket.socket, address: str, client_id: str, timeout_s: float, heartbeat_s: float
    ) -> None:
        self._address = address
        self._client_id = client_id
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._socket = dialled
        dialled.settimeout(timeout_s)
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A child that was forked has neither the threads, nor may it speak on the connection of its parent.
        self._process = os.getpid()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sequences = count(1)
        self._waiting: dict[int, Future[dict[str, str]]] = {}
        # For `_lost` and `_is_ending`.
        self._lock = threading.Lock()
        # Why there is no connection any more.
        self._lost: str | None = None
        # The last thing that the broker said, and nobody had asked for.
        self._said = ""
        self._is_ending = False
        self._ends_in_turn = False
        self.ended = threading.Event()
        # Whose turn it is: for `_subscriptions` and `_busy`, the subscription whose handler runs.
        self._turn = threading.Condition()
        self._subscriptions: dict[str, _Subscription] = {}
        self._busy: str | None = None
        # What has come and is not done, by `_key`. What comes again meanwhile is the same message.
        self._held: dict[_Key, BrokerMessage] = {}
        self._arrived: queue.SimpleQueue[BrokerMessage | None] = queue.SimpleQueue()
        # What waits for `receive`.
        self._unread: queue.SimpleQueue[BrokerMessage | None] = queue.SimpleQueue()
        # The least that the broker said.
        self._deadline_s: float | None = None
        self._threads: dict[str, threading.Thread] = {}
        _OPEN.add(self)
        self._start("writer", self._write)
        self._start("reader", self._read)
        self._start("messages", self._deliver)
        self._start("heartbeats", self._beat)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"penstock {self._client_id} {name}", daemon=True)
        thread.start()
        # Not before: an interrupt may come in between, and `close` joins what is here.
        self._threads[name] = thread

    @property
    def is_open(self) -> bool:
        return self._lost is None and not self._is_ending and self._process == os.getpid()

    def check(self) -> None:
        # What a handler has begun it may end.
        if not self.is_open and (self._lost is not None or not self._is_in_turn()):
            raise ConnectionLost(self._lost or _ENDED)

    # Requests.

    def ask(
        self, kind: Kind, fields: Mapping[str, object], body: bytes = b"", timeout_s: float | None = None
    ) -> dict[str, str]:
        """The properties of the answer."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        sequence = next(self._sequences)
        data = self._encode(kind, sequence, fields, body)
        answer: Future[dict[str, str]] = Future()
        with self._lock:
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            self._waiting[sequence] = answer
        try:
            self._send(data)
            return answer.result(timeout_s)
        except TimeoutError:
            raise TimedOut(f"{kind.name}: no answer from {self._address} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(sequence, None)

    def tell(self, kind: Kind, fields: Mapping[str, object]) -> None:
        """As `ask`, where nobody waits for the answer."""
        self._send(self._encode(kind, next(self._sequences), fields))

    def acknowledge(self, message: BrokerMessage) -> None:
        self._send(_acknowledgement(message))

    def _encode(self, kind: Kind, sequence: int, fields: Mapping[str, object], body: bytes = b"") -> bytes:
        now_ms = _now_ms()
        common = {"client_id": self._client_id, "created_at": f"{now_ms / 1000:.3f}", "version": _VERSION}
        data = prefixed.message(kind, sequence, now_ms, prefixed.properties({**fields, **common}), body)
        if len(data) > prefixed.FRAME_BYTES_MAX:
            raise BadRequest(f"a message of {len(data)} bytes, {prefixed.FRAME_BYTES_MAX} are allowed")
        return data

    def _send(self, data: bytes) -> None:
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        self._outgoing.put(data)

    def _write(self) -> None:
        """In a thread of its own, where no Ctrl-C comes in the midst of a frame."""
        try:
            while (data := self._outgoing.get()) is not None:
                self._socket.sendall(data)
            self._socket.shutdown(socket.SHUT_WR)
        except TimeoutError:
            self._lose(f"{self._address} reads nothing")
        except OSError as error:
            self._lose(f"the connection to {self._address} is lost: {error.strerror or error}")

    # Subscriptions.

    def add(self, name: str, subscription: _Subscription) -> bool:
        """Before the broker is asked, for messages come as soon as it agrees. False if there is one already."""
        with self._turn:
            return self._subscriptions.setdefault(name, subscription) is subscription

    def names_of(self, own: tuple[str, int]) -> list[str]:
        with self._turn:
            return [name for name, subscription in self._subscriptions.items() if subscription.own == own]

    def stop_delivery(self, names: list[str]) -> None:
        """Hand out no more of their messages, and wait for the handler that has one, so that it is acknowledged."""
        with self._turn:
            for name in names:
                self._subscriptions.pop(name, None)
            if not self._is_in_turn():
                self._turn.wait_for(lambda: self._busy not in names, CLOSE_S)

    def receive(self, timeout: float | None) -> BrokerMessage | None:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                message = self._unread.get(timeout=_next_wait(until))
            except queue.Empty:
                if until is not None and time.monotonic() >= until:
                    return None
                continue
            if message is None:
                # For the next one who waits.
                self._unread.put(None)
                if self._is_ending:
                    return None
                raise ConnectionLost(self._lost)
            self._held.pop(_key(message), None)
            subscription = self._subscriptions.get(message.subscription)
            if subscription is not None:
                if subscription.acknowledges:
                    self.acknowledge(message)
                return message

    # In.

    def _read(self) -> None:
        frames = prefixed.FrameReader()
        frames.dialect = prefixed.Dialect.QB
        reason = "the thread that reads has failed"
        try:
            while frames.refusal is None and (data := self._receive()):
                for message in frames.feed(data):
                    assert isinstance(message, prefixed.Message), "the dialect says so"
                    self._take(message)
            ends = f"{self._address} ended the connection"
            reason = f"{ends}: {self._said}" if self._said else ends
            if frames.refusal is not None:
                reason = f"{self._address} does not speak the protocol: {frames.refusal}"
        except OSError as error:
            reason = f"the connection to {self._address} is lost: {error.strerror or error}"
        except PenstockError as error:
            reason = f"{self._address} does not speak the protocol: {error}"
        finally:
            self._lose(reason)
            self._threads["writer"].join()
            self._socket.close()

    def _receive(self) -> bytes:
        while True:
            try:
                return self._socket.recv(_RECEIVE_BYTES)
            except TimeoutError:
                pass  # heartbeats notice whether somebody is there

    def _take(self, message: prefixed.Message) -> None:
        properties = prefixed.read_properties(message.properties)
        match message.kind:
            case Kind.ACK | Kind.HEARTBEAT:
                answer = self._waiting.pop(message.sequence, None)
                if answer is not None:
                    answer.set_result(properties)
                elif _is_refusal(properties):
                    self._said = properties.get("error", "")
            case Kind.DATA:
                made = _message(message, properties)
                # What is here already comes again if its deadline is over: it is handled once.
                if self._held.setdefault(_key(made), made) is made:
                    self._arrived.put(made)

    # Messages.

    def _deliver(self) -> None:
        try:
            while (message := self._arrived.get()) is not None:
                self._hand_over(message)
                if self._ends_in_turn:
                    self._end()
                    return
        except SystemExit:
            pass  # which ends a thread, and with this one all that it is for
        finally:
            self._lose("a handler has ended its thread")

    def _hand_over(self, message: BrokerMessage) -> None:
        with self._turn:
            subscription = self._subscriptions.get(message.subscription)
            if subscription is None or self._is_ending:
                # Left meanwhile: the broker gives it to another.
                self._held.pop(_key(message), None)
                return
            self._busy = message.subscription
        try:
            if self._handle(message, subscription):
                self.acknowledge(message)
        except ConnectionLost as error:
            logger.debug("message %d of %s: %s", message.offset, message.subscription, error)
        finally:
            with self._turn:
                self._busy = None
                self._turn.notify_all()

    def _handle(self, message: BrokerMessage, subscription: _Subscription) -> bool:
        """Whether it is to be acknowledged now."""
        if not subscription.wants(message):
            self._held.pop(_key(message), None)
            return True
        if subscription.handler is None:
            self._unread.put(message)
            return False
        try:
            subscription.handler(message)
        except Exception:  # whatever it is, other messages must be handled
            logger.exception("message %d of %s failed: it is delivered again", message.offset, message.subscription)
            return False
        finally:
            self._held.pop(_key(message), None)
        return subscription.acknowledges

    def _is_in_turn(self) -> bool:
        return threading.current_thread() is self._threads.get("messages")

    # Deadlines.

    def extend_within(self, deadline_ms: str) -> None:
        """What is acknowledged later is given to another, unless the broker is told before that it is here."""
        if not deadline_ms.isdecimal():
            return
        deadline_s = int(deadline_ms) / 1000
        with self._lock:
            if self._deadline_s is None or deadline_s < self._deadline_s:
                self._deadline_s = deadline_s
                self._start("deadlines", partial(self._extend, deadline_s))

    def _extend(self, deadline_s: float) -> None:
        """Until the end, or a shorter deadline is told."""
        while not self.ended.wait(deadline_s / 3) and self._deadline_s == deadline_s:
            pending = [_acknowledgement(message, status="pending") for message in list(self._held.values())]
            with suppress(ConnectionLost):
                self._send(b"".join(pending))

    # Heartbeats.

    def _beat(self) -> None:
        while not self.ended.wait(self._heartbeat_s):
            try:
                with suppress(ConnectionLost):
                    self.ask(Kind.HEARTBEAT, {})
            except TimedOut as error:
                self._lose(str(error))

    # The end.

    def close(self) -> None:
        if self._process != os.getpid():
            return
        with self._lock:
            is_first, self._is_ending = not self._is_ending, True
        if self._is_in_turn():
            self._ends_in_turn = self._ends_in_turn or is_first
            return
        if is_first:
            self._end()
        until = time.monotonic() + CLOSE_S
        for thread in list(self._threads.values()):
            thread.join(max(0, until - time.monotonic()))

    def _end(self) -> None:
        """What can be left in time is; the broker notices the rest when the connection is gone."""
        until = time.monotonic() + CLOSE_S
        with self._turn:
            subscriptions = dict(self._subscriptions)
        self.stop_delivery(list(subscriptions))
        try:
            for name, subscription in subscriptions.items():
                fields = {"subscription_id": name, "subscriber_id": self._client_id}
                self.ask(Kind.UNSUBSCRIBE, fields, timeout_s=max(0, until - time.monotonic()))
                if subscription.own is not None:
                    self.ask(Kind.DELETE_SUBSCRIPTION, fields, timeout_s=max(0, until - time.monotonic()))
        except (ConnectionLost, TimedOut) as error:
            logger.debug("while disconnecting: %s", error)
        # To close a socket that is not read to its end would take back what was said last.
        self._outgoing.put(None)
        self.ended.wait(max(0, until - time.monotonic()))
        self._lose(_ENDED)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = _ENDED if self._is_ending else reason
        _OPEN.discard(self)
        if self._subscriptions and not self._is_ending:
            logger.warning("%s", reason)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was quicker
        while self._waiting:
            try:
                _, answer = self._waiting.popitem()
            except KeyError:
                break
            answer.set_exception(ConnectionLost(self._lost))
        for ends in (self._outgoing, self._arrived, self._unread):
            ends.put(None)
        self.ended.set()


_ENDED: Final = "the connection is ended: call connect() again"
_OPEN: Final[set[_Connection]] = set()


@atexit.register
def _close_all() -> None:
    """The interpreter ends: handlers end what they have begun, and subscriptions are left."""
    for connection in list(_OPEN):
        connection.close()


def _message(message: prefixed.Message, properties: dict[str, str]) -> BrokerMessage:
    try:
        partition = int(properties.get("partition", "0"))
    except ValueError:
        raise BadRequest(f"a message of partition {properties['partition']!r}") from None
    return BrokerMessage(
        body=message.body,
        topic=properties.get("topic", ""),
        properties=properties,
        sequence_number=message.sequence,
        partition=partition,
        timestamp=message.timestamp_ms / 1000,
        subscription=properties.get("subscription_id", ""),
    )


def _acknowledgement(message: BrokerMessage, **more: str) -> bytes:
    """In the words of the message, and under its sequence. It is not answered."""
    fields = {name: message.properties[name] for name in _PLACE if name in message.properties} | more
    return prefixed.message(Kind.ACK, message.sequence_number, _now_ms(), prefixed.properties(fields))


def _key(message: BrokerMessage) -> _Key:
    return message.subscription, message.partition, message.sequence_number


def _is_refusal(answer: Mapping[str, str]) -> bool:
    return answer.get("status") == "error"


def _now_ms() -> int:
    return SystemClock().now_us() // 1000


def _next_wait(until: float | None) -> float:
    return _WAIT_S if until is None else max(0, min(_WAIT_S, until - time.monotonic()))
