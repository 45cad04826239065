"""Batches to test with: well-made ones, ones that a hostile producer made, and what reading them costs."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, product
from random import Random
from typing import Any, Final

import lz4.block
import zstandard
from crc32c import crc32c
from hypothesis import strategies as st

from penstock.errors import BatchTooLarge, CorruptBatch, UnsupportedBatch
from penstock.model.batch import HEADER_BYTES, PACKING_RATIO_MAX, Columns, Compression, encode

# The arguments of `encode` that make its columns.
Lists = dict[str, Any]
BINARY: Final = ("keys", "subjects", "replies", "headers")

COMPRESSIONS: Final = list(Compression)
REFUSALS: Final = (CorruptBatch, UnsupportedBatch, BatchTooLarge)

TIMESTAMPS: Final = 1 << 2
DELTAS: Final = 1 << 3
TOMBSTONES: Final = 1 << 4
KEYS: Final = 1 << 5
NULLABLE_KEYS: Final = 1 << 9
EVERY_COLUMN: Final = (1 << 13) - (1 << 2)

I64: Final = st.integers(-(1 << 63), (1 << 63) - 1)
U64: Final = st.integers(0, (1 << 64) - 1)
U32_MAX: Final = (1 << 32) - 1
BOOLEANS: Final = st.booleans()


# ---- well made


def every_combination(count: int, repeat: int = 20) -> Iterator[Lists]:
    """Columns that are there or not, and where they may be: with and without None among them."""
    values = [b"value %d, " % i * repeat for i in range(count)]
    binary = [_columns_of(name, count) for name in BINARY]
    others: list[list[Lists]] = [
        [{}, {"timestamps": [i * i - 5 for i in range(count)]}],
        [{}, {"tombstones": [i % 3 == 0 for i in range(count)]}],
        [{}, {"deltas": [3 * i + 1 for i in range(count)], "span": 3 * count}],
    ]
    for parts in product(*binary, *others):
        lists: Lists = {"values": values, "timestamp": 1_700_000_000_000_000}
        for part in parts:
            lists |= part
        yield lists


def _columns_of(name: str, count: int) -> list[Lists]:
    whole = [b"" if i % 4 == 0 else b"%s %d" % (name.encode(), i) for i in range(count)]
    gappy = [None if i % 3 == 0 else item for i, item in enumerate(whole)]
    return [{}, {name: whole}, {name: gappy}]


_ITEM: Final = st.binary(max_size=8) | st.sampled_from([b"packs well " * 20, bytes(300)])
_ITEM_OR_NONE: Final = st.none() | _ITEM
_GAP: Final = st.integers(0, 3) | st.integers(0, 1 << 27)


@st.composite
def lists_of_columns(
    draw: st.DrawFn, times: st.SearchStrategy[int] = I64, holes: st.SearchStrategy[bool] = BOOLEANS
) -> Lists:
    # Whole rows first and then the columns to keep of them, so that no strategy depends on the count.
    binary = st.tuples(_ITEM_OR_NONE, _ITEM_OR_NONE, _ITEM_OR_NONE, _ITEM_OR_NONE)
    rows = draw(st.lists(st.tuples(_ITEM, times, BOOLEANS, _GAP, binary), min_size=1, max_size=10))
    lists: Lists = {"values": [row[0] for row in rows], "timestamp": draw(times)}
    if draw(BOOLEANS):
        lists["timestamps"] = [row[1] for row in rows]
    if draw(BOOLEANS):
        lists["tombstones"] = [row[2] for row in rows]
    if draw(holes):
        *deltas, span = accumulate((row[3] + 1 for row in rows), initial=draw(_GAP))
        lists |= {"deltas": deltas, "span": span}
    for name, column in zip(BINARY, zip(*(row[4] for row in rows), strict=True), strict=True):
        match draw(st.sampled_from(["absent", "whole", "gappy"])):
            case "whole":
                lists[name] = [item or b"" for item in column]
            case "gappy":
                lists[name] = list(column)
    return lists


def expected(lists: Lists) -> Lists:
    """What `read` gives for a batch of these lists."""
    return {
        "values": lists["values"],
        "keys": lists.get("keys"),
        "subjects": lists.get("subjects"),
        "replies": lists.get("replies"),
        "headers": lists.get("headers"),
        "timestamps": lists.get("timestamps") or [lists["timestamp"]] * len(lists["values"]),
        "tombstones": lists.get("tombstones"),
        "deltas": lists.get("deltas"),
    }


def read(columns: Columns) -> Lists:
    deltas = columns.deltas()
    return {
        "values": columns.values(),
        "keys": columns.keys(),
        "subjects": columns.subjects(),
        "replies": columns.replies(),
        "headers": columns.headers(),
        "timestamps": list(columns.timestamps()),
        "tombstones": columns.tombstones(),
        "deltas": None if deltas is None else list(deltas),
    }


COLUMN_READERS: Final[Sequence[Callable[[Columns], object]]] = (
    Columns.values,
    Columns.keys,
    Columns.subjects,
    Columns.replies,
    Columns.headers,
    Columns.timestamps,
    Columns.tombstones,
    Columns.deltas,
    Columns.offsets,
    Columns.check,
)


def stored(lists: Lists, compression: Compression = Compression.NONE, base_offset: int = 1000) -> bytearray:
    """The bytes of a batch of these lists as a log holds them."""
    batch = encode(**lists, compression=compression)
    batch.stamp(base_offset, append_time=base_offset + 1, durable_bytes=base_offset % 1000)
    assert isinstance(batch.data, bytearray)
    return batch.data


# ---- made by someone hostile: wrong, under checksums that are right


def sign(data: bytearray) -> bytearray:
    """Make both checksums right, the header's over the other."""
    struct.pack_into("<I", data, 56, crc32c(memoryview(data)[60:]))
    struct.pack_into("<I", data, 0, crc32c(memoryview(data)[4:96]))
    return data


def forge(
    body: bytes, *, count: int = 1, flags: int = 0, plain_length: int | None = None, span: int | None = None
) -> bytes:
    """A signed batch with this behind its header and, unless told otherwise, a header that fits to it."""
    data = bytearray(HEADER_BYTES) + body
    struct.pack_into("<I", data, 4, len(data) - 8)
    struct.pack_into("<I", data, 16, count if span is None else span)
    plain_length = len(body) if plain_length is None else plain_length
    struct.pack_into("<IHHI", data, 60, count, 1, flags, plain_length)
    return bytes(sign(data))


def packed_body(packed: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(packed) if length is None else length) + padded(packed)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def i32s(*numbers: int) -> bytes:
    return padded(struct.pack(f"<{len(numbers)}i", *numbers))


def pack(plain: bytes, compression: Compression) -> bytes:
    if compression is Compression.LZ4:
        return bytes(lz4.block.compress(plain, store_size=False))
    return zstandard.ZstdCompressor().compress(plain)


_WORDS: Final = st.lists(st.sampled_from([0, 0, 0, 1, 2, 8, 100]) | st.integers(-(1 << 31), (1 << 31) - 1), max_size=40)
_COUNT: Final = st.integers(0, 10) | st.integers(0, U32_MAX)
_FLAGS: Final = st.integers(0, (1 << 13) - 1) | st.integers(0, (1 << 16) - 1)


@st.composite
def made_up(draw: st.DrawFn) -> bytes:
    """Any columns at all behind a header that nearly fits to them."""
    return _packed_if_flagged(i32s(*draw(_WORDS)), draw(_COUNT), draw(_FLAGS))


_GOOD: Final = [bytes(encode(**lists).data) for count in (1, 3, 9) for lists in every_combination(count, repeat=1)]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good batch, changed in a few places."""
    data = bytearray(draw(st.sampled_from(_GOOD)))
    _mutate(draw, data, [60, 66])
    count, _, flags = struct.unpack_from("<IHH", data, 60)
    span = struct.unpack_from("<I", data, 16)[0] if flags & DELTAS else count
    resize = draw(st.sampled_from([0, 0, 0, 0, 8, -8]))
    body = bytes(data[HEADER_BYTES : len(data) + min(resize, 0)]) + bytes(max(resize, 0))
    flags = flags & ~3 | draw(st.sampled_from(COMPRESSIONS))
    data = bytearray(_packed_if_flagged(body, count, flags, span))
    if draw(st.booleans()):
        _mutate(draw, data, [4, 16, 24, 60, 64, 66, 68])
    return bytes(sign(data))


# Where, how wide, and what is kept of the number that is there with what is added to it.
_CHANGE: Final = st.tuples(
    st.integers(0, 1 << 16),
    st.sampled_from(["<B", "<H", "<I"]),
    st.tuples(st.just(0), st.sampled_from([0, 1, 7, 8, 9, 1 << 15, (1 << 31) - 1, 1 << 31, U32_MAX]))
    | st.tuples(st.just(1), st.integers(-9, 9)),
)
_CHANGES: Final = st.lists(_CHANGE, min_size=1, max_size=3)


def _mutate(draw: st.DrawFn, data: bytearray, header_fields: list[int]) -> None:
    # A field of the header is as likely as ten words of the columns.
    places = header_fields * 10 + list(range(HEADER_BYTES, len(data), 4))
    for where, width, (keep, add) in draw(_CHANGES):
        place = places[where % len(places)]
        old = struct.unpack_from(width, data, place)[0]
        limit = (1 << 8 * struct.calcsize(width)) - 1
        struct.pack_into(width, data, place, (keep * old + add) & limit)


def _packed_if_flagged(body: bytes, count: int, flags: int, span: int | None = None) -> bytes:
    if flags & 3 in (Compression.LZ4, Compression.ZSTD):
        packed = pack(body, Compression(flags & 3))
        return forge(packed_body(packed), count=count, flags=flags, plain_length=len(body), span=span)
    return forge(body, count=count, flags=flags, span=span)


# The columns of one message.
_ONE: Final = i32s(0, 8) + b"12345678"
_MIB: Final = 1 << 20


def _zstd_frame(content_bytes: int) -> bytes:
    """A frame that says how much it holds, and holds nothing."""
    magic, eight_byte_size_and_no_window, empty_last_block = 0xFD2FB528, 0b1110_0000, b"\1\0\0"
    return struct.pack("<IBQ", magic, eight_byte_size_and_no_window, content_bytes) + empty_last_block


def _claims(compression: Compression, packed: bytes, plain_length: int) -> bytes:
    return forge(packed_body(packed), flags=compression, plain_length=plain_length)


def _lz4(plain: bytes, *, count: int = 1, flags: int = 0, plain_length: int | None = None) -> bytes:
    body = packed_body(pack(plain, Compression.LZ4))
    plain_length = len(plain) if plain_length is None else plain_length
    return forge(body, count=count, flags=flags | Compression.LZ4, plain_length=plain_length)


def _packed_length(compression: Compression, excess: int) -> bytes:
    packed = pack(_ONE, compression)
    return forge(packed_body(packed, len(packed) + excess), flags=compression, plain_length=len(_ONE))


def _wave(count: int) -> bytes:
    """Numbers that pack tightly, each too large to be a Python integer that is there already."""
    return (struct.pack("<64I", *range(1000, 1064)) * (count // 64 + 1))[: 4 * count]


LZ4, ZSTD = Compression.LZ4, Compression.ZSTD
_WAVE_COUNT: Final = 1 << 17
_NOISE_BYTES: Final = 1 << 14

# Each is a lie about a size or a place; none may be believed before it is checked.
BOMBS: Final[dict[str, bytes]] = {
    "huge count": forge(_ONE, count=U32_MAX),
    "huge count, every column": forge(_ONE, count=U32_MAX, flags=EVERY_COLUMN),
    "huge count, packed": _lz4(_ONE, count=U32_MAX, flags=EVERY_COLUMN),
    "huge plain length": forge(_ONE, plain_length=U32_MAX),
    "huge plain length, lz4": _claims(LZ4, pack(_ONE, LZ4), U32_MAX),
    "huge plain length, zstd": _claims(ZSTD, pack(_ONE, ZSTD), U32_MAX),
    "plain length over the ratio, lz4": _claims(LZ4, b"\0", PACKING_RATIO_MAX + 1),
    "plain length at the ratio, lz4": _claims(LZ4, bytes(1000), PACKING_RATIO_MAX * 1000),
    "plain length over what is there, lz4": _lz4(_ONE, plain_length=len(_ONE) + 8),
    "plain length 0, lz4 that begins with a size": _claims(LZ4, struct.pack("<I", 1 << 30) + b"\0", 0),
    "plain length 0, zstd": _claims(ZSTD, _zstd_frame(0), 0),
    "zstd frame of a TiB": _claims(ZSTD, _zstd_frame(1 << 40), len(_ONE)),
    "zstd frame of a GiB": _claims(ZSTD, _zstd_frame(1 << 30), len(_ONE)),
    "zstd frame of a GiB, and the header agrees": _claims(ZSTD, _zstd_frame(1 << 30), 1 << 30),
    "zstd frame at the ratio": _claims(ZSTD, _zstd_frame(PACKING_RATIO_MAX * 16), PACKING_RATIO_MAX * 16),
    "zstd frame of no known size": _claims(
        ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(_MIB)), len(_ONE)
    ),
    "zstd of zeros": _claims(ZSTD, pack(bytes(_MIB), ZSTD), _MIB),
    "two zstd frames": _claims(ZSTD, pack(_ONE, ZSTD) * 2, len(_ONE)),
    "lz4 of zeros": _lz4(bytes(_MIB)),
    "lz4 of zeros that claims to be small": _lz4(bytes(_MIB), plain_length=len(_ONE)),
    "packed length past the end, lz4": _packed_length(LZ4, 8),
    "packed length past the end, zstd": _packed_length(ZSTD, 8),
    "packed length huge": forge(packed_body(b"", (1 << 64) - 1), flags=LZ4, plain_length=len(_ONE)),
    "packed length at the sign": forge(packed_body(b"", 1 << 63), flags=ZSTD, plain_length=len(_ONE)),
    "packed length cut short": _packed_length(LZ4, -1),
    "packed and nothing there": forge(b"", flags=LZ4, plain_length=0),
    "unknown compression": forge(packed_body(_ONE), flags=3, plain_length=len(_ONE)),
    "unknown flag": forge(_ONE, flags=1 << 14),
    "no columns": forge(b""),
    "no messages": forge(i32s(0), count=0),
    "first offset not 0": forge(i32s(1, 8) + b"12345678"),
    "first offset negative": forge(i32s(-8, 8) + b"12345678"),
    "last offset negative": forge(i32s(0, -8)),
    "last offset past the end": forge(i32s(0, 16) + b"12345678"),
    "last offset the largest": forge(i32s(0, (1 << 31) - 1) + b"12345678"),
    "last offset short of the end": forge(i32s(0, 8) + bytes(16)),
    "offsets that descend": forge(i32s(0, 6, 2, 8) + b"12345678", count=3),
    "an offset that is negative": forge(i32s(0, -4, 2, 8) + b"12345678", count=3),
    "an offset past the end": forge(i32s(0, 400, 2, 8) + b"12345678", count=3),
    "a key's offset past the end": forge(_ONE + i32s(0, 1 << 30), flags=KEYS),
    "keys' offsets that descend": forge(i32s(0, 0, 0, 0) + i32s(0, 6, 2, 8) + b"12345678", count=3, flags=KEYS),
    "a key column that is not there": forge(_ONE, flags=KEYS),
    "validity that is not there": forge(_ONE + i32s(0, 0), flags=KEYS | NULLABLE_KEYS),
    "timestamps that are not there": forge(_ONE, flags=TIMESTAMPS),
    "tombstones that are not there": forge(_ONE, flags=TOMBSTONES),
    "more offsets than messages, and no deltas": forge(_ONE, span=2),
    "deltas that descend": forge(i32s(1, 0) + i32s(0, 0, 0), count=2, flags=DELTAS),
    "deltas that repeat": forge(i32s(1, 1) + i32s(0, 0, 0), count=2, flags=DELTAS),
    "a delta past the span": forge(i32s(0, 2) + i32s(0, 0, 0), count=2, flags=DELTAS),
    "very many offsets that descend": _lz4(padded(bytes(4) + _wave(_WAVE_COUNT - 1) + bytes(4)), count=_WAVE_COUNT),
    "many offsets that descend, and bytes that do not pack": _lz4(
        bytes(4) + _wave(_NOISE_BYTES - 1) + i32s(_NOISE_BYTES) + Random(0).randbytes(_NOISE_BYTES),
        count=_NOISE_BYTES,
    ),
    "very many deltas that repeat": _lz4(
        padded(_wave(_WAVE_COUNT)) + padded(bytes(4 * (_WAVE_COUNT + 1))), count=_WAVE_COUNT, flags=DELTAS
    ),
}


# ---- what it costs


def bytes_allowed(data: bytes) -> int:
    """What a reader of `data` may allocate at most: so much for each byte, and a little for itself."""
    return 256 * len(data) + (64 << 10)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that `call` held at once, whether or not it refused."""
    tracemalloc.start()
    try:
        with suppress(*REFUSALS):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
