"""The messages of a consumer that wait for a handler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from penstock.app.consumer import Consumer
from penstock.client.message import Message

# A consumer of a shared group takes this many messages at once, so that their acknowledgements share a frame. Not more,
# because other members of the group may be idle.
_TAKE: Final = 32


class HandlerQueue:
    """Messages that are started in order, `width` at a time: all of a shared group, or those of one partition."""

    __slots__ = ("busy", "waiting", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.busy = 0
        self.waiting: deque[Message] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether another handler could start. Then no message waits."""
        return self.busy < self.width


class HandlerQueues:
    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._is_shared = consumer.mode == "shared"
        self._queues: dict[tuple[str, int] | None, HandlerQueue] = {}
        self._waiting = 0
        # Partitioned: messages of earlier assignments are stale.
        self._generation = 0

    def room(self) -> int:
        """Return how many messages may be taken now."""
        consumer = self._consumer
        if not self._is_shared:
            return consumer.buffer - self._waiting
        is_idle = None not in self._queues or self._queues[None].is_idle
        return max(min(consumer.buffer, _TAKE), consumer.batch or 1) if is_idle else 0

    def put(self, message: Message) -> HandlerQueue:
        """Add a message, and return its queue."""
        place = None if self._is_shared else (message.topic, message.partition)
        if place not in self._queues:
            self._queues[place] = HandlerQueue(self._consumer.concurrency if self._is_shared else 1)
        found = self._queues[place]
        found.waiting.append(message)
        self._waiting += 1
        return found

    def take(self, queue: HandlerQueue) -> list[Message]:
        """Take the messages for one call of the handler."""
        count = min(self._consumer.batch or 1, len(queue.waiting))
        self._waiting -= count
        return [queue.waiting.popleft() for _ in range(count)]

    def drain(self) -> Iterator[Message]:
        """Take all messages."""
        for queue in self._queues.values():
            while queue.waiting:
                yield queue.waiting.popleft()

    def is_stale(self, messages: Sequence[Message]) -> bool:
        """Return whether the partitions were assigned again since the messages were delivered."""
        return messages[0].generation < self._generation

    def forget_before(self, generation: int) -> None:
        """Discard the messages of earlier assignments. The new owners of the partitions receive them again."""
        if generation <= self._generation:
            return
        self._generation = generation
        for queue in self._queues.values():
            self._waiting -= len(queue.waiting)
            queue.waiting = deque(message for message in queue.waiting if not self.is_stale([message]))
            self._waiting += len(queue.waiting)
