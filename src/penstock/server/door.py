"""A connection that has not said anything yet: its first byte tells which protocol it speaks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.broker.group import Group
from penstock.broker.member import Member
from penstock.broker.subscription import Subscription
from penstock.server.binary import BinarySession
from penstock.server.peer import Traffic
from penstock.server.prefixed import PrefixedSession
from penstock.server.session import Session
from penstock.wire import text
from penstock.wire.binary import Type

if TYPE_CHECKING:
    from penstock.server.server import Server

# What a client of the binary door may begin with; text begins with a letter or a blank.
_BINARY: Final = frozenset(kind for kind in Type if kind < Type.RESULT)


class Door(asyncio.Protocol):
    def __init__(self, server: Server, *, greets: bool) -> None:
        self._server = server
        self._greets = greets
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self.id = 0
        self.address = ""
        self.ping_at = 0.0
        self.has_spoken = False
        self.traffic = Traffic()
        self.subscriptions: dict[int, tuple[Member, Subscription | Group]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        refusal = self._server.add(self, peer[1] if peer else 0)
        if refusal is not None:
            self._refuse(refusal)
        elif self._greets:
            transport.write(text.info(self._server.info(self)))

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._is_closing:
            return
        session: BinarySession | PrefixedSession | Session
        if data[0] in _BINARY:
            session = BinarySession(self._server)
        elif data[0] == 0 and not self._greets:
            session = PrefixedSession(self._server)
        else:
            session = Session(self._server, greets=self._greets)
        session.id, session.address, session.ping_at = self.id, self.address, self.ping_at
        self._server.replace(self, session)
        # What reads into a buffer must be asked for it from the beginning.
        self._transport.pause_reading()
        self._transport.set_protocol(session)
        session.connection_made(self._transport)
        self._transport.resume_reading()
        session.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.remove(self)

    # For the server.

    def ping(self) -> None:
        """It has not begun; `expire` ends it."""

    def expire(self) -> None:
        self._server.counters.silent += 1
        self._refuse("Authentication Timeout" if self._server.needs_auth else "Connection Timeout")

    def stop(self) -> None:
        self._refuse("Server Shutdown")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def summary(self) -> dict[str, Any]:
        return {"id": self.id, "cid": self.id, "ip": self.address, "name": "", **self.traffic._asdict()}

    def _refuse(self, reason: str) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.write(text.error(reason, is_nats=self._greets))
            self._transport.close()
