"""Decisions of an application about messages (ack, nack, …), gathered until they are sent and stored.

Any thread may add a settlement. Those with the same verb, delay and partition share one frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from penstock.client.ledger import Ledger
from penstock.errors import NotOutstanding, PenstockError
from penstock.wire.binary import SETTLE_MAX, Settle, Verb

COMMIT: Final = int(Verb.COMMIT)


class Settlement(NamedTuple):
    """A decision about messages of one partition."""

    verb: int
    delay_us: int
    generation: int
    topic_id: int
    partition: int
    # Why they failed.
    reason: str = ""

    def frame(self, subscription: int, offsets: list[int]) -> Settle:
        verb, delay_us, generation, topic_id, partition, reason = self
        return Settle(subscription, verb, generation, delay_us, topic_id, partition, offsets, reason)


# A Settlement as a plain tuple, because one is made for every acknowledgement.
PlainSettlement = tuple[int, int, int, int, int, str]


class Settlements:
    def __init__(self, lock: AbstractContextManager[Any], wake: Callable[[], None]) -> None:
        """`wake` is called, with the lock held, when there is something to send."""
        self._lock = lock
        self._wake = wake
        # Why no more are accepted.
        self._closed: PenstockError | None = None
        # Not sent yet, and since which mark.
        self._waiting: dict[PlainSettlement, list[int]] = {}
        self._waiting_since = 0
        # Not stored yet, including those that were not sent.
        self._unstored = Ledger()
        # Since the last `check`: how many were too late, and the last error.
        self._late = 0
        self._failure: PenstockError | None = None

    def __bool__(self) -> bool:
        """Return whether some are not sent yet."""
        return bool(self._waiting)

    def add(self, about: PlainSettlement, offset: int) -> None:
        """Settle one message. Raise the reason if the subscription has ended."""
        with self._lock:
            offsets = self._waiting.get(about)
            if offsets is None:
                offsets = self._begin(about)
            offsets.append(offset)

    def take(self) -> Iterator[tuple[int, Settlement, list[int]]]:
        """Yield everything to send, with the mark since which it waits. `settled` or `repeat` must follow for each."""
        with self._lock:
            if not self._waiting:
                return
            waiting, since, self._waiting = self._waiting, self._waiting_since, {}
            parts = [
                (self._unstored.enter(since), Settlement(*about), offsets[at : at + SETTLE_MAX])
                # Extensions first: an extension after the acknowledgement of its message would be too late.
                for about, offsets in sorted(waiting.items(), key=lambda each: each[0][0] != Verb.EXTEND)
                for at in range(0, len(offsets), SETTLE_MAX)
            ]
            self._unstored.leave(since)
        for moment, about, offsets in parts:
            # The highest commit includes the others.
            yield moment, about, [max(offsets)] if about.verb == COMMIT else offsets

    def settled(self, since: int, late: int, error: PenstockError | None = None) -> None:
        """Record the broker's answer: how many messages were too late, or an error that concerns all of them."""
        with self._lock:
            self._unstored.leave(since)
            self._late += late
            self._failure = error or self._failure

    def repeat(self, since: int, about: Settlement, offsets: list[int]) -> None:
        """Send it again on the next connection, because the answer was lost; unless the subscription has ended."""
        with self._lock:
            if self._closed is not None:
                self._unstored.leave(since)
                return
            if self._waiting:
                self._unstored.leave(max(since, self._waiting_since))
                since = min(since, self._waiting_since)
            self._waiting_since = since
            self._waiting.setdefault((*about,), []).extend(offsets)

    def mark(self) -> int:
        """Return a mark for `is_done`."""
        with self._lock:
            return self._unstored.mark()

    def is_done(self, mark: int) -> bool:
        """Return whether everything before the mark is stored or refused."""
        with self._lock:
            return self._unstored.is_done(mark)

    def check(self) -> None:
        """Raise what went wrong since the last check."""
        with self._lock:
            late, failure = self._late, self._failure
            self._late, self._failure = 0, None
        if failure is not None:
            raise failure
        if late:
            count = "1 message" if late == 1 else f"{late} messages"
            raise NotOutstanding(f"too late for {count}: already settled, redelivered, or dead-lettered")

    def close(self, reason: PenstockError) -> None:
        """Discard what was not sent, and accept no more. The caller holds the lock."""
        self._closed = self._closed or reason
        if self._waiting:
            self._unstored.leave(self._waiting_since)
            self._waiting = {}

    def _begin(self, about: PlainSettlement) -> list[int]:
        if self._closed is not None:
            raise self._closed
        if not self._waiting:
            self._waiting_since = self._unstored.enter()
            self._wake()
        return self._waiting.setdefault(about, [])
