"""The seam between the log and the disk: the few calls whose order decides what survives a power cut.

`OsFiles` is the real disk. `penstock.testing.FaultyFiles` lets calls fail, and keeps only what was synced. The log
relies on what POSIX promises:

- written bytes survive the end of the process, and survive a power cut only after `File.sync`;
- a name that was created, renamed or removed survives a power cut only after `sync_directory`;
- a renamed file replaces the one of that name at once and whole.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from penstock.errors import DirectoryInUse
from penstock.model.batch import Buffer

# Up to this many files are synced one by one, in a few threads; more by one sync of the file system. 1,000 dirty files
# took 134 ms the first way and 30 ms the second.
SYNC_EACH_MAX: Final = 16
_SYNC_THREADS: Final = 8
# Small buffers are joined and written as one. Large ones are written as a vector, which is faster than a copy, and than
# a call for each: 20 buffers of 52 KB took 290 µs as a vector and 580 µs one by one.
_JOIN_BELOW_BYTES: Final = 4096
_PARTS_MAX: Final = 1024  # what Linux takes at once
# Only the owner may read messages, names and addresses, regardless of the umask.
FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or the one that caused it, says that the disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


class File(Protocol):
    def read(self, length: int, position: int) -> bytes:
        """Return `length` bytes, fewer only at the end of the file."""
        ...

    def view(self) -> memoryview:
        """Return the whole file, mapped into memory. It must not change any more."""
        ...

    def write(self, data: Buffer, position: int) -> None:
        """Write all of `data`. If this raises OSError, any part of it may be written."""
        ...

    def write_all(self, parts: Sequence[Buffer], position: int) -> None:
        """Write several buffers one behind the other, as `write` does."""
        ...

    def truncate(self, length: int) -> None: ...

    def allocate(self, length: int) -> None:
        """Allocate room on the disk for this many bytes, with zeros where there were none."""
        ...

    def size(self) -> int: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Files(Protocol):
    def open(self, path: Path) -> File:
        """Open an existing file for reading and writing."""
        ...

    def create(self, path: Path) -> File:
        """Create an empty file, in place of one with this name."""
        ...

    def sizes(self, directory: Path) -> dict[str, int]:
        """Return the names in a directory and their sizes; nothing if the directory does not exist."""
        ...

    def make_directory(self, path: Path) -> None:
        """Create a directory and its missing parents, durably."""
        ...

    def remove_directory(self, path: Path) -> None: ...

    def rename(self, path: Path, to: Path) -> None: ...

    def link(self, path: Path, to: Path) -> None:
        """Create a hard link: the file stays until both names are removed or replaced."""
        ...

    def version(self, path: Path) -> str:
        """Return the identity of a file, which no other file of this name has. It changes with every write."""
        ...

    def remove(self, path: Path) -> None: ...

    def sync_directory(self, path: Path) -> None: ...

    def sync(self, files: Sequence[File]) -> list[OSError | None]:
        """Sync each of the files; return the error of each, or None."""
        ...

    def space(self, path: Path) -> tuple[int, int]:
        """Return the bytes on the file system of `path` that are free for this process, and all of them."""
        ...

    def lock(self, path: Path) -> File:
        """Lock `path` until the file is closed or the process ends. Raises DirectoryInUse if another process has it."""
        ...


class OsFile:
    """A file descriptor, closed with its last reference, so that a segment can be dropped while it is read."""

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = -1
        self._path = path
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    def __del__(self) -> None:
        self.close()

    def read(self, length: int, position: int) -> bytes:
        data = os.pread(self._descriptor, length, position)
        if len(data) == length or not data:
            return data
        # A short read is the end of the file, or a signal.
        parts = [data]
        position += len(data)
        length -= len(data)
        while length and (data := os.pread(self._descriptor, length, position)):
            parts.append(data)
            position += len(data)
            length -= len(data)
        return b"".join(parts)

    def view(self) -> memoryview:
        if not self.size():
            return memoryview(b"")
        return memoryview(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ))

    def write(self, data: Buffer, position: int) -> None:
        written = os.pwrite(self._descriptor, data, position)
        while written < len(data):
            more = os.pwrite(self._descriptor, memoryview(data)[written:], position + written)
            if not more:
                raise OSError(errno.EIO, "the disk takes no more bytes", str(self._path))
            written += more

    def write_all(self, parts: Sequence[Buffer], position: int) -> None:
        if sum(map(len, parts)) < _JOIN_BELOW_BYTES * len(parts):
            self.write(b"".join(parts), position)
            return
        for first in range(0, len(parts), _PARTS_MAX):
            some = parts[first : first + _PARTS_MAX]
            size = sum(map(len, some))
            written = os.pwritev(self._descriptor, some, position)
            if written < size:
                self.write(b"".join(some)[written:], position + written)
            position += size

    def truncate(self, length: int) -> None:
        os.ftruncate(self._descriptor, length)

    def allocate(self, length: int) -> None:
        os.posix_fallocate(self._descriptor, 0, length)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def fileno(self) -> int:
        return self._descriptor


class OsFiles:
    """The real disk."""

    def __init__(self, *, read_only: bool = False) -> None:
        self._open_flags = os.O_RDONLY if read_only else os.O_RDWR
        self._pool: ThreadPoolExecutor | None = None
        self._syncfs = _find_syncfs()

    def open(self, path: Path) -> OsFile:
        return OsFile(path, self._open_flags)

    def create(self, path: Path) -> OsFile:
        return OsFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def sizes(self, directory: Path) -> dict[str, int]:
        try:
            with os.scandir(directory) as entries:
                return {entry.name: entry.stat().st_size for entry in entries}
        except FileNotFoundError:
            return {}

    def make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        self.make_directory(path.parent)
        path.mkdir(DIRECTORY_MODE, exist_ok=True)
        self.sync_directory(path.parent)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def link(self, path: Path, to: Path) -> None:
        os.link(path, to)

    def version(self, path: Path) -> str:
        # A rewritten file is created while the old one exists, so it has another inode. An appended one has another
        # time.
        found = path.stat()
        return f"{found.st_ino:x}.{found.st_mtime_ns:x}"

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync(self, files: Sequence[File]) -> list[OSError | None]:
        if len(files) == 1:
            return [_try_sync(files[0])]
        if len(files) > SYNC_EACH_MAX and self._syncfs is not None:
            return self._syncfs(files)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_SYNC_THREADS, "penstock-sync")
        return list(self._pool.map(_try_sync, files))

    def space(self, path: Path) -> tuple[int, int]:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def lock(self, path: Path) -> OsFile:
        lock = OsFile(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(64, 0).decode(errors="replace").strip() or "unknown"
            lock.close()
            raise DirectoryInUse(
                f"{path.parent} is in use by process {holder}: stop it first, or choose another directory"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode(), 0)
        return lock


def _try_sync(file: File) -> OSError | None:
    try:
        file.sync()
    except OSError as error:
        return error
    return None


def _find_syncfs() -> _Syncfs | None:
    """Return whether syncfs reports failed write-backs: Linux does since 5.8."""
    release = os.uname().release.split(".")
    if os.uname().sysname != "Linux" or (int(release[0]), int(release[1])) < (5, 8):
        return None
    return _Syncfs()


class _Syncfs:
    def __init__(self) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syncfs

    def __call__(self, files: Sequence[File]) -> list[OSError | None]:
        """Sync the file system that has all files. If that fails, nobody knows which files lost pages: all of them
        failed."""
        first = files[0]
        assert isinstance(first, OsFile)
        if self._call(first.fileno()) == 0:
            return [None] * len(files)
        number = ctypes.get_errno()
        return [OSError(number, f"syncfs: {os.strerror(number)}")] * len(files)
