"""Topics by name, and which partition a message belongs to.

A topic stores the subjects at and below its name, and no topic's name lies at or below another's: so a subject has
one owner for ever. Of a topic's partitions a message goes to the one of its key; without a key to that of its
subject, if it lies below the topic's name, so that each subject keeps its order. Messages without a key at the topic's
own name are spread evenly: a run of them is cut into a few pieces, each for the partition that was given least.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapreplace
from typing import Final

from penstock.broker.dedup import DedupWindow
from penstock.broker.memo import Memo
from penstock.broker.partition import LivePartition, Partition
from penstock.broker.value_check import Check
from penstock.errors import (
    BadHeader,
    BadSubject,
    PenstockError,
    ReadOnlyTopic,
    StaleLayout,
    TopicConflict,
    UnknownTopic,
)
from penstock.health import Usage
from penstock.log.policy import Dedup as DedupMode
from penstock.log.policy import Topic
from penstock.model import headers
from penstock.model.batch import Batch, Columns
from penstock.model.headers import hash_key
from penstock.model.subject import AUDIT_SUBJECT, is_subject, meets, owns
from penstock.security.identity import Identity

# Topics whose names begin so are the broker's own.
RESERVED: Final = b"$"
# Subjects that begin so are never stored: inboxes, services (`$SRV`), and what nats-server keeps for itself (`$JS`, …).
LIVE: Final = (b"_", RESERVED)
# The minimum size of a piece of a run: each piece costs as much as a run, so a run of a few messages is not cut.
PIECE_MESSAGES_MIN: Final = 16
# Of subjects whose owner is remembered.
_REMEMBERED_BYTES_MAX: Final = 16 << 20


class ServedTopic:
    """A topic, its partitions, and what of them was already seen, where it is asked for."""

    __slots__ = ("_given", "check", "dedup", "name", "partitions", "refusal", "topic")

    def __init__(
        self,
        topic: Topic,
        partitions: list[Partition],
        refusal: PenstockError | None = None,
        check: Check | None = None,
    ) -> None:
        self.topic = topic
        # Why it cannot be served, if one of its logs could not be opened: then it has no partitions here.
        self.refusal = refusal
        self.name = topic.name.encode()
        self.partitions = partitions
        # What was stored not long ago, once it was read from the logs because somebody asked for a repetition.
        self.dedup: DedupWindow | None = None
        # What checks its values, if it enforces its schema.
        self.check = check
        # A heap: how many messages without a key were given to which partition.
        self._given: list[tuple[int, int]] = []

    @property
    def is_internal(self) -> bool:
        """Whether it is internal: clients neither read nor write it."""
        return self.topic.is_internal

    @property
    def is_piped(self) -> bool:
        """Whether it is a copy of another broker's topic, which is read-only here."""
        return self.topic.origin is not None

    def check_writable(self) -> None:
        """Raise unless messages can be published to it."""
        if self.refusal is not None:
            raise self.refusal
        if self.topic.is_audit:
            raise ReadOnlyTopic(f"the topic {self.topic.name} is written by the broker alone")
        if self.is_piped:
            raise ReadOnlyTopic(
                f"the topic {self.topic.name} is piped from another broker and read-only here: publish it at its origin"
            )

    def check_layout(self, number: int, partitions: int) -> None:
        """Raise StaleLayout if a client chose a partition that is not there, or among another number of them."""
        count = len(self.partitions)
        if partitions != count:
            raise StaleLayout(f"the topic {self.topic.name} has {count} partitions, not {partitions}: look again")
        if number >= count:
            raise StaleLayout(f"invalid partition {number}: topic {self.topic.name} has {count} (0-{count - 1})")

    def takes_opaque(self, *, asks: bool) -> bool:
        """Return whether a batch can be stored without decoding it."""
        return not (asks or self.topic.policy.dedup is DedupMode.PAYLOAD)

    def choose(self, subject: bytes, key: bytes | None) -> Partition:
        """Return the partition of one message, and count it there."""
        fixed = self.fixed(subject, key)
        return next(self.spread(1))[0] if fixed is None else fixed

    def fixed(self, subject: bytes, key: bytes | None) -> Partition | None:
        """Return the partition of a message, or None if `spread` may choose any."""
        partitions = self.partitions
        if len(partitions) == 1:
            return partitions[0]
        if key is not None:
            return partitions[hash_key(key) % len(partitions)]
        if subject != self.name:
            return partitions[hash_key(subject) % len(partitions)]
        return None

    def spread(self, count: int) -> Iterator[tuple[Partition, range]]:
        """Cut `count` messages that may go to any partition into pieces, in order, each for one partition."""
        partitions, given = self.partitions, self._given
        if len(given) != len(partitions):
            # There are more than before: all begin anew, or the new ones would be given everything for a while.
            given = self._given = [(0, number) for number in range(len(partitions))]
        pieces = max(1, min(len(partitions), count // PIECE_MESSAGES_MIN))
        for piece in range(pieces):
            places = range(count * piece // pieces, count * (piece + 1) // pieces)
            least, number = given[0]
            heapreplace(given, (least + len(places), number))
            yield partitions[number], places


class Topics:
    def __init__(self) -> None:
        self._topics: dict[bytes, ServedTopic] = {}
        self._by_id: dict[int, ServedTopic] = {}
        self._remembered: Memo[ServedTopic] = Memo(_REMEMBERED_BYTES_MAX)

    def __iter__(self) -> Iterator[ServedTopic]:
        return iter(self._topics.values())

    def __len__(self) -> int:
        return len(self._topics)

    def get(self, name: bytes) -> ServedTopic | None:
        return self._topics.get(name)

    def by_id(self, topic_id: int) -> ServedTopic | None:
        return self._by_id.get(topic_id)

    def named(self, name: bytes) -> ServedTopic:
        """Return a topic that clients may know of. Raises UnknownTopic."""
        served = self._topics.get(name)
        if served is None or served.is_internal:
            raise UnknownTopic(f"there is no topic {name.decode(errors='replace')}: create it, or publish to it")
        return served

    def public(self, topic_id: int, identity: Identity | None = None) -> ServedTopic:
        """Return a topic that clients may read and write. Raises if it cannot be served. `identity`: to this client, a
        topic that it may not know of is one that does not exist."""
        topic = self._by_id.get(topic_id)
        if topic is None or topic.is_internal or not (identity is None or identity.shows_topic(topic.name)):
            raise UnknownTopic(f"there is no topic with id {topic_id}")
        if topic.refusal is not None:
            raise topic.refusal
        return topic

    def partition(self, topic_id: int, number: int) -> Partition | None:
        """Return a partition, or None if there is none. Raises if its topic cannot be opened."""
        topic = self._by_id.get(topic_id)
        if topic is not None and topic.refusal is not None:
            raise topic.refusal
        return topic.partitions[number] if topic is not None and number < len(topic.partitions) else None

    def matching(self, pattern: bytes) -> list[Partition]:
        """Return the partitions that may hold messages with subjects that match."""
        topics = [topic for topic in self if selects(pattern, topic.name) and not topic.is_internal]
        return [partition for topic in topics for partition in topic.partitions]

    def owner(self, subject: bytes) -> ServedTopic | None:
        """The topic that stores this subject, if there is one."""
        found = self._remembered.get(subject)
        if found is None:
            tokens = subject.split(b".")
            for length in range(1, len(tokens) + 1):
                found = self._topics.get(b".".join(tokens[:length]))
                if found is not None:
                    self._remembered.put(subject, found)
                    break
        return found

    @property
    def usage(self) -> Usage:
        return self._remembered.usage

    def check_new(self, name: bytes, coming: Iterable[bytes]) -> None:
        """Raise unless a topic can have this name beside those that there are, and that are being made."""
        for other in (*self._topics, *coming):
            if owns(other, name):
                raise TopicConflict(f"{name.decode()} belongs to the topic {other.decode()}, which exists")
            if owns(name, other):
                raise TopicConflict(f"{name.decode()} would own the subjects of the topic {other.decode()}")

    def add(self, topic: ServedTopic) -> None:
        self._topics[topic.name] = topic
        self._by_id[topic.topic.id] = topic
        self._remembered.clear()

    def remove(self, name: bytes) -> None:
        del self._by_id[self._topics.pop(name).topic.id]
        self._remembered.clear()


def selects(pattern: bytes, topic: bytes) -> bool:
    """Return whether a reader's pattern can match subjects of a topic. The audit trail must be named."""
    return meets(pattern, topic) and (topic != AUDIT_SUBJECT or pattern.startswith(AUDIT_SUBJECT))


def is_reserved(topic: bytes) -> bool:
    """Return whether nobody may subscribe to a topic: it is the broker's own, and not the audit trail."""
    return topic.startswith(RESERVED) and not owns(AUDIT_SUBJECT, topic.partition(b" ")[0])


def visible_topics(topics: Iterable[ServedTopic], identity: Identity | None) -> list[ServedTopic]:
    """Return the topics that a client may know of."""
    return [
        topic for topic in topics if not topic.is_internal and (identity is None or identity.shows_topic(topic.name))
    ]


def check_lines(batch: Batch, topic: bytes | None = None, columns: Columns | None = None) -> None:
    """What a batch from outside says of its messages must fit into the lines of text, and be true of the topic if it is
    for one. Its keys must not be longer than any message's."""
    if batch.has("key") and batch.plain_length > headers.KEY_BYTES_MAX:
        columns = columns or batch.columns()
        headers.check_key_size(columns.longest("key"))
    check_stored_lines(batch, topic, columns)


def check_stored_lines(batch: Batch, topic: bytes | None, columns: Columns | None = None) -> None:
    """The same for a batch that another broker has stored, and that must not be refused for its keys."""
    if not any(map(batch.has, ("subject", "reply", "headers"))):
        return
    columns = columns or batch.columns()
    for subject in columns.distinct("subject") if topic is not None else ():
        if not is_subject(subject) or not owns(topic or b"", subject):
            raise BadSubject(f"{subject.decode(errors='replace')!r} is not a subject of this topic")
    for reply in columns.distinct("reply"):
        if not is_subject(reply):
            raise BadSubject(f"{reply.decode(errors='replace')!r} cannot be a reply subject")
    if not all(map(headers.is_block, columns.distinct("headers"))):
        raise BadHeader("headers are lines, each with its end: Name: value")


Target = Partition | LivePartition
