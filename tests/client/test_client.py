"""Both clients against a real server: each test runs over the one for threads and the one for asyncio."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow
import pytest
import uvloop

import penstock
from penstock import AsyncClient, Client, Outgoing, Receipt
from penstock.client import link, loop_thread
from penstock.client.blocking import Stage, Transaction
from penstock.client.message import Message
from penstock.client.producer import AsyncProducer
from penstock.client.subscription import AsyncSubscription
from penstock.client.sync import Producer, Subscription
from penstock.client.transaction import AsyncStage, AsyncTransaction
from penstock.client.values import Redriven
from penstock.errors import (
    BadHeader,
    BadRequest,
    BadSubject,
    BatchTooLarge,
    Closed,
    ConnectionLost,
    DeliveryFailed,
    GroupConflict,
    NoBroker,
    NotOutstanding,
    OffsetOutOfRange,
    TimedOut,
    TopicConflict,
    Unauthorized,
    UnknownGroup,
    UnknownTopic,
)
from tests import blocking
from tests.support.proxy import Proxy
from tests.support.server import PATIENCE_S, Serve, clean_environment
from tests.support.shells import SHELLS, Shell, shell_of

_NAMES: Final = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("server"), server_payload_bytes_max=100_000) as running:
        yield running


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    with shell_of(request.param) as made:
        yield made


@pytest.fixture
def client(shell: Shell, server: Serve) -> Client:
    return shell.client(address_of(server), name="test")


@pytest.fixture
def topic() -> str:
    return f"t{next(_NAMES)}"


def address_of(server: Serve, door: str = "text") -> str:
    return f"127.0.0.1:{server.ports[door]}"


def wait_until(is_so: Callable[[], bool]) -> None:
    """For what cannot be waited for otherwise: it must become so in time."""
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "it does not become so"
        time.sleep(0.01)


def values(messages: list[Message]) -> list[bytes]:
    return [message.value for message in messages]


def take(subscription: Any, count: int) -> list[Message]:
    return [subscription.get(PATIENCE_S) for _ in range(count)]


def fetched(client: Client, topic: str, **options: Any) -> list[bytes]:
    return [message.value for message in client.fetch(topic, **options)]


class TestPublish:
    def test_a_receipt_tells_where_it_is(self, client: Client, topic: str) -> None:
        receipts = [client.publish(f"{topic}.eu", b"%d" % number) for number in range(2)]

        assert receipts == [Receipt(topic, 0, 0, duplicate=False), Receipt(topic, 0, 1, duplicate=False)]

    @pytest.mark.parametrize("door", ["text", "quiet"])
    def test_both_ports_do(self, shell: Shell, server: Serve, door: str, topic: str) -> None:
        assert shell.client(address_of(server, door)).publish(topic, b"x").offset == 0

    def test_a_repeated_id_is_answered_with_the_first_ones_offset(self, client: Client, topic: str) -> None:
        client.publish(topic, b"before")
        first = client.publish(topic, b"x", message_id="one")
        client.publish(topic, b"between")

        again = client.publish(topic, b"y", message_id="one")

        assert again == Receipt(topic, 0, first.offset, duplicate=True)
        assert fetched(client, topic) == [b"before", b"x", b"between"]

    def test_a_message_comes_back_as_it_was(self, client: Client, topic: str) -> None:
        before = datetime.now(UTC)
        client.publish(
            f"{topic}.a",
            json={"n": [1, None, "ö"]},
            key="k",
            headers={"A-b": "wört; x: 1", "Empty": ""},
            message_id="id",
        )

        (message,) = client.fetch(topic)

        assert (message.topic, message.subject, message.partition, message.offset) == (topic, f"{topic}.a", 0, 0)
        assert (message.json(), message.key, message.message_id) == ({"n": [1, None, "ö"]}, b"k", "id")
        assert message.headers == {"Msg-ID": "id", "A-b": "wört; x: 1", "Empty": ""}
        assert before - timedelta(seconds=1) <= message.timestamp <= datetime.now(UTC) + timedelta(seconds=1)
        assert (message.attempts, message.deleted) == (1, False)

    def test_messages_of_a_key_go_to_one_partition(self, client: Client, topic: str) -> None:
        client.create_topic(topic, partitions=8)

        places = {
            key: {client.publish(topic, b"x", key=key).partition for _ in range(3)} for key in ("a", "b", "c", "d")
        }

        assert all(len(partitions) == 1 for partitions in places.values())
        assert len(set.union(*places.values())) > 1

    def test_without_a_value_it_deletes_its_key(self, client: Client, topic: str) -> None:
        client.publish(topic, key="k")

        (message,) = client.fetch(topic)

        assert (message.deleted, message.key, message.value) == (True, b"k", b"")

    def test_a_delayed_one_comes_later(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic)

        later = client.publish(topic, b"later", delay=0.3)
        client.publish(topic, b"due", delay=datetime.now(UTC) - timedelta(seconds=1))
        client.publish(topic, b"now")

        assert later == Receipt(topic, -1, -1, duplicate=False)
        assert values(take(subscription, 3)) == [b"due", b"now", b"later"]

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"value": "text"}, TypeError),
            ({"value": None}, TypeError),
            ({"value": b"x", "json": 1}, TypeError),
            ({"value": b"x", "headers": {"a b": "x"}}, BadHeader),
            ({"value": b"x", "headers": {"a": "x\r\ny"}}, BadHeader),
            ({"value": b"x", "delay": -1}, BadHeader),
            ({"value": b"x" * 100_001}, BatchTooLarge),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, client: Client, topic: str, options: dict[str, Any], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            client.publish(topic, **options)
        with pytest.raises(error):
            client.producer().publish(topic, **options)

    @pytest.mark.parametrize("subject", ["a..b", "a.*", "$reserved"])
    def test_what_is_no_subject_is_refused(self, client: Client, subject: str) -> None:
        with pytest.raises(BadSubject):
            client.publish(subject, b"x")

    def test_of_many_at_once_each_has_its_own_receipt_or_error(self, client: Client, topic: str) -> None:
        def publish(number: int) -> int | str:
            try:
                return client.publish("$no" if number % 10 == 0 else topic, b"%d" % number).offset
            except BadSubject:
                return "refused"

        with ThreadPoolExecutor(20) as pool:
            found = list(pool.map(publish, range(100)))

        stored = fetched(client, topic)
        assert found.count("refused") == 10
        assert all(offset == "refused" or stored[int(offset)] == b"%d" % number for number, offset in enumerate(found))


class TestPublishMany:
    def test_all_are_stored_and_progress_is_told(self, client: Client, topic: str) -> None:
        told: list[int] = []
        messages: list[Any] = [(f"{topic}.a", b"%d" % number) for number in range(5000)]
        messages.append(Outgoing(topic, b"last", key="k", headers={"A": "b"}))

        count = client.publish_many(iter(messages), progress=told.append)

        assert count == 5001
        assert told == sorted(told)
        assert told[-1] == 5001
        *_, last = client.fetch(topic)
        assert (last.value, last.key, last.headers) == (b"last", b"k", {"A": "b"})

    def test_what_is_not_stored_is_told(self, client: Client, topic: str) -> None:
        with pytest.raises(BadSubject):
            client.publish_many([(topic, b"0"), ("a..b", b"1")])

    def test_asyncios_takes_async_iterables(self, server: Serve, topic: str) -> None:
        async def messages() -> Any:
            for number in range(3):
                yield topic, b"%d" % number

        async def publish() -> int:
            async with AsyncClient(address_of(server)) as client:
                return await client.publish_many(messages())

        assert asyncio.run(publish()) == 3


class TestProducer:
    def test_messages_are_stored_in_batches_and_in_order(self, client: Client, topic: str) -> None:
        with client.producer(batch_bytes=10_000) as producer:
            for number in range(3000):
                producer.publish(topic, b"%d" % number)
            producer.flush()
            assert producer.stored == 3000

        assert fetched(client, topic) == [b"%d" % number for number in range(3000)]

    @pytest.mark.parametrize("headers", [None, {"Colour": "red"}], ids=["plain", "headers"])
    def test_messages_without_a_key_are_spread_evenly(
        self, client: Client, topic: str, headers: dict[str, str] | None
    ) -> None:
        client.create_topic(topic, partitions=4)
        with client.producer() as producer:
            for number in range(1000):
                producer.publish(topic, b"%d" % number, headers=headers)

        counts = [position.committed for position in client.topic(topic).positions]
        assert sum(counts) == 1000
        assert min(counts) >= 200

    def test_duplicates_are_counted(self, client: Client, topic: str) -> None:
        client.publish(topic, b"0", message_id="0")
        with client.producer() as producer:
            for number in range(3):
                producer.publish(topic, b"%d" % number, message_id=str(number))
            producer.publish(topic, b"plain")

        assert (producer.stored, producer.duplicates) == (4, 1)
        assert fetched(client, topic) == [b"0", b"1", b"2", b"plain"]

    def test_a_message_does_not_wait_for_others(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic)
        producer = client.producer(linger=0.01)

        producer.publish(topic, b"alone")

        assert subscription.get(PATIENCE_S).value == b"alone"
        producer.close()

    @pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
    def test_everything_a_message_can_have(self, client: Client, topic: str, compression: str) -> None:
        client.create_topic(topic, partitions=3)
        with client.producer(compression=compression) as producer:
            for number in range(30):
                producer.publish(f"{topic}.x", json={"n": number}, key=f"{number % 5}", headers={"N": str(number)})
            producer.publish(topic, key="gone")

        found = [message for partition in range(3) for message in client.fetch(topic, partition)]
        by_number = {message.headers["N"]: message for message in found if not message.deleted}
        assert len(by_number) == 30
        assert all(
            (message.json(), message.key) == ({"n": int(n)}, b"%d" % (int(n) % 5)) for n, message in by_number.items()
        )
        assert [message.key for message in found if message.deleted] == [b"gone"]
        partitions = {message.key: message.partition for message in found}
        assert all(message.partition == partitions[message.key] for message in found)

    def test_ids_are_stored_once_and_delays_are_kept(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic)
        with client.producer() as producer:
            producer.publish(topic, b"later", delay=0.3)
            for _ in range(3):
                producer.publish(topic, b"once", message_id="m")
            producer.publish(topic, b"plain")

        assert values(take(subscription, 3)) == [b"once", b"plain", b"later"]

    def test_a_topic_is_made_by_the_first_message(self, client: Client, topic: str) -> None:
        with client.producer() as producer:
            producer.publish(f"{topic}.eu.x", b"0")
            producer.publish(f"{topic}.us", b"1")

        assert client.topic(topic).positions[0].committed == 2

    def test_partitions_that_are_added_meanwhile_are_used(self, client: Client, topic: str) -> None:
        client.create_topic(topic, partitions=1)
        with client.producer(batch_bytes=1000) as producer:
            for number in range(3000):
                producer.publish(topic, b"%d" % number, key=b"%d" % (number % 11))
                if number == 1000:
                    client.alter_topic(topic, partitions=4)

        found = [list(client.fetch(topic, partition)) for partition in range(4)]
        assert Counter(int(message.value) for part in found for message in part) == Counter(range(3000))
        assert all(found)
        by_key: dict[bytes | None, list[int]] = {}
        # Those of the old layout are in partition 0, in front of those of the new one.
        for message in sorted(itertools.chain.from_iterable(found), key=lambda message: message.timestamp_us):
            by_key.setdefault(message.key, []).append(int(message.value))
        assert len(by_key) == 11

    def test_what_fails_is_told_once_with_the_messages(self, client: Client, topic: str) -> None:
        client.create_topic(topic)
        producer = client.producer(linger=0)
        producer.publish(topic, b"stored")
        producer.flush()
        client.delete_topic(topic)

        producer.publish(topic, b"lost")
        with pytest.raises(DeliveryFailed) as caught:
            producer.flush()

        ((subject, value, error),) = caught.value.failed
        assert (subject, value, type(error)) == (topic, b"lost", UnknownTopic)
        producer.flush()
        producer.publish(topic, b"again")
        producer.close()
        assert fetched(client, topic) == [b"again"]

    def test_what_is_not_flushed_is_stored_when_the_client_closes(
        self, shell: Shell, server: Serve, topic: str
    ) -> None:
        client = shell.client(address_of(server))
        client.producer(linger=60).publish(topic, b"x")

        client.close()

        assert fetched(shell.client(address_of(server)), topic) == [b"x"]

    def test_after_close_nothing_is_taken(self, client: Client, topic: str) -> None:
        producer = client.producer()
        producer.publish(topic, b"x")
        producer.close()

        with pytest.raises(Closed, match="producer"):
            producer.publish(topic, b"x")
        producer.close()

    def test_it_waits_when_too_much_waits(self, client: Client, topic: str) -> None:
        with client.producer(buffer_bytes=10_000, batch_bytes=2_000) as producer:
            for number in range(2000):
                producer.publish(topic, b"%100d" % number)
                assert producer._async._batcher.bytes < 11_000 if isinstance(producer, Producer) else True

        assert [int(value) for value in fetched(client, topic)] == list(range(2000))

    @pytest.mark.parametrize(
        "options", [{"compression": "gzip"}, {"batch_bytes": 0}, {"linger": -1}, {"timeout": 0}, {"buffer_bytes": 0}]
    )
    def test_settings_that_cannot_be_are_refused(self, client: Client, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            client.producer(**options)

    @pytest.mark.parametrize("seed", range(2))
    def test_each_message_is_stored_once_though_connections_break(
        self, shell: Shell, server: Serve, topic: str, seed: int
    ) -> None:
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            client.create_topic(topic, partitions=2)
            proxy.rage(seed)
            proxy.cut()
            with client.producer(batch_bytes=3000, linger=0.001, buffer_bytes=100_000) as producer:
                for number in range(3000):
                    producer.publish(topic, b"%0200d" % number, key=b"%d" % (number % 10))
                    if number % 500 == 0:
                        proxy.cut()
                proxy.calm()
            connections = proxy.connections
            client.close()

        direct = shell.client(address_of(server))
        found = [[int(value) for value in fetched(direct, topic, partition=partition)] for partition in range(2)]
        assert connections > 5
        assert sorted(found[0] + found[1]) == list(range(3000))
        assert all(part == sorted(part) for part in found)

    def test_a_lost_acknowledgement_stores_nothing_twice(self, shell: Shell, server: Serve, topic: str) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            producer = client.producer(linger=0)
            producer.publish(topic, b"0")
            producer.flush()
            proxy.mute()
            for number in range(1, 6):
                producer.publish(topic, b"%d" % number)
                wait_until(lambda: direct.topic(topic).positions[0].committed == number + 1)  # noqa: B023
            assert producer.stored == 1

            proxy.cut()
            producer.flush()

            assert producer.stored == 6
            client.close()
        assert fetched(direct, topic) == [b"%d" % number for number in range(6)]


class TestSubscribe:
    def test_a_plain_one_gets_what_comes_from_now_on(self, client: Client, topic: str) -> None:
        client.publish(f"{topic}.a", b"before")
        subscription = client.subscribe(f"{topic}.*")

        client.publish(f"{topic}.b", b"0")
        client.publish(f"{topic}.c.d", b"other")
        client.publish(f"{topic}.c", b"1")

        assert values(take(subscription, 2)) == [b"0", b"1"]
        assert (subscription.pattern, subscription.group, subscription.mode) == (f"{topic}.*", None, "shared")

    @pytest.mark.parametrize("group", [None, "all"])
    def test_a_whole_topic(self, client: Client, topic: str, group: str | None) -> None:
        for subject in (topic, f"{topic}.eu", f"{topic}x"):
            client.publish(subject, subject.encode())
        group = group and f"{group}-{topic}"
        with client.subscribe(topic=topic, group=group, start="earliest") as subscription:
            found = values(take(subscription, 2))
            client.publish(f"{topic}.eu.de", b"live")
            assert sorted([*found, *values(take(subscription, 1))]) == sorted(
                [topic.encode(), f"{topic}.eu".encode(), b"live"]
            )
            assert subscription.pattern == f"{topic} {topic}.>"

    def test_a_pattern_that_misses_a_part_of_its_topic_is_hinted_at(
        self, client: Client, topic: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        client.publish(topic, b"0")
        with caplog.at_level("WARNING", "penstock.client"):
            client.subscribe(topic).close()
            assert not caplog.records
            client.publish(f"{topic}.eu", b"1")
            client.subscribe(topic).close()
            client.subscribe(topic=topic).close()
            client.subscribe(f"{topic}.>").close()
        [record] = caplog.records
        assert f"such as {topic}.eu: to read all of it, name the topic (--topic {topic}" in record.getMessage()

    def test_or_from_anywhere(self, client: Client, topic: str) -> None:
        client.publish(topic, b"0")
        client.publish(topic, b"1")
        moment = datetime.now(UTC)
        client.publish(topic, b"2")

        def first(start: Any) -> bytes:
            with client.subscribe(topic, start=start) as subscription:
                return subscription.get(PATIENCE_S).value

        assert [first("earliest"), first(1), first(moment)] == [b"0", b"1", b"2"]
        assert [first(moment.isoformat()), first(f"@{moment.timestamp():.6f}")] == [b"2", b"2"]
        assert [first("-1h"), first(timedelta(hours=-1)), first(time.time() - 3600)] == [b"0", b"0", b"0"]

    def test_what_is_there_is_read_in_lists(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(300))
        subscription = client.subscribe(topic, start="earliest", buffer=50)

        first = subscription.get_many(7, PATIENCE_S)
        found = list(first)
        for batch in subscription.batches():
            found += batch
            if len(found) == 300:
                break

        assert 1 <= len(first) <= 7
        assert values(found) == [b"%d" % number for number in range(300)]

    def test_waiting_for_a_message_can_take_too_long(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic)

        with pytest.raises(TimedOut, match=topic):
            subscription.get(0.01)
        with pytest.raises(TimedOut, match=topic):
            subscription.get_many(timeout=0.01)
        client.publish(topic, b"x")

        assert subscription.get(PATIENCE_S).value == b"x"

    def test_close_ends_iteration_in_another_thread(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic)
        found: list[bytes] = []
        first = threading.Event()

        def read() -> None:
            for message in subscription:
                found.append(message.value)
                first.set()

        reader = threading.Thread(target=read)
        reader.start()
        client.publish(topic, b"x")
        assert first.wait(PATIENCE_S)
        subscription.close()
        reader.join(PATIENCE_S)

        assert not reader.is_alive()
        assert found == [b"x"]
        assert list(subscription) == []
        with pytest.raises(Closed):
            subscription.get(1)
        subscription.close()

    def test_closing_the_client_ends_it_too(self, shell: Shell, server: Serve, topic: str) -> None:
        client = shell.client(address_of(server))
        subscription = client.subscribe(topic)

        client.close()

        assert list(subscription) == []
        assert list(subscription.batches()) == []

    def test_one_that_is_not_read_gets_no_more_than_its_buffer(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(2000))
        subscription = client.subscribe(topic, start="earliest", buffer=20)
        feed = subscription._feed

        wait_until(lambda: len(feed._unread) == 20)
        client.publish(topic, b"2000")
        client.topics()

        assert len(feed._unread) == 20
        assert values(take(subscription, 2001)) == [b"%d" % number for number in range(2001)]

    @pytest.mark.parametrize("options", [{"mode": "other"}, {"buffer": 0}, {"start": "now"}, {"start": -1}])
    def test_what_cannot_be_is_refused(self, client: Client, topic: str, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            client.subscribe(topic, **options)

    def test_a_pattern_that_is_none_is_refused(self, client: Client) -> None:
        with pytest.raises(BadSubject):
            client.subscribe("a..b")


class TestGroups:
    def test_members_of_a_shared_group_share(self, client: Client, shell: Shell, server: Serve, topic: str) -> None:
        other = shell.client(address_of(server))
        client.create_group(topic, topic)
        members = [client.subscribe(topic, group=topic, buffer=10), other.subscribe(topic, group=topic, buffer=10)]
        client.publish_many((topic, b"%d" % number) for number in range(200))
        found: list[list[bytes]] = [[], []]
        all_done = threading.Event()

        def read(member: Any, mine: list[bytes]) -> None:
            for message in member:
                mine.append(message.value)
                message.ack()
                if sum(map(len, found)) == 200:
                    all_done.set()

        readers = [threading.Thread(target=read, args=pair) for pair in zip(members, found, strict=True)]
        for reader in readers:
            reader.start()
        assert all_done.wait(PATIENCE_S)
        for member in members:
            member.flush()
            member.close()
        for reader in readers:
            reader.join(PATIENCE_S)

        assert sorted(map(int, found[0] + found[1])) == list(range(200))
        assert all(found)
        assert client.lag(topic) == 0

    def test_a_partitioned_one_commits_by_offset(self, client: Client, shell: Shell, server: Serve, topic: str) -> None:
        client.create_topic(topic, partitions=2)
        for number in range(20):
            client.publish(topic, b"%d" % number, key=b"%d" % number)
        member = client.subscribe(topic, group=topic, mode="partitioned", start="earliest")
        messages = take(member, 20)
        last = {message.partition: message for message in messages}

        for message in last.values():
            message.ack()
        member.flush()

        assert len(last) == 2
        assert client.group(topic).mode == "partitioned"
        assert [position.lag for position in client.group(topic).positions] == [0, 0]
        with pytest.raises(TypeError, match="shared groups"):
            messages[0].nack()

    def test_what_is_not_acknowledged_comes_again_and_then_is_a_dead_letter(self, client: Client, topic: str) -> None:
        client.create_topic(topic, ack_deadline_ms=200, deliveries_max=2)
        client.publish(topic, b"x", headers={"A": "b"})
        member = client.subscribe(topic, group=topic, start="earliest")

        attempts = [member.get(PATIENCE_S).attempts for _ in range(2)]
        wait_until(lambda: client.group(topic).dead_lettered == 1)

        assert attempts == [1, 2]
        (letter,) = client.dead_letters(topic)
        assert (letter.value, letter.topic, letter.group, letter.attempts) == (b"x", topic, topic, 2)
        assert letter.headers["A"] == "b"
        client.alter_topic(topic, ack_deadline_ms=60_000)
        assert client.redrive(topic) == Redriven(1, 0, None)
        again = member.get(PATIENCE_S)
        again.ack()
        member.flush()
        assert again.value == b"x"
        assert client.dead_letters(topic) == []
        assert [each.redriven for each in client.dead_letters(topic, redriven=True)] == [True]

    def test_nack_reject_and_extend(self, client: Client, topic: str) -> None:
        client.create_topic(topic, ack_deadline_ms=1000)
        client.publish_many((topic, b"%d" % number) for number in range(3))
        member = client.subscribe(topic, group=topic, start="earliest")
        nacked, rejected, extended = take(member, 3)

        nacked.nack(delay=0.05)
        rejected.reject(reason=LookupError("no such\ncustomer"))
        again = member.get(PATIENCE_S)
        again.ack()
        after_the_deadline = time.monotonic() + 1.2
        while time.monotonic() < after_the_deadline:
            extended.extend()
            member.flush()
        extended.ack()
        member.flush()

        assert (again.value, again.attempts) == (b"0", 2)
        [letter] = client.dead_letters(topic)
        assert (letter.value, letter.reason) == (b"1", "LookupError: no such customer")
        assert letter.timestamp_us >= rejected.timestamp_us
        assert (client.lag(topic), client.group(topic).redelivered) == (0, 1)

    def test_what_nobody_looked_at_does_not_count_as_delivered(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(3))
        for _ in range(5):
            with client.subscribe(topic, group=topic, start="earliest") as member:
                wait_until(lambda member=member: len(member.unread()) == 3)  # type: ignore[misc]
        with client.subscribe(topic, group=topic) as member:
            messages = take(member, 3)
            assert [message.attempts for message in messages] == [1, 1, 1]
            messages[0].release()
            assert (member.get(PATIENCE_S).offset, messages[0].attempts) == (messages[0].offset, 1)

    def test_who_takes_the_last_one_it_wants_is_not_sent_another(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(3))
        for number in range(2):
            with client.subscribe(topic, group=topic, start="earliest", buffer=1) as member:
                message = member.get(PATIENCE_S)
                assert (message.value, message.attempts) == (b"%d" % number, 1)
                message.ack()
                member.flush()
                assert client.group(topic).pending == 0

    def test_one_that_comes_too_late_is_told(self, client: Client, topic: str) -> None:
        client.create_topic(topic, ack_deadline_ms=50, deliveries_max=1)
        client.publish(topic, b"x")
        member = client.subscribe(topic, group=topic, start="earliest")
        message = member.get(PATIENCE_S)
        wait_until(lambda: client.group(topic).dead_lettered == 1)

        message.nack()

        with pytest.raises(NotOutstanding, match="too late"):
            member.flush()
        member.flush()

    def test_only_messages_of_a_group_are_acknowledged(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic, start="earliest")
        client.publish(topic, b"x")

        with pytest.raises(TypeError, match="group"):
            subscription.get(PATIENCE_S).ack()

    def test_a_member_that_closes_leaves_the_rest_to_others(self, client: Client, topic: str) -> None:
        first = client.subscribe(topic, group=topic)
        client.publish_many((topic, b"%d" % number) for number in range(10))
        done, *_ = take(first, 10)
        done.ack()

        first.close()

        second = client.subscribe(topic, group=topic)
        assert sorted(values(take(second, 9))) == [b"%d" % number for number in range(1, 10)]
        with pytest.raises(Closed):
            done.ack()

    def test_a_group_that_is_another_one_is_a_conflict(self, client: Client, topic: str) -> None:
        client.create_group(topic, topic)

        with pytest.raises(GroupConflict):
            client.subscribe(f"{topic}.>", group=topic)
        with pytest.raises(GroupConflict):
            client.subscribe(topic, group=topic, mode="partitioned")

    def test_one_that_is_deleted_ends_its_members(self, client: Client, topic: str) -> None:
        member = client.subscribe(topic, group=topic)

        client.delete_group(topic)

        with pytest.raises(UnknownGroup):
            member.get(PATIENCE_S)


class TestReconnect:
    def test_a_killed_broker_that_comes_back_is_gone_on_with(self, shell: Shell, tmp_path: Path, topic: str) -> None:
        with Serve(tmp_path) as server:
            client = shell.client(address_of(server))
            subscription = client.subscribe(topic, buffer=7)
            producer = client.producer(linger=0.001)
            found: list[Message] = []
            for life in range(3):
                for number in range(100):
                    producer.publish(topic, b"%d" % (100 * life + number))
                found += take(subscription, 50)
                server.kill()
                server.restart()
            producer.flush()
            found += take(subscription, 150)
            client.publish(topic, b"end")

            assert values(found) == [b"%d" % number for number in range(300)]
            assert subscription.get(PATIENCE_S).value == b"end"
            client.close()

    @pytest.mark.parametrize("seed", range(2))
    def test_a_plain_subscription_loses_and_doubles_nothing(
        self, shell: Shell, server: Serve, topic: str, seed: int
    ) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            direct.create_topic(topic, partitions=3)
            subscription = client.subscribe(topic, buffer=30)
            proxy.rage(seed)
            with direct.producer(batch_bytes=3000) as producer:
                for number in range(1000):
                    producer.publish(topic, b"%d" % number, key=b"%d" % (number % 10))
            found: list[Message] = []
            while len(found) < 1000:
                found += subscription.get_many(timeout=PATIENCE_S)
                if len(found) % 7 == 0:
                    proxy.cut()
            proxy.calm()
            direct.publish(topic, b"1000")
            found.append(subscription.get(PATIENCE_S))
            connections = proxy.connections
            client.close()

        assert connections > 3
        assert sorted(int(message.value) for message in found) == list(range(1001))
        for partition in range(3):
            offsets = [message.offset for message in found if message.partition == partition]
            assert offsets == sorted(offsets)

    def test_a_member_gets_again_what_it_has_not_acknowledged(self, shell: Shell, server: Serve, topic: str) -> None:
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            client.create_topic(topic, ack_deadline_ms=60_000)
            client.publish_many((topic, b"%d" % number) for number in range(10))
            member = client.subscribe(topic, group=topic, start="earliest")
            done, *_ = take(member, 5)
            done.ack()
            member.flush()

            proxy.cut()
            wait_until(lambda: proxy.connections == 2)

            again = take(member, 9)
            assert sorted(values(again)) == [b"%d" % number for number in range(1, 10)]
            for message in again:
                message.ack()
            member.flush()
            assert client.lag(topic) == 0
            client.close()

    @pytest.mark.parametrize("was_heard", [True, False])
    def test_acknowledgements_that_were_not_answered_are_said_again(
        self, shell: Shell, server: Serve, topic: str, was_heard: bool
    ) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
            client = shell.client(proxy.address)
            direct.publish(topic, b"x")
            member = client.subscribe(topic, group=topic, start="earliest")
            message = member.get(PATIENCE_S)
            if was_heard:
                proxy.mute()
                message.ack()
                wait_until(lambda: direct.lag(topic) == 0)
            else:
                proxy.deafen()
                message.ack()
            flushed = pool.submit(member.flush)

            proxy.cut()
            flushed.result(PATIENCE_S)

            assert direct.lag(topic) == 0
            client.close()

    def test_a_request_that_may_be_repeated_is(self, shell: Shell, server: Serve, topic: str) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
            client = shell.client(proxy.address)
            client.connect()
            proxy.mute()
            receipt = pool.submit(client.publish, topic, b"x", message_id="m")
            wait_until(lambda: any(each.name == topic and each.positions[0].committed for each in direct.topics()))

            proxy.cut()

            assert receipt.result(PATIENCE_S) == Receipt(topic, 0, 0, duplicate=True)
            client.close()

    def test_one_that_may_not_be_is_told(self, shell: Shell, server: Serve, topic: str) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
            client = shell.client(proxy.address)
            client.connect()
            proxy.mute()
            receipt = pool.submit(client.publish, topic, b"x")
            wait_until(lambda: any(each.name == topic and each.positions[0].committed for each in direct.topics()))

            proxy.cut()

            with pytest.raises(ConnectionLost, match="may or may not"):
                receipt.result(PATIENCE_S)
            assert client.publish(topic, b"y").offset == 1
            client.close()

    def test_while_the_broker_is_away_requests_wait_until_their_time_is_over(
        self, shell: Shell, tmp_path: Path, topic: str
    ) -> None:
        with Serve(tmp_path) as server, ThreadPoolExecutor(1) as pool:
            client = shell.client(address_of(server))
            client.connect()
            server.kill()
            # What is sent before the loss is noticed is lost with it.
            with suppress(ConnectionLost, TimedOut):
                client.publish(topic, b"early", timeout=0.2)

            with pytest.raises(TimedOut, match=rf"publish to {topic} \(no connection to 127.0.0.1"):
                client.publish(topic, b"late", timeout=0.2)
            waiting = pool.submit(client.publish, topic, b"x")
            server.restart()

            assert waiting.result(PATIENCE_S).offset == 0
            client.close()

    def test_the_next_server_is_tried(self, shell: Shell, server: Serve, topic: str) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            servers = [f"127.0.0.1:{unused.getsockname()[1]}", address_of(server)]

            assert shell.client(servers).publish(topic, b"x").offset == 0


class TestFetch:
    def test_a_range(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(50))

        def found(**options: Any) -> list[int]:
            return [message.offset for message in client.fetch(topic, **options)]

        assert found() == list(range(50))
        assert found(offset=10, end=13) == [10, 11, 12]
        assert found(offset=45, count=2) == [45, 46]
        assert found(offset=48, end=100) == [48, 49]
        assert found(offset="latest") == found(offset=50) == found(count=0) == []
        assert found(offset=datetime(2020, 1, 1, tzinfo=UTC), count=1) == found(offset="-1h", count=1) == [0]

    def test_more_than_one_answer_holds(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%8d" % number * 1000) for number in range(2000))

        numbers = [int(message.value[:8]) for message in client.fetch(topic, offset=3, end=1997)]

        assert numbers == list(range(3, 1997))

    def test_following_goes_on_with_what_comes(self, client: Client, topic: str) -> None:
        client.publish(topic, b"0")
        follower = client.fetch(topic, follow=True, count=3)

        assert next(follower).value == b"0"
        client.publish(topic, b"1")
        assert next(follower).value == b"1"
        client.publish(topic, b"2")
        assert values(list(follower)) == [b"2"]

    def test_following_outlasts_a_lost_connection(self, shell: Shell, server: Serve, topic: str) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            direct.publish(topic, b"0")
            follower = client.fetch(topic, follow=True, count=2)
            assert next(follower).value == b"0"

            proxy.cut()
            direct.publish(topic, b"1")

            assert values(list(follower)) == [b"1"]
            client.close()

    def test_record_batches(self, client: Client, topic: str) -> None:
        client.publish_many(Outgoing(topic, b"%d" % number, key=b"k") for number in range(5000))

        whole = pyarrow.Table.from_batches(client.fetch(topic, arrow=True))
        part = pyarrow.Table.from_batches(
            client.fetch(topic, offset=7, end=4007, count=3000, arrow=True, columns=["offset", "value"])
        )

        assert whole.column("value").to_pylist() == [b"%d" % number for number in range(5000)]
        assert set(whole.column("key").to_pylist()) == {b"k"}
        assert part.column_names == ["offset", "value"]
        assert part.column("offset").to_pylist() == list(range(7, 3007))

    def test_what_is_not_there_is_told(self, client: Client, topic: str) -> None:
        client.create_topic(topic)

        with pytest.raises(OffsetOutOfRange) as caught:
            list(client.fetch(topic, offset=7, follow=True))
        assert (caught.value.offset, caught.value.start, caught.value.end) == (7, 0, 0)
        with pytest.raises(UnknownTopic):
            list(client.fetch("nowhere"))
        with pytest.raises(BadRequest, match="partition 1"):
            list(client.fetch(topic, 1))
        with pytest.raises(ValueError, match="'soon': it must be earliest, latest, an offset"):
            list(client.fetch(topic, offset="soon"))
        with pytest.raises(ValueError, match="unknown columns: colour"):
            list(client.fetch(topic, arrow=True, columns=["colour"]))

    def test_without_pyarrow_it_says_what_to_install(
        self, client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client.publish(topic, b"x")
        monkeypatch.delitem(sys.modules, "penstock.model.arrow", raising=False)
        monkeypatch.delattr(penstock, "arrow", raising=False)
        monkeypatch.setitem(sys.modules, "pyarrow", None)

        with pytest.raises(ImportError, match=r"pip install 'penstock\[arrow\]'"):
            list(client.fetch(topic, arrow=True))


class TestAdministration:
    def test_topics(self, client: Client, topic: str) -> None:
        made = client.create_topic(topic, partitions=2, durability="flush", retain_ms=60_000)
        altered = client.alter_topic(topic, partitions=3, retain_ms=None)

        assert (made.name, made.partitions, made.refused, len(made.positions)) == (topic, 2, None, 2)
        assert (made.policy["durability"], made.policy["retain_ms"]) == ("flush", 60_000)
        assert (altered.partitions, altered.policy["retain_ms"], altered.id) == (3, None, made.id)
        assert client.topic(topic) == altered
        assert altered in client.topics()
        with pytest.raises(TopicConflict):
            client.create_topic(f"{topic}.below")
        client.delete_topic(topic)
        with pytest.raises(UnknownTopic):
            client.topic(topic)
        with pytest.raises(BadRequest, match="durability"):
            client.create_topic(topic, durability="maybe")

    def test_offsets(self, client: Client, topic: str) -> None:
        client.publish(topic, b"x" * 5000)
        moment = datetime.now(UTC)
        client.publish(topic, b"x" * 5000)

        assert client.offset_at(topic, 0, moment) == 1
        assert client.offset_at(topic, 0, moment.timestamp()) == 1
        assert client.offset_at(topic, 0, "-1h") == client.offset_at(topic, 0, "1960-01-01") == 0
        assert client.offset_at(topic, 0, moment + timedelta(days=1)) == client.offset_at(topic, 0, "1d") == 2
        assert client.offset_after(topic, 0, 0, 1 << 30) == 2

    def test_who_waits_is_told_of_more(self, client: Client, topic: str) -> None:
        client.create_topic(topic, partitions=2)
        number = client.topic(topic).id
        assert not client.wait([(number, 0, 0), (number, 1, 0)], 0.01)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(client.wait, [(number, 0, 0), (number, 1, 0)], 10.0)
            client.publish(topic, b"x")
            assert waiting.result(PATIENCE_S)
        assert client.wait([(number, 0, 0), (number, 1, 0)], 10.0)
        with pytest.raises(BadRequest, match="positions"):
            client.wait([], 1.0)
        with pytest.raises(UnknownTopic):
            client.wait([(number, 2, 0)], 1.0)

    def test_groups(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(10))
        made = client.create_group(topic, f"{topic}.>", start="earliest")
        other = client.create_group(f"{topic}-b", topic, mode="partitioned", start=3)

        assert (made.name, made.pattern, made.mode) == (topic, f"{topic}.>", "shared")
        assert {made.name, other.name} <= {group.name for group in client.groups()}
        assert client.lag(other.name) == 7
        assert client.reset_group(other.name, "earliest").lag == 10
        assert client.reset_group(other.name, 5, topic=topic, partition=0).lag == 5
        client.commit(other.name, topic, 0, 8)
        assert client.lag(other.name) == 2
        client.delete_group(topic)
        with pytest.raises(UnknownGroup):
            client.group(topic)

    def test_members_are_listed(self, client: Client, topic: str) -> None:
        client.publish(topic, b"x")
        member = client.subscribe(topic, group=topic, start="earliest")
        member.get(PATIENCE_S)

        (found,) = client.group(topic).members

        assert (found.name, found.unacknowledged) == ("test", 1)

    def test_statistics(self, client: Client) -> None:
        assert client.statistics()


class TestConnecting:
    def test_nobody_there(self, shell: Shell) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            client = shell.client(address)
            told = f"no broker at {address}: start one with `penstock serve`, or name another with servers="

            for attempt in (
                client.connect,
                client.topics,
                lambda: client.subscribe("t"),
                lambda: client.publish("t", b""),
            ):
                with pytest.raises(NoBroker) as caught:
                    attempt()
                assert str(caught.value) == told

    @pytest.mark.parametrize(
        ("greeting", "answer", "told"),
        [
            (
                b"",
                b"HTTP/1.1 400 Bad Request\r\n\r\n",
                "is an HTTP port: connect to the broker's text port (4222",
            ),
            (b'INFO {"version":"2.10.0"}\r\n', b"", "is another NATS server, not a Penstock broker: name another"),
            (
                b"",
                b"-ERR unknown command 'HELLO'\r\n",
                "answers like Redis, not like a Penstock broker: check the port",
            ),
            (b"-DENIED Redis is running in protected mode\r\n", b"", "answers like Redis, not like a Penstock broker"),
            (b"SSH-2.0-x\r\n", b"", "is another service, not a Penstock broker (it says b'SSH-2.0-x\\r\\n')"),
            (b"", b"", "is another service, not a Penstock broker (closed before HELLO was answered): check the port"),
        ],
    )
    def test_somebody_else_there(self, shell: Shell, greeting: bytes, answer: bytes, told: str) -> None:
        def serve(listener: socket.socket) -> None:
            # The client comes twice: as to a broker, then to find out what is there.
            for _ in range(2):
                taken, _ = listener.accept()
                with taken:
                    taken.sendall(greeting)
                    taken.recv(100)
                    taken.sendall(answer)

        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve, listener)
            with pytest.raises(NoBroker) as caught:
                shell.client(f"127.0.0.1:{listener.getsockname()[1]}").connect()
            served.result(PATIENCE_S)
        assert told in str(caught.value)

    @pytest.mark.parametrize(
        ("greeting", "dial_s", "told"),
        [
            (b'INFO {"version":"2.10.0"}\r\n', 2.0, "is another NATS server"),
            (b"", 0.2, r"no answer from 127.0.0.1:\d+ within 0.2 s: check the address"),
        ],
    )
    def test_somebody_there_who_does_not_answer(
        self, shell: Shell, greeting: bytes, dial_s: float, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "DIAL_S", dial_s)
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            connections = []

            def serve() -> None:
                for _ in range(2):
                    taken, _ = listener.accept()
                    connections.append(taken)
                    taken.sendall(greeting)

            served = pool.submit(serve)
            with pytest.raises(NoBroker, match=told):
                shell.client(f"127.0.0.1:{listener.getsockname()[1]}").connect()
            served.result(PATIENCE_S)
            for each in connections:
                each.close()

    def test_the_brokers_http_port(self, shell: Shell, server: Serve) -> None:
        with pytest.raises(NoBroker, match=r"is an HTTP port: connect to the broker's text port"):
            shell.client(f"127.0.0.1:{server.ports['http']}").connect()

    def test_urls(self, shell: Shell, tmp_path: Path) -> None:
        with Serve(tmp_path, auth_user="ann", auth_password="p@ss:1") as server:
            shell.client(f"nats://ann:p%40ss%3A1@{address_of(server)}/").publish("t", b"x")
            with pytest.raises(Unauthorized):
                shell.client(f"nats://ann:other@{address_of(server)}").connect()
            shell.client(f"nats://ann:other@{address_of(server)}", user="ann", password="p@ss:1").topics()
            shell.close()

    @pytest.mark.parametrize("servers", ["host:port", "", ":1", "a:99999", []])
    def test_what_is_no_address(self, shell: Shell, servers: Any) -> None:
        with pytest.raises(ValueError, match=r"address|empty"):
            shell.client(servers)

    def test_credentials(self, shell: Shell, tmp_path: Path) -> None:
        with Serve(tmp_path, auth_token="secret") as server:
            shell.client(address_of(server), token="secret").publish("t", b"x")
            with pytest.raises(Unauthorized):
                shell.client(address_of(server), token="other").connect()
            with pytest.raises(Unauthorized):
                shell.client(address_of(server)).connect()
            shell.close()

    def test_after_close_nothing_is_done(self, shell: Shell, server: Serve) -> None:
        client = shell.client(address_of(server))
        client.topics()
        client.close()
        client.close()

        with pytest.raises(Closed):
            client.topics()
        with pytest.raises(Closed):
            client.subscribe("t")

    def test_a_broker_that_says_nothing_takes_too_long(self, shell: Shell, server: Serve) -> None:
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address, timeout=1)
            client.connect()
            proxy.mute()

            with pytest.raises(TimedOut, match=r"topics \(connected to 127.0.0.1.*1 s"):
                client.topics()
            client.close()

    def test_a_silent_connection_is_given_up(self, shell: Shell, tmp_path: Path) -> None:
        with Serve(tmp_path, server_heartbeat_s=1) as server, Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            client.connect()

            proxy.mute()
            wait_until(lambda: proxy.connections == 1)
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(client.topics)
                wait_until(lambda: proxy.connections > 1 or answer.done())
                proxy.cut()
                assert answer.result(PATIENCE_S) == []
            client.close()


class TestThreads:
    def test_everything_at_once(self, client: Client, topic: str) -> None:
        """Publish, subscribe, unsubscribe and ask, from many threads, on one connection."""
        client.create_topic(topic, partitions=2)
        reader = client.subscribe(topic, buffer=1000)
        rounds, workers = 15, 8

        def work(number: int) -> None:
            with client.producer(linger=0.001) as producer:
                for turn in range(rounds):
                    client.publish(topic, b"a%d/%d" % (number, turn))
                    producer.publish(topic, b"b%d/%d" % (number, turn))
                    with client.subscribe(f"{topic}-{number}") as subscription:
                        client.publish(f"{topic}-{number}", b"%d" % turn)
                        assert subscription.get(PATIENCE_S).value == b"%d" % turn
                    client.topic(topic)

        with ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(work, number) for number in range(workers)]:
                done.result(60)

        found = Counter(values(take(reader, 2 * rounds * workers)))
        assert found == Counter(
            b"%c%d/%d" % (kind, number, turn) for kind in b"ab" for number in range(workers) for turn in range(rounds)
        )

    def test_many_threads_read_one_subscription_and_acknowledge(self, client: Client, topic: str) -> None:
        client.create_group(topic, topic)
        member = client.subscribe(topic, group=topic, buffer=50)
        client.publish_many((topic, b"%d" % number) for number in range(1000))
        lock, found = threading.Lock(), set[bytes]()

        def work() -> None:
            for message in member:
                message.ack()
                with lock:
                    found.add(message.value)
                    if len(found) == 1000:
                        all_done.set()

        all_done = threading.Event()
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        assert all_done.wait(PATIENCE_S)
        member.flush()
        member.close()
        for worker in workers:
            worker.join(PATIENCE_S)

        assert client.lag(topic) == 0

    def test_many_threads_use_one_producer(self, client: Client, topic: str) -> None:
        with client.producer(batch_bytes=2000) as producer, ThreadPoolExecutor(8) as pool:

            def work(number: int) -> None:
                for turn in range(500):
                    producer.publish(topic, b"%d/%d" % (number, turn))

            for done in [pool.submit(work, number) for number in range(8)]:
                done.result(60)

        found = fetched(client, topic)
        assert len(found) == 4000
        for number in range(8):
            mine = [value for value in found if value.startswith(b"%d/" % number)]
            assert mine == [b"%d/%d" % (number, turn) for turn in range(500)]

    def test_within_a_running_loop(self, server: Serve, topic: str) -> None:
        """As in a notebook."""

        async def cell() -> bytes:
            with Client(address_of(server)) as client:
                subscription = client.subscribe(topic)
                client.publish(topic, b"x")
                return subscription.get(PATIENCE_S).value

        assert asyncio.run(cell()) == b"x"

    def test_acknowledging_from_another_thread_than_the_loops(self, server: Serve, topic: str) -> None:
        async def consume() -> int:
            async with AsyncClient(address_of(server)) as client:
                await client.publish(topic, b"x")
                member = await client.subscribe(topic, group=topic, start="earliest")
                message = await member.get(PATIENCE_S)
                await asyncio.to_thread(message.ack)
                await member.flush()
                return await client.lag(topic)

        assert asyncio.run(consume()) == 0

    def test_uvloop_does_as_well(self, server: Serve, topic: str) -> None:
        async def use() -> list[bytes]:
            async with AsyncClient(address_of(server)) as client:
                subscription = await client.subscribe(topic)
                await client.publish_many([(topic, b"0"), (topic, b"1")])
                return [(await subscription.get(PATIENCE_S)).value for _ in range(2)]

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(use()) == [b"0", b"1"]

    def test_cancelling_a_wait_leaves_the_rest_as_it_was(self, server: Serve, topic: str) -> None:
        async def use() -> bytes:
            async with AsyncClient(address_of(server)) as client:
                subscription = await client.subscribe(topic)
                waiting = asyncio.ensure_future(subscription.get())
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                await client.publish(topic, b"x")
                return (await subscription.get(PATIENCE_S)).value

        assert asyncio.run(use()) == b"x"


class TestProcesses:
    def test_a_forked_child_has_a_connection_of_its_own(self, server: Serve, topic: str) -> None:
        with Client(address_of(server)) as client:
            subscription = client.subscribe(topic)
            producer = client.producer(linger=60)
            producer.publish(topic, b"parent")

            def child() -> None:
                producer.publish(topic, b"child's producer")
                producer.close()
                client.publish(topic, b"child")
                with client.subscribe(topic, start="earliest") as mine:
                    assert values(take(mine, 2)) == [b"child's producer", b"child"]
                with pytest.raises(Closed, match="subscribe again"):
                    subscription.get()
                with pytest.raises(Closed, match="subscribe again"):
                    next(subscription)
                client.close()

            assert _in_child(child) == 0
            producer.close()

            assert values(take(subscription, 3)) == [b"child's producer", b"child", b"parent"]
            assert client.publish(topic, b"still here").offset == 3
            assert subscription.get(PATIENCE_S).value == b"still here"

    def test_messages_of_the_parent_are_not_acknowledged_by_a_child(self, server: Serve, topic: str) -> None:
        with Client(address_of(server)) as client:
            member = client.subscribe(topic, group=topic)
            client.publish(topic, b"x")
            message = member.get(PATIENCE_S)

            def child() -> None:
                for use in (message.ack, member.flush):
                    with pytest.raises(Closed, match="subscribe again"):
                        use()
                member.close()

            assert _in_child(child) == 0
            message.ack()
            member.flush()
            assert client.lag(topic) == 0

    def test_a_transaction_of_the_parent_is_refused_in_a_child(self, server: Serve, topic: str) -> None:
        with Client(address_of(server)) as client:
            transaction = client.transaction()
            transaction.publish(topic, b"parent")

            def child() -> None:
                with pytest.raises(Closed, match="parent process"):
                    transaction.commit()
                with client.transaction() as mine:
                    mine.publish(topic, b"child")

            assert _in_child(child) == 0
            assert transaction.commit()
            assert values(list(client.fetch(topic))) == [b"child", b"parent"]

    def test_a_child_does_not_close_a_client_that_the_parent_has_dropped(self, server: Serve, topic: str) -> None:
        Client(address_of(server)).publish(topic, b"x")
        gc.collect()

        assert _in_child(loop_thread._close_all) == 0
        assert _in_child(lambda: sys.exit(len(loop_thread._RUNNING))) == 0

    def test_a_client_that_was_never_used_is_used_by_many_children(self, server: Serve, topic: str) -> None:
        client = Client(address_of(server))

        def child() -> None:
            client.publish(topic, b"x")

        assert [_in_child(child) for _ in range(3)] == [0, 0, 0]
        assert fetched(client, topic) == [b"x"] * 3
        client.close()

    def test_a_program_that_just_ends_stores_what_it_has_and_does_not_hang(self, server: Serve, topic: str) -> None:
        code = f"""
import penstock
client = penstock.Client({address_of(server)!r})
subscription = client.subscribe("x")
client.producer(linger=60).publish({topic!r}, b"x")
"""
        done = _python(code)

        assert (done.returncode, done.stderr) == (0, "")
        with Client(address_of(server)) as client:
            assert fetched(client, topic) == [b"x"]

    def test_a_key_that_interrupts_ends_a_wait(self, server: Serve) -> None:
        code = f"""
import penstock
client = penstock.Client({address_of(server)!r})
subscription = client.subscribe("nothing")
try:
    print("ready", flush=True)
    subscription.get()
except KeyboardInterrupt:
    print("interrupted")
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=clean_environment()
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.wait(PATIENCE_S) == 0

    def test_importing_it_loads_neither_the_server_nor_the_rest(self) -> None:
        code = """
import sys, penstock
assert not any(name.startswith("penstock.") for name in sys.modules), sys.modules
penstock.Client, penstock.AsyncClient, penstock.Outgoing, penstock.Receipt, penstock.Message
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("penstock.")}
assert not loaded & {"server", "broker", "storage", "cli", "app", "embedded", "arrow"}, loaded
assert "Client" in dir(penstock)
try:
    penstock.Nothing
except AttributeError as error:
    assert "Nothing" in str(error)
else:
    raise AssertionError
"""
        done = _python(code)

        assert (done.returncode, done.stderr) == (0, "")


def _in_child(work: Callable[[], None]) -> int | None:
    """The exit code of a forked child that does it."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=clean_environment(),
    )


@pytest.mark.parametrize(
    ("threads", "aio"),
    [
        (Client, AsyncClient),
        (Subscription, AsyncSubscription),
        (Producer, AsyncProducer),
        (Stage, AsyncStage),
        (Transaction, AsyncTransaction),
    ],
)
def test_both_clients_have_the_same_methods_with_the_same_parameters(threads: type, aio: type) -> None:
    for_the_link = {"connected", "disconnected", "writable"}

    def methods(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            name: [(each.name, each.kind, each.default) for each in inspect.signature(found).parameters.values()]
            for name, found in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in for_the_link
        }

    assert methods(threads) == methods(aio)
    for kind in (threads, aio):
        for name in methods(kind):
            assert getattr(kind, name).__doc__, f"{kind.__name__}.{name} has no docstring"


def test_methods_that_are_generated_are_up_to_date() -> None:
    assert blocking.TARGET.read_text() == blocking.generate(), "run `python -m tests.blocking --write`"


def test_constructors_are_the_same() -> None:
    assert inspect.signature(Client) == inspect.signature(AsyncClient)
