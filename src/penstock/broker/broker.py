"""The broker: topics, those who publish to them and those who read. It is what every door opens to.

It belongs to the event loop. `publish` and what is delivered are callbacks, because they happen for every run of
messages; whatever waits for the disk and is rare (topics, groups, reading what was long ago) is awaited.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

from penstock.broker import headers
from penstock.broker.deadletters import DeadLetters
from penstock.broker.dedup import Dedup
from penstock.broker.delay import DELAYED_TOPIC, Delays
from penstock.broker.flow import Flow
from penstock.broker.group import Group, Mode
from penstock.broker.interest import Interest
from penstock.broker.member import Member
from penstock.broker.partition import LivePartition, Partition
from penstock.broker.subscription import Subscription
from penstock.broker.topic import RESERVED, ServedTopic, Target, Topics
from penstock.clock import Clock
from penstock.errors import BadSubject, GroupConflict, PenstockError, TooManyTopics, UnknownGroup, UnknownTopic
from penstock.run import Run
from penstock.storage.meta import Change
from penstock.storage.policy import Dedup as DedupMode
from penstock.storage.policy import Policy, Topic
from penstock.storage.store import Store
from penstock.subject import is_pattern, is_subject, matches, meets

logger = logging.getLogger(__name__)

# Subjects that begin so are live only: inboxes.
LIVE: Final = b"_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    # Whether a subject without a topic makes one, named by its first token; how many are made so.
    auto_create: bool = True
    topics_max: int = 10_000
    partitions: int = 1
    policy: Policy = field(default_factory=Policy)
    flow: Flow = field(default_factory=Flow)
    dead_letter_prefix: str = "DLQ"


class Start(StrEnum):
    """Where a new group begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


class Receipt:
    """What becomes of a run that is published. `done` is called once, when all of it is decided."""

    __slots__ = ("_done", "_undo", "_waiting", "count", "duplicates", "error", "places")

    def __init__(self, count: int, done: Callable[[Receipt], None]) -> None:
        self.count = count
        # The first thing that went wrong; then none of the run counts as stored, though some of it may be.
        self.error: PenstockError | None = None
        # Which of the messages were stored before, and are not again.
        self.duplicates: list[int] = []
        # Where the messages went: partition, first offset, how many.
        self.places: list[tuple[Target, int, int]] = []
        self._done = done
        self._waiting = 1
        self._undo: list[Callable[[], None]] = []

    def on_failure(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def expect(self) -> None:
        self._waiting += 1

    def settle(self, _offset: int, error: PenstockError | None) -> None:
        if error is not None and self.error is None:
            self.error = error
        self._waiting -= 1
        if not self._waiting:
            if self.error is not None:
                for undo in self._undo:
                    undo()
            self._done(self)


class Broker:
    def __init__(self, store: Store, *, clock: Clock, settings: Settings | None = None) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings or Settings()
        self.topics = Topics()
        self.interest: Interest[Subscription] = Interest()
        # Partitions with messages that nobody was given yet.
        self._unserved: dict[Partition, None] = {}
        self._queues: dict[tuple[bytes, bytes], Subscription] = {}
        self._live = LivePartition(LIVE, self._deliver)
        self._creating: dict[bytes, asyncio.Future[ServedTopic]] = {}
        # There once it runs.
        self.delays: Delays | None = None
        self._dead_letters: DeadLetters | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        # Those with a name.
        self.groups: dict[bytes, Group] = {}
        for topic in store.topics:
            self._serve(topic)
        for name, value in store.state.items("group"):
            self._open_group(name, value)

    # Its life.

    async def run(self, started: asyncio.Event) -> None:
        """Serve until cancelled."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self.store.run(), name="store")
            delayed = self.topics.get(DELAYED_TOPIC) or await self._create(
                DELAYED_TOPIC, 1, Policy(dedup=DedupMode.OFF)
            )
            self.delays = Delays(delayed.partitions[0], self)
            tasks.create_task(self.delays.run(), name="delays")
            for group in self.groups.values():
                group.start()
            started.set()

    def save(self) -> None:
        """Before a stop: let the groups write where they are."""
        for group in self.groups.values():
            group.save_all()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "it runs"
        return self._tasks.create_task(coroutine)

    def call_at(self, when_us: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        assert self._loop is not None, "it runs"
        # uvloop counts in milliseconds, and rounds: never early, or whoever is woken finds nothing to do.
        delay_us = max(0, when_us - self.clock.monotonic_us()) + 1000
        return self._loop.call_later(delay_us / 1e6, callback)

    # Topics.

    async def create_topic(self, name: bytes, *, partitions: int | None = None, policy: Policy | None = None) -> Topic:
        if not is_subject(name) or name.startswith((RESERVED, LIVE)):
            raise BadSubject(f"a topic cannot be named {name.decode(errors='replace')!r}")
        return (await self._create(name, partitions, policy)).topic

    async def alter_topic(self, name: bytes, *, partitions: int | None = None, policy: Policy | None = None) -> Topic:
        served = self._named(name)
        topic = served.topic
        topic = replace(topic, partitions=partitions or topic.partitions, policy=policy or topic.policy)
        await self.store.alter_topic_async(topic)
        self._serve(topic)
        return topic

    async def delete_topic(self, name: bytes) -> None:
        served = self._named(name)
        self.topics.remove(name)
        positions = []
        for partition in served.partitions:
            for group in self.groups.values():
                if (partition.topic_id, partition.number) in group.positions:
                    group.detach(partition)
                    positions.append(Change("position", group.key(partition), None))
            partition.close()
        await self.store.delete_topic_async(served.topic.id)
        if positions:
            await self.store.write_state(positions)

    def _named(self, name: bytes) -> ServedTopic:
        served = self.topics.get(name)
        if served is None:
            raise UnknownTopic(f"there is no topic {name.decode(errors='replace')}")
        return served

    async def _create(self, name: bytes, partitions: int | None, policy: Policy | None) -> ServedTopic:
        """Make a topic; whoever asks for the same one meanwhile gets the same."""
        made = self._creating.get(name)
        if made is None:
            self.topics.check_new(name)
            made = self._creating[name] = asyncio.get_running_loop().create_future()
            self.spawn(self._make(name, partitions, policy, made))
        return await asyncio.shield(made)

    async def _make(
        self, name: bytes, partitions: int | None, policy: Policy | None, made: asyncio.Future[ServedTopic]
    ) -> None:
        try:
            topic = await self.store.create_topic_async(
                name.decode(),
                partitions=partitions or self.settings.partitions,
                policy=policy or self.settings.policy,
            )
        except PenstockError as error:
            made.set_exception(error)
            made.exception()  # it may be that nobody waits for it any more
        else:
            made.set_result(self._serve(topic))
        finally:
            del self._creating[name]

    def _serve(self, topic: Topic) -> ServedTopic:
        """Open the doors of a topic, or of what was added to it."""
        name = topic.name.encode()
        refusal = next((self.store.refused[place] for place in self.store.refused if place[0] == topic.id), None)
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
            partitions.append(Partition(topic.id, number, name, log, self.store, deliver, self._unserved))
            for group in self.groups.values():
                if group.matches(name) and not name.startswith(RESERVED):
                    # The group is older than the partition: all of it is for the group.
                    group.attach(partitions[-1], log.start)
        served = ServedTopic(topic, partitions)
        if before is not None:
            served.dedups = before.dedups
        self.topics.add(served)
        return served

    # In.

    def is_ready(self, run: Run) -> bool:
        """Whether `publish` can take the run as things are; if not, `prepare` makes it so."""
        if self.store.is_crowded:
            return False
        subject = run.subject
        if subject is not None and not run.headers:
            return subject.startswith(LIVE) or (
                (topic := self.topics.owner(subject)) is not None
                and topic.refusal is None
                and topic.topic.policy.dedup is not DedupMode.PAYLOAD
            )
        return all(self._is_prepared(subject) for subject in set(run.subjects))

    async def prepare(self, run: Run) -> None:
        """Make the topics that the run needs, read what must be known of them, and wait for the disk to catch up."""
        for subject in set(run.subjects):
            if subject.startswith(LIVE):
                continue
            topic = await self.owner(subject)
            if topic.refusal is not None:
                raise topic.refusal
            if topic.topic.policy.dedup is not DedupMode.OFF:
                for partition in topic.partitions:
                    if partition not in topic.dedups:
                        topic.dedups[partition] = await self._read_dedup(topic, partition)
        await self.store.room()

    def publish(self, run: Run, done: Callable[[Receipt], None]) -> Receipt:
        """Take a run that is the broker's from now on. It must be ready for it (`is_ready`)."""
        receipt = Receipt(len(run), done)
        subject = run.subject
        if subject is not None and not run.headers:
            if subject.startswith(LIVE):
                self._append(self._live, run, receipt)
                receipt.settle(0, None)
                return receipt
            topic = self.topics.owner(subject)
            if topic is not None and topic.topic.policy.dedup is not DedupMode.PAYLOAD:
                self._append(topic.choose(subject, None), run, receipt)
                topic.turn()
                receipt.settle(0, None)
                return receipt
        self._publish_mixed(run, receipt)
        receipt.settle(0, None)
        return receipt

    def _append(self, target: Target, run: Run, receipt: Receipt) -> int:
        receipt.expect()
        count = len(run)
        try:
            offset = target.append(run, receipt.settle)
        except PenstockError as error:
            receipt.settle(0, error)
            return -1
        receipt.places.append((target, offset, count))
        return offset

    def _publish_mixed(self, run: Run, receipt: Receipt) -> None:
        """Message by message to where it belongs; those for the same partition stay together and in order."""
        now_us = self.clock.now_us()
        parts: dict[Target, list[int]] = {}
        topics: dict[Target, ServedTopic] = {}
        asked: dict[int, headers.Asked] = {}
        try:
            for index, block in run.headers.items():
                asked[index] = headers.read(block, now_us)
        except PenstockError as error:
            receipt.error = error
            return
        for index, found in asked.items():
            if found.key is not None:
                run.keys[index] = found.key
        for index, subject in enumerate(run.subjects):
            if subject.startswith(LIVE):
                parts.setdefault(self._live, []).append(index)
                continue
            topic = self.topics.owner(subject)
            if topic is None:
                receipt.error = UnknownTopic(f"the topic of {subject.decode()} was deleted meanwhile")
                return
            partition = topic.choose(subject, run.keys.get(index))
            topics[partition] = topic
            parts.setdefault(partition, []).append(index)
        for topic in set(topics.values()):
            topic.turn()
        for target, indices in parts.items():
            if isinstance(target, Partition):
                self._append_part(topics[target], target, run, indices, asked, receipt)
            else:
                self._append(target, run.select(indices), receipt)

    def _append_part(
        self,
        topic: ServedTopic,
        partition: Partition,
        run: Run,
        indices: list[int],
        asked: dict[int, headers.Asked],
        receipt: Receipt,
    ) -> None:
        """Append what was not stored before, and is not for later."""
        now_us = self.clock.now_us()
        fresh = indices
        identities: list[bytes] = []
        if topic.topic.policy.dedup is not DedupMode.OFF:
            fresh, identities = self._sift(topic, partition, run, indices, asked, receipt)
        later = [index for index in fresh if index in asked and (asked[index].due_us or 0) > now_us]
        if later:
            delays = self.delays
            assert delays is not None, "it runs"
            try:
                delays.check_room(len(later))
            except PenstockError as error:
                receipt.error = error
                return
            for index in later:
                self._append(delays.partition, delays.delayed(run, index, asked[index].due_us or 0), receipt)
            fresh = [index for index in fresh if index not in later]
        if fresh:
            self._append(partition, run.select(fresh), receipt)
        if identities:
            # They are known from now on, unless what they belong to is taken back.
            dedup = topic.dedups[partition]
            for identity in identities:
                dedup.add(identity, partition.end, now_us)
            receipt.on_failure(partial(dedup.forget, identities))

    def _sift(
        self,
        topic: ServedTopic,
        partition: Partition,
        run: Run,
        indices: list[int],
        asked: dict[int, headers.Asked],
        receipt: Receipt,
    ) -> tuple[list[int], list[bytes]]:
        """Those of the messages that were not stored before, and the ids that they have."""
        by_payload = topic.topic.policy.dedup is DedupMode.PAYLOAD
        dedup = topic.dedups[partition]
        now_us = self.clock.now_us()
        fresh: list[int] = []
        identities: dict[bytes, None] = {}
        for index in indices:
            if by_payload:
                identity: bytes | None = _payload_identity(run.values[index])
            else:
                identity = asked[index].identity if index in asked else None
            if identity is not None:
                if identity in identities or dedup.find(identity, now_us) is not None:
                    receipt.duplicates.append(index)
                    continue
                identities[identity] = None
            fresh.append(index)
        if len(fresh) < len(indices):
            # A repetition is as durable as the message that it repeats, which may still wait for the disk.
            receipt.expect()
            partition.log.when_committed(0, receipt.settle)
        return fresh, list(identities)

    def _is_prepared(self, subject: bytes) -> bool:
        if subject.startswith(LIVE):
            return True
        topic = self.topics.owner(subject)
        if topic is None or topic.refusal is not None:
            return False
        return topic.topic.policy.dedup is DedupMode.OFF or len(topic.dedups) == len(topic.partitions)

    async def owner(self, subject: bytes) -> ServedTopic:
        """The topic that stores a subject, made if there is none."""
        return self.topics.owner(subject) or await self._create_for(subject)

    async def _create_for(self, subject: bytes) -> ServedTopic:
        if not self.settings.auto_create:
            raise UnknownTopic(f"no topic stores {subject.decode()}, and none is made by itself: create it")
        if len(self.topics) + len(self._creating) >= self.settings.topics_max:
            raise TooManyTopics(f"there are {len(self.topics)} topics: create the one for {subject.decode()} by name")
        return await self._create(subject.split(b".", 1)[0], None, None)

    async def _read_dedup(self, topic: ServedTopic, partition: Partition) -> Dedup:
        """What the log says of the messages within the window."""
        policy = topic.topic.policy
        dedup = Dedup(policy.dedup_window_us)
        by_payload = policy.dedup is DedupMode.PAYLOAD
        loop = asyncio.get_running_loop()
        since = self.clock.now_us() - policy.dedup_window_us
        offset = await loop.run_in_executor(None, partition.log.offset_at, since)
        while offset < partition.log.committed:
            batches = await self.store.read(partition.log, offset, 1 << 20)
            for batch in batches:
                columns = batch.columns()
                if by_payload:
                    for at, value in zip(columns.offsets(), columns.values(), strict=True):
                        dedup.add(_payload_identity(value), at, batch.append_time)
                elif (blocks := columns.headers()) is not None:
                    for at, block in zip(columns.offsets(), blocks, strict=True):
                        identity = headers.identity(block) if block else None
                        if identity is not None:
                            dedup.add(identity, at, batch.append_time)
            if not batches:
                break
            offset = batches[-1].end
        return dedup

    # Out.

    def subscribe(self, pattern: bytes, member: Member, queue: bytes | None = None) -> Subscription:
        """From now on `member` gets what matches; with a queue, its share of it."""
        key = None if queue is None else (pattern, queue)
        subscription = self._queues.get(key) if key else None
        if subscription is None:
            subscription = Subscription(pattern, self)
            self._skip_unserved(subscription)
            if key:
                self._queues[key] = subscription
            self.interest.add(pattern, subscription)
        subscription.members.append(member)
        return subscription

    def unsubscribe(self, subscription: Subscription, member: Member) -> None:
        subscription.members.remove(member)
        if not subscription.members:
            self.interest.remove(subscription.pattern, subscription)
            for key, queued in list(self._queues.items()):
                if queued is subscription:
                    del self._queues[key]
            subscription.behind.clear()
        else:
            subscription.wake()

    # Groups.

    async def join(self, name: bytes | None, pattern: bytes, member: Member, mode: Mode = Mode.SHARED) -> Group:
        """Make `member` one of a group, which is made if there is none; without a name, one of its own."""
        if name is None:
            group = Group(None, pattern, mode, self)
            self._attach(group)
            group.start()
        else:
            group = self.groups.get(name) or await self.create_group(name, pattern, mode)
            if (group.pattern, group.mode) != (pattern, mode):
                raise GroupConflict(
                    f"the group {name.decode()} is {group.mode} and reads {group.pattern.decode()}: use another name"
                )
        group.join(member)
        return group

    def leave(self, group: Group, member: Member) -> None:
        group.leave(member)
        if group.name is None and not group.members:
            group.stop()

    async def create_group(
        self, name: bytes, pattern: bytes, mode: Mode = Mode.SHARED, *, start: Start = Start.LATEST
    ) -> Group:
        """A group that is remembered, with its positions, from now on."""
        if not is_pattern(pattern):
            raise BadSubject(f"{pattern.decode(errors='replace')!r} is not a pattern")
        if name in self.groups:
            raise GroupConflict(f"there is a group {name.decode()} already")
        group = self.groups[name] = Group(name, pattern, mode, self)
        self._attach(group, start)
        now_us = self.clock.monotonic_us()
        changes = [Change("group", name.decode(), {"pattern": pattern.decode(), "mode": mode})]
        changes += [Change("position", group.key(p.partition), p.to_json(now_us)) for p in group.positions.values()]
        try:
            await self.store.write_state(changes)
        except PenstockError:
            del self.groups[name]
            group.stop()
            raise
        group.start()
        return group

    async def delete_group(self, name: bytes) -> None:
        group = self.group(name)
        del self.groups[name]
        group.stop()
        changes = [Change("group", name.decode(), None)]
        changes += [Change("position", group.key(p.partition), None) for p in group.positions.values()]
        await self.store.write_state(changes)

    def group(self, name: bytes) -> Group:
        found = self.groups.get(name)
        if found is None:
            raise UnknownGroup(f"there is no group {name.decode(errors='replace')}")
        return found

    def _attach(self, group: Group, start: Start = Start.LATEST) -> None:
        for topic in self.topics:
            if group.matches(topic.name) and not topic.is_internal:
                for partition in topic.partitions:
                    group.attach(partition, partition.end if start is Start.LATEST else partition.start)

    def _open_group(self, name: str, value: dict[str, Any]) -> None:
        """As it was when the broker stopped."""
        group = self.groups[name.encode()] = Group(name.encode(), value["pattern"].encode(), Mode(value["mode"]), self)
        for topic in self.topics:
            if group.matches(topic.name) and not topic.is_internal:
                for partition in topic.partitions:
                    position = self.store.state.get("position", group.key(partition))
                    group.attach(partition, partition.start, position)

    async def dead_letter_topic(self) -> ServedTopic:
        name = self.settings.dead_letter_prefix.encode()
        # What nobody wants to handle as a dead letter does not become one again.
        policy = replace(self.settings.policy, dead_letters=False)
        return self.topics.get(name) or await self._create(name, 1, policy)

    async def dead_letters(self) -> DeadLetters:
        topic = await self.dead_letter_topic()
        if self._dead_letters is None or self._dead_letters.topic is not topic:
            self._dead_letters = DeadLetters(topic, self)
        return self._dead_letters

    def dead_letter_subject(self, subject: bytes) -> bytes:
        return self.settings.dead_letter_prefix.encode() + b"." + subject

    @property
    def refused(self) -> list[str]:
        """Topics that are not served, because a partition of theirs cannot be opened."""
        return [topic.topic.name for topic in self.topics if topic.refusal is not None]

    def is_served(self, subject: bytes) -> bool:
        """Whether there is anyone who gets what is published there now."""
        return bool(self.interest.match(subject)) or any(
            group.members and matches(group.pattern, subject) for group in self.groups.values()
        )

    def _deliver(self, target: Target, run: Run) -> None:
        """Every run that is committed comes here once."""
        subject = run.subject
        if subject is not None:
            for subscription in self.interest.match(subject):
                subscription.deliver(target, run)
            return
        wanted: dict[Subscription, list[int]] = {}
        match = self.interest.match
        for index, each in enumerate(run.subjects):
            for subscription in match(each):
                if subscription in wanted:
                    wanted[subscription].append(index)
                else:
                    wanted[subscription] = [index]
        for subscription, indices in wanted.items():
            subscription.deliver(target, run if len(indices) == len(run) else run.select(indices))

    def _skip_unserved(self, subscription: Subscription) -> None:
        """What was published before a subscription was made is not for it, though it may be committed later."""
        for partition in self._unserved:
            if meets(subscription.pattern, partition.name):
                subscription.since[partition] = partition.end


def _deliver_to_nobody(_partition: Partition, _run: Run) -> None:
    pass


def _payload_identity(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()
