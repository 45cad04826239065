"""A topic that enforces its schema refuses what does not match at every door, and takes what does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nats
import pytest

from penstock import Client
from penstock.errors import DeliveryFailed, SchemaConflict, SchemaMismatch, UnknownSchema
from tests.support.frames import Frames
from tests.support.lengths import PUBLISH, Cursus, Qb
from tests.support.provider_door import DATA, DISCONNECT
from tests.support.provider_door import Client as Provider
from tests.support.server import Flux, Serve
from tests.support.web import ask

GOOD = b'{"id": 1}'
BAD = b'{"id": "x"}'
REASON = 'topic orders: the value does not match version 1 of its schema: at /id: "x" is not of type "integer"'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve"), server_test_endpoints="true") as made:
        with Client(made.url) as client:
            client.create_topic("orders", schema_enforced=True)
            client.set_schema("orders", "id bigint NOT NULL")
        yield made


def _stored(server: Serve) -> list[bytes]:
    with Client(server.url) as client:
        return [message.value for message in client.fetch("orders")]


def _by_flux(server: Serve, value: bytes) -> str:
    with Flux(server) as client:
        return client.publish("orders", value)


def _by_nats(server: Serve, value: bytes) -> str:
    async def publish() -> str:
        errors: list[str] = []

        async def note(error: Exception) -> None:
            errors.append(str(error))

        client = await nats.connect(server.url, error_cb=note)
        await client.publish("orders", value)
        await client.flush()
        await client.drain()
        return " ".join(errors)

    return asyncio.run(publish())


def _by_qb(server: Serve, value: bytes) -> str:
    with Qb(server) as client:
        if value == GOOD:
            return str(client.done(PUBLISH, value, topic="orders", client_id="a"))
        return client.refused(PUBLISH, value, topic="orders", client_id="a")


def _by_cursus(server: Serve, value: bytes) -> str:
    with Cursus(server) as client:
        return client.ask(b"PUBLISH topic=orders message=" + value)


def _by_provider(server: Serve, value: bytes) -> str:
    with Provider(server) as client:
        client.write_json(DATA, 1, topic="orders", data=json.loads(value))
        found = client.frame()
        return found.payload.decode() if found.type == DISCONNECT else ""


def _by_http(server: Serve, value: bytes) -> str:
    if value == GOOD:
        return _by_flux(server, value)  # the endpoint publishes no JSON
    return str(ask(server, "POST", "/test/inject-messages", {"topic": "orders", "prefix": BAD.decode()}).json["text"])


def _by_publish(server: Serve, value: bytes) -> str:
    with Client(server.url) as client:
        return _error_of(lambda: client.publish("orders", value))


def _by_producer(server: Serve, value: bytes) -> str:
    def produce() -> None:
        with client.producer() as producer:
            producer.publish("orders", value)

    with Client(server.url) as client:
        return _error_of(produce)


def _by_transaction(server: Serve, value: bytes) -> str:
    def commit() -> None:
        with client.transaction() as transaction:
            transaction.publish("orders", value)

    with Client(server.url) as client:
        return _error_of(commit)


def _error_of(do: Callable[[], Any]) -> str:
    try:
        do()
    except (SchemaMismatch, DeliveryFailed) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "publish",
    [
        _by_flux,
        _by_nats,
        _by_qb,
        _by_cursus,
        _by_provider,
        _by_http,
        _by_publish,
        _by_producer,
        _by_transaction,
    ],
)
def test_every_door_refuses_what_does_not_match(server: Serve, publish: Callable[[Serve, bytes], str]) -> None:
    before = _stored(server)

    refused, accepted = publish(server, BAD), publish(server, GOOD)

    assert "does not match version 1 of its schema" in refused
    assert "schema" not in accepted
    assert [json.loads(value) for value in _stored(server)[len(before) :]] == [{"id": 1}]


def test_messages_of_one_publish_are_refused_one_by_one_and_those_of_a_producer_together(server: Serve) -> None:
    before = len(_stored(server))
    with Frames(server) as frames:
        receipts = frames.publish("orders", GOOD, BAD, b"", GOOD, tombstones=[False, False, True, False])
    with Client(server.url) as client, pytest.raises(DeliveryFailed) as caught:
        client.publish_many([("orders", GOOD), ("orders", BAD)])

    assert [receipt["text"] for receipt in receipts if isinstance(receipt, dict)] == [REASON]
    assert len(_stored(server)) == before + 3
    failed = [(value, str(error)) for _, value, error in caught.value.failed]
    assert failed == [(GOOD, f"message 1 of the batch: {REASON}"), (BAD, f"message 1 of the batch: {REASON}")]


def test_a_producer_continues_after_a_refused_batch(server: Serve) -> None:
    before = len(_stored(server))
    with Client(server.url) as client:
        producer = client.producer(linger=0)
        for number in range(300):
            producer.publish("orders", BAD if number == 150 else b'{"id": %d}' % number)
            if number in (149, 150):
                with pytest.raises(DeliveryFailed) if number == 150 else nullcontext():
                    producer.flush()
        producer.close()

    assert [json.loads(value)["id"] for value in _stored(server)[before:]] == [n for n in range(300) if n != 150]


def test_versions_survive_kill_9_and_are_shown_at_every_door(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Client(server.url) as client:
            client.create_topic("orders", schema_enforced=True)
            with pytest.raises(UnknownSchema):
                client.schema("orders")
            first = client.set_schema("orders", "id bigint NOT NULL")
            second = client.set_schema("orders", '{"type": "object", "properties": {"id": {"type": "integer"}}}')
            with pytest.raises(SchemaConflict):
                client.set_schema("orders", "id string")
        server.kill()
        server.restart()
        with Client(server.url) as client:
            assert (client.schema("orders", 1), client.schema("orders")) == (first, second)
            assert [each.version for each in client.schemas("orders")] == [1, 2]
            assert not client.check_schema("orders", "id string").compatible
            assert client.check_schema("orders", "id double").compatible
            with pytest.raises(SchemaMismatch, match="version 2"):
                client.publish("orders", b"[]")
            assert second.to_ddl() == "id BIGINT"
            assert '"required"' in first.to_json_schema()
            limits = client.statistics()["limits"]
            assert limits["schema_versions"]["used"] == 2
        path = "/admin/topics/orders/schema"
        assert ask(server, "GET", path).json["version"] == 2
        assert ask(server, "GET", f"{path}?version=1").json["schema"] == first.text
        assert [each["version"] for each in ask(server, "GET", f"{path}s").json["schemas"]] == [1, 2]
        assert ask(server, "POST", f"{path}/check", {"schema": "id string"}).json["compatible"] is False
        assert ask(server, "POST", path, {"schema": "id string"}).status == 409
        assert ask(server, "POST", path, {"schema": "{"}).status == 400
        assert ask(server, "GET", f"{path}?version=3").status == 404
        assert ask(server, "POST", path, {"schema": "id double"}).json["version"] == 3
