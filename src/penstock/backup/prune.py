"""Remove old backups, and the segments that no other backup names, while other backups may run.

A running backup relies on segments that it found in the target. So both a backup and a removal first put a flag there,
and then look for flags of the other kind. At least one of them sees the other: a backup waits for the removal, a
removal leaves the segments for the next time. A flag that has not been renewed for a while belongs to a killed process;
its age is measured by the clock of the target.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.backup.create import put
from penstock.backup.manifest import MANIFEST_NAME, MANIFESTS, SEGMENT_NAME, SEGMENTS
from penstock.backup.restore import manifests
from penstock.backup.target import Target

RUNNING: Final = "running/"
PRUNING: Final = "pruning/"
_REFRESH_S: Final = 20.0
# A backup may take long for one large segment; a removal does not.
_STALE_S: Final = {RUNNING: 3600.0, PRUNING: 120.0}
_POLL_S: Final = 1.0


class Flag:
    def __init__(self, target: Target, kind: str) -> None:
        self._target = target
        self.name = f"{kind}{secrets.token_hex(8)}"
        self._put()

    def refresh(self) -> None:
        if time.monotonic() >= self._due:
            self._put()

    def remove(self) -> None:
        self._target.remove([self.name])

    def others(self, kind: str) -> list[str]:
        """Return the flags of other processes that are not stale."""
        self._put()
        own = self.name.partition("/")[0] + "/"
        found = self._target.names(own) | self._target.names(kind)
        now_s = found[self.name].time_s
        return [
            name
            for name, each in found.items()
            if name.startswith(kind) and name != self.name and each.time_s > now_s - _STALE_S[kind]
        ]

    def _put(self) -> None:
        put(self._target, self.name, b"")
        self._due = time.monotonic() + _REFRESH_S


@contextmanager
def running(target: Target) -> Iterator[Flag]:
    """Prevent the removal of segments while a backup runs."""
    flag = Flag(target, RUNNING)
    try:
        while flag.others(PRUNING):
            time.sleep(_POLL_S)
        yield flag
    finally:
        flag.remove()


def prune(target: Target, keep: int) -> list[str]:
    """Remove all but the `keep` newest backups and their unshared segments; return the removed IDs."""
    names = sorted(name for name in target.names(MANIFESTS) if MANIFEST_NAME.fullmatch(name))
    removed = names[:-keep]
    target.remove(removed)
    flag = Flag(target, PRUNING)
    try:
        if not flag.others(RUNNING):
            _remove_unneeded(target, flag)
    finally:
        flag.remove()
    return [name.removeprefix(MANIFESTS).removesuffix(".json") for name in removed]


def _remove_unneeded(target: Target, flag: Flag) -> None:
    # A damaged manifest may name any segment: reading it raises, so all segments stay.
    needed = {segment.name for manifest in manifests(target) for segment in manifest.segments}
    for name in target.names(SEGMENTS):
        if SEGMENT_NAME.fullmatch(name) and name not in needed:
            flag.refresh()
            target.remove([name])
