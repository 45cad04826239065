"""The way in: from a run that somebody publishes to the partitions where its messages belong.

Most runs have one subject and no headers, and go to one partition as they are. Of the others each message is looked
at: its key, its id, and whether it is for later.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.broker.dedup import DedupWindow
from penstock.broker.dedup_windows import UNPLACED, DedupWindows, packed, payload_identity, unpacked
from penstock.broker.delay import Delays
from penstock.broker.opened import in_worker_if_large
from penstock.broker.order import Order, Publisher
from penstock.broker.partition import LivePartition, LiveQueue
from penstock.broker.topic import LIVE, ServedTopic, Target, Topics
from penstock.broker.value_check import Check
from penstock.clock import Clock
from penstock.errors import BadRequest, PenstockError, ReadOnlyTopic, UnknownTopic
from penstock.log.policy import Dedup as DedupMode
from penstock.model import headers
from penstock.model.batch import Batch
from penstock.model.run import Run
from penstock.model.subject import AUDIT_SUBJECT, owns
from penstock.outcome import Outcome
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.broker.changes import TopicChanges

# Why messages cannot be stored: those with a subject, or one by its index in the run.
Refusals = dict[bytes | int, PenstockError]


class Stored(NamedTuple):
    """The place of a message of a run. Partition and offset are -1 while it is delayed, or if it is not stored."""

    topic: bytes
    partition: int
    offset: int
    is_duplicate: bool


class Receipt:
    """The results of the messages of a published run. Its `outcome` is settled when all of them are decided,
    with the first error if there is one."""

    __slots__ = ("_waiting", "count", "duplicates", "failed", "late", "outcome", "places")

    def __init__(self, count: int) -> None:
        self.outcome = Outcome()
        self.count = count
        # Why messages are not stored, by their place in the run.
        self.failed: dict[int, PenstockError] = {}
        # Which of the messages were stored before, and are not again: the topic and the id of each.
        self.duplicates: dict[int, tuple[ServedTopic, bytes]] = {}
        # Which of the messages are for later, and the topic of each.
        self.late: dict[int, bytes] = {}
        # Where the messages went: partition, first offset, and their places in the run.
        self.places: list[tuple[Target, int, Sequence[int]]] = []
        # Parts that are not decided; until `close` there may come more.
        self._waiting = 1

    @property
    def error(self) -> PenstockError | None:
        return next(iter(self.failed.values()), None)

    def stored(self) -> list[Stored | PenstockError]:
        """The result of each message, once it is known."""
        found: list[Stored | PenstockError] = [_NOWHERE] * self.count
        for target, offset, indices in self.places:
            for step, index in enumerate(indices):
                place = (target.number, offset + step) if target.keeps else (-1, -1)
                found[index] = Stored(target.name, *place, False)
        for index, name in self.late.items():
            found[index] = Stored(name, -1, -1, False)
        for index, (topic, identity) in self.duplicates.items():
            assert topic.dedup is not None
            found[index] = Stored(topic.name, *unpacked(topic.dedup.get(identity)), True)
        for index, error in self.failed.items():
            found[index] = error
        return found

    def part(self, indices: Sequence[int]) -> Outcome:
        """Return the outcome of some of the messages, which the code that stores them settles."""
        self._waiting += 1

        def settle(error: PenstockError | None) -> None:
            if error is not None:
                self.refuse(indices, error)
            self.close()

        return Outcome(settle)

    def refuse(self, indices: Sequence[int], error: PenstockError) -> None:
        for index in indices:
            self.failed.setdefault(index, error)

    def close(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.outcome.settle(self.error)


_NOWHERE: Final = Stored(b"", -1, -1, False)


class Appended(NamedTuple):
    """The place of a producer's batch."""

    offset: int
    # It was stored before, and is not again.
    is_duplicate: bool


class IntakeHost(Protocol):
    """The broker, as far as publishing needs it."""

    clock: Clock
    store: Store
    topics: Topics
    changes: TopicChanges
    delays: Delays | None
    dedup_windows: DedupWindows


class Intake:
    def __init__(self, host: IntakeHost, live: LivePartition, order: Order) -> None:
        self._host = host
        self._live = live
        self._order = order

    def is_ready(
        self,
        run: Run,
        publisher: Publisher | None = None,
        checked: Container[Check] = (),
        refused: Container[bytes | int] = (),
    ) -> bool:
        """Return whether `publish` can take the run as things are; if not, `prepare` makes it so.

        `checked`: the schemas that its values were checked with; `refused`: subjects that are not to be stored.
        """
        subject = run.subject
        if run.is_live or (subject is not None and subject.startswith(LIVE)):
            # Messages that have to wait for the disk count with those that wait for it.
            return publisher is None or not publisher.is_waiting or not self._host.store.rounds.unflushed.is_crowded
        if self._host.store.rounds.unflushed.is_crowded:
            return False
        subjects = set(run.subjects) if subject is None else (subject,)
        return all(
            each in refused or self._knows(each, has_headers=bool(run.headers), checked=checked) for each in subjects
        )

    async def prepare(self, run: Run, checked: set[Check], refused: Container[bytes | int] = ()) -> Refusals:
        """Make the topics that the run needs, read what must be known of them, check values against enforced schemas,
        and wait for the disk to catch up.

        Subjects and messages for which that cannot be, with the reason: for `publish`. The schemas that values were
        checked with are added to `checked`. Nothing is done for `refused` subjects.
        """
        refusals: Refusals = {}
        for subject in set(run.subjects):
            if not (run.is_live or subject.startswith(LIVE) or subject in refused):
                try:
                    await self._host.dedup_windows.open(await self._host.changes.owner(subject))
                except PenstockError as error:
                    refusals[subject] = error.with_traceback(None)  # whose frames would keep the run alive
        if not run.is_live:
            refusals |= await self._check_values(run, checked)
        await self._host.store.rounds.unflushed.room()
        return refusals

    async def _check_values(self, run: Run, checked: set[Check]) -> Refusals:
        """Return why values do not match the enforced schema of their topic, by index."""
        checks: dict[bytes, Check] = {}
        for subject in set(run.subjects):
            topic = None if subject.startswith(LIVE) else self._host.topics.owner(subject)
            if topic is not None and topic.check is not None and topic.check not in checked:
                checks[subject] = topic.check
        failed: Refusals = {}
        for check in set(checks.values()):
            mine = [index for index, subject in enumerate(run.subjects) if checks.get(subject) is check]
            exempt = {step for step, index in enumerate(mine) if index in run.tombstones} if run.tombstones else ()
            found = await check.run([run.values[index] for index in mine], exempt)
            failed |= {mine[step]: error for step, error in found.items()}
            checked.add(check)
        return failed

    async def make_ready(
        self, run: Run, publisher: Publisher | None = None, refused: Refusals | None = None
    ) -> Refusals:
        """Repeat `prepare` until the run can be published, but for what is `refused` anyway."""
        refusals: Refusals = {}
        refused = refused or {}
        checked: set[Check] = set()
        while not refusals and not self.is_ready(run, publisher, checked, refused):
            refusals = await self.prepare(run, checked, refused)
        return {**refusals, **refused}

    def is_batch_ready(self, topic_id: int) -> bool:
        """Return whether `append` or a transaction can take a batch as things are; if not, `prepare_batch` makes it
        so."""
        return self._host.topics.public(topic_id).check is None and not self._host.store.rounds.unflushed.is_crowded

    async def prepare_batch(self, topic_id: int, batch: Batch) -> PenstockError | None:
        """Wait for the disk to catch up, and check the values against an enforced schema. Return why the batch is
        refused; otherwise it can be taken at once."""
        checked: Check | None = None
        while True:
            await self._host.store.rounds.unflushed.room()
            check = self._host.topics.public(topic_id).check
            if check is checked:
                return None
            checked = check
            if check is None:
                continue
            values, exempt = await in_worker_if_large(batch, partial(_read_values, batch))
            for index, error in (await check.run(values, exempt)).items():
                return type(error)(f"message {index} of the batch: {error}")

    def publish(
        self,
        run: Run,
        refusals: Refusals | None = None,
        publisher: Publisher | None = None,
    ) -> Receipt:
        """Take a run that is the broker's from now on. It must be ready for it (`is_ready`), but for `refusals`.

        What one publisher publishes is delivered in this order.
        """
        receipt = Receipt(len(run))
        must_wait = publisher is not None and publisher.is_waiting
        self._publish(run, receipt, refusals, publisher)
        if publisher is not None:
            self._order.note(publisher, receipt.places)
            if publisher.live is not None and publisher.live.served < publisher.live.end:
                self._order.add(publisher.live)
                if not must_wait:
                    self._order.serve()
        receipt.close()
        return receipt

    def _publish(self, run: Run, receipt: Receipt, refusals: Refusals | None, publisher: Publisher | None) -> None:
        subject = run.subject
        if run.is_live or (subject is not None and subject.startswith(LIVE) and not (run.keys or refusals)):
            if subject is not None and owns(AUDIT_SUBJECT, subject):
                receipt.refuse(range(len(run)), _audit_is_read_only())
                return
            live = self._queue(publisher) if publisher is not None and publisher.is_waiting else self._live
            self._append(live, run, range(len(run)), receipt)
            return
        kept: Sequence[int] = range(len(run))
        if refusals:
            kept = _refuse(run, receipt, refusals)
            if not kept:
                return
        topic = None
        is_live = refusals is not None and subject is not None and subject.startswith(LIVE)
        if subject is not None and not (run.headers or run.keys or run.partition is not None or is_live):
            topic = self._host.topics.owner(subject)
        if subject is not None and topic is not None and topic.topic.policy.dedup is not DedupMode.PAYLOAD:
            partition = topic.fixed(subject, None)
            places = topic.spread(len(kept)) if partition is None else ((partition, range(len(kept))),)
            for target, piece in places:
                indices = kept[piece.start : piece.stop]
                self._append(target, run if len(indices) == len(run) else run.select(indices), indices, receipt)
        else:
            self._publish_each(run, receipt, publisher)

    def _queue(self, publisher: Publisher) -> LiveQueue:
        if publisher.live is None:
            publisher.live = LiveQueue(self._live, self._host.store.rounds.unflushed)
        return publisher.live

    def append(self, topic_id: int, number: int, partitions: int, batch: Batch, outcome: Outcome) -> Appended:
        """Store a batch as its producer made it, in the partition that the producer chose.

        The batch must be checked (`accept`), and one that need not be opened (`is_opaque`), and the broker ready for it
        (`is_batch_ready`, `prepare_batch`). Raises if it is refused.
        """
        topic = self._host.topics.public(topic_id)
        topic.check_writable()
        count = len(topic.partitions)
        # A batch that is stored already may be sent again by a producer that knows an older layout.
        if number >= count or (partitions != count and not topic.partitions[number].log.producers.is_duplicate(batch)):
            topic.check_layout(number, partitions)
        partition = topic.partitions[number]
        end = partition.end
        offset = partition.append_batch(batch, 0, 0, outcome)
        return Appended(offset, partition.end == end)

    def is_stored(self, topic_id: int, number: int, batch: Batch) -> bool:
        """Return whether a producer's batch was appended before, as far as is known."""
        partitions = self._host.topics.public(topic_id).partitions
        return number < len(partitions) and partitions[number].log.producers.is_duplicate(batch)

    def _append(
        self,
        target: Target,
        run: Run,
        indices: Sequence[int],
        receipt: Receipt,
        done: Callable[[PenstockError | None], None] | None = None,
    ) -> int:
        """Append the messages with these indices of a published run. Return their offset, or -1 if they are refused.
        `done` is called when they are settled, before the receipt is."""
        part = receipt.part(indices)
        outcome = part if done is None else Outcome(done)
        if done is not None:
            outcome.then(part.settle)
        try:
            offset = target.append(run, outcome)
        except PenstockError as error:
            outcome.settle(error)
            return -1
        receipt.places.append((target, offset, indices))
        return offset

    def _publish_each(self, run: Run, receipt: Receipt, publisher: Publisher | None) -> None:
        """Publish message by message. Messages for the same partition stay together and in order."""
        now_us = self._host.clock.now_us()
        asked = _read_options(run, receipt, now_us)
        parts, later, topics = self._route(run, receipt, asked, now_us)
        identities = self._sift(run, topics, asked, receipt, now_us)
        for target, indices in parts.items():
            if target is self._live and publisher is not None and (len(parts) > 1 or publisher.is_waiting):
                target = self._queue(publisher)
            self._append_part(target, run, indices, topics, identities, receipt)
        if later:
            self._append_later(run, later, topics, identities, asked, receipt)

    def _route(
        self, run: Run, receipt: Receipt, asked: dict[int, headers.HeaderOptions], now_us: int
    ) -> tuple[dict[Target, list[int]], list[int], dict[int, ServedTopic]]:
        """Choose the partition of each message that was not refused. Return the indices of each partition, those of
        delayed messages, and the topic of each message that is to be stored."""
        parts: dict[Target, list[int]] = {}
        later: list[int] = []
        topics: dict[int, ServedTopic] = {}
        # Messages that may go to any partition of their topic.
        loose: dict[ServedTopic, list[int]] = {}
        for index, subject in enumerate(run.subjects):
            if index in receipt.failed:
                continue
            if subject.startswith(LIVE):
                if owns(AUDIT_SUBJECT, subject):
                    receipt.refuse([index], _audit_is_read_only())
                else:
                    parts.setdefault(self._live, []).append(index)
                continue
            topic = self._host.topics.owner(subject)
            if topic is None:
                receipt.refuse([index], UnknownTopic(f"the topic of {subject.decode()} was deleted meanwhile"))
                continue
            refusal = self._misplaced(topic, run.partition, asked.get(index), now_us)
            if refusal is not None:
                receipt.refuse([index], refusal)
                continue
            topics[index] = topic
            if index in asked and (asked[index].due_us or 0) > now_us:
                later.append(index)
            elif run.partition is not None:
                parts.setdefault(topic.partitions[run.partition], []).append(index)
            elif (fixed := topic.fixed(subject, run.keys.get(index))) is not None:
                parts.setdefault(fixed, []).append(index)
            else:
                loose.setdefault(topic, []).append(index)
        for topic, indices in loose.items():
            for partition, places in topic.spread(len(indices)):
                chosen = parts.setdefault(partition, [])
                chosen += indices[places.start : places.stop]
                chosen.sort()
        return parts, later, topics

    def _misplaced(
        self, topic: ServedTopic, partition: int | None, asked: headers.HeaderOptions | None, now_us: int
    ) -> PenstockError | None:
        """Why a message cannot go to the partition that its publisher chose."""
        if partition is None:
            return None
        if not 0 <= partition < len(topic.partitions):
            return BadRequest(
                f"the topic {topic.topic.name} has no partition {partition}, it has {len(topic.partitions)}"
            )
        if asked is not None and (asked.due_us or 0) > now_us:
            return BadRequest("a message that is delayed cannot choose its partition")
        return None

    def _sift(
        self,
        run: Run,
        topics: dict[int, ServedTopic],
        asked: dict[int, headers.HeaderOptions],
        receipt: Receipt,
        now_us: int,
    ) -> dict[int, bytes]:
        """Find those that were stored before; the ids of the others, which are known from now on."""
        identities: dict[int, bytes] = {}
        for index, topic in topics.items():
            match topic.topic.policy.dedup:
                case DedupMode.PAYLOAD:
                    identity: bytes | None = payload_identity(run.values[index])
                case DedupMode.ID:
                    identity = asked[index].identity if index in asked else None
                case DedupMode.OFF:
                    identity = None
            if identity is None:
                continue
            assert topic.dedup is not None, "it is prepared"
            if topic.dedup.find(identity, now_us) is None:
                topic.dedup.add(identity, UNPLACED, now_us)
                topic.dedup.expect([identity])
                identities[index] = identity
                continue
            receipt.duplicates[index] = (topic, identity)
            # A repetition is as durable as the message that it repeats, which may still wait for the disk.
            repeated = receipt.part([index])
            if not topic.dedup.wait(identity, repeated):
                repeated.settle()
        return identities

    def _append_part(
        self,
        target: Target,
        run: Run,
        indices: list[int],
        topics: dict[int, ServedTopic],
        identities: dict[int, bytes],
        receipt: Receipt,
    ) -> None:
        fresh = [index for index in indices if index not in receipt.duplicates]
        if not fresh:
            return
        known = [
            (topics[index].dedup, identities[index], step) for step, index in enumerate(fresh) if index in identities
        ]
        part = run if len(fresh) == len(run) else run.select(fresh)
        if not known:
            self._append(target, part, fresh, receipt)
            return

        def done(error: PenstockError | None) -> None:
            for dedup, identity, _ in known:
                assert dedup is not None
                dedup.settle([identity], error)

        offset = self._append(target, part, fresh, receipt, done)
        if offset < 0:
            return
        for dedup, identity, step in known:
            assert dedup is not None
            dedup.place(identity, packed(target.number, offset + step))

    def _append_later(
        self,
        run: Run,
        later: list[int],
        topics: dict[int, ServedTopic],
        identities: dict[int, bytes],
        asked: dict[int, headers.HeaderOptions],
        receipt: Receipt,
    ) -> None:
        delays = self._host.delays
        for index in later:
            if index in receipt.duplicates:
                continue
            receipt.late[index] = topics[index].name
            dedup, identity, due_us = topics[index].dedup, identities.get(index), asked[index].due_us
            assert due_us is not None

            def done(
                error: PenstockError | None,
                dedup: DedupWindow | None = dedup,
                identity: bytes | None = identity,
            ) -> None:
                if dedup is not None and identity is not None:
                    dedup.settle([identity], error)

            refusal = UnknownTopic("delayed messages cannot be stored here") if delays is None else delays.refusal()
            if delays is None or refusal is not None:
                assert refusal is not None
                receipt.refuse([index], refusal)
                done(refusal)
            else:
                self._append(delays.partition, delays.delayed(run, index, due_us), [index], receipt, done)

    def _knows(self, subject: bytes, *, has_headers: bool, checked: Container[Check]) -> bool:
        """Return whether there is a topic for it, with what must be known of earlier messages, and values that were
        checked with its schema."""
        if subject.startswith(LIVE):
            return True
        topic = self._host.topics.owner(subject)
        if topic is None or topic.is_internal or topic.is_piped or topic.refusal is not None:
            return False
        if topic.check is not None and topic.check not in checked:
            return False
        mode = topic.topic.policy.dedup
        return topic.dedup is not None or mode is DedupMode.OFF or (mode is DedupMode.ID and not has_headers)


def _audit_is_read_only() -> ReadOnlyTopic:
    return ReadOnlyTopic(f"the topic {AUDIT_SUBJECT.decode()} is written by the broker alone")


def _read_values(batch: Batch) -> tuple[list[bytes], set[int]]:
    """Return the values of a batch, and the indices of tombstones."""
    columns = batch.columns()
    tombstones = columns.tombstones() or ()
    return columns.values(), {index for index, is_dead in enumerate(tombstones) if is_dead}


def _refuse(run: Run, receipt: Receipt, refusals: Refusals) -> list[int]:
    """Refuse messages, and return the indices of the others."""
    kept = []
    for index, subject in enumerate(run.subjects):
        error = refusals.get(subject) or refusals.get(index)
        if error is None:
            kept.append(index)
        else:
            receipt.refuse([index], error)
    return kept


def _read_options(run: Run, receipt: Receipt, now_us: int) -> dict[int, headers.HeaderOptions]:
    """Read the headers that are for the broker, by index, and apply key, time and TTL to the run. Refuse messages with
    invalid ones."""
    asked: dict[int, headers.HeaderOptions] = {}
    for index, block in run.headers.items():
        if run.subjects[index].startswith(LIVE):
            continue  # its headers are not for the broker
        try:
            asked[index] = headers.read(block, now_us)
        except PenstockError as error:
            receipt.refuse([index], error)
    for index, found in asked.items():
        if found.key is not None:
            run.keys[index] = found.key
            run.size = 0  # it did not count the key
        if found.time_us is not None:
            run.times[index] = found.time_us
        if found.ttl_us is not None:
            run.ttls[index] = found.ttl_us
    for index, key in run.keys.items():
        try:
            headers.check_key_size(len(key))
        except PenstockError as error:
            receipt.refuse([index], error)
    return asked
