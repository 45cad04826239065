"""What becomes of a message whose handler failed. Nothing here waits: attempts in, seconds out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

T = TypeVar("T")

# From any first delay that makes sense, so many lead to any last one; and more would leave the range of a float.
_DOUBLINGS_MAX: Final = 1000


class Failed(StrEnum):
    """What follows a failure."""

    RETRY = "retry"  # the same message again, later
    SKIP = "skip"  # the next message: this one counts as done
    PAUSE = "pause"  # nothing, until somebody who has looked says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Made by `exponential`, `forever`, `skip` or `pause`. Delays are seconds; attempts are counted from 1."""

    failed: Failed
    initial: float = 1.0
    maximum: float = 30.0
    doublings: int = 10
    then: float = 30.0
    attempts: int | None = None
    is_endless: bool = False

    def __post_init__(self) -> None:
        for name in ("initial", "maximum", "then"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value!r}, it must be a number of seconds, 0 or more")
        if not 0 <= self.doublings <= _DOUBLINGS_MAX:
            raise ValueError(f"doublings is {self.doublings!r}, it must be from 0 to {_DOUBLINGS_MAX}")
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts!r}, it must be at least 1, or None: no bound")

    @classmethod
    def exponential(
        cls,
        initial: float = 1.0,
        maximum: float = 30.0,
        doublings: int = 10,
        then: float = 30.0,
        attempts: int | None = None,
    ) -> Retry:
        """Again after `initial`, then each time after twice as long, up to `maximum`; when that was done for
        `doublings` attempts, every `then`, until there were so many `attempts`.

        Without `attempts`, a shared group dead-letters a message after the topic's `deliveries_max`, and a partitioned
        group retries forever.
        """
        return cls(
            failed=Failed.RETRY, initial=initial, maximum=maximum, doublings=doublings, then=then, attempts=attempts
        )

    @classmethod
    def forever(cls, initial: float = 1.0, maximum: float = 30.0) -> Retry:
        """Again after `initial`, then each time after twice as long, up to `maximum`, until it succeeds, whatever the
        topic's `deliveries_max`. It never becomes a dead letter.
        """
        return cls(
            failed=Failed.RETRY,
            initial=initial,
            maximum=maximum,
            doublings=_DOUBLINGS_MAX,
            then=maximum,
            is_endless=True,
        )

    @classmethod
    def skip(cls) -> Retry:
        """Go on with the next message; `on_error` is all that hears of this one."""
        return cls(failed=Failed.SKIP, attempts=1)

    @classmethod
    def pause(cls) -> Retry:
        """Keep the message, and take no others, until the consumer is resumed: then it is tried again."""
        return cls(failed=Failed.PAUSE, attempts=1)

    @property
    def deliveries_max(self) -> int | None:
        """For a shared group: after how many deliveries it dead-letters a message; 0: never, None: the topic says."""
        if self.is_endless:
            return 0
        return self.attempts if self.failed is Failed.RETRY else None

    def delay_s(self, attempt: int) -> float | None:
        """How long to wait when attempt number `attempt` has failed; None: it was the last."""
        if self.attempts is not None and attempt >= self.attempts:
            return None
        if attempt > self.doublings:
            return self.then
        return min(self.initial * 2.0 ** (attempt - 1), self.maximum)


def halves(batch: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """In their order, neither of them empty: halved as long as it fails, a batch leaves a bad message alone."""
    assert len(batch) > 1, "there is nothing to halve"
    middle = len(batch) // 2
    return batch[:middle], batch[middle:]
