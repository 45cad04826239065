"""The messages of a producer on their way to one partition.

A lane gathers messages into a batch. A *sealed* batch has its number and is in one of these states:

    WAITING   not sent, or refused: certainly not stored
    SENT      the answer is on its way
    UNKNOWN   the connection broke before the answer: the batch may be stored or not
    DECIDED   stored, or failed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError
from penstock.model.batch import Batch, Compression
from penstock.model.run import Run

if TYPE_CHECKING:
    from penstock.client.routes import TopicLanes

# Unanswered batches of a lane: fewer than the broker remembers for deduplication.
IN_FLIGHT_MAX: Final = 8
# The first and the longest delay of a lane when the broker is overloaded.
BACKOFF_S: Final = 0.05
BACKOFF_S_MAX: Final = 1.0


class BatchState(Enum):
    WAITING = "waiting"
    SENT = "sent"
    UNKNOWN = "unknown"
    DECIDED = "decided"


class SealedBatch:
    """A batch that takes no more messages."""

    __slots__ = ("batch", "deadline", "error", "lane", "since", "size", "state")

    def __init__(self, lane: PartitionLane, batch: Batch, size: int, since: int) -> None:
        self.lane = lane
        self.batch = batch
        # As it was counted while it was gathered.
        self.size = size
        self.since = since
        self.state = BatchState.WAITING
        # When it fails; None until the first `expired`.
        self.deadline: float | None = None
        # The last refusal.
        self.error: PenstockError | None = None

    @property
    def is_numbered(self) -> bool:
        """Whether the broker deduplicates it by its number. Otherwise it does so by the IDs of the messages."""
        return self.batch.producer != 0


class PartitionLane:
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

    def __init__(self, topic: TopicLanes, partition: int, producer: int) -> None:
        self.topic = topic
        self.partition = partition
        self.producer = producer
        self.sequence = 0
        # In the order of their numbers.
        self.sealed: deque[SealedBatch] = deque()
        # The numbers have a gap: batches that were not sent must be renumbered.
        self.is_broken = False
        self.retry_at: float | None = None
        self.backoff = BACKOFF_S
        self.begin()

    def begin(self) -> None:
        """Gather the next batch."""
        # Either all of its messages ask the broker for something, or none does.
        self.run = Run([], [])
        # The lists of the run: used for every message.
        self.values = self.run.values
        self.subjects = self.run.subjects
        self.asks = False
        self.bytes = 0
        self.since = 0
        # When it is sealed even if it is small; None until the first `is_due`.
        self.due: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether no answer is missing: every batch here is certainly not stored."""
        return all(each.state is BatchState.WAITING for each in self.sealed)

    def seal(self, now_us: int, compression: Compression) -> None:
        """Encode the messages that were gathered, and begin the next batch."""
        is_numbered = not self.asks
        batch = self.run.encode(
            self.topic.layout.name,
            now_us,
            producer=self.producer if is_numbered else 0,
            sequence=self.sequence if is_numbered else 0,
            compression=compression,
            asks=self.asks,
        )
        self.sequence += is_numbered
        self.sealed.append(SealedBatch(self, batch, self.bytes, self.since))
        self.begin()

    def is_due(self, now: float, linger: float, *, is_connected: bool) -> bool:
        """Return whether the gathered messages have waited long enough to be sealed."""
        if self.bytes and self.due is None:
            self.due = now + linger
        return self.due is not None and self.due <= now and self._can_go(is_connected=is_connected)

    def expired(self, now: float, timeout: float) -> Iterator[SealedBatch]:
        """Yield the batches whose deadline has passed."""
        for sealed in list(self.sealed):
            if sealed.deadline is None:
                sealed.deadline = now + timeout
            elif sealed.deadline <= now:
                yield sealed

    def sendable(self, now: float, draw: Callable[[], int]) -> Iterator[SealedBatch]:
        """Yield the batches to send now, and count them as sent. `draw` returns a producer ID, to renumber them."""
        in_flight = sum(each.state is BatchState.SENT for each in self.sealed)
        if self.retry_at is not None:
            if in_flight or now < self.retry_at:
                return
            self.retry_at = None
        if self.is_broken and self.is_settled:
            self._renumber(draw())
        is_held = self.is_broken or self.topic.is_stale
        for sealed in self.sealed:
            if in_flight >= (IN_FLIGHT_MAX if sealed.is_numbered else 1):
                return
            if sealed.state is BatchState.UNKNOWN or (sealed.state is BatchState.WAITING and not is_held):
                sealed.state = BatchState.SENT
                in_flight += 1
                yield sealed
            if not sealed.is_numbered:
                return

    def moments(self, *, is_connected: bool) -> Iterator[float]:
        """Yield the times at which the lane needs attention again."""
        if self.due is not None and self._can_go(is_connected=is_connected):
            yield self.due
        if self.sealed and self.sealed[0].deadline is not None:
            yield self.sealed[0].deadline
        if self.retry_at is not None:
            yield self.retry_at

    def lost(self) -> None:
        """The connection is lost, and with it the answers to all batches that were sent."""
        self.retry_at = None
        for sealed in self.sealed:
            if sealed.state is BatchState.SENT:
                sealed.state = BatchState.UNKNOWN

    def back_off(self, now: float) -> None:
        self.retry_at = now + self.backoff
        self.backoff = min(2 * self.backoff, BACKOFF_S_MAX)

    def _renumber(self, producer: int) -> None:
        """Number the batches again under another producer ID, which closes a gap."""
        self.producer = producer
        self.sequence = 0
        for sealed in self.sealed:
            if sealed.is_numbered:
                sealed.batch.number(self.producer, self.sequence)
                self.sequence += 1
        self.is_broken = False

    def _can_go(self, *, is_connected: bool) -> bool:
        """Return whether a sealed batch could be sent soon. Otherwise it may as well grow."""
        return not self.sealed or (is_connected and len(self.sealed) < IN_FLIGHT_MAX)
