"""Brokers in a tree: what flows up to a parent, which parents there are, and what carries a pipe."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from penstock import Client
from tests.support.pipes import Tree, broker, client_of, data, offsets, publish
from tests.support.server import Serve
from tests.support.trees import eventually, get, healthy, reason_of, records, status_of, url

# ---- up


def test_what_a_child_pushes_is_in_its_parents_log_once(tree: Tree) -> None:
    root, l2, _ = tree
    publish(root, "sales", b"the root's own")
    with client_of(l2) as client:
        for number in range(30):
            client.publish("sales.eu", b"%d" % number, key=f"k{number}", message_id=f"m{number}")
    found = records(root, "sales", 31)
    assert data(found) == ["the root's own", *map(str, range(30))]
    assert found[1]["subject"] == "sales.eu"
    l2.kill()
    root.kill()
    root.restart()
    l2.restart()
    publish(l2, "sales", b"last")
    assert data(records(root, "sales", 32)) == ["the root's own", *map(str, range(30)), "last"]
    eventually("nothing is left to push", lambda: [up["lag"] for up in ups(l2)] == [0])
    assert [(up["topic"], up["position"]) for up in ups(l2)] == [("sales", [31])]
    # An id that came up is known to the parent, as if it had been published there.
    with client_of(root) as client:
        assert client.publish("sales.eu", b"again", message_id="m3").duplicate


def ups(server: Serve) -> list[dict[str, Any]]:
    return [topic for topic in status_of(server)["topics"] if topic["direction"] == "up"]


def test_what_several_children_push_goes_down_to_others(tree: Tree, tmp_path: Path) -> None:
    with broker(tmp_path, "shop", tree.root, pipe_up="returns") as shop, broker(tmp_path, "board", tree.root) as board:
        publish(shop, "returns", b"1a", b"1b")
        publish(tree.l2, "returns", b"2a", b"2b")
        assert sorted(data(records(board, "returns", 4))) == ["1a", "1b", "2a", "2b"]
        assert data(records(shop, "returns", 2)) == ["1a", "1b"]
        assert data(records(tree.l3, "returns", 2)) == ["2a", "2b"]


def test_what_cannot_go_up_is_told(tree: Tree, tmp_path: Path) -> None:
    root, l2, _ = tree
    publish(root, "downward", b"a")
    records(l2, "downward", 1)
    with broker(tmp_path, "shop", l2, pipe_topics="downward") as shop:
        records(shop, "downward", 1)
        shop.stop()
        shop.restart(pipe_topics="nothing", pipe_up="downward")
        reason_of(shop, "downward is piped down to this broker, so it cannot be pushed up")
        with client_of(shop) as client:
            client.delete_topic("downward")
            client.publish("downward", b"mine")
        reason_of(shop, "the topic downward is piped from another broker")
        assert data(records(l2, "downward", 1)) == ["a"]
    with pytest.raises(AssertionError, match="topics and up both have downward"):
        Serve(tmp_path / "bad", pipe_parent=url(root), pipe_topics="downward", pipe_up="downward")


# ---- loops


def test_two_brokers_do_not_follow_each_other(tmp_path: Path) -> None:
    with broker(tmp_path, "a", "http://127.0.0.1:9") as a, broker(tmp_path, "b", a) as b:
        publish(a, "ring", b"x")
        records(b, "ring", 1)
        a.stop()
        a.restart(pipe_parent=url(b))
        eventually(
            "one of them is refused",
            lambda: any("loop" in status_of(each)["reason"] for each in (a, b)),
            lambda: [status_of(each) for each in (a, b)],
        )
        publish(a, "ring", b"y")
        assert data(records(b, "ring", 2)) == ["x", "y"]
        assert data(records(a, "ring", 2)) == ["x", "y"]


def test_a_broker_refuses_those_above_it_and_its_own_name(tree: Tree, tmp_path: Path) -> None:
    eventually("it knows who is above it", lambda: status_of(tree.l3)["ancestry"] == ["root", "l2", "l3"])
    for node in ("root", "l2", "l3"):
        status, told = get(tree.l3, "/pipe/topics", node=node)
        assert (status, told["code"]) == (409, "PIPE_LOOP")
    with broker(tmp_path, "root", tree.root) as impostor:
        reason_of(impostor, "give each its own server.node_id", health="UNHEALTHY")


# ---- parents of other kinds


class Answers:
    """A parent that answers as it is told."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.page: tuple[int, bytes] | None = None

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, bytes]:
        self.asked.append((path, query))
        if self.page is not None:
            return self.page
        if path != "/pipe/poll":
            return 404, b"<html>not found</html>"
        offset, limit = int(query["offset"]), int(query["limit"])
        found = [record for record in self.records if record["offset"] >= offset][:limit]
        return (200, json.dumps(found).encode()) if found else (204, b"")


@contextmanager
def other_parent(answers: Answers) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            status, body = answers.answer(parts.path, {name: value[0] for name, value in parse_qs(parts.query).items()})
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_parent_without_batches_is_polled_for_records(tree: Tree, tmp_path: Path) -> None:
    answers = Answers()
    with (
        other_parent(answers) as parent,
        broker(tmp_path, "child", parent, pipe_topics="price-topic", pipe_batch_size=3) as child,
        broker(tmp_path, "below", child) as below,
    ):
        healthy(child)
        names = ("AAPL", "GOOGL", "MSFT", "TSLA", "AMZN")
        for number, name in enumerate(names):
            record = {"offset": number * 2, "msgKey": name, "eventType": "MESSAGE", "data": {"price": number}}
            answers.records.append(record)
        answers.records.append({"offset": 20, "msgKey": "AAPL", "eventType": "DELETE", "data": None})
        found = records(below, "price-topic", 6)
        assert offsets(found) == [0, 2, 4, 6, 8, 20]
        assert [record["msgKey"] for record in found] == [*names, "AAPL"]
        assert found[1]["data"] == '{"price": 1}'
        assert found[-1]["eventType"] == "DELETE"
        assert "3" in {query["limit"] for path, query in answers.asked if path == "/pipe/poll"}
        child.kill()
        child.restart()
        answers.records.append({"offset": 21, "msgKey": None, "eventType": "MESSAGE", "data": "next"})
        assert offsets(records(below, "price-topic", 7)) == [0, 2, 4, 6, 8, 20, 21]
        # It has messages of a parent that cannot say whose they are: those of another are not mixed with them.
        publish(tree.root, "price-topic", b"other")
        child.stop()
        child.restart(pipe_parent=url(tree.root))
        reason_of(child, "the topic price-topic is a copy of document/price-topic")


def test_a_parent_that_is_something_else_is_told(tmp_path: Path) -> None:
    pages = ((200, b"<html>welcome</html>"), (200, b'{"hello": 1}'), (500, b"oops"), (302, b""))
    answers = Answers()
    with other_parent(answers) as parent:
        answers.page = pages[0]
        with broker(tmp_path, "lost", parent, pipe_topics="t") as lost:
            for page in pages:
                answers.page = page
                reason_of(lost, f"{parent} is no", health="UNHEALTHY")
            answers.page = (200, b'[{"offset": 5, "data": "a"}, {"offset": 4, "data": "b"}]')
            reason_of(lost, "not in the order of their offsets", health="UNHEALTHY")
            answers.page = None
            healthy(lost)
            eventually("its topic is made", lambda: get(lost, "/pipe/poll", topic="t", offset=0)[0] == 204)


# ---- what carries a pipe


def test_a_package_can_add_what_carries_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site"
    (package / "carrier-1.0.dist-info").mkdir(parents=True)
    (package / "carrier-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
    (package / "carrier-1.0.dist-info" / "entry_points.txt").write_text("[penstock.pipes]\npigeon = carrier:connect\n")
    (package / "carrier.py").write_text(CARRIER)
    path = f"{package}:{Path(__file__).parents[2] / 'src'}"
    monkeypatch.setenv("PYTHONPATH", path)
    with broker(tmp_path, "l2", "http://coop", pipe_type="pigeon") as l2:
        assert data(records(l2, "letters", 1)) == ["coo"]
        healthy(l2)


CARRIER = """
import asyncio
from penstock.model.batch import encode
from penstock.pipe.connector import Piece, Remote, RemotePartition, RemoteTopic

class Pigeon:
    async def topics(self):
        return Remote(("coop",), (RemoteTopic("letters", "coop/1", (RemotePartition(0, 1),)),))

    async def stream(self, topic, partition, offset):
        if offset == 0:
            batch = encode([b"coo"], timestamp=1)
            batch.stamp(0, append_time=1)
            yield Piece([batch], 1)
        else:
            await asyncio.sleep(0.1)
            yield Piece([], 1)

    async def close(self):
        pass

def connect(url, caller):
    return Pigeon()
"""


def test_what_nobody_has_added_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"pipe\.type is 'owl': it must be an installed one: http"):
        Serve(tmp_path, pipe_type="owl")


# ---- who may


def test_a_child_gives_its_parent_the_credentials_of_its_pipe(tmp_path: Path) -> None:
    secrets = {"auth_user": "ann", "auth_password": "secret"}
    with broker(tmp_path, "root", **secrets) as root, broker(tmp_path, "stranger", root, **secrets) as stranger:
        with Client(f"127.0.0.1:{root.port}", user="ann", password="secret") as client:
            client.publish("prices", b"1")
        for path in ("topics", "poll", "stream", "push"):
            assert get(root, f"/pipe/{path}", topic="prices", partition=0, offset=0)[0] == 401
        # Those that its own clients need are not for others.
        reason_of(stranger, "pipe.user and pipe.password, are not set", health="UNHEALTHY")
        with broker(tmp_path, "child", root, pipe_user="ann", pipe_password="secret") as child:
            healthy(child)
            eventually("it has sent its credentials", lambda: status_of(child)["credentials"] == "sent")
            with Client(f"127.0.0.1:{child.port}") as client:
                prices = client.subscribe("prices", start="earliest")
                assert prices.get(timeout=20).value == b"1"
