"""The seam between a copy and the disk: the calls whose order decides what a crash leaves. What is done is durable."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Protocol

from penstock.errors import DirectoryInUse


class Disk(Protocol):
    def write(self, path: Path, data: bytes, position: int) -> None:
        """Into a file, which is made if there is none. It may fail with any part of it written."""
        ...

    def truncate(self, path: Path, size: int) -> None: ...

    def replace(self, path: Path, data: bytes) -> None:
        """The whole of a file at once: a crash leaves the one of before, or this one."""
        ...

    def make_directory(self, path: Path) -> None: ...

    def remove(self, path: Path) -> None:
        """A file, or a directory with all that it holds."""
        ...


class OsDisk:
    """The real one."""

    def write(self, path: Path, data: bytes, position: int) -> None:
        is_new = not path.exists()
        # Written and synced by one descriptor: Linux tells the others nothing of a page that could not be written.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, data, position)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            _sync_directory(path.parent)

    def truncate(self, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, path: Path, data: bytes) -> None:
        aside = path.with_name(f"{path.name}.new")
        aside.unlink(missing_ok=True)
        self.write(aside, data, 0)
        aside.rename(path)
        _sync_directory(path.parent)

    def make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        self.make_directory(path.parent)
        path.mkdir(0o700, exist_ok=True)
        _sync_directory(path.parent)

    def remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        _sync_directory(path.parent)


class Lock:
    """Holds a directory until it is closed, or the process ends."""

    def __init__(self, directory: Path) -> None:
        path = directory / "LOCK"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            raise DirectoryInUse(
                f"{directory} is in use by process {holder}: stop it first, or choose another directory"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _write_all(descriptor: int, data: bytes, position: int) -> None:
    written = 0
    while written < len(data):
        more = os.pwrite(descriptor, memoryview(data)[written:], position + written)
        if not more:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        written += more


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
