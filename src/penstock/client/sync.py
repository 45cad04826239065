"""The client for threads: Client, Subscription, Producer. Works in a script, a web server, a notebook.

It is `AsyncClient` in an event loop of its own, in a thread of its own. What happens to each message happens in the
thread that calls: messages are gathered there, and read from the subscription's feed. The loop is woken for many at
once.

After a fork the child has neither that thread nor may it touch its connection, which is the parent's. So everything of
a client that lives in the thread is left alone there, and made anew when it is next used.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, Unpack, overload

from penstock.batch import Batch
from penstock.client.aio import (
    BATCH_BYTES,
    BUFFER,
    BUFFER_BYTES,
    LINGER_S,
    SERVERS,
    TIMEOUT_S,
    TTL,
    AsyncClient,
    AsyncSubscription,
    Delay,
    Headers,
    Moment,
    Place,
    closed_subscription,
)
from penstock.client.feed import SHARED, Notice
from penstock.client.link import Servers
from penstock.client.message import Message
from penstock.client.outgoing import ABSENT
from penstock.client.transaction import AsyncStage, AsyncTransaction
from penstock.client.values import (
    DeadLetter,
    DelayedMessage,
    Group,
    LetterFilter,
    Outgoing,
    Owner,
    Receipt,
    Redriven,
    Refresh,
    Topic,
    arguments,
)
from penstock.errors import Closed, PenstockError, TimedOut
from penstock.subject import selection

T = TypeVar("T")

# What is called with the name of a topic.
Told = Callable[[str], None]

# A thread that waits looks up so often: a signal that comes just when it begins to wait does not wake it.
_WAIT_S: Final = 0.5

# How long what is still in producers may take when the interpreter ends.
EXIT_S: Final = 5.0

_LOG: Final = logging.getLogger("penstock.client")


class Client:
    """A connection to a broker. It connects when it is first used, and again by itself whenever it must.

    All its methods may be called by any thread, also by one that runs an event loop. `penstock.AsyncClient` is the
    same for asyncio.
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
    ) -> None:
        """`servers`: "host:port", several of them to be tried in turn, or a `penstock.Broker`. `timeout`: in seconds,
        for everything that is given none of its own. `claim`: a name that one client has at a time; connecting raises
        ClaimConflict while another one has it."""
        self._make = partial(
            AsyncClient, servers, name=name, user=user, password=password, token=token, timeout=timeout, claim=claim
        )
        self._timeout = timeout
        self._async = self._make()
        self._lock = threading.Lock()
        self._host: _Host | None = None
        self._is_closed = False
        # What must know when the process is forked.
        self._inherited: weakref.WeakSet[Subscription | Producer] = weakref.WeakSet()
        _CLIENTS.add(self)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Connect now. Raises NoBroker if nobody is there."""
        return self._run(self._async.connect())

    def close(self) -> None:
        """Store what producers still hold, end the subscriptions, and disconnect.

        Raises DeliveryFailed if messages of a producer are not stored.
        """
        with self._lock:
            self._is_closed = True
            host, self._host = self._host, None
        if host is not None:
            host.close()

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
        timeout: float | None = None,
    ) -> Receipt:
        """Store a message; returns when it is as durable as its topic promises.

        Messages with the same key keep their order. One with a `message_id` that was stored before is not stored
        again. `delay`: seconds, or until when. `ttl`: for how long it is delivered, in seconds. Without a value it
        deletes its key.
        """
        return self._run(
            self._async.publish(
                subject,
                value,
                json=json,
                key=key,
                headers=headers,
                message_id=message_id,
                delay=delay,
                ttl=ttl,
                timeout=timeout,
            )
        )

    def request(
        self,
        subject: str,
        value: bytes | None = None,
        *,
        json: Any = ABSENT,
        key: bytes | str | None = None,
        headers: Headers = None,
        timeout: float | None = None,
    ) -> Message:
        """Publish a message and return the first reply to it.

        Raises NoResponders at once, and stores nothing, if nobody is subscribed to the subject; TimedOut if no reply
        comes in time. A subscriber replies with `message.respond`, a NATS client as it does to any request.
        """
        return self._run(self._async.request(subject, value, json=json, key=key, headers=headers, timeout=timeout))

    def publish_many(
        self,
        messages: Iterable[tuple[str, bytes] | Outgoing],
        *,
        progress: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Store many messages, in batches; how many. `progress` is told how many are stored so far.

        `timeout`: how long each may take. Raises DeliveryFailed with those that are not stored.
        """
        producer = self.producer(timeout=self._timeout if timeout is None else timeout)
        told = 0
        with producer:
            for message in messages:
                subject, value, options = arguments(message)
                producer.publish(subject, value, **options)
                if progress is not None and producer.stored > told:
                    told = producer.stored
                    progress(told)
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
        """For many messages: they are sent in batches of `batch_bytes`, or after `linger` seconds.

        At most `buffer_bytes` wait to be stored; `compression` is none, lz4 or zstd; a message that is not stored
        within `timeout` seconds has failed.
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

    def transaction(self, name: str | None = None, number: int = 0) -> Transaction:
        """For messages to several topics that are stored together, or not at all: `with` it, and publish.

        With a name and a number, one that was committed before is not stored again; the numbers of a name ascend.
        """
        return Transaction(self, self._async.transaction(name, number))

    def stage(self, name: str, number: int) -> Stage:
        """A part of a transaction that is committed elsewhere, by who has all of its parts."""
        return Stage(self, self._async.stage(name, number))

    def last_transaction(self, name: str) -> int | None:
        """Return the number of the last committed transaction of this name, or None if there is none."""
        return self._run(self._async.last_transaction(name))

    def commit_transaction(self, name: str, number: int, offsets: Sequence[int], *, once: bool = False) -> bool:
        """Let readers have what was staged, all at once; False if the transaction had been committed before.

        Raises StageLost if some of it is not there any more: then nothing is stored. `once`: nobody comes back to the
        name.
        """
        return self._run(self._async.commit_transaction(name, number, offsets, once=once))

    def abort_transaction(self, name: str, number: int) -> None:
        """Forget what was staged."""
        return self._run(self._async.abort_transaction(name, number))

    def resolve(self, subject: str) -> Owner:
        """The topic that stores a subject, made if there is none: its name, its id, and how many partitions it has."""
        return self._run(self._async.resolve(subject))

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
        on_reset: Told | None = None,
        on_ready: Told | None = None,
    ) -> Subscription:
        """Messages whose subject matches the pattern, or of a whole topic (`topic="orders"`), as they come.

        Without a group each subscriber gets all of them. With one, its members share them and acknowledge each
        (`mode="shared"`), or have partitions of their own (`"partitioned"`). `start`: "latest", "earliest", an offset
        or a time; of a group that exists it counts for nothing. At most `buffer` messages are here unread.
        `deliveries_max`: a shared group dead-letters a message after this many deliveries, 0 for never; without it, as
        the topic says. Of several members the most patient one decides.

        `on_reset` and `on_ready` are for a refresh, and are called with a topic by the thread that reads: forget what
        you have of it, all of it comes again; it has come. Each may be called twice. While it runs no message is given
        out, and if it raises the subscription ends.
        """
        told = {"RESET": on_reset, "READY": on_ready}
        opened = self._async._subscription(selection(pattern, topic), group, mode, start, buffer, told, deliveries_max)
        self._run(self._async._begin(opened))
        subscription = Subscription(self, opened)
        self._inherited.add(subscription)
        return subscription

    @overload
    def fetch(
        self,
        topic: str,
        partition: int = 0,
        offset: Place = "earliest",
        *,
        end: int | None = None,
        count: int | None = None,
        follow: bool = False,
        arrow: Literal[False] = False,
        columns: Sequence[str] | None = None,
        expired: bool = False,
    ) -> Iterator[Message]: ...

    @overload
    def fetch(
        self,
        topic: str,
        partition: int = 0,
        offset: Place = "earliest",
        *,
        end: int | None = None,
        count: int | None = None,
        follow: bool = False,
        arrow: bool,
        columns: Sequence[str] | None = None,
        expired: bool = False,
    ) -> Iterator[Any]: ...

    def fetch(
        self,
        topic: str,
        partition: int = 0,
        offset: Place = "earliest",
        *,
        end: int | None = None,
        count: int | None = None,
        follow: bool = False,
        arrow: bool = False,
        columns: Sequence[str] | None = None,
        expired: bool = False,
    ) -> Iterator[Any]:
        """What a partition holds from an offset or a time on, up to what is committed now; with `follow`, for ever.

        With `arrow` it yields `pyarrow.RecordBatch`es, of all columns or of those that are named; with `expired`, also
        messages whose TTL has ended.
        """
        parts = self._async._fetch(
            topic, partition, offset, end, count, follow=follow, arrow=arrow, columns=columns, expired=expired
        )
        steps = _Steps(self._run(parts))
        try:
            while (parts := self._run(steps.next())) is not None:
                for part in parts:
                    if arrow:
                        yield part
                    else:
                        yield from part
        finally:
            # With the client its reading has ended.
            with suppress(Closed):
                self._run(steps.close())

    def topics(self) -> list[Topic]:
        """All topics, with their positions."""
        return self._run(self._async.topics())

    def topic(self, name: str) -> Topic:
        """A topic, with its positions. Raises UnknownTopic if there is none."""
        return self._run(self._async.topic(name))

    def create_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Make a topic. `policy`: what differs from the broker's defaults, such as `durability="flush"`."""
        return self._run(self._async.create_topic(name, partitions=partitions, **policy))

    def alter_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Change a topic: give it more partitions, or another policy.

        More partitions move keys: what this means for messages that are stored is in `warning` of the answer.
        """
        return self._run(self._async.alter_topic(name, partitions=partitions, **policy))

    def purge_topic(self, name: str, before: Place, *, partition: int | None = None) -> Topic:
        """Drop all messages of a topic that were stored before a time, or before an offset of one partition, or all
        (`"latest"`); returns when that is durable. Groups go on behind them. The disk is freed by whole segments.
        """
        return self._run(self._async.purge_topic(name, before, partition=partition))

    def delete_topic(self, name: str) -> None:
        """Delete a topic and all that it holds."""
        return self._run(self._async.delete_topic(name))

    def refresh_topic(self, topic: str) -> Refresh:
        """Let all groups that read a topic and understand it (`on_reset`) forget it, and have all of it again.

        Returns when it has begun; if one is under way already, with that. Raises RefreshConflict if some members of a
        group understand it and others do not.
        """
        return self._run(self._async.refresh_topic(topic))

    def refresh_status(self, topic: str) -> Refresh:
        """How far the last refresh of a topic is."""
        return self._run(self._async.refresh_status(topic))

    def offset_at(self, topic: str, partition: int, moment: Moment) -> int:
        """The first offset that was stored at a time or later."""
        return self._run(self._async.offset_at(topic, partition, moment))

    def offset_after(self, topic: str, partition: int, offset: int, bytes: int) -> int:
        """The offset at which a batch begins at least so many bytes behind another; or the end."""
        return self._run(self._async.offset_after(topic, partition, offset, bytes))

    def wait(self, positions: Iterable[tuple[int, int, int]], timeout: float) -> bool:
        """Wait until one of some partitions (topic id, partition, offset) holds something at its offset; False if none
        does within `timeout` seconds, of which the broker waits ten at the most."""
        return self._run(self._async.wait(positions, timeout))

    def groups(self) -> list[Group]:
        """All groups, with their members and positions."""
        return self._run(self._async.groups())

    def group(self, name: str) -> Group:
        """A group. Raises UnknownGroup if there is none."""
        return self._run(self._async.group(name))

    def create_group(
        self,
        name: str,
        pattern: str | None = None,
        *,
        topic: str | None = None,
        mode: str = SHARED,
        start: Place = "latest",
    ) -> Group:
        """Make a group of a pattern or a whole topic before its first member comes: nothing is missed from now on."""
        return self._run(self._async.create_group(name, pattern, topic=topic, mode=mode, start=start))

    def reset_group(self, name: str, start: Place, *, topic: str | None = None, partition: int | None = None) -> Group:
        """Let a group begin anew somewhere else: in all it reads, or in one topic or partition."""
        return self._run(self._async.reset_group(name, start, topic=topic, partition=partition))

    def delete_group(self, name: str) -> None:
        """Delete a group: nobody knows how far it has come any more."""
        return self._run(self._async.delete_group(name))

    def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Say how far a group has come, whose positions are kept elsewhere."""
        return self._run(self._async.commit(group, topic, partition, offset))

    def lag(self, group: str) -> int:
        """How many messages a group has not done yet."""
        return self._run(self._async.lag(group))

    def dead_letters(
        self, pattern: str = ">", *, limit: int = 100, redriven: bool = False, **wanted: Unpack[LetterFilter]
    ) -> list[DeadLetter]:
        """Return messages that a group could not handle, oldest first; with `redriven`, also those that were redriven.
        Choose by `group`, `reason`, `since`, `until`, `partition` and `offsets`."""
        return self._run(self._async.dead_letters(pattern, limit=limit, redriven=redriven, **wanted))

    def redrive(
        self, pattern: str = ">", *, count: int | None = None, to_group: bool = False, **wanted: Unpack[LetterFilter]
    ) -> Redriven:
        """Send dead letters to their subjects again, each once, and return how many. `to_group`: deliver each only to
        the group that failed. Choose by `group`, `reason`, `since`, `until`, `partition` and `offsets`.

        Letters that cannot be redriven are skipped, and stay in the list. Raises if there is none that can."""
        return self._run(self._async.redrive(pattern, count=count, to_group=to_group, **wanted))

    def purge_dead_letters(
        self, pattern: str = ">", *, count: int | None = None, **wanted: Unpack[LetterFilter]
    ) -> int:
        """Forget dead letters, and return how many. Choose by `group`, `reason`, `since`, `until`, `partition` and
        `offsets`."""
        return self._run(self._async.purge_dead_letters(pattern, count=count, **wanted))

    def delayed(self, pattern: str = ">", *, limit: int = 100, message_id: str | None = None) -> list[DelayedMessage]:
        """Return messages that were published with a delay and wait, those first that are due first."""
        return self._run(self._async.delayed(pattern, limit=limit, message_id=message_id))

    def cancel_delayed(
        self, pattern: str, *, message_id: str | None = None, offsets: Sequence[int] | None = None
    ) -> int:
        """Cancel delayed messages, and return how many: they are never published. `offsets`: where they wait."""
        return self._run(self._async.cancel_delayed(pattern, message_id=message_id, offsets=offsets))

    def statistics(self) -> dict[str, Any]:
        """The broker's figures."""
        return self._run(self._async.statistics())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of it, in the thread of the client."""
        with self._lock:
            if self._host is None and not self._is_closed:
                self._host = _Host(self._async)
            host = self._host
        if host is None:
            work.close()
            raise Closed("the client is closed")
        return host.run(work)

    def _forked(self) -> None:
        """This is a child: the thread is not here, and the connection is the parent's."""
        _ABANDONED.append(self._async)
        self._lock = threading.Lock()
        self._host = None
        self._async = self._make()
        for each in list(self._inherited):
            each._forked()


class Subscription:
    """Messages as they come: `for message in subscription`, or `get`. It goes on by itself after a reconnect: a plain
    one where it was; a member of a group is given again what it has not acknowledged. Several threads may read it.
    """

    def __init__(self, client: Client, opened: AsyncSubscription) -> None:
        """`Client.subscribe` makes them."""
        self._client = client
        self._async = opened
        self._feed = opened._feed
        self._arrival = threading.Condition()
        self._feed.arrived = self._arrived
        # Why it cannot be used in this process.
        self._foreign: Closed | None = None

    @property
    def pattern(self) -> str:
        return self._feed.pattern

    @property
    def group(self) -> str | None:
        return self._feed.group

    @property
    def mode(self) -> str:
        return self._feed.mode

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
        """The next message. Raises TimedOut if none comes in time, Closed if none will."""
        return self.get_many(1, timeout)[0]

    def get_many(self, max: int | None = None, timeout: float | None = None) -> list[Message]:
        """The messages that are here, at least one. Raises TimedOut if none comes in time, Closed if none will."""
        messages = self._next_many(max, timeout)
        if not messages:
            raise closed_subscription()
        return messages

    def batches(self) -> Iterator[list[Message]]:
        """The messages in lists, each what is here when it is asked for."""
        while messages := self._next_many(None, None):
            yield messages

    def unread(self) -> list[Message]:
        """What has come and was not read yet: it is still there afterwards. Its deadlines run, too."""
        return self._feed.unread()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all acknowledgements so far are stored. Raises NotOutstanding if some came too late."""
        if self._foreign is not None:
            raise self._foreign
        self._client._run(self._async.flush(timeout))

    def close(self) -> None:
        """No more messages: iteration ends. What is not acknowledged goes to other members of the group."""
        if self._foreign is not None:
            self._feed.close()
        elif not self._feed.is_closed:
            # With the client its subscriptions have ended.
            with suppress(Closed):
                self._client._run(self._async.close())

    def _next_many(self, count_max: int | None, timeout: float | None) -> list[Message]:
        """Empty if there will be none."""
        until = None if timeout is None else time.monotonic() + timeout
        messages = self._feed.take_many(count_max)
        while not messages and not self._feed.is_closed:
            if not self._wait(until):
                raise TimedOut(f"get from {self.pattern}: not done within {timeout:g} s")
            messages = self._feed.take_many(count_max)
        return messages

    def _wait(self, until: float | None) -> bool:
        """Whether something came in time, or nothing more will."""
        with self._arrival:
            while not self._feed.is_ready:
                left = _WAIT_S if until is None else min(until - time.monotonic(), _WAIT_S)
                if left <= 0:
                    return False
                self._arrival.wait(left)
        if (notice := self._feed.notice()) is not None:
            self._tell(notice)
        return True

    def _tell(self, notice: Notice) -> None:
        """Let the application do what the broker says, in this thread; the others that read wait for it."""
        callback = self._async._told[notice.word]
        try:
            if callback is not None:
                callback(notice.topic)
        except BaseException as error:
            # With the client its subscriptions have ended.
            with suppress(Closed):
                self._client._run(self._async._fail(notice, error))
            if not isinstance(error, Exception):
                raise
        else:
            self._feed.heard(notice)

    def _arrived(self) -> None:
        self._async._bell.ring()
        with self._arrival:
            self._arrival.notify_all()

    def _forked(self) -> None:
        self._arrival = threading.Condition()
        self._foreign = Closed("the subscription is that of the process which forked this one: subscribe again here")
        self._feed.disown(threading.Lock(), self._foreign)


class Producer:
    """Publishes many messages in few batches. Each is stored once, in order, though connections break meanwhile.

    Several threads may use it.
    """

    def __init__(self, client: Client, **settings: Any) -> None:
        """`Client.producer` makes them."""
        self._client = client
        self._settings = settings
        self._async = client._async.producer(**settings)

    @property
    def stored(self) -> int:
        """How many messages are stored, duplicates included."""
        return self._async.stored

    @property
    def duplicates(self) -> int:
        """How many of them were not stored again: the broker had their `message_id` (or payload) already.

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
        """Take a message; it is stored later. Waits only if `buffer_bytes` wait already.

        Raises DeliveryFailed if earlier messages are not stored, once; then this one was not taken.
        """
        left = self._async._take(subject, value, json, key, headers, message_id, delay, ttl)
        if left is not None:
            self._client._run(self._async._publish(left))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all messages so far are stored. Raises DeliveryFailed with those that are not."""
        self._client._run(self._async.flush(timeout))

    def close(self) -> None:
        """Flush, and take no more."""
        if not self._async._batcher.is_closed:
            self._client._run(self._async.close())

    def _forked(self) -> None:
        """What it held is the parent's to send; here it begins anew, under ids of its own."""
        self._async = self._client._async.producer(**self._settings)


class Stage:
    """A part of a transaction: batches that are stored, and which nobody reads before it is committed.

    `close` gives what `commit_transaction` takes. Parts of other processes are given with it.
    """

    def __init__(self, client: Client, stage: AsyncStage) -> None:
        """`Client.stage` makes them."""
        self._client = client
        self._async = stage

    @property
    def is_done(self) -> bool:
        """Whether the transaction had been committed before: then nothing needs to be staged."""
        return self._async.is_done

    def append(self, topic: str, partition: int, batch: Batch) -> None:
        """Stage a batch for a partition. Raises what the broker said of earlier ones, if it refused them."""
        return self._client._run(self._async.append(topic, partition, batch))

    def close(self) -> list[int]:
        """Wait until all of it is on the disk; where it is staged."""
        return self._client._run(self._async.close())


class Transaction:
    """Messages that are stored together when the `with` block ends, or not at all if it raises."""

    def __init__(self, client: Client, transaction: AsyncTransaction) -> None:
        """`Client.transaction` makes them."""
        self._client = client
        self._async = transaction

    @property
    def is_duplicate(self) -> bool:
        """Whether it had been committed before: then nothing is stored."""
        return self._async.is_duplicate

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._run(self._async.__aexit__(kind, error, trace))

    def publish(
        self,
        subject: str,
        value: bytes | None = None,
        *,
        json: Any = ABSENT,
        key: bytes | str | None = None,
        headers: Headers = None,
        message_id: str | None = None,
        ttl: TTL = None,
    ) -> None:
        """Add a message. An id is stored with it and known afterwards; the transaction itself is stored once anyway."""
        self._client._run(
            self._async.publish(subject, value, json=json, key=key, headers=headers, message_id=message_id, ttl=ttl)
        )

    def commit(self) -> bool:
        """Store all of it; False if the transaction had been committed before."""
        return self._client._run(self._async.commit())

    def abort(self) -> None:
        """Store nothing of it."""
        return self._client._run(self._async.abort())


class _Host:
    """A thread with an event loop, for one AsyncClient."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = _new_loop()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="penstock client", daemon=True)
        self._thread.start()
        _HOSTS.add(self)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """What comes of it, for a thread that is not the loop's."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a client cannot wait for itself: call it in another thread")
        with self._lock:
            if self._is_stopping:
                work.close()
                raise Closed("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise Closed("the client was closed meanwhile") from None
        finally:
            # Ctrl-C, or the time is over: nobody waits for it any more.
            future.cancel()

    def close(self, timeout_s: float | None = None) -> None:
        """Close the client, and end the thread."""
        _HOSTS.discard(self)
        try:
            self.run(self._client.close(), timeout_s)
        finally:
            with self._lock:
                self._is_stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._cancel_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    async def _cancel_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


# Those whose thread runs.
_HOSTS: Final[set[_Host]] = set()
_CLIENTS: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
# What a forked child has of its parent: never used, and never collected, which would close what the parent uses.
_ABANDONED: Final[list[object]] = []


def _close_all() -> None:
    """The interpreter ends: what producers hold is stored, if that can be soon."""
    for host in list(_HOSTS):
        try:
            host.close(EXIT_S)
        except (PenstockError, TimeoutError) as error:
            _LOG.error("at exit: %s", error)


def _forked() -> None:
    _ABANDONED.extend(_HOSTS)
    _HOSTS.clear()
    for client in list(_CLIENTS):
        client._forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Steps:
    """An async generator, step by step from another thread. A step that is cancelled is over before the end begins."""

    def __init__(self, parts: AsyncGenerator[Any, None]) -> None:
        self._parts = parts
        self._lock = asyncio.Lock()

    async def next(self) -> Any:
        """None at the end."""
        async with self._lock:
            return await anext(self._parts, None)

    async def close(self) -> None:
        async with self._lock:
            await self._parts.aclose()
