"""A topic, and what it asks of its logs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

# A segment has a head, a foot and an index: smaller ones would be mostly that.
SEGMENT_BYTES_MIN: Final = 4096
# Batches tell positions in their segment in 32 bits.
SEGMENT_BYTES_MAX: Final = 2 << 30
# The sequences that the text door gives to messages have 8 bits for the partition.
PARTITIONS_MAX: Final = 256
# A message that still fails after so many deliveries will not be taken at the next one either.
DELIVERIES_MAX: Final = 1000
# Where a topic does not say.
DELIVERIES_DEFAULT: Final = 4


class Durability(StrEnum):
    """When a message may be read and its producer told: what an acknowledgement is worth."""

    FSYNC = "fsync"  # it is on the disk
    FLUSH = "flush"  # it is with the operating system, and on the disk 100 ms or 500 messages later


class Cleanup(StrEnum):
    DELETE = "delete"  # whole segments, when they are too old or too many
    COMPACT = "compact"  # of each key the latest message stays


class Dedup(StrEnum):
    """Which messages are taken for a repetition of an earlier one, and not stored again."""

    OFF = "off"
    ID = "id"  # those with the same message id; one without an id is never a repetition
    PAYLOAD = "payload"  # those with an equal payload


class OnDamage(StrEnum):
    """What a reader does where stored messages are damaged."""

    STOP = "stop"  # it gets an error with the file and the offsets
    SKIP = "skip"  # it goes on behind them, and they are counted


_ENUMS: Final[dict[str, type[StrEnum]]] = {
    "durability": Durability,
    "cleanup": Cleanup,
    "dedup": Dedup,
    "on_damage": OnDamage,
}
# What each number must be at least, and at most if there is a bound.
_BOUNDS: Final[dict[str, tuple[int, int | None]]] = {
    "segment_bytes": (SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX),
    "retain_ms": (1, None),
    "retain_bytes": (1, None),
    "tombstone_ms": (0, None),
    "dedup_window_ms": (1, None),
    "ack_deadline_ms": (1, None),
    "deliveries_max": (1, DELIVERIES_MAX),
    "refresh_wait_ms": (1, None),
}
_OPTIONAL: Final = frozenset({"retain_ms", "retain_bytes", "dedup_window_ms", "deliveries_max"})
_DEDUP_WINDOW_MS: Final = {Dedup.OFF: 0, Dedup.ID: 5 * 60 * 1000, Dedup.PAYLOAD: 30 * 60 * 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    durability: Durability = Durability.FSYNC
    segment_bytes: int = 64 << 20
    cleanup: Cleanup = Cleanup.DELETE
    retain_ms: int | None = None
    retain_bytes: int | None = None
    # A reader that is slower than this may miss that a key was deleted.
    tombstone_ms: int = 24 * 60 * 60 * 1000
    dedup: Dedup = Dedup.ID
    # How long a message is remembered for that; None: 5 minutes by id, 30 minutes by payload.
    dedup_window_ms: int | None = None
    # A message that is not acknowledged within this time is delivered again, so many times in all; then it
    # goes to the dead letters. Without those it is delivered again forever. None: what the members of a group expect.
    ack_deadline_ms: int = 5_000
    deliveries_max: int | None = None
    dead_letters: bool = True
    # A consumer that does not answer in a refresh, or is away, is waited for so long.
    refresh_wait_ms: int = 60_000
    on_damage: OnDamage = OnDamage.STOP

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if type(value) is not int:
                raise ValueError(f"{name} is {value!r}, it must be a whole number")
            if value < low:
                raise ValueError(f"{name} is {value}, it must be at least {low}")
            if high is not None and value > high:
                raise ValueError(f"{name} is {value}, it must be at most {high}")
        for name, kind in _ENUMS.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(kind)}")
        if not isinstance(self.dead_letters, bool):
            raise ValueError(f"dead_letters is {self.dead_letters!r}, it must be true or false")

    @property
    def dedup_window_us(self) -> int:
        """For how long a repetition is known; 0: not at all."""
        window_ms = _DEDUP_WINDOW_MS[self.dedup]
        if window_ms and self.dedup_window_ms is not None:
            window_ms = self.dedup_window_ms
        return window_ms * 1000

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Policy:
        """Unknown names are refused: a policy that is silently not followed is worse than none. Names that are
        missing have their defaults, as in what was written before they were known."""
        unknown = data.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown in a policy: {', '.join(sorted(unknown))}")
        known = dict(data)
        for name, kind in _ENUMS.items():
            if known.get(name) in list(kind):
                known[name] = kind(known[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Topic:
    id: int
    name: str
    partitions: int
    policy: Policy
    # Of a topic that is piped from another broker: which one it is there. It is read-only, and numbered as there.
    origin: str | None = None

    def __post_init__(self) -> None:
        if type(self.partitions) is not int or not 1 <= self.partitions <= PARTITIONS_MAX:
            raise ValueError(f"partitions is {self.partitions!r}, it must be a whole number from 1 to {PARTITIONS_MAX}")

    @property
    def is_internal(self) -> bool:
        """Whether it is the broker's own: nobody else reads or writes it, and the broker drops what it has done."""
        return self.name.startswith("$")

    def to_json(self) -> dict[str, Any]:
        origin = {} if self.origin is None else {"origin": self.origin}
        return {"name": self.name, "partitions": self.partitions, "policy": self.policy.to_json(), **origin}

    @classmethod
    def from_json(cls, topic_id: int, data: dict[str, Any]) -> Topic:
        policy = Policy.from_json(data["policy"])
        return cls(topic_id, data["name"], data["partitions"], policy, data.get("origin"))
