"""Message headers with a meaning for the broker.

Msg-ID, Nats-Msg-Id     the ID of the message, for deduplication
Penstock-Key            its key, which selects the partition and is used by compaction
Penstock-Timestamp      the publisher's timestamp, in any form that `times.read_moment` reads
Deliver-At, Delay       when to append it: such a time; or a delay: 500ms, 5s, 2m, 1h, 1d
Nats-TTL                how long it is delivered, from its append; as in nats-server: seconds, a
                        duration as Go writes it (1m30s, 1h, 2000ms), of a second or more, or never
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

from penstock import times
from penstock.errors import BadHeader

# A year: a longer delay is probably a mistake in the unit.
DELAY_US_MAX: Final = 366 * 24 * 3600 * 1_000_000

# The year 9999: a later time is wrong, and must fit into 64 bits.
TIME_US_MAX: Final = 253_402_300_800_000_000

# Hashing a key takes 0.1 µs per byte, during which all clients wait.
KEY_BYTES_MAX: Final = 64 << 10
_KEY_BYTES_REMEMBERED: Final = 256
# Limit of the reason of a failure, which the broker keeps with each message that is retried.
REASON_BYTES_MAX: Final = 512
# A longer message ID is replaced by its hash, so that remembered IDs have a limited size.
_IDENTITY_BYTES_MAX: Final = 64

_IDENTITIES: Final = (b"msg-id", b"nats-msg-id")

TTL_US_MIN: Final = 1_000_000
TTL_FORMS: Final = "seconds (1 or more), a duration like 90s, 1m30s or 1h, or never"
TTL: Final = b"nats-ttl"
_TTL_LINE: Final = re.compile(rb"^nats-ttl[ \t]*:([^\n]*)", re.IGNORECASE | re.MULTILINE)
# Go's integers have 64 bits; its durations are nanoseconds.
_INT64_MAX: Final = (1 << 63) - 1
_SECONDS: Final = re.compile(r"[0-9]{1,19}")
_GO_NUMBER: Final = r"(?:[0-9]{1,19}(?:\.[0-9]{0,32})?|\.[0-9]{1,32})"
_GO_DURATION: Final = re.compile(rf"\+?(?:{_GO_NUMBER}(?:ns|us|µs|μs|ms|s|m|h)){{1,16}}")
_GO_PART: Final = re.compile(r"([0-9.]+)([a-zµμ]+)")
_GO_UNIT_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "μs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}


class HeaderOptions(NamedTuple):
    identity: bytes | None = None
    key: bytes | None = None
    # µs since 1970: when to append it, and the publisher's timestamp.
    due_us: int | None = None
    time_us: int | None = None
    # µs: how long it is delivered; None: forever.
    ttl_us: int | None = None


def read(block: bytes, now_us: int) -> HeaderOptions:
    """Parse the header lines of a message. The first of a repeated header counts."""
    fields = _fields(block)
    due_us = None
    if (moment := fields.get(b"deliver-at")) is not None:
        due_us = _moment("Deliver-At", moment, now_us)
    elif (delay := fields.get(b"delay")) is not None:
        due_us = now_us + _duration(delay)
    if due_us is not None and due_us > now_us + DELAY_US_MAX:
        raise BadHeader("invalid delay: a message can be delayed for at most a year")
    time_us = None
    if (made := fields.get(b"penstock-timestamp")) is not None:
        time_us = _moment("Penstock-Timestamp", made, now_us)
    ttl_us = None
    if (ttl := fields.get(TTL)) is not None:
        ttl_us = read_ttl(ttl.decode(errors="replace"))
    return HeaderOptions(_identity(fields), fields.get(b"penstock-key"), due_us, time_us, ttl_us)


def identity(block: bytes) -> bytes | None:
    """Return the ID of a message, if it has one."""
    return _identity(_fields(block))


def ttl_us(block: bytes) -> int | None:
    """Return the TTL of a stored message; None if it never expires: it has no TTL, or an invalid one."""
    line = _TTL_LINE.search(block)
    if line is None:
        return None
    try:
        return read_ttl(line[1].strip(b" \t\r").decode(errors="replace"))
    except BadHeader:
        return None


@lru_cache(1024)
def read_ttl(text: str) -> int | None:
    """Return the microseconds of a TTL, or None for never."""
    if text.lower() in ("", "never"):
        return None
    if _GO_DURATION.fullmatch(text):
        ttl_ns = sum(int(Decimal(number) * _GO_UNIT_NS[unit]) for number, unit in _GO_PART.findall(text))
        if ttl_ns <= _INT64_MAX and ttl_ns // 1000 >= TTL_US_MIN:
            return ttl_ns // 1000
    elif _SECONDS.fullmatch(text) and 1 <= int(text) <= _INT64_MAX:
        return int(text) * 1_000_000
    raise BadHeader(f"Nats-TTL: {text!r} is not a TTL: it must be {TTL_FORMS}")


def lines(**fields: object) -> bytes:
    """Encode header lines: `dead_letter_reason="…"` becomes `Dead-Letter-Reason: …`."""
    out = []
    for name, value in fields.items():
        text = str(value).replace("\r", " ").replace("\n", " ")
        out.append(f"{name.replace('_', '-').title()}: {text}\r\n")
    return "".join(out).encode(errors="replace")


def reason(text: str) -> str:
    """Return the reason of a failure as one printable line of at most `REASON_BYTES_MAX` bytes."""
    # A character has at least one byte, so the text can be shortened first.
    line = " ".join("".join(each if each.isprintable() else " " for each in text[: 4 * REASON_BYTES_MAX]).split())
    data = line.encode(errors="replace")
    if len(data) > REASON_BYTES_MAX:
        data = data[: REASON_BYTES_MAX - 3] + "…".encode()
    return data.decode(errors="ignore")


def without(block: bytes, *names: bytes) -> bytes:
    """Return the lines without those of these names, in lower case; a name that ends with a hyphen is a prefix."""
    beginnings = tuple(name for name in names if name.endswith(b"-"))
    kept = []
    for line in block.split(b"\n"):
        name = line.partition(b":")[0].rstrip(b" \t").lower()
        if name not in names and not name.startswith(beginnings):
            kept.append(line)
    return b"\n".join(kept)


def named(block: bytes, **fields: bytes) -> bytes:
    """Add fields to a block, unless it has one of that name or the value does not fit into a line."""
    for name, value in fields.items():
        line = name.replace("_", "-").title().encode()
        if b"\n" not in value and b"\r" not in value and value_of(block, line) is None:
            block += b"%b: %b\r\n" % (line, value)
    return block


def is_block(block: bytes) -> bool:
    """Return whether these are complete lines, none of them empty."""
    return not block or (block.endswith(b"\r\n") and not block.startswith(b"\r\n") and b"\r\n\r\n" not in block)


def value_of(block: bytes, name: bytes) -> bytes | None:
    return _fields(block).get(name.lower())


def hash_key(key: bytes) -> int:
    """Return the 64-bit FNV-1a hash of a key, which selects the partition, here and in every client."""
    return _hash_short(key) if len(key) <= _KEY_BYTES_REMEMBERED else _hash(key)


def check_key_size(size: int) -> None:
    """Raise if a key of this size is too large."""
    if size > KEY_BYTES_MAX:
        raise BadHeader(f"key of {size} bytes: at most {KEY_BYTES_MAX} are allowed")


@lru_cache(4096)
def _hash_short(key: bytes) -> int:
    return _hash(key)


def _hash(key: bytes) -> int:
    number = 14695981039346656037
    for byte in key:
        number = (number ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    return number


def _fields(block: bytes) -> dict[bytes, bytes]:
    """Return the values by name in lower case; the first of a repeated name."""
    fields: dict[bytes, bytes] = {}
    for line in block.split(b"\n"):
        name, colon, value = line.partition(b":")
        # A line that begins with a blank continues the one before, and is not a field.
        if colon and name[:1] not in b" \t":
            fields.setdefault(name.rstrip(b" \t").lower(), value.strip(b" \t\r"))
    return fields


def _identity(fields: dict[bytes, bytes]) -> bytes | None:
    found = next((fields[name] for name in _IDENTITIES if fields.get(name)), None)
    if found is not None and len(found) > _IDENTITY_BYTES_MAX:
        # One byte longer than any unhashed ID.
        return b"#" + blake2b(found).digest()
    return found


def _duration(value: bytes) -> int:
    """Parse a duration; a number without a unit is seconds."""
    text = value.decode(errors="replace")
    try:
        return times.read_duration(f"{text}s" if text[-1:].isdecimal() else text)
    except ValueError:
        raise BadHeader(f"Delay: {text!r} is not a duration such as 500ms, 5s, 2m, 1h or 1d") from None


def _moment(name: str, value: bytes, now_us: int) -> int:
    try:
        return times.read_moment(value.decode(errors="replace"), now_us)
    except ValueError as error:
        raise BadHeader(f"{name}: {error}") from None
