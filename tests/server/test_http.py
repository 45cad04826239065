"""The HTTP port: health and figures, in the shape that nats-server gives them."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from penstock.client.sync import Client
from penstock.server.rows import ANSWER_BYTES_MAX
from tests.support.process import PATIENCE_S
from tests.support.registries import until
from tests.support.server import Flux, Nats, Raw, Serve, pub
from tests.support.web import ask, get


def test_a_server_that_is_well_says_so(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        assert get(server, "/healthz")[::2] == (200, b'{"status":"ok"}')
        assert get(server, "/health")[::2] == (200, b"OK")
        assert get(server, "/health", Accept="application/json").json == {"status": "OK"}


def test_a_topic_that_cannot_be_opened_makes_it_unwell_and_is_named(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Flux(server) as client:
            assert client.publish("orders", b"hello") == "+OK"
        server.stop()
        [log] = (server.data / "topics" / "2" / "0").glob("*.log")
        log.with_name("notes.txt").touch()
        server.restart()

        for path in ("/healthz", "/health"):
            answer = get(server, path, Accept="application/json")
            assert answer.status == 503
            assert "orders" in answer.json["error"]
        answer = get(server, "/health")
        assert answer.status == 503
        assert answer.body.startswith(b"Broker not ready: partitions that cannot be opened: orders")


def test_a_server_that_takes_no_connections_says_so_in_cursus_words(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Flux(server) as client:
        assert client.publish("orders", b"hello") == "+OK"
        server.process.send_signal(signal.SIGUSR2)
        until(lambda: get(server, "/health").status == 503)
        assert get(server, "/health").body == b"Broker not ready: Main listener not active"


def test_varz_has_the_names_of_nats_and_what_happened(tmp_path: Path) -> None:
    with Serve(tmp_path, server_node_id="shop-7") as server, Flux(server) as client, Nats(server) as other:
        assert client.publish("orders", b"hello") == "+OK"
        other.send("SUB orders 1\r\n")
        assert other.ask("PING") == "PONG"

        found = get(server, "/varz").json

    assert found["server_name"] == "shop-7"
    assert (found["connections"], found["total_connections"], found["subscriptions"]) == (2, 2, 1)
    assert (found["in_msgs"], found["out_msgs"], found["slow_consumers"]) == (1, 0, 0)
    assert found["mem"] > 1 << 20
    assert found["cores"] >= 1
    assert {"server_id", "version", "now", "start", "uptime", "in_bytes", "out_bytes", "max_payload"} <= found.keys()


def test_connz_has_a_row_for_each_connection(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server, name="billing") as client, Raw(server.ports["quiet"]) as silent:
        client.send("SUB orders.> 1\r\nSUB refunds 2\r\n")
        assert client.ask("PING") == "PONG"

        found = get(server, "/connz?subs=1").json
        row = next(row for row in found["connections"] if row["name"] == "billing")

        assert found["num_connections"] == found["total"] == 2
        assert (row["ip"], row["port"]) == client.socket.getsockname()
        assert row["subscriptions"] == 2
        assert row["subscriptions_list"] == ["orders.>", "refunds"]
        assert {"cid", "start", "uptime", "in_msgs", "in_bytes", "out_msgs", "out_bytes"} <= row.keys()
        # One that has not said anything is one too.
        [other] = [row for row in found["connections"] if row["name"] != "billing"]
        assert (other["port"], other["subscriptions"]) == (silent.socket.getsockname()[1], 0)
        [alone] = get(server, f"/connz?cid={row['cid']}").json["connections"]
        assert alone["name"] == "billing"


def test_subjects_and_details_of_connz_are_limited_in_bytes(tmp_path: Path) -> None:
    subject = "x" * 4000
    with Serve(tmp_path) as server, Nats(server) as client:
        client.send("".join(f"SUB {subject} {number}\r\n" for number in range(3000)))
        assert client.ask("PING") == "PONG"
        for subs, name in (("true", "subscriptions_list"), ("detail", "subscriptions_list_detail")):
            answer = get(server, f"/connz?subs={subs}")
            [row] = answer.json["connections"]
            assert row["subscriptions"] == 3000
            assert 1000 < len(row[name]) < 3000
            assert len(answer.body) < ANSWER_BYTES_MAX + 2 * len(subject)


def test_connz_gives_a_page_at_a_time(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        clients = [Flux(server) for _ in range(5)]
        try:
            pages = [get(server, f"/connz?limit=2&offset={offset}").json for offset in (0, 2, 4)]
        finally:
            for client in clients:
                client.close()

    assert [page["num_connections"] for page in pages] == [2, 2, 1]
    assert {page["total"] for page in pages} == {5}
    numbers = [row["cid"] for page in pages for row in page["connections"]]
    assert len(set(numbers)) == 5


def test_subsz_has_a_row_for_each_subscription(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server) as client, Client(f"127.0.0.1:{server.port}") as ours:
        client.send("SUB orders.> 7\r\n")
        assert client.ask("PING") == "PONG"
        with ours.subscribe("refunds", group="clerks"):
            client.send(pub("orders.eu", b"hello"))
            assert client.message().payload == b"hello"

            found = get(server, "/subsz").json
            page = get(server, "/subsz?limit=1&offset=1").json

    rows = {row["subject"]: row for row in found["subscriptions_list"]}
    assert found["num_subscriptions"] == found["total"] == 2
    assert (rows["orders.>"]["sid"], rows["orders.>"]["msgs"]) == ("7", 1)
    assert rows["refunds"]["group"] == "clerks"
    assert [row["subject"] for row in page["subscriptions_list"]] == ["refunds"]


def test_what_is_not_there_is_an_error_with_a_code(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        nothing, not_so, no_number = (
            get(server, "/nothing"),
            ask(server, "POST", "/varz"),
            get(server, "/connz?limit=x"),
        )

    assert (nothing.status, nothing.code) == (404, "BAD_REQUEST")
    assert (not_so.status, not_so.code) == (405, "BAD_REQUEST")
    assert (no_number.status, no_number.code) == (400, "BAD_REQUEST")


def test_bytes_that_are_not_http_disturb_nobody(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        for data, answer in ((b"", b"HTTP/1.1 400 "), (b"x" * 20_000, b"HTTP/1.1 431 ")):
            with socket.create_connection(("127.0.0.1", server.ports["http"]), PATIENCE_S) as peer:
                peer.sendall(b"\x00\xff not http\r\n\r\n" + data)
                assert peer.recv(1000).startswith(answer)

        assert get(server, "/healthz").status == 200
