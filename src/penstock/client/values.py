"""The values that a client takes and returns, besides messages."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self, TypedDict

from penstock.topic_schema.ddl import read_ddl, write_ddl
from penstock.topic_schema.json_schema import read_json_schema, write_json_schema

Headers = Mapping[str, str] | None
Delay = float | timedelta | datetime | str | None
TTL = float | timedelta | str | None
Moment = str | datetime | timedelta | float
Place = str | int | datetime | timedelta | float


@dataclass(frozen=True, slots=True)
class Receipt:
    """The place of a stored message. `duplicate`: it was already stored, at this offset."""

    topic: str
    partition: int
    offset: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for `publish_many`, with the parameters of `publish`."""

    subject: str
    value: bytes | None = None
    key: bytes | str | None = None
    headers: Headers = None
    message_id: str | None = None
    delay: Delay = None
    ttl: TTL = None


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """The offsets of a partition. Messages from `start` to `committed` can be read. `end`: the end of the log, with
    messages that are not committed yet. `held_bytes`: the size of what retention would drop, and keeps for the group in
    `retain_for`."""

    partition: int
    start: int
    committed: int
    end: int
    bytes: int
    held_bytes: int = 0

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        offsets = found["partition"], found["start"], found["committed"], found["end"]
        # An earlier broker does not say what is held.
        return cls(*offsets, found["bytes"], found.get("held_bytes", 0))


class SubjectOwner(NamedTuple):
    """The topic that stores a subject."""

    topic: str
    id: int
    partitions: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic. `refused`: why the broker cannot serve it. `warning`: what `alter_topic` means for stored messages."""

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
class TopicSchema:
    """A version of the schema of a topic. `format`: json (JSON Schema) or ddl (Spark DDL), in which `text` is."""

    topic: str
    version: int
    format: str
    text: str
    registered_us: int

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["topic"], found["version"], found["format"], found["schema"], found["registered_us"])

    def to_ddl(self) -> str:
        """Return the schema as Spark DDL. Raise BadSchema if DDL cannot express it."""
        return self.text if self.format == "ddl" else write_ddl(read_json_schema(self.text))

    def to_json_schema(self) -> str:
        """Return the schema as JSON Schema."""
        return self.text if self.format == "json" else json.dumps(write_json_schema(read_ddl(self.text)), indent=2)


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A version of the schema of a topic, without its text."""

    version: int
    format: str
    registered_us: int

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["version"], found["format"], found["registered_us"])


@dataclass(frozen=True, slots=True)
class SchemaVerdict:
    """Whether a schema could be registered. `reason`: why not. `version`: the version that it was compared with, None
    if the topic has no schema. `compatibility`: what the topic asks for."""

    compatible: bool
    reason: str | None
    version: int | None
    compatibility: str

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["compatible"], found["reason"], found["version"], found["compatibility"])


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group. `unacknowledged`: messages delivered to it and not settled."""

    name: str
    address: str
    unacknowledged: int

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["name"], found["address"], found["unacknowledged"])


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """The position of a group in a partition. All messages below `committed` are done. `next` is the next to deliver.
    `pending`: messages delivered and not acknowledged."""

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
    """A group. `lag`: messages that are not done. `lost`: messages that retention deleted before they were done;
    `expired`: those whose TTL passed before. `pattern` is `orders orders.>` for a whole topic. `hint`: which messages
    the group may miss; only `Client.group` returns it."""

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
    """The state of a group in a refresh. `reason`: why it was aborted. `waits_for`: members that have not confirmed, or
    are away. `left`: messages still to be replayed."""

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
    READY_SENT, as the slowest group; COMPLETED, or ABORTED with the reason."""

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
        """Whether no refresh is running."""
        return self.state in ("IDLE", "COMPLETED", "ABORTED")


class LetterFilter(TypedDict, total=False):
    """Select the dead letters that meet all given conditions. `reason`: part of the reason, ignoring case. `since` and
    `until`: when they were dead-lettered. `partition` and `offsets`: their own."""

    group: str
    reason: str
    since: Moment
    until: Moment
    partition: int
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter. `partition` and `offset`: its own; `topic`, `origin_partition` and `origin_offset`: those of the
    message. `reason`: why the last delivery failed. `timestamp_us`: when it was dead-lettered, in µs since 1970."""

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
    """The number of dead letters that were redriven and skipped, and why the first one was skipped."""

    count: int
    skipped: int
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """The last report of a pipeline. Times are in µs since 1970. `state`: starting, running, retrying, done, stopped,
    failed, invalid, or silent if it has not reported for half a minute. `runner`: the host and the process that run it.
    `lag` and `batch` are None if they are unknown."""

    name: str
    kind: str
    state: str
    file: str
    runner: str
    started_us: int
    updated_us: int
    heard_us: int
    batches: int
    batch: int | None
    rows: int
    rows_in: int | None
    rows_out: int | None
    dead_letters: int | None
    rows_per_second: float
    late_rows: int
    lag: int | None
    watermark: str | None
    failures: int
    reason: str | None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        known: dict[str, Any] = {field.name: found[field.name] for field in fields(cls)}
        return cls(**known)


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that is published at `due_us`, in µs since 1970. `offset`: where it waits; it may change."""

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
    """Return the arguments for `publish`: the subject, the value, and the others by name."""
    if not isinstance(message, Outgoing):
        subject, value = message
        return subject, value, {}
    rest = ("key", "headers", "message_id", "delay", "ttl")
    return message.subject, message.value, {name: getattr(message, name) for name in rest}


def read_headers(block: bytes) -> dict[str, str]:
    """Return header lines as a mapping. If a name is repeated, the first value counts."""
    fields: dict[str, str] = {}
    for line in block.decode(errors="replace").split("\n"):
        name, colon, value = line.partition(":")
        if colon and name[:1] not in " \t":
            fields.setdefault(name.rstrip(" \t"), value.strip(" \t\r"))
    return fields
