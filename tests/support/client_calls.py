"""Helpers for tests of both clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock import Client
from penstock.client.message import Message
from tests.support.process import PATIENCE_S
from tests.support.server import Serve


def address_of(server: Serve, door: str = "text") -> str:
    return f"127.0.0.1:{server.ports[door]}"


def wait_until(is_so: Callable[[], bool]) -> None:
    """For what cannot be waited for otherwise: it must become so in time."""
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "it does not become so"
        time.sleep(0.01)


def values(messages: list[Message]) -> list[bytes]:
    return [message.value for message in messages]


def take(subscription: Any, count: int) -> list[Message]:
    return [subscription.get(PATIENCE_S) for _ in range(count)]


def fetched(client: Client, topic: str, **options: Any) -> list[bytes]:
    return [message.value for message in client.fetch(topic, **options)]
