"""Cursus' names for settings, in its YAML files, its JSON files and its flags.

Its YAML files have `log_dir`, its JSON files `log.dir`, its command line `--log-dir`. `canonical` makes one name of the
first two, and `FLAGS` of the third. The tables of `config` say what a name means here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Names with the same meaning and form as one of our settings.
ALIASES: Final[Mapping[str, str]] = {
    "broker_port": "server.quiet_port",  # its clients speak first
    "consumer_session_timeout_ms": "server.session_timeout_ms",
    "disk_flush_batch_size": "storage.flush_messages",
    "health_check_port": "server.http_port",
    "linger_ms": "storage.flush_ms",
    "log_cleanup_policy": "topic.cleanup",
    "log_dir": "storage.data_dir",
    "log_retention_check_interval_ms": "storage.upkeep_ms",
    "log_segment_bytes": "topic.segment_bytes",
    "tls_cert_path": "tls.cert",
    "tls_key_path": "tls.key",
}
_BUFFERS: Final = "what waits is limited in bytes, not in messages"
_CLUSTER: Final = "there is no cluster"
_COMPRESSION: Final = "each frame tells how it is compressed, and is answered in the same way"
_INDEX: Final = "an index has an entry every 4 KiB"
NO_EFFECT: Final[Mapping[str, str]] = {
    "advertised_host": _CLUSTER,
    "bootstrap_cluster": _CLUSTER,
    "broadcast_channel_buffer_size": _BUFFERS,
    "channel_buffer_size": _BUFFERS,
    "compression_type": _COMPRESSION,
    "consumer_channel_buffer_size": _BUFFERS,
    "consumer_heartbeat_check_ms": "a member is missed when server.session_timeout_ms has passed",
    "discovery_port": _CLUSTER,
    "disk_flush_interval_ms": "storage.flush_ms says when messages are synced",
    "disk_write_timeout_ms": "publishers wait while more than half of storage.unflushed_bytes_max is used",
    "enable_benchmark": "`penstock bench` measures a broker",
    "enable_exporter": "the metrics are always at /metrics of server.http_port",
    "enable_gzip": _COMPRESSION,
    "exporter_port": "the metrics are at /metrics of server.http_port",
    "log_compaction_check_interval_ms": "storage.upkeep_ms says how often compaction looks",
    "log_index_interval_bytes": _INDEX,
    "log_index_size_bytes": _INDEX,
    "log_min_cleanable_dirty_ratio": "compaction decides by itself what is worth it",
    "log_segment_roll_ms": "a segment is sealed by its size, or when retention needs it",
    "max_stream_connections": "server.connections_max limits all connections",
    "min_insync_replicas": _CLUSTER,
    "partition_channel_buffer_size": _BUFFERS,
    "raft_peers": _CLUSTER,
    "raft_port": _CLUSTER,
    "static_cluster_members": _CLUSTER,
    "static_consumer_groups": "a group is made when its first member joins",
    "stream_commit_interval": "a position is stored before it is confirmed",
    "stream_heartbeat_interval": "a stream is kept alive as its clients need it",
    "stream_timeout": "a stream lasts as long as its connection",
}

# Flag, without dashes: name in a YAML file. Those of `SWITCHES` need no value.
FLAGS: Final[Mapping[str, str]] = {
    "advertised-host": "advertised_host",
    "bootstrap-cluster": "bootstrap_cluster",
    "broadcast-ch-buffer": "broadcast_channel_buffer_size",
    "channel-buffer": "channel_buffer_size",
    "cleanup-interval": "log_cleanup_interval",
    "cleanup-policy": "log_cleanup_policy",
    "compaction-check-interval": "log_compaction_check_interval_ms",
    "compression-type": "compression_type",
    "consumer-ch-buffer": "consumer_channel_buffer_size",
    "consumer-heartbeat-check": "consumer_heartbeat_check_ms",
    "consumer-session-timeout": "consumer_session_timeout_ms",
    "discovery-port": "discovery_port",
    "disk-flush-batch": "disk_flush_batch_size",
    "disk-flush-interval-ms": "disk_flush_interval_ms",
    "disk-write-timeout": "disk_write_timeout_ms",
    "enable-distribution": "enabled_distribution",
    "exporter": "enable_exporter",
    "exporter-port": "exporter_port",
    "health-port": "health_check_port",
    "index-interval-bytes": "log_index_interval_bytes",
    "index-size": "log_index_size_bytes",
    "linger-ms": "linger_ms",
    "log-dir": "log_dir",
    "log-level": "log_level",
    "max-stream-connections": "max_stream_connections",
    "min-cleanable-dirty-ratio": "log_min_cleanable_dirty_ratio",
    "min-insync-replicas": "min_insync_replicas",
    "partition-ch-buffer": "partition_channel_buffer_size",
    "port": "broker_port",
    "raft-peers": "raft_peers",
    "raft-port": "raft_port",
    "retention-bytes": "log_retention_bytes",
    "retention-check-interval": "log_retention_check_interval_ms",
    "retention-hours": "log_retention_hours",
    "segment-roll-time-ms": "log_segment_roll_ms",
    "segment-size": "log_segment_bytes",
    "stream-commit-interval": "stream_commit_interval",
    "stream-heartbeat-interval": "stream_heartbeat_interval",
    "stream-timeout": "stream_timeout",
    "tls": "use_tls",
    "tls-cert": "tls_cert_path",
    "tls-key": "tls_key_path",
}
SWITCHES: Final = ("bootstrap-cluster", "enable-distribution", "exporter", "tls")

# Names of its JSON files that are not those of its YAML files with dots, and names of its manual.
_OTHERS: Final[Mapping[str, str]] = {
    "cleanup_interval": "log_cleanup_interval",
    "distribution_advertised_host": "advertised_host",
    "distribution_bootstrap": "bootstrap_cluster",
    "distribution_discovery_port": "discovery_port",
    "distribution_enabled": "enabled_distribution",
    "distribution_raft_peers": "raft_peers",
    "distribution_raft_port": "raft_port",
    "gzip_enable": "enable_gzip",
    "tls_enable": "use_tls",
}
_NAMES: Final = frozenset(FLAGS.values()) | ALIASES.keys() | NO_EFFECT.keys()


def canonical(key: str, written: str) -> str:
    """Return the name that a setting of Cursus has in a YAML file, and any other name unchanged. `written` includes the
    tables around it, which `key` may lack."""
    if written == "broker.port":
        return "broker_port"
    name = key.replace(".", "_")
    name = _OTHERS.get(name, name)
    return name if name in _NAMES else key
