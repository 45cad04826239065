"""How fast a reader may be served, and what becomes of it when it falls behind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, assert_never

_SECOND_US: Final = 1_000_000


class Overflow(StrEnum):
    """How a reader that is more than `buffer` offsets behind continues."""

    BLOCK = "block"  # it waits its turn: it reads everything, however late; nothing is lost
    DROP = "drop"  # it reads the oldest `buffer`; the newest beyond them are skipped
    SHED = "shed"  # it reads the newest `buffer`; the oldest before them are skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    rate: float = 0  # messages each second; 0: as fast as it goes
    burst: int = 100  # messages at once, after a pause
    buffer: int = 1000
    overflow: Overflow = Overflow.BLOCK

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"rate is {self.rate}, it must be at least 0 and finite")
        for name in ("burst", "buffer"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")


class Window(NamedTuple):
    """The offsets to read: [begin, until), then from `jump` on."""

    begin: int
    until: int
    jump: int
    skipped: int  # offsets that are not read, before `begin` and from `until` to `jump`


def window(flow: Flow, position: int, end: int) -> Window:
    """Return what a reader at `position` reads of a log that is committed up to `end`.

    The caller keeps to it until it is read, and only then asks again, at `jump`: a reader that drops would else
    move its buffer along with its position, and skip nothing.
    """
    assert position <= end
    match flow.overflow:
        case Overflow.BLOCK:
            return Window(position, end, end, 0)
        case Overflow.DROP:
            until = min(position + flow.buffer, end)
            return Window(position, until, end, end - until)
        case Overflow.SHED:
            begin = max(position, end - flow.buffer)
            return Window(begin, end, end, begin - position)
        case _:
            assert_never(flow.overflow)


class Backlog:
    """How a reader of one log that is too far behind keeps to its buffer: what it skips, and up to where it reads."""

    __slots__ = ("_jump", "until")

    def __init__(self) -> None:
        # With `drop`: what is read before the rest is skipped; None: no end.
        self.until: int | None = None
        self._jump = 0

    def begin(self, flow: Flow, position: int, end: int) -> int:
        """Return where a reader at `position` continues in a log that is committed up to `end`."""
        if self.until is not None:
            if position < self.until:
                return position
            self.until = None
            position = max(position, self._jump)
        if flow.overflow is Overflow.BLOCK or end - position <= flow.buffer:
            return position
        found = window(flow, position, end)
        if found.until < found.jump:
            self.until, self._jump = found.until, found.jump
        return found.begin


class TokenBucket:
    """In any time t it grants at most `burst` + `rate` · t tokens, and no fewer to one who always asks.

    It counts in integers, in parts of a token so small that a microsecond brings a whole number of them: nothing is
    rounded, so nothing drifts.
    """

    __slots__ = ("_each_us", "_token", "_full", "_level", "_at_us")

    def __init__(self, rate: float, burst: int) -> None:
        """A full bucket. `rate` is in tokens each second; 0 is no limit."""
        assert rate >= 0
        assert burst >= 1
        self._each_us, denominator = rate.as_integer_ratio()
        self._token = denominator * _SECOND_US
        self._full = burst * self._token
        self._level = self._full
        self._at_us = 0

    def take(self, wanted: int, now_us: int) -> int:
        """How many of the wanted tokens are granted now."""
        assert wanted >= 0
        if not self._each_us:
            return wanted
        self._level = self._level_at(now_us)
        self._at_us = max(self._at_us, now_us)
        granted = min(wanted, self._level // self._token)
        self._level -= granted * self._token
        return granted

    def refund(self, count: int) -> None:
        """So many of the granted tokens were not used. What does not fit is lost, as if it had never been asked for."""
        assert count >= 0
        self._level += count * self._token

    def tokens(self, now_us: int) -> float:
        """Infinite if there is no limit."""
        return self._level_at(now_us) / self._token if self._each_us else math.inf

    def ready_us(self, now_us: int) -> int:
        """From when on there is a whole token, if nobody takes any: `now_us` or later."""
        missing = self._token - self._level_at(now_us)
        if missing <= 0:
            return now_us
        return max(now_us, self._at_us) + -(-missing // self._each_us)

    def _level_at(self, now_us: int) -> int:
        return min(self._full, self._level + max(0, now_us - self._at_us) * self._each_us)
