"""`Client`: the client for threads. It works in scripts, web servers and notebooks.

It is an `AsyncClient` in an event loop in a thread of its own (`loop_thread.py`). The work for each message is done in
the calling thread: producers gather messages there, and subscriptions read from their feed. The loop is woken once for
many messages. Methods that only wait for the asynchronous method of the same name are generated: see `blocking.py`.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from penstock.client.aio import (
    BATCH_BYTES,
    BUFFER,
    BUFFER_BYTES,
    LINGER_S,
    SERVERS,
    TIMEOUT_S,
    AsyncClient,
)
from penstock.client.blocking import BlockingMethods
from penstock.client.feed import SHARED
from penstock.client.loop_thread import LoopThread, abandon_all
from penstock.client.message import Message
from penstock.client.outgoing import ABSENT
from penstock.client.servers import Servers
from penstock.client.subscription import AsyncSubscription, closed_subscription
from penstock.client.unread import RefreshNotice
from penstock.client.values import TTL, Delay, Headers, Outgoing, Place, arguments
from penstock.errors import Closed, TimedOut
from penstock.model.subject import selection
from penstock.tls.options import TlsOptions

# Called with the name of a topic.
TopicCallback = Callable[[str], None]

# A waiting thread wakes up this often, because a signal that arrives just before the wait does not interrupt it.
_WAIT_S: Final = 0.5


class Client(BlockingMethods):
    """A connection to a broker. It opens on first use, and reopens by itself after it is lost.

    Any thread may call its methods, including one that runs an event loop. `penstock.AsyncClient` is the same client
    for asyncio.
    """

    def __init__(
        self,
        servers: Servers = SERVERS,
        *,
        name: str = "",
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
        claim: str | None = None,
        tls: TlsOptions | None = None,
    ) -> None:
        """`servers`: "host:port", a list of addresses to try in order, or a `penstock.Broker`. `timeout`: the default
        timeout of every method, in seconds. `claim`: a name that only one client can hold at a time; connecting raises
        ClaimConflict while another client holds it. `tls`: use TLS, with these options; an address `tls://host:port`
        uses TLS without any."""
        self._make = partial(
            AsyncClient,
            servers,
            name=name,
            user=user,
            password=password,
            token=token,
            timeout=timeout,
            claim=claim,
            tls=tls,
        )
        self._timeout = timeout
        client = self._make()
        super().__init__(client, LoopThread(client))
        # What must be renewed after a fork.
        self._inherited: weakref.WeakSet[Subscription | Producer] = weakref.WeakSet()
        _CLIENTS.add(self)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Flush the producers, close the subscriptions and disconnect.

        Raise DeliveryFailed if a producer could not store all of its messages.
        """
        self._loop.close()

    def publish_many(
        self,
        messages: Iterable[tuple[str, bytes] | Outgoing],
        *,
        progress: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Publish many messages in batches, and return how many were stored. `progress` is called with the number
        stored so far.

        `timeout`: seconds for each message. Raise DeliveryFailed with the messages that were not stored.
        """
        producer = self.producer(timeout=self._timeout if timeout is None else timeout)
        reported = 0
        with producer:
            for message in messages:
                subject, value, options = arguments(message)
                producer.publish(subject, value, **options)
                if progress is not None and producer.stored > reported:
                    reported = producer.stored
                    progress(reported)
        if progress is not None:
            progress(producer.stored)
        return producer.stored

    def producer(
        self,
        *,
        batch_bytes: int = BATCH_BYTES,
        linger: float = LINGER_S,
        buffer_bytes: int = BUFFER_BYTES,
        compression: str = "none",
        timeout: float = TIMEOUT_S,
    ) -> Producer:
        """Return a producer. It sends messages in batches of `batch_bytes`, or after `linger` seconds.

        `buffer_bytes` limits the messages that are not stored yet. `compression`: "none", "lz4" or "zstd". A message
        that is not stored within `timeout` seconds has failed.
        """
        producer = Producer(
            self,
            batch_bytes=batch_bytes,
            linger=linger,
            buffer_bytes=buffer_bytes,
            compression=compression,
            timeout=timeout,
        )
        self._inherited.add(producer)
        return producer

    def subscribe(
        self,
        pattern: str | None = None,
        *,
        topic: str | None = None,
        group: str | None = None,
        mode: str = SHARED,
        start: Place = "latest",
        buffer: int = BUFFER,
        deliveries_max: int | None = None,
        on_reset: TopicCallback | None = None,
        on_ready: TopicCallback | None = None,
    ) -> Subscription:
        """Subscribe to the subjects that match a pattern, or to a whole topic (`topic="orders"`).

        Without a group, each subscription receives all messages. In a group, each message goes to one member, which
        acknowledges it (`mode="shared"`), or each member receives whole partitions (`mode="partitioned"`). `start`:
        "latest", "earliest", an offset or a time; a group that exists continues at its position instead. `buffer`: the
        most messages that wait here to be read. `deliveries_max`: a shared group dead-letters a message after this many
        deliveries, 0 for never; by default the topic's policy decides. If members differ, the highest limit applies.

        `on_reset` and `on_ready` let a group take part in a refresh. The reading thread calls each with the name of a
        topic: `on_reset` discards what the application has of it, because all of it is delivered again; `on_ready`
        follows the last message. Each may be called twice. No message is delivered while one runs. If one raises, the
        subscription ends.
        """
        callbacks = {"RESET": on_reset, "READY": on_ready}
        selected = selection(pattern, topic)
        opened = self._async._subscription(selected, group, mode, start, buffer, callbacks, deliveries_max)
        self._loop.run(opened._begin)
        subscription = Subscription(self, opened)
        self._inherited.add(subscription)
        return subscription

    def _forked(self) -> None:
        """Start anew in a forked child."""
        is_closed = self._loop.is_closed
        self._loop.abandon()
        if not is_closed:
            self._async = self._make()
            self._loop = LoopThread(self._async)
        for each in list(self._inherited):
            each._forked()


class Subscription:
    """A stream of messages: `for message in subscription`, or `get`. Several threads may read it.

    It continues after a reconnect: a subscription without a group at the next offset; a member of a group receives its
    unacknowledged messages again.
    """

    def __init__(self, client: Client, opened: AsyncSubscription) -> None:
        """Use `Client.subscribe`."""
        self._client = client
        self._async = opened
        self._feed = opened._feed
        self._arrival = threading.Condition()
        self._feed.arrived = self._arrived
        # Why it cannot be used in this process.
        self._foreign: Closed | None = None

    @property
    def pattern(self) -> str:
        return self._async.pattern

    @property
    def group(self) -> str | None:
        return self._async.group

    @property
    def mode(self) -> str:
        return self._async.mode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        message = self._feed.take()
        while message is None:
            if self._feed.is_closed:
                raise StopIteration
            self._wait(None)
            message = self._feed.take()
        return message

    def get(self, timeout: float | None = None) -> Message:
        """Return the next message. Raise TimedOut if none arrives in time, Closed if the subscription is closed."""
        return self.get_many(1, timeout)[0]

    def get_many(self, max: int | None = None, timeout: float | None = None) -> list[Message]:
        """Return the messages that have arrived, at least one. Raise TimedOut if none arrives in time, Closed if the
        subscription is closed."""
        messages = self._next_many(max, timeout)
        if not messages:
            raise closed_subscription()
        return messages

    def batches(self) -> Iterator[list[Message]]:
        """Yield lists of messages, each with those that have arrived since the last one."""
        while messages := self._next_many(None, None):
            yield messages

    def unread(self) -> list[Message]:
        """Return the messages that have arrived and were not read, without reading them. Their ack deadlines run."""
        return self._feed.unread()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all acknowledgements so far are stored. Raise NotOutstanding if some were too late."""
        if self._foreign is not None:
            raise self._foreign
        self._client._loop.run(lambda: self._async.flush(timeout))

    def close(self) -> None:
        """Stop receiving: iteration ends. Unacknowledged messages go to other members of the group."""
        if self._foreign is not None:
            self._feed.close()
        elif not self._feed.is_closed:
            # A closed client has closed its subscriptions.
            with suppress(Closed):
                self._client._loop.run(self._async.close)

    def _next_many(self, count_max: int | None, timeout: float | None) -> list[Message]:
        """Return messages; an empty list if the subscription is closed."""
        until = None if timeout is None else time.monotonic() + timeout
        messages = self._feed.take_many(count_max)
        while not messages and not self._feed.is_closed:
            if not self._wait(until):
                raise TimedOut(f"get from {self.pattern}: not done within {timeout:g} s")
            messages = self._feed.take_many(count_max)
        return messages

    def _wait(self, until: float | None) -> bool:
        """Wait for messages or the end, and return False if the time is over. Run the callback of a refresh if one is
        due."""
        with self._arrival:
            while not self._feed.is_ready:
                left = _WAIT_S if until is None else min(until - time.monotonic(), _WAIT_S)
                if left <= 0:
                    return False
                self._arrival.wait(left)
        if (notice := self._feed.notice()) is not None:
            self._refresh(notice)
        return True

    def _refresh(self, notice: RefreshNotice) -> None:
        """Call the callback in this thread. Other threads that read wait for it."""
        callback = self._async._callbacks[notice.word]
        try:
            if callback is not None:
                callback(notice.topic)
        except BaseException as error:
            # A closed client has closed its subscriptions.
            with suppress(Closed):
                self._client._loop.run(partial(self._async._fail, notice, error))
            if not isinstance(error, Exception):
                raise
        else:
            self._feed.complete(notice)

    def _arrived(self) -> None:
        self._async._bell.ring()
        with self._arrival:
            self._arrival.notify_all()

    def _forked(self) -> None:
        self._arrival = threading.Condition()
        self._foreign = Closed("the subscription belongs to the parent process: subscribe again in the child")
        self._feed.disown(threading.Lock(), self._foreign)


class Producer:
    """Publish many messages in few batches. Each is stored once and in order, even if connections break.

    Several threads may use it.
    """

    def __init__(self, client: Client, **settings: Any) -> None:
        """Use `Client.producer`."""
        self._client = client
        self._settings = settings
        self._async = client._async.producer(**settings)

    @property
    def stored(self) -> int:
        """The number of stored messages, including duplicates."""
        return self._async.stored

    @property
    def duplicates(self) -> int:
        """The number of duplicates: the broker had already stored their `message_id` (or payload).

        A message that was sent again after a lost connection may count as its own duplicate.
        """
        return self._async.duplicates

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(
        self,
        subject: str,
        value: bytes | None = None,
        *,
        json: Any = ABSENT,
        key: bytes | str | None = None,
        headers: Headers = None,
        message_id: str | None = None,
        delay: Delay = None,
        ttl: TTL = None,
    ) -> None:
        """Accept a message, which is stored later. Wait only if `buffer_bytes` are not stored yet.

        Raise DeliveryFailed, once, if earlier messages were not stored; then this one was not accepted.
        """
        left = self._async._add(subject, value, json, key, headers, message_id, delay, ttl)
        if left is not None:
            self._client._loop.run(lambda: self._async._publish(left))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all messages so far are stored. Raise DeliveryFailed with those that were not."""
        self._client._loop.run(lambda: self._async.flush(timeout))

    def close(self) -> None:
        """Flush, and accept no more messages."""
        if not self._async._batcher.is_closed:
            self._client._loop.run(self._async.close)

    def _forked(self) -> None:
        """Start empty, under other producer IDs: the parent sends the messages that it has accepted."""
        self._async = self._client._async.producer(**self._settings)


_CLIENTS: Final[weakref.WeakSet[Client]] = weakref.WeakSet()


def _forked() -> None:
    for client in list(_CLIENTS):
        client._forked()
    abandon_all()


os.register_at_fork(after_in_child=_forked)
