"""Times as people and other brokers write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def iso(time_us: int, timespec: str = "auto") -> str:
    """Raises OverflowError if it is not of the years 1 to 9999: a producer may say what it likes."""
    return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec=timespec).replace("+00:00", "Z")


def iso_or_none(time_us: int, timespec: str = "auto") -> str | None:
    try:
        return iso(time_us, timespec)
    except OverflowError:
        return None


def elapsed(duration_us: int) -> str:
    """As nats-server writes it: 1d2h3m4s, without what is none at the front."""
    seconds = max(0, duration_us) // 1_000_000
    parts = [(seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s")]
    while len(parts) > 1 and not parts[0][0]:
        del parts[0]
    return "".join(f"{number}{unit}" for number, unit in parts)
