"""Room for the positions of groups: one budget in bytes for all groups, partitions and pending messages together.

A group has a position in each partition that it reads, so their number is that of groups times that of partitions. When
the room is used up, no group and no partition is made that needs more. While more than half of it is used, a position
with many pending messages takes no more of them until some are done. One with few always does: nobody waits for a group
that acknowledges nothing.
"""

from __future__ import annotations

from typing import Final

from penstock.health import Usage

# In memory, as measured: a position with its record in the state topic, and the name of its group in keys; a pending
# message that has a lot of its own.
POSITION_BYTES: Final = 3000
NAME_COPIES: Final = 2
PENDING_BYTES: Final = 500

# How many messages of a position may be pending while the room is short.
PENDING_FEW: Final = 16


class Room:
    __slots__ = ("_bytes_max", "_used")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._used = 0

    @property
    def usage(self) -> Usage:
        return Usage(self._used, self._bytes_max)

    @property
    def is_short(self) -> bool:
        return self._used > self._bytes_max // 2

    def fits(self, size: int) -> bool:
        return self._used + size <= self._bytes_max

    def take(self, size: int) -> None:
        self._used += size

    def give_back(self, size: int) -> None:
        self._used -= size
        assert self._used >= 0, "what was taken is given back once"
