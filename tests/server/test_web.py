"""The HTTP port for strangers: who is closed, what is refused, and what one bad request does to the others."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from penstock import address
from penstock.server.http import guarded
from penstock.server.server import Server
from penstock.server.settings import Config, StorageConfig
from penstock.web.credentials import Credentials
from penstock.web.guard import Guard, local_names
from penstock.web.port import HEADER_BYTES_MAX
from tests.support.server import Raw, Serve
from tests.support.web import ask, get, metrics


class Guarded:
    """An application behind a guard; `faults` are what it was told of."""

    def __init__(self, *hosts: str) -> None:
        self.faults: list[str] = []
        app = Starlette(routes=[Route("/well", self._well, methods=["GET", "POST"]), Route("/ill", self._ill)])
        self._guard = Guard(
            app,
            hosts=hosts,
            setting="server.http_hosts",
            describe=lambda error: {"text": str(error)},
            fault=lambda path, error: self.faults.append(f"{path} {error!r}"),
        )

    def ask(self, method: str, path: str = "/well", **headers: str) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self._guard, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(run())

    async def _well(self, _: Request) -> JSONResponse:
        return JSONResponse({})

    async def _ill(self, _: Request) -> JSONResponse:
        raise KeyError("a secret")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8222", "a.localhost", "127.0.0.1:8222", "10.1.2.3", "[::1]:8222", "Shop-7", "shop-7.:80"],
)
def test_a_host_that_is_this_machine_is_served(host: str) -> None:
    assert Guarded("shop-7").ask("GET", Host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8222", "shop-7.evil.example", "localhost.evil", "", "[x]"]
)
def test_a_host_with_another_name_is_refused_and_the_setting_is_named(host: str) -> None:
    refused = Guarded("shop-7").ask("GET", Host=host)

    assert refused.status_code == 403
    assert "server.http_hosts" in refused.json()["text"]
    assert Guarded("*").ask("GET", Host=host).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:8222"}, 200),
        ({"Origin": "https://LOCALHOST:8222"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://proxied.example"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:8222"}, 403),
    ],
)
def test_a_page_of_another_site_cannot_change_anything(headers: dict[str, str], status: int) -> None:
    guarded = Guarded()

    assert guarded.ask("POST", Host="localhost:8222", **headers).status_code == status
    assert guarded.ask("GET", Host="localhost:8222", **headers).status_code == 200


def test_an_unexpected_exception_is_counted_and_its_text_stays_here() -> None:
    guarded = Guarded()

    assert guarded.ask("GET", "/ill").status_code == 500
    assert "secret" not in guarded.ask("GET", "/ill").text
    assert guarded.faults == ["'/ill' KeyError('a secret')"] * 2
    assert guarded.ask("GET").status_code == 200


def test_who_can_be_reached_only_from_this_machine() -> None:
    assert all(map(address.is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(address.is_loopback, ["0.0.0.0", "::", "10.0.0.1", "shop-7", "localhost.evil"]))
    assert {"shop-7", "a.example", "b"} <= {*local_names("shop-7", "a.example, b,")}


def test_credentials_are_accepted_in_each_form_and_nothing_else_is() -> None:
    both = Credentials(user="ann", password="päss:word", token="t0ken")
    assert both.accepts_header(both.header or "")
    assert both.accepts_header(Credentials(user="ann", password="päss:word").header or "")
    assert both.accepts(token="t0ken")
    for header in (
        "",
        "Bearer",
        "Bearer t0ke",
        "Basic",
        "Basic !",
        "Basic YW5u",
        "Basic /w==",
        "Basic ÿ",
        "Digest t0ken",
    ):
        assert not both.accepts_header(header)
    for name in ("user", "password", "token"):
        assert not both.accepts(**{name: "\ud800"})
    assert not Credentials()
    assert not Credentials().accepts_header("Bearer ")
    assert "t0ken" not in repr(both)
    assert "word" not in repr(both)


def test_a_fault_in_one_endpoint_fails_that_request_only(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(Config(storage=StorageConfig(data_dir=str(tmp_path))), listens=False)
        server.statistics = [].pop  # type: ignore[assignment]
        transport = httpx.ASGITransport(guarded(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            failed = await client.get("/varz")
            served = await client.get("/healthz")
        server.broker.store.close()

        assert (failed.status_code, failed.json()["code"]) == (500, "ERROR")
        assert "empty list" not in failed.text
        assert served.status_code == 200
        assert server.broker.store.health.faults == {"http": 1}

    asyncio.run(run())


# A real server.


def closed(connection: Raw) -> bool:
    return bool(select.select([connection.socket], [], [], 0)[0]) and not connection.socket.recv(1 << 16)


def test_clients_that_keep_the_port_waiting_are_closed(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, server_handshake_s=1) as server,
        Raw(server.ports["http"]) as silent,
        Raw(server.ports["http"]) as dribbling,
        Raw(server.ports["http"]) as served,
        Raw(server.ports["http"], receive_bytes=4096) as deaf,
    ):
        served.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert served.line() == "HTTP/1.1 200 OK"
        # Answers of 13 MB, of which none is read: the system keeps up to 4 MiB of them for a client.
        deaf.send("GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        dribbling.send("GET /healthz HTTP/1.1\r\nX-Long: ")
        while not closed(dribbling):
            try:
                dribbling.send("x")
            except OSError:
                break
            select.select([dribbling.socket], [], [], 0.1)

        assert silent.rest() == ""
        served.send("GET /heal")
        served.rest()
        while get(server, "/varz").json["limits"]["http_connections"]["used"] > 1:
            time.sleep(0.01)
        # It is closed with answers that were not sent.
        assert deaf.rest().count("HTTP/1.1 200") < 1000
        assert get(server, "/healthz").status == 200
        assert get(server, "/varz").json["limits"]["http_connections"]["used"] == 1


def test_headers_are_limited_however_they_arrive(tmp_path: Path) -> None:
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    small = start + b"\r\n"
    fits = start + b"X: %b\r\n\r\n" % (b"x" * (HEADER_BYTES_MAX - 100))
    too_long = [
        start + b"X: %b\r\n\r\n" % (b"x" * HEADER_BYTES_MAX),
        start + b"X: y\r\n" * (HEADER_BYTES_MAX // 6) + b"\r\n",
        small.replace(b"healthz", b"healthz?" + b"x" * HEADER_BYTES_MAX),
    ]
    with Serve(tmp_path) as server:
        for head in too_long:
            for before in (b"", small, small + fits):
                with Raw(server.ports["http"]) as client:
                    client.send(before + head)
                    told = client.rest()
                    assert told.count("HTTP/1.1 200") == before.count(b"GET")
                    assert told.count("HTTP/1.1 431 Request Header Fields Too Large") == 1


def test_connections_and_headers_are_limited(tmp_path: Path) -> None:
    with Serve(tmp_path, server_http_connections_max=2) as server:
        first, second = Raw(server.ports["http"]), Raw(server.ports["http"])
        with Raw(server.ports["http"]) as third:
            assert third.line() == "HTTP/1.1 503 Service Unavailable"
            assert third.rest().endswith("maximum connections exceeded\n")
        first.send("GET /healthz HTTP/1.1\r\nX: " + "x" * (64 << 10))
        assert first.line() == "HTTP/1.1 431 Request Header Fields Too Large"
        first.close()
        second.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert second.rest().startswith("HTTP/1.1 200")
        second.close()


def test_a_page_cannot_reach_a_broker_by_another_name_or_change_it(tmp_path: Path) -> None:
    with Serve(tmp_path, server_http_hosts="broker.example") as server:
        rebound = get(server, "/admin/topics", Host="evil.example")
        posted = ask(server, "POST", "/admin/topics", {"name": "t"}, headers={"Origin": "http://evil.example"})
        deleted = ask(server, "DELETE", "/admin/topics/t", headers={"Sec-Fetch-Site": "cross-site"})
        pushed = ask(server, "POST", "/pipe/push?topic=t", b"", headers={"Origin": "null"})

        for answer in (rebound, posted, deleted, pushed):
            assert (answer.status, answer.code) == (403, "FORBIDDEN")
        assert get(server, "/admin/topics", Host="broker.example:80").json["topics"] == []
        assert get(server, "/admin/topics", Host=socket.gethostname()).status == 200


@pytest.mark.parametrize(
    ("request_line", "chunks", "status"),
    [
        ("POST /admin/topics", ["zz\r\n"], "400"),
        ("POST /admin/topics", ["1\r\n{\r\n", "zz\r\n"], "400"),
        ("POST /admin/topics", ["1\r\n{}\r\n0\r\n\r\n"], "400"),
        ("POST /pipe/push?topic=t&partition=0&node=x", ["zz\r\n"], "400"),
        # These are answered before the body is read.
        ("GET /healthz", ["", "zz\r\n"], "200"),
        ("POST /nothing", ["", "1\r\n{\r\n", "zz\r\n"], "404"),
    ],
)
def test_a_bad_chunk_is_an_error_of_the_client(
    tmp_path: Path, request_line: str, chunks: list[str], status: str
) -> None:
    head = "Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Serve(tmp_path) as server:
        before = metrics(server)
        with Raw(server.ports["http"]) as client:
            client.send(f"{request_line} HTTP/1.1\r\n{head}{chunks[0]}")
            first = client.line() if status != "400" else ""
            for chunk in chunks[1:]:
                client.send(chunk)
            told = first + client.rest()

        assert told.split()[1] == status
        assert told.count("HTTP/1.1 ") == 1
        after = metrics(server)
        assert after["broker_protocol_errors_total"] == before["broker_protocol_errors_total"] + 1
        assert not [name for name in after if name.startswith("broker_faults_total")]
    # `Serve` has checked that there is no traceback in the log.
