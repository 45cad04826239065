"""Who waits for connections: a seam that a setting replaces, `server.network`. TCP ships."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock import address


class Listener(Protocol):
    # Where it listens, at every host; what was asked for may have been any free one.
    port: int

    async def start(self) -> None:
        """Take connections. Before that, clients wait."""
        ...

    def close(self) -> None:
        """Take no more connections. Those that are there stay."""
        ...


class Listen(Protocol):
    async def __call__(self, door: Callable[[], asyncio.Protocol], hosts: Sequence[str], port: int) -> Listener:
        """Give each connection a door of its own, which speaks to it through a transport of asyncio's. OSError if one
        of the hosts cannot be listened at; then none is."""
        ...


class _TcpListener:
    def __init__(self, servers: list[asyncio.Server]) -> None:
        self._servers = servers
        self.port: int = servers[0].sockets[0].getsockname()[1]

    async def start(self) -> None:
        for server in self._servers:
            await server.start_serving()

    def close(self) -> None:
        for server in self._servers:
            server.close()


async def listen(door: Callable[[], asyncio.Protocol], hosts: Sequence[str], port: int) -> Listener:
    loop = asyncio.get_running_loop()
    return _TcpListener(
        [
            await loop.create_server(door, sock=each, backlog=address.BACKLOG, start_serving=False)
            for each in address.bind(hosts, port)
        ]
    )
