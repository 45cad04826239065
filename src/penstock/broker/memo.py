"""A cache of limited size in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from penstock.health import Usage

T = TypeVar("T")

# The entry of a dict and the objects in it, without their contents.
ENTRY_BYTES: Final = 200


class Memo(Generic[T]):
    """It is cleared when it is full, so a flood of new keys costs no more than without a cache."""

    __slots__ = ("_bytes_max", "_entries", "_size_of", "_used", "get")

    def __init__(self, bytes_max: int, size_of: Callable[[T], int] = lambda _: 0) -> None:
        """`size_of` returns the bytes of an answer, without its key."""
        self._bytes_max = bytes_max
        self._size_of = size_of
        self._used = 0
        self._entries: dict[bytes, T] = {}
        # Called for every message, so without a method of our own in between.
        self.get = self._entries.get

    def put(self, key: bytes, answer: T) -> None:
        size = ENTRY_BYTES + len(key) + self._size_of(answer)
        if self._used + size > self._bytes_max:
            self.clear()
        self._entries[key] = answer
        self._used += size

    def forget(self, key: bytes) -> None:
        answer = self._entries.pop(key, None)
        if answer is not None:
            self._used -= ENTRY_BYTES + len(key) + self._size_of(answer)

    def clear(self) -> None:
        self._entries.clear()
        self._used = 0

    @property
    def usage(self) -> Usage:
        return Usage(self._used, self._bytes_max)
