"""Dead letters: messages that a group could not handle. They are listed, looked at, and sent to their subject again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple, Protocol

from penstock import headers
from penstock.broker.mover import Mover
from penstock.broker.partition import Partition
from penstock.broker.sources import pause
from penstock.broker.topic import ServedTopic
from penstock.clock import Clock
from penstock.errors import BadRequest, PenstockError
from penstock.run import Run
from penstock.storage.store import Store
from penstock.subject import is_subject, matches


class Host(Protocol):
    clock: Clock
    store: Store

    async def owner(self, subject: bytes) -> ServedTopic: ...

    def partition(self, topic_id: int, number: int) -> Partition | None: ...


class DeadLetter(NamedTuple):
    partition: int
    offset: int
    # Where it was published, and where it lies in its topic.
    subject: bytes
    topic: bytes
    origin_partition: int
    origin_offset: int
    group: bytes
    reason: bytes
    attempts: int
    # When it became a dead letter, in µs since 1970.
    time_us: int
    value: bytes
    headers: bytes
    is_redriven: bool


class DeadLetters:
    def __init__(self, topic: ServedTopic, host: Host) -> None:
        self._host = host
        self._movers: dict[Partition, Mover] = {}
        self.serve(topic)

    def serve(self, topic: ServedTopic) -> None:
        """Serve the topic as it is now: it may have been given more partitions."""
        self.topic = topic
        for partition in topic.partitions:
            if partition not in self._movers:
                name = f"redriven {partition.topic_id} {partition.number}"
                self._movers[partition] = Mover(name, partition, self._host, self._route, self._shape)

    async def list(self, pattern: bytes = b">", *, redriven: bool = False) -> AsyncIterator[DeadLetter]:
        """Those whose own subject matches, oldest first; with `redriven`, also those that were sent again."""
        for partition, mover in list(self._movers.items()):
            offset = partition.start
            while (found := await partition.read(offset)) is not None:
                run, offset = found
                for index in range(len(run)):
                    await pause(index)
                    is_redriven = mover.has_arrived(run.offset(index))
                    subject = None if is_redriven and not redriven else _subject(run.headers.get(index, b""))
                    if subject is not None and matches(pattern, subject):
                        yield _letter(partition, run, index, is_redriven)

    async def peek(self, partition: int, offset: int) -> DeadLetter | None:
        async for letter in self.list(redriven=True):
            if (letter.partition, letter.offset) == (partition, offset):
                return letter
        return None

    async def redrive(
        self, pattern: bytes = b">", count: int | None = None, offsets: Iterable[int] | None = None
    ) -> int:
        """Publish dead letters to their subjects again, and return how many. Each is published once, even if this is
        interrupted and called again.

        `offsets`: only those there. Raises if some of them cannot be published; then these are still listed.
        """
        wanted = None if offsets is None else frozenset(offsets)
        chosen: dict[int, list[int]] = {}
        taken = 0
        async for letter in self.list(pattern):
            if count is not None and taken >= count:
                break
            if wanted is not None and letter.offset not in wanted:
                continue
            chosen.setdefault(letter.partition, []).append(letter.offset)
            taken += 1
        failed: list[PenstockError] = []
        for partition, mover in list(self._movers.items()):
            failed += (await mover.move(chosen.get(partition.number, []), retry=True)).values()
        if failed:
            raise failed[0]
        return taken

    async def _route(self, run: Run) -> Partition:
        subject = _known_subject(run)
        if headers.value_of(run.headers[0], b"Dead-Letter-Is-Empty") is not None:
            raise BadRequest(
                f"dead letter {run.offset(0)} cannot be redriven: its message was too large for a dead letter;"
                " fetch it from its topic, at the offset that the letter names"
            )
        topic = await self._host.owner(subject)
        return topic.choose(subject, run.keys.get(0))

    def _shape(self, run: Run, _target: Partition) -> Run:
        """Return the message as it was published."""
        again = Run([_known_subject(run)], run.values)
        again.keys, again.tombstones = run.keys, run.tombstones
        block = headers.without(run.headers[0], b"dead-letter-")
        if block:
            again.headers[0] = block
        return again


def _subject(block: bytes) -> bytes | None:
    """Return the subject of a dead letter; None if it is a message that somebody published there."""
    subject = headers.value_of(block, b"Dead-Letter-Subject")
    return subject if subject is not None and is_subject(subject) else None


def _known_subject(run: Run) -> bytes:
    subject = _subject(run.headers[0])
    assert subject is not None, "it was listed"
    return subject


def _letter(partition: Partition, run: Run, index: int, is_redriven: bool) -> DeadLetter:
    block = run.headers[index]

    def field(name: bytes) -> bytes:
        return headers.value_of(block, b"Dead-Letter-" + name) or b""

    def number(name: bytes) -> int:
        return int(field(name)) if field(name).isdigit() and len(field(name)) <= 20 else -1

    return DeadLetter(
        partition.number,
        run.offset(index),
        field(b"Subject"),
        field(b"Topic"),
        number(b"Partition"),
        number(b"Offset"),
        field(b"Group"),
        field(b"Reason"),
        number(b"Attempts"),
        run.time_us(index),
        run.values[index],
        headers.without(block, b"dead-letter-"),
        is_redriven,
    )
