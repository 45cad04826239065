"""What was published long ago: a reader of everything that matches a pattern, merged by the time it was appended."""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from penstock.broker.partition import Partition
from penstock.broker.subscription import select_matching
from penstock.run import Run
from penstock.subject import meets

if TYPE_CHECKING:
    from penstock.broker.broker import Broker


class History:
    """It begins with the first message that is still there, and ends with the last one as of now."""

    def __init__(self, broker: Broker, pattern: bytes) -> None:
        self._broker = broker
        self._pattern = pattern
        self._is_restricted = False
        self._offsets: dict[Partition, int] = {}
        self._find()
        # The next batch of each partition that has one: when it was appended, and where to find it.
        self._next: list[tuple[int, int, int, Partition]] | None = None

    async def seek_message(self, topic_id: int, number: int, offset: int) -> None:
        """Just the message there; nothing, if there is none."""
        partition = self._partition(topic_id, number)
        if partition is not None and offset >= partition.start:
            found = await partition.read(offset)
            if found is not None and found.run.values and found.run.offset(0) == offset:
                self._restrict({partition: offset})
                return
        self._restrict({})

    async def seek_sequence(self, topic_id: int, number: int, offset: int) -> None:
        """The message there, or the next one that its partition still has, and everything that `read` returns after
        it; nothing, if this sequence was never assigned."""
        home = self._partition(topic_id, number)
        appended = None
        if home is not None and offset <= home.served:
            # Right behind its last message, the partition adds nothing yet, and others what they stored since.
            appended = await self._append_time(home, min(offset, home.served - 1))
        if appended is None:
            self._restrict({})
            return
        for partition in self._offsets:
            if partition is home:
                self._offsets[partition] = offset
            else:
                # Batches of the same time are read in the order of their partitions.
                precedes = (partition.topic_id, partition.number) < (topic_id, number)
                self._offsets[partition] = await self._offset_at(partition, appended + precedes)

    async def seek_time(self, time_us: int) -> None:
        for partition in self._offsets:
            self._offsets[partition] = await self._offset_at(partition, time_us)

    async def seek_last(self) -> None:
        """The message that was appended last."""
        last: tuple[int, Partition, int] | None = None
        for partition in self._offsets:
            appended = await self._append_time(partition, partition.served - 1)
            if appended is not None and (last is None or appended >= last[0]):
                last = (appended, partition, partition.served - 1)
        self._restrict({} if last is None else {last[1]: last[2]})

    async def read(self, count: int) -> tuple[Partition, Run] | None:
        """The next messages, at most so many and all of one partition; None at the end, as of now."""
        if not self._next:
            self._find()
            self._next = [entry for partition in self._offsets if (entry := await self._entry(partition))]
            heapify(self._next)
        while self._next:
            _, _, _, partition = heappop(self._next)
            found = await partition.read(self._offsets[partition])
            if found is None:
                continue
            run, following = found.run, found.following
            run = select_matching(run, self._pattern)
            if len(run) > count:
                following = run.offset(count)
                run = run.select(range(count))
            self._broker.figures.expired += len(select_matching(found.expired.below(following), self._pattern))
            self._offsets[partition] = following
            entry = await self._entry(partition)
            if entry is not None:
                heappush(self._next, entry)
            if run.values:
                return partition, run
        return None

    def _find(self) -> None:
        """Topics may have been made since the last time."""
        if self._is_restricted:
            return
        for topic in self._broker.topics:
            if meets(self._pattern, topic.name) and not topic.is_internal:
                for partition in topic.partitions:
                    self._offsets.setdefault(partition, partition.start)

    def _partition(self, topic_id: int, number: int) -> Partition | None:
        return next((each for each in self._offsets if (each.topic_id, each.number) == (topic_id, number)), None)

    async def _offset_at(self, partition: Partition, time_us: int) -> int:
        return await asyncio.get_running_loop().run_in_executor(None, partition.log.offset_at, time_us)

    def _restrict(self, offsets: dict[Partition, int]) -> None:
        self._is_restricted = True
        self._offsets = offsets

    async def _entry(self, partition: Partition) -> tuple[int, int, int, Partition] | None:
        appended = await self._append_time(partition, self._offsets[partition])
        return None if appended is None else (appended, partition.topic_id, partition.number, partition)

    async def _append_time(self, partition: Partition, offset: int) -> int | None:
        offset = max(offset, partition.start)
        if offset >= partition.served:
            return None
        batches = await self._broker.store.read(partition.log, offset, 1)
        return batches[0].append_time if batches else None
