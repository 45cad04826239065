"""History: all stored messages that match a pattern, merged by append time."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from penstock.broker.cursor import Cursor
from penstock.broker.partition import Partition
from penstock.broker.topic import selects
from penstock.model.run import Run

if TYPE_CHECKING:
    from penstock.broker.broker import Broker


class History:
    """It begins with the first message that is still there, and ends with the last one as of now."""

    def __init__(self, broker: Broker, pattern: bytes) -> None:
        self._broker = broker
        self._pattern = pattern
        self._is_restricted = False
        self._cursors: dict[Partition, Cursor] = {}
        self._find()
        # Cursors that have more to read: when their next batch was appended, and where it is.
        self._next: list[tuple[int, int, int, Cursor]] | None = None

    async def seek_message(self, topic_id: int, number: int, offset: int) -> None:
        """Read only the message there, if there is one."""
        cursor = self._cursor(topic_id, number)
        if cursor is not None and offset >= cursor.partition.start:
            cursor.offset, cursor.end = offset, offset + 1
            found = await cursor.read()
            if found is not None and found.run.values:
                self._restrict([cursor])
                return
        self._restrict([])

    async def seek_sequence(self, topic_id: int, number: int, offset: int) -> None:
        """Begin with the message there, or the next one that its partition still has, and go on with everything that
        `read` returns after it. Read nothing if this sequence was never assigned."""
        home = self._cursor(topic_id, number)
        appended = None
        if home is not None and offset <= home.partition.served:
            # Right behind its last message, the partition adds nothing yet, and others what they stored since.
            home.offset = min(offset, home.partition.served - 1)
            appended = await home.append_time()
            home.offset = offset
        if appended is None:
            self._restrict([])
            return
        for partition, cursor in self._cursors.items():
            if cursor is not home:
                # Batches of the same time are read in the order of their partitions.
                await cursor.seek_time(appended + (partition.place < (topic_id, number)))

    async def seek_time(self, time_us: int) -> None:
        for cursor in self._cursors.values():
            await cursor.seek_time(time_us)

    async def seek_last(self) -> None:
        """Read only the message that was appended last."""
        last: tuple[int, Cursor] | None = None
        for partition, cursor in self._cursors.items():
            cursor.offset = partition.served - 1
            appended = await cursor.append_time()
            if appended is not None and (last is None or appended >= last[0]):
                last = (appended, cursor)
        self._restrict([] if last is None else [last[1]])

    async def read(self, count: int) -> tuple[Partition, Run] | None:
        """Return the next messages, at most `count` and all of one partition; None at the end, as of now."""
        if not self._next:
            self._find()
            self._next = [entry for cursor in self._cursors.values() if (entry := await _entry(cursor))]
            heapify(self._next)
        while self._next:
            *_, cursor = heappop(self._next)
            found = await cursor.read()
            if found is None:
                continue
            part = found.first(count)
            self._broker.figures.expired += len(part.expired)
            cursor.offset = part.following
            if (entry := await _entry(cursor)) is not None:
                heappush(self._next, entry)
            if part.run.values:
                return cursor.partition, part.run
        return None

    def _find(self) -> None:
        """Topics may have been made since the last time."""
        if self._is_restricted:
            return
        for topic in self._broker.topics:
            if selects(self._pattern, topic.name) and not topic.is_internal:
                for partition in topic.partitions:
                    if partition not in self._cursors:
                        self._cursors[partition] = partition.cursor(partition.start, pattern=self._pattern)

    def _cursor(self, topic_id: int, number: int) -> Cursor | None:
        return next((cursor for each, cursor in self._cursors.items() if each.place == (topic_id, number)), None)

    def _restrict(self, cursors: list[Cursor]) -> None:
        self._is_restricted = True
        self._cursors = {cursor.partition: cursor for cursor in cursors}


async def _entry(cursor: Cursor) -> tuple[int, int, int, Cursor] | None:
    appended = None if cursor.end is not None and cursor.offset >= cursor.end else await cursor.append_time()
    return None if appended is None else (appended, *cursor.partition.place, cursor)
