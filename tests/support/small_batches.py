"""Small batches with every column, and the stamps of a broker."""

from __future__ import annotations

from penstock.model.batch import (
    Compression,
    parse,
)
from tests.support.batches import (
    Lists,
    stored,
)

# What a producer sends, small enough to try every bit and every length of, and worth packing.
SMALL: Lists = {
    "values": [b"spam and eggs, " * 10, b"", b"spam and eggs, " * 10],
    "keys": [b"one", None, b""],
    "timestamps": [-1, 0, 1],
    "tombstones": [False, True, False],
    "timestamp": 7,
    "producer": 3,
    "sequence": 4,
}


def small(compression: Compression) -> bytearray:
    data = stored(SMALL, compression)
    assert parse(data).compression is compression
    return data
