"""What is read in one turn of the event loop: a budget for all connections together.

The loop reads up to 2 MiB from each connection that has sent so much before it does anything else, so a hundred that
flood it would hold up the others for seconds. When a turn has read enough, whoever sends more is not read from before
the next one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.server.connection import Connection

TURN_BYTES_MAX: Final = 4 << 20
# A turn that reads less needs not be counted. To notice the next one costs a callback: 10 µs for each request.
_LITTLE: Final = 16


class Turns:
    def __init__(self, bytes_max: int = TURN_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # What was read since the last turn that read much.
        self._bytes = 0
        self._is_counting = False
        self._held: dict[Connection, None] = {}

    def took(self, connection: Connection, count: int) -> None:
        """So many bytes were read from a connection. It is read from again in the next turn if that was enough."""
        self._bytes += count
        if self._bytes * _LITTLE > self._bytes_max and not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin)
        if self._bytes > self._bytes_max:
            connection.peer.hold()
            self._held[connection] = None

    def _begin(self) -> None:
        self._bytes = 0
        self._is_counting = False
        held, self._held = self._held, {}
        for connection in held:
            connection.read_on()
