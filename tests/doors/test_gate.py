"""The gate: before a connection is admitted only its credentials are processed, in every dialect."""

from __future__ import annotations

import gzip
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import lz4.frame
import pytest

from penstock.doors.gate import HANDSHAKE_BYTES_MAX
from penstock.doors.session import Session
from penstock.model.batch import encode
from penstock.wire import binary, prefixed
from penstock.wire import cursus as wire_cursus
from penstock.wire import qb as wire_qb
from penstock.wire.binary import Append, Type
from penstock.wire.cursus import Record
from tests.support.frames import Frames
from tests.support.lengths import CREATE_TOPIC, PUBLISH, Cursus, Qb
from tests.support.process import PATIENCE_S
from tests.support.server import Nats, Raw, Serve
from tests.support.web import ask

TOKEN: Final = "s3cret"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("gate"), auth_token=TOKEN, server_handshake_s=1) as server:
        with Frames(server, token=TOKEN) as client:
            client.call("create_topic", name="private")
        yield server


@pytest.fixture
def bystander(server: Serve) -> Iterator[Frames]:
    with Frames(server, token=TOKEN) as client:
        yield client
        # Whatever the others did, nothing was stored, and no topic was created.
        assert [topic["name"] for topic in client.call("topics")["topics"]] == ["private"]
        [partition] = client.call("topic", name="private")["positions"]
        assert partition["end"] == 0


def _record(size: int = 1) -> bytes:
    return wire_cursus.batch(b"private", 0, [Record(0, b"x" * size)], "1")


def _named(topic: bytes) -> bytes:
    return struct.pack(">H", len(topic)) + topic + b"payload"


def _qb(kind: int, **properties: object) -> bytes:
    block = wire_qb.properties(properties)
    return wire_qb.message(wire_qb.Kind(kind), 1, 0, block, b"body")


_BATCH = encode([b"x"], timestamp=0, subjects=[b"private"]).data
# What somebody without credentials may send first, by dialect: nothing of it is processed.
TEXT = {
    "PUB": b"PUB private 1\r\nx\r\n",
    "PUB without its payload": b"PUB private 1000000\r\n",
    "HPUB": b"HPUB private 2 3\r\n\r\nx\r\n",
    "SUB": b"SUB private 1\r\n",
    "PING": b"PING\r\n",
    "INFO": b"INFO\r\n",
    "STATS": b"STATS\r\n",
    "REPLAY": b"REPLAY FIRST 10\r\n",
    "no command": b"GET / HTTP/1.1\r\n",
    "no credentials": b"CONNECT {}\r\nPUB private 1\r\nx\r\n",
    "invalid credentials": b'CONNECT {"auth_token":"x"}\r\nPUB private 1\r\nx\r\n',
    "no text": b'CONNECT {"auth_token":"\\ud800","user":"\\ud800","pass":"\\ud800"}\r\n',
    "no JSON": b"CONNECT {{{\r\n",
}
BINARY = {
    "PUBLISH": binary.frame(Type.PUBLISH, 1, _BATCH),
    "APPEND": binary.append_frame(1, Append(1, 0, 1), _BATCH),
    "CALL": binary.json_frame(Type.CALL, 1, {"call": "topics"}),
    "DATA": binary.json_frame(Type.DATA, 1, {"topic": "private", "data": "x"}),
    "SUBSCRIBE": binary.json_frame(Type.SUBSCRIBE, 1, {"topic": "private"}),
    "HEARTBEAT": binary.frame(Type.HEARTBEAT, 1),
    "no credentials": binary.json_frame(Type.HELLO, 1, {"version": 1}) + binary.frame(Type.PUBLISH, 2, _BATCH),
    "no JSON": binary.frame(Type.HELLO, 1, b"{"),
    "too long": binary.head(Type.HELLO, 1, HANDSHAKE_BYTES_MAX + 1),
}
CURSUS = {
    "a batch": prefixed.frame(_record()),
    "a packed batch": prefixed.frame(gzip.compress(_record())),
    "a bomb": prefixed.frame(lz4.frame.compress(_record(10 << 20))),
    "a packed AUTH": prefixed.frame(gzip.compress(f"AUTH token={TOKEN}".encode())),
    "an envelope": prefixed.frame(_named(b"private")),
    "an envelope for no topic": prefixed.frame(_named(b"unknown")),
    "a command": prefixed.frame(b"LIST"),
    "a command in an envelope": prefixed.frame(struct.pack(">H", 7) + b"private" + b"LIST"),
    "no command": prefixed.frame(b"XYZ"),
    "nothing": prefixed.frame(b""),
    "invalid credentials": prefixed.frame(b"AUTH token=x") + prefixed.frame(_record()),
    "no credentials": prefixed.frame(b"AUTH") + prefixed.frame(_record()),
    "too long": struct.pack(">I", HANDSHAKE_BYTES_MAX + 1) + b"AUTH",
}
QB = {
    "PUBLISH": _qb(PUBLISH, topic="private", publisher_id="me"),
    "PUBLISH to no topic": _qb(PUBLISH, topic="unknown", publisher_id="me"),
    "CREATE_TOPIC": _qb(CREATE_TOPIC, topic="mine"),
    "no credentials": _qb(3) + _qb(PUBLISH, topic="private", publisher_id="me"),
    "no text": wire_qb.message(wire_qb.Kind.HEARTBEAT, 1, 0, b"\xff\xff"),
    "too long": struct.pack(">II", HANDSHAKE_BYTES_MAX + 1, 3),
}
_CASES: Final = [
    pytest.param(door, data, id=f"{dialect}: {name}")
    for dialect, door, cases in (
        ("text", "text", TEXT),
        ("binary", "text", BINARY),
        ("binary", "quiet", {"DATA": BINARY["DATA"]}),
        ("Cursus", "quiet", CURSUS),
        ("QB", "quiet", QB),
    )
    for name, data in cases.items()
]


def _limits(server: Serve) -> dict[str, dict[str, int]]:
    answer = ask(server, "GET", "/varz", headers={"Authorization": f"Bearer {TOKEN}"})
    found: dict[str, dict[str, int]] = answer.json["limits"]
    return found


@pytest.mark.parametrize(("door", "data"), _CASES)
def test_a_first_message_without_valid_credentials_closes(
    server: Serve, bystander: Frames, door: str, data: bytes
) -> None:
    with Raw(server.ports[door]) as client:
        client.send(data)
        told = client.rest()
        assert "unknown" not in told  # neither which topics exist, nor which do not
        assert "private" not in told


# A first message that never becomes complete: its door, how it begins and goes on.
UNENDING: Final = (
    ("text", b"", b"\r\n"),
    ("text", b"CONNECT ", b" "),
    ("text", binary.head(Type.HELLO, 1, HANDSHAKE_BYTES_MAX), b" "),
    ("quiet", struct.pack(">I", HANDSHAKE_BYTES_MAX), b" "),
    ("quiet", struct.pack(">II", HANDSHAKE_BYTES_MAX, 3), b"\0"),
)


def test_a_connection_that_never_authenticates_may_send_64_kib(server: Serve, bystander: Frames) -> None:
    for door, begin, more in UNENDING:
        with Raw(server.ports[door]) as client, suppress(ConnectionError):
            client.send(begin)
            client.send(more * (4 * HANDSHAKE_BYTES_MAX // len(more)))
            client.rest()


def test_a_connection_that_never_authenticates_is_closed_in_time(server: Serve, bystander: Frames) -> None:
    """Bytes that keep coming do not move the deadline."""
    clients = [(Raw(server.ports[door]), begin, more) for door, begin, more in UNENDING]
    for client, begin, _ in clients:
        client.send(begin)
    is_open = {client: True for client, *_ in clients}
    until = time.monotonic() + PATIENCE_S
    while any(is_open.values()) and time.monotonic() < until:
        for client, _, more in clients:
            try:
                client.send(more)
            except ConnectionError:
                is_open[client] = False
        time.sleep(0.05)
    assert not any(is_open.values())
    for client, *_ in clients:
        client.close()


def test_what_follows_the_credentials_is_processed(server: Serve) -> None:
    with Raw(server.port) as client:
        assert client.line().startswith("INFO")
        client.send(b'CONNECT {"auth_token":"%b","verbose":false}\r\n' % TOKEN.encode())
        client.send(b"PUB _live 100000\r\n" + bytes(100_000) + b"\r\nPING\r\n")
        assert client.line() == "PONG"
    with Cursus(server) as cursus:
        assert cursus.ask(f"AUTH token={TOKEN}") == "OK"
        assert cursus.ask("LIST") == "private"
    with Qb(server) as qb:
        assert qb.heartbeat(token=TOKEN).kind == wire_qb.Kind.HEARTBEAT
        assert qb.refused(PUBLISH, b"x", topic="unknown", client_id="me") == "Topic 'unknown' does not exist"


def test_a_crowd_of_connections_that_say_nothing_keeps_no_client_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Serve(tmp_path_factory.mktemp("crowd"), auth_token=TOKEN, server_handshakes_max=20) as server:
        idle = [Raw(server.ports["quiet"]) for _ in range(60)]
        for connection in idle[:40]:
            assert "Timeout" in connection.rest()
        assert _limits(server)["handshakes_count"] == {"used": 20, "limit": 20}
        with Frames(server, token=TOKEN) as client:
            client.sync()
        for connection in idle:
            connection.close()


def test_what_all_that_are_not_admitted_send_is_limited_in_total(server: Serve, bystander: Frames) -> None:
    before = server.rss()
    line = b"CONNECT " + b" " * 4000
    crowd = [Raw(server.port) for _ in range(200)]
    for connection in crowd:
        with suppress(ConnectionError):
            connection.send(b"\r\n" * 30_000 + line)
    bystander.sync()
    limits = _limits(server)["handshakes_bytes"]
    assert limits["used"] <= limits["limit"] == 16 << 20
    assert server.rss() - before < 64 << 20
    for connection in crowd:
        connection.close()


def test_a_name_that_is_no_text_is_shown_as_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        Serve(tmp_path_factory.mktemp("names")) as server,
        Nats(server, name="\ud800 a\x1b[2J\r\nb" + "c" * 3_000) as nats,
        Frames(server, name="\x07" * 300) as frames,
    ):
        nats.send("SUB a DURABLE:g 1\r\n")
        assert nats.ask("PING") == "PONG"
        frames.sync()
        rows = ask(server, "GET", "/connz", headers={"Authorization": f"Bearer {TOKEN}"}).json["connections"]
        names = sorted(row["name"] for row in rows)
        assert names == ["\ufffd a\ufffd[2J\ufffd\ufffdb" + "c" * 246, "\ufffd" * 256]
        assert ask(server, "GET", "/admin/groups").status == 200


@pytest.mark.parametrize("entry", ["connection_made", "data_received", "buffer_updated", "pause_writing"])
def test_every_entry_of_the_transport_is_guarded(entry: str) -> None:
    assert hasattr(getattr(Session, entry), "__wrapped__")


@pytest.mark.parametrize("entry", ["resume_writing", "read_on", "ping", "expire", "tell_lame_duck", "stop"])
def test_every_entry_of_the_server_is_guarded(entry: str) -> None:
    assert hasattr(getattr(Session, entry), "__wrapped__")
