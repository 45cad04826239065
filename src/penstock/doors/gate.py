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
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.doors.counters import Counters
from penstock.doors.journal import Journal
from penstock.errors import PenstockError, Unauthorized
from penstock.health import Usage
from penstock.security.identity import Identity
from penstock.security.security import Login, Security

if TYPE_CHECKING:
    from penstock.doors.session import Session

# What one connection, and all of them together, may send before they have authenticated.
HANDSHAKE_BYTES_MAX: Final = 64 << 10
HANDSHAKES_BYTES_MAX: Final = 16 << 20
# The same total if the broker requires no credentials: a first command may be a whole batch.
OPEN_BYTES_MAX: Final = 160 << 20


@dataclass(slots=True, eq=False)
class _Pending:
    session: Session
    deadline: float
    bytes: int = 0


class Gate:
    def __init__(
        self, security: Security, counters: Counters, journal: Journal, handshake_s: float, handshakes_max: int
    ) -> None:
        """`handshake_s`: how long a connection has until it must be admitted; `handshakes_max`: how many may wait."""
        self._security = security
        self._counters = counters
        self._journal = journal
        self._deadline_s = handshake_s
        self._connections_max = handshakes_max
        self.needs_auth = security.is_required
        self._bytes_max = HANDSHAKES_BYTES_MAX if self.needs_auth else OPEN_BYTES_MAX
        # By the connection's ID, the oldest first.
        self._pending: dict[int, _Pending] = {}
        self._bytes = 0

    def enter(self, session: Session) -> None:
        """Start the handshake of a new connection."""
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        self._pending[session.id] = _Pending(session, deadline)
        if len(self._pending) > self._connections_max:
            self._expire_oldest()

    def leave(self, session: Session) -> None:
        """Forget the handshake of a connection: it is admitted, or gone."""
        if (pending := self._pending.pop(session.id, None)) is not None:
            self._bytes -= pending.bytes

    def admit(
        self, session: Session, credentials: Mapping[str, Any] | None
    ) -> PenstockError | Coroutine[Any, Any, PenstockError | None] | None:
        """Admit a connection with its first command, or return why not; a coroutine if that takes a while.
        `credentials`: those in the command, if it can carry any, as NATS names them."""
        if not self.needs_auth or session.identity is not None:
            self._open(session, session.identity)
            return None
        certificate = session.peer.certificate
        names = () if certificate is None else certificate.names
        if credentials is None and not names:
            return self._refuse(session, Unauthorized("credentials required"))
        given = Login.from_nats(credentials or {}, session.nonce, names)
        try:
            found = self._security.login(given, address=session.address, door=session.type)
            if not isinstance(found, Identity):
                return self._admit_later(session, found)
            self._open(session, found)
        except PenstockError as error:
            return self._refuse(session, error)
        return None

    async def _admit_later(self, session: Session, login: Coroutine[Any, Any, Identity]) -> PenstockError | None:
        try:
            self._open(session, await login)
        except PenstockError as error:
            return self._refuse(session, error)
        return None

    def _open(self, session: Session, identity: Identity | None) -> None:
        """Raise QuotaExceeded if the user has too many connections."""
        if identity is not None and session.is_connected:
            session.identify(identity)
            self._security.connect(identity, session.permissions_changed, session.revoke)
            session.at_end.append(lambda: self._security.disconnect(identity))
        self.leave(session)
        session.is_admitted = True

    def received(self, session: Session, count: int) -> bool:
        """Count bytes from a connection that is not admitted yet. Return whether it may send more."""
        pending = self._pending.get(session.id)
        if pending is None:
            return True  # it is being closed
        pending.bytes += count
        self._bytes += count
        if self.needs_auth and pending.bytes > HANDSHAKE_BYTES_MAX:
            self._refuse(session, Unauthorized("too much was sent without credentials"))
            return False
        while self._bytes > self._bytes_max:
            self._expire_oldest()
        return True

    def _refuse(self, session: Session, error: PenstockError) -> PenstockError:
        self._counters.unauthorized += 1
        self._journal.failed_login(session.type, session.address)
        return error

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
        session = next(iter(self._pending.values())).session
        self.leave(session)
        session.expire()


def credentials(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return credentials under NATS' names, from fields named user, password and token."""
    return {"user": fields.get("user"), "pass": fields.get("password"), "auth_token": fields.get("token")}
