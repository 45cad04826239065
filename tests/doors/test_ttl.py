"""A TTL at every door, with real clients: what was published with one is delivered, and after its end it is not."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import nats
import pyarrow
import pytest

from penstock import AsyncClient, BrokerClient, Client, Outgoing
from penstock.errors import BadHeader
from tests.support.commands import Penstock, client, penstock, server  # noqa: F401
from tests.support.lengths import consume
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Nats, Serve, hpub


def until(found: Callable[[], Any], expected: object) -> None:
    """Wait until it is so: nothing here asserts how long that takes."""
    deadline = time.monotonic() + PATIENCE_S
    while found() != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found() == expected


def by_nats(server: Serve, topic: str) -> None:  # noqa: F811
    async def publish() -> None:
        connection = await nats.connect(server.url)
        await connection.publish(topic, b"nats", headers={"Nats-TTL": "1s"})
        await connection.close()

    asyncio.run(publish())


def by_asyncio(server: Serve, topic: str) -> None:  # noqa: F811
    async def publish() -> None:
        async with AsyncClient(server.url) as other, other.producer() as producer:
            await other.publish(topic, b"asyncio", ttl=1)
            await producer.publish(topic, b"asyncio producer", ttl=1)
            async with other.transaction() as transaction:
                await transaction.publish(topic, b"asyncio transaction", ttl=1)

    asyncio.run(publish())


def publish_everywhere(server: Serve, client: Client, penstock: Penstock, topic: str, path: Path) -> int:  # noqa: F811
    """Publish short-lived messages; how many."""
    client.publish(topic, b"client", ttl=1)
    client.publish(topic, b"client header", headers={"nats-ttl": "1"})
    client.publish(topic, b"client id", ttl="1s", message_id="1")
    client.publish_many([Outgoing(topic, b"many", ttl=timedelta(seconds=1))])
    with client.producer() as producer:
        for number in range(3):
            producer.publish(topic, b"producer %d" % number, ttl=1)
            producer.publish(topic, b"lasting producer %d" % number)
    with client.transaction() as transaction:
        transaction.publish(topic, b"transaction", ttl=1.0)
        transaction.publish(topic, b"lasting transaction")
    assert penstock("publish", topic, "cli", "--ttl", "1").code == 0
    path.write_text('{"value": "line", "ttl": 1}\n{"value": "lasting line"}\n{"value": "text line", "ttl": "1s"}\n')
    assert penstock("publish", topic, "--file", str(path)).code == 0
    with Flux(server) as flux:
        assert flux.publish_with_headers(topic, b"flux", nats_ttl="1").startswith("+OK")
    by_nats(server, topic)
    by_asyncio(server, topic)
    with BrokerClient(port=server.ports["quiet"]) as qb:
        assert qb.publish(topic, b"qb", None, **{"Nats-TTL": "1"})
    client.publish(topic, b"lasting last", ttl="never")
    return 4 + 3 + 1 + 1 + 2 + 1 + 1 + 3 + 1


@pytest.fixture(scope="module")
def topic(
    server: Serve,  # noqa: F811
    client: Client,  # noqa: F811
    penstock: Penstock,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """One whose short-lived messages have expired: of every door."""
    client.create_group("early", "shortlived", start="earliest")
    path = tmp_path_factory.mktemp("ttl") / "lines.jsonl"
    count = publish_everywhere(server, client, penstock, "shortlived", path)
    stored = [message.value for message in client.fetch("shortlived", expired=True)]
    assert len(stored) == count + 6
    until(lambda: [each.value for each in client.fetch("shortlived")], lasting(client))
    return "shortlived"


def lasting(client: Client) -> list[bytes]:  # noqa: F811
    values = [message.value for message in client.fetch("shortlived", expired=True)]
    return [value for value in values if value.startswith(b"lasting")]


def test_fetch_leaves_out_what_has_expired_unless_asked(client: Client, topic: str) -> None:  # noqa: F811
    assert len(lasting(client)) == 6
    tables = list(client.fetch(topic, arrow=True, columns=["value", "offset"]))
    rows = pyarrow.Table.from_batches(tables)
    assert rows["value"].to_pylist() == lasting(client)
    assert rows["offset"].to_pylist() == [message.offset for message in client.fetch(topic)]
    first, second = [message.offset for message in client.fetch(topic)][:2]
    assert [each.value for each in client.fetch(topic, 0, first + 1, end=second + 1)] == lasting(client)[1:2]
    (cut,) = client.fetch(topic, 0, first + 1, end=second + 1, arrow=True, columns=["value"])
    assert cut["value"].to_pylist() == lasting(client)[1:2]
    assert [each.value for each in client.fetch(topic, count=2)] == lasting(client)[:2]


def test_no_reader_gets_what_has_expired(server: Serve, client: Client, topic: str) -> None:  # noqa: F811
    expected = lasting(client)
    with client.subscribe(topic, start="earliest") as subscription:
        assert [subscription.get(timeout=PATIENCE_S).value for _ in expected] == expected
    with Flux(server) as flux:
        flux.send(f"PULL {topic} 100\r\n")
        assert [message.payload for message in flux.until_ok()[0]] == expected
        flux.send("REPLAY FIRST 1000\r\n")
        assert [each.payload for each in flux.until_ok()[0] if each.subject == topic] == expected
    assert consume(server, topic) == expected


def test_a_group_is_not_behind_by_what_has_expired(
    server: Serve,  # noqa: F811
    client: Client,  # noqa: F811
    penstock: Penstock,  # noqa: F811
    topic: str,
) -> None:
    expected = lasting(client)
    with client.subscribe(topic, group="early") as subscription:
        for value in expected:
            message = subscription.get(timeout=PATIENCE_S)
            assert message.value == value
            message.ack()
        subscription.flush()
    until(lambda: client.group("early").lag, 0)
    expired = len(list(client.fetch(topic, expired=True))) - len(expected)
    group = client.group("early")
    assert (group.expired, group.lost, group.dead_lettered) == (expired, 0, 0)
    assert f", {expired} expired" in penstock("group", "describe", "early").out
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/varz") as answer:
        assert json.load(answer)["expired"] >= expired
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/metrics") as answer:
        metrics = answer.read().decode()
    assert f'broker_consumer_expired_total{{consumer="early"}} {expired}.0' in metrics
    assert "broker_messages_expired_total " in metrics


def test_the_command_line_shows_expired_messages_if_asked(
    client: Client,  # noqa: F811
    penstock: Penstock,  # noqa: F811
    topic: str,
    tmp_path: Path,
) -> None:
    assert [each["value"].encode() for each in penstock("fetch", topic, "--json").documents] == lasting(client)
    stored = len(list(client.fetch(topic, expired=True)))
    assert len(penstock("fetch", topic, "--json", "--expired").documents) == stored
    written = penstock("fetch", topic, "--format", "parquet", "--output", str(tmp_path / "t.parquet")).out
    assert written.startswith("wrote 6 messages ")


def test_a_copy_has_what_has_not_expired(client: Client, penstock: Penstock, topic: str) -> None:  # noqa: F811
    assert penstock("topic", "copy", topic, "lasting-copy").code == 0
    assert [each.value for each in client.fetch("lasting-copy", expired=True)] == lasting(client)
    client.publish("long", b"x", ttl="1h")
    assert penstock("topic", "copy", "long", "long-copy").code == 0
    (copied,) = client.fetch("long-copy")
    assert copied.headers == {"Nats-TTL": "1h"}


def test_an_invalid_ttl_is_refused_at_every_door(
    server: Serve,  # noqa: F811
    client: Client,  # noqa: F811
    penstock: Penstock,  # noqa: F811
) -> None:
    for ttl in (0, 0.5, -1, float("nan"), "1d", "500ms", timedelta(milliseconds=1)):
        with pytest.raises(BadHeader, match="must be seconds"):
            client.publish("refused", b"x", ttl=ttl)
    with pytest.raises(BadHeader, match="must be seconds"):
        client.publish("refused", b"x", headers={"Nats-TTL": "soon"})
    with pytest.raises(BadHeader), client.transaction() as transaction:
        transaction.publish("refused", b"x", ttl="soon")
    done = penstock("publish", "refused", "x", "--ttl", "1d")
    assert (done.code, "must be seconds" in done.err) == (2, True)
    with Flux(server) as flux:
        assert "is not a TTL" in flux.publish_with_headers("refused", b"x", nats_ttl="soon")
    with Nats(server) as plain:
        plain.send(hpub("refused", b"x", nats_ttl="0"))
        assert "is not a TTL" in plain.line()
    with BrokerClient(port=server.ports["quiet"]) as qb:
        assert not qb.publish("refused", b"x", None, **{"Nats-TTL": "soon"})
    assert "refused" not in [topic.name for topic in client.topics()] or not list(client.fetch("refused"))


def test_a_producer_stores_messages_with_a_ttl_once(client: Client) -> None:  # noqa: F811
    """They are numbered like all others: only ids and delays need batches of their own."""
    with client.producer() as producer:
        for number in range(5000):
            producer.publish("numbered", b"%d" % number, ttl="1h" if number % 2 else None)
    assert [int(message.value) for message in client.fetch("numbered")] == list(range(5000))
    assert producer.duplicates == 0
    with client.producer() as producer:
        producer.publish("numbered", b"x", ttl="1h", message_id="7")
        producer.publish("numbered", b"again", ttl="1h", message_id="7")
    assert producer.duplicates == 1
