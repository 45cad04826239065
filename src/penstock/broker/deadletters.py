"""Dead letters: messages that a group could not handle. They are listed, redriven and purged.

A redriven letter is published to its subject again, for all readers of that subject. A letter that is redriven to its
group is not copied: its message is still in its topic, and the group goes back to it. A purged letter is not listed any
more, and remains in the log until retention removes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.mover import Mover
from penstock.broker.partition import Partition
from penstock.broker.position import Position
from penstock.broker.sources import pause
from penstock.broker.topic import ServedTopic, Topics
from penstock.clock import Clock
from penstock.errors import BadRequest, Overloaded, PenstockError
from penstock.model import headers
from penstock.model.run import Run, read_ttls
from penstock.model.subject import SUBJECT_BYTES_MAX, is_subject, matches, owns
from penstock.store.meta import Change
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.broker.changes import TopicChanges
    from penstock.broker.groups import Groups


class RedriveHost(Protocol):
    """The broker, as far as dead letters are redriven in it."""

    clock: Clock
    store: Store
    topics: Topics
    changes: TopicChanges
    groups: Groups


class DeadLetter(NamedTuple):
    partition: int
    offset: int
    # Where the message was published, and where it is in its topic.
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


class DeadLetterFilter(NamedTuple):
    """Selects the dead letters that meet every condition that is not None."""

    # Of the subjects that their messages were published to.
    pattern: bytes = b">"
    group: bytes | None = None
    # Part of the reason, in upper or lower case.
    reason: str | None = None
    # When they became dead letters: at or after, and before.
    since_us: int | None = None
    until_us: int | None = None
    # Where the letters are.
    partition: int | None = None
    offsets: frozenset[int] | None = None

    def meets(self, letter: DeadLetter) -> bool:
        return (
            (self.group is None or letter.group == self.group)
            and (self.reason is None or self.reason.casefold() in letter.reason.decode(errors="replace").casefold())
            and (self.since_us is None or letter.time_us >= self.since_us)
            and (self.until_us is None or letter.time_us < self.until_us)
            and (self.partition is None or letter.partition == self.partition)
            and (self.offsets is None or letter.offset in self.offsets)
        )


_ALL: Final = DeadLetterFilter()


@dataclass(frozen=True, slots=True)
class Redriven:
    count: int
    # How many could not be redriven and are still listed, and why the first of them could not.
    skipped: int = 0
    reason: str | None = None


class _Origin(NamedTuple):
    """The place of a letter's message, for its group."""

    group: Group
    position: Position[Partition]
    offset: int


class DeadLetters:
    def __init__(self, topic: ServedTopic, host: RedriveHost) -> None:
        self._host = host
        self._movers: dict[Partition, Mover] = {}
        self.serve(topic)

    def serve(self, topic: ServedTopic) -> None:
        """Serve the topic as it is now: it may have more partitions than before."""
        self.topic = topic
        for partition in topic.partitions:
            if partition not in self._movers:
                name = f"redriven {partition.topic_id} {partition.number}"
                self._movers[partition] = Mover(name, partition, self._host, self._route, self._shape)

    async def list(self, wanted: DeadLetterFilter = _ALL, *, redriven: bool = False) -> AsyncIterator[DeadLetter]:
        """Yield letters that are not purged, oldest first; with `redriven`, also those that were redriven."""
        for partition, mover in list(self._movers.items()):
            cursor = partition.cursor(partition.start)
            while (found := await cursor.read()) is not None:
                run, cursor.offset = found.run, found.following
                for index in range(len(run)):
                    await pause(index)
                    is_redriven = mover.moves.has_arrived(run.offset(index))
                    if is_redriven and (not redriven or mover.moves.is_dropped(run.offset(index))):
                        continue
                    subject = _subject(run.headers.get(index, b""))
                    if subject is None or not _is_letter(partition.name, run.subjects[index], subject):
                        continue
                    if matches(wanted.pattern, subject):
                        letter = _letter(partition, run, index, is_redriven=is_redriven)
                        if wanted.meets(letter):
                            yield letter

    async def redrive(
        self, wanted: DeadLetterFilter = _ALL, count: int | None = None, *, to_group: bool = False
    ) -> Redriven:
        """Publish dead letters to their subjects again. Each is published once, even if this is interrupted and called
        again. `to_group`: redeliver each to the group that failed, and to nobody else.

        Letters that cannot be redriven are skipped, and still listed. Raises if none can.
        """
        chosen = await self._choose(wanted, count)
        failed: list[PenstockError] = []
        for partition, mover in list(self._movers.items()):
            offsets = chosen.get(partition.number, [])
            try:
                found = await (self._requeue(mover, offsets) if to_group else mover.move(offsets, retry=True))
            except PenstockError as error:
                # Some of them may have been redriven before the error.
                found = {offset: error for offset in offsets if not mover.moves.has_arrived(offset)}
            failed += found.values()
        redriven = sum(map(len, chosen.values())) - len(failed)
        if failed and not redriven:
            raise failed[0]
        return Redriven(redriven, len(failed), str(failed[0]) if failed else None)

    async def purge(self, wanted: DeadLetterFilter = _ALL, count: int | None = None) -> int:
        """Remove dead letters from the list, and return how many."""
        chosen = await self._choose(wanted, count)
        for partition, mover in list(self._movers.items()):
            await mover.drop(chosen.get(partition.number, []))
        return sum(map(len, chosen.values()))

    async def _choose(self, wanted: DeadLetterFilter, count: int | None) -> dict[int, Sequence[int]]:
        """Return the offsets of the first letters that are wanted, by partition."""
        chosen: dict[int, list[int]] = {}
        taken = 0
        async for letter in self.list(wanted):
            if count is not None and taken >= count:
                break
            chosen.setdefault(letter.partition, []).append(letter.offset)
            taken += 1
        return {**chosen}

    async def _requeue(self, mover: Mover, offsets: Sequence[int]) -> dict[int, PenstockError]:
        """Let groups go back to the messages of these letters. Return why some cannot, by offset."""
        failed: dict[int, PenstockError] = {}
        found: dict[int, _Origin] = {}
        taken: Counter[Position[Partition]] = Counter()
        for index, offset in enumerate(offsets):
            await pause(index)
            try:
                origin = await self._find_origin(mover.partition, offset)
                if taken[origin.position] >= origin.position.inflight.room():
                    raise Overloaded(
                        f"dead letter {offset} is not redriven yet: too many messages of its group are pending;"
                        " redrive it when the group has caught up"
                    )
            except PenstockError as error:
                failed[offset] = error
                continue
            taken[origin.position] += 1
            found[offset] = origin

        def requeue(letters: Sequence[int]) -> list[Change]:
            origins: dict[tuple[Group, Position[Partition]], list[int]] = {}
            for group, position, offset in map(found.__getitem__, letters):
                origins.setdefault((group, position), []).append(offset)
            return [
                change
                for (group, position), together in origins.items()
                for change in group.requeue(position, together)
            ]

        await mover.replace(list(found), requeue)
        return failed

    async def _find_origin(self, partition: Partition, offset: int) -> _Origin:
        """Return where the message of a letter is, for its group. Raises if the group cannot go back to it."""

        def refused(reason: str) -> BadRequest:
            return BadRequest(f"dead letter {offset} cannot be redriven to its group: {reason}")

        stored = await partition.cursor(offset).read_message()
        if stored is None:
            raise refused("retention removed it")
        letter = _letter(partition, stored, 0, is_redriven=False)
        group = self._host.groups[letter.group]
        position = next(
            (
                each
                for each in group.positions.values()
                if (each.partition.name, each.partition.number) == (letter.topic, letter.origin_partition)
            ),
            None,
        )
        if position is None or group.mode is not Mode.SHARED:
            raise refused(f"{letter.group.decode()} is not a shared group that reads {letter.topic.decode()} any more")
        run = await position.partition.cursor(letter.origin_offset).read_message()
        if run is None or not _is_of(stored, run):
            raise refused("its message is not in its topic any more; redrive it to its subject")
        if not run.split_expired(self._host.clock.now_us())[0].values:
            raise refused("its message has expired; redrive it to its subject, where its TTL begins anew")
        if position.inflight.is_dead(letter.origin_offset):
            raise refused("the group is still storing it; try again")
        return _Origin(group, position, letter.origin_offset)

    async def _route(self, run: Run) -> Partition:
        subject = _known_subject(run)
        if headers.value_of(run.headers[0], b"Dead-Letter-Is-Empty") is not None:
            raise BadRequest(
                f"dead letter {run.offset(0)} cannot be redriven: its message was too large for a dead letter;"
                " fetch it from its topic, at the offset that the letter names"
            )
        topic = await self._host.changes.owner(subject)
        return topic.choose(subject, run.keys.get(0))

    def _shape(self, run: Run, _target: Partition) -> Run:
        """Return the message as it was published."""
        again = Run([_known_subject(run)], run.values)
        again.keys, again.tombstones = run.keys, run.tombstones
        block = headers.without(run.headers[0], b"dead-letter-")
        if (ttl := headers.value_of(run.headers[0], b"Dead-Letter-Ttl")) is not None:
            block = headers.without(block, headers.TTL) + b"Nats-TTL: %b\r\n" % ttl
        if block:
            again.headers[0] = block
            again.ttls = read_ttls({0: block})
        return again


def _subject(block: bytes) -> bytes | None:
    """Return the subject that headers name; None for messages without, which clients published to the topic."""
    subject = headers.value_of(block, b"Dead-Letter-Subject")
    return subject if subject is not None and is_subject(subject) else None


def _is_letter(prefix: bytes, at: bytes, subject: bytes) -> bool:
    """Return whether a message that was published at a subject is a dead letter of another. A client that may
    publish dead letters of some subjects cannot forge those of others."""
    full = b"%b.%b" % (prefix, subject)
    # Pipelines shorten a subject that is too long to that of its topic.
    return at == full or (len(full) > SUBJECT_BYTES_MAX and at != prefix and owns(at, full))


def _is_of(letter: Run, run: Run) -> bool:
    """Return whether a letter is that of a message, and not of one in a deleted topic of the same name."""
    is_empty = headers.value_of(letter.headers[0], b"Dead-Letter-Is-Empty") is not None
    return _subject(letter.headers[0]) == run.subjects[0] and (is_empty or letter.values[0] == run.values[0])


def _known_subject(run: Run) -> bytes:
    subject = _subject(run.headers[0])
    assert subject is not None, "it was listed"
    return subject


def _letter(partition: Partition, run: Run, index: int, *, is_redriven: bool) -> DeadLetter:
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
