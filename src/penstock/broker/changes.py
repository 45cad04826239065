"""Changes of topics: create, alter, purge, delete, pipe. Each is finished even if its client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from penstock.broker.group import Group
from penstock.broker.partition import Partition
from penstock.broker.start import AtOffset, AtPositions, Begin, Start, offset_of
from penstock.broker.topic import LIVE, ServedTopic, Topics
from penstock.errors import (
    BadRequest,
    BadSubject,
    OffsetOutOfRange,
    OriginConflict,
    PenstockError,
    ReadOnlyTopic,
    TooManyTopics,
    UnknownTopic,
)
from penstock.log.policy import Dedup as DedupMode
from penstock.log.policy import Policy, Topic
from penstock.model.subject import is_subject
from penstock.store.meta import Change
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.broker.broker import Settings
    from penstock.broker.epochs import Epochs
    from penstock.broker.groups import Groups
    from penstock.broker.refresh import Refreshes
    from penstock.broker.schemas import TopicSchemas

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Of the broker's own topics. Upkeep removes whole segments that are not needed any more, but never the last one.
_OWN_POLICY: Final = Policy(dedup=DedupMode.OFF, segment_bytes=8 << 20)


class ChangesHost(Protocol):
    """The broker, as far as changes of topics need it."""

    store: Store
    settings: Settings
    topics: Topics
    groups: Groups
    refreshes: Refreshes
    epochs: Epochs
    schemas: TopicSchemas

    def begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Future[T]: ...

    async def to_its_end(self, change: Coroutine[Any, Any, T]) -> T: ...

    async def dead_letter_topic(self) -> ServedTopic: ...

    def is_dead_letters(self, topic: bytes) -> bool: ...


class TopicChanges:
    def __init__(self, host: ChangesHost, serve: Callable[[Topic, int], Partition]) -> None:
        """`serve` opens a partition of a topic, by its number, for publishers and subscribers."""
        self._host = host
        self._serve_partition = serve
        self._creating: dict[bytes, asyncio.Future[ServedTopic]] = {}

    # Create.

    async def create(self, name: bytes, *, partitions: int | None = None, policy: Policy | None = None) -> Topic:
        _check_name(name)
        return (await self.make(name, partitions, policy)).topic

    async def owner(self, subject: bytes) -> ServedTopic:
        """Return the topic that stores a subject, and create it if there is none. Raises if the subject cannot be
        published to."""
        if not is_subject(subject) or subject.startswith(LIVE):
            raise BadSubject(f"nothing can be stored under {subject.decode(errors='replace')!r}")
        topic = self._host.topics.owner(subject) or await self._create_for(subject)
        topic.check_writable()
        return topic

    async def pushed(self, name: bytes, partitions: int) -> ServedTopic:
        """Return the topic to which another broker pushes its own of that name, which has `partitions` partitions."""
        topic = self._host.topics.get(name)
        if topic is None:
            self._check_auto_created(name)
            await self.create(name, partitions=partitions)
            topic = self._host.topics.named(name)
        topic = self._host.topics.public(topic.topic.id)
        topic.check_writable()
        return topic

    async def own(self, name: bytes) -> ServedTopic:
        """Return a topic of the broker's own, and create it if there is none."""
        served = self._host.topics.get(name) or await self.make(name, 1, _OWN_POLICY)
        if served.refusal is None and served.topic.policy != _OWN_POLICY:
            # An older version created it.
            topic = replace(served.topic, policy=_OWN_POLICY)
            try:
                await self._host.store.alter_topic_async(topic)
            except PenstockError as error:
                logger.warning("%s keeps its policy until the next start: %s", topic.name, error)
            else:
                served = self.serve(topic)
        return served

    async def make(
        self, name: bytes, partitions: int | None, policy: Policy | None, origin: str | None = None
    ) -> ServedTopic:
        """Create a topic. Several that ask for the same one at once get the same."""
        made = self._creating.get(name)
        if made is None:
            self._host.topics.check_new(name, self._creating)
            made = self._creating[name] = self._host.begin(self._make(name, partitions, policy, origin))
        return await asyncio.shield(made)

    async def _make(
        self, name: bytes, partitions: int | None, policy: Policy | None, origin: str | None
    ) -> ServedTopic:
        settings = self._host.settings
        partitions = settings.partitions if partitions is None else partitions
        policy = policy or settings.policy
        try:
            self._host.schemas.check_policy(policy)
            with self._reserve_positions(name, partitions):
                topic = await self._host.store.create_topic_async(
                    name.decode(), partitions=partitions, policy=policy, origin=origin
                )
                return self.serve(topic)
        finally:
            del self._creating[name]

    async def _create_for(self, subject: bytes) -> ServedTopic:
        self._check_auto_created(subject)
        name = subject.split(b".", 1)[0]
        if self._host.is_dead_letters(name):
            return await self._host.dead_letter_topic()
        return await self.make(name, None, None)

    def _check_auto_created(self, subject: bytes) -> None:
        settings = self._host.settings
        if not settings.auto_create:
            raise UnknownTopic(
                f"no topic stores {subject.decode()}, and topics are not created automatically: create it"
            )
        count = sum(not topic.is_internal for topic in self._host.topics) + len(self._creating)
        if count >= settings.topics_max:
            raise TooManyTopics(f"there are {count} topics: create the one for {subject.decode()} by name")

    def serve(self, topic: Topic) -> ServedTopic:
        """Open a topic, or the partitions that were added to it, for publishers and subscribers."""
        name = topic.name.encode()
        refused = self._host.store.catalogue.refused
        refusal = next((refused[place] for place in refused if place[0] == topic.id), None)
        if refusal is not None:
            served = ServedTopic(topic, [], refusal)
            self._host.topics.add(served)
            return served
        before = self._host.topics.get(name)
        partitions = list(before.partitions) if before else []
        for number in range(len(partitions), topic.partitions):
            partitions.append(self._serve_partition(topic, number))
            self._host.groups.add_partition(partitions[-1])
        served = ServedTopic(topic, partitions, check=self._host.schemas.check(topic))
        if before is not None and _same_dedup(before.topic.policy, topic.policy):
            served.dedup = before.dedup
        self._host.topics.add(served)
        return served

    # Alter.

    async def alter(self, name: bytes, *, partitions: int | None = None, policy: Policy | None = None) -> Topic:
        return await self._host.to_its_end(self._alter(name, partitions, policy))

    def warning(self, name: bytes, partitions: int | None) -> str | None:
        """Return what this number of partitions would mean for the messages of a topic; None if nothing."""
        served = self._host.topics.named(name)
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
        served = self._host.topics.named(name)
        topic = served.topic
        warning = self.warning(name, partitions)
        if topic.origin is not None and partitions not in (None, topic.partitions):
            raise ReadOnlyTopic(f"the topic {topic.name} is piped: it has as many partitions as at its origin")
        topic = replace(
            topic,
            partitions=topic.partitions if partitions is None else partitions,
            policy=topic.policy if policy is None else policy,
        )
        self._host.schemas.check_policy(topic.policy, served)
        with self._reserve_positions(name, topic.partitions - served.topic.partitions):
            await self._host.store.alter_topic_async(topic)
            self.serve(topic)
        if warning is not None:
            logger.warning("%s", warning)
        return topic

    async def purge(self, name: bytes, before: Begin, *, partition: int | None = None) -> None:
        """Drop all messages before a place, in one partition or in all, and wait until that is durable.

        Groups continue after them. Upkeep frees the disk, by whole segments.
        """
        await self._host.to_its_end(self._purge(name, before, partition))

    async def _purge(self, name: bytes, before: Begin, partition: int | None) -> None:
        served = self._host.topics.named(name)
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
        await self._host.store.purge_topic_async(served.topic.id, offsets)
        logger.info("%s is purged: its partitions start at %s", served.topic.name, offsets)
        for group in dict.fromkeys(self._reading(chosen)):
            group.wake()

    # Delete.

    async def delete(self, name: bytes) -> None:
        await self._host.to_its_end(self._delete(name))

    async def _delete(self, name: bytes) -> None:
        served = self._host.topics.named(name)
        await self._host.store.delete_topic_async(served.topic.id)
        if self._host.topics.get(name) is not served:
            return  # it was deleted twice at once
        self._host.topics.remove(name)
        positions: list[Change] = []
        for partition in served.partitions:
            for group in self._host.groups.reading(partition):
                group.detach(partition)
                self._host.groups.forget_letters(group, partition)
                positions += group.writer.removals([partition])
            partition.close()
        topic_id = served.topic.id
        self._host.schemas.forget_topic(topic_id)
        forgotten = [*self._host.refreshes.forget_topic(topic_id), *self._host.epochs.forget_topic(topic_id)]
        if changes := [*positions, *forgotten]:
            await self._host.store.write_state(changes)

    def _reading(self, partitions: Iterable[Partition]) -> Iterator[Group]:
        for partition in partitions:
            yield from self._host.groups.reading(partition)

    # Pipe.

    async def pipe(self, name: bytes, origin: str, partitions: int) -> ServedTopic:
        """Return the topic here that is a copy of one elsewhere, and create it if there is none, with as many
        partitions as there.

        Raises OriginConflict if there is another of that name, with messages of its own or of another origin.
        """
        served = self._host.topics.get(name)
        if served is None:
            _check_name(name)
            served = await self.make(name, partitions, None, origin)
        if served.topic.origin != origin or len(served.partitions) < partitions:
            served = await self._host.to_its_end(self._pipe(name, origin, partitions))
        if served.refusal is not None:
            raise served.refusal
        return served

    async def _pipe(self, name: bytes, origin: str, partitions: int) -> ServedTopic:
        served = self._host.topics.named(name)
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
                await self._host.store.alter_topic_async(piped)
                return self.serve(piped)
        except BaseException:
            served.topic = topic
            raise

    def _reserve_positions(self, name: bytes, partitions: int) -> AbstractContextManager[None]:
        return self._host.groups.reserve_positions(name, partitions)


def _check_name(name: bytes) -> None:
    if not is_subject(name) or name.startswith(LIVE):
        raise BadSubject(f"a topic cannot be named {name.decode(errors='replace')!r}")


def _same_dedup(before: Policy, now: Policy) -> bool:
    return (before.dedup, before.dedup_window_us) == (now.dedup, now.dedup_window_us)
