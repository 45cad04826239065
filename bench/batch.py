"""Encode and decode, against the primitives that they cannot do without."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Final

import lz4.block
import pyarrow
import zstandard
from crc32c import crc32c

from bench.data import MESSAGES, STORED, TIMESTAMP, make_values, store
from bench.measure import Bench, Line, repeat
from penstock.model import arrow
from penstock.model.batch import HEADER_BYTES, Batch, Compression, encode, parse

_TARGET: Final = 1.5
_VALUES: Final = make_values()
# Where the offsets and the bytes of the value column are in a batch that has no other.
_OFFSETS_BYTES: Final = 4 * (MESSAGES + 1)
_VALUES_AT: Final = HEADER_BYTES + (_OFFSETS_BYTES + 7) // 8 * 8
# As `Log.read` gives it: its header is parsed.
_BATCH: Final = parse(STORED)
_PACKED_AT: Final = HEADER_BYTES + 8
_PLAIN_BYTES: Final = len(STORED) - HEADER_BYTES
_SCHEMA: Final = pyarrow.schema([("value", pyarrow.binary())])
_SCHEMA_ALL: Final = arrow.schema()


def measure(bench: Bench) -> Iterator[Line]:
    yield _line(bench, "encode a list", _encode, "accumulate, pack, join, crc32c", _bare_encode, _TARGET)
    yield _line(bench, "decode to a list", _decode, "crc32c, offsets, slices", _bare_decode, _TARGET)
    yield _line(bench, "decode to Arrow, values", _to_arrow, "crc32c, from_buffers, RecordBatch", _bare_arrow, _TARGET)
    yield _line(bench, "decode to Arrow, all columns", _all_to_arrow, "the same and those columns", _bare_all)
    for compression in (Compression.LZ4, Compression.ZSTD):
        name = compression.name.lower()
        packed = store(compression)
        ours, bare = partial(_encode, compression), partial(_bare_encode, compression)
        yield _line(bench, f"encode a list, {name}", ours, f"the same and {name}", bare)
        ours, bare = partial(_decode, parse(packed)), partial(_bare_decode, packed, compression)
        yield _line(bench, f"decode to a list, {name}", ours, f"the same and {name}", bare)


def _line(
    bench: Bench,
    what: str,
    penstock: Callable[[], object],
    against: str,
    limit: Callable[[], object],
    target: float | None = None,
) -> Line:
    # Rounds of a millisecond or two: many of them are not interrupted at all.
    times = bench.choose(30, 2)
    ours, bare = bench.processor(what, repeat(penstock, times), repeat(limit, times), bench.choose(400, 3))
    millions = times * MESSAGES / 1e6
    return Line(
        section="batch",
        what=what,
        against=against,
        unit="M msg/s",
        penstock=millions / ours,
        limit=millions / bare,
        ratio_of="time",
        target=target,
    )


def _encode(compression: Compression = Compression.NONE) -> object:
    return encode(_VALUES, timestamp=TIMESTAMP, compression=compression)


def _bare_encode(compression: Compression = Compression.NONE) -> object:
    offsets = tuple(accumulate(map(len, _VALUES), initial=0))
    columns = b"".join([struct.pack(f"<{len(offsets)}i", *offsets), *_VALUES])
    if compression is Compression.LZ4:
        columns = lz4.block.compress(columns, store_size=False)
    elif compression is Compression.ZSTD:
        columns = zstandard.ZstdCompressor().compress(columns)
    return columns, crc32c(columns)


def _decode(batch: Batch = _BATCH) -> object:
    return batch.columns().values()


def _bare_decode(stored: bytes = STORED, compression: Compression = Compression.NONE) -> object:
    crc32c(stored)
    if compression is Compression.NONE:
        offsets = struct.unpack_from(f"<{MESSAGES + 1}i", stored, HEADER_BYTES)
        data = stored[_VALUES_AT:]
    else:
        packed = memoryview(stored)[_PACKED_AT : _PACKED_AT + int.from_bytes(stored[HEADER_BYTES:_PACKED_AT], "little")]
        if compression is Compression.LZ4:
            columns = lz4.block.decompress(packed, uncompressed_size=_PLAIN_BYTES)
        else:
            columns = zstandard.ZstdDecompressor().decompress(packed)
        offsets = struct.unpack_from(f"<{MESSAGES + 1}i", columns)
        data = columns[_VALUES_AT - HEADER_BYTES :]
    # pairwise takes a fifth longer.
    return [data[start:stop] for start, stop in zip(offsets, offsets[1:], strict=False)]  # noqa: RUF007


def _to_arrow() -> object:
    return arrow.decode(_BATCH, ("value",))


def _all_to_arrow() -> object:
    return arrow.decode(_BATCH)


def _bare_arrow() -> object:
    return pyarrow.RecordBatch.from_arrays([_bare_values()], schema=_SCHEMA)


def _bare_all() -> object:
    offsets = array("q", range(MESSAGES))
    timestamps = array("q", [TIMESTAMP]) * MESSAGES
    made = {"offset": offsets, "timestamp": timestamps, "tombstone": bytes(MESSAGES // 8 + 1)}
    columns = []
    for name, kind in arrow.TYPES.items():
        if name == "value":
            columns.append(_bare_values())
        elif name in made:
            columns.append(pyarrow.Array.from_buffers(kind, MESSAGES, [None, pyarrow.py_buffer(made[name])]))
        else:
            columns.append(pyarrow.nulls(MESSAGES, kind))
    return pyarrow.RecordBatch.from_arrays(columns, schema=_SCHEMA_ALL)


def _bare_values() -> Any:
    crc32c(STORED)
    stored = pyarrow.py_buffer(STORED)
    buffers = [None, stored.slice(HEADER_BYTES, _OFFSETS_BYTES), stored.slice(_VALUES_AT)]
    return pyarrow.Array.from_buffers(_SCHEMA.field(0).type, MESSAGES, buffers)
