"""An archive as a Delta table, written with `deltalake`: no jar.

The log of the table is the manifest. Each commit carries the number of the writer's batch and the end of each topic
partition as application transactions of Delta. So both are as atomic as the files, and Delta itself refuses one of two
writers that continue from the same end.
"""

from __future__ import annotations

import datetime
import json
import os
import urllib.parse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow

from penstock.errors import BadDirectory, PenstockError
from penstock.spark import manifest
from penstock.spark.durable_files import sync_directory
from penstock.spark.manifest import ArchivedFile, Entry
from penstock.spark.parquet import Unit

try:
    from deltalake import CommitProperties, DeltaTable, Transaction
    from deltalake.exceptions import CommitFailedError, TableNotFoundError
    from deltalake.transaction import AddAction
except ImportError:
    raise PenstockError("Delta tables need deltalake: pip install 'penstock[delta]'") from None

_PARTITIONS: Final[dict[Unit, list[str]]] = {"hour": ["topic", "day", "hour"], "day": ["topic", "day"]}


class DeltaManifest:
    """The Delta table at `root`, with the methods of `Manifest`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, rows: pyarrow.Schema, unit: Unit) -> None:
        """Create an empty table if there is none. An existing one must have the same columns and partitioning."""
        table = DeltaTable.create(self.root, _schema(rows, unit), mode="ignore", partition_by=_PARTITIONS[unit])
        known = [field.name for field in table.schema().fields]
        wanted = _schema(rows, unit).names
        if known != wanted or table.metadata().partition_columns != _PARTITIONS[unit]:
            raise ValueError(
                f"the table {self.root} has the columns {', '.join(known)}, partitioned by"
                f" {', '.join(table.metadata().partition_columns)}, but this write has {', '.join(wanted)}, partitioned"
                f" by {', '.join(_PARTITIONS[unit])}: write the same, or to another directory"
            )
        self._sync(table)

    def ranges(self) -> dict[tuple[str, int], tuple[int, int]]:
        found: dict[tuple[str, int], tuple[int, int]] = {}
        for file in self.files():
            first, end = found.get((file.topic, file.partition), (file.first, file.last + 1))
            found[file.topic, file.partition] = min(first, file.first), max(end, file.last + 1)
        return found

    def files(self) -> list[ArchivedFile]:
        actions = pyarrow.table(self._table().get_add_actions(flatten=True)).to_pylist()
        return [self._file(action) for action in actions]

    def commit(self, entry: Entry, *, gaps: bool = False) -> bool:
        """Add a batch; return False if it was added before. Raise ValueError if it does not continue the table."""
        table = self._table()
        known, spans = table.transaction_version(entry.writer), entry.spans()
        ends = {place: end for place in spans if (end := table.transaction_version(_place(place))) is not None}
        if known is not None and entry.batch <= known:
            ranges = {place: manifest.ArchivedRange(0, end, entry.writer) for place, end in ends.items()}
            manifest.check_replay(self.root, entry, ranges)
            self._sync(table)
            return False
        for place in ends:
            manifest.refuse_overlap(self.root, place, spans[place][0], ends)
            if known is None and not gaps:
                manifest.refuse_gap(self.root, place, spans[place][0], ends)
        self._add(table, entry)
        return True

    def unnamed(self, paths: Iterable[str]) -> list[str]:
        """Return those of the files that the table does not have."""
        named = {_decoded(uri) for uri in pyarrow.table(self._table().get_add_actions())["path"].to_pylist()}
        return [path for path in paths if path not in named]

    def _table(self) -> DeltaTable:
        try:
            return DeltaTable(self.root)
        except TableNotFoundError as error:
            raise BadDirectory(f"{self.root} is not a Delta table") from error

    def _add(self, table: DeltaTable, entry: Entry) -> None:
        marks = [Transaction(_place(place), end) for place, (_, end) in entry.spans().items()]
        try:
            table.create_write_transaction(
                [self._action(file, table.metadata().partition_columns) for file in entry.files],
                mode="append",
                schema=table.schema(),
                partition_by=table.metadata().partition_columns,
                commit_properties=CommitProperties(app_transactions=[Transaction(entry.writer, entry.batch), *marks]),
            )
        except CommitFailedError as error:
            raise BadDirectory(
                f"{self.root}: another writer committed first: start the query again ({error})"
            ) from error
        self._sync(self._table())

    def _sync(self, table: DeltaTable) -> None:
        """Sync the log, which Delta does not."""
        log = self.root / "_delta_log"
        descriptor = os.open(log / f"{table.version():020d}.json", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        for path in (log, self.root, self.root.parent):
            sync_directory(path)

    def _action(self, file: ArchivedFile, partitions: Sequence[str]) -> AddAction:
        hour = _time(file.first_timestamp)
        values = {"topic": file.topic, "day": f"{hour:%Y-%m-%d}", "hour": str(hour.hour)}
        stats = {
            "numRecords": file.rows,
            "minValues": _bounds(file.partition, file.first, file.first_timestamp),
            "maxValues": _bounds(file.partition, file.last, file.last_timestamp),
            "nullCount": {"partition": 0, "offset": 0, "timestamp": 0},
        }
        modified_ms = (self.root / file.path).stat().st_mtime_ns // 1_000_000
        partition_values = {name: values[name] for name in partitions}
        return AddAction(file.path, file.bytes, partition_values, modified_ms, True, json.dumps(stats))

    def _file(self, action: dict[str, Any]) -> ArchivedFile:
        if action.get("min.offset") is None or action["min.partition"] != action["max.partition"]:
            raise BadDirectory(
                f"{self.root} has been rewritten: {action['path']} has rows of several partitions, or no statistics."
                " Read it as a Delta table"
            )
        times = [
            (action[name] - _time(0)) // datetime.timedelta(microseconds=1)
            for name in ("min.timestamp", "max.timestamp")
        ]
        return ArchivedFile(
            _decoded(action["path"]),
            action["partition.topic"],
            action["min.partition"],
            action["num_records"],
            action["size_bytes"],
            action["min.offset"],
            action["max.offset"],
            *times,
        )


def _schema(rows: pyarrow.Schema, unit: Unit) -> pyarrow.Schema:
    divided = {"day": pyarrow.date32(), "hour": pyarrow.int32()} if unit == "hour" else {"day": pyarrow.date32()}
    return pyarrow.schema([*rows, *(pyarrow.field(name, kind) for name, kind in divided.items())])


def _place(place: tuple[str, int]) -> str:
    return f"penstock:{place[0]}/{place[1]}"


def _bounds(partition: int, offset: int, timestamp: int) -> dict[str, Any]:
    return {"partition": partition, "offset": offset, "timestamp": f"{_time(timestamp):%Y-%m-%dT%H:%M:%S.%fZ}"}


def _time(timestamp: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=timestamp)


def _decoded(uri: str) -> str:
    """Decode a path in the log, which is a URI: deltalake encodes paths, and returns them encoded."""
    return urllib.parse.unquote(uri)
