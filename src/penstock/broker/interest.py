"""The interest index: which subscriptions want a subject.

A tree of tokens, walked once for each subject that is new; what it said is remembered, so a message costs one look-up
however many subscriptions there are.

A branch that does not fork is one node, however many tokens it has. So a pattern adds at most two nodes: its
own, and one where it leaves the way of others. A node for each token would take 350 bytes for two bytes of a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from penstock.broker.memo import Memo
from penstock.health import Usage
from penstock.model.subject import is_literal

T = TypeVar("T")

# Of subjects that are remembered, and who wants them: 8 bytes for each of those. A walk takes some µs.
_REMEMBERED_BYTES_MAX: Final = 16 << 20


class _Node(Generic[T]):
    """`path` are the tokens from the parent to here; `below` has the children, by the first token of their paths."""

    __slots__ = ("below", "path", "targets")

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.below: dict[bytes, _Node[T]] | None = None
        self.targets: dict[T, None] | None = None

    def add_below(self, token: bytes, node: _Node[T]) -> None:
        if self.below is None:
            self.below = {}
        self.below[token] = node

    def split(self, tokens: Sequence[bytes], count: int) -> _Node[T]:
        """Return a new parent with the first `count` of the tokens that lead here; this node keeps the others."""
        parent: _Node[T] = _Node(b".".join(tokens[:count]))
        self.path = b".".join(tokens[count:])
        parent.add_below(tokens[count], self)
        return parent

    def merge(self) -> None:
        """Be one with the only child, if nobody wants what ends here."""
        if not self.targets and self.below is not None and len(self.below) == 1:
            (child,) = self.below.values()
            self.path = b"%b.%b" % (self.path, child.path)
            self.below, self.targets = child.below, child.targets


class Interest(Generic[T]):
    def __init__(self, choose: Callable[[tuple[T, ...]], tuple[T, ...]] | None = None) -> None:
        """`choose` says which of those whose patterns match a subject get it; all, if there is none."""
        self._root: _Node[T] = _Node(b"")
        self._choose = choose
        self._remembered: Memo[tuple[T, ...]] = Memo(_REMEMBERED_BYTES_MAX, lambda found: 8 * len(found))

    def add(self, pattern: bytes, target: T) -> None:
        for each in pattern.split(b" "):
            self._add(each, target)

    def remove(self, pattern: bytes, target: T) -> None:
        for each in pattern.split(b" "):
            self._remove(each, target)

    def match(self, subject: bytes) -> tuple[T, ...]:
        """Return the targets whose pattern matches the subject, or those of them that are chosen; each once."""
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
        tokens = pattern.split(b".")
        while tokens:
            child = node.below.get(tokens[0]) if node.below else None
            if child is None:
                child = _Node(b".".join(tokens))
                node.add_below(tokens[0], child)
                count = len(tokens)
            else:
                path = child.path.split(b".")
                count = _count_common(path, tokens)
                if count < len(path):
                    child = child.split(path, count)
                    node.add_below(tokens[0], child)
            node, tokens = child, tokens[count:]
        if node.targets is None:
            node.targets = {}
        node.targets[target] = None
        self._forget(pattern)

    def _remove(self, pattern: bytes, target: T) -> None:
        parent = node = self._root
        tokens, token = pattern.split(b"."), b""
        while tokens:
            token, parent = tokens[0], node
            node = (parent.below or {})[token]
            path = node.path.split(b".")
            if tokens[: len(path)] != path:
                raise KeyError(pattern)
            tokens = tokens[len(path) :]
        if node.targets is None:
            raise KeyError(pattern)
        del node.targets[target]
        if not node.targets:
            node.targets = None
            node.merge()
            if node.below is None and node.targets is None and parent.below is not None:
                self._drop(parent, token)
        self._forget(pattern)

    def _drop(self, parent: _Node[T], token: bytes) -> None:
        """Remove a child that leads nowhere."""
        assert parent.below is not None
        del parent.below[token]
        if not parent.below:
            parent.below = None
        elif parent is not self._root:
            parent.merge()

    def _walk(self, subject: bytes) -> tuple[T, ...]:
        found: dict[T, None] = {}
        tokens = subject.split(b".")
        if b"" in tokens:
            return ()  # as in nats-server, also not to `>`
        # Nodes whose paths match, and how many tokens they and those above them have.
        nodes = [(self._root, 0)]
        for node, at in nodes:
            if at == len(tokens):
                found.update(node.targets or {})
            elif node.below:
                for name in (tokens[at], b"*", b">"):
                    child = node.below.get(name)
                    if child is not None and (end := _match(child.path, tokens, at)):
                        nodes.append((child, end))
        return tuple(found) if self._choose is None else self._choose(tuple(found))

    def _forget(self, pattern: bytes) -> None:
        if is_literal(pattern):
            self._remembered.forget(pattern)
        else:
            self._remembered.clear()


def _count_common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Return how many tokens both begin with."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _match(path: bytes, tokens: Sequence[bytes], at: int) -> int:
    """Return up to where a path, whose first token matches, matches the tokens from `at` on; 0 if it does not."""
    if b"." not in path:
        return len(tokens) if path == b">" else at + 1
    wanted = path.split(b".")
    end = at + len(wanted)
    if end > len(tokens):
        return 0
    if wanted[-1] == b">":
        wanted.pop()
        end = len(tokens)
    return end if all(want in (b"*", token) for want, token in zip(wanted, tokens[at:], strict=False)) else 0
