"""The arguments of Cursus' commands."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.errors import BadRequest
from penstock.log.policy import PARTITIONS_MAX


def needed(arguments: Mapping[str, str], name: str) -> str:
    value = arguments.get(name)
    if not value:
        raise BadRequest("missing topic name" if name == "topic" else f"missing {name} parameter")
    return value


def number(arguments: Mapping[str, str], name: str, wrong: str, *, default: int | None = None) -> int:
    value = arguments.get(name, None if default is None else str(default))
    if value is None or not value.isascii() or not value.isdigit() or len(value) > 18:
        raise BadRequest(wrong)
    return int(value)


def offset_of(arguments: Mapping[str, str], *, default: int | None = None) -> int:
    return number(arguments, "offset", "invalid offset", default=default)


def read_offsets(text: str) -> list[tuple[int, int]]:
    """Read offsets like P0:100,P1:200."""
    entries = text.split(",")
    if len(entries) > PARTITIONS_MAX:
        raise BadRequest(f"invalid offsets: {len(entries)} of them, {PARTITIONS_MAX} are allowed")
    found = []
    for entry in entries:
        matched = re.fullmatch(r"P(\d{1,9}):(\d{1,18})", entry)
        if matched is None:
            raise BadRequest(f"invalid offsets: {entry!r} is not like P0:100")
        found.append((int(matched[1]), int(matched[2])))
    return found


def group_name(topic: str, group: str) -> str:
    return f"{topic}:{group}"
