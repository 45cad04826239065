"""A parent over HTTP: stored batches from a Penstock broker, JSON records from any other server.

GET  /pipe/topics                    the parent's ID and topics
GET  /pipe/stream?topic=…&offset=…   batches back to back, as they are committed, for some seconds; then the next
                                     request. So a message needs no request of its own, and a proxy that buffers
                                     replies delays it by no more than that
GET  /pipe/push?topic=…              the position of a pushed partition at the parent
POST /pipe/push?topic=…&after=…      batches to push
GET  /pipe/poll?topic=…&offset=…     records, from a parent without batches
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import httpx

from penstock.errors import (
    BadParent,
    ConnectionLost,
    CorruptBatch,
    NoBroker,
    OffsetOutOfRange,
    TimedOut,
    from_wire,
)
from penstock.log.policy import PARTITIONS_MAX
from penstock.model.batch import BATCH_BYTES_MAX, OFFSET_MAX, Batch
from penstock.model.subject import is_literal
from penstock.pipe import records
from penstock.pipe.ask import context_for, explained
from penstock.pipe.batches import CONTENT_TYPE, BatchSplitter, joined
from penstock.pipe.connector import Caller, Piece, PipeConnector, PushSource, Remote, RemotePartition, RemoteTopic
from penstock.tls.dial import explain

TIMEOUT_S: Final = 10.0
# How long the parent may keep a stream open.
WAIT_MS: Final = 5000
# Limits of a JSON reply and of an error reply.
JSON_BYTES_MAX: Final = BATCH_BYTES_MAX
ERROR_BYTES_MAX: Final = 64 << 10
# The delay between polls for records grows while there are none.
DELAY_FIRST_S: Final = 0.1
DELAY_LONGEST_S: Final = 5.0

Query = Mapping[str, str | int]
# Takes a topic, the first offset and a limit; returns records.
Poll = Callable[[str, int, int], Awaitable[list[Any]]]


def connect(url: str, caller: Caller) -> PipeConnector:
    return HttpConnector(url, caller)


class HttpConnector:
    def __init__(self, url: str, caller: Caller) -> None:
        self._url = url
        self._caller = caller
        # Each partition has a pending request most of the time.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {} if caller.authorization is None else {"Authorization": caller.authorization}
        # A redirect could leak the credentials to another server.
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=TIMEOUT_S,
            limits=limits,
            headers=headers,
            follow_redirects=False,
            verify=context_for(url, caller.tls),
        )
        self._record_parent: _RecordParent | None = None

    async def close(self) -> None:
        await self._client.aclose()

    async def topics(self) -> Remote:
        if self._record_parent is None:
            status, answer = await self._ask("GET", "/pipe/topics", {})
            if status == 200 and isinstance(answer, dict) and "penstock" in answer:
                return _read_remote(answer)
            if status not in (200, 404, 405):
                raise self._error(status, answer)
            self._record_parent = _RecordParent(self._caller)
        return await self._record_parent.topics(self._poll)

    async def stream(self, topic: RemoteTopic, partition: int, offset: int) -> AsyncGenerator[Piece, None]:
        if self._record_parent is not None:
            yield await self._record_parent.next(self._poll, topic.name, offset)
            return
        query: Query = {
            "topic": topic.name,
            "origin": topic.origin,
            "partition": partition,
            "offset": offset,
            "wait_ms": WAIT_MS,
        }
        async with self._open("GET", "/pipe/stream", query) as response:
            if response.status_code not in (200, 204):
                status, answer = response.status_code, await self._read_json(response, ERROR_BYTES_MAX)
                if status == 410 and isinstance(answer, dict):
                    raise OffsetOutOfRange(offset, _number(answer, "start"), _number(answer, "end"))
                raise self._error(status, answer)
            committed = int(response.headers.get("penstock-committed", "0"))
            if response.status_code == 204:
                yield Piece([], committed)
                return
            if response.headers.get("content-type") != CONTENT_TYPE:
                raise BadParent(f"{self._url} replied with another content type than batches")
            reader = BatchSplitter()
            async for data in response.aiter_raw():
                if batches := reader.feed(data):
                    yield Piece(batches, max(committed, batches[-1].end))
            if not reader.is_empty:
                raise CorruptBatch("the parent's reply ends in the middle of a batch")

    async def pushed(self, source: PushSource) -> int:
        status, answer = await self._ask("GET", "/pipe/push", _source_query(source))
        if status != 200 or not isinstance(answer, dict):
            raise self._error(status, answer)
        return _number(answer, "position")

    async def push(self, source: PushSource, after: int, batches: Sequence[Batch]) -> int:
        query = {**_source_query(source), "after": after}
        status, answer = await self._ask("POST", "/pipe/push", query, joined(list(batches)))
        if status != 200 or not isinstance(answer, dict):
            raise self._error(status, answer)
        return _number(answer, "position")

    async def _poll(self, topic: str, offset: int, limit: int) -> list[Any]:
        status, answer = await self._ask("GET", "/pipe/poll", {"topic": topic, "offset": offset, "limit": limit})
        if status == 204:
            return []
        if status != 200 or not isinstance(answer, list):
            raise BadParent(
                f"{self._url} is not a Penstock broker, and replied to a poll with neither records nor 204 ({status})"
            )
        return answer

    async def _ask(self, method: str, path: str, query: Query, body: bytes | None = None) -> tuple[int, Any]:
        async with self._open(method, path, query, body) as response:
            return response.status_code, await self._read_json(response, JSON_BYTES_MAX)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, query: Query, body: bytes | None = None
    ) -> AsyncIterator[httpx.Response]:
        # Batches may be compressed already.
        headers = {"accept-encoding": "identity"} | ({} if body is None else {"content-type": CONTENT_TYPE})
        params = {"node": self._caller.node, **query}
        request = self._client.build_request(method, path, params=params, content=body, headers=headers)
        with self._translated_errors():
            try:
                response = await self._client.send(request, stream=True)
            except AttributeError as error:
                # anyio raises this under uvloop if a connection ends right after it was opened.
                raise ConnectionLost(f"the connection to {self._url} was lost right after it was opened") from error
            try:
                yield response
            finally:
                await response.aclose()

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise errors of httpx as errors of Penstock."""
        try:
            yield
        except ssl.SSLError as error:
            raise NoBroker(explain(self._url, error)) from error
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise NoBroker(f"no answer from {self._url}: {explained(self._url, error) or _reason(error)}") from error
        except httpx.TimeoutException as error:
            raise TimedOut(f"{self._url} did not answer within {TIMEOUT_S:g} s") from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
            raise ConnectionLost(f"the connection to {self._url} was lost: {_reason(error)}") from error

    async def _read_json(self, response: httpx.Response, bytes_max: int) -> Any:
        """Return the reply; None if it is not JSON."""
        parts, size = [], 0
        async for data in response.aiter_raw():
            parts.append(data)
            size += len(data)
            if size > bytes_max:
                raise BadParent(f"{self._url} replied with more than {bytes_max} bytes")
        try:
            return json.loads(b"".join(parts))
        except (ValueError, RecursionError):
            return None

    def _error(self, status: int, answer: object) -> Exception:
        match answer:
            case {"code": str(code), "text": str(text)}:
                return from_wire(code, text[:1000])
        return BadParent(f"{self._url} cannot be the parent of a pipe: it replied with status {status}")


class _RecordParent:
    """A parent that serves only records: its topics are those listed by name, each with one partition."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._clock = caller.clock
        self._names = [name for name in caller.topics if is_literal(name.encode())]
        self._replied_us: int | None = None
        self._delay_s: dict[str, float] = {}
        # The offset up to which there are only records of other topics.
        self._passed: dict[str, int] = {}

    async def topics(self, poll: Poll) -> Remote:
        if not self._names:
            raise BadParent(
                "the parent is not a Penstock broker and cannot list its topics: name them, without wildcards, "
                "in pipe.topics, or in the registry's topics for this node"
            )
        now_us = self._clock.monotonic_us()
        if self._replied_us is None or now_us - self._replied_us > TIMEOUT_S * 1e6:
            records.read_records(await poll(self._names[0], 0, 1), b"", 0, 0)
            self._replied_us = now_us
        whole = (RemotePartition(0, 0),)
        return Remote((), tuple(RemoteTopic(name, f"document/{name}", whole) for name in self._names))

    async def next(self, poll: Poll, topic: str, offset: int) -> Piece:
        """Return the next records, after a delay that grows while there are none."""
        delay_s = self._delay_s.get(topic, 0.0)
        await asyncio.sleep(delay_s)
        offset = max(offset, self._passed.get(topic, 0))
        found = await poll(topic, offset, self._caller.batch_size)
        self._replied_us = self._clock.monotonic_us()
        batch = records.read_records(found, topic.encode(), offset, self._clock.now_us())
        if batch is None and (end := records.end_of(found, offset)) > offset:
            self._passed[topic] = end
        elif batch is None:
            first_s = min(self._caller.poll_ms / 1000, DELAY_LONGEST_S)
            self._delay_s[topic] = min(delay_s * 2, DELAY_LONGEST_S) if delay_s else first_s
            return Piece([], 0)
        self._delay_s[topic] = 0.0 if len(found) >= self._caller.batch_size else DELAY_FIRST_S
        return Piece([], 0) if batch is None else Piece([batch], batch.end)


def _read_remote(answer: dict[str, Any]) -> Remote:
    try:
        ancestry = tuple(str(node) for node in answer["ancestry"])
        return Remote(ancestry, tuple(map(_read_topic, answer["topics"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadParent(f"the parent's list of topics is invalid: {type(error).__name__}") from error


def _read_topic(entry: dict[str, Any]) -> RemoteTopic:
    partitions = tuple(
        RemotePartition(_number(each, "start"), _number(each, "committed")) for each in entry["partitions"]
    )
    if not 0 < len(partitions) <= PARTITIONS_MAX:
        raise ValueError("partitions")
    return RemoteTopic(str(entry["name"]), str(entry["origin"]), partitions)


def _number(entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise BadParent(f"invalid {name} {value!r} in a reply of the parent: it must be a non-negative integer")
    return value


def _source_query(source: PushSource) -> dict[str, str | int]:
    return {
        "topic": source.topic,
        "origin": source.origin,
        "partition": source.partition,
        "partitions": source.partitions,
    }


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
