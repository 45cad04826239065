"""A topic, and what it asks of its logs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock import schema
from penstock.model.subject import AUDIT_SUBJECT
from penstock.schema import NonNegative, Positive, Text, about
from penstock.topic_schema.compatibility import Compatibility

# A segment has a header, a footer and an index: smaller segments would be mostly overhead.
SEGMENT_BYTES_MIN: Final = 4096
# Batches store positions in their segment in 32 bits.
SEGMENT_BYTES_MAX: Final = 2 << 30
# The sequence numbers of the text protocol have 8 bits for the partition.
PARTITIONS_MAX: Final = 256
# A message that still fails after this many deliveries will fail at the next one too.
DELIVERIES_MAX: Final = 1000
# For topics that do not set it.
DELIVERIES_DEFAULT: Final = 4

Partitions = Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)]
Deliveries = Annotated[int, Meta(ge=1, le=DELIVERIES_MAX)]
SegmentBytes = Annotated[int, Meta(ge=SEGMENT_BYTES_MIN, le=SEGMENT_BYTES_MAX)]


class Durability(StrEnum):
    """When a message may be read and its producer is answered: what an acknowledgement is worth."""

    FSYNC = "fsync"  # it is on the disk
    FLUSH = "flush"  # the operating system has it; it is on the disk 100 ms or 500 messages later


class Cleanup(StrEnum):
    DELETE = "delete"  # drop whole segments when they are too old or too many
    COMPACT = "compact"  # keep the latest message of each key


class Dedup(StrEnum):
    """Which messages are duplicates of an earlier one, and are not stored again."""

    OFF = "off"
    ID = "id"  # those with the same message ID; a message without an ID is never a duplicate
    PAYLOAD = "payload"  # those with an equal payload


class OnDamage(StrEnum):
    """How a reader handles damaged messages."""

    STOP = "stop"  # it gets an error with the file and the offsets
    SKIP = "skip"  # it continues behind them, and they are counted


_PARTITIONS: Final = schema.field("partitions", Partitions)
_DEDUP_WINDOW_MS: Final = {Dedup.OFF: 0, Dedup.ID: 5 * 60 * 1000, Dedup.PAYLOAD: 30 * 60 * 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings `topic.*`, the policy in calls and over HTTP, and the options of `penstock topic` are these."""

    durability: Annotated[Durability, about("acknowledge when it is on the disk, or with the operating system")] = (
        Durability.FSYNC
    )
    segment_bytes: Annotated[SegmentBytes, about("seal a segment at this size")] = 64 << 20
    retain_ms: Annotated[Positive | None, about("drop segments that are older")] = None
    retain_bytes: Annotated[Positive | None, about("drop the oldest segments of a partition that is larger")] = None
    retain_for: Annotated[
        Text | None, about("drop no message that this group has not processed, whatever the limits say")
    ] = None
    cleanup: Annotated[Cleanup, about("drop old segments, or keep the latest message of each key")] = Cleanup.DELETE
    # A reader that is slower than this may miss the deletion of a key.
    tombstone_ms: Annotated[NonNegative, about("compaction keeps the deletion of a key for this long")] = 86_400_000
    dedup: Annotated[Dedup, about("how duplicates are recognised")] = Dedup.ID
    dedup_window_ms: Annotated[
        Positive | None, about("how long a message is remembered for that; none: 5 minutes by id, 30 by payload")
    ] = None
    # Without dead letters, a message is redelivered forever.
    ack_deadline_ms: Annotated[Positive, about("redeliver a message that is not acknowledged by then")] = 5_000
    deliveries_max: Annotated[
        Deliveries | None,
        about("deliveries of a message, with the first; none: 4, and no limit for the Provider's clients"),
    ] = None
    dead_letters: Annotated[bool, about("keep messages that reached deliveries_max as dead letters")] = True
    refresh_wait_ms: Annotated[Positive, about("how long a refresh waits for a consumer that does not answer")] = 60_000
    on_damage: Annotated[OnDamage, about("readers stop with an error at damaged messages, or skip them")] = (
        OnDamage.STOP
    )
    schema_compatibility: Annotated[
        Compatibility, about("which version of the schema must read the messages of the other")
    ] = Compatibility.BACKWARD
    schema_enforced: Annotated[bool, about("refuse values that do not match the newest schema")] = False

    def __post_init__(self) -> None:
        schema.check(self)

    @property
    def dedup_window_us(self) -> int:
        """How long a duplicate is recognised; 0: never."""
        window_ms = _DEDUP_WINDOW_MS[self.dedup]
        if window_ms and self.dedup_window_ms is not None:
            window_ms = self.dedup_window_ms
        return window_ms * 1000

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Policy:
        """Unknown names are refused: a policy that is silently not followed is worse than none. Missing names have
        their defaults, as in data that was written before they existed."""
        return schema.build(cls, data)


@dataclass(frozen=True, slots=True)
class Topic:
    id: int
    name: str
    partitions: int
    policy: Policy
    # Identifies a piped topic at the broker where it comes from. Such a topic is read-only and has the same offsets.
    origin: str | None = None

    def __post_init__(self) -> None:
        try:
            _PARTITIONS.read(self.partitions)
        except schema.Invalid as problem:
            raise ValueError(problem.of("partitions")) from None

    @property
    def is_internal(self) -> bool:
        """Whether the topic is the broker's own: clients neither read nor write it. They may read the audit trail."""
        return self.name.startswith("$") and not self.is_audit

    @property
    def is_audit(self) -> bool:
        return self.name == AUDIT_SUBJECT.decode()

    def to_json(self) -> dict[str, Any]:
        origin = {} if self.origin is None else {"origin": self.origin}
        return {"name": self.name, "partitions": self.partitions, "policy": self.policy.to_json(), **origin}

    @classmethod
    def from_json(cls, topic_id: int, data: dict[str, Any]) -> Topic:
        policy = Policy.from_json(data["policy"])
        return cls(topic_id, data["name"], data["partitions"], policy, data.get("origin"))
