"""What all sessions of a server share: the broker behind the doors, and the budgets in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.broker.broker import Broker
from penstock.broker.flow import Flow
from penstock.doors.arrivals import Arrivals
from penstock.doors.claims import Claims
from penstock.doors.counters import Counters
from penstock.doors.gate import Gate
from penstock.doors.journal import Journal
from penstock.doors.peer import Peer
from penstock.doors.sessions import Sessions
from penstock.doors.tasks import Tasks
from penstock.doors.turns import Turns
from penstock.errors import BatchTooLarge
from penstock.security.identity import Identity
from penstock.security.security import Security
from penstock.tls.port import ServerTls
from penstock.wire.binary import SCRATCH_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """The settings that dialects follow. Gate and Sessions have their own."""

    payload_bytes_max: int
    heartbeat_s: float
    # The flow control of a subscription that sets none; above this share of its buffer it is a slow consumer.
    flow: Flow
    slow_threshold: float
    # A member of a Cursus group that is silent for this long loses its partitions.
    session_timeout_ms: int
    # A QB subscription without partitions reports this deadline.
    ack_deadline_ms: int
    # A Provider subscription starts when the client has answered READY.
    provider_ready: bool

    def check_size(self, *sizes: int) -> None:
        """Raise BatchTooLarge if a message is too large. `sizes`: those of its value, its key and its headers."""
        size, limit = sum(sizes), self.payload_bytes_max
        if size > limit:
            raise BatchTooLarge(
                f"a message of {size} bytes (value, key and headers), {limit} are allowed: "
                "send less, or raise server.payload_bytes_max"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Who this server is, for INFO, HELLO and clients that ask for the leader of a partition."""

    id: str
    node_id: str
    version: str
    hosts: Sequence[str]
    # By name: text, quiet, http, qb. Filled when the server listens.
    ports: dict[str, int]
    tls: ServerTls | None = None


class Calls(Protocol):
    """The administrative calls, which take and return JSON."""

    async def call(self, fields: dict[str, Any], identity: Identity | None) -> dict[str, Any]: ...

    async def answer(self, peer: Peer, fields: dict[str, Any], identity: Identity | None) -> bytes:
        """Call, and return the result as JSON, once the peer has read the answers that it was given."""
        ...

    def statistics(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    broker: Broker
    security: Security
    settings: DoorSettings
    node: Node
    calls: Calls
    counters: Counters
    journal: Journal
    gate: Gate
    arrivals: Arrivals
    turns: Turns
    claims: Claims
    sessions: Sessions
    tasks: Tasks
    # Binary frames are read into this. One loop reads from one connection at a time, so one buffer is enough.
    scratch: bytearray = field(default_factory=lambda: bytearray(SCRATCH_BYTES))
