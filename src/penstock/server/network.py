"""Listening for connections: a seam that the setting `server.network` replaces. TCP ships."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock import address
from penstock.acceptor import Acceptor


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
    def __init__(self, acceptor: Acceptor) -> None:
        self._acceptor = acceptor
        self.port: int = acceptor.sockets[0].getsockname()[1]

    async def start(self) -> None:
        self._acceptor.start(address.BACKLOG)

    def close(self) -> None:
        self._acceptor.close()


async def listen(open_protocol: Callable[[], asyncio.Protocol], hosts: Sequence[str], port: int) -> Listener:
    return _TcpListener(Acceptor(address.bind(hosts, port), open_protocol))
