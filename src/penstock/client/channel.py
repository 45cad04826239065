"""`ChannelBroker`: publish and subscribe by topic on a channel, with the methods that PulsyFlux' users know.

It is a thin layer over `Client`. A channel is a topic of Penstock's, named by the channel's id, and what is published
under a topic has the subject `<channel>.<topic>`: so channels do not see each other, and everything else of Penstock
can read them. One broker has a channel at a time; a second one is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from queue import Empty, Queue
from types import TracebackType
from typing import Final, Self
from uuid import UUID

from penstock.client.link import Servers
from penstock.client.message import Message
from penstock.client.sync import Client, Subscription
from penstock.errors import BadSubject, Closed, PenstockError, TimedOut
from penstock.subject import is_subject

TIMEOUT_S: Final = 5.0
BUFFER: Final = 100


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    topic: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class ChannelBroker:
    """The broker of a channel. All its methods may be called by any thread.

    `servers`: "host:port", or a `penstock.Broker`. `channel`: a UUID, or other text.
    Raises ClaimConflict if the channel has a broker already. `timeout`: how many seconds everything may take.
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
    ) -> None:
        self.channel = str(channel)
        if not is_subject(self.channel.encode()) or "." in self.channel or self.channel[0] in "_$":
            raise BadSubject(
                f"invalid channel {self.channel!r}: use a UUID, or text without dots, blanks and wildcards that begins "
                f"with neither _ nor $"
            )
        self._client = Client(
            servers,
            name=f"broker of {self.channel}",
            user=user,
            password=password,
            token=token,
            timeout=timeout,
            claim=f"channel {self.channel}",
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
        """Store a message, and send it to every subscriber of the topic. Returns when it is stored."""
        self._client.publish(self._subject(topic), payload, headers=headers, timeout=timeout)

    def subscribe(self, topic: str, *, buffer: int = BUFFER, drop_when_full: bool = False) -> ChannelSubscriber:
        """Return a subscriber of exactly this topic. At most `buffer` messages wait in it to be read; then the others
        wait at the broker, or are dropped if the subscriber wants that (`drop_when_full`)."""
        subscription = self._client.subscribe(self._subject(topic), buffer=buffer)
        subscriber = ChannelSubscriber(topic, subscription, buffer if drop_when_full else 0)
        with self._lock:
            if not self._is_closed:
                self._subscribers.setdefault(topic, []).append(subscriber)
                return subscriber
        subscriber._close()
        raise Closed("the broker is closed")

    def unsubscribe(self, topic: str) -> None:
        """End all subscribers of a topic: their loops end, and what they have not read they do not get."""
        with self._lock:
            subscribers = self._subscribers.pop(topic, [])
        for subscriber in subscribers:
            subscriber._close()

    def close(self) -> None:
        """End all subscribers, disconnect, and let go of the channel."""
        with self._lock:
            self._is_closed = True
            topics = list(self._subscribers)
        for topic in topics:
            self.unsubscribe(topic)
        self._client.close()

    def _subject(self, topic: str) -> str:
        if not is_subject(topic.encode()):
            raise BadSubject(f"invalid topic {topic!r}: tokens with dots between them, without blanks and wildcards")
        return f"{self.channel}.{topic}"


class ChannelSubscriber:
    """Messages of one topic: `for message in subscriber`, or `get`. Several threads may read it."""

    def __init__(self, topic: str, subscription: Subscription, dropping: int) -> None:
        """`ChannelBroker.subscribe` makes them. `dropping`: how many messages are kept here before more are dropped; 0:
        none is dropped, the broker keeps them."""
        self.topic = topic
        # How many messages were dropped because the buffer was full.
        self.dropped = 0
        self._subscription = subscription
        # In which messages are kept by a subscriber that drops, and None behind the last; and why there are no more.
        self._kept: Queue[Message | None] | None = None
        self._failure: PenstockError | None = None
        if dropping:
            # One more place than messages: for the end.
            self._kept = Queue(dropping + 1)
            threading.Thread(target=self._keep, name=f"penstock-{topic}", daemon=True).start()

    def __iter__(self) -> Iterator[ChannelMessage]:
        while (message := self._next(None)) is not None:
            yield self._shown(message)

    def get(self, timeout: float | None = None) -> ChannelMessage:
        """Return the next message. Raises TimedOut if none comes in so many seconds, Closed if none will."""
        message = self._next(timeout)
        if message is None:
            raise Closed(f"unsubscribed from {self.topic}")
        return self._shown(message)

    def _next(self, timeout: float | None) -> Message | None:
        """None: there will be none."""
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
            # For whoever else reads.
            self._kept.put(None)
            if self._failure is not None:
                raise self._failure
        return message

    def _keep(self) -> None:
        """In a thread of its own: take what comes, and keep as much as there is room for."""
        assert self._kept is not None, "it drops"
        try:
            for message in self._subscription:
                if self._kept.qsize() < self._kept.maxsize - 1:
                    self._kept.put(message)
                else:
                    self.dropped += 1
        except PenstockError as error:
            self._failure = error
        self._kept.put(None)

    def _shown(self, message: Message) -> ChannelMessage:
        return ChannelMessage(self.topic, message.value, message.headers)

    def _close(self) -> None:
        self._subscription.close()
