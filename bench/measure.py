"""How a figure is come by.

The rounds of both sides alternate, A B A B …, so that what else runs on the machine meets both; they are short, so
that many meet nothing. A side's figure is its best round where only the processor is at work, because noise there only
ever adds. Where the disk is, which is sometimes lucky, it is the round that a tenth of them beat: the median would
tell more of a busy machine than of the code, since whoever wakes from a sync waits for a processor first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

RatioOf = Literal["speed", "count", "time", "memory"]
MORE_IS_BETTER: Final = ("speed", "count")

# One round: seconds that it took, what came before and after them left out.
Round = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table.

    `penstock` and `limit`, the machine's, a peer's or a promised one, are in `unit`: a speed (…/s), a count, a time or
    memory. The ratio is of their speeds or counts, and the target is to reach at least that much, or of their times or
    memory, and the target is to take at most that much. A target of the figure is for `penstock` itself.
    """

    section: str
    what: str
    against: str
    unit: str
    penstock: float
    limit: float
    ratio_of: RatioOf
    target: float | None = None
    target_of: Literal["ratio", "figure"] = "ratio"

    @property
    def ratio(self) -> float:
        ratio = self.penstock / self.limit
        return ratio if self.unit.endswith("/s") == (self.ratio_of == "speed") else 1 / ratio

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        reached = self.ratio if self.target_of == "ratio" else self.penstock
        return reached >= self.target if self.ratio_of in MORE_IS_BETTER else reached <= self.target


@dataclass(frozen=True, slots=True)
class Bench:
    """What a section needs to know of this run."""

    directory: Path
    quick: bool
    progress: Callable[[str], None]
    note: Callable[[str], None]  # what is to be read below the table

    def choose(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def processor(self, what: str, penstock: Round, limit: Round, rounds: int) -> tuple[float, float]:
        """Seconds of the best round of each."""
        times = self._alternate(what, penstock, limit, rounds)
        return min(ours for ours, _ in times), min(theirs for _, theirs in times)

    def disk(self, what: str, penstock: Round, limit: Round, rounds: int) -> tuple[float, float]:
        """Seconds of the round that a tenth of the rounds beat, of each."""
        times = self._alternate(what, penstock, limit, rounds)
        return best_tenth([ours for ours, _ in times]), best_tenth([theirs for _, theirs in times])

    def _alternate(self, what: str, penstock: Round, limit: Round, rounds: int) -> list[tuple[float, float]]:
        penstock()  # the first of each finds cold caches
        limit()
        times = []
        for _ in range(rounds):
            self.progress(what)
            times.append((penstock(), limit()))
        return times


def best_tenth(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def repeat(work: Callable[[], object], times: int = 1) -> Round:
    """A round that does `work` so many times."""

    def run() -> float:
        begun = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - begun

    return run
