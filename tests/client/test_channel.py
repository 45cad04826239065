"""`ChannelBroker`: publish and subscribe by topic on a channel, as PulsyFlux' users know it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import pytest

from penstock import Broker, ChannelBroker, Client
from penstock.client.channel import ChannelMessage, ChannelSubscriber
from penstock.errors import BadSubject, ClaimConflict, Closed, NoBroker, TimedOut
from tests.support.proxy import Proxy

EVENTS = "events"


@pytest.fixture(scope="module")
def host() -> Iterator[Broker]:
    with Broker(listen="127.0.0.1:0", settings={"topic.durability": "flush"}) as broker:
        yield broker


@pytest.fixture
def broker(host: Broker) -> Iterator[ChannelBroker]:
    assert host.address is not None
    with ChannelBroker(host.address, uuid4(), timeout=60) as broker:
        yield broker


def payloads(subscriber: ChannelSubscriber, count: int) -> list[bytes]:
    return [subscriber.get(timeout=30).payload for _ in range(count)]


# ---- publish and subscribe (TE-02, TE-03)


def test_a_subscriber_gets_what_is_published(broker: ChannelBroker) -> None:
    subscriber = broker.subscribe(EVENTS)
    broker.publish(EVENTS, b"hello")
    broker.publish(EVENTS, b"again", {"priority": "high"})
    assert subscriber.get(timeout=30) == ChannelMessage("events", b"hello", {})
    assert subscriber.get(timeout=30) == ChannelMessage("events", b"again", {"priority": "high"})


def test_every_subscriber_of_a_topic_gets_each_message(broker: ChannelBroker) -> None:
    subscribers = [broker.subscribe("orders") for _ in range(3)]
    broker.publish("orders", b"new")
    assert [payloads(each, 1) for each in subscribers] == [[b"new"]] * 3


def test_a_subscriber_gets_nothing_of_other_topics_and_channels(host: Broker, broker: ChannelBroker) -> None:
    orders, users = broker.subscribe("orders"), broker.subscribe("users")
    with ChannelBroker(host, uuid4()) as other:
        for topic in ("orders.eu", "order", "users"):
            other.publish(topic, b"other")
            broker.publish(topic, topic.encode())
        broker.publish("orders", b"last")
    assert payloads(orders, 1) == [b"last"]
    assert payloads(users, 1) == [b"users"]


def test_a_message_is_stored_for_other_clients(host: Broker, broker: ChannelBroker) -> None:
    broker.publish(EVENTS, b"x")
    with Client(host) as client:
        [message] = client.fetch(broker.channel)
    assert (message.subject, message.value) == (f"{broker.channel}.events", b"x")


def test_a_channel_is_a_uuid_or_a_name(host: Broker) -> None:
    with ChannelBroker(host, UUID(int=7)) as broker:
        assert broker.channel == "00000000-0000-0000-0000-000000000007"
    for name in ("", "a.b", "a b", "*", ">", "_inbox", "$SYS"):
        with pytest.raises(BadSubject, match="invalid channel"):
            ChannelBroker(host, name)


@pytest.mark.parametrize("topic", ["", "orders.*", "orders.>", "a b", "a..b"])
def test_a_topic_is_exact(broker: ChannelBroker, topic: str) -> None:
    with pytest.raises(BadSubject, match="invalid topic"):
        broker.subscribe(topic)
    with pytest.raises(BadSubject, match="invalid topic"):
        broker.publish(topic, b"")


# ---- waiting, unsubscribing, closing (AP-18, DE-16, TE-04)


def test_receiving_has_a_timeout(broker: ChannelBroker) -> None:
    for drops in (False, True):
        with pytest.raises(TimedOut, match=EVENTS):
            broker.subscribe(EVENTS, drop_when_full=drops).get(timeout=0.01)


@pytest.mark.parametrize("drops", [False, True])
def test_unsubscribing_ends_the_loops_of_all_subscribers_of_a_topic(broker: ChannelBroker, drops: bool) -> None:
    gone = [broker.subscribe(EVENTS, drop_when_full=drops) for _ in range(2)]
    stays = broker.subscribe("orders")
    with ThreadPoolExecutor() as threads:
        loops = [threads.submit(lambda each=each: list(each)) for each in gone]  # type: ignore[misc]
        broker.unsubscribe(EVENTS)
        assert [loop.result(30) for loop in loops] == [[], []]
    for subscriber in gone:
        with pytest.raises(Closed):
            subscriber.get(timeout=30)
    broker.unsubscribe(EVENTS)
    broker.publish("orders", b"x")
    assert payloads(stays, 1) == [b"x"]


def test_a_topic_may_be_subscribed_to_again(host: Broker, broker: ChannelBroker) -> None:
    broker.subscribe(EVENTS)
    broker.unsubscribe(EVENTS)
    broker.publish(EVENTS, b"missed")
    again = broker.subscribe(EVENTS)
    broker.publish(EVENTS, b"seen")
    assert payloads(again, 1) == [b"seen"]


def test_closing_ends_everything(host: Broker) -> None:
    broker = ChannelBroker(host, uuid4())
    subscriber = broker.subscribe(EVENTS)
    broker.close()
    assert list(subscriber) == []
    for call in (lambda: broker.publish(EVENTS, b""), lambda: broker.subscribe(EVENTS)):
        with pytest.raises(Closed):
            call()
    broker.close()


# ---- a subscriber that does not read (DE-15)


def test_a_burst_waits_for_a_slow_subscriber(broker: ChannelBroker) -> None:
    subscriber = broker.subscribe(EVENTS, buffer=10)
    for number in range(50):
        broker.publish(EVENTS, b"%d" % number)
    assert payloads(subscriber, 50) == [b"%d" % number for number in range(50)]
    assert subscriber.dropped == 0


def test_a_subscriber_may_drop_what_comes_when_it_is_full(broker: ChannelBroker) -> None:
    slow, quick = broker.subscribe(EVENTS, buffer=10, drop_when_full=True), broker.subscribe(EVENTS)
    for number in range(50):
        broker.publish(EVENTS, b"%d" % number)
    assert len(payloads(quick, 50)) == 50
    while slow.dropped < 40:
        pass
    assert payloads(slow, 10) == [b"%d" % number for number in range(10)]
    broker.publish(EVENTS, b"after")
    assert payloads(slow, 1) == [b"after"]


# ---- one broker for a channel (AP-20)


def test_a_subscriber_has_room_for_a_hundred_messages(broker: ChannelBroker) -> None:
    slow, quick = broker.subscribe(EVENTS, drop_when_full=True), broker.subscribe(EVENTS)
    for number in range(130):
        broker.publish(EVENTS, b"%d" % number)
    assert len(payloads(quick, 130)) == 130
    while slow.dropped < 30:
        pass
    assert payloads(slow, 100) == [b"%d" % number for number in range(100)]


def test_publishing_has_a_timeout(host: Broker) -> None:
    assert host.address is not None
    with Proxy(int(host.address.rpartition(":")[2])) as proxy, ChannelBroker(proxy.address, "mute") as broker:
        proxy.mute()
        with pytest.raises(TimedOut):
            broker.publish(EVENTS, b"x", timeout=0.1)
        proxy.calm()
        broker.publish(EVENTS, b"y", timeout=60)


def test_a_second_broker_of_a_channel_is_refused(host: Broker, broker: ChannelBroker) -> None:
    with pytest.raises(ClaimConflict, match=rf"channel {broker.channel} is in use .*broker of {broker.channel}"):
        ChannelBroker(host, broker.channel)
    broker.close()
    ChannelBroker(host, broker.channel).close()


def test_a_broker_has_its_channel_after_a_reconnect(host: Broker) -> None:
    assert host.address is not None
    with (
        Proxy(int(host.address.rpartition(":")[2])) as proxy,
        ChannelBroker(f"127.0.0.1:{proxy.port}", "mine", timeout=60) as broker,
    ):
        subscriber = broker.subscribe(EVENTS)
        proxy.cut()
        broker.publish(EVENTS, b"after the cut")
        assert payloads(subscriber, 1) == [b"after the cut"]
        with pytest.raises(ClaimConflict):
            ChannelBroker(host, "mine")


def test_a_server_that_is_not_there_is_told() -> None:
    # Nobody listens at a port that is bound and no more.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(NoBroker):
            ChannelBroker(f"127.0.0.1:{bound.getsockname()[1]}", uuid4())


# ---- threads and connections (AP-17, TE-05)


def test_threads_may_publish_subscribe_and_unsubscribe_at_once(broker: ChannelBroker) -> None:
    all_of_it = broker.subscribe(EVENTS)
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for step in range(20):
            subscriber = broker.subscribe(f"own{number}")
            broker.publish(f"own{number}", b"%d" % step)
            broker.publish(EVENTS, b"%d/%d" % (number, step))
            assert payloads(subscriber, 1) == [b"%d" % step]
            broker.unsubscribe(f"own{number}")

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, number) for number in range(4)]:
            done.result()
    expected = {b"%d/%d" % (number, step) for number in range(4) for step in range(20)}
    assert set(payloads(all_of_it, 80)) == expected


def test_a_broker_has_one_connection_however_much_it_does(host: Broker, broker: ChannelBroker) -> None:
    before = host.statistics()["total_connections"]
    for number in range(10):
        broker.publish(EVENTS, b"%d" % number)
        broker.subscribe(EVENTS)
    assert host.statistics()["total_connections"] == before
