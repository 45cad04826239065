"""From the broker into the copy: a member of a partitioned group, which acknowledges what is stored here.

The copy says how far it is, not the group. What comes again is not stored again; and where the group is ahead of the
copy (its directory was removed, or is an older one), the group is moved back.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Final, TypeVar

from penstock.client.aio import AsyncClient, AsyncSubscription
from penstock.client.message import Message
from penstock.client.values import GroupPosition
from penstock.errors import BadConfig, DiskError, PeerError, PenstockError, UnknownGroup, UnknownTopic
from penstock.replica.config import OnError, ReplicaConfig
from penstock.replica.copies import Copies, OriginTopic
from penstock.run import Run
from penstock.web import Credentials

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Messages that are here and not stored yet, and how many are stored at once.
BUFFER: Final = 10_000
STORED_AT_ONCE: Final = 5_000
# For a request to the broker; for a look at it, and between two of them; and until it is asked again to subscribe.
_TIMEOUT_S: Final = 5.0
_ANSWER_S: Final = 2.0
_LOOK_S: Final = 1.0
_AGAIN_S: Final = 1.0
# What the disk may do.
_DISK_ERRORS: Final = (OSError, sqlite3.Error, DiskError)


@dataclass(frozen=True, slots=True)
class Broker:
    """What is known of it: how far behind it the copy is, and what keeps them apart."""

    connected: bool = False
    lag: int | None = None
    error: str | None = None


class Follower:
    def __init__(
        self,
        config: ReplicaConfig,
        copies: Copies,
        *,
        delay_s: Callable[[int], float | None],
        credentials: Credentials,
    ) -> None:
        """`delay_s`: how long to wait when a message could not be stored for the n-th time."""
        # Messages that were acknowledged and are not stored, because that was asked for.
        self.skipped = 0
        # Why messages are not stored at present, if they are not.
        self.failure: str | None = None
        self.is_paused = False
        self._config = config
        self._copies = copies
        self._delay_s = delay_s
        self._credentials = credentials
        self._stop = asyncio.Event()
        self._resumed = asyncio.Event()
        # The only thread that changes the copies.
        self._thread = ThreadPoolExecutor(1, "penstock-replica")
        self._subscription: AsyncSubscription | None = None
        # What the broker says of the group, and why there is no subscription, if there is none.
        self._seen = Broker()
        self._refusal: str | None = None

    @property
    def broker(self) -> Broker:
        return replace(self._seen, error=self._refusal or self._seen.error)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Then what is being stored is stored, and acknowledged."""
        self._stop = stop
        client = AsyncClient(
            self._config.broker, name=f"replica {self._config.type}", timeout=_TIMEOUT_S, **asdict(self._credentials)
        )
        watching = asyncio.create_task(self._watch(client))
        try:
            await self._follow(client)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await client.close()
            self._thread.shutdown()

    def resume(self) -> bool:
        """After a pause; False if there was none."""
        self._resumed.set()
        return self.is_paused

    # RESET and READY, as the broker says them.

    async def reset(self, topic: str) -> None:
        """All of the topic comes again: into a new copy. Readers have the old one meanwhile."""
        logger.info("%s is sent anew: a new copy begins", topic)
        await self._insist(self._copies.begin, "a new copy cannot be begun")

    async def ready(self, topic: str) -> None:
        """All has come: readers have the new copy."""
        if await self._insist(self._copies.complete, "the new copy cannot take the place of the old one"):
            logger.info("%s is complete: the new copy is read", topic)

    # The subscription.

    async def _follow(self, client: AsyncClient) -> None:
        was_open = False
        while not self._stop.is_set():
            try:
                async with await self._subscribe(client) as subscription:
                    self._subscription = subscription
                    was_open = True
                    self._refusal = None
                    await self._take(subscription)
            except PenstockError as error:
                if isinstance(error, BadConfig) or (isinstance(error, PeerError) and not was_open):
                    raise  # what was asked for is wrong, and will be
                self._note_refusal(error)
                await self._pause(_AGAIN_S)

    async def _subscribe(self, client: AsyncClient) -> AsyncSubscription:
        await client.connect()
        if self._copies.is_building and await self._is_in_vain(client):
            logger.warning("the new copy will not be completed: it is given up")
            await self._insist(self._copies.abandon, "the new copy cannot be given up")
        await self._move_back(client)
        return await client.subscribe(
            self._config.topic,
            group=self._config.group,
            mode="partitioned",
            start="earliest",
            buffer=BUFFER,
            on_reset=self.reset,
            on_ready=self.ready,
        )

    async def _is_in_vain(self, client: AsyncClient) -> bool:
        """Whether a new copy was begun, and the broker will not say that it is complete."""
        if await self._refresh_is_over(client):
            return True
        # It may have been given up before the group went back: then nothing comes again.
        return bool(await self._ahead(client))

    async def _refresh_is_over(self, client: AsyncClient) -> bool:
        """Of this group: also if the topic or the group is not there any more."""
        try:
            refresh = await client.refresh_status(self._copies.topic_name or self._config.topic)
        except UnknownTopic:
            return True
        states = [each.state for each in refresh.groups if each.group == self._config.group]
        return not states or states == ["COMPLETED"]

    async def _move_back(self, client: AsyncClient) -> None:
        """The group must not be ahead of the copy, or what is between them would never come."""
        for position, wanted in await self._ahead(client):
            logger.warning(
                "the group %s is at offset %d of %s/%d, and the copy at %d: the group goes back",
                self._config.group,
                position.committed,
                position.topic,
                position.partition,
                wanted,
            )
            await client.reset_group(self._config.group, wanted, topic=position.topic, partition=position.partition)

    async def _ahead(self, client: AsyncClient) -> list[tuple[GroupPosition, int]]:
        """Where the group is ahead of the copy, and where that is."""
        try:
            group = await client.group(self._config.group)
        except UnknownGroup:
            return []
        if group.members:
            logger.warning(
                "the group %s has %d other members: each has only some of the partitions. Give each replica its own",
                group.name,
                len(group.members),
            )
        ahead = []
        for position in group.positions:
            try:
                topic = await client.topic(position.topic)
            except UnknownTopic:
                continue
            is_ours = self._copies.topic in (None, OriginTopic(topic.name, topic.id))
            wanted = self._copies.next_offset(position.partition) if is_ours else 0
            if position.committed > max(wanted, topic.positions[position.partition].start):
                ahead.append((position, wanted))
        return ahead

    async def _take(self, subscription: AsyncSubscription) -> None:
        """Until it is time to stop; or until the subscription must be made anew, to get what comes from its begin."""
        while (messages := await self._next(subscription)) is not None:
            for topic, several in _by_topic(messages):
                if not await self._is_ours(topic):
                    return
                await self._store(topic, several)
        await self._settle(subscription)

    async def _next(self, subscription: AsyncSubscription) -> list[Message] | None:
        """The messages that have come; None if it is time to stop."""
        taking = asyncio.create_task(subscription.get_many(STORED_AT_ONCE))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
            return None if self._stop.is_set() else taking.result()
        finally:
            for task in (taking, stopping):
                task.cancel()
            await asyncio.gather(taking, stopping, return_exceptions=True)

    async def _is_ours(self, topic: OriginTopic) -> bool:
        """Whether messages of this topic belong into the copy. If it was deleted and made again, or is another
        broker's, a new copy begins."""
        ours = self._copies.topic
        if ours in (None, topic):
            return True
        assert ours is not None
        if ours.name != topic.name:
            raise BadConfig(
                [f"{self._config.topic} matches {ours.name} and {topic.name}: a copy is of one topic, name that"]
            )
        logger.warning("%s is another topic than the one that was copied: a new copy begins", topic.name)
        await self._insist(self._copies.begin, "a new copy cannot be begun")
        await self._insist(self._copies.complete, "the new copy cannot take the place of the old one")
        return False

    async def _settle(self, subscription: AsyncSubscription) -> None:
        try:
            await subscription.flush()
        except PenstockError as error:
            # It comes again, and is here already.
            logger.info("not all is acknowledged: %s", error)

    # Storing.

    async def _store(self, topic: OriginTopic, messages: Sequence[Message]) -> None:
        """Halved as long as it fails, a batch leaves alone what cannot be stored."""
        parts, attempt = [messages], 1
        while parts:
            part = parts.pop()
            try:
                await self._in_thread(partial(self._append, topic, part))
            except _DISK_ERRORS as error:
                if len(part) > 1:
                    middle = len(part) // 2
                    parts += (part[middle:], part[:middle])
                    continue
                self._note_failure(f"offset {part[0].offset} of {topic.name}/{part[0].partition} is not stored", error)
                if self._config.on_error is OnError.SKIP_ON_ERROR:
                    self._skip(topic, part[0])
                elif await self._waits(attempt):
                    parts.append(part)
                    attempt += 1
                    continue
                else:
                    return
            else:
                self.failure = None
            attempt = 1
            _acknowledge(part)

    def _append(self, topic: OriginTopic, messages: Sequence[Message]) -> None:
        partitions: dict[int, list[Message]] = {}
        for message in messages:
            partitions.setdefault(message.partition, []).append(message)
        self._copies.append(topic, {partition: _run(several) for partition, several in partitions.items()})

    def _skip(self, topic: OriginTopic, message: Message) -> None:
        self.skipped += 1
        logger.error("offset %d of %s/%d is skipped", message.offset, topic.name, message.partition)

    async def _waits(self, attempt: int) -> bool:
        """Until it is time to try again; False if it is time to stop."""
        if self._config.on_error is OnError.PAUSE_ON_ERROR:
            logger.error("paused, until it is resumed: POST /api/consumer/resume")
            await self._wait_resumed()
        else:
            await self._pause(self._delay_s(attempt) or 0.0)
        return not self._stop.is_set()

    async def _wait_resumed(self) -> None:
        self._resumed.clear()
        self.is_paused = True
        waits = [asyncio.create_task(event.wait()) for event in (self._resumed, self._stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.is_paused = False
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _insist(self, change: Callable[[], T], problem: str) -> T:
        """What the broker waits for is tried until it is done."""
        attempt = 1
        while True:
            try:
                done = await self._in_thread(change)
            except _DISK_ERRORS as error:
                self._note_failure(problem, error)
                await self._pause(self._delay_s(attempt) or 0.0)
                if self._stop.is_set():
                    raise
                attempt += 1
            else:
                self.failure = None
                return done

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _pause(self, seconds: float) -> None:
        """Or until it is time to stop."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            pass

    # What is known.

    def _note_failure(self, problem: str, error: Exception) -> None:
        self.failure = f"{problem}: {error}"
        logger.error("%s", self.failure)

    def _note_refusal(self, error: PenstockError) -> None:
        if str(error) != self._refusal:
            logger.warning("not subscribed: %s", error)
        self._refusal = str(error)

    async def _watch(self, client: AsyncClient) -> None:
        """Look at the broker now and then: who answers is there."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self._seen = await self._look(client)
                    await self._look_at_refresh(client)
            except TimeoutError:
                self._seen = Broker(error=f"no answer from {self._config.broker} for {_ANSWER_S:g} s")
            except PenstockError as error:
                self._seen = Broker(error=str(error))
            await asyncio.sleep(_LOOK_S)

    async def _look(self, client: AsyncClient) -> Broker:
        try:
            group = await client.group(self._config.group)
        except UnknownGroup:
            return Broker(connected=True)
        return Broker(connected=True, lag=group.lag)

    async def _look_at_refresh(self, client: AsyncClient) -> None:
        """If a new copy waits for a word that will not come (its group was deleted), it is looked at anew."""
        if self._copies.is_building and await self._refresh_is_over(client) and self._subscription is not None:
            await self._subscription.close()


def _by_topic(messages: Sequence[Message]) -> Iterator[tuple[OriginTopic, list[Message]]]:
    """In their order. Almost always it is one topic."""
    for topic, several in groupby(messages, key=lambda message: OriginTopic(message.topic, message.topic_id)):
        yield topic, list(several)


def _run(messages: Sequence[Message]) -> Run:
    run = Run([message.subject.encode() for message in messages], [message.value for message in messages])
    run.keys = {index: key for index, message in enumerate(messages) if (key := message.key) is not None}
    run.headers = {index: block for index, message in enumerate(messages) if (block := message.header_block)}
    run.tombstones = {index for index, message in enumerate(messages) if message.deleted}
    run.timestamps = [message.timestamp_us for message in messages]
    run.offsets = [message.offset for message in messages]
    run.base_offset = messages[0].offset
    return run


def _acknowledge(messages: Sequence[Message]) -> None:
    """In a partition the last one speaks for all."""
    last: dict[int, Message] = {message.partition: message for message in messages}
    for message in last.values():
        message.ack()
