"""Messages to publish: arguments checked and converted to the columns of a batch."""

from __future__ import annotations

import json as jsons
import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from numbers import Real
from typing import Any, Final, NamedTuple

from penstock.client.values import TTL, Delay, Headers
from penstock.errors import BadHeader, BadSubject, BatchTooLarge
from penstock.model.batch import Batch, encode
from penstock.model.headers import DELAY_US_MAX, TTL_FORMS, TTL_US_MIN, read_ttl
from penstock.model.run import Run
from penstock.model.subject import is_subject
from penstock.times import read_delay, read_moment

# The default of `json=`, where None is a value.
ABSENT: Final[Any] = type("Absent", (), {"__repr__": lambda _: "<absent>"})()

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BROKEN: Final = re.compile(r"[\r\n\0]")
# Headers that ask the broker for something, so that it must open the batch.
_ASKING: Final = frozenset({"msg-id", "nats-msg-id", "delay", "deliver-at"})
_IDENTITIES: Final = frozenset({"msg-id", "nats-msg-id"})
_KEY: Final = "penstock-key"
_TTL: Final = "nats-ttl"


class Prepared(NamedTuple):
    subject: str
    value: bytes
    key: bytes | None = None
    headers: bytes | None = None
    is_tombstone: bool = False
    # Whether it has an ID or a delay.
    asks: bool = False
    # Whether the broker deduplicates it by ID.
    has_identity: bool = False
    # The reply subject of a request.
    reply: bytes | None = None
    # Time until it expires; None: never.
    ttl_us: int | None = None

    def add_to(self, run: Run, subject: bytes, headers: bytes | None) -> None:
        """Append it to a run."""
        index = len(run.values)
        run.values.append(self.value)
        run.subjects.append(subject)
        if self.key is not None:
            run.keys[index] = self.key
        if headers is not None:
            run.headers[index] = headers
        if self.is_tombstone:
            run.tombstones.add(index)
        if self.ttl_us is not None:
            run.ttls[index] = self.ttl_us


def prepare(
    subject: str,
    value: bytes | None,
    json: Any,
    key: bytes | str | None,
    headers: Headers,
    message_id: str | None,
    delay: Delay,
    ttl: TTL,
    now_us: int,
) -> Prepared:
    """Check the arguments of `publish`, and return the message."""
    subject_bytes(subject)
    plain_key = key.encode() if isinstance(key, str) else key
    lines: dict[str, str] = {}
    if message_id is not None:
        if not message_id:
            raise BadHeader("empty message_id: omit it, or give an ID that no other message has")
        lines["Msg-ID"] = message_id
    if delay is not None:
        name, text = _delay(delay, now_us)
        lines[name] = text
    if ttl is not None:
        lines["Nats-TTL"] = _ttl(ttl)
    given = {name.lower() for name in lines}
    for name, text in (headers or {}).items():
        low = name.lower() if isinstance(name, str) else ""
        if low not in given and not (low in _IDENTITIES and message_id is not None):
            lines[name] = text
    if plain_key is None:
        plain_key = next((text.encode() for name, text in lines.items() if name.lower() == _KEY), None)
    block = _block(lines) if lines else None
    asked = {name.lower() for name in lines} & _ASKING
    payload, is_tombstone = _value(value, json, has_key=plain_key is not None)
    return Prepared(
        subject,
        payload,
        plain_key,
        block,
        is_tombstone,
        bool(asked),
        bool(asked & _IDENTITIES),
        ttl_us=next((read_ttl(text) for name, text in lines.items() if name.lower() == _TTL), None),
    )


def prepare_call(subject: str, value: bytes | None, json: Any, key: bytes | str | None, headers: Headers) -> Prepared:
    """Return a request or a reply. Without a value it is empty, not a tombstone."""
    payload = b"" if value is None and json is ABSENT else value
    return prepare(subject, payload, json, key, headers, None, None, None, 0)


def subject_bytes(subject: str) -> bytes:
    if not isinstance(subject, str):
        raise TypeError(f"a subject must be a str, not {type(subject).__name__}")
    data = subject.encode(errors="surrogatepass")
    if not is_subject(data):
        raise BadSubject(f"invalid subject {subject!r}: it must be tokens separated by dots, such as orders.eu")
    return data


def check_size(size: int, bytes_max: int) -> None:
    """Raise BatchTooLarge if a value exceeds the broker's limit."""
    if size > bytes_max:
        raise BatchTooLarge(
            f"message of {size} bytes is too large, the broker's limit is {bytes_max}: split it, or raise the limit"
        )


def encode_each(messages: list[Prepared], timestamp: int) -> Batch:
    """Return a batch in which every message has its subject."""
    return encode(
        [message.value for message in messages],
        timestamp=timestamp,
        subjects=[message.subject.encode() for message in messages],
        keys=_column([message.key for message in messages]),
        headers=_column([message.headers for message in messages]),
        replies=_column([message.reply for message in messages]),
        tombstones=tombstones if any(tombstones := [message.is_tombstone for message in messages]) else None,
        asks=any(message.asks or message.ttl_us is not None for message in messages),
    )


def _value(value: bytes | None, json: Any, *, has_key: bool) -> tuple[bytes, bool]:
    """Return the payload, and whether it is a tombstone."""
    if json is not ABSENT:
        if value is not None:
            raise TypeError("give a value or json=, not both")
        return jsons.dumps(json, separators=(",", ":"), ensure_ascii=False).encode(), False
    if value is None:
        if not has_key:
            raise TypeError("a message without a value deletes its key: give a key, or a value (which may be b'')")
        return b"", True
    if isinstance(value, str):
        raise TypeError("a value must be bytes, not str: use value.encode(), or json=")
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(
            f"a value must be bytes, not {type(value).__name__}: use json= for objects that JSON can express"
        )
    return bytes(value), False


def _delay(delay: float | timedelta | datetime | str, now_us: int) -> tuple[str, str]:
    """Return the name and the value of the header."""
    if isinstance(delay, str):
        delay = read_delay(delay)
    if isinstance(delay, datetime):
        due_us = read_moment(delay, now_us)
        if due_us > now_us + DELAY_US_MAX:
            raise BadHeader("invalid delay: a message can be delayed by one year at most")
        return "Deliver-At", f"{due_us // 1_000_000}.{due_us % 1_000_000:06}"
    if isinstance(delay, bool):
        raise BadHeader(f"invalid delay {delay}: it must be seconds, a duration or a time")
    if isinstance(delay, timedelta):
        delay_us = delay // timedelta(microseconds=1)
    else:
        delay_us = round(delay * 1_000_000) if math.isfinite(delay) else -1
    if not 0 <= delay_us <= DELAY_US_MAX:
        raise BadHeader(f"invalid delay {delay}: it must be from 0 to one year")
    return "Delay", f"{delay_us // 1_000_000}.{delay_us % 1_000_000:06}s"


def _ttl(ttl: float | timedelta | str) -> str:
    """Return the value of the header."""
    # True is not a number of seconds, and an empty text is not `never`.
    if not isinstance(ttl, (Real, timedelta, str)) or isinstance(ttl, bool) or ttl == "":
        raise BadHeader(f"invalid ttl {ttl!r}: it must be {TTL_FORMS}, as a number, a timedelta or text")
    if isinstance(ttl, str):
        read_ttl(ttl)
        return ttl
    if isinstance(ttl, timedelta):
        ttl_us = ttl // timedelta(microseconds=1)
    else:
        ttl_us = round(ttl * 1_000_000) if math.isfinite(ttl) else -1
    text = f"{ttl_us}us" if ttl_us % 1_000_000 else str(ttl_us // 1_000_000)
    if ttl_us < TTL_US_MIN:
        raise BadHeader(f"invalid ttl {ttl!r}: it must be {TTL_FORMS}")
    read_ttl(text)
    return text


def _block(lines: Mapping[str, str]) -> bytes:
    for name, text in lines.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"invalid header {name!r}: {text!r}: names and values must be text")
        if not _NAME.fullmatch(name):
            raise BadHeader(f"invalid header name {name!r}: use letters, digits and hyphens")
        if _BROKEN.search(text) or text != text.strip(" \t"):
            raise BadHeader(f"invalid header {name}: {text!r} has a line break, or begins or ends with a blank")
    return "".join([f"{name}: {text}\r\n" for name, text in lines.items()]).encode()


def _column(items: list[bytes | None]) -> list[bytes | None] | None:
    return items if any(item is not None for item in items) else None
