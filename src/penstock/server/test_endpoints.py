"""Endpoints that fill topics, for trying things out. They are there only if `server.test_endpoints` says so.

Rows of a SQLite file go the way of all that is published, in runs; each run is stored before the next is read. A file
must lie in `server.test_data_dir`, links followed: without that setting none is read.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

from starlette.responses import JSONResponse, Response

from penstock import headers
from penstock.broker.intake import Receipt
from penstock.errors import BadRequest, BatchTooLarge, PenstockError
from penstock.run import Run
from penstock.server.routes import Asked, Endpoint, Field, Json, status_of

if TYPE_CHECKING:
    from penstock.server.server import Server

T = TypeVar("T")

# A run is as many rows as this, or so many bytes of them.
RUN_ROWS: Final = 500
RUN_BYTES: Final = 1 << 20
COUNT_MAX: Final = 1_000_000
TOPICS_MAX: Final = 1000

# Columns that are read, where a table has them. `data` it must have.
_COLUMNS: Final = ("msg_key", "event_type", "data", "created_at")


async def _load(asked: Asked) -> Json | Response:
    path = _allowed(asked.server.config.server.test_data_dir, asked.text("sqliteFilePath"))
    table, subject = asked.text("tableName", "messages"), asked.text("topic").encode()
    limit = asked.server.config.server.payload_bytes_max
    return await _fill(asked.server, subject, _runs_of_file(path, table, subject, limit))


async def _inject(asked: Asked) -> Json | Response:
    count, prefix, subject = asked.number("count", 10), asked.text("prefix", "TEST"), asked.text("topic").encode()
    if count > COUNT_MAX:
        raise BadRequest(f"count is {count}, at most {COUNT_MAX} are injected at once")
    return await _fill(asked.server, subject, _numbered(count, prefix.encode(), subject))


async def _stats(asked: Asked) -> Json:
    broker = asked.server.broker
    topics = [topic for topic in broker.topics if not topic.is_internal]
    rows = (
        {
            "topic": topic.topic.name,
            "messages": sum(partition.log.committed - partition.log.start for partition in topic.partitions),
            "segments": sum(len(partition.log.segments) for partition in topic.partitions),
            "bytes": sum(segment.size for partition in topic.partitions for segment in partition.log.segments),
        }
        for topic in topics[:TOPICS_MAX]
    )
    return {"topics": rows, "total": len(topics), "server": asked.server.statistics()}


ENDPOINTS: Final = (
    Endpoint(
        method="POST",
        path="/test/load-from-sqlite",
        about="Publish the rows of a table: data, and msg_key, event_type and created_at where it has them",
        answer=_load,
        fields=(
            Field(name="sqliteFilePath", kind="text", about="a file in server.test_data_dir", required=True),
            Field(name="tableName", kind="text", about="the table", default="messages"),
            Field(name="topic", kind="text", about="where they go", required=True),
        ),
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/test/inject-messages",
        about="Publish so many messages: PREFIX-1, PREFIX-2, each its own key",
        answer=_inject,
        fields=(
            Field(name="count", kind="number", about=f"how many, at most {COUNT_MAX}", default=10),
            Field(name="topic", kind="text", about="where they go", required=True),
            Field(name="prefix", kind="text", about="what they begin with", default="TEST"),
        ),
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/test/stats",
        about=f"What the topics hold, the first {TOPICS_MAX} of them, and the server's figures",
        answer=_stats,
        guarded=True,
    ),
)


# In.


async def _fill(server: Server, subject: bytes, runs: AsyncGenerator[Run, None]) -> Json | Response:
    stored = 0
    try:
        topic = await server.broker.owner(subject)
        async with aclosing(runs):
            async for run in runs:
                count = len(run)
                await _publish(server, run)
                stored += count
    except PenstockError as error:
        text = f"{error}; {stored} messages were stored before"
        return JSONResponse({"code": error.code, "text": text}, status_of(error))
    return {"topic": topic.topic.name, "count": stored}


async def _publish(server: Server, run: Run) -> None:
    """Wait until all of it is stored; raises if some of it is not."""
    broker = server.broker
    for error in (await broker.make_ready(run)).values():
        raise error
    settled: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()

    def done(receipt: Receipt) -> None:
        if not settled.done():
            settled.set_result(receipt)

    broker.publish(run, done)
    receipt = await settled
    if receipt.error is not None:
        server.counters.failed_publishes += len(receipt.failed)
        raise receipt.error


async def _numbered(count: int, prefix: bytes, subject: bytes) -> AsyncGenerator[Run, None]:
    for first in range(1, count + 1, RUN_ROWS):
        values = [b"%b-%d" % (prefix, number) for number in range(first, min(first + RUN_ROWS, count + 1))]
        run = Run([subject] * len(values), values)
        run.keys = dict(enumerate(values))
        yield run


# SQLite.


def _allowed(directory: str | None, name: str) -> Path:
    """Where a file is, if it may be read."""
    if directory is None:
        raise BadRequest("no file may be read: set server.test_data_dir to the directory of those that may")
    root = Path(directory).resolve()
    path = (root / name).resolve()
    # The same words for what is not there and what is elsewhere: it is nobody's affair which it is.
    if not path.is_relative_to(root) or not path.is_file():
        raise BadRequest(f"there is no file {name[:200]!r} in server.test_data_dir")
    return path


async def _runs_of_file(path: Path, table: str, subject: bytes, bytes_max: int) -> AsyncGenerator[Run, None]:
    """SQLite waits for the disk, so it does that in another thread; never in two at a time."""
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
    # A value that is larger than a message may be is not even read. What the file itself defines is not run.
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, bytes_max + 4096)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _rows(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    known = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if table not in known:
        raise BadRequest(f"there is no table {table[:100]!r} in the file: there are {', '.join(known)[:500] or 'none'}")
    found = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}
    if "data" not in found:
        raise BadRequest(f"the table {table} has no column data")
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
                raise BadRequest(f"{place} has event_type {str(event)[:100]!r}, it must be MESSAGE or DELETE")
        if created is not None:
            run.headers[index] = _created_at(created, place)
        size += len(value)
        if len(run) >= RUN_ROWS or size >= RUN_BYTES:
            break
    return run if run.values else None


def _created_at(value: Any, place: str) -> bytes:
    text = str(value)
    if not text.isprintable() or len(text) > 100:
        raise BadRequest(f"{place} has no time in created_at: {text[:100]!r}")
    return headers.lines(created_at=text)


def _bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return value if isinstance(value, bytes) else str(value).encode()
