"""The binary door of a real server: how a connection begins, and what ends it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.wire import binary
from penstock.wire.binary import HEAD, Settle, Type, Verb
from tests.support import web
from tests.support.binary_door import MIB, OURS, PROVIDERS, codes, counted, http, stored_values
from tests.support.frames import Bare, Frames, batch, messages, read_json
from tests.support.server import Flux, Serve, in_pieces

HELLO: Final = binary.json_frame(Type.HELLO, 1, {"version": 1, "name": "bare"})

# ---- which door it is


@pytest.mark.parametrize("door", ["text", "quiet"])
def test_the_first_byte_chooses_the_door(server: Serve, topic: str, door: str) -> None:
    with Flux(server, door=door) as text, Frames(server, door=door) as frames:
        text.subscribe(topic, "1")
        frames.open(1, topic)
        assert text.publish(topic, b"by text") == "+OK"
        assert frames.publish(topic, b"by frames") == [[topic, 0, 1, False]]
        assert [message.payload for message in text.messages(2)] == [b"by text", b"by frames"]
        assert [message.value for message in frames.delivered(2)] == [b"by text", b"by frames"]


def test_a_connection_to_the_greeting_port_is_greeted_before_it_speaks_frames(server: Serve) -> None:
    with Bare(server) as client:
        assert client.info["headers"] is True
        client.send(HELLO)
        assert client.frame().type == Type.RESULT


def test_nothing_comes_from_the_quiet_port_before_the_answer(server: Serve) -> None:
    with Bare(server, door="quiet") as client:
        client.send(HELLO)
        frame = client.frame()
        assert (frame.type, frame.id) == (Type.RESULT, 1)


@pytest.mark.parametrize("door", ["text", "quiet"])
def test_a_lone_first_byte_is_enough_to_know_the_door(server: Serve, client: Frames, door: str) -> None:
    with Bare(server, door=door) as slow:
        slow.send(HELLO[:1])
        client.sync()
        for piece in in_pieces(HELLO[1:], 1):
            slow.send(piece)
            client.sync()
        assert read_json(slow.frame())["node_id"]


def test_frames_that_come_byte_by_byte_are_taken(client: Frames, topic: str) -> None:
    data = binary.frame(Type.PUBLISH, 77, messages([topic], [b"a"]).data)
    for piece in in_pieces(data, 1):
        client.send(piece)
    assert client.result_of(77) == {"receipts": [[topic, 0, 0, False]]}


def test_many_frames_in_one_piece_with_the_first_are_taken(server: Serve, topic: str) -> None:
    publishes = [binary.frame(Type.PUBLISH, 2 + n, messages([topic], [b"%d" % n]).data) for n in range(50)]
    with Bare(server) as client:
        client.send(HELLO + b"".join(publishes))
        assert client.answer(1).type == Type.RESULT
        offsets = [read_json(client.answer(2 + n))["receipts"][0][2] for n in range(50)]
    assert offsets == list(range(50))


def test_a_frame_that_is_larger_than_what_is_read_at_once_is_taken(client: Frames, topic: str) -> None:
    values = [bytes([n]) * 900_000 for n in range(4)]
    assert codes(client.publish(topic, *values)) == [None] * 4
    assert stored_values(client, topic) == values


# ---- HELLO, and who may come in


def test_hello_tells_who_the_server_is_and_its_limits(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, server_node_id="n7", server_payload_bytes_max=1234, server_heartbeat_s=7) as server,
        Frames(server) as client,
    ):
        hello = client.hello
        assert (hello["node_id"], hello["payload_bytes_max"], hello["heartbeat_s"]) == ("n7", 1234, 7)
        assert hello["version"] == server.version
        assert hello["server_id"] == client.info["server_id"]


def test_a_version_that_is_not_known_is_refused_and_the_connection_ends(server: Serve) -> None:
    for version in (0, 2, None, "1"):
        with Bare(server) as client:
            client.send(binary.json_frame(Type.HELLO, 1, {"version": version}))
            assert client.goodbye()["code"] == "BAD_REQUEST"


def test_the_name_of_a_client_is_seen_by_others(server: Serve, client: Frames, topic: str) -> None:
    with Frames(server, name="billing") as named:
        named.open(1, topic, group="named", start="earliest")
        assert "billing" in [row["name"] for row in http(server, "connz")["connections"]]
        assert client.call("group", name="named")["members"] == [
            {"name": "billing", "address": "127.0.0.1", "unacknowledged": 0}
        ]


AUTHS: Final[list[dict[str, object]]] = [{"user": "ann", "password": "secret"}, {"token": "secret"}]
WRONG: Final[list[dict[str, object]]] = [
    {},
    {"user": "ann"},
    {"user": "ann", "password": "no"},
    {"user": "bob", "password": "secret"},
    {"token": "no"},
    {"token": None},
    {"token": ["secret"]},
    {"user": {"a": 1}, "password": 5},
]


@pytest.fixture(scope="module", params=AUTHS, ids=["password", "token"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, Any]]:
    settings = {f"auth_{name}": value for name, value in request.param.items()}
    with Serve(tmp_path_factory.mktemp("guarded"), **settings) as server:
        yield server, request.param


def test_who_is_known_comes_in(guarded: tuple[Serve, Any], topic: str) -> None:
    server, credentials = guarded
    with Frames(server, **credentials) as client:
        assert codes(client.publish(topic, b"a")) == [None]


@pytest.mark.parametrize("options", WRONG)
def test_who_is_not_known_is_told_so_and_the_connection_ends(
    guarded: tuple[Serve, Any], options: dict[str, object]
) -> None:
    server, credentials = guarded
    allowed = web.basic("ann", "secret") if "user" in credentials else {"Authorization": "Bearer secret"}
    before = counted(server, "unauthorized", **allowed)
    with Bare(server) as client:
        client.send(binary.json_frame(Type.HELLO, 9, {"version": 1} | options))
        frames = client.frames_until_end()
    assert [(frame.type, frame.id) for frame in frames] == [(Type.ERROR, 9)]
    assert read_json(frames[0])["code"] == "UNAUTHORIZED"
    assert counted(server, "unauthorized", **allowed) == before + 1


def test_what_comes_behind_a_refused_hello_is_not_done(guarded: tuple[Serve, Any], topic: str) -> None:
    server, credentials = guarded
    with Bare(server) as client:
        refused = binary.json_frame(Type.HELLO, 1, {"version": 1, "token": "no"})
        client.send(refused + binary.frame(Type.PUBLISH, 2, messages([topic], [b"a"]).data))
        assert len(client.frames_until_end()) == 1
    with Frames(server, **credentials) as client:
        assert client.refused("topic", name=topic)["code"] == "UNKNOWN_TOPIC"


@pytest.mark.parametrize("kind", [*PROVIDERS, Type.HEARTBEAT, *OURS])
def test_nothing_but_hello_is_taken_from_who_is_not_known(guarded: tuple[Serve, Any], kind: Type) -> None:
    server, credentials = guarded
    payload = binary.json_frame(kind, 3, {"call": "create_topic", "name": "sneaked", "topic": "sneaked"})
    with Bare(server) as client:
        client.send(payload)
        assert client.goodbye()["code"] == "UNAUTHORIZED"
    with Frames(server, **credentials) as client:
        assert client.call("topics")["topics"] == [t for t in client.call("topics")["topics"] if t["name"] != "sneaked"]


def test_a_token_that_is_no_text_is_no_request(tmp_path: Path) -> None:
    """JSON can say half of a surrogate pair, which nothing can encode."""
    with Serve(tmp_path, auth_token="secret") as server, Bare(server) as client:
        client.send(binary.json_frame(Type.HELLO, 1, {"version": 1, "token": "\ud800"}))
        assert client.goodbye()["code"] == "BAD_REQUEST"


# ---- what is too large, and what is no frame


def test_a_frame_beyond_the_limit_is_refused_before_it_comes_and_takes_no_memory(server: Serve) -> None:
    before = server.rss()
    for length in (10 * MIB + 1, 1 << 31, (1 << 32) - 1):
        with Bare(server) as client:
            client.send(HEAD.pack(Type.HELLO, 1, length))
            assert client.goodbye()["code"] == "BAD_FRAME"
    assert server.rss() - before < 8 * MIB


def test_after_hello_a_frame_may_be_as_large_as_a_batch_and_no_larger(server: Serve) -> None:
    before = server.rss()
    for length in (binary.FRAME_BYTES_MAX + 1, (1 << 32) - 1):
        with Frames(server) as client:
            client.send(HEAD.pack(Type.PUBLISH, 1, length))
            assert client.goodbye()["code"] == "BAD_FRAME"
    assert server.rss() - before < 8 * MIB


def test_what_a_head_claims_takes_no_memory_until_it_comes(tmp_path: Path) -> None:
    """Nobody has to be known to send 13 bytes."""
    with Serve(tmp_path, auth_token="secret") as server, Frames(server, token="secret") as client:
        before = server.rss()
        claims = [Bare(server) for _ in range(20)]
        try:
            for claim in claims:
                claim.send(HEAD.pack(Type.HELLO, 1, 10 * MIB) + b"{")
            client.sync()
            assert server.rss() - before < 40 * MIB
        finally:
            for claim in claims:
                claim.close()


@pytest.mark.parametrize("kind", [0x00, 0x09, 0x0A, 0x16, 0x20, 0x22, 0x7F, 0xFF])
def test_a_frame_that_a_client_does_not_send_ends_its_connection_only_and_is_counted(
    server: Serve, client: Frames, kind: int
) -> None:
    before = counted(server, "protocol_errors")
    with Frames(server) as bad:
        bad.send(HEAD.pack(kind, 1, 0))
        assert bad.goodbye()["code"] == "BAD_FRAME"
    assert counted(server, "protocol_errors") == before + 1
    client.sync()


@pytest.mark.parametrize("kind", PROVIDERS)
def test_who_said_hello_does_not_speak_as_the_provider(server: Serve, kind: Type) -> None:
    with Frames(server) as client:
        client.send(binary.json_frame(kind, 1, {}))
        assert client.goodbye()["code"] == "BAD_FRAME"


@pytest.mark.parametrize("kind", [Type.APPEND, Type.FETCH, Type.END, Type.CREDIT, Type.SETTLE])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(7), bytes(13)])
def test_fields_that_do_not_fit_are_refused_and_the_connection_goes_on(
    client: Frames, kind: Type, payload: bytes
) -> None:
    assert client.error(kind, payload)["code"] == "BAD_FRAME"
    client.sync()


def test_a_settle_frame_that_claims_more_than_it_holds_is_refused(client: Frames) -> None:
    data = bytearray(binary.settle_frame(1, Settle(1, Verb.ACK, 0, 0, 1, 0, [5])))[HEAD.size :]
    data[37:41] = (1 << 31).to_bytes(4, "big")
    assert client.error(Type.SETTLE, data)["code"] == "BAD_FRAME"


@pytest.mark.parametrize("kind", [Type.OPEN, Type.CALL, Type.HELLO])
@pytest.mark.parametrize("payload", [b"{", b"[]", b"1", b"\xff", b'"x"', b"[" * 100_000, b"9" * 5000])
def test_what_is_not_json_is_refused_and_the_connection_goes_on(client: Frames, kind: Type, payload: bytes) -> None:
    assert client.error(kind, payload)["code"] == "BAD_REQUEST"
    client.sync()


@pytest.mark.parametrize("payload", [b"", b"x" * 95, bytes(96), bytes(104), bytes(1000)])
def test_what_is_no_batch_is_refused_and_the_connection_goes_on(client: Frames, topic: str, payload: bytes) -> None:
    assert client.error(Type.PUBLISH, payload)["code"] == "CORRUPT_BATCH"
    to = binary.append_frame(0, binary.Append(client.topic_id(topic), 0, 1), payload)[HEAD.size :]
    assert client.error(Type.APPEND, to)["code"] == "CORRUPT_BATCH"
    assert stored_values(client, topic) == []


def test_disconnect_ends_the_connection(client: Frames) -> None:
    client.send(binary.frame(Type.DISCONNECT, 0))
    assert client.frames_until_end() == []


# ---- heartbeats, and the end


def test_a_heartbeat_is_answered_with_its_id(client: Frames) -> None:
    client.send(binary.frame(Type.HEARTBEAT, 77))
    assert client.frame() == (Type.HEARTBEAT, 77, b"")


def test_who_says_nothing_is_asked_and_dropped_and_who_answers_stays(tmp_path: Path) -> None:
    with Serve(tmp_path, server_heartbeat_s=1) as server, Frames(server) as silent, Frames(server) as awake:
        ended = threading.Event()
        said: list[Any] = []

        def listen() -> None:
            said.extend(silent.frames_until_end())
            ended.set()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            until = time.monotonic() + 20
            while not ended.is_set():
                assert time.monotonic() < until, "it is not dropped"
                awake.of_type(Type.HEARTBEAT, 0)
                awake.send(binary.frame(Type.HEARTBEAT, 0))
        finally:
            silent.socket.shutdown(2) if not ended.is_set() else None
            thread.join()
        assert [frame.type for frame in said] == [Type.HEARTBEAT, Type.HEARTBEAT, Type.DISCONNECT]
        assert {frame.id for frame in said} == {0}
        awake.sync()
        assert counted(server, "stale") == 1


def test_who_sends_no_whole_frame_is_dropped(tmp_path: Path) -> None:
    with Serve(tmp_path, server_handshake_s=1) as server, Bare(server) as slow:
        slow.send(HELLO[:-1])
        assert slow.goodbye()["code"] == "BAD_REQUEST"
        assert counted(server, "silent") == 1


def test_a_server_that_stops_answers_what_was_published_and_says_goodbye(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Frames(server) as client:
            topic_id = client.topic_id("orders")
            client.open(1, "bills")
            sent = [
                client.ask_append(topic_id, batch(b"%d" % number, producer=7, sequence=number)) for number in range(200)
            ]
            client.result_of(sent[0])
            server.process.send_signal(signal.SIGTERM)
            frames = client.frames_until_end()
            assert frames[-1].type == Type.DISCONNECT
            assert read_json(frames[-1])["code"] == "CLOSED"
            answered = [frame.id for frame in frames[:-1]]
            assert {frame.type for frame in frames[:-1]} <= {Type.RESULT}
            assert answered == sent[1 : 1 + len(answered)]
        assert server.wait().code == 0
        # Neither more nor less: what was not answered was not taken either.
        assert [message["value"] for message in server.dump("orders")] == [str(n) for n in range(len(answered) + 1)]


def test_a_server_that_stops_says_goodbye_to_who_has_not_said_hello(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Bare(server) as client:
        client.send(binary.json_frame(Type.DATA, 1, {"topic": "orders", "data": "a"}))
        assert client.frame().type == Type.ACK
        server.process.send_signal(signal.SIGTERM)
        assert client.goodbye()["code"] == "CLOSED"
        assert server.wait() == (0, "")


def test_who_waits_for_a_fetch_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Frames(server) as client:
        client.ask_fetch(client.topic_id("orders"), wait_ms=60_000)
        client.sync()
        server.process.send_signal(signal.SIGTERM)
        assert client.frames_until_end()[-1].type == Type.DISCONNECT
        assert server.wait() == (0, "")
