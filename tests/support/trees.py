"""Brokers in a tree, asked over HTTP how they are."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from penstock.model.batch import Batch
from penstock.pipe.batches import BatchSplitter
from tests.support.process import PATIENCE_S
from tests.support.server import Serve


def url(broker: Serve) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


def ask(
    broker: Serve, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None, **query: Any
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of an answer."""
    whole = f"{url(broker)}{path}?{urlencode(query)}" if query else url(broker) + path
    request = urllib.request.Request(whole, data=body, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.read(), dict(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def get(broker: Serve, path: str, **query: Any) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    status, body, _ = ask(broker, path, **query)
    return status, json.loads(body) if body else None


def status_of(broker: Serve) -> dict[str, Any]:
    status, found = get(broker, "/pipe/status")
    assert status == 200, found
    assert isinstance(found, dict)
    return found


def eventually(what: str, happened: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """Wait until it is so. Only a test that fails waits long."""
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < until, f"not within {PATIENCE_S} s: {what} {told()}"
        time.sleep(0.03)


def healthy(broker: Serve) -> None:
    eventually("it is healthy", lambda: status_of(broker)["health"] == "HEALTHY", lambda: status_of(broker))


def reason_of(broker: Serve, text: str, *, health: str = "DEGRADED") -> dict[str, Any]:
    """Wait until its health is that, for this reason."""
    found: dict[str, Any] = {}

    def is_so() -> bool:
        found.update(status_of(broker))
        return found["health"] == health and text in found["reason"]

    eventually(f"{health} because of {text!r}", is_so, lambda: found)
    return found


def records(broker: Serve, topic: str, count: int, *, partition: int = 0, offset: int = 0) -> list[dict[str, Any]]:
    """So many messages of a partition, as soon as they are there."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        nonlocal offset
        status, answer = get(broker, "/pipe/poll", topic=topic, partition=partition, offset=offset, limit=10_000)
        if status == 200:
            found[:] = answer
        elif status == 410:
            offset = answer["start"]
        return len(found) >= count

    eventually(f"{count} messages of {topic}", is_there, lambda: (len(found), status_of(broker), broker.stderr[-2000:]))
    return found


def batches(broker: Serve, topic: str, *, partition: int = 0, offset: int = 0, **query: Any) -> list[Batch]:
    """What a child is given."""
    status, body, _ = ask(broker, "/pipe/stream", topic=topic, partition=partition, offset=offset, **query)
    assert status in (200, 204), body
    return BatchSplitter().feed(body)
