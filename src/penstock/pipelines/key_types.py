"""The types of the keys in a pipeline file: how each value is read from TOML and checked.

Each reader raises ValueError with what follows the key's name in the message: "is 7: it must be text in quotes".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from difflib import get_close_matches
from typing import Any, Final

from penstock import address, times
from penstock.clock import SystemClock
from penstock.model import subject
from penstock.pipelines.pipeline import SERVERS
from penstock.times import Place

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DURATION: Final = re.compile(r"\d+ (?:millisecond|second|minute|hour|day|week)s?(?: \d+ (?:second|minute|hour)s?)*")


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"is {_shown(value)}: it must be text in quotes")
    if not value.strip():
        raise ValueError("is empty")
    return value


def name(value: Any) -> str:
    if not _NAME.fullmatch(text(value)):
        raise ValueError(
            f"is {value!r}: it must be 1 to 100 letters, digits, '.', '_' or '-', and begin with a letter or digit"
        )
    return str(value)


def servers(value: Any) -> str:
    servers = [server.strip() for server in text(value).split(",")]
    try:
        # A pipeline file must name the port.
        is_valid = all(address.split(server, -1)[1] >= 0 for server in servers)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"is {value!r}: it must be like {SERVERS!r}, or several separated by commas")
    return ",".join(servers)


def topic(value: Any) -> str:
    if not subject.is_subject(text(value).encode()):
        raise ValueError(f"is {value!r}: a topic name has no blanks, no wildcards and no empty parts between dots")
    return str(value)


def topics(value: Any) -> tuple[str, ...]:
    return tuple(topic(each) for each in some_texts(value))


def regex(value: Any) -> str:
    try:
        re.compile(text(value))
    except re.error as error:
        raise ValueError(f"is {value!r}, which is not a regular expression: {error}") from None
    return str(value)


def patterns(value: Any) -> tuple[str, ...]:
    for each in some_texts(value):
        if not subject.is_pattern(each.encode()):
            raise ValueError(f"has {each!r}, which is not a subject pattern: write orders.* or orders.>")
    return some_texts(value)


def place(value: Any) -> Place:
    # TOML has its own times. Without a zone they are UTC, like times in text.
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if isinstance(value, datetime) and value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    try:
        return times.read_place(value, SystemClock().now_us())
    except ValueError as error:
        raise ValueError(f"is {error}") from None


def fixed_place(value: Any) -> Place:
    if isinstance(value, str) and times.is_relative(value):
        raise ValueError(f"is {value!r}, which would change with every run: give an offset or an absolute time")
    return place(value)


def options(value: Any) -> dict[str, str]:
    """Return options as Spark takes them: as text."""
    if not isinstance(value, dict):
        raise ValueError(f"is {_shown(value)}: it must be a table, such as {{ maxOffsetsPerTrigger = 100000 }}")
    return dict(_option(name, each) for name, each in value.items())


def _option(name: str, value: Any) -> tuple[str, str]:
    if isinstance(value, bool):
        return name, str(value).lower()
    if isinstance(value, (str, int, float)):
        return name, str(value)
    raise ValueError(f"has {name} = {_shown(value)}: an option is text, a number or a boolean")


def duration(value: Any) -> str:
    if not _DURATION.fullmatch(text(value)):
        raise ValueError(f"is {value!r}: it must be like '10 minutes', or '1 hour 30 minutes'")
    return str(value)


def count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"is {_shown(value)}: it must be a positive integer")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of texts. A single text is a list of one."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) and each.strip() for each in values):
        raise ValueError(f"is {_shown(value)}: it must be a list of texts, such as ['id', 'country']")
    if len(set(values)) < len(values):
        raise ValueError(f"is {_shown(value)}: one of them is repeated")
    return tuple(values)


def some_texts(value: Any) -> tuple[str, ...]:
    if not (values := texts(value)):
        raise ValueError("is an empty list: name at least one")
    return values


def measures(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) and each.strip() for each in value.values()):
        raise ValueError(
            f'is {_shown(value)}: it must be a table of names and SQL, such as {{ total = "sum(amount)" }}'
        )
    if not value:
        raise ValueError('is empty: add at least one measure, such as { rows = "count(*)" }')
    return dict(value)


def code(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text(value)):
        raise ValueError(f"is {value!r}: it must be module:function, such as shop.orders:clean")
    return str(value)


def choice(choices: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"is {_shown(value)}{suggestion(str(value), choices)}: it must be {' or '.join(choices)}")
        return str(value)

    return read


def _shown(value: Any) -> str:
    """Return a value about as it is in the file."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "a table"
        case _:
            return repr(value)


READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "text": text,
    "servers": servers,
    "topic": topic,
    "topics": topics,
    "regex": regex,
    "patterns": patterns,
    "place": place,
    "fixed place": fixed_place,
    "path": text,
    "options": options,
    "duration": duration,
    "count": count,
    "texts": texts,
    "some_texts": some_texts,
    "measures": measures,
    "code": code,
}


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" if a known word is close, else an empty text."""
    near = get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
