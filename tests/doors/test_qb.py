"""The Python broker's protocol at the prefixed door of a real server, message by message."""

from __future__ import annotations

import itertools
import json
import struct
import urllib.request
from collections.abc import Iterator
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

_names = itertools.count()
STYLES: Final = list(itertools.product([True, False], [False, True]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture
def client(server: Serve) -> Iterator[Qb]:
    with Qb(server) as client:
        yield client


@pytest.fixture
def other(server: Serve) -> Iterator[Qb]:
    with Qb(server) as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"topic-{next(_names)}"


# ---- one by one (WI-15 to WI-26)


def test_a_topic_is_created(client: Qb, topic: str) -> None:
    assert client.done(CREATE_TOPIC, topic=topic) == {"topic": topic, "partitions": "1"}
    assert client.refused(CREATE_TOPIC, topic=topic) == f"Topic '{topic}' already exists"


def test_a_topic_has_the_partitions_and_the_retention_that_are_asked_for(client: Qb, server: Serve, topic: str) -> None:
    assert client.done(CREATE_TOPIC, topic=topic, partitions=3, retention_hours=24)["partitions"] == "3"
    with Frames(server) as frames:
        told = frames.call("topic", name=topic)
    assert told["partitions"] == 3
    assert told["policy"]["retain_ms"] == 24 * 3600 * 1000


def test_a_published_message_is_acknowledged_with_its_offset(client: Qb, topic: str) -> None:
    client.create(topic)
    for offset in range(3):
        answer = client.done(PUBLISH, b"x", topic=topic, publisher_id="p")
        assert answer == {"topic": topic, "partition": "0", "offset": str(offset), "delivered_to": "0"}


@pytest.mark.parametrize("identity", ["client_id", "publisher_id"])
def test_a_publisher_says_who_it_is_by_either_name(client: Qb, topic: str, identity: str) -> None:
    client.create(topic)
    assert client.ask(PUBLISH, b"x", topic=topic, **{identity: "p"})["status"] == "success"


def test_a_subscription_is_created_once(client: Qb, topic: str) -> None:
    client.create(topic)
    made = client.done(CREATE_SUBSCRIPTION, subscription_id=f"{topic}-s", topic=topic, start_offset=2)
    assert made == {"subscription_id": f"{topic}-s", "topic": topic, "start_offset": "2"}
    again = client.refused(CREATE_SUBSCRIPTION, subscription_id=f"{topic}-s", topic=topic)
    assert again == f"Subscription '{topic}-s' already exists"


def test_a_subscription_is_deleted(client: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    assert client.done(DELETE_SUBSCRIPTION, subscription_id=f"{topic}-s") == {"subscription_id": f"{topic}-s"}
    assert client.refused(DELETE_SUBSCRIPTION, subscription_id=f"{topic}-s").endswith("does not exist")
    assert client.refused(SUBSCRIBE, subscription_id=f"{topic}-s", subscriber_id="ann").endswith("does not exist")


def test_who_joins_is_sent_what_is_published(client: Qb, other: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    joined = client.done(SUBSCRIBE, subscription_id=f"{topic}-s", subscriber_id="ann")
    assert joined == {
        "subscription_id": f"{topic}-s",
        "subscriber_id": "ann",
        "topic": topic,
        "ack_deadline_ms": "5000",
    }
    answer = other.done(PUBLISH, b"hello", topic=topic, client_id="bob", colour="red")
    assert answer["delivered_to"] == "1"
    [got] = client.data(1)
    assert (got.sequence, got.timestamp_ms, got.body) == (0, MADE_MS, b"hello")
    assert got.properties == {
        "topic": topic,
        "subscription_id": f"{topic}-s",
        "partition": "0",
        "colour": "red",
        "created_at": f"{MADE_MS / 1000:.3f}",
        "version": "1.0",
    }


def test_who_leaves_is_sent_no_more(client: Qb, other: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.subscribe(f"{topic}-s")
    left = client.done(UNSUBSCRIBE, subscription_id=f"{topic}-s", subscriber_id="ann")
    assert left == {"subscriber_id": "ann", "subscription_id": f"{topic}-s"}
    other.publish(topic, b"nobody is there")
    assert client.sync() == []
    client.subscribe(f"{topic}-s")
    assert client.bodies(1) == [b"nobody is there"]


def test_who_leaves_without_saying_what_leaves_all(client: Qb, other: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-a", f"{topic}-b")
    client.subscribe(f"{topic}-a")
    client.subscribe(f"{topic}-b")
    client.done(UNSUBSCRIBE, subscriber_id="ann")
    other.publish(topic, b"x")
    assert client.sync() == []


def test_a_heartbeat_is_answered(client: Qb) -> None:
    got = client.heartbeat(5)
    assert (got.kind, got.sequence, got.body) == (HEARTBEAT, 5, b"")


# ---- order and shares (GR-04 to GR-09, DE-07, TE-02, TE-03)


def test_messages_go_to_the_subscribers_in_turn(client: Qb, other: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.subscribe(f"{topic}-s", "ann")
    other.subscribe(f"{topic}-s", "bob")
    for number in range(6):
        client.publish(topic, b"%d" % number)
    assert client.bodies(3) == [b"0", b"2", b"4"]
    assert other.bodies(3) == [b"1", b"3", b"5"]


def test_a_late_subscriber_is_caught_up(client: Qb, topic: str) -> None:
    client.create(topic)
    for number in range(5):
        client.publish(topic, b"%d" % number)
    client.done(CREATE_SUBSCRIPTION, subscription_id=f"{topic}-all", topic=topic)
    client.done(CREATE_SUBSCRIPTION, subscription_id=f"{topic}-late", topic=topic, start_offset=3)
    client.subscribe(f"{topic}-late")
    assert [(got.sequence, got.body) for got in client.data(2)] == [(3, b"3"), (4, b"4")]
    client.subscribe(f"{topic}-all", "bob")
    assert client.bodies(5) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_client_without_acknowledgements_has_time_for_the_answer_before_messages_come(client: Qb, topic: str) -> None:
    # Its own client takes DATA in one thread, and says what is to be done with it in another, when that has the answer.
    client.create(topic)
    for number in range(5):
        client.publish(topic, b"%d" % number)
    client.done(CREATE_SUBSCRIPTION, subscription_id=topic, topic=topic)
    client.begin(SUBSCRIBE, subscription_id=topic, subscriber_id="ann")
    assert client.next().kind == ACK
    for _ in range(10):
        client.begin(HEARTBEAT)
        assert client.next().kind == HEARTBEAT
    assert client.bodies(5) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_subscription_is_remembered_when_its_subscribers_are_gone(server: Serve, client: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    with Qb(server) as first:
        first.subscribe(f"{topic}-s")
        client.publish(topic, b"seen")
        assert first.bodies(1) == [b"seen"]
        first.sync()
    client.publish(topic, b"missed")
    client.subscribe(f"{topic}-s", "later")
    assert client.bodies(1) == [b"missed"]


def test_subscriptions_of_one_topic_do_not_know_of_each_other(client: Qb, other: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-a", f"{topic}-b")
    client.subscribe(f"{topic}-a")
    other.subscribe(f"{topic}-b")
    client.publish(topic, b"x")
    assert client.bodies(1) == other.bodies(1) == [b"x"]


def test_a_subscriber_of_one_topic_gets_nothing_of_another(client: Qb, other: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.create(f"{topic}-other")
    other.subscribe(f"{topic}-s")
    client.publish(f"{topic}-other", b"no")
    client.publish(topic, b"yes")
    assert other.bodies(1) == [b"yes"]
    assert other.sync() == []


def test_the_publisher_is_told_before_the_subscribers(client: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.subscribe(f"{topic}-s")
    client.begin(PUBLISH, b"x", topic=topic, client_id="p")
    assert [client.next().kind, client.next().kind] == [ACK, DATA]


def test_many_are_published_without_waiting_for_answers(client: Qb, topic: str) -> None:
    client.create(topic)
    numbers = [client.begin(PUBLISH, b"%d" % number, topic=topic, client_id="p") for number in range(500)]
    assert [int(client.answer(number)["offset"]) for number in numbers] == list(range(500))


def test_a_message_goes_to_the_partition_that_it_chose(client: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s", partitions=3)
    numbers = [
        client.begin(PUBLISH, b"%d" % partition, topic=topic, client_id="p", partition=partition)
        for partition in (2, 0, 2)
    ]
    answers = [client.answer(number) for number in numbers]
    assert [(answer["partition"], answer["offset"]) for answer in answers] == [("2", "0"), ("0", "0"), ("2", "1")]
    client.subscribe(f"{topic}-s")
    assert {(got.properties["partition"], got.sequence, got.body) for got in client.data(3)} == {
        ("2", 0, b"2"),
        ("0", 0, b"0"),
        ("2", 1, b"2"),
    }


def test_what_is_published_is_there_after_a_kill(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Qb(server) as client:
            client.create("events", "s")
            for number in range(10):
                client.publish("events", b"%d" % number)
        server.kill()
        server.restart()
        with Qb(server) as client:
            client.subscribe("s")
            assert client.bodies(10) == [b"%d" % number for number in range(10)]


# ---- acknowledgements


def test_without_acknowledgements_a_message_is_done_when_it_is_sent(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_ack_deadline_ms=50) as server, Qb(server) as client, Qb(server) as other:
        client.create("events", "s")
        client.subscribe("s")
        client.publish("events", b"once")
        assert client.bodies(1) == [b"once"]
        client.sync()
        with Frames(server) as frames:
            told = frames.call("group", name="s")
        assert (told["lag"], told["pending"], told["redelivered"]) == (0, 0, 0)
        client.done(UNSUBSCRIBE, subscriber_id="ann")
        other.subscribe("s", "bob")
        assert other.sync() == []


def test_who_acknowledges_gets_again_what_it_does_not(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_ack_deadline_ms=1000, topic_deliveries_max=3) as server, Qb(server) as client:
        client.create("events", "s")
        client.subscribe("s", auto_ack="false")
        client.publish("events", b"done")
        client.publish("events", b"never")
        done, first = client.data(2)
        client.ack(done)
        again = client.data(2)
        assert [got.body for got in (first, *again)] == [b"never"] * 3
        assert [got.properties.get("Delivery-Count") for got in (first, *again)] == [None, "2", "3"]
        with Frames(server) as frames:
            frames.open(1, "DLQ.>", start="earliest")
            [letter] = frames.delivered(1)
        assert (letter.subject, letter.value) == ("DLQ.events", b"never")


def test_an_acknowledgement_that_says_only_its_offset_counts(server: Serve, client: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.subscribe(f"{topic}-s", auto_ack="false")
    client.publish(topic, b"x")
    [got] = client.data(1)
    client.send(client.frame(ACK, got.sequence))
    client.sync()
    with Frames(server) as frames:
        assert frames.call("group", name=f"{topic}-s")["lag"] == 0


def test_who_needs_more_time_says_so(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_ack_deadline_ms=2000) as server, Qb(server) as client:
        client.create("events", "s")
        client.subscribe("s", auto_ack="false")
        client.publish("events", b"slow")
        client.publish("events", b"forgotten")
        slow, _ = client.data(2)
        names = ("subscription_id", "topic", "partition")
        more = client.frame(ACK, slow.sequence, status="pending", **{name: slow.properties[name] for name in names})
        again: list[bytes] = []
        while not again:
            client.send(more)
            again = [got.body for got in client.sync() if got.kind == DATA]
        assert again == [b"forgotten"]


def test_what_a_subscriber_gives_back_was_not_delivered(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_deliveries_max=2) as server, Qb(server) as client:
        client.create("events", "s")
        client.publish("events", b"seen")
        client.publish("events", b"unseen")
        for _ in range(5):
            client.subscribe("s", auto_ack="false")
            assert client.bodies(2) == [b"seen", b"unseen"]
            client.done(UNSUBSCRIBE, subscriber_id="ann")
        client.subscribe("s", auto_ack="false")
        assert [got.properties.get("Delivery-Count") for got in client.data(2)] == ["1", "1"]


def test_a_header_of_another_door_does_not_pass_for_the_protocols_own(server: Serve, client: Qb, topic: str) -> None:
    client.create(topic, f"{topic}-s")
    client.subscribe(f"{topic}-s")
    with Flux(server) as flux:
        block = b"topic: lie\r\npartition: lie\r\nsubscription_id: lie\r\n\r\n"
        flux.send(b"HPUB %b %d %d\r\n%bx\r\n" % (topic.encode(), len(block), len(block) + 1, block))
    [got] = client.data(1)
    assert (got.properties["topic"], got.properties["partition"]) == (topic, "0")
    assert got.properties["subscription_id"] == f"{topic}-s"


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
