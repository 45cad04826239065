"""The gate: what a connection may do before it is admitted, in every dialect.

The first command of a connection admits it or closes it. If the broker requires credentials, that command must carry
them: CONNECT, HELLO, a QB HEARTBEAT or AUTH. Otherwise any complete command is enough. Until then no other message is
processed, nothing is decompressed, and nothing reaches the broker.

Connections that are not admitted yet are limited together in number, bytes and time. Only admission ends the deadline.
A connection beyond one of the limits closes the oldest of them rather than the new one, so a crowd of idle connections
does not keep clients out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.health import Usage

if TYPE_CHECKING:
    from penstock.server.connection import Connection
    from penstock.server.server import Server

# What one connection may send before it has authenticated, and all of them together.
HANDSHAKE_BYTES_MAX: Final = 64 << 10
HANDSHAKES_BYTES_MAX: Final = 16 << 20
# The same total if the broker requires no credentials: a first command may be a whole batch.
OPEN_BYTES_MAX: Final = 160 << 20


@dataclass(slots=True, eq=False)
class _Pending:
    connection: Connection
    deadline: float
    bytes: int = 0


class Gate:
    def __init__(self, server: Server) -> None:
        config = server.config.server
        self._server = server
        self._deadline_s = config.handshake_s
        self._connections_max = config.handshakes_max
        self.needs_auth = server.needs_auth
        self._bytes_max = HANDSHAKES_BYTES_MAX if self.needs_auth else OPEN_BYTES_MAX
        # By the connection's ID, the oldest first.
        self._pending: dict[int, _Pending] = {}
        self._bytes = 0

    def enter(self, connection: Connection) -> None:
        """Start the handshake of a new connection."""
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        self._pending[connection.id] = _Pending(connection, deadline)
        if len(self._pending) > self._connections_max:
            self._expire_oldest()

    def replace(self, connection: Connection) -> None:
        """Take another object for the connection with this ID. Its deadline stays."""
        if (pending := self._pending.get(connection.id)) is not None:
            pending.connection = connection

    def leave(self, connection: Connection) -> None:
        """Forget a connection: it is admitted, or gone."""
        if (pending := self._pending.pop(connection.id, None)) is not None:
            self._bytes -= pending.bytes

    def admit(self, connection: Connection, credentials: Mapping[str, Any] | None) -> bool:
        """Return whether the connection's first command admits it. `credentials`: those in the command, if it can carry
        any, as NATS names them."""
        if self.needs_auth and (credentials is None or not self._server.authorizes(credentials)):
            self._refuse(connection)
            return False
        self.leave(connection)
        connection.is_admitted = True
        return True

    def received(self, connection: Connection, count: int) -> bool:
        """Count bytes from a connection that is not admitted yet. Return whether it may send more."""
        pending = self._pending.get(connection.id)
        if pending is None:
            return True  # it is being closed
        pending.bytes += count
        self._bytes += count
        if self.needs_auth and pending.bytes > HANDSHAKE_BYTES_MAX:
            self._refuse(connection)
            return False
        while self._bytes > self._bytes_max:
            self._expire_oldest()
        return True

    def _refuse(self, connection: Connection) -> None:
        self._server.counters.unauthorized += 1
        self._server.journal.failed_login(connection.type, connection.address)

    def sweep(self, now: float) -> None:
        """Close the connections whose handshake has taken too long."""
        while self._pending and next(iter(self._pending.values())).deadline <= now:
            self._expire_oldest()

    def usage(self) -> dict[str, Usage]:
        return {
            "handshakes_count": Usage(len(self._pending), self._connections_max),
            "handshakes_bytes": Usage(self._bytes, self._bytes_max),
        }

    def _expire_oldest(self) -> None:
        connection = next(iter(self._pending.values())).connection
        self.leave(connection)
        connection.expire()


def credentials(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return credentials under NATS' names, from fields named user, password and token."""
    return {"user": fields.get("user"), "pass": fields.get("password"), "auth_token": fields.get("token")}
