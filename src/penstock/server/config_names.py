"""Names that other brokers use for settings: Flux, Cursus (see `cursus_names`) and the Python broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec import Meta

from penstock import schema
from penstock.log.policy import Dedup, Durability
from penstock.schema import DURATIONS_MS, Field, Form, Positive
from penstock.server import cursus_names
from penstock.server.settings import SETTINGS
from penstock.tls.options import VARIABLES


class Target(NamedTuple):
    """What a name of another broker stands for."""

    key: str | None  # the setting that it sets; None: the value is checked, and has no effect
    form: Field  # what may be written
    meaning: Callable[[Any], Any] = lambda value: value  # from that to the value of the setting


def own(key: str) -> Target:
    return Target(key, SETTINGS[key])


def _form(hint: Any, unit: str = "") -> Field:
    return schema.field(unit, hint)


def _only(allowed: bool, reason: str) -> Field:
    """Return the form of a switch that has one position here."""

    def read(value: Any) -> bool:
        if str(value).lower() != str(allowed).lower():
            raise ValueError(value)
        return allowed

    return _form(Annotated[bool, Form(allowed=f"{str(allowed).lower()}: {reason}", read=read)])


_BOOL: Final = _form(bool)
_HOURS: Final = Target("topic.retain_ms", _form(Positive), lambda hours: hours * DURATIONS_MS["h"])
_NO_CLUSTER: Final = _only(False, "clustering is not available yet")
ALIASES: Final[dict[str, Target]] = {
    alias: own(key)
    for alias, key in {
        "ack.timeout": "topic.ack_deadline_ms",
        "client.heartbeat_interval": "client.heartbeat_s",
        "client.request_timeout": "client.request_timeout_s",
        "deduplication.max_entries": "topic.dedup_ids_max",
        "deduplication.window": "topic.dedup_window_ms",
        "deduplication.window_size": "topic.dedup_window_ms",
        "flow_control.backpressure_mode": "flow.mode",
        "flow_control.buffer": "flow.buffer",
        "flow_control.burst": "flow.burst",
        "flow_control.default_buffer_size": "flow.buffer",
        "flow_control.default_rate_burst": "flow.burst",
        "flow_control.default_rate_limit": "flow.rate",
        "flow_control.default_slow_threshold": "flow.slow_threshold",
        "flow_control.mode": "flow.mode",
        "flow_control.rate": "flow.rate",
        "lame_duck_duration": "server.lame_duck_s",
        "lame_duck_grace_period": "server.lame_duck_grace_s",
        "logging.level": "server.log_level",
        "network.port": "server.quiet_port",
        "network.type": "server.network",
        "node.id": "server.node_id",
        "pipe.poll_interval": "pipe.poll_ms",
        "registry.poll_interval": "registry.poll_ms",
        "retention.check_interval": "storage.upkeep_ms",
        "retention.max_age": "topic.retain_ms",
        "retention.max_bytes": "storage.retain_bytes",
        "server.data_dir": "storage.data_dir",
        "server.heartbeat_interval": "server.heartbeat_s",
        "server.max_connections": "server.connections_max",
        "server.max_message_size": "server.payload_bytes_max",
        "storage.dir": "storage.data_dir",
        "storage.max_segment_size": "topic.segment_bytes",
        "storage.retention.max_age": "topic.retain_ms",
        "storage.retention.max_bytes": "storage.retain_bytes",
        "storage.segment_size": "topic.segment_bytes",
        "storage.type": "storage.reader",
        **cursus_names.ALIASES,
    }.items()
} | {
    "ack.max_retries": Target(
        "topic.deliveries_max", _form(Annotated[int, Meta(ge=0, le=999)]), lambda retries: retries + 1
    ),
    "client.auto_ack": Target(
        None,
        _only(
            True, "`penstock client` acknowledges what it prints; in a program, BrokerClient.subscribe takes auto_ack"
        ),
    ),
    "cluster.enabled": Target(None, _NO_CLUSTER),
    "deduplication.enabled": Target("topic.dedup", _BOOL, {True: Dedup.ID, False: Dedup.OFF}.get),
    "flow_control.enable_backpressure": Target(
        None, _only(True, "buffers are always limited, flow.mode says what a full one does")
    ),
    "enabled_distribution": Target(None, _NO_CLUSTER),
    "flow_control.enable_rate_limit": Target(None, _BOOL),
    "log_cleanup_interval": Target("topic.dedup_window_ms", _form(Positive, "s"), lambda s: s * 1000),
    "log_level": Target(
        "server.log_level",
        _form(Literal["debug", "info", "warn", "warning", "error"]),
        lambda level: "warning" if level == "warn" else level,
    ),
    "log_retention_bytes": Target(
        "topic.retain_bytes", _form(Annotated[int, Meta(ge=-1)], "bytes"), lambda size: size if size > 0 else None
    ),
    "log_retention_hours": _HOURS,
    "storage.fsync_on_write": Target("topic.durability", _BOOL, {True: Durability.FSYNC, False: Durability.FLUSH}.get),
    "use_tls": Target("tls.required", _BOOL),
}
_CLUSTER: Final = "there is no cluster"
_ONE_REQUEST: Final = "a request is sent once: one without an answer may have been executed"
_ONE_LOOP: Final = "one event loop serves all connections"
_LOG_ONLY: Final = "the log alone stores everything"
# Names of other brokers for things that work differently here, and why.
NO_EFFECT: Final[Mapping[str, str]] = {
    "client.max_retries": _ONE_REQUEST,
    "client.retry_delay": _ONE_REQUEST,
    **{
        f"cluster.{name}": _CLUSTER
        for name in (
            "advertise_addr",
            "bind_addr",
            "bootstrap",
            "data_dir",
            "election_timeout",
            "heartbeat_interval",
            "node_id",
            "peers",
            "raft_addr",
            "raft_dir",
            "replication_mode",
            "snapshot_interval",
            "snapshot_threshold",
        )
    },
    "durable.flush_interval": "an acknowledgement is stored before it is confirmed",
    "durable.replay_batch": "a group that is behind reads as much as its members accept",
    "logging.file": "the log goes to stderr",
    "logging.format": "the log has one format, or JSON with log.format",
    "network.threads.boss": _ONE_LOOP,
    "network.threads.worker": _ONE_LOOP,
    "server.connection_timeout": "idle connections get heartbeats, every server.heartbeat_s",
    "storage.max_log_size": "topic.segment_bytes splits a log into segments, and topic.retain_bytes limits it",
    "storage.memory_cache_size": "storage.tail_bytes_max limits the newest batches in memory",
    "storage.snapshot_dir": _LOG_ONLY,
    "storage.snapshot_interval": _LOG_ONLY,
    "storage.sync_interval": "topic.durability says when a message is synced",
    "topics.max_partitions": "a topic has at most 256 partitions",
    **cursus_names.NO_EFFECT,
}

# Only the Python broker has these settings. They identify its files.
PYTHON_BROKER: Final = (
    "client.auto_ack",
    "client.heartbeat_interval",
    "client.max_retries",
    "client.request_timeout",
    "client.retry_delay",
    "server.heartbeat_interval",
    "storage.fsync_on_write",
)
# In its files these apply to all topics; ours have a table for each topic there.
PYTHON_BROKER_TOPICS: Final = {
    "topics.default_partitions": own("topic.partitions"),
    "topics.max_message_size": own("server.payload_bytes_max"),
    "topics.retention_hours": _HOURS,
}

PREFIX: Final = "PENSTOCK_"
ENVIRONMENT: Final = {PREFIX + key.replace(".", "_").upper(): key for key in SETTINGS}
ENVIRONMENT_ALIASES: Final = {
    "BROKER_PORT": "server.quiet_port",
    "DATA_DIR": "storage.data_dir",
    "HTTP_PORT": "server.http_port",
    "NODE_ID": "server.node_id",
    "QB_DATA_DIR": "storage.data_dir",
    "QB_DEFAULT_PARTITIONS": "topic.partitions",
    "QB_LOG_LEVEL": "server.log_level",
    "QB_MAX_CONNECTIONS": "server.connections_max",
    "QB_SERVER_HOST": "server.host",
    "QB_SERVER_PORT": "server.quiet_port",  # its clients speak first
    "REGISTRY_URL": "registry.url",
}
# The Python broker's variables for names that have no effect.
ENVIRONMENT_NO_EFFECT: Final = {
    "QB_MAX_RETRIES": "client.max_retries",
    "QB_SNAPSHOT_DIR": "storage.snapshot_dir",
    "QB_SNAPSHOT_INTERVAL": "storage.snapshot_interval",
}
PATH_NAMES: Final = ("PENSTOCK_CONFIG", "QB_CONFIG_FILE", "CONFIG_PATH")
# Where commands find a broker: valid variables, but not for the server.
CLIENT_NAMES: Final = ("PENSTOCK_SERVERS", *VARIABLES.values())
