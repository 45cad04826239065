"""What a broker answers to those below it, over HTTP: batches, records, pushes, and clear errors."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Client
from penstock.broker.opened import LARGE_MESSAGES
from penstock.model.batch import Batch, encode
from penstock.pipe.batches import CONTENT_TYPE, BatchSplitter
from penstock.server.pipe_http import RECORDS_BYTES
from tests.support.frames import Frames, batch
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Serve, pub
from tests.support.trees import ask, batches, eventually, get, status_of

BATCHES = {"content-type": CONTENT_TYPE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory: Path = tmp_path_factory.mktemp("pipe")
    settings: dict[str, Any] = {"topic_retain_bytes": 8192, "topic_segment_bytes": 4096, "storage_upkeep_ms": 20}
    with Serve(directory, server_node_id="root", **settings) as found:
        yield found


def publish(server: Serve, subject: str, *values: bytes, **options: Any) -> None:
    with Client(f"127.0.0.1:{server.port}") as client:
        for value in values:
            client.publish(subject, value, **options)


def error(server: Serve, path: str, **query: Any) -> tuple[int, str]:
    status, told = get(server, path, **query)
    assert told["text"], "it says what is wrong"
    return status, told["code"]


# ---- down


def test_the_topics_are_listed_with_their_origin(server: Serve) -> None:
    publish(server, "listed", b"a", b"b")
    status, told = get(server, "/pipe/topics")
    assert (status, told["node"], told["ancestry"]) == (200, "root", ["root"])
    [topic] = [topic for topic in told["topics"] if topic["name"] == "listed"]
    assert topic["partitions"] == [{"start": 0, "committed": 2}]
    identity, _, number = topic["origin"].partition("/")
    assert len(identity) == 32
    assert number.isdigit()
    assert not [topic for topic in told["topics"] if topic["name"].startswith("$")], "the broker's own are not piped"


def test_batches_come_as_they_are_stored(server: Serve) -> None:
    publish(server, "stored", b"a", b"b", b"c", key="k")
    status, body, headers = ask(server, "/pipe/stream", topic="stored", offset=1)
    assert (status, headers["content-type"], headers["penstock-committed"]) == (200, CONTENT_TYPE, "3")
    found = BatchSplitter().feed(body)
    assert [(batch.base_offset, batch.columns().values()) for batch in found] == [(1, [b"b"]), (2, [b"c"])]
    assert ask(server, "/pipe/stream", topic="stored", offset=3)[0] == 204


def test_an_answer_waits_for_the_next_message(server: Serve) -> None:
    publish(server, "awaited", b"a")
    found: list[Batch] = []
    thread = threading.Thread(target=lambda: found.extend(batches(server, "awaited", offset=1, wait_ms=5_000)))
    thread.start()
    publish(server, "awaited", b"b")
    thread.join(PATIENCE_S)
    assert [batch.columns().values() for batch in found] == [[b"b"]]


def test_a_reader_that_does_not_read_is_not_read_ahead_of(tmp_path: Path) -> None:
    with Serve(tmp_path, storage_tail_bytes_max=0, topic_durability="flush") as server:
        with Flux(server) as flux:
            for _ in range(60):
                flux.send(pub("large", bytes(1 << 20)))
                assert flux.line() == "+OK"
        before = server.rss()
        slow = []
        for _ in range(8):
            reader = socket.create_connection(("127.0.0.1", server.ports["http"]))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(b"GET /pipe/stream?topic=large&offset=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert reader.recv(100).startswith(b"HTTP/1.1 200")
            slow.append(reader)
        # Others are served meanwhile.
        assert batches(server, "large", offset=59)[0].base_offset == 59
        grown = server.rss() - before
        for reader in slow:
            reader.close()
        assert grown < 48 << 20, f"{grown} bytes for eight readers that do not read"


def test_records_are_as_clients_of_that_kind_know_them(server: Serve) -> None:
    with Client(f"127.0.0.1:{server.port}") as client:
        client.publish("records", b'{"price": 1}', key="AAPL")
        client.publish("records.below", b"\xff\xfe", headers={"Colour": "red"})
        client.publish("records", key="AAPL")
    status, found = get(server, "/pipe/poll", topic="records", offset=0, limit=100)
    assert status == 200
    first, second, third = found
    assert (first["offset"], first["msgKey"], first["eventType"], first["data"]) == (
        0,
        "AAPL",
        "MESSAGE",
        '{"price": 1}',
    )
    assert first["createdAt"].endswith("Z")
    assert (second["subject"], second["headers"], second["dataBase64"]) == ("records.below", "Colour: red\r\n", "//4=")
    assert (third["offset"], third["eventType"]) == (2, "DELETE")
    assert [record["offset"] for record in get(server, "/pipe/poll", topic="records", offset=1, limit=1)[1]] == [1]
    assert get(server, "/pipe/poll", topic="records", offset=3) == (204, None)


def test_a_large_batch_is_polled_in_parts(tmp_path: Path) -> None:
    """One that is opened in another thread, among others."""
    values = [b"%d" % number for number in range(LARGE_MESSAGES + 1000)]
    with Serve(tmp_path) as server:
        publish(server, "large", b"first", b"second")
        with Frames(server) as client:
            client.append(client.call("topic", name="large")["id"], batch(*values))
        publish(server, "large", b"last")
        expected = ["first", "second", *(value.decode() for value in values), "last"]
        found: list[str] = []
        for limit in (1, 100, 10_000, 10_000):
            before = len(found)
            _, records = get(server, "/pipe/poll", topic="large", offset=before, limit=limit)
            assert [record["offset"] for record in records] == list(range(before, before + len(records)))
            assert 0 < len(records) <= limit
            found += [record["data"] for record in records]
        assert found == expected

        with Frames(server) as client:
            client.append(client.topic_id("heavy"), batch(*[b"%0100000d" % number for number in range(100)]))
        _, records = get(server, "/pipe/poll", topic="heavy", offset=50, limit=1000)
        size = sum(len(record["data"]) for record in records)
        assert RECORDS_BYTES <= size < RECORDS_BYTES + (2 << 20), "an answer is bounded though the batch is not"


def test_what_retention_has_dropped_is_told_with_where_to_go_on(server: Serve) -> None:
    for _ in range(30):
        publish(server, "dropped", b"x" * 3000)
    eventually("some are dropped", lambda: get(server, "/pipe/poll", topic="dropped", offset=0)[0] == 410)
    assert error(server, "/pipe/stream", topic="dropped", offset=0) == (410, "OFFSET_OUT_OF_RANGE")
    offset = 0
    # More may be dropped meanwhile.
    while (answer := ask(server, "/pipe/stream", topic="dropped", offset=offset))[0] == 410:
        assert json.loads(answer[1])["start"] > offset
        offset = json.loads(answer[1])["start"]
    assert BatchSplitter().feed(answer[1])[0].base_offset == offset


@pytest.mark.parametrize("path", ["/pipe/stream", "/pipe/poll"])
def test_what_cannot_be_read_is_refused(server: Serve, path: str) -> None:
    publish(server, "refused", b"a")
    assert error(server, path, topic="nowhere", offset=0) == (404, "UNKNOWN_TOPIC")
    assert error(server, path, topic="$delayed", offset=0) == (404, "UNKNOWN_TOPIC")
    assert error(server, path, topic="refused", partition=1, offset=0) == (404, "UNKNOWN_TOPIC")
    assert error(server, path, offset=0) == (400, "BAD_REQUEST")
    for offset in ("", "x", "-1", "1.5", "9" * 30, "٣"):
        assert error(server, path, topic="refused", offset=offset) == (400, "BAD_REQUEST")
    assert error(server, path, topic="refused", offset=0, partition="one") == (400, "BAD_REQUEST")
    assert error(server, path, topic="refused", offset=0, node="x" * 1000) == (400, "BAD_REQUEST")
    assert error(server, path, topic="refused", offset=0, node="root") == (409, "PIPE_LOOP")
    # A child that has more than the topic's own origin has it from somewhere else.
    assert error(server, path, topic="refused", offset=1000) == (409, "ORIGIN_CONFLICT")


def test_limits_of_a_poll_are_refused(server: Serve) -> None:
    publish(server, "refused", b"a")
    for limit in ("0", "10001", "many"):
        assert error(server, "/pipe/poll", topic="refused", offset=0, limit=limit) == (400, "BAD_REQUEST")


def test_a_topic_of_another_origin_is_not_streamed(server: Serve) -> None:
    publish(server, "refused", b"a")
    assert error(server, "/pipe/stream", topic="refused", offset=0, origin="other/1") == (409, "ORIGIN_CONFLICT")


# ---- up


def at(offset: int, *values: bytes) -> bytes:
    batch = encode(values, timestamp=1)
    batch.stamp(offset, append_time=1, log=3)
    return bytes(batch.data)


def push(server: Serve, topic: str, body: bytes, **query: Any) -> tuple[int, Any]:
    query = {"topic": topic, "origin": "shop/1", "partition": 0, "partitions": 1, **query}
    status, answer, _ = ask(server, "/pipe/push", body=body, headers=BATCHES, **query)
    return status, json.loads(answer)


def pushed(server: Serve, topic: str, origin: str = "shop/1") -> int:
    status, told = get(server, "/pipe/push", topic=topic, origin=origin, partition=0)
    assert status == 200
    position: int = told["position"]
    return position


def values(server: Serve, topic: str) -> list[str]:
    status, found = get(server, "/pipe/poll", topic=topic, offset=0, limit=1000)
    return [record["data"] for record in found] if status == 200 else []


def test_what_is_pushed_is_stored_once_in_order(server: Serve) -> None:
    assert pushed(server, "pushed") == 0
    assert push(server, "pushed", at(0, b"a", b"b") + at(5, b"c"), after=0) == (200, {"position": 6})
    assert pushed(server, "pushed") == 6
    assert pushed(server, "pushed", "shop/2") == 0
    # Sent again, because the answer was lost.
    status, told = push(server, "pushed", at(0, b"a", b"b") + at(5, b"c"), after=0)
    assert (status, told["code"]) == (409, "OUT_OF_SEQUENCE")
    # And from a child that believes that more has arrived.
    assert push(server, "pushed", at(9, b"z"), after=9)[0] == 409
    assert push(server, "pushed", at(9, b"d"), after=6) == (200, {"position": 10})
    assert push(server, "pushed", at(0, b"other"), after=0, origin="shop/2") == (200, {"position": 1})
    assert values(server, "pushed") == ["a", "b", "c", "d", "other"]


def test_a_batch_that_is_there_is_not_stored_again_within_a_push(server: Serve) -> None:
    assert push(server, "twice", at(0, b"a") + at(0, b"a") + at(1, b"b"), after=0) == (200, {"position": 2})
    assert values(server, "twice") == ["a", "b"]


def test_a_position_holds_though_the_topic_gets_more_partitions(server: Serve) -> None:
    query = {"origin": "shop/9", "partition": 3, "partitions": 1}
    assert push(server, "wider", at(0, b"a"), after=0, **query) == (200, {"position": 1})
    with Client(f"127.0.0.1:{server.port}") as client:
        client.alter_topic("wider", partitions=4)
    assert push(server, "wider", at(0, b"a"), after=0, **query)[0] == 409
    assert push(server, "wider", at(1, b"b"), after=1, **query) == (200, {"position": 2})


def test_a_push_that_is_no_batches_is_refused_and_stores_nothing(server: Serve) -> None:
    whole = at(0, b"a")
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    for body in (b"junk" * 100, whole[:-8], bytes(damaged), b"\xff" * 96):
        status, told = push(server, "junk", body, after=0)
        assert (status, told["code"]) == (400, "CORRUPT_BATCH")
    assert values(server, "junk") == []
    status, answer, _ = ask(server, "/pipe/push", body=whole, topic="junk", origin="o", partition=0, after=0)
    assert (status, json.loads(answer)["code"]) == (400, "BAD_REQUEST")
    assert push(server, "junk", whole, after="x")[0] == 400
    assert push(server, "junk", whole, after=0, partitions=1000)[0] == 400
    assert push(server, "junk", whole, after=0, origin="")[0] == 400
    assert push(server, "$delayed", whole, after=0)[0] in (400, 404)


def test_messages_of_subjects_that_are_not_the_topics_are_refused(server: Serve) -> None:
    batch = encode([b"a"], timestamp=1, subjects=[b"elsewhere"])
    batch.stamp(0, append_time=1)
    assert push(server, "strict", bytes(batch.data), after=0)[1]["code"] == "BAD_SUBJECT"
    assert values(server, "strict") == []


# ---- and how it is


def test_the_status_of_a_root(server: Serve) -> None:
    get(server, "/pipe/topics", node="shop-7")
    status = status_of(server)
    assert status["node"] == "root"
    assert (status["health"], status["reason"], status["parent"], status["role"]) == ("HEALTHY", "", None, None)
    [child] = [child for child in status["children"] if child["node"] == "shop-7"]
    assert child["address"] == "127.0.0.1"
    assert child["seen"].endswith("Z")
    assert status["topics"] == []


def test_a_server_stops_though_children_wait(tmp_path: Path) -> None:
    server = Serve(tmp_path)
    publish(server, "t", b"a")
    waiting = socket.create_connection(("127.0.0.1", server.ports["http"]))
    waiting.sendall(b"GET /pipe/stream?topic=t&offset=1&wait_ms=30000&node=x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    eventually("it was asked", lambda: status_of(server)["children"])
    ended = server.stop()
    assert ended.code == 0
    assert ended.stderr == ""
    assert waiting.recv(100).startswith(b"HTTP/1.1 204")
    waiting.close()
