"""The memory of the process: how much there is, and how freed memory goes back to the system.

glibc keeps freed memory. After a burst of large batches that can be hundreds of megabytes, forever. With another C
library nothing is done.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Final

# How often memory is given back: soon after its size has changed by this much, otherwise seldom, since it takes the
# allocator up to 30 ms.
SOON_S: Final = 10.0
SELDOM_S: Final = 60.0
CHANGE_BYTES: Final = 16 << 20

_ARENA_MAX: Final = -8  # M_ARENA_MAX of malloc.h
_ARENAS: Final = 2


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        # Not Linux: the maximum so far.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Memory:
    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._malloc_trim = getattr(libc, "malloc_trim", None)
        if (mallopt := getattr(libc, "mallopt", None)) is not None:
            # Otherwise each thread gets an arena, which keeps the memory that it frees.
            mallopt(_ARENA_MAX, _ARENAS)
        self._at_start = self._resident = resident_bytes()
        self._due_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether it is time to give memory back. `now` is in seconds."""
        if now < self._due_at:
            return False
        resident = resident_bytes()
        has_changed = abs(resident - self._resident) > CHANGE_BYTES
        self._due_at = now + (SOON_S if has_changed else SELDOM_S)
        self._resident = resident
        return self._malloc_trim is not None and resident > self._at_start + CHANGE_BYTES

    def give_back(self) -> None:
        """Give freed memory back to the system. Call it in a thread: it takes a while."""
        assert self._malloc_trim is not None, "it is due"
        self._malloc_trim(0)
