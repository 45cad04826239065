"""What a replica can be asked and what it answers, declared once for serving and for OpenAPI."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.schema import INTEGER_MAX, Form, NonNegative, about

LIMIT: Final = 100
LIMIT_MAX: Final = 1000
PARTITION_MAX: Final = 65_535

Partition = Annotated[int, Meta(ge=0, le=PARTITION_MAX)]
Limit = Annotated[Annotated[int, Meta(ge=1, le=LIMIT_MAX)], about("rows of one answer")]


# ---- requests


def from_base64(text: Any) -> bytes:
    """Raise ValueError unless a text is URL-safe base64."""
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, TypeError):
        raise ValueError(text) from None


def _checked_base64(text: Any) -> Any:
    from_base64(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class FindOffset:
    offset: Annotated[NonNegative, about("the offset")]
    partition: Annotated[Partition, about("its partition")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FindKey:
    key: Annotated[str, about("the key; it may contain slashes")]
    base64: Annotated[bool, about("whether the key is given in URL-safe base64")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FindRange:
    first: Annotated[NonNegative, Form(name="from"), about("the first offset")] = 0
    last: Annotated[NonNegative, Form(name="to"), about("the last offset")] = INTEGER_MAX
    limit: Limit = LIMIT
    partition: Annotated[Partition, about("its partition")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FindKeys:
    prefix: Annotated[str, about("only keys that begin with it")] = ""
    after: Annotated[
        str | None,
        Form(read=_checked_base64, allowed="URL-safe base64, with - and _"),
        about("only keys behind it, in URL-safe base64"),
    ] = None
    limit: Limit = LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class FindSegments:
    partition: Annotated[Partition | None, about("only of this partition")] = None
    limit: Limit = LIMIT


# ---- answers


class Answer(msgspec.Struct, rename="camel"):
    """The base of all answers: fields in camel case."""


class Record(Answer, kw_only=True):
    partition: int
    offset: int
    msg_key: str | None
    msg_key_base64: Annotated[str, about("the key, if it is not UTF-8")] | UnsetType = UNSET
    event_type: Literal["MESSAGE", "DELETE"]
    data: str
    data_base64: Annotated[str, about("the value, if it is not UTF-8")] | UnsetType = UNSET
    created_at: str | None
    subject: str
    headers: dict[str, str]


class Records(Answer, kw_only=True):
    partition: int
    count: int
    records: list[Record]
    next: Annotated[int | None, about("the first offset of the rest")]


class Key(Answer, kw_only=True):
    key: str
    key_base64: Annotated[str, about("the key, if it is not UTF-8")] | UnsetType = UNSET


class Keys(Answer, kw_only=True):
    count: int
    keys: list[Key]
    next: Annotated[str | None, about("`after` of the next request")]


class OffsetRange(Answer, kw_only=True):
    min: int | None
    max: int | None


class PartitionStats(Answer, kw_only=True):
    partition: int
    segment_count: int
    total_records: int
    offset_range: OffsetRange
    next_offset: int


class Stats(Answer, kw_only=True):
    type: str
    topic: str
    group: str
    segment_count: int
    total_records: int
    offset_range: OffsetRange
    sqlite_db_size: int
    skipped: int
    partitions: list[PartitionStats]


class Segment(Answer, kw_only=True):
    segment_id: int | None
    file: str
    partition: int
    start_offset: int
    end_offset: int
    range: str
    records: int
    bytes: int
    capacity: int
    created_at: str


class Segments(Answer, kw_only=True):
    count: int
    segments: list[Segment]


class BrokerHealth(Answer, kw_only=True):
    address: str
    connected: bool
    lag: int | None
    error: str | None


class Health(Answer, kw_only=True):
    status: Literal["UP", "DOWN"]
    segments: int
    records: int
    refreshing: bool
    paused: bool
    broker: BrokerHealth
    error: str | UnsetType = UNSET


class Resumed(Answer, kw_only=True):
    resumed: bool


class Error(Answer, kw_only=True):
    error: str
