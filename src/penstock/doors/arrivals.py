"""Memory for large frames that are arriving: one budget for all connections.

A frame says its length before its bytes come. A connection whose next frame is large is read from only when the budget
has room for all of it, so hundreds of connections with large frames take turns, those with the smallest frame first.
Small frames never wait.

The room is free again when the frame is handled. While others wait, a connection that has room must send its frame at
some pace, or it is closed: announcing a length costs nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.doors.counters import Counters
from penstock.health import Usage

if TYPE_CHECKING:
    from penstock.doors.session import Session

ARRIVING_BYTES_MAX: Final = 128 << 20
# A frame up to this size needs no room.
SMALL_BYTES: Final = 256 << 10
# While others wait, this many bytes of a frame must arrive in each second after the first few seconds.
PATIENCE_S: Final = 3.0
BYTES_PER_S: Final = 1 << 20


@dataclass(slots=True, eq=False)
class _Claim:
    bytes: int
    # When it got its room, and what its connection had received before.
    begun: float = 0.0
    received: int = 0


class Arrivals:
    def __init__(self, counters: Counters, bytes_max: int = ARRIVING_BYTES_MAX) -> None:
        self._counters = counters
        self._bytes_max = bytes_max
        self._bytes = 0
        # Connections that have room, and those that wait for it, the oldest first.
        self._granted: dict[Session, _Claim] = {}
        self._waiting: dict[Session, _Claim] = {}

    def claim(self, session: Session, length: int) -> None:
        """Claim room for a large frame that has begun. The connection is read from when there is room."""
        session.peer.has_room = False
        self._waiting[session] = _Claim(length)
        self._grant()
        if not session.peer.has_room:
            session.peer.hold()

    def release(self, session: Session) -> None:
        """Give the room back: the frame is handled, or the connection is gone."""
        self._waiting.pop(session, None)
        if (claim := self._granted.pop(session, None)) is not None:
            self._bytes -= claim.bytes
            self._grant()

    def sweep(self, now: float) -> None:
        """Close the connections that keep others waiting."""
        if not self._waiting:
            return
        for session, claim in list(self._granted.items()):
            due = (now - claim.begun - PATIENCE_S) * BYTES_PER_S
            if session.peer.is_awaited and session.peer.received_bytes - claim.received < due:
                self._counters.slow += 1
                session.abort()

    def usage(self) -> dict[str, Usage]:
        return {"arriving_bytes": Usage(self._bytes, self._bytes_max)}

    def _grant(self) -> None:
        while self._waiting:
            session, claim = min(self._waiting.items(), key=lambda item: item[1].bytes)
            # A frame that is larger than the budget gets all of it.
            if self._granted and self._bytes + claim.bytes > self._bytes_max:
                return
            del self._waiting[session]
            self._granted[session] = claim
            self._bytes += claim.bytes
            claim.begun = asyncio.get_running_loop().time()
            claim.received = session.peer.received_bytes
            session.peer.has_room = True
            session.read_on()
