"""The arguments of each call, declared once for the binary protocol and the admin API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.broker import deadletters, delay
from penstock.broker.group_state import Mode
from penstock.doors.requests import Position
from penstock.errors import BadRequest
from penstock.log.policy import Partitions, Policy
from penstock.model.subject import whole_topic
from penstock.schema import Form, NonNegative, about

# Rows of dead letters or delayed messages in one answer.
ROWS_MAX: Final = 10_000
# Partitions that one request waits for.
PLACES_MAX: Final = 10_000

Time = '{"time": "2030-01-31T12:00:00Z"} (or seconds since 1970, or "-5m") or {"time_us": n}'
Begins = Annotated[
    Any,
    about(f'"earliest", "latest", {{"offset": n}}, {Time}, or {{"positions": [[topic id, partition, offset], ...]}}'),
]
Changes = Annotated[
    dict[str, Any] | None,
    Form(json_type=Policy),
    about("fields of the policy that differ from the settings in `topic`"),
]
Rows = Annotated[Annotated[int, Meta(ge=0, le=ROWS_MAX)], about(f"rows of one answer, at most {ROWS_MAX}")]
Count = Annotated[NonNegative | None, about("at most this many; all, if it is not given")]
OnlyPartition = Annotated[NonNegative | None, about("only this partition")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    limit: Annotated[NonNegative | None, about("rows of one answer")] = None
    offset: Annotated[NonNegative, about("rows to skip")] = 0

    @property
    def rows(self) -> slice:
        return slice(self.offset, None if self.limit is None else self.offset + self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    name: Annotated[str, about("its name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolve:
    subject: Annotated[str, about("a subject")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopic:
    name: Annotated[str, about("its name")]
    partitions: Annotated[Partitions | None, about("number of partitions")] = None
    policy: Changes = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterTopic:
    name: Annotated[str, about("its name")]
    partitions: Annotated[Partitions | None, about("number of partitions; never fewer than before")] = None
    policy: Changes = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeTopic:
    name: Annotated[str, about("its name")]
    before: Annotated[Any, about(f'"latest" for all, {{"offset": n}} in one partition, {Time}')]
    partition: OnlyPartition = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSchema:
    name: Annotated[str, about("the topic")]
    schema: Annotated[str, about("JSON Schema (draft 2020-12) or Spark DDL, as text")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    name: Annotated[str, about("the topic")]
    version: Annotated[NonNegative | None, about("the version; the newest, if it is not given")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetAt:
    name: str
    partition: NonNegative
    time_us: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetAfter:
    name: str
    partition: NonNegative
    offset: NonNegative
    bytes: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    positions: Annotated[
        list[Position],
        Meta(min_length=1, max_length=PLACES_MAX),
        Form(allowed=f"1 to {PLACES_MAX} lists of a topic ID, a partition and an offset"),
    ]
    wait_ms: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGroup:
    name: Annotated[str, about("its name")]
    pattern: Annotated[str | None, about("the subjects that it reads; this, or topic")] = None
    topic: Annotated[str | None, about("the topic that it reads, with all its subjects; this, or pattern")] = None
    mode: Annotated[Mode, about("how its members share messages")] = Mode.SHARED
    start: Begins = "latest"

    @property
    def selection(self) -> bytes:
        if (self.topic is None) == (self.pattern is None):
            raise BadRequest("name either a pattern or a topic")
        return whole_topic(self.topic.encode()) if self.topic is not None else (self.pattern or "").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetGroup:
    name: Annotated[str, about("its name")]
    start: Begins
    topic: Annotated[str | None, about("only in this topic")] = None
    partition: OnlyPartition = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    group: str
    topic: str
    partition: NonNegative
    offset: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTransaction:
    name: str
    number: NonNegative
    offsets: list[NonNegative]
    once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortTransaction:
    name: str
    number: NonNegative


Subjects = Annotated[str, about("pattern of their original subjects")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    group: Annotated[str | None, about("of this group")] = None
    reason: Annotated[str | None, about("with this text in their reason")] = None
    since_us: Annotated[NonNegative | None, about("since this time, in µs since 1970")] = None
    until_us: Annotated[NonNegative | None, about("before this time, in µs since 1970")] = None
    partition: Annotated[NonNegative | None, about("only from this partition of their topic")] = None
    offsets: Annotated[list[NonNegative] | None, about("only at these offsets")] = None

    def wanted(self, pattern: str) -> deadletters.DeadLetterFilter:
        return deadletters.DeadLetterFilter(
            pattern.encode(),
            None if self.group is None else self.group.encode(),
            self.reason,
            self.since_us,
            self.until_us,
            self.partition,
            None if self.offsets is None else frozenset(self.offsets),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    pattern: Subjects = ">"
    which: LetterFilter
    limit: Rows = 100
    redriven: Annotated[bool, about("also those that were redriven")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeDeadLetters:
    pattern: Subjects
    which: LetterFilter
    count: Count = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Redrive:
    pattern: Subjects
    which: LetterFilter
    count: Count = None
    to_group: Annotated[bool, about("deliver each only to the group that failed")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedFilter:
    message_id: Annotated[str | None, about("with this ID")] = None
    offsets: Annotated[list[NonNegative] | None, about("only at these offsets, as the list shows them")] = None

    def wanted(self, pattern: str) -> delay.DelayedFilter:
        return delay.DelayedFilter(
            pattern.encode(),
            None if self.message_id is None else self.message_id.encode(),
            None if self.offsets is None else frozenset(self.offsets),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedMessages:
    pattern: Annotated[str, about("pattern of their subjects")] = ">"
    which: DelayedFilter
    limit: Rows = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelDelayed:
    pattern: Annotated[str, about("pattern of their subjects")]
    which: DelayedFilter
