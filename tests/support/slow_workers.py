"""Spark gives a Python worker 10 s to start, whatever else the machine has to do. What fails for that is run again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Final

_SLOW_WORKER: Final = "Python worker failed to connect back"
_ATTEMPTS: Final = 3


def patiently(run: Callable[[int], subprocess.CompletedProcess[str]]) -> subprocess.CompletedProcess[str]:
    """Run a process with the number of the attempt, and again if a worker was too slow."""
    for attempt in range(_ATTEMPTS):
        done = run(attempt)
        if _SLOW_WORKER not in done.stderr:
            break
    return done
