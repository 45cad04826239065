"""Both servers, once for a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nats.run import NATS_SERVER, Peer, nats_server, penstock


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Peer]]:
    """The real server, and ours."""
    if not NATS_SERVER.exists():
        pytest.skip("nats-server is not installed")
    with nats_server() as real, penstock(tmp_path_factory.mktemp("penstock") / "serve") as ours:
        yield real, ours
