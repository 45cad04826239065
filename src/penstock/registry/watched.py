"""The registry's file as it changes: the last tree that was right, and its version."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from penstock.clock import Clock
from penstock.errors import BadConfig
from penstock.pipe import json_file
from penstock.registry.file import read
from penstock.registry.tree import Tree

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    tree: Tree
    version: int


class Watched:
    """Looked at now and then, by one thread at a time. `served` is replaced whole, so that anyone may read it."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        """BadConfig if there is nothing right to begin with."""
        self.path = path
        self._versions = _Versions(path.with_name(f"{path.name}.version"), clock)
        self._seen: bytes | str = _read_bytes(path)
        self._taken = self._seen
        tree = self._read(self._seen)
        self.served = Served(tree, self._versions.of(tree))
        # What is wrong with the file as it is now; what it held before is served.
        self.problems: tuple[str, ...] = ()

    def look(self) -> None:
        """Take what is new in the file, or say what is wrong with it.

        The bytes are compared, not the time of the last change: that is coarser than two writes may be apart. And they
        are taken when they were the same twice: who writes a file in place shows half of it for a moment, which may
        look like a whole one with a parent less.
        """
        before, self._seen = self._seen, _read_bytes(self.path)
        if self._seen != before or self._seen == self._taken:
            return
        self._taken = self._seen
        try:
            tree = self._read(self._seen)
        except BadConfig as error:
            self.problems = tuple(error.problems)
            for problem in self.problems:
                logger.error("%s", problem)
            logger.error("%s is wrong: version %d stays, as it was before", self.path, self.served.version)
            return
        self.problems = ()
        self.served = Served(tree, self._versions.of(tree))
        logger.info("%s is taken: version %d, %d nodes", self.path, self.served.version, len(tree.nodes))

    def _read(self, data: bytes | str) -> Tree:
        if isinstance(data, str):
            raise BadConfig([data])
        return read(self.path, data)


def _read_bytes(path: Path) -> bytes | str:
    """What is in the file, or why that cannot be told."""
    try:
        return path.read_bytes()
    except OSError as error:
        return f"{path}: {error.strerror}"


class _Versions:
    """A number for each tree, which goes up with every change, and never back.

    A broker does not take an older version than it has, so a registry that began to count anew, because it was moved
    or lost what it had kept, would not be heard. So a version is the second in which a tree was first seen, or one more
    than the last. It is kept beside the file, so that a restart alone changes nothing; where that cannot be written it
    is a newer version of the same, which does no harm.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._digest, self._last = "", 0
        try:
            document = json_file.load(path) or {}
            digest, version = document.get("digest"), document.get("version")
            if isinstance(digest, str) and isinstance(version, int):
                self._digest, self._last = digest, version
        except (OSError, ValueError) as error:
            logger.warning("the last version is not known: %s", error)

    def of(self, tree: Tree) -> int:
        digest = tree.digest()
        if digest != self._digest:
            self._digest, self._last = digest, max(self._last + 1, self._clock.now_us() // 1_000_000)
            try:
                json_file.save(self._path, {"version": self._last, "digest": digest})
            except OSError as error:
                logger.warning("version %d is not kept in %s: %s", self._last, self._path, error.strerror)
        return self._last
