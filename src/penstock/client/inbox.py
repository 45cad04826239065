"""Requests: messages with a reply subject, and the first message published to it.

All requests of a client share one subscription, `_INBOX.<client>.*`, which the first request opens. Subjects that begin
with `_` are not stored: a late reply is dropped.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from penstock.client.outbox import Outbox
from penstock.client.outgoing import Prepared

if TYPE_CHECKING:
    from penstock.client.link import Link
    from penstock.client.message import Message
    from penstock.client.subscription import AsyncSubscription

_PREFIX: Final = "_INBOX"
# Replies are not stored and are dropped without credit, so the inbox has credit for this many.
REPLIES_MAX: Final = 65_536

# Opens a subscription with a buffer of this many messages.
Subscribe = Callable[[str, int], Awaitable["AsyncSubscription"]]


class ReplyInbox:
    def __init__(self, link: Link, outbox: Outbox, subscribe: Subscribe) -> None:
        self._link = link
        self._outbox = outbox
        self._subscribe = subscribe
        self._subject = f"{_PREFIX}.{secrets.token_hex(11)}"
        self._opening = asyncio.Lock()
        self._subscription: AsyncSubscription | None = None
        # The replies that are expected, by reply subject; None until they arrive.
        self._replies: dict[str, Message | None] = {}

    async def request(self, message: Prepared, timeout_s: float | None) -> Message:
        """Publish a request and return the first reply. Raise NoResponders if nobody is subscribed to its subject."""
        async with self._link.within(timeout_s, f"request to {message.subject}"):
            subscription = await self._open()
            reply = f"{self._subject}.{secrets.token_hex(8)}"
            self._replies[reply] = None
            try:
                await self._outbox.publish_alone(message._replace(reply=reply.encode()))
                await subscription._wait_for(lambda: self._has_arrived(subscription, reply))
                found = self._replies[reply]
            finally:
                del self._replies[reply]
        assert found is not None, "the reply has arrived"
        return found

    async def _open(self) -> AsyncSubscription:
        """Return the subscription. Open another one if the broker has ended the last."""
        async with self._opening:
            if self._subscription is None or self._subscription._is_over:
                self._subscription = await self._subscribe(f"{self._subject}.*", REPLIES_MAX)
            return self._subscription

    def _has_arrived(self, subscription: AsyncSubscription, reply: str) -> bool:
        """Assign all replies that have arrived, also those for other requests."""
        for message in subscription._take_unread():
            if self._replies.get(message.subject, message) is None:
                self._replies[message.subject] = message
        return self._replies[reply] is not None
