"""A server for NATS clients, and subjects that no other test uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.nats_clients import TOPICS, numbers
from tests.support.server import Serve


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("nats"), config=TOPICS) as server:
        yield server


@pytest.fixture
def subject() -> str:
    """One that no other test uses, of a topic that is new."""
    return f"t{next(numbers)}.x"
