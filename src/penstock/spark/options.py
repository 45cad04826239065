"""The options of the source, parsed and checked. Spark passes them as text, with names in lower case.

Names and meanings are those of the Kafka connector where the meaning is the same, so that a job moves by changing its
format and its servers.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from penstock import times
from penstock.clock import SystemClock
from penstock.model.subject import is_pattern
from penstock.spark import connection
from penstock.tls.options import TlsOptions

if TYPE_CHECKING:
    from penstock.client.sync import Client

# How long the broker may be unreachable, or take to reply.
TIMEOUT_S: Final = connection.TIMEOUT_S
# How long a stream waits for `minOffsetsPerTrigger`, as in the Kafka connector.
TRIGGER_DELAY_S: Final = 15 * 60.0

CONNECTION: Final = ("servers", "kafka.bootstrap.servers", *connection.LOGIN, "timeout")
READ: Final = (
    *CONNECTION,
    "subscribe",
    "subscribePattern",
    "assign",
    "subjects",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "group",
    "kafka.group.id",
    "archive",
)
# Options that Spark itself adds.
_SPARKS: Final = frozenset({"checkpointlocation", "queryname"})

EARLIEST: Final = -2
LATEST: Final = -1
OFFSET_MAX: Final = (1 << 63) - 1

_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|min|h|d)")
_UNIT_S: Final = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """The servers of a broker, and the credentials for it."""

    servers: str
    timeout_s: float
    user: str | None = None
    password: str | None = None
    token: str | None = None
    tls: TlsOptions | None = None

    def connect(self) -> Client:
        """Return the connected client of this process."""
        return connection.client(
            self.servers,
            self.timeout_s,
            user=self.user,
            password=self.password,
            token=self.token,
            tls=self.tls,
        )


@dataclass(frozen=True, slots=True)
class Names:
    """`subscribe`: these topics."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matching:
    """`subscribePattern`: topics whose full name matches, including those created later."""

    expression: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Assigned:
    """`assign`: these partitions."""

    places: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for each partition, which may be EARLIEST or LATEST."""

    name: str
    offsets: dict[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class AtTimestamp:
    """The first message stored at a time or later."""

    name: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class AtTimestamps:
    name: str
    times_ms: dict[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class AtEdge:
    """EARLIEST or LATEST in all partitions."""

    offset: int


Topics = Names | Matching | Assigned
Bound = AtEdge | AtOffsets | AtTimestamp | AtTimestamps


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """All options of the source."""

    broker: BrokerOptions
    topics: Topics
    subjects: tuple[bytes, ...]
    start: Bound
    end: Bound
    # Whether a start time after the last message is an error, or means the end.
    is_late_start_error: bool
    offsets_max: int | None
    offsets_min: int | None
    delay_s: float
    bytes_max: int | None
    partitions_min: int | None
    records_max: int | None
    fails_on_loss: bool
    has_headers: bool
    group: str | None
    archive: str | None


def read(options: Mapping[str, str], *, is_stream: bool) -> ReadOptions:
    check_known(options, READ)
    found = ReadOptions(
        broker=broker(options),
        topics=_topics(options),
        subjects=_subjects(options),
        start=_bound(options, "starting", AtEdge(LATEST if is_stream else EARLIEST)),
        end=_bound(options, "ending", AtEdge(LATEST)),
        is_late_start_error=choice(options, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "error",
        offsets_max=number(options, "maxOffsetsPerTrigger"),
        offsets_min=number(options, "minOffsetsPerTrigger"),
        delay_s=duration_s(options, "maxTriggerDelay", TRIGGER_DELAY_S),
        bytes_max=number(options, "maxBytesPerTrigger"),
        partitions_min=number(options, "minPartitions"),
        records_max=number(options, "maxRecordsPerPartition"),
        fails_on_loss=flag(options, "failOnDataLoss", default=True),
        has_headers=has_headers(options),
        group=text(options, "group") or text(options, "kafka.group.id"),
        archive=text(options, "archive"),
    )
    _check_together(found, is_stream=is_stream)
    return found


def has_headers(options: Mapping[str, str]) -> bool:
    return flag(options, "includeHeaders", default=False)


def broker(options: Mapping[str, str]) -> BrokerOptions:
    return BrokerOptions(
        servers=text(options, "servers") or text(options, "kafka.bootstrap.servers") or connection.SERVERS,
        timeout_s=seconds(options, "timeout", TIMEOUT_S),
        **connection.login({name: value for name in connection.LOGIN if (value := text(options, name)) is not None}),
    )


def check_known(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for an unknown option. `known` are names as users write them."""
    names = {name.lower(): name for name in known}
    for given in options:
        if given.lower() in names or given.lower() in _SPARKS:
            continue
        if given.lower() == "path":
            raise ValueError("a topic has no path: call load() and save() without one, and name topics with options")
        nearest = difflib.get_close_matches(given.lower(), names, 1)
        if nearest:
            raise ValueError(f"unknown option {given!r}: did you mean {names[nearest[0]]!r}?")
        raise ValueError(f"unknown option {given!r}: there are {', '.join(sorted(names.values()))}")


# Readers of one option each, by the name that users write.


def text(options: Mapping[str, str], name: str) -> str | None:
    """Return an option, which must not be empty; None if it is absent."""
    given = options.get(name.lower())
    if given is None:
        return None
    if not given.strip():
        raise ValueError(f"{name} is empty: set a value, or omit it")
    return given.strip()


def number(options: Mapping[str, str], name: str, *, least: int = 1) -> int | None:
    given = text(options, name)
    if given is None:
        return None
    try:
        found = int(given)
    except ValueError:
        found = least - 1
    if not least <= found <= OFFSET_MAX:
        raise ValueError(f"{name} is {given!r}: it must be an integer of at least {least}")
    return found


def flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    given = text(options, name)
    if given is None:
        return default
    if given.lower() not in ("true", "false"):
        raise ValueError(f"{name} is {given!r}: it must be true or false")
    return given.lower() == "true"


def choice(options: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed values; the first by default."""
    given = text(options, name)
    if given is None:
        return allowed[0]
    if given.lower() not in allowed:
        raise ValueError(f"{name} is {given!r}: it must be {' or '.join(allowed)}")
    return given.lower()


def seconds(options: Mapping[str, str], name: str, default: float) -> float:
    """Return a duration, given as a number of seconds or as 500ms."""
    given = text(options, name)
    try:
        found = default if given is None else float(given)
    except ValueError:
        return duration_s(options, name, default)
    if not 0 < found < 1e9:
        raise ValueError(f"{name} is {given!r}: it must be more than 0 seconds")
    return found


def duration_s(options: Mapping[str, str], name: str, default: float) -> float:
    given = text(options, name)
    if given is None:
        return default
    found = _DURATION.fullmatch(given.lower())
    if not found:
        raise ValueError(f"{name} is {given!r}: it must be a duration such as 500ms, 30s, 15m, 1h or 1d")
    return int(found[1]) * _UNIT_S[found[2]]


def names(options: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return a comma-separated list without duplicates, in the given order."""
    given = text(options, name)
    if given is None:
        return ()
    found = tuple(dict.fromkeys(each.strip() for each in given.split(",")))
    if not all(found):
        raise ValueError(f"{name} is {given!r}: it must be names separated by commas")
    return found


def _topics(options: Mapping[str, str]) -> Topics:
    ways = [name for name in ("subscribe", "subscribePattern", "assign") if name.lower() in options]
    if len(ways) != 1:
        given = " and ".join(ways) or "none"
        raise ValueError(f"exactly one of subscribe, subscribePattern and assign is needed, but there is {given}")
    match ways[0]:
        case "subscribe":
            return Names(names(options, "subscribe"))
        case "subscribePattern":
            expression = text(options, "subscribePattern") or ""
            try:
                return Matching(re.compile(expression))
            except re.error as error:
                raise ValueError(
                    f"subscribePattern is {expression!r}, which is not a regular expression: {error}"
                ) from None
    return Assigned(_assigned(options))


def _assigned(options: Mapping[str, str]) -> tuple[TopicPartition, ...]:
    expected = '{"orders": [0, 1]}'
    given = _object(options, "assign", expected)
    places = []
    for topic, partitions in given.items():
        if not isinstance(partitions, list) or not all(type(each) is int and each >= 0 for each in partitions):
            _refuse("assign", options, expected)
        places += [TopicPartition(topic, each) for each in partitions]
    if not places:
        _refuse("assign", options, expected)
    return tuple(dict.fromkeys(places))


def _subjects(options: Mapping[str, str]) -> tuple[bytes, ...]:
    patterns = tuple(each.encode() for each in names(options, "subjects"))
    for pattern in patterns:
        if not is_pattern(pattern):
            raise ValueError(
                f"subjects has {pattern.decode()!r}, which is not a pattern: use tokens separated by dots, "
                "`*` for one token, and `>` at the end for all that follow"
            )
    return patterns


def _bound(options: Mapping[str, str], which: str, default: Bound) -> Bound:
    """Return where reading starts or ends. As with Kafka, a time wins over times by partition, then offsets."""
    time_ms = _time_ms(options, f"{which}Timestamp")
    if time_ms is not None:
        return AtTimestamp(f"{which}Timestamp", time_ms)
    by_time, by_offset = f"{which}OffsetsByTimestamp", f"{which}Offsets"
    if by_time.lower() in options:
        return AtTimestamps(by_time, _by_place(options, by_time, least=0))
    given = text(options, by_offset)
    match given.lower() if given else given:
        case None:
            return default
        case "earliest":
            return AtEdge(EARLIEST)
        case "latest":
            return AtEdge(LATEST)
    return AtOffsets(by_offset, _by_place(options, by_offset, least=EARLIEST))


def _time_ms(options: Mapping[str, str], name: str) -> int | None:
    """Return a time in milliseconds. A number is milliseconds, as in the Kafka connector."""
    given = text(options, name)
    if given is None or given.isdecimal():
        return number(options, name, least=0)
    try:
        return max(0, times.read_moment(given, SystemClock().now_us()) // 1000)
    except ValueError:
        raise ValueError(f"{name} is {given!r}: it must be milliseconds since 1970, or {times.MOMENT_FORMS}") from None


def _by_place(options: Mapping[str, str], name: str, *, least: int) -> dict[TopicPartition, int]:
    if least == EARLIEST:
        expected = 'earliest, latest or {"orders": {"0": 23, "1": -2}} (-2 is earliest, -1 is latest)'
    else:
        expected = '{"orders": {"0": 1700000000000}} (milliseconds since 1970)'
    found = {}
    for topic, offsets in _object(options, name, expected).items():
        if not isinstance(offsets, dict):
            _refuse(name, options, expected)
        for partition, offset in offsets.items():
            if not partition.isdecimal() or type(offset) is not int or not least <= offset <= OFFSET_MAX:
                _refuse(name, options, expected)
            found[TopicPartition(topic, int(partition))] = offset
    return found


def _object(options: Mapping[str, str], name: str, expected: str) -> dict[str, Any]:
    try:
        found = json.loads(options[name.lower()])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        _refuse(name, options, expected)
    return found


def _refuse(name: str, options: Mapping[str, str], expected: str) -> NoReturn:
    raise ValueError(f"{name} is {options[name.lower()]!r}: it must be {expected}")


def _check_together(found: ReadOptions, *, is_stream: bool) -> None:
    if found.end == AtEdge(EARLIEST):
        raise ValueError("endingOffsets is earliest, which leaves nothing to read: it must be latest or offsets")
    if isinstance(found.end, AtOffsets) and EARLIEST in found.end.offsets.values():
        raise ValueError("endingOffsets has -2 (earliest), which leaves nothing to read")
    if not is_stream and found.start == AtEdge(LATEST):
        raise ValueError("startingOffsets is latest, which leaves a batch nothing to read")
    if found.archive is not None and found.bytes_max is not None:
        raise ValueError("maxBytesPerTrigger does not work with an archive: use maxOffsetsPerTrigger")
