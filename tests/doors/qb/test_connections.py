"""The Python broker's protocol at the prefixed door: how clients write, errors, and the end of a connection."""

from __future__ import annotations

import itertools
import json
import struct
import urllib.request
from pathlib import Path
from typing import Final

import pytest

from tests.support.frames import Frames
from tests.support.lengths import (
    ACK,
    CREATE_SUBSCRIPTION,
    CREATE_TOPIC,
    DATA,
    DELETE_SUBSCRIPTION,
    HEARTBEAT,
    MADE_MS,
    PUBLISH,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Cursus,
    Qb,
)
from tests.support.server import Flux, Serve, in_pieces

STYLES: Final = list(itertools.product([True, False], [False, True]))

# ---- how clients write


@pytest.mark.parametrize(("counts_itself", "lengths_first"), STYLES)
def test_a_client_is_answered_as_it_writes(server: Serve, topic: str, counts_itself: bool, lengths_first: bool) -> None:
    with Qb(server, counts_itself=counts_itself, lengths_first=lengths_first) as client:
        client.create(topic, f"{topic}-s")
        client.subscribe(f"{topic}-s")
        assert client.publish(topic, bytes(range(256))) == 0
        assert client.publish(topic, b"") == 1
        assert client.bodies(2) == [bytes(range(256)), b""]
        assert client.heartbeat().kind == HEARTBEAT


def test_a_request_may_come_byte_by_byte(client: Qb, topic: str) -> None:
    for piece in in_pieces(client.frame(CREATE_TOPIC, 9, topic=topic), 1):
        client.send(piece)
    assert client.answer(9)["status"] == "success"


# ---- other doors


def test_properties_are_headers_at_the_other_doors(server: Serve, client: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.subscribe(f"{topic}-s")
    with Flux(server) as flux:
        flux.subscribe(topic, "1")
        client.publish(topic, b"from qb", colour="red")
        got = flux.message()
        assert (got.payload, got.header("colour")) == (b"from qb", "red")
        assert got.header("Penstock-Timestamp") == f"{MADE_MS / 1000:.6f}"
        flux.publish_with_headers(topic, b"from flux", Shape="round", **{"Penstock-Key": "k"})
    first, second = client.data(2)
    assert first.properties["colour"] == "red"
    assert (second.body, second.properties["Shape"], second.properties["Penstock-Key"]) == (b"from flux", "round", "k")


def test_a_key_is_a_property_of_that_name(server: Serve, client: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.publish(topic, b"x", **{"Penstock-Key": "customer"})
    with Frames(server) as frames:
        frames.open(1, topic, start="earliest")
        [got] = frames.delivered(1)
        assert got.key == b"customer"
        frames.publish(topic, b"y", keys=[b"other"])
    client.subscribe(f"{topic}-s")
    assert [got.properties["Penstock-Key"] for got in client.data(2)] == ["customer", "other"]


def test_an_id_makes_a_message_stored_once(client: Qb, topic: str) -> None:
    client.create(topic)
    offsets = [client.publish(topic, b"x", **{"Msg-ID": identity}) for identity in ("1", "1", "2")]
    assert offsets == [0, 0, 1]


def test_a_subject_below_a_topic_is_stored_in_it(server: Serve, client: Qb, topic: str) -> None:
    client.create(topic)
    client.done(CREATE_SUBSCRIPTION, subscription_id=f"{topic}-s", topic=f"{topic}.eu")
    client.subscribe(f"{topic}-s")
    client.publish(topic, b"above")
    client.publish(f"{topic}.eu", b"below")
    assert [(got.properties["topic"], got.body) for got in client.data(1)] == [(f"{topic}.eu", b"below")]


# ---- what is wrong


@pytest.mark.parametrize(
    ("kind", "properties", "reason"),
    [
        (CREATE_TOPIC, {}, "Missing 'topic' property"),
        (CREATE_TOPIC, {"topic": "a b"}, "a topic cannot be named 'a b'"),
        (
            CREATE_TOPIC,
            {"topic": "x", "partitions": "many"},
            "Invalid 'partitions' property: it must be a whole number",
        ),
        (CREATE_TOPIC, {"topic": "x", "partitions": "0"}, "partitions is 0: it must be an integer, 1 to 256"),
        (PUBLISH, {"client_id": "c"}, "Missing 'topic' property"),
        (PUBLISH, {"topic": "there"}, "Missing 'publisher_id' property"),
        (PUBLISH, {"topic": "nowhere", "client_id": "c"}, "Topic 'nowhere' does not exist"),
        (PUBLISH, {"topic": "a..b", "client_id": "c"}, "'a..b' cannot be the name of a topic"),
        (
            PUBLISH,
            {"topic": "there", "client_id": "c", "partition": "7"},
            "the topic there has no partition 7, it has 1",
        ),
        (PUBLISH, {"topic": "there", "client_id": "c", "a:b": "c"}, "Invalid property 'a:b'"),
        (PUBLISH, {"topic": "there", "client_id": "c", "a": "b\r\nc"}, "Invalid property 'a'"),
        (PUBLISH, {"topic": "there", "client_id": "c", "Delay": "soon"}, "Delay: 'soon' is not a duration"),
        (CREATE_SUBSCRIPTION, {"topic": "there"}, "Missing 'subscription_id' property"),
        (CREATE_SUBSCRIPTION, {"subscription_id": "s"}, "Missing 'topic' property"),
        (CREATE_SUBSCRIPTION, {"subscription_id": "s", "topic": "nowhere"}, "Topic 'nowhere' does not exist"),
        (
            CREATE_SUBSCRIPTION,
            {"subscription_id": "s", "topic": "there", "start_offset": "-1"},
            "Invalid 'start_offset'",
        ),
        (DELETE_SUBSCRIPTION, {}, "Missing 'subscription_id' property"),
        (SUBSCRIBE, {"subscriber_id": "a"}, "Missing 'subscription_id' property"),
        (SUBSCRIBE, {"subscription_id": "s"}, "Missing 'subscriber_id' property"),
        (SUBSCRIBE, {"subscription_id": "nowhere", "subscriber_id": "a"}, "Subscription 'nowhere' does not exist"),
        (UNSUBSCRIBE, {}, "Missing 'subscriber_id' property"),
        (DATA, {}, "Unknown message type"),
        (42, {"topic": "x"}, "Unknown message type"),
        (0, {}, "Unknown message type"),
    ],
)
def test_what_cannot_be_done_is_refused(client: Qb, kind: int, properties: dict[str, str], reason: str) -> None:
    client.ask(CREATE_TOPIC, topic="there")
    assert client.refused(kind, **properties).startswith(reason)
    assert client.heartbeat().kind == HEARTBEAT


def test_an_unknown_type_is_refused_though_it_comes_first(server: Serve) -> None:
    with Qb(server) as client:
        assert client.refused(99, topic="x") == "Unknown message type"


def test_a_subscriber_is_there_once(client: Qb, other: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.subscribe(f"{topic}-s")
    assert (
        other.refused(SUBSCRIBE, subscription_id=f"{topic}-s", subscriber_id="ann") == "Subscriber 'ann' already exists"
    )
    assert "already" in client.refused(SUBSCRIBE, subscription_id=f"{topic}-s", subscriber_id="bob")


def test_a_group_with_partitions_of_their_own_is_no_subscription(server: Serve, client: Qb, topic: str) -> None:
    client.create(topic)
    with Frames(server) as frames:
        frames.call("create_group", name=f"{topic}-g", pattern=topic, mode="partitioned")
    assert "partitions of their own" in client.refused(SUBSCRIBE, subscription_id=f"{topic}-g", subscriber_id="ann")


@pytest.mark.parametrize("block", [b"no equals sign\0", b"=no name\0", b"a=b\0\0", b"\xff\xfe=x\0"])
def test_properties_that_are_none_are_refused(client: Qb, block: bytes) -> None:
    head = struct.pack(">IIQQI", 32 + len(block), CREATE_TOPIC, 4, MADE_MS, len(block))
    client.send(head + block + struct.pack(">I", 0))
    answer = client.answer(4)
    assert (answer["status"], answer["error"][:18]) == ("error", "Invalid properties")
    assert client.heartbeat().kind == HEARTBEAT


def test_a_payload_above_the_limit_is_refused_by_itself(client: Qb, topic: str) -> None:
    client.create(topic)
    large = client.begin(PUBLISH, bytes((1 << 20) + 1), topic=topic, client_id="c")
    small = client.begin(PUBLISH, b"small", topic=topic, client_id="c")
    assert "a message of 1048577 bytes (value, key and headers), 1048576 are allowed" in client.answer(large)["error"]
    assert client.answer(small)["offset"] == "0"


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (struct.pack(">IIQQII", 0x01000001, PUBLISH, 1, 0, 0, 0), "a frame of 16777217 bytes, 16777216 are allowed"),
        (struct.pack(">IIQQII", 33, PUBLISH, 1, 0, 5, 5), "lengths do not agree"),
        (struct.pack(">IIQQII", 32, PUBLISH, 1, 0, 0, 9), "lengths do not agree"),
        (struct.pack(">IIQQI", 28, PUBLISH, 1, 0, 0x7FFFFFFF), "lengths do not agree"),
        (struct.pack(">IIQQ", 24, PUBLISH, 1, 0), "a message of 24 bytes"),
    ],
)
def test_a_frame_that_cannot_be_one_ends_the_connection(server: Serve, frame: bytes, reason: str) -> None:
    with Qb(server) as client:
        client.heartbeat()
        client.send(frame)
        got = client.next()
        assert (got.kind, got.properties["status"]) == (ACK, "error")
        assert reason in got.properties["error"]
        assert client.rest() == ""


def test_what_came_before_a_wrong_frame_is_done(server: Serve, client: Qb, topic: str) -> None:
    client.create(topic)
    with Qb(server) as bad:
        bad.send(bad.frame(PUBLISH, 1, b"good", topic=topic, client_id="c") + struct.pack(">I", 0xFFFFFFFF))
        assert bad.answer(1)["status"] == "success"
        assert "a frame of 4294967295 bytes" in bad.next().properties["error"]
        assert bad.rest() == ""


def test_a_frame_that_stops_half_way_costs_nobody_anything(server: Serve, client: Qb, topic: str) -> None:
    with Qb(server) as half:
        half.send(half.frame(CREATE_TOPIC, 1, topic=f"{topic}-half")[:-3])
    client.create(topic)
    assert client.refused(PUBLISH, topic=f"{topic}-half", client_id="c").endswith("does not exist")


# ---- its life


def test_a_silent_subscriber_is_dropped_and_its_messages_go_to_the_others(tmp_path: Path) -> None:
    # Only the drop hands its messages over: the deadline for an acknowledgement, after which any subscriber, also the
    # silent one, may be sent a message again, is far away.
    server = Serve(tmp_path, server_heartbeat_s=2, topic_ack_deadline_ms=600_000)
    with server, Qb(server) as silent, Qb(server) as client:
        silent.create("events", "s")
        silent.subscribe("s", "silent", auto_ack="false")
        client.subscribe("s", "alive", auto_ack="false")
        client.publish("events", b"0")
        client.publish("events", b"1")
        first = silent.data(1)
        # The server asks whether it is there, it says nothing, and is gone; who answers is not.
        while (got := client.next()).kind != DATA or got.body != first[0].body:
            if got.kind == HEARTBEAT:
                client.heartbeat(1)
            elif got.kind == DATA:
                client.ack(got)
        assert silent.next().kind == HEARTBEAT
        assert silent.rest() == ""
        assert client.heartbeat().kind == HEARTBEAT
        with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/varz") as answer:
            assert json.load(answer)["since_start"]["stale"] == 1


def test_a_client_that_must_say_who_it_is_says_so_in_a_heartbeat(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_user="ann", auth_password="secret", auth_token="t0k3n") as server:
        with Qb(server) as client:
            assert client.refused(CREATE_TOPIC, topic="events").startswith("Unauthorized")
            assert client.rest() == ""
        with Qb(server) as client:
            got = client.heartbeat(user="ann", password="wrong")
            assert (got.kind, got.properties["status"]) == (ACK, "error")
            assert client.rest() == ""
        for who in ({"user": "ann", "password": "secret"}, {"token": "t0k3n"}):
            with Qb(server) as client:
                assert client.heartbeat(**who).kind == HEARTBEAT
                assert client.done(CREATE_TOPIC, topic=f"events-{len(who)}")["partitions"] == "1"
        with Qb(server) as client:
            client.send(struct.pack(">II", 1 << 20, PUBLISH) + bytes(100))
            assert "65536 are allowed" in client.next().properties["error"]


def test_a_stop_answers_what_was_published(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        client = Qb(server)
        client.create("events")
        numbers = [client.begin(PUBLISH, b"%d" % number, topic="events", client_id="p") for number in range(100)]
        client.answer(numbers[0])
        assert server.stop().code == 0
        answered = 1
        try:
            for number in numbers[1:]:
                answered += client.answer(number)["status"] == "success"
        except AssertionError:
            pass  # what came too late has no answer
        client.close()
        assert len(server.dump("events")) >= answered


def test_deleting_a_subscription_leaves_its_subscribers_connected(client: Qb, other: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.subscribe(f"{topic}-s")
    other.subscribe(f"{topic}-s", "bob")
    client.done(DELETE_SUBSCRIPTION, subscription_id=f"{topic}-s")
    assert client.heartbeat().kind == other.heartbeat().kind == HEARTBEAT
    client.publish(topic, b"x")
    assert client.sync() == other.sync() == []


def test_the_greeting_port_has_no_prefixed_door(server: Serve) -> None:
    with Flux(server) as client:
        client.send(struct.pack(">IIQQII", 32, HEARTBEAT, 1, 0, 0, 0) + b"\r\n")
        assert client.rest().startswith("-ERR")


def test_both_protocols_and_all_doors_share_the_quiet_port(server: Serve, topic: str) -> None:
    with Qb(server) as qb, Cursus(server) as cursus, Flux(server, door="quiet") as flux:
        qb.create(topic, f"{topic}-s")
        qb.subscribe(f"{topic}-s")
        flux.subscribe(topic, "1")
        cursus.publish(topic, b"from cursus")
        assert qb.bodies(1) == [b"from cursus"]
        assert flux.message().payload == b"from cursus"
