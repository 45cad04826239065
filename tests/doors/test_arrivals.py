"""Large frames that are arriving share one budget, and take turns; small ones never wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, cast

import pytest

from penstock.doors.arrivals import ARRIVING_BYTES_MAX, BYTES_PER_S, PATIENCE_S, Arrivals
from penstock.doors.counters import Counters
from penstock.doors.session import Session
from penstock.doors.turns import MUCH_BYTES, TURN_S_MAX, Turns
from penstock.server.memory import SELDOM_S, SOON_S, Memory
from penstock.wire import binary, prefixed
from penstock.wire.binary import Type
from tests.support.brokers import in_loop
from tests.support.frames import Frames
from tests.support.lengths import Cursus
from tests.support.server import Nats, Raw, Serve
from tests.support.trees import eventually
from tests.support.web import ask

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
        self.received_bytes = 1000
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
    arrivals = Arrivals(counters, bytes_max=150 << 20)
    silent, slow, quick, busy, waiting = (Stand() for _ in range(5))
    busy.is_awaited = False  # its frame is here, and is being dealt with
    for connection in (silent, slow, quick, busy):
        arrivals.claim(cast(Session, connection), 30 << 20)
    begun = asyncio.get_running_loop().time()
    quick.received_bytes += 10 * BYTES_PER_S
    slow.received_bytes += 9 * BYTES_PER_S
    arrivals.sweep(begun + PATIENCE_S + 9.5)
    assert counters.slow == 0, "nobody waits"
    arrivals.claim(cast(Session, waiting), 50 << 20)
    assert waiting.calls == ["hold"]
    arrivals.sweep(begun + PATIENCE_S - 0.5)
    assert counters.slow == 0, "all of them still have time"
    arrivals.sweep(begun + PATIENCE_S + 9.5)
    assert [each.calls for each in (silent, slow, quick, busy)] == [["read on", "abort"]] * 2 + [["read on"]] * 2
    assert counters.slow == 2
    arrivals.release(cast(Session, silent))
    assert waiting.has_room
    assert waiting.calls == ["hold", "read on"]


@in_loop
async def test_the_smallest_frame_is_the_first_to_have_room() -> None:
    arrivals = Arrivals(Counters(), bytes_max=100)
    first, largest, large, small = (Stand() for _ in range(4))
    for connection, size in ((first, 100), (largest, 90), (large, 80), (small, 10)):
        arrivals.claim(cast(Session, connection), size)
    arrivals.release(cast(Session, first))
    assert [each.has_room for each in (largest, large, small)] == [False, True, True]


@in_loop
async def test_a_turn_of_the_loop_reads_so_much_and_goes_on_in_the_next() -> None:
    turns = Turns(bytes_max=100, clock=lambda: 0.0)
    greedy, modest = Stand(), Stand()
    turns.took(cast(Session, modest), 50)
    turns.took(cast(Session, greedy), 60)
    turns.took(cast(Session, greedy), 60)
    assert (greedy.calls, modest.calls) == (["hold", "hold"], [])
    await asyncio.sleep(0)
    assert (greedy.calls, modest.calls) == (["hold", "hold", "read on"], [])
    for _ in range(3):
        turns.took(cast(Session, greedy), 100)
        await asyncio.sleep(0)
    assert greedy.calls == ["hold", "hold", "read on"]


@in_loop
async def test_a_turn_of_the_loop_reads_for_so_long_and_each_connection_has_its_turn() -> None:
    now = 0.0
    turns = Turns(bytes_max=1000, clock=lambda: now)
    greedy = [Stand() for _ in range(10)]
    for connection in greedy:
        turns.took(cast(Session, connection), 70)
        now += TURN_S_MAX / 2.1
    assert [each.calls for each in greedy] == [[]] * 3 + [["hold"]] * 7, "as long as there was time"
    served = []
    for _ in range(10):
        for connection in greedy:
            connection.calls.clear()
        await asyncio.sleep(0)
        served.append([greedy.index(each) for each in greedy if "read on" in each.calls])
        for number in served[-1]:
            turns.took(cast(Session, greedy[number]), 1)
            now += TURN_S_MAX / 2.1
    # Two have time in a turn, and whoever waits for longest comes first.
    assert served[:4] == [[3, 4], [5, 6], [7, 8], [9]]
    assert served[4:] == [[]] * 6


@in_loop
async def test_connections_that_send_little_do_not_wait_for_all_those_that_send_much() -> None:
    now = 0.0
    turns = Turns(bytes_max=1000, clock=lambda: now)
    greedy = [Stand() for _ in range(10)]
    for connection in greedy:
        turns.took(cast(Session, connection), MUCH_BYTES)
        now += TURN_S_MAX / 2.1
    modest = Stand()
    turns.took(cast(Session, modest), 10)
    assert modest.calls == ["hold"]
    # Two have time in a turn: one of each kind.
    await asyncio.sleep(0)
    assert modest.calls == ["hold", "read on"]
    assert [each.calls for each in greedy].count(["hold", "read on"]) == 1
    # Where only one has, they alternate.
    held = [Stand() for _ in range(4)]
    turns = Turns(bytes_max=1000, clock=lambda: now)
    for connection, size in zip(held, (MUCH_BYTES, 10, MUCH_BYTES, 10), strict=True):
        turns.took(cast(Session, connection), size)
        now += 4 * TURN_S_MAX
    order = []
    for _ in range(20):
        await asyncio.sleep(0)
        now += 4 * TURN_S_MAX
        order += [number for number, each in enumerate(held) if each.calls[-1:] == ["read on"] and number not in order]
    assert set(order) == set(range(4)), "nobody starves"


class Receiver:
    """A connection with messages of so many bytes that wait for their turn."""

    def __init__(self, sent: list[str], name: str, size: int) -> None:
        self._sent = sent
        self._name = name
        self._size = size

    def send_waiting(self) -> int:
        self._sent.append(self._name)
        return self._size


@in_loop
async def test_a_turn_of_the_loop_sends_so_much_and_the_rest_waits_for_the_next() -> None:
    much = 10 * MUCH_BYTES
    turns = Turns(sent_bytes_max=2 * much, s_max=0, clock=lambda: 0.0)
    sent: list[str] = []
    assert turns.may_send(much)
    assert not turns.may_send(much), "half of a turn is for connections that are sent little"
    for name in ("a", "b", "c"):
        turns.wait(cast(Session, Receiver(sent, name, much)), much)
    while turns.may_send(MUCH_BYTES):
        pass
    turns.wait(cast(Session, Receiver(sent, "little", 10)), 10)
    publisher, other = Stand(), Stand()
    turns.took(cast(Session, publisher), MUCH_BYTES + 1)
    turns.took(cast(Session, other), 100)
    assert (publisher.calls, other.calls) == (["hold"], [])
    await asyncio.sleep(0)
    assert sent == ["a", "little"]
    await asyncio.sleep(0)
    assert publisher.calls == ["hold"], "it goes on when nothing waits any more"
    await asyncio.sleep(0)
    assert sent == ["a", "little", "b", "c"]
    assert (publisher.calls, other.calls) == (["hold", "read on"], [])
    await asyncio.sleep(0)
    assert turns.may_send(much)


@in_loop
async def test_a_turn_of_the_loop_sends_more_while_it_has_time() -> None:
    now = 0.0
    much = 10 * MUCH_BYTES
    turns = Turns(sent_bytes_max=2 * much, clock=lambda: now)
    assert all(turns.may_send(much) for _ in range(10))
    now += TURN_S_MAX / 2
    assert not turns.may_send(much)
    assert turns.may_send(MUCH_BYTES), "half of the time is for connections that are sent little"
    now += TURN_S_MAX / 2
    assert not turns.may_send(MUCH_BYTES)
    sent: list[str] = []
    for name in ("a", "b", "c", "d"):
        turns.wait(cast(Session, Receiver(sent, name, much)), much)
    await asyncio.sleep(0)
    assert sent == ["a", "b", "c", "d"]


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
