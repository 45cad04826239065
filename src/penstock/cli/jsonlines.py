"""Parse a message to publish from a JSON object, in the format that `penstock fetch` writes."""

from __future__ import annotations

import base64
import json
from typing import Any, Final, NoReturn

import typer

from penstock.cli.options import read_delay, seconds_of
from penstock.client.values import Outgoing
from penstock.errors import BadRequest
from penstock.model.headers import TTL_FORMS

_VALUES: Final = ("value", "value_base64", "json", "tombstone")
_KEYS: Final = ("key", "key_base64")
_OTHERS: Final = ("subject", "headers", "message_id", "delay", "ttl")
# Fields that `fetch` writes for a stored message; ignored, because the published message is stored elsewhere.
_STORED: Final = ("topic", "partition", "offset", "timestamp", "timestamp_us", "attempts")
_KNOWN: Final = frozenset((*_VALUES, *_KEYS, *_OTHERS, *_STORED))


def read_message(fields: dict[str, Any], common: Outgoing) -> Outgoing:
    """Parse a message; `common` has the defaults, and its subject overrides. Raise BadRequest if a field is invalid."""
    try:
        _check_known(fields)
        return _message(fields, common)
    except (ValueError, typer.BadParameter) as error:
        raise BadRequest(str(error)) from None


def is_message(fields: dict[str, Any]) -> bool:
    """Return whether an object has the fields of a message, and no others."""
    if not fields.keys() <= _KNOWN:
        return False
    match [name for name in _VALUES if name in fields]:
        case ["json"]:
            return True
        case ["tombstone"]:
            return fields["tombstone"] is True
        case [name]:
            return isinstance(fields[name], str)
    return False


def read_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"invalid JSON: {error} (if lines are plain values, use --format lines)") from None
    if not isinstance(fields, dict):
        raise BadRequest("not a JSON object")
    return fields


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not allowed in JSON")


def _message(fields: dict[str, Any], common: Outgoing) -> Outgoing:
    key, subject = _key(fields, common.key), _text(fields, "subject", "")
    return Outgoing(
        common.subject or subject,
        _value(fields, has_key=key is not None),
        key=key,
        headers=_headers(fields, common.headers),
        message_id=_text(fields, "message_id", common.message_id),
        delay=_delay(fields, common.delay),
        ttl=_ttl(fields, common.ttl),
    )


def _check_known(fields: dict[str, Any]) -> None:
    unknown = fields.keys() - _KNOWN
    if unknown:
        raise ValueError(
            f"unknown field {', '.join(sorted(unknown))}: use {', '.join((*_OTHERS, *_KEYS, *_VALUES))}, or publish "
            "plain objects with --format objects"
        )


def _value(fields: dict[str, Any], *, has_key: bool) -> bytes | None:
    given = [name for name in _VALUES if name in fields]
    if len(given) != 1:
        raise ValueError(f"a message must have exactly one of {', '.join(_VALUES)}")
    match given[0]:
        case "json":
            return json.dumps(fields["json"], separators=(",", ":")).encode()
        case "tombstone":
            if fields["tombstone"] is not True:
                raise ValueError("tombstone must be true, or absent")
            if not has_key:
                raise ValueError("a tombstone needs a key")
            return None
        case name:
            return _bytes(fields, name)


def _key(fields: dict[str, Any], common: bytes | str | None) -> bytes | str | None:
    given = [name for name in _KEYS if name in fields]
    return _bytes(fields, given[0]) if given else common


def _headers(fields: dict[str, Any], common: Any) -> Any:
    headers = fields.get("headers", {})
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise ValueError("headers must be an object of strings")
    return {**(common or {}), **headers} or None


def _delay(fields: dict[str, Any], common: Any) -> Any:
    match fields.get("delay"):
        case None:
            return common
        case str(text):
            return read_delay(text)
        case int() | float() as seconds if not isinstance(seconds, bool):
            return seconds_of(seconds)
    raise ValueError("delay must be a number of seconds, or a string such as 5s or a time")


def _ttl(fields: dict[str, Any], common: Any) -> Any:
    match fields.get("ttl"):
        case None:
            return common
        case str(text):
            return text
        case int() | float() as seconds if not isinstance(seconds, bool):
            return seconds
    raise ValueError(f"ttl must be {TTL_FORMS}")


def _bytes(fields: dict[str, Any], name: str) -> bytes:
    text = fields[name]
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string")
    if not name.endswith("_base64"):
        return text.encode(errors="surrogatepass")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"{name} must be base64") from None


def _text(fields: dict[str, Any], name: str, common: Any) -> Any:
    text = fields.get(name, common)
    if name in fields and not isinstance(text, str):
        raise ValueError(f"{name} must be a string")
    return text
