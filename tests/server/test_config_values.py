"""The values of settings: how they may be written, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import BadConfig
from penstock.schema import shown
from penstock.server.config import load
from penstock.server.settings import SETTINGS
from tests.support.configs import MIB, Place, changed, value_of

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
        ("auth.audit", "true or false, or none"),
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
    ("auth.failures_max", 0, 1_000_000),
    ("auth.lockout_s", 1, 86_400),
    ("tls.handshake_s", 1, 86_400),
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
    shown = url.replace("user:pass@", "***@")
    assert problem.startswith(f"registry.url (file FILE:1) is {shown!r}: ")
    assert problem.endswith(": a URL like http://host:8080")


def test_every_number_is_in_the_table_of_bounds() -> None:
    assert [key for key, _, _ in BOUNDS] == [key for key, setting in SETTINGS.items() if setting.low is not None]


def test_a_word_that_is_no_switch_is_not_taken_for_none() -> None:
    with pytest.raises(BadConfig, match=r"auth\.audit .*is '1': it must be true or false, or none"):
        load(path=None, environ={"PENSTOCK_AUTH_AUDIT": "1"}, flags={})
