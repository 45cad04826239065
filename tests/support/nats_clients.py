"""Real NATS clients (nats-py), and what they receive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tests.support.process import PATIENCE_S
from tests.support.server import Serve

# Nothing of `patient` is delivered again while a test runs, all of `quick` is at once.
TOPICS = """
[topics.patient]
ack_deadline_ms = "1h"
[topics.quick]
ack_deadline_ms = 700
deliveries_max = 3
"""


# For subjects that no other test uses.
numbers = count()


@asynccontextmanager
async def connected(server: Serve, **options: Any) -> AsyncIterator[Client]:
    """A client; what it complains about fails the test, unless the test looks at it itself."""
    complaints: list[Exception] = []

    async def note(error: Exception) -> None:
        complaints.append(error)

    settings = {"allow_reconnect": False, "error_cb": note, "connect_timeout": PATIENCE_S} | options
    client = await nats.connect(server.url, **settings)
    try:
        yield client
    finally:
        await client.close()
    assert not complaints


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * PATIENCE_S):
            await work()

    asyncio.run(bounded())


async def settle(client: Client) -> None:
    """Until the server has done all that the client sent.

    The client writes its PING ahead of what it has gathered, so only the second PONG speaks for that.
    """
    await client.flush()
    await client.flush()


async def take(subscription: Subscription, number: int) -> list[Msg]:
    return [await subscription.next_msg(PATIENCE_S) for _ in range(number)]


async def take_data(subscription: Subscription, number: int) -> list[bytes]:
    return [message.data for message in await take(subscription, number)]
