"""A connection that has not said anything yet: its first byte tells which protocol it speaks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from penstock.broker.group import Group
from penstock.broker.member import Member
from penstock.broker.subscription import Subscription
from penstock.server.binary import BinarySession
from penstock.server.connection import WEBSOCKET, Connection, ConnectionType
from penstock.server.prefixed import PrefixedSession
from penstock.server.session import Session
from penstock.wire import text
from penstock.wire.binary import Type

if TYPE_CHECKING:
    from penstock.server.server import Server

# What a client of the binary door may begin with; text begins with a letter or a blank. BATCH_ACK is a newline, and
# never comes first.
_BINARY: Final = frozenset(kind for kind in Type if kind < Type.RESULT) - {Type.BATCH_ACK}


class Door(Connection, asyncio.Protocol):
    def __init__(self, server: Server, *, greets: bool, type: ConnectionType = "nats") -> None:
        super().__init__(server)
        self._greets = greets
        self.type = type
        self._transport: asyncio.Transport | None = None
        self.subscriptions: dict[int, tuple[Member, Subscription | Group]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        refusal = self.server.add(self, peer[1] if peer else 0)
        if refusal is not None:
            self._refuse(refusal)
        elif self._greets:
            self._transport.write(text.info(self.server.info(self)))

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self.peer.is_closing:
            return
        session: BinarySession | PrefixedSession | Session
        if self.type == WEBSOCKET:
            session = Session(self.server, greets=True)
            session.type = self.type
        elif data[0] in _BINARY:
            session = BinarySession(self.server)
        elif data[0] == 0 and not self._greets:
            session = PrefixedSession(self.server)
        else:
            session = Session(self.server, greets=self._greets)
        session.id, session.address, session.ping_at = self.id, self.address, self.ping_at
        self.server.replace(self, session)
        # What reads into a buffer must be asked for it from the beginning.
        self._transport.pause_reading()
        self._transport.set_protocol(session)
        session.connection_made(self._transport)
        self._transport.resume_reading()
        session.data_received(data)

    # For the server.

    def ping(self) -> None:
        """It has not begun; `expire` ends it."""

    def expire(self) -> None:
        self.server.counters.silent += 1
        self._refuse("Authentication Timeout" if self.server.needs_auth else "Connection Timeout")

    def stop(self) -> None:
        if self._greets:
            # As by nats-server: to a client that is about to connect, an error would be the end.
            self.peer.close()
        else:
            self._refuse("Server Shutdown")

    def tell_fault(self) -> None:
        self.peer.write(text.error("Internal Error", is_nats=self._greets))

    def _refuse(self, reason: str) -> None:
        self.peer.write(text.error(reason, is_nats=self._greets))
        self.peer.close()
