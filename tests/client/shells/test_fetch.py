"""Fetching and administration with both clients."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow
import pytest

import penstock.model
from penstock import Client, Outgoing
from penstock.errors import (
    BadRequest,
    OffsetOutOfRange,
    TopicConflict,
    UnknownGroup,
    UnknownTopic,
)
from tests.support.client_calls import address_of, values
from tests.support.process import PATIENCE_S
from tests.support.proxy import Proxy
from tests.support.server import Serve
from tests.support.shells import Shell


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
        monkeypatch.delattr(penstock.model, "arrow", raising=False)
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
