"""Brokers in a tree: real ones, each following the one above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from penstock import Client
from tests.support.server import Serve
from tests.support.trees import url


class Tree(NamedTuple):
    root: Serve
    l2: Serve
    l3: Serve


@contextmanager
def broker(directory: Path, name: str, *parents: Serve | str, **settings: Any) -> Iterator[Serve]:
    """One that follows these, quickly."""
    urls = [parent if isinstance(parent, str) else url(parent) for parent in parents]
    following: dict[str, Any] = {"pipe_parent": ",".join(urls)} if urls else {}
    with Serve(directory / name, server_node_id=name, pipe_poll_ms=100, **following, **settings) as found:
        yield found


def client_of(server: Serve) -> Client:
    return Client(f"127.0.0.1:{server.port}")


def publish(server: Serve, subject: str, *values: bytes, **options: Any) -> None:
    with client_of(server) as client:
        for value in values:
            client.publish(subject, value, **options)


def offsets(found: list[dict[str, Any]]) -> list[int]:
    return [record["offset"] for record in found]


def data(found: list[dict[str, Any]]) -> list[str]:
    return [record["data"] for record in found]
