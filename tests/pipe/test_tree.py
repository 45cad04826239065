"""A tree of brokers from its registry to a replica's answers: real processes, as they would be deployed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from penstock.client.sync import Client
from tests.support.registries import Answer, Answers, MockCloud, Registry, as_json, get
from tests.support.replicas import ReplicaProcess
from tests.support.server import Serve
from tests.support.trees import eventually, healthy, reason_of, records, status_of, url

TOPIC: Final = "price-topic"
PRICES: Final = {"AAPL": "189.95", "GOOGL": "140.93", "MSFT": "378.91", "TSLA": "248.48", "AMZN": "153.42"}
MANY: Final = 100_000


@contextmanager
def node(directory: Path, registry: Registry, name: str) -> Iterator[Serve]:
    """A broker that knows nothing but its name and the registry."""
    settings: dict[str, Any] = {
        "server_node_id": name,
        "registry_url": registry.url,
        "registry_poll_ms": 200,
        "pipe_poll_ms": 100,
    }
    with Serve(directory / name, **settings) as broker:
        yield broker


def nodes(path: Path, *above: tuple[str, str, Serve | None, str | None]) -> None:
    """Write the registry's file."""
    text = ""
    for name, role, broker, parent in above:
        text += f'[[nodes]]\nid = "{name}"\nrole = "{role}"\n'
        text += f'url = "{url(broker)}"\n' if broker is not None else ""
        text += f'parent = "{parent}"\n' if parent is not None else ""
    path.write_text(text)


def test_the_documents_run_from_a_mock_cloud_to_a_consumer(tmp_path: Path) -> None:
    """TE-06: five messages from the cloud, stored in the active segment, delivered, and the offset goes from 0 to 5."""
    with MockCloud() as cloud:
        assert cloud.ready.endswith(", 5 messages of price-topic\n")
        with Serve(tmp_path / "broker", server_node_id="local-001", registry_url=cloud.url) as broker:
            with Client(f"127.0.0.1:{broker.port}") as client:
                records(broker, TOPIC, 5)
                assert client.groups() == []
                # One segment, which is the active one.
                assert len(list(broker.data.glob(f"topics/{client.topic(TOPIC).id}/0/*.log"))) == 1
            with ReplicaProcess(tmp_path / "consumer", broker.ports["quiet"], TOPIC) as consumer:
                consumer.wait_records(5)
                found = consumer.records()
                assert [record["msgKey"] for record in found] == ["AAPL", "GOOGL", "MSFT", "TSLA", "AMZN"]
                assert [record["offset"] for record in found] == [0, 1, 2, 3, 4]
                assert json.loads(found[0]["data"]) == {"symbol": "AAPL", "price": 189.95}
                with Client(f"127.0.0.1:{broker.port}") as client:
                    consumer.wait_for(lambda: client.group(f"{TOPIC}-group").positions[0].committed == 5)
            status = status_of(broker)
            assert (status["role"], status["health"]) == ("LOCAL", "HEALTHY")


def test_a_mock_cloud_answers_as_the_document_says(tmp_path: Path) -> None:
    with MockCloud() as cloud:
        assert get(f"{cloud.url}/health").json() == {"status": "ok", "role": "CLOUD", "totalMessages": 5}
        assert [each["key"] for each in get(f"{cloud.url}/status").json()["recentMessages"]] == list(PRICES)
        told = get(f"{cloud.url}/registry/topology", nodeId="pos-7").json()
        assert (told["nodeId"], told["role"], told["topics"]) == ("pos-7", "LOCAL", [TOPIC])
        assert (told["requestToFollow"], told["cloudDataUrl"]) == ([cloud.url], cloud.url)
        polled = get(f"{cloud.url}/pipe/poll", offset="1", limit="2", topic=TOPIC).json()
        assert [(each["offset"], each["msgKey"]) for each in polled] == [(1, "GOOGL"), (2, "MSFT")]
        assert len(get(f"{cloud.url}/pipe/poll").json()) == 5
        for nothing in ({"offset": "5"}, {"topic": "trade-topic"}):
            assert get(f"{cloud.url}/pipe/poll", **nothing).status_code == 204
        for wrong in ("-1", "x", "9" * 30):
            refused = get(f"{cloud.url}/pipe/poll", offset=wrong)
            assert (refused.status_code, refused.json()["code"]) == (400, "BAD_REQUEST")
        assert get(f"{cloud.url}/registry/topology").status_code == 400
        assert get(f"{cloud.url}/pipe/push").status_code == 404


def test_a_cloud_that_tells_no_offsets_and_has_its_version_as_text_is_followed(tmp_path: Path) -> None:
    """As the Provider's own test server does."""
    stored = [{"msgKey": symbol, "eventType": "MESSAGE", "data": price} for symbol, price in PRICES.items()]

    def answer(path: str) -> Answer:
        if path.startswith("/registry/"):
            return as_json(
                {
                    "nodeId": "local-001",
                    "role": "LOCAL",
                    "requestToFollow": [cloud.url],
                    "cloudDataUrl": cloud.url,
                    "cloudDataUrlFallback": None,
                    "topologyVersion": "1.0",
                    "topics": [TOPIC],
                }
            )
        if not path.startswith("/pipe/poll"):
            return as_json({}, 404)
        query = parse_qs(urlsplit(path).query)
        offset, limit = int(query["offset"][0]), int(query["limit"][0])
        return as_json(stored[offset : offset + limit]) if offset < len(stored) else Answer(b"", 204)

    with (
        Answers(answer) as cloud,
        Serve(tmp_path, server_node_id="local-001", registry_url=cloud.url, pipe_poll_ms=50, pipe_batch_size=2) as node,
    ):
        found = records(node, TOPIC, 5)
        assert [(record["offset"], record["msgKey"], record["data"]) for record in found] == [
            (offset, symbol, price) for offset, (symbol, price) in enumerate(PRICES.items())
        ]
        stored.append({"msgKey": "NFLX", "eventType": "MESSAGE", "data": "1"})
        node.kill()
        node.restart()
        assert [record["offset"] for record in records(node, TOPIC, 6)] == [0, 1, 2, 3, 4, 5]


def test_prices_at_the_root_are_answered_by_a_replica_two_levels_below(tmp_path: Path) -> None:
    """The document's run in a tree, and then a hundred thousand messages while the broker in the middle is killed."""
    path = tmp_path / "tree.toml"
    nodes(path, ("root", "ROOT", None, None))
    with (
        Registry(path) as registry,
        node(tmp_path, registry, "root") as root,
        node(tmp_path, registry, "l2") as l2,
        node(tmp_path, registry, "l3") as l3,
    ):
        nodes(path, ("root", "ROOT", root, None), ("l2", "L2", l2, "root"), ("l3", "L3", l3, "l2"))
        with Client(f"127.0.0.1:{root.port}") as client:
            for symbol, price in PRICES.items():
                client.publish(TOPIC, price.encode(), key=symbol)
        with ReplicaProcess(tmp_path / "replica", l3.ports["quiet"], TOPIC) as replica:
            replica.wait_records(5)
            assert {symbol: replica.get(f"key/{symbol}")["data"] for symbol in PRICES} == PRICES
            assert [record["offset"] for record in replica.records()] == [0, 1, 2, 3, 4]
            with Client(f"127.0.0.1:{l3.port}") as client:
                replica.wait_for(lambda: client.group(f"{TOPIC}-group").positions[0].committed == 5)
            assert [status_of(broker)["role"] for broker in (root, l2, l3)] == ["ROOT", "L2", "L3"]

            with Client(f"127.0.0.1:{root.port}") as client, client.producer() as producer:
                for part in range(4):
                    for number in range(part * MANY // 4, (part + 1) * MANY // 4):
                        producer.publish(TOPIC, b"%d" % number)
                    producer.flush()
                    if part < 3:
                        l2.kill()
                        l2.restart()
            replica.wait_records(5 + MANY)
            found = replica.records()
            assert [record["offset"] for record in found] == list(range(5 + MANY))
            assert [record["data"] for record in found[5:]] == [str(number) for number in range(MANY)]
        for broker in (l2, l3):
            healthy(broker)


def test_a_broker_whose_registry_names_no_parent_any_more_is_disconnected(tmp_path: Path) -> None:
    path = tmp_path / "tree.toml"
    nodes(path, ("root", "ROOT", None, None))
    with (
        Registry(path) as registry,
        node(tmp_path, registry, "root") as root,
        node(tmp_path, registry, "leaf") as leaf,
        Client(f"127.0.0.1:{root.port}") as client,
    ):
        client.publish(TOPIC, b"x")
        nodes(path, ("root", "ROOT", root, None), ("leaf", "LOCAL", None, "root"))
        records(leaf, TOPIC, 1)
        nodes(path, ("root", "ROOT", root, None), ("leaf", "LOCAL", None, None))
        eventually("it has no parent", lambda: status_of(leaf)["parent"] is None)
        client.publish(TOPIC, b"y")
        # What it has stays, and no more comes, until it has a parent again.
        assert [topic["position"] for topic in status_of(leaf)["topics"]] == [[1]]
        nodes(path, ("root", "ROOT", root, None), ("leaf", "LOCAL", None, "root"))
        assert [record["data"] for record in records(leaf, TOPIC, 2)] == ["x", "y"]


def test_a_registry_names_patterns_and_a_setting_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "tree.toml"
    nodes(path, ("root", "ROOT", None, None))
    with Registry(path) as registry, node(tmp_path, registry, "root") as root, node(tmp_path, registry, "leaf") as leaf:
        with Client(f"127.0.0.1:{root.port}") as client:
            for subject in ("stock.eu", "prices"):
                client.publish(subject, b"x")
        nodes(path, ("root", "ROOT", root, None), ("leaf", "LOCAL", None, "root"))
        path.write_text(path.read_text() + 'topics = ["stock.>"]\n')
        records(leaf, "stock", 1)
        healthy(leaf)
        assert [topic["topic"] for topic in status_of(leaf)["topics"]] == ["stock"]

        leaf.stop()
        leaf.restart(pipe_topics="prices")
        records(leaf, "prices", 1)
        healthy(leaf)


def test_a_parent_that_a_registry_names_gets_no_credentials_unless_it_is_allowed(tmp_path: Path) -> None:
    def answer(path: str) -> Answer:
        if path.startswith("/registry/"):
            return as_json({"nodeId": "child", "role": "LOCAL", "requestToFollow": [thief.url]})
        return as_json({"code": "UNAUTHORIZED", "text": "credentials required"}, 401)

    secrets = {"auth_user": "ann", "auth_password": "secret", "pipe_token": "t0ken"}
    with (
        Answers(answer) as thief,
        Answers(lambda _: as_json({})) as accomplice,
        Serve(
            tmp_path,
            server_node_id="child",
            registry_url=thief.url,
            pipe_poll_ms=100,
            pipe_parents="http://root:8222",
            **secrets,
        ) as child,
    ):
        told = f"credentials withheld: {thief.url} is not in pipe.parents"
        assert reason_of(child, told, health="UNHEALTHY")["credentials"] in told
        assert thief.given == {}

        child.stop()
        child.restart(pipe_parents=f"http://root:8222, {thief.url}")
        eventually("it is given the token", lambda: thief.given)
        assert thief.given == {"/pipe/topics": "Bearer t0ken"}

        # Where it sends others is not where they go.
        moved = Answer(b"", 302, (("Location", f"{accomplice.url}/pipe/topics"),))
        thief.answer = lambda _: moved
        count = len(thief.asked)
        eventually("it is asked again", lambda: len(thief.asked) > count + 1)
        assert accomplice.asked == []
