"""Connections are accepted a few in each turn of the loop, and all of them are."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack

import pytest

from penstock import acceptor
from penstock.acceptor import ACCEPTED_MAX, Acceptor
from tests.support.brokers import in_loop

MANY = 5 * ACCEPTED_MAX


class Greeting(asyncio.Protocol):
    def __init__(self, made: list[int], turn: list[int]) -> None:
        self._made = made
        self._turn = turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._made.append(self._turn[0])
        transport.write(b"hello")


def listening() -> socket.socket:
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found


@in_loop
async def test_many_connections_are_accepted_in_several_turns() -> None:
    made: list[int] = []
    turn = [0]
    server = listening()
    address = server.getsockname()
    accepting = Acceptor([server], lambda: Greeting(made, turn))
    accepting.start(MANY)
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(MANY)]
        while len(made) < MANY:
            turn[0] += 1
            await asyncio.sleep(0)
        assert all(made.count(each) <= 2 * ACCEPTED_MAX for each in set(made)), "of two turns, at most"
        for client in clients:
            client.settimeout(20)
            assert await asyncio.to_thread(client.recv, 5) == b"hello"
    accepting.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


@in_loop
async def test_a_connection_that_was_accepted_before_the_end_is_opened() -> None:
    made: list[int] = []
    server = listening()
    accepting = Acceptor([server], lambda: Greeting(made, [0]))
    accepting.start(1)
    with socket.create_connection(server.getsockname()) as client:
        accepting._accept(server)
        accepting.close()
        await accepting.wait_closed()
        assert made
        client.settimeout(20)
        assert await asyncio.to_thread(client.recv, 5) == b"hello"


@in_loop
async def test_it_goes_on_when_there_are_descriptors_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_S", 0.01)
    made: list[int] = []
    failures = iter([OSError(errno.EMFILE, "Too many open files")] * 2)

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            for failure in failures:
                raise failure
            return super().accept()

    server = Exhausted()
    server.bind(("127.0.0.1", 0))
    accepting = Acceptor([server], lambda: Greeting(made, [0]))
    accepting.start(10)
    with socket.create_connection(server.getsockname()):
        while not made:
            await asyncio.sleep(0.001)
    accepting.close()
    assert caplog.text.count("Too many open files") == 2


def test_a_connection_that_is_being_opened_when_the_loop_ends_is_closed() -> None:
    """An event loop that ends cancels tasks that have not begun."""
    server = listening()
    accepted: list[socket.socket] = []

    class Noting(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            found, address = super().accept()
            accepted.append(found)
            return found, address

    async def main(noting: socket.socket) -> None:
        accepting = Acceptor([noting], lambda: Greeting([], [0]))
        accepting.start(1)
        client.connect(noting.getsockname())
        accepting._accept(noting)
        accepting.close()

    with socket.socket() as client:
        asyncio.run(main(Noting(fileno=server.detach())))
        assert [each.fileno() for each in accepted] == [-1]
