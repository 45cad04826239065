"""Watch the registry's file: serve the last valid tree and its version."""

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


class WatchedFile:
    """Checked periodically, by one thread at a time. `served` is replaced atomically, so any thread may read it."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        """Raise BadConfig if the file is invalid at the start."""
        self.path = path
        self._versions = _Versions(path.with_name(f"{path.name}.version"), clock)
        self._seen: bytes | str = _read_bytes(path)
        self._taken = self._seen
        tree = self._read(self._seen)
        self.served = Served(tree, self._versions.of(tree))
        # The problems of the current file; while there are any, the previous tree is served.
        self.problems: tuple[str, ...] = ()

    def look(self) -> None:
        """Check the file: serve a new tree, or log its problems.

        It compares the content, not the modification time, which is too coarse for two writes in a row. A change is
        used only after two checks saw the same bytes: an editor that writes in place exposes half of the file for a
        moment, which may parse as a valid file with a parent missing.
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
            logger.error("%s is invalid: still serving version %d", self.path, self.served.version)
            return
        self.problems = ()
        self.served = Served(tree, self._versions.of(tree))
        logger.info("%s changed: serving version %d, %d nodes", self.path, self.served.version, len(tree.nodes))

    def _read(self, data: bytes | str) -> Tree:
        if isinstance(data, str):
            raise BadConfig([data])
        return read(self.path, data)


def _read_bytes(path: Path) -> bytes | str:
    """Return the content of the file, or the reason why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        return f"{path}: {error.strerror}"


class _Versions:
    """Assign each tree a version, which increases with every change and never decreases.

    Brokers ignore versions older than their own, so they would ignore a registry that starts counting again because it
    was moved or lost its file. So a version is the second in which a tree was first seen, or one more than the last. It
    is stored beside the file, so that a restart does not change it; if it cannot be written, the same tree gets a newer
    version, which does no harm.
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
            logger.warning("cannot read the last version: %s", error)

    def of(self, tree: Tree) -> int:
        digest = tree.digest()
        if digest != self._digest:
            self._digest, self._last = digest, max(self._last + 1, self._clock.now_us() // 1_000_000)
            try:
                json_file.save(self._path, {"version": self._last, "digest": digest})
            except OSError as error:
                logger.warning("cannot store version %d in %s: %s", self._last, self._path, error.strerror)
        return self._last
