"""Convert a batch to an Arrow record batch that shares its bytes, and Arrow columns to a batch."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final

import pyarrow
from pyarrow import compute

from penstock.errors import CorruptBatch
from penstock.model.batch import (
    ASKS,
    BINARY,
    BLANK_HEADER,
    PLAIN_BYTES_MAX,
    TIMESTAMPS,
    TOMBSTONES,
    Batch,
    Buffer,
    Columns,
    Compression,
    append_padded,
    seal,
    too_large,
)

_NUMBERS_MAX: Final = 1 << 16

# Absent columns have a type too, so that all record batches of a log have the same schema.
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
    """Return the named columns of a batch. Uncompressed columns are checked and not copied."""
    columns = Columns(batch)
    binary = columns.binary
    body = pyarrow.py_buffer(columns.body)
    arrays = []
    try:
        for name in names:
            arrays.append(_binary(columns, body, name) if name in binary else _other(columns, body, name))
    except pyarrow.ArrowInvalid as error:
        raise CorruptBatch(f"invalid columns: {error}") from error
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema(tuple(names)))


def take(rows: pyarrow.RecordBatch, indices: Sequence[int]) -> pyarrow.RecordBatch:
    """Return a copy of some of the rows."""
    return rows.take(pyarrow.array(indices, pyarrow.int64()))


def encode(
    rows: pyarrow.RecordBatch,
    *,
    timestamp: int,
    compression: Compression = Compression.NONE,
    asks: bool = False,
) -> Batch:
    """Return a batch of these columns, each of its type in `TYPES`; only `value` is required, and must have no nulls.

    Empty columns (only nulls, no tombstone) are omitted. The buffers are used unchanged: about 10 ns per message,
    mostly to copy it.
    """
    count = rows.num_rows
    if not count:
        raise ValueError("a batch needs at least one message")
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    if columns["value"].null_count:
        raise ValueError("a value is null: use an empty value for a tombstone")
    flags = ASKS if asks else 0
    parts: list[Buffer] = [BLANK_HEADER]
    if (times := columns.get("timestamp")) is not None:
        flags |= TIMESTAMPS
        parts.append(memoryview(times.buffers()[1])[8 * times.offset : 8 * (times.offset + count)])
    if (tombstones := columns.get("tombstone")) is not None and tombstones.true_count:
        flags |= TOMBSTONES
        append_padded(parts, _bitmap(tombstones))
    for name, (present, nullable) in BINARY.items():
        column = columns.get(name)
        if column is None or column.null_count == count:
            continue
        flags |= present
        if column.null_count:
            flags |= nullable
            append_padded(parts, _bitmap(compute.is_valid(column)))
            # Bytes under a null may be anything.
            column = compute.fill_null(column, b"")
        _append_binary(parts, column)
    return seal(parts, flags, count, timestamp, compression, span=count)


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
            # array("q") would take twice as long.
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
    """Return an array of nulls, cached because arrays are immutable and batches often have the same size."""
    return pyarrow.nulls(count, TYPES[name])


@cache
def _numbers() -> pyarrow.Array:
    """Return 0, 1, 2, …, to which the base offset of a batch is added: 1 ns each, instead of 40 to build them."""
    return pyarrow.array(range(_NUMBERS_MAX), pyarrow.int64())


def _append_binary(parts: list[Buffer], column: pyarrow.Array) -> None:
    _, offsets, data = column.buffers()
    begin = column.offset
    numbers = memoryview(offsets)[4 * begin : 4 * (begin + len(column) + 1)].cast("i")
    first, last = numbers[0], numbers[-1]
    if last - first > PLAIN_BYTES_MAX:
        raise too_large(last - first)
    if first:
        # The column is a slice of a longer array.
        whole = pyarrow.Array.from_buffers(pyarrow.int32(), len(numbers), [None, offsets], offset=begin)
        shifted = compute.subtract(whole, pyarrow.scalar(first, pyarrow.int32()))
        numbers = memoryview(shifted.buffers()[1])[: 4 * len(numbers)].cast("i")
    append_padded(parts, numbers)
    if data is not None:
        append_padded(parts, memoryview(data)[first:last])


def _bitmap(bits: pyarrow.Array) -> bytes:
    """Return the bits aligned to the first one, padded with zeros."""
    if bits.offset:
        bits = pyarrow.concat_arrays([bits.slice(0, 0), bits])
    count = len(bits)
    data = bytearray(memoryview(bits.buffers()[1])[: (count + 7) // 8])
    if count % 8:
        data[-1] &= (1 << count % 8) - 1
    return bytes(data)
