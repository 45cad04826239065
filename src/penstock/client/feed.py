"""A subscription without I/O: what has come and is not read, what is said of it, and where to go on after a reconnect.

The broker may send as many messages as it has credit for. Of `buffer` messages each is at any time either credit that
the broker has, or unread here, or taken by the application and not yet given back as credit: that happens when half of
them are. So a reader that stops is sent no more than `buffer`.

Any thread may take messages and settle them; the rest belongs to the thread of the connection. How many were taken is
what is neither credit nor unread.

What the broker says of a refresh (RESET, READY) has its place among the messages: it is due when all before it were
taken, and nothing behind it can be until the application has done what it must. Then the broker is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from penstock.batch import parse
from penstock.client import tracing
from penstock.client.ledger import Ledger
from penstock.client.message import Delivery, Message
from penstock.client.outgoing import Prepared
from penstock.errors import BadFrame, Closed, CorruptBatch, NotOutstanding, PenstockError, UnsupportedBatch
from penstock.wire.binary import SETTLE_MAX, Messages, Settle, Verb, read_messages

SHARED: Final = "shared"
PARTITIONED: Final = "partitioned"

Start = str | dict[str, Any]

# Messages that are made at once: so few that they are used before the garbage collector looks at them.
_MADE_MAX: Final = 500


class Notice:
    """A word about a topic, RESET or READY, that is answered under its number."""

    __slots__ = ("number", "topic", "word")

    def __init__(self, word: str, number: int, topic: str) -> None:
        self.word = word
        self.number = number
        self.topic = topic


class Unread:
    """What has come and was not taken, in its order.

    Only some of it are messages yet: of a hundred thousand objects that wait, the garbage collector looks at all again
    and again, for 1 µs each.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._messages: deque[Message] = deque()
        # What messages are made of when those are taken: a delivery, and how far it is used. And what is between them.
        self._deliveries: deque[Delivery | Notice] = deque()
        self._used = 0
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._messages) + self._waiting

    def __iter__(self) -> Iterator[Message]:
        """All of them, which stay."""
        with self._lock:
            messages, deliveries, used = list(self._messages), list(self._deliveries), self._used
        yield from messages
        for number, delivery in enumerate(deliveries):
            if isinstance(delivery, Delivery):
                yield from delivery.at(0 if number else used)

    def add(self, delivery: Delivery) -> None:
        with self._lock:
            self._deliveries.append(delivery)
            self._waiting += len(delivery.values)

    def add_notice(self, notice: Notice) -> None:
        with self._lock:
            self._deliveries.append(notice)

    def notice(self) -> Notice | None:
        """The one that is due: all before it were taken. It stays, and with it all behind it, until `remove`."""
        with self._lock:
            if self._messages or not self._deliveries:
                return None
            first = self._deliveries[0]
            return first if isinstance(first, Notice) else None

    def remove(self, notices: Callable[[Notice], bool]) -> None:
        with self._lock:
            kept = [each for each in self._deliveries if not (isinstance(each, Notice) and notices(each))]
            self._deliveries = deque(kept)

    def take(self) -> Message | None:
        """A deque gives each message to one who asks: only who finds it empty needs the lock."""
        while True:
            try:
                return self._messages.popleft()
            except IndexError:
                if not self._make():
                    return None

    def take_many(self, count_max: int) -> list[Message]:
        """So many as there are of those that came together."""
        taken: list[Message] = []
        try:
            while len(taken) < count_max:
                taken.append(self._messages.popleft())
        except IndexError:
            pass
        if not taken:
            with self._lock:
                taken = self._open(count_max)
        return taken

    def clear(self, kept: Notice | None = None) -> None:
        """By who holds the lock. What is `kept` is still in the way of all that comes."""
        self._messages.clear()
        self._deliveries.clear()
        self._used = self._waiting = 0
        if kept is not None:
            self._deliveries.append(kept)

    def _make(self) -> bool:
        """Whether there are messages."""
        with self._lock:
            if not self._messages:
                self._messages.extend(self._open(_MADE_MAX))
            return bool(self._messages)

    def _open(self, count_max: int) -> list[Message]:
        """The next messages, made by who holds the lock."""
        if not self._deliveries:
            return []
        delivery = self._deliveries[0]
        if isinstance(delivery, Notice):
            return []
        made = delivery.at(self._used, count_max)
        self._waiting -= len(made)
        self._used += len(made)
        if self._used == len(delivery.values):
            self._deliveries.popleft()
            self._used = 0
        return made


class Settlement(NamedTuple):
    """What is said of messages: the same of all."""

    verb: int
    delay_us: int
    generation: int
    topic_id: int
    partition: int
    # Why they failed.
    reason: str = ""


# As a plain tuple, because one is made for every acknowledgement.
_About = tuple[int, int, int, int, int, str]
_COMMIT: Final = int(Verb.COMMIT)


class Feed:
    def __init__(
        self,
        pattern: str,
        group: str | None,
        mode: str,
        start: Start,
        buffer: int,
        *,
        refreshes: bool = False,
        deliveries_max: int | None = None,
        lock: AbstractContextManager[Any],
        wake: Callable[[], None],
        arrived: Callable[[], None],
        respond: Callable[[Prepared], None],
    ) -> None:
        """`refreshes`: it wants to be told of a refresh. `deliveries_max`: see `AsyncClient.subscribe`. `wake` is
        called when there is something for the broker: see `credit`, `settlements` and `answers`; `arrived` when there
        is something for a reader, or will be nothing more; `respond` with a reply to publish, by any thread.
        """
        if refreshes and group is None:
            raise ValueError("on_reset and on_ready are for groups: subscribe with group=")
        if mode not in (SHARED, PARTITIONED):
            raise ValueError(f"mode is {mode!r}, it must be {SHARED!r} or {PARTITIONED!r}")
        if deliveries_max is not None and (group is None or mode != SHARED):
            raise ValueError("deliveries_max is for shared groups: only they count deliveries")
        if deliveries_max is not None and deliveries_max < 0:
            raise ValueError(f"deliveries_max is {deliveries_max}, it must be at least 1, or 0 for no limit")
        if buffer < 1:
            raise ValueError(f"buffer is {buffer}, it must be at least 1")
        self.pattern = pattern
        self.group = group
        self.mode = mode
        self.buffer = buffer
        # Its number on the present connection, 0 if there is none or the broker has not agreed yet.
        self.number = 0
        # Why no more come, once that is so.
        self.ended: PenstockError | None = None
        self.is_closed = False
        self.arrived = arrived
        self.respond = respond
        self._refreshes = refreshes
        self._deliveries_max = deliveries_max
        self._start = start
        self._lock = lock
        self._wake = wake
        self._unread = Unread(lock)
        self._credit = 0
        # Whether somebody wants more than is here.
        self._is_asked = False
        # With no more than this here and on the way, it is time to give back.
        self._low = buffer // 2
        # Of each topic and partition, which offset comes next: for a plain subscription.
        self._positions: dict[tuple[int, int], int] | None = None
        # What was said of messages, and all of it that is not stored yet.
        self._said: dict[_About, list[int]] = {}
        self._said_since = 0
        self._unsettled = Ledger()
        # Of a refresh: what the broker said on the present connection and was not answered, what the application is
        # busy with, and what is to be answered.
        self._notices: set[Notice] = set()
        self._told: Notice | None = None
        self._answers: list[int] = []
        # Since `check_settled` was last asked: how many came too late, and the last error.
        self._late = 0
        self._failed: PenstockError | None = None

    def opening(self, number: int) -> dict[str, Any]:
        """What OPEN says on a new connection."""
        if self.group is not None:
            # The broker gives them to this member or another one again.
            with self._lock:
                self._unread.clear(self._told)
        self._credit = self.buffer - len(self._unread)
        start = self._start
        if self._positions is not None:
            start = {"positions": [[*place, offset] for place, offset in self._positions.items()]}
        opening = {
            "subscription": number,
            "pattern": self.pattern,
            "group": self.group,
            "mode": self.mode,
            "start": start,
            "credit": self._credit,
        }
        if self._refreshes:
            opening["refresh"] = True
        if self._deliveries_max is not None:
            opening["deliveries_max"] = self._deliveries_max
        return opening

    def opened(self, number: int, positions: list[list[int]]) -> None:
        self.number = number
        if self.group is None:
            # Messages may have come already: they count.
            begun = {(topic_id, partition): offset for topic_id, partition, offset in positions}
            self._positions = begun | (self._positions or {})
        with self._lock:
            if self._said or self._is_asked:
                self._wake()

    def lost(self) -> None:
        """The connection is gone."""
        self.number = 0
        if self.group is not None:
            with self._lock:
                self._unread.clear(self._told)
                # The broker says it again, under another number.
                self._notices.clear()
                self._answers.clear()

    def hear(self, word: str, number: int, topic: str) -> None:
        """RESET or READY."""
        if self.is_over:
            return
        notice = Notice(word, number, topic)
        with self._lock:
            self._notices.add(notice)
        self._unread.add_notice(notice)
        self.arrived()

    def received(self, payload: bytes | bytearray) -> None:
        """MESSAGES. Raises BadFrame if it is none, or more than there is credit for."""
        messages = read_messages(payload)
        try:
            delivery = self._open(messages)
        except (CorruptBatch, UnsupportedBatch) as error:
            self.end(error)
            return
        if len(delivery.values) > self._credit:
            raise BadFrame(f"more messages of {self.pattern} than were asked for")
        if self.is_over:
            return
        self._credit -= len(delivery.values)
        self._unread.add(delivery)
        # What is not stored (inboxes) has no topic, and cannot be gone back to.
        if self.group is None and messages.topic_id:
            if self._positions is None:
                self._positions = {}
            self._positions[messages.topic_id, messages.partition] = delivery.offsets[-1] + 1
        self.arrived()

    def end(self, error: PenstockError) -> None:
        """No more come. What is here can still be read."""
        with self._lock:
            if self.ended is None:
                self.ended = error
                self._drop_said()
        self._unread.remove(lambda notice: True)
        self.arrived()

    def give_back(self) -> None:
        """Nobody has looked at what is unread: it is not to count as delivered."""
        self._unread.remove(lambda notice: True)
        while self.group is not None and self.mode != PARTITIONED and (message := self._unread.take()):
            message.release()

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._unread.clear()
            self._drop_said()
        self.arrived()

    def disown(self, lock: AbstractContextManager[Any], error: PenstockError) -> None:
        """It is another process that reads this: whoever held the lock is not here, and nobody is to be woken."""
        self._lock = lock
        self._wake = _nobody
        self.respond = _refuse
        self._unread = Unread(lock)
        self._said = {}
        self.ended = error
        self.number = 0

    def take(self) -> Message | None:
        """The next message; None if there is none here. Raises what ended it, when all is read.

        More is asked for only by who comes back: whoever takes the last one it wants is not sent others.
        """
        self._ask()
        message = self._unread.take()
        if message is None:
            self._check_more()
        else:
            tracing.received((message,))
        return message

    def take_many(self, count_max: int | None) -> list[Message]:
        """So many as there are, and some hundreds at the most if it does not matter how many."""
        self._ask()
        limit = _MADE_MAX if count_max is None else count_max
        messages = self._unread.take_many(limit)
        while 0 < len(messages) < limit and (more := self._unread.take_many(limit - len(messages))):
            messages += more
        if not messages:
            self._check_more()
        tracing.received(messages)
        return messages

    def _ask(self) -> None:
        if len(self._unread) + self._credit <= self._low:
            self._is_asked = True
            self._wake()

    def unread(self) -> list[Message]:
        """What is here and not taken yet; it stays."""
        return list(self._unread)

    @property
    def is_ready(self) -> bool:
        """Whether a reader need not wait: there is something, or there will be nothing."""
        if self.is_over:
            return True
        return self._told is None and (bool(self._unread) or self._unread.notice() is not None)

    @property
    def is_over(self) -> bool:
        """Whether there will be nothing more."""
        return self.is_closed or self.ended is not None

    def notice(self) -> Notice | None:
        """What the application must be told next, by who asks: `heard` must follow, or the end. None if nothing is due,
        or somebody is at it."""
        found = self._unread.notice()
        with self._lock:
            if found is None or self._told is not None:
                return None
            self._told = found
            return found

    def heard(self, notice: Notice) -> None:
        """The application has done what it must: what is behind it can be taken, and the broker is told."""
        self._unread.remove(lambda each: each is notice)
        with self._lock:
            self._told = None
            # Unless it was on another connection: there it is said again.
            if notice in self._notices:
                self._notices.remove(notice)
                self._answers.append(notice.number)
                self._wake()
        self.arrived()

    def answers(self) -> list[int]:
        """The numbers of what is to be answered now."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def credit(self) -> int:
        """How many more the broker may send from now on, if it is worth telling."""
        kept = len(self._unread) + self._credit
        if not self.number or not self._is_asked or kept > self._low:
            return 0
        self._is_asked = False
        self._credit += self.buffer - kept
        return self.buffer - kept

    def settle(self, delivery: Delivery, offset: int, verb: int, delay_us: int = 0, reason: str = "") -> None:
        """Something is said of a message; it is gathered until `settlements`."""
        if self.group is None:
            raise TypeError("only messages of a group are acknowledged: subscribe with group=")
        if self.mode == PARTITIONED:
            verb, offset = _commit(verb, offset)
        about = (verb, delay_us, delivery.generation, delivery.topic_id, delivery.partition, reason)
        with self._lock:
            offsets = self._said.get(about)
            if offsets is None:
                offsets = self._begin(about)
            offsets.append(offset)

    def settlements(self) -> Iterator[tuple[int, Settlement, list[int]]]:
        """What was said, each part with the moment since when it waits. `settled` or `unsaid` must follow each."""
        with self._lock:
            if not self.number or not self._said:
                return
            said, since, self._said = self._said, self._said_since, {}
            parts = [
                (self._unsettled.enter(since), Settlement(*about), offsets[at : at + SETTLE_MAX])
                # Who asks for more time does so before it is done: the other way round it would come too late.
                for about, offsets in sorted(said.items(), key=lambda each: each[0][0] != Verb.EXTEND)
                for at in range(0, len(offsets), SETTLE_MAX)
            ]
            self._unsettled.leave(since)
        for moment, about, offsets in parts:
            # Of commits the furthest says it all.
            yield moment, about, [max(offsets)] if about.verb == _COMMIT else offsets

    def frame(self, about: Settlement, offsets: list[int]) -> Settle:
        verb, delay_us, generation, topic_id, partition, reason = about
        return Settle(self.number, verb, generation, delay_us, topic_id, partition, offsets, reason)

    def settled(self, since: int, refused: int, error: PenstockError | None = None) -> None:
        """The broker has answered: so many came too late, or none was taken at all."""
        with self._lock:
            self._unsettled.leave(since)
            self._late += refused
            self._failed = error or self._failed

    def unsaid(self, since: int, about: Settlement, offsets: list[int]) -> None:
        """The answer will not come: it is said again on the next connection."""
        with self._lock:
            if self.is_over:
                self._unsettled.leave(since)
                return
            if self._said:
                self._unsettled.leave(max(since, self._said_since))
                since = min(since, self._said_since)
            self._said_since = since
            self._said.setdefault((*about,), []).extend(offsets)

    def mark(self) -> int:
        """The moment up to which `is_settled` is asked."""
        with self._lock:
            return self._unsettled.mark()

    def is_settled(self, mark: int) -> bool:
        with self._lock:
            return self._unsettled.is_done(mark)

    def check_settled(self) -> None:
        """Raise what went wrong since the last time."""
        with self._lock:
            late, failed = self._late, self._failed
            self._late, self._failed = 0, None
        if failed is not None:
            raise failed
        if late:
            count = "1 message" if late == 1 else f"{late} messages"
            raise NotOutstanding(f"too late for {count}: done already, back with the group, or a dead letter")

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

    def _check_more(self) -> None:
        if self.ended is not None and not self.is_closed:
            raise self.ended

    def _begin(self, about: _About) -> list[int]:
        """Where offsets of which this is said are gathered."""
        if self.is_over:
            raise self.ended or Closed("the subscription is closed: what is not acknowledged is delivered again")
        if not self._said:
            self._said_since = self._unsettled.enter()
            self._wake()
        return self._said.setdefault(about, [])

    def _drop_said(self) -> None:
        """Nobody will hear it."""
        if self._said:
            self._unsettled.leave(self._said_since)
            self._said = {}


def _commit(verb: int, offset: int) -> tuple[int, int]:
    """What an acknowledgement is in a partitioned group."""
    if verb != Verb.ACK:
        raise TypeError(
            f"{Verb(verb).name.lower()} is for shared groups: in a partitioned one ack() commits all up to a message,"
            " and who has a message tries it again by himself"
        )
    return _COMMIT, offset + 1


def _nobody() -> None:
    pass


def _refuse(_: Prepared) -> None:
    raise Closed("the message came to another process, from which this one was forked: only that one can respond")
