"""`AsyncClient`: the client for asyncio. It works in any asyncio event loop, including uvloop's."""

# Both clients take timeouts as parameters.
# ruff: noqa: ASYNC109

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, Self, overload

from penstock.client import tracing
from penstock.client.admin import AsyncAdmin
from penstock.client.calls import Calls
from penstock.client.feed import SHARED, SubscriptionOptions
from penstock.client.inbox import ReplyInbox
from penstock.client.link import Link
from penstock.client.message import Message
from penstock.client.outbox import Outbox
from penstock.client.outgoing import ABSENT, prepare, prepare_call
from penstock.client.producer import AsyncProducer
from penstock.client.reader import PartitionReader
from penstock.client.servers import Servers
from penstock.client.subscription import AsyncSubscription, Callbacks
from penstock.client.transaction import AsyncStage, AsyncTransaction
from penstock.client.values import TTL, Delay, Headers, Outgoing, Place, Receipt, Topic, arguments
from penstock.clock import SystemClock
from penstock.errors import BadRequest, PenstockError, ReadFailed
from penstock.model.subject import selection
from penstock.times import read_place
from penstock.tls.options import TlsOptions

SERVERS: Final = "127.0.0.1:4222"
TIMEOUT_S: Final = 30.0
BATCH_BYTES: Final = 256 << 10
LINGER_S: Final = 0.005
BUFFER_BYTES: Final = 32 << 20
BUFFER: Final = 100

# Called with the name of a topic.
AsyncTopicCallback = Callable[[str], Awaitable[None]]


class AsyncClient(AsyncAdmin):
    """A connection to a broker. It opens on first use, and reopens by itself after it is lost.

    An `AsyncClient` belongs to the event loop that first uses it. `penstock.Client` is the same client for threads.
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
        given = {"name": name, "user": user, "password": password, "token": token, "claim": claim}
        if claim is not None:
            given["owner"] = secrets.token_hex(8)
        credentials = {field: text for field, text in given.items() if text is not None}
        self._link = Link(servers, credentials, timeout, tls)
        super().__init__(Calls(self._link), SystemClock())
        self._outbox = Outbox(self._link, self._clock)
        self._inbox = ReplyInbox(
            self._link, self._outbox, lambda pattern, buffer: self.subscribe(pattern, buffer=buffer)
        )
        # Closed before the connection is.
        self._open: dict[AsyncSubscription | AsyncProducer, None] = {}

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect now. Raise NoBroker if no broker answers."""
        await self._link.connect()

    async def close(self) -> None:
        """Flush the producers, close the subscriptions and disconnect.

        Raise DeliveryFailed if a producer could not store all of its messages.
        """
        failed: PenstockError | None = None
        for each in list(self._open):
            try:
                await each.close()
            except PenstockError as error:
                failed = failed or error
        await self._link.close()
        if failed is not None:
            raise failed

    async def publish(
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
        """Publish a message. Return when it is as durable as its topic requires.

        Messages with the same key keep their order. The broker deduplicates by `message_id`. `delay`: seconds, or the
        time of delivery. `ttl`: seconds until the message expires. A message with a key and no value is a tombstone: it
        deletes the key.
        """
        with tracing.publishing("publish", subject, headers) as traced:
            message = prepare(subject, value, json, key, traced, message_id, delay, ttl, self._clock.now_us())
            return await self._outbox.publish(message, timeout)

    async def request(
        self,
        subject: str,
        value: bytes | None = None,
        *,
        json: Any = ABSENT,
        key: bytes | str | None = None,
        headers: Headers = None,
        timeout: float | None = None,
    ) -> Message:
        """Publish a request and return the first reply.

        Raise NoResponders at once, and store nothing, if nobody is subscribed to the subject. Raise TimedOut if no
        reply arrives in time. Subscribers reply with `message.respond`; NATS clients reply as to any request.
        """
        with tracing.publishing("request", subject, headers) as traced:
            message = prepare_call(subject, value, json, key, traced)
            return await self._inbox.request(message, timeout)

    async def publish_many(
        self,
        messages: Iterable[tuple[str, bytes] | Outgoing] | AsyncIterable[tuple[str, bytes] | Outgoing],
        *,
        progress: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Publish many messages in batches, and return how many were stored. `progress` is called with the number
        stored so far.

        `timeout`: seconds for each message. Raise DeliveryFailed with the messages that were not stored.
        """
        producer = self.producer(timeout=self._link.timeout_s if timeout is None else timeout)
        reported = 0
        async with producer:
            async for message in _each(messages):
                subject, value, options = arguments(message)
                await producer.publish(subject, value, **options)
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
    ) -> AsyncProducer:
        """Return a producer. It sends messages in batches of `batch_bytes`, or after `linger` seconds.

        `buffer_bytes` limits the messages that are not stored yet. `compression`: "none", "lz4" or "zstd". A message
        that is not stored within `timeout` seconds has failed.
        """
        producer = AsyncProducer(
            self,
            batch_bytes=batch_bytes,
            linger=linger,
            buffer_bytes=buffer_bytes,
            compression=compression,
            timeout=timeout,
        )
        self._open[producer] = None
        return producer

    def transaction(self, name: str | None = None, number: int = 0) -> AsyncTransaction:
        """Return a transaction. Use it in `async with`: its messages are stored together, or not at all.

        A transaction with a name and a number is stored once, even if it is repeated. The numbers of a name must
        increase.
        """
        given = name or f"once-{_draw_id():x}"
        stage = self.stage(given, number)
        return AsyncTransaction(self, stage, given, number, once=name is None)

    def stage(self, name: str, number: int) -> AsyncStage:
        """Return one part of a transaction. The process that has collected all parts commits it."""
        return AsyncStage(self._link, self._calls, name, number)

    async def subscribe(
        self,
        pattern: str | None = None,
        *,
        topic: str | None = None,
        group: str | None = None,
        mode: str = SHARED,
        start: Place = "latest",
        buffer: int = BUFFER,
        deliveries_max: int | None = None,
        on_reset: AsyncTopicCallback | None = None,
        on_ready: AsyncTopicCallback | None = None,
    ) -> AsyncSubscription:
        """Subscribe to the subjects that match a pattern, or to a whole topic (`topic="orders"`).

        Without a group, each subscription receives all messages. In a group, each message goes to one member, which
        acknowledges it (`mode="shared"`), or each member receives whole partitions (`mode="partitioned"`). `start`:
        "latest", "earliest", an offset or a time; a group that exists continues at its position instead. `buffer`: the
        most messages that wait here to be read. `deliveries_max`: a shared group dead-letters a message after this many
        deliveries, 0 for never; by default the topic's policy decides. If members differ, the highest limit applies.

        `on_reset` and `on_ready` let a group take part in a refresh. Each is awaited with the name of a topic:
        `on_reset` discards what the application has of it, because all of it is delivered again; `on_ready` follows the
        last message. Each may be called twice. No message is delivered while one runs. If one raises, the subscription
        ends.
        """
        callbacks = {"RESET": on_reset, "READY": on_ready}
        selected = selection(pattern, topic)
        subscription = self._subscription(selected, group, mode, start, buffer, callbacks, deliveries_max)
        await subscription._begin()
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
    ) -> AsyncIterator[Message]: ...

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
    ) -> AsyncIterator[Any]: ...

    async def fetch(
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
    ) -> AsyncIterator[Any]:
        """Yield the messages of a partition, from an offset or a time to the current end; with `follow`, forever.

        With `arrow`, yield `pyarrow.RecordBatch`es with all columns, or with those in `columns`. With `expired`, also
        yield messages whose TTL has passed.
        """
        parts = self._fetch(
            topic,
            partition,
            offset,
            end=end,
            count=count,
            follow=follow,
            arrow=arrow,
            columns=columns,
            expired=expired,
        )
        async with aclosing(parts):
            async for several in parts:
                for each in several:
                    yield each

    async def _fetch(
        self,
        topic: str,
        partition: int,
        offset: Place,
        *,
        end: int | None,
        count: int | None,
        follow: bool,
        arrow: bool,
        columns: Sequence[str] | None,
        expired: bool,
    ) -> AsyncGenerator[list[Any], None]:
        """Yield lists of messages or of record batches, one list for each FETCH."""
        described = await self._calls.read("topic", name=topic)
        found = Topic.from_json(described)
        if found.refused is not None:
            raise ReadFailed(f"{topic} cannot be read: {found.refused}")
        if not 0 <= partition < len(found.positions):
            raise BadRequest(f"invalid partition {partition}: topic {topic!r} has {len(found.positions)} partitions")
        reader = PartitionReader(self._link, topic, found.id, partition)
        # The broker's clock decides what has expired, not the one here.
        ahead_us = int(described.get("now_us", self._clock.now_us())) - self._clock.now_us()
        now_us = None if expired else lambda: self._clock.now_us() + ahead_us
        position = found.positions[partition]
        match read_place(offset, self._clock.now_us()):
            case datetime() as moment:
                begin = await self.offset_at(topic, partition, moment)
            case int(number):
                begin = number
            case "earliest":
                begin = position.start
            case _:
                begin = position.committed
        if not follow:
            end = position.committed if end is None else min(end, position.committed)
        if arrow:
            parts = reader.record_batches(begin, end, count, columns, now_us, follow=follow)
        else:
            parts = reader.messages(begin, end, count, now_us, follow=follow)
        async with aclosing(parts):
            async for several in parts:
                yield several

    def _subscription(
        self,
        pattern: str,
        group: str | None,
        mode: str,
        start: Place,
        buffer: int,
        callbacks: Callbacks,
        deliveries_max: int | None,
    ) -> AsyncSubscription:
        """Return a subscription that is not open yet: `_begin` opens it."""
        options = SubscriptionOptions(
            pattern=pattern,
            group=group,
            mode=mode,
            start=self._start(start),
            buffer=buffer,
            refreshes=any(callbacks.values()),
            deliveries_max=deliveries_max,
        )
        return AsyncSubscription(self, options, callbacks)


def _draw_id() -> int:
    return random.SystemRandom().randrange(1, 1 << 63)


async def _each(
    messages: Iterable[tuple[str, bytes] | Outgoing] | AsyncIterable[tuple[str, bytes] | Outgoing],
) -> AsyncIterator[tuple[str, bytes] | Outgoing]:
    if isinstance(messages, AsyncIterable):
        async for message in messages:
            yield message
    else:
        for message in messages:
            yield message
