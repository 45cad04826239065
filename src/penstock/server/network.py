"""Listening for connections: a seam that the setting `server.network` replaces. TCP ships."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock import address


class Listener(Protocol):
    # The port at every host. If port 0 was asked for, it is any free one.
    port: int

    async def start(self) -> None:
        """Accept connections. Before that, clients wait."""
        ...

    def close(self) -> None:
        """Accept no more connections. Open ones stay."""
        ...


class Listen(Protocol):
    async def __call__(
        self, open_protocol: Callable[[], asyncio.Protocol], hosts: Sequence[str], port: int
    ) -> Listener:
        """Listen, and create a protocol of asyncio for each connection. Raise OSError if one of the hosts cannot be
        listened on; then none is."""
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


async def listen(open_protocol: Callable[[], asyncio.Protocol], hosts: Sequence[str], port: int) -> Listener:
    loop = asyncio.get_running_loop()
    return _TcpListener(
        [
            await loop.create_server(open_protocol, sock=each, backlog=address.BACKLOG, start_serving=False)
            for each in address.bind(hosts, port)
        ]
    )
