"""The HTTP port of a replica, which answers queries. `queries.py` declares them."""

from __future__ import annotations

import asyncio
import base64
import logging
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import BadRequest, DiskError, PenstockError
from penstock.replica import queries
from penstock.replica.config import ReplicaConfig
from penstock.replica.copies import Copies
from penstock.replica.copy import CopiedRecord, Copy
from penstock.replica.follower import Follower
from penstock.replica.index import CopiedSegment, Totals
from penstock.replica.writer import CopyWriter
from penstock.times import iso_or_none
from penstock.tls.port import ServerTls
from penstock.web.credentials import Credentials
from penstock.web.endpoints import JSON, Endpoint, Nothing, application
from penstock.web.guard import Guard, local_names
from penstock.web.openapi import with_description
from penstock.web.port import WebPort

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Limit of the records in one reply.
ANSWER_BYTES_MAX: Final = 8 << 20
# Close connections that send no request, or do not read the reply, for this long.
IDLE_S: Final = 30.0
_THREADS: Final = 4


class Queries:
    def __init__(
        self,
        config: ReplicaConfig,
        copies: Copies,
        writer: CopyWriter,
        follower: Follower,
        *,
        version: str,
        credentials: Credentials,
    ) -> None:
        """`credentials` are required of queries; if empty, none are."""
        self._config = config
        self._credentials = credentials
        self._copies = copies
        self._writer = writer
        self._follower = follower
        self._version = version
        # Reads of the disk must not block the loop.
        self._threads = ThreadPoolExecutor(_THREADS, "penstock-query")

    def close(self) -> None:
        self._threads.shutdown()

    def port(self, tls: ServerTls | None = None) -> WebPort:
        app = Guard(
            self.app(),
            hosts=local_names(self._config.host, self._config.http_hosts),
            setting="CONSUMER_HTTP_HOSTS",
            describe=_described,
            fault=lambda path, error: logger.error("unexpected error in http: %s", path, exc_info=error),
        )
        return WebPort(app, self._config.host, self._config.port, idle_s=IDLE_S, tls=tls)

    def app(self) -> Starlette:
        every = with_description(
            self._endpoints(),
            title="Penstock replica",
            about="A copy of a topic that answers queries.",
            version=self._version,
            error=queries.Error,
        )
        return application(
            every,
            authorize=self._credentials.require,
            read_json=msgspec.json.decode,
            encode=_encode,
            describe=_described,
        )

    def _endpoints(self) -> list[Endpoint]:
        """Return the table of all endpoints, which is why this is long."""

        def get(path: str, about: str, answer: Any, returns: Any, parameters: Any = Nothing, **more: Any) -> Endpoint:
            return Endpoint(
                method="GET",
                path=path,
                about=about,
                answer=answer,
                parameters=parameters,
                returns=returns,
                **{"guarded": True, **more},
            )

        none = {404: "There is no such record"}
        return [
            get(
                "/api/query/offset/{offset}",
                "The record at an offset",
                self._offset,
                queries.Record,
                queries.FindOffset,
                errors=none,
            ),
            get(
                "/api/query/key/{key:path}",
                "The latest record of a key, unless that deleted it",
                self._key,
                queries.Record,
                queries.FindKey,
                errors=none,
            ),
            get(
                "/api/query/range",
                "The records from one offset to another, both included",
                self._range,
                queries.Records,
                queries.FindRange,
            ),
            get(
                "/api/query/keys",
                "The keys that have a value, in the order of their bytes",
                self._keys,
                queries.Keys,
                queries.FindKeys,
            ),
            get("/api/query/stats", "The size of the copy", self._stats, queries.Stats),
            get(
                "/api/query/segments",
                "The number of segments, and the first of them",
                self._segments,
                queries.Segments,
                queries.FindSegments,
            ),
            get(
                "/api/query/health",
                "UP while messages can be stored and read, whether or not the broker is connected; DOWN with 503",
                self._health,
                queries.Health,
                guarded=False,
            ),
            Endpoint(
                method="POST",
                path="/api/consumer/resume",
                about="Continue after a pause (PAUSE_ON_ERROR)",
                answer=self._resume,
                accepts="",
                returns=queries.Resumed,
                guarded=True,
            ),
        ]

    async def _offset(self, asked: queries.FindOffset, _request: Request) -> queries.Record:
        found = await self._ask(lambda copy: copy.find(asked.partition, asked.offset))
        if found is None:
            raise HTTPException(404, f"no record at offset {asked.offset} of partition {asked.partition}")
        return self._record(asked.partition, found)

    async def _key(self, asked: queries.FindKey, _request: Request) -> queries.Record:
        try:
            key = queries.from_base64(asked.key) if asked.base64 else asked.key.encode()
        except ValueError:
            raise BadRequest(f"key is {asked.key!r}: it must be URL-safe base64, with - and _") from None
        found = await self._ask(lambda copy: copy.find_key(key))
        if found is None:
            raise HTTPException(404, f"no value for key {asked.key!r}")
        return self._record(*found)

    async def _range(self, asked: queries.FindRange, _request: Request) -> queries.Records:
        first, last, partition = asked.first, asked.last, asked.partition
        if first > last:
            raise BadRequest(f"invalid range: from {first} is greater than to {last}")
        found, rest = await self._ask(
            lambda copy: copy.find_range(partition, first, last, limit=asked.limit, bytes_max=ANSWER_BYTES_MAX)
        )
        records = [self._record(partition, record) for record in found]
        return queries.Records(partition=partition, count=len(records), records=records, next=rest)

    async def _keys(self, asked: queries.FindKeys, _request: Request) -> queries.Keys:
        after = None if asked.after is None else queries.from_base64(asked.after)
        found = await self._ask(lambda copy: copy.keys(asked.prefix.encode(), after, asked.limit + 1))
        keys, is_more = found[: asked.limit], len(found) > asked.limit
        following = base64.urlsafe_b64encode(keys[-1]).decode() if is_more else None
        shown = [queries.Key(key=text, key_base64=raw) for text, raw in map(_text, keys)]
        return queries.Keys(count=len(keys), keys=shown, next=following)

    async def _stats(self, _asked: Nothing, _request: Request) -> queries.Stats:
        totals, size = await self._ask(lambda copy: (copy.totals(), copy.index_bytes()))
        partitions = [
            queries.PartitionStats(
                partition=partition,
                segment_count=each.segments,
                total_records=each.records,
                offset_range=queries.OffsetRange(min=each.start, max=each.end),
                next_offset=(-1 if each.end is None else each.end) + 1,
            )
            for partition, each in totals.items()
        ]
        return queries.Stats(
            type=self._config.type,
            topic=self._config.topic,
            group=self._config.group,
            segment_count=sum(each.segments for each in totals.values()),
            total_records=sum(each.records for each in totals.values()),
            offset_range=_range_of(totals),
            sqlite_db_size=size,
            skipped=self._writer.skipped,
            partitions=partitions,
        )

    async def _segments(self, asked: queries.FindSegments, _request: Request) -> queries.Segments:
        totals, segments = await self._ask(lambda copy: (copy.totals(), copy.segments(asked.partition, asked.limit)))
        count = sum(each.segments for number, each in totals.items() if asked.partition in (None, number))
        return queries.Segments(count=count, segments=[self._segment(each) for each in segments])

    async def _health(self, _asked: Nothing, _request: Request) -> queries.Health | Response:
        error = self._writer.failure
        totals: Mapping[int, Totals] = {}
        try:
            totals = await self._ask(lambda copy: copy.totals())
        except HTTPException as unreadable:
            error = unreadable.detail
        seen = self._follower.broker
        health = queries.Health(
            status="UP" if error is None else "DOWN",
            segments=sum(each.segments for each in totals.values()),
            records=sum(each.records for each in totals.values()),
            refreshing=self._copies.is_building,
            paused=self._writer.is_paused,
            broker=queries.BrokerHealth(
                address=self._config.broker, connected=seen.connected, lag=seen.lag, error=seen.error
            ),
            error=UNSET if error is None else error,
        )
        return health if error is None else Response(await _encode(health), 503, media_type=JSON)

    async def _resume(self, _asked: Nothing, _request: Request) -> queries.Resumed:
        return queries.Resumed(resumed=self._writer.resume())

    async def _ask(self, query: Callable[[Copy], T]) -> T:
        def ask() -> T:
            with self._copies.read() as copy:
                return query(copy)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except (OSError, sqlite3.Error, DiskError) as error:
            raise HTTPException(500, f"cannot read the copy: {error}") from error

    def _record(self, partition: int, record: CopiedRecord) -> queries.Record:
        key, key_base64 = (None, UNSET) if record.key is None else _text(record.key)
        data, data_base64 = _text(record.value)
        return queries.Record(
            partition=partition,
            offset=record.offset,
            msg_key=key,
            msg_key_base64=key_base64,
            event_type="DELETE" if record.deleted else "MESSAGE",
            data=data,
            data_base64=data_base64,
            created_at=iso_or_none(record.timestamp_us),
            subject=record.subject or self._copies.topic_name or self._config.topic,
            headers=dict(record.headers),
        )

    def _segment(self, segment: CopiedSegment) -> queries.Segment:
        return queries.Segment(
            segment_id=segment.id,
            file=segment.file,
            partition=segment.partition,
            start_offset=segment.start,
            end_offset=segment.end,
            range=f"{segment.start}-{segment.end}",
            records=segment.records,
            bytes=segment.bytes,
            capacity=self._config.segment_bytes_max,
            created_at=segment.created_at,
        )


async def _encode(answer: object) -> bytes:
    return msgspec.json.encode(answer)


def _described(error: PenstockError) -> dict[str, object]:
    return {"error": str(error)}


def _text(value: bytes) -> tuple[str, str | UnsetType]:
    """Return bytes as text, and in base64 if they are not UTF-8."""
    try:
        return value.decode(), UNSET
    except UnicodeDecodeError:
        return value.decode(errors="replace"), base64.b64encode(value).decode()


def _range_of(totals: Mapping[int, Totals]) -> queries.OffsetRange:
    starts = [each.start for each in totals.values() if each.start is not None]
    ends = [each.end for each in totals.values() if each.end is not None]
    return queries.OffsetRange(min=min(starts, default=None), max=max(ends, default=None))
