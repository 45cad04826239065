"""SIGUSR2, on nats-server and on Penstock: clients are told, then sent away one by one, and the server ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import urlopen

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from penstock import BrokerClient, Client
from penstock.doors.sessions import _pace
from penstock.errors import PenstockError
from penstock.wire.websocket import Opcode
from tests.nats.run import NATS_SERVER, Peer, nats_server, penstock
from tests.nats.test_clients import NATS_JS, install_nats_js
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Nats, Raw, Serve, pub
from tests.support.websocket import Frame, WebSocketRaw, request

# Shorter than nats-server allows for the whole; it closes one connection a second at the least.
QUICK: Final[dict[str, Any]] = {"server_lame_duck_s": 3, "server_lame_duck_grace_s": 1}
# Nothing is closed by itself while the test looks.
SLOW: Final[dict[str, Any]] = {"server_lame_duck_s": 3600, "server_lame_duck_grace_s": 1800}


@contextmanager
def both(directory: Path) -> Iterator[tuple[Peer, Peer]]:
    """Both servers, which must have ended well with the block."""
    if not NATS_SERVER.exists():
        pytest.skip("nats-server is not installed")
    config = directory / "nats.conf"
    config.write_text('lame_duck_duration: "30s"\nlame_duck_grace_period: "5s"\n')
    with (
        nats_server("-c", str(config)) as real,
        Serve(directory / "serve", server_lame_duck_s=30, server_lame_duck_grace_s=5) as ours,
    ):
        yield real, Peer("penstock", ours.port, ours.ports["http"], ours.process)
        assert real.process.wait(PATIENCE_S) == 0
        assert ours.wait().code == 0


def test_clients_see_what_they_see_of_nats_server(tmp_path: Path) -> None:
    with both(tmp_path) as peers, ThreadPoolExecutor() as pool:
        real, ours = pool.map(_observe, peers)
        assert ours == real


def _observe(peer: Peer) -> dict[str, Any]:
    """Return what connections with and without asynchronous INFO receive from the signal on."""
    seen: dict[str, Any] = {}
    with Raw(peer.port) as one, Raw(peer.port) as other, Raw(peer.port) as silent:
        silent.line()
        for raw, protocol in ((one, 1), (other, 0)):
            raw.line()
            raw.send(f'CONNECT {{"verbose":false,"protocol":{protocol}}}\r\nPING\r\n')
            assert raw.line() == "PONG"
        assert one.line().startswith("INFO ")

        peer.process.send_signal(signal.SIGUSR2)
        seen["told"] = json.loads(one.line().removeprefix("INFO "))["ldm"]
        seen["healthy"] = healthy(peer.http_port)
        seen["refused"] = _refuses(peer.port)
        # They are served as before until they are closed.
        one.send(b"SUB retired 1\r\nPING\r\n")
        assert one.line() == "PONG"
        other.send(pub("retired", b"hello") + b"PING\r\n")
        seen["other"] = _until_closed(other)
        seen["one"] = _until_closed(one)
        seen["silent"] = _until_closed(silent)
    return seen


def _until_closed(raw: Raw) -> list[str]:
    """Return what comes, without PINGs, until the server closes."""
    return [line for line in raw.rest().split("\r\n") if line not in ("PING", "")]


def _refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
    except ConnectionRefusedError:
        return True
    return False


def healthy(http_port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{http_port}/healthz", timeout=PATIENCE_S):
            return True
    except HTTPError:
        return False


def test_health_says_why(tmp_path: Path) -> None:
    with Serve(tmp_path, **SLOW) as server, Nats(server) as client:
        retire(server, client)
        with pytest.raises(HTTPError) as failed:
            urlopen(f"http://127.0.0.1:{server.ports['http']}/healthz", timeout=PATIENCE_S)
        told = json.load(failed.value)
        assert failed.value.code == 503
        assert told["error"] == "lame duck mode: no new connections, 1 are still to be closed"


def retire(server: Serve, *clients: Nats) -> None:
    """Send the signal, and wait until all NATS clients are told."""
    server.process.send_signal(signal.SIGUSR2)
    for client in clients:
        assert '"ldm":true' in client.line()


def test_a_stop_is_announced(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server) as client:
        assert server.stop().code == 0
        [line] = client.rest().splitlines()
        assert json.loads(line.removeprefix("INFO "))["ldm"] is True


def test_a_server_without_clients_ends_at_once(tmp_path: Path) -> None:
    with Serve(tmp_path, **SLOW) as server:
        assert server.stop(signal.SIGUSR2).code == 0


def test_it_ends_when_its_clients_have_gone(tmp_path: Path) -> None:
    with Serve(tmp_path, **SLOW) as server:
        with Nats(server) as client:
            retire(server, client)
        assert server.wait().code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_another_signal_stops_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with Serve(tmp_path, **SLOW) as server, Nats(server) as client:
        retire(server, client)
        server.process.send_signal(signal.SIGUSR2)
        client.send(pub("orders", b"last") + b"PING\r\n")
        assert client.line() == "PONG"
        ended = server.stop(number)
        assert (ended.code, client.rest()) == (0, "")
        assert [message["value"] for message in server.dump("orders")] == ["last"]


def test_what_is_acknowledged_meanwhile_is_stored(tmp_path: Path) -> None:
    with Serve(tmp_path, **QUICK) as server, Nats(server) as client:
        retire(server, client)
        acknowledged = _publish_until_closed(
            lambda number: client.ask(pub("orders", b"%d" % number) + b"PING") == "PONG"
        )
        assert server.wait().code == 0
        stored = [int(message["value"]) for message in server.dump("orders")]
    assert acknowledged > 0
    assert stored[:acknowledged] == list(range(acknowledged))
    assert len(stored) <= acknowledged + 1


def _publish_until_closed(publish: Callable[[int], bool]) -> int:
    """Return how many were acknowledged."""
    count = 0
    try:
        while publish(count):
            count += 1
    except (AssertionError, ConnectionError):
        pass  # it is closed
    return count


def test_nats_py_goes_to_another_server(tmp_path: Path) -> None:
    with Serve(tmp_path / "one", **QUICK) as one, Serve(tmp_path / "other") as other:
        assert asyncio.run(_move(one, other)) == [b"before", b"after"]
        assert one.wait().code == 0


async def _move(one: Serve, other: Serve) -> list[bytes]:
    told, moved = asyncio.Event(), asyncio.Event()
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(message: Msg) -> None:
        received.put_nowait(message.data)

    async def tell() -> None:
        told.set()

    async def move() -> None:
        moved.set()

    client: NatsClient = await nats.connect(
        [one.url, other.url],
        dont_randomize=True,
        reconnect_time_wait=0,
        lame_duck_mode_cb=tell,
        reconnected_cb=move,
    )
    async with asyncio.timeout(PATIENCE_S):
        await client.subscribe("orders", cb=take)
        await client.publish("orders", b"before")
        found = [await received.get()]
        one.process.send_signal(signal.SIGUSR2)
        await told.wait()
        await moved.wait()
        await client.flush()
        await client.publish("orders", b"after")
        found.append(await received.get())
        assert client.connected_url is not None
        assert client.connected_url.port == other.port
    await client.close()
    return found


def test_nats_js_goes_to_another_server(tmp_path: Path) -> None:
    node = install_nats_js(tmp_path, NATS_JS)
    shutil.copy(Path(__file__).with_name("lame_duck.mjs"), tmp_path)
    with both(tmp_path) as retiring, penstock(tmp_path / "other") as other, ThreadPoolExecutor() as pool:
        seen = [*pool.map(lambda peer: _move_js(node, tmp_path, peer, other), retiring)]
    assert seen == [["ldm", "moved", "hello"]] * 2


def _move_js(node: str, directory: Path, one: Peer, other: Peer) -> list[str]:
    command = [node, "lame_duck.mjs", f"127.0.0.1:{one.port}", f"127.0.0.1:{other.port}", f"retired.{one.port}"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            one.process.send_signal(signal.SIGUSR2)
            out, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return out.splitlines()


def test_other_doors_are_closed_too_and_have_their_answers(tmp_path: Path) -> None:
    with (
        Serve(tmp_path / "one", **QUICK) as one,
        Serve(tmp_path / "other") as other,
        Flux(one) as flux,
        BrokerClient("127.0.0.1", one.ports["quiet"], request_timeout=PATIENCE_S) as broker,
        Client([f"127.0.0.1:{one.port}", f"127.0.0.1:{other.port}"]) as client,
        Nats(one) as told,
    ):
        broker.create_topic("qb")
        client.publish("binary", b"before")
        retire(one, told)
        count = _publish_until_closed(lambda number: flux.publish("flux", b"%d" % number) == "+OK")
        with pytest.raises(PenstockError):
            _publish_for_ever(broker)
        deadline = time.monotonic() + PATIENCE_S
        # The first one that the other server stores.
        for number in itertools.count():
            if client.publish("binary", b"after", message_id=f"after {number}").offset == 0:
                break
            assert time.monotonic() < deadline
        assert one.wait().code == 0
        assert [message["value"] for message in one.dump("flux")][:count] == [str(number) for number in range(count)]


def test_websockets_are_closed_too_and_no_new_ones_taken(tmp_path: Path) -> None:
    with Serve(tmp_path, **QUICK) as server, WebSocketRaw(server) as client:
        client.send(b'CONNECT {"verbose":false,"protocol":1}\r\n')
        assert client.ask("PING") == "PONG"
        assert client.line().startswith("INFO ")
        retire(server, client)
        with Raw(server.ports["http"]) as late:
            late.send(request(server.ports["http"]))
            assert late.line() == "HTTP/1.1 503 Service Unavailable"
        assert client.rest() == ""
        assert client.socket.controls == [Frame(Opcode.CLOSE, b"\x03\xe9")]
        assert server.wait().code == 0


def _publish_for_ever(broker: BrokerClient) -> None:
    while True:
        assert broker.publish("qb", b"hello")


def test_the_pace_is_that_of_nats_server() -> None:
    assert _pace(0, 110) == (1.0, 1)
    assert _pace(10, 110) == (1.0, 1)
    assert _pace(220, 110) == (0.5, 1)
    assert _pace(110_000, 110) == (0.001, 1)
    assert _pace(1_100_000, 110) == (0.001, 10)
