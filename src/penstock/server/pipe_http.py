"""The HTTP port for brokers below this one: what they copy, and what they push.

GET  /pipe/topics    who this is, and each topic with its origin and what its partitions hold
GET  /pipe/stream    stored batches of a partition from an offset on, back to back, each as soon as it may be read,
                     until `wait_ms` are over; 204 if none came by then
GET  /pipe/poll      the same as JSON records, for clients that know no batches
GET  /pipe/push      up to where a partition that is pushed here has come
POST /pipe/push      batches of it, which are durable when the answer comes
GET  /pipe/status    this broker in the tree

An error is {"code", "text"}, as everywhere; an offset that retention has dropped is 410, with `start`, where to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.batch import Batch
from penstock.broker.broker import Broker
from penstock.broker.partition import Partition, is_large
from penstock.broker.sources import source_number
from penstock.broker.topic import ServedTopic
from penstock.errors import (
    BadRequest,
    CorruptBatch,
    OffsetOutOfRange,
    OriginConflict,
    OutOfSequence,
    PenstockError,
    UnknownTopic,
)
from penstock.pipe.batches import CONTENT_TYPE, BatchReader, check_stored, joined
from penstock.pipe.document import stored_record
from penstock.pipe.pipes import Pipes
from penstock.pipe.topology import NODE_ID_CHARACTERS_MAX
from penstock.run import Run, open_batch
from penstock.server.routes import authorize, refusal
from penstock.server.rows import Answers, encode
from penstock.storage.log import State
from penstock.storage.policy import PARTITIONS_MAX
from penstock.storage.store import outcome

if TYPE_CHECKING:
    from penstock.server.server import Server

# Read from a log and held for a child at once, unless a batch is larger; and what one answer has.
CHUNK_BYTES: Final = 1 << 20
ANSWER_BYTES: Final = 64 << 20
WAIT_MS_MAX: Final = 30_000
# Records in one answer, and bytes of their messages.
RECORDS_MAX: Final = 10_000
RECORDS_BYTES: Final = 4 << 20
# Records that are made before others may use the loop, and bytes of their messages.
SLICE: Final = 100
SLICE_BYTES: Final = 256 << 10
NUMBER_MAX: Final = (1 << 62) - 1
ORIGIN_CHARACTERS_MAX: Final = 512

Answer = Callable[[Request], Awaitable[Response]]


def routes(server: Server) -> list[Route]:
    """All but the status are for brokers, and need a user or a token where the server has one."""
    door = _PipeDoor(server.broker, server.pipes, server.answers, server.version)
    return [
        Route("/pipe/topics", _guarded(server, door.topics)),
        Route("/pipe/stream", _guarded(server, door.stream)),
        Route("/pipe/poll", _guarded(server, door.poll)),
        Route("/pipe/push", _guarded(server, door.pushed), methods=["GET"]),
        Route("/pipe/push", _guarded(server, door.push), methods=["POST"]),
        Route("/pipe/status", door.status),
    ]


class _PipeDoor:
    def __init__(self, broker: Broker, pipes: Pipes, answers: Answers, version: str) -> None:
        self._broker = broker
        self._answers = answers
        self._pipes = pipes
        self._version = version
        # One request at a time for what comes from one source: its batches arrive in order.
        self._pushing: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    async def status(self, _: Request) -> Response:
        return await self._json(self._pipes.status())

    async def topics(self, request: Request) -> Response:
        self._admit(request)
        await self._pipes.start()
        return await self._json(
            {
                "penstock": self._version,
                "node": self._pipes.node,
                "ancestry": list(self._pipes.ancestry),
                "topics": (
                    {
                        "name": topic.topic.name,
                        "origin": self._pipes.origin(topic),
                        "partitions": [
                            {"start": partition.start, "committed": partition.log.committed}
                            for partition in topic.partitions
                        ],
                    }
                    for topic in list(self._broker.topics)
                    if not topic.is_internal and topic.refusal is None
                ),
            }
        )

    async def _json(self, document: object) -> Response:
        return Response(await self._answers.make(encode(document)), media_type="application/json")

    # Down.

    async def stream(self, request: Request) -> Response:
        self._admit(request)
        topic = self._topic(request)
        partition = self._partition(request, topic)
        offset = _number(request, "offset")
        wait_ms = min(_number(request, "wait_ms", default=0), WAIT_MS_MAX)
        until = asyncio.get_running_loop().time() + wait_ms / 1000
        origin = request.query_params.get("origin")
        if origin is not None and origin != self._pipes.origin(topic):
            raise OriginConflict(
                f"the topic {topic.topic.name} is {self._pipes.origin(topic)} here, and not {origin}: it was made anew"
            )
        batches = await self._await_batches(topic, partition, offset, until)
        # nginx would wait for more before it passes anything on.
        headers = {"penstock-committed": str(partition.log.committed), "x-accel-buffering": "no"}
        if not batches:
            return Response(status_code=204, headers=headers)
        content = self._batches(topic, partition, batches, until)
        return StreamingResponse(content, media_type=CONTENT_TYPE, headers=headers)

    async def poll(self, request: Request) -> Response:
        self._admit(request)
        topic = self._topic(request)
        partition = self._partition(request, topic)
        offset, limit = _number(request, "offset"), _number(request, "limit", default=100)
        if not 0 < limit <= RECORDS_MAX:
            raise BadRequest(f"limit is {limit}, it must be 1 to {RECORDS_MAX}")
        records: list[dict[str, Any]] = []
        size = sliced = 0
        try:
            async for run in self._runs(topic, partition, offset):
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
            # Whoever asks for what comes next is told.
        return await self._json(records) if records else Response(status_code=204)

    async def _runs(self, topic: ServedTopic, partition: Partition, offset: int) -> AsyncIterator[Run]:
        """Yield what is stored from an offset on, batch by batch. A large one is opened in another thread and comes in
        parts; a request that waits for its turn at that holds no batch."""
        while batches := await self._read(topic, partition, offset):
            for batch in batches:
                end = batch.end
                if is_large(batch):
                    break
                yield open_batch(batch, topic.name, offset)
                offset = end
            del batch, batches
            while offset < end:
                found = await partition.read_stored(offset)
                if found is None:
                    return
                run, offset = found
                yield run

    async def _batches(
        self, topic: ServedTopic, partition: Partition, batches: list[Batch], until: float
    ) -> AsyncIterator[bytes]:
        """These, and what comes behind them. The next are read when the child has taken the last."""
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
                return  # whoever asks again is told

    async def _await_batches(self, topic: ServedTopic, partition: Partition, offset: int, until: float) -> list[Batch]:
        """The next batches, as soon as there are any; none if there are none by then."""
        grown = asyncio.Event()
        partition.groups[grown.set] = self._pipes.waiting[grown.set] = None
        try:
            while True:
                grown.clear()
                batches = await self._read(topic, partition, offset)
                if batches or self._pipes.is_stopping or partition.log.state is State.CLOSED:
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
                    f"offset {offset} is beyond the end of {topic.topic.name}, {log.end}, at its own origin: "
                    f"it was restored from an older copy, and the child has what it lost"
                )
            return []
        place = (partition.topic_id, partition.number)
        behind = self._pipes.gaps.behind(place, offset)
        if behind > offset:
            raise OffsetOutOfRange(offset, behind, log.end)
        batches = await self._broker.store.read(log, offset, CHUNK_BYTES)
        gap = self._pipes.gaps.next(place, offset)
        return batches if gap is None else [batch for batch in batches if batch.base_offset < gap]

    # Up.

    async def pushed(self, request: Request) -> Response:
        self._admit(request)
        source = _source(request)
        async with self._turn(source):
            topic = self._broker.topics.get(_name(request))
            return JSONResponse({"position": 0 if topic is None else self._position(topic, source)})

    async def push(self, request: Request) -> Response:
        self._admit(request)
        if request.headers.get("content-type") != CONTENT_TYPE:
            raise BadRequest(f"the content type must be {CONTENT_TYPE}")
        source, after = _source(request), _number(request, "after")
        async with self._turn(source):
            topic = await self._target(request)
            position = self._position(topic, source)
            if position != after:
                raise OutOfSequence(f"up to {position} is here, not up to {after}: go on from there")
            partition = topic.partitions[_number(request, "partition") % len(topic.partitions)]
            await self._take(request, partition, source)
            return JSONResponse({"position": self._position(topic, source)})

    async def _take(self, request: Request, partition: Partition, source: int) -> None:
        """Append what comes, and wait until it is as durable as its topic promises."""
        reader = BatchReader()
        waits = []
        noted = []
        try:
            async for data in request.stream():
                for batch in reader.feed(data):
                    check_stored(batch, partition.name)
                    await self._broker.store.rounds.room()
                    settled, done = outcome()
                    waits.append(settled)
                    end = partition.end
                    # Where the batch ends at its origin is the place behind it: never 0, which would be none.
                    partition.append_batch(batch, source, batch.end, done)
                    if partition.end > end and self._broker.is_noted(partition, batch):
                        noted.append(batch)
            if not reader.is_empty:
                raise CorruptBatch("the request ends in the middle of a batch")
        finally:
            found = await asyncio.gather(*waits, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        for batch in noted:
            identities = await self._broker.identities(partition, batch)
            self._broker.note(partition, identities, batch.append_time)

    async def _target(self, request: Request) -> ServedTopic:
        count = _number(request, "partitions", default=1)
        if not 0 < count <= PARTITIONS_MAX:
            raise BadRequest(f"partitions is {count}, it must be 1 to {PARTITIONS_MAX}")
        return await self._broker.pushed_topic(_name(request), count)

    def _position(self, topic: ServedTopic, source: int) -> int:
        """How far a source has come. It goes to one partition, which may have been another when there were fewer."""
        return max((partition.log.position(source) for partition in topic.partitions), default=0)

    def _turn(self, source: int) -> asyncio.Lock:
        return self._pushing.setdefault(source, asyncio.Lock())

    # Who asks, and for what.

    def _admit(self, request: Request) -> None:
        node = request.query_params.get("node")
        if node is None:
            return
        if not 0 < len(node) <= NODE_ID_CHARACTERS_MAX or not node.isprintable():
            raise BadRequest(f"node must be printable text, up to {NODE_ID_CHARACTERS_MAX} characters")
        self._pipes.admit(node, request.client.host if request.client is not None else "")

    def _topic(self, request: Request) -> ServedTopic:
        topic = self._broker.topic(_name(request))
        return self._broker.public_topic(topic.topic.id)

    def _partition(self, request: Request, topic: ServedTopic) -> Partition:
        number = _number(request, "partition", default=0)
        if number >= len(topic.partitions):
            raise UnknownTopic(f"{topic.topic.name} has {len(topic.partitions)} partitions, none with number {number}")
        return topic.partitions[number]


def _guarded(server: Server, answer: Answer) -> Answer:
    """For whoever may ask; an error becomes the answer."""

    async def answered(request: Request) -> Response:
        try:
            authorize(server, request)
            return await answer(request)
        except OffsetOutOfRange as error:
            places = {"offset": error.offset, "start": error.start, "end": error.end}
            return JSONResponse({"code": error.code, "text": str(error), **places}, status_code=410)
        except PenstockError as error:
            return refusal(error)
        except ClientDisconnect:
            return Response(status_code=400)

    return answered


def _name(request: Request) -> bytes:
    name = request.query_params.get("topic")
    if not name:
        raise BadRequest("which topic? Say topic=")
    return name.encode(errors="replace")


def _number(request: Request, name: str, *, default: int | None = None) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > NUMBER_MAX:
        raise BadRequest(f"{name} is {text!r}, it must be a whole number from 0 on")
    return int(text)


def _source(request: Request) -> int:
    origin = request.query_params.get("origin")
    if not origin or len(origin) > ORIGIN_CHARACTERS_MAX:
        raise BadRequest("which topic of which broker? Say origin=")
    return source_number("pipe", origin, _number(request, "partition"))
