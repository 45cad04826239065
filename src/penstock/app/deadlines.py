"""Ack deadlines of the messages that a consumer of a shared group has, extended as long as it has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from penstock.client.aio import AsyncClient
from penstock.client.message import Message
from penstock.client.subscription import AsyncSubscription
from penstock.errors import PenstockError

# Delay before the deadline of a topic is requested again after an error.
_ASK_AGAIN_S: Final = 1.0

logger = logging.getLogger("penstock.app.worker")


class DeadlineExtender:
    def __init__(
        self, name: str, client: AsyncClient, subscription: AsyncSubscription, tasks: asyncio.TaskGroup
    ) -> None:
        """`name`: that of the consumer, for the log."""
        self._name = name
        self._client = client
        self._subscription = subscription
        self._tasks = tasks
        # Messages that were taken and not settled.
        self._held: set[Message] = set()
        self._extending: dict[str, asyncio.Task[None]] = {}

    def add(self, message: Message) -> None:
        self._held.add(message)
        self._watch(message.topic)

    def discard(self, messages: Sequence[Message]) -> None:
        self._held.difference_update(messages)

    def cancel(self) -> None:
        for task in self._extending.values():
            task.cancel()

    def _watch(self, topic: str) -> None:
        if topic not in self._extending:
            self._extending[topic] = self._tasks.create_task(self._extend(topic))

    async def _extend(self, topic: str) -> None:
        """Extend the messages of a topic whenever a third of their deadline has passed."""
        third_s = await self._deadline_s(topic) / 3
        while True:
            await asyncio.sleep(third_s)
            try:
                for message in (*self._held, *self._subscription.unread()):
                    if message.topic == topic:
                        message.extend()
                    else:
                        self._watch(message.topic)
            except PenstockError as error:
                logger.warning("consumer %s: deadlines are no longer extended: %s", self._name, error)
                return

    async def _deadline_s(self, topic: str) -> float:
        while True:
            try:
                deadline_ms: int = (await self._client.topic(topic)).policy["ack_deadline_ms"]
            except PenstockError as error:
                logger.warning("consumer %s: the ack deadline of %s is unknown: %s", self._name, topic, error)
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                return deadline_ms / 1000
