"""A client that has left costs nothing more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from penstock import Broker
from penstock.server.server import Server
from tests.support.frames import Frames, batch
from tests.support.lengths import Cursus, Qb
from tests.support.provider_door import Client as Provider
from tests.support.server import Flux, Nats, Serve
from tests.support.trees import eventually
from tests.support.websocket import WebSocketRaw

# Enough messages that a batch is checked in a worker.
MANY: Final = 5000


def inside(broker: Broker) -> tuple[Server, Serve]:
    """The server of an embedded broker, and the same as clients know it."""
    server = broker._server_thread._server
    assert server is not None
    return server, cast(Serve, SimpleNamespace(ports=server.ports, port=server.ports["text"]))


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(listen="127.0.0.1:0") as broker:
        yield broker


def test_a_large_batch_of_a_client_that_left_while_it_waited_is_not_checked(broker: Broker) -> None:
    server, doors = inside(broker)
    loop = broker._server_thread._loop
    assert loop is not None
    large = server.shared.tasks.large
    with Frames(doors) as staying:
        topic_id = staying.topic_id("batches")
        before = len(server.sessions)
        asyncio.run_coroutine_threadsafe(large.acquire(), loop).result()
        leaving = Frames(doors)
        leaving.ask_append(topic_id, batch(*[b"left"] * MANY))
        eventually("it waits", lambda: any(session.inbox.is_waiting for session in server.sessions))
        leaving.close()
        number = staying.ask_append(topic_id, batch(*[b"stayed"] * MANY))
        loop.call_soon_threadsafe(large.release)
        assert staying.result_of(number)["offset"] == 0, "what the other one sent is not stored"
        eventually("it is gone", lambda: len(server.sessions) == before)


def use_nats(client: Nats) -> None:
    client.send('CONNECT {"verbose":false}\r\nSUB orders.> 1\r\nPUB orders.eu 5\r\nhello\r\n')
    assert client.message().payload == b"hello"
    assert client.ask("PING") == "PONG"


def use_flux(client: Flux) -> None:
    client.subscribe("orders.>", "1")
    assert client.publish("orders.eu", b"hello") == "+OK"


def use_frames(client: Frames) -> None:
    client.open(1, "orders.>")
    client.publish("orders.eu", b"hello")
    assert client.delivered(1)[0].value == b"hello"
    client.fetch(client.call("topic", name="orders")["id"])


def use_qb(client: Qb) -> None:
    client.create("letters", "readers")
    client.subscribe("readers")
    client.publish("letters", b"hello")
    assert client.bodies(1) == [b"hello"]


def use_cursus(client: Cursus) -> None:
    client.create("reports")
    client.publish("reports", b"hello")


def use_provider(client: Provider) -> None:
    client.publish("events", "hello")
    client.subscribe("events")


@pytest.mark.parametrize(
    ("connect", "use"),
    [
        (Nats, use_nats),
        (WebSocketRaw, use_nats),
        (Flux, use_flux),
        (Frames, use_frames),
        (Provider, use_provider),
        (Qb, use_qb),
        (Cursus, use_cursus),
    ],
)
def test_the_memory_of_an_ended_session_is_freed_without_the_garbage_collector(
    broker: Broker, connect: Callable[[Serve], Any], use: Callable[[Any], None]
) -> None:
    server, doors = inside(broker)
    eventually("the last one is gone", lambda: len(server.sessions) == 1)
    gc.collect()
    gc.disable()
    try:
        with connect(doors) as client:
            use(client)
            session = weakref.ref(list(server.sessions)[-1])
        eventually("it is freed", lambda: session() is None)
    finally:
        gc.enable()
