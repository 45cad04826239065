"""A partition: messages go into its log and, when they are committed, to those who wait for them."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from penstock.batch import Batch
from penstock.clock import Clock
from penstock.errors import OffsetOutOfRange
from penstock.health import Usage
from penstock.run import Run, batch_bytes, open_batch
from penstock.storage.log import Done, Log, State
from penstock.storage.policy import Policy


class Order(Protocol):
    """Who decides when a partition is served."""

    def add(self, target: Partition, /) -> None:
        """There is something to serve."""
        ...

    def take_back(self, target: Partition, /) -> None:
        """What was appended beyond its end is not coming any more."""
        ...


class Budget(Protocol):
    """Who counts the bytes that wait for the disk."""

    def charge(self, size: int) -> None:
        """Raise Overloaded if so many more are too many."""
        ...

    def settled(self, size: int) -> None: ...


class Reader(Protocol):
    """Who reads a log from memory or, without holding up the loop, from the disk."""

    async def read(self, log: Log, offset: int, bytes_max: int) -> list[Batch]: ...


# A batch with more of either is large: it is opened in another thread, and its readers get it in parts. The other
# readers of the broker wait for one part, some milliseconds, and not for all of it, which can be seconds.
LARGE_MESSAGES: Final = 16_384
LARGE_BYTES: Final = 4 << 20
_PART_MESSAGES: Final = 8192
_PART_BYTES: Final = 1 << 20

# What is kept opened of batches that were read last: readers with little room come back for the rest, and many readers
# that are a little behind read the same ones.
OPENED_BYTES_MAX: Final = 4 << 20
# What a message takes besides its bytes.
_OBJECT_BYTES: Final = 64
# A large one that nobody reads from is kept so long.
_LARGE_IDLE_S: Final = 5.0


def is_large(item: Batch | Run) -> bool:
    if isinstance(item, Batch):
        return item.count > LARGE_MESSAGES or item.plain_length > LARGE_BYTES
    return len(item) > LARGE_MESSAGES or item.size > LARGE_BYTES


class Opened:
    """Batches that were read not long ago, opened; for all partitions together, the oldest use goes first.

    Opened, a large batch takes several times its size. So there is one at a time, and it is kept only until somebody
    has read all of it, or nobody has read from it for a while.
    """

    def __init__(self, bytes_max: int = OPENED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._runs: dict[tuple[int, int, int], Run] = {}
        self._bytes = 0
        # Held while a large batch is read and opened.
        self.lock = asyncio.Lock()
        self._large: _Large | None = None

    def open(self, place: tuple[int, int], batch: Batch, topic: bytes) -> Run:
        """Return the messages of a batch that is not large."""
        key = (*place, batch.base_offset)
        known = self._take(key, batch) or open_batch(batch, topic)
        self._runs[key] = known
        self._bytes += _opened_bytes(batch)
        while self._bytes > self._bytes_max and len(self._runs) > 1:
            self._drop(next(iter(self._runs)))
        return known

    def large_at(self, place: tuple[int, int], offset: int) -> Run | None:
        """Return the large batch with this offset, if it is open."""
        large = self._large
        if large is None or large.place != place or not large.batch.base_offset <= offset < large.batch.end:
            return None
        self._keep(large)
        return large.run

    async def open_large(self, place: tuple[int, int], batch: Batch, topic: bytes) -> Run:
        """Open a large batch in another thread, in place of the one before."""
        self.drop_large()
        run = await asyncio.get_running_loop().run_in_executor(None, open_batch, batch, topic)
        self._keep(_Large(place, batch, run))
        return run

    def drop_large(self) -> None:
        if self._large is not None and self._large.timer is not None:
            self._large.timer.cancel()
        self._large = None

    def _keep(self, large: _Large) -> None:
        self.drop_large()
        large.timer = asyncio.get_running_loop().call_later(_LARGE_IDLE_S, self.drop_large)
        self._large = large

    def _take(self, key: tuple[int, int, int], batch: Batch) -> Run | None:
        """Take out what is kept for a batch; None if that is nothing, or was another batch."""
        known = self._runs.get(key)
        if known is None:
            return None
        self._drop(key)
        return known if known.batch is not None and known.batch.crc == batch.crc else None

    @property
    def usage(self) -> Usage:
        return Usage(self._bytes, self._bytes_max)

    def forget(self, place: tuple[int, int]) -> None:
        for key in [key for key in self._runs if key[:2] == place]:
            self._drop(key)
        if self._large is not None and self._large.place == place:
            self.drop_large()

    def _drop(self, key: tuple[int, int, int]) -> None:
        batch = self._runs.pop(key).batch
        assert batch is not None
        self._bytes -= _opened_bytes(batch)


class Part(NamedTuple):
    """What a reader finds in a partition at an offset."""

    # The messages to deliver; none, where compaction left none or all have expired.
    run: Run
    # Where to read on.
    following: int
    # Messages that are left out of `run`, because their TTL has ended.
    expired: Run


def _opened_bytes(batch: Batch) -> int:
    return batch.plain_length + _OBJECT_BYTES * batch.count


@dataclass(slots=True)
class _Large:
    place: tuple[int, int]
    batch: Batch
    run: Run
    timer: asyncio.TimerHandle | None = None


class Partition:
    """The log of a partition, and `served`: all below it has gone to whoever was waiting.

    A reader that is not behind has no position of its own: it has seen all below `served`, and gets what comes next.
    """

    __slots__ = (
        "_clock",
        "_deliver",
        "_fresh",
        "_opened",
        "_order",
        "_pass_over",
        "_reader",
        "_unserved",
        "cuts",
        "groups",
        "keeps",
        "log",
        "name",
        "number",
        "received",
        "sent",
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
        deliver: Callable[[Partition, Batch | Run], None],
        pass_over: Callable[[Partition], None],
        unserved: dict[Partition, None],
        opened: Opened,
        order: Order,
        clock: Clock,
    ) -> None:
        """`name` is the topic's; `order` decides when what is committed is served. `deliver` gets all that is appended
        once, in order; until then this is one of `unserved`. `pass_over` is called where that is not at hand, or large:
        from `served` on readers must read for themselves.
        """
        self.topic_id = topic_id
        self.keeps = True
        self.number = number
        self.name = name
        self.log = log
        self.served = log.committed
        # Messages since the broker started: that were taken, and that went to connections.
        self.received = self.sent = 0
        # Callbacks for each commit and each rejected write: of groups, and of readers that wait for more.
        self.groups: dict[Callable[[], None], None] = {}
        self._clock = clock
        self._reader = reader
        self._opened = opened
        self._deliver = deliver
        self._pass_over = pass_over
        self._unserved = unserved
        self._order = order
        # How often messages were taken back.
        self.cuts = 0
        # What is committed and not served yet, as it was appended.
        self._fresh: deque[Batch | Run] = deque()
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

    @property
    def is_closed(self) -> bool:
        return self.log.state is State.CLOSED

    def append(self, run: Run, done: Done | None) -> int:
        self._unserved[self] = None
        count, offset = len(run), self.log.gather(run, done)
        self.received += count
        return offset

    def append_batch(self, batch: Batch, source: int, position: int, done: Done | None) -> int:
        self._unserved[self] = None
        offset = self.log.append(batch, source=source, position=position, done=done)
        self.received += batch.count
        return offset

    def append_at(self, batch: Batch, done: Done | None = None) -> bool:
        """Of a piped topic: at the offset that the batch has at its origin; whether it is new."""
        self._unserved[self] = None
        return self.log.append_at(batch, done)

    async def read(self, offset: int) -> Part | None:
        """As `read_stored`, for whoever delivers messages: what has expired is left out."""
        found = await self.read_stored(offset)
        if found is None:
            return None
        stored, following = found
        run, expired = stored.split_expired(self._clock.now_us())
        return Part(run, following, expired)

    async def read_stored(self, offset: int) -> tuple[Run, int] | None:
        """The messages of the next batch from `offset` on, and where to read on; None at `served`.

        A large batch comes in parts. What retention dropped is passed over. Where None is returned nothing is awaited.
        """
        offset = max(offset, self.log.start)
        if offset >= self.served or self.log.state is State.CLOSED:
            return None
        served = self.served
        run = self._opened.large_at(self._place, offset) or await self._open(offset)
        if run is None:
            # These offsets were reserved when the broker crashed, and never given out.
            return Run([], []), served
        batch = run.batch
        assert batch is not None, "it was opened"
        if not is_large(batch):
            return run.at_least(offset), batch.end
        part = run.window(offset, max(1, min(_PART_MESSAGES, batch.count * _PART_BYTES // batch.plain_length)))
        if part.values and part.end < run.end:
            return part, part.end
        self._opened.drop_large()
        return part, batch.end

    async def _open(self, offset: int) -> Run | None:
        """Open the next batch from `offset` on; None if there is none."""
        batches = await self._reader.read(self.log, offset, 1)
        if not batches or not is_large(batches[0]):
            return self._opened.open(self._place, batches[0], self.name) if batches else None
        # Many may wait for their turn: they do not keep the batch meanwhile.
        del batches
        async with self._opened.lock:
            run = self._opened.large_at(self._place, offset)
            if run is None and (batches := await self._reader.read(self.log, offset, 1)):
                run = await self._opened.open_large(self._place, batches[0], self.name)
            return run

    @property
    def _place(self) -> tuple[int, int]:
        return self.topic_id, self.number

    async def message(self, offset: int) -> Run | None:
        """Return the message at an offset, or None if there is none, or no longer. It may have expired."""
        if not self.log.start <= offset < self.served or self.log.state is State.CLOSED:
            return None
        try:
            run = await self._open(offset)
        except OffsetOutOfRange:
            return None  # retention was faster
        if run is None:
            return None
        index = bisect_left(run.all_offsets(), offset)
        return run.select([index]) if index < len(run) and run.offset(index) == offset else None

    async def grown(self, offset: int) -> None:
        """Wait until there is something at `offset`, or the topic is gone."""
        while self.served <= offset and self.log.state is not State.CLOSED:
            woken = asyncio.Event()
            self.groups[woken.set] = None
            try:
                await woken.wait()
            finally:
                del self.groups[woken.set]

    def close(self) -> None:
        """The topic is deleted: whoever is behind has nothing more to read."""
        self.log.on_commit = self.log.on_reject = None
        self.log.tell(self.log.committed)
        self._fresh.clear()
        self.served = 0
        self._unserved.pop(self, None)
        self._opened.forget(self._place)
        for wake in list(self.groups):
            wake()

    @property
    def is_held(self) -> bool:
        """Whether it is not known when more will be available."""
        return self.log.is_held

    @property
    def available(self) -> int:
        """Up to where it may be served."""
        return 0 if self.is_closed else self.log.committed

    def waiting_subjects(self) -> Iterator[bytes]:
        """The subjects of what is to be served, as far as they are known; some of them several times."""
        for item in self._fresh:
            yield from set(item.subjects) if isinstance(item, Run) else (self.name,)

    def serve(self, until: int) -> None:
        """Hand out what is committed below `until`."""
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
        """Tell those who published below `until` that it is committed."""
        self.log.tell(until)

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
    """What is published here goes to those who wait for it now, and nowhere else: inboxes."""

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

    def append(self, run: Run, done: Done | None) -> int:
        offset = self._number(run)
        self._deliver(self, run)
        self.served = self.end
        if done is not None:
            done(offset, None)
        return offset

    def _number(self, run: Run) -> int:
        offset = run.base_offset = self.end
        run.offsets = None
        self.received += len(run)
        self.end += len(run)
        return offset

    async def read(self, offset: int) -> Part | None:
        """Nothing is kept."""
        return None


class LiveQueue(LivePartition):
    """What one connection publishes and is not stored, while it waits for what the connection published before."""

    __slots__ = ("_budget", "_total", "_waiting", "groups")

    cuts = 0
    is_held = False

    def __init__(self, total: LivePartition, budget: Budget) -> None:
        """`total` counts its messages too."""
        super().__init__(total.name, total._deliver)
        self._total = total
        self._budget = budget
        self._waiting: deque[tuple[Run, Done | None]] = deque()
        # Called when some of it was served.
        self.groups: dict[Callable[[], None], None] = {}

    @property
    def available(self) -> int:
        """Up to where it may be served."""
        return self.end

    def waiting_subjects(self) -> Iterator[bytes]:
        for run, _ in self._waiting:
            yield from set(run.subjects)

    def append(self, run: Run, done: Done | None) -> int:
        size = batch_bytes(run)
        self._budget.charge(size)
        run.size = size
        offset = self._number(run)
        self._total.received += len(run)
        self._waiting.append((run, done))
        return offset

    def serve(self, until: int) -> None:
        """Hand out what waits below `until`."""
        sent = self.sent
        try:
            while self._waiting and self.served < until:
                run, done = self._waiting[0]
                end = min(run.end, until)
                part = run.window(self.served, end - self.served)
                self.served = end
                if end == run.end:
                    self._waiting.popleft()
                    self._budget.settled(run.size)
                self._deliver(self, part)
                if end == run.end and done is not None:
                    done(run.base_offset, None)
        finally:
            self._total.sent += self.sent - sent
            if not self._waiting:
                self.since.clear()
        for wake in list(self.groups):
            wake()

    def tell(self, until: int) -> None:
        """Whoever published was told."""


# Where messages may wait to be served.
Waiting = Partition | LiveQueue
