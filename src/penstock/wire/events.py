"""The requests of clients, independent of their protocol. Messages to publish are a Run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from penstock.model.run import Run


class Connect(NamedTuple):
    options: dict[str, Any]


class Call(NamedTuple):
    """A message to the broker itself, neither stored nor delivered: an acknowledgement, `$ACK.…`."""

    subject: bytes
    value: bytes
    reply: bytes | None


class Subscribe(NamedTuple):
    subject: bytes
    sid: bytes
    # The group whose members share the messages, and whether it outlives its members.
    group: bytes | None = None
    durable: bool = False


class Unsubscribe(NamedTuple):
    sid: bytes
    # End after this many messages in total; None: immediately.
    after: int | None = None


class Ack(NamedTuple):
    sequence: int
    group: bytes | None = None


class Pull(NamedTuple):
    subject: bytes
    messages_max: int


class FlowControl(NamedTuple):
    sid: bytes
    push: bool
    # None if not given.
    rate: float | None = None
    burst: int | None = None
    buffer: int | None = None
    overflow: str | None = None


class Stats(NamedTuple):
    sid: bytes | None


class ReplayStart(Enum):
    MESSAGE = "message"  # only the message with this sequence
    SEQUENCE = "sequence"  # this message and the ones after it
    FIRST = "first"
    LAST = "last"
    TIME = "time"


class Replay(NamedTuple):
    origin: ReplayStart
    # A sequence, or a time in µs since 1970.
    value: int
    messages_max: int


class SimpleCommand(Enum):
    PING = "ping"
    PONG = "pong"
    INFO = "info"
    # Changes of cluster membership.
    MEMBERSHIP = "membership"


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused request; `closes`: the connection cannot continue."""

    reason: str
    closes: bool = False
    # Whether it was a message to publish, which is not stored.
    publish: bool = False


Event = (
    Run | Call | Connect | Subscribe | Unsubscribe | Ack | Pull | FlowControl | Stats | Replay | SimpleCommand | Refused
)
