"""A configuration file, what the server reads from it, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadConfig
from penstock.server.config import Loaded, load
from penstock.server.settings import Config

MIB = 1 << 20


DEFAULTS = {
    "server.host": "127.0.0.1",
    "server.port": 4222,
    "server.quiet_port": 9092,
    "server.qb_port": 9999,
    "server.http_port": 8222,
    "server.network": "tcp",
    "server.node_id": "local-001",
    "server.heartbeat_s": 120,
    "server.session_timeout_ms": 10_000,
    "server.provider_ready": False,
    "server.handshake_s": 30,
    "server.handshakes_max": 1000,
    "server.connections_max": 20_000,
    "server.http_connections_max": 4096,
    "server.http_hosts": None,
    "server.websocket_origins": None,
    "server.insecure": False,
    "server.subscriptions_max": 100_000,
    "server.groups_max": 10_000,
    "server.position_bytes_max": 512 << 20,
    "server.payload_bytes_max": MIB,
    "server.stop_s": 10,
    "server.lame_duck_s": 120,
    "server.lame_duck_grace_s": 10,
    "server.test_endpoints": False,
    "server.test_data_dir": None,
    "server.log_level": "info",
    "log.format": "text",
    "auth.user": None,
    "auth.password": None,
    "auth.token": None,
    "auth.users": None,
    "auth.failures_max": 10,
    "auth.lockout_s": 300,
    "auth.audit": None,
    "tls.cert": None,
    "tls.key": None,
    "tls.client_ca": None,
    "tls.client_certificates": "none",
    "tls.min_version": "1.2",
    "tls.required": True,
    "tls.handshake_first": False,
    "tls.handshake_s": 5,
    "storage.data_dir": "./data",
    "storage.files": "os",
    "storage.reader": "pread",
    "storage.unflushed_bytes_max": 64 * MIB,
    "storage.tail_bytes_max": 64 * MIB,
    "storage.open_segments_max": None,
    "storage.partitions_max": 20_000,
    "storage.disk_reserve_bytes": 16 * MIB,
    "storage.flush_messages": 500,
    "storage.flush_ms": 100,
    "storage.upkeep_ms": 10_000,
    "storage.retain_bytes": None,
    "topic.auto_create": True,
    "topic.topics_max": 10_000,
    "topic.dedup_ids_max": 100_000,
    "topic.partitions": 1,
    "topic.durability": "fsync",
    "topic.segment_bytes": 64 * MIB,
    "topic.retain_ms": None,
    "topic.retain_bytes": None,
    "topic.retain_for": None,
    "topic.cleanup": "delete",
    "topic.tombstone_ms": 86_400_000,
    "topic.dedup": "id",
    "topic.dedup_window_ms": None,
    "topic.ack_deadline_ms": 5000,
    "topic.deliveries_max": None,
    "topic.dead_letters": True,
    "topic.refresh_wait_ms": 60_000,
    "topic.on_damage": "stop",
    "topic.schema_compatibility": "backward",
    "topic.schema_enforced": False,
    "flow.rate": 0,
    "flow.burst": 100,
    "flow.buffer": 1000,
    "flow.mode": "block",
    "flow.slow_threshold": 0.8,
    "dlq.prefix": "DLQ",
    "registry.url": None,
    "registry.poll_ms": 30_000,
    "pipe.parent": None,
    "pipe.parents": None,
    "pipe.user": None,
    "pipe.password": None,
    "pipe.token": None,
    "pipe.ca": None,
    "pipe.cert": None,
    "pipe.key": None,
    "pipe.topics": None,
    "pipe.up": None,
    "pipe.poll_ms": 1000,
    "pipe.batch_size": 100,
    "pipe.type": "http",
    "pipe.on_gap": "stop",
    "client.request_timeout_s": 30,
    "client.heartbeat_s": 30,
}


class Place:
    """A directory with a configuration file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "config.json"

    def load(
        self,
        content: Mapping[str, Any] | str | None = None,
        *,
        suffix: str = ".json",
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> Loaded:
        path = None
        if content is not None:
            path = self.path = self.path.with_suffix(suffix)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return load(path=path, environ=environ or {}, flags=flags or {})

    def problems(self, content: Mapping[str, Any] | str | None = None, **sources: Any) -> list[str]:
        with pytest.raises(BadConfig) as caught:
            self.load(content, **sources)
        assert str(caught.value) == "\n".join(caught.value.problems)
        assert not any("\n" in problem for problem in caught.value.problems)
        return [problem.replace(str(self.path), "FILE") for problem in caught.value.problems]


def changed(loaded: Loaded) -> dict[str, Any]:
    """What is not as by default; secrets as they are shown."""
    return {key: value for key, value in loaded.shown().items() if loaded.origins[key] != "default"}


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    found = getattr(config, section)
    return getattr(found if hasattr(found, name) else found.policy, name)


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value
