"""Servers, and the Python broker's client of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, Final

import pytest

from penstock import BrokerClient
from penstock.client.sync import Client
from tests.support.server import Serve


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all tests here; each has topics of its own."""
    with Serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="package")
def observer(server: Serve) -> Iterator[Client]:
    """Looks what came of it, through another door."""
    with Client(f"127.0.0.1:{server.port}") as client:
        yield client


_NUMBERS: Final = count()


@pytest.fixture
def name() -> str:
    """Of a topic, and of what else a test makes."""
    return f"name{next(_NUMBERS)}"


@pytest.fixture
def connect(server: Serve) -> Iterator[Callable[..., BrokerClient]]:
    """Clients that are disconnected with the test."""
    with ExitStack() as stack:

        def made(client_id: str | None = None, *, to: Serve = server, **options: Any) -> BrokerClient:
            return stack.enter_context(BrokerClient(port=to.ports["quiet"], client_id=client_id, **options))

        yield made
