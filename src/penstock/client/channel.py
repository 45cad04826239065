"""`ChannelBroker`: publish and subscribe by topic on a channel, with the methods that PulsyFlux' users know.

It is a thin layer over `Client`. A channel is a Penstock topic, named by the ID of the channel. A message of a topic on
the channel has the subject `<channel>.<topic>`. So channels are separate, and other Penstock clients can read them.
Only one broker can hold a channel at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from queue import Empty, Queue
from types import TracebackType
from typing import Final, Self
from uuid import UUID

from penstock.client.message import Message
from penstock.client.servers import Servers
from penstock.client.sync import Client, Subscription
from penstock.errors import BadSubject, Closed, PenstockError, TimedOut
from penstock.model.subject import is_subject
from penstock.tls.options import TlsOptions

TIMEOUT_S: Final = 5.0
BUFFER: Final = 100


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """A message of a topic on a channel."""

    topic: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class ChannelBroker:
    """The broker of a channel. Any thread may call its methods.

    `servers`: "host:port", or a `penstock.Broker`. `channel`: a UUID, or other text. `timeout`: the default timeout of
    every method, in seconds. `tls`: as of a `Client`. Raise ClaimConflict if the channel already has a broker.
    """

    def __init__(
        self,
        servers: Servers,
        channel: UUID | str,
        *,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
        tls: TlsOptions | None = None,
    ) -> None:
        self.channel = str(channel)
        if not is_subject(self.channel.encode()) or "." in self.channel or self.channel[0] in "_$":
            raise BadSubject(
                f"invalid channel {self.channel!r}: use a UUID, or text without dots, blanks and wildcards that does "
                f"not begin with _ or $"
            )
        self._client = Client(
            servers,
            name=f"broker of {self.channel}",
            user=user,
            password=password,
            token=token,
            timeout=timeout,
            claim=f"channel {self.channel}",
            tls=tls,
        )
        self._lock = threading.Lock()
        self._subscribers: dict[str, list[ChannelSubscriber]] = {}
        self._is_closed = False
        try:
            self._client.connect()
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(
        self, topic: str, payload: bytes, headers: Mapping[str, str] | None = None, *, timeout: float | None = None
    ) -> None:
        """Publish a message to every subscriber of the topic. Return when it is stored."""
        self._client.publish(self._subject(topic), payload, headers=headers, timeout=timeout)

    def subscribe(self, topic: str, *, buffer: int = BUFFER, drop_when_full: bool = False) -> ChannelSubscriber:
        """Return a subscriber of exactly this topic. When `buffer` messages wait to be read, more messages wait at the
        broker, or are dropped (`drop_when_full`)."""
        subscription = self._client.subscribe(self._subject(topic), buffer=buffer)
        subscriber = ChannelSubscriber(topic, subscription, buffer if drop_when_full else 0)
        with self._lock:
            if not self._is_closed:
                self._subscribers.setdefault(topic, []).append(subscriber)
                return subscriber
        subscriber._close()
        raise Closed("the broker is closed")

    def unsubscribe(self, topic: str) -> None:
        """End all subscribers of a topic. Their loops end, and unread messages are discarded."""
        with self._lock:
            subscribers = self._subscribers.pop(topic, [])
        for subscriber in subscribers:
            subscriber._close()

    def close(self) -> None:
        """End all subscribers, disconnect, and release the channel."""
        with self._lock:
            self._is_closed = True
            topics = list(self._subscribers)
        for topic in topics:
            self.unsubscribe(topic)
        self._client.close()

    def _subject(self, topic: str) -> str:
        if not is_subject(topic.encode()):
            raise BadSubject(f"invalid topic {topic!r}: use tokens separated by dots, without blanks and wildcards")
        return f"{self.channel}.{topic}"


class ChannelSubscriber:
    """Messages of one topic: `for message in subscriber`, or `get`. Several threads may read it."""

    def __init__(self, topic: str, subscription: Subscription, dropping: int) -> None:
        """Use `ChannelBroker.subscribe`. `dropping`: how many messages are kept before more are dropped; 0: none is
        dropped."""
        self.topic = topic
        # Messages dropped because the buffer was full.
        self.dropped = 0
        self._subscription = subscription
        # The messages of a subscriber that drops, with None after the last one; and the error that ended it.
        self._kept: Queue[Message | None] | None = None
        self._failure: PenstockError | None = None
        if dropping:
            # One more than the messages, for the None at the end.
            self._kept = Queue(dropping + 1)
            threading.Thread(target=self._keep, name=f"penstock-{topic}", daemon=True).start()

    def __iter__(self) -> Iterator[ChannelMessage]:
        while (message := self._next(None)) is not None:
            yield self._convert(message)

    def get(self, timeout: float | None = None) -> ChannelMessage:
        """Return the next message. Raise TimedOut if none arrives in time, Closed after `unsubscribe`."""
        message = self._next(timeout)
        if message is None:
            raise Closed(f"unsubscribed from {self.topic}")
        return self._convert(message)

    def _next(self, timeout: float | None) -> Message | None:
        """Return the next message; None at the end."""
        if self._kept is None:
            try:
                return self._subscription.get(timeout)
            except Closed:
                return None
        try:
            message = self._kept.get(timeout=timeout)
        except Empty:
            raise TimedOut(f"get from {self.topic}: not done within {timeout:g} s") from None
        if message is None:
            # Wake the next thread that waits.
            self._kept.put(None)
            if self._failure is not None:
                raise self._failure
        return message

    def _keep(self) -> None:
        """Read messages in a thread of its own, and keep as many as there is room for."""
        assert self._kept is not None, "the subscriber drops messages"
        try:
            for message in self._subscription:
                if self._kept.qsize() < self._kept.maxsize - 1:
                    self._kept.put(message)
                else:
                    self.dropped += 1
        except PenstockError as error:
            self._failure = error
        self._kept.put(None)

    def _convert(self, message: Message) -> ChannelMessage:
        return ChannelMessage(self.topic, message.value, message.headers)

    def _close(self) -> None:
        self._subscription.close()
