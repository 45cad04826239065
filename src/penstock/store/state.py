"""The state that the broker must not lose: topics and policies, positions of groups, decisions of transactions.

It is written to the state topic, as ordinary batches of keyed JSON messages, so that one mechanism makes everything
durable and, later, replicated. The latest value of each key is kept here. `meta.db` follows, for queries, and so that a
start need not read the whole topic.

A large value that changes often is not rewritten each time. Instead an `Addition` stores what changed, as a message
with a key of its own: `<kind>+/<key>/<number>`. Setting or deleting the value deletes its additions in the same batch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from penstock.errors import PenstockError
from penstock.log.log import Log
from penstock.model.batch import Batch, encode
from penstock.outcome import Outcome
from penstock.store.meta import Change, Meta

# The ID of the state topic, which has one partition. The IDs of other topics begin at 1.
STATE_TOPIC: Final = 0

_READ_BYTES: Final = 1 << 20
# The suffix of the kind of additions.
_ADDED: Final = "+"

Key = tuple[str, str]  # kind and key


class Addition(NamedTuple):
    """A record beside the value of a key, until the value is set again."""

    kind: str
    key: str
    value: Any


class StoreState:
    def __init__(self, log: Log, meta: Meta) -> None:
        self._log = log
        self._values: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        # The numbers of the additions of each key.
        self._added: dict[Key, _Added] = {}
        # The latest change of each key since the last projection.
        self._unprojected: dict[Key, Change] = {}
        self._applied = meta.applied()
        # The log is opened with `meta.db` as its witness.
        assert self._applied <= log.end
        if not log.segments[-1].base <= self._applied:
            # Changes that it missed may have been compacted away, deletions too.
            meta.forget_state()
            self._applied = log.start
        self._apply(meta.state())
        self._catch_up()
        self._find_additions()

    def get(self, kind: str, key: str) -> Any:
        """Return the committed value of a key, or None."""
        return self._values[kind].get(key)

    def items(self, kind: str) -> list[tuple[str, Any]]:
        return list(self._values[kind].items())

    def everything(self) -> Iterator[Change]:
        """Yield all committed values and additions."""
        for kind, values in self._values.items():
            for key, value in values.items():
                yield Change(kind, key, value)

    def additions(self, kind: str, key: str) -> list[Any]:
        """Return the committed additions of a key, in order."""
        added = self._added.get((kind, key))
        if added is None:
            return []
        found = [self.get(*_place(kind, key, number)) for number in added.numbers()]
        return [value for value in found if value is not None]

    def write(self, changes: Sequence[Change | Addition], outcome: Outcome | None = None) -> None:
        """Set and delete values atomically. They count when they are committed: then `outcome` is settled."""
        # The keys whose additions these changes delete, and up to which number.
        replaced: list[tuple[Key, _Added, int]] = []
        written: list[Change] = []
        for change in changes:
            key = (change.kind, change.key)
            added = self._added.get(key)
            if isinstance(change, Addition):
                if added is None:
                    added = self._added[key] = _Added()
                added.last += 1
                written.append(Change(*_place(*key, added.last), change.value))
                continue
            written.append(change)
            if added is not None:
                written += [Change(*_place(*key, number), None) for number in added.numbers()]
                replaced.append((key, added, added.last))
        batch = encode(
            [b"" if value is None else json.dumps(value, separators=(",", ":")).encode() for _, _, value in written],
            keys=[f"{kind}/{key}".encode() for kind, key, _ in written],
            tombstones=[value is None for _, _, value in written],
            timestamp=0,
        )

        def committed(error: PenstockError | None) -> None:
            if error is None:
                self._commit(written, batch.end)
                for key, added, last in replaced:
                    added.first = last + 1
                    # Numbers start again at 1. A later write may still refer to this object, but only to numbers below.
                    if added.last == last and self._added.get(key) is added:
                        del self._added[key]
            if outcome is not None:
                outcome.settle(error)

        self._log.append(batch, outcome=Outcome(committed))

    def unprojected(self) -> tuple[list[Change], int]:
        """Return the changes that `meta.db` lacks, for `Meta.apply`, which another thread may call."""
        return list(self._unprojected.values()), self._applied

    def projected(self, changes: list[Change]) -> None:
        """Drop these changes, which `meta.db` has, except those of keys that have changed again."""
        for change in changes:
            key = (change.kind, change.key)
            if self._unprojected.get(key) is change:
                del self._unprojected[key]

    def _commit(self, changes: list[Change], end: int) -> None:
        self._apply(changes)
        self._unprojected.update(((change.kind, change.key), change) for change in changes)
        self._applied = max(self._applied, end)

    def _apply(self, changes: Sequence[Change]) -> None:
        for kind, key, value in changes:
            if value is None:
                self._values[kind].pop(key, None)
            else:
                self._values[kind][key] = value

    def _catch_up(self) -> None:
        while batches := self._log.read(self._applied, _READ_BYTES):
            for batch in batches:
                self._commit(list(read_changes(batch)), batch.end)

    def _find_additions(self) -> None:
        for kind in [kind for kind in self._values if kind.endswith(_ADDED)]:
            for place in self._values[kind]:
                key, _, number = place.rpartition("/")
                added = self._added.setdefault((kind.removesuffix(_ADDED), key), _Added(int(number), int(number)))
                added.first, added.last = min(added.first, int(number)), max(added.last, int(number))


class _Added:
    """The range of numbers that the additions of a key may have, including pending ones."""

    __slots__ = ("first", "last")

    def __init__(self, first: int = 1, last: int = 0) -> None:
        self.first = first
        self.last = last

    def numbers(self) -> range:
        return range(self.first, self.last + 1)


def _place(kind: str, key: str, number: int) -> Key:
    """Return the kind and the key of an addition."""
    return kind + _ADDED, f"{key}/{number}"


def read_changes(batch: Batch) -> Iterator[Change]:
    """Yield the changes in a batch of the state topic."""
    columns = batch.columns()
    keys, tombstones = columns.keys(), columns.tombstones()
    assert keys is not None
    assert tombstones is not None
    for key, value, gone in zip(keys, columns.values(), tombstones, strict=True):
        assert key is not None
        kind, _, name = key.decode().partition("/")
        yield Change(kind, name, None if gone else json.loads(value))
