"""Read messages to publish from files: JSON lines, CSV, Parquet.

A row is an object of fields. It is a *message* if it has the format that `penstock fetch` writes; otherwise the whole
object is the value of a message, as JSON, and two of its fields may be key and subject. The first row decides which of
the two a file holds.
"""

from __future__ import annotations

import base64
import codecs
import csv
import datetime
import decimal
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from penstock.cli.jsonlines import is_message, read_message, read_object
from penstock.client.values import Outgoing
from penstock.errors import BadRequest, PenstockError

Form = Literal["auto", "messages", "objects", "lines", "csv", "parquet"]

_SUFFIXES: Final[dict[str, Form]] = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
# The columns that identify a table written by `penstock fetch`.
_EXPORTED: Final = {"partition", "offset", "timestamp", "subject", "key", "headers", "tombstone", "value"}
_ROWS: Final = 4096

# A row, the raw bytes of its line if it has one, and its location.
Row = tuple[dict[str, Any], bytes | None, str]


@dataclass(slots=True, kw_only=True)
class Import:
    """How to read a file of messages; `found` is the kind of rows it turned out to have."""

    form: Form
    common: Outgoing
    key_field: str | None = None
    subject_field: str | None = None
    found: Literal["messages", "objects", "lines"] | None = field(default=None, init=False)

    def messages(self, stream: BinaryIO, advance: Callable[[int], None]) -> Iterator[tuple[Outgoing, str]]:
        """Yield each message with its location in the file. Raise BadRequest for an invalid row."""
        form = self.form
        if form == "auto":
            form = _SUFFIXES.get(Path(str(stream.name)).suffix.lower(), "auto")
        match form:
            case "lines":
                self.found = "lines"
                for number, line in enumerate(stream, 1):
                    advance(len(line))
                    yield self._plain(line.removesuffix(b"\n")), f"line {number}"
            case "csv":
                yield from self._rows(_csv_rows(stream, advance), is_table=True)
            case "parquet":
                yield from self._rows(_parquet_rows(stream, advance), is_table=True)
            case _:
                yield from self._rows(_json_rows(stream, advance), is_table=False)

    def _rows(self, rows: Iterator[Row], *, is_table: bool) -> Iterator[tuple[Outgoing, str]]:
        for fields, line, where in rows:
            if self.found is None:
                self.found = "messages" if self._has_messages(fields, is_table=is_table) else "objects"
            try:
                if self.found == "messages":
                    message = read_message(_exported(fields) if is_table else fields, self.common)
                else:
                    message = self._object(fields, line)
            except BadRequest as error:
                raise BadRequest(f"{where}: {error}") from None
            yield message, where

    def _has_messages(self, first: dict[str, Any], *, is_table: bool) -> bool:
        if self.form == "messages":
            return True
        if self.form == "objects" or self.key_field is not None or self.subject_field is not None:
            return False
        return first.keys() >= _EXPORTED if is_table else is_message(first)

    def _object(self, fields: dict[str, Any], line: bytes | None) -> Outgoing:
        common = self.common
        subject = common.subject if self.subject_field is None else _text(fields, self.subject_field, "--subject-field")
        if not subject:
            raise BadRequest("a plain object has no subject: give SUBJECT or --subject-field")
        key = common.key if self.key_field is None else _text(fields, self.key_field, "--key-field")
        value = line if line is not None else _as_json(fields)
        return replace(common, subject=subject, value=value, key=key)

    def _plain(self, value: bytes) -> Outgoing:
        return replace(self.common, value=value)


def _json_rows(stream: BinaryIO, advance: Callable[[int], None]) -> Iterator[Row]:
    for number, line in enumerate(stream, 1):
        advance(len(line))
        text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
        if text:
            where = f"line {number}"
            try:
                yield read_object(text), text, where
            except BadRequest as error:
                raise BadRequest(f"{where}: {error}") from None


def _csv_rows(stream: BinaryIO, advance: Callable[[int], None]) -> Iterator[Row]:
    def lines() -> Iterator[str]:
        for line in io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""):
            advance(len(line.encode()))
            yield line

    table = csv.DictReader(lines(), strict=True)
    try:
        twice = [name for name, count in Counter(table.fieldnames or ()).items() if count > 1]
        if twice:
            raise BadRequest(f"line 1: duplicate column {twice[0]!r}: column names must be unique")
        for fields in table:
            if None in fields or None in fields.values():
                raise BadRequest(f"line {table.line_num}: the number of columns differs from the first line")
            yield fields, None, f"line {table.line_num}"
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadRequest(f"line {table.line_num or 1}: invalid CSV in UTF-8: {error}") from None


def _parquet_rows(stream: BinaryIO, advance: Callable[[int], None]) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise PenstockError("Parquet needs pyarrow: pip install 'penstock[arrow]'") from None
    number = 0
    try:
        file = parquet.ParquetFile(stream)
        size = stream.seek(0, io.SEEK_END)
        for batch in file.iter_batches(_ROWS):
            for fields in batch.to_pylist():
                number += 1
                yield fields, None, f"row {number}"
            # Progress is in bytes: the share of the rows in the file.
            advance(size * batch.num_rows // max(1, file.metadata.num_rows))
    except pyarrow.ArrowException as error:
        raise BadRequest(f"invalid Parquet file: {error}") from None


def _exported(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of a table written by `penstock fetch` to its JSON form. In CSV, absent fields are empty."""
    fields: dict[str, Any] = {"subject": row["subject"]} if row["subject"] else {}
    for name in ("key", "value"):
        given = row[name]
        if isinstance(given, bytes):
            fields[f"{name}_base64"] = base64.b64encode(given).decode()
        elif row.get(f"{name}_base64"):
            fields[f"{name}_base64"] = row[f"{name}_base64"]
        elif given or (name == "value" and given is not None):
            fields[name] = given
    if row["tombstone"] in (True, "True", "true"):
        fields.pop("value", None)
        fields.pop("value_base64", None)
        fields["tombstone"] = True
    if isinstance(row["headers"], bytes):
        pairs = (line.partition(":") for line in row["headers"].decode(errors="replace").splitlines())
        fields["headers"] = {name.strip(): text.strip() for name, _, text in pairs}
    elif row["headers"]:
        fields["headers"] = json.loads(row["headers"])
    return fields


def _text(fields: dict[str, Any], name: str, option: str) -> str:
    value = fields.get(name)
    if name not in fields:
        raise BadRequest(f"no field {name!r}, given by {option}: the fields are {', '.join(map(str, fields))}")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    raise BadRequest(f"field {name!r}, given by {option}, is {value!r}: it must be text or a number")


def _as_json(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise BadRequest(f"cannot be encoded as JSON: {error}") from None


def _plain(value: object) -> object:
    """Convert Parquet types that JSON lacks: times to ISO 8601, decimals and bytes to text."""
    match value:
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal():
            return str(value)
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
    raise ValueError(f"unsupported type {type(value).__name__}")
