"""What nats-py sees: checks by name, each with the address of a server, that return what the client received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import nats
import nats.errors
import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.micro.request import Request

PATIENCE_S: Final = 20.0

# The address of a server and a subject of the check's own in, what the client saw out.
Check = Callable[[str, str], Awaitable[Any]]


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Client]:
    client = await nats.connect(url, allow_reconnect=False, connect_timeout=PATIENCE_S, **options)
    try:
        yield client
    finally:
        await client.close()


async def settle(client: Client) -> None:
    """Wait until the server has processed all that the client sent.

    The client writes the PING of a flush ahead of what it has gathered, so only the second PONG covers that.
    """
    await client.flush()
    await client.flush()


class Receiver:
    """Keeps what its callback `take` receives."""

    def __init__(self) -> None:
        self.data: list[str] = []

    async def take(self, message: Msg) -> None:
        self.data.append(message.data.decode())


async def drain_a_subscription(url: str, subject: str) -> Any:
    async with connected(url) as client:
        receive = Receiver()
        subscription = await client.subscribe(subject, cb=receive.take)
        for number in range(100):
            await client.publish(subject, b"%d" % number)
        await subscription.drain()  # type: ignore[no-untyped-call]
        return receive.data


async def drain_a_connection(url: str, subject: str) -> Any:
    async with connected(url) as client:
        receive = Receiver()
        await client.subscribe(subject, cb=receive.take)
        for number in range(100):
            await client.publish(subject, b"%d" % number)
        await client.drain()
        return receive.data


async def drain_what_another_published(url: str, subject: str) -> Any:
    async with connected(url) as client, connected(url) as other:
        receive = Receiver()
        subscription = await client.subscribe(subject, cb=receive.take)
        await settle(client)
        for number in range(1000):
            await other.publish(subject, b"%d" % number)
        await settle(other)
        await subscription.drain()  # type: ignore[no-untyped-call]
        return receive.data


async def unsubscribe_after_max(url: str, subject: str) -> Any:
    async with connected(url) as client:
        receive = Receiver()
        subscription = await client.subscribe(subject, cb=receive.take)
        await subscription.unsubscribe(limit=3)
        await settle(client)
        for number in range(5):
            await client.publish(subject, b"%d" % number)
        await settle(client)
        return receive.data


async def flush_then_next(url: str, subject: str) -> Any:
    async with connected(url) as client:
        subscription = await client.subscribe(subject)
        await client.publish(subject, b"hello")
        await settle(client)
        waiting = subscription.pending_msgs
        return waiting, (await subscription.next_msg(PATIENCE_S)).data.decode()


async def request(url: str, subject: str) -> Any:
    async with connected(url) as client, connected(url) as service:

        async def answer(message: Msg) -> None:
            await message.respond(b"re: " + message.data)

        await service.subscribe(subject, cb=answer)
        await settle(service)
        return [(await client.request(subject, b"%d" % number, PATIENCE_S)).data.decode() for number in range(10)]


async def no_responders(url: str, subject: str) -> Any:
    async with connected(url) as client:
        return await _fails(client.request(subject, b"", PATIENCE_S))


async def no_responders_but_oneself(url: str, subject: str) -> Any:
    async with connected(url, no_echo=True) as client:
        await client.subscribe(subject)
        await settle(client)
        # Shorter than for what must come: a server that does not answer would take all of it.
        return await _fails(client.request(subject, b"", 2.0))


async def jetstream_is_not_there(url: str, subject: str) -> Any:
    async with connected(url) as client:
        return await _fails(client.jetstream().add_stream(name="S", subjects=[subject]))


async def headers(url: str, subject: str) -> Any:
    async with connected(url) as client:
        subscription = await client.subscribe(subject)
        await client.publish(subject, b"hello", headers={"A": "1", "b": "two words"})
        message = await subscription.next_msg(PATIENCE_S)
        return message.data.decode(), dict(message.headers or {})


async def queue_group(url: str, subject: str) -> Any:
    async with connected(url) as one, connected(url) as two, connected(url) as publisher:
        receive = Receiver()
        for client, pattern in ((one, subject), (one, subject), (two, subject)):
            await client.subscribe(pattern, queue="workers", cb=receive.take)
        await settle(one)
        await settle(two)
        for number in range(100):
            await publisher.publish(subject, b"%d" % number)
        await settle(publisher)
        await one.drain()
        await two.drain()
        return sorted(receive.data)


async def invalid_subjects(url: str, subject: str) -> Any:
    async with connected(url) as client:
        await client.publish(f"{subject}..x", b"0")
        await client.publish(f"{subject}.*", b"1")
        return await _fails(settle(client)), client.is_connected


async def service(url: str, subject: str) -> Any:
    async with connected(url) as client, connected(url) as other:

        async def answer(asked: Request) -> None:
            await asked.respond(b"re: " + asked.data)

        async with await nats.micro.add_service(client, name="echo", version="1.0.0") as added:
            await added.add_endpoint(name="echo", subject=subject, handler=answer)
            await settle(client)
            answered = (await other.request(subject, b"hello", 2.0)).data.decode()
            return answered, await _fails(other.request("$SRV.PING.echo", b"", 2.0))


CHECKS: Final[dict[str, Check]] = {
    check.__name__: check
    for check in (
        drain_a_subscription,
        drain_a_connection,
        drain_what_another_published,
        unsubscribe_after_max,
        flush_then_next,
        request,
        no_responders,
        no_responders_but_oneself,
        jetstream_is_not_there,
        headers,
        queue_group,
        invalid_subjects,
        service,
    )
}


def run_check(check: Check, url: str, subject: str) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(3 * PATIENCE_S):
            return await check(url, subject)

    return asyncio.run(bounded())


async def _fails(work: Awaitable[Any]) -> str | None:
    """Return the kind of error that something ends with, if it does."""
    try:
        await work
    except (nats.errors.Error, TimeoutError) as error:
        return type(error).__name__
    return None
