"""Scenarios that hypothesis generates, on nats-server and on Penstock."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.nats.generate import compare, scenarios
from tests.nats.run import Peer


@settings(max_examples=250, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=scenarios())
def test_connections_receive_what_they_receive_from_nats_server(peers: tuple[Peer, Peer], text: str) -> None:
    compare(peers, text)
