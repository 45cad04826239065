"""What clients and their groups did while a broker was killed again and again, and whether that was right."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

from penstock.client.message import Message
from penstock.client.values import Receipt

ATTEMPTS_MAX: Final = 10
# The names of topics go to each partition in turn, what lies below them to one.
SUBJECTS: Final = ("one", "one.a", "four", "four.a", "four.b", "four.c.d", "jobs.a", "jobs.b", "jobs.c")
# How long to wait for what must come. Only a failure waits so long.
PATIENCE_S: Final = 60.0
Place = tuple[str, int]
At = tuple[str, int, int]


@dataclass(slots=True, eq=False)
class Sent:
    """A message that somebody wants to publish."""

    author: str
    number: int
    subject: str
    key: str | None
    message_id: str | None
    delay: float | None
    value: bytes = field(repr=False)
    # Whether it must be stored, and where a receipt says that it is.
    is_certain: bool = False
    receipt: Receipt | None = None

    @property
    def keeps_order(self) -> bool:
        """What is in doubt may have been on its way when later ones were stored. What goes to each partition in turn,
        and has an id, goes where the broker says."""
        goes_anywhere = self.subject == "four" and self.key is None and self.message_id is not None
        return self.is_certain and self.delay is None and not goes_anywhere

    def options(self) -> dict[str, Any]:
        return {"key": self.key, "message_id": self.message_id, "delay": self.delay}


class Stored(NamedTuple):
    """A message in a log."""

    partition: int
    offset: int
    subject: str
    key: bytes | None
    value: bytes


# By topic; its partitions in their order, each in the order of its offsets.
Log = dict[str, list[Stored]]


class ClientFigures(NamedTuple):
    kills: int
    stops: int
    cuts: int
    published: int
    in_doubt: int
    delivered: int
    again: int
    confirmed: int
    dead_letters: int

    def __str__(self) -> str:
        return (
            f"{self.kills} kills and {self.stops} stops of a server under our clients, {self.cuts} times cut off: "
            f"{self.published} messages stored, {self.in_doubt} in doubt, {self.delivered} delivered to groups, "
            f"{self.again} again, {self.confirmed} confirmed, {self.dead_letters} dead letters"
        )


def is_poison(value: bytes) -> bool:
    """Whether a group never acknowledges it."""
    return b"/poison/" in value


def at_of(message: Message) -> At:
    return message.topic, message.partition, message.offset


class Journal:
    """What the clients were told. All threads write to it, under its lock."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[bytes, Sent] = {}
        self.failures: list[BaseException] = []
        # Receipts and deliveries: by them the judge knows that there is something going on.
        self.count = 0
        # No more is published; everything is read. Until the first, members of groups are careless.
        self.is_quiet = False
        self.is_over = False
        # Of each group, what it had not done when that was last asked for.
        self.lags: dict[str, int] = {}

    def note(self, count: int) -> None:
        """Whoever has the lock got so many receipts or deliveries."""
        self.count += count
        self.changed.notify_all()

    def publishing(self, sent: Sent) -> None:
        with self.changed:
            self.sent[sent.value] = sent

    def receipt(self, sent: Sent, receipt: Receipt) -> None:
        with self.changed:
            sent.is_certain = True
            sent.receipt = receipt
            self.note(1)

    def stored(self, sent: Iterable[Sent]) -> None:
        with self.changed:
            for each in sent:
                each.is_certain = True
            self.note(1)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failures.append(error)
            self.changed.notify_all()

    def hush(self) -> None:
        with self.changed:
            self.is_quiet = True

    def end(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def wait(self, what: str, happened: Callable[[], bool], missing: Callable[[], object] = lambda: "") -> None:
        with self.changed:
            self.changed.wait_for(lambda: bool(self.failures) or happened(), PATIENCE_S)
            self.check()
            assert happened(), f"not within {PATIENCE_S} s: {what} {missing()}"

    def check(self) -> None:
        if self.failures:
            raise self.failures[0]


class Author:
    """Thinks of messages, and when to publish them. Each is of one thread or task."""

    def __init__(self, name: str, journal: Journal, seed: int, *, has_ids: bool | None = None) -> None:
        """`has_ids`: all of its messages have one, or none; None: some."""
        self.name = name
        self.sent: list[Sent] = []
        self._journal = journal
        self._random = Random(f"{seed} {name}")
        self._has_ids = has_ids

    def next(self) -> Sent:
        random = self._random
        number = len(self.sent) + 1
        subject = random.choice(SUBJECTS)
        has_id = random.random() < 0.1 if self._has_ids is None else self._has_ids
        kind = "poison" if subject.startswith("jobs") and random.random() < 0.01 else "plain"
        padding = "x" * random.choice((0, 0, 0, 10, 10, 10, 100, 100, 100, 1000, 1000, 20_000))
        sent = Sent(
            self.name,
            number,
            subject,
            key=f"k{random.randrange(9)}" if random.random() < 0.3 else None,
            message_id=f"{self.name}-{number}" if has_id else None,
            delay=random.uniform(0, 0.3) if random.random() < 0.03 else None,
            value=f"{self.name}/{number}/{kind}/{padding}".encode(),
        )
        self.sent.append(sent)
        self._journal.publishing(sent)
        return sent

    def burst(self) -> list[Sent]:
        return [self.next() for _ in range(self._random.choice((1, 5, 30)))]

    def pause_s(self) -> float:
        """So that the rest of the machine keeps up."""
        return self._random.uniform(0, 0.06)

    def is_impatient(self) -> bool:
        """Whether it flushes in between."""
        return self._random.random() < 0.05


class Reader:
    """What one plain subscription, or one that follows, was given."""

    def __init__(self, name: str, journal: Journal, seed: int, wants: Callable[[bytes], bool]) -> None:
        """`wants`: which subjects it is given."""
        self.name = name
        self.rows: dict[Place, list[tuple[int, bytes]]] = defaultdict(list)
        self.values: set[bytes] = set()
        self._journal = journal
        self._random = Random(f"{seed} {name}")
        self._wants = wants

    def take(self, messages: Sequence[Message]) -> None:
        with self._journal.changed:
            for message in messages:
                row = self.rows[message.topic, message.partition]
                assert not row or row[-1][0] < message.offset, (
                    f"{self.name}: {message} comes behind offset {row[-1][0]}, of {row[-1][1][:40]!r}"
                )
                row.append((message.offset, message.value))
                self.values.add(message.value)
            self._journal.note(len(messages))

    def pause_s(self) -> float:
        """Now and then it is slow: blows find its buffer full, or the broker far ahead of it."""
        is_slow = not self._journal.is_quiet and self._random.random() < 0.02
        return self._random.uniform(0, 1) if is_slow else 0

    def wanted(self, stored: Log) -> dict[Place, list[tuple[int, bytes]]]:
        """What it must be given."""
        rows: dict[Place, list[tuple[int, bytes]]] = defaultdict(list)
        for topic, messages in stored.items():
            for each in messages:
                if self._wants(each.subject.encode()):
                    rows[topic, each.partition].append((each.offset, each.value))
        return rows


class SharedGroup:
    """What the members of a shared group were given and said, and what of that is confirmed."""

    name: Final = "workers"
    pattern: Final = "jobs.>"
    mode: Final = "shared"

    def __init__(self, journal: Journal) -> None:
        # By which generation each message was last delivered, and the one that the group had at the most when it was
        # confirmed that it is done.
        self.delivered: dict[At, int] = {}
        self.confirmed: dict[At, int] = {}
        self.values: dict[At, bytes] = {}
        # What members said, whether that was stored or not; and what is confirmed of the rejected ones.
        self.done: set[At] = set()
        self.rejected: set[At] = set()
        self.rejections: set[At] = set()
        self.deliveries = 0
        self._journal = journal

    def take(self, message: Message, random: Random, member: str) -> bool:
        """A member says something of a message; whether that is final."""
        at = self.deliver(message)
        fate = 1.0 if self._journal.is_quiet else random.random()
        if is_poison(message.value):
            message.nack()
        elif fate < 0.02:
            message.nack(random.choice((0, 0.02)))
        elif fate < 0.04:
            message.extend()
        elif fate < 0.05:
            self.say(self.rejected, at)
            message.reject()
            return True
        else:
            self.say(self.done, at)
            message.ack()
            return True
        return False

    def handle(self, message: Message, random: Random) -> None:
        """As an app does: what this returns from is acknowledged. It fails now and then."""
        at = self.deliver(message)
        fails = not self._journal.is_quiet and random.random() < 0.05
        if fails or is_poison(message.value):
            if message.attempts >= ATTEMPTS_MAX:
                self.say(self.rejected, at)
            raise ValueError(f"{message} is not to its liking")
        self.say(self.done, at)

    def deliver(self, message: Message) -> At:
        at = at_of(message)
        with self._journal.changed:
            before = self.values.setdefault(at, message.value)
            assert before == message.value, f"{self.name}: at {at} was {before!r} and is {message.value!r}"
            self.delivered[at] = max(self.delivered.get(at, 0), message.generation)
            self.deliveries += 1
            self._check(at)
            self._journal.note(1)
        return at

    def say(self, said: set[At], at: At) -> None:
        with self._journal.changed:
            said.add(at)

    def confirm(self, said: Sequence[At], generation: int) -> None:
        with self._journal.changed:
            for at in said:
                self.confirmed[at] = min(self.confirmed.get(at, generation), generation)
                if at in self.rejected and at not in self.done:
                    self.rejections.add(at)
                self._check(at)

    def committed(self) -> dict[Place, int]:
        """Nobody commits."""
        return {}

    def _check(self, at: At) -> None:
        delivered, confirmed = self.delivered[at], self.confirmed.get(at)
        assert confirmed is None or delivered <= confirmed, (
            f"{self.name}: {at}, {self.values[at][:40]!r}, is delivered by generation {delivered}, though by "
            f"{confirmed} it was confirmed to be {'rejected' if at in self.rejections else 'acknowledged'}"
        )


class PartitionedGroup:
    """What the members of a partitioned group were given, and the commits that are confirmed."""

    name: Final = "keepers"
    pattern: Final = "four.>"
    mode: Final = "partitioned"

    def __init__(self, journal: Journal) -> None:
        # What came by each generation, and to whom; commits as in `SharedGroup`: (generation, offset).
        self.rows: dict[Place, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.owners: dict[tuple[Place, int], str] = {}
        self.commits: dict[Place, list[tuple[int, int]]] = defaultdict(list)
        self.deliveries = 0
        self._journal = journal

    def take(self, message: Message, random: Random, member: str) -> bool:
        """A member may commit a message; whether it does."""
        place, generation = (message.topic, message.partition), message.generation
        with self._journal.changed:
            row = self.rows[place][generation]
            assert not row or row[-1] < message.offset, (
                f"{self.name}: {message} comes behind {row[-1]}, by the same generation {generation}"
            )
            row.append(message.offset)
            owner = self.owners.setdefault((place, generation), member)
            assert owner == member, f"{self.name}: by generation {generation} {place} is {owner}'s and {member}'s"
            self.deliveries += 1
            self._journal.note(1)
        commits = self._journal.is_quiet or random.random() < 0.5
        if commits:
            message.ack()
        return commits

    def confirm(self, said: Sequence[At], generation: int) -> None:
        with self._journal.changed:
            for topic, partition, offset in said:
                self.commits[topic, partition].append((generation, offset + 1))

    def committed(self) -> dict[Place, int]:
        """As far as it is confirmed."""
        with self._journal.changed:
            return {place: max(offset for _, offset in commits) for place, commits in self.commits.items()}
