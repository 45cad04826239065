"""Large frames that are arriving share one budget, and take turns; small ones never wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, cast

import pytest

from penstock.server.arrivals import ARRIVING_BYTES_MAX, PATIENCE_S, Arrivals
from penstock.server.connection import Connection
from penstock.server.memory import SELDOM_S, SOON_S, Memory
from penstock.server.server import Counters
from penstock.wire import binary, prefixed
from penstock.wire.binary import Type
from tests.brokers import in_loop
from tests.frames import Frames
from tests.lengths import Cursus
from tests.server import Nats, Raw, Serve
from tests.trees import eventually
from tests.web import ask

HALF: Final = ARRIVING_BYTES_MAX // 2


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("arrivals"), server_payload_bytes_max=8 << 20) as server:
        yield server


def arriving(server: Serve) -> int:
    used: int = ask(server, "GET", "/varz").json["limits"]["arriving_bytes"]["used"]
    return used


def begin(client: Raw, size: int) -> None:
    """Send the head of a large PUBLISH, and a little of it."""
    client.send(binary.head(Type.PUBLISH, 99, size) + bytes(1000))


def test_large_frames_take_turns_and_small_ones_do_not_wait(server: Serve) -> None:
    with Frames(server) as first, Frames(server) as second, Frames(server) as third:
        begin(first, HALF)
        begin(second, HALF)
        eventually("bytes arriving", lambda: arriving(server) == 2 * HALF)
        begin(third, 1 << 20)
        third.send(bytes((1 << 20) - 1000))
        with Nats(server) as small:
            small.send(b"PUB orders 5\r\nhello\r\nPING\r\n")
            assert small.line() == "PONG"
        assert arriving(server) == 2 * HALF
        first.close()
        assert third.error_of(99)["code"], "its turn has come"
        eventually("bytes arriving", lambda: arriving(server) == HALF)
    eventually("bytes arriving", lambda: arriving(server) == 0)


def test_what_is_dealt_with_gives_its_room_back(server: Serve) -> None:
    value = bytes(1 << 20)
    with Frames(server) as client:
        for _ in range(3):
            client.publish("orders", value)
    with Nats(server) as nats:
        for _ in range(3):
            nats.send(b"PUB orders %d\r\n%b\r\n" % (len(value), value))
        nats.send(b"PING\r\n")
        assert nats.line() == "PONG"
    with Cursus(server) as cursus:
        for _ in range(3):
            cursus.send(prefixed.frame(b"PUBLISH topic=orders message=" + b"x" * len(value)))
            assert cursus.frame()
    assert arriving(server) == 0


def test_every_door_claims_room_for_what_it_announces(server: Serve) -> None:
    size = 4 << 20
    with Frames(server) as frames, Nats(server) as nats, Cursus(server) as cursus:
        begin(frames, size)
        nats.send(b"PUB orders %d\r\nbegin" % size)
        cursus.send(size.to_bytes(4, "big") + b"PUBLISH topic=orders message=begin")
        eventually("bytes arriving", lambda: 3 * size <= arriving(server) <= 3 * size + 1000)
    eventually("bytes arriving", lambda: arriving(server) == 0)


class Stand:
    """A connection, as far as the budget must know it."""

    def __init__(self) -> None:
        self.peer = self
        self.has_room = True
        self.is_awaited = True
        self.calls: list[str] = []

    def hold(self) -> None:
        self.calls.append("hold")

    def read_on(self) -> None:
        self.calls.append("read on")

    def abort(self) -> None:
        self.calls.append("abort")


@in_loop
async def test_a_connection_that_does_not_send_is_closed_only_while_others_wait() -> None:
    counters = Counters()
    arrivals = Arrivals(counters, bytes_max=100)
    slow, busy, waiting = Stand(), Stand(), Stand()
    busy.is_awaited = False  # its frame is here, and is being dealt with
    for connection in (slow, busy):
        arrivals.claim(cast(Connection, connection), 50)
    late = asyncio.get_running_loop().time() + 2 * PATIENCE_S
    arrivals.sweep(late)
    assert counters.slow == 0, "nobody waits"
    arrivals.claim(cast(Connection, waiting), 50)
    assert waiting.calls == ["hold"]
    arrivals.sweep(late)
    assert (slow.calls, busy.calls) == (["read on", "abort"], ["read on"])
    assert counters.slow == 1
    arrivals.release(cast(Connection, slow))
    assert waiting.has_room
    assert waiting.calls == ["hold", "read on"]


def test_memory_is_given_back_soon_after_it_changed_and_otherwise_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = 50 << 20
    monkeypatch.setattr("penstock.server.memory.resident_bytes", lambda: resident)
    memory = Memory()
    assert not memory.is_due(0), "there is nothing to give back"
    resident = 500 << 20
    assert memory.is_due(SELDOM_S)
    assert not memory.is_due(SELDOM_S + SOON_S / 2)
    assert memory.is_due(SELDOM_S + SOON_S), "it may have been in use before"
    assert not memory.is_due(SELDOM_S + 2 * SOON_S), "it did not change"
    assert memory.is_due(2 * SELDOM_S + SOON_S)
    memory.give_back()
