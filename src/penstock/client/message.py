"""A message as an application sees it.

The messages of one frame are one `Delivery`: its batch is opened once, and each column on first use. A `Message` is an
index into it, so creating one takes about 100 ns, however many columns there are.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from penstock.client import tracing
from penstock.client.outgoing import ABSENT, prepare_call
from penstock.client.values import Headers, read_headers
from penstock.errors import BadRequest
from penstock.model import headers
from penstock.model.batch import Batch
from penstock.times import check_seconds
from penstock.wire.binary import Verb

if TYPE_CHECKING:
    from penstock.client.feed import Feed

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Plain numbers, which are faster than members of an enum.
_ACK, _NACK, _EXTEND, _REJECT, _RELEASE = map(int, (Verb.ACK, Verb.NACK, Verb.EXTEND, Verb.REJECT, Verb.RELEASE))
_NOTHING: Final[Mapping[int, int]] = {}


class Delivery:
    """The messages of one batch that was delivered."""

    __slots__ = (
        "_columns",
        "_opened",
        "attempts",
        "feed",
        "generation",
        "log",
        "offsets",
        "partition",
        "topic",
        "topic_id",
        "values",
    )

    def __init__(
        self,
        batch: Batch,
        topic: str,
        topic_id: int,
        partition: int,
        *,
        generation: int = 0,
        attempts: Mapping[int, int] = _NOTHING,
        feed: Feed | None = None,
    ) -> None:
        """Raise CorruptBatch if a checksum is wrong. `attempts`: by index, where it is not 1. `feed`: takes the
        settlements of the messages."""
        columns = batch.columns()
        # The number of the log that stores it.
        self.log = batch.log
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self.generation = generation
        self.attempts = attempts
        self.feed = feed
        self.values = columns.values()
        self.offsets = columns.offsets()
        self._columns = columns
        self._opened: dict[str, Sequence[Any] | None] = {}

    def messages(self, begin: int = 0, end: int | None = None) -> list[Message]:
        """Return the messages from offset `begin` up to, but not including, `end`."""
        first = bisect_left(self.offsets, begin)
        last = len(self.values) if end is None else bisect_left(self.offsets, end)
        return self.at(first, last - first)

    def at(self, first: int, count: int | None = None) -> list[Message]:
        """Return up to `count` messages from an index on, or all."""
        last = len(self.values) if count is None else min(first + count, len(self.values))
        return [Message(self, index) for index in range(first, last)]

    def column(self, name: str) -> Sequence[Any] | None:
        """Return a column of `penstock.model.batch.Columns` by name."""
        opened = self._opened
        if name not in opened:
            opened[name] = getattr(self._columns, name)()
        return opened[name]

    def item(self, name: str, index: int) -> Any:
        column = self.column(name)
        return None if column is None else column[index]


class Message:
    """A stored message. Acknowledge a message of a group with `ack`. No method waits or must be awaited.

    It has many small properties, because columns are opened only on use.
    """

    __slots__ = ("_delivery", "_index")

    def __init__(self, delivery: Delivery, index: int) -> None:
        self._delivery = delivery
        self._index = index

    def __repr__(self) -> str:
        return f"<Message {self.subject} {self.partition}/{self.offset}, {len(self.value)} bytes>"

    @property
    def topic(self) -> str:
        return self._delivery.topic

    @property
    def topic_id(self) -> int:
        """The ID of the topic. A topic that is deleted and created again has another one."""
        return self._delivery.topic_id

    @property
    def partition(self) -> int:
        return self._delivery.partition

    @property
    def offset(self) -> int:
        return self._delivery.offsets[self._index]

    @property
    def subject(self) -> str:
        subject: bytes | None = self._delivery.item("subjects", self._index)
        return self._delivery.topic if subject is None else subject.decode(errors="replace")

    @property
    def value(self) -> bytes:
        return self._delivery.values[self._index]

    @property
    def key(self) -> bytes | None:
        key: bytes | None = self._delivery.item("keys", self._index)
        return key

    @property
    def headers(self) -> dict[str, str]:
        block = self._delivery.item("headers", self._index)
        return {} if block is None else read_headers(block)

    @property
    def header_block(self) -> bytes | None:
        """The header lines as stored."""
        block: bytes | None = self._delivery.item("headers", self._index)
        return block

    @property
    def log(self) -> int:
        """The random number of its partition's log. Copies of a topic have other numbers."""
        return self._delivery.log

    @property
    def reply(self) -> str | None:
        """The reply subject, if the message is a request."""
        reply: bytes | None = self._delivery.item("replies", self._index)
        return None if reply is None else reply.decode(errors="replace")

    @property
    def message_id(self) -> str | None:
        block = self._delivery.item("headers", self._index)
        identity = None if block is None else headers.identity(block)
        return None if identity is None else identity.decode(errors="replace")

    @property
    def timestamp_us(self) -> int:
        """The producer's time, in µs since 1970."""
        moment: int = self._delivery.item("timestamps", self._index)
        return moment

    @property
    def timestamp(self) -> datetime:
        return _EPOCH + timedelta(microseconds=self.timestamp_us)

    @property
    def attempts(self) -> int:
        """The delivery attempt, starting at 1."""
        return self._delivery.attempts.get(self._index, 1)

    @property
    def generation(self) -> int:
        """The assignment of partitions by which it was delivered to a member of a partitioned group. Messages of an
        earlier assignment that were not committed are delivered again, to the new owner of the partition."""
        return self._delivery.generation

    @property
    def deleted(self) -> bool:
        """Whether it is a tombstone, which deletes its key."""
        return bool(self._delivery.item("tombstones", self._index))

    def json(self) -> Any:
        """Return the value, decoded from JSON."""
        return json.loads(self.value)

    def respond(self, value: bytes | None = None, *, json: Any = ABSENT, headers: Headers = None) -> None:
        """Reply to a request. The reply is sent once and not stored; the requester may have stopped waiting."""
        reply, feed = self.reply, self._delivery.feed
        if reply is None:
            raise BadRequest(f"the message of {self.subject} is not a request: it has no reply subject")
        if feed is None:
            raise TypeError("only a message of a subscription can be responded to")
        feed.respond(prepare_call(reply, value, json, None, tracing.created(reply, headers)))

    def ack(self) -> None:
        """Acknowledge the message. In a partitioned group this includes all earlier messages of its partition."""
        self._settle(_ACK)

    def nack(self, delay: float = 0, *, reason: str | BaseException = "") -> None:
        """Redeliver the message after `delay` seconds. If it becomes a dead letter, that has the reason."""
        check_seconds("delay", delay)
        if delay < 0:
            raise ValueError(f"invalid delay {delay}: it must be 0 or more seconds")
        self._settle(_NACK, round(delay * 1_000_000), _describe(reason))

    def extend(self) -> None:
        """Restart the ack deadline of the message."""
        self._settle(_EXTEND)

    def reject(self, *, reason: str | BaseException = "") -> None:
        """Dead-letter the message at once, with the reason."""
        self._settle(_REJECT, reason=_describe(reason))

    def release(self) -> None:
        """Give the message back unprocessed. It goes to another member, and this delivery does not count."""
        self._settle(_RELEASE)

    def _settle(self, verb: int, delay_us: int = 0, reason: str = "") -> None:
        delivery = self._delivery
        if delivery.feed is None:
            raise TypeError("only messages of a group are acknowledged: subscribe with group=")
        delivery.feed.settle(delivery, delivery.offsets[self._index], verb, delay_us, reason)


def _describe(reason: str | BaseException) -> str:
    """Return a reason as the broker stores it: for an exception, its type and message."""
    if isinstance(reason, BaseException):
        name = type(reason).__name__
        try:
            reason = f"{name}: {reason}" if str(reason) else name
        except Exception:  # noqa: BLE001  its __str__ is the application's
            reason = name
    return headers.reason(reason)
