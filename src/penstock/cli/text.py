"""Format bytes and times for printing.

For people, text that is ambiguous or could control a terminal is shown as a Python literal: 'two\\nlines',
b'\\xff\\x00'. For programs, bytes that are not UTF-8 are in base64, so nothing is lost.
"""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any

from penstock.times import iso_or_none

Document = dict[str, Any]


def shown(data: bytes, *, alone: bool) -> str:
    """Return bytes as text. `alone`: nothing follows in the line, so spaces need no quotes."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return repr(data)
    return text if text.isprintable() and (alone or (text and " " not in text)) else repr(text)


def safe(text: str) -> str:
    return text if text.isprintable() else repr(text)


def put(document: Document, name: str, data: bytes) -> None:
    """Set `name`, or `name_base64` if the data is not UTF-8."""
    try:
        document[name] = data.decode()
    except UnicodeDecodeError:
        document[f"{name}_base64"] = base64.b64encode(data).decode()


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@lru_cache(maxsize=1024)
def iso(time_us: int) -> str | None:
    """Return a time in ISO 8601; None outside the years 1 to 9999."""
    return iso_or_none(time_us, "microseconds")
