"""Retry policies for messages whose handler has failed. No I/O: attempts in, seconds out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from penstock.times import check_seconds

T = TypeVar("T")

# More doublings would exceed the range of a float.
_DOUBLINGS_MAX: Final = 1000


class FailureAction(StrEnum):
    """The decision after a failure."""

    RETRY = "retry"  # try the message again later
    SKIP = "skip"  # acknowledge the message, and continue with the next one
    PAUSE = "pause"  # stop until the consumer is resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A retry policy: use `exponential`, `forever`, `skip` or `pause`. Delays are in seconds; attempts start at 1."""

    action: FailureAction
    initial: float = 1.0
    maximum: float = 30.0
    doublings: int = 10
    then: float = 30.0
    attempts: int | None = None
    is_endless: bool = False

    def __post_init__(self) -> None:
        for name in ("initial", "maximum", "then"):
            value = getattr(self, name)
            check_seconds(name, value)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"invalid {name} {value!r}: it must be 0 or more seconds")
        if not 0 <= self.doublings <= _DOUBLINGS_MAX:
            raise ValueError(f"invalid doublings {self.doublings!r}: it must be 0 to {_DOUBLINGS_MAX}")
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"invalid attempts {self.attempts!r}: it must be at least 1, or None for no limit")

    @classmethod
    def exponential(
        cls,
        initial: float = 1.0,
        maximum: float = 30.0,
        doublings: int = 10,
        then: float = 30.0,
        attempts: int | None = None,
    ) -> Retry:
        """Retry after `initial` seconds, doubling the delay up to `maximum`. After `doublings` attempts, retry every
        `then` seconds. Give up after `attempts`.

        Without `attempts`, a shared group dead-letters a message after the topic's `deliveries_max`, and a partitioned
        group retries forever.
        """
        return cls(
            action=FailureAction.RETRY,
            initial=initial,
            maximum=maximum,
            doublings=doublings,
            then=then,
            attempts=attempts,
        )

    @classmethod
    def forever(cls, initial: float = 1.0, maximum: float = 30.0) -> Retry:
        """Retry after `initial` seconds, doubling the delay up to `maximum`, until the message succeeds. It is never
        dead-lettered, regardless of the topic's `deliveries_max`.
        """
        return cls(
            action=FailureAction.RETRY,
            initial=initial,
            maximum=maximum,
            doublings=_DOUBLINGS_MAX,
            then=maximum,
            is_endless=True,
        )

    @classmethod
    def skip(cls) -> Retry:
        """Acknowledge the message and continue with the next one. Only `on_error` is called."""
        return cls(action=FailureAction.SKIP, attempts=1)

    @classmethod
    def pause(cls) -> Retry:
        """Keep the message and take no others until the consumer is resumed. Then try it again."""
        return cls(action=FailureAction.PAUSE, attempts=1)

    @property
    def deliveries_max(self) -> int | None:
        """The deliveries after which a shared group dead-letters a message; 0: never, None: the topic's policy."""
        if self.is_endless:
            return 0
        return self.attempts if self.action is FailureAction.RETRY else None

    def delay_s(self, attempt: int) -> float | None:
        """Return the delay after attempt number `attempt` has failed; None if it was the last attempt."""
        if self.attempts is not None and attempt >= self.attempts:
            return None
        if attempt > self.doublings:
            return self.then
        return min(self.initial * 2.0 ** (attempt - 1), self.maximum)


def halves(batch: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return two parts in order, neither of them empty. Repeated halving isolates a message that fails."""
    assert len(batch) > 1, "a batch of one cannot be halved"
    middle = len(batch) // 2
    return batch[:middle], batch[middle:]
