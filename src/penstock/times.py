"""Parse and format times and durations.

A time is ISO 8601 (UTC unless it has a zone), seconds since 1970 (`@1900000000`; the `@` is optional where a
number cannot be an offset), or relative to now: `-5m` is five minutes ago, `1h` in an hour. In Python it may also be a
`datetime` with a zone, a `timedelta` from now, or a float of seconds since 1970, as `time.time()` returns.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import Any, Final

MOMENT_FORMS: Final = (
    "a time like 2030-01-31T12:00:00Z, seconds since 1970 like @1900000000, or relative to now like -5m "
    "(units: ms, s, m, h, d)"
)
PLACE_FORMS: Final = f"earliest, latest, an offset, {MOMENT_FORMS}"
DELAY_FORMS: Final = (
    "seconds, a duration like 500ms, 5s, 2m, 1h or 1d, or a time like 2030-01-31T12:00:00Z or @1900000000"
)

# A position in a log: "earliest", "latest", an offset, or a time.
Place = str | int | datetime

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_TIME_US_MIN: Final = (datetime(1, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_TIME_US_MAX: Final = 253_402_300_800_000_000
_OFFSET_MAX: Final = (1 << 63) - 1
_OFFSET: Final = re.compile(r"[0-9]{1,19}")
_DURATION: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(ms|s|m|h|d)")
_SECONDS: Final = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,9})?")
_UNIT_US: Final = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}


def read_duration(text: str) -> int:
    """Return the microseconds of a duration such as 500ms or 2h. Raise ValueError for anything else."""
    found = _DURATION.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a duration: it must be like 500ms, 5s, 2m, 1h or 1d")
    return int(float(found[1]) * _UNIT_US[found[2]])


def is_relative(text: str) -> bool:
    return bool(_DURATION.fullmatch(text.removeprefix("-").removeprefix("+")))


def read_moment(given: Any, now_us: int, allowed: str = MOMENT_FORMS) -> int:
    """Return a time in microseconds since 1970. Raise ValueError, with the allowed forms, if it is invalid."""
    match given:
        case datetime():
            if given.tzinfo is None:
                raise ValueError(f"{given!r} has no time zone: datetime.now(UTC) has one, and so has .astimezone()")
            return (given - _EPOCH) // _MICROSECOND
        case timedelta():
            return _checked(now_us + given // _MICROSECOND, given)
        case int() | float() if not isinstance(given, bool) and math.isfinite(given):
            return _checked(round(given * 1_000_000), given)
        case str() if is_relative(given):
            distance_us = read_duration(given.lstrip("+-"))
            return _checked(now_us - distance_us if given.startswith("-") else now_us + distance_us, given)
        case str() if _SECONDS.fullmatch(given.removeprefix("@")):
            return _checked(round(float(given.removeprefix("@")) * 1_000_000), given)
        case str():
            try:
                moment = datetime.fromisoformat(given)
            except ValueError:
                raise ValueError(f"{given!r}: it must be {allowed}") from None
            return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    raise ValueError(f"{given!r}: it must be {allowed}")


def read_place(given: Any, now_us: int) -> Place:
    """Return a position in a log; an integer is an offset. Raise ValueError, with the allowed forms, otherwise."""
    if isinstance(given, str) and _OFFSET.fullmatch(given):
        given = int(given)
    match given:
        case "earliest" | "latest":
            return str(given)
        case int() if not isinstance(given, bool) and 0 <= given <= _OFFSET_MAX:
            return given
        case int():
            raise ValueError(f"{given!r}: it must be {PLACE_FORMS}")
        case str() if _SECONDS.fullmatch(given):
            raise ValueError(f"{given!r}: it must be {PLACE_FORMS}")
    time_us = read_moment(given, now_us, PLACE_FORMS)
    if time_us > now_us and (isinstance(given, timedelta) or (isinstance(given, str) and is_relative(given))):
        raise ValueError(f"{given!r}: it is in the future, use a minus for the past, such as -5m")
    return _datetime(time_us)


def read_delay(text: str) -> float | datetime:
    """Return seconds, or the time at which a delay ends; a number is seconds. Raise ValueError if it is neither."""
    if text.startswith("-"):
        raise ValueError(f"{text!r}: it must be {DELAY_FORMS}")
    if _SECONDS.fullmatch(text):
        return float(text)
    if is_relative(text):
        return read_duration(text.removeprefix("+")) / 1e6
    return _datetime(read_moment(text, 0, DELAY_FORMS))


def _datetime(time_us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=time_us)


def _checked(time_us: int, given: object) -> int:
    """Return the time if it is in the years 1 to 9999, so that it can be formatted."""
    if not _TIME_US_MIN <= time_us < _TIME_US_MAX:
        raise ValueError(f"{given!r} is not in the years 1 to 9999: give seconds since 1970, not milliseconds")
    return time_us


def check_seconds(name: str, value: object) -> None:
    """Raise ValueError unless a value is a number. True is not a second."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ValueError(f"invalid {name} {value!r}: it must be a number of seconds")


def iso(time_us: int, timespec: str = "auto") -> str:
    """Return a time in ISO 8601. Raise OverflowError outside the years 1 to 9999, which a producer may send."""
    return _datetime(time_us).isoformat(timespec=timespec).replace("+00:00", "Z")


def iso_or_none(time_us: int, timespec: str = "auto") -> str | None:
    try:
        return iso(time_us, timespec)
    except OverflowError:
        return None


def elapsed(duration_us: int) -> str:
    """Return a duration like nats-server: 1d2h3m4s, without leading zero units."""
    seconds = max(0, duration_us) // 1_000_000
    parts = [(seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s")]
    while len(parts) > 1 and not parts[0][0]:
        del parts[0]
    return "".join(f"{number}{unit}" for number, unit in parts)
