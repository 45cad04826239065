"""Requests: a message with a reply subject, and the first message that comes there.

All requests of a client share one subscription, `_INBOX.<client>.*`, which is opened with the first. What is published
below `_` is not stored: a reply that nobody waits for any more is dropped.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from penstock.client.outbox import Outbox
from penstock.client.outgoing import Prepared

if TYPE_CHECKING:
    from penstock.client.aio import AsyncSubscription
    from penstock.client.link import Link
    from penstock.client.message import Message

_PREFIX: Final = "_INBOX"
# What is not stored, and comes while there is no credit for it, is dropped: so there is credit for this many replies.
REPLIES_MAX: Final = 65_536

# Opens a subscription with a buffer of this many messages.
Subscribe = Callable[[str, int], Awaitable["AsyncSubscription"]]


class Inbox:
    def __init__(self, link: Link, outbox: Outbox, subscribe: Subscribe) -> None:
        self._link = link
        self._outbox = outbox
        self._subscribe = subscribe
        self._subject = f"{_PREFIX}.{secrets.token_hex(11)}"
        self._opening = asyncio.Lock()
        self._subscription: AsyncSubscription | None = None
        # By reply subject: what is waited for, and has come.
        self._replies: dict[str, Message | None] = {}

    async def request(self, message: Prepared, timeout_s: float | None) -> Message:
        """Publish it, and return the first reply. Raises NoResponders if nobody is subscribed to its subject."""
        async with self._link.within(timeout_s, f"request to {message.subject}"):
            subscription = await self._open()
            reply = f"{self._subject}.{secrets.token_hex(8)}"
            self._replies[reply] = None
            try:
                await self._outbox.publish_alone(message._replace(reply=reply.encode()))
                await subscription._wait_for(lambda: self._has_come(subscription, reply))
                found = self._replies[reply]
            finally:
                del self._replies[reply]
        assert found is not None, "it has come"
        return found

    async def _open(self) -> AsyncSubscription:
        """The subscription; another if the last one was ended by the broker."""
        async with self._opening:
            if self._subscription is None or self._subscription._is_over:
                self._subscription = await self._subscribe(f"{self._subject}.*", REPLIES_MAX)
            return self._subscription

    def _has_come(self, subscription: AsyncSubscription, reply: str) -> bool:
        """Whoever looks sorts out what has come, for all."""
        for message in subscription._take_unread():
            if self._replies.get(message.subject, message) is None:
                self._replies[message.subject] = message
        return self._replies[reply] is not None
