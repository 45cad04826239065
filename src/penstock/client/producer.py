"""The heart of a producer, without I/O: messages in, numbered batches out, each stored exactly once and in order.

Messages are gathered in *lanes*, one for each partition. A lane's messages become a batch when they are enough or have
waited long enough; the batch gets the next number of the lane's producer id and is *sealed*. What holds from then on:

    WAITING   not sent, or refused: it is certainly not stored
    SENT      the answer is on its way
    UNKNOWN   the connection broke before the answer: it may be stored or not
    DECIDED   stored, or failed

- A lane sends its batches in the order of their numbers, at most IN_FLIGHT_MAX unanswered: fewer than the broker
  remembers. After a reconnect they are sent again under the same numbers, so that what was stored is known again.
- When the broker is too busy, the lane waits until all that it has sent is answered, and goes on from the first.
- When a batch fails there is a gap in the numbers. What is behind it is numbered anew under another producer id, but
  only when the fate of everything in the lane is known: else it could be stored twice.
- Messages that ask the broker for something (an id, a delay) are in batches of their own, which have no number: the
  broker opens them, and knows a repetition by the ids. Such a batch is sent when all before it is stored, and nothing
  is sent behind it until it is.
- When the topic has more partitions than was known, nothing of it is sent until all its lanes are answered; then
  what is not stored is distributed anew. So the messages of a key stay in order.

Everything here may be called by any thread: `lock` is held by whoever is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from heapq import heapreplace
from typing import Any, Final

from penstock.batch import Batch, Compression
from penstock.client.ledger import Ledger
from penstock.client.outgoing import Prepared, check_size, subject_bytes
from penstock.client.partitioner import PIECE_MESSAGES, Layout
from penstock.errors import (
    AppendFailed,
    Closed,
    OutOfSequence,
    Overloaded,
    PenstockError,
    StaleLayout,
    TimedOut,
    UnknownTopic,
)
from penstock.run import MESSAGE_BYTES, Run, open_batch

IN_FLIGHT_MAX: Final = 8
# How long a lane waits when the broker is too busy, at first and at the most.
BACKOFF_S: Final = 0.05
BACKOFF_S_MAX: Final = 1.0
# Subjects whose lane is remembered; a flood of new ones begins again.
_ROUTES_MAX: Final = 65_536

Failed = tuple[str, bytes | None, PenstockError]


class State(Enum):
    WAITING = "waiting"
    SENT = "sent"
    UNKNOWN = "unknown"
    DECIDED = "decided"


class Sealed:
    """A batch that has its number, if it is to have one."""

    __slots__ = ("batch", "deadline", "error", "lane", "since", "size", "state")

    def __init__(self, lane: Lane, batch: Batch, size: int, since: int) -> None:
        self.lane = lane
        self.batch = batch
        # As it was counted when it was gathered.
        self.size = size
        self.since = since
        self.state = State.WAITING
        # When it fails; None: nobody has asked the time yet.
        self.deadline: float | None = None
        # Why it was refused last.
        self.error: PenstockError | None = None

    @property
    def is_numbered(self) -> bool:
        """Whether it is a batch of its producer; if not, the ids of its messages tell whether it came twice."""
        return self.batch.producer != 0


class Lane:
    """The messages on their way to one partition."""

    __slots__ = (
        "asks",
        "backoff",
        "bytes",
        "due",
        "is_broken",
        "partition",
        "producer",
        "retry_at",
        "run",
        "sealed",
        "sequence",
        "since",
        "subjects",
        "topic",
        "values",
    )

    def __init__(self, topic: ServedTopic, partition: int, producer: int) -> None:
        self.topic = topic
        self.partition = partition
        self.producer = producer
        self.sequence = 0
        # In the order of their numbers.
        self.sealed: deque[Sealed] = deque()
        # There is a gap in the numbers: what is not sent is numbered anew.
        self.is_broken = False
        self.retry_at: float | None = None
        self.backoff = BACKOFF_S
        self.begin()

    def begin(self) -> None:
        """Gather the next batch."""
        # All of its messages ask the broker for something, or none.
        self.run = Run([], [])
        # The run's own: looked up for every message.
        self.values = self.run.values
        self.subjects = self.run.subjects
        self.asks = False
        self.bytes = 0
        self.since = 0
        # When it is sealed though it is small; None: nobody has asked the time yet.
        self.due: float | None = None

    def count(self, state: State) -> int:
        return sum(each.state is state for each in self.sealed)

    @property
    def is_settled(self) -> bool:
        """Whether the fate of all that is here is known."""
        return all(each.state is State.WAITING for each in self.sealed)


class ServedTopic:
    """A topic, as it was when it was asked for."""

    __slots__ = ("_first", "_given", "is_asked", "is_stale", "lanes", "layout", "own")

    def __init__(self, layout: Layout, first: int) -> None:
        """`first`: any number; it chooses where messages that may go anywhere begin."""
        self.layout = layout
        self.lanes: dict[int, Lane] = {}
        # Of the topic's own name, whose messages go to each partition in turn.
        self.own: _Route | None = None
        # A heap: how many of these were given to which partition, counted from the first. The least one has its turn.
        self._given = [(0, number) for number in range(layout.partitions)]
        self._first = first
        # It has another number of partitions than was known, and whether somebody asks how many.
        self.is_stale = False
        self.is_asked = False

    def turn(self, given: int) -> int:
        """Count so many messages for the partition that has its turn, and return the next one."""
        least, number = self._given[0]
        heapreplace(self._given, (least + given, number))
        return (self._first + self._given[0][1]) % self.layout.partitions


class _Route:
    """Where the messages of a subject go that have no key."""

    __slots__ = ("lane", "left", "overhead", "subject")

    def __init__(self, subject: bytes, lane: Lane, left: int = 0) -> None:
        """`left`: so many messages until another lane has its turn; 0: never."""
        self.subject = subject
        self.lane = lane
        self.left = left
        self.overhead = MESSAGE_BYTES + len(subject)


class Batcher:
    def __init__(
        self,
        *,
        batch_bytes: int,
        linger: float,
        buffer_bytes: int,
        compression: Compression,
        timeout: float,
        draw: Callable[[], int],
        now_us: Callable[[], int],
        lock: AbstractContextManager[Any],
        wake: Callable[[], None],
    ) -> None:
        """`draw` gives a producer id, `now_us` the time for messages. `wake` is called when `pump` has to be, by who
        holds the lock."""
        # Bytes that are gathered and not stored.
        self.bytes = 0
        # Messages that are stored, and how many of them had been stored before under the same id or payload.
        self.stored = 0
        self.duplicates = 0
        # What the broker takes.
        self.value_bytes_max = 1 << 62
        self._under_way = Ledger()
        # When `pump` is to be called again, at the latest.
        self.next_at: float | None = None
        self._batch_bytes = batch_bytes
        self._linger = linger
        self._buffer_bytes = buffer_bytes
        self._compression = compression
        self._timeout = timeout
        self._draw = draw
        self._now_us = now_us
        self._lock = lock
        self._wake = wake
        # Above it nothing is taken: below zero if it is not for want of room.
        self._limit = buffer_bytes
        self._failed: list[Failed] = []
        self._is_closed = False
        # Messages that were given an id.
        self._identities = 0
        self._topics: dict[bytes, ServedTopic] = {}
        self._routes: dict[str, _Route] = {}
        # Lanes that hold messages.
        self._busy: dict[Lane, None] = {}

    def add(self, subject: str, value: bytes) -> bool:
        """Take a message that is nothing but a value. False if it cannot be as things are:
        `knows`, `is_full`, `has_failed` and `is_closed` tell why.

        Every message of a producer goes through here or `add_prepared`: 0.4 µs.
        """
        with self._lock:
            route = self._routes.get(subject) or self._find_route(subject)
            if route is None or self.bytes >= self._limit:
                return False
            size = len(value)
            if size > self.value_bytes_max:
                check_size(size, self.value_bytes_max)
            lane = route.lane
            if lane.asks:
                self._seal(lane)
            if not lane.bytes:
                self._begin(lane)
            lane.values.append(value)
            lane.subjects.append(route.subject)
            size += route.overhead
            lane.bytes += size
            self.bytes += size
            if lane.bytes >= self._batch_bytes:
                self._seal(lane)
                self._wake()
            if route.left:
                self._count(route)
            return True

    def add_prepared(self, message: Prepared) -> bool:
        """The same for a message that may have more than a value."""
        with self._lock:
            if self.bytes >= self._limit:
                return False
            check_size(len(message.value), self.value_bytes_max)
            subject = message.subject.encode()
            topic = self._owner(subject)
            if topic is None:
                return False
            lane = self._lane_of(topic, subject, message.key)
            self._put(lane, subject, message)
            if lane.bytes >= self._batch_bytes:
                self._seal(lane)
                self._wake()
            return True

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._buffer_bytes

    @property
    def has_failed(self) -> bool:
        """Whether `take_failed` has something to tell."""
        return bool(self._failed)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def knows(self, subject: str) -> bool:
        """Whether it is known where messages of the subject go."""
        return self._owner(subject.encode()) is not None

    def learn(self, layout: Layout) -> None:
        """What the broker says of a topic. One that is known stays as it is: the broker tells when that is wrong."""
        with self._lock:
            self._learn(layout)

    def mark(self) -> int:
        """Seal all there is; the moment for `is_done`."""
        with self._lock:
            for lane in list(self._busy):
                if lane.bytes:
                    self._seal(lane)
            self._wake()
            return self._under_way.mark()

    def is_done(self, mark: int) -> bool:
        """Whether all that was gathered before the mark is stored, or has failed."""
        with self._lock:
            return self._under_way.is_done(mark)

    def close(self) -> None:
        """Take no more."""
        with self._lock:
            self._is_closed = True
            self._limit = -1

    def take_failed(self) -> list[Failed]:
        """The messages that are not stored, and why: each is told once."""
        with self._lock:
            failed, self._failed = self._failed, []
            self._limit = -1 if self._is_closed else self._buffer_bytes
            return failed

    def pump(self, now: float, *, is_connected: bool) -> list[Sealed]:
        """What is to be sent now, in this order: it counts as sent. `answered` must follow for each, or `lost`."""
        with self._lock:
            out: list[Sealed] = []
            moments: list[float] = []
            for lane in list(self._busy):
                self._seal_due(lane, now, is_connected=is_connected)
                self._expire(lane, now)
                if is_connected:
                    out += self._sendable(lane, now)
                moments += self._moments(lane, is_connected=is_connected)
                if not lane.bytes and not lane.sealed:
                    del self._busy[lane]
            self.next_at = min(moments, default=None)
            return out

    def answered(self, sealed: Sealed, error: PenstockError | None, now: float, duplicates: int = 0) -> None:
        """The broker has stored it, or it has not. `duplicates`: messages of it that had been stored before."""
        with self._lock:
            if sealed.state is not State.SENT:
                # It was given up meanwhile.
                return
            if error is None:
                self.stored += sealed.batch.count
                self.duplicates += duplicates
                sealed.lane.backoff = BACKOFF_S
                self._decide(sealed)
            else:
                self._refused(sealed, error, now)
            self._wake()

    def lost(self) -> None:
        """The connection is gone, and with it the answers to all that was sent."""
        with self._lock:
            for lane in self._busy:
                lane.retry_at = None
                for sealed in lane.sealed:
                    if sealed.state is State.SENT:
                        sealed.state = State.UNKNOWN

    def stale(self) -> list[ServedTopic]:
        """Topics whose partitions are to be asked for: `relay` or `abandon` must follow for each."""
        with self._lock:
            found = []
            for topic in {lane.topic: None for lane in self._busy}:
                if topic.is_stale and not topic.is_asked and all(lane.is_settled for lane in topic.lanes.values()):
                    topic.is_asked = True
                    found.append(topic)
            return found

    def relay(self, topic: ServedTopic, layout: Layout) -> None:
        """The topic is laid out anew: what is not stored is distributed once more."""
        with self._lock:
            self._forget(topic)
            self._learn(layout)
            for lane in topic.lanes.values():
                for run, since, asks in self._drain(lane):
                    self._distribute(run, since, asks=asks)
            self._wake()

    def abandon(self, topic: ServedTopic, error: PenstockError) -> None:
        """Nobody can say where the topic's messages belong: they fail."""
        with self._lock:
            self._forget(topic)
            for lane in topic.lanes.values():
                for run, _, _ in self._drain(lane):
                    self._fail_run(run, error)

    def _learn(self, layout: Layout) -> None:
        if layout.name not in self._topics:
            # Programs that publish little and end must not all begin with the same partition.
            first = self._draw() if layout.partitions > 1 else 0
            self._topics[layout.name] = ServedTopic(layout, first)

    def _begin(self, lane: Lane) -> None:
        lane.since = self._under_way.enter()
        self._busy[lane] = None
        self._wake()

    def _put(self, lane: Lane, subject: bytes, message: Prepared) -> None:
        if lane.bytes and lane.asks is not message.asks:
            self._seal(lane)
        if not lane.bytes:
            self._begin(lane)
            lane.asks = message.asks
        headers = message.headers
        if message.asks and not message.has_identity:
            # It is for later: by an id it is known again if it is sent twice.
            self._identities += 1
            headers = b"Msg-ID: %x-%d\r\n%b" % (lane.producer, self._identities, headers or b"")
        run, index = lane.run, len(lane.values)
        lane.values.append(message.value)
        lane.subjects.append(subject)
        if message.key is not None:
            run.keys[index] = message.key
        if headers is not None:
            run.headers[index] = headers
        if message.is_tombstone:
            run.tombstones.add(index)
        if message.ttl_us is not None:
            run.ttls[index] = message.ttl_us
        parts = (subject, message.value, message.key or b"", headers or b"")
        size = MESSAGE_BYTES + sum(map(len, parts))
        lane.bytes += size
        self.bytes += size

    def _owner(self, subject: bytes) -> ServedTopic | None:
        """The topic of a subject: its own name, or one above it. No topic lies below another, so there is but one."""
        topics = self._topics
        end = len(subject)
        while end >= 0:
            topic = topics.get(subject[:end])
            if topic is not None:
                return topic
            end = subject.rfind(b".", 0, end)
        return None

    def _lane_of(self, topic: ServedTopic, subject: bytes, key: bytes | None) -> Lane:
        partition = topic.layout.choose(subject, key)
        if partition is not None:
            return self._lane(topic, partition)
        route = self._own_route(topic)
        lane = route.lane
        self._count(route)
        return lane

    def _count(self, route: _Route) -> None:
        """A message of the topic's own name was given to its lane: after some the next lane has its turn."""
        route.left -= 1
        if not route.left:
            self._turn(route)

    def _turn(self, route: _Route) -> None:
        topic = route.lane.topic
        route.lane, route.left = self._lane(topic, topic.turn(PIECE_MESSAGES - route.left)), PIECE_MESSAGES

    def _lane(self, topic: ServedTopic, partition: int) -> Lane:
        lane = topic.lanes.get(partition)
        if lane is None:
            lane = topic.lanes[partition] = Lane(topic, partition, self._draw())
        return lane

    def _own_route(self, topic: ServedTopic) -> _Route:
        if topic.own is None:
            topic.own = _Route(topic.layout.name, self._lane(topic, topic.turn(0)), PIECE_MESSAGES)
        return topic.own

    def _find_route(self, subject: str) -> _Route | None:
        data = subject_bytes(subject)
        topic = self._owner(data)
        if topic is None:
            return None
        if len(self._routes) >= _ROUTES_MAX:
            self._routes.clear()
        partition = topic.layout.choose(data, None)
        route = self._own_route(topic) if partition is None else _Route(data, self._lane(topic, partition))
        self._routes[subject] = route
        return route

    def _seal(self, lane: Lane) -> None:
        topic = lane.topic
        is_numbered = not lane.asks
        batch = lane.run.encode(
            topic.layout.name,
            self._now_us(),
            producer=lane.producer if is_numbered else 0,
            sequence=lane.sequence if is_numbered else 0,
            compression=self._compression,
            asks=lane.asks,
        )
        lane.sequence += is_numbered
        lane.sealed.append(Sealed(lane, batch, lane.bytes, lane.since))
        lane.begin()
        if topic.own is not None and topic.own.lane is lane:
            self._turn(topic.own)

    def _seal_due(self, lane: Lane, now: float, *, is_connected: bool) -> None:
        if lane.bytes and lane.due is None:
            lane.due = now + self._linger
        if lane.due is not None and lane.due <= now and self._can_go(lane, is_connected=is_connected):
            self._seal(lane)

    def _can_go(self, lane: Lane, *, is_connected: bool) -> bool:
        """Whether a batch is worth sealing: while it cannot be sent anyway, it may as well grow."""
        return not lane.sealed or (is_connected and len(lane.sealed) < IN_FLIGHT_MAX)

    def _sendable(self, lane: Lane, now: float) -> Iterator[Sealed]:
        in_flight = lane.count(State.SENT)
        if lane.retry_at is not None:
            if in_flight or now < lane.retry_at:
                return
            lane.retry_at = None
        if lane.is_broken and lane.is_settled:
            self._renumber(lane)
        is_held = lane.is_broken or lane.topic.is_stale
        for sealed in lane.sealed:
            if in_flight >= (IN_FLIGHT_MAX if sealed.is_numbered else 1):
                return
            if sealed.state is State.UNKNOWN or (sealed.state is State.WAITING and not is_held):
                sealed.state = State.SENT
                in_flight += 1
                yield sealed
            if not sealed.is_numbered:
                return

    def _moments(self, lane: Lane, *, is_connected: bool) -> Iterator[float]:
        """When the lane is to be looked at again, if nothing happens before."""
        if lane.due is not None and self._can_go(lane, is_connected=is_connected):
            yield lane.due
        if lane.sealed and lane.sealed[0].deadline is not None:
            yield lane.sealed[0].deadline
        if lane.retry_at is not None:
            yield lane.retry_at

    def _expire(self, lane: Lane, now: float) -> None:
        for sealed in list(lane.sealed):
            if sealed.deadline is None:
                sealed.deadline = now + self._timeout
            elif sealed.deadline <= now:
                self._fail(sealed, self._overdue(sealed))

    def _overdue(self, sealed: Sealed) -> PenstockError:
        if sealed.state is not State.WAITING:
            return TimedOut(f"no answer within {self._timeout:g} s: it may or may not be stored")
        return sealed.error or TimedOut(f"it could not be sent within {self._timeout:g} s")

    def _refused(self, sealed: Sealed, error: PenstockError, now: float) -> None:
        lane = sealed.lane
        sealed.state = State.WAITING
        is_behind = lane.is_broken or lane.sealed[0] is not sealed
        match error:
            case StaleLayout():
                lane.topic.is_stale = True
            case Overloaded() | Closed() | AppendFailed():
                sealed.error = error
                lane.retry_at = now + lane.backoff
                lane.backoff = min(2 * lane.backoff, BACKOFF_S_MAX)
            case OutOfSequence() if is_behind:
                lane.retry_at = now if lane.retry_at is None else lane.retry_at
            case UnknownTopic():
                self._fail(sealed, error)
                self._forget(lane.topic)
            case _:
                self._fail(sealed, error)

    def _fail(self, sealed: Sealed, error: PenstockError) -> None:
        lane = sealed.lane
        lane.is_broken = lane.is_broken or sealed.is_numbered
        self._fail_run(open_batch(sealed.batch, lane.topic.layout.name), error)
        self._decide(sealed)

    def _fail_run(self, run: Run, error: PenstockError) -> None:
        for index, (subject, value) in enumerate(zip(run.subjects, run.values, strict=True)):
            self._failed.append((subject.decode(), None if index in run.tombstones else value, error))
        self._limit = -1

    def _decide(self, sealed: Sealed) -> None:
        sealed.state = State.DECIDED
        sealed.lane.sealed.remove(sealed)
        self.bytes -= sealed.size
        self._under_way.leave(sealed.since)

    def _renumber(self, lane: Lane) -> None:
        lane.producer = self._draw()
        lane.sequence = 0
        for sealed in lane.sealed:
            if sealed.is_numbered:
                sealed.batch.number(lane.producer, lane.sequence)
                lane.sequence += 1
        lane.is_broken = False

    def _forget(self, topic: ServedTopic) -> None:
        """It is not as it was: ask for it again when there are messages for it."""
        if self._topics.get(topic.layout.name) is topic:
            del self._topics[topic.layout.name]
            self._routes.clear()

    def _drain(self, lane: Lane) -> Iterator[tuple[Run, int, bool]]:
        """Take out all that the lane holds, in order."""
        for sealed in list(lane.sealed):
            yield open_batch(sealed.batch, lane.topic.layout.name), sealed.since, not sealed.is_numbered
            self._decide(sealed)
        if lane.bytes:
            yield lane.run, lane.since, lane.asks
            self.bytes -= lane.bytes
            self._under_way.leave(lane.since)
            lane.begin()
        self._busy.pop(lane, None)

    def _distribute(self, run: Run, since: int, *, asks: bool) -> None:
        for index, (subject, value) in enumerate(zip(run.subjects, run.values, strict=True)):
            message = Prepared(
                subject.decode(),
                value,
                run.keys.get(index),
                run.headers.get(index),
                index in run.tombstones,
                asks,
                has_identity=asks,
                ttl_us=run.ttls.get(index),
            )
            topic = self._owner(subject)
            if topic is None:
                self._fail_run(run.select([index]), UnknownTopic(f"no topic owns {message.subject} any more"))
                continue
            lane = self._lane_of(topic, subject, message.key)
            self._put(lane, subject, message)
            if since < lane.since:
                self._under_way.leave(lane.since)
                lane.since = self._under_way.enter(since)
            if lane.bytes >= self._batch_bytes:
                self._seal(lane)
