"""The same over WebSocket: scenarios and clients on nats-server and on Penstock, and frames as a test writes them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.wire.websocket import Opcode
from tests.nats.browser import NATS_WS, Page, serve_page
from tests.nats.differences import CLIENT_DIFFERENCES, DIFFERENCES
from tests.nats.python_client import CHECKS, run_check
from tests.nats.run import NATS_SERVER, Peer, nats_server, penstock, run_both
from tests.nats.scenarios import SCENARIOS
from tests.nats.test_clients import FAILED, install_nats_js, judge, of_nats_js
from tests.support.process import PATIENCE_S
from tests.support.server import Serve
from tests.support.websocket import Frame, WebSocket, deflate, encode

BINARY, PING, CLOSE = Opcode.BINARY, Opcode.PING, Opcode.CLOSE
DEFLATED: Final = 4
NATS_CORE: Final = "@nats-io/nats-core@3.4.0"
HELLO: Final = b'CONNECT {"verbose":false}\r\nPING\r\n'
_subjects: Final = (f"websocket.c{number}" for number in count())


# Over WebSocket, nats-server closes before it has sent the error about an unknown line. Penstock sends it.
UNSENT: Final = frozenset(
    {
        "a message from a client",
        "an error is not the end of other connections",
        "an unknown verb",
        "messages before an error are published",
    }
)


@pytest.fixture(scope="module")
def websocket_peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Peer]]:
    """The real server, and ours."""
    if not NATS_SERVER.exists():
        pytest.skip("nats-server is not installed")
    directory = tmp_path_factory.mktemp("websocket")
    config = directory / "nats.conf"
    config.write_text('websocket { listen: "127.0.0.1:-1", no_tls: true, compression: true }')
    with nats_server("-c", str(config)) as real, penstock(directory / "serve") as ours:
        yield replace(real, is_websocket=True), replace(ours, is_websocket=True)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in DIFFERENCES])
def test_connections_receive_what_they_receive_from_nats_server(websocket_peers: tuple[Peer, Peer], name: str) -> None:
    real, ours = run_both(websocket_peers, SCENARIOS[name])
    if name in UNSENT:
        error = "-ERR 'Unknown Protocol Operation'"
        assert any(error in line for line in ours)
        real, ours = ([line for line in lines if error not in line] for lines in (real, ours))
    assert ours == real


@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
# nats-py gives aiohttp a timeout in an old form.
@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in CHECKS if f"nats-py {name}" not in CLIENT_DIFFERENCES])
def test_nats_py(websocket_peers: tuple[Peer, Peer], name: str) -> None:
    real, ours = (run_check(CHECKS[name], peer.url, next(_subjects)) for peer in websocket_peers)
    assert ours == real


@pytest.mark.parametrize("package", [NATS_WS, NATS_CORE])
def test_nats_js(websocket_peers: tuple[Peer, Peer], tmp_path: Path, package: str) -> None:
    node = install_nats_js(tmp_path, package, "ws@8.18.0")
    real, ours = (of_nats_js(node, tmp_path, package, peer) for peer in websocket_peers)
    assert real.keys() == ours.keys()
    judge(real, ours)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with serve_page(tmp_path_factory.mktemp("page")) as page:
        yield page


def test_nats_ws_in_a_browser(websocket_peers: tuple[Peer, Peer], page: Page, tmp_path: Path) -> None:
    real = page.run_checks(websocket_peers[0].url, next(_subjects))
    with Serve(tmp_path, server_websocket_origins=page.origin) as server:
        ours = page.run_checks(f"ws://127.0.0.1:{server.ports['http']}", next(_subjects))
    judge(real, ours)


def test_a_page_of_another_origin_cannot_connect(websocket_peers: tuple[Peer, Peer], page: Page) -> None:
    found = page.run_checks(websocket_peers[1].url, next(_subjects))
    assert {str(value).partition(": ")[0] + ": " for value in found.values()} == {FAILED}


def _in_parts(payload: bytes, reserved: int = 0) -> bytes:
    begin = encode(BINARY, payload[:9], reserved=reserved, final=False)
    return begin + encode(0, payload[9:20], final=False) + encode(0, payload[20:])


# Frames of a client, as they are sent. Each goes to a new connection, behind INFO.
SAME: Final = {
    "a message": encode(BINARY, HELLO),
    "text": encode(Opcode.TEXT, HELLO),
    "text that is none": encode(Opcode.TEXT, HELLO + b"PUB x.y 2\r\n\xff\xfe\r\nPING\r\n"),
    "a message in parts": _in_parts(HELLO),
    "a part in each message": b"".join(encode(BINARY, HELLO[at : at + 7]) for at in range(0, len(HELLO), 7)),
    "an empty message": encode(BINARY) + encode(BINARY, HELLO),
    "the begin of a message": encode(BINARY, HELLO, length=1 << 40),
    "a length with more bytes than it needs": bytes([0x82, 0xFE, 0, len(HELLO), 0, 0, 0, 0]) + HELLO,
    "pings": encode(PING, b"one") + encode(PING) + encode(BINARY, HELLO),
    "a ping within a message": encode(BINARY, HELLO[:9], final=False) + encode(PING, b"two") + encode(0, HELLO[9:]),
    "a pong": encode(Opcode.PONG, b"unasked") + encode(BINARY, HELLO),
    "compressed": encode(BINARY, deflate(HELLO), reserved=DEFLATED),
    "compressed text": encode(Opcode.TEXT, deflate(HELLO), reserved=DEFLATED),
    "compressed in parts": _in_parts(deflate(HELLO), DEFLATED),
    "some compressed": encode(2, HELLO) + encode(2, deflate(b"PING\r\n"), reserved=DEFLATED) + encode(2, b"PING\r\n"),
}  # fmt: skip


def exchange(peer: Peer, data: bytes, pongs: int) -> list[tuple[int, bytes]]:
    """Return what comes: the stream of messages without INFO, and control frames, up to so many PONGs."""
    with socket.create_connection(("127.0.0.1", peer.websocket_port), timeout=PATIENCE_S) as connected:
        client = WebSocket(connected, deflates=True)
        client.sendall_raw(data)
        stream, controls = b"", []
        while pongs > stream.count(b"PONG\r\n"):
            frame = client.frame()
            if frame is None:
                break
            if frame.opcode == BINARY:
                stream += frame.message
            else:
                controls.append((frame.opcode, frame.payload))
    lines = [line for line in stream.split(b"\r\n") if line and not line.startswith(b"INFO ")]
    return [*controls, *((int(BINARY), line) for line in lines)]


@pytest.mark.parametrize("name", SAME)
def test_frames_are_answered_as_by_nats_server(websocket_peers: tuple[Peer, Peer], name: str) -> None:
    data = SAME[name]
    pongs = 3 if name == "some compressed" else 2 if name == "text that is none" else 1
    real, ours = (exchange(peer, data, pongs) for peer in websocket_peers)
    assert (BINARY, b"PONG") in real
    assert ours == real


REFUSED: Final = {
    "no mask": encode(BINARY, HELLO, mask=None),
    "an unknown opcode": encode(3, HELLO),
    "reserved bits": encode(BINARY, HELLO, reserved=2),
    "a continuation of nothing": encode(0, HELLO),
    "a message within a message": encode(BINARY, b"P", final=False) + encode(BINARY, HELLO),
    "a long ping": encode(PING, bytes(126)),
    "a ping in parts": encode(PING, b"x", final=False),
    "a compressed ping": encode(PING, b"x", reserved=DEFLATED),
    "a compressed continuation": encode(BINARY, b"", final=False) + encode(0, deflate(HELLO), reserved=DEFLATED),
    "what cannot be inflated": encode(BINARY, b"\xff\xff\xff\xff", reserved=DEFLATED),
    "a length with its first bit": encode(BINARY, b"", length=1 << 63),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nats_server_refuses_is_refused(websocket_peers: tuple[Peer, Peer], name: str) -> None:
    """Penstock also says why, which nats-server does for some."""
    real, ours = (exchange(peer, REFUSED[name], 1) for peer in websocket_peers)
    assert all(opcode == CLOSE for opcode, _ in real)
    [(opcode, payload)] = ours
    assert (opcode, payload[:2]) == (CLOSE, b"\x03\xea")


@pytest.mark.parametrize("payload", [b"", b"\x03\xe8", b"\x03\xe8bye", b"\x0f\xa0"])
def test_a_close_is_answered_as_by_nats_server(websocket_peers: tuple[Peer, Peer], payload: bytes) -> None:
    for peer in websocket_peers:
        with socket.create_connection(("127.0.0.1", peer.websocket_port), timeout=PATIENCE_S) as connected:
            client = WebSocket(connected)
            assert client.recv(1).startswith(b"INFO ")
            client.sendall_raw(encode(CLOSE, payload))
            assert (peer.name, client.frame(), client.frame()) == (peer.name, Frame(CLOSE, payload), None)


def test_the_monitor_tells_of_both_alike(websocket_peers: tuple[Peer, Peer]) -> None:
    for peer in websocket_peers:
        with socket.create_connection(("127.0.0.1", peer.websocket_port), timeout=PATIENCE_S) as connected:
            client = WebSocket(connected)
            assert client.recv(1).startswith(b"INFO ")
            port = connected.getsockname()[1]
            # The greeting may come a moment before the connection is listed.
            rows: list[dict[str, Any]] = []
            until = time.monotonic() + PATIENCE_S
            while not rows and time.monotonic() < until:
                rows = [row for row in peer.get("/connz")["connections"] if row["port"] == port]
        [row] = rows
        assert (row["kind"], row["type"], row["ip"]) == ("Client", "websocket", "127.0.0.1")
        shown = peer.get("/varz")["websocket"]
        assert shown == {"host": "127.0.0.1", "port": peer.websocket_port, "no_tls": True, "compression": True}
