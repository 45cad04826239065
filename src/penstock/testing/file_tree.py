"""The tree of files and directories of `FaultyFiles`, by path."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

from penstock.model.batch import Buffer
from penstock.testing.inodes import Directory, Inode, NameChange, Node, PendingTruncate, PendingWrite


class FileTree:
    def __init__(self, check: Callable[[], None]) -> None:
        """`check` is called before a path is looked up: it raises if the power is off."""
        # The bytes of all files that have a name.
        self.bytes = 0
        self._check = check
        self._root = Directory()
        # The directories with pending changes, in the order in which a cut draws for them.
        self._changed: dict[Directory, None] = {}

    def change_bytes(self, inode: Inode, change: PendingWrite | PendingTruncate) -> None:
        bytes_before = len(inode.content)
        change.apply(inode.content)
        inode.pending.append(change)
        if inode.links:
            self.bytes += len(inode.content) - bytes_before

    def change_names(
        self, directory: Directory, names: dict[str, Node | None], needs: NameChange | None = None
    ) -> NameChange:
        for name, node in names.items():
            self._count_link(directory.entries.get(name), -1)
            self._count_link(node, +1)
        change = NameChange(directory, names, needs)
        change.apply(directory.entries)
        directory.pending.append(change)
        self._changed[directory] = None
        return change

    def _count_link(self, node: Node | None, step: int) -> None:
        """Count the bytes of files that have a name. Open handles can still read a file that has lost its last one."""
        if isinstance(node, Inode):
            links_before = node.links
            node.links += step
            if not links_before or not node.links:
                self.bytes += step * len(node.content)

    def end_max(self, inode: Inode, capacity: int | None) -> int:
        """Return the size up to which a file can grow."""
        if capacity is None or not inode.links:
            return sys.maxsize
        return len(inode.content) + max(0, capacity - self.bytes)

    def find_deepest(self, path: Path) -> tuple[Directory, tuple[str, ...]]:
        """Return the last directory on the way to `path`, and the remaining names, which are not directories."""
        self._check()
        names = path.parts[1:] if path.anchor else path.parts
        directory = self._root
        for depth, name in enumerate(names):
            node = directory.entries.get(name)
            if not isinstance(node, Directory):
                return directory, names[depth:]
            directory = node
        return directory, ()

    def find_directory(self, path: Path) -> Directory:
        directory, missing = self.find_deepest(path)
        if missing:
            raise error_at(errno.ENOTDIR if missing[0] in directory.entries else errno.ENOENT, path)
        return directory

    def find(self, path: Path) -> Node:
        node = self.find_directory(path.parent).entries.get(path.name)
        if node is None:
            raise error_at(errno.ENOENT, path)
        return node

    def find_file(self, path: Path) -> Inode:
        node = self.find(path)
        if isinstance(node, Directory):
            raise error_at(errno.EISDIR, path)
        return node

    def set_content(self, path: Path, content: Buffer) -> None:
        """Create a file or replace its bytes, durable at once, with all names of its directory."""
        directory = self.find_directory(path.parent)
        inode = self.find_file(path) if path.name in directory.entries else Inode()
        if inode.links:
            self.bytes += len(content) - len(inode.content)
        if len(content) == len(inode.content):
            inode.content[:] = content  # views see it, as they would see a bit that flipped
        else:
            inode.content = bytearray(content)
        inode.durable = bytearray(content)
        inode.pending.clear()
        if not inode.links:
            self.change_names(directory, {path.name: inode})
        directory.keep(len(directory.pending))

    def cut(self, random: Random) -> None:
        """Keep the first few pending names of each directory."""
        for directory in self._changed:
            directory.keep(random.randint(0, len(directory.pending)))

    def restore(self, other: FileTree, random: Random) -> None:
        """Copy what a power cut leaves of another tree."""
        self._restore(other._root, self._root, {}, random)

    def _restore(self, old: Directory, new: Directory, copies: dict[Node, Node], random: Random) -> None:
        for name, node in old.durable.items():
            copy = copies.get(node)
            if isinstance(node, Inode):
                if copy is None:
                    content = node.after_cut(random)
                    copy = copies[node] = Inode(content, bytearray(content))
                self._count_link(copy, +1)
            elif copy is None:
                directory = copy = copies[node] = Directory()
                self._restore(node, directory, copies, random)
            else:
                continue  # the cut left two names of this directory; the first one stays
            new.entries[name] = new.durable[name] = copy


def error_at(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
