"""Addresses of brokers as users write them, or a broker in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from penstock import address
from penstock.tls.options import TlsOptions

PORT: Final = 4222
_LOGIN: Final = {"user", "password", "token"}


class BrokerEndpoint(Protocol):
    """A broker that a client can connect to: an address, or a `penstock.Broker`."""

    async def dial(self, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseTransport: ...


Servers = str | Sequence[str] | BrokerEndpoint


class BrokerAddress(NamedTuple):
    host: str
    port: int
    # None: without TLS.
    tls: TlsOptions | None = None

    @classmethod
    def read(cls, text: str, tls: TlsOptions | None = None) -> BrokerAddress:
        """`tls`: use it also if the address does not ask for it."""
        options = TlsOptions() if tls is None and address.uses_tls(text) else tls
        return cls(*address.split(text, PORT), options)

    def __str__(self) -> str:
        return address.join(self.host, self.port)

    async def dial(self, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseTransport:
        if self.tls is not None:
            from penstock.tls.dial import dial

            # Read anew each time: the files may have been renewed.
            return await dial(factory, self.host, self.port, self.tls.context(), str(self))
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(factory, self.host, self.port)
        return transport


def read_servers(servers: Servers, tls: TlsOptions | None = None) -> list[BrokerEndpoint]:
    """`tls`: None means what the environment says; if it says nothing, only a `tls://` address uses TLS."""
    options = tls if tls is not None else TlsOptions.from_environment() or None
    if isinstance(servers, str):
        return [BrokerAddress.read(servers, options)]
    if isinstance(servers, Sequence):
        if not servers:
            raise ValueError("servers is empty: name at least one")
        return [BrokerAddress.read(server, options) for server in servers]
    return [servers]


def complete_credentials(servers: Servers, credentials: Mapping[str, str]) -> Mapping[str, str]:
    """Return the credentials, with those of the first URL that has some if none were given."""
    if _LOGIN & credentials.keys():
        return credentials
    texts = [servers] if isinstance(servers, str) else servers if isinstance(servers, Sequence) else []
    return {**next((found for found in map(address.login, texts) if found), {}), **credentials}
