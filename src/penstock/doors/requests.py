"""Requests in JSON: the frames OPEN and SNAPSHOT of the binary dialect, declared, and how any request is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from penstock import schema
from penstock.broker.group_state import Mode
from penstock.broker.start import AtOffset, AtPositions, AtTime, Begin, Start
from penstock.errors import BadRequest
from penstock.model.batch import OFFSET_MAX
from penstock.schema import NonNegative
from penstock.times import read_moment

T = TypeVar("T")

# Topic ID, partition and offset.
Position = tuple[NonNegative, NonNegative, NonNegative]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSubscription:
    subscription: NonNegative
    pattern: str
    group: str | None = None
    mode: Mode = Mode.SHARED
    start: Any = "latest"
    credit: NonNegative = 100
    refresh: bool = False
    # 0: no limit.
    deliveries_max: NonNegative | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    # The number of a snapshot to end; None: begin one.
    end: NonNegative | None = None


def read(cls: type[T], fields: dict[str, Any]) -> T:
    """Read a request. Raise BadRequest with the first problem."""
    try:
        return schema.build(cls, fields)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def begin(name: str, value: Any, now_us: int) -> Begin:
    """Return the place in a log that a request names: its `start`, or what is `before` it."""
    match value:
        case "earliest" | "latest":
            return Start(value)
        # Not a bool, which is an int to Python, and nothing that fits into no log.
        case {"offset": int(offset)} if type(offset) is int and 0 <= offset <= OFFSET_MAX:
            return AtOffset(offset)
        case {"time_us": int(time_us)} if type(time_us) is int and 0 <= time_us <= OFFSET_MAX:
            return AtTime(time_us)
        case {"time": time}:
            try:
                return AtTime(read_moment(time, now_us))
            except ValueError as error:
                raise BadRequest(f"{name}.time is {error}") from None
        case {"positions": positions}:
            try:
                found = msgspec.convert(positions, list[Position])
                return AtPositions({(topic_id, number): offset for topic_id, number, offset in found})
            except msgspec.ValidationError:
                pass
    raise BadRequest(f"{name} is {schema.shown(value)}: it must be earliest, latest, an offset, a time or positions")
