"""What HTTP connections receive is handled in turns, in order."""

from __future__ import annotations

import asyncio

from penstock.web.request_turns import RECEIVED_MAX, WAITING_BYTES_MAX, RequestTurns
from tests.support.brokers import in_loop


class Connection:
    def __init__(self, name: int, calls: list[tuple[str, int, bytes]]) -> None:
        self._name = name
        self._calls = calls

    def handle_received(self, data: bytes) -> None:
        self._calls.append(("handle", self._name, data))

    def hold(self) -> None:
        self._calls.append(("hold", self._name, b""))

    def refuse_full(self) -> None:
        self._calls.append(("refuse", self._name, b""))


@in_loop
async def test_a_turn_handles_some_and_the_others_wait_in_order() -> None:
    calls: list[tuple[str, int, bytes]] = []
    turns = RequestTurns()
    connections = [Connection(name, calls) for name in range(2 * RECEIVED_MAX + 3)]
    for connection in connections:
        turns.received(connection, b"first")
    assert [name for act, name, _ in calls if act == "handle"] == list(range(RECEIVED_MAX))
    turns.received(connections[-1], b"second")
    while len([act for act, _, _ in calls if act == "handle"]) < len(connections) + 1:
        before = len(calls)
        await asyncio.sleep(0)
        assert len(calls) - before <= RECEIVED_MAX
    handled = [(name, data) for act, name, data in calls if act == "handle"]
    assert handled == [(name, b"first") for name in range(len(connections))] + [(len(connections) - 1, b"second")]
    # The next turn begins anew.
    await asyncio.sleep(0)
    turns.received(connections[0], b"third")
    assert calls[-1] == ("handle", 0, b"third")


@in_loop
async def test_what_waits_is_limited_in_bytes() -> None:
    calls: list[tuple[str, int, bytes]] = []
    turns = RequestTurns()
    for name in range(RECEIVED_MAX):
        turns.received(Connection(name, calls), b"x")
    turns.received(Connection(100, calls), bytes(WAITING_BYTES_MAX))
    turns.received(Connection(101, calls), b"x")
    assert calls[-2:] == [("hold", 100, b""), ("refuse", 101, b"")]
    await asyncio.sleep(0)
    assert calls[-1][1] == 100
