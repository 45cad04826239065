"""The messages of a `BrokerClient`: its subscriptions, the queue of messages, and the calls of handlers.

One thread calls handlers, one message at a time (`run`), so a handler may take its time and may itself use the client.
A message stays in `pending` until it is handled, so that its ack deadline can be extended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.clock import SystemClock
from penstock.errors import BadRequest, ConnectionLost
from penstock.wire import qb
from penstock.wire.qb import Kind

# How long to wait for a running handler when its subscription ends.
HANDLER_S: Final = 5.0

# The properties of a message that its acknowledgement repeats.
_REPEATED: Final = ("subscription_id", "topic", "partition")
# A waiting thread wakes up this often, because a signal that arrives just before the wait does not interrupt it.
_WAIT_S: Final = 0.5

logger = logging.getLogger("penstock.client.qb")


@dataclass(frozen=True, slots=True)
class BrokerMessage:
    """A message of a subscription. `properties`: those of the publisher and of the protocol. `timestamp`: seconds since
    1970."""

    body: bytes
    topic: str
    properties: dict[str, str]
    sequence_number: int
    partition: int
    timestamp: float
    subscription: str

    @property
    def offset(self) -> int:
        """The same as `sequence_number`."""
        return self.sequence_number

    def text(self) -> str:
        """Return the body, decoded from UTF-8."""
        return self.body.decode()


Handler = Callable[[BrokerMessage], object]
# Subscription, partition, offset.
_Key = tuple[str, int, int]


class HandledSubscription(NamedTuple):
    """A subscription that this client has joined."""

    handler: Handler | None
    acknowledges: bool = True
    # The topic and partition of a subscription that the client has created for itself, and deletes when it leaves.
    own: tuple[str, int] | None = None

    def wants(self, message: BrokerMessage) -> bool:
        return self.own is None or self.own[1] == message.partition


class BrokerDeliveries:
    def __init__(self, send: Callable[[bytes], None]) -> None:
        """`send` sends acknowledgements. It raises ConnectionLost if there is no connection."""
        # Whether no more messages are handed to handlers.
        self.is_stopping = False
        self._send = send
        # Why there is no connection any more; None if the client has ended it.
        self._lost: str | None = None
        # Guards `_subscriptions` and `_busy`, the subscription whose handler runs.
        self._turn = threading.Condition()
        self._subscriptions: dict[str, HandledSubscription] = {}
        self._busy: str | None = None
        # Messages that are not handled. One that is delivered again in the meantime is the same message.
        self._held: dict[_Key, BrokerMessage] = {}
        self._arrived: queue.SimpleQueue[BrokerMessage | None] = queue.SimpleQueue()
        # Messages that wait for `receive`.
        self._unread: queue.SimpleQueue[BrokerMessage | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_in_handler(self) -> bool:
        """Whether the calling thread is the one that calls handlers."""
        return threading.current_thread() is self._thread

    @property
    def subscriptions(self) -> dict[str, HandledSubscription]:
        with self._turn:
            return dict(self._subscriptions)

    def add(self, name: str, subscription: HandledSubscription) -> bool:
        """Add a subscription before the broker is asked, because messages arrive as soon as it agrees. Return False if
        it was already added."""
        with self._turn:
            return self._subscriptions.setdefault(name, subscription) is subscription

    def remove(self, names: list[str]) -> None:
        """Remove subscriptions, and wait for a handler that runs, so that its message is acknowledged."""
        with self._turn:
            for name in names:
                self._subscriptions.pop(name, None)
            if not self.is_in_handler:
                self._turn.wait_for(lambda: self._busy not in names, HANDLER_S)

    def put(self, message: BrokerMessage) -> None:
        # The broker delivers a message again after its deadline: it is handled once.
        if self._held.setdefault(_key(message), message) is message:
            self._arrived.put(message)

    def pending(self) -> list[bytes]:
        """Return the frames that extend the ack deadlines of all messages that are not handled."""
        return [_acknowledgement(message, status="pending") for message in list(self._held.values())]

    def acknowledge(self, message: BrokerMessage) -> None:
        self._send(_acknowledgement(message))

    def receive(self, timeout: float | None) -> BrokerMessage | None:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                message = self._unread.get(timeout=next_wait(until))
            except queue.Empty:
                if until is not None and time.monotonic() >= until:
                    return None
                continue
            if message is None:
                # Wake the next thread that waits.
                self._unread.put(None)
                if self._lost is None:
                    return None
                raise ConnectionLost(self._lost)
            self._held.pop(_key(message), None)
            subscription = self._subscriptions.get(message.subscription)
            if subscription is not None:
                if subscription.acknowledges:
                    self.acknowledge(message)
                return message

    def run(self) -> Iterator[None]:
        """Hand over messages until `close`; yield after each one."""
        self._thread = threading.current_thread()
        while (message := self._arrived.get()) is not None:
            self._hand_over(message)
            yield

    def close(self, lost: str | None) -> None:
        """End `run` and `receive`. `lost`: why there is no connection; None if the client has ended it."""
        self._lost = lost
        self._arrived.put(None)
        self._unread.put(None)

    def _hand_over(self, message: BrokerMessage) -> None:
        with self._turn:
            subscription = self._subscriptions.get(message.subscription)
            if subscription is None or self.is_stopping:
                # The client has left the subscription: the broker redelivers the message to another subscriber.
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

    def _handle(self, message: BrokerMessage, subscription: HandledSubscription) -> bool:
        """Return whether to acknowledge the message now."""
        if not subscription.wants(message):
            self._held.pop(_key(message), None)
            return True
        if subscription.handler is None:
            self._unread.put(message)
            return False
        try:
            subscription.handler(message)
        except Exception:  # whatever it is, other messages must be handled
            logger.exception(
                "the handler failed for message %d of %s, which is redelivered", message.offset, message.subscription
            )
            return False
        finally:
            self._held.pop(_key(message), None)
        return subscription.acknowledges


def read_message(message: qb.QbMessage, properties: dict[str, str]) -> BrokerMessage:
    try:
        partition = int(properties.get("partition", "0"))
    except ValueError:
        raise BadRequest(f"invalid partition {properties['partition']!r} of a message") from None
    return BrokerMessage(
        body=message.body,
        topic=properties.get("topic", ""),
        properties=properties,
        sequence_number=message.sequence,
        partition=partition,
        timestamp=message.timestamp_ms / 1000,
        subscription=properties.get("subscription_id", ""),
    )


def next_wait(until: float | None) -> float:
    """Return how long to wait now, in order to wait until a time or forever."""
    return _WAIT_S if until is None else max(0, min(_WAIT_S, until - time.monotonic()))


def now_ms() -> int:
    return SystemClock().now_us() // 1000


def _acknowledgement(message: BrokerMessage, **more: str) -> bytes:
    """Return the frame. It has the sequence of the message, and the broker does not answer it."""
    fields = {name: message.properties[name] for name in _REPEATED if name in message.properties} | more
    return qb.message(Kind.ACK, message.sequence_number, now_ms(), qb.properties(fields))


def _key(message: BrokerMessage) -> _Key:
    return message.subscription, message.partition, message.sequence_number
