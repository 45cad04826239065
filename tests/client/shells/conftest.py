"""A server, and each client of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import pytest

from penstock import Client
from tests.support.client_calls import address_of
from tests.support.server import Serve
from tests.support.shells import SHELLS, Shell, shell_of

_NAMES: Final = itertools.count()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("server"), server_payload_bytes_max=100_000) as running:
        yield running


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    with shell_of(request.param) as made:
        yield made


@pytest.fixture
def client(shell: Shell, server: Serve) -> Client:
    return shell.client(address_of(server), name="test")


@pytest.fixture
def topic() -> str:
    return f"t{next(_NAMES)}"
