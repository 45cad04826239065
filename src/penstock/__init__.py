"""Penstock: a durable message broker; one log, many doors.

Names are imported on first use: a program that only publishes never loads the server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.app import App, Retry
    from penstock.client.aio import AsyncClient
    from penstock.client.channel import ChannelBroker
    from penstock.client.message import Message
    from penstock.client.qb import BrokerClient
    from penstock.client.sync import Client
    from penstock.client.values import Outgoing, Receipt
    from penstock.embedded import Broker
    from penstock.tls.options import TlsOptions

__all__ = [
    "App",
    "AsyncClient",
    "Broker",
    "BrokerClient",
    "ChannelBroker",
    "Client",
    "Message",
    "Outgoing",
    "Receipt",
    "Retry",
    "TlsOptions",
]

_HOMES: Final = {
    "App": "penstock.app",
    "AsyncClient": "penstock.client.aio",
    "Broker": "penstock.embedded",
    "BrokerClient": "penstock.client.qb",
    "ChannelBroker": "penstock.client.channel",
    "Client": "penstock.client.sync",
    "Message": "penstock.client.message",
    "Outgoing": "penstock.client.values",
    "Receipt": "penstock.client.values",
    "Retry": "penstock.app",
    "TlsOptions": "penstock.tls.options",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
