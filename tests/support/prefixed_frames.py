"""Frames of the prefixed protocols, whole and cut."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from types import FrameType
from typing import Any, Final

import pytest
from hypothesis import strategies as st

from penstock.errors import PeerError
from penstock.wire.cursus import (
    Record,
    batch,
)
from penstock.wire.prefixed import PrefixedReader
from penstock.wire.qb import QbMessage, Style

U32_MAX: Final = (1 << 32) - 1
U64_MAX: Final = (1 << 64) - 1
U64: Final = st.integers(0, U64_MAX)
BYTES: Final = st.binary(max_size=40)
PLACES: Final = st.lists(st.integers(0, 1 << 16), max_size=20)
STYLES: Final = [Style(counts, first) for counts in (True, False) for first in (False, True)]
Frame = QbMessage | bytes


def feed(reader: PrefixedReader, pieces: Iterable[bytes]) -> list[Frame]:
    return [found for piece in pieces for found in reader.feed(piece)]


def one_by_one(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def named_style(style: Style) -> str:
    counts = "counts itself" if style.counts_itself else "does not count itself"
    return f"{counts}, lengths first" if style.lengths_first else counts


each_style = pytest.mark.parametrize("style", STYLES, ids=named_style)


def written(given: QbMessage, style: Style) -> bytes:
    """As `message` writes it, but of any kind, and by another way."""
    counts = [struct.pack(">I", len(part)) for part in (given.properties, given.body)]
    if style.lengths_first:
        parts = [*counts, given.properties, given.body]
    else:
        parts = [counts[0], given.properties, counts[1], given.body]
    behind = struct.pack(">IQQ", given.kind, given.sequence, given.timestamp_ms) + b"".join(parts)
    return struct.pack(">I", len(behind) + (4 if style.counts_itself else 0)) + behind


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that `call` held at once, whether or not it refused."""
    tracemalloc.start()
    try:
        with suppress(PeerError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def methods_called(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Every method of bytes that is called, and how many bytes it is called on: work that no clock must measure."""
    seen: list[tuple[str, int]] = []

    def see(_frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and isinstance(getattr(called, "__self__", None), bytes):
            seen.append((called.__name__, len(called.__self__)))

    sys.setprofile(see)
    try:
        with suppress(PeerError):
            call()
    finally:
        sys.setprofile(None)
    return seen


BATCH: Final = batch(b"orders", 1, [Record(7, b"value", b"key"), Record(8, b"", sequence=3)], "all")
MIB: Final = 1 << 20
