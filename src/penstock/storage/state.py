"""What the broker must not forget: topics and their policy, positions of groups, decisions of transactions.

It is written to the state topic first, as ordinary batches of keyed JSON messages, so that one mechanism makes it
durable and, later, replicated. The latest value of each key is kept here; `meta.db` follows, for queries and so
that a start need not read the whole topic.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from penstock.batch import Batch, encode
from penstock.errors import PenstockError
from penstock.storage.log import Done, Log
from penstock.storage.meta import Change, Meta

# The id of the state topic, which has one partition. Other topics count from 1.
STATE_TOPIC: Final = 0

_READ_BYTES: Final = 1 << 20


class State:
    def __init__(self, log: Log, meta: Meta) -> None:
        self._log = log
        self._values: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self._unprojected: list[Change] = []
        self._applied = meta.applied()
        if not log.segments[-1].base <= self._applied <= log.end:
            # What it missed may have been compacted away since, deletions too.
            meta.forget_state()
            self._applied = log.start
        self._apply(meta.state())
        self._catch_up()

    def get(self, kind: str, key: str) -> Any:
        """The committed value of a key, None if it has none."""
        return self._values[kind].get(key)

    def items(self, kind: str) -> list[tuple[str, Any]]:
        return list(self._values[kind].items())

    def write(self, changes: Sequence[Change], done: Done | None = None) -> None:
        """Set and delete values, all or none of them. They count once they are committed; `done` tells."""
        batch = encode(
            [b"" if value is None else json.dumps(value).encode() for _, _, value in changes],
            keys=[f"{kind}/{key}".encode() for kind, key, _ in changes],
            tombstones=[value is None for _, _, value in changes],
            timestamp=0,
        )

        def committed(offset: int, error: PenstockError | None) -> None:
            if error is None:
                self._apply(changes)
                self._unprojected += changes
                self._applied = max(self._applied, batch.end)
            if done is not None:
                done(offset, error)

        self._log.append(batch, done=committed)

    def unprojected(self) -> tuple[list[Change], int]:
        """What `meta.db` has not seen yet, for `Meta.apply`, which may be called by another thread."""
        return list(self._unprojected), self._applied

    def projected(self, changes: list[Change]) -> None:
        """`meta.db` has seen these, which were the first."""
        del self._unprojected[: len(changes)]

    def _apply(self, changes: Sequence[Change]) -> None:
        for kind, key, value in changes:
            if value is None:
                self._values[kind].pop(key, None)
            else:
                self._values[kind][key] = value

    def _catch_up(self) -> None:
        while batches := self._log.read(self._applied, _READ_BYTES):
            for batch in batches:
                changes = list(read_changes(batch))
                self._apply(changes)
                self._unprojected += changes
                self._applied = batch.end


def read_changes(batch: Batch) -> Iterator[Change]:
    """What a batch of the state topic says."""
    columns = batch.columns()
    keys, tombstones = columns.keys(), columns.tombstones()
    assert keys is not None
    assert tombstones is not None
    for key, value, gone in zip(keys, columns.values(), tombstones, strict=True):
        assert key is not None
        kind, _, name = key.decode().partition("/")
        yield Change(kind, name, None if gone else json.loads(value))
