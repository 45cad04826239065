"""A server, and Cursus clients of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.lengths import Cursus
from tests.support.server import Serve

_names = itertools.count()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture
def client(server: Serve) -> Iterator[Cursus]:
    with Cursus(server) as client:
        yield client


@pytest.fixture
def other(server: Serve) -> Iterator[Cursus]:
    with Cursus(server) as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"topic-{next(_names)}"
