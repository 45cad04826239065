"""NATS over WebSocket, at the HTTP port of a real server."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.doors.gate import HANDSHAKE_BYTES_MAX
from penstock.wire.websocket import Opcode
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Raw, Serve, pub
from tests.support.trees import eventually
from tests.support.web import ask, get
from tests.support.websocket import Frame, WebSocket, WebSocketRaw, deflate, encode, request

TOKEN: Final = "s3cret"
CONNECT: Final = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
DEFLATED: Final = 4
MEGABYTE: Final = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("websocket"), server_websocket_origins="https://App.example") as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("guarded"), auth_token=TOKEN, server_handshakes_max=20) as server:
        yield server


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def client(server: Serve, request: pytest.FixtureRequest) -> Iterator[WebSocketRaw]:
    with WebSocketRaw(server, deflates=request.param) as client:
        client.send(CONNECT)
        yield client


def connection_of(server: Serve, info: dict[str, Any]) -> dict[str, Any]:
    """Return the row of /connz of a connection."""
    [row] = get(server, f"/connz?cid={info['client_id']}").json["connections"]
    assert isinstance(row, dict)
    return row


# The handshake.


def shake(server: Serve, path: str = "/", method: str = "GET", **headers: str | None) -> tuple[int, dict[str, str]]:
    with Raw(server.ports["http"]) as client:
        client.send(request(server.ports["http"], path, method, **headers))
        _, status, *_ = client.line().split()
        found = {}
        while line := client.line():
            name, _, value = line.partition(": ")
            found[name.lower()] = value
        return int(status), found


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 101),
        ("http://127.0.0.1:{port}", 101),
        ("https://127.0.0.1:{port}", 101),
        ("https://app.example", 101),
        ("http://app.example", 403),
        ("https://app.example.evil", 403),
        ("http://127.0.0.1:1", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_only_pages_of_this_host_and_of_those_allowed_may_connect(
    server: Serve, origin: str | None, status: int
) -> None:
    told = None if origin is None else origin.format(port=server.ports["http"])
    assert shake(server, origin=told)[0] == status


def test_any_page_may_connect_where_that_is_set(tmp_path: Path) -> None:
    with Serve(tmp_path, server_websocket_origins="*") as server:
        assert shake(server, origin="http://evil.example")[0] == 101
        assert shake(server, origin="http://evil.example", host="evil.example")[0] == 403


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"upgrade": None}, 400),
        ({"upgrade": "h2c"}, 400),
        ({"connection": "keep-alive"}, 400),
        ({"sec_websocket_key": None}, 400),
        ({"sec_websocket_key": "short"}, 400),
        ({"sec_websocket_version": None}, 400),
        ({"sec_websocket_version": "8"}, 400),
        ({"content_length": "5"}, 400),
        ({"method": "POST"}, 405),
        ({"method": "HEAD"}, 400),
        ({"path": "/other"}, 404),
        ({"path": "/?x=1"}, 101),
    ],
)
def test_a_handshake_that_is_none_is_refused(server: Serve, changed: dict[str, str | None], status: int) -> None:
    found, headers = shake(server, **changed)  # type: ignore[arg-type]
    assert found == status
    assert (headers.get("sec-websocket-version") == "13") == (status == 400)
    assert get(server, "/varz").json["faults"] == {}


def test_a_request_that_is_none_is_told_what_is_here(server: Serve) -> None:
    answer = get(server, "/")
    assert (answer.status, answer.code) == (400, "BAD_REQUEST")
    assert "NATS clients" in answer.json["text"]


def test_answers_before_the_handshake_are_read_first(server: Serve) -> None:
    """So the socket has room, and says when it has none."""
    with Raw(server.ports["http"], receive_bytes=4096) as client:
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client.send(asked * 100 + request(server.ports["http"]) + encode(2, CONNECT + b"PING\r\n"))
        data = bytearray()
        while b"PONG\r\n" not in data[-100:]:
            data += client.socket.recv(1 << 16)
    assert data.count(b"HTTP/1.1 200 OK") == 100
    assert data.count(b"HTTP/1.1 101 ") == 1


# The session.


def test_messages_are_published_and_received(server: Serve, client: WebSocketRaw) -> None:
    client.send(b"SUB ws.> 1\r\n")
    client.send(pub("ws.x", b"hello " * 20) + pub("ws.y", b"") + b"PING\r\n")
    assert [client.message()[:3] for _ in range(2)] == [("ws.x", "1", b"hello " * 20), ("ws.y", "1", b"")]
    assert client.line() == "PONG"
    with Flux(server) as flux:
        flux.publish("ws.z", b"from elsewhere")
    assert client.message().payload == b"from elsewhere"


def test_a_message_may_hold_a_part_of_a_line_or_many(client: WebSocketRaw) -> None:
    client.send(b"SUB parts.> 1\r\nPING\r\n")
    assert client.line() == "PONG"
    for byte in pub("parts.x", b"hello"):
        client.send(bytes([byte]))
    assert client.message().payload == b"hello"
    client.send(pub("parts.x", b"m") * 10_000 + b"PING\r\n")
    assert [client.message().payload for _ in range(10_000)] == [b"m"] * 10_000
    assert client.line() == "PONG"


def test_a_message_may_be_larger_than_a_payload(client: WebSocketRaw) -> None:
    """Four of them at once. They go out in messages of 64 KiB."""
    payload = bytes(range(256)) * 3000
    client.send(b"SUB large.x 1\r\n" + pub("large.x", payload) * 4)
    assert [client.message().payload for _ in range(4)] == [payload] * 4


def test_text_is_taken_like_anything_else(client: WebSocketRaw) -> None:
    client.socket.sendall_raw(encode(Opcode.TEXT, b"SUB text.x 1\r\n" + pub("text.x", b"\xff\xfe")))
    assert client.message().payload == b"\xff\xfe"


def test_a_large_payload_finds_room(server: Serve, client: WebSocketRaw) -> None:
    assert client.ask("SUB _live.x 1\r\nPING") == "PONG"
    client.send(pub("_live.x", bytes(MEGABYTE)))
    assert client.message().payload == bytes(MEGABYTE)
    client.send("PING\r\n")
    assert client.line() == "PONG"
    assert get(server, "/varz").json["limits"]["arriving_bytes"]["used"] == 0


def test_who_is_connected_by_websocket_is_seen(server: Serve, client: WebSocketRaw) -> None:
    info = json.loads(client.info.partition(" ")[2])
    assert info["port"] == server.ports["http"]
    assert client.ask("PING") == "PONG"
    row = connection_of(server, info)
    assert (row["kind"], row["type"], row["ip"]) == ("Client", "websocket", "127.0.0.1")
    shown = get(server, "/varz").json["websocket"]
    assert shown == {"host": "127.0.0.1", "port": server.ports["http"], "no_tls": True, "compression": True}
    with Flux(server) as flux:
        assert connection_of(server, flux.info)["type"] == "nats"


# Control frames.


def test_pings_are_answered_also_within_a_message(server: Serve, client: WebSocketRaw) -> None:
    client.socket.sendall_raw(encode(Opcode.PING, b"one"))
    assert client.socket.frame() == Frame(Opcode.PONG, b"one")
    client.socket.sendall_raw(
        encode(Opcode.BINARY, b"PI", final=False) + encode(Opcode.PING, b"two") + encode(0, b"NG\r\n")
    )
    assert client.socket.frame() == Frame(Opcode.PONG, b"two")
    assert client.line() == "PONG"
    client.socket.sendall_raw(encode(Opcode.PONG, b"unasked"))
    assert client.ask("PING") == "PONG"


def test_a_close_comes_behind_what_was_sent_before_and_is_answered(client: WebSocketRaw) -> None:
    client.socket.sendall_raw(
        encode(Opcode.BINARY, b"PING\r\n") + encode(Opcode.CLOSE, b"\x03\xe8bye") + encode(2, b"PING\r\n")
    )
    assert client.line() == "PONG"
    assert client.rest() == ""
    assert client.socket.controls == [Frame(Opcode.CLOSE, b"\x03\xe8bye")]


def test_what_comes_before_a_close_is_published(server: Serve, client: WebSocketRaw) -> None:
    """Also what takes several turns, and to a topic that does not exist yet."""
    topic = f"closing{id(client)}"
    data = b"".join(pub(f"{topic}.x", b"%d" % number) + b"PONG\r\n" for number in range(5000))
    client.socket.sendall_raw(encode(Opcode.BINARY, data) + encode(Opcode.CLOSE, b"\x03\xe8"))
    assert client.rest() == ""
    assert client.socket.controls == [Frame(Opcode.CLOSE, b"\x03\xe8")]
    payloads: list[bytes] = []
    with Flux(server) as flux:
        # What the connection had published when it was closed is stored soon after.
        until = time.monotonic() + PATIENCE_S
        while len(payloads) < 5000 and time.monotonic() < until:
            flux.send(f"PULL {topic}.x 5000\r\n")
            payloads += [message.payload for message in flux.until_ok()[0]]
    assert payloads == [b"%d" % number for number in range(5000)]


def test_a_server_that_retires_takes_no_more(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, WebSocketRaw(server) as client:
        client.send(b'CONNECT {"verbose":false,"protocol":1}\r\n')
        assert client.ask("PING") == "PONG"
        assert '"ldm"' not in client.line()
        server.process.send_signal(signal.SIGUSR2)
        assert '"ldm"' in client.line()
        assert shake(server)[0] == 503
        assert server.stop().code == 0
        assert client.rest() == ""
        assert client.socket.controls == [Frame(Opcode.CLOSE, b"\x03\xe9")]


def test_a_protocol_error_is_told(server: Serve, client: WebSocketRaw) -> None:
    client.socket.sendall_raw(encode(Opcode.BINARY, b"PING\r\n", mask=None))
    assert client.rest() == ""
    assert client.socket.controls == [Frame(Opcode.CLOSE, b"\x03\xeaa frame without a mask")]


def test_an_error_of_the_session_closes_with_a_status(client: WebSocketRaw) -> None:
    client.send(b"PUB x 99999999\r\n")
    assert client.rest() == "-ERR 'Maximum Payload Violation'\r\n"
    assert client.socket.controls == [Frame(Opcode.CLOSE, b"\x03\xf0")]


def test_a_stop_says_goodbye(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, WebSocketRaw(server) as client:
        client.send(CONNECT)
        assert client.ask("PING") == "PONG"
        assert server.stop().code == 0
        assert '"ldm": true' in client.rest().replace('"ldm":true', '"ldm": true')
        assert client.socket.controls == [Frame(Opcode.CLOSE, b"\x03\xe9")]


@pytest.mark.parametrize("cut", [1, 3, 7, 50, 100_000])
def test_a_connection_that_ends_within_a_frame_leaves_nothing(server: Serve, cut: int) -> None:
    with WebSocketRaw(server) as client:
        client.send(CONNECT + b"SUB cut.x 1\r\n")
        client.socket.sendall_raw(encode(Opcode.BINARY, pub("cut.x", bytes(500_000)))[:cut])
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == ""
    wait_for(lambda: get(server, "/varz").json["limits"]["arriving_bytes"]["used"] == 0)
    wait_for(lambda: all(row["type"] != "websocket" for row in get(server, "/connz").json["connections"]))


# Limits.


def wait_for(is_so: Any) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(server: Serve, client: WebSocketRaw) -> None:
    count, payload = 200, bytes(100_000)
    before = server.rss()
    client.send(b"SUB slow.x 1\r\nPING\r\n")
    assert client.line() == "PONG"
    with Flux(server) as flux:
        for number in range(count):
            assert flux.publish("slow.x", b"%d." % number + payload) == "+OK"
    # Its PINGs wait as well, with one answer for all.
    for number in range(1000):
        client.socket.sendall_raw(encode(Opcode.PING, b"%d" % number))
    assert server.rss() - before < 64 << 20
    for number in range(count):
        assert client.message().payload.startswith(b"%d." % number)
    assert client.ask("PING") == "PONG"
    assert client.socket.controls[-1] == Frame(Opcode.PONG, b"999")


def test_pings_of_a_client_that_does_not_read_cost_no_memory(server: Serve) -> None:
    before = server.rss()
    with WebSocketRaw(server, receive_bytes=4096) as client:
        pings = encode(Opcode.PING, bytes(125)) * 1000
        for _ in range(200):
            client.socket.sendall_raw(pings)
        assert server.rss() - before < 32 << 20
        # It reads: what was left out is one PONG.
        client.socket.sendall_raw(encode(Opcode.PING, b"last"))
        while (frame := client.socket.frame()) != Frame(Opcode.PONG, b"last"):
            assert frame == Frame(Opcode.PONG, bytes(125))


def test_a_bomb_takes_no_memory(server: Serve) -> None:
    """64 MiB of messages in less than 100 KB."""
    before = server.rss()
    with WebSocketRaw(server, deflates=True) as client:
        client.send(CONNECT)
        data = pub("_bomb.x", bytes(MEGABYTE)) * 64 + b"PING\r\n"
        bomb = encode(Opcode.BINARY, deflate(data), reserved=DEFLATED)
        assert len(bomb) < 100_000
        client.socket.sendall_raw(bomb)
        assert client.line() == "PONG"
        assert connection_of(server, json.loads(client.info.partition(" ")[2]))["in_msgs"] == 64
    assert server.rss() - before < 32 << 20


def test_nothing_is_inflated_for_a_client_that_is_gone(server: Serve) -> None:
    before = get(server, "/varz").json["in_msgs"]
    line = pub("_nobody", b"")
    bomb = encode(Opcode.BINARY, deflate(line * 5_000_000), reserved=DEFLATED)
    with WebSocketRaw(server, deflates=True) as client:
        client.send(CONNECT)
        assert client.ask("PING") == "PONG"
        client.socket.sendall_raw(bomb)
    # Its messages count when it is removed.
    eventually("gone", lambda: get(server, "/varz").json["limits"]["connections"]["used"] == 0)
    assert get(server, "/varz").json["in_msgs"] - before < 5_000_000


def test_a_bomb_of_nothing_is_refused_at_once(server: Serve) -> None:
    with WebSocketRaw(server, deflates=True) as client:
        client.socket.sendall_raw(encode(Opcode.BINARY, deflate(bytes(64 << 20)), reserved=DEFLATED))
        assert client.rest().startswith("-ERR ")


def test_nothing_is_inflated_beyond_what_may_be_sent_before_connect(guarded: Serve) -> None:
    before = _received_bytes(guarded)
    with WebSocketRaw(guarded, deflates=True) as client:
        client.socket.sendall_raw(encode(Opcode.BINARY, deflate(b"\r\n" * (32 << 20)), reserved=DEFLATED))
        assert client.rest() == "-ERR 'Authorization Violation'\r\n"
    wait_for(
        lambda: (
            get(guarded, "/varz", Authorization=f"Bearer {TOKEN}").json["since_start"]["received_bytes"]
            == before + HANDSHAKE_BYTES_MAX + 1
        )
    )


@pytest.mark.parametrize(
    "more",
    [encode(Opcode.BINARY), encode(Opcode.PING, bytes(125)), encode(Opcode.BINARY, b"\r\n" * 100)],
    ids=["empty messages", "pings", "line ends"],
)
def test_a_connection_that_never_authenticates_may_send_64_kib(guarded: Serve, more: bytes) -> None:
    with WebSocketRaw(guarded) as client, suppress(ConnectionError):
        client.socket.sendall_raw(more * (4 * HANDSHAKE_BYTES_MAX // len(more)))
        client.rest()


def test_a_crowd_that_never_authenticates_keeps_no_client_out(guarded: Serve) -> None:
    with ExitStack() as crowd:
        idle = [crowd.enter_context(WebSocketRaw(guarded)) for _ in range(60)]
        for connection in idle[:40]:
            assert "Authentication Timeout" in connection.rest()
        limits = get(guarded, "/varz", Authorization=f"Bearer {TOKEN}").json["limits"]
        assert limits["handshakes_count"] == {"used": 20, "limit": 20}
        with WebSocketRaw(guarded) as client:
            client.send(b'CONNECT {"auth_token":"%b","verbose":false}\r\nPING\r\n' % TOKEN.encode())
            assert client.line() == "PONG"
            # What follows the credentials may be larger.
            client.send(pub("_live.x", bytes(100_000)) + b"PING\r\n")
            assert client.line() == "PONG"


def test_connections_are_counted_with_those_of_the_other_doors(tmp_path: Path) -> None:
    with Serve(tmp_path, server_connections_max=2, server_http_connections_max=2) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(WebSocketRaw(server))
        # They have left the HTTP port.
        assert get(server, "/varz").json["limits"]["http_connections"]["used"] == 1
        with Raw(server.port) as refused:
            assert refused.line() == "-ERR 'maximum connections exceeded'"
        with Raw(server.ports["http"]) as plain:
            websocket = WebSocket(plain.socket)
            assert websocket.recv(1 << 16) == b"-ERR 'maximum connections exceeded'\r\n"
            assert websocket.recv(1 << 16) == b""


def test_other_protocols_are_not_taken(server: Serve) -> None:
    with WebSocketRaw(server) as client:
        client.send(b"\x10\x00\x00\x00\x01\x00\x00\x00\x00\r\n")
        assert client.rest().startswith("-ERR ")


def test_a_post_by_a_page_is_refused_as_before(server: Serve) -> None:
    """What may connect by WebSocket may not change anything over HTTP."""
    answer = ask(server, "POST", "/admin/topics", {"name": "t"}, headers={"Origin": "https://app.example"})
    assert (answer.status, answer.code) == (403, "FORBIDDEN")


def _received_bytes(guarded: Serve) -> int:
    figures = get(guarded, "/varz", Authorization=f"Bearer {TOKEN}").json
    return int(figures["since_start"]["received_bytes"])
