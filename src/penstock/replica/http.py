"""The HTTP port of a replica: queries of the copy. `openapi.py` says what there is."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from penstock.errors import DiskError
from penstock.replica import openapi
from penstock.replica.config import ReplicaConfig
from penstock.replica.copies import Copies
from penstock.replica.copy import Copy, Record
from penstock.replica.follower import Follower
from penstock.replica.index import CopiedSegment, Totals
from penstock.replica.openapi import LIMIT, LIMIT_MAX, OFFSET_MAX, PARTITION_MAX
from penstock.times import iso_or_none
from penstock.web import Credentials, Guard, WebPort, local_names, unexpected

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Of what a range answers.
ANSWER_BYTES_MAX: Final = 8 << 20
# A client that sends no request, or does not read its answer, is closed.
IDLE_S: Final = 30.0
_THREADS: Final = 4


class Queries:
    def __init__(
        self, config: ReplicaConfig, copies: Copies, follower: Follower, version: str, credentials: Credentials
    ) -> None:
        """`credentials` are what a query must give; none: nothing."""
        self._config = config
        self._credentials = credentials
        self._copies = copies
        self._follower = follower
        self._version = version
        # The disk is not waited for in the loop.
        self._threads = ThreadPoolExecutor(_THREADS, "penstock-query")

    def close(self) -> None:
        self._threads.shutdown()

    def port(self) -> WebPort:
        app = Guard(
            self.app(),
            hosts=local_names(self._config.host, self._config.http_hosts),
            setting="CONSUMER_HTTP_HOSTS",
            describe=lambda error: {"error": str(error)},
            fault=lambda path, error: logger.error("unexpected error in http: %s", path, exc_info=error),
        )
        return WebPort(app, self._config.host, self._config.port, idle_s=IDLE_S)

    def app(self) -> Starlette:
        async def docs(_: Request) -> HTMLResponse:
            return HTMLResponse(openapi.page())

        async def described(_: Request) -> JSONResponse:
            return JSONResponse(openapi.document(self._version))

        routes = [
            Route("/api/query/offset/{offset}", self._guarded(self._offset)),
            Route("/api/query/key/{key:path}", self._guarded(self._key)),
            Route("/api/query/range", self._guarded(self._range)),
            Route("/api/query/keys", self._guarded(self._keys)),
            Route("/api/query/stats", self._guarded(self._stats)),
            Route("/api/query/segments", self._guarded(self._segments)),
            Route("/api/query/health", _answers(self._health)),
            Route("/api/consumer/resume", self._guarded(self._resume), methods=["POST"]),
            Route("/openapi.json", described),
            Route("/docs", docs),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refuse, Exception: _failed})

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """For those who give the credentials, if there are any."""

        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if self._credentials and not self._credentials.accepts_header(given):
                wanted = {"WWW-Authenticate": 'Basic realm="penstock", Bearer'}
                raise HTTPException(401, "credentials required: a user and a password, or a token", wanted)
            return await answer(request)

        return endpoint

    # What there is to ask.

    async def _offset(self, request: Request) -> Response:
        asked = _Asked(request, "partition")
        offset = _number(request.path_params["offset"], "offset", 0, OFFSET_MAX)
        partition = asked.number("partition", 0, high=PARTITION_MAX)
        found = await self._ask(lambda copy: copy.find(partition, offset))
        if found is None:
            raise HTTPException(404, f"there is no record at offset {offset} of partition {partition}")
        return JSONResponse(self._record(partition, found))

    async def _key(self, request: Request) -> Response:
        asked = _Asked(request, "base64")
        given = request.path_params["key"]
        key = _from_base64(given, "key") if asked.flag("base64") else given.encode()
        found = await self._ask(lambda copy: copy.find_key(key))
        if found is None:
            raise HTTPException(404, f"the key {given!r} has no value")
        return JSONResponse(self._record(*found))

    async def _range(self, request: Request) -> Response:
        asked = _Asked(request, "from", "to", "limit", "partition")
        first, last = asked.number("from", 0), asked.number("to", OFFSET_MAX)
        limit = asked.number("limit", LIMIT, low=1, high=LIMIT_MAX)
        partition = asked.number("partition", 0, high=PARTITION_MAX)
        if first > last:
            raise HTTPException(400, f"from is {first} and to is {last}: from must not be behind it")
        records, rest = await self._ask(
            lambda copy: copy.find_range(partition, first, last, limit=limit, bytes_max=ANSWER_BYTES_MAX)
        )
        shown = [self._record(partition, record) for record in records]
        return JSONResponse({"partition": partition, "count": len(shown), "records": shown, "next": rest})

    async def _keys(self, request: Request) -> Response:
        asked = _Asked(request, "prefix", "after", "limit")
        prefix = asked.text("prefix").encode()
        after = _from_base64(asked.text("after"), "after") if asked.has("after") else None
        limit = asked.number("limit", LIMIT, low=1, high=LIMIT_MAX)
        found = await self._ask(lambda copy: copy.keys(prefix, after, limit + 1))
        keys, is_more = found[:limit], len(found) > limit
        following = base64.urlsafe_b64encode(keys[-1]).decode() if is_more else None
        return JSONResponse({"count": len(keys), "keys": [_text("key", key) for key in keys], "next": following})

    async def _stats(self, request: Request) -> Response:
        _Asked(request)
        totals, size = await self._ask(lambda copy: (copy.totals(), copy.index_bytes()))
        partitions = [
            {
                "partition": partition,
                "segmentCount": each.segments,
                "totalRecords": each.records,
                "offsetRange": {"min": each.start, "max": each.end},
                "nextOffset": (-1 if each.end is None else each.end) + 1,
            }
            for partition, each in totals.items()
        ]
        return JSONResponse(
            {
                "type": self._config.type,
                "topic": self._config.topic,
                "group": self._config.group,
                "segmentCount": sum(each.segments for each in totals.values()),
                "totalRecords": sum(each.records for each in totals.values()),
                "offsetRange": _range_of(totals),
                "sqliteDbSize": size,
                "skipped": self._follower.skipped,
                "partitions": partitions,
            }
        )

    async def _segments(self, request: Request) -> Response:
        asked = _Asked(request, "partition", "limit")
        partition = asked.number("partition", 0, high=PARTITION_MAX) if asked.has("partition") else None
        limit = asked.number("limit", LIMIT, low=1, high=LIMIT_MAX)
        totals, segments = await self._ask(lambda copy: (copy.totals(), copy.segments(partition, limit)))
        count = sum(each.segments for number, each in totals.items() if partition in (None, number))
        return JSONResponse({"count": count, "segments": [self._segment(each) for each in segments]})

    async def _health(self, request: Request) -> Response:
        _Asked(request)
        error = self._follower.failure
        totals: Mapping[int, Totals] = {}
        try:
            totals = await self._ask(lambda copy: copy.totals())
        except HTTPException as unreadable:
            error = unreadable.detail
        seen = self._follower.broker
        health = {
            "status": "UP" if error is None else "DOWN",
            "segments": sum(each.segments for each in totals.values()),
            "records": sum(each.records for each in totals.values()),
            "refreshing": self._copies.is_building,
            "paused": self._follower.is_paused,
            "broker": {
                "address": self._config.broker,
                "connected": seen.connected,
                "lag": seen.lag,
                "error": seen.error,
            },
        }
        if error is None:
            return JSONResponse(health)
        return JSONResponse(health | {"error": error}, status_code=503)

    async def _resume(self, request: Request) -> Response:
        _Asked(request)
        return JSONResponse({"resumed": self._follower.resume()})

    # How it is answered.

    async def _ask(self, query: Callable[[Copy], T]) -> T:
        def ask() -> T:
            with self._copies.read() as copy:
                return query(copy)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except (OSError, sqlite3.Error, DiskError) as error:
            raise HTTPException(500, f"the copy cannot be read: {error}") from error

    def _record(self, partition: int, record: Record) -> dict[str, Any]:
        key = {"msgKey": None} if record.key is None else _text("msgKey", record.key)
        return {
            "partition": partition,
            "offset": record.offset,
            **key,
            "eventType": "DELETE" if record.deleted else "MESSAGE",
            **_text("data", record.value),
            "createdAt": iso_or_none(record.timestamp_us),
            "subject": record.subject or self._copies.topic_name or self._config.topic,
            "headers": dict(record.headers),
        }

    def _segment(self, segment: CopiedSegment) -> dict[str, Any]:
        return {
            "segmentId": segment.id,
            "file": segment.file,
            "partition": segment.partition,
            "startOffset": segment.start,
            "endOffset": segment.end,
            "range": f"{segment.start}-{segment.end}",
            "records": segment.records,
            "bytes": segment.bytes,
            "capacity": self._config.segment_bytes_max,
            "createdAt": segment.created_at,
        }


class _Asked:
    """The parameters of a request: those that are known, each once."""

    def __init__(self, request: Request, *known: str) -> None:
        self._values = request.query_params
        for name, _ in self._values.multi_items():
            if name not in known:
                there_are = f"there are {', '.join(known)}" if known else "there are none here"
                raise HTTPException(400, f"there is no parameter {name!r}: {there_are}")
            if len(self._values.getlist(name)) > 1:
                raise HTTPException(400, f"{name} is given more than once")

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str:
        return self._values.get(name, "")

    def number(self, name: str, default: int, *, low: int = 0, high: int = OFFSET_MAX) -> int:
        return _number(self._values[name], name, low, high) if name in self._values else default

    def flag(self, name: str) -> bool:
        text = self._values.get(name, "false")
        if text not in ("true", "false"):
            raise HTTPException(400, f"{name} is {text!r}: it must be true or false")
        return text == "true"


def _answers(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A bound method, as a function: that is what a Route takes for an endpoint of its own kind."""

    async def endpoint(request: Request) -> Response:
        return await answer(request)

    return endpoint


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


async def _failed(_: Request, __: Exception) -> JSONResponse:
    """An unexpected exception, which Starlette raises again: the port's `Guard` logs it."""
    return JSONResponse({"error": str(unexpected())}, status_code=500)


def _number(text: str, name: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and low <= int(text) <= high):
        raise HTTPException(400, f"{name} is {text!r}: it must be a whole number, {low} to {high}")
    return int(text)


def _from_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise HTTPException(400, f"{name} is {text!r}: it must be base64 with - and _") from None


def _text(name: str, value: bytes) -> dict[str, str]:
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {name: value.decode(errors="replace"), f"{name}Base64": base64.b64encode(value).decode()}


def _range_of(totals: Mapping[int, Totals]) -> dict[str, int | None]:
    starts = [each.start for each in totals.values() if each.start is not None]
    ends = [each.end for each in totals.values() if each.end is not None]
    return {"min": min(starts, default=None), "max": max(ends, default=None)}
