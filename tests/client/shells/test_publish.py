"""Publishing with both clients, one by one and with a producer."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import AsyncClient, Client, Outgoing, Receipt
from penstock.client.sync import Producer
from penstock.errors import (
    BadHeader,
    BadSubject,
    BatchTooLarge,
    Closed,
    DeliveryFailed,
    UnknownTopic,
)
from tests.support.client_calls import address_of, fetched, take, values, wait_until
from tests.support.process import PATIENCE_S
from tests.support.proxy import Proxy
from tests.support.server import Serve
from tests.support.shells import Shell


class TestPublish:
    def test_a_boolean_is_not_a_number_of_seconds(self, client: Client, topic: str) -> None:
        publishing: list[dict[str, Any]] = [{"delay": True}, {"delay": False}, {"ttl": True}, {"timeout": True}]
        producing: list[dict[str, Any]] = [{"linger": True}, {"timeout": False}]
        for options in publishing:
            with pytest.raises((ValueError, BadHeader), match=f"invalid {next(iter(options))} (True|False): it must"):
                client.publish(topic, b"x", **options)
        for options in producing:
            with pytest.raises(ValueError, match=f"invalid {next(iter(options))} (True|False): it must be"):
                client.producer(**options)
        with pytest.raises(ValueError, match="invalid timeout True"):
            Client(timeout=True)
        client.publish(topic, b"x")
        with client.subscribe(topic, group=f"{topic}-g", start="earliest") as subscription:
            message = next(iter(subscription))
            with pytest.raises(ValueError, match="invalid delay True"):
                message.nack(True)
            message.ack()

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
                        proxy.force_reconnect()
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
