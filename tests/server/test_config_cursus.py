"""The file and the flags of Cursus."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server import config_names, cursus_names
from tests.support.configs import MIB, Place, changed

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
    "tls.required": False,
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
            "tls.required (file FILE:1) has no effect without a certificate: set tls.cert as well",
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
