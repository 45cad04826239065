"""The schemas of topics at the endpoints that clients of Confluent's Schema Registry know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client.sync import Client
from tests.support.server import Serve
from tests.support.web import Answer, ask, get

ROOT = "/schema-registry"
V1 = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
V2 = {**V1, "properties": {**V1["properties"], "note": {"type": "string"}}}  # type: ignore[dict-item]
BAD = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("registry"), topic_schema_compatibility="backward") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.port}") as found:
        yield found


def body(schema: Any, **more: Any) -> dict[str, Any]:
    return {"schema": json.dumps(schema), "schemaType": "JSON", **more}


def post(server: Serve, path: str, document: dict[str, Any]) -> Answer:
    return ask(server, "POST", ROOT + path, document)


def test_versions_are_registered_found_and_compared(server: Serve, client: Client) -> None:
    client.create_topic("orders")
    versions = "/subjects/orders-value/versions"

    first = post(server, versions, body(V1)).json["id"]
    assert post(server, versions, body(V1, references=[], metadata=None)).json == {"id": first}
    second = post(server, versions + "?normalize=false", body(V2)).json["id"]
    # An older one is not registered again.
    assert post(server, versions, body(V1)).json == {"id": first}

    assert get(server, f"{ROOT}/subjects?deleted=false").json == ["orders-value"]
    assert get(server, ROOT + versions).json == [1, 2]
    newest = get(server, f"{ROOT}{versions}/latest").json
    assert (newest["id"], newest["version"], newest["schemaType"]) == (second, 2, "JSON")
    assert json.loads(newest["schema"]) == V2
    assert json.loads(get(server, f"{ROOT}{versions}/1").json["schema"]) == V1
    assert json.loads(get(server, f"{ROOT}/schemas/ids/{first}").json["schema"]) == V1
    assert post(server, "/subjects/orders-value", body(V1)).json["version"] == 1
    assert post(server, f"/compatibility{versions}/latest", body(V2)).json == {"is_compatible": True, "messages": []}
    refused = post(server, f"/compatibility{versions}/1", body(BAD)).json
    assert (refused["is_compatible"], len(refused["messages"])) == (False, 1)
    every = post(server, f"/compatibility{versions}?verbose=true", body(V2)).json
    assert every == {"is_compatible": True, "messages": []}
    assert not post(server, f"/compatibility{versions}", body(BAD)).json["is_compatible"]
    # It is the schema that our own client sees.
    assert json.loads(client.schema("orders").text) == V2


def test_a_schema_in_ddl_is_shown_as_json(server: Serve, client: Client) -> None:
    client.create_topic("lines")
    client.set_schema("lines", "id bigint NOT NULL")

    found = get(server, f"{ROOT}/subjects/lines-value/versions/latest").json

    assert json.loads(found["schema"])["required"] == ["id"]
    assert post(server, "/subjects/lines-value", body(json.loads(found["schema"]))).json["id"] == found["id"]


def test_the_compatibility_of_a_topic_is_changed(server: Serve, client: Client) -> None:
    client.create_topic("levels")
    path = f"{ROOT}/config/levels-value"

    assert get(server, f"{ROOT}/config").json == get(server, path).json == {"compatibilityLevel": "BACKWARD"}
    assert ask(server, "PUT", path, {"compatibility": "FULL"}).json == {"compatibility": "FULL"}
    assert get(server, path).json == {"compatibilityLevel": "FULL"}
    assert client.topic("levels").policy["schema_compatibility"] == "full"


@pytest.mark.parametrize(
    ("method", "path", "document", "status", "code"),
    [
        ("GET", "/subjects/none-value/versions", None, 404, 40401),
        ("GET", "/subjects/there/versions", None, 404, 40401),
        ("GET", "/subjects/there-value/versions/3", None, 404, 40402),
        ("GET", "/schemas/ids/1", None, 404, 40403),
        ("POST", "/subjects/there-value", body(V2), 404, 40403),
        ("POST", "/subjects/there-value/versions", body(BAD), 409, 409),
        ("POST", "/subjects/there-value/versions", {"schema": '{"type": 5}', "schemaType": "JSON"}, 422, 42201),
        ("POST", "/subjects/there-value/versions", {"schema": '{"type": "record"}'}, 422, 42201),
        ("POST", "/subjects/there-value/versions", body(V1, references=[{"name": "a"}]), 422, 42201),
        ("PUT", "/config/there-value", {"compatibility": "BACKWARD_TRANSITIVE"}, 422, 42203),
    ],
)
def test_errors_have_the_codes_of_the_registry(
    server: Serve, client: Client, method: str, path: str, document: dict[str, Any] | None, status: int, code: int
) -> None:
    if "there" not in [topic.name for topic in client.topics()]:
        client.create_topic("there")
        client.set_schema("there", json.dumps(V1))

    found = get(server, ROOT + path) if document is None else ask(server, method, ROOT + path, document)

    assert (found.status, found.json["error_code"]) == (status, code)
    assert found.json["message"]
