"""Limits of one user over all of its connections, and what it uses of them.

Rates are token buckets with debt: what a user sends or receives is accepted, and the connection then waits until its
share is paid for. So a client that sends too fast is slowed down by back-pressure. Only if its other connections have
piled up debt for longer than `DEBT_S_MAX`, more is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from penstock.errors import QuotaExceeded

# How much a user may take at once, and how far its connections may get ahead before more is refused.
BURST_S: Final = 1.0
DEBT_S_MAX: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """None: no limit."""

    connections: int | None = None
    subscriptions: int | None = None
    messages_in_s: int | None = None
    bytes_in_s: int | None = None
    messages_out_s: int | None = None
    bytes_out_s: int | None = None

    def __or__(self, other: Quotas) -> Quotas:
        """Return these, and those of `other` where these have none."""
        return Quotas(**{name: other.get(name) if self.get(name) is None else self.get(name) for name in NAMES})

    def __and__(self, other: Quotas) -> Quotas:
        """Return the smaller of each."""
        found = {name: [each for each in (self.get(name), other.get(name)) if each is not None] for name in NAMES}
        return Quotas(**{name: min(values, default=None) for name, values in found.items()})

    def get(self, name: str) -> int | None:
        value: int | None = getattr(self, name)
        return value

    @property
    def has_any(self) -> bool:
        return any(self.get(name) is not None for name in NAMES)


NAMES: Final = tuple(each.name for each in fields(Quotas))
RATES: Final = ("messages_in_s", "bytes_in_s", "messages_out_s", "bytes_out_s")
NO_QUOTAS: Final = Quotas()


class Bucket:
    """Tokens that come at a rate, up to a burst; fewer than none is debt."""

    __slots__ = ("_at_us", "_level", "rate")

    def __init__(self, rate: int, now_us: int) -> None:
        self.rate = rate
        self._level = rate * BURST_S
        self._at_us = now_us

    def take(self, count: int, now_us: int) -> float:
        """Take tokens. Return how many seconds it takes to pay for them."""
        return max(0.0, -self._fill(now_us, count) / self.rate)

    def debt_s(self, now_us: int) -> float:
        return max(0.0, -self._fill(now_us) / self.rate)

    def used(self, now_us: int) -> int:
        """Return how many tokens were taken in about the last second."""
        return max(0, round(self.rate * BURST_S - self._fill(now_us)))

    def _fill(self, now_us: int, taken: int = 0) -> float:
        came = (now_us - self._at_us) * self.rate / 1e6
        self._level, self._at_us = min(self.rate * BURST_S, self._level + came) - taken, now_us
        return self._level


class Meter:
    """What one user uses. It outlives changes of the user."""

    def __init__(self, user: str, quotas: Quotas, now_us: int) -> None:
        self._user = user
        self._counts = dict.fromkeys(("connections", "subscriptions"), 0)
        self.buckets: dict[str, Bucket] = {}
        self.quotas = NO_QUOTAS
        self.change(quotas, now_us)

    def change(self, quotas: Quotas, now_us: int) -> None:
        for name in RATES:
            rate, bucket = quotas.get(name), self.buckets.get(name)
            if rate is None:
                self.buckets.pop(name, None)
            elif bucket is None or bucket.rate != rate:
                self.buckets[name] = Bucket(rate, now_us)
        self.quotas = quotas

    def begin(self, name: str) -> None:
        """Count one more connection or subscription. Raise QuotaExceeded if there are too many."""
        self.check(name, self._counts[name])
        self._counts[name] += 1

    def end(self, name: str) -> None:
        self._counts[name] -= 1

    def check(self, name: str, used: int, more: int = 1) -> None:
        """Raise QuotaExceeded if `more` than is used does not fit."""
        limit = self.quotas.get(name)
        if limit is not None and used + more > limit:
            raise self._exceeded(name, f"{used} of {limit} are in use")

    def check_rates(self, now_us: int) -> None:
        """Raise QuotaExceeded if the connections of the user have sent far too much."""
        for name in ("messages_in_s", "bytes_in_s"):
            bucket = self.buckets.get(name)
            if bucket is not None and bucket.debt_s(now_us) > DEBT_S_MAX:
                raise self._exceeded(name, f"all connections together send more than {bucket.rate} per second")

    @property
    def limits_out(self) -> bool:
        return not self.buckets.keys().isdisjoint(("messages_out_s", "bytes_out_s"))

    def took(self, direction: str, messages: int, size: int, now_us: int) -> float:
        """Count messages, `in` or `out`. Return for how many seconds their connection must wait."""
        wait_s = 0.0
        for name, count in ((f"messages_{direction}_s", messages), (f"bytes_{direction}_s", size)):
            bucket = self.buckets.get(name)
            if bucket is not None:
                wait_s = max(wait_s, bucket.take(count, now_us))
        return wait_s

    def usage(self, now_us: int) -> dict[str, int]:
        return self._counts | {name: bucket.used(now_us) for name, bucket in self.buckets.items()}

    def _exceeded(self, name: str, how: str) -> QuotaExceeded:
        return QuotaExceeded(f"quota {name} of user {self._user}: {how}")
