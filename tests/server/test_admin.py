"""The admin API, and the description of all that the HTTP port answers."""

from __future__ import annotations

import base64
import html
import http.client
import re
import socket
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.routing import Route

from penstock import errors
from penstock.client.sync import Client
from penstock.errors import PenstockError
from penstock.server.http import endpoints
from penstock.server.settings import SETTINGS
from penstock.web.endpoints import BODY_BYTES_MAX, STATUSES, application, status_of
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Serve
from tests.support.web import ask, basic, get

# ---- topics


def test_a_topic_is_made_looked_at_altered_and_deleted(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Client(f"127.0.0.1:{server.port}") as client:
        policy = {"durability": "flush"}
        made = ask(server, "POST", "/admin/topics", {"name": "orders", "partitions": 2, "policy": policy})
        client.publish("orders.eu", b"hello")
        found = get(server, "/admin/topics/orders")
        altered = ask(server, "PATCH", "/admin/topics/orders", {"partitions": 3, "policy": {"retain_ms": 5000}})
        # One way to make a topic, whatever the door: this is what a client sees.
        seen = client.topic("orders")
        deleted = ask(server, "DELETE", "/admin/topics/orders")
        gone = get(server, "/admin/topics/orders")

    assert (made.status, made.json["partitions"], made.json["policy"]["durability"]) == (201, 2, "flush")
    assert sum(row["committed"] for row in found.json["positions"]) == 1
    assert (altered.status, altered.json["partitions"]) == (200, 3)
    assert (altered.json["policy"]["durability"], altered.json["policy"]["retain_ms"]) == ("flush", 5000)
    assert seen.partitions == 3
    assert (deleted.status, deleted.body) == (204, b"")
    assert (gone.status, gone.code) == (404, "UNKNOWN_TOPIC")


def test_topics_are_listed_a_page_at_a_time(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        for name in ("a", "b", "c"):
            assert ask(server, "POST", "/admin/topics", {"name": name}).status == 201

        every, page = get(server, "/admin/topics").json, get(server, "/admin/topics?limit=1&offset=1").json

    assert [topic["name"] for topic in every["topics"]] == ["a", "b", "c"]
    assert ([topic["name"] for topic in page["topics"]], page["total"]) == (["b"], 3)


def test_a_name_may_have_a_slash(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        assert ask(server, "POST", "/admin/topics", {"name": "a/b"}).status == 201
        assert ask(server, "POST", "/admin/groups", {"name": "x/reset", "pattern": "a/b"}).status == 201

        assert get(server, "/admin/topics/a/b").json["name"] == "a/b"
        assert get(server, "/admin/topics/a%2Fb").json["name"] == "a/b"
        assert get(server, "/admin/groups/x/reset").json["name"] == "x/reset"
        assert ask(server, "POST", "/admin/groups/x/reset/reset", {"start": "earliest"}).json["name"] == "x/reset"


# ---- groups and dead letters


def test_a_group_is_made_reset_and_deleted(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Client(f"127.0.0.1:{server.port}") as client:
        client.publish_many([("orders", b"x")] * 5)
        made = ask(server, "POST", "/admin/groups", {"name": "clerks", "pattern": "orders", "start": "earliest"})
        reset = ask(server, "POST", "/admin/groups/clerks/reset", {"start": {"offset": 3}})
        again = ask(server, "POST", "/admin/groups/clerks/reset", {"start": {"time": "-1h"}})
        whole = ask(server, "POST", "/admin/groups", {"name": "whole", "topic": "orders"})
        neither = ask(server, "POST", "/admin/groups", {"name": "neither"})
        both = ask(server, "POST", "/admin/groups", {"name": "both", "topic": "orders", "pattern": "orders"})
        ask(server, "DELETE", "/admin/groups/whole")
        bodies = ({}, *({"start": start} for start in ({"time": "soon"}, {"offset": True}, {"offset": 10**30})))
        wrong = [ask(server, "POST", "/admin/groups/clerks/reset", body) for body in bodies]
        listed = get(server, "/admin/groups")
        deleted = ask(server, "DELETE", "/admin/groups/clerks")
        gone = get(server, "/admin/groups/clerks")

    assert (made.status, made.json["lag"]) == (201, 5)
    assert (reset.status, reset.json["lag"]) == (200, 2)
    assert (again.status, again.json["lag"]) == (200, 5)
    assert (whole.status, whole.json["pattern"]) == (201, "orders orders.>")
    assert [neither.status, both.status] == [400, 400]
    assert [(each.status, each.json["code"]) for each in wrong] == [(400, "BAD_REQUEST")] * 4
    assert [group["lag"] for group in listed.json["groups"]] == [5], "nothing was reset"
    assert [group["name"] for group in listed.json["groups"]] == ["clerks"]
    assert deleted.status == 204
    assert (gone.status, gone.code) == (404, "UNKNOWN_GROUP")


def test_delayed_messages_are_listed_and_cancelled(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Client(f"127.0.0.1:{server.port}") as client:
        client.publish("orders", b"\x00later", delay=3600)
        [message] = get(server, "/admin/delayed").json["messages"]
        assert (message["subject"], base64.b64decode(message["value"])) == ("orders", b"\x00later")
        body = {"pattern": ">", "offsets": [message["offset"]]}
        assert ask(server, "POST", "/admin/delayed/cancel", body).json == {"cancelled": 1}
        assert get(server, "/admin/delayed?pattern=orders").json == {"messages": [], "total": 0}


def test_dead_letters_are_listed_and_sent_again(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Client(f"127.0.0.1:{server.port}") as client:
        with client.subscribe("orders", group="clerks") as subscription:
            client.publish("orders", b"\x00bad")
            next(iter(subscription)).reject()
            while not (letters := get(server, "/admin/dead-letters").json["letters"]):
                pass
        redriven = ask(server, "POST", "/admin/dead-letters/redrive", {"pattern": ">"})
        left, every = (
            get(server, "/admin/dead-letters"),
            get(server, "/admin/dead-letters?redriven=true&pattern=orders"),
        )
        topic = get(server, "/admin/topics/orders")

    [letter] = letters
    assert (letter["subject"], letter["group"], base64.b64decode(letter["value"])) == ("orders", "clerks", b"\x00bad")
    assert redriven.json == {"redriven": 1, "skipped": 0, "reason": None}
    assert (left.json["letters"], len(every.json["letters"])) == ([], 1)
    assert topic.json["positions"][0]["committed"] == 2


def test_topics_are_refreshed(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Client(f"127.0.0.1:{server.port}") as client:
        client.publish_many([("orders", b"x"), ("refunds", b"x")])
        before = get(server, "/admin/refresh-status?topic=orders")
        missing = ask(server, "POST", "/admin/refresh-topic", {"topics": ["orders", "none"]})
        still = get(server, "/admin/refresh-status?topic=orders")
        begun = ask(server, "POST", "/admin/refresh-topic", {"topics": ["orders", "refunds"]})
        # Nobody reads it: there is nobody to wait for.
        while get(server, "/admin/refresh-status?topic=orders").json["state"] != "COMPLETED":
            pass
        bodies: list[dict[str, Any]] = [{}, {"topics": []}, {"topic": 7}]
        wrong = [ask(server, "POST", "/admin/refresh-topic", body).status for body in bodies]

    assert (before.json["state"], still.json["state"]) == ("IDLE", "IDLE")
    assert (missing.status, missing.code) == (404, "UNKNOWN_TOPIC")
    assert begun.status == 202
    assert [refresh["topic"] for refresh in begun.json["refreshes"]] == ["orders", "refunds"]
    assert wrong == [400, 400, 400]


# ---- settings and figures


def test_settings_are_told_with_their_origin_and_without_secrets(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_token="s3cret", flow_buffer=77) as server:
        answer = get(server, "/admin/config", Authorization="Bearer s3cret")

    settings = answer.json["settings"]
    assert list(settings) == list(SETTINGS)
    assert settings["flow.buffer"] == {"value": 77, "from": "environment PENSTOCK_FLOW_BUFFER"}
    assert settings["auth.token"] == {"value": "***", "from": "environment PENSTOCK_AUTH_TOKEN"}
    assert settings["topic.partitions"] == {"value": 1, "from": "default"}
    assert b"s3cret" not in answer.body


def test_statistics_are_those_of_varz(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Flux(server):
        found, varz = get(server, "/admin/statistics").json, get(server, "/varz").json

    changing = {"now", "uptime", "mem", "loop_stalls", "limits", "unflushed_bytes"}
    assert {name: value for name, value in found.items() if name not in changing} == {
        name: value for name, value in varz.items() if name not in changing
    }


# ---- who may


def test_without_the_right_words_nothing_is_told_or_done(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_user="ann", auth_password="pa:ss", auth_token="t0ken") as server:
        wrong: list[dict[str, str]] = [
            {},
            basic("ann", "wrong"),
            basic("bob", "pa:ss"),
            {"Authorization": "Basic not base64"},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer "},
            {"Authorization": "t0ken"},
        ]
        for headers in wrong:
            refused = ask(server, "POST", "/admin/topics", {"name": "orders"}, headers=headers)
            assert (refused.status, refused.code) == (401, "UNAUTHORIZED")
            assert refused.headers["www-authenticate"].startswith("Basic")
        found = get(server, "/varz", Authorization="Bearer t0ken").json["since_start"]["unauthorized"]
        assert found == len(wrong)

        listed = ask(server, "GET", "/admin/topics", headers=basic("ann", "pa:ss"))
        assert (listed.status, listed.json["topics"]) == (200, [])
        assert get(server, "/admin/topics", Authorization="Bearer t0ken").status == 200
        # Whether it is healthy is no secret. Figures name topics and clients.
        for path in ("/healthz", "/health", "/openapi.json", "/docs"):
            assert get(server, path).status == 200, path
        for path in ("/metrics", "/varz", "/connz", "/subsz"):
            assert get(server, path).status == 401, path
            assert get(server, path, Authorization="Bearer t0ken").status == 200, path


def test_every_endpoint_that_tells_or_changes_is_guarded(tmp_path: Path) -> None:
    every = endpoints(_of_a_server(test_endpoints=True))

    free = {endpoint.path for endpoint in every if not endpoint.guarded}

    assert free == {
        "/healthz",
        "/health",
        "/openapi.json",
        "/docs",
        "/pipe/status",
    }
    assert all(endpoint.guarded for endpoint in every if endpoint.method != "GET")


# ---- what is wrong


WRONG: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/admin/topics", {}, 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", {"name": 7}, 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", {"name": "a b"}, 400, "BAD_SUBJECT"),
    ("POST", "/admin/topics", {"name": "$x"}, 400, "BAD_SUBJECT"),
    ("POST", "/admin/topics", {"name": "a", "partitions": 0}, 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", {"name": "a", "partitions": True}, 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", {"name": "a", "policy": {"retain_ms": -1}}, 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", {"name": "a", "polizy": {}}, 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", {"name": "there"}, 409, "TOPIC_CONFLICT"),
    ("POST", "/admin/topics", {"name": "there.below"}, 409, "TOPIC_CONFLICT"),
    ("POST", "/admin/topics", b"{", 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", b"[" * 100_000, 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", b"[]", 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", b"\xff", 400, "BAD_REQUEST"),
    ("PATCH", "/admin/topics/none", {"partitions": 2}, 404, "UNKNOWN_TOPIC"),
    ("PATCH", "/admin/topics/there", {"partitions": 0}, 400, "BAD_REQUEST"),
    ("DELETE", "/admin/topics/none", None, 404, "UNKNOWN_TOPIC"),
    ("GET", "/admin/topics?limit=-1", None, 400, "BAD_REQUEST"),
    ("GET", "/admin/topics?offset=" + "9" * 30, None, 400, "BAD_REQUEST"),
    ("POST", "/admin/groups", {"name": "g"}, 400, "BAD_REQUEST"),
    ("POST", "/admin/groups", {"name": "g", "pattern": "a..b"}, 400, "BAD_SUBJECT"),
    ("POST", "/admin/groups", {"name": "g", "pattern": "a", "mode": "odd"}, 400, "BAD_REQUEST"),
    ("POST", "/admin/groups", {"name": "g", "pattern": "a", "mode": []}, 400, "BAD_REQUEST"),
    ("POST", "/admin/groups", {"name": "g", "pattern": "a", "start": 5}, 400, "BAD_REQUEST"),
    ("POST", "/admin/groups/none/reset", {"start": "earliest"}, 404, "UNKNOWN_GROUP"),
    ("GET", "/admin/dead-letters?redriven=maybe", None, 400, "BAD_REQUEST"),
    ("POST", "/admin/dead-letters/redrive", {}, 400, "BAD_REQUEST"),
    ("POST", "/admin/delayed/cancel", {}, 400, "BAD_REQUEST"),
    ("GET", "/admin/delayed?limit=x", None, 400, "BAD_REQUEST"),
    ("POST", "/admin/dead-letters/purge", {}, 400, "BAD_REQUEST"),
    ("POST", "/admin/dead-letters/purge", {"pattern": ">", "since_us": "now"}, 400, "BAD_REQUEST"),
    ("GET", "/admin/dead-letters?since_us=-1", None, 400, "BAD_REQUEST"),
    ("POST", "/admin/dead-letters/redrive", {"pattern": ">", "offsets": [-1]}, 400, "BAD_REQUEST"),
    ("POST", "/admin/statistics", {}, 405, "BAD_REQUEST"),
    ("POST", "/admin/topics", b'{"name":"\\ud800"}', 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", b'{"name":NaN}', 400, "BAD_REQUEST"),
    ("POST", "/admin/topics", b'{"name":[' + b"0," * 70_000 + b"0]}", 400, "BAD_REQUEST"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Serve(tmp_path_factory.mktemp("admin")) as started:
        assert ask(started, "POST", "/admin/topics", {"name": "there"}).status == 201
        yield started


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong[0]} {wrong[1]} {str(wrong[2])[:40]}"[:80])
def test_what_is_wrong_is_said_with_a_code(server: Serve, wrong: tuple[str, str, Any, int, str]) -> None:
    method, path, body, status, code = wrong
    headers = {"Content-Type": "application/json"} if isinstance(body, bytes) else {}

    answer = ask(server, method, path, body, headers=headers)

    assert (answer.status, answer.code) == (status, code), answer.body
    assert "Traceback" not in answer.json["text"]
    assert "internal error" not in answer.json["text"]
    assert [topic["name"] for topic in get(server, "/admin/topics").json["topics"]] == ["there"]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_foreign_page_can_send_is_refused(server: Serve, kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}

    answer = ask(server, "POST", "/admin/topics", b'{"name": "forged"}', headers=headers)

    assert (answer.status, answer.code) == (400, "BAD_REQUEST")
    assert "application/json" in answer.json["text"]


def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(server: Serve) -> None:
    head = "POST /admin/topics HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {1 << 40}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.ports["http"]), PATIENCE_S) as peer:
        peer.sendall(head.encode())
        answer = b""
        while b"}" not in answer:
            answer += peer.recv(10_000)

    assert answer.startswith(b"HTTP/1.1 413")
    assert b"REQUEST_TOO_LARGE" in answer


def test_a_body_that_grows_too_large_is_refused(server: Serve) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=PATIENCE_S)
    parts = [b" " * (64 << 10)] * (BODY_BYTES_MAX // (64 << 10) + 1)
    try:
        connection.request(
            "POST", "/admin/topics", iter(parts), {"Content-Type": "application/json"}, encode_chunked=True
        )
        answer = connection.getresponse()
        assert answer.status == 413
    finally:
        connection.close()


def test_a_body_as_large_as_is_allowed_is_read(server: Serve) -> None:
    body = b'{"name": 7}'.ljust(BODY_BYTES_MAX)

    answer = ask(server, "POST", "/admin/topics", body, headers={"Content-Type": "application/json"})

    assert answer.status == 400


def test_every_error_has_a_status() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)]
    statuses = {kind: status_of(kind.__new__(kind)) for kind in kinds}

    assert set(statuses.values()) <= {400, 401, 403, 404, 409, 410, 413, 429, 500, 503, 507}
    assert statuses[errors.UnknownTopic] == 404
    assert statuses[errors.Overloaded] == 503
    assert statuses[errors.LogFailed] == 500
    assert statuses[errors.BadHeader] == 400
    assert set(STATUSES) <= set(kinds)


# ---- the description


def _of_a_server(**settings: object) -> Any:
    """As much of a server as its endpoints ask for."""
    from types import SimpleNamespace

    config = SimpleNamespace(server=SimpleNamespace(**settings))
    return cast(Any, SimpleNamespace(version="1.2.3", config=config, broker=None, pipes=None, settings={}))


def test_every_route_is_described_and_nothing_else(tmp_path: Path) -> None:
    fake = _of_a_server(test_endpoints=True)
    unused = cast(Any, None)
    app = application(endpoints(fake), authorize=unused, read_json=unused, encode=unused, describe=unused)
    routed = {
        (method, re.sub(r":\w+\}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    with Serve(tmp_path, server_test_endpoints=True) as server:
        description = get(server, "/openapi.json").json
        page = html.unescape(get(server, "/docs").body.decode())

    described = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert described == routed
    assert description["openapi"] == "3.1.0"
    for method, path in described:
        assert f"<b>{method}</b> {path}</h2>" in page
        operation = description["paths"][path][method.lower()]
        named = {field["name"] for field in operation.get("parameters", ()) if field["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))
        assert ("requestBody" in operation) == (method in ("POST", "PUT", "PATCH"))


def test_the_page_needs_nothing_from_elsewhere(server: Serve) -> None:
    answer = get(server, "/docs")

    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(rb"https?://|<script", answer.body)


def test_the_server_stops_though_somebody_holds_a_request_open(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, socket.create_connection(("127.0.0.1", server.ports["http"])) as peer:
        peer.sendall(
            b"POST /admin/topics HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 9\r\n\r\n{"
        )
        assert server.stop().code == 0
