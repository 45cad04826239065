"""A batch as an Arrow record batch that shares its bytes. The only module that needs pyarrow."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final

import pyarrow
from pyarrow import compute

from penstock.batch import Batch, Columns
from penstock.errors import CorruptBatch

_NUMBERS_MAX: Final = 1 << 16

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
    columns = Columns(batch)
    binary = columns.binary
    body = pyarrow.py_buffer(columns.body)
    arrays = []
    try:
        for name in names:
            arrays.append(_binary(columns, body, name) if name in binary else _other(columns, body, name))
    except pyarrow.ArrowInvalid as error:
        raise CorruptBatch(f"the columns are not sound: {error}") from error
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema(tuple(names)))


@cache
def schema(names: tuple[str, ...] = tuple(TYPES)) -> pyarrow.Schema:
    return pyarrow.schema([(name, TYPES[name]) for name in names])


def _binary(columns: Columns, body: pyarrow.Buffer, name: str) -> pyarrow.Array:
    validity_at, offsets_at, start, stop = columns.binary[name]
    validity = None if validity_at < 0 else body.slice(validity_at, offsets_at - validity_at)
    buffers = [validity, body.slice(offsets_at, start - offsets_at), body.slice(start, stop - start)]
    column = pyarrow.Array.from_buffers(TYPES[name], columns.batch.count, buffers)
    column.validate(full=True)
    return column


def _other(columns: Columns, body: pyarrow.Buffer, name: str) -> pyarrow.Array:
    count = columns.batch.count
    match name:
        case "offset" if columns.deltas_at < 0 and count <= _NUMBERS_MAX:
            base = pyarrow.scalar(columns.batch.base_offset, pyarrow.int64())
            return compute.add(_numbers().slice(0, count), base)
        case "offset":
            # array("q") of them takes twice as long.
            column = pyarrow.py_buffer(struct.pack(f"={count}q", *columns.offsets()))
        case "timestamp" if columns.timestamps_at < 0:
            column = pyarrow.py_buffer(array("q", [columns.batch.timestamp]) * count)
        case "timestamp":
            column = body.slice(columns.timestamps_at, 8 * count)
        case "tombstone" if columns.tombstones_at < 0:
            column = pyarrow.py_buffer(bytes((count + 7) // 8))
        case "tombstone":
            column = body.slice(columns.tombstones_at, (count + 7) // 8)
        case _:
            return _nulls(name, count)
    return pyarrow.Array.from_buffers(TYPES[name], count, [None, column])


@lru_cache(64)
def _nulls(name: str, count: int) -> pyarrow.Array:
    """Batches of a producer are alike, and arrays never change: those of absent columns are made once."""
    return pyarrow.nulls(count, TYPES[name])


@cache
def _numbers() -> pyarrow.Array:
    """0, 1, 2, …: the offsets of a batch are these and a base. To add them takes 1 ns each, to build them 40."""
    return pyarrow.array(range(_NUMBERS_MAX), pyarrow.int64())
