"""Memory for large frames that are arriving: one budget for all connections.

A frame says its length before its bytes come. A connection whose next frame is large is read from only when the budget
has room for all of it, so hundreds of connections with large frames take turns, those with the smallest frame first.
Small frames never wait.

The room is free again when the frame is dealt with. While others wait, a connection that has room must send its frame
at some pace, or it is closed: a length costs nothing to announce.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.health import Usage

if TYPE_CHECKING:
    from penstock.server.connection import Connection
    from penstock.server.server import Counters

ARRIVING_BYTES_MAX: Final = 128 << 20
# A frame that is not larger needs no room.
SMALL_BYTES: Final = 256 << 10
# While others wait, so many bytes of a frame have to arrive in each second, but for the first few.
PATIENCE_S: Final = 3.0
BYTES_PER_S: Final = 1 << 20


@dataclass(slots=True, eq=False)
class _Claim:
    bytes: int
    # Since when it has room, and what its connection had received before.
    begun: float = 0.0
    received: int = 0


class Arrivals:
    def __init__(self, counters: Counters, bytes_max: int = ARRIVING_BYTES_MAX) -> None:
        self._counters = counters
        self._bytes_max = bytes_max
        self._bytes = 0
        # Those that have room, and those that wait for it; the oldest first.
        self._granted: dict[Connection, _Claim] = {}
        self._waiting: dict[Connection, _Claim] = {}

    def claim(self, connection: Connection, length: int) -> None:
        """A large frame has begun. The connection is read from when there is room for it."""
        connection.peer.has_room = False
        self._waiting[connection] = _Claim(length)
        self._grant()
        if not connection.peer.has_room:
            connection.peer.hold()

    def release(self, connection: Connection) -> None:
        """The frame is dealt with, or the connection is gone."""
        self._waiting.pop(connection, None)
        if (claim := self._granted.pop(connection, None)) is not None:
            self._bytes -= claim.bytes
            self._grant()

    def sweep(self, now: float) -> None:
        """Close the connections that keep others waiting."""
        if not self._waiting:
            return
        for connection, claim in list(self._granted.items()):
            due = (now - claim.begun - PATIENCE_S) * BYTES_PER_S
            if connection.peer.is_awaited and connection.peer.received_bytes - claim.received < due:
                self._counters.slow += 1
                connection.abort()

    def usage(self) -> dict[str, Usage]:
        return {"arriving_bytes": Usage(self._bytes, self._bytes_max)}

    def _grant(self) -> None:
        while self._waiting:
            connection, claim = min(self._waiting.items(), key=lambda item: item[1].bytes)
            # One that alone is larger than the budget has it for itself.
            if self._granted and self._bytes + claim.bytes > self._bytes_max:
                return
            del self._waiting[connection]
            self._granted[connection] = claim
            self._bytes += claim.bytes
            claim.begun = asyncio.get_running_loop().time()
            claim.received = connection.peer.received_bytes
            connection.peer.has_room = True
            connection.read_on()
