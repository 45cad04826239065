"""FETCH at the binary door of a real server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.wire.binary import Type
from tests.support.binary_door import MIB
from tests.support.frames import Frames, batch
from tests.support.server import Serve


def test_a_fetch_begins_with_the_batch_that_holds_the_offset(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    for begin in range(0, 9, 3):
        client.append(topic_id, batch(*(b"%d" % number for number in range(begin, begin + 3))))
    assert client.fetch(topic_id, 0).offsets == list(range(9))
    assert client.fetch(topic_id, 4).offsets == list(range(3, 9))
    assert client.fetch(topic_id, 4, size=1).offsets == [3, 4, 5]
    assert client.fetch(topic_id, 0, end=3).offsets == [0, 1, 2]
    assert client.fetch(topic_id, 0, end=4).offsets == [0, 1, 2, 3, 4, 5]
    fetched = client.fetch(topic_id, 9)
    assert (fetched.start, fetched.committed, fetched.batches) == (0, 9, [])


def test_a_fetch_waits_until_there_is_something(client: Frames, other: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    number = client.ask_fetch(topic_id, 0, wait_ms=20_000)
    client.sync()
    other.publish(topic, b"a")
    fetched = client.fetched(number)
    assert (fetched.values, fetched.committed) == ([b"a"], 1)


def test_a_fetch_that_waits_in_vain_gives_nothing(client: Frames, topic: str) -> None:
    fetched = client.fetch(client.topic_id(topic), 0, wait_ms=20)
    assert (fetched.start, fetched.committed, fetched.batches) == (0, 0, [])


def test_others_are_answered_while_a_fetch_waits(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    waiting = [client.ask_fetch(topic_id, 0, wait_ms=20_000) for _ in range(10)]
    assert client.call("topic", name=topic)["id"] == topic_id
    assert client.fetch(topic_id).batches == []
    client.publish(topic, b"a")
    assert [client.fetched(number).values for number in waiting] == [[b"a"]] * 10


def test_a_fetch_that_waits_for_a_topic_that_is_deleted_is_answered(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    number = client.ask_fetch(topic_id, 0, wait_ms=20_000)
    client.sync()
    client.call("delete_topic", name=topic)
    frame = client.answer(number)
    assert frame.type == Type.ERROR or client.error_of(client.ask_fetch(topic_id))["code"] == "UNKNOWN_TOPIC"


def test_a_fetch_behind_the_last_message_waits_also_after_a_crash(tmp_path: Path) -> None:
    """Offsets are left out then: that they are committed does not mean that there is something."""
    with Serve(tmp_path, topic_durability="flush") as server:
        with Frames(server) as client:
            client.publish("orders", b"a", b"b")
            server.kill()
        server.restart()
        with Frames(server) as client, Frames(server) as other:
            topic_id = client.call("topic", name="orders")["id"]
            assert client.fetch(topic_id).values == [b"a", b"b"]
            number = client.ask_fetch(topic_id, 2, wait_ms=20_000)
            client.sync()
            other.publish("orders", b"c")
            assert client.fetched(number).values == [b"c"]


def test_what_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    config = "[topics.orders]\nsegment_bytes = 4096\nretain_bytes = 8192\n"
    with Serve(tmp_path, config=config, storage_upkeep_ms=50) as server, Frames(server) as client:
        topic_id = client.call("topic", name="orders")["id"]
        for number in range(40):
            client.append(topic_id, batch(b"%02d" % number + bytes(1000)))
        until = time.monotonic() + 20
        while not (start := client.call("topic", name="orders")["positions"][0]["start"]):
            assert time.monotonic() < until, "nothing is dropped"
        error = client.error_of(client.ask_fetch(topic_id, start - 1))
        assert error["code"] == "OFFSET_OUT_OF_RANGE"
        assert (error["offset"], error["end"]) == (start - 1, 40)
        assert error["start"] >= start
        beyond = client.error_of(client.ask_fetch(topic_id, 41, wait_ms=20_000))
        assert (beyond["code"], beyond["offset"], beyond["end"]) == ("OFFSET_OUT_OF_RANGE", 41, 40)
        # What is kept: from then on nothing is dropped.
        while (start := client.fetch(topic_id, 40).start) < 32:
            assert time.monotonic() < until, "too much is kept"
        assert client.fetch(topic_id, start).values[0][:2] == b"%02d" % start


def test_a_fetch_from_what_is_not_there_is_refused(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    assert client.error_of(client.ask_fetch(topic_id, partition=1))["code"] == "UNKNOWN_TOPIC"
    assert client.error_of(client.ask_fetch(1 << 63))["code"] == "UNKNOWN_TOPIC"
    assert client.error_of(client.ask_fetch(topic_id, (1 << 64) - 1))["code"] == "OFFSET_OUT_OF_RANGE"


def test_many_fetches_at_once_are_all_answered(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    client.publish(topic, *(b"%d" % number for number in range(100)))
    numbers = [client.ask_fetch(topic_id, number % 100, size=1) for number in range(1000)]
    for number in numbers:
        assert len(client.fetched(number).values) == 100


@pytest.mark.parametrize("tail_bytes", [0, 64 * MIB])
def test_who_does_not_read_what_it_fetches_does_not_make_the_server_grow(tmp_path: Path, tail_bytes: int) -> None:
    with (
        Serve(tmp_path, topic_durability="flush", storage_tail_bytes_max=tail_bytes) as server,
        Frames(server) as client,
        Frames(server, receive_bytes=4096) as lazy,
    ):
        topic_id = client.topic_id("orders")
        for _ in range(20):
            client.append(topic_id, batch(bytes(900_000)))
        before = server.rss()
        asked = [lazy.ask_fetch(topic_id, size=16 * MIB) for _ in range(20)]
        # Each of these is read by the same threads, behind those.
        for _ in range(20):
            client.fetch(topic_id, size=16 * MIB)
        assert server.rss() - before < 120 * MIB
        for number in asked:
            assert len(lazy.fetched(number).batches) > 10
