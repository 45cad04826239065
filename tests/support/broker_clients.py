"""Helpers for tests of the Python broker's client."""

from __future__ import annotations

import queue
from collections.abc import Callable

from penstock import BrokerClient
from penstock.client.qb import BrokerMessage
from tests.support.process import PATIENCE_S

Connect = Callable[..., BrokerClient]


class Inbox:
    """A handler that keeps what it is given."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[BrokerMessage] = queue.SimpleQueue()

    def __call__(self, message: BrokerMessage) -> None:
        self._messages.put(message)

    def next(self) -> BrokerMessage:
        return self._messages.get(timeout=PATIENCE_S)

    def texts(self, count: int) -> list[str]:
        return [self.next().text() for _ in range(count)]

    @property
    def is_empty(self) -> bool:
        return self._messages.empty()
