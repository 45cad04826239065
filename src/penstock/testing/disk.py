"""A disk in memory that keeps what was synced, and of the rest whatever hurts most.

Between a sync and the power cut that follows, a disk promises almost nothing. This one draws from a seed
what it leaves behind. What is modelled:

- **Bytes.** A file has durable bytes and, in order, the writes and truncates since its last sync. A power cut
  keeps one of: none of them; all; the first few, the last of them torn at any byte; or, out of order, some
  sectors of some of them, where what did not arrive shows the bytes of before, or zeros where the file grew.
  A torn sector may end in garbage, but for bytes that are as before. Bytes that no pending change covers never change.
- **Names.** Each directory keeps the first few of its changes since its last `sync_directory`, in order as
  a journal does; two directories know nothing of each other. A rename within a directory is one change. One
  between two directories is two, and the new name comes first: a cut may leave both names, never neither.
- **Both.** A synced file without a synced name is gone. A synced name may hold a file without a byte.
- **Failed syncs.** What was pending can still be read, and no later sync makes it durable: Linux marks the
  pages clean. Only writing it again helps. It is the same for the names of a directory.
- **Room.** `capacity` bounds the bytes of the files that have a name.
- **Descriptors.** `descriptors_max` bounds the files that are open. Listing or syncing a directory needs one too.

Not modelled: durable bytes that rot (`set_content` does that), and a disk that lies about its syncs.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from penstock.batch import Buffer
from penstock.errors import DirectoryInUse
from penstock.storage.files import File

# fmt: off
_MUTATING: Final = frozenset({
    "create", "write", "truncate", "allocate", "sync",
    "rename", "link", "remove", "sync_directory", "make_directory", "remove_directory",
})
# fmt: on
_CALLS: Final = _MUTATING | {"open", "sizes", "version", "read", "view"}

# The smaller ones are no real sectors: they tear the records of a small log more often. A cut draws from
# those that make no more pieces of a file than the bound, or it would take longer than the workload did.
_SECTOR_BYTES: Final = (1, 8, 64, 512, 4096)
_SECTORS_MAX: Final = 256
_BOUNDLESS_BYTES: Final = 1 << 40


class PowerCut(BaseException):
    """There is no power. Not an OSError: whoever handles those must not go on as if the process lived."""


class FaultyFiles:
    """A disk in memory that loses, tears and refuses; see the head of this module for how.

    The same seed and the same calls in the same order give the same outcome. With `cut_after`, the power goes
    within the mutating call after that many, which may have done its work, a part of it, or nothing. From
    then on every call raises PowerCut, until `power_cut` gives the disk as it is after the reboot:

        disk = FaultyFiles(seed=7, cut_after=31)
        try:
            workload(disk)
        except PowerCut:
            pass
        check(disk.power_cut())

    `calls` counts the mutating calls. `cut_after`, `capacity` and `descriptors_max` may be set at any time; a disk
    comes back from a cut with its capacity, and without the faults and the cut that were planned before.
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
        # Files that are open. A file is closed with its last reference, if not before.
        self.open_files = 0
        self._lock = threading.RLock()
        self._random = Random(seed)
        self._power = _Power.ON
        self._process = 0
        self._root = _Directory()
        self._changed: dict[_Directory, None] = {}  # in the order in which the cut draws for them
        self._bytes = 0
        self._faults: list[_Fault] = []
        self._locks: dict[_Inode, FaultyFile] = {}

    def __repr__(self) -> str:
        return f"FaultyFiles(seed={self.seed}, calls={self.calls}, {self._power.name})"

    # The Files protocol.

    def open(self, path: Path) -> FaultyFile:
        with self._lock:
            inode = self._find_file(path)
            self._check_descriptors(path)
            _raise(self._begin("open", path))
            return FaultyFile(self, inode, path)

    def create(self, path: Path) -> FaultyFile:
        with self._lock:
            directory = self._find_directory(path.parent)
            inode = self._find_file(path) if path.name in directory.entries else None
            self._check_descriptors(path)
            planned = self._begin("create", path)
            if self._happens(planned):
                if inode is not None:
                    self._change_bytes(inode, _Truncate(0))
                else:
                    inode = _Inode()
                    self._change_names(directory, {path.name: inode})
            _raise(planned)
            assert inode is not None
            return FaultyFile(self, inode, path)

    def sizes(self, directory: Path) -> dict[str, int]:
        with self._lock:
            try:
                entries = list(self._find_directory(directory).entries.items())
            except FileNotFoundError:
                return {}
            self._check_descriptors(directory)
            _raise(self._begin("sizes", directory))
            self._random.shuffle(entries)  # no file system promises an order
            return {name: len(node.content) if isinstance(node, _Inode) else 0 for name, node in entries}

    def make_directory(self, path: Path) -> None:
        with self._lock:
            directory, missing = self._find_deepest(path)
            if missing and missing[0] in directory.entries:
                raise _error(errno.EEXIST, path)
            planned = self._begin("make_directory", path)
            levels = len(missing)
            if planned is not None:
                levels = self._random.randint(0, levels) if isinstance(planned, PowerCut) else 0
            for level, name in enumerate(missing[:levels], start=1):
                made = _Directory()
                self._change_names(directory, {name: made})
                if planned is None or level < levels:
                    directory.keep(len(directory.pending))
                directory = made
            _raise(planned)

    def remove_directory(self, path: Path) -> None:
        with self._lock:
            if self._find_directory(path).entries:
                raise _error(errno.ENOTEMPTY, path)
            planned = self._begin("remove_directory", path)
            if self._happens(planned):
                self._change_names(self._find_directory(path.parent), {path.name: None})
            _raise(planned)

    def rename(self, path: Path, to: Path) -> None:
        with self._lock:
            source, target = self._find_directory(path.parent), self._find_directory(to.parent)
            node = self._find(path)
            replaced = target.entries.get(to.name)
            if replaced is node:
                return
            _check_replaceable(node, replaced, path, to)
            planned = self._begin("rename", path, to)
            if self._happens(planned):
                if source is target:
                    self._change_names(source, {path.name: None, to.name: node})
                else:
                    arrival = self._change_names(target, {to.name: node})
                    self._change_names(source, {path.name: None}, needs=arrival)
            _raise(planned)

    def link(self, path: Path, to: Path) -> None:
        with self._lock:
            inode, target = self._find_file(path), self._find_directory(to.parent)
            if to.name in target.entries:
                raise _error(errno.EEXIST, to)
            planned = self._begin("link", path, to)
            if self._happens(planned):
                self._change_names(target, {to.name: inode})
            _raise(planned)

    def version(self, path: Path) -> str:
        with self._lock:
            inode = self._find_file(path)
            _raise(self._begin("version", path))
            return f"{id(inode):x}.{zlib.crc32(inode.content):x}"

    def remove(self, path: Path) -> None:
        with self._lock:
            self._find_file(path)
            planned = self._begin("remove", path)
            if self._happens(planned):
                self._change_names(self._find_directory(path.parent), {path.name: None})
            _raise(planned)

    def sync_directory(self, path: Path) -> None:
        with self._lock:
            directory = self._find_directory(path)
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
            total = _BOUNDLESS_BYTES if self.capacity is None else self.capacity
            return max(0, total - self._bytes), total

    def lock(self, path: Path) -> FaultyFile:
        with self._lock:
            there = path.name in self._find_directory(path.parent).entries
            lock = self.open(path) if there else self.create(path)
            inode = self._find_file(path)
            if inode in self._locks:
                raise DirectoryInUse(
                    f"{path.parent} is in use by this process: close it first, or choose another directory"
                )
            lock.truncate(0)
            lock.write(b"1\n", 0)  # a process id, the same in every run
            self._locks[inode] = lock
            return lock

    # What a test does to the disk.

    def fail(self, call: str, error: int, *, times: int = 1, after: int = 0, path_suffix: str = "") -> None:
        """Let `times` calls of that name raise OSError(`error`), once `after` of them have passed.

        Only calls with a path that ends in `path_suffix` are counted. A write that fails has written any part
        of its data, a sync that fails has lost what it should have synced; the others have done nothing.
        """
        if call not in _CALLS:
            raise ValueError(f"no call is named {call!r}: choose one of {', '.join(sorted(_CALLS))}")
        if times < 1:
            raise ValueError(f"times is {times}: a fault happens at least once")
        with self._lock:
            self._faults.append(_Fault(call, error, times, after, path_suffix))

    def heal(self) -> None:
        """Forget the faults and the cut that are planned, and have room and descriptors for everything."""
        with self._lock:
            self._faults.clear()
            self.cut_after = None
            self.capacity = None
            self.descriptors_max = None

    def power_cut(self) -> FaultyFiles:
        """The disk after the reboot, with all that is on it durable. This one is of no use from now on."""
        with self._lock:
            if self._power is _Power.REBOOTED:
                raise PowerCut("this disk was rebooted: go on with the one that power_cut returned")
            self._power = _Power.REBOOTED
            for directory in self._changed:
                directory.keep(self._random.randint(0, len(directory.pending)))
            rebooted = FaultyFiles(seed=self.seed, capacity=self.capacity)
            rebooted._random = self._random
            rebooted._restore(self._root, rebooted._root, {})
            return rebooted

    def kill(self) -> None:
        """The process ends, the power stays: handles are closed, locks let go, what was written is there."""
        with self._lock:
            self._check_power()
            self._process += 1
            self.open_files = 0
            self._locks.clear()

    def content(self, path: Path) -> bytes:
        """What a read of the whole file would give."""
        with self._lock:
            return bytes(self._find_file(path).content)

    def set_content(self, path: Path, content: Buffer) -> None:
        """Put a file there, or other bytes into it; durable at once, with all names of its directory."""
        with self._lock:
            directory = self._find_directory(path.parent)
            inode = self._find_file(path) if path.name in directory.entries else _Inode()
            if inode.links:
                self._bytes += len(content) - len(inode.content)
            if len(content) == len(inode.content):
                inode.content[:] = content  # views see it, as they would see a bit that flipped
            else:
                inode.content = bytearray(content)
            inode.durable = bytearray(content)
            inode.pending.clear()
            if not inode.links:
                self._change_names(directory, {path.name: inode})
            directory.keep(len(directory.pending))

    # Every call, in this order: find what it is about, begin, let it happen or not, raise what was planned.

    def _check_power(self) -> None:
        if self._power is not _Power.ON:
            raise PowerCut("there is no power: go on with the disk that power_cut returns")

    def _check_descriptors(self, path: Path) -> None:
        if self.descriptors_max is not None and self.open_files >= self.descriptors_max:
            raise _error(errno.EMFILE, path)

    def _begin(self, call: str, *paths: Path) -> OSError | PowerCut | None:
        """What the call has to raise, after it has done what it does in spite of that."""
        if call in _MUTATING:
            if self.cut_after is not None and self.calls >= self.cut_after:
                self._power = _Power.CUT
                return PowerCut(f"seed {self.seed}: the power went in {call} {paths[-1]}, after {self.calls} calls")
            self.calls += 1
        for fault in self._faults:
            if fault.call == call and any(str(path).endswith(fault.path_suffix) for path in paths):
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
                return _error(fault.error, paths[-1])
        return None

    def _happens(self, planned: OSError | PowerCut | None) -> bool:
        """Whether a call that does its work whole or not at all does it."""
        return planned is None or (isinstance(planned, PowerCut) and self._random.random() < 0.5)

    def _change_bytes(self, inode: _Inode, change: _Write | _Truncate) -> None:
        bytes_before = len(inode.content)
        change.apply(inode.content)
        inode.pending.append(change)
        if inode.links:
            self._bytes += len(inode.content) - bytes_before

    def _change_names(
        self, directory: _Directory, names: dict[str, _Node | None], needs: _NameChange | None = None
    ) -> _NameChange:
        for name, node in names.items():
            self._count_link(directory.entries.get(name), -1)
            self._count_link(node, +1)
        change = _NameChange(directory, names, needs)
        change.apply(directory.entries)
        directory.pending.append(change)
        self._changed[directory] = None
        return change

    def _count_link(self, node: _Node | None, step: int) -> None:
        """A file that loses its last name gives its bytes back, though open handles still read them."""
        if isinstance(node, _Inode):
            links_before = node.links
            node.links += step
            if not links_before or not node.links:
                self._bytes += step * len(node.content)

    def _end_max(self, inode: _Inode) -> int:
        """Where the room for this file ends."""
        if self.capacity is None or not inode.links:
            return sys.maxsize
        return len(inode.content) + max(0, self.capacity - self._bytes)

    def _restore(self, old: _Directory, new: _Directory, copies: dict[_Node, _Node]) -> None:
        """Copy what is durable in `old`, a disk before the cut, into `new`, which is on this one."""
        for name, node in old.durable.items():
            copy = copies.get(node)
            if isinstance(node, _Inode):
                if copy is None:
                    content = node.after_cut(self._random)
                    copy = copies[node] = _Inode(content, bytearray(content))
                self._count_link(copy, +1)
            elif copy is None:
                directory = copy = copies[node] = _Directory()
                self._restore(node, directory, copies)
            else:
                continue  # the cut left this directory two names; the first one found stays
            new.entries[name] = new.durable[name] = copy

    def _find_deepest(self, path: Path) -> tuple[_Directory, tuple[str, ...]]:
        """The last directory on the way to `path`, and the names below it that are no directories."""
        self._check_power()
        names = path.parts[1:] if path.anchor else path.parts
        directory = self._root
        for depth, name in enumerate(names):
            node = directory.entries.get(name)
            if not isinstance(node, _Directory):
                return directory, names[depth:]
            directory = node
        return directory, ()

    def _find_directory(self, path: Path) -> _Directory:
        directory, missing = self._find_deepest(path)
        if missing:
            raise _error(errno.ENOTDIR if missing[0] in directory.entries else errno.ENOENT, path)
        return directory

    def _find(self, path: Path) -> _Node:
        node = self._find_directory(path.parent).entries.get(path.name)
        if node is None:
            raise _error(errno.ENOENT, path)
        return node

    def _find_file(self, path: Path) -> _Inode:
        node = self._find(path)
        if isinstance(node, _Directory):
            raise _error(errno.EISDIR, path)
        return node


class FaultyFile:
    """An open file of FaultyFiles. It reads and writes what it has opened, whatever has that name by now."""

    __slots__ = ("_closed", "_disk", "_inode", "_path", "_process")

    def __init__(self, disk: FaultyFiles, inode: _Inode, path: Path) -> None:
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
        """The content itself: to resize the file while a view lives is a BufferError here, SIGBUS there."""
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
            end_max = disk._end_max(inode)
            if position + len(data) > end_max:
                data = data[: max(0, end_max - position)]
                planned = planned or _error(errno.ENOSPC, self._path)
            if data:
                disk._change_bytes(inode, _Write(position, data))
            _raise(planned)

    def truncate(self, length: int) -> None:
        disk = self._disk
        with disk._lock:
            inode = self._opened(length)
            planned = disk._begin("truncate", self._path)
            if planned is None and length > disk._end_max(inode):
                planned = _error(errno.ENOSPC, self._path)
            if disk._happens(planned):
                disk._change_bytes(inode, _Truncate(length))
            _raise(planned)

    def allocate(self, length: int) -> None:
        disk = self._disk
        with disk._lock:
            inode = self._opened(length)
            planned = disk._begin("allocate", self._path)
            if planned is None and length > disk._end_max(inode):
                planned = _error(errno.ENOSPC, self._path)
            if disk._happens(planned) and length > len(inode.content):
                disk._change_bytes(inode, _Truncate(length))
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

    def _opened(self, *numbers: int) -> _Inode:
        """The inode, if the handle is good, and the positions and lengths it is given are."""
        self._disk._check_power()
        if self._closed or self._process != self._disk._process:
            raise _error(errno.EBADF, self._path)
        if min(numbers, default=0) < 0:
            raise _error(errno.EINVAL, self._path)
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


class _Write(NamedTuple):
    position: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        _grow(content, self.position)
        content[self.position : self.position + len(self.data)] = self.data

    def garbled(self, content: bytearray, kept: int, random: Random) -> _Write:
        """This write as far as byte `kept`, then garbage. A byte that it would leave as it is is in no danger."""
        before = content[self.position + kept : self.position + len(self.data)]
        after = self.data[kept:]
        rest = random.randbytes(len(after))
        safe = [new if new == old else other for old, new, other in zip(before, after, rest, strict=False)]
        return _Write(self.position, self.data[:kept] + bytes(safe) + rest[len(safe) :])

    def sectors(self, sector_bytes: int) -> Iterator[_Write]:
        """This write in pieces that end where the sectors of the file do."""
        end = self.position + len(self.data)
        start = self.position
        while start < end:
            stop = min(end, start - start % sector_bytes + sector_bytes)
            yield _Write(start, self.data[start - self.position : stop - self.position])
            start = stop


class _Truncate(NamedTuple):
    length: int

    def apply(self, content: bytearray) -> None:
        del content[self.length :]
        _grow(content, self.length)


@dataclass(slots=True, eq=False)
class _Inode:
    content: bytearray = field(default_factory=bytearray)  # what reads see
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Write | _Truncate] = field(default_factory=list)  # not yet durable, in their order
    links: int = 0  # the names it has now

    def keep(self) -> None:
        for change in self.pending:
            change.apply(self.durable)
        self.pending.clear()

    def after_cut(self, random: Random) -> bytearray:
        content = bytearray(self.durable)
        if self.pending:
            outcome = random.choice((_keep_none, _keep_all, _tear, _scatter))
            outcome(content, self.pending, random)
        return content


@dataclass(slots=True, eq=False)
class _Directory:
    entries: dict[str, _Node] = field(default_factory=dict)  # what calls see
    durable: dict[str, _Node] = field(default_factory=dict)
    pending: list[_NameChange] = field(default_factory=list)  # not yet durable, in their order

    def keep(self, count: int) -> None:
        """Make the first `count` pending changes durable."""
        for _ in range(count):
            change = self.pending.pop(0)
            if (needs := change.needs) and needs in needs.directory.pending:
                needs.directory.keep(needs.directory.pending.index(needs) + 1)
            change.apply(self.durable)


_Node = _Inode | _Directory


@dataclass(slots=True, eq=False)
class _NameChange:
    directory: _Directory
    names: dict[str, _Node | None]  # None: the name is removed
    needs: _NameChange | None  # what is durable before this is

    def apply(self, entries: dict[str, _Node]) -> None:
        for name, node in self.names.items():
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node


# What a power cut leaves of the pending changes of a file: one of these four, on top of its durable bytes.


def _keep_none(content: bytearray, pending: list[_Write | _Truncate], random: Random) -> None:
    pass


def _keep_all(content: bytearray, pending: list[_Write | _Truncate], random: Random) -> None:
    for change in pending:
        change.apply(content)


def _tear(content: bytearray, pending: list[_Write | _Truncate], random: Random) -> None:
    whole = random.randrange(len(pending))
    _keep_all(content, pending[:whole], random)
    last = pending[whole]
    if isinstance(last, _Write):
        kept = random.randint(0, len(last.data))
        torn = _Write(last.position, last.data[:kept])
        if random.random() < 0.25:
            sector_rest = 512 - (last.position + kept) % 512
            torn = _Write(last.position, last.data[: kept + sector_rest]).garbled(content, kept, random)
        torn.apply(content)


def _scatter(content: bytearray, pending: list[_Write | _Truncate], random: Random) -> None:
    """Often the first changes are there, for the kernel writes back by age; the disk reorders the rest."""
    whole = random.choice((0, random.randrange(len(pending))))
    _keep_all(content, pending[:whole], random)
    pending_bytes = sum(len(change.data) for change in pending[whole:] if isinstance(change, _Write))
    fitting = [size for size in _SECTOR_BYTES if pending_bytes <= size * _SECTORS_MAX]
    sector_bytes = random.choice(fitting or _SECTOR_BYTES[-1:])
    arrives = random.choice((0.1, 0.5, 0.9))
    grows_first = random.random() < 0.5
    garbage = random.choice((0.0, 0.0, 0.0, 0.1))
    for change in pending[whole:]:
        if isinstance(change, _Truncate):
            if random.random() < arrives:
                change.apply(content)
            continue
        if grows_first:
            _grow(content, change.position + len(change.data))
        for piece in change.sectors(sector_bytes):
            if random.random() < arrives:
                if garbage and random.random() < garbage:
                    piece = piece.garbled(content, random.randrange(len(piece.data)), random)
                piece.apply(content)


def _grow(content: bytearray, length: int) -> None:
    if length > len(content):
        content.extend(bytes(length - len(content)))


def _check_replaceable(node: _Node, replaced: _Node | None, path: Path, to: Path) -> None:
    """What rename refuses."""
    if path in to.parents:
        raise _error(errno.EINVAL, to)
    if to in path.parents:
        raise _error(errno.ENOTEMPTY, to)
    if isinstance(node, _Directory) and isinstance(replaced, _Inode):
        raise _error(errno.ENOTDIR, to)
    if isinstance(node, _Inode) and isinstance(replaced, _Directory):
        raise _error(errno.EISDIR, to)
    if isinstance(replaced, _Directory) and replaced.entries:
        raise _error(errno.ENOTEMPTY, to)


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def _raise(planned: OSError | PowerCut | None) -> None:
    if planned is not None:
        raise planned
