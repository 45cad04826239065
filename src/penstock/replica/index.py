"""The index of a copy, in SQLite: where each record is, which is the latest of each key, and what the segments hold.

What is in it was stored before: an entry is committed, durably, only when its record is. So whatever the index does not
know was never acknowledged, and whatever it knows must be there.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

# The number that an index of this kind bears: one of another is not read.
_VERSION: Final = 1
_BUSY_S: Final = 30.0

_SCHEMA: Final = """
DROP TABLE IF EXISTS segment_ranges;
CREATE TABLE segment_ranges (
    segment_id    INTEGER PRIMARY KEY,
    segment_file  TEXT NOT NULL,
    start_offset  INTEGER NOT NULL,
    end_offset    INTEGER NOT NULL,
    record_count  INTEGER NOT NULL,
    created_at    TEXT NOT NULL,
    partition     INTEGER NOT NULL,
    bytes         INTEGER NOT NULL
);
DROP TABLE IF EXISTS records;
CREATE TABLE records (
    partition INTEGER NOT NULL,
    "offset"  INTEGER NOT NULL,
    segment_id INTEGER NOT NULL,
    position  INTEGER NOT NULL,
    length    INTEGER NOT NULL,
    PRIMARY KEY (partition, "offset")
) WITHOUT ROWID;
DROP TABLE IF EXISTS latest;
CREATE TABLE latest (
    key       BLOB PRIMARY KEY,
    partition INTEGER NOT NULL,
    "offset"  INTEGER NOT NULL
) WITHOUT ROWID;
DROP TABLE IF EXISTS topic;
CREATE TABLE topic (name TEXT NOT NULL, id INTEGER NOT NULL);
"""
_SEGMENT_COLUMNS: Final = (
    "segment_id, segment_file, start_offset, end_offset, record_count, created_at, partition, bytes"
)
_PLACE: Final = """SELECT records.partition, records."offset", segment_file, position, length FROM records
    JOIN segment_ranges USING (segment_id)"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Offsets from `start` to `end`, both of them there; `bytes` of the file are known to be records."""

    id: int
    file: str
    start: int
    end: int
    records: int
    created_at: str
    partition: int
    bytes: int


class Place(NamedTuple):
    """Where a record is."""

    partition: int
    offset: int
    file: str
    position: int
    length: int


class Topic(NamedTuple):
    """One that is deleted and made again has another id."""

    name: str
    id: int


@dataclass(frozen=True, slots=True)
class Totals:
    segments: int
    records: int
    start: int | None
    end: int | None


# Of each record: partition, offset, id of its segment, position and length.
Row = tuple[int, int, int, int, int]
# Of each key: the partition and the offset of its latest message; None if that deletes it.
Latest = Mapping[bytes, tuple[int, int] | None]


class Index:
    """One thread at a time writes, others may read meanwhile. Raises sqlite3.Error for what the disk does, and
    sqlite3.DatabaseError, at first, for a file that is no index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Whether it was not there, or not completed: then it knows nothing of the segments that are.
        self.is_new = False
        self._lock = threading.Lock()
        self._writer = _connect(path)
        try:
            self._prepare()
            self._reader = _connect(path)
        except BaseException:
            self._writer.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._reader.close()
        self._writer.close()

    def complete(self) -> None:
        """It knows all that there is; before, it is begun anew when it is opened."""
        if self.is_new:
            self._writer.execute(f"PRAGMA user_version = {_VERSION}")
            self.is_new = False

    def add(self, segments: Iterable[Segment], rows: Sequence[Row], latest: Latest, topic: Topic | None) -> None:
        """All of it, or nothing; durable when it returns."""
        with self._transaction() as writer:
            writer.executemany(
                f"INSERT OR REPLACE INTO segment_ranges ({_SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        each.id,
                        each.file,
                        each.start,
                        each.end,
                        each.records,
                        each.created_at,
                        each.partition,
                        each.bytes,
                    )
                    for each in segments
                ],
            )
            writer.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", rows)
            writer.executemany("DELETE FROM latest WHERE key = ?", [(key,) for key, at in latest.items() if at is None])
            writer.executemany(
                "INSERT OR REPLACE INTO latest VALUES (?, ?, ?)",
                [(key, *at) for key, at in latest.items() if at is not None],
            )
            if topic is not None:
                writer.execute("DELETE FROM topic")
                writer.execute("INSERT INTO topic VALUES (?, ?)", topic)

    def segments(self, partition: int | None = None, limit: int = -1) -> list[Segment]:
        """In the order in which they were begun."""
        rows = self._read(
            f"SELECT {_SEGMENT_COLUMNS} FROM segment_ranges WHERE ? IS NULL OR partition = ?"
            " ORDER BY segment_id LIMIT ?",
            partition,
            partition,
            limit,
        )
        return [Segment(*row) for row in rows]

    def totals(self) -> dict[int, Totals]:
        """Of each partition."""
        rows = self._read(
            "SELECT partition, count(*), sum(record_count), min(start_offset), max(end_offset) FROM segment_ranges"
            " GROUP BY partition ORDER BY partition"
        )
        return {row[0]: Totals(*row[1:]) for row in rows}

    def topic(self) -> Topic | None:
        rows = self._read("SELECT name, id FROM topic")
        return Topic(*rows[0]) if rows else None

    def find(self, partition: int, offset: int) -> Place | None:
        return _one(self._read(f'{_PLACE} WHERE records.partition = ? AND records."offset" = ?', partition, offset))

    def find_range(self, partition: int, first: int, last: int, limit: int) -> list[Place]:
        """Those from one offset to another, both included."""
        rows = self._read(
            f'{_PLACE} WHERE records.partition = ? AND records."offset" BETWEEN ? AND ?'
            ' ORDER BY records."offset" LIMIT ?',
            partition,
            first,
            last,
            limit,
        )
        return [Place(*row) for row in rows]

    def find_key(self, key: bytes) -> Place | None:
        """Where its latest message is."""
        wanted = '(SELECT partition, "offset" FROM latest WHERE key = ?)'
        return _one(self._read(f'{_PLACE} WHERE (records.partition, records."offset") = {wanted}', key))

    def keys(self, prefix: bytes, after: bytes | None, limit: int) -> list[bytes]:
        """Keys that have a value, in the order of their bytes."""
        begin = ("key > ?", after) if after is not None and after >= prefix else ("key >= ?", prefix)
        end = _behind(prefix)
        rows = self._read(
            f"SELECT key FROM latest WHERE {begin[0]} AND (? IS NULL OR key < ?) ORDER BY key LIMIT ?",
            begin[1],
            end,
            end,
            limit,
        )
        return [row[0] for row in rows]

    def size(self) -> int:
        """Bytes of its files."""
        sizes = 0
        for suffix in ("", "-wal", "-shm"):
            path = self.path.with_name(self.path.name + suffix)
            sizes += path.stat().st_size if path.exists() else 0
        return sizes

    def _prepare(self) -> None:
        # FULL: a commit is on the disk when it returns.
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = FULL")
        [version] = self._writer.execute("PRAGMA user_version").fetchone()
        self.is_new = version == 0
        if self.is_new:
            self._writer.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"an index of version {version}; this one reads {_VERSION}")
        # Whoever is not an index says so now.
        self._writer.execute("SELECT count(*) FROM segment_ranges").fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._reader.execute(query, values).fetchall()


def _connect(path: Path) -> sqlite3.Connection:
    # SQLite makes what it keeps beside the database as private as the database is. One that is there is not opened:
    # closing it again would take the locks of other connections.
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _one(rows: list[Any]) -> Place | None:
    return Place(*rows[0]) if rows else None


def _behind(prefix: bytes) -> bytes | None:
    """The first key behind all that begin so; None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
