"""The messages of a subscription that have arrived and were not read, with the notices of a refresh between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from penstock.client.message import Delivery, Message

# Messages created at once: few enough that they are used before the garbage collector looks at them.
CREATED_MAX: Final = 500


class RefreshNotice:
    """RESET or READY of a topic. The broker expects a confirmation with the same number."""

    __slots__ = ("number", "topic", "word")

    def __init__(self, word: str, number: int, topic: str) -> None:
        self.word = word
        self.number = number
        self.topic = topic


class Unread:
    """A queue of deliveries and notices.

    `Message` objects are created when they are taken: the garbage collector would visit a hundred thousand waiting
    objects again and again, for 1 µs each.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._messages: deque[Message] = deque()
        self._deliveries: deque[Delivery | RefreshNotice] = deque()
        # Messages of the first delivery that were created, and messages of all deliveries that were not.
        self._used = 0
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._messages) + self._waiting

    def __iter__(self) -> Iterator[Message]:
        """Yield all messages without taking them."""
        with self._lock:
            messages, deliveries, used = list(self._messages), list(self._deliveries), self._used
        yield from messages
        for number, delivery in enumerate(deliveries):
            if isinstance(delivery, Delivery):
                yield from delivery.at(0 if number else used)

    def add(self, delivery: Delivery) -> None:
        with self._lock:
            self._deliveries.append(delivery)
            self._waiting += len(delivery.values)

    def add_notice(self, notice: RefreshNotice) -> None:
        with self._lock:
            self._deliveries.append(notice)

    def notice(self) -> RefreshNotice | None:
        """Return the notice that is due, if all messages before it were taken. It blocks the queue until `remove`."""
        with self._lock:
            if self._messages or not self._deliveries:
                return None
            first = self._deliveries[0]
            return first if isinstance(first, RefreshNotice) else None

    def remove(self, matches: Callable[[RefreshNotice], bool]) -> None:
        """Remove the notices that match."""
        with self._lock:
            kept = [each for each in self._deliveries if not (isinstance(each, RefreshNotice) and matches(each))]
            self._deliveries = deque(kept)

    def take(self) -> Message | None:
        """Take the next message. `deque.popleft` is atomic, so the lock is needed only when the deque is empty."""
        while True:
            try:
                return self._messages.popleft()
            except IndexError:
                if not self._create():
                    return None

    def take_many(self, count_max: int) -> list[Message]:
        """Take up to `count_max` messages of one delivery."""
        taken: list[Message] = []
        try:
            while len(taken) < count_max:
                taken.append(self._messages.popleft())
        except IndexError:
            pass
        if not taken:
            with self._lock:
                taken = self._open(count_max)
        return taken

    def clear(self, kept: RefreshNotice | None = None) -> None:
        """Remove everything except `kept`, which still blocks the queue. The caller holds the lock."""
        self._messages.clear()
        self._deliveries.clear()
        self._used = self._waiting = 0
        if kept is not None:
            self._deliveries.append(kept)

    def _create(self) -> bool:
        """Create the next messages. Return whether there are any."""
        with self._lock:
            if not self._messages:
                self._messages.extend(self._open(CREATED_MAX))
            return bool(self._messages)

    def _open(self, count_max: int) -> list[Message]:
        """Create messages of the first delivery. The caller holds the lock."""
        if not self._deliveries:
            return []
        delivery = self._deliveries[0]
        if isinstance(delivery, RefreshNotice):
            return []
        created = delivery.at(self._used, count_max)
        self._waiting -= len(created)
        self._used += len(created)
        if self._used == len(delivery.values):
            self._deliveries.popleft()
            self._used = 0
        return created
