"""The index of a copy, in SQLite: the latest message of each key, and the contents of each segment.

The index is derived from the copy's logs, and stores the offset up to which it covers each of them. After a crash it
may be behind, and catches up. It can be deleted.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

# The version of the tables. An index of another version is rebuilt.
_VERSION: Final = 2
_BUSY_S: Final = 30.0
_SUFFIXES: Final = ("", "-wal", "-shm")

_SCHEMA: Final = """
CREATE TABLE segment_ranges (
    segment_id    INTEGER PRIMARY KEY,
    segment_file  TEXT NOT NULL,
    start_offset  INTEGER NOT NULL,
    end_offset    INTEGER NOT NULL,
    record_count  INTEGER NOT NULL,
    created_at    TEXT NOT NULL,
    partition     INTEGER NOT NULL,
    base_offset   INTEGER NOT NULL,
    bytes         INTEGER NOT NULL,
    UNIQUE (partition, base_offset)
);
CREATE TABLE latest (
    key       BLOB PRIMARY KEY,
    partition INTEGER NOT NULL,
    "offset"  INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE positions (
    partition INTEGER PRIMARY KEY,
    "offset"  INTEGER NOT NULL
);
"""
_SEGMENT_COLUMNS: Final = (
    "segment_id, partition, base_offset, segment_file, start_offset, end_offset, record_count, created_at, bytes"
)


class CopiedSegment(NamedTuple):
    """A segment with messages from offset `start` to `end`, inclusive. `id` is None before it is in the index."""

    id: int | None
    partition: int
    base: int
    file: str
    start: int
    end: int
    records: int
    created_at: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    segments: int
    records: int
    start: int | None
    end: int | None


class ReplicaIndex:
    """One thread at a time may write; others may read at the same time. Raises sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        """Raises sqlite3.DatabaseError if the file is not an index of this version."""
        self.path = path
        self._lock = threading.Lock()
        self._writer = _connect(path)
        try:
            self._prepare()
            self._reader = _connect(path)
        except BaseException:
            self._writer.close()
            raise

    @classmethod
    def open(cls, path: Path) -> ReplicaIndex:
        """Open an index, or start an empty one in place of a file that cannot be used."""
        try:
            return cls(path)
        except sqlite3.OperationalError:
            raise  # an error of the disk, not of the file
        except sqlite3.DatabaseError as error:
            logger.warning("%s: %s: rebuilding it from the segments", path, error)
        remove_index(path)
        return cls(path)

    def close(self) -> None:
        with self._lock:
            self._reader.close()
        self._writer.close()

    def remove(self) -> None:
        self.close()
        remove_index(self.path)

    def position(self, partition: int) -> int:
        """Return the offset up to which the index covers a partition."""
        [[offset]] = self._read('SELECT coalesce(max("offset"), 0) FROM positions WHERE partition = ?', partition)
        return int(offset)

    def add(
        self, partition: int, position: int, segments: Sequence[CopiedSegment], latest: Mapping[bytes, int | None]
    ) -> None:
        """Add messages up to `position`. `latest` has the last offset of each key, or None if it is deleted."""
        with self._transaction() as writer:
            writer.execute("INSERT OR REPLACE INTO positions VALUES (?, ?)", (partition, position))
            writer.executemany(
                f"INSERT OR REPLACE INTO segment_ranges ({_SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                segments,
            )
            writer.executemany("DELETE FROM latest WHERE key = ?", [(key,) for key, at in latest.items() if at is None])
            writer.executemany(
                "INSERT OR REPLACE INTO latest VALUES (?, ?, ?)",
                [(key, partition, at) for key, at in latest.items() if at is not None],
            )

    def segment(self, partition: int, base: int) -> CopiedSegment | None:
        rows = self._read(
            f"SELECT {_SEGMENT_COLUMNS} FROM segment_ranges WHERE partition = ? AND base_offset = ?", partition, base
        )
        return CopiedSegment(*rows[0]) if rows else None

    def segments(self, partition: int | None = None, limit: int = -1) -> list[CopiedSegment]:
        """Return segments in the order in which they were created."""
        rows = self._read(
            f"SELECT {_SEGMENT_COLUMNS} FROM segment_ranges WHERE ? IS NULL OR partition = ?"
            " ORDER BY segment_id LIMIT ?",
            partition,
            partition,
            limit,
        )
        return [CopiedSegment(*row) for row in rows]

    def totals(self) -> dict[int, Totals]:
        """Return the totals of each partition."""
        rows = self._read(
            "SELECT partition, count(*), sum(record_count), min(start_offset), max(end_offset) FROM segment_ranges"
            " GROUP BY partition ORDER BY partition"
        )
        return {row[0]: Totals(*row[1:]) for row in rows}

    def find_key(self, key: bytes) -> tuple[int, int] | None:
        """Return partition and offset of the latest message of a key."""
        rows = self._read('SELECT partition, "offset" FROM latest WHERE key = ?', key)
        return (rows[0][0], rows[0][1]) if rows else None

    def keys(self, prefix: bytes, after: bytes | None, limit: int) -> list[bytes]:
        """Return keys that have a value, in the order of their bytes."""
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
        """Return the size of the index files in bytes."""
        sizes = 0
        for path in _files(self.path):
            with suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes

    def _prepare(self) -> None:
        # Consistent after a power cut, though possibly a little behind: the rest is read from the logs again.
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = NORMAL")
        [version] = self._writer.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._writer.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"index version {version}, expected {_VERSION}")
        # Force SQLite to read the file.
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
    # SQLite gives its other files the mode of the database. Do not open an existing file: closing it would drop the
    # locks of other connections.
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _files(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in _SUFFIXES]


def remove_index(path: Path) -> None:
    for each in _files(path):
        each.unlink(missing_ok=True)


def _behind(prefix: bytes) -> bytes | None:
    """Return the first key after all keys with `prefix`; None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
