"""A batch as an Arrow record batch that shares its bytes. The only module that needs pyarrow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Final

import pyarrow

from penstock.batch import Batch, Buffer, Columns
from penstock.errors import CorruptBatch

# Each column has its type whether or not a batch has it, so that the record batches of a log fit together.
TYPES: Final = {
    "offset": pyarrow.int64(),
    "timestamp": pyarrow.timestamp("us", tz="UTC"),
    "key": pyarrow.binary(),
    "value": pyarrow.binary(),
    "subject": pyarrow.binary(),
    "reply": pyarrow.binary(),
    "headers": pyarrow.binary(),
    "tombstone": pyarrow.bool_(),
}


def decode(batch: Batch, names: Sequence[str] = tuple(TYPES)) -> pyarrow.RecordBatch:
    """The named columns of a batch. What it holds plain is checked and not copied."""
    columns = batch.columns()
    try:
        arrays = [_binary(columns, name) if name in columns.binary else _other(columns, name) for name in names]
    except pyarrow.ArrowInvalid as error:
        raise CorruptBatch(f"the columns are not sound: {error}") from error
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema(tuple(names)))


@cache
def schema(names: tuple[str, ...] = tuple(TYPES)) -> pyarrow.Schema:
    return pyarrow.schema([(name, TYPES[name]) for name in names])


def _binary(columns: Columns, name: str) -> pyarrow.Array:
    body = columns.body
    validity_at, offsets_at, start, stop = columns.binary[name]
    validity = None if validity_at < 0 else pyarrow.py_buffer(body[validity_at:offsets_at])
    buffers = [validity, pyarrow.py_buffer(body[offsets_at:start]), pyarrow.py_buffer(body[start:stop])]
    column = pyarrow.Array.from_buffers(TYPES[name], columns.batch.count, buffers)
    column.validate(full=True)
    return column


def _other(columns: Columns, name: str) -> pyarrow.Array:
    count = columns.batch.count
    column: Buffer | array[int]
    match name:
        case "offset":
            column = array("q", columns.offsets())
        case "timestamp" if columns.timestamps_at < 0:
            column = array("q", [columns.batch.timestamp]) * count
        case "timestamp":
            column = columns.body[columns.timestamps_at : columns.timestamps_at + 8 * count]
        case "tombstone" if columns.tombstones_at < 0:
            column = bytes((count + 7) // 8)
        case "tombstone":
            column = columns.body[columns.tombstones_at : columns.tombstones_at + (count + 7) // 8]
        case _:
            return pyarrow.nulls(count, TYPES[name])
    return pyarrow.Array.from_buffers(TYPES[name], count, [None, pyarrow.py_buffer(column)])
