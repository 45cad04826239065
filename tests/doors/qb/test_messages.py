"""The Python broker's protocol at the prefixed door: publishing, order and acknowledgements."""

from __future__ import annotations

from pathlib import Path

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
    Qb,
)
from tests.support.server import Flux, Serve

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
