"""The partition of a message, as the broker itself would choose it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Self

from penstock.model.headers import hash_key

# Messages that may go to any partition change partition after this many.
PIECE_MESSAGES: Final = 16


class Layout(NamedTuple):
    """The layout of a topic, for a producer."""

    name: bytes
    id: int
    partitions: int

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        return cls(found["topic"].encode(), found["id"], found["partitions"])

    def choose(self, subject: bytes, key: bytes | None) -> int | None:
        """Return the partition of a message; None: any partition, in turn."""
        if key is not None:
            return hash_key(key) % self.partitions
        if subject != self.name:
            return hash_key(subject) % self.partitions
        return None if self.partitions > 1 else 0
