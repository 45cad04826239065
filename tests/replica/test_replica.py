"""`penstock replica` as a process of its own, beside a real broker: what it answers, and that no end of either of them
loses a message or doubles one."""

from __future__ import annotations

import base64
import re
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.client.sync import Client
from penstock.client.values import Outgoing
from tests.support.replicas import (
    ReplicaProcess,
    check_copy,
    publishing,
    quiet,
    wait_acknowledged,
    wait_some_more,
)
from tests.support.server import Serve, clean_environment

PRICES = ("AAPL", "GOOGL", "MSFT", "TSLA", "AMZN")
MANY = 5_000
# Larger than any file may be, where there is such a limit.
LARGE = 1 << 20
_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"t{next(_numbers)}"


# ---- what it answers


def test_five_prices_arrive_and_are_found(server: Serve, client: Client, tmp_path: Path) -> None:
    with ReplicaProcess(tmp_path, quiet(server)) as replica:
        assert replica.get("stats")["offsetRange"] == {"min": None, "max": None}
        for number, name in enumerate(PRICES):
            client.publish("price-topic", json={"symbol": name, "price": number}, key=name)
        replica.wait_records(5)

        stats = replica.get("stats")
        assert (stats["segmentCount"], stats["totalRecords"], stats["offsetRange"]) == (1, 5, {"min": 0, "max": 4})
        assert stats["partitions"][0]["nextOffset"] == 5
        files = replica.data.glob("index-1.db*")
        assert 0 < stats["sqliteDbSize"] <= sum(path.stat().st_size for path in files)
        for offset, name in enumerate(PRICES):
            found = replica.get(f"offset/{offset}")
            assert found == replica.get(f"key/{name}")
            assert (found["msgKey"], found["eventType"], found["offset"]) == (name, "MESSAGE", offset)
            assert found["data"] == f'{{"symbol":"{name}","price":{offset}}}'
        assert replica.ask("/api/query/offset/5") == (404, {"error": "no record at offset 5 of partition 0"})
        assert [each["offset"] for each in replica.get("range?from=1&to=3")["records"]] == [1, 2, 3]
        assert replica.get("keys?prefix=A") == {"count": 2, "keys": [{"key": "AAPL"}, {"key": "AMZN"}], "next": None}
        [segment] = replica.get("segments")["segments"]
        assert (segment["segmentId"], segment["file"], segment["range"]) == (1, f"topics/1/0/{0:020}.log", "0-4")
        assert segment["capacity"] == 64 << 20
        wait_acknowledged(replica, client, "price-topic")
        replica.wait_for(lambda: replica.get("health")["broker"]["lag"] == 0)
        health = replica.get("health")
        assert (health["status"], health["segments"], health["records"]) == ("UP", 1, 5)
        assert health["broker"]["connected"]
        committed = client.group("price-topic-group").positions[0].committed
        assert committed == 5


def test_a_replica_has_all_partitions(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.create_topic(topic, partitions=4)
    places = [client.publish(topic, b"%d" % number, key=f"k{number}") for number in range(40)]
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        replica.wait_records(40)

        stats = replica.get("stats")
        sizes = [sum(place.partition == partition for place in places) for partition in range(4)]
        assert [each["totalRecords"] for each in stats["partitions"]] == [size for size in sizes if size]
        assert stats["segmentCount"] == len([size for size in sizes if size]) > 1
        for number, place in enumerate(places):
            found = replica.get(f"offset/{place.offset}?partition={place.partition}")
            assert found == replica.get(f"key/k{number}")
            assert (found["partition"], found["data"]) == (place.partition, str(number))
        [segment] = replica.get(f"segments?partition={places[0].partition}")["segments"]
        assert segment["partition"] == places[0].partition
        wait_acknowledged(replica, client, topic)


def test_whatever_a_message_has_is_kept(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.publish(topic, b"\xff\x00", key=b"a/\xfe", headers={"trace": "ö", "b": '"'})
    client.publish(topic, b"plain", key="with/slash and blank")
    client.publish(topic, b"no key")
    client.publish(topic, b"gone", key="k")
    client.publish(topic, None, key="k")
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        replica.wait_records(5)

        found = replica.get("offset/0")
        assert base64.b64decode(found["dataBase64"]) == b"\xff\x00"
        assert base64.b64decode(found["msgKeyBase64"]) == b"a/\xfe"
        assert found["headers"] == {"trace": "ö", "b": '"'}
        assert replica.get(f"key/{base64.urlsafe_b64encode(b'a/' + bytes([0xFE])).decode()}?base64=true") == found
        assert replica.get("key/with%2Fslash%20and%20blank")["data"] == "plain"
        assert "dataBase64" not in replica.get("offset/1")
        assert replica.get("offset/2")["msgKey"] is None
        assert replica.get("offset/4")["eventType"] == "DELETE"
        assert replica.ask("/api/query/key/k") == (404, {"error": "no value for key 'k'"})
        first = replica.get("keys?limit=1")
        second = replica.get(f"keys?limit=1&after={first['next']}")
        assert [each["key"] for each in first["keys"] + second["keys"]] == ["a/�", "with/slash and blank"]
        assert second["next"] is None


def test_a_pattern_takes_the_subjects_below_a_topic(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.create_topic(topic)
    for subject in (f"{topic}.eu", topic, f"{topic}.us.ny"):
        client.publish(subject, b"x")
    with ReplicaProcess(tmp_path, quiet(server), f"{topic}.>") as replica:
        replica.wait_records(2)
        assert [(each["offset"], each["subject"]) for each in replica.records()] == [
            (0, f"{topic}.eu"),
            (2, f"{topic}.us.ny"),
        ]


def test_a_wrong_question_is_told_what_is_wrong(server: Serve, topic: str, tmp_path: Path) -> None:
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        refused = {
            "offset/x": "offset is 'x': it must be a non-negative integer",
            "offset/-1": "offset is '-1': it must be",
            "offset/9223372036854775808": "offset is '9223372036854775808': it must be",
            "offset/1?partition=x": "partition is 'x'",
            "range?from=3&to=2": "invalid range: from 3 is greater than to 2",
            "range?form=3": "'form' is unknown (did you mean from?): there are from, to, limit, partition",
            "range?limit=1001": "limit is '1001': it must be an integer, 1 to 1000",
            "range?limit=0": "limit is '0'",
            "range?from=1&from=2": "from is repeated",
            "keys?limit=1e3": "limit is '1e3'",
            "keys?after=!": "after is '!': it must be URL-safe base64",
            "key/!?base64=true": "key is '!': it must be URL-safe base64",
            "key/a?base64=yes": "base64 is 'yes': it must be true or false",
            "stats?partition=1": "'partition' is unknown: nothing is expected here",
        }
        for path, told in refused.items():
            status, answer = replica.ask(f"/api/query/{path}")
            assert (status, answer["error"][: len(told)]) == (400, told), path
        assert replica.ask("/api/query/nothing") == (
            404,
            {"error": "unknown path or method: /openapi.json lists them"},
        )
        assert replica.ask("/api/query/stats", "POST")[0] == 405
        assert replica.ask("/api/consumer/resume", "POST") == (200, {"resumed": False})


def test_what_is_answered_is_as_openapi_tells_it(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.publish(topic, b"x", key="k")
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        replica.wait_records(1)
        _, described = replica.ask("/openapi.json")
        queries = {path: methods for path, methods in described["paths"].items() if path.startswith("/api/")}
        assert len(queries) == 8
        for path, methods in queries.items():
            for method, operation in methods.items():
                asked = path.replace("{offset}", "0").replace("{key}", "k")
                for code, url in {"200": asked, "400": f"{asked}?nothing=1"}.items():
                    status, answer = replica.ask(url, method.upper())
                    assert status == int(code), url
                    response = operation["responses"].get(code, operation["responses"]["default"])
                    told = response["content"]["application/json"]["schema"]
                    assert_fits(answer, told, described["components"]["schemas"])
        with urllib.request.urlopen(f"http://127.0.0.1:{replica.port}/docs") as answer:
            page = answer.read().decode()
        assert all(path in page for path in described["paths"])
        # Nothing is loaded from elsewhere.
        assert not re.search(r"https?:|//|<script", page.replace("<!doctype html>", ""))


def assert_fits(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> None:
    """As far as these schemas go."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        [schema] = [each for each in schema["anyOf"] if (each.get("type") == "null") == (value is None)]
    if "enum" in schema:
        assert value in schema["enum"]
        return
    kinds = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list, "null": type(None)}
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert type(value) in [kinds[kind] for kind in allowed], (value, schema)
    if isinstance(value, dict) and "properties" in schema:
        assert set(schema["required"]) <= set(value) <= set(schema["properties"]), value
        for name, inner in value.items():
            assert_fits(inner, schema["properties"][name], schemas)
    elif isinstance(value, list):
        for inner in value:
            assert_fits(inner, schema["items"], schemas)


# ---- whatever ends


def test_a_replica_that_is_killed_loses_nothing_and_doubles_nothing(
    server: Serve, client: Client, topic: str, tmp_path: Path
) -> None:
    seed = 5
    print("seed", seed)
    random = Random(seed)
    client.create_topic(topic, partitions=3)
    with ReplicaProcess(tmp_path, quiet(server), topic, STORAGE_SEGMENT_SIZE="20kB") as replica:
        for _ in range(5):
            with publishing(server.port, topic, MANY // 5):
                wait_some_more(replica, random.randint(1, MANY // 10))
                replica.kill()
            replica.restart()
        check_copy(replica, client, topic, MANY)
        assert replica.get("stats")["segmentCount"] > 3


def test_a_broker_that_is_killed_is_waited_for(topic: str, tmp_path: Path) -> None:
    with Serve(tmp_path / "broker") as server, ReplicaProcess(tmp_path / "replica", quiet(server), topic) as replica:
        for _ in range(2):
            with publishing(server.port, topic, MANY // 2):
                wait_some_more(replica, MANY // 10)
                server.kill()
                before = replica.get("stats")["totalRecords"]
                replica.wait_for(lambda: not replica.get("health")["broker"]["connected"])
                assert replica.get("health")["status"] == "UP"
                assert len(replica.records()) >= before
                server.restart()
        with Client(f"127.0.0.1:{server.port}") as client:
            check_copy(replica, client, topic, MANY)
        replica.wait_for(lambda: replica.get("health")["broker"]["connected"])


def test_it_answers_without_a_broker_and_finds_it_when_it_comes(topic: str, tmp_path: Path) -> None:
    with Serve(tmp_path / "broker") as server:
        with (
            Client(f"127.0.0.1:{server.port}") as client,
            ReplicaProcess(tmp_path / "replica", quiet(server), topic) as replica,
        ):
            client.publish(topic, b"first")
            replica.wait_records(1)
            wait_acknowledged(replica, client, topic)
        server.stop()
        replica.restart()
        with replica:
            assert replica.get("offset/0")["data"] == "first"
            replica.wait_for(lambda: replica.get("health")["broker"]["error"] is not None)
            health = replica.get("health")
            assert (health["status"], health["records"], health["broker"]["connected"]) == ("UP", 1, False)
            assert "no broker at localhost" in health["broker"]["error"]

            server.restart()
            with Client(f"127.0.0.1:{server.port}") as client:
                client.publish(topic, b"second")
                check_copy(replica, client, topic, 2)
            replica.wait_for(lambda: replica.get("health")["broker"]["error"] is None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly_and_all_that_it_has_is_acknowledged(
    server: Serve, client: Client, topic: str, tmp_path: Path, number: signal.Signals
) -> None:
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        client.publish_many((topic, b"%d" % each) for each in range(1000))
        replica.wait_records(1)
        ended = replica.stop(number)
        assert (ended.code, "Traceback" in ended.stderr) == (0, False)
        [position] = client.group(f"{topic}-group").positions
        replica.restart()
        assert len(replica.records()) >= position.committed > 0
        check_copy(replica, client, topic, 1000)
        assert "moving the group back" not in replica.stderr


# ---- the copy and the broker do not agree


def test_a_copy_that_was_removed_is_made_again(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.create_topic(topic, partitions=2)
    client.publish_many(Outgoing(topic, b"%d" % each, key=str(each)) for each in range(100))
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        check_copy(replica, client, topic, 100)
        replica.stop()
        replica.data.rename(tmp_path / "elsewhere")
        client.publish(topic, b"more")
        replica.restart()
        check_copy(replica, client, topic, 101)
        assert "moving the group back" in replica.stderr


def test_a_topic_that_is_made_again_is_another_one(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.publish_many(Outgoing(topic, b"old %d" % each, key=f"k{each}") for each in range(20))
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        check_copy(replica, client, topic, 20)
        client.delete_topic(topic)
        client.create_topic(topic)
        client.publish_many(Outgoing(topic, b"new %d" % each, key=f"n{each}") for each in range(5))
        replica.wait_for(lambda: replica.ask("/api/query/key/n4")[0] == 200)
        check_copy(replica, client, topic, 5)
        assert replica.ask("/api/query/key/k0")[0] == 404


def test_a_pattern_of_two_topics_is_refused(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.create_topic(f"{topic}.a")
    client.create_topic(f"{topic}.b")
    with ReplicaProcess(tmp_path, quiet(server), f"{topic}.*") as replica:
        client.publish(f"{topic}.a", b"x")
        replica.wait_records(1)
        client.publish(f"{topic}.b", b"x")
        ended = replica.wait()
    assert ended.code == 1
    assert ended.stderr.splitlines()[-1] == (
        f"error: {topic}.* matches the topics {topic}.a and {topic}.b: give the name of one topic"
    )


def test_a_group_of_another_kind_is_refused(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.create_group(f"{topic}-group", topic)
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        ended = replica.wait()
    assert ended.code == 1
    assert ended.stderr.splitlines()[-1] == (
        f"error: the group {topic}-group is shared and reads {topic}: use another name"
    )


def test_what_is_in_the_way_is_told(server: Serve, topic: str, tmp_path: Path) -> None:
    def refused(*flags: str) -> str:
        command = [sys.executable, "-m", "penstock", "replica", "--broker-port", str(quiet(server)), *flags]
        done = subprocess.run(
            command, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (1, ""), done
        return done.stderr

    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        flags = ("--topic", topic, "--group", "other", "--port")
        assert f"error: {replica.data} is in use by process {replica.process.pid}: stop it first" in refused(
            *flags, "0", "--data", str(replica.data)
        )
        assert "Address already in use" in refused(*flags, str(replica.port), "--data", "other")
    assert "has a copy of" in refused("--topic", "else", "--group", "g", "--data", str(replica.data), "--port", "0")


# ---- a disk that takes no more


def limit_files() -> None:
    """No file may grow beyond this: in the replica, before it starts."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, resource.RLIM_INFINITY))


def lift(replica: ReplicaProcess) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(replica.process.pid, resource.RLIMIT_FSIZE, unlimited)


def publish_one_too_large(client: Client, topic: str) -> None:
    client.publish(topic, b"before")
    client.publish(topic, b"x" * LARGE)
    client.publish(topic, b"after")


@pytest.mark.parametrize("policy", ["EXPONENTIAL_THEN_FIXED", "PAUSE_ON_ERROR"])
def test_what_cannot_be_stored_is_not_acknowledged_and_stored_later(
    server: Serve, client: Client, topic: str, tmp_path: Path, policy: str
) -> None:
    publish_one_too_large(client, topic)
    with ReplicaProcess(tmp_path, quiet(server), topic, before=limit_files, CONSUMER_RETRY_POLICY=policy) as replica:
        replica.wait_for(lambda: replica.ask("/api/query/health")[0] == 503)
        status, health = replica.ask("/api/query/health")
        assert (status, health["status"], health["records"]) == (503, "DOWN", 1)
        assert f"cannot store offset 1 of {topic}/0: " in health["error"]
        assert client.lag(f"{topic}-group") == 2
        assert replica.get("offset/0")["data"] == "before"

        lift(replica)
        if policy == "PAUSE_ON_ERROR":
            replica.wait_for(lambda: replica.ask("/api/query/health")[1]["paused"])
            assert replica.ask("/api/consumer/resume", "POST") == (200, {"resumed": True})
        check_copy(replica, client, topic, 3)
        assert replica.get("health")["status"] == "UP"


def test_what_cannot_be_stored_is_skipped_if_that_is_wanted_and_told(
    server: Serve, client: Client, topic: str, tmp_path: Path
) -> None:
    publish_one_too_large(client, topic)
    with ReplicaProcess(
        tmp_path, quiet(server), topic, before=limit_files, CONSUMER_RETRY_POLICY="SKIP_ON_ERROR"
    ) as replica:
        replica.wait_records(2)
        wait_acknowledged(replica, client, topic)
        assert [(each["offset"], each["data"]) for each in replica.records()] == [(0, "before"), (2, "after")]
        assert replica.get("stats")["skipped"] == 1
        assert replica.get("health")["status"] == "UP"
        assert f"skipping offset 1 of {topic}/0" in replica.stderr


def test_a_copy_is_as_well_guarded_as_the_broker_that_it_is_of(topic: str, tmp_path: Path) -> None:
    with (
        Serve(tmp_path / "broker", auth_token="t0ken") as server,
        ReplicaProcess(tmp_path / "replica", server.ports["quiet"], topic, PENSTOCK_AUTH_TOKEN="t0ken") as replica,
    ):
        for path in ("offset/0", "key/a", "range", "keys", "stats", "segments"):
            assert replica.ask(f"/api/query/{path}")[0] == 401
        assert replica.ask("/api/consumer/resume", "POST")[0] == 401
        assert replica.ask("/api/query/stats", authorization="Bearer t0ken")[0] == 200
        assert replica.ask("/api/query/health")[0] == 200

        # Its own, where it has them, and only those.
        replica.stop()
        replica.restart(CONSUMER_HTTP_USER="ann", CONSUMER_HTTP_PASSWORD="secret")
        assert replica.ask("/api/query/stats", authorization="Bearer t0ken")[0] == 401
        own = "Basic " + base64.b64encode(b"ann:secret").decode()
        assert replica.ask("/api/query/stats", authorization=own)[0] == 200


def test_a_web_page_cannot_reach_a_copy(server: Serve, topic: str, tmp_path: Path) -> None:
    with ReplicaProcess(tmp_path, server.ports["quiet"], topic, CONSUMER_HTTP_HOSTS="shop.example") as replica:
        status, answer = replica.ask("/api/query/stats", host="evil.example")
        assert status == 403
        assert "CONSUMER_HTTP_HOSTS" in answer["error"]
        assert replica.ask("/api/query/stats", host="shop.example:80")[0] == 200
        assert replica.ask("/api/consumer/resume", "POST", origin="http://evil.example")[0] == 403
        assert replica.ask("/api/consumer/resume", "POST", sec_fetch_site="cross-site")[0] == 403
        assert replica.ask("/api/consumer/resume", "POST")[0] == 200


def test_damage_is_told_to_who_reads_it(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.publish(topic, b"spoilt")
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        replica.wait_records(1)
        [segment] = (replica.data / "topics" / "1" / "0").glob("*.log")
        segment.write_bytes(segment.read_bytes().replace(b"spoilt", b"spoiled"[:6]))
        status, answer = replica.ask("/api/query/offset/0")
        assert (status, "checksum" in answer["error"], str(segment) in answer["error"]) == (500, True, True)
