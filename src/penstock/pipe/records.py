"""Messages as JSON records, for brokers that do not support batches.

    {"offset": 7, "msgKey": "AAPL", "eventType": "MESSAGE" | "DELETE", "data": "…", "createdAt": "2026-01-31T12:00:00Z"}

`data` may be any JSON; values and keys that are not UTF-8 are also in `dataBase64` and `msgKeyBase64`. `subject` is
present if it differs from the topic's name, `headers` if there are any.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from penstock.errors import BadParent
from penstock.model.batch import OFFSET_MAX, Batch, encode
from penstock.model.headers import ttl_us
from penstock.model.run import Run
from penstock.times import iso_or_none

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def record(run: Run, index: int) -> dict[str, Any]:
    """Return a message as a record."""
    value, key = run.values[index], run.keys.get(index)
    time_us = run.time_us(index)
    found: dict[str, Any] = {
        "msgKey": None if key is None else key.decode(errors="replace"),
        "eventType": "DELETE" if index in run.tombstones else "MESSAGE",
        "data": value.decode(errors="replace"),
        "createdAt": iso_or_none(time_us),
    }
    if not _is_utf8(value):
        found["dataBase64"] = base64.b64encode(value).decode()
    return found


def stored_record(run: Run, index: int, topic: bytes) -> dict[str, Any]:
    """Return a message as a record with its offset and everything else that a copy needs."""
    found = {"offset": run.offset(index), **record(run, index)}
    key, subject, block = run.keys.get(index), run.subjects[index], run.headers.get(index)
    if key is not None and not _is_utf8(key):
        found["msgKeyBase64"] = base64.b64encode(key).decode()
    if subject != topic:
        found["subject"] = subject.decode(errors="replace")
    if block:
        found["headers"] = block.decode(errors="replace")
    return found


def read_value(data: object) -> bytes:
    """Return the value that `data` of a record stands for."""
    if data is None:
        return b""
    return (data if isinstance(data, str) else json.dumps(data)).encode(errors="replace")


def read_records(records: object, topic: bytes, offset: int, now_us: int) -> Batch | None:
    """Return the records from `offset` on as a batch at their own offsets; None if there are none. Raise BadParent for
    invalid or unordered records. Records without offsets are numbered from `offset` on. Records of another topic are
    skipped, because the Provider's cloud replies with all of its topics."""
    if not isinstance(records, list):
        raise BadParent(f"the parent replied with a {type(records).__name__} instead of a list of records")
    if all(isinstance(each, dict) and "offset" not in each for each in records):
        records = [{**each, "offset": at} for at, each in enumerate(records, offset)]
    found = [each for each in map(_checked, records) if each["offset"] >= offset]
    if not found:
        return None
    offsets = [each["offset"] for each in found]
    if any(second <= first for first, second in pairwise(offsets)):
        raise BadParent("the parent's records are not in the order of their offsets")
    found = [each for each in found if _text(each, "topic", topic) == topic]
    if not found:
        return None
    offsets = [each["offset"] for each in found]
    subjects = [_text(each, "subject", topic) for each in found]
    blocks = [_text(each, "headers", b"") for each in found]
    batch = encode(
        [_value(each) for each in found],
        timestamp=now_us,
        timestamps=[_time_us(each.get("createdAt"), now_us) for each in found],
        keys=[_key(each) for each in found],
        subjects=None if all(subject == topic for subject in subjects) else subjects,
        headers=[block or None for block in blocks] if any(blocks) else None,
        tombstones=_tombstones(found),
        deltas=[each - offsets[0] for each in offsets],
        span=offsets[-1] - offsets[0] + 1,
        asks=any(ttl_us(block) is not None for block in blocks),
    )
    batch.stamp(offsets[0], append_time=now_us)
    return batch


def end_of(records: Sequence[dict[str, Any]], offset: int) -> int:
    """Return the offset after the records, which start at `offset`."""
    return records[-1]["offset"] + 1 if records and "offset" in records[-1] else offset + len(records)


def _checked(entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict) or type(entry.get("offset")) is not int or not 0 <= entry["offset"] < OFFSET_MAX:
        raise BadParent("the parent's records have an invalid offset: it must be a non-negative integer")
    return entry


def _value(entry: dict[str, Any]) -> bytes:
    return _bytes(entry, "dataBase64") or read_value(entry.get("data"))


def _key(entry: dict[str, Any]) -> bytes | None:
    key = entry.get("msgKey")
    return _bytes(entry, "msgKeyBase64") or (None if key is None else str(key).encode(errors="replace"))


def _bytes(entry: dict[str, Any], name: str) -> bytes | None:
    if name not in entry:
        return None
    try:
        return base64.b64decode(entry[name], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BadParent(f"{name} of the parent's record {entry['offset']} is not base64") from None


def _text(entry: dict[str, Any], name: str, default: bytes) -> bytes:
    value = entry.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise BadParent(f"{name} of the parent's record {entry['offset']} is not text")
    return value.encode(errors="replace")


def _tombstones(found: Sequence[dict[str, Any]]) -> list[bool] | None:
    dead = [each.get("eventType") == "DELETE" and each.get("msgKey") is not None for each in found]
    return dead if any(dead) else None


def _time_us(value: object, now_us: int) -> int:
    """Parse an ISO time or milliseconds; return `now_us` for anything else."""
    try:
        match value:
            case str():
                time = datetime.fromisoformat(value)
                return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
            case int() | float():
                return min(max(int(value * 1000), 0), OFFSET_MAX)
    except (ValueError, OverflowError):
        pass
    return now_us


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
