"""What a caller wants to publish, checked, as the columns of a batch have it."""

from __future__ import annotations

import json as jsons
import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from numbers import Real
from typing import Any, Final, NamedTuple

from penstock.batch import Batch, encode
from penstock.errors import BadHeader, BadSubject, BatchTooLarge
from penstock.headers import DELAY_US_MAX, TTL_FORMS, TTL_US_MIN, read_ttl
from penstock.subject import is_subject
from penstock.times import read_delay, read_moment

# For `json=`, where None is a value.
ABSENT: Final[Any] = type("Absent", (), {"__repr__": lambda _: "<absent>"})()

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BROKEN: Final = re.compile(r"[\r\n\0]")
# Headers by which the broker is asked for something: it must look inside the batch.
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
    # Whether it has an id, or is for later.
    asks: bool = False
    # Whether it is stored once, however often it is sent.
    has_identity: bool = False
    # Where a reply is expected.
    reply: bytes | None = None
    # How long it is delivered; None: for ever.
    ttl_us: int | None = None


def prepare(
    subject: str,
    value: bytes | None,
    json: Any,
    key: bytes | str | None,
    headers: Mapping[str, str] | None,
    message_id: str | None,
    delay: float | timedelta | datetime | str | None,
    ttl: float | timedelta | str | None,
    now_us: int,
) -> Prepared:
    subject_bytes(subject)
    plain_key = key.encode() if isinstance(key, str) else key
    lines: dict[str, str] = {}
    if message_id is not None:
        if not message_id:
            raise BadHeader("message_id is empty: leave it out, or give one that no other message has")
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


def prepare_call(
    subject: str, value: bytes | None, json: Any, key: bytes | str | None, headers: Mapping[str, str] | None
) -> Prepared:
    """A request or a reply: without a value it is empty, and deletes nothing."""
    payload = b"" if value is None and json is ABSENT else value
    return prepare(subject, payload, json, key, headers, None, None, None, 0)


def subject_bytes(subject: str) -> bytes:
    if not isinstance(subject, str):
        raise TypeError(f"a subject is text, not {type(subject).__name__}")
    data = subject.encode(errors="surrogatepass")
    if not is_subject(data):
        raise BadSubject(f"{subject!r} is no subject: tokens with dots between them, such as orders.eu")
    return data


def check_size(size: int, bytes_max: int) -> None:
    """Of a value: what the broker's limit is for."""
    if size > bytes_max:
        raise BatchTooLarge(
            f"a message of {size} bytes, the broker takes {bytes_max}: send it in parts, or raise its limit"
        )


def encode_each(messages: list[Prepared], timestamp: int) -> Batch:
    """A batch in which every message says its subject."""
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
    """The payload, and whether it deletes its key."""
    if json is not ABSENT:
        if value is not None:
            raise TypeError("a message has a value or json, not both")
        return jsons.dumps(json, separators=(",", ":"), ensure_ascii=False).encode(), False
    if value is None:
        if not has_key:
            raise TypeError("a message without a value deletes its key: give a key, or a value (b'' is one)")
        return b"", True
    if isinstance(value, str):
        raise TypeError("a value is bytes: encode the text (value.encode()), or give it as json=")
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"a value is bytes, not {type(value).__name__}: json= takes what can be written as JSON")
    return bytes(value), False


def _delay(delay: float | timedelta | datetime | str, now_us: int) -> tuple[str, str]:
    """The header that asks for it."""
    if isinstance(delay, str):
        delay = read_delay(delay)
    if isinstance(delay, datetime):
        due_us = read_moment(delay, now_us)
        if due_us > now_us + DELAY_US_MAX:
            raise BadHeader("a message can be delayed for a year at the most")
        return "Deliver-At", f"{due_us // 1_000_000}.{due_us % 1_000_000:06}"
    if isinstance(delay, timedelta):
        delay_us = delay // timedelta(microseconds=1)
    else:
        delay_us = round(delay * 1_000_000) if math.isfinite(delay) else -1
    if not 0 <= delay_us <= DELAY_US_MAX:
        raise BadHeader(f"a delay of {delay} is below zero, or more than a year")
    return "Delay", f"{delay_us // 1_000_000}.{delay_us % 1_000_000:06}s"


def _ttl(ttl: float | timedelta | str) -> str:
    """The value of the header that asks for it."""
    # True is not a number of seconds, and an empty text not a wish that the message stays: see `never`.
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
            raise TypeError(f"headers are text: {name!r}: {text!r}")
        if not _NAME.fullmatch(name):
            raise BadHeader(f"{name!r} is no name of a header: letters, digits and hyphens")
        if _BROKEN.search(text) or text != text.strip(" \t"):
            raise BadHeader(f"header {name}: {text!r} has a line break, or begins or ends with a blank")
    return "".join([f"{name}: {text}\r\n" for name, text in lines.items()]).encode()


def _column(items: list[bytes | None]) -> list[bytes | None] | None:
    return items if any(item is not None for item in items) else None
