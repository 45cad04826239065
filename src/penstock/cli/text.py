"""Bytes and times as they are printed.

For people, text that could be misread, or could do things to a terminal, is shown as Python would write it:
'two\\nlines', b'\\xff\\x00'. For programs nothing is lost: what is not UTF-8 is in base64.
"""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any

from penstock.times import iso_or_none

Document = dict[str, Any]


def shown(data: bytes, *, alone: bool) -> str:
    """`alone`: nothing follows it in the line, so it may have spaces."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return repr(data)
    return text if text.isprintable() and (alone or (text and " " not in text)) else repr(text)


def safe(text: str) -> str:
    return text if text.isprintable() else repr(text)


def put(document: Document, name: str, data: bytes) -> None:
    """As `name`, or `name_base64` if it is not UTF-8."""
    try:
        document[name] = data.decode()
    except UnicodeDecodeError:
        document[f"{name}_base64"] = base64.b64encode(data).decode()


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@lru_cache(maxsize=1024)
def iso(time_us: int) -> str | None:
    """None if it is not of the years 1 to 9999."""
    return iso_or_none(time_us, "microseconds")
