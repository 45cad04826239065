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

from penstock import headers
from penstock.batch import Batch, Columns
from penstock.broker.dedup import Dedup
from penstock.broker.memo import Memo
from penstock.broker.partition import LivePartition, Partition
from penstock.errors import BadHeader, BadSubject, PenstockError, ReadOnlyTopic, TopicConflict
from penstock.headers import hash_key
from penstock.health import Usage
from penstock.storage.policy import Dedup as DedupMode
from penstock.storage.policy import Topic
from penstock.subject import is_subject, owns

# Topics whose names begin so are the broker's own.
RESERVED: Final = b"$"
# Subjects that begin so are never stored: inboxes, services (`$SRV`), and what nats-server keeps for itself (`$JS`, …).
LIVE: Final = (b"_", RESERVED)
# A piece of a run has at least so many messages: each costs as much as a run, so one of a few messages is not cut.
PIECE_MESSAGES_MIN: Final = 16
# Of subjects whose owner is remembered.
_REMEMBERED_BYTES_MAX: Final = 16 << 20


class ServedTopic:
    """A topic, its partitions, and what of them was already seen, where it is asked for."""

    __slots__ = ("_given", "dedup", "name", "partitions", "refusal", "topic")

    def __init__(self, topic: Topic, partitions: list[Partition], refusal: PenstockError | None = None) -> None:
        self.topic = topic
        # Why it cannot be served, if one of its logs could not be opened: then it has no partitions here.
        self.refusal = refusal
        self.name = topic.name.encode()
        self.partitions = partitions
        # What was stored not long ago, once it was read from the logs because somebody asked for a repetition.
        self.dedup: Dedup | None = None
        # A heap: how many messages without a key were given to which partition.
        self._given: list[tuple[int, int]] = []

    @property
    def is_internal(self) -> bool:
        """Whether it is the broker's own, which nobody reads or writes."""
        return self.topic.is_internal

    @property
    def is_piped(self) -> bool:
        """Whether it is a copy of another broker's, to which nothing is published here."""
        return self.topic.origin is not None

    def check_writable(self) -> None:
        """Raise unless messages can be published to it."""
        if self.refusal is not None:
            raise self.refusal
        if self.is_piped:
            raise ReadOnlyTopic(
                f"the topic {self.topic.name} is piped from another broker and read-only here: publish it at its origin"
            )

    def takes_opaque(self, *, asks: bool) -> bool:
        """Whether a batch can be stored as it came: nobody wants to know what is in it."""
        return not (asks or self.topic.policy.dedup is DedupMode.PAYLOAD)

    def choose(self, subject: bytes, key: bytes | None) -> Partition:
        """Return the partition of one message, and count it there."""
        fixed = self.fixed(subject, key)
        return next(self.spread(1))[0] if fixed is None else fixed

    def fixed(self, subject: bytes, key: bytes | None) -> Partition | None:
        """Return the partition of a message, or None if it may go to any: `spread` tells where."""
        partitions = self.partitions
        if len(partitions) == 1:
            return partitions[0]
        if key is not None:
            return partitions[hash_key(key) % len(partitions)]
        if subject != self.name:
            return partitions[hash_key(subject) % len(partitions)]
        return None

    def spread(self, count: int) -> Iterator[tuple[Partition, range]]:
        """Cut so many messages that may go to any partition into pieces, in order, each for one partition."""
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
