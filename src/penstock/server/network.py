"""Who waits for connections: a seam that a setting replaces, `server.network`. TCP ships."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

# Connections that the system keeps for us until we take them.
BACKLOG: Final = 4096


class Listener(Protocol):
    # Where it listens; what was asked for may have been any free one.
    port: int

    def close(self) -> None:
        """Take no more connections. Those that are there stay."""
        ...


class Listen(Protocol):
    async def __call__(self, door: Callable[[], asyncio.Protocol], host: str, port: int) -> Listener:
        """Give each connection a door of its own, which speaks to it through a transport of asyncio's."""
        ...


class _TcpListener:
    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.port: int = server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()


async def listen(door: Callable[[], asyncio.Protocol], host: str, port: int) -> Listener:
    return _TcpListener(await asyncio.get_running_loop().create_server(door, host, port, backlog=BACKLOG))
