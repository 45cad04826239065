"""`meta.db`: the content of the logs as tables for queries. It is a projection: if it is deleted, it is rebuilt.

state       the latest value of each key in the state topic
applied     the offset of the state topic up to which `state` is projected
segments    the segments of every log, as of the last upkeep

Everything in it can be read from the logs again, except where each log ended. It is a witness of that, if a log is cut
short (`log/witness.py`). So no row claims more than is on the disk.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.log.files import FILE_MODE

logger = logging.getLogger(__name__)

# 2: the end of a log's last segment is where its last batch on the disk ends.
_VERSION: Final = 2
_IN_MEMORY: Final = ":memory:"
_SCHEMA: Final = """
    CREATE TABLE state (kind TEXT, key TEXT, value TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
    CREATE TABLE applied (only_row INTEGER PRIMARY KEY CHECK (only_row = 0), "offset" INTEGER NOT NULL);
    CREATE TABLE segments (
        topic INTEGER, partition INTEGER, base_offset INTEGER, end_offset INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL, created_us INTEGER NOT NULL, sealed INTEGER NOT NULL,
        PRIMARY KEY (topic, partition, base_offset)
    ) WITHOUT ROWID;
    INSERT INTO applied VALUES (0, 0);
"""


class Change(NamedTuple):
    """The new value of a key; None: it is deleted."""

    kind: str
    key: str
    value: Any


class SegmentRow(NamedTuple):
    topic: int
    partition: int
    base_offset: int
    end_offset: int
    size_bytes: int
    created_us: int
    sealed: int


class Meta:
    def __init__(self, path: Path | None, database: sqlite3.Connection | None = None) -> None:
        """Open the file, or create it again if it cannot be used. Without a path, use memory, or an open connection."""
        self._lock = threading.Lock()
        if path is None:
            self._database = database or _create(_IN_MEMORY)
            return
        try:
            self._database = _open(path)
        except sqlite3.DatabaseError as error:
            logger.warning("%s: built again from the logs: %s", path, error)
            self._database = _recreate(path)

    def applied(self) -> int:
        """Return the offset up to which the state topic is projected."""
        with self._lock:
            return int(self._database.execute('SELECT "offset" FROM applied').fetchone()[0])

    def state(self) -> list[Change]:
        with self._lock:
            rows = self._database.execute("SELECT kind, key, value FROM state").fetchall()
        return [Change(kind, key, json.loads(value)) for kind, key, value in rows]

    def apply(self, changes: Iterable[Change], offset: int) -> None:
        with self._lock, self._database:
            for kind, key, value in changes:
                if value is None:
                    self._database.execute("DELETE FROM state WHERE kind = ? AND key = ?", (kind, key))
                else:
                    row = (kind, key, json.dumps(value))
                    self._database.execute("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", row)
            self._database.execute('UPDATE applied SET "offset" = ?', (offset,))

    def forget_state(self) -> None:
        """Start the projection again from nothing."""
        with self._lock, self._database:
            self._database.execute("DELETE FROM state")
            self._database.execute('UPDATE applied SET "offset" = 0')

    def segments(self) -> list[SegmentRow]:
        with self._lock:
            rows = self._database.execute("SELECT * FROM segments ORDER BY topic, partition, base_offset").fetchall()
        return [SegmentRow._make(row) for row in rows]

    def replace_segments(self, rows: Iterable[SegmentRow], kept: Callable[[int, int], bool]) -> None:
        """Replace all rows, except those of partitions for which `kept` returns true."""
        old = [row for row in self.segments() if kept(row.topic, row.partition)]
        with self._lock, self._database:
            self._database.execute("DELETE FROM segments")
            self._database.executemany("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)", [*old, *rows])

    def close(self) -> None:
        with self._lock:
            self._database.close()


@contextmanager
def look_into(path: Path, *, is_live: bool) -> Iterator[Meta | None]:
    """Read a `meta.db` without changing it or its neighbours; None if it does not exist or cannot be read.

    SQLite makes files beside a database that a killed process left. So a copy is opened, unless a broker has it open.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory, ExitStack() as stack:
        meta = None
        with suppress(sqlite3.Error, OSError):
            if is_live:
                database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            else:
                for suffix in ("", "-wal"):
                    if (source := path.with_name(path.name + suffix)).exists():
                        shutil.copyfile(source, Path(directory) / f"meta.db{suffix}")
                database = sqlite3.connect(Path(directory) / "meta.db", check_same_thread=False)
            stack.enter_context(closing(database))
            _check(database)
            meta = Meta(None, database)
        yield meta


def _open(path: Path) -> sqlite3.Connection:
    if not path.exists():
        return _create(str(path))
    database = _connect(str(path))
    with _closed_on_error(database):
        _check(database)
    return database


def _check(database: sqlite3.Connection) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version != _VERSION or database.execute("PRAGMA quick_check").fetchone()[0] != "ok":
        raise sqlite3.DatabaseError(f"version {version}, or damaged")


def _recreate(path: Path) -> sqlite3.Connection:
    try:
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _create(str(path))
    except (sqlite3.Error, OSError) as error:
        logger.warning("%s: cannot be created, kept in memory until the next start: %s", path, error)
        return _create(_IN_MEMORY)


def _create(name: str) -> sqlite3.Connection:
    database = _connect(name)
    with _closed_on_error(database), closing(database.cursor()) as cursor:
        cursor.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
    return database


def _connect(name: str) -> sqlite3.Connection:
    if name != _IN_MEMORY:
        # SQLite gives the files beside the database the same mode. An existing file is not opened here: closing it
        # would drop the locks of other connections. SQLite reports what is wrong with it.
        with suppress(OSError):
            os.close(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    database = sqlite3.connect(name, check_same_thread=False)
    with _closed_on_error(database):
        # Consistent after a power cut, and only a little behind: the rest is applied again from the state topic.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
    return database


@contextmanager
def _closed_on_error(database: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        database.close()
        raise
