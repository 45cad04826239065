"""The health of this process: its current problems, the unexpected exceptions so far, and the usage of its tables.

A *problem* is a lasting condition: a failed partition, a full disk, a message that cannot be moved. The code that
detects it reports it under a name, and clears that name when the condition ends. `/healthz` is ok without problems.

A *fault* is an unexpected exception, that is a bug. The seam that catches it limits the damage to one session, reader,
partition or target, logs the traceback, and counts it here for the metrics.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

# Normally there are few problems. A flood of them must not fill the memory.
PROBLEMS_MAX: Final = 1000


class Usage(NamedTuple):
    """The usage of a limited cache, queue or table; both in the same unit, bytes unless its name says otherwise."""

    used: int
    limit: int


class Health:
    def __init__(self) -> None:
        # name -> the problem and its remedy.
        self.problems: dict[str, str] = {}
        # seam -> number of unexpected exceptions it has caught.
        self.faults: Counter[str] = Counter()

    def report(self, name: str, problem: str) -> None:
        """Record a problem, or its new text. Log it when it is new."""
        if name not in self.problems:
            if len(self.problems) >= PROBLEMS_MAX:
                return
            logger.error("%s: %s", name, problem)
        self.problems[name] = problem

    def clear(self, name: str) -> None:
        """Remove the problem with this name, if there is one."""
        if self.problems.pop(name, None) is not None:
            logger.warning("%s: solved", name)

    def fault(self, seam: str, where: str, error: BaseException) -> None:
        """Count an unexpected exception, and log its traceback."""
        self.faults[seam] += 1
        logger.error("unexpected error in %s: %s", seam, where, exc_info=error)

    async def supervise(self, seam: str, task: Coroutine[Any, Any, None]) -> None:
        """Await a coroutine. An unexpected exception ends it, but not the process."""
        try:
            await task
        except Exception as error:  # noqa: BLE001 - supervises one task
            self.fault(seam, getattr(task, "__qualname__", repr(task)), error)
