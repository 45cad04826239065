"""Endpoints that fill topics, for trials. They exist only with `server.test_endpoints`.

Rows of a SQLite file are published in runs; each run is stored before the next is read. The file must be in
`server.test_data_dir`, also after links are followed; without that setting no file is read.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import quote

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.awaiting import settled
from penstock.broker.broker import Broker
from penstock.errors import BadRequest, BatchTooLarge, PenstockError
from penstock.model import headers
from penstock.model.run import Run
from penstock.schema import Form, Text, about
from penstock.security.permissions import Action
from penstock.server.calls import Callee, Json
from penstock.server.settings import ServerConfig
from penstock.web.endpoints import Endpoint, status_of

T = TypeVar("T")

# The rows of one run, and their bytes.
RUN_ROWS: Final = 500
RUN_BYTES: Final = 1 << 20
COUNT_MAX: Final = 1_000_000
TOPICS_MAX: Final = 1000

# The columns that are read. A table must have `data`.
_COLUMNS: Final = ("msg_key", "event_type", "data", "created_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    path: Annotated[Text, Form(name="sqliteFilePath"), about("a file in server.test_data_dir")]
    table: Annotated[Text, Form(name="tableName"), about("the table")] = "messages"
    topic: Annotated[Text, about("the topic to fill")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inject:
    count: Annotated[Annotated[int, Meta(ge=0, le=COUNT_MAX)], about(f"how many, at most {COUNT_MAX}")] = 10
    topic: Annotated[Text, about("the topic to fill")]
    prefix: Annotated[Text, about("what they begin with")] = "TEST"


@dataclass(frozen=True, slots=True)
class _Target:
    broker: Broker
    # Called with the number of messages that were not stored.
    failed: Callable[[int], None]


def endpoints(callee: Callee, config: ServerConfig, failed: Callable[[int], None]) -> list[Endpoint]:
    """`failed` is called with the number of messages that were not stored."""
    target = _Target(callee.broker, failed)

    async def load(asked: _Load, _request: Request) -> Json | Response:
        path, subject = _allowed(config.test_data_dir, asked.path), asked.topic.encode()
        return await _fill(target, subject, _runs_of_file(path, asked.table, subject, config.payload_bytes_max))

    async def inject(asked: _Inject, _request: Request) -> Json | Response:
        subject = asked.topic.encode()
        return await _fill(target, subject, _numbered(asked.count, asked.prefix.encode(), subject))

    async def stats(_asked: object, _request: Request) -> Json:
        return _stats(callee)

    return [
        Endpoint(
            method="POST",
            path="/test/load-from-sqlite",
            about="Publish the rows of a table: data, and msg_key, event_type and created_at if it has them",
            answer=load,
            parameters=_Load,
            guarded=True,
            action=Action.ADMIN,
        ),
        Endpoint(
            method="POST",
            path="/test/inject-messages",
            about="Publish messages PREFIX-1, PREFIX-2 and so on, each with its value as key",
            answer=inject,
            parameters=_Inject,
            guarded=True,
            action=Action.ADMIN,
        ),
        Endpoint(
            method="GET",
            path="/test/stats",
            about=f"The contents of the first {TOPICS_MAX} topics, and the server's figures",
            answer=stats,
            guarded=True,
            action=Action.ADMIN,
        ),
    ]


def _stats(callee: Callee) -> Json:
    topics = [topic for topic in callee.broker.topics if not topic.is_internal]
    rows = (
        {
            "topic": topic.topic.name,
            "messages": sum(partition.log.committed - partition.log.start for partition in topic.partitions),
            "segments": sum(len(partition.log.segments) for partition in topic.partitions),
            "bytes": sum(segment.size for partition in topic.partitions for segment in partition.log.segments),
        }
        for topic in topics[:TOPICS_MAX]
    )
    return {"topics": rows, "total": len(topics), "server": callee.statistics()}


# In.


async def _fill(target: _Target, subject: bytes, runs: AsyncGenerator[Run, None]) -> Json | Response:
    stored = 0
    try:
        topic = await target.broker.changes.owner(subject)
        async with aclosing(runs):
            async for run in runs:
                count = len(run)
                await _publish(target, run)
                stored += count
    except PenstockError as error:
        text = f"{error}; {stored} messages were stored before"
        return JSONResponse({"code": error.code, "text": text}, status_of(error))
    return {"topic": topic.topic.name, "count": stored}


async def _publish(target: _Target, run: Run) -> None:
    """Publish a run, and wait until it is stored. Raise if some of it is not."""
    broker = target.broker
    for error in (await broker.intake.make_ready(run)).values():
        raise error
    receipt = broker.intake.publish(run)
    try:
        await settled(receipt.outcome)
    except PenstockError:
        target.failed(len(receipt.failed))
        raise


async def _numbered(count: int, prefix: bytes, subject: bytes) -> AsyncGenerator[Run, None]:
    for first in range(1, count + 1, RUN_ROWS):
        values = [b"%b-%d" % (prefix, number) for number in range(first, min(first + RUN_ROWS, count + 1))]
        run = Run([subject] * len(values), values)
        run.keys = dict(enumerate(values))
        yield run


# SQLite.


def _allowed(directory: str | None, name: str) -> Path:
    """Return the path of a file that may be read."""
    if directory is None:
        raise BadRequest("no file may be read: set server.test_data_dir to a directory of files that may")
    root = Path(directory).resolve()
    path = (root / name).resolve()
    # The same error for a missing file and one elsewhere, so that neither is revealed.
    if not path.is_relative_to(root) or not path.is_file():
        raise BadRequest(f"no file {name[:200]!r} in server.test_data_dir")
    return path


async def _runs_of_file(path: Path, table: str, subject: bytes, bytes_max: int) -> AsyncGenerator[Run, None]:
    """Read in another thread, since SQLite waits for the disk; never in two at a time."""
    connection = await _in_thread(partial(_open, path, bytes_max))
    with closing(connection):
        rows = await _in_thread(partial(_rows, connection, table))
        number = 0
        while (run := await _in_thread(partial(_next_run, rows, number, subject, bytes_max))) is not None:
            number += len(run)
            yield run


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except sqlite3.DataError as error:
        raise BatchTooLarge(f"the file has a value that is too large: {error}") from None
    except sqlite3.Error as error:
        raise BadRequest(f"the file cannot be read: {error}") from None


def _open(path: Path, bytes_max: int) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=1, check_same_thread=False)
    # Values larger than a message are not read, and functions that the file defines are not run.
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, bytes_max + 4096)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _rows(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    known = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if table not in known:
        raise BadRequest(f"no table {table[:100]!r} in the file: it has {', '.join(known)[:500] or 'none'}")
    found = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}
    if "data" not in found:
        raise BadRequest(f"table {table} has no column data")
    columns = ", ".join(name if name in found else f"NULL AS {name}" for name in _COLUMNS)
    quoted = table.replace('"', '""')
    return connection.execute(f'SELECT {columns} FROM "{quoted}"')


def _next_run(rows: Iterator[tuple[Any, ...]], number: int, subject: bytes, bytes_max: int) -> Run | None:
    run = Run([], [])
    size = 0
    for key, event, data, created in rows:
        index = len(run)
        place = f"row {number + index + 1}"
        value = _bytes(data)
        if len(value) > bytes_max:
            raise BatchTooLarge(f"{place} has {len(value)} bytes of data, {bytes_max} are allowed")
        run.subjects.append(subject)
        run.values.append(value)
        if key is not None:
            run.keys[index] = _bytes(key)
        match event:
            case None | "MESSAGE":
                pass
            case "DELETE" if key is not None:
                run.tombstones.add(index)
            case "DELETE":
                raise BadRequest(f"{place} is a DELETE and has no msg_key")
            case _:
                raise BadRequest(f"{place} has event_type {str(event)[:100]!r}: it must be MESSAGE or DELETE")
        if created is not None:
            run.headers[index] = _created_at(created, place)
        size += len(value)
        if len(run) >= RUN_ROWS or size >= RUN_BYTES:
            break
    return run if run.values else None


def _created_at(value: Any, place: str) -> bytes:
    text = str(value)
    if not text.isprintable() or len(text) > 100:
        raise BadRequest(f"{place} has created_at {text[:100]!r}: it must be printable text, up to 100 characters")
    return headers.lines(created_at=text)


def _bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return value if isinstance(value, bytes) else str(value).encode()
