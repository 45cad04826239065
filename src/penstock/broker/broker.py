"""The broker: topics, those who publish to them and those who read. It is what every door opens to.

It belongs to the event loop. `publish` and what is delivered are callbacks, because they happen for every run of
messages; whatever waits for the disk and is rare (topics, groups, reading what was long ago) is awaited.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, groupby
from operator import itemgetter
from typing import Any, Final, TypeVar

from penstock.batch import Batch
from penstock.broker.deadletters import DeadLetters
from penstock.broker.dedup import ENTRIES_MAX
from penstock.broker.delay import DELAYED_TOPIC, Delays
from penstock.broker.epochs import Epochs
from penstock.broker.figures import Figures
from penstock.broker.group import Group, Mode
from penstock.broker.inflight import Record
from penstock.broker.intake import Identity, Intake, Receipt, Refusals
from penstock.broker.interest import Interest
from penstock.broker.member import Member, Sink
from penstock.broker.order import Order, Publisher
from penstock.broker.partition import LivePartition, Opened, Partition, Waiting, is_large
from penstock.broker.refresh import Refresh, Refreshes
from penstock.broker.room import Room
from penstock.broker.start import AtOffset, AtPositions, Begin, Start, offset_of
from penstock.broker.subscription import Queue, Subscription, choose_readers
from penstock.broker.topic import LIVE, RESERVED, ServedTopic, Target, Topics
from penstock.broker.transactions import STAGED_TOPIC, Transactions
from penstock.clock import Clock
from penstock.errors import (
    BadRequest,
    BadSubject,
    GroupConflict,
    LogDamaged,
    OffsetOutOfRange,
    OriginConflict,
    PenstockError,
    ReadOnlyTopic,
    StaleLayout,
    TooManyGroups,
    TooManySubscriptions,
    TooManyTopics,
    UnknownGroup,
    UnknownTopic,
)
from penstock.health import Usage
from penstock.run import Run, open_batch
from penstock.storage.log import Done
from penstock.storage.meta import Change
from penstock.storage.policy import Dedup as DedupMode
from penstock.storage.policy import Policy, Topic
from penstock.storage.store import Store, outcome
from penstock.subject import is_literal, is_readable, is_subject, is_text, matches, meets

logger = logging.getLogger(__name__)


T = TypeVar("T")

# Groups are limited in number, so their names are in size.
_GROUP_NAME_BYTES_MAX: Final = 4096
# Of patterns, ids and queue names: so many for each subscription that is allowed, together.
_NAME_BYTES_EACH: Final = 512
_NAME_BYTES_MIN: Final = 1 << 20
# Look at this many partitions of a topic for a hint: it may miss rare subjects.
_HINT_PARTITIONS: Final = 8

_SLEEP_US_MAX: Final = 24 * 3600 * 1_000_000
# Messages that are dealt out in turn before it is looked who still takes some.
_IN_TURN: Final = 16
# Of the broker's own topics. Upkeep removes whole segments that nobody needs any more, but never the last one.
_OWN_POLICY: Final = Policy(dedup=DedupMode.OFF, segment_bytes=8 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    # Whether a subject without a topic makes one, named by its first token; how many are made so.
    auto_create: bool = True
    topics_max: int = 10_000
    # Message ids that each topic remembers.
    dedup_ids_max: int = ENTRIES_MAX
    # Groups with a name, and subscriptions: those of a group's members, and all others.
    groups_max: int = 10_000
    subscriptions_max: int = 100_000
    # Memory for the positions of all groups.
    position_bytes_max: int = 512 << 20
    partitions: int = 1
    policy: Policy = field(default_factory=Policy)
    dead_letter_prefix: str = "DLQ"


class Broker:
    def __init__(self, store: Store, *, clock: Clock, settings: Settings | None = None) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings or Settings()
        self.health = store.health
        self.figures = Figures(clock)
        self.topics = Topics()
        self.interest: Interest[Subscription] = Interest(choose_readers)
        # Partitions with messages that nobody was given yet.
        self._unserved: dict[Partition, None] = {}
        self._opened = Opened()
        self._subscriptions: dict[Subscription, None] = {}
        # Those that get what was published up to now, and nothing more.
        self._leaving: dict[Subscription, None] = {}
        self._left: Interest[Subscription] = Interest()
        # All members, with the bytes of their names.
        self._members: dict[Member, int] = {}
        self._name_bytes = 0
        self._name_bytes_max = max(_NAME_BYTES_MIN, _NAME_BYTES_EACH * self.settings.subscriptions_max)
        self.room = Room(self.settings.position_bytes_max)
        # Those with a queue: by its name, then by their patterns.
        self._queues: dict[bytes, dict[bytes, Subscription]] = {}
        self._queue_numbers = count()
        self.live = LivePartition(LIVE[0], self._deliver)
        self._order = Order(self._find_sinks, self.health)
        store.rounds.on_commit = self._order.serve
        store.maintenance.on_upkeep = self._keep_up
        self._intake = Intake(self, self.live, self._order, self.settings.dedup_ids_max)
        self._creating: dict[bytes, asyncio.Future[ServedTopic]] = {}
        # There once it runs, unless its log cannot be opened.
        self.delays: Delays | None = None
        # There once somebody has staged something.
        self.transactions: Transactions | None = None
        self._dead_letters: DeadLetters | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        # Those with a name, and all.
        self.groups: dict[bytes, Group] = {}
        self._all_groups: dict[Group, None] = {}
        # Those that are being made.
        self._making: dict[bytes, asyncio.Future[None]] = {}
        for topic in store.topics:
            self._serve(topic)
        for name, value in store.state.items("group"):
            self._open_group(name, value)
        self.refreshes = Refreshes(self)
        self.epochs = Epochs(self)

    # Its life.

    async def run(self, started: asyncio.Event) -> None:
        """Serve until cancelled."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self.store.run(), name="store")
            if self.topics.get(STAGED_TOPIC) is not None:
                await self._start_transactions()
            delayed = await self._own_topic(DELAYED_TOPIC)
            if delayed.refusal is None:
                self.delays = Delays(delayed.partitions[0], self)
                tasks.create_task(self.delays.run(), name="delays")
            for group in self.groups.values():
                group.start()
            self.refreshes.start()
            started.set()

    async def _own_topic(self, name: bytes) -> ServedTopic:
        served = self.topics.get(name) or await self._create(name, 1, _OWN_POLICY)
        if served.refusal is None and served.topic.policy != _OWN_POLICY:
            # An older version made it.
            topic = replace(served.topic, policy=_OWN_POLICY)
            try:
                await self.store.alter_topic_async(topic)
            except PenstockError as error:
                logger.warning("%s keeps its policy until the next start: %s", topic.name, error)
            else:
                served = self._serve(topic)
        return served

    def _keep_up(self) -> None:
        """Let groups pass over what retention dropped, or what has expired."""
        for group in self._all_groups:
            group.keep_up()

    def save(self) -> None:
        """Before a stop: let the groups write where they are."""
        for group in self.groups.values():
            group.save_all()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task. An unexpected exception ends this task only."""
        assert self._tasks is not None, "it runs"
        return self._tasks.create_task(self.health.supervise("task", coroutine))

    def call_at(self, when_us: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        assert self._loop is not None, "it runs"
        # uvloop counts in milliseconds, and rounds: never early, or whoever is woken finds nothing to do.
        # And not for longer than a day: who is woken looks again, and what a client asked for may be beyond any clock.
        delay_us = min(max(0, when_us - self.clock.monotonic_us()), _SLEEP_US_MAX) + 1000
        return self._loop.call_later(delay_us / 1e6, self._on_time, callback)

    def _on_time(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as fault:  # noqa: BLE001 - supervises one timer
            self.health.fault("timer", repr(callback), fault)

    def usage(self) -> dict[str, Usage]:
        """How full each limited table is, by name."""
        found = {
            "opened_batches": self._opened.usage,
            "interest_bytes": self.interest.usage,
            "owners_bytes": self.topics.usage,
            **self._intake.usage(),
            **self.epochs.usage(),
            "groups": Usage(len(self.groups) + len(self._making), self.settings.groups_max),
            "position_bytes": self.room.usage,
            "subscriptions": Usage(len(self._members), self.settings.subscriptions_max),
            "subscription_name_bytes": Usage(self._name_bytes, self._name_bytes_max),
        }
        for part in (self.delays, self.transactions):
            if part is not None:
                found |= part.usage()
        return found

    # Topics.

    async def create_topic(self, name: bytes, *, partitions: int | None = None, policy: Policy | None = None) -> Topic:
        if not is_subject(name) or name.startswith(LIVE):
            raise BadSubject(f"a topic cannot be named {name.decode(errors='replace')!r}")
        return (await self._create(name, partitions, policy)).topic

    async def alter_topic(self, name: bytes, *, partitions: int | None = None, policy: Policy | None = None) -> Topic:
        return await self._to_its_end(self._alter(name, partitions, policy))

    def warning(self, name: bytes, partitions: int | None) -> str | None:
        """Return what this number of partitions would mean for the messages of a topic; None if nothing."""
        served = self.topic(name)
        before = served.topic.partitions
        if partitions is None or partitions <= before or not any(partition.end for partition in served.partitions):
            return None
        return (
            f"with {partitions} partitions instead of {before}, most keys and subjects of {served.topic.name} move to "
            "another one: messages from before and after the change have no order between them, and compaction keeps "
            "the latest of each partition; to keep them together, fill a new topic of "
            f"{partitions} partitions with a replay pipeline"
        )

    async def _alter(self, name: bytes, partitions: int | None, policy: Policy | None) -> Topic:
        served = self.topic(name)
        topic = served.topic
        warning = self.warning(name, partitions)
        if topic.origin is not None and partitions not in (None, topic.partitions):
            raise ReadOnlyTopic(f"the topic {topic.name} is piped: it has as many partitions as at its origin")
        topic = replace(
            topic,
            partitions=topic.partitions if partitions is None else partitions,
            policy=topic.policy if policy is None else policy,
        )
        with self._reserve_positions(name, topic.partitions - served.topic.partitions):
            await self.store.alter_topic_async(topic)
            self._serve(topic)
        if warning is not None:
            logger.warning("%s", warning)
        return topic

    async def purge_topic(self, name: bytes, before: Begin, *, partition: int | None = None) -> None:
        """Drop all messages before a place, in one partition or in all, and wait until that is durable.

        Groups go on behind them. Upkeep frees the disk, by whole segments.
        """
        await self._to_its_end(self._purge(name, before, partition))

    async def _purge(self, name: bytes, before: Begin, partition: int | None) -> None:
        served = self.topic(name)
        if served.refusal is not None:
            raise served.refusal
        count = len(served.partitions)
        if partition is not None and partition >= count:
            raise UnknownTopic(f"{served.topic.name} has {count} partitions, none with number {partition}")
        chosen = served.partitions if partition is None else [served.partitions[partition]]
        match before:
            case AtOffset(offset):
                if len(chosen) > 1:
                    raise BadRequest(f"an offset is of one partition, and {served.topic.name} has {count}: name one")
                if offset > chosen[0].served:
                    raise OffsetOutOfRange(offset, chosen[0].start, chosen[0].served)
            case Start.EARLIEST | AtPositions():
                raise BadRequest("a topic is purged before an offset, before a time, or before latest: all of it")
        offsets = {each.number: await offset_of(before, each) for each in chosen}
        await self.store.purge_topic_async(served.topic.id, offsets)
        logger.info("%s is purged: its partitions start at %s", served.topic.name, offsets)
        for group in self._all_groups:
            if any((each.topic_id, each.number) in group.positions for each in chosen):
                group.wake()

    async def delete_topic(self, name: bytes) -> None:
        await self._to_its_end(self._delete(name))

    async def _delete(self, name: bytes) -> None:
        served = self.topic(name)
        await self.store.delete_topic_async(served.topic.id)
        if self.topics.get(name) is not served:
            return  # two wanted the same
        self.topics.remove(name)
        positions = []
        for partition in served.partitions:
            for group in self._all_groups:
                if (partition.topic_id, partition.number) in group.positions:
                    group.detach(partition)
                    self._forget_letters(group, partition)
                    if group.name is not None:
                        positions.append(Change("position", group.key(partition), None))
            partition.close()
        topic_id = served.topic.id
        changes = [*positions, *self.refreshes.forget_topic(topic_id), *self.epochs.forget_topic(topic_id)]
        if changes:
            await self.store.write_state(changes)

    async def refresh_topic(self, name: bytes) -> Refresh:
        """Let all consumers of a topic that understand it begin anew; if that is under way, what is."""
        return await self._to_its_end(self.refreshes.begin(self.topic(name)))

    def refresh(self, name: bytes) -> Refresh | None:
        """The last refresh of a topic; None if there was none."""
        return self.refreshes.of(self.topic(name))

    async def pipe_topic(self, name: bytes, origin: str, partitions: int) -> ServedTopic:
        """The topic here that is a copy of one elsewhere: made if there is none, with as many partitions as there.

        Raises OriginConflict if there is another of that name, with messages of its own or of another origin.
        """
        served = self.topics.get(name)
        if served is None:
            if not is_subject(name) or name.startswith(LIVE):
                raise BadSubject(f"a topic cannot be named {name.decode(errors='replace')!r}")
            served = await self._create(name, partitions, None, origin)
        if served.topic.origin != origin or len(served.partitions) < partitions:
            served = await self._to_its_end(self._pipe(name, origin, partitions))
        if served.refusal is not None:
            raise served.refusal
        return served

    async def _pipe(self, name: bytes, origin: str, partitions: int) -> ServedTopic:
        served = self.topic(name)
        topic = served.topic
        if topic.origin not in (None, origin):
            raise OriginConflict(
                f"the topic {topic.name} is a copy of {topic.origin}, and the parent's is {origin}: "
                f"delete it here to begin again with the parent's"
            )
        if topic.origin is None and not all(partition.log.is_empty for partition in served.partitions):
            raise OriginConflict(
                f"the topic {topic.name} has messages of its own here, and is not overwritten: rename or delete it"
            )
        if topic.origin is None and topic.partitions > partitions:
            raise OriginConflict(
                f"the topic {topic.name} has {topic.partitions} partitions here, {partitions} at its origin: delete it"
            )
        # From here on nothing is published to it, while it is still empty.
        served.topic = piped = replace(topic, origin=origin, partitions=max(partitions, topic.partitions))
        try:
            with self._reserve_positions(name, piped.partitions - topic.partitions):
                await self.store.alter_topic_async(piped)
                return self._serve(piped)
        except BaseException:
            served.topic = topic
            raise

    def topic(self, name: bytes) -> ServedTopic:
        served = self.topics.get(name)
        if served is None or served.is_internal:
            raise UnknownTopic(f"there is no topic {name.decode(errors='replace')}: create it, or publish to it")
        return served

    async def _create(
        self, name: bytes, partitions: int | None, policy: Policy | None, origin: str | None = None
    ) -> ServedTopic:
        """Make a topic; whoever asks for the same one meanwhile gets the same."""
        made = self._creating.get(name)
        if made is None:
            self.topics.check_new(name, self._creating)
            made = self._creating[name] = self._begin(self._make(name, partitions, policy, origin))
        return await asyncio.shield(made)

    async def _make(
        self, name: bytes, partitions: int | None, policy: Policy | None, origin: str | None
    ) -> ServedTopic:
        partitions = self.settings.partitions if partitions is None else partitions
        try:
            with self._reserve_positions(name, partitions):
                topic = await self.store.create_topic_async(
                    name.decode(), partitions=partitions, policy=policy or self.settings.policy, origin=origin
                )
                return self._serve(topic)
        finally:
            del self._creating[name]

    async def _to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        """A change, which is not left half done though whoever asked for it is gone."""
        return await asyncio.shield(self._begin(change))

    def _begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                ended.set_result(await change)
            except (PenstockError, ValueError) as error:
                ended.set_exception(error)
                ended.exception()  # it may be that nobody waits for it any more

        self.spawn(run())
        return ended

    def _serve(self, topic: Topic) -> ServedTopic:
        """Open the doors of a topic, or of what was added to it."""
        name = topic.name.encode()
        refused = self.store.catalogue.refused
        refusal = next((refused[place] for place in refused if place[0] == topic.id), None)
        if refusal is not None:
            served = ServedTopic(topic, [], refusal)
            self.topics.add(served)
            return served
        before = self.topics.get(name)
        partitions = list(before.partitions) if before else []
        for number in range(len(partitions), topic.partitions):
            log = self.store.log(topic.id, number)
            # What is in a topic of our own has the subject of where it goes, and is not there yet.
            deliver = _deliver_to_nobody if name.startswith(RESERVED) else self._deliver
            partitions.append(
                Partition(
                    topic.id,
                    number,
                    name,
                    log,
                    self.store,
                    deliver,
                    self._pass_over,
                    self._unserved,
                    self._opened,
                    self._order,
                    self.clock,
                )
            )
            for group in self._all_groups:
                if group.matches(name) and not name.startswith(RESERVED):
                    # The group is older than the partition: all of it is for the group.
                    group.attach(partitions[-1], log.start)
        served = ServedTopic(topic, partitions)
        if before is not None and _same_dedup(before.topic.policy, topic.policy):
            served.dedup = before.dedup
        self.topics.add(served)
        return served

    # In.

    def is_ready(self, run: Run, publisher: Publisher | None = None) -> bool:
        """Whether `publish` can take the run as things are; if not, `prepare` makes it so."""
        return self._intake.is_ready(run, publisher)

    async def prepare(self, run: Run) -> Refusals:
        """Make the topics that the run needs, read what must be known of them, and wait for the disk to catch up.

        Subjects for which that cannot be, with the reason: for `publish`.
        """
        return await self._intake.prepare(run)

    async def make_ready(self, run: Run, publisher: Publisher | None = None) -> Refusals:
        """`prepare` until it is ready."""
        refusals: Refusals = {}
        while not refusals and not self.is_ready(run, publisher):
            refusals = await self.prepare(run)
        return refusals

    def publish(
        self,
        run: Run,
        done: Callable[[Receipt], None],
        refusals: Refusals | None = None,
        publisher: Publisher | None = None,
    ) -> Receipt:
        """Take a run that is the broker's from now on. It must be ready for it (`is_ready`), but for `refusals`.

        What one publisher publishes is delivered in this order.
        """
        return self._intake.publish(run, done, refusals, publisher)

    async def owner(self, subject: bytes) -> ServedTopic:
        """The topic that stores a subject, made if there is none. Raises if nothing can be published there."""
        if not is_subject(subject) or subject.startswith(LIVE):
            raise BadSubject(f"nothing can be stored under {subject.decode(errors='replace')!r}")
        topic = self.topics.owner(subject) or await self._create_for(subject)
        topic.check_writable()
        return topic

    async def pushed_topic(self, name: bytes, partitions: int) -> ServedTopic:
        """The topic to which another broker pushes its own of that name, which has so many partitions."""
        topic = self.topics.get(name)
        if topic is None:
            self._check_made_by_itself(name)
            await self.create_topic(name, partitions=partitions)
            topic = self.topic(name)
        topic = self.public_topic(topic.topic.id)
        topic.check_writable()
        return topic

    def append(self, topic_id: int, number: int, partitions: int, batch: Batch, done: Done) -> bool:
        """Store a batch as its producer made it, in the partition that it chose among so many; whether it was there.

        The batch must be checked (`accept`), and one that need not be opened (`is_opaque`). Raises if it is not taken.
        """
        topic = self.public_topic(topic_id)
        topic.check_writable()
        count = len(topic.partitions)
        partition = topic.partitions[number] if number < count else None
        if partition is None or (partitions != count and not partition.log.holds(batch)):
            raise _stale(topic, partitions)
        end = partition.end
        partition.append_batch(batch, 0, 0, done)
        return partition.end == end

    def stage(self, to: tuple[int, int, int], name: bytes, number: int, batch: Batch, done: Done) -> None:
        """Keep a batch, as `append` takes it, until its transaction is committed; after `open_transactions`."""
        topic_id, partition, partitions = to
        topic = self.public_topic(topic_id)
        topic.check_writable()
        if partitions != len(topic.partitions):
            raise _stale(topic, partitions)
        assert self.transactions is not None, "they are open"
        self.transactions.stage(name, number, topic_id, partition, batch, done)

    def public_topic(self, topic_id: int) -> ServedTopic:
        """One that clients may read and write."""
        topic = self.topics.by_id(topic_id)
        if topic is None or topic.is_internal:
            raise UnknownTopic(f"there is no topic with id {topic_id}")
        if topic.refusal is not None:
            raise topic.refusal
        return topic

    async def open_transactions(self) -> Transactions:
        """What they need is made when somebody first stages something. Raises if it cannot be opened."""
        if self.transactions is None:
            topic = await self._own_topic(STAGED_TOPIC)
            if topic.refusal is not None:
                raise topic.refusal
            if self.transactions is None:
                self.transactions = Transactions(topic.partitions[0], self)
        return self.transactions

    async def _start_transactions(self) -> None:
        """Finish those of the life before."""
        try:
            transactions = await self.open_transactions()
        except PenstockError as error:
            logger.error("what was staged for transactions cannot be opened: %s", error)
        else:
            await transactions.start()

    def is_noted(self, partition: Partition, batch: Batch) -> bool:
        """Whether `note` wants to know of it."""
        topic = self.topics.by_id(partition.topic_id)
        return topic is not None and not topic.takes_opaque(asks=batch.asks)

    async def identities(self, partition: Partition, batch: Batch) -> Sequence[Identity]:
        """Return what `note` is told of a stored batch."""
        topic = self.topics.by_id(partition.topic_id)
        return [] if topic is None else await self._intake.identities(topic, partition, batch)

    def note(self, partition: Partition, identities: Sequence[Identity], append_time: int) -> None:
        """Messages came into a partition, and not the way of those that are published."""
        topic = self.topics.by_id(partition.topic_id)
        if topic is not None:
            self._intake.note(topic, identities, append_time)

    def partition(self, topic_id: int, number: int) -> Partition | None:
        """Return a partition, or None if there is none. Raises if its topic cannot be opened."""
        topic = self.topics.by_id(topic_id)
        if topic is not None and topic.refusal is not None:
            raise topic.refusal
        return topic.partitions[number] if topic is not None and number < len(topic.partitions) else None

    def _check_made_by_itself(self, subject: bytes) -> None:
        if not self.settings.auto_create:
            raise UnknownTopic(f"no topic stores {subject.decode()}, and none is made by itself: create it")
        count = sum(not topic.is_internal for topic in self.topics) + len(self._creating)
        if count >= self.settings.topics_max:
            raise TooManyTopics(f"there are {count} topics: create the one for {subject.decode()} by name")

    async def _create_for(self, subject: bytes) -> ServedTopic:
        self._check_made_by_itself(subject)
        name = subject.split(b".", 1)[0]
        return await (self.dead_letter_topic() if self.is_dead_letters(name) else self._create(name, None, None))

    # Out.

    def subscribe(self, pattern: bytes, member: Member, queue: bytes | None = None) -> Subscription:
        """From now on `member` gets what matches; with a queue, its share of it."""
        self._add_member(member, pattern, queue or b"")
        subscription = None if queue is None else self._queues.get(queue, {}).get(pattern)
        if subscription is None:
            if queue is None:
                subscription = Subscription(pattern, self)
            else:
                others = self._queues.setdefault(queue, {})
                place = Queue(queue, next(self._queue_numbers), self.interest.match, others)
                subscription = others[pattern] = Subscription(pattern, self, place)
            self._skip_unserved(subscription)
            self.interest.add(pattern, subscription)
            self._subscriptions[subscription] = None
        subscription.members.append(member)
        return subscription

    async def subscribe_from(self, pattern: bytes, member: Member, begin: Begin) -> Subscription:
        """As `subscribe`, with what was published before."""
        offsets = await self._offsets(pattern, begin)
        subscription = self.subscribe(pattern, member)
        for partition in self._matching(pattern) if begin is not Start.LATEST else ():
            # What is on its way is for it too.
            partition.since.pop(subscription, None)
            offset = offsets.get(partition, partition.start)
            if offset < partition.served:
                subscription.behind[partition] = offset
        subscription.wake()
        return subscription

    async def hint(self, pattern: bytes) -> str | None:
        """Return what a reader of this pattern may not know: that it misses a part of the topic that it names."""
        topic = self.topics.get(pattern) if is_literal(pattern) else None
        if topic is None or topic.is_internal:
            return None
        for partition in topic.partitions[:_HINT_PARTITIONS]:
            for offset in {partition.start, partition.served - 1} if partition.start < partition.served else ():
                below = await self._subject_below(partition, offset)
                if below is not None:
                    name = pattern.decode()
                    return (
                        f"{name!r} reads only messages with the subject {name}; the topic {name} also holds subjects "
                        f"below it, such as {below.decode()}: to read all of it, name the topic (--topic {name}, "
                        f"topic={name!r})"
                    )
        return None

    async def _subject_below(self, partition: Partition, offset: int) -> bytes | None:
        """Return a subject below the topic's name that is stored near an offset."""
        with suppress(PenstockError):
            for batch in await self.store.read(partition.log, offset, 1):
                if batch.has("subject") and not is_large(batch):
                    return next((each for each in batch.columns().distinct("subject") if each != partition.name), None)
        return None

    def positions(self, subscription: Subscription) -> list[tuple[int, int, int]]:
        """Topic, partition and offset of what comes next, for each partition."""
        found = []
        for partition in self._matching(subscription.pattern):
            begin = subscription.behind.get(partition, partition.since.get(subscription, partition.served))
            found.append((partition.topic_id, partition.number, begin))
        return found

    def unsubscribe(self, subscription: Subscription, member: Member) -> None:
        """End a member at once: it gets nothing more."""
        self._remove_member(member)
        subscription.leave(member)
        if not subscription.members:
            self._withdraw(subscription)
        else:
            subscription.wake()

    def finish(
        self, subscription: Subscription, member: Member, done: Callable[[], None], *, after: int | None = None
    ) -> None:
        """End a member when it has what was published up to now; with `after`, when it also has so many in all.

        `done` is called once it has the former, or is unsubscribed. Other members of a queue group take over at once.
        """
        if len(subscription.members) > 1:
            self._end(subscription, member, after, done)
            return
        end = partial(self._end, subscription, member, after, done)
        if after is None and subscription.queue is None:
            self._withdraw(subscription)
            self._leaving[subscription] = None
            self._left.add(subscription.pattern, subscription)
            subscription.stop_at(member, self._ends(subscription), end, is_final=True)
            return
        # One that goes on, or shares with others, gets what is not stored at once: it is nowhere to be read later.
        self._order.release(subscription.pattern)
        ends = self._put_behind(subscription)
        if after is None:
            self._withdraw(subscription)
        subscription.stop_at(member, ends, end, is_final=after is None)

    def _end(self, subscription: Subscription, member: Member, after: int | None, done: Callable[[], None]) -> None:
        if subscription in self._leaving:
            del self._leaving[subscription]
            self._left.remove(subscription.pattern, subscription)
        if member in subscription.members:
            if after is None or after <= member.delivered:
                self.unsubscribe(subscription, member)
            else:
                member.remaining = after - member.delivered
                subscription.go_on()
        done()

    def _put_behind(self, subscription: Subscription) -> dict[Waiting, int]:
        """Put it behind where messages for it may be on their way; up to where in each partition."""
        for partition in self._on_the_way(subscription):
            begin = max(partition.served, partition.since.get(subscription, 0))
            subscription.behind.setdefault(partition, begin)
        return {partition: partition.end for partition in subscription.behind}

    def _ends(self, subscription: Subscription) -> dict[Waiting, int]:
        """Up to where messages for it may be on their way, in each place where they may."""
        places: list[Waiting] = [*subscription.behind, *self._on_the_way(subscription)]
        return {place: place.end for place in [*places, *self._order.waiting_live(subscription.pattern)]}

    def _on_the_way(self, subscription: Subscription) -> list[Partition]:
        """Return the partitions where messages for it may be on their way."""
        return [
            partition
            for partition in self._unserved
            if not partition.name.startswith(RESERVED)
            and max(partition.served, partition.since.get(subscription, 0)) < partition.end
            and meets(subscription.pattern, partition.name)
        ]

    def _withdraw(self, subscription: Subscription) -> None:
        """Give it nothing that is published from now on."""
        if subscription not in self._subscriptions:
            return
        del self._subscriptions[subscription]
        self.interest.remove(subscription.pattern, subscription)
        if subscription.queue is not None:
            self._leave_queue(subscription, subscription.queue)

    def _leave_queue(self, subscription: Subscription, queue: Queue) -> None:
        """Others with its queue name take over what they match, from where the partitions are served."""
        others = self._queues[queue.name]
        del others[subscription.pattern]
        if not others:
            del self._queues[queue.name]
        heirs = []
        for other in others.values():
            assert other.queue is not None, "it is in a queue"
            is_older = other.queue.number < queue.number
            begins = {
                partition: 0 if is_older else max(partition.served, partition.since.get(other, 0))
                for partition in subscription.behind
            }
            heirs.append((other.pattern, begins))
            if other.behind:
                other.queue.take(subscription.pattern, {partition: partition.served for partition in other.behind})
        queue.leave(heirs)

    def _add_member(self, member: Member, pattern: bytes, queue: bytes = b"") -> None:
        size = len(member.sid) + len(pattern) + len(queue)
        self._check_subscriptions(size)
        self._members[member] = size
        self._name_bytes += size

    def _remove_member(self, member: Member) -> None:
        self._name_bytes -= self._members.pop(member, 0)

    def _check_subscriptions(self, name_bytes: int = 0) -> None:
        if self._name_bytes + name_bytes > self._name_bytes_max:
            raise TooManySubscriptions(
                f"the names of {len(self._members)} subscriptions have {self._name_bytes} bytes, and "
                f"{self._name_bytes_max} are the most: use shorter subjects, or raise server.subscriptions_max"
            )
        if len(self._members) >= self.settings.subscriptions_max:
            raise TooManySubscriptions(
                f"there are {len(self._members)} subscriptions: end some, or raise server.subscriptions_max"
            )

    # Groups.

    async def join(
        self,
        name: bytes | None,
        pattern: bytes,
        member: Member,
        mode: Mode = Mode.SHARED,
        *,
        start: Begin = Start.LATEST,
    ) -> Group:
        """Make `member` one of a group, which is made if there is none; without a name, one of its own.

        `start` is for one that is made.
        """
        self._check_subscriptions()
        if name is None:
            group = Group(None, pattern, mode, self)
            self._check_positions(group)
            self._all_groups[group] = None
            self._attach(group, {partition: partition.served for partition in self._matching(pattern)})
            group.start()
        else:
            making = self._making.get(name)
            if making is not None:
                await asyncio.shield(making)
            group = self.groups.get(name) or await self.create_group(name, pattern, mode, start=start)
            if (group.pattern, group.mode) != (pattern, mode):
                raise GroupConflict(
                    f"the group {name.decode()} is {group.mode} and reads {group.pattern.decode()}: use another name"
                )
            self.refreshes.check(group, member)
            if member.hears is not None and not group.refreshes:
                self._remember_refreshes(group)
        # Again: others may have come while the group was made.
        self._add_member(member, pattern)
        group.join(member)
        self.refreshes.changed(group)
        return group

    def leave(self, group: Group, member: Member) -> None:
        self._remove_member(member)
        group.leave(member)
        self.refreshes.changed(group)
        if group.name is None and not group.members:
            del self._all_groups[group]
            group.stop()

    async def create_group(
        self, name: bytes, pattern: bytes, mode: Mode = Mode.SHARED, *, start: Begin = Start.LATEST
    ) -> Group:
        """A group that is remembered, with its positions, from now on."""
        if not is_readable(pattern):
            raise BadSubject(f"{pattern.decode(errors='replace')!r} is not a pattern")
        if not is_text(name):
            raise BadSubject(f"a group cannot be named {name!r}")
        if len(name) > _GROUP_NAME_BYTES_MAX:
            raise BadSubject(f"a group name of {len(name)} bytes is too long: at most {_GROUP_NAME_BYTES_MAX}")
        if name in self.groups or name in self._making:
            raise GroupConflict(f"there is a group {name.decode()} already")
        count = len(self.groups) + len(self._making)
        if count >= self.settings.groups_max:
            raise TooManyGroups(
                f"there are {count} groups, so {name.decode()} is not created: delete some, or raise server.groups_max"
            )
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._making[name] = made
        group = Group(name, pattern, mode, self, secrets.token_hex(8))
        await self._to_its_end(self._store_group(group, start, made))
        return group

    async def _store_group(self, group: Group, start: Begin, made: asyncio.Future[None]) -> None:
        assert group.name is not None
        try:
            await self._write_group(group, start)
            self.groups[group.name] = group
            group.start()
        finally:
            del self._making[group.name]
            made.set_result(None)

    async def _write_group(self, group: Group, start: Begin) -> None:
        assert group.name is not None
        offsets = await self._offsets(group.pattern, start)
        self._check_positions(group)
        # Topics that are made from now on are for the group too; it is joined when it is stored.
        self._all_groups[group] = None
        self._attach(group, offsets)
        now_us = self.clock.monotonic_us()
        changes = [Change("group", group.name.decode(), _describe(group))]
        changes += [Change("position", group.key(p.partition), p.to_json(now_us)) for p in group.positions.values()]
        try:
            await self.store.write_state(changes)
        except BaseException:
            del self._all_groups[group]
            group.stop()
            raise

    def _remember_refreshes(self, group: Group) -> None:
        """Its members are waited for from now on. Not waited for itself: who joins again says so again."""
        assert group.name is not None
        group.refreshes = True
        try:
            self.store.state.write([Change("group", group.name.decode(), _describe(group))])
        except PenstockError as error:
            logger.warning("that group %s can be refreshed is not remembered: %s", group.name.decode(), error)

    async def reset_group(
        self, name: bytes, start: Begin, *, topic: bytes | None = None, partition: int | None = None
    ) -> None:
        """Let a group go on from somewhere else, in all that it reads or in some of it, and wait until that counts."""
        group = self.group(name)
        if topic is not None:
            self.topic(topic)
        chosen = [
            position.partition
            for position in group.positions.values()
            if topic in (None, position.partition.name) and partition in (None, position.partition.number)
        ]
        if not chosen:
            raise UnknownTopic(f"the group {name.decode()} reads nothing of that kind")
        offsets = {each: await offset_of(start, each) for each in chosen}
        waits = []
        for each, offset in offsets.items():
            settled, done = outcome()
            group.reset((each.topic_id, each.number), offset, partial(done, offset))
            waits.append(settled)
        await asyncio.gather(*waits)

    async def delete_group(self, name: bytes) -> None:
        await self._to_its_end(self._delete_group(name))

    async def _delete_group(self, name: bytes) -> None:
        group = self.group(name)
        self._forget_group(group)
        for member in list(group.members):
            member.sink.fail(member, UnknownGroup(f"the group {name.decode()} was deleted"))
        changes = [Change("group", name.decode(), None)]
        changes += [Change("position", group.key(p.partition), None) for p in group.positions.values()]
        changes += self.refreshes.forget_group(group)
        await self.store.write_state(changes)
        for position in group.positions.values():
            self._forget_letters(group, position.partition)

    def _forget_letters(self, group: Group, origin: Partition) -> None:
        topic = self.topics.get(self.settings.dead_letter_prefix.encode())
        if topic is not None:
            group.forget_letters(origin, topic)

    def _forget_group(self, group: Group) -> None:
        assert group.name is not None
        del self.groups[group.name]
        del self._all_groups[group]
        group.stop()

    def group(self, name: bytes) -> Group:
        found = self.groups.get(name)
        if found is None:
            raise UnknownGroup(f"there is no group {name.decode(errors='replace')}")
        return found

    def _check_positions(self, group: Group) -> None:
        count = len(self._matching(group.pattern))
        if not self.room.fits(count * group.position_bytes):
            raise TooManyGroups(
                f"there is no room for {count} positions of a group that reads {group.pattern.decode()}: positions use "
                f"{self.room.usage.used} of {self.room.usage.limit} bytes: delete groups that nobody uses, or raise "
                "server.position_bytes_max"
            )

    @contextmanager
    def _reserve_positions(self, name: bytes, partitions: int) -> Iterator[None]:
        """Have room for new partitions of a topic: each group that reads them needs it."""
        groups = [group for group in self._all_groups if group.matches(name) and not name.startswith(RESERVED)]
        size = partitions * sum(group.position_bytes for group in groups)
        if not self.room.fits(size):
            raise TooManyTopics(
                f"topic {name.decode()} cannot get {partitions} partitions: {len(groups)} groups read it, and their "
                f"positions use {self.room.usage.used} of {self.room.usage.limit} bytes: delete groups that nobody "
                "uses, or raise server.position_bytes_max"
            )
        self.room.take(size)
        try:
            yield
        finally:
            # Those that were made have taken it.
            self.room.give_back(size)

    def _attach(self, group: Group, offsets: Mapping[Partition, int]) -> None:
        """Let it read all that matches, from these offsets, and what is not among them from its beginning."""
        for partition in self._matching(group.pattern):
            group.attach(partition, offsets.get(partition, partition.start))

    def _matching(self, pattern: bytes) -> list[Partition]:
        """The partitions in which there may be messages that match."""
        topics = [topic for topic in self.topics if meets(pattern, topic.name) and not topic.is_internal]
        return [partition for topic in topics for partition in topic.partitions]

    async def _offsets(self, pattern: bytes, begin: Begin) -> dict[Partition, int]:
        return {partition: await offset_of(begin, partition) for partition in self._matching(pattern)}

    def _open_group(self, name: str, value: dict[str, Any]) -> None:
        """As it was when the broker stopped."""
        pattern, mode = value["pattern"].encode(), Mode(value["mode"])
        group = self.groups[name.encode()] = Group(name.encode(), pattern, mode, self, value["identity"])
        group.refreshes = value.get("refreshes", False)
        self._all_groups[group] = None
        for topic in self.topics:
            if group.matches(topic.name) and not topic.is_internal:
                for partition in topic.partitions:
                    group.attach(partition, partition.start, self._position_records(group.key(partition)))

    def _position_records(self, key: str) -> list[Record]:
        state = self.store.state
        whole = state.get("position", key)
        return [] if whole is None else [whole, *state.additions("position", key)]

    async def dead_letter_topic(self) -> ServedTopic:
        name = self.settings.dead_letter_prefix.encode()
        # What nobody wants to handle as a dead letter does not become one again.
        policy = replace(self.settings.policy, dead_letters=False)
        topic = self.topics.get(name) or await self._create(name, 1, policy)
        topic.check_writable()
        return topic

    async def dead_letters(self) -> DeadLetters | None:
        """None as long as there was none."""
        topic = self.topics.get(self.settings.dead_letter_prefix.encode())
        if topic is None:
            return None
        if topic.refusal is not None:
            raise topic.refusal
        if self._dead_letters is None or self._dead_letters.topic.topic.id != topic.topic.id:
            self._dead_letters = DeadLetters(topic, self)
        self._dead_letters.serve(topic)
        return self._dead_letters

    def is_dead_letters(self, topic: bytes) -> bool:
        return topic == self.settings.dead_letter_prefix.encode()

    def dead_letter_subject(self, subject: bytes) -> bytes:
        return self.settings.dead_letter_prefix.encode() + b"." + subject

    @property
    def refused(self) -> list[str]:
        """Topics that are not served, because a partition of theirs cannot be opened."""
        return [topic.topic.name for topic in self.topics if topic.refusal is not None]

    def damage(self) -> list[tuple[str, int, LogDamaged]]:
        """What is known of messages that cannot be read: topic, partition, and where. All around them is served."""
        damaged = dict.fromkeys(self.store.catalogue.damage)
        if not damaged:
            return []
        return [
            (topic.topic.name, partition.number, damage)
            for topic in self.topics
            for partition in topic.partitions
            if partition.log in damaged
            for damage in partition.log.damage
        ]

    @property
    def failed(self) -> list[str]:
        """Topics that are read, and take nothing more until a restart: an fsync failed, or we have a bug."""
        failed = self.store.rounds.failed
        if not failed:
            return []
        names = [
            f"{topic.topic.name} ({partition.log.failure})"
            for topic in self.topics
            for partition in topic.partitions
            if partition.log in failed
        ]
        # What groups and topics are is in a log that is no topic's.
        is_state = failed.keys() - {p.log for topic in self.topics for p in topic.partitions}
        return [*names, "the broker's own state"] if is_state else names

    @property
    def slow_readers(self) -> int:
        """Subscriptions that are behind, because their connections do not take what they are given."""
        return sum(bool(subscription.behind) for subscription in self._subscriptions)

    def is_served(self, subject: bytes, besides: Sink | None = None) -> bool:
        """Whether anyone gets what is published there now, other than the connection `besides`."""
        groups = (group for group in self._all_groups if group.members and matches(group.pattern, subject))
        readers = chain[Subscription | Group](self.interest.match(subject), groups)
        return any(member.sink is not besides for reader in readers for member in reader.members)

    def groups_reading(self, subject: bytes) -> int:
        """How many groups have a member who gets what is published there now."""
        return sum(bool(group.members) and matches(group.pattern, subject) for group in self._all_groups)

    def _deliver(self, target: Target, fresh: Batch | Run) -> None:
        """All that is committed comes here once. A batch is opened only if somebody may want it."""
        if isinstance(fresh, Run):
            run = fresh
        elif fresh.has("subject") or self._match(target.name):
            run = open_batch(fresh, target.name)
        else:
            return
        if run.ttls:
            run, expired = run.split_expired(self.clock.now_us())
            self.figures.expired += len(expired)
            if not run.values:
                return
        wanted: dict[Subscription, Sequence[int]] = {}
        match = self._match if self._leaving else self.interest.match
        subject = run.subject
        if subject is not None:
            wanted = dict.fromkeys(match(subject), range(len(run)))
        else:
            found: dict[Subscription, list[int]] = {}
            for index, each in enumerate(run.subjects):
                for subscription in match(each):
                    if subscription in found:
                        found[subscription].append(index)
                    else:
                        found[subscription] = [index]
            wanted.update(found)
        was_sent = False
        for subscription, indices in _in_turn(target, wanted) if len(wanted) > 1 and len(run) > 1 else wanted.items():
            part = run if len(indices) == len(run) else run.select(indices)
            was_sent |= self._hand_over(subscription, target, part)
        if was_sent:
            self.figures.delivered(run)

    def _hand_over(self, subscription: Subscription, target: Target, run: Run) -> bool:
        """Deliver to one subscription. An unexpected exception ends it, and nobody else's."""
        try:
            return subscription.deliver(target, run)
        except Exception as fault:  # noqa: BLE001 - supervises one reader
            subscription.fail(fault)
            return False

    def _match(self, subject: bytes) -> tuple[Subscription, ...]:
        """Return who gets messages with this subject, among them those that get only what is on its way."""
        return self.interest.match(subject) + self._left.match(subject)

    def _find_sinks(self, subjects: Iterable[bytes]) -> set[Sink]:
        """Return the connections that get what is published under these subjects, unless they are behind."""
        readers = {reader for subject in subjects for reader in self._match(subject)}
        return {member.sink for reader in readers for member in reader.members}

    def _pass_over(self, partition: Partition) -> None:
        """What is committed next is too much to be handed out: whoever wants it reads it from the disk."""
        for subscription in chain(self._subscriptions, self._leaving):
            if meets(subscription.pattern, partition.name) and partition not in subscription.behind:
                subscription.behind[partition] = max(partition.served, partition.since.get(subscription, 0))
                subscription.wake()

    def _skip_unserved(self, subscription: Subscription) -> None:
        """What was published before a subscription was made is not for it, though it may be committed later."""
        for partition in self._unserved:
            if meets(subscription.pattern, partition.name):
                partition.since[subscription] = partition.end
        for live in self._order.waiting_live(subscription.pattern):
            live.since[subscription] = live.end


def _in_turn(target: Target, wanted: dict[Subscription, Sequence[int]]) -> Iterator[tuple[Subscription, Sequence[int]]]:
    """Which messages of a run each subscription gets. A connection with several gets one message after the other,
    until it takes no more: a flood for hundreds of subscriptions costs no more steps than messages are sent.
    """
    counts = Counter(member.sink for subscription in wanted for member in subscription.members)
    several: dict[Subscription, Sequence[int]] = {}
    for subscription, indices in wanted.items():
        if any(counts[member.sink] > 1 for member in subscription.members):
            several[subscription] = indices
        else:
            yield subscription, indices
    end = 0
    while several:
        end += _IN_TURN
        steps: list[tuple[int, Subscription]] = []
        for subscription, indices in list(several.items()):
            if target in subscription.behind or not any(member.sink.is_open for member in subscription.members):
                yield subscription, several.pop(subscription)
                continue
            upto = bisect_left(indices, end)
            steps += [(index, subscription) for index in indices[:upto]]
            several[subscription] = indices[upto:]
            if upto == len(indices):
                del several[subscription]
        steps.sort(key=itemgetter(0))
        for subscription, chosen in groupby(steps, itemgetter(1)):
            yield subscription, [index for index, _ in chosen]


def _describe(group: Group) -> dict[str, Any]:
    """As it is remembered."""
    return {
        "pattern": group.pattern.decode(),
        "mode": group.mode,
        "identity": group.identity,
        "refreshes": group.refreshes,
    }


def _stale(topic: ServedTopic, partitions: int) -> StaleLayout:
    count = len(topic.partitions)
    return StaleLayout(f"the topic {topic.topic.name} has {count} partitions, not {partitions}: look again")


def _same_dedup(before: Policy, now: Policy) -> bool:
    return (before.dedup, before.dedup_window_us) == (now.dedup, now.dedup_window_us)


def _deliver_to_nobody(_partition: Partition, _fresh: Batch | Run) -> None:
    pass
