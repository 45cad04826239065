"""Copy messages from the broker: a member of a partitioned group that acknowledges messages once they are stored here.

The copy decides the position, not the group. Redelivered messages are not stored again; if the group is ahead of the
copy (its directory was removed, or is an older one), the group is moved back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Final

from penstock.client.aio import AsyncClient
from penstock.client.message import Message
from penstock.client.subscription import AsyncSubscription
from penstock.client.values import GroupPosition
from penstock.errors import BadConfig, PeerError, PenstockError, UnknownGroup, UnknownTopic
from penstock.replica.config import ReplicaConfig
from penstock.replica.copies import Copies, OriginTopic
from penstock.replica.writer import CopyWriter
from penstock.tls.options import TlsOptions
from penstock.web.credentials import Credentials

logger = logging.getLogger(__name__)

# Messages to prefetch, and to store at once.
BUFFER: Final = 10_000
STORED_AT_ONCE: Final = 5_000
# Timeouts of a request and of a status check; intervals between status checks and between attempts to subscribe.
_TIMEOUT_S: Final = 5.0
_ANSWER_S: Final = 2.0
_LOOK_S: Final = 1.0
_AGAIN_S: Final = 1.0
# States of a refresh in which the broker waits for members to confirm RESET, and delivers nothing.
_RESETTING: Final = ("RESET_SENT", "WAITING_FOR_ACKS")


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """The connection to the broker: the lag of the copy, or the error."""

    connected: bool = False
    lag: int | None = None
    error: str | None = None


class Follower:
    def __init__(
        self,
        config: ReplicaConfig,
        copies: Copies,
        *,
        writer: CopyWriter,
        credentials: Credentials,
        stop: asyncio.Event,
        tls: TlsOptions | None = None,
    ) -> None:
        self._config = config
        self._copies = copies
        self._writer = writer
        self._credentials = credentials
        self._stop = stop
        self._tls = tls
        self._subscription: AsyncSubscription | None = None
        # The last status of the broker, and why there is no subscription, if so.
        self._seen = BrokerStatus()
        self._refusal: str | None = None

    @property
    def broker(self) -> BrokerStatus:
        return replace(self._seen, error=self._refusal or self._seen.error)

    async def run(self) -> None:
        """Run until `stop`, then store and acknowledge the messages at hand."""
        client = AsyncClient(
            self._config.broker,
            name=f"replica {self._config.type}",
            timeout=_TIMEOUT_S,
            tls=self._tls,
            **asdict(self._credentials),
        )
        watching = asyncio.create_task(self._watch(client))
        try:
            await self._follow(client)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await client.close()
            self._writer.close()

    # ---- RESET and READY from the broker

    async def reset(self, topic: str) -> None:
        """Start a new copy, because the broker sends the whole topic again. Readers keep the old copy meanwhile."""
        logger.info("refresh of %s: starting a new copy", topic)
        await self._writer.insist(self._copies.begin, "cannot start a new copy")

    async def ready(self, topic: str) -> None:
        """Serve the new copy: it is complete."""
        if await self._writer.insist(self._copies.complete, "cannot replace the old copy"):
            logger.info("refresh of %s is complete: serving the new copy", topic)

    # ---- the subscription

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
                    raise  # the request is wrong: a retry would fail again
                self._note_refusal(error)
                await self._writer.pause(_AGAIN_S)

    async def _subscribe(self, client: AsyncClient) -> AsyncSubscription:
        await client.connect()
        if self._copies.is_building and await self._is_refresh_lost(client):
            logger.warning("abandoning the new copy: the refresh has ended")
            await self._writer.insist(self._copies.abandon, "cannot abandon the new copy")
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

    async def _is_refresh_lost(self, client: AsyncClient) -> bool:
        """Return whether a new copy was started that the broker will not complete."""
        if await self._refresh_is_over(client):
            return True
        # The refresh may have been aborted before the replay: then nothing is sent again.
        return bool(await self._ahead(client))

    async def _refresh_is_over(self, client: AsyncClient) -> bool:
        """Return whether the refresh of this group has ended; also if the topic or the group no longer exists."""
        return await self._refresh_state(client) in (None, "COMPLETED")

    async def _refresh_state(self, client: AsyncClient) -> str | None:
        """Return the state of the refresh of this group, if there is or was one."""
        try:
            refresh = await client.refresh_status(self._copies.topic_name or self._config.topic)
        except UnknownTopic:
            return None
        return next((each.state for each in refresh.groups if each.group == self._config.group), None)

    async def _move_back(self, client: AsyncClient) -> None:
        """Move the group back if it is ahead of the copy: otherwise the messages in between would be missing."""
        for position, wanted in await self._ahead(client):
            logger.warning(
                "group %s is at offset %d of %s/%d, but the copy is at %d: moving the group back",
                self._config.group,
                position.committed,
                position.topic,
                position.partition,
                wanted,
            )
            await client.reset_group(self._config.group, wanted, topic=position.topic, partition=position.partition)

    async def _ahead(self, client: AsyncClient) -> list[tuple[GroupPosition, int]]:
        """Return the positions where the group is ahead of the copy, each with the offset of the copy."""
        try:
            group = await client.group(self._config.group)
        except UnknownGroup:
            return []
        if group.members:
            logger.warning(
                "group %s has %d other members, and each gets only some partitions: give each replica its own group",
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
        """Store messages until the stop, or until a new subscription is needed to read from the start."""
        while (messages := await self._next(subscription)) is not None:
            for topic, several in _by_topic(messages):
                if not await self._is_ours(topic):
                    return
                if not (await self._writer.store(topic, several) or self._stop.is_set()):
                    return
        await self._settle(subscription)

    async def _next(self, subscription: AsyncSubscription) -> list[Message] | None:
        """Return the next messages; None at the stop."""
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
        """Return whether messages of this topic belong to the copy. Start a new copy if the topic was deleted and
        created again, or is of another broker."""
        ours = self._copies.topic
        if ours in (None, topic):
            return True
        assert ours is not None
        if ours.name != topic.name:
            raise BadConfig(
                [f"{self._config.topic} matches the topics {ours.name} and {topic.name}: give the name of one topic"]
            )
        logger.warning("%s is not the topic that was copied: starting a new copy", topic.name)
        await self._writer.insist(self._copies.begin, "cannot start a new copy")
        await self._writer.insist(self._copies.complete, "cannot replace the old copy")
        return False

    async def _settle(self, subscription: AsyncSubscription) -> None:
        try:
            await subscription.flush()
        except PenstockError as error:
            # They are redelivered, and recognised as stored.
            logger.info("some messages are not acknowledged: %s", error)

    # ---- status

    def _note_refusal(self, error: PenstockError) -> None:
        if str(error) != self._refusal:
            logger.warning("not subscribed: %s", error)
        self._refusal = str(error)

    async def _watch(self, client: AsyncClient) -> None:
        """Check the broker periodically."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self._seen = await self._look(client)
                    await self._look_at_refresh(client)
            except TimeoutError:
                self._seen = BrokerStatus(error=f"no answer from {self._config.broker} for {_ANSWER_S:g} s")
            except PenstockError as error:
                self._seen = BrokerStatus(error=str(error))
            await asyncio.sleep(_LOOK_S)

    async def _look(self, client: AsyncClient) -> BrokerStatus:
        try:
            group = await client.group(self._config.group)
        except UnknownGroup:
            return BrokerStatus(connected=True)
        return BrokerStatus(connected=True, lag=group.lag)

    async def _look_at_refresh(self, client: AsyncClient) -> None:
        """Subscribe again if a refresh cannot go on with this subscription."""
        if self._subscription is None:
            return
        if self._copies.is_building:
            if await self._refresh_is_over(client):
                await self._subscription.close()  # the new copy will never be completed: its group was deleted
        elif self._writer.failure is not None and await self._refresh_state(client) in _RESETTING:
            # RESET comes behind the messages that cannot be stored. A new subscription gets it first.
            logger.warning("the copy cannot be written: the refresh replaces it")
            self._writer.give_up()


def _by_topic(messages: Sequence[Message]) -> Iterator[tuple[OriginTopic, list[Message]]]:
    """Group messages by topic, in order. Almost always there is only one."""
    for topic, several in groupby(messages, key=lambda message: OriginTopic(message.topic, message.topic_id)):
        yield topic, list(several)
