"""The settings: what there is to set, where values come from, and what is refused.

    defaults  <  file  <  environment  <  flags            the stronger one wins, setting by setting

The dataclasses below are the one list of settings. All else follows from them: names in files and in the
environment, how a value is read, what is allowed. Names that other brokers use for the same thing are aliases, in
tables. Whatever is wrong is refused, all of it at once; nothing is clamped, and nothing is ignored in silence.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import combinations, permutations
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from penstock.address import hosts, is_loopback
from penstock.errors import BadConfig
from penstock.server import cursus_names


def _about(meaning: str, low: int | None = None, high: int | None = None, **more: str | bool) -> dict[str, Any]:
    """The metadata of a field: what its type does not say. Fields of `Setting`, by their names."""
    return {"meaning": meaning, "low": low, "high": high} | more


# ---- what there is to set

# A name or an IPv4 address, or an IPv6 address; a port has a setting of its own.
_HOST: Final = r"([^\s,/@:\[\]]+|\[?[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}(%[^\s,\]]+)?\]?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = field(
        default="127.0.0.1",
        metadata=_about(
            "address of all ports, or a name; several: a list, or with commas between",
            pattern=rf"{_HOST}(\s*,\s*{_HOST})*",
            note="addresses or names without a port, like 127.0.0.1,::1",
            is_list=True,
        ),
    )
    port: int = field(default=4222, metadata=_about("text door; 0: any free port", 0, 65535, drop_prefix=":"))
    quiet_port: int = field(default=9092, metadata=_about("doors whose clients speak first; 0: any free", 0, 65535))
    qb_port: int | None = field(
        default=9999,
        metadata=_about(
            "the same as quiet_port once more, where the Python broker's clients look; none: not opened", 1, 65535
        ),
    )
    http_port: int = field(default=8222, metadata=_about("HTTP door; 0: any free port", 0, 65535))
    network: str = field(default="tcp", metadata=_about("who waits for connections: tcp, or one that a package adds"))
    node_id: str = field(default="local-001", metadata=_about("name of this broker among others"))
    heartbeat_s: int = field(default=120, metadata=_about("the text door sends a PING this often", 1, 86_400))
    session_timeout_ms: int = field(
        default=10_000,
        metadata=_about("a member of a Cursus group that is silent for so long loses its partitions", 100, 86_400_000),
    )
    provider_ready: bool = field(
        default=False,
        metadata=_about("send READY to the Provider's clients when they subscribe, and deliver when it is answered"),
    )
    handshake_s: int = field(default=30, metadata=_about("closes a connection that is not admitted by then", 1, 86_400))
    handshakes_max: int = field(
        default=1000, metadata=_about("connections that are not admitted yet; more close the oldest", 1, 1_000_000)
    )
    connections_max: int = field(default=20_000, metadata=_about("connections at a time", 1, 1_000_000))
    http_connections_max: int = field(
        default=4096,
        metadata=_about("connections to the HTTP port; a child of a tree uses one per partition", 1, 1_000_000),
    )
    http_hosts: str | None = field(
        default=None,
        metadata=_about("more names of this machine that clients of the HTTP port use, with commas between; *: any"),
    )
    websocket_origins: str | None = field(
        default=None,
        metadata=_about("origins of other web pages that may connect by WebSocket, with commas between; *: any"),
    )
    insecure: bool = field(
        default=False,
        metadata=_about("serve other machines without credentials: anyone who connects can do everything"),
    )
    subscriptions_max: int = field(default=100_000, metadata=_about("subscriptions of all connections together", 1))
    groups_max: int = field(default=10_000, metadata=_about("groups with a name", 0))
    position_bytes_max: int = field(
        default=512 << 20, metadata=_about("memory for positions of groups and their pending messages", 1 << 20)
    )
    # A batch is at most 64 MiB, and a payload shares it with a header, a subject and headers.
    payload_bytes_max: int = field(default=1 << 20, metadata=_about("largest payload", 1, (64 << 20) - 4096))
    stop_s: int = field(default=10, metadata=_about("bound on a clean stop", 1, 3600))
    lame_duck_s: int = field(
        default=120, metadata=_about("after SIGUSR2: time in which all connections are closed, one by one", 1, 86_400)
    )
    lame_duck_grace_s: int = field(
        default=10, metadata=_about("how much of that passes before the first connection is closed", 0, 3600)
    )
    test_endpoints: bool = field(default=False, metadata=_about("whether the HTTP door has /test, which fills topics"))
    test_data_dir: str | None = field(
        default=None, metadata=_about("directory from which /test/load-from-sqlite may read; none: it may not")
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata=_about("least severity that is logged")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    format: Literal["text", "json"] = field(
        default="text", metadata=_about("how `penstock serve` writes its log: lines of text, or of JSON")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """What is not shown when it is printed is a secret."""

    user: str | None = field(default=None, metadata=_about("name that clients give, with a password"))
    password: str | None = field(default=None, repr=False, metadata=_about("password that goes with the user"))
    token: str | None = field(default=None, repr=False, metadata=_about("token that clients give instead"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    data_dir: str = field(default="./data", metadata=_about("directory of all data"))
    files: str = field(default="os", metadata=_about("how the disk is reached: os, or one that a package adds"))
    reader: Literal["pread", "mmap"] = field(default="pread", metadata=_about("how sealed segments are read"))
    unflushed_bytes_max: int = field(default=64 << 20, metadata=_about("bytes that wait for a write", 1))
    tail_bytes_max: int = field(default=64 << 20, metadata=_about("last batches, kept in memory", 0))
    open_segments_max: int | None = field(
        default=None,
        metadata=_about("segments with an open file; none: half of the file descriptors, 1024 at most", 1),
    )
    partitions_max: int = field(default=20_000, metadata=_about("partitions of all topics together", 1))
    disk_reserve_bytes: int = field(
        default=16 << 20, metadata=_about("room on the disk that is kept for what frees a full one; 0: none", 0)
    )
    flush_messages: int = field(default=500, metadata=_about("under flush: sync after so many messages", 1))
    flush_ms: int = field(default=100, metadata=_about("under flush: sync so long after the first", 1))
    upkeep_ms: int = field(default=10_000, metadata=_about("how often retention and compaction look", 1))
    # With less, what the broker itself must remember would take much of it.
    retain_bytes: int | None = field(
        default=None, metadata=_about("drop the oldest segments of all topics when the store is larger", 16 << 20)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """The policy of topics that are made by themselves; in `topics`, of one topic."""

    # These three are of all topics together: one topic cannot set them.
    auto_create: bool = field(default=True, metadata=_about("make a topic when it is first named"))
    topics_max: int = field(default=10_000, metadata=_about("topics that are made by themselves", 0))
    # All topics together have room for 128 MiB of them.
    dedup_ids_max: int = field(
        default=100_000, metadata=_about("IDs that each topic remembers; the oldest are forgotten first", 1, 400_000)
    )

    partitions: int = field(default=1, metadata=_about("logs of a topic", 1, 256))
    durability: Literal["fsync", "flush"] = field(
        default="fsync", metadata=_about("acknowledge when it is on the disk, or with the operating system")
    )
    segment_bytes: int = field(default=64 << 20, metadata=_about("a segment is sealed at this size", 4096, 2 << 30))
    retain_ms: int | None = field(default=None, metadata=_about("drop segments that are older", 1))
    retain_bytes: int | None = field(default=None, metadata=_about("drop segments when a log is larger", 1))
    cleanup: Literal["delete", "compact"] = field(
        default="delete", metadata=_about("drop old segments, or keep the latest message of each key")
    )
    tombstone_ms: int = field(
        default=24 * 3600 * 1000, metadata=_about("compaction keeps the deletion of a key for so long", 0)
    )
    dedup: Literal["off", "id", "payload"] = field(
        default="id", metadata=_about("what makes two messages the same one")
    )
    dedup_window_ms: int | None = field(
        default=None, metadata=_about("how long it is remembered; none: 5 minutes by id, 30 by payload", 1)
    )
    ack_deadline_ms: int = field(default=5000, metadata=_about("deliver again without an ack by then", 1))
    deliveries_max: int | None = field(
        default=None,
        metadata=_about(
            "deliveries of a message, with the first; none: 4, and no limit for the Provider's clients", 1, 1000
        ),
    )
    dead_letters: bool = field(default=True, metadata=_about("keep what was delivered so often in vain"))
    refresh_wait_ms: int = field(default=60_000, metadata=_about("a refresh waits so long for a consumer", 1))
    on_damage: Literal["stop", "skip"] = field(
        default="stop", metadata=_about("readers stop with an error where messages are damaged, or skip them")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """How messages flow to a subscription that does not say otherwise."""

    rate: int = field(default=0, metadata=_about("messages a second; 0: as fast as they can", 0))
    burst: int = field(default=100, metadata=_about("messages at once, above the rate", 1))
    buffer: int = field(default=1000, metadata=_about("messages that may wait for a subscriber", 1))
    mode: Literal["block", "drop", "shed"] = field(default="block", metadata=_about("what a full buffer does"))
    slow_threshold: float = field(
        default=0.8, metadata=_about("part of the buffer above which STATS calls a subscriber slow", 0, 1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DlqConfig:
    prefix: str = field(
        default="DLQ",
        metadata=_about(
            "dead letters go to this subject and their own behind it",
            pattern=r"[^\s.*>]+(\.[^\s.*>]+)*",
            drop_suffix=".",
            note="a subject without wildcards",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Who tells this broker where it stands in a tree of brokers."""

    url: str | None = field(
        default=None,
        metadata=_about(
            "registry that tells this broker its role and its parent",
            pattern=r"https?://[^\s/?#@]+(/[^\s?#]*)?",
            note="a URL like http://host:8080",
        ),
    )
    poll_ms: int = field(default=30_000, metadata=_about("how often it is asked", 100, 86_400_000))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeConfig:
    """The broker above this one, and what flows between them."""

    parent: str | None = field(
        default=None,
        metadata=_about(
            "HTTP door of the broker to follow", pattern=r"https?://\S+", note="a URL like http://root:8222"
        ),
    )
    parents: str | None = field(
        default=None,
        metadata=_about(
            "parents that a registry may name and that get the credentials below, with commas between",
            pattern=r"https?://[^\s,/?#@]+(\s*,\s*https?://[^\s,/?#@]+)*",
            note="origins like http://root:8222,http://l2:8222",
        ),
    )
    user: str | None = field(default=None, metadata=_about("name that this broker gives its parents, with a password"))
    password: str | None = field(default=None, repr=False, metadata=_about("password that goes with the user"))
    token: str | None = field(default=None, repr=False, metadata=_about("token that this broker gives instead"))
    topics: str | None = field(
        default=None,
        metadata=_about(
            "topics that come down, names or patterns with commas between; none: what the registry says, or all"
        ),
    )
    up: str | None = field(
        default=None,
        metadata=_about(
            "topics that are pushed up, names or patterns with commas between; none: what the registry says"
        ),
    )
    poll_ms: int = field(default=1000, metadata=_about("how often the parent is asked for its topics", 10, 3_600_000))
    batch_size: int = field(
        default=100, metadata=_about("records of one poll, where a parent has no batches", 1, 10_000)
    )
    type: str = field(default="http", metadata=_about("what carries the pipe: http, or one that a package adds"))
    on_gap: Literal["stop", "skip"] = field(
        default="stop", metadata=_about("what to do when the parent has dropped what is missing here")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Of `penstock client`, which reads the same file; the server does not."""

    request_timeout_s: int = field(default=30, metadata=_about("how long it waits for an answer", 1, 86_400))
    heartbeat_s: int = field(default=30, metadata=_about("how often it sends a heartbeat", 1, 86_400))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    topic: TopicConfig = field(default_factory=TopicConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    dlq: DlqConfig = field(default_factory=DlqConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    pipe: PipeConfig = field(default_factory=PipeConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    # Topics that are to exist, by name. What one does not set comes from `topic`.
    topics: Mapping[str, TopicConfig] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    config: Config
    # "default", "file config.toml", "environment QB_DATA_DIR" or "flag --port", by dotted key.
    origins: dict[str, str]
    warnings: list[str]

    def shown(self) -> dict[str, Any]:
        """Every value by its dotted key, as people may see it: secrets are hidden."""
        flat = {key: value for key, _, value in _flatten(asdict(self.config))}
        values = {key: flat[key] for key in self.origins}
        secrets = [key for key, setting in SETTINGS.items() if setting.secret and values[key] is not None]
        return values | dict.fromkeys(secrets, "***")

    def document(self) -> dict[str, dict[str, Any]]:
        """The same, with where each value came from."""
        return {key: {"value": value, "from": self.origins[key]} for key, value in self.shown().items()}


def load(*, path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """The configuration that all sources make together. `flags` has dotted keys; None: not given."""
    notes = _Notes()
    path = path or _path_in(environ)
    table = _read_file(path, notes) if path else {}
    topics = _topic_names(table)
    # What a topic does not set comes from `topic`.
    general = {f"topics.{topic}.{name}": f"topic.{name}" for topic in topics for name in _OF_ONE_TOPIC}
    settings = SETTINGS | {key: SETTINGS[default] for key, default in general.items()}

    values = {key: setting.default for key, setting in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, "default")
    for source in (
        _from_file(table, f"file {path}", settings, environ, notes),
        _from_environment(environ, notes),
        _from_flags(flags, notes),
    ):
        for given in _once(source, notes):
            value = _read(given, notes)
            if given.target.key is not None:
                values[given.target.key], origins[given.target.key] = value, given.origin
    for key, default in general.items():
        values.setdefault(key, values[default])
        origins.setdefault(key, origins[default])
    origins = {key: origins[key] for key in settings}

    notes.problems.extend(_conflicts(values, origins))
    if notes.problems:
        raise BadConfig(notes.problems)
    return Loaded(config=_build(values, topics), origins=origins, warnings=notes.warnings)


def load_client(*, path: Path | None, environ: Mapping[str, str]) -> ClientConfig:
    """Only what concerns clients: a server's mistakes, and its warnings, are for whoever starts it."""
    notes = _Notes()
    path = path or _path_in(environ)
    table = _read_file(path, notes) if path else {}
    own = {key: value for key, _, value in _flatten(table) if key.startswith("client.")}
    variables = {name: value for name, value in environ.items() if name.startswith(f"{_PREFIX}CLIENT_")}
    values: dict[str, Any] = {}
    sources = (_from_file(own, f"file {path}", SETTINGS, environ, notes), _from_environment(variables, notes))
    for source in sources:
        for given in _once(source, notes):
            value = _read(given, notes)
            if given.target.key is not None:
                values[given.target.key.removeprefix("client.")] = value
    if notes.problems:
        raise BadConfig(notes.problems)
    return ClientConfig(**values)


# ---- a setting, and how its value is read

Kind = Literal["text", "choice", "bool", "count", "fraction", "ms", "s", "bytes"]

# Spelled exactly: 5M is no duration, and Mb are not bytes.
_DURATIONS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZES: Final = {"B": 1, "kB": 1000} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
# A number without a unit has the one that the setting's name ends with.
_UNITS: Final[Mapping[Kind, Mapping[str, Fraction | int]]] = {
    "count": {"": 1},
    "ms": {"": 1} | _DURATIONS_MS,
    "s": {"": 1} | {unit: Fraction(ms, 1000) for unit, ms in _DURATIONS_MS.items()},
    "bytes": {"": 1} | _SIZES,
}
_FORMS: Final[Mapping[Kind, str]] = {
    "text": "text that is not empty (a number needs quotes)",
    "count": "a whole number",
    "fraction": "a number",
    "ms": 'whole milliseconds, as a number or like "500ms", "5s", "5m", "24h", "7d"',
    "s": 'whole seconds, as a number or like "5s", "5m", "24h", "7d"',
    "bytes": 'whole bytes, as a number or like "64MiB", "1GB"',
}
_NUMBER: Final = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    kind: Kind
    default: Any = None
    optional: bool = False
    choices: tuple[Any, ...] = ()
    secret: bool = False
    meaning: str = ""
    low: int | None = None
    high: int | None = None
    pattern: str = ""
    # Whether a file may write it as a list of texts.
    is_list: bool = False
    drop_prefix: str = ""
    drop_suffix: str = ""
    note: str = ""

    @property
    def allowed(self) -> str:
        text = " or ".join(str(choice).lower() for choice in self.choices) or _FORMS[self.kind]
        if self.high is not None:
            text += f", {self.low} to {self.high}"
        elif self.low is not None:
            text += f", at least {self.low}"
        if self.optional:
            text += ", or none"
        return f"{text}: {self.note}" if self.note else text

    def convert(self, value: Any) -> Any:
        """`value` as the setting holds it; ValueError if it is not allowed."""
        # TOML and the environment have no null. Text is taken as it is: a password may be "none".
        if self.optional and (value is None or (value == "none" and self.kind in _UNITS)):
            return None
        converted = self._parse(value)
        if (
            (self.choices and converted not in self.choices)
            or (self.low is not None and converted < self.low)
            or (self.high is not None and converted > self.high)
            or (self.pattern and not re.fullmatch(self.pattern, converted))
        ):
            raise ValueError(value)
        return converted

    def _parse(self, value: Any) -> Any:
        match self.kind:
            case "text":
                if self.is_list and isinstance(value, list):
                    value = ",".join(map(_text, value))
                return _text(value).removesuffix(self.drop_suffix)
            case "choice":
                # YAML takes `off` without quotes for false.
                return "off" if value is False else _text(value).lower()
            case "bool":
                return value if isinstance(value, bool) else {"true": True, "false": False}.get(_text(value).lower())
            case "fraction":
                return _fraction(value)
            case _:
                value = value.removeprefix(self.drop_prefix) if isinstance(value, str) else value
                return _whole_number(value, _UNITS[self.kind])


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    return value


def _fraction(value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(value)
    return float(value)


def _whole_number(value: Any, units: Mapping[str, Fraction | int]) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    found = _NUMBER.fullmatch(_text(value))
    if found is None or found[2] not in units:
        raise ValueError(value)
    number = Fraction(found[1]) * units[found[2]]
    if number.denominator != 1:
        raise ValueError(value)
    return int(number)


def _setting(declared: Field[Any], hint: Any) -> Setting:
    """What the declaration of a field says, as a value."""
    optional = NoneType in get_args(hint)
    if optional:
        [hint] = set(get_args(hint)) - {NoneType}
    kind, choices = _kind(declared.name, hint)
    return Setting(
        kind=kind,
        default=declared.default,
        optional=optional,
        choices=choices,
        secret=not declared.repr,
        **declared.metadata,
    )


def _kind(name: str, hint: Any) -> tuple[Kind, tuple[Any, ...]]:
    """How a value is read, and the choices if there are few."""
    if get_origin(hint) is Literal:
        return "choice", get_args(hint)
    if hint is bool:
        return "bool", (True, False)
    if hint is str:
        return "text", ()
    if hint is float:
        return "fraction", ()
    kinds: dict[str, Kind] = {"ms": "ms", "s": "s", "bytes": "bytes"}
    return kinds.get(name.removesuffix("_max").rpartition("_")[2], "count"), ()


_SECTIONS: Final[Mapping[str, Any]] = {
    name: hint for name, hint in get_type_hints(Config).items() if is_dataclass(hint)
}
SETTINGS: Final[dict[str, Setting]] = {
    f"{section}.{declared.name}": _setting(declared, get_type_hints(cls)[declared.name])
    for section, cls in _SECTIONS.items()
    for declared in fields(cls)
}
_OF_ALL_TOPICS: Final = ("auto_create", "topics_max", "dedup_ids_max")
_OF_ONE_TOPIC: Final = [f.name for f in fields(TopicConfig) if f.name not in _OF_ALL_TOPICS]


# ---- other names


class _Target(NamedTuple):
    key: str | None  # the setting that is set; None: what is written must be right, and that is all
    form: Setting  # what may be written
    meant: Callable[[Any], Any] = lambda value: value  # from that to the value of the setting


_BOOL: Final = Setting(kind="bool", choices=(True, False))
_ALIASES: Final[dict[str, _Target]] = {
    alias: _Target(key, SETTINGS[key])
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
    "ack.max_retries": _Target("topic.deliveries_max", Setting(kind="count", low=0, high=999), lambda n: n + 1),
    "client.auto_ack": _Target(
        None,
        Setting(
            kind="bool",
            choices=(True,),
            note="`penstock client` acknowledges what it printed; in a program, BrokerClient.subscribe takes auto_ack",
        ),
    ),
    "cluster.enabled": _Target(None, Setting(kind="bool", choices=(False,), note="clustering is not available yet")),
    "deduplication.enabled": _Target("topic.dedup", _BOOL, {True: "id", False: "off"}.get),
    "flow_control.enable_backpressure": _Target(
        None,
        Setting(kind="bool", choices=(True,), note="buffers are always limited, flow.mode says what a full one does"),
    ),
    "enabled_distribution": _Target(
        None, Setting(kind="bool", choices=(False,), note="clustering is not available yet")
    ),
    "flow_control.enable_rate_limit": _Target(None, _BOOL),
    "log_cleanup_interval": _Target("topic.dedup_window_ms", Setting(kind="s", low=1), lambda s: s * 1000),
    "log_level": _Target(
        "server.log_level",
        Setting(kind="choice", choices=("debug", "info", "warn", "warning", "error")),
        lambda level: "warning" if level == "warn" else level,
    ),
    "log_retention_bytes": _Target(
        "topic.retain_bytes", Setting(kind="bytes", low=-1), lambda size: size if size > 0 else None
    ),
    "log_retention_hours": _Target(
        "topic.retain_ms", Setting(kind="count", low=1), lambda hours: hours * _DURATIONS_MS["h"]
    ),
    "storage.fsync_on_write": _Target("topic.durability", _BOOL, {True: "fsync", False: "flush"}.get),
    "use_tls": _Target(
        None, Setting(kind="bool", choices=(False,), note="there is no TLS here, let a proxy in front of it do that")
    ),
}
# Names of other brokers for what is different here, and why nothing can follow from them.
NO_EFFECT: Final[Mapping[str, str]] = {
    "client.max_retries": "a request is sent once, because one that was not answered may have been done",
    "client.retry_delay": "a request is sent once, because one that was not answered may have been done",
    **{
        f"cluster.{name}": "there is no cluster"
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
    "durable.replay_batch": "a group that is behind reads as much as its members take",
    "logging.file": "the log goes to stderr",
    "logging.format": "the log has one format, or JSON with log.format",
    "network.threads.boss": "one event loop serves all connections",
    "network.threads.worker": "one event loop serves all connections",
    "server.connection_timeout": "a connection that is silent is sent heartbeats, every server.heartbeat_s",
    "storage.max_log_size": "a log is cut into segments of topic.segment_bytes, and topic.retain_bytes limits it",
    "storage.memory_cache_size": "the last batches are kept in memory within storage.tail_bytes_max",
    "storage.snapshot_dir": "the log alone holds all that is stored",
    "storage.snapshot_interval": "the log alone holds all that is stored",
    "storage.sync_interval": "topic.durability says when a message is synced",
    "topics.max_partitions": "a topic has at most 256 partitions",
    **cursus_names.NO_EFFECT,
}

# Settings that only the Python broker has. They tell whose file it is.
_PYTHON_BROKER: Final = (
    "client.auto_ack",
    "client.heartbeat_interval",
    "client.max_retries",
    "client.request_timeout",
    "client.retry_delay",
    "server.heartbeat_interval",
    "storage.fsync_on_write",
)

# What its file says of all topics, where ours has a table for each.
_PYTHON_BROKER_TOPICS: Final = {
    "topics.default_partitions": _Target("topic.partitions", SETTINGS["topic.partitions"]),
    "topics.max_message_size": _Target("server.payload_bytes_max", SETTINGS["server.payload_bytes_max"]),
    "topics.retention_hours": _Target(
        "topic.retain_ms", Setting(kind="count", low=1), lambda hours: hours * _DURATIONS_MS["h"]
    ),
}

_PREFIX: Final = "PENSTOCK_"
_ENVIRONMENT: Final = {_PREFIX + key.replace(".", "_").upper(): key for key in SETTINGS}
_ENVIRONMENT_ALIASES: Final = {
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
_ENVIRONMENT_NO_EFFECT: Final = {
    "QB_MAX_RETRIES": "client.max_retries",
    "QB_SNAPSHOT_DIR": "storage.snapshot_dir",
    "QB_SNAPSHOT_INTERVAL": "storage.snapshot_interval",
}
_PATH_NAMES: Final = ("PENSTOCK_CONFIG", "QB_CONFIG_FILE", "CONFIG_PATH")
# Where commands find a broker: not for the server, and no mistake.
_CLIENT_NAMES: Final = ("PENSTOCK_SERVERS",)


# ---- the sources

_VARIABLE: Final = re.compile(r"\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<default>[^}]*))?\})?")


@dataclass(frozen=True, slots=True)
class _Notes:
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class _Given(NamedTuple):
    name: str  # as it is written
    value: Any
    origin: str
    target: _Target

    @property
    def place(self) -> str:
        return f"{self.name} ({self.origin})"


def _path_in(environ: Mapping[str, str]) -> Path | None:
    return next((Path(environ[name]) for name in _PATH_NAMES if name in environ), None)


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        # The text of the error quotes the file, and there may be a password in it.
        mark = getattr(error, "problem_mark", None)
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{getattr(error, 'problem', None) or 'this is not YAML'}{where}") from None


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


def _read_file(path: Path, notes: _Notes) -> dict[Any, Any]:
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        notes.problems.append(f"file {path}: its name must end with {', '.join(_PARSERS)}")
        return {}
    try:
        table = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        notes.problems.append(f"file {path}: {' '.join(str(reason).split())}")
        return {}
    if not isinstance(table, dict | None):
        notes.problems.append(f"file {path}: it must hold tables of settings")
        return {}
    return table or {}


def _flatten(table: Mapping[Any, Any], key: str = "", written: str = "") -> Iterator[tuple[str, str, Any]]:
    """Dotted key, the same as it is written, and value. Tables within `broker` count as if they stood outside."""
    for name, value in table.items():
        # The name of a topic is not ours to spell.
        spelled = str(name) if key == "topics." else str(name).replace("-", "_").removeprefix("broker.")
        inner = f"{key}{spelled}"
        if isinstance(value, dict):
            yield from _flatten(value, "" if inner == "broker" else f"{inner}.", f"{written}{name}.")
        else:
            yield inner, f"{written}{name}", value


def _topic_names(table: Mapping[Any, Any]) -> list[str]:
    tables = [place.get("topics") for place in (table, table.get("broker")) if isinstance(place, dict)]
    return [
        str(name)
        for topics in tables
        if isinstance(topics, dict)
        for name, value in topics.items()
        # The Python broker's file has settings of all topics there.
        if isinstance(value, dict) or f"topics.{name}" not in (*_PYTHON_BROKER_TOPICS, *NO_EFFECT)
    ]


def _from_file(
    table: Mapping[Any, Any],
    origin: str,
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    notes: _Notes,
) -> Iterator[_Given]:
    targets = {key: _Target(key, setting) for key, setting in settings.items()} | _ALIASES
    entries = [(cursus_names.canonical(key, written), written, value) for key, written, value in _flatten(table)]
    if any(key in _PYTHON_BROKER for key, _, _ in entries):
        targets |= _PYTHON_BROKER_TOPICS
        # The one port of the Python broker is for clients that speak first.
        targets["server.port"] = _Target("server.quiet_port", settings["server.quiet_port"])
        notes.warnings.extend(
            f"{written} ({origin}) is read as server.quiet_port, as this is a file of the Python broker"
            for key, written, _ in entries
            if key == "server.port"
        )
    if any(key == "flow_control.enable_rate_limit" and str(value).lower() == "false" for key, _, value in entries):
        # Flux's rate counts only where its limit is enabled.
        rates = ("flow_control.default_rate_limit", "flow_control.default_rate_burst")
        entries = [entry for entry in entries if entry[0] not in rates]
    for key, written, value in entries:
        place = f"{written} ({origin})"
        if key == "server.port" and isinstance(value, str) and value.startswith(":"):
            notes.warnings.append(
                f"{place} is {value!r}: only the port is taken from it, server.host says where to listen"
            )
        if key in targets:
            try:
                value = _interpolate(value, environ)
            except ValueError as error:
                notes.problems.append(f"{place}: {error}")
            else:
                yield _Given(written, value, origin, targets[key])
        elif key in NO_EFFECT:
            notes.warnings.append(f"{place} is {value!r}, which has no effect: {NO_EFFECT[key]}")
        elif not any(name.startswith(f"{key}.") for name in (*targets, *NO_EFFECT, "broker.", "topics.")):
            notes.problems.append(f"{place} is not a setting{_hint(key, targets)}")
        elif value is not None:  # nothing is an empty table in YAML
            notes.problems.append(f"{place} must be a table of settings")


def _interpolate(value: Any, environ: Mapping[str, str]) -> Any:
    def replacement(found: re.Match[str]) -> str:
        if found["name"] is None:
            raise ValueError("write a variable as ${NAME} or ${NAME:default}")
        text = environ.get(found["name"], found["default"])
        if text is None:
            raise ValueError(f"the environment has no {found['name']}, and it has no default")
        return text

    return _VARIABLE.sub(replacement, value) if isinstance(value, str) else value


def _from_environment(environ: Mapping[str, str], notes: _Notes) -> Iterator[_Given]:
    own = {key for name, key in _ENVIRONMENT.items() if name in environ}
    aliases = {name: key for name, key in _ENVIRONMENT_ALIASES.items() if key not in own}
    for name, key in (_ENVIRONMENT | aliases).items():
        if name in environ:
            yield _Given(key, environ[name], f"environment {name}", _Target(key, SETTINGS[key]))
    for name, value in environ.items():
        if name in _ENVIRONMENT_NO_EFFECT:
            reason = NO_EFFECT[_ENVIRONMENT_NO_EFFECT[name]]
            notes.warnings.append(f"{name} (environment) is {value!r}, which has no effect: {reason}")
        elif name.startswith(_PREFIX) and name not in (*_ENVIRONMENT, *_PATH_NAMES, *_CLIENT_NAMES):
            notes.problems.append(f"{name} (environment) is not a setting{_hint(name, [*_ENVIRONMENT, *_PATH_NAMES])}")


def _from_flags(flags: Mapping[str, Any], notes: _Notes) -> Iterator[_Given]:
    """By dotted keys, and Cursus' flags by their own names."""
    is_cursus = any(name in cursus_names.FLAGS and value is not None for name, value in flags.items())
    for key, value in flags.items():
        name = cursus_names.FLAGS.get(key, key)
        origin = f"flag --{key.rpartition('.')[2].replace('_', '-')}"
        if name in NO_EFFECT:
            notes.warnings.append(
                f"{origin.removeprefix('flag ')} is {value!r}, which has no effect: {NO_EFFECT[name]}"
            )
        elif name in _ALIASES:
            yield _Given(name, value, origin, _ALIASES[name])
        elif name not in SETTINGS:
            notes.problems.append(f"{key} ({origin}) is not a setting{_hint(key, SETTINGS)}")
        elif value is None:
            pass
        elif name == "server.port" and is_cursus:
            notes.warnings.append("--port is read as --quiet-port, as these are flags of Cursus")
            yield _Given(name, value, origin, _ALIASES["broker_port"])
        else:
            yield _Given(name, value, origin, _Target(name, SETTINGS[name]))


def _hint(wrong: str, right: Collection[str]) -> str:
    """The nearest right name: one that is spelled alike, else one that has the same last part."""
    last = f".{wrong.rpartition('.')[2]}"
    near = get_close_matches(wrong, right, 1) or [name for name in right if name.endswith(last)]
    return f": did you mean {near[0]}?" if near else ""


def _once(source: Iterable[_Given], notes: _Notes) -> Iterator[_Given]:
    """One source says a thing once, whatever it calls it: who says it twice may mean either."""
    seen: dict[str, _Given] = {}
    for given in source:
        key = given.target.key
        if key is not None and seen.setdefault(key, given) is not given:
            notes.problems.append(f"{given.place} says again what {seen[key].place} says: keep one of them")
        else:
            yield given


# ---- from what was given to the configuration


def _read(given: _Given, notes: _Notes) -> Any:
    form = given.target.form
    try:
        return given.target.meant(form.convert(given.value))
    except ValueError:
        shown = "***" if form.secret else repr(given.value)
        notes.problems.append(f"{given.place} is {shown}: it must be {form.allowed}")
        # It is wrong, and yet it is there: what needs it must not complain too.
        return given.value


def _conflicts(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """What is right by itself, and wrong together."""
    for section in ("auth", "pipe"):
        for one, other in permutations((f"{section}.user", f"{section}.password"), 2):
            if values[one] is not None and values[other] is None:
                yield f"{one} ({origins[one]}) needs {other}: set both, or neither"
    for name in ("pipe.user", "pipe.token"):
        if values[name] is not None and values["pipe.parents"] is None and values["pipe.parent"] is None:
            yield f"{name} ({origins[name]}) is sent to no parent: list those that may have it in pipe.parents"
    for name in ("pipe.topics", "pipe.up"):
        if values[name] is not None and values["pipe.parent"] is None and values["registry.url"] is None:
            yield f"{name} ({origins[name]}) has no effect without a parent: set pipe.parent or registry.url as well"
    if values["registry.url"] is not None and values["pipe.parent"] is not None:
        yield (
            f"registry.url ({origins['registry.url']}) and pipe.parent ({origins['pipe.parent']}) both say whom to "
            "follow: keep one of them"
        )
    host = values["server.host"]
    is_open = values["auth.user"] is None and values["auth.token"] is None and values["server.insecure"] is not True
    is_right = isinstance(host, str) and re.fullmatch(SETTINGS["server.host"].pattern, host)
    public = [each for each in hosts(host) if not is_loopback(each)] if is_right else []
    if is_open and public:
        yield (
            f"server.host ({origins['server.host']}) is {', '.join(public)!r}, which other machines can reach, and no "
            "credentials are required: set auth.user and auth.password, or auth.token; to serve anyone, set "
            "server.insecure (--insecure)"
        )
    lasts, grace = "server.lame_duck_s", "server.lame_duck_grace_s"
    if isinstance(values[lasts], int) and isinstance(values[grace], int) and 0 < values[lasts] <= values[grace]:
        yield (
            f"{grace} ({origins[grace]}) is {values[grace]}, and {lasts} ({origins[lasts]}) is {values[lasts]}: the "
            "grace period must be shorter"
        )
    for one, other in combinations(("server.port", "server.quiet_port", "server.http_port"), 2):
        if values[one] == values[other] != 0:
            yield f"{one} ({origins[one]}) and {other} ({origins[other]}) are both {values[one]}: they must differ"
    for one in ("server.port", "server.http_port"):
        qb = "server.qb_port"
        if values[one] == values[qb] and origins[qb] != "default":
            yield f"{one} ({origins[one]}) and {qb} ({origins[qb]}) are both {values[one]}: they must differ"


def _build(values: Mapping[str, Any], topics: Iterable[str]) -> Config:
    sections = {
        section: cls(**{declared.name: values[f"{section}.{declared.name}"] for declared in fields(cls)})
        for section, cls in _SECTIONS.items()
    }
    one_by_one = {
        topic: replace(sections["topic"], **{name: values[f"topics.{topic}.{name}"] for name in _OF_ONE_TOPIC})
        for topic in topics
    }
    return Config(**sections, topics=one_by_one)
