"""A partition: messages go into its log and, when they are committed, to the subscriptions and groups that read it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.broker.cursor import Cursor, ReadAhead
from penstock.broker.opened import Opened, is_large
from penstock.clock import Clock
from penstock.log.appender import LogState
from penstock.log.log import Log
from penstock.log.policy import OnDamage, Policy
from penstock.model.batch import Batch
from penstock.model.run import Run, batch_bytes
from penstock.outcome import Outcome


class Order(Protocol):
    """Decides when a partition is served."""

    def add(self, target: Partition, /) -> None:
        """Note that there is something to serve."""
        ...

    def take_back(self, target: Partition, /) -> None:
        """Note that messages beyond its end were taken back."""
        ...


class Budget(Protocol):
    """Counts the bytes that wait for the disk."""

    def charge(self, size: int) -> None:
        """Count more bytes. Raise Overloaded if there are too many."""
        ...

    def settled(self, size: int) -> None: ...


class Reader(Protocol):
    """Reads a log from memory or, without blocking the loop, from the disk."""

    async def read(self, log: Log, offset: int, bytes_max: int, on_damage: OnDamage | None = None) -> list[Batch]: ...


class Partition:
    """The log of a partition, and `served`: all messages below it were handed to their readers.

    A reader that is not behind has no position of its own: it has everything below `served`, and gets what comes next.
    """

    __slots__ = (
        "_deliver",
        "_fresh",
        "_order",
        "_pass_over",
        "_unserved",
        "clock",
        "cuts",
        "groups",
        "keeps",
        "log",
        "name",
        "number",
        "opened",
        "read_ahead",
        "received",
        "sent",
        "served",
        "since",
        "store",
        "topic_id",
    )

    def __init__(
        self,
        topic_id: int,
        number: int,
        name: bytes,
        log: Log,
        store: Reader,
        deliver: Callable[[Partition, Batch | Run], None],
        pass_over: Callable[[Partition], None],
        unserved: dict[Partition, None],
        opened: Opened,
        read_ahead: ReadAhead,
        order: Order,
        clock: Clock,
    ) -> None:
        """`name`: of the topic. `order` decides when committed messages are served. `deliver` gets every message once,
        in order; until then the partition is in `unserved`. `pass_over` is called instead if messages are not in
        memory, or too large: then readers read from `served` on.
        """
        self.topic_id = topic_id
        self.keeps = True
        self.number = number
        self.name = name
        self.log = log
        self.served = log.committed
        # Messages since the broker started: appended, and sent to connections.
        self.received = self.sent = 0
        # Called after each commit and each rejected write: groups, and readers that wait for more.
        self.groups: dict[Callable[[], None], None] = {}
        # For its cursors.
        self.clock = clock
        self.store = store
        self.opened = opened
        self.read_ahead = read_ahead
        self._deliver = deliver
        self._pass_over = pass_over
        self._unserved = unserved
        self._order = order
        # How often messages were taken back.
        self.cuts = 0
        # Committed runs and batches that are not served yet, in the form in which they were appended.
        self._fresh: deque[Batch | Run] = deque()
        # The first offset for readers that subscribed while earlier messages were not committed yet.
        self.since: dict[object, int] = {}
        log.attach(name, self._on_commit, self._on_reject)

    @property
    def policy(self) -> Policy:
        return self.log.policy

    @property
    def start(self) -> int:
        return self.log.start

    @property
    def end(self) -> int:
        return self.log.end

    @property
    def is_closed(self) -> bool:
        return self.log.state is LogState.CLOSED

    def append(self, run: Run, outcome: Outcome | None) -> int:
        self._unserved[self] = None
        count, offset = len(run), self.log.gather(run, outcome)
        self.received += count
        return offset

    def append_batch(self, batch: Batch, source: int, position: int, outcome: Outcome | None) -> int:
        self._unserved[self] = None
        offset = self.log.append(batch, source=source, position=position, outcome=outcome)
        self.received += batch.count
        return offset

    def append_at(self, batch: Batch, outcome: Outcome | None = None) -> bool:
        """Append a batch of a piped topic at the offset that it has at its origin. Return whether it is new."""
        self._unserved[self] = None
        return self.log.append_at(batch, outcome)

    def cursor(self, offset: int, *, pattern: bytes | None = None, end: int | None = None) -> Cursor:
        """Return a reader of what is stored here, from an offset on."""
        return Cursor(self, offset, pattern=pattern, end=end)

    @property
    def place(self) -> tuple[int, int]:
        return self.topic_id, self.number

    async def grown(self, offset: int) -> None:
        """Wait until there is a message at `offset`, or the topic is deleted."""
        while not self.has_grown(offset):
            woken = asyncio.Event()
            self.groups[woken.set] = None
            try:
                await woken.wait()
            finally:
                del self.groups[woken.set]

    def has_grown(self, offset: int) -> bool:
        """Return whether there is a message at `offset`, or the topic is deleted."""
        return self.served > offset or self.is_closed

    def close(self) -> None:
        """End the partition, because its topic is deleted: its readers have nothing more to read."""
        self.log.detach()
        self._fresh.clear()
        self.served = 0
        self._unserved.pop(self, None)
        self.opened.forget(self.place)
        for wake in list(self.groups):
            wake()

    @property
    def is_held(self) -> bool:
        """Return whether a transaction holds the log, so that it is not known when more will be available."""
        return self.log.is_held

    @property
    def available(self) -> int:
        """Up to where it may be served."""
        return 0 if self.is_closed else self.log.committed

    def waiting_subjects(self) -> Iterator[bytes]:
        """Yield the subjects of what is to be served, as far as they are known; some of them several times."""
        for item in self._fresh:
            yield from set(item.subjects) if isinstance(item, Run) else (self.name,)

    def serve(self, until: int) -> None:
        """Hand out the committed messages below `until`."""
        while self.served < until and self._fresh and self._fresh[0].base_offset < until:
            item = self._fresh[0]
            if item.end <= until or not isinstance(item, Run) or is_large(item):
                self._fresh.popleft()
                end = item.end
            else:
                end = until
            if item.base_offset > self.served:
                self._pass_over(self)
                self.served = item.base_offset
            if is_large(item):
                self._pass_over(self)
            elif isinstance(item, Run):
                self._deliver(self, item.window(self.served, end - self.served))
            else:
                self._deliver(self, item)
            self.served = end
        if until > self.served:
            self._pass_over(self)
            self.served = until
        if self.served == self.log.end:
            self._unserved.pop(self, None)
            self.since.clear()
        for wake in list(self.groups):
            wake()

    def tell(self, until: int) -> None:
        """Confirm the publishes below `until`."""
        self.log.confirm(until)

    def _on_commit(self, fresh: list[Batch | Run]) -> None:
        self._fresh.extend(fresh)
        self._order.add(self)

    def _on_reject(self, offset: int) -> None:
        for reader, begin in self.since.items():
            self.since[reader] = min(begin, offset)
        self.cuts += 1
        self._order.take_back(self)
        for wake in list(self.groups):
            wake()


class LivePartition:
    """Messages that are not stored (inboxes): they go to current subscribers only."""

    __slots__ = ("_deliver", "end", "keeps", "name", "received", "sent", "served", "since", "topic_id")

    number = 0
    start = 0
    is_closed = False

    def __init__(self, name: bytes, deliver: Callable[[LivePartition, Run], None]) -> None:
        self.topic_id = -1
        self.keeps = False
        self.since: dict[object, int] = {}
        self.name = name
        self.served = self.end = 0
        self.received = self.sent = 0
        self._deliver = deliver

    def append(self, run: Run, outcome: Outcome | None) -> int:
        offset = self._number(run)
        self._deliver(self, run)
        self.served = self.end
        if outcome is not None:
            outcome.settle()
        return offset

    def _number(self, run: Run) -> int:
        offset = run.base_offset = self.end
        run.offsets = None
        self.received += len(run)
        self.end += len(run)
        return offset


class LiveQueue(LivePartition):
    """Unstored messages of one connection that wait for what the connection published before."""

    __slots__ = ("_budget", "_total", "_waiting", "groups")

    cuts = 0
    is_held = False

    def __init__(self, total: LivePartition, budget: Budget) -> None:
        """`total`: the partition that counts its messages too."""
        super().__init__(total.name, total._deliver)
        self._total = total
        self._budget = budget
        self._waiting: deque[tuple[Run, Outcome | None]] = deque()
        # Called when some of it was served.
        self.groups: dict[Callable[[], None], None] = {}

    @property
    def available(self) -> int:
        """Up to where it may be served."""
        return self.end

    def waiting_subjects(self) -> Iterator[bytes]:
        for run, _ in self._waiting:
            yield from set(run.subjects)

    def append(self, run: Run, outcome: Outcome | None) -> int:
        size = batch_bytes(run)
        self._budget.charge(size)
        run.size = size
        offset = self._number(run)
        self._total.received += len(run)
        self._waiting.append((run, outcome))
        return offset

    def serve(self, until: int) -> None:
        """Hand out the waiting messages below `until`."""
        sent = self.sent
        try:
            while self._waiting and self.served < until:
                run, outcome = self._waiting[0]
                end = min(run.end, until)
                part = run.window(self.served, end - self.served)
                self.served = end
                if end == run.end:
                    self._waiting.popleft()
                    self._budget.settled(run.size)
                self._deliver(self, part)
                if end == run.end and outcome is not None:
                    outcome.settle()
        finally:
            self._total.sent += self.sent - sent
            if not self._waiting:
                self.since.clear()
        for wake in list(self.groups):
            wake()

    def tell(self, until: int) -> None:
        """Do nothing: the publishers were notified when the messages were served."""


# Where messages may wait to be served.
Waiting = Partition | LiveQueue
