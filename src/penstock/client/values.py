"""What a client gives and takes, besides messages: plain values."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self, TypedDict


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where a message is stored; `duplicate`: it was there already, and this is where."""

    topic: str
    partition: int
    offset: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for `publish_many`, with all that `publish` takes."""

    subject: str
    value: bytes | None = None
    key: bytes | str | None = None
    headers: Mapping[str, str] | None = None
    message_id: str | None = None
    delay: float | timedelta | datetime | str | None = None
    ttl: float | timedelta | str | None = None


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """`start` to `committed` can be read; `end` is what was appended, and may still wait for the disk."""

    partition: int
    start: int
    committed: int
    end: int
    bytes: int

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["partition"], found["start"], found["committed"], found["end"], found["bytes"])


class Owner(NamedTuple):
    """The topic that stores a subject."""

    topic: str
    id: int
    partitions: int


@dataclass(frozen=True, slots=True)
class Topic:
    """`refused`: why it cannot be served, if it cannot. `warning`: what a change means for messages that are stored, in
    the answer to `alter_topic`."""

    name: str
    id: int
    partitions: int
    policy: dict[str, Any]
    refused: str | None
    positions: list[PartitionPosition]
    warning: str | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        positions = [PartitionPosition.from_json(each) for each in found["positions"]]
        return cls(
            found["name"],
            found["id"],
            found["partitions"],
            found["policy"],
            found["refused"],
            positions,
            found.get("warning"),
        )


@dataclass(frozen=True, slots=True)
class GroupMember:
    name: str
    address: str
    unacknowledged: int

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["name"], found["address"], found["unacknowledged"])


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """All below `committed` is done; `next` is delivered next; `pending` are delivered and not acknowledged."""

    topic: str
    topic_id: int
    partition: int
    committed: int
    next: int
    end: int
    pending: int
    lag: int

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(
            found["topic"],
            found["topic_id"],
            found["partition"],
            found["committed"],
            found["next"],
            found["end"],
            found["pending"],
            found["lag"],
        )


@dataclass(frozen=True, slots=True)
class Group:
    """`lag`: messages that are not done. `lost`: those that retention dropped before they were; `expired`: those whose
    TTL ended before they were. `pattern` is `orders orders.>` if it reads a whole topic. `hint`: what it may miss,
    where this one group is asked for."""

    name: str
    pattern: str
    mode: str
    generation: int
    lag: int
    pending: int
    redelivered: int
    dead_lettered: int
    lost: int
    members: list[GroupMember]
    positions: list[GroupPosition]
    hint: str | None = None
    expired: int = 0

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(
            found["name"],
            found["pattern"],
            found["mode"],
            found["generation"],
            found["lag"],
            found["pending"],
            found["redelivered"],
            found["dead_lettered"],
            found["lost"],
            [GroupMember.from_json(each) for each in found["members"]],
            [GroupPosition.from_json(each) for each in found["positions"]],
            found.get("hint"),
            found.get("expired", 0),
        )


@dataclass(frozen=True, slots=True)
class RefreshedGroup:
    """`reason`: why it was given up, if it was. `waits_for`: members that are to answer, or to come back. `left`: how
    many messages are to be replayed still."""

    group: str
    state: str
    reason: str | None
    waits_for: list[str]
    left: int

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["group"], found["state"], found["reason"], list(found["waits_for"]), found["left"])


@dataclass(frozen=True, slots=True)
class Refresh:
    """The last refresh of a topic. `state`: IDLE if there was none; RESET_SENT, WAITING_FOR_ACKS, REPLAYING or
    READY_SENT, whichever the group is in that is furthest behind; COMPLETED, or ABORTED with the reason."""

    topic: str
    state: str
    reason: str | None
    started_us: int | None
    groups: list[RefreshedGroup]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        groups = [RefreshedGroup.from_json(each) for each in found["groups"]]
        return cls(found["topic"], found["state"], found["reason"], found["started_us"], groups)

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way."""
        return self.state in ("IDLE", "COMPLETED", "ABORTED")


class LetterFilter(TypedDict, total=False):
    """Which dead letters: those that meet every condition that is given. `reason`: part of it, in upper or lower case.
    `since` and `until`: when they died. `partition` and `offsets`: where they are themselves."""

    group: str
    reason: str
    since: str | datetime | timedelta | float
    until: str | datetime | timedelta | float
    partition: int
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`partition` and `offset` are its own; `topic`, `origin_partition` and `origin_offset` where the message was.
    `reason`: why its last delivery failed; `timestamp_us`: when it became a dead letter, in µs since 1970."""

    partition: int
    offset: int
    subject: str
    topic: str
    origin_partition: int
    origin_offset: int
    group: str
    reason: str
    attempts: int
    timestamp_us: int
    value: bytes
    headers: dict[str, str]
    redriven: bool

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(
            found["partition"],
            found["offset"],
            found["subject"],
            found["topic"],
            found["origin_partition"],
            found["origin_offset"],
            found["group"],
            found["reason"],
            found["attempts"],
            found["timestamp_us"],
            base64.b64decode(found["value"]),
            read_headers(found["headers"].encode()),
            found["redriven"],
        )


@dataclass(frozen=True, slots=True)
class Redriven:
    """How many dead letters were redriven, how many could not be, and why the first of these could not."""

    count: int
    skipped: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that waits until `due_us`, in µs since 1970. `offset` is where it waits, and may change meanwhile."""

    offset: int
    due_us: int
    subject: str
    key: bytes | None
    message_id: str | None
    headers: dict[str, str]
    value: bytes

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(
            found["offset"],
            found["due_us"],
            found["subject"],
            None if found["key"] is None else base64.b64decode(found["key"]),
            found["message_id"],
            read_headers(found["headers"].encode()),
            base64.b64decode(found["value"]),
        )


def arguments(message: tuple[str, bytes] | Outgoing) -> tuple[str, bytes | None, dict[str, Any]]:
    """What `publish` takes of it: subject, value, and the rest by name."""
    if not isinstance(message, Outgoing):
        subject, value = message
        return subject, value, {}
    rest = ("key", "headers", "message_id", "delay", "ttl")
    return message.subject, message.value, {name: getattr(message, name) for name in rest}


def read_headers(block: bytes) -> dict[str, str]:
    """Header lines as names and values; of a name that comes twice, the first."""
    fields: dict[str, str] = {}
    for line in block.decode(errors="replace").split("\n"):
        name, colon, value = line.partition(":")
        if colon and name[:1] not in " \t":
            fields.setdefault(name.rstrip(" \t"), value.strip(" \t\r"))
    return fields
