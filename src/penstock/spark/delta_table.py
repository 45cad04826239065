"""Delta tables of rows, read and written with `deltalake`: no jar."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow

from penstock.errors import BadDirectory, PenstockError
from penstock.spark.durable_files import sync_directory

try:
    from deltalake import CommitProperties, DeltaTable, Schema, Transaction
    from deltalake.exceptions import CommitFailedError, TableNotFoundError
except ImportError:
    raise PenstockError("Delta tables need deltalake: pip install 'penstock[delta]'") from None


def read(path: str) -> pyarrow.Table:
    """Return all rows of a table."""
    return _existing(path).to_pyarrow_table()


def schema(path: str) -> pyarrow.Schema:
    return pyarrow.schema(_existing(path).schema().to_arrow())


class UpsertTable:
    """A table with the latest row of each key.

    Each commit carries the query and the number of its batch as an application transaction of Delta, as atomic as the
    rows. So a batch that is repeated, because the run was killed before Spark knew that it was stored, changes nothing.
    """

    def __init__(self, path: str, key: str = "") -> None:
        self._path = path
        self._key = key

    def last(self, query: str) -> int | None:
        """Return the number of the last batch of a query; None if there is none."""
        table = _open(self._path)
        return None if table is None else table.transaction_version(_writer(query))

    def has(self, query: str, number: int) -> bool:
        last = self.last(query)
        return last is not None and number <= last

    def check(self, rows: pyarrow.Table) -> None:
        """Raise ValueError if the table cannot have these columns, or has others."""
        try:
            wanted = pyarrow.schema(Schema.from_arrow(_nullable(rows.schema)).to_arrow())
        except Exception as error:  # deltalake raises nothing narrower, with a stack below the sentence
            sentence = str(error).partition("\n")[0]
            raise ValueError(f"a Delta table cannot have these columns: {sentence}") from error
        table = _open(self._path)
        if table is None:
            return
        known = pyarrow.schema(table.schema().to_arrow())
        if _types(known) != _types(wanted):
            raise ValueError(
                f"the table {self._path} has the columns {_shown(known)}, but the pipeline writes {_shown(wanted)}: "
                "write the same, or to another directory"
            )

    def merge(self, changes: pyarrow.Table, query: str, number: int, *, deleted: str) -> None:
        """Merge a batch: at most one row for each key, which is deleted if its column `deleted` is true."""
        rows = changes.drop_columns([deleted])
        self.check(rows)
        table = DeltaTable.create(self._path, _nullable(rows.schema), mode="ignore")
        assigned = {_quoted(name): f"s.{_quoted(name)}" for name in rows.column_names}
        key, gone = _quoted(self._key), f"s.{_quoted(deleted)}"
        properties = CommitProperties(app_transactions=[Transaction(_writer(query), number)])
        merging = (
            table.merge(changes, f"t.{key} = s.{key}", "s", "t", commit_properties=properties)
            .when_matched_delete(gone)
            .when_matched_update(assigned)
            .when_not_matched_insert(assigned, f"NOT {gone}")
        )
        try:
            merging.execute()
        except CommitFailedError as error:
            raise BadDirectory(
                f"{self._path}: another writer committed first: start the query again ({error})"
            ) from error
        self._sync()

    def _sync(self) -> None:
        """Sync the last commit and its files, which Delta does not."""
        root, log = Path(self._path), Path(self._path) / "_delta_log"
        commit = log / f"{DeltaTable(self._path).version():020d}.json"
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for path in (*(root / action["add"]["path"] for action in actions if "add" in action), commit):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        for directory in (log, root, root.parent):
            sync_directory(directory)


def _existing(path: str) -> DeltaTable:
    found = _open(path)
    if found is None:
        raise BadDirectory(f"{path} is not a Delta table")
    return found


def _open(path: str) -> DeltaTable | None:
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        return None


def _writer(query: str) -> str:
    return f"spark:{query}"


def _nullable(schema: pyarrow.Schema) -> pyarrow.Schema:
    """Make all columns nullable: deltalake would check each row."""
    return pyarrow.schema([field.with_nullable(True) for field in schema])


def _types(schema: pyarrow.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _shown(schema: pyarrow.Schema) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in _types(schema).items())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
