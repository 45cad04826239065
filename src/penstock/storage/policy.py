"""A topic, and what it asks of its logs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

# Batches tell positions in their segment in 32 bits.
SEGMENT_BYTES_MAX: Final = 2 << 30


class Durability(StrEnum):
    """When a message may be read and its producer told: what an acknowledgement is worth."""

    FSYNC = "fsync"  # it is on the disk
    FLUSH = "flush"  # it is with the operating system, and on the disk 100 ms or 500 messages later


class Cleanup(StrEnum):
    DELETE = "delete"  # whole segments, when they are too old or too many
    COMPACT = "compact"  # of each key the latest message stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    durability: Durability = Durability.FSYNC
    segment_bytes: int = 64 << 20
    cleanup: Cleanup = Cleanup.DELETE
    retain_ms: int | None = None
    retain_bytes: int | None = None
    # A reader that is slower than this may miss that a key was deleted.
    tombstone_ms: int = 24 * 60 * 60 * 1000

    def __post_init__(self) -> None:
        for name, low in (("segment_bytes", 4096), ("retain_ms", 1), ("retain_bytes", 1), ("tombstone_ms", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} is {value}, it must be at least {low}")
        if self.segment_bytes > SEGMENT_BYTES_MAX:
            raise ValueError(f"segment_bytes is {self.segment_bytes}, it must be at most {SEGMENT_BYTES_MAX}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Policy:
        """Unknown names are refused: a policy that is silently not followed is worse than none."""
        unknown = data.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown in a policy: {', '.join(sorted(unknown))}")
        known = dict(data)
        if "durability" in known:
            known["durability"] = Durability(known["durability"])
        if "cleanup" in known:
            known["cleanup"] = Cleanup(known["cleanup"])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Topic:
    id: int
    name: str
    partitions: int
    policy: Policy

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "partitions": self.partitions, "policy": self.policy.to_json()}

    @classmethod
    def from_json(cls, topic_id: int, data: dict[str, Any]) -> Topic:
        return cls(topic_id, data["name"], data["partitions"], Policy.from_json(data["policy"]))
