"""Which partition a message belongs to: what the broker itself would choose."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Self

from penstock.headers import hash_key

# So many messages that may go anywhere go to one partition before the next has its turn.
PIECE_MESSAGES: Final = 16


class Layout(NamedTuple):
    """A topic as far as a producer must know it."""

    name: bytes
    id: int
    partitions: int

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        return cls(found["topic"].encode(), found["id"], found["partitions"])

    def choose(self, subject: bytes, key: bytes | None) -> int | None:
        """None: any of them; a producer gives each some messages in turn."""
        if key is not None:
            return hash_key(key) % self.partitions
        if subject != self.name:
            return hash_key(subject) % self.partitions
        return None if self.partitions > 1 else 0
