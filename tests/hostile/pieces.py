"""What attacks are made of, whatever the door: sizes around a limit, names, JSON that hurts, and patience."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Final

from tests.hostile.siege import Step

# As JSON writes half of a surrogate pair: text that cannot be encoded.
SURROGATE: Final = rb"\ud800"
NUMBERS: Final = (
    b"-1", b"0", b"00", b"+1", b"1e3", b"0x10", b"nan", b"inf", b"\xd9\xa1", b"4294967296", b"9223372036854775808",
    b"18446744073709551616", b"9" * 25, b"9" * 3000,
)  # fmt: skip


def around(limit: int, source: random.Random) -> int:
    """A size at a limit, or just beyond it."""
    return limit + source.choice((-1, 0, 1, 2))


def name(source: random.Random, size: int = 12) -> bytes:
    return source.randbytes(-(-size // 2)).hex()[:size].encode()


def dribble(data: bytes, seconds: float = 0.01) -> Iterator[Step]:
    """One byte at a time."""
    for at in range(len(data)):
        yield data[at : at + 1]
        yield seconds


def in_pieces(data: bytes, source: random.Random, size: int = 64 << 10) -> Iterator[Step]:
    """Cut anywhere."""
    at = 0
    while at < len(data):
        count = source.randint(1, size)
        yield data[at : at + count]
        at += count


def deep_json(depth: int = 100_000) -> bytes:
    """It recurses."""
    return b'{"name":' + b"[" * depth + b"]" * depth + b"}"


def wide_json(count: int = 20_000) -> bytes:
    return json.dumps({f"key{number}": number for number in range(count)}).encode()
