"""What is wrong with this process right now, which bugs it has survived, and how full its tables are.

A *problem* is a condition that lasts: a failed partition, a full disk, a message that cannot be moved. Whoever finds
it reports it under a name, and clears that name when the condition is over. `/healthz` is ok when there is none.

A *fault* is an unexpected exception: a bug of ours. The seam that catches it limits the damage to one session, reader,
partition or target, logs the traceback, and counts it here, so that it shows in the metrics.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

# Problems are few kinds times few places. A flood of them must not become a problem of its own.
PROBLEMS_MAX: Final = 1000


class Usage(NamedTuple):
    """How much of a limited cache, queue or table is in use; both in the same unit, bytes unless the name says
    otherwise."""

    used: int
    limit: int


class Health:
    def __init__(self) -> None:
        # name -> what is wrong and what to do about it.
        self.problems: dict[str, str] = {}
        # seam -> how many unexpected exceptions it has caught.
        self.faults: Counter[str] = Counter()

    def report(self, name: str, problem: str) -> None:
        """Record a problem, or its new text. It is logged when it is new."""
        if name not in self.problems:
            if len(self.problems) >= PROBLEMS_MAX:
                return
            logger.error("%s: %s", name, problem)
        self.problems[name] = problem

    def clear(self, name: str) -> None:
        """Remove a problem, if there is one of this name."""
        if self.problems.pop(name, None) is not None:
            logger.warning("%s: solved", name)

    def fault(self, seam: str, where: str, error: BaseException) -> None:
        """Count an unexpected exception, and log its traceback."""
        self.faults[seam] += 1
        logger.error("unexpected error in %s: %s", seam, where, exc_info=error)

    async def supervise(self, seam: str, task: Coroutine[Any, Any, None]) -> None:
        """Await a task of its own. An unexpected exception ends it, and not the process."""
        try:
            await task
        except Exception as error:  # noqa: BLE001 - supervises one task
            self.fault(seam, getattr(task, "__qualname__", repr(task)), error)
