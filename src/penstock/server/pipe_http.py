"""The HTTP port for child brokers: the batches that they pull, and those that they push.

GET  /pipe/topics    this broker, and each topic with its origin and the offsets of its partitions
GET  /pipe/stream    stored batches of a partition from an offset, back to back, each as soon as it may be read, until
                     `wait_ms` are over; 204 if there were none
GET  /pipe/poll      the same as JSON records, for clients that cannot read batches
GET  /pipe/push      the position of a partition that is pushed here
POST /pipe/push      batches of it, which are durable when the answer is sent
GET  /pipe/status    this broker in the tree

An offset that retention has dropped is answered with 410 and `start`, the first offset that is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final
from weakref import WeakValueDictionary

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.awaiting import settled
from penstock.broker.broker import Broker
from penstock.broker.opened import is_large
from penstock.broker.partition import Partition
from penstock.broker.sources import source_number
from penstock.broker.topic import ServedTopic, visible_topics
from penstock.errors import (
    BadRequest,
    CorruptBatch,
    OffsetOutOfRange,
    OriginConflict,
    OutOfSequence,
    PenstockError,
    UnknownTopic,
)
from penstock.log.appender import LogState
from penstock.log.policy import Partitions
from penstock.model.batch import Batch
from penstock.model.run import Run, open_batch
from penstock.model.subject import whole_topic
from penstock.outcome import Outcome
from penstock.pipe.batches import CONTENT_TYPE, BatchSplitter, check_stored, joined
from penstock.pipe.pipes import Pipes
from penstock.pipe.records import stored_record
from penstock.pipe.topology import NODE_ID_CHARACTERS_MAX
from penstock.schema import Form, Text, about
from penstock.security.identity import authorize_all
from penstock.security.permissions import Action
from penstock.server.http_identity import identity_of
from penstock.web.endpoints import Endpoint, Nothing

# Bytes that are read from a log at once, unless a batch is larger; and of one answer.
CHUNK_BYTES: Final = 1 << 20
ANSWER_BYTES: Final = 64 << 20
WAIT_MS_MAX: Final = 30_000
# Records in one answer, and bytes of their messages.
RECORDS_MAX: Final = 10_000
RECORDS_BYTES: Final = 4 << 20
# Records that are made before other tasks run, and bytes of their messages.
SLICE: Final = 100
SLICE_BYTES: Final = 256 << 10
ORIGIN_CHARACTERS_MAX: Final = 512

Offset = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
Source = Annotated[str, Meta(min_length=1, max_length=ORIGIN_CHARACTERS_MAX), about("the origin of the topic")]
TopicName = Annotated[Text, about("the name of the topic")]


def _printable(value: Any) -> Any:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    node: Annotated[
        Annotated[str, Meta(min_length=1, max_length=NODE_ID_CHARACTERS_MAX)] | None,
        Form(read=_printable, allowed=f"printable text, up to {NODE_ID_CHARACTERS_MAX} characters"),
        about("the node ID of the child"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    topic: TopicName
    partition: Annotated[Offset, about("its partition")] = 0
    offset: Annotated[Offset, about("the first offset")]
    wait_ms: Annotated[Offset, about(f"how long to wait for more, at most {WAIT_MS_MAX}")] = 0
    origin: Annotated[str | None, about("the origin that the topic must have")] = None
    child: _Child


@dataclass(frozen=True, slots=True, kw_only=True)
class _Poll:
    topic: TopicName
    partition: Annotated[Offset, about("its partition")] = 0
    offset: Annotated[Offset, about("the first offset")]
    limit: Annotated[Annotated[int, Meta(ge=1, le=RECORDS_MAX)], about("records of one answer")] = 100
    child: _Child


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pushed:
    topic: TopicName
    origin: Source
    partition: Annotated[Offset, about("the partition at the origin")]
    child: _Child


@dataclass(frozen=True, slots=True, kw_only=True)
class _Push:
    topic: TopicName
    origin: Source
    partition: Annotated[Offset, about("the partition at the origin")]
    after: Annotated[Offset, about("the position before these batches")]
    partitions: Annotated[Partitions, about("partitions of the topic, if it is created")] = 1
    child: _Child


def endpoints(broker: Broker, pipes: Pipes, version: str) -> list[Endpoint]:
    door = _PipeDoor(broker, pipes, version)

    def get(path: str, about: str, answer: Any, parameters: type[Any], **more: Any) -> Endpoint:
        # A newer child may send more parameters.
        return Endpoint(
            method="GET",
            path=path,
            about=about,
            answer=answer,
            parameters=parameters,
            ignores_unknown=True,
            **{"guarded": True, "action": Action.PIPES, **more},
        )

    return [
        get("/pipe/topics", "This broker and its topics, for a child", door.topics, _Child),
        get("/pipe/stream", "Stored batches of a partition", door.stream, _Stream, media=CONTENT_TYPE),
        get("/pipe/poll", "Stored messages of a partition as JSON records", door.poll, _Poll),
        get("/pipe/push", "The position of a partition that is pushed here", door.pushed, _Pushed),
        Endpoint(
            method="POST",
            path="/pipe/push",
            about="Store batches that a child pushes",
            answer=door.push,
            parameters=_Push,
            accepts=CONTENT_TYPE,
            guarded=True,
            action=Action.PIPES,
            ignores_unknown=True,
        ),
        get("/pipe/status", "This broker in the tree", door.status, Nothing, guarded=False),
    ]


class _PipeDoor:
    def __init__(self, broker: Broker, pipes: Pipes, version: str) -> None:
        self._broker = broker
        self._pipes = pipes
        self._version = version
        # One request at a time for each source, since its batches arrive in order.
        self._pushing: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    async def status(self, _asked: Nothing, _request: Request) -> Mapping[str, Any]:
        return self._pipes.status()

    async def topics(self, asked: _Child, request: Request) -> dict[str, Any]:
        self._admit(asked, request)
        identity = identity_of(request)
        await self._pipes.start()
        rows = (
            {
                "name": topic.topic.name,
                "origin": self._pipes.origin(topic),
                "partitions": [
                    {"start": partition.start, "committed": partition.log.committed} for partition in topic.partitions
                ],
            }
            for topic in visible_topics(self._broker.topics, identity)
            if topic.refusal is None and (identity is None or identity.allows_all(whole_topic(topic.name)))
        )
        return {
            "penstock": self._version,
            "node": self._pipes.node,
            "ancestry": list(self._pipes.ancestry),
            "topics": rows,
        }

    # Down.

    async def stream(self, asked: _Stream, request: Request) -> Response:
        self._admit(asked.child, request)
        authorize_all(identity_of(request), whole_topic(_name(asked.topic)))
        topic = self._topic(asked.topic)
        partition = _partition(topic, asked.partition)
        until = asyncio.get_running_loop().time() + min(asked.wait_ms, WAIT_MS_MAX) / 1000
        if asked.origin is not None and asked.origin != self._pipes.origin(topic):
            raise OriginConflict(
                f"topic {topic.topic.name} has the origin {self._pipes.origin(topic)} here, not {asked.origin}: it was "
                "created anew"
            )
        batches = await self._await_batches(topic, partition, asked.offset, until)
        # nginx would buffer the answer otherwise.
        headers = {"penstock-committed": str(partition.log.committed), "x-accel-buffering": "no"}
        if not batches:
            return Response(status_code=204, headers=headers)
        content = self._batches(topic, partition, batches, until)
        return StreamingResponse(content, media_type=CONTENT_TYPE, headers=headers)

    async def poll(self, asked: _Poll, request: Request) -> Response | list[dict[str, Any]]:
        self._admit(asked.child, request)
        authorize_all(identity_of(request), whole_topic(_name(asked.topic)))
        topic, limit = self._topic(asked.topic), asked.limit
        partition = _partition(topic, asked.partition)
        records: list[dict[str, Any]] = []
        size = sliced = 0
        try:
            async for run in self._runs(topic, partition, asked.offset):
                for index in range(min(len(run), limit - len(records))):
                    records.append(stored_record(run, index, topic.name))
                    size += len(run.values[index])
                    if len(records) % SLICE == 0 or size - sliced > SLICE_BYTES:
                        sliced = size
                        await asyncio.sleep(0)
                if len(records) >= limit or size >= RECORDS_BYTES:
                    break
        except PenstockError:
            if not records:
                raise
            # The next request gets the error.
        return records or Response(status_code=204)

    async def _runs(self, topic: ServedTopic, partition: Partition, offset: int) -> AsyncIterator[Run]:
        """Yield stored messages from an offset, batch by batch. A large batch is opened in another thread and comes in
        parts; a request that waits for its turn to do so holds no batch."""
        while batches := await self._read(topic, partition, offset):
            for batch in batches:
                end = batch.end
                if is_large(batch):
                    break
                yield open_batch(batch, topic.name, offset)
                offset = end
            del batch, batches
            while offset < end:
                found = await partition.cursor(offset).read_stored()
                if found is None:
                    return
                run, offset = found
                yield run

    async def _batches(
        self, topic: ServedTopic, partition: Partition, batches: list[Batch], until: float
    ) -> AsyncIterator[bytes]:
        """Yield these batches and those behind them. The next are read when the child has taken the last."""
        sent = 0
        while batches:
            data = joined(batches)
            yield data
            sent += len(data)
            if sent >= ANSWER_BYTES:
                return
            try:
                batches = await self._await_batches(topic, partition, batches[-1].end, until)
            except PenstockError:
                return  # the next request gets the error

    async def _await_batches(self, topic: ServedTopic, partition: Partition, offset: int, until: float) -> list[Batch]:
        """Return the next batches as soon as there are any, or none at the time `until`."""
        grown = asyncio.Event()
        partition.groups[grown.set] = self._pipes.waiting[grown.set] = None
        try:
            while True:
                grown.clear()
                batches = await self._read(topic, partition, offset)
                if batches or self._pipes.is_stopping or partition.log.state is LogState.CLOSED:
                    return batches
                async with asyncio.timeout_at(until):
                    await grown.wait()
        except TimeoutError:
            return []
        finally:
            del partition.groups[grown.set], self._pipes.waiting[grown.set]

    async def _read(self, topic: ServedTopic, partition: Partition, offset: int) -> list[Batch]:
        log = partition.log
        if offset > log.committed:
            if not topic.is_piped and offset > log.end:
                raise OriginConflict(
                    f"offset {offset} is beyond the end of {topic.topic.name}, {log.end}, at its origin: the origin "
                    "was restored from an older copy, and the child has messages that it lost"
                )
            return []
        place = (partition.topic_id, partition.number)
        behind = self._pipes.gaps.behind(place, offset)
        if behind > offset:
            raise OffsetOutOfRange(offset, behind, log.end)
        batches = await partition.cursor(offset).read_batches(CHUNK_BYTES)
        gap = self._pipes.gaps.next(place, offset)
        return batches if gap is None else [batch for batch in batches if batch.base_offset < gap]

    # Up.

    async def pushed(self, asked: _Pushed, request: Request) -> dict[str, int]:
        self._admit(asked.child, request)
        authorize_all(identity_of(request), whole_topic(_name(asked.topic)), Action.PUBLISH)
        source = source_number("pipe", asked.origin, asked.partition)
        async with self._turn(source):
            topic = self._broker.topics.get(_name(asked.topic))
            return {"position": 0 if topic is None else self._position(topic, source)}

    async def push(self, asked: _Push, request: Request) -> dict[str, int]:
        self._admit(asked.child, request)
        authorize_all(identity_of(request), whole_topic(_name(asked.topic)), Action.PUBLISH)
        if request.headers.get("content-type") != CONTENT_TYPE:
            raise BadRequest(f"the content type must be {CONTENT_TYPE}")
        source = source_number("pipe", asked.origin, asked.partition)
        async with self._turn(source):
            topic = await self._broker.changes.pushed(_name(asked.topic), asked.partitions)
            position = self._position(topic, source)
            if position != asked.after:
                raise OutOfSequence(f"the position here is {position}, not {asked.after}: continue from there")
            await self._take(request, topic.partitions[asked.partition % len(topic.partitions)], source)
            return {"position": self._position(topic, source)}

    async def _take(self, request: Request, partition: Partition, source: int) -> None:
        """Append the batches of a request, and wait until they are as durable as their topic promises."""
        reader = BatchSplitter()
        waits = []
        noted = []
        try:
            async for data in request.stream():
                for batch in reader.feed(data):
                    check_stored(batch, partition.name)
                    await self._broker.store.rounds.unflushed.room()
                    outcome = Outcome()
                    end = partition.end
                    # Its end at the origin is the position behind it. It is never 0, which would mean none.
                    partition.append_batch(batch, source, batch.end, outcome)
                    waits.append(settled(outcome))
                    if partition.end > end and self._broker.dedup_windows.is_noted(partition, batch):
                        noted.append(batch)
            if not reader.is_empty:
                raise CorruptBatch("the request ends within a batch")
        finally:
            found = await asyncio.gather(*waits, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        for batch in noted:
            identities = await self._broker.dedup_windows.identities(partition, batch)
            self._broker.dedup_windows.note(partition, identities, batch.append_time)

    def _position(self, topic: ServedTopic, source: int) -> int:
        """Return the position of a source. Its partition may have been another one when there were fewer."""
        return max((partition.log.producers.position(source) for partition in topic.partitions), default=0)

    def _turn(self, source: int) -> asyncio.Lock:
        return self._pushing.setdefault(source, asyncio.Lock())

    def _admit(self, child: _Child, request: Request) -> None:
        if child.node is not None:
            self._pipes.admit(child.node, request.client.host if request.client is not None else "")

    def _topic(self, name: str) -> ServedTopic:
        topic = self._broker.topics.named(_name(name))
        return self._broker.topics.public(topic.topic.id)


def _partition(topic: ServedTopic, number: int) -> Partition:
    if number >= len(topic.partitions):
        raise UnknownTopic(f"{topic.topic.name} has {len(topic.partitions)} partitions, none with number {number}")
    return topic.partitions[number]


def _name(topic: str) -> bytes:
    return topic.encode(errors="replace")
