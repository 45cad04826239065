"""How much a test tries: in `make check` a sample of it."""

from __future__ import annotations

# `tests/check.py` sets others. Its stride is prime: so a sample of bytes has every alignment.
stride = 1
divisor = 1


def sampled(numbers: range) -> range:
    return numbers[::stride]


def examples(count: int) -> int:
    """Return how many seeds to try, or examples of a state machine: those of others are set in `tests/check.py`."""
    return max(1, count // divisor)


def covered(found: object) -> bool:
    """Return whether a test met the cases it is about. A sample may miss some."""
    return bool(found) or stride > 1
