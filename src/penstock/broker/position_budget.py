"""One budget in bytes for the positions of all groups, in all partitions, with all their pending messages.

A group has a position in each partition that it reads, so their number is groups times partitions. When the budget is
used up, no group and no partition can be created that needs more. While more than half of it is used, a position with
many pending messages takes no more of them until some are done. A position with few always does, so that a group that
acknowledges nothing does not block the others.
"""

from __future__ import annotations

from typing import Final

from penstock.health import Usage

# Memory, as measured: of a position with its record in the state topic; of the name of its group, in keys; and of a
# pending message with a lot of its own.
POSITION_BYTES: Final = 3000
NAME_COPIES: Final = 2
PENDING_BYTES: Final = 500

# How many messages of a position may be pending while the budget is short.
PENDING_FEW: Final = 16


class PositionBudget:
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
        assert self._used >= 0, "more was given back than taken"
