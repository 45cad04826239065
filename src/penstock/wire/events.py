"""What a client can ask of a broker, whichever door it comes through. Messages to publish come as a Run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from penstock.run import Run


class Connect(NamedTuple):
    options: dict[str, Any]


class Call(NamedTuple):
    """A message to the broker itself, which is neither stored nor delivered: an acknowledgement, `$ACK.…`."""

    subject: bytes
    value: bytes
    reply: bytes | None


class Subscribe(NamedTuple):
    subject: bytes
    sid: bytes
    # A group whose members share the messages, and whether it is remembered when they are gone.
    group: bytes | None = None
    durable: bool = False


class Unsubscribe(NamedTuple):
    sid: bytes
    # After so many messages in all; None: at once.
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
    # Each as it was given, None where it was not.
    rate: float | None = None
    burst: int | None = None
    buffer: int | None = None
    overflow: str | None = None


class Stats(NamedTuple):
    sid: bytes | None


class Origin(Enum):
    MESSAGE = "message"  # only the message with this sequence
    SEQUENCE = "sequence"  # this message and the ones after it
    FIRST = "first"
    LAST = "last"
    TIME = "time"


class Replay(NamedTuple):
    origin: Origin
    # A sequence, or a time in µs since 1970.
    value: int
    messages_max: int


class Asked(Enum):
    PING = "ping"
    PONG = "pong"
    INFO = "info"
    # Changes of a cluster's membership.
    MEMBERSHIP = "membership"


@dataclass(frozen=True, slots=True)
class Refused:
    """What was sent cannot be done; `closes`: and nothing behind it can be understood or trusted."""

    reason: str
    closes: bool = False
    # It was a message to publish, which is not stored.
    publish: bool = False


Event = Run | Call | Connect | Subscribe | Unsubscribe | Ack | Pull | FlowControl | Stats | Replay | Asked | Refused
