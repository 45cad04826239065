"""A subscription without I/O: unread messages, settlements, and where to continue after a reconnect.

The broker may send as many messages as it has credit for. Each of the `buffer` messages is in one of three places: it
is credit of the broker, or it waits here unread, or the application has taken it. Half of the buffer taken, the feed
returns it as credit. So a reader that stops reading is sent no more than `buffer` messages.

Any thread may take and settle messages; everything else belongs to the thread of the connection.

The notices of a refresh (RESET, READY) have a position between the messages. A notice is due when all messages before
it were taken. No later message can be taken until the application has handled the notice. Then the feed confirms it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from penstock.client import tracing
from penstock.client.message import Delivery, Message
from penstock.client.outgoing import Prepared
from penstock.client.settlements import COMMIT, Settlement, Settlements
from penstock.client.unread import CREATED_MAX, RefreshNotice, Unread
from penstock.errors import BadFrame, Closed, CorruptBatch, PenstockError, UnsupportedBatch
from penstock.model.batch import parse
from penstock.wire.binary import Messages, Verb, read_messages

SHARED: Final = "shared"
PARTITIONED: Final = "partitioned"

Start = str | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionOptions:
    """See `AsyncClient.subscribe`. `refreshes`: the application takes part in a refresh."""

    pattern: str
    group: str | None
    mode: str
    start: Start
    buffer: int
    refreshes: bool = False
    deliveries_max: int | None = None

    def __post_init__(self) -> None:
        if self.refreshes and self.group is None:
            raise ValueError("on_reset and on_ready are for groups: subscribe with group=")
        if self.mode not in (SHARED, PARTITIONED):
            raise ValueError(f"invalid mode {self.mode!r}: it must be {SHARED!r} or {PARTITIONED!r}")
        if self.deliveries_max is not None and (self.group is None or self.mode != SHARED):
            raise ValueError("deliveries_max is for shared groups: only they count deliveries")
        if self.deliveries_max is not None and self.deliveries_max < 0:
            raise ValueError(f"invalid deliveries_max {self.deliveries_max}: it must be at least 1, or 0 for no limit")
        if self.buffer < 1:
            raise ValueError(f"invalid buffer {self.buffer}: it must be at least 1")


class Feed:
    def __init__(
        self,
        options: SubscriptionOptions,
        *,
        lock: AbstractContextManager[Any],
        wake: Callable[[], None],
        arrived: Callable[[], None],
        respond: Callable[[Prepared], None],
    ) -> None:
        """`wake` is called when there is something to send: see `credit`, `take_settlements` and `confirmations`.
        `arrived` is called when there is something to read, or nothing more will come. `respond` is called from any
        thread with a reply to publish.
        """
        self.options = options
        # The number of the subscription on the present connection; 0 until the broker has accepted it.
        self.number = 0
        # Why no more messages come.
        self.ended: PenstockError | None = None
        self.is_closed = False
        self.arrived = arrived
        self.respond = respond
        self.settlements = Settlements(lock, wake)
        self._is_partitioned = options.mode == PARTITIONED
        self._lock = lock
        self._wake = wake
        self._unread = Unread(lock)
        self._credit = 0
        # Whether a reader wants more than is here.
        self._is_wanted = False
        # Whether unread messages are given back: the broker must not deliver them to this subscription again.
        self._is_leaving = False
        # Credit is returned when no more than this is unread or on the way.
        self._low = options.buffer // 2
        # Without a group: the next offset of each topic ID and partition.
        self._positions: dict[tuple[int, int], int] | None = None
        # A refresh: notices of the present connection that are not confirmed, the one that the application handles,
        # and the numbers to confirm.
        self._unconfirmed: set[RefreshNotice] = set()
        self._current: RefreshNotice | None = None
        self._confirmations: list[int] = []

    # The connection.

    def opening(self, number: int) -> dict[str, Any]:
        """Return the fields of OPEN on a new connection."""
        options = self.options
        if options.group is not None:
            # The broker delivers these again, to this member or another one.
            with self._lock:
                self._unread.clear(self._current)
        self._credit = options.buffer - len(self._unread)
        start = options.start
        if self._positions is not None:
            start = {"positions": [[*place, offset] for place, offset in self._positions.items()]}
        opening = {
            "subscription": number,
            "pattern": options.pattern,
            "group": options.group,
            "mode": options.mode,
            "start": start,
            "credit": self._credit,
        }
        if options.refreshes:
            opening["refresh"] = True
        if options.deliveries_max is not None:
            opening["deliveries_max"] = options.deliveries_max
        return opening

    def opened(self, number: int, positions: list[list[int]]) -> None:
        self.number = number
        if self.options.group is None:
            # Positions of messages that have already arrived take precedence.
            begun = {(topic_id, partition): offset for topic_id, partition, offset in positions}
            self._positions = begun | (self._positions or {})
        with self._lock:
            if self.settlements or self._is_wanted:
                self._wake()

    def lost(self) -> None:
        """The connection is lost."""
        self.number = 0
        if self.options.group is not None:
            with self._lock:
                self._unread.clear(self._current)
                # The broker repeats these under other numbers.
                self._unconfirmed.clear()
                self._confirmations.clear()

    def received(self, payload: bytes | bytearray) -> None:
        """Take a MESSAGES frame. Raise BadFrame if it is invalid or exceeds the credit."""
        messages = read_messages(payload)
        try:
            delivery = self._open(messages)
        except (CorruptBatch, UnsupportedBatch) as error:
            self.end(error)
            return
        if len(delivery.values) > self._credit:
            raise BadFrame(f"the broker sent more messages of {self.options.pattern} than it had credit for")
        if self.is_over:
            return
        self._credit -= len(delivery.values)
        self._unread.add(delivery)
        # Messages that are not stored (inboxes) have no topic, and no position to continue from.
        if self.options.group is None and messages.topic_id:
            if self._positions is None:
                self._positions = {}
            self._positions[messages.topic_id, messages.partition] = delivery.offsets[-1] + 1
        self.arrived()

    def notified(self, word: str, number: int, topic: str) -> None:
        """Take a RESET or READY."""
        if self.is_over:
            return
        notice = RefreshNotice(word, number, topic)
        with self._lock:
            self._unconfirmed.add(notice)
        self._unread.add_notice(notice)
        self.arrived()

    def credit(self) -> int | None:
        """Return how many more messages the broker may send: 0 if no more at all, None if there is nothing to say."""
        if not self.number:
            return None
        if self._is_leaving:
            return 0
        kept = len(self._unread) + self._credit
        if not self._is_wanted or kept > self._low:
            return None
        self._is_wanted = False
        self._credit += self.options.buffer - kept
        return self.options.buffer - kept

    def take_settlements(self) -> Iterable[tuple[int, Settlement, list[int]]]:
        """Return the settlements to send now: see `Settlements.take`."""
        return self.settlements.take() if self.number else ()

    def confirmations(self) -> list[int]:
        """Return the numbers of the notices to confirm now."""
        with self._lock:
            confirmations, self._confirmations = self._confirmations, []
        return confirmations

    # The end.

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.is_closed or self.ended is not None

    def end(self, error: PenstockError) -> None:
        """No more messages come. Those that have arrived can still be read."""
        with self._lock:
            if self.ended is None:
                self.ended = error
                self.settlements.close(error)
        self._unread.remove(lambda notice: True)
        self.arrived()

    def give_back(self) -> None:
        """Release the unread messages of a shared group, so that they do not count as delivered."""
        self._unread.remove(lambda notice: True)
        if self.ended is not None:
            return  # the broker has taken them back
        self._is_leaving = True
        while self.options.group is not None and not self._is_partitioned and (message := self._unread.take()):
            message.release()

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._unread.clear()
            self.settlements.close(Closed("the subscription is closed: unacknowledged messages are delivered again"))
        self.arrived()

    def disown(self, lock: AbstractContextManager[Any], error: PenstockError) -> None:
        """Detach from the parent process, in a forked child. A thread of the parent may hold the old lock."""
        self._lock = lock
        self._wake = _ignore
        self.respond = _refuse
        self._unread = Unread(lock)
        self.settlements = Settlements(lock, _ignore)
        self.settlements.close(error)
        self.ended = error
        self.number = 0

    # The application.

    def take(self) -> Message | None:
        """Take the next message; None if there is none. After the last one, raise the error that ended the feed.

        A reader that takes the last message that it wants causes no more to be sent: credit is returned when it comes
        back for another one.
        """
        self._want()
        message = self._unread.take()
        if message is None:
            self._check_ended()
        else:
            tracing.received((message,))
        return message

    def take_many(self, count_max: int | None) -> list[Message]:
        """Take the messages that have arrived, up to `count_max`, or some hundreds if it is None."""
        self._want()
        limit = CREATED_MAX if count_max is None else count_max
        messages = self._unread.take_many(limit)
        while 0 < len(messages) < limit and (more := self._unread.take_many(limit - len(messages))):
            messages += more
        if not messages:
            self._check_ended()
        tracing.received(messages)
        return messages

    def unread(self) -> list[Message]:
        """Return the messages that have arrived, without taking them."""
        return list(self._unread)

    @property
    def is_ready(self) -> bool:
        """Whether a reader need not wait: there is something to do, or nothing more will come."""
        if self.is_over:
            return True
        return self._current is None and (bool(self._unread) or self._unread.notice() is not None)

    def notice(self) -> RefreshNotice | None:
        """Return the notice that the caller must handle, followed by `complete` or `end`. None if none is due, or
        another reader handles it."""
        found = self._unread.notice()
        with self._lock:
            if found is None or self._current is not None:
                return None
            self._current = found
            return found

    def complete(self, notice: RefreshNotice) -> None:
        """The application has handled a notice: let later messages be taken, and confirm it."""
        self._unread.remove(lambda each: each is notice)
        with self._lock:
            self._current = None
            # A notice of an earlier connection is not confirmed: the broker repeats it.
            if notice in self._unconfirmed:
                self._unconfirmed.remove(notice)
                self._confirmations.append(notice.number)
                self._wake()
        self.arrived()

    def settle(self, delivery: Delivery, offset: int, verb: int, delay_us: int = 0, reason: str = "") -> None:
        """Settle a message; it is sent with `take_settlements`."""
        if self.options.group is None:
            raise TypeError("only messages of a group are acknowledged: subscribe with group=")
        if self._is_partitioned:
            verb, offset = _commit(verb, offset)
        about = (verb, delay_us, delivery.generation, delivery.topic_id, delivery.partition, reason)
        self.settlements.add(about, offset)

    def _want(self) -> None:
        if len(self._unread) + self._credit <= self._low:
            self._is_wanted = True
            self._wake()

    def _open(self, messages: Messages) -> Delivery:
        return Delivery(
            parse(messages.batch),
            messages.topic.decode(),
            messages.topic_id,
            messages.partition,
            generation=messages.generation,
            attempts=messages.attempts,
            feed=self,
        )

    def _check_ended(self) -> None:
        if self.ended is not None and not self.is_closed:
            raise self.ended


def _commit(verb: int, offset: int) -> tuple[int, int]:
    """Return an acknowledgement as a partitioned group needs it."""
    if verb != Verb.ACK:
        raise TypeError(
            f"{Verb(verb).name.lower()} is for shared groups: in a partitioned group ack() commits everything up to a"
            " message, and the consumer retries a message itself"
        )
    return COMMIT, offset + 1


def _ignore() -> None:
    pass


def _refuse(_: Prepared) -> None:
    raise Closed("the message was delivered to the parent process: only the parent can respond to it")
