"""Handshakes in turns: a few milliseconds of them in each turn of the event loop.

A handshake costs between half a millisecond and several, depending on the key. Without a limit, a thousand clients that
connect at the same moment would keep everyone else waiting for a second or more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

TURN_S: Final = 0.005


class Handshaking(Protocol):
    """A connection."""

    def step(self) -> None:
        """Go on with the handshake, as far as the bytes that have come allow."""
        ...

    def hold(self) -> None:
        """Read nothing from the client until `step`."""
        ...


class HandshakeTurns:
    def __init__(self, s_max: float = TURN_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._s_max = s_max
        self._clock = clock
        self._spent_s = 0.0
        self._waiting: dict[Handshaking, None] = {}
        self._is_counting = False

    def __len__(self) -> int:
        """Return how many connections wait for a turn."""
        return len(self._waiting)

    def take(self, connection: Handshaking) -> None:
        """Let a connection go on, now or in a later turn."""
        if self._waiting or self._spent_s >= self._s_max:
            self._waiting[connection] = None
            connection.hold()
        else:
            self._step(connection)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin)

    def leave(self, connection: Handshaking) -> None:
        self._waiting.pop(connection, None)

    def _step(self, connection: Handshaking) -> None:
        began = self._clock()
        connection.step()
        self._spent_s += self._clock() - began

    def _begin(self) -> None:
        self._spent_s = 0.0
        while self._waiting and self._spent_s < self._s_max:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            self._step(connection)
        self._is_counting = bool(self._waiting)
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin)
