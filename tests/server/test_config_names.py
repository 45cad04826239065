"""The names that other brokers have for settings, and their whole files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import BadConfig
from penstock.server.config import load_client
from penstock.server.settings import ClientConfig
from tests.support.configs import MIB, Place, changed, nested

# The example configurations of the brokers whose files and variables are understood.

FLAT_EXAMPLE = {  # dotted names, as its documentation has them
    "server.host": "127.0.0.1",
    "server.port": 9999,
    "server.heartbeat_interval": 30,
    "storage.data_dir": "./storage/data",
    "storage.fsync_on_write": True,
    "client.request_timeout": 30,
    "client.heartbeat_interval": 30,
}


PYTHON_BROKER = {  # as its program has it
    "server": {
        "host": "127.0.0.1",
        "port": 9999,
        "max_connections": 100,
        "connection_timeout": 300,
        "heartbeat_interval": 30,
    },
    "storage": {
        "data_dir": "./storage/data",
        "snapshot_dir": "./storage/snapshots",
        "snapshot_interval": 60,
        "max_log_size": 104857600,
        "sync_interval": 1,
        "memory_cache_size": 1000,
        "fsync_on_write": True,
    },
    "topics": {"default_partitions": 1, "max_partitions": 16, "retention_hours": 24, "max_message_size": 1048576},
    "client": {"max_retries": 3, "retry_delay": 1, "request_timeout": 30, "auto_ack": True},
    "logging": {"level": "INFO", "format": "%(message)s", "file": None},
}


YAML_EXAMPLE = """
broker:
  node:
    id: ${NODE_ID:local-001}

  storage:
    type: mmap
    data-dir: ${DATA_DIR:./data}
    segment-size: 1073741824  # 1GB

  network:
    type: tcp
    port: ${BROKER_PORT:9092}
    threads:
      boss: 2
      worker: 16

  registry:
    url: ${REGISTRY_URL:http://localhost:8080}
    poll-interval: 30000

  pipe:
    poll-interval: 1000
    batch-size: 100
"""


JSON_EXAMPLE = """
{
  "server": {"host": "0.0.0.0", "port": 4222},
  "storage": {"dir": "./data", "retention": {"max_age": "24h", "max_bytes": 1073741824}},
  "cluster": {"enabled": %s, "node_id": "node-1", "raft_addr": "127.0.0.1:7001", "raft_dir": "./data/raft"}
}
"""


# ---- names of other brokers


@pytest.mark.parametrize(
    ("alias", "value", "key", "meant"),
    [
        ("storage.dir", "/d", "storage.data_dir", "/d"),
        ("storage.data-dir", "/d", "storage.data_dir", "/d"),
        ("server.data_dir", "/d", "storage.data_dir", "/d"),
        ("storage.type", "mmap", "storage.reader", "mmap"),
        ("storage.segment-size", 1 << 30, "topic.segment_bytes", 1 << 30),
        ("storage.max_segment_size", "1GiB", "topic.segment_bytes", 1 << 30),
        ("storage.fsync_on_write", True, "topic.durability", "fsync"),
        ("storage.fsync_on_write", False, "topic.durability", "flush"),
        ("storage.fsync_on_write", "False", "topic.durability", "flush"),
        ("storage.retention.max_age", "24h", "topic.retain_ms", 86_400_000),
        ("storage.retention.max_bytes", 1 << 30, "storage.retain_bytes", 1 << 30),
        ("broker.node.id", "n1", "server.node_id", "n1"),
        ("network.port", 9093, "server.quiet_port", 9093),
        ("network.type", "own", "server.network", "own"),
        ("server.heartbeat_interval", 30, "server.heartbeat_s", 30),
        ("server.heartbeat_interval", "1m", "server.heartbeat_s", 60),
        ("server.max_message_size", "2MiB", "server.payload_bytes_max", 2 * MIB),
        ("server.max_connections", 100, "server.connections_max", 100),
        ("ack.timeout", "30s", "topic.ack_deadline_ms", 30_000),
        ("ack.max_retries", 0, "topic.deliveries_max", 1),
        ("ack.max_retries", 5, "topic.deliveries_max", 6),
        ("ack.max_retries", 999, "topic.deliveries_max", 1000),
        ("dlq.prefix", "DEAD.", "dlq.prefix", "DEAD"),
        ("dlq.prefix", "a.b", "dlq.prefix", "a.b"),
        ("pipe.poll-interval", "2s", "pipe.poll_ms", 2000),
        ("pipe.batch-size", 50, "pipe.batch_size", 50),
        ("deduplication.window", "2m", "topic.dedup_window_ms", 120_000),
        ("deduplication.enabled", False, "topic.dedup", "off"),
        ("deduplication.enabled", True, "topic.dedup", "id"),
        ("flow_control.rate", 10, "flow.rate", 10),
        ("flow-control.burst", 20, "flow.burst", 20),
        ("flow_control.buffer", 30, "flow.buffer", 30),
        ("flow_control.default_slow_threshold", 0.5, "flow.slow_threshold", 0.5),
        ("flow_control.default_slow_threshold", "1", "flow.slow_threshold", 1.0),
        ("deduplication.max_entries", 10, "topic.dedup_ids_max", 10),
        ("client.request_timeout", 5, "client.request_timeout_s", 5),
        ("client.heartbeat_interval", 5, "client.heartbeat_s", 5),
        ("flow_control.mode", "drop", "flow.mode", "drop"),
        ("flow_control.backpressure_mode", "shed", "flow.mode", "shed"),
        ("flow_control.default_rate_limit", 1000.0, "flow.rate", 1000),
        ("flow_control.default_rate_burst", 50, "flow.burst", 50),
        ("flow_control.default_buffer_size", 10, "flow.buffer", 10),
        ("deduplication.window_size", "2m", "topic.dedup_window_ms", 120_000),
        ("retention.max_age", "24h", "topic.retain_ms", 86_400_000),
        ("retention.max_bytes", 1 << 30, "storage.retain_bytes", 1 << 30),
        ("retention.check_interval", "5s", "storage.upkeep_ms", 5000),
        ("lame_duck_duration", "3m", "server.lame_duck_s", 180),
        ("lame_duck_grace_period", "20s", "server.lame_duck_grace_s", 20),
    ],
)
def test_names_of_other_brokers_are_understood(place: Place, alias: str, value: Any, key: str, meant: Any) -> None:
    for content in ({alias: value}, nested(alias, value), {"broker": nested(alias.removeprefix("broker."), value)}):
        loaded = place.load(content)
        assert changed(loaded) == {key: meant}
        assert loaded.origins[key] == f"file {place.path}"
        assert loaded.warnings == []


# The keys of Flux's own configuration files.
FLUX: dict[str, Any] = {
    "server": {"port": ":4223", "data_dir": "data"},
    "storage": {"max_segment_size": 10485760},
    "retention": {"max_age": "24h", "max_bytes": 1073741824, "check_interval": "10s"},
    "ack": {"timeout": "60s", "max_retries": 3},
    "durable": {"flush_interval": "1s", "replay_batch": 100},
    "dlq": {"prefix": "DLQ."},
    "flow_control": {
        "enable_rate_limit": True,
        "enable_backpressure": True,
        "default_rate_limit": 1000.0,
        "default_rate_burst": 200,
        "default_buffer_size": 10000,
        "default_slow_threshold": 0.8,
        "backpressure_mode": "drop",
    },
    "deduplication": {"enabled": True, "window_size": "5m", "max_entries": 100000},
    "cluster": {
        "enabled": False,
        "node_id": "node-1",
        "bind_addr": "127.0.0.1:7001",
        "advertise_addr": "127.0.0.1:7001",
        "peers": [],
        "data_dir": "data/raft",
        "election_timeout": "3s",
        "heartbeat_interval": "1s",
        "snapshot_interval": "1h",
        "snapshot_threshold": 1000,
        "replication_mode": "sync",
        "bootstrap": True,
    },
}


def test_the_configuration_of_flux_is_understood(place: Place) -> None:
    """CI-07, CO-41, FC-06"""
    loaded = place.load(FLUX)
    assert changed(loaded) == {
        "server.port": 4223,
        "storage.data_dir": "data",
        "storage.retain_bytes": 1 << 30,
        "storage.upkeep_ms": 10_000,
        "dlq.prefix": "DLQ",
        "topic.dedup": "id",
        "topic.segment_bytes": 10485760,
        "topic.retain_ms": 86_400_000,
        "topic.ack_deadline_ms": 60_000,
        "topic.deliveries_max": 4,
        "topic.dedup_window_ms": 300_000,
        "flow.rate": 1000,
        "flow.burst": 200,
        "flow.buffer": 10000,
        "flow.mode": "drop",
        "flow.slow_threshold": 0.8,
        "topic.dedup_ids_max": 100_000,
    }
    told = [warning.replace(str(place.path), "FILE") for warning in loaded.warnings]
    assert told[0] == ("server.port (file FILE:1) is ':4223': only the port is used, server.host sets the address")
    assert "cluster.peers (file FILE:1) is [], which has no effect: there is no cluster" in told
    assert (
        "durable.flush_interval (file FILE:1) is '1s', which has no effect: "
        "an acknowledgement is stored before it is confirmed"
    ) in told
    assert not [warning for warning in told if warning.startswith(("flow_control.", "deduplication."))]


def test_a_rate_of_flux_counts_only_where_its_limit_is_enabled(place: Place) -> None:
    flow = {"enable_rate_limit": False, "default_rate_limit": 10000.0, "default_rate_burst": 1000}
    assert changed(place.load({"flow_control": flow})) == {}


@pytest.mark.parametrize("name", ["default_rate_limit", "default_rate_burst"])
def test_a_rate_of_flux_is_checked_where_its_limit_is_disabled_too(place: Place, name: str) -> None:
    [problem] = place.problems({"flow_control": {"enable_rate_limit": False, name: -1}})
    assert problem.startswith(f"flow_control.{name} (file FILE:1) is -1: it must be ")


def test_a_cluster_of_flux_is_refused(place: Place) -> None:
    assert place.problems(FLUX | {"cluster": FLUX["cluster"] | {"enabled": True}}) == [
        "cluster.enabled (file FILE:1) is true: it must be false: clustering is not available yet"
    ]


@pytest.mark.parametrize("content", [{"cluster.enabled": False}, {"cluster": {"enabled": "false"}}])
def test_what_is_so_anyway_may_be_said(place: Place, content: dict[str, Any]) -> None:
    loaded = place.load(content)
    assert (changed(loaded), loaded.warnings) == ({}, [])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {"cluster": {"enabled": True}},
            "cluster.enabled (file FILE:1) is true: it must be false: clustering is not available yet",
        ),
        (
            {"storage": {"fsync_on_write": "maybe"}},
            "storage.fsync_on_write (file FILE:1) is 'maybe': it must be true or false",
        ),
        (
            {"flow_control": {"enable_backpressure": False}},
            (
                "flow_control.enable_backpressure (file FILE:1) is false: it must be true: buffers are always limited, "
                "flow.mode says what a full one does"
            ),
        ),
        (
            {"flow_control": {"default_slow_threshold": float("nan")}},
            "flow_control.default_slow_threshold (file FILE:1) is nan: it must be a number, 0 to 1",
        ),
        (
            {"client": {"auto_ack": False}},
            (
                "client.auto_ack (file FILE:1) is false: it must be true: `penstock client` acknowledges what it "
                "prints; in a program, BrokerClient.subscribe takes auto_ack"
            ),
        ),
        ({"ack": {"max_retries": -1}}, "ack.max_retries (file FILE:1) is -1: it must be an integer, 0 to 999"),
        ({"ack": {"max_retries": 1000}}, "ack.max_retries (file FILE:1) is 1000: it must be an integer, 0 to 999"),
        (
            {"broker": {"storage": {"type": "s3"}}},
            "broker.storage.type (file FILE:1) is 's3': it must be pread or mmap",
        ),
    ],
)
def test_a_wrong_value_under_another_name_is_refused_by_that_name(
    place: Place, content: dict[str, Any], problem: str
) -> None:
    assert place.problems(content) == [problem]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("cluster.node_id", "there is no cluster"),
        ("cluster.raft_addr", "there is no cluster"),
        ("cluster.raft_dir", "there is no cluster"),
        ("cluster.peers", "there is no cluster"),
        ("durable.replay_batch", "a group that is behind reads as much as its members accept"),
        ("network.threads.boss", "one event loop serves all connections"),
        ("network.threads.worker", "one event loop serves all connections"),
        ("client.max_retries", "a request is sent once: one without an answer may have been executed"),
    ],
)
def test_what_has_no_effect_is_warned_of(place: Place, key: str, why: str) -> None:
    loaded = place.load(nested(key, 1))
    assert loaded.warnings == [f"{key} (file {place.path}:1) is 1, which has no effect: {why}"]
    assert changed(loaded) == {}


def test_the_flat_example(place: Place) -> None:
    loaded = place.load(FLAT_EXAMPLE)
    assert changed(loaded) == {
        "server.host": "127.0.0.1",
        # Its clients speak first.
        "server.quiet_port": 9999,
        "server.heartbeat_s": 30,
        "storage.data_dir": "./storage/data",
        "topic.durability": "fsync",
        "client.request_timeout_s": 30,
        "client.heartbeat_s": 30,
    }
    assert [warning.split()[0] for warning in loaded.warnings] == ["server.port"]


def test_the_whole_file_of_the_python_broker_is_understood(place: Place) -> None:
    """CO-41"""
    loaded = place.load(PYTHON_BROKER)
    assert changed(loaded) == {
        "server.host": "127.0.0.1",
        "server.quiet_port": 9999,
        "server.connections_max": 100,
        "server.heartbeat_s": 30,
        "server.payload_bytes_max": 1 << 20,
        "server.log_level": "info",
        "storage.data_dir": "./storage/data",
        "topic.durability": "fsync",
        "topic.partitions": 1,
        "topic.retain_ms": 24 * 3_600_000,
        "client.request_timeout_s": 30,
    }
    assert [warning.split()[0] for warning in loaded.warnings] == [
        "server.port",
        "server.connection_timeout",
        "storage.snapshot_dir",
        "storage.snapshot_interval",
        "storage.max_log_size",
        "storage.sync_interval",
        "storage.memory_cache_size",
        "topics.max_partitions",
        "client.max_retries",
        "client.retry_delay",
        "logging.format",
        "logging.file",
    ]


def test_a_client_reads_what_concerns_it_and_nothing_else(place: Place) -> None:
    """CO-06, CO-07"""
    for content in (FLAT_EXAMPLE, {"client": {"request_timeout": 5, "heartbeat_s": 7}, "server": {"prot": 1}}):
        place.path.write_text(json.dumps(content))
        found = load_client(path=place.path, environ={"PENSTOCK_CLIENT_HEARTBEAT_S": "9", "PENSTOCK_SERVER_PROT": "1"})
        assert found == ClientConfig(request_timeout_s=5 if "client" in content else 30, heartbeat_s=9)
    assert load_client(path=None, environ={"QB_CONFIG_FILE": str(place.path)}).heartbeat_s == 7
    place.path.write_text('{"client": {"request_timeout": 0, "nonsense": 1}}')
    with pytest.raises(BadConfig) as refused:
        load_client(path=place.path, environ={})
    assert [problem.split()[0] for problem in refused.value.problems] == ["client.request_timeout", "client.nonsense"]


def test_the_yaml_example(place: Place) -> None:
    loaded = place.load(YAML_EXAMPLE, suffix=".yml")
    expected = {
        "server.network": "tcp",
        "server.quiet_port": 9092,
        "server.node_id": "local-001",
        "storage.data_dir": "./data",
        "storage.reader": "mmap",
        "topic.segment_bytes": 1 << 30,
        "registry.url": "http://localhost:8080",
        "registry.poll_ms": 30_000,
        "pipe.poll_ms": 1000,
        "pipe.batch_size": 100,
    }
    assert changed(loaded) == expected
    assert [warning.split()[0] for warning in loaded.warnings] == [
        "broker.network.threads.boss",
        "broker.network.threads.worker",
    ]
    environ = {"NODE_ID": "b-1", "DATA_DIR": "/app/data", "BROKER_PORT": "9000", "HTTP_PORT": "8081"}
    assert changed(place.load(YAML_EXAMPLE, suffix=".yml", environ=environ)) == expected | {
        "server.quiet_port": 9000,
        "server.http_port": 8081,
        "server.node_id": "b-1",
        "storage.data_dir": "/app/data",
    }


def test_the_json_example(place: Place) -> None:
    loaded = place.load(JSON_EXAMPLE % "false", flags={"server.insecure": True})
    assert changed(loaded) == {
        "server.host": "0.0.0.0",
        "server.insecure": True,
        "server.port": 4222,
        "storage.data_dir": "./data",
        "storage.retain_bytes": 1 << 30,
        "topic.retain_ms": 86_400_000,
    }
    assert [warning.split()[0] for warning in loaded.warnings] == [
        "cluster.node_id",
        "cluster.raft_addr",
        "cluster.raft_dir",
    ]
    [problem] = place.problems(JSON_EXAMPLE % "true", flags={"server.insecure": True})
    assert "clustering is not available yet" in problem
