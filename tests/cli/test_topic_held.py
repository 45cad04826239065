"""What a topic keeps only for the group in its policy: in `penstock topic describe`, and as a metric."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.client.sync import Client
from tests.support.commands import Penstock
from tests.support.server import Serve
from tests.support.web import metrics

HELD = 'broker_log_held_bytes{topic="orders"}'
LARGE = bytes(1500)


def test_what_retention_keeps_for_a_group_is_shown(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, storage_upkeep_ms=10, topic_segment_bytes=4096, topic_retain_bytes=1) as server,
        Client(f"127.0.0.1:{server.port}") as client,
    ):
        penstock = Penstock(f"127.0.0.1:{server.port}")
        client.create_topic("orders", retain_for="archive")
        for number in range(20):
            client.publish("orders", b"%d " % number + LARGE)

        held = wait(server, held=True)
        described = penstock("topic", "describe", "orders")
        assert " are held for group archive: retention drops them when it has processed them" in described.out
        assert client.topic("orders").positions[0].held_bytes >= held > 10 * len(LARGE)

        client.alter_topic("orders", retain_for=None)
        wait(server, held=False)
        assert "held for group" not in penstock("topic", "describe", "orders").out


def wait(server: Serve, *, held: bool) -> float:
    until = time.monotonic() + 60
    while True:
        found = metrics(server)[HELD]
        # At most one segment is not sealed.
        if found > 10 * len(LARGE) if held else not found:
            return found
        assert time.monotonic() < until, found
        time.sleep(0.01)
