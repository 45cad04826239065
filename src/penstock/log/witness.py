"""Says how far a log once reached, as others know it.

A file that was cut short looks as if it had never been longer. So others bear witness (`store/witnesses.py`). A
witness may be behind and is never ahead, so it can only raise the end of a log.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PartitionId = tuple[int, int]  # the ID of a topic, and a partition


class Witness(NamedTuple):
    """A log was cut short if it has no batch up to `durable`, or neither stored nor reserved offsets below `given`."""

    durable: int = 0
    given: int = 0

    @property
    def end(self) -> int:
        return max(self)


NOBODY: Final = Witness()
