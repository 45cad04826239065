"""A server, and clients of its binary door."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.frames import Delivered, Frames
from tests.support.server import Serve

_numbers = itertools.count()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all that need no settings of their own; its log has no traceback at the end."""
    with Serve(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture
def client(server: Serve) -> Iterator[Frames]:
    with Frames(server) as client:
        yield client


@pytest.fixture
def other(server: Serve) -> Iterator[Frames]:
    with Frames(server) as client:
        yield client


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"topic-{next(_numbers)}"


@pytest.fixture
def group(client: Frames, topic: str) -> list[Delivered]:
    """Five messages that a member of the group `g-<topic>` has."""
    client.open(1, topic, group=f"g-{topic}")
    client.publish(topic, *(b"%d" % number for number in range(5)))
    return client.delivered(5)
