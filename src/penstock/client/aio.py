"""The client for asyncio: AsyncClient, AsyncSubscription, AsyncProducer. Works in any asyncio loop, uvloop's too."""

# A timeout is a parameter here, so that both clients take the same.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack, overload

from penstock.batch import BATCH_BYTES_MAX, Compression
from penstock.client import tracing
from penstock.client.feed import SHARED, Feed, Notice, Settlement, Start
from penstock.client.inbox import Inbox
from penstock.client.link import Link, Servers, resolve
from penstock.client.message import Message
from penstock.client.outbox import Outbox
from penstock.client.outgoing import ABSENT, Prepared, check_size, prepare, prepare_call
from penstock.client.partitioner import Layout
from penstock.client.producer import Batcher, Sealed, ServedTopic
from penstock.client.protocol import Answer, Request
from penstock.client.reader import Part, PartitionPlace, messages_of, read, record_batches_of
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
from penstock.client.wait import Bell, Within
from penstock.clock import SystemClock
from penstock.errors import (
    BadRequest,
    Closed,
    ConnectionLost,
    DeliveryFailed,
    Overloaded,
    PenstockError,
    ReadFailed,
    UnknownTopic,
)
from penstock.subject import owns, selection
from penstock.times import read_moment, read_place
from penstock.wire.binary import Append, Type, append_frame, json_frame, settle_frame

SERVERS: Final = "127.0.0.1:4222"
TIMEOUT_S: Final = 30.0
BATCH_BYTES: Final = 256 << 10
LINGER_S: Final = 0.005
BUFFER_BYTES: Final = 32 << 20
BUFFER: Final = 100

Delay = float | timedelta | datetime | str | None
TTL = float | timedelta | str | None
Headers = Mapping[str, str] | None
Moment = str | datetime | timedelta | float
Place = str | int | datetime | timedelta | float
# What is called with the name of a topic.
Told = Callable[[str], Awaitable[None]]

# When a subscription is asked for again that the broker could not go on with.
REOPEN_S: Final = 0.2

_LOG: Final = logging.getLogger("penstock.client")
_COMPRESSIONS: Final = {kind.name.lower(): kind for kind in Compression}


class AsyncClient:
    """A connection to a broker. It connects when it is first used, and again by itself whenever it must.

    It belongs to the event loop in which it is first used. `penstock.Client` is the same for threads.
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
        given = {"name": name, "user": user, "password": password, "token": token, "claim": claim}
        if claim is not None:
            given["owner"] = secrets.token_hex(8)
        credentials = {field: text for field, text in given.items() if text is not None}
        self._link = Link(servers, credentials, timeout)
        self._clock = SystemClock()
        self._outbox = Outbox(self._link, self._clock)
        self._inbox = Inbox(self._link, self._outbox, lambda pattern, buffer: self.subscribe(pattern, buffer=buffer))
        # What must end before the client does.
        self._open: dict[AsyncSubscription | AsyncProducer, None] = {}

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect now. Raises NoBroker if nobody is there."""
        await self._link.connect()

    async def close(self) -> None:
        """Store what producers still hold, end the subscriptions, and disconnect.

        Raises DeliveryFailed if messages of a producer are not stored.
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
        """Store a message; returns when it is as durable as its topic promises.

        Messages with the same key keep their order. One with a `message_id` that was stored before is not stored
        again. `delay`: seconds, or until when. `ttl`: for how long it is delivered, in seconds. Without a value it
        deletes its key.
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
        """Publish a message and return the first reply to it.

        Raises NoResponders at once, and stores nothing, if nobody is subscribed to the subject; TimedOut if no reply
        comes in time. A subscriber replies with `message.respond`, a NATS client as it does to any request.
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
        """Store many messages, in batches; how many. `progress` is told how many are stored so far.

        `timeout`: how long each may take. Raises DeliveryFailed with those that are not stored.
        """
        producer = self.producer(timeout=self._link.timeout_s if timeout is None else timeout)
        told = 0
        async with producer:
            async for message in _each(messages):
                subject, value, options = arguments(message)
                await producer.publish(subject, value, **options)
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
    ) -> AsyncProducer:
        """For many messages: they are sent in batches of `batch_bytes`, or after `linger` seconds.

        At most `buffer_bytes` wait to be stored; `compression` is none, lz4 or zstd; a message that is not stored
        within `timeout` seconds has failed.
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
        """For messages to several topics that are stored together, or not at all: `async with` it, and publish.

        With a name and a number, one that was committed before is not stored again; the numbers of a name ascend.
        """
        given = name or f"once-{_draw_id():x}"
        stage = self.stage(given, number)
        return AsyncTransaction(self, stage, self._link, self._clock, given, number, once=name is None)

    def stage(self, name: str, number: int) -> AsyncStage:
        """A part of a transaction that is committed elsewhere, by who has all of its parts."""
        return AsyncStage(self, self._link, name, number)

    async def last_transaction(self, name: str) -> int | None:
        """Return the number of the last committed transaction of this name, or None if there is none."""
        number: int | None = (await self._read("transaction", name=name))["number"]
        return number

    async def commit_transaction(self, name: str, number: int, offsets: Sequence[int], *, once: bool = False) -> bool:
        """Let readers have what was staged, all at once; False if the transaction had been committed before.

        Raises StageLost if some of it is not there any more: then nothing is stored. `once`: nobody comes back to the
        name.
        """
        found = await self._read("commit_transaction", name=name, number=number, offsets=list(offsets), once=once)
        return bool(found["committed"])

    async def abort_transaction(self, name: str, number: int) -> None:
        """Forget what was staged."""
        await self._read("abort_transaction", name=name, number=number)

    async def resolve(self, subject: str) -> Owner:
        """The topic that stores a subject, made if there is none: its name, its id, and how many partitions it has."""
        layout = await self._layout(subject)
        return Owner(layout.name.decode(), layout.id, layout.partitions)

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
        on_reset: Told | None = None,
        on_ready: Told | None = None,
    ) -> AsyncSubscription:
        """Messages whose subject matches the pattern, or of a whole topic (`topic="orders"`), as they come.

        Without a group each subscriber gets all of them. With one, its members share them and acknowledge each
        (`mode="shared"`), or have partitions of their own (`"partitioned"`). `start`: "latest", "earliest", an offset
        or a time; of a group that exists it counts for nothing. At most `buffer` messages are here unread.
        `deliveries_max`: a shared group dead-letters a message after this many deliveries, 0 for never; without it, as
        the topic says. Of several members the most patient one decides.

        `on_reset` and `on_ready` are for a refresh, and are awaited with a topic by whoever reads: forget what you have
        of it, all of it comes again; it has come. Each may be called twice. While it runs no message is given out, and
        if it raises the subscription ends.
        """
        told = {"RESET": on_reset, "READY": on_ready}
        subscription = self._subscription(selection(pattern, topic), group, mode, start, buffer, told, deliveries_max)
        await self._begin(subscription)
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
        """What a partition holds from an offset or a time on, up to what is committed now; with `follow`, for ever.

        With `arrow` it yields `pyarrow.RecordBatch`es, of all columns or of those that are named; with `expired`, also
        messages whose TTL has ended.
        """
        parts = await self._fetch(
            topic, partition, offset, end, count, follow=follow, arrow=arrow, columns=columns, expired=expired
        )
        async with aclosing(parts):
            async for several in parts:
                for part in several:
                    if arrow:
                        yield part
                    else:
                        for message in part:
                            yield message

    async def topics(self) -> list[Topic]:
        """All topics, with their positions."""
        return [Topic.from_json(each) for each in await self._read_rows("topics")]

    async def topic(self, name: str) -> Topic:
        """A topic, with its positions. Raises UnknownTopic if there is none."""
        return Topic.from_json(await self._read("topic", name=name))

    async def create_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Make a topic. `policy`: what differs from the broker's defaults, such as `durability="flush"`."""
        return Topic.from_json(await self._call("create_topic", name=name, partitions=partitions, policy=policy))

    async def alter_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Change a topic: give it more partitions, or another policy.

        More partitions move keys: what this means for messages that are stored is in `warning` of the answer.
        """
        return Topic.from_json(await self._call("alter_topic", name=name, partitions=partitions, policy=policy))

    async def purge_topic(self, name: str, before: Place, *, partition: int | None = None) -> Topic:
        """Drop all messages of a topic that were stored before a time, or before an offset of one partition, or all
        (`"latest"`); returns when that is durable. Groups go on behind them. The disk is freed by whole segments.
        """
        purged = await self._call("purge_topic", name=name, before=self._start(before), partition=partition)
        return Topic.from_json(purged)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and all that it holds."""
        await self._call("delete_topic", name=name)

    async def refresh_topic(self, topic: str) -> Refresh:
        """Let all groups that read a topic and understand it (`on_reset`) forget it, and have all of it again.

        Returns when it has begun; if one is under way already, with that. Raises RefreshConflict if some members of a
        group understand it and others do not.
        """
        return Refresh.from_json(await self._call("refresh_topic", name=topic))

    async def refresh_status(self, topic: str) -> Refresh:
        """How far the last refresh of a topic is."""
        return Refresh.from_json(await self._read("refresh_status", name=topic))

    async def offset_at(self, topic: str, partition: int, moment: Moment) -> int:
        """The first offset that was stored at a time or later."""
        time_us = read_moment(moment, self._clock.now_us())
        found = await self._read("offset_at", name=topic, partition=partition, time_us=max(0, time_us))
        return int(found["offset"])

    async def offset_after(self, topic: str, partition: int, offset: int, bytes: int) -> int:
        """The offset at which a batch begins at least so many bytes behind another; or the end."""
        found = await self._read("offset_after", name=topic, partition=partition, offset=offset, bytes=bytes)
        return int(found["offset"])

    async def wait(self, positions: Iterable[tuple[int, int, int]], timeout: float) -> bool:
        """Wait until one of some partitions (topic id, partition, offset) holds something at its offset; False if none
        does within `timeout` seconds, of which the broker waits ten at the most."""
        found = await self._read("wait", positions=[list(each) for each in positions], wait_ms=round(timeout * 1000))
        return bool(found["grown"])

    async def groups(self) -> list[Group]:
        """All groups, with their members and positions."""
        return [Group.from_json(each) for each in await self._read_rows("groups")]

    async def group(self, name: str) -> Group:
        """A group. Raises UnknownGroup if there is none."""
        return Group.from_json(await self._read("group", name=name))

    async def create_group(
        self,
        name: str,
        pattern: str | None = None,
        *,
        topic: str | None = None,
        mode: str = SHARED,
        start: Place = "latest",
    ) -> Group:
        """Make a group of a pattern or a whole topic before its first member comes: nothing is missed from now on."""
        made = await self._call(
            "create_group", name=name, pattern=selection(pattern, topic), mode=mode, start=self._start(start)
        )
        return Group.from_json(made)

    async def reset_group(
        self, name: str, start: Place, *, topic: str | None = None, partition: int | None = None
    ) -> Group:
        """Let a group begin anew somewhere else: in all it reads, or in one topic or partition."""
        return Group.from_json(
            await self._call("reset_group", name=name, start=self._start(start), topic=topic, partition=partition)
        )

    async def delete_group(self, name: str) -> None:
        """Delete a group: nobody knows how far it has come any more."""
        await self._call("delete_group", name=name)

    async def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Say how far a group has come, whose positions are kept elsewhere."""
        await self._call("commit", group=group, topic=topic, partition=partition, offset=offset)

    async def lag(self, group: str) -> int:
        """How many messages a group has not done yet."""
        return (await self.group(group)).lag

    async def dead_letters(
        self, pattern: str = ">", *, limit: int = 100, redriven: bool = False, **wanted: Unpack[LetterFilter]
    ) -> list[DeadLetter]:
        """Return messages that a group could not handle, oldest first; with `redriven`, also those that were redriven.
        Choose by `group`, `reason`, `since`, `until`, `partition` and `offsets`."""
        fields = self._letter_fields(wanted)
        found = await self._read("dead_letters", pattern=pattern, limit=limit, redriven=redriven, **fields)
        return [DeadLetter.from_json(each) for each in found["letters"]]

    async def redrive(
        self, pattern: str = ">", *, count: int | None = None, to_group: bool = False, **wanted: Unpack[LetterFilter]
    ) -> Redriven:
        """Send dead letters to their subjects again, each once, and return how many. `to_group`: deliver each only to
        the group that failed. Choose by `group`, `reason`, `since`, `until`, `partition` and `offsets`.

        Letters that cannot be redriven are skipped, and stay in the list. Raises if there is none that can."""
        fields = self._letter_fields(wanted)
        found = await self._call("redrive", pattern=pattern, count=count, to_group=to_group, **fields)
        return Redriven(found["redriven"], found["skipped"], found["reason"])

    async def purge_dead_letters(
        self, pattern: str = ">", *, count: int | None = None, **wanted: Unpack[LetterFilter]
    ) -> int:
        """Forget dead letters, and return how many. Choose by `group`, `reason`, `since`, `until`, `partition` and
        `offsets`."""
        found = await self._call("purge_dead_letters", pattern=pattern, count=count, **self._letter_fields(wanted))
        return int(found["purged"])

    async def delayed(
        self, pattern: str = ">", *, limit: int = 100, message_id: str | None = None
    ) -> list[DelayedMessage]:
        """Return messages that were published with a delay and wait, those first that are due first."""
        found = await self._read("delayed", pattern=pattern, limit=limit, message_id=message_id)
        return [DelayedMessage.from_json(each) for each in found["messages"]]

    async def cancel_delayed(
        self, pattern: str, *, message_id: str | None = None, offsets: Sequence[int] | None = None
    ) -> int:
        """Cancel delayed messages, and return how many: they are never published. `offsets`: where they wait."""
        chosen = None if offsets is None else list(offsets)
        found = await self._call("cancel_delayed", pattern=pattern, message_id=message_id, offsets=chosen)
        return int(found["cancelled"])

    def _letter_fields(self, wanted: LetterFilter) -> dict[str, Any]:
        """Return the fields of a call. Times become µs since 1970."""
        known = {*LetterFilter.__annotations__}
        if unknown := wanted.keys() - known:
            raise TypeError(f"no such condition: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        fields: dict[str, Any] = {**wanted}
        for name in ("since", "until"):
            if (moment := fields.pop(name, None)) is not None:
                fields[f"{name}_us"] = max(0, read_moment(moment, self._clock.now_us()))
        if fields.get("offsets") is not None:
            fields["offsets"] = list(fields["offsets"])
        return fields

    async def statistics(self) -> dict[str, Any]:
        """The broker's figures."""
        return await self._read("statistics")

    def _subscription(
        self,
        pattern: str,
        group: str | None,
        mode: str,
        start: Place,
        buffer: int,
        told: Mapping[str, Callable[[str], Any] | None],
        deliveries_max: int | None,
    ) -> AsyncSubscription:
        return AsyncSubscription(self, pattern, group, mode, self._start(start), buffer, told, deliveries_max)

    def _start(self, start: Place) -> Start:
        match read_place(start, self._clock.now_us()):
            case datetime() as moment:
                return {"time_us": read_moment(moment, 0)}
            case int(offset):
                return {"offset": offset}
            case edge:
                return edge

    async def _begin(self, subscription: AsyncSubscription) -> None:
        async with self._link.within(None, f"subscribe to {subscription.pattern}"):
            await subscription._begin()

    async def _layout(self, subject: str) -> Layout:
        return Layout.from_json(await self._read("resolve", subject=subject))

    async def _read(self, call: str, /, **fields: Any) -> dict[str, Any]:
        """A call that may be repeated."""
        return await self._ask(call, fields, is_repeatable=True)

    async def _read_rows(self, call: str) -> list[dict[str, Any]]:
        """All rows of a list, which the broker gives in parts if they are many."""
        rows: dict[str, dict[str, Any]] = {}
        offset, total = 0, 1
        while offset < total:
            found = await self._read(call, offset=offset or None)
            rows |= {row["name"]: row for row in found[call]}
            offset, total = offset + len(found[call]), found["total"]
            if not found[call]:
                break  # some were deleted meanwhile
        return list(rows.values())

    async def _call(self, call: str, /, **fields: Any) -> dict[str, Any]:
        return await self._ask(call, fields, is_repeatable=False)

    async def _ask(self, call: str, fields: dict[str, Any], *, is_repeatable: bool) -> dict[str, Any]:
        """What is None is left out."""
        asked = {"call": call} | {name: value for name, value in fields.items() if value is not None}
        found: dict[str, Any] = await self._link.ask(
            lambda number: json_frame(Type.CALL, number, asked), call, is_repeatable=is_repeatable
        )
        return found

    async def _fetch(
        self,
        topic: str,
        partition: int,
        offset: Place,
        end: int | None,
        count: int | None,
        *,
        follow: bool,
        arrow: bool,
        columns: Sequence[str] | None,
        expired: bool,
    ) -> AsyncGenerator[list[Part], None]:
        """Lists of messages, or record batches; those of one FETCH at a time."""
        described = await self._read("topic", name=topic)
        found = Topic.from_json(described)
        if found.refused is not None:
            raise ReadFailed(f"{topic} cannot be read: {found.refused}")
        if not 0 <= partition < len(found.positions):
            raise BadRequest(f"{topic} has {len(found.positions)} partitions: there is no partition {partition}")
        place = PartitionPlace(topic, found.id, partition)
        # The broker's clock decides what has expired, not the one here.
        ahead_us = int(described.get("now_us", self._clock.now_us())) - self._clock.now_us()
        now_us = None if expired else lambda: self._clock.now_us() + ahead_us
        shape = record_batches_of(columns, now_us) if arrow else messages_of(place, now_us)
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
        return read(self._link, place, begin, end, count, shape, follow=follow)


class AsyncSubscription:
    """Messages as they come: `async for message in subscription`, or `get`. It goes on by itself after a reconnect:
    a plain one where it was; a member of a group is given again what it has not acknowledged.
    """

    def __init__(
        self,
        client: AsyncClient,
        pattern: str,
        group: str | None,
        mode: str,
        start: Start,
        buffer: int,
        told: Mapping[str, Callable[[str], Any] | None],
        deliveries_max: int | None = None,
    ) -> None:
        """`AsyncClient.subscribe` makes them. `told`: who is told of what the broker says, by word."""
        self._client = client
        self._link = client._link
        self._bell = Bell()
        self._feed = Feed(
            pattern,
            group,
            mode,
            start,
            buffer,
            refreshes=any(told.values()),
            deliveries_max=deliveries_max,
            lock=threading.Lock(),
            wake=self._wake,
            arrived=self._bell.ring,
            respond=self._respond,
        )
        self._told = told
        self._telling: asyncio.Task[None] | None = None
        self._is_woken = False
        # Whether the broker has agreed to it once.
        self._is_open = False
        self._again: asyncio.TimerHandle | None = None

    @property
    def pattern(self) -> str:
        return self._feed.pattern

    @property
    def group(self) -> str | None:
        return self._feed.group

    @property
    def mode(self) -> str:
        return self._feed.mode

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = self._feed.take()
        while message is None:
            if self._feed.is_closed:
                raise StopAsyncIteration
            await self._wait()
            message = self._feed.take()
        return message

    async def get(self, timeout: float | None = None) -> Message:
        """The next message. Raises TimedOut if none comes in time, Closed if none will."""
        message = self._feed.take()
        if message is not None:
            return message
        async with Within(timeout, f"get from {self.pattern}"):
            async for message in self:
                return message
        raise closed_subscription()

    async def get_many(self, max: int | None = None, timeout: float | None = None) -> list[Message]:
        """The messages that are here, at least one. Raises TimedOut if none comes in time, Closed if none will."""
        async with Within(timeout, f"get from {self.pattern}"):
            messages = await self._next_many(max)
        if not messages:
            raise closed_subscription()
        return messages

    async def batches(self) -> AsyncIterator[list[Message]]:
        """The messages in lists, each what is here when it is asked for."""
        while messages := await self._next_many(None):
            yield messages

    def unread(self) -> list[Message]:
        """What has come and was not read yet: it is still there afterwards. Its deadlines run, too."""
        return self._feed.unread()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until all acknowledgements so far are stored. Raises NotOutstanding if some came too late."""
        mark = self._feed.mark()
        self._carry()
        async with self._link.within(timeout, f"flush of {self.pattern}"):
            await self._bell.until(lambda: self._feed.is_settled(mark) or self._feed.is_over)
        self._feed.check_settled()

    async def close(self) -> None:
        """No more messages: iteration ends. What is not acknowledged goes to other members of the group."""
        if self._feed.is_closed:
            return
        if self._telling is not None and self._telling is not asyncio.current_task():
            self._telling.cancel()
        self._feed.give_back()
        self._carry()
        self._detach()
        await self._leave()

    async def _leave(self) -> None:
        """Tell the broker that no more is wanted."""
        connection = self._link.connection
        if connection is None or not self._feed.number:
            return
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        connection.end(self._feed, lambda answer: resolve(ended, answer))
        self._link.flush_soon()
        try:
            async with self._link.within(None, f"end of {self.pattern}"):
                await ended
        except ConnectionLost:
            # With the connection the subscription is over as well.
            pass

    def connected(self) -> None:
        """For the link: (re)open."""
        if self._again is not None:
            self._again.cancel()
        connection = self._link.connection
        if connection is not None and not self._feed.is_over:
            connection.open(self._feed, self._opened)
            self._link.flush_soon()

    def disconnected(self) -> None:
        """For the link: the feed is told by its connection."""
        if self._again is not None:
            self._again.cancel()

    def writable(self) -> None:
        """For the link: what waited for room can be sent."""
        self._carry()

    async def _begin(self) -> None:
        await self._link.connect()
        self._client._open[self] = None
        self._link.attach(self)
        try:
            await self._bell.until(lambda: self._is_open or self._feed.is_over)
        finally:
            if not self._is_open:
                self._detach()
        if self._feed.ended is not None:
            raise self._feed.ended

    def _detach(self) -> None:
        self._feed.close()
        self._link.detach(self)
        self._client._open.pop(self, None)

    def _opened(self, answer: Answer) -> None:
        match answer:
            case dict():
                if not self._is_open and (hint := answer.get("hint")) is not None:
                    _LOG.warning("hint: %s", hint)
                self._is_open = True
            case ConnectionLost():
                pass
            case Closed() | Overloaded() if self._is_open:
                self._again = asyncio.get_running_loop().call_later(REOPEN_S, self.connected)
            case PenstockError():
                self._feed.end(answer)
        self._bell.ring()

    async def _wait(self) -> None:
        """Until a reader need not; what the application must be told on the way, it is told."""
        await self._bell.until(lambda: self._feed.is_ready)
        if (notice := self._feed.notice()) is not None:
            # By a task of its own: a reader that does not wait so long must not end it half done.
            self._telling = asyncio.create_task(self._tell(notice))
            await asyncio.wait([self._telling])

    async def _tell(self, notice: Notice) -> None:
        callback = self._told[notice.word]
        try:
            if callback is not None:
                await callback(notice.topic)
        except Exception as error:  # noqa: BLE001  whatever it is, who reads must know
            await self._fail(notice, error)
        else:
            self._feed.heard(notice)

    async def _fail(self, notice: Notice, error: BaseException) -> None:
        """The application could not do what it must: the broker is not told that it did, but that it has left."""
        failure = Closed(f"on_{notice.word.lower()} of {self.pattern} failed for {notice.topic}: {error!r}")
        failure.__cause__ = error
        self._feed.end(failure)
        try:
            await self._leave()
        except PenstockError as left:
            _LOG.warning("the broker does not know that %s has ended: %s", self.pattern, left)

    async def _next_many(self, count_max: int | None) -> list[Message]:
        """Empty if there will be none."""
        messages = self._feed.take_many(count_max)
        while not messages and not self._feed.is_closed:
            await self._wait()
            messages = self._feed.take_many(count_max)
        return messages

    # For the inbox, which waits for one of many messages.

    @property
    def _is_over(self) -> bool:
        return self._feed.is_over

    def _take_unread(self) -> Iterator[Message]:
        """What has come, without waiting: it is read with this."""
        while not self._feed.is_over and (messages := self._feed.take_many(None)):
            yield from messages

    async def _wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so because messages have come. Raises Closed if none will."""
        await self._bell.until(lambda: is_so() or self._feed.is_over)
        if not is_so():
            raise self._feed.ended or closed_subscription()

    def _wake(self) -> None:
        """Called by any thread that holds the feed's lock."""
        if not self._is_woken:
            self._is_woken = True
            self._link.call_soon(self._carry)

    def _carry(self) -> None:
        """Tell the broker what was read, and what was said of it."""
        self._is_woken = False
        connection = self._link.connection
        if connection is None or not self._link.is_writable:
            return
        connection.credit(self._feed)
        for since, about, offsets in self._feed.settlements():
            self._settle(since, about, offsets)
        connection.answer(self._feed)
        self._link.flush_soon()

    def _respond(self, message: Prepared) -> None:
        """Called by any thread."""
        self._link.check_open()
        check_size(len(message.value), self._link.hello.payload_bytes_max)
        self._link.call_soon(lambda: self._send_reply(message))

    def _send_reply(self, message: Prepared) -> None:
        def done(error: PenstockError | None) -> None:
            if error is not None:
                _LOG.warning("a reply to %s was not sent: %s", message.subject, error)

        try:
            self._client._outbox.send(message, done)
        except PenstockError as error:
            done(error)

    def _settle(self, since: int, about: Settlement, offsets: list[int]) -> None:
        def done(answer: Answer) -> None:
            match answer:
                case ConnectionLost():
                    self._feed.unsaid(since, about, offsets)
                case PenstockError():
                    _LOG.warning("%d messages of %s are not settled: %s", len(offsets), self.pattern, answer)
                    self._feed.settled(since, 0, answer)
                case dict():
                    self._feed.settled(since, len(answer["refused"]))
            self._bell.ring()

        frame = self._feed.frame(about, offsets)
        self._link.send(Request(lambda number: settle_frame(number, frame), done))


class AsyncProducer:
    """Publishes many messages in few batches. Each is stored once, in order, though connections break meanwhile."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        batch_bytes: int,
        linger: float,
        buffer_bytes: int,
        compression: str,
        timeout: float,
    ) -> None:
        """`AsyncClient.producer` makes them."""
        if compression not in _COMPRESSIONS:
            raise ValueError(f"compression is {compression!r}, it must be one of {', '.join(_COMPRESSIONS)}")
        if not 0 < batch_bytes <= BATCH_BYTES_MAX // 2:
            raise ValueError(f"batch_bytes is {batch_bytes}, it must be 1 to {BATCH_BYTES_MAX // 2}")
        if linger < 0 or buffer_bytes < 1 or timeout <= 0:
            raise ValueError("linger, buffer_bytes and timeout cannot be below zero, nor the latter two zero")
        self._client = client
        self._link = client._link
        self._clock = client._clock
        self._timeout = timeout
        self._bell = Bell()
        self._batcher = Batcher(
            batch_bytes=batch_bytes,
            linger=linger,
            buffer_bytes=buffer_bytes,
            compression=_COMPRESSIONS[compression],
            timeout=timeout,
            draw=_draw_id,
            now_us=self._clock.now_us,
            lock=threading.Lock(),
            wake=self._wake,
        )
        self._is_woken = False
        self._is_detached = False
        self._timer: asyncio.TimerHandle | None = None
        self._relays: set[asyncio.Task[None]] = set()

    @property
    def stored(self) -> int:
        """How many messages are stored, duplicates included."""
        return self._batcher.stored

    @property
    def duplicates(self) -> int:
        """How many of them were not stored again: the broker had their `message_id` (or payload) already.

        A message that was sent again after a lost connection may count as its own duplicate.
        """
        return self._batcher.duplicates

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
    ) -> None:
        """Take a message; it is stored later. Waits only if `buffer_bytes` wait already.

        Raises DeliveryFailed if earlier messages are not stored, once; then this one was not taken.
        """
        left = self._take(subject, value, json, key, headers, message_id, delay, ttl)
        if left is not None:
            await self._publish(left)
        if self._is_woken:
            # A batch begins or is full: without this a loop that only publishes would never let it go.
            await asyncio.sleep(0)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until all messages so far are stored. Raises DeliveryFailed with those that are not."""
        mark = self._batcher.mark()
        # Without a timeout of its own: each message has one.
        async with Within(timeout, "flush of a producer"):
            await self._bell.until(lambda: self._batcher.is_done(mark))
        self._check_failed()

    async def close(self) -> None:
        """Flush, and take no more."""
        if self._batcher.is_closed:
            return
        self._batcher.close()
        try:
            await self.flush()
        finally:
            self._client._open.pop(self, None)
            self._link.detach(self)
            self._is_detached = True
            if self._timer is not None:
                self._timer.cancel()
            for relay in self._relays:
                relay.cancel()

    def connected(self) -> None:
        """For the link: what is unanswered is sent again."""
        self._pump()

    def disconnected(self) -> None:
        """For the link: nobody knows what became of what was sent."""
        self._batcher.lost()
        self._pump()

    def writable(self) -> None:
        """For the link: what waited for room can be sent."""
        self._pump()

    def _take(
        self,
        subject: str,
        value: bytes | None,
        json: Any,
        key: bytes | str | None,
        headers: Headers,
        message_id: str | None,
        delay: Delay,
        ttl: TTL,
    ) -> Prepared | None:
        """Gather a message, in any thread. If that cannot be at once: what `_publish` needs."""
        headers = tracing.created(subject, headers)
        # Almost all messages are nothing but a value.
        if (
            type(value) is bytes
            and key is None
            and headers is None
            and message_id is None
            and delay is None
            and ttl is None
            and json is ABSENT
        ):
            return None if self._batcher.add(subject, value) else Prepared(subject, value)
        message = prepare(subject, value, json, key, headers, message_id, delay, ttl, self._clock.now_us())
        return None if self._batcher.add_prepared(message) else message

    async def _publish(self, message: Prepared) -> None:
        """Gather a message, when that is possible."""
        while True:
            self._check_failed()
            if self._batcher.is_closed:
                raise Closed("the producer is closed")
            if not self._batcher.knows(message.subject):
                await self._resolve(message.subject)
            if self._batcher.add_prepared(message):
                return
            async with self._link.within(self._timeout, f"publish to {message.subject}: room in the producer"):
                await self._bell.until(lambda: not self._batcher.is_full or self._batcher.has_failed)

    async def _resolve(self, subject: str) -> None:
        """Find out which topic the subject belongs to."""
        async with self._link.within(self._timeout, f"find the topic of {subject}"):
            await self._link.connect()
            layout = await self._client._layout(subject)
        if not owns(layout.name, subject.encode()):
            raise UnknownTopic(f"the broker says that {subject} belongs to {layout.name.decode()}, which cannot be")
        self._batcher.value_bytes_max = self._link.hello.payload_bytes_max
        self._batcher.learn(layout)
        self._link.attach(self)

    def _check_failed(self) -> None:
        failed = self._batcher.take_failed()
        if failed:
            raise DeliveryFailed(failed)

    def _wake(self) -> None:
        """Called by any thread that holds the lock."""
        if not self._is_woken:
            self._is_woken = True
            self._link.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what can be sent."""
        if self._is_detached:
            return
        loop = asyncio.get_running_loop()
        self._is_woken = False
        out = self._batcher.pump(loop.time(), is_connected=self._link.is_writable)
        stale = self._batcher.stale()
        next_at = self._batcher.next_at
        for sealed in out:
            self._send(sealed)
        for topic in stale:
            relay = loop.create_task(self._relay(topic))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if next_at is None else loop.call_at(next_at, self._pump)
        self._bell.ring()

    def _send(self, sealed: Sealed) -> None:
        def done(answer: Answer) -> None:
            # `disconnected` has told the batcher of that.
            if not isinstance(answer, ConnectionLost):
                error = answer if isinstance(answer, PenstockError) else None
                # A batch that is numbered has no duplicates: one that comes twice is its own.
                duplicates = answer.get("duplicates", 0) if isinstance(answer, dict) else 0
                self._batcher.answered(sealed, error, asyncio.get_running_loop().time(), duplicates)
                self._bell.ring()

        layout = sealed.lane.topic.layout
        to = Append(layout.id, sealed.lane.partition, layout.partitions)
        self._link.send(Request(lambda number: append_frame(number, to, sealed.batch.data), done))

    async def _relay(self, topic: ServedTopic) -> None:
        """Find out how many partitions a topic has by now, and distribute its messages anew."""
        try:
            layout = await self._client._layout(topic.layout.name.decode())
        except PenstockError as error:
            self._batcher.abandon(topic, error)
        else:
            self._batcher.relay(topic, layout)
        self._bell.ring()


def closed_subscription() -> Closed:
    return Closed("the subscription is closed")


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
