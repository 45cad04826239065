"""The settings of a server: every one of them, with its default, its meaning and what is allowed.

`config` reads them from a file, the environment and flags. The documentation and `penstock config` list them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, Final, Literal, get_type_hints

from msgspec import Meta

from penstock.log.policy import Partitions, Policy
from penstock.schema import Field, Form, NonNegative, Port, Positive, Text, about, declared, make
from penstock.tls.certificate import CertificateFiles

# A name or an IPv4 address, or an IPv6 address. The port is a setting of its own.
_HOST: Final = r"([^\s,/@:\[\]]+|\[?[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}(%[^\s,\]]+)?\]?)"
HOSTS_PATTERN: Final = rf"^{_HOST}(\s*,\s*{_HOST})*\Z"


def _joined(value: Any) -> Any:
    return ",".join(value) if isinstance(value, list) and all(value) and all(map(_is_text, value)) else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _without_colon(value: Any) -> Any:
    return value.removeprefix(":") if isinstance(value, str) else value


def _without_dot(value: Any) -> Any:
    return value.removesuffix(".") if isinstance(value, str) else value


Hosts = Annotated[
    Text,
    Meta(pattern=HOSTS_PATTERN),
    Form(read=_joined, note="addresses or names without a port, like 127.0.0.1,::1"),
]
Seconds = Annotated[int, Meta(ge=1, le=86_400)]
Connections = Annotated[int, Meta(ge=1, le=1_000_000)]
Origins = Annotated[
    Text,
    Meta(pattern=r"^https?://[^\s,/?#@]+(\s*,\s*https?://[^\s,/?#@]+)*\Z"),
    Form(note="origins like http://root:8222,http://l2:8222"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: Annotated[Hosts, about("addresses or names of all ports: a list, or separated by commas")] = "127.0.0.1"
    # Flux writes ":4222".
    port: Annotated[Port, Form(read=_without_colon), about("text protocol; 0: any free port")] = 4222
    quiet_port: Annotated[Port, about("protocols whose clients speak first; 0: any free port")] = 9092
    qb_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        about("a second quiet_port, where the Python broker's clients look; none: not opened"),
    ] = 9999
    http_port: Annotated[Port, about("HTTP; 0: any free port")] = 8222
    network: Annotated[Text, about("what accepts connections: tcp, or an entry that a package adds")] = "tcp"
    node_id: Annotated[Text, about("name of this broker among others")] = "local-001"
    heartbeat_s: Annotated[Seconds, about("interval of PINGs in the text protocol")] = 120
    session_timeout_ms: Annotated[
        Annotated[int, Meta(ge=100, le=86_400_000)],
        about("a member of a Cursus group that is silent for this long loses its partitions"),
    ] = 10_000
    provider_ready: Annotated[
        bool, about("send READY to the Provider's clients when they subscribe, and deliver after their answer")
    ] = False
    handshake_s: Annotated[Seconds, about("close a connection that is not admitted by then")] = 30
    handshakes_max: Annotated[
        Connections, about("connections that are not admitted yet; above it, the oldest is closed")
    ] = 1000
    connections_max: Annotated[Connections, about("connections")] = 20_000
    http_connections_max: Annotated[
        Connections, about("connections to the HTTP port; a child broker uses one for each partition")
    ] = 4096
    http_hosts: Annotated[
        Text | None, about("other names of this machine in the Host header, separated by commas; *: any")
    ] = None
    websocket_origins: Annotated[
        Text | None, about("origins of web pages that may connect by WebSocket, separated by commas; *: any")
    ] = None
    insecure: Annotated[
        bool, about("serve other machines without credentials or without TLS; unsafe on an open network")
    ] = False
    subscriptions_max: Annotated[Positive, about("subscriptions of all connections")] = 100_000
    groups_max: Annotated[NonNegative, about("groups with a name")] = 10_000
    position_bytes_max: Annotated[
        Annotated[int, Meta(ge=1 << 20)], about("memory for positions of groups and their pending messages")
    ] = 512 << 20
    # A batch has at most 64 MiB, and a payload shares it with a header, a subject and headers.
    payload_bytes_max: Annotated[Annotated[int, Meta(ge=1, le=(64 << 20) - 4096)], about("largest payload")] = 1 << 20
    stop_s: Annotated[Annotated[int, Meta(ge=1, le=3600)], about("longest time that a clean stop takes")] = 10
    lame_duck_s: Annotated[Seconds, about("after SIGUSR2: time in which all connections are closed, one by one")] = 120
    lame_duck_grace_s: Annotated[
        Annotated[int, Meta(ge=0, le=3600)], about("how much of that passes before the first connection is closed")
    ] = 10
    test_endpoints: Annotated[bool, about("serve /test over HTTP, which fills topics")] = False
    test_data_dir: Annotated[
        Text | None, about("directory from which /test/load-from-sqlite may read; none: it may not")
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about("lowest severity that is logged")] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    format: Annotated[
        Literal["text", "json"], about("format of the log of `penstock serve`: lines of text or JSON")
    ] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Fields without a repr are secrets."""

    user: Annotated[Text | None, about("name that clients give, with a password")] = None
    password: Annotated[Text | None, about("password of the user")] = field(default=None, repr=False)
    token: Annotated[Text | None, about("token that clients give instead")] = field(default=None, repr=False)
    users: Annotated[Text | None, about("file of users and their permissions; the credentials above stay valid")] = None
    failures_max: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)],
        about("failed logins of a user at an address, after which they are locked out; 0: never"),
    ] = 10
    lockout_s: Annotated[Seconds, about("how long they are locked out")] = 300
    audit: Annotated[
        bool | None, about("store logins, refusals and changes in the topic $audit; none: if auth.users is set")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS on all ports."""

    cert: Annotated[Text | None, about("file with the certificate of this server, PEM; none: no TLS")] = None
    key: Annotated[Text | None, about("file with its private key; none: it is in the file of the certificate")] = None
    client_ca: Annotated[Text | None, about("file with the CAs that sign the certificates of clients")] = None
    client_certificates: Annotated[
        Literal["none", "optional", "required"], about("whether clients show a certificate")
    ] = "none"
    min_version: Annotated[Literal["1.2", "1.3"], about("oldest version of TLS that clients may use")] = "1.2"
    required: Annotated[bool, about("refuse clients that do not use TLS, if there is a certificate")] = True
    handshake_first: Annotated[
        bool, about("on the text port, send INFO after the TLS handshake instead of before it")
    ] = False
    handshake_s: Annotated[Seconds, about("close a connection whose TLS handshake takes longer")] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    data_dir: Annotated[Text, about("directory of all data")] = "./data"
    files: Annotated[Text, about("how the disk is accessed: os, or an entry that a package adds")] = "os"
    reader: Annotated[Literal["pread", "mmap"], about("how sealed segments are read")] = "pread"
    unflushed_bytes_max: Annotated[Positive, about("bytes that wait for a write")] = 64 << 20
    tail_bytes_max: Annotated[NonNegative, about("newest batches, kept in memory")] = 64 << 20
    open_segments_max: Annotated[
        Positive | None, about("segments with an open file; none: half of the file descriptors, at most 1024")
    ] = None
    partitions_max: Annotated[Positive, about("partitions of all topics")] = 20_000
    disk_reserve_bytes: Annotated[
        NonNegative, about("disk space reserved for the work that frees a full disk; 0: none")
    ] = 16 << 20
    flush_messages: Annotated[Positive, about("with durability flush: sync after this many messages")] = 500
    flush_ms: Annotated[Positive, about("with durability flush: sync this long after the first message")] = 100
    upkeep_ms: Annotated[Positive, about("interval of retention and compaction")] = 10_000
    # A smaller store would mostly hold what the broker itself must remember.
    retain_bytes: Annotated[
        Annotated[int, Meta(ge=16 << 20)] | None,
        about("drop the oldest segments of all topics when the store is larger"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """How topics are created automatically. The fields of the policy are settings beside the others."""

    # These three apply to all topics together: a single topic cannot set them.
    auto_create: Annotated[bool, about("create a topic when it is first used")] = True
    topics_max: Annotated[NonNegative, about("topics that are created automatically")] = 10_000
    # All topics together have room for 128 MiB of them.
    dedup_ids_max: Annotated[
        Annotated[int, Meta(ge=1, le=400_000)], about("IDs that each topic remembers; the oldest are forgotten first")
    ] = 100_000

    partitions: Annotated[Partitions, about("partitions of a topic")] = 1
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """How messages flow to a subscription that does not say otherwise."""

    rate: Annotated[NonNegative, about("messages per second; 0: unlimited")] = 0
    burst: Annotated[Positive, about("messages at once, above the rate")] = 100
    buffer: Annotated[Positive, about("messages that may wait for a subscriber")] = 1000
    mode: Annotated[Literal["block", "drop", "shed"], about("what happens when the buffer is full")] = "block"
    slow_threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)], about("part of the buffer above which STATS reports a slow subscriber")
    ] = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class DlqConfig:
    prefix: Annotated[
        Annotated[Text, Meta(pattern=r"^[^\s.*>]+(\.[^\s.*>]+)*\Z")],
        Form(read=_without_dot, note="a subject without wildcards"),
        about("dead letters go to this subject, followed by their own"),
    ] = "DLQ"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """The registry that assigns this broker its place in a tree of brokers."""

    url: Annotated[
        Annotated[Text, Meta(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?\Z"), Form(note="a URL like http://host:8080")]
        | None,
        about("registry that tells this broker its role and its parent"),
    ] = None
    poll_ms: Annotated[Annotated[int, Meta(ge=100, le=86_400_000)], about("interval of its requests")] = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeConfig:
    """The parent of this broker, and what flows between the two."""

    parent: Annotated[
        Annotated[Text, Meta(pattern=r"^https?://\S+\Z"), Form(note="a URL like http://root:8222")] | None,
        about("HTTP port of the broker to follow"),
    ] = None
    parents: Annotated[Origins | None, about("parents that a registry may name and that get the credentials below")] = (
        None
    )
    user: Annotated[Text | None, about("name that this broker gives its parents, with a password")] = None
    password: Annotated[Text | None, about("password of the user")] = field(default=None, repr=False)
    token: Annotated[Text | None, about("token that this broker gives instead")] = field(default=None, repr=False)
    ca: Annotated[
        Text | None,
        about("file with the CAs of parents and the registry (https); none: those of the system"),
    ] = None
    cert: Annotated[Text | None, about("file with the certificate that this broker shows them")] = None
    key: Annotated[Text | None, about("file with its private key; none: it is in the file of the certificate")] = None
    topics: Annotated[
        Text | None,
        about("topics to pull, names or patterns separated by commas; none: as the registry says, or all"),
    ] = None
    up: Annotated[
        Text | None, about("topics to push, names or patterns separated by commas; none: as the registry says")
    ] = None
    poll_ms: Annotated[
        Annotated[int, Meta(ge=10, le=3_600_000)], about("how often the parent is asked for its topics")
    ] = 1000
    batch_size: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)], about("records of one poll, if the parent does not serve batches")
    ] = 100
    type: Annotated[Text, about("how the pipe is transported: http, or an entry that a package adds")] = "http"
    on_gap: Annotated[
        Literal["stop", "skip"], about("what to do when the parent has dropped messages that are missing here")
    ] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """For `penstock client`, which reads the same file. The server ignores it."""

    request_timeout_s: Annotated[Seconds, about("how long it waits for an answer")] = 30
    heartbeat_s: Annotated[Seconds, about("interval of its heartbeats")] = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    topic: TopicConfig = field(default_factory=TopicConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    dlq: DlqConfig = field(default_factory=DlqConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    pipe: PipeConfig = field(default_factory=PipeConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    # Topics that must exist, by name. A topic has the values of `topic` where it does not set its own.
    topics: Mapping[str, TopicConfig] = field(default_factory=dict)


SECTIONS: Final[Mapping[str, Any]] = {name: hint for name, hint in get_type_hints(Config).items() if is_dataclass(hint)}
# By dotted key, in the order of the documentation.
SETTINGS: Final[dict[str, Field]] = {
    f"{section}.{name}": setting for section, cls in SECTIONS.items() for name, setting in declared(cls).items()
}
_OF_ALL_TOPICS: Final = ("auto_create", "topics_max", "dedup_ids_max")
OF_ONE_TOPIC: Final = [name for name in declared(TopicConfig) if name not in _OF_ALL_TOPICS]


def certificate_files(values: Mapping[str, Any]) -> CertificateFiles | None:
    """Return the files of the server's certificate from valid settings of `tls`; None without TLS."""
    if values["cert"] is None:
        return None
    names = ("cert", "key", "client_ca", "client_certificates", "min_version")
    return CertificateFiles(**{name: values[name] for name in names})


def build(values: Mapping[str, Any], topics: Mapping[str, Mapping[str, Any]]) -> Config:
    """Make the configuration of valid values: by dotted key, and those of each topic by name."""
    sections = {
        section: make(cls, {name: values[f"{section}.{name}"] for name in declared(cls)})
        for section, cls in SECTIONS.items()
    }
    general = {name: values[f"topic.{name}"] for name in _OF_ALL_TOPICS}
    return Config(**sections, topics={name: make(TopicConfig, {**general, **own}) for name, own in topics.items()})
