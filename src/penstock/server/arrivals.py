"""Memory for large frames that are arriving: one budget for all connections.

A frame says its length before its bytes come. A connection whose next frame is large is read from only when the budget
has room for all of it, so hundreds of connections with large frames take turns. Small frames never wait.

The room is free again when the frame is dealt with. A connection that has room and does not send its frame is closed
if others wait for it.
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
# While others wait, a frame has to arrive in this time, and a second more for each of so many bytes.
PATIENCE_S: Final = 10.0
BYTES_PER_S: Final = 1 << 20


@dataclass(slots=True, eq=False)
class _Claim:
    bytes: int
    deadline: float = 0.0


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
        if self._waiting:
            for connection in [each for each, claim in self._granted.items() if claim.deadline < now]:
                if connection.peer.is_awaited:
                    self._counters.slow += 1
                    connection.abort()

    def usage(self) -> dict[str, Usage]:
        return {"arriving_bytes": Usage(self._bytes, self._bytes_max)}

    def _grant(self) -> None:
        while self._waiting:
            connection, claim = next(iter(self._waiting.items()))
            # One that alone is larger than the budget has it for itself.
            if self._granted and self._bytes + claim.bytes > self._bytes_max:
                return
            del self._waiting[connection]
            self._granted[connection] = claim
            self._bytes += claim.bytes
            claim.deadline = asyncio.get_running_loop().time() + PATIENCE_S + claim.bytes / BYTES_PER_S
            connection.peer.has_room = True
            connection.read_on()
