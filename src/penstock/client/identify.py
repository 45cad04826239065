"""Find out what listens at an address that does not answer as a broker, for a useful error."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum, auto
from typing import Final

from penstock.client.servers import PORT, BrokerAddress, BrokerEndpoint
from penstock.errors import NoBroker, PenstockError

# How Redis answers an unknown command, or a client that is not authenticated.
_REDIS: Final = (b"-ERR ", b"-NOAUTH ", b"-DENIED ", b"-NOPERM ", b"-WRONGPASS ")
# How a port with TLS answers what is not TLS: the record of an alert.
_ALERT: Final = b"\x15\x03"
# How long to wait for a connection, for a greeting, and for the answer to a request.
_CONNECT_S: Final = 5.0
_GREETING_S: Final = 0.5
_ANSWER_S: Final = 2.0


class ServiceKind(Enum):
    BROKER = auto()  # the text port of a Penstock broker
    NATS = auto()
    HTTP = auto()
    REDIS = auto()
    TLS = auto()
    OTHER = auto()


def recognise(greeting: bytes) -> ServiceKind:
    """Return the kind of a service by the first bytes that it sends, unasked or as an answer to an HTTP request."""
    if greeting.startswith(b"INFO {"):
        return ServiceKind.BROKER if b"penstock" in greeting else ServiceKind.NATS
    if greeting.startswith(b"HTTP/"):
        return ServiceKind.HTTP
    if greeting.startswith(_ALERT):
        return ServiceKind.TLS
    if greeting.startswith(_REDIS):
        return ServiceKind.REDIS
    return ServiceKind.OTHER


async def identify(server: BrokerEndpoint, error: PenstockError) -> NoBroker:
    """Return an error that names the service and what to do. `error`: why HELLO failed; if nothing answers at the
    address, it is returned as it is."""
    greeting = b""
    if isinstance(server, BrokerAddress):
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                greeting = await _read_greeting(server)
    if not greeting and isinstance(error, NoBroker):
        return error
    match recognise(greeting):
        case ServiceKind.BROKER:
            return NoBroker(f"the broker at {server} closed the connection ({error}): it may be stopping, try again")
        case ServiceKind.NATS:
            what = "is another NATS server, not a Penstock broker: name another address, or use a NATS client with it"
        case ServiceKind.HTTP:
            what = f"is an HTTP port: connect to the broker's text port ({PORT} by default) or its client-first port"
        case ServiceKind.TLS:
            what = "speaks TLS: use an address that begins with tls://"
        case ServiceKind.REDIS:
            what = f"answers like Redis, not like a Penstock broker: check the port ({PORT} by default)"
        case ServiceKind.OTHER:
            reason = f"it says {greeting[:40]!r}" if greeting else str(error)
            what = f"is another service, not a Penstock broker ({reason}): check the port ({PORT} by default)"
    return NoBroker(f"what listens at {server} {what}")


async def _read_greeting(server: BrokerAddress) -> bytes:
    """Return what the service sends by itself, or in answer to an HTTP request."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_GREETING_S):
                return await reader.read(4096)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                return await reader.read(4096)
        return b""
    finally:
        writer.close()
