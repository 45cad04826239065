"""A subscription that has ended leaves nothing behind for the garbage collector, which runs seldom in a broker."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from penstock import Broker
from penstock.broker.subscription import Subscription
from penstock.server.server import Server
from tests.support.client_calls import wait_until
from tests.support.server import Nats, Serve

COUNT = 50


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Broker(listen="127.0.0.1:0") as broker:
        inside: Server | None = broker._server_thread._server
        assert inside is not None
        yield cast(Serve, SimpleNamespace(ports=inside.ports, port=inside.ports["text"]))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def unsubscribe(client: Nats) -> None:
    for number in range(COUNT):
        client.send(f"SUB t.{number} {number}\r\nPUB t.{number} 1\r\nx\r\nUNSUB {number}\r\n")


def unsubscribe_after_some(client: Nats) -> None:
    for number in range(COUNT):
        client.send(f"SUB t.{number} {number} q\r\nUNSUB {number} 1\r\nPUB t.{number} 1\r\nx\r\n")


def disconnect(client: Nats) -> None:
    for number in range(COUNT):
        client.send(f"SUB t.{number} {number}\r\nPUB t.{number} 1\r\nx\r\n")


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("end", [unsubscribe, unsubscribe_after_some, disconnect])
def test_the_memory_of_a_subscription_is_free_when_it_ends(server: Serve, end: Callable[[Nats], None]) -> None:
    before = subscriptions()
    with Nats(server, verbose=False) as client:
        end(client)
        client.send("PING\r\n")
        while client.line() != "PONG":
            pass
    wait_until(lambda: subscriptions() == before)


def subscriptions() -> int:
    return sum(type(each) is Subscription for each in gc.get_objects())
