"""Handshakes that are slow, unfinished or many cost bounded memory and time, and delay nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from penstock import Client
from penstock.tls.handshakes import HandshakeTurns
from penstock.tls.stream import TlsStream
from tests.support.certificates import Certificates
from tests.support.process import PATIENCE_S
from tests.support.registries import until
from tests.support.server import Serve

UNFINISHED = 1000


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Serve]:
    """A server that waits a second for a handshake, and has room for 1,000 of them."""
    settings = certificates.settings(handshake_s=1)
    with Serve(tmp_path_factory.mktemp("hasty"), auth_token="secret", **settings) as server:
        yield server


def client_hello(certificates: Certificates) -> bytes:
    stream = TlsStream(certificates.context(), is_server=False, server_name="localhost")
    assert not stream.handshake()
    return stream.take()


def varz(server: Serve, certificates: Certificates) -> dict[str, Any]:
    url = f"https://localhost:{server.ports['http']}/varz"
    request = Request(url, headers={"Authorization": "Bearer secret"})
    with urlopen(request, context=certificates.context(), timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def ends(connected: socket.socket) -> bool:
    """Read to the end. Return whether the server ends the connection."""
    try:
        while connected.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("door", ["text", "quiet", "http"])
def test_handshakes_that_stop_end_in_time(hasty: Serve, certificates: Certificates, door: str) -> None:
    """After a byte, a head, a part, all but a byte, and the whole of the first message."""
    hello = client_hello(certificates)
    with ExitStack() as opened:
        stopped = []
        for end in (1, 5, 100, -1, None):
            connected = socket.create_connection(("localhost", hasty.ports[door]), PATIENCE_S)
            stopped.append(opened.enter_context(connected))
            connected.sendall(hello[:end])

        assert all(map(ends, stopped))


def test_a_handshake_byte_by_byte_works(server: Serve, certificates: Certificates) -> None:
    stream = TlsStream(certificates.context(), is_server=False, server_name="localhost")
    with socket.create_connection(("localhost", server.ports["quiet"]), PATIENCE_S) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not stream.handshake():
            for byte in stream.take():
                connected.sendall(bytes([byte]))
            stream.feed(connected.recv(1))
        for byte in stream.take():
            connected.sendall(bytes([byte]))
        stream.write(b"PUB bytes 1\r\nx\r\n")
        for byte in stream.take():
            connected.sendall(bytes([byte]))
        while not (answer := stream.read(100)):
            stream.feed(connected.recv(1))

    assert answer.startswith(b"+OK")


@pytest.mark.parametrize(
    "answer", [b"\x16\x03\x01\xff\xff" + bytes(70_000), b"\x16" * 1000, b"\x16\x03\x01\x00\x05hello"]
)
@pytest.mark.parametrize("door", ["text", "quiet", "http"])
def test_bytes_that_are_no_handshake_are_refused(hasty: Serve, door: str, answer: bytes) -> None:
    with socket.create_connection(("localhost", hasty.ports[door]), PATIENCE_S) as connected:
        try:
            connected.sendall(answer)
            assert ends(connected)
        except (BrokenPipeError, ConnectionResetError):
            pass


def test_a_thousand_unfinished_handshakes_delay_nobody(hasty: Serve, certificates: Certificates) -> None:
    hello = client_hello(certificates)
    before, failed = hasty.rss(), varz(hasty, certificates)["tls"]["handshakes_failed"]
    tls = certificates.options()

    with ExitStack() as crowd, Client(f"localhost:{hasty.ports['quiet']}", token="secret", tls=tls) as bystander:
        for number in range(UNFINISHED):
            each = crowd.enter_context(socket.create_connection(("localhost", hasty.ports["quiet"]), PATIENCE_S))
            each.sendall(hello)
            if number % 100 == 0:
                bystander.publish("bystander", b"x")
        with Client(f"localhost:{hasty.port}", token="secret", tls=tls) as late:
            late.publish("bystander", b"x")
        grown = hasty.rss() - before
        shown = varz(hasty, certificates)["limits"]["handshakes_count"]
        # All of them end by themselves.
        until(lambda: varz(hasty, certificates)["tls"]["handshakes_failed"] - failed >= UNFINISHED)

    assert shown["used"] <= shown["limit"] == 1000
    assert grown < 100 << 20
    until(lambda: varz(hasty, certificates)["connections"] == 0)


def test_a_client_without_credentials_cannot_send_empty_records_forever(
    hasty: Serve, certificates: Certificates
) -> None:
    """TLS 1.2 has empty records, which the session never sees."""
    context = certificates.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= getattr(ssl, "OP_DONT_INSERT_EMPTY_FRAGMENTS", 0)
    with (
        socket.create_connection(("localhost", hasty.ports["quiet"]), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        sent = 0
        try:
            while sent < 20 << 20:
                sent += secured.send(b"P")  # a letter of PUB, in a record of 30 bytes
        except OSError:
            pass

    assert sent < 1 << 20


# ---- turns


class Handshaking:
    """A connection whose steps take a time that it says."""

    def __init__(self, clock: list[float], cost_s: float) -> None:
        self._clock, self._cost_s = clock, cost_s
        self.steps = self.holds = 0

    def step(self) -> None:
        self.steps += 1
        self._clock[0] += self._cost_s

    def hold(self) -> None:
        self.holds += 1


async def turns_of(connections: list[Handshaking], clock: list[float]) -> list[int]:
    """How many had a step after each turn of the loop."""
    turns = HandshakeTurns(0.005, clock=lambda: clock[0])
    for each in connections:
        turns.take(each)
    seen: list[int] = []
    while not seen or seen[-1] < len(connections):
        seen.append(sum(each.steps for each in connections))
        await asyncio.sleep(0)
    return seen


def test_a_turn_has_few_handshakes() -> None:
    clock = [0.0]
    connections = [Handshaking(clock, 0.002) for _ in range(10)]

    seen = asyncio.run(turns_of(connections, clock))

    assert seen[0] == 3
    assert all(after - before <= 3 for before, after in pairwise(seen))
    assert [each.holds for each in connections] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_a_handshake_that_is_longer_than_a_turn_has_one_of_its_own(tmp_path: Path) -> None:
    clock = [0.0]

    assert asyncio.run(turns_of([Handshaking(clock, 1.0) for _ in range(3)], clock)) == [1, 2, 3]
