"""Who wants which subject.

A tree of tokens, walked once for each subject that is new; what it said is remembered, so a message costs one look-up
however many subscriptions there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from penstock.broker.memo import Memo
from penstock.health import Usage
from penstock.subject import is_literal

T = TypeVar("T")

# Of subjects that are remembered, and who wants them: 8 bytes for each of those. A walk takes some µs.
_REMEMBERED_BYTES_MAX: Final = 16 << 20


class _Node(Generic[T]):
    __slots__ = ("below", "targets")

    def __init__(self) -> None:
        self.below: dict[bytes, _Node[T]] = {}
        self.targets: dict[T, None] = {}


class Interest(Generic[T]):
    def __init__(self, choose: Callable[[tuple[T, ...]], tuple[T, ...]] | None = None) -> None:
        """`choose` says which of those whose patterns match a subject get it; all, if there is none."""
        self._root: _Node[T] = _Node()
        self._choose = choose
        self._remembered: Memo[tuple[T, ...]] = Memo(_REMEMBERED_BYTES_MAX, lambda found: 8 * len(found))

    def add(self, pattern: bytes, target: T) -> None:
        for each in pattern.split(b" "):
            self._add(each, target)

    def remove(self, pattern: bytes, target: T) -> None:
        for each in pattern.split(b" "):
            self._remove(each, target)

    def match(self, subject: bytes) -> tuple[T, ...]:
        """Everyone whose pattern matches the subject, or those of them that are chosen; each once."""
        found = self._remembered.get(subject)
        if found is None:
            found = self._walk(subject)
            self._remembered.put(subject, found)
        return found

    @property
    def usage(self) -> Usage:
        return self._remembered.usage

    def _add(self, pattern: bytes, target: T) -> None:
        node = self._root
        for token in pattern.split(b"."):
            following = node.below.get(token)
            if following is None:
                following = node.below[token] = _Node()
            node = following
        node.targets[target] = None
        self._forget(pattern)

    def _remove(self, pattern: bytes, target: T) -> None:
        path = [self._root]
        tokens = pattern.split(b".")
        for token in tokens:
            path.append(path[-1].below[token])
        del path[-1].targets[target]
        # Branches that lead nowhere go with it.
        for token, parent, node in zip(reversed(tokens), reversed(path[:-1]), reversed(path[1:]), strict=True):
            if node.targets or node.below:
                break
            del parent.below[token]
        self._forget(pattern)

    def _walk(self, subject: bytes) -> tuple[T, ...]:
        found: dict[T, None] = {}
        nodes = [self._root]
        tokens = subject.split(b".")
        if b"" in tokens:
            return ()  # as in nats-server, also not to `>`
        for token in tokens:
            following = []
            for node in nodes:
                below = node.below
                if not below:
                    continue
                for name in (token, b"*"):
                    if name in below:
                        following.append(below[name])
                if b">" in below:
                    found.update(below[b">"].targets)
            nodes = following
        for node in nodes:
            found.update(node.targets)
        return tuple(found) if self._choose is None else self._choose(tuple(found))

    def _forget(self, pattern: bytes) -> None:
        if is_literal(pattern):
            self._remembered.forget(pattern)
        else:
            self._remembered.clear()
