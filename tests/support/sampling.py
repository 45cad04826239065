"""Ranges that a test goes through: each number of them, or in `make check` a sample."""

from __future__ import annotations

# `tests/check.py` sets another one, which is prime: so a sample of bytes has every alignment.
stride = 1


def sampled(numbers: range) -> range:
    return numbers[::stride]


def covered(found: object) -> bool:
    """Return whether a test met the cases it is about. A sample may miss some."""
    return bool(found) or stride > 1
