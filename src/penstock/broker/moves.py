"""Which messages of a partition were moved elsewhere, and which of those have not arrived. No I/O.

A message counts as moved when that is decided: a decision has a number, and names its messages by their targets. It is
finished for a target when its messages have arrived there. Decisions for one target are finished in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.broker.position import PartitionId
from penstock.broker.ranges import Ranges
from penstock.errors import Overloaded

# Finished decisions that are kept one by one before they are folded. With many ranges to write, it takes more of them.
_MOVES_MAX: Final = 64
_RANGES_PER_MOVE: Final = 64
# A limit on the size of the folded record, about 10 MiB.
RANGES_MAX: Final = 400_000

# Targets that do not exist: of messages that were dropped, and of those that something else was done with.
DROPPED: Final[PartitionId] = (-1, 0)
ELSEWHERE: Final[PartitionId] = (-1, 1)


class Moves:
    def __init__(self, folded: Mapping[str, Any] | None) -> None:
        """`folded`: the record of earlier decisions, as `fold` has made it."""
        folded = folded or {"number": 0, "floor": 0, "ranges": []}
        # All messages below the floor were moved or are gone, and these above it.
        self.floor: int = folded["floor"]
        self._moved = Ranges((first, last) for first, last in folded["ranges"])
        # Those of them that were dropped.
        self._dropped = Ranges((first, last) for first, last in folded.get("dropped", ()))
        # The number of the last decision, and the decisions that are not folded yet.
        self.number: int = folded["number"]
        self._unfolded: list[int] = []
        # By target, the number and the offsets of each decision that is not finished, in order.
        self.unfinished: dict[PartitionId, list[tuple[int, list[int]]]] = {}
        # The target of each message that is decided and has not arrived.
        self.targets: dict[int, PartitionId] = {}

    def is_moved(self, offset: int) -> bool:
        """Return whether a message has arrived, or will."""
        return offset < self.floor or offset in self._moved

    def has_arrived(self, offset: int) -> bool:
        return self.is_moved(offset) and offset not in self.targets

    def is_dropped(self, offset: int) -> bool:
        return offset in self._dropped

    @property
    def needed_from(self) -> int:
        """The lowest offset that may have to be read again."""
        return min(self.floor, *self.targets, self.floor)

    @property
    def range_count(self) -> int:
        """The number of separate ranges of offsets; memory and records grow with it."""
        return len(self._moved) + len(self._dropped)

    def check_ranges(self, topic: str) -> None:
        """Raise if messages were moved from too many separate ranges."""
        if self.range_count > RANGES_MAX:
            raise Overloaded(
                f"messages of {topic} were moved from {self.range_count} separate ranges of offsets, the limit is"
                f" {RANGES_MAX}: move the oldest ones first"
            )

    def skip(self, first: int, last: int, start: int) -> None:
        """Count offsets as moved, where there is nothing to move. `start`: the first offset that is still stored."""
        self._moved.add(first, last)
        self._raise_floor(start)

    def begin(self, number: int, targets: Mapping[PartitionId, list[int]], start: int) -> None:
        """Add a decision."""
        self.number = max(self.number, number)
        self._unfolded.append(number)
        for target, offsets in targets.items():
            self.unfinished.setdefault(target, []).append((number, offsets))
            for offset in offsets:
                self.targets[offset] = target
                self._moved.add(offset, offset)
                if target == DROPPED:
                    self._dropped.add(offset, offset)
        self._raise_floor(start)

    def finish_first(self, target: PartitionId) -> None:
        """Finish the first decision for a target."""
        _, offsets = self.unfinished[target].pop(0)
        for offset in offsets:
            self.targets.pop(offset, None)
        if not self.unfinished[target]:
            del self.unfinished[target]

    def finished(self) -> list[int]:
        """Return the decisions to fold, if there are enough of them."""
        unfinished = self._unfinished_numbers()
        finished = [number for number in self._unfolded if number not in unfinished]
        return finished if len(finished) >= _MOVES_MAX + len(self._moved) // _RANGES_PER_MOVE else []

    def fold(self) -> dict[str, Any]:
        """Return one record in place of all finished decisions. Call `folded` when it is stored."""
        return {
            "number": self.number,
            "floor": self.floor,
            "ranges": list(self._moved),
            "dropped": list(self._dropped),
        }

    def folded(self) -> None:
        self._unfolded = sorted(self._unfinished_numbers())

    def _unfinished_numbers(self) -> set[int]:
        return {number for decisions in self.unfinished.values() for number, _ in decisions}

    def _raise_floor(self, start: int) -> None:
        self.floor = self._moved.pop_below(max(self.floor, start))
        self._dropped.drop_below(start)
