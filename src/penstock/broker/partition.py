"""A partition: messages go into its log and, when they are committed, to those who wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.batch import Batch
from penstock.run import Run, open_batch
from penstock.storage.log import Done, Log, State
from penstock.storage.policy import Policy


class Reader(Protocol):
    """Who reads a log from memory or, without holding up the loop, from the disk."""

    async def read(self, log: Log, offset: int, bytes_max: int) -> list[Batch]: ...


class Partition:
    """The log of a partition, and `served`: all below it has gone to whoever was waiting.

    A reader that is not behind has no position of its own: it has seen all below `served`, and gets what comes next.
    """

    __slots__ = (
        "_deliver",
        "_reader",
        "_unserved",
        "groups",
        "keeps",
        "log",
        "name",
        "number",
        "served",
        "since",
        "topic_id",
    )

    def __init__(
        self,
        topic_id: int,
        number: int,
        name: bytes,
        log: Log,
        reader: Reader,
        deliver: Callable[[Partition, Run], None],
        unserved: dict[Partition, None],
    ) -> None:
        """`name` is the topic's; `deliver` gets every run once, in order; meanwhile this is one of `unserved`."""
        self.topic_id = topic_id
        self.keeps = True
        self.number = number
        self.name = name
        self.log = log
        self.served = log.committed
        # Who is told of each commit, and reads for itself.
        self.groups: dict[Callable[[], None], None] = {}
        self._reader = reader
        self._deliver = deliver
        self._unserved = unserved
        # Where readers begin that came while messages were on their way: those were not for them.
        self.since: dict[object, int] = {}
        log.subject = name
        log.on_commit = self._on_commit
        log.on_reject = self._on_reject

    @property
    def policy(self) -> Policy:
        return self.log.policy

    @property
    def start(self) -> int:
        return self.log.start

    @property
    def end(self) -> int:
        return self.log.end

    def append(self, run: Run, done: Done | None) -> int:
        self._unserved[self] = None
        return self.log.gather(run, done)

    def append_batch(self, batch: Batch, source: int, position: int, done: Done | None) -> int:
        self._unserved[self] = None
        return self.log.append(batch, source=source, position=position, done=done)

    async def read(self, offset: int) -> tuple[Run, int] | None:
        """The messages of the next batch from `offset` on, and where to read on; None at `served`.

        What retention dropped is passed over. Nothing is awaited where None is the answer.
        """
        offset = max(offset, self.log.start)
        if offset >= self.served or self.log.state is State.CLOSED:
            return None
        batches = await self._reader.read(self.log, offset, 1)
        return (open_batch(batches[0], self.name, offset), batches[0].end) if batches else None

    def close(self) -> None:
        """The topic is deleted: whoever is behind has nothing more to read."""
        self.log.on_commit = self.log.on_reject = None
        self.served = 0
        self._unserved.pop(self, None)

    def _on_commit(self, fresh: list[Batch | Run]) -> None:
        for item in fresh:
            self._deliver(self, item if isinstance(item, Run) else open_batch(item, self.name))
            self.served = item.end
        self.served = self.log.committed
        if self.served == self.log.end:
            self._unserved.pop(self, None)
            self.since.clear()
        for wake in self.groups:
            wake()

    def _on_reject(self, offset: int) -> None:
        for reader, begin in self.since.items():
            self.since[reader] = min(begin, offset)


class LivePartition:
    """What is published here goes to those who wait for it now, and nowhere else: inboxes."""

    __slots__ = ("_deliver", "keeps", "name", "served", "since", "topic_id")

    number = 0
    start = 0

    def __init__(self, name: bytes, deliver: Callable[[LivePartition, Run], None]) -> None:
        self.topic_id = -1
        self.keeps = False
        self.since: dict[object, int] = {}
        self.name = name
        self.served = 0
        self._deliver = deliver

    @property
    def end(self) -> int:
        return self.served

    def append(self, run: Run, done: Done | None) -> int:
        offset = run.base_offset = self.served
        run.offsets = None
        self._deliver(self, run)
        self.served = offset + len(run)
        if done is not None:
            done(offset, None)
        return offset

    async def read(self, offset: int) -> tuple[Run, int] | None:
        """Nothing is kept."""
        return None
