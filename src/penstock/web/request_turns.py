"""What HTTP connections receive is handled in turns: a few of them in each turn of the event loop.

To parse a request and to start its handler takes a millisecond. Without a limit, thousands of clients that send
something at the same moment would keep everyone else waiting for seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

# Handled in one turn. The handlers that they start run in the next one.
RECEIVED_MAX: Final = 16
# Bytes that wait for a turn, of all connections.
WAITING_BYTES_MAX: Final = 16 << 20


class Receiver(Protocol):
    """A connection."""

    def handle_received(self, data: bytes) -> None:
        """Handle bytes that the client sent."""
        ...

    def hold(self) -> None:
        """Read nothing from the client until `handle_received`."""
        ...

    def refuse_full(self) -> None:
        """Close the connection: too many clients send at the same time."""
        ...


class RequestTurns:
    def __init__(self) -> None:
        self._handled = 0
        self._waiting: deque[tuple[Receiver, bytes]] = deque()
        self._bytes = 0
        self._is_counting = False

    def received(self, connection: Receiver, data: bytes) -> None:
        """Let a connection handle what it has received, now or in a later turn."""
        self._count()
        if self._handled < RECEIVED_MAX and not self._waiting:
            self._handled += 1
            connection.handle_received(data)
        elif self._bytes + len(data) > WAITING_BYTES_MAX:
            connection.refuse_full()
        else:
            self._waiting.append((connection, data))
            self._bytes += len(data)
            connection.hold()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_counting = False
        self._handled = 0
        while self._waiting and self._handled < RECEIVED_MAX:
            self._handled += 1
            connection, data = self._waiting.popleft()
            self._bytes -= len(data)
            connection.handle_received(data)
        if self._waiting:
            self._count()
