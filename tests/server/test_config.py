"""The settings: where they come from, what they may be, and how they are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.inspect import StrType

from penstock import table_file
from penstock.errors import BadConfig, PenstockError
from penstock.schema import shown
from penstock.server import config_names, cursus_names
from penstock.server.config import Loaded, load, load_client
from penstock.server.settings import SETTINGS, ClientConfig, Config

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
    "pipe.topics": None,
    "pipe.up": None,
    "pipe.poll_ms": 1000,
    "pipe.batch_size": 100,
    "pipe.type": "http",
    "pipe.on_gap": "stop",
    "client.request_timeout_s": 30,
    "client.heartbeat_s": 30,
}

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


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


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


# ---- the list of settings


def test_without_any_source_everything_is_as_by_default(place: Place) -> None:
    loaded = place.load()
    assert loaded.config == Config()
    assert loaded.shown() == DEFAULTS
    assert loaded.origins == dict.fromkeys(DEFAULTS, "default")
    assert loaded.warnings == []


def test_every_setting_has_a_meaning_in_one_line_and_every_number_a_bound() -> None:
    assert list(SETTINGS) == list(DEFAULTS)
    for key, setting in SETTINGS.items():
        assert setting.about, key
        assert "\n" not in setting.about, key
        assert setting.choices or isinstance(setting.base, StrType) or setting.low is not None, key


def test_every_default_is_allowed() -> None:
    for key, setting in SETTINGS.items():
        assert setting.parse(setting.default) == DEFAULTS[key], key


def test_a_configuration_cannot_be_changed(place: Place) -> None:
    loaded = place.load({"topics": {"orders": {}}})
    config = loaded.config
    sections = (config.server, config.auth, config.storage, config.topic, config.flow, config.dlq, config.pipe)
    for part in (loaded, config, *sections, config.topics["orders"]):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, None)


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("server.log_level", ["debug", "info", "warning", "error"]),
        ("log.format", ["text", "json"]),
        ("storage.reader", ["pread", "mmap"]),
        ("topic.durability", ["fsync", "flush"]),
        ("topic.cleanup", ["delete", "compact"]),
        ("topic.dedup", ["off", "id", "payload"]),
        ("flow.mode", ["block", "drop", "shed"]),
        ("pipe.on_gap", ["stop", "skip"]),
    ],
)
def test_every_choice_may_be_made(place: Place, key: str, choices: list[str]) -> None:
    assert [changed(place.load({key: choice})) for choice in choices] == [{key: choice} for choice in choices]


# ---- sources


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(place: Place) -> None:
    loaded = place.load(
        {"server": {"port": 1, "quiet_port": 2, "http_port": 3}},
        environ={"PENSTOCK_SERVER_PORT": "11", "PENSTOCK_SERVER_QUIET_PORT": "12"},
        flags={"server.port": 21, "server.stop_s": None},
    )
    server = loaded.config.server
    assert (server.port, server.quiet_port, server.http_port, server.stop_s) == (21, 12, 3, 10)
    keys = ("server.port", "server.quiet_port", "server.http_port", "server.stop_s")
    assert [loaded.origins[key] for key in keys] == [
        "flag --port",
        "environment PENSTOCK_SERVER_QUIET_PORT",
        f"file {place.path}",
        "default",
    ]


@pytest.mark.parametrize("key", DEFAULTS)
def test_every_setting_has_a_variable_of_its_own(place: Place, key: str) -> None:
    setting = SETTINGS[key]
    other = [choice for choice in setting.choices if choice != setting.default]
    text = "http://some" if "http" in (getattr(setting.base, "pattern", None) or "") else "some"
    value = other[0] if other else text if setting.low is None else setting.low + 1
    partners = {
        "auth.user": {"PENSTOCK_AUTH_PASSWORD": "other"},
        "auth.password": {"PENSTOCK_AUTH_USER": "other"},
        "pipe.user": {"PENSTOCK_PIPE_PASSWORD": "other", "PENSTOCK_PIPE_PARENTS": "http://root"},
        "pipe.password": {"PENSTOCK_PIPE_USER": "other", "PENSTOCK_PIPE_PARENTS": "http://root"},
        "pipe.token": {"PENSTOCK_PIPE_PARENTS": "http://root"},
        "pipe.topics": {"PENSTOCK_PIPE_PARENT": "http://root"},
        "pipe.up": {"PENSTOCK_REGISTRY_URL": "http://registry"},
        "server.host": {"PENSTOCK_AUTH_TOKEN": "other"},
        "server.lame_duck_s": {"PENSTOCK_SERVER_LAME_DUCK_GRACE_S": "0"},
    }.get(key, {})
    name = "PENSTOCK_" + key.upper().replace(".", "_")
    loaded = place.load(environ={name: str(value)} | partners)
    assert value_of(loaded.config, key) == value != DEFAULTS[key]
    assert loaded.origins[key] == f"environment {name}"


@pytest.mark.parametrize(
    ("name", "value", "key", "meant"),
    [
        ("QB_SERVER_HOST", "localhost", "server.host", "localhost"),
        ("QB_SERVER_PORT", "9999", "server.quiet_port", 9999),
        ("QB_DATA_DIR", "/srv/qb", "storage.data_dir", "/srv/qb"),
        ("QB_LOG_LEVEL", "DEBUG", "server.log_level", "debug"),
        ("QB_MAX_CONNECTIONS", "100", "server.connections_max", 100),
        ("QB_DEFAULT_PARTITIONS", "4", "topic.partitions", 4),
        ("NODE_ID", "broker-001", "server.node_id", "broker-001"),
        ("BROKER_PORT", "9093", "server.quiet_port", 9093),
        ("DATA_DIR", "/var/lib/broker", "storage.data_dir", "/var/lib/broker"),
        ("HTTP_PORT", "8081", "server.http_port", 8081),
        ("REGISTRY_URL", "http://registry.example.com", "registry.url", "http://registry.example.com"),
    ],
)
def test_variables_of_other_brokers_are_understood(place: Place, name: str, value: str, key: str, meant: Any) -> None:
    loaded = place.load(environ={name: value})
    assert changed(loaded) == {key: meant}
    assert loaded.origins[key] == f"environment {name}"
    # An own name beats them, and then they are not looked at.
    own = "PENSTOCK_" + key.upper().replace(".", "_")
    loaded = place.load(environ={name: "", own: value})
    assert changed(loaded) == {key: meant}
    assert loaded.origins[key] == f"environment {own}"


@pytest.mark.parametrize("name", ["QB_MAX_RETRIES", "QB_SNAPSHOT_DIR", "QB_SNAPSHOT_INTERVAL"])
def test_variables_that_have_no_effect_are_warned_of(place: Place, name: str) -> None:
    loaded = place.load(environ={name: "5"})
    assert changed(loaded) == {}
    [warning] = loaded.warnings
    assert warning.startswith(f"{name} (environment) is '5', which has no effect: ")


@pytest.mark.parametrize("name", ["PENSTOCK_CONFIG", "QB_CONFIG_FILE", "CONFIG_PATH"])
def test_a_variable_may_name_the_file(place: Place, tmp_path: Path, name: str) -> None:
    named = tmp_path / "named.toml"
    named.write_text("server.port = 5")
    loaded = load(path=None, environ={name: str(named)}, flags={})
    assert (loaded.config.server.port, loaded.origins["server.port"]) == (5, f"file {named}")
    assert place.load({"server.port": 6}, environ={name: str(named)}).config.server.port == 6


def test_the_own_variable_for_the_file_beats_the_other(tmp_path: Path) -> None:
    for number in (5, 6):
        (tmp_path / f"{number}.toml").write_text(f"server.port = {number}")
    environ = {"QB_CONFIG_FILE": str(tmp_path / "5.toml"), "PENSTOCK_CONFIG": str(tmp_path / "6.toml")}
    assert load(path=None, environ=environ, flags={}).config.server.port == 6


# ---- files


CONTENT: dict[str, Any] = {
    "server": {"port": 4000, "node-id": "n", "heartbeat_s": "2m"},
    "topic": {"dead_letters": False, "segment_bytes": "1MiB", "dedup": "off"},
    "topics": {"orders.eu": {"retain_ms": "7d", "partitions": 3}, "my-topic": {}},
}
FORMATS = {
    ".json": json.dumps(CONTENT),
    ".yaml": yaml.safe_dump(CONTENT, sort_keys=False),
    ".yml": """
server: {port: 4000, node-id: n, heartbeat_s: 2m}
topic: {dead_letters: no, segment_bytes: 1MiB, dedup: off}
topics:
  orders.eu: {retain_ms: 7d, partitions: 3}
  my-topic:
""",
    ".toml": """
[server]
port = 4000
node-id = "n"
heartbeat_s = "2m"
[topic]
dead_letters = false
segment_bytes = "1MiB"
dedup = "off"
[topics."orders.eu"]
retain_ms = "7d"
partitions = 3
[topics.my-topic]
""",
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_says_the_same(place: Place, suffix: str) -> None:
    loaded = place.load(FORMATS[suffix], suffix=suffix)
    config = loaded.config
    assert (config.server.port, config.server.node_id, config.server.heartbeat_s) == (4000, "n", 120)
    policy = config.topic.policy
    assert (policy.dead_letters, policy.segment_bytes, policy.dedup) == (False, MIB, "off")
    assert list(config.topics) == ["orders.eu", "my-topic"]
    assert config.topics["my-topic"] == config.topic
    orders = config.topics["orders.eu"]
    assert (orders.policy.retain_ms, orders.partitions, orders.policy.segment_bytes) == (7 * 86_400_000, 3, MIB)
    assert loaded.warnings == []


def test_a_suffix_may_be_in_capitals(place: Place) -> None:
    assert place.load("server: {port: 5}", suffix=".YAML").config.server.port == 5


def test_topics_may_stand_in_the_table_of_the_broker(place: Place) -> None:
    config = place.load({"topics": {"a": {}}, "broker": {"topics": {"b": {"partitions": 2}, "c": None}}}).config
    assert [(name, topic.partitions) for name, topic in config.topics.items()] == [("a", 1), ("b", 2), ("c", 1)]


def test_what_a_topic_does_not_set_comes_from_the_general_policy_with_its_origin(place: Place) -> None:
    loaded = place.load(
        {"topic": {"retain_ms": "1h"}, "topics": {"a-b": {"retain-ms": "none", "dedup-window_ms": "1m"}}},
        environ={"PENSTOCK_TOPIC_DURABILITY": "flush"},
    )
    topic = loaded.config.topics["a-b"].policy
    assert (topic.retain_ms, topic.dedup_window_ms, topic.durability, topic.cleanup) == (
        None,
        60_000,
        "flush",
        "delete",
    )
    origins = {key: origin for key, origin in loaded.origins.items() if key.startswith("topics.")}
    assert list(origins)[:2] == ["topics.a-b.partitions", "topics.a-b.durability"]
    assert origins["topics.a-b.retain_ms"] == f"file {place.path}"
    assert origins["topics.a-b.durability"] == "environment PENSTOCK_TOPIC_DURABILITY"
    assert origins["topics.a-b.cleanup"] == "default"
    assert loaded.shown()["topics.a-b.dedup_window_ms"] == 60_000


@pytest.mark.parametrize("name", ["auto_create", "topics_max", "dedup_ids_max"])
def test_what_is_of_all_topics_is_no_setting_of_one(place: Place, name: str) -> None:
    [problem] = place.problems({"topics": {"orders": {name: 1}}})
    assert problem.startswith(f"topics.orders.{name} (file FILE:1) is not a setting")


@pytest.mark.parametrize(("suffix", "content"), [(".yaml", ""), (".toml", ""), (".json", "{}"), (".yaml", "server:\n")])
def test_an_empty_file_or_table_sets_nothing(place: Place, suffix: str, content: str) -> None:
    assert changed(place.load(content, suffix=suffix)) == {}


def _aliases(form: str) -> str:
    """Forty values, each twice the one before."""
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {form.format(f'a{n - 1}')}" for n in range(1, 40))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("suffix", "content", "problem"),
    [
        (".ini", "", "FILE: unknown format: the name must end with .toml, .json, .yaml, .yml"),
        (".json", "{", "FILE:1: invalid JSON: Expecting property name"),
        (".toml", "port = ", "FILE:1: invalid TOML: Invalid value"),
        (".yaml", "a: [1\nauth: {password: hush}", "FILE:2: invalid YAML: expected ',' or ']', but got ':'"),
        (".yaml", "a: \x00", "FILE: invalid YAML: unexpected characters"),
        (".json", "[1]", "FILE: the file must contain tables, not a list"),
        (".json", "null", "FILE: the file must contain tables, not null"),
        (".json", "7", "FILE: the file must contain tables, not a number or time"),
        (".json", '{"a": 1' + "0" * 5000 + "}", "FILE: invalid JSON: Exceeds the limit"),
        (".json", "[" * 100_000, "FILE: too many nested tables"),
        (".toml", "a = 1" + "0" * 5000, "FILE: invalid TOML: Exceeds the limit"),
        (".toml", "a = " + "[" * 100_000, "FILE: too many nested tables"),
        (".yaml", "text", "FILE: the file must contain tables, not text"),
        (".yaml", "null", "FILE: the file must contain tables, not null"),
        (".yaml", "- 1", "FILE: the file must contain tables, not a list"),
        (".yaml", "true", "FILE: the file must contain tables, not true or false"),
        (".yaml", "3.5", "FILE: the file must contain tables, not a number or time"),
        (".yaml", "[" * 100_000, "FILE: too many nested tables"),
        (".yaml", "a: 2026-13-01", "FILE: invalid YAML: a date, number or tagged value is invalid"),
        (".yaml", "a: !!bool maybe", "FILE: invalid YAML: a date, number or tagged value is invalid"),
        (".yaml", "a: !!timestamp now", "FILE: invalid YAML: a date, number or tagged value is invalid"),
        (".yaml", "a: !!int ''", "FILE: invalid YAML: a date, number or tagged value is invalid"),
        (".yaml", "a: !!python/object:os.system {}", "FILE:1: invalid YAML: could not determine a constructor"),
        (".yaml", "a: 1\nb: &b\n  c: *b", "FILE:2: invalid YAML: an alias refers to a value that contains it"),
        (".yaml", _aliases("[*{0},*{0}]"), "FILE:13: invalid YAML: aliases repeat more than 10000 values"),
        (".yaml", _aliases("{{x: *{0}, y: *{0}}}"), "FILE:12: invalid YAML: aliases repeat more than 10000 values"),
        (".yaml", _aliases("{{<<: [*{0},*{0}]}}"), "FILE:12: invalid YAML: aliases repeat more than 10000 values"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_name(
    place: Place, suffix: str, content: str, problem: str
) -> None:
    [found] = place.problems(content, suffix=suffix)
    assert found.startswith(problem)
    assert "hush" not in found


def test_aliases_and_merged_tables_are_understood() -> None:
    content = "base: &base {port: 1, http_port: 2}\nserver: {<<: *base, port: 3}"

    merged = table_file.parse(Path("f.yaml"), content.encode())
    assert merged.tables["server"] == {"port": 3, "http_port": 2}
    assert (merged.lines.of(("server", "port")), merged.repeated) == (2, [])


def test_a_file_that_is_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=re.escape(f"{tmp_path / 'no.toml'}: No such file or directory")):
        load(path=tmp_path / "no.toml", environ={}, flags={})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="not UTF-8 text"):
        load(path=path, environ={}, flags={})


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


CURSUS = """
broker_port: 9000
health_check_port: 9080
enable_exporter: true
exporter_port: 9100
log_level: "warn"
log_dir: broker-logs
linger_ms: 50
disk_flush_batch_size: 1000
log_cleanup_interval: 1800
log_segment_bytes: 1048576
log_cleanup_policy: compact
log_retention_hours: 168
log_retention_bytes: -1
log_retention_check_interval_ms: 300000
consumer_session_timeout_ms: 30000
channel_buffer_size: 8192
consumer_heartbeat_check_ms: 5000
static_consumer_groups: [{name: workers, consumer_count: 2, topics: [orders]}]
stream_timeout: 30m
use_tls: false
enabled_distribution: false
"""
CURSUS_MEANT = {
    "server.quiet_port": 9000,
    "server.http_port": 9080,
    "server.log_level": "warning",
    "server.session_timeout_ms": 30_000,
    "storage.data_dir": "broker-logs",
    "storage.flush_messages": 1000,
    "storage.flush_ms": 50,
    "storage.upkeep_ms": 300_000,
    "topic.segment_bytes": MIB,
    "topic.retain_ms": 168 * 3_600_000,
    "topic.retain_bytes": None,
    "topic.cleanup": "compact",
    "topic.dedup_window_ms": 30 * 60_000,
}


def test_the_file_of_cursus_is_understood(place: Place) -> None:
    loaded = place.load(CURSUS, suffix=".yaml")
    assert changed(loaded) == CURSUS_MEANT
    assert [warning.split()[0] for warning in loaded.warnings] == [
        "enable_exporter",
        "exporter_port",
        "channel_buffer_size",
        "consumer_heartbeat_check_ms",
        "static_consumer_groups",
        "stream_timeout",
    ]
    assert loaded.warnings[1] == (
        f"exporter_port (file {place.path}:5) is 9100, which has no effect: the metrics are at /metrics of "
        "server.http_port"
    )


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        ("broker: {port: 9000, log_dir: logs, cleanup_interval: 60, enable_gzip: false}", ".yaml"),
        ({"broker.port": 9000, "log.dir": "logs", "cleanup.interval": 60, "gzip.enable": False}, ".json"),
        ({"broker.port": 9000, "log.dir": "logs", "log.cleanup.interval": 60, "distribution.raft.port": 1}, ".json"),
    ],
)
def test_cursus_spells_its_names_in_three_ways(place: Place, content: Any, suffix: str) -> None:
    loaded = place.load(content, suffix=suffix)
    assert changed(loaded) == {
        "server.quiet_port": 9000,
        "storage.data_dir": "logs",
        "topic.dedup_window_ms": 60_000,
    }
    assert len(loaded.warnings) == 1


def test_the_defaults_of_cursus_batches_are_those_of_the_broker(place: Place) -> None:
    """CO-34, CO-35"""
    storage = place.load().config.storage
    assert (storage.flush_messages, storage.flush_ms) == (500, 100)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {"use_tls": True},
            "use_tls (file FILE:1) is true: it must be false: TLS is not available: use a proxy",
        ),
        (
            {"distribution.enabled": True},
            "distribution.enabled (file FILE:1) is true: it must be false: clustering is not available yet",
        ),
        (
            {"broker_port": 9000, "network": {"port": 9092}},
            "network.port (file FILE:1) repeats broker_port (file FILE:1): keep one of them",
        ),
    ],
)
def test_what_cursus_has_and_this_broker_does_not_is_refused(place: Place, content: Any, problem: str) -> None:
    assert place.problems(content) == [problem]


def test_a_port_that_is_not_of_cursus_is_no_setting(place: Place) -> None:
    assert place.problems({"port": 4222}) == ["port (file FILE:1) is not a setting: did you mean server.port?"]


def test_flags_of_cursus_are_understood(place: Place) -> None:
    flags = {
        "server.port": 9000,
        "server.host": None,
        "health-port": "9080",
        "exporter": "true",
        "exporter-port": "9100",
        "log-dir": "broker-logs",
        "disk-flush-batch": "50",
        "linger-ms": "50",
    }
    loaded = place.load({"log_dir": "other"}, flags=flags)
    assert changed(loaded) == {
        "server.quiet_port": 9000,
        "server.http_port": 9080,
        "storage.data_dir": "broker-logs",
        "storage.flush_messages": 50,
        "storage.flush_ms": 50,
    }
    assert loaded.origins["storage.data_dir"] == "flag --log-dir"
    assert loaded.warnings == [
        "--port is read as --quiet-port, as these are flags of Cursus",
        "--exporter is 'true', which has no effect: the metrics are always at /metrics of server.http_port",
        "--exporter-port is '9100', which has no effect: the metrics are at /metrics of server.http_port",
    ]


def test_every_flag_of_cursus_means_a_setting_or_has_a_reason() -> None:
    for name in cursus_names.FLAGS.values():
        assert (name in config_names.ALIASES) != (name in config_names.NO_EFFECT), name


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


# ---- variables within a file


@pytest.mark.parametrize(
    ("key", "text", "meant"),
    [
        ("server.port", "${PORT}", 7000),
        ("server.port", "${NONE:7001}", 7001),
        ("server.port", "${PORT:7001}", 7000),
        ("server.port", "7${DIGIT}${NONE:0}2", 7102),
        ("storage.data_dir", "/srv/${NAME}/data", "/srv/x y/data"),
        ("storage.data_dir", "/srv/${NONE:}/data", "/srv//data"),
        ("storage.data_dir", "${NONE:http://h:80/}", "http://h:80/"),
        ("storage.data_dir", "$HOME {x}", "$HOME {x}"),
        ("topic.dead_letters", "${NONE:false}", False),
        ("topic.retain_ms", "${NONE:1h}", 3_600_000),
        ("topic.retain_bytes", "${NONE:1KiB}", 1024),
    ],
)
def test_variables_in_a_file_are_replaced_and_the_result_is_converted(
    place: Place, key: str, text: str, meant: Any
) -> None:
    loaded = place.load({key: text}, environ={"PORT": "7000", "DIGIT": "1", "NAME": "x y"})
    assert changed(loaded) == {key: meant}
    assert loaded.origins[key] == f"file {place.path}"


def test_variables_are_replaced_in_the_settings_of_one_topic(place: Place) -> None:
    loaded = place.load({"topics": {"t": {"partitions": "${COUNT}"}}}, environ={"COUNT": "7"})
    assert loaded.config.topics["t"].partitions == 7


def test_a_variable_that_is_not_set_is_refused_with_its_key(place: Place) -> None:
    assert place.problems({"auth": {"token": "hush${SECRET}"}}) == [
        "auth.token (file FILE:1): SECRET is not in the environment: set it, or write ${SECRET:default}"
    ]


@pytest.mark.parametrize("text", ["${", "${A", "${}", "${A B}", "${1A:2}", "x${:y}"])
def test_a_variable_that_is_misspelled_is_refused(place: Place, text: str) -> None:
    assert place.problems({"storage": {"dir": text}}, environ={"A": "a"}) == [
        "storage.dir (file FILE:1): invalid variable: write ${NAME} or ${NAME:default}"
    ]


def test_nothing_is_replaced_outside_a_file(place: Place) -> None:
    loaded = place.load(environ={"DATA_DIR": "${HOME}"}, flags={"server.node_id": "${HOME}"})
    assert (loaded.config.storage.data_dir, loaded.config.server.node_id) == ("${HOME}", "${HOME}")


# ---- values


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("topic.retain_ms", 1500, 1500),
        ("topic.retain_ms", "1500", 1500),
        ("topic.retain_ms", "500ms", 500),
        ("topic.retain_ms", "5s", 5000),
        ("topic.retain_ms", "5m", 300_000),
        ("topic.retain_ms", "24h", 86_400_000),
        ("topic.retain_ms", "7d", 604_800_000),
        ("topic.retain_ms", "1.5h", 5_400_000),
        ("topic.retain_ms", "none", None),
        ("topic.retain_ms", None, None),
        ("server.stop_s", "3000ms", 3),
        ("server.stop_s", "1m", 60),
        ("server.stop_s", "1h", 3600),
        ("storage.tail_bytes_max", "1048576", MIB),
        ("storage.tail_bytes_max", "64MiB", 64 * MIB),
        ("storage.tail_bytes_max", "64 MiB", 64 * MIB),
        ("storage.tail_bytes_max", "1GB", 10**9),
        ("storage.tail_bytes_max", "1GiB", 1 << 30),
        ("storage.tail_bytes_max", "2kB", 2000),
        ("storage.tail_bytes_max", "2KB", 2000),
        ("storage.tail_bytes_max", "2KiB", 2048),
        ("storage.tail_bytes_max", "3MB", 3_000_000),
        ("storage.tail_bytes_max", "1TB", 10**12),
        ("storage.tail_bytes_max", "1TiB", 1 << 40),
        ("storage.tail_bytes_max", "7B", 7),
        ("storage.tail_bytes_max", "0.5KiB", 512),
        ("topic.auto_create", "FALSE", False),
        ("topic.auto_create", "true", True),
        ("server.log_level", "Warning", "warning"),
        ("auth.token", "none", "none"),
        ("server.port", 0, 0),
        ("server.quiet_port", 0, 0),
    ],
)
def test_a_value_may_be_written_in_several_ways(place: Place, key: str, value: Any, meant: Any) -> None:
    found = value_of(place.load({key: value}).config, key)
    assert (found, type(found)) == (meant, type(meant))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("server.port", ["", "abc", "1.5", 1.5, True, None, [1]]),
        ("server.port", ["1s", "1 000", "1_000", "１", "0x10", " 1"]),
        ("topic.retain_ms", ["5M", "5 minutes", "h", "1.5ms", "1h30m", "-5s", 0, "None", ""]),
        ("server.stop_s", ["500ms", "1.5s", "0s"]),
        ("storage.tail_bytes_max", ["64M", "64mb", "1Mb", "1.5B", "5s", -1, "none"]),
        ("topic.dead_letters", ["yes", "", 1, 0, None, "off"]),
        ("topic.durability", ["never", "", None, True, False, 1]),
        ("topic.dedup", ["on", True]),
        ("server.host", ["", None, 1, True]),
        ("auth.token", ["", 1234]),
        ("dlq.prefix", [".", "DLQ..", ".DLQ", "DLQ.*", "DLQ.>", "D LQ", ""]),
        ("pipe.parent", ["root:8222", "ftp://root", "http://", ""]),
        ("pipe.parents", ["root:8222", "http://root/path", "http://root,", "http://ann:secret@root", ""]),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(place: Place, key: str, values: list[Any]) -> None:
    for value in values:
        text = "***" if key == "auth.token" else shown(value)
        assert place.problems({key: value}) == [f"{key} (file FILE:1) is {text}: it must be {SETTINGS[key].allowed}"]


def test_a_choice_that_is_nearly_right_is_suggested(place: Place) -> None:
    assert place.problems({"topic.durability": "sync"}) == [
        "topic.durability (file FILE:1) is 'sync' (did you mean fsync?): it must be fsync or flush"
    ]


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("server.port", "an integer, 0 to 65535"),
        ("storage.data_dir", "non-empty text (a number needs quotes)"),
        (
            "server.host",
            "non-empty text (a number needs quotes): addresses or names without a port, like 127.0.0.1,::1",
        ),
        ("server.stop_s", 'a number of seconds or a duration such as "5s", "5m", "24h" or "7d", 1 to 3600'),
        ("storage.tail_bytes_max", 'a number of bytes or a size such as "64MiB" or "1GB", at least 0'),
        (
            "topic.retain_ms",
            'a number of milliseconds or a duration such as "500ms", "5s", "5m", "24h" or "7d", at least 1, or none',
        ),
        ("topic.durability", "fsync or flush"),
        ("topic.dedup", "off, id or payload"),
        ("topic.dead_letters", "true or false"),
        ("dlq.prefix", "non-empty text (a number needs quotes): a subject without wildcards"),
    ],
)
def test_what_is_allowed_is_said_in_words(key: str, allowed: str) -> None:
    assert SETTINGS[key].allowed == allowed


BOUNDS = [
    ("server.port", 0, 65535),
    ("server.quiet_port", 0, 65535),
    ("server.qb_port", 1, 65535),
    ("server.http_port", 0, 65535),
    ("server.heartbeat_s", 1, 86_400),
    ("server.session_timeout_ms", 100, 86_400_000),
    ("server.handshake_s", 1, 86_400),
    ("server.handshakes_max", 1, 1_000_000),
    ("server.connections_max", 1, 1_000_000),
    ("server.http_connections_max", 1, 1_000_000),
    ("server.subscriptions_max", 1, None),
    ("server.groups_max", 0, None),
    ("server.position_bytes_max", 1 << 20, None),
    ("server.payload_bytes_max", 1, 64 * MIB - 4096),
    ("server.stop_s", 1, 3600),
    ("server.lame_duck_s", 1, 86_400),
    ("server.lame_duck_grace_s", 0, 3600),
    ("storage.unflushed_bytes_max", 1, None),
    ("storage.tail_bytes_max", 0, None),
    ("storage.open_segments_max", 1, None),
    ("storage.partitions_max", 1, None),
    ("storage.disk_reserve_bytes", 0, None),
    ("storage.flush_messages", 1, None),
    ("storage.flush_ms", 1, None),
    ("storage.upkeep_ms", 1, None),
    ("storage.retain_bytes", 16 * MIB, None),
    ("topic.topics_max", 0, None),
    ("topic.dedup_ids_max", 1, 400_000),
    ("topic.partitions", 1, 256),
    ("topic.segment_bytes", 4096, 2 << 30),
    ("topic.retain_ms", 1, None),
    ("topic.retain_bytes", 1, None),
    ("topic.tombstone_ms", 0, None),
    ("topic.dedup_window_ms", 1, None),
    ("topic.ack_deadline_ms", 1, None),
    ("topic.deliveries_max", 1, 1000),
    ("topic.refresh_wait_ms", 1, None),
    ("flow.rate", 0, None),
    ("flow.burst", 1, None),
    ("flow.buffer", 1, None),
    ("flow.slow_threshold", 0, 1),
    ("registry.poll_ms", 100, 86_400_000),
    ("pipe.poll_ms", 10, 3_600_000),
    ("pipe.batch_size", 1, 10_000),
    ("client.request_timeout_s", 1, 86_400),
    ("client.heartbeat_s", 1, 86_400),
]


@pytest.mark.parametrize(("key", "low", "high"), BOUNDS)
def test_bounds_are_allowed_and_what_is_beyond_them_is_refused(
    place: Place, key: str, low: int, high: int | None
) -> None:
    partners = {
        "server.lame_duck_s": {"server.lame_duck_grace_s": 0},
        "server.lame_duck_grace_s": {"server.lame_duck_s": 86_400},
    }.get(key, {})
    for value in (low, high):
        if value is not None:
            assert changed(place.load({key: value} | partners)) == {key: value} | partners
    for value in (low - 1, None if high is None else high + 1):
        if value is not None:
            [problem] = place.problems({key: value} | partners)
            assert problem.startswith(f"{key} (file FILE:1) is {value}: ")


@pytest.mark.parametrize(
    "url", ["registry:8080", "ftp://registry", "http://", "http://user:pass@registry", "http://a?b"]
)
def test_a_registry_that_is_no_url_is_refused(place: Place, url: str) -> None:
    [problem] = place.problems({"registry": {"url": url}})
    assert problem.startswith(f"registry.url (file FILE:1) is {url!r}: ")
    assert problem.endswith(": a URL like http://host:8080")


def test_every_number_is_in_the_table_of_bounds() -> None:
    assert [key for key, _, _ in BOUNDS] == [key for key, setting in SETTINGS.items() if setting.low is not None]


# ---- refusals


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("server.prot", ": did you mean server.port?"),
        ("server.Port", ": did you mean server.port?"),
        ("sever.host", ": did you mean server.host?"),
        ("server.port.number", ": did you mean server.port?"),
        ("storage.retention.max_agee", ": did you mean storage.retention.max_age?"),
        ("topic.durabilty", ": did you mean topic.durability?"),
        ("durability", ": did you mean topic.durability?"),
        ("port", ": did you mean server.port?"),
        ("zzz", ""),
    ],
)
def test_a_wrong_key_is_refused_with_the_nearest_right_one(place: Place, key: str, hint: str) -> None:
    assert place.problems({key: 1}) == [f"{key} (file FILE:1) is not a setting{hint}"]


def test_a_wrong_key_of_one_topic_is_refused_with_the_nearest_right_one(place: Place) -> None:
    assert place.problems({"topics": {"a-b": {"retain-sm": 1}}}) == [
        "topics.a-b.retain-sm (file FILE:1) is not a setting: did you mean topics.a-b.retain_ms?"
    ]


def test_a_wrong_variable_is_refused_with_the_nearest_right_one(place: Place) -> None:
    assert place.problems(environ={"PENSTOCK_SERVER_PROT": "1", "PENSTOCK_CONFG": "x", "QB_WHATEVER": "1"}) == [
        "PENSTOCK_SERVER_PROT (environment) is not a setting: did you mean PENSTOCK_SERVER_PORT?",
        "PENSTOCK_CONFG (environment) is not a setting: did you mean PENSTOCK_CONFIG?",
    ]


def test_a_wrong_flag_is_refused_with_the_nearest_right_one(place: Place) -> None:
    assert place.problems(flags={"server.prot": 1}) == [
        "server.prot (flag --prot) is not a setting: did you mean server.port?"
    ]


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".toml", '# first\n[server]\nport = 1\n\n[storage]\ndir = 7\n[topics."a.b"]\nretain = 1\n'),
        (".yaml", "# first\nserver:\n  port: 1\nstorage:\n\n  dir: 7\ntopics:\n  a.b: {retain: 1}\n"),
        (".json", '{\n"server":\n{"port":\t1},\n"storage":\n\n{"dir": 7},\n"topics": {\n"a.b": {"retain": 1}}}'),
    ],
)
def test_a_problem_has_its_file_and_line_in_every_format(place: Place, suffix: str, content: str) -> None:
    assert place.problems(content, suffix=suffix) == [
        f"storage.dir (file FILE:6) is 7: it must be {SETTINGS['storage.data_dir'].allowed}",
        "topics.a.b.retain (file FILE:8) is not a setting: did you mean topics.a.b.retain_ms?",
    ]


@pytest.mark.parametrize(
    ("suffix", "content"), [(".yaml", "server:\n  port: 1\n  port: 2\n"), (".json", '{"a": 1,\n\n"a": 2}')]
)
def test_a_key_that_is_repeated_is_refused_with_its_line(place: Place, suffix: str, content: str) -> None:
    name = "port" if suffix == ".yaml" else "a"
    assert f"FILE:3: '{name}' is repeated: keep one of them" in place.problems(content, suffix=suffix)


@pytest.mark.parametrize("key", ["server", "topics", "topics.orders", "broker", "registry", "storage.retention"])
def test_a_value_in_the_place_of_a_table_is_refused_and_not_shown(place: Place, key: str) -> None:
    assert place.problems(nested(key, "hush")) == [f"{key} (file FILE:1) must be a table of settings"]


def test_all_problems_are_told_at_once_each_with_its_source(place: Place) -> None:
    assert place.problems(
        {"server": {"port": 70000, "prot": 1}, "topic": {"cleanup": "burn"}, "auth": {"user": "me"}},
        environ={"QB_SERVER_PORT": "x", "PENSTOCK_FLOW_RATE": "-1"},
        flags={"storage.data_dir": ""},
    ) == [
        "server.port (file FILE:1) is 70000: it must be an integer, 0 to 65535",
        "server.prot (file FILE:1) is not a setting: did you mean server.port?",
        "topic.cleanup (file FILE:1) is 'burn': it must be delete or compact",
        "flow.rate (environment PENSTOCK_FLOW_RATE) is '-1': it must be a non-negative integer",
        "server.quiet_port (environment QB_SERVER_PORT) is 'x': it must be an integer, 0 to 65535",
        "storage.data_dir (flag --data-dir) is '': it must be non-empty text (a number needs quotes)",
        "auth.user (file FILE:1) needs auth.password: set both, or neither",
    ]


def test_a_wrong_value_is_refused_even_if_a_right_one_beats_it(place: Place) -> None:
    [problem] = place.problems({"server": {"port": -1}}, flags={"server.port": 5})
    assert problem.startswith("server.port (file FILE:1) is -1")


def test_a_user_and_a_password_go_together(place: Place) -> None:
    config = place.load({"auth": {"user": "me"}}, environ={"PENSTOCK_AUTH_PASSWORD": "hush"}).config
    assert (config.auth.user, config.auth.password) == ("me", "hush")
    assert place.problems({"auth": {"password": "hush"}}) == [
        "auth.password (file FILE:1) needs auth.user: set both, or neither"
    ]
    assert place.problems({"auth": {"user": "me", "password": None}}) == [
        "auth.user (file FILE:1) needs auth.password: set both, or neither"
    ]
    # A password that is wrong is not missing too.
    assert len(place.problems({"auth": {"user": "me", "password": 1234}})) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "shop-7"])
def test_other_machines_are_not_served_without_credentials(place: Place, host: str) -> None:
    [problem] = place.problems(flags={"server.host": host})
    assert problem.startswith(f"server.host (flag --host) is '{host}', which other machines can reach")
    assert all(remedy in problem for remedy in ("auth.user and auth.password", "auth.token", "--insecure"))
    for secrets in ({"auth.token": "t"}, {"auth.user": "u", "auth.password": "p"}, {"server.insecure": True}):
        assert place.load(flags={"server.host": host, **secrets}).config.server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1,0.0.0.0", "::1, ::", "localhost,::ffff:0.0.0.0", "[::]"])
def test_one_of_several_hosts_that_others_can_reach_needs_credentials(place: Place, host: str) -> None:
    [problem] = place.problems(flags={"server.host": host})
    assert "which other machines can reach" in problem


def test_several_hosts_are_a_list_or_have_commas_between(place: Place) -> None:
    hosts = ["127.0.0.1", "::1"]
    for given in (hosts, "127.0.0.1,::1"):
        assert place.load({"server": {"host": given}}).config.server.host == "127.0.0.1,::1"
    assert place.load(flags={"server.host": hosts}).config.server.host == "127.0.0.1,::1"
    assert place.load(environ={"PENSTOCK_SERVER_HOST": "127.0.0.1,::1"}).config.server.host == "127.0.0.1,::1"


@pytest.mark.parametrize(
    "host", [[], ["127.0.0.1", 7], "127.0.0.1:4222", "[::1]:4222", "a b", "nats://a", "a,", ",", 7]
)
def test_what_is_no_host_is_refused(place: Place, host: Any) -> None:
    [problem] = place.problems({"server": {"host": host}})
    assert problem.startswith(f"server.host (file FILE:1) is {host!r}: it must be ")
    assert problem.endswith("addresses or names without a port, like 127.0.0.1,::1")


def test_the_grace_period_is_shorter_than_the_lame_duck_mode(place: Place) -> None:
    [problem] = place.problems({"lame_duck_duration": 30, "lame_duck_grace_period": 30})
    assert problem == (
        "server.lame_duck_grace_s (file FILE:1) is 30, and server.lame_duck_s (file FILE:1) is 30: the grace period "
        "must be shorter"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]", "127.0.0.1,::1,localhost"])
def test_this_machine_is_served_without_credentials(place: Place, host: str) -> None:
    assert place.load(flags={"server.host": host}).config.server.host == host


def test_topics_to_pipe_need_a_parent(place: Place) -> None:
    assert place.problems({"pipe.topics": "a", "pipe.up": "b"}) == [
        "pipe.topics (file FILE:1) has no effect without a parent: set pipe.parent or registry.url as well",
        "pipe.up (file FILE:1) has no effect without a parent: set pipe.parent or registry.url as well",
    ]


def test_the_credentials_of_a_pipe_are_for_somebody(place: Place) -> None:
    assert place.problems({"pipe.user": "me", "pipe.password": "hush"}) == [
        "pipe.user (file FILE:1) has no parent to go to: list the parents that may get it in pipe.parents"
    ]
    assert place.problems({"pipe.token": "t", "pipe.user": "me", "pipe.parent": "http://root"}) == [
        "pipe.user (file FILE:1) needs pipe.password: set both, or neither"
    ]
    config = place.load(
        {"pipe.token": "t", "registry.url": "http://r", "pipe.parents": "http://a:1 , https://b"}
    ).config
    assert "'t'" not in repr(config)


def test_doors_do_not_share_a_port(place: Place) -> None:
    assert place.problems(flags={"server.port": 9092}) == [
        "server.port (flag --port) and server.quiet_port (default) are both 9092: they must differ"
    ]
    assert place.problems(flags={"server.http_port": 4222}) == [
        "server.port (default) and server.http_port (flag --http-port) are both 4222: they must differ"
    ]
    free = dict.fromkeys(("server.port", "server.quiet_port", "server.http_port"), 0)
    assert changed(place.load(flags=free)) == free


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {"storage": {"dir": "a", "data_dir": "a"}},
            "storage.data_dir (file FILE:1) repeats storage.dir (file FILE:1): keep one of them",
        ),
        (
            {"server": {"node-id": "a", "node_id": "b"}},
            "server.node_id (file FILE:1) repeats server.node-id (file FILE:1): keep one of them",
        ),
        (
            {"server": {"port": 1}, "broker": {"server": {"port": 2}}},
            "broker.server.port (file FILE:1) repeats server.port (file FILE:1): keep one of them",
        ),
        (
            {"ack": {"max_retries": 3}, "topic": {"deliveries_max": 3}},
            "topic.deliveries_max (file FILE:1) repeats ack.max_retries (file FILE:1): keep one of them",
        ),
    ],
)
def test_one_file_says_a_thing_once(place: Place, content: dict[str, Any], problem: str) -> None:
    assert place.problems(content) == [problem]


def test_the_environment_says_a_thing_once_unless_by_its_own_name(place: Place) -> None:
    environ = {"QB_DATA_DIR": "/a", "DATA_DIR": "/b"}
    assert place.problems(environ=environ) == [
        ("storage.data_dir (environment QB_DATA_DIR) repeats storage.data_dir (environment DATA_DIR): keep one of them")
    ]
    assert place.load(environ=environ | {"PENSTOCK_STORAGE_DATA_DIR": "/c"}).config.storage.data_dir == "/c"


def test_a_bad_configuration_has_a_code_of_its_own() -> None:
    error = BadConfig(["one", "two"])
    assert isinstance(error, PenstockError)
    assert (error.code, error.problems, str(error)) == ("BAD_CONFIG", ["one", "two"], "one\ntwo")


# ---- secrets


def test_secrets_are_not_shown(place: Place) -> None:
    loaded = place.load({"auth": {"user": "me", "password": "hush", "token": "psst"}})
    assert changed(loaded) == {"auth.user": "me", "auth.password": "***", "auth.token": "***"}
    assert "hush" not in repr(loaded)
    assert "psst" not in repr(loaded)
    assert (loaded.config.auth.password, loaded.config.auth.token) == ("hush", "psst")


# ---- the command


def penstock(*arguments: str | Path, command: str = "config", **environment: str) -> subprocess.CompletedProcess[str]:
    """With nothing in the environment that would be a setting."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "penstock", command, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=inherited | environment,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yml"
    path.write_text(
        "auth: {token: hush}\nstorage: {dir: '[red]x'}\ncluster: {node_id: x}\ntopics: {t: {partitions: 2}}\n"
    )
    return path


def test_a_server_takes_its_file_as_flux_does(tmp_path: Path) -> None:
    file = tmp_path / "node1.json"
    file.write_text(json.dumps({"cluster": {"enabled": True}}))
    result = penstock("-config", file, command="serve")
    assert (result.returncode, result.stderr) == (
        1,
        f"error: cluster.enabled (file {file}:1) is true: it must be false: clustering is not available yet\n",
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--prot", "5"], "unknown option --prot, did you mean --port?"),
        (["--lingr-ms=5"], "unknown option --lingr-ms, did you mean --linger-ms?"),
        (["orders"], "unexpected argument 'orders': serve takes only options"),
    ],
)
def test_options_that_nobody_has_are_refused(options: list[str], problem: str) -> None:
    result = penstock(*options, command="serve")
    assert result.returncode == 2
    assert problem in result.stderr


def test_flags_may_be_written_as_go_programs_have_them() -> None:
    result = penstock("-port", "70000", "-health-port=-1", "--tls", "--linger-ms", command="serve")
    assert result.returncode == 1
    assert [line.partition(": it must")[0] for line in result.stderr.splitlines()] == [
        "error: broker_port (flag --port) is '70000'",
        "error: health_check_port (flag --health-port) is '-1'",
        "error: use_tls (flag --tls) is 'true'",
        "error: linger_ms (flag --linger-ms) is ''",
    ]


def test_the_command_shows_every_value_and_its_origin(file: Path) -> None:
    result = penstock("--config", file, QB_LOG_LEVEL="ERROR")
    assert result.returncode == 0
    assert (
        result.stderr == f"warning: cluster.node_id (file {file}:3) is 'x', which has no effect: there is no cluster\n"
    )
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines() if "." in line}
    assert rows["auth.token"] == f"*** file {file}"
    assert rows["storage.data_dir"] == f"[red]x file {file}"
    assert rows["server.log_level"] == "error environment QB_LOG_LEVEL"
    assert rows["topics.t.partitions"] == f"2 file {file}"
    assert rows["topic.retain_ms"] == "none default"
    assert rows["topic.dead_letters"] == "true default"
    assert rows.keys() > DEFAULTS.keys()


def test_the_command_tells_programs_the_same(file: Path) -> None:
    result = penstock("--json", PENSTOCK_CONFIG=str(file))
    assert result.returncode == 0
    assert result.stderr.startswith("warning: cluster.node_id ")
    document = json.loads(result.stdout)
    assert document["auth.token"] == {"value": "***", "from": f"file {file}"}
    assert document["server.port"] == {"value": 4222, "from": "default"}
    assert document["topic.retain_ms"] == {"value": None, "from": "default"}
    assert document["topics.t.partitions"] == {"value": 2, "from": f"file {file}"}
    assert document.keys() > DEFAULTS.keys()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_command_prints_each_problem_in_a_line(options: list[str]) -> None:
    result = penstock(*options, PENSTOCK_SERVER_PORT="x", PENSTOCK_SERVER_PROT="1")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "error: server.port (environment PENSTOCK_SERVER_PORT) is 'x': it must be an integer, 0 to 65535",
        "error: PENSTOCK_SERVER_PROT (environment) is not a setting: did you mean PENSTOCK_SERVER_PORT?",
    ]
