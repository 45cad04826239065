"""OPEN, CREDIT and END at the binary door of a real server."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.wire import binary
from penstock.wire.binary import Type, Verb
from tests.support.binary_door import MIB, counted
from tests.support.frames import Delivered, Frames
from tests.support.server import Serve


def test_no_more_come_than_there_is_credit_for(client: Frames, other: Frames, topic: str) -> None:
    client.open(1, topic, credit=3)
    values = [b"%d" % number for number in range(10)]
    for value in values:
        other.publish(topic, value)
    found = client.delivered(3)
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.credit(1, 2)
    found += client.delivered(2)
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.credit(1, 1000)
    found += client.delivered(5)
    assert [message.value for message in found] == values
    assert [message.offset for message in found] == list(range(10))


def test_one_batch_is_cut_where_the_credit_ends(client: Frames, topic: str) -> None:
    client.open(1, topic, credit=4)
    client.publish(topic, *(b"%d" % number for number in range(10)))
    assert [message.offset for message in client.delivered(4)] == [0, 1, 2, 3]
    client.credit(1, 1)
    assert [message.offset for message in client.delivered(1)] == [4]


def test_without_credit_nothing_comes(client: Frames, topic: str) -> None:
    client.open(1, topic, credit=0)
    client.publish(topic, b"a")
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.credit(1, 1)
    client.delivered(1)


@pytest.mark.parametrize("group", [None, "eager"])
def test_credit_that_comes_right_behind_open_counts(
    client: Frames, other: Frames, topic: str, group: str | None
) -> None:
    options = {"subscription": 1, "pattern": topic, "group": group and f"{group}-{topic}", "credit": 0}
    client.send(binary.json_frame(Type.OPEN, 50, options) + binary.credit_frame(1, 1))
    client.result_of(50)
    other.publish(topic, b"a")
    client.socket.settimeout(5)
    assert [message.value for message in client.delivered(1)] == [b"a"]


def test_credit_for_no_messages_takes_all_credit_back(client: Frames, topic: str) -> None:
    client.open(1, topic, group=f"g-{topic}", credit=10)
    client.publish(topic, b"a")
    [first] = client.delivered(1)
    client.credit(1, 0)
    assert client.settle(Verb.RELEASE, first) == []
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.credit(1, 1)
    assert [(message.value, message.attempts) for message in client.delivered(1)] == [(b"a", 1)]


def test_credit_for_what_is_not_open_harms_nobody(client: Frames) -> None:
    client.credit(99, (1 << 32) - 1)
    client.sync()


def test_a_client_hears_itself(client: Frames, topic: str) -> None:
    client.open(1, topic)
    client.publish(topic, b"a")
    assert [message.value for message in client.delivered(1)] == [b"a"]


def begin_at(place: str, client: Frames, topic: str, moment_us: int) -> Any:
    topic_id = client.call("topic", name=topic)["id"]
    return {
        "latest": "latest",
        "earliest": "earliest",
        "offset": {"offset": 2},
        "beyond": {"offset": 1 << 40},
        "time": {"time_us": moment_us},
        "long ago": {"time_us": 0},
        "to come": {"time_us": 1 << 62},
        "positions": {"positions": [[topic_id, 0, 1]]},
        "not listed": {"positions": [[topic_id + 1000, 0, 1]]},
    }[place]


BEGINS: Final = {
    "latest": 4,
    "earliest": 0,
    "offset": 2,
    "beyond": 4,
    "time": 3,
    "long ago": 0,
    "to come": 4,
    "positions": 1,
    "not listed": 0,
}


@pytest.mark.parametrize("mode", [None, "shared", "partitioned"])
@pytest.mark.parametrize("place", list(BEGINS))
def test_where_a_reader_begins(client: Frames, topic: str, place: str, mode: str | None) -> None:
    for number in range(3):
        client.publish(topic, b"%d" % number)
    moment_us = time.time_ns() // 1000
    client.publish(topic, b"3")
    start = begin_at(place, client, topic, moment_us)
    group: dict[str, Any] = {} if mode is None else {"group": f"group-{topic}", "mode": mode}
    opened = client.open(1, topic, start=start, **group)
    if mode is None:
        assert opened["positions"] == [[client.call("topic", name=topic)["id"], 0, BEGINS[place]]]
    else:
        assert opened["positions"] == []
    client.publish(topic, b"4")
    expected = [b"%d" % number for number in range(BEGINS[place], 5)]
    assert [message.value for message in client.delivered(len(expected))] == expected


def test_who_resumes_by_positions_misses_and_doubles_nothing(server: Serve, topic: str) -> None:
    with Frames(server) as client:
        client.topic_id(topic, partitions=3)
    stop = threading.Event()
    published: list[bytes] = []

    def publish() -> None:
        with Frames(server) as publisher:
            while not stop.is_set():
                values = [b"%d" % (len(published) + step) for step in range(7)]
                publisher.publish(topic, *values, keys=values)
                published.extend(values)
                time.sleep(0)

    thread = threading.Thread(target=publish)
    found: dict[tuple[int, int], list[Delivered]] = {}

    def receive(client: Frames, count: int) -> None:
        for message in client.delivered(count):
            found.setdefault((message.topic_id, message.partition), []).append(message)

    positions: dict[tuple[int, int], int] = {}
    try:
        for life in range(12):
            with Frames(server) as client:
                listed = [[*place, offset] for place, offset in positions.items()]
                opened = client.open(1, topic, credit=20, start={"positions": listed} if life else "earliest")
                if not life:
                    positions = {(topic_id, number): offset for topic_id, number, offset in opened["positions"]}
                    thread.start()
                assert {(row[0], row[1]): row[2] for row in opened["positions"]} == positions
                receive(client, 20)
                client.credit(1, 5)
                receive(client, 5)
            positions |= {place: received[-1].offset + 1 for place, received in found.items()}
    finally:
        stop.set()
        thread.join()
    with Frames(server) as client:
        listed = [[*place, offset] for place, offset in positions.items()]
        client.open(1, topic, credit=1 << 20, start={"positions": listed})
        receive(client, len(published) - sum(map(len, found.values())))
    values = [message.value for received in found.values() for message in received]
    assert sorted(values, key=int) == published
    for received in found.values():
        assert [message.offset for message in received] == list(range(len(received)))


def test_after_end_no_more_come(client: Frames, other: Frames, topic: str) -> None:
    client.open(1, topic)
    client.open(2, topic)
    client.end(1)
    other.publish(topic, b"a")
    client.delivered(1, subscription=2)
    client.sync()
    assert client.kept(Type.MESSAGES) == []
    client.end(1)
    client.end(77)


@pytest.mark.parametrize("group", [None, "hasty"])
def test_an_end_right_behind_its_open_ends_it(client: Frames, other: Frames, topic: str, group: str | None) -> None:
    options = {"subscription": 1, "pattern": topic, "group": group and f"{group}-{topic}"}
    client.send(binary.json_frame(Type.OPEN, 50, options) + binary.end_frame(51, 1))
    client.answer(50)
    client.answer(51)
    other.publish(topic, b"a")
    client.call("topics")
    assert client.kept(Type.MESSAGES) == []
    assert sum(len(told["members"]) for told in other.call("groups")["groups"] if told["name"] == options["group"]) == 0


def test_a_number_is_of_one_subscription(client: Frames, topic: str) -> None:
    client.open(1, topic)
    assert client.open_refused(1, topic)["code"] == "GROUP_CONFLICT"


def test_a_number_is_of_one_subscription_also_when_both_are_asked_for_at_once(
    client: Frames, other: Frames, topic: str
) -> None:
    names = [f"{topic}-a", f"{topic}-b"]
    asked = [
        other.request(Type.OPEN, {"subscription": 1, "pattern": topic, "group": name, "start": "earliest"})
        for name in names
    ]
    assert sorted(other.answer(number).type for number in asked) == [Type.RESULT, Type.ERROR]
    other.close()
    until = time.monotonic() + 20
    while any(told["members"] for told in client.call("groups")["groups"] if told["name"] in names):
        assert time.monotonic() < until, "a member stays in its group though its connection is gone"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"subscription": "1"}, "subscription"),
        ({"subscription": -1}, "subscription"),
        ({"subscription": None}, "subscription"),
        ({"credit": -1}, "credit"),
        ({"credit": 1.5}, "credit"),
        ({"credit": True}, "credit"),
        ({"pattern": 5}, "pattern"),
        ({"pattern": None}, "pattern"),
        ({"group": 5}, "group"),
        ({"group": "g", "mode": "both"}, "mode"),
        ({"group": "g", "mode": ["shared"]}, "mode"),
        ({"start": "now"}, "start"),
        ({"start": {"offset": -1}}, "start"),
        ({"start": {"offset": "1"}}, "start"),
        ({"start": {}}, "start"),
        ({"start": 5}, "start"),
        ({"start": {"positions": 5}}, "start"),
        ({"start": {"positions": [[1, 2]]}}, "start"),
        ({"start": {"positions": [[1, 2, -3]]}}, "start"),
        ({"start": {"positions": [["a", 2, 3]]}}, "start"),
        ({"start": {"positions": [None]}}, "start"),
    ],
)
def test_an_open_with_a_bad_field_is_refused_by_its_name(client: Frames, fields: dict[str, Any], named: str) -> None:
    error = client.error(Type.OPEN, {"subscription": 1, "pattern": "orders", "credit": 5} | fields)
    assert error["code"] == "BAD_REQUEST"
    assert error["text"].startswith(f"{named} is ")


@pytest.mark.parametrize("pattern", ["", "a..b", "a b", "a.>.b", "$delayed", "$>", "x" * 1025])
@pytest.mark.parametrize("group", [None, "of-a-bad-pattern"])
def test_a_pattern_that_cannot_be_read_is_refused(client: Frames, pattern: str, group: str | None) -> None:
    assert client.open_refused(1, pattern, group=group)["code"] == "BAD_SUBJECT"
    assert client.refused("group", name="of-a-bad-pattern")["code"] == "UNKNOWN_GROUP"


def test_a_name_that_cannot_be_encoded_is_refused_and_not_taken_for_another(client: Frames) -> None:
    """JSON can say half of a surrogate pair."""
    assert client.refused("create_topic", name="\ud800")["code"] == "BAD_REQUEST"
    assert client.open_refused(1, "\ud800")["code"] == "BAD_REQUEST"
    assert client.refused("create_group", name="\ud800", pattern="a")["code"] == "BAD_REQUEST"


def test_a_pattern_reads_many_topics_and_those_that_are_made_later(client: Frames, other: Frames, topic: str) -> None:
    other.publish(f"{topic}-old.x", b"0")
    opened = client.open(1, "*.x", start="latest")
    assert [offset for _, _, offset in opened["positions"]].count(1) >= 1
    other.publish(f"{topic}-old.x", b"1")
    other.publish(f"{topic}-new.x", b"2")
    other.publish(f"{topic}-new.y", b"3")
    other.publish(f"{topic}-new.x", b"4")
    found = client.delivered(3)
    assert sorted((message.subject, message.value) for message in found) == [
        (f"{topic}-new.x", b"2"),
        (f"{topic}-new.x", b"4"),
        (f"{topic}-old.x", b"1"),
    ]
    assert {message.topic for message in found} == {f"{topic}-old", f"{topic}-new"}


def test_who_does_not_read_its_messages_does_not_make_the_server_grow(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, topic_durability="flush", storage_tail_bytes_max=MIB) as server,
        Frames(server) as client,
        Frames(server, receive_bytes=4096) as lazy,
    ):
        lazy.open(1, "orders", credit=1 << 20)
        client.publish("orders", b"first")
        before = server.rss()
        for _ in range(100):
            client.publish("orders", bytes(900_000))
        assert server.rss() - before < 60 * MIB
        assert [len(message.value) for message in lazy.delivered(101)] == [5] + [900_000] * 100


# More than the answers that may wait, and what the system keeps for a connection besides.
FLOODS: Final = {
    "heartbeats": lambda: b"".join(binary.frame(Type.HEARTBEAT, number) for number in range(1, 700_000)),
    "calls": lambda: b"".join(binary.json_frame(Type.CALL, number, {"call": "topics"}) for number in range(3000)),
    "ends": lambda: binary.end_frame(1, 1) * 600_000,
}


@pytest.mark.parametrize("kind", list(FLOODS))
def test_who_does_not_read_its_answers_is_not_read_from(tmp_path: Path, kind: str) -> None:
    with Serve(tmp_path) as server, Frames(server, receive_bytes=4096) as lazy, Frames(server) as client:
        for number in range(20):
            client.topic_id(f"topic-{number}")
        before = server.rss()
        lazy.flood(FLOODS[kind]())
        until = time.monotonic() + 20
        while not counted(server, "unread"):
            assert time.monotonic() < until, "it is read from, whatever it does not read"
        assert server.rss() - before < 60 * MIB
        client.sync()
