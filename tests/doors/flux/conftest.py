"""A server, and Flux clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.flux_door import NUMBERS, TOPICS
from tests.support.server import Flux, Serve


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("flux"), config=TOPICS) as server:
        yield server


@pytest.fixture
def flux(server: Serve) -> Iterator[Flux]:
    with Flux(server) as client:
        yield client


@pytest.fixture
def other(server: Serve) -> Iterator[Flux]:
    with Flux(server) as client:
        yield client


@pytest.fixture
def subject() -> str:
    """One that no other test uses, and whose messages need no acknowledgement for now."""
    return f"patient.{next(NUMBERS)}"
