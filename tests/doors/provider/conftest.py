"""A server, and the Provider's client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.provider_door import Client
from tests.support.server import Serve

_names = iter(range(1 << 30))


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture
def client(server: Serve) -> Iterator[Client]:
    with Client(server) as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"prices-{next(_names)}"
