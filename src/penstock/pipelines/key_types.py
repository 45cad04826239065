"""The types of the keys in a pipeline file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock import address, times
from penstock.clock import SystemClock
from penstock.model import subject
from penstock.schema import Form, Invalid, shown

SERVERS: Final = "127.0.0.1:4222"


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(value)
    return value


def _servers(value: Any) -> str:
    servers = [server.strip() for server in _text(value).split(",")]
    # A pipeline file must name the port.
    if not all(address.split(server, -1)[1] >= 0 for server in servers):
        raise ValueError(value)
    return ",".join(servers)


def _topic(value: Any) -> str:
    if not subject.is_subject(_text(value).encode()):
        raise ValueError(value)
    return str(value)


def _pattern(value: Any) -> str:
    if not subject.is_pattern(_text(value).encode()):
        raise ValueError(value)
    return str(value)


def _regex(value: Any) -> str:
    try:
        re.compile(_text(value))
    except re.error as error:
        raise Invalid(f"is {value!r}, which is not a regular expression: {error}") from None
    return str(value)


def _place(value: Any) -> times.Place:
    # TOML has its own times. Without a zone they are UTC, like times in text.
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if isinstance(value, datetime) and value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    try:
        return times.read_place(value, SystemClock().now_us())
    except ValueError as error:
        raise Invalid(f"is {error}") from None


def _fixed_place(value: Any) -> times.Place:
    if isinstance(value, str) and times.is_relative(value):
        raise Invalid(f"is {value!r}, which would change with every run: give an offset or an absolute time")
    return _place(value)


def _option(value: Any) -> Any:
    """Return an option as Spark takes it: as text."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
    return value


def _options(value: Any) -> Any:
    return {name: _option(each) for name, each in value.items()} if isinstance(value, dict) else value


def _each(read: Callable[[Any], str] = _text) -> Callable[[Any], list[str]]:
    """Return the reader of a list of texts. A single text is a list of one."""

    def read_all(value: Any) -> list[str]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise ValueError(value)
        found = [read(each) for each in values]
        if len(set(found)) < len(found):
            raise Invalid(f"is {shown(value)}: one of them is repeated")
        return found

    return read_all


_TEXTS: Final = "a list of texts, such as ['id', 'country']"

Text = Annotated[str, Meta(pattern=r"\S"), Form(allowed="text in quotes, which is not empty")]
Name = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z"),
    Form(allowed="1 to 100 letters, digits, '.', '_' or '-', and begin with a letter or digit"),
]
Servers = Annotated[str, Form(read=_servers, allowed=f"like {SERVERS!r}, or several separated by commas")]
Topic = Annotated[
    str,
    Form(read=_topic, allowed="a topic name in quotes, without blanks, wildcards and empty parts between dots"),
]
Topics = Annotated[tuple[str, ...], Meta(min_length=1), Form(read=_each(_topic), allowed="a list of topic names")]
Patterns = Annotated[
    tuple[str, ...],
    Meta(min_length=1),
    Form(read=_each(_pattern), allowed="a list of subject patterns, such as ['orders.*', 'payments.>']"),
]
Regex = Annotated[str, Form(read=_regex, allowed="a regular expression")]
# Of the type times.Place, whose alternatives msgspec cannot tell apart.
AnyPlace = Annotated[Any, Form(read=_place)]
FixedPlace = Annotated[Any, Form(read=_fixed_place)]
Options = Annotated[
    Mapping[str, str],
    Form(read=_options, allowed="a table of text, numbers and booleans, such as { maxOffsetsPerTrigger = 100000 }"),
]
Duration = Annotated[
    str,
    Meta(pattern=r"^\d+ (?:millisecond|second|minute|hour|day|week)s?(?: \d+ (?:second|minute|hour)s?)*\Z"),
    Form(allowed="like '10 minutes', or '1 hour 30 minutes'"),
]
Columns = Annotated[tuple[str, ...], Form(read=_each(), allowed=_TEXTS)]
SomeColumns = Annotated[tuple[str, ...], Meta(min_length=1), Form(read=_each(), allowed=_TEXTS)]
Measures = Annotated[
    Mapping[str, Text],
    Meta(min_length=1),
    Form(allowed='a table of names and SQL, at least one, such as { rows = "count(*)" }'),
]
Code = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z"),
    Form(allowed="module:function, such as shop.orders:clean"),
]

_SECONDS: Final = {"millisecond": 0.001, "second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}


def seconds(duration: str) -> float:
    """Return a `Duration` in seconds."""
    words = duration.split()
    return sum(
        int(count) * _SECONDS[unit.removesuffix("s")] for count, unit in zip(words[::2], words[1::2], strict=True)
    )
