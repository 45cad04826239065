"""The core of a producer, without I/O: messages in, numbered batches out, each stored exactly once and in order.

Messages are gathered in *lanes*, one for each partition (`lane.py`). A lane seals its messages into a batch when there
are enough of them, or when they have waited long enough; the batch gets the next number of the lane's producer ID. From
then on:

- A lane sends its batches in the order of their numbers, at most IN_FLIGHT_MAX unanswered. After a reconnect it sends
  them again under the same numbers, so that the broker recognises those that it has stored.
- When the broker is overloaded, the lane waits until everything sent is answered, and continues with the first batch.
- When a batch fails, the numbers have a gap. Later batches are renumbered under another producer ID, but only when it
  is known of every batch in the lane whether it is stored: otherwise one could be stored twice.
- Messages that ask the broker for something (an ID, a delay) are in batches of their own, without a number: the broker
  opens these and deduplicates by ID. Such a batch is sent when everything before it is stored, and nothing is sent
  after it until it is.
- When a topic has more partitions than was known, nothing is sent until all of its lanes are answered. Then the
  messages that are not stored are distributed again. So the messages of a key stay in order.

Any thread may call these methods; each holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from penstock.client.lane import BACKOFF_S, BatchState, PartitionLane, SealedBatch
from penstock.client.ledger import Ledger
from penstock.client.outgoing import Prepared, check_size
from penstock.client.partitioner import Layout
from penstock.client.routes import Routes, TopicLanes
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
from penstock.model.batch import Compression
from penstock.model.run import MESSAGE_BYTES, Run, open_batch
from penstock.times import check_seconds

# Subject, value and error of a message that was not stored.
FailedMessage = tuple[str, bytes | None, PenstockError]


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
        """`draw` returns a random producer ID, `now_us` the time of messages. `wake` is called, with the lock held,
        when `pump` must be called."""
        check_seconds("linger", linger)
        check_seconds("timeout", timeout)
        # Bytes that are gathered and not stored.
        self.bytes = 0
        # Messages that are stored, and how many of them are duplicates.
        self.stored = 0
        self.duplicates = 0
        # The broker's limit.
        self.value_bytes_max = 1 << 62
        # When `pump` must be called again, at the latest.
        self.next_at: float | None = None
        self.is_closed = False
        self._batch_bytes = batch_bytes
        self._linger = linger
        self._buffer_bytes = buffer_bytes
        self._compression = compression
        self._timeout = timeout
        self._draw = draw
        self._now_us = now_us
        self._lock = lock
        self._wake = wake
        # Messages are accepted below this many bytes: none if it is negative.
        self._limit = buffer_bytes
        self._failed: list[FailedMessage] = []
        # A counter for the IDs of messages that need one.
        self._identities = 0
        self._routes = Routes(draw)
        # The lanes that hold messages.
        self._busy: dict[PartitionLane, None] = {}
        self._under_way = Ledger()

    def add(self, subject: str, value: bytes) -> bool:
        """Add a message that is nothing but a value. Return False if that is not possible now: `knows`, `is_full`,
        `take_failed` and `is_closed` tell why.

        Every message of a producer goes through here or `add_prepared`: 0.4 µs.
        """
        with self._lock:
            route = self._routes.known.get(subject) or self._routes.find(subject)
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
                self._routes.count(route)
            return True

    def add_prepared(self, message: Prepared) -> bool:
        """Add a message that may have more than a value, as `add` does."""
        with self._lock:
            if self.bytes >= self._limit:
                return False
            check_size(len(message.value), self.value_bytes_max)
            subject = message.subject.encode()
            topic = self._routes.owner(subject)
            if topic is None:
                return False
            lane = self._routes.choose(topic, subject, message.key)
            self._put(lane, subject, message)
            if lane.bytes >= self._batch_bytes:
                self._seal(lane)
                self._wake()
            return True

    @property
    def is_full(self) -> bool:
        """Whether messages must wait for room. If some have failed, their error comes first."""
        return self.bytes >= self._buffer_bytes and not self._failed

    def knows(self, subject: str) -> bool:
        """Return whether the topic of a subject is known."""
        return self._routes.owner(subject.encode()) is not None

    def learn(self, layout: Layout) -> None:
        """Add a topic. A known topic stays as it is: the broker reports when its layout is stale."""
        with self._lock:
            self._routes.learn(layout)

    def mark(self) -> int:
        """Seal everything, and return a mark for `is_done`."""
        with self._lock:
            for lane in list(self._busy):
                if lane.bytes:
                    self._seal(lane)
            self._wake()
            return self._under_way.mark()

    def is_done(self, mark: int) -> bool:
        """Return whether every message added before the mark is stored or has failed."""
        with self._lock:
            return self._under_way.is_done(mark)

    def close(self) -> None:
        """Accept no more messages."""
        with self._lock:
            self.is_closed = True
            self._limit = -1

    def take_failed(self) -> list[FailedMessage]:
        """Return the messages that have failed since the last call."""
        with self._lock:
            failed, self._failed = self._failed, []
            self._limit = -1 if self.is_closed else self._buffer_bytes
            return failed

    def pump(self, now: float, *, is_connected: bool) -> list[SealedBatch]:
        """Return the batches to send now, in this order. They count as sent: `answered` must follow for each, or
        `lost`."""
        with self._lock:
            out: list[SealedBatch] = []
            moments: list[float] = []
            for lane in list(self._busy):
                if lane.is_due(now, self._linger, is_connected=is_connected):
                    self._seal(lane)
                for sealed in lane.expired(now, self._timeout):
                    self._fail_batch(sealed, _overdue(sealed, self._timeout))
                if is_connected:
                    out += lane.sendable(now, self._draw)
                moments += lane.moments(is_connected=is_connected)
                if not lane.bytes and not lane.sealed:
                    del self._busy[lane]
            self.next_at = min(moments, default=None)
            return out

    def answered(self, sealed: SealedBatch, error: PenstockError | None, now: float, duplicates: int = 0) -> None:
        """The broker has stored a batch, or refused it. `duplicates`: messages of it that were already stored."""
        with self._lock:
            if sealed.state is not BatchState.SENT:
                # Its deadline has passed in the meantime.
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
        """The connection is lost, and with it the answers to everything that was sent."""
        with self._lock:
            for lane in self._busy:
                lane.lost()

    def stale(self) -> list[TopicLanes]:
        """Return the topics whose layout must be requested: `relay` or `abandon` must follow for each."""
        with self._lock:
            found = []
            for topic in {lane.topic: None for lane in self._busy}:
                if topic.is_stale and not topic.is_asked and all(lane.is_settled for lane in topic.lanes.values()):
                    topic.is_asked = True
                    found.append(topic)
            return found

    def relay(self, topic: TopicLanes, layout: Layout) -> None:
        """Distribute the messages of a topic that are not stored over its new partitions."""
        with self._lock:
            self._routes.forget(topic)
            self._routes.learn(layout)
            for lane in topic.lanes.values():
                for run, since, asks in self._drain(lane):
                    self._distribute(run, since, asks=asks)
            self._wake()

    def abandon(self, topic: TopicLanes, error: PenstockError) -> None:
        """Fail the messages of a topic, because its layout cannot be found out."""
        with self._lock:
            self._routes.forget(topic)
            for lane in topic.lanes.values():
                for run, _, _ in self._drain(lane):
                    self._fail(run, error)

    def _begin(self, lane: PartitionLane) -> None:
        lane.since = self._under_way.enter()
        self._busy[lane] = None
        self._wake()

    def _put(self, lane: PartitionLane, subject: bytes, message: Prepared) -> None:
        if lane.bytes and lane.asks is not message.asks:
            self._seal(lane)
        if not lane.bytes:
            self._begin(lane)
            lane.asks = message.asks
        headers = message.headers
        if message.asks and not message.has_identity:
            # A delayed message needs an ID to be deduplicated, because its batch has no number.
            self._identities += 1
            headers = b"Msg-ID: %x-%d\r\n%b" % (lane.producer, self._identities, headers or b"")
        message.add_to(lane.run, subject, headers)
        size = MESSAGE_BYTES + sum(map(len, (subject, message.value, message.key or b"", headers or b"")))
        lane.bytes += size
        self.bytes += size

    def _seal(self, lane: PartitionLane) -> None:
        lane.seal(self._now_us(), self._compression)
        self._routes.sealed(lane)

    def _refused(self, sealed: SealedBatch, error: PenstockError, now: float) -> None:
        lane = sealed.lane
        sealed.state = BatchState.WAITING
        is_behind = lane.is_broken or lane.sealed[0] is not sealed
        match error:
            case StaleLayout():
                lane.topic.is_stale = True
            case Overloaded() | Closed() | AppendFailed():
                sealed.error = error
                lane.back_off(now)
            case OutOfSequence() if is_behind:
                lane.retry_at = now if lane.retry_at is None else lane.retry_at
            case UnknownTopic():
                self._fail_batch(sealed, error)
                self._routes.forget(lane.topic)
            case _:
                self._fail_batch(sealed, error)

    def _fail_batch(self, sealed: SealedBatch, error: PenstockError) -> None:
        lane = sealed.lane
        lane.is_broken = lane.is_broken or sealed.is_numbered
        self._fail(open_batch(sealed.batch, lane.topic.layout.name), error)
        self._decide(sealed)

    def _fail(self, run: Run, error: PenstockError) -> None:
        for index, (subject, value) in enumerate(zip(run.subjects, run.values, strict=True)):
            self._failed.append((subject.decode(), None if index in run.tombstones else value, error))
        self._limit = -1

    def _decide(self, sealed: SealedBatch) -> None:
        sealed.state = BatchState.DECIDED
        sealed.lane.sealed.remove(sealed)
        self.bytes -= sealed.size
        self._under_way.leave(sealed.since)

    def _drain(self, lane: PartitionLane) -> Iterator[tuple[Run, int, bool]]:
        """Take all messages out of a lane, in order."""
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
            topic = self._routes.owner(subject)
            if topic is None:
                self._fail(run.select([index]), UnknownTopic(f"no topic stores {message.subject} any more"))
                continue
            lane = self._routes.choose(topic, subject, message.key)
            self._put(lane, subject, message)
            if since < lane.since:
                self._under_way.leave(lane.since)
                lane.since = self._under_way.enter(since)
            if lane.bytes >= self._batch_bytes:
                self._seal(lane)


def _overdue(sealed: SealedBatch, timeout: float) -> PenstockError:
    if sealed.state is not BatchState.WAITING:
        return TimedOut(f"no answer within {timeout:g} s: the message may or may not be stored")
    return sealed.error or TimedOut(f"not sent within {timeout:g} s")
