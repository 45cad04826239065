"""The known damage of a log, found by recovery or by readers. Any thread may use it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from penstock.errors import LogDamaged
from penstock.log import log_files
from penstock.log.files import Files
from penstock.log.segment import Segment

logger = logging.getLogger(__name__)

# What to do about damage, for errors and problem reports.
DAMAGE_REMEDY: Final = (
    "restore the file from a copy, or stop the broker and run penstock log repair; "
    "with on_damage=skip the topic's readers go on behind it"
)
# Remember at most this many damaged ranges of one log.
_DAMAGE_MAX: Final = 100


class KnownDamage:
    def __init__(self, files: Files, directory: Path, on_change: Callable[[], None]) -> None:
        self._files = files
        self._directory = directory
        self._on_change = on_change
        # By file name and position.
        self._known: dict[tuple[str, int], LogDamaged] = {}
        self._lock = threading.Lock()

    def all(self) -> list[LogDamaged]:
        """Return the damage by ascending offset."""
        with self._lock:
            return sorted(self._known.values(), key=lambda damage: damage.first)

    def remember(self, damage: LogDamaged) -> bool:
        """Return whether it is new, or more than was known of the same position, and there is room for it."""
        key = (damage.path.name, damage.position)
        with self._lock:
            known = self._known.get(key)
            if known.covers(damage) if known is not None else len(self._known) >= _DAMAGE_MAX:
                return False
            self._known[key] = damage
        logger.error("%s", damage)
        self._on_change()
        return True

    def note(self, damage: LogDamaged, segments: Sequence[Segment]) -> None:
        """Remember damage that a reader found, and write it down for the next start."""
        if not self.remember(damage):
            return
        # Recovery walks the active segment itself.
        base = next((segment.base for segment in segments[:-1] if segment.path == damage.path), None)
        if base is None:
            return
        noted = [each for each in self.all() if each.path == damage.path]
        try:
            log_files.note_damage(self._files, self._directory, base, noted)
        except OSError as error:
            logger.warning("%s: cannot note that it is damaged: %s", damage.path, error.strerror)

    def forget(self, segment: Segment) -> None:
        """Forget the damage of a segment that was removed."""
        name = segment.path.name
        with self._lock:
            known = [key for key in self._known if key[0] == name]
            for key in known:
                del self._known[key]
        if known:
            self._on_change()
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(self._directory / log_files.damaged_name(segment.base))
