"""Helpers for tests of apps: topics, and what their handlers were called with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from queue import Queue
from typing import Any

from penstock.app import App, Retry
from penstock.embedded import Broker
from tests.support.process import PATIENCE_S

SOON = Retry.exponential(initial=0.01, maximum=0.01, then=0.01)
NUMBERS = count()


def make_topic(broker: Broker, *, ack_deadline_ms: int = 3_600_000, **options: Any) -> str:
    name = f"t{next(NUMBERS)}"
    broker.create_topic(name, ack_deadline_ms=ack_deadline_ms, **options)
    return name


def publish(broker: Broker, topic: str, *values: bytes, key: str | None = None) -> None:
    for value in values:
        broker.publish(topic, value, key=key)


class Seen(Queue[Any]):
    """What a handler was called with; whoever tests it waits for that."""

    def next(self) -> Any:
        return self.get(timeout=PATIENCE_S)

    def some(self, number: int) -> list[Any]:
        return [self.next() for _ in range(number)]

    def rest(self) -> list[Any]:
        return [self.get_nowait() for _ in range(self.qsize())]


def wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S), "what is waited for does not happen"


def until(is_so: Callable[[], bool]) -> None:
    """For what only the app's own figures tell."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it does not become so"
        time.sleep(0.001)


def make_partitioned(broker: Broker, partitions: int) -> tuple[str, list[str]]:
    """A topic, and a key for each of its partitions."""
    topic = make_topic(broker, partitions=partitions)
    keys: dict[int, str] = {}
    for number in count():
        if len(keys) == partitions:
            break
        keys.setdefault(broker.publish(topic, b"", key=f"{number}").partition, f"{number}")
    broker.delete_topic(topic)
    broker.create_topic(topic, partitions=partitions)
    return topic, [keys[number] for number in range(partitions)]


def stopping(app: App) -> bool:
    return app._running is not None and app._running.stop.is_set()
