"""CALL at the binary door of a real server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.wire.binary import Type, Verb
from tests.support.binary_door import codes, http
from tests.support.frames import Frames, batch
from tests.support.server import Serve


def test_a_topic_is_made_described_altered_and_deleted(client: Frames, topic: str) -> None:
    made = client.call("create_topic", name=topic, partitions=2, policy={"retain_ms": 5000, "durability": "flush"})
    assert (made["name"], made["partitions"], made["refused"]) == (topic, 2, None)
    assert (made["policy"]["retain_ms"], made["policy"]["durability"]) == (5000, "flush")
    client.publish(topic, b"a", keys=[b"k"])
    altered = client.call("alter_topic", name=topic, partitions=3, policy={"retain_ms": None})
    assert (altered["id"], altered["partitions"], altered["policy"]["retain_ms"]) == (made["id"], 3, None)
    assert altered["policy"]["durability"] == "flush"
    told = client.call("topic", name=topic)
    assert told.pop("now_us") > 0
    assert told == next(each for each in client.call("topics")["topics"] if each["name"] == topic)
    assert [position["partition"] for position in told["positions"]] == [0, 1, 2]
    assert sum(position["committed"] for position in told["positions"]) == 1
    assert all(position["start"] <= position["committed"] <= position["end"] for position in told["positions"])
    assert all(position["bytes"] > 0 for position in told["positions"])
    assert client.refused("create_topic", name=topic)["code"] == "TOPIC_CONFLICT"
    assert client.refused("alter_topic", name=topic, partitions=1)["code"] == "BAD_REQUEST"
    assert client.call("delete_topic", name=topic) == {}
    for call in ("topic", "alter_topic", "delete_topic"):
        assert client.refused(call, name=topic)["code"] == "UNKNOWN_TOPIC"


@pytest.mark.parametrize("partitions", [0, 257, 1 << 40])
def test_a_topic_with_as_many_partitions_as_cannot_be_is_refused(tmp_path: Path, partitions: int) -> None:
    with Serve(tmp_path) as server, Frames(server) as client:
        assert client.refused("create_topic", name="orders", partitions=partitions)["code"] == "BAD_REQUEST"
        assert client.refused("topic", name="orders")["code"] == "UNKNOWN_TOPIC"
        client.topic_id("orders")
        assert client.refused("alter_topic", name="orders", partitions=partitions)["code"] == "BAD_REQUEST"


def test_resolve_tells_the_topic_of_a_subject_and_makes_it(client: Frames, topic: str) -> None:
    told = client.call("resolve", subject=f"{topic}.a.b")
    assert told == client.call("resolve", subject=topic)
    assert (told["topic"], told["partitions"]) == (topic, 1)
    assert client.call("topic", name=topic)["id"] == told["id"]


def test_resolve_makes_no_topic_where_topics_do_not_make_themselves(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_auto_create="false") as server, Frames(server) as client:
        assert client.refused("resolve", subject="orders")["code"] == "UNKNOWN_TOPIC"
        assert codes(client.publish("orders", b"a")) == ["UNKNOWN_TOPIC"]
        client.topic_id("orders")
        assert codes(client.publish("orders.x", b"a")) == [None]


def test_offsets_are_found_by_time_and_by_size(client: Frames, topic: str) -> None:
    topic_id = client.topic_id(topic)
    for number in range(10):
        client.append(topic_id, batch(b"%d" % number + bytes(5000)))
    times = [each.append_time for each in client.fetch(topic_id).batches]
    for number, moment in enumerate(times):
        found = client.call("offset_at", name=topic, partition=0, time_us=moment)["offset"]
        assert found == times.index(moment) <= number
    assert client.call("offset_at", name=topic, partition=0, time_us=times[-1] + 1) == {"offset": 10}
    assert client.call("offset_after", name=topic, partition=0, offset=0, bytes=12_000) == {"offset": 3}
    assert client.call("offset_after", name=topic, partition=0, offset=5, bytes=1 << 40) == {"offset": 10}
    assert client.refused("offset_after", name=topic, partition=0, offset=11, bytes=1)["code"] == "OFFSET_OUT_OF_RANGE"
    assert client.refused("offset_at", name=topic, partition=1, time_us=0)["code"] == "UNKNOWN_TOPIC"


def test_a_group_is_made_described_reset_and_deleted(client: Frames, topic: str) -> None:
    name = f"g-{topic}"
    client.publish(topic, *(b"%d" % number for number in range(10)))
    made = client.call("create_group", name=name, pattern=topic, mode="partitioned", start={"offset": 4})
    assert (made["name"], made["pattern"], made["mode"], made["lag"]) == (name, topic, "partitioned", 6)
    assert made == client.call("group", name=name)
    [listed] = [each for each in client.call("groups")["groups"] if each["name"] == name]
    assert made == {**listed, "hint": None}
    [position] = made["positions"]
    assert (position["topic"], position["partition"], position["committed"], position["end"]) == (topic, 0, 4, 10)
    assert client.refused("create_group", name=name, pattern=topic)["code"] == "GROUP_CONFLICT"
    reset = client.call("reset_group", name=name, start="earliest")
    assert (reset["lag"], reset["generation"] > made["generation"]) == (10, True)
    reset = client.call("reset_group", name=name, start={"offset": 7}, topic=topic, partition=0)
    assert reset["positions"][0]["committed"] == 7
    assert client.refused("reset_group", name=name, start="earliest", partition=1)["code"] == "UNKNOWN_TOPIC"
    assert client.refused("reset_group", name=name, start="earliest", topic="nothing")["code"] == "UNKNOWN_TOPIC"
    assert client.call("commit", group=name, topic=topic, partition=0, offset=9) == {}
    assert client.call("group", name=name)["positions"][0]["committed"] == 9
    refused = client.refused("commit", group=name, topic=topic, partition=0, offset=1 << 40)
    assert refused["code"] == "OFFSET_OUT_OF_RANGE"
    client.call("commit", group=name, topic=topic, partition=0, offset=10)
    assert client.call("group", name=name)["positions"][0]["committed"] == 10
    assert client.call("delete_group", name=name) == {}
    for call in ("group", "delete_group"):
        assert client.refused(call, name=name)["code"] == "UNKNOWN_GROUP"
    assert client.refused("reset_group", name=name, start="latest")["code"] == "UNKNOWN_GROUP"
    assert client.refused("commit", group=name, topic=topic, partition=0, offset=1)["code"] == "UNKNOWN_GROUP"


def test_what_was_set_by_hand_is_there_after_a_kill(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Frames(server) as client:
            client.publish("orders", *(b"%d" % number for number in range(10)))
            client.call("create_group", name="reset", pattern="orders", start="earliest")
            client.call("create_group", name="committed", pattern="orders", start="earliest")
            client.call("create_group", name="gone", pattern="orders")
            client.call("reset_group", name="reset", start={"offset": 3})
            client.call("commit", group="committed", topic="orders", partition=0, offset=6)
            client.call("delete_group", name="gone")
            server.kill()
        server.restart()
        with Frames(server) as client:
            told = {each["name"]: each["positions"][0]["committed"] for each in client.call("groups")["groups"]}
            assert told == {"reset": 3, "committed": 6}


def test_a_member_whose_group_is_reset_reads_from_there(client: Frames, topic: str) -> None:
    client.publish(topic, b"a", b"b")
    client.open(1, topic, group=f"g-{topic}", start="earliest")
    held = client.delivered(2)
    client.settle(Verb.ACK, held[0], 0, 1)
    client.call("reset_group", name=f"g-{topic}", start="earliest")
    assert [message.value for message in client.delivered(2)] == [b"a", b"b"]


def test_dead_letters_are_listed_and_redriven(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Frames(server) as client:
        assert client.call("dead_letters", pattern=">")["letters"] == []
        client.open(1, "orders", group="g")
        client.publish("orders", b"\xff\xfe", b"b", b"c", headers=[b"X: y\r\n", None, None])
        held = client.delivered(3)
        client.settle(Verb.REJECT, held[0], 0, 1, 2)
        until = time.monotonic() + 20
        while len(letters := client.call("dead_letters", pattern="orders")["letters"]) < 3:
            assert time.monotonic() < until, "they do not become dead letters"
        letter = letters[0]
        assert (letter["value"], letter["subject"], letter["topic"]) == ("//4=", "orders", "orders")
        assert (letter["origin_partition"], letter["origin_offset"], letter["group"]) == (0, 0, "g")
        assert (letter["attempts"], letter["redriven"]) == (1, False)
        assert "X: y" in letter["headers"]
        assert len(client.call("dead_letters", pattern=">", limit=2)["letters"]) == 2
        assert client.call("dead_letters", pattern="bills")["letters"] == []
        assert client.call("redrive", pattern="orders", count=1)["redriven"] == 1
        assert [message.value for message in client.delivered(1)] == [b"\xff\xfe"]
        assert client.call("redrive", pattern=">")["redriven"] == 2
        assert [message.value for message in client.delivered(2)] == [b"b", b"c"]
        assert client.call("dead_letters", pattern=">")["letters"] == []
        assert len(client.call("dead_letters", pattern=">", redriven=True)["letters"]) == 3


def test_statistics_are_those_of_the_http_port(server: Serve, client: Frames) -> None:
    assert client.call("statistics").keys() == http(server, "varz").keys()


BAD_CALLS: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("resolve", {}, "subject"),
    ("resolve", {"subject": 5}, "subject"),
    ("topic", {}, "name"),
    ("topic", {"name": ["a"]}, "name"),
    ("create_topic", {"partitions": 1}, "name"),
    ("create_topic", {"name": "bad", "partitions": "2"}, "partitions"),
    ("create_topic", {"name": "bad", "partitions": True}, "partitions"),
    ("create_topic", {"name": "bad", "partitions": -1}, "partitions"),
    ("create_topic", {"name": "bad", "policy": [1]}, "policy"),
    ("create_topic", {"name": "bad", "policy": {"retain_ms": "1"}}, "retain_ms"),
    ("create_topic", {"name": "bad", "policy": {"retain_ms": 0}}, "retain_ms"),
    ("create_topic", {"name": "bad", "policy": {"durability": "none"}}, "durability"),
    ("create_topic", {"name": "bad", "policy": {"durability": ["fsync"]}}, "durability"),
    ("create_topic", {"name": "bad", "policy": {"colour": "red"}}, "colour"),
    ("create_topic", {"name": "bad", "policy": {"dead_letters": 1}}, "dead_letters"),
    ("alter_topic", {}, "name"),
    ("alter_topic", {"name": "there", "policy": {"deliveries_max": 0}}, "deliveries_max"),
    ("alter_topic", {"name": "there", "partitions": 1.0}, "partitions"),
    ("delete_topic", {}, "name"),
    ("offset_at", {"name": "there", "time_us": 0}, "partition"),
    ("offset_at", {"name": "there", "partition": 0}, "time_us"),
    ("offset_after", {"name": "there", "partition": 0, "bytes": 0}, "offset"),
    ("offset_after", {"name": "there", "partition": 0, "offset": 0}, "bytes"),
    ("offset_after", {"name": "there", "partition": 0, "offset": 0, "bytes": 1 << 64}, "bytes"),
    ("group", {}, "name"),
    ("create_group", {"name": "bad"}, "pattern"),
    ("create_group", {"pattern": "bad"}, "name"),
    ("create_group", {"name": "bad", "pattern": "there", "mode": "x"}, "mode"),
    ("create_group", {"name": "bad", "pattern": "there", "start": "x"}, "start"),
    ("reset_group", {"start": "earliest"}, "name"),
    ("reset_group", {"name": "there", "start": {"offset": -1}}, "start"),
    ("reset_group", {"name": "there", "start": "earliest", "partition": "0"}, "partition"),
    ("delete_group", {"name": None}, "name"),
    ("commit", {"topic": "there", "partition": 0, "offset": 0}, "group"),
    ("commit", {"group": "there", "partition": 0, "offset": 0}, "topic"),
    ("commit", {"group": "there", "topic": "there", "offset": 0}, "partition"),
    ("commit", {"group": "there", "topic": "there", "partition": 0}, "offset"),
    ("dead_letters", {"pattern": 7}, "pattern"),
    ("dead_letters", {"pattern": ">", "limit": -1}, "limit"),
    ("redrive", {}, "pattern"),
    ("redrive", {"pattern": ">", "count": "all"}, "count"),
]


@pytest.mark.parametrize(("call", "fields", "named"), BAD_CALLS)
def test_a_call_with_a_bad_field_is_refused_by_its_name(
    client: Frames, call: str, fields: dict[str, Any], named: str
) -> None:
    if "there" not in [told["name"] for told in client.call("topics")["topics"]]:
        client.topic_id("there")
        client.call("create_group", name="there", pattern="there")
    error = client.refused(call, **fields)
    assert error["code"] == "BAD_REQUEST"
    assert named in error["text"]
    assert client.refused("topic", name="bad")["code"] == "UNKNOWN_TOPIC"
    assert client.refused("group", name="bad")["code"] == "UNKNOWN_GROUP"


@pytest.mark.parametrize("fields", [{}, {"call": None}, {"call": 5}, {"call": "reboot"}])
def test_a_call_that_there_is_not_is_refused(client: Frames, fields: dict[str, Any]) -> None:
    error = client.error(Type.CALL, fields)
    assert error["code"] == "BAD_REQUEST"
    if fields.get("call") == "reboot":
        assert "create_topic" in error["text"]


@pytest.mark.parametrize("name", ["", "a..b", "a b", "a.*", ">", "$a", "_a", "x" * 1025])
def test_a_topic_cannot_have_a_bad_or_reserved_name(client: Frames, name: str) -> None:
    assert client.refused("create_topic", name=name)["code"] == "BAD_SUBJECT"
    assert client.refused("resolve", subject=name)["code"] in ("BAD_SUBJECT", "BAD_REQUEST")
