"""A disk in memory that keeps synced data, and loses the rest in the worst way.

Between a sync and a power cut, a disk promises almost nothing. This one draws from a seed what it keeps. It models:

- **Bytes.** A file has durable bytes and the writes and truncates since its last sync, in order. A power cut keeps one
  of: none of them; all; the first few, the last of them torn at any byte; or some sectors of some of them, out of
  order. Sectors that did not arrive have the old bytes, or zeros where the file grew. A torn sector may end in garbage,
  except for bytes that the write does not change. Bytes that no pending change covers never change.
- **Names.** Each directory keeps the first few of its changes since its last `sync_directory`, in order, like a
  journal. Directories are independent of each other. A rename within a directory is one change. A rename between two
  directories is two changes, the new name first: a cut may leave both names, never neither.
- **Both.** A synced file without a synced name is lost. A synced name may have an empty file.
- **Failed syncs.** Pending bytes can still be read, but no later sync makes them durable, because Linux marks the pages
  clean. Only writing them again helps. The same holds for the names of a directory.
- **Capacity.** `capacity` limits the bytes of the files that have a name.
- **Descriptors.** `descriptors_max` limits the open files. Listing or syncing a directory needs one too.

It does not model durable bytes that rot (use `set_content`), nor a disk that lies about its syncs.
"""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from random import Random
from typing import Final

from penstock.errors import DirectoryInUse
from penstock.log.files import File
from penstock.model.batch import Buffer
from penstock.testing.file_tree import FileTree, error_at
from penstock.testing.inodes import Directory, Inode, Node, PendingTruncate, PendingWrite

# fmt: off
_MUTATING: Final = frozenset({
    "create", "write", "truncate", "allocate", "sync",
    "rename", "link", "remove", "sync_directory", "make_directory", "remove_directory",
})
# fmt: on
_CALLS: Final = _MUTATING | {"open", "sizes", "version", "read", "view"}

# The size of a disk without `capacity`.
_UNLIMITED_BYTES: Final = 1 << 40


class PowerCut(BaseException):
    """The power is off. Not an OSError: code that handles those must not continue as if the process lived."""


class FaultyFiles:
    """A disk in memory with faults; the docstring of this module describes them.

    The same seed and the same calls in the same order give the same outcome. With `cut_after`, the power is cut in the
    next mutating call after that many, which may have done all, a part or none of its work. From then on every call
    raises PowerCut. `power_cut` returns the disk after the reboot:

        disk = FaultyFiles(seed=7, cut_after=31)
        try:
            workload(disk)
        except PowerCut:
            pass
        check(disk.power_cut())

    `calls` counts the mutating calls. `cut_after`, `capacity` and `descriptors_max` may be set at any time. After a
    reboot the disk has the same capacity, and no planned faults or cuts.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        cut_after: int | None = None,
        capacity: int | None = None,
        descriptors_max: int | None = None,
    ) -> None:
        self.seed: Final = seed
        self.cut_after = cut_after
        self.capacity = capacity
        self.descriptors_max = descriptors_max
        self.calls = 0
        # Open files. A file is closed with its last reference at the latest.
        self.open_files = 0
        self._lock = threading.RLock()
        self._random = Random(seed)
        self._power = _Power.ON
        self._process = 0
        self._tree = FileTree(self._check_power)
        self._faults: list[_Fault] = []
        self._locks: dict[Inode, FaultyFile] = {}

    def __repr__(self) -> str:
        return f"FaultyFiles(seed={self.seed}, calls={self.calls}, {self._power.name})"

    # The methods of `Files`.

    def open(self, path: Path) -> FaultyFile:
        with self._lock:
            inode = self._tree.find_file(path)
            self._check_descriptors(path)
            _raise(self._begin("open", path))
            return FaultyFile(self, inode, path)

    def create(self, path: Path) -> FaultyFile:
        with self._lock:
            directory = self._tree.find_directory(path.parent)
            inode = self._tree.find_file(path) if path.name in directory.entries else None
            self._check_descriptors(path)
            planned = self._begin("create", path)
            if self._happens(planned):
                if inode is not None:
                    self._tree.change_bytes(inode, PendingTruncate(0))
                else:
                    inode = Inode()
                    self._tree.change_names(directory, {path.name: inode})
            _raise(planned)
            assert inode is not None
            return FaultyFile(self, inode, path)

    def sizes(self, directory: Path) -> dict[str, int]:
        with self._lock:
            try:
                entries = list(self._tree.find_directory(directory).entries.items())
            except FileNotFoundError:
                return {}
            self._check_descriptors(directory)
            _raise(self._begin("sizes", directory))
            self._random.shuffle(entries)  # no file system promises an order
            return {name: len(node.content) if isinstance(node, Inode) else 0 for name, node in entries}

    def make_directory(self, path: Path) -> None:
        with self._lock:
            directory, missing = self._tree.find_deepest(path)
            if missing and missing[0] in directory.entries:
                raise error_at(errno.EEXIST, path)
            planned = self._begin("make_directory", path)
            levels = len(missing)
            if planned is not None:
                levels = self._random.randint(0, levels) if isinstance(planned, PowerCut) else 0
            for level, name in enumerate(missing[:levels], start=1):
                made = Directory()
                self._tree.change_names(directory, {name: made})
                if planned is None or level < levels:
                    directory.keep(len(directory.pending))
                directory = made
            _raise(planned)

    def remove_directory(self, path: Path) -> None:
        with self._lock:
            if self._tree.find_directory(path).entries:
                raise error_at(errno.ENOTEMPTY, path)
            planned = self._begin("remove_directory", path)
            if self._happens(planned):
                self._tree.change_names(self._tree.find_directory(path.parent), {path.name: None})
            _raise(planned)

    def rename(self, path: Path, to: Path) -> None:
        with self._lock:
            source, target = self._tree.find_directory(path.parent), self._tree.find_directory(to.parent)
            node = self._tree.find(path)
            replaced = target.entries.get(to.name)
            if replaced is node:
                return
            _check_replaceable(node, replaced, path, to)
            planned = self._begin("rename", path, to)
            if self._happens(planned):
                if source is target:
                    self._tree.change_names(source, {path.name: None, to.name: node})
                else:
                    arrival = self._tree.change_names(target, {to.name: node})
                    self._tree.change_names(source, {path.name: None}, needs=arrival)
            _raise(planned)

    def link(self, path: Path, to: Path) -> None:
        with self._lock:
            inode, target = self._tree.find_file(path), self._tree.find_directory(to.parent)
            if to.name in target.entries:
                raise error_at(errno.EEXIST, to)
            planned = self._begin("link", path, to)
            if self._happens(planned):
                self._tree.change_names(target, {to.name: inode})
            _raise(planned)

    def version(self, path: Path) -> str:
        with self._lock:
            inode = self._tree.find_file(path)
            _raise(self._begin("version", path))
            return f"{id(inode):x}.{zlib.crc32(inode.content):x}"

    def remove(self, path: Path) -> None:
        with self._lock:
            self._tree.find_file(path)
            planned = self._begin("remove", path)
            if self._happens(planned):
                self._tree.change_names(self._tree.find_directory(path.parent), {path.name: None})
            _raise(planned)

    def sync_directory(self, path: Path) -> None:
        with self._lock:
            directory = self._tree.find_directory(path)
            self._check_descriptors(path)
            planned = self._begin("sync_directory", path)
            if self._happens(planned):
                directory.keep(len(directory.pending))
            elif isinstance(planned, OSError):
                directory.pending.clear()
            _raise(planned)

    def sync(self, files: Sequence[File]) -> list[OSError | None]:
        errors: list[OSError | None] = []
        for file in files:
            try:
                file.sync()
                errors.append(None)
            except OSError as error:
                errors.append(error)
        return errors

    def space(self, path: Path) -> tuple[int, int]:
        with self._lock:
            self._check_power()
            total = _UNLIMITED_BYTES if self.capacity is None else self.capacity
            return max(0, total - self._tree.bytes), total

    def lock(self, path: Path) -> FaultyFile:
        with self._lock:
            there = path.name in self._tree.find_directory(path.parent).entries
            lock = self.open(path) if there else self.create(path)
            inode = self._tree.find_file(path)
            if inode in self._locks:
                raise DirectoryInUse(
                    f"{path.parent} is in use by this process: close it first, or choose another directory"
                )
            lock.truncate(0)
            lock.write(b"1\n", 0)  # a process id, the same in every run
            self._locks[inode] = lock
            return lock

    # Methods for tests.

    def fail(self, call: str, error: int, *, times: int = 1, after: int = 0, path_suffix: str = "") -> None:
        """Let `times` calls of that name raise OSError(`error`), after `after` of them have succeeded.

        Only calls with a path that ends in `path_suffix` count. A failed write has written any part of its data, a
        failed sync has lost the pending changes; other failed calls have done nothing.
        """
        if call not in _CALLS:
            raise ValueError(f"unknown call {call!r}: choose one of {', '.join(sorted(_CALLS))}")
        if times < 1:
            raise ValueError(f"invalid times {times}: it must be at least 1")
        with self._lock:
            self._faults.append(_Fault(call, error, times, after, path_suffix))

    def heal(self) -> None:
        """Cancel the planned faults and cuts, and remove the limits."""
        with self._lock:
            self._faults.clear()
            self.cut_after = None
            self.capacity = None
            self.descriptors_max = None

    def power_cut(self) -> FaultyFiles:
        """Cut the power, and return the disk after the reboot, on which everything is durable. This one is unusable."""
        with self._lock:
            if self._power is _Power.REBOOTED:
                raise PowerCut("this disk was rebooted: use the one that power_cut returned")
            self._power = _Power.REBOOTED
            self._tree.cut(self._random)
            rebooted = FaultyFiles(seed=self.seed, capacity=self.capacity)
            rebooted._random = self._random
            rebooted._tree.restore(self._tree, self._random)
            return rebooted

    def kill(self) -> None:
        """End the process, but not the power: close handles, release locks, keep everything that was written."""
        with self._lock:
            self._check_power()
            self._process += 1
            self.open_files = 0
            self._locks.clear()

    def content(self, path: Path) -> bytes:
        """Return the content of a file, as reads see it."""
        with self._lock:
            return bytes(self._tree.find_file(path).content)

    def set_content(self, path: Path, content: Buffer) -> None:
        """Create a file or replace its bytes, durable at once, with all names of its directory."""
        with self._lock:
            self._tree.set_content(path, content)

    # Every call, in this order: find its files, begin, happen or not, raise what was planned.

    def _check_power(self) -> None:
        if self._power is not _Power.ON:
            raise PowerCut("the power is off: use the disk that power_cut returns")

    def _check_descriptors(self, path: Path) -> None:
        if self.descriptors_max is not None and self.open_files >= self.descriptors_max:
            raise error_at(errno.EMFILE, path)

    def _begin(self, call: str, *paths: Path) -> OSError | PowerCut | None:
        """Return what the call must raise, after it has done as much as a failed call does."""
        if call in _MUTATING:
            if self.cut_after is not None and self.calls >= self.cut_after:
                self._power = _Power.CUT
                return PowerCut(f"seed {self.seed}: power cut in {call} {paths[-1]}, after {self.calls} calls")
            self.calls += 1
        for fault in self._faults:
            if fault.call == call and any(str(path).endswith(fault.path_suffix) for path in paths):
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
                return error_at(fault.error, paths[-1])
        return None

    def _happens(self, planned: OSError | PowerCut | None) -> bool:
        """Return whether a call that is all or nothing does its work."""
        return planned is None or (isinstance(planned, PowerCut) and self._random.random() < 0.5)


class FaultyFile:
    """An open file of FaultyFiles. It stays the same file when its name is given to another one."""

    __slots__ = ("_closed", "_disk", "_inode", "_path", "_process")

    def __init__(self, disk: FaultyFiles, inode: Inode, path: Path) -> None:
        self._disk = disk
        self._inode = inode
        self._path = path
        self._process = disk._process
        self._closed = False
        disk.open_files += 1

    def __del__(self) -> None:
        with self._disk._lock:
            self._close()

    def read(self, length: int, position: int) -> bytes:
        with self._disk._lock:
            content = self._opened(length, position).content
            _raise(self._disk._begin("read", self._path))
            return bytes(memoryview(content)[position : position + length])

    def view(self) -> memoryview:
        """Return the content itself. Resizing the file while a view exists is a BufferError; on a disk, SIGBUS."""
        with self._disk._lock:
            content = self._opened().content
            _raise(self._disk._begin("view", self._path))
            return memoryview(content).toreadonly() if content else memoryview(b"")

    def write_all(self, parts: Sequence[Buffer], position: int) -> None:
        self.write(b"".join(parts), position)

    def write(self, data: Buffer, position: int) -> None:
        disk = self._disk
        with disk._lock:
            inode = self._opened(position)
            planned = disk._begin("write", self._path)
            data = bytes(data)
            if planned is not None:
                data = data[: disk._random.randint(0, len(data))]
            end_max = disk._tree.end_max(inode, disk.capacity)
            if position + len(data) > end_max:
                data = data[: max(0, end_max - position)]
                planned = planned or error_at(errno.ENOSPC, self._path)
            if data:
                disk._tree.change_bytes(inode, PendingWrite(position, data))
            _raise(planned)

    def truncate(self, length: int) -> None:
        disk = self._disk
        with disk._lock:
            inode = self._opened(length)
            planned = disk._begin("truncate", self._path)
            if planned is None and length > disk._tree.end_max(inode, disk.capacity):
                planned = error_at(errno.ENOSPC, self._path)
            if disk._happens(planned):
                disk._tree.change_bytes(inode, PendingTruncate(length))
            _raise(planned)

    def allocate(self, length: int) -> None:
        disk = self._disk
        with disk._lock:
            inode = self._opened(length)
            planned = disk._begin("allocate", self._path)
            if planned is None and length > disk._tree.end_max(inode, disk.capacity):
                planned = error_at(errno.ENOSPC, self._path)
            if disk._happens(planned) and length > len(inode.content):
                disk._tree.change_bytes(inode, PendingTruncate(length))
            _raise(planned)

    def size(self) -> int:
        with self._disk._lock:
            return len(self._opened().content)

    def sync(self) -> None:
        disk = self._disk
        with disk._lock:
            inode = self._opened()
            planned = disk._begin("sync", self._path)
            if disk._happens(planned):
                inode.keep()
            elif isinstance(planned, OSError):
                inode.pending.clear()
            _raise(planned)

    def close(self) -> None:
        disk = self._disk
        with disk._lock:
            disk._check_power()
            self._close()
            if disk._locks.get(self._inode) is self:
                del disk._locks[self._inode]

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._process == self._disk._process:
                self._disk.open_files -= 1

    def _opened(self, *numbers: int) -> Inode:
        """Return the inode. Raise OSError if the handle is closed, or a position or length is negative."""
        self._disk._check_power()
        if self._closed or self._process != self._disk._process:
            raise error_at(errno.EBADF, self._path)
        if min(numbers, default=0) < 0:
            raise error_at(errno.EINVAL, self._path)
        return self._inode


class _Power(Enum):
    ON = auto()
    CUT = auto()
    REBOOTED = auto()


@dataclass(slots=True)
class _Fault:
    call: str
    error: int
    times: int
    after: int
    path_suffix: str


def _check_replaceable(node: Node, replaced: Node | None, path: Path, to: Path) -> None:
    """Raise the error of an invalid rename."""
    if path in to.parents:
        raise error_at(errno.EINVAL, to)
    if to in path.parents:
        raise error_at(errno.ENOTEMPTY, to)
    if isinstance(node, Directory) and isinstance(replaced, Inode):
        raise error_at(errno.ENOTDIR, to)
    if isinstance(node, Inode) and isinstance(replaced, Directory):
        raise error_at(errno.EISDIR, to)
    if isinstance(replaced, Directory) and replaced.entries:
        raise error_at(errno.ENOTEMPTY, to)


def _raise(planned: OSError | PowerCut | None) -> None:
    if planned is not None:
        raise planned
