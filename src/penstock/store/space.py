"""Watches the room on the disk, and keeps a reserve.

The broker must be able to store changes that free a full disk: a shorter retention, the deletion of a topic. So an
unused file, `<data>/reserve`, keeps some room. When a write of the state topic finds the disk full, the file is removed
and the write is repeated. Other topics take no appends while the reserve is missing or less than its size is free;
otherwise they would fill the released room. So there is also room to compact the state topic.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Final

from penstock.errors import AppendFailed
from penstock.health import Health, Usage
from penstock.log.files import File, Files

_NAME: Final = "reserve"
_PROBLEM: Final = "disk"


class DiskSpace:
    """`free` and `total` are bytes, as of the last check. Any thread may call any method."""

    def __init__(self, files: Files, directory: Path, reserve_bytes: int, health: Health) -> None:
        """Create the reserve if there is room for it. With a size of 0 there is none, and nothing is refused."""
        self._files = files
        self._path = directory / _NAME
        self._reserve_bytes = reserve_bytes
        self._health = health
        self._lock = threading.Lock()
        self._has_reserve = not reserve_bytes
        self._is_full = False
        self.free = self.total = 0
        with contextlib.suppress(OSError):
            file = files.open(self._path)
            if reserve_bytes:
                self._allocate(file)
            else:
                file.close()
                files.remove(self._path)
        self.check()

    @property
    def usage(self) -> dict[str, Usage]:
        return {"disk_bytes": Usage(self.total - self.free, self.total)}

    @property
    def is_full(self) -> bool:
        return self._is_full

    def admit(self) -> None:
        """Raise AppendFailed if there is no room for anything but the state topic."""
        if self._is_full and self._reserve_bytes:
            raise AppendFailed(self._problem())

    def check(self) -> None:
        """Check how much is free, and create the reserve again if twice its size is."""
        with self._lock, contextlib.suppress(OSError):
            self._look()
            if not self._has_reserve and self.free >= 2 * self._reserve_bytes:
                self._allocate(self._files.create(self._path))
                self._look()
            self._judge(is_full=not self._has_reserve or self.free < max(1, self._reserve_bytes))

    def note_full(self) -> None:
        """Note that a write found no room: appends are refused until a check finds some."""
        with self._lock, contextlib.suppress(OSError):
            self._look()
            self._judge(is_full=True)

    def release(self) -> bool:
        """Give the reserve to the state topic; False if there is none."""
        with self._lock:
            if not self._has_reserve or not self._reserve_bytes:
                return False
            self._has_reserve = False
            with contextlib.suppress(OSError):
                self._files.remove(self._path)
            self._judge(is_full=True)
            return True

    def _look(self) -> None:
        self.free, self.total = self._files.space(self._path.parent)

    def _allocate(self, file: File) -> None:
        try:
            file.truncate(min(file.size(), self._reserve_bytes))
            file.allocate(self._reserve_bytes)
            self._has_reserve = True
        except OSError:
            with contextlib.suppress(OSError):
                self._files.remove(self._path)
        finally:
            file.close()

    def _judge(self, *, is_full: bool) -> None:
        self._is_full = is_full
        if is_full:
            self._health.report(_PROBLEM, self._problem())
        else:
            self._health.clear(_PROBLEM)

    def _problem(self) -> str:
        needed = self._reserve_bytes if self._has_reserve else 2 * self._reserve_bytes
        return (
            f"the disk is full: {self.free} of {self.total} bytes are free in {self._path.parent}, messages are stored "
            f"again at {max(1, needed)} (storage.disk_reserve_bytes): shorten retention, delete topics, or make room"
        )
