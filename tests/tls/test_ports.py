"""TLS on every port, with clients that others wrote: nats-py, curl, Python's ssl."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from typing import Any

import httpx
import nats
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from penstock.tls.certificate import CertificateFiles, ServerCertificate
from penstock.tls.port import ServerTls
from penstock.web.port import WebPort, certificate
from penstock.wire import binary, qb
from penstock.wire.binary import Type
from tests.support.certificates import Certificates
from tests.support.process import PATIENCE_S
from tests.support.server import Raw, Serve


def curl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["curl", "-sS", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)


def test_nats_py_publishes_and_subscribes(server: Serve, certificates: Certificates) -> None:
    async def run() -> list[bytes]:
        client = await nats.connect(f"tls://localhost:{server.port}", tls=certificates.context("ann"))
        subscription = await client.subscribe("nats.>")
        await client.flush()
        for number in range(2000):
            await client.publish("nats.numbers", b"%d" % number + bytes(number))
        await client.flush()
        messages = [await subscription.next_msg(PATIENCE_S) for _ in range(2000)]
        await client.close()
        return [message.data for message in messages]

    assert asyncio.run(run()) == [b"%d" % number + bytes(number) for number in range(2000)]


def test_a_connection_lists_its_tls_version_and_cipher(server: Serve, certificates: Certificates) -> None:
    async def run() -> dict[str, Any]:
        client = await nats.connect(f"tls://localhost:{server.port}", tls=certificates.context("ann"), name="listed")
        done = curl("--cacert", certificates.ca, f"https://localhost:{server.ports['http']}/connz")
        await client.close()
        return next(each for each in json.loads(done.stdout)["connections"] if each["name"] == "listed")

    row = asyncio.run(run())

    assert row["tls_version"] == "1.3"
    assert row["tls_cipher_suite"].startswith("TLS_")
    assert row["tls_peer_certs"] == [{"subject": "CN=ann"}]


def test_a_handler_of_a_request_knows_the_certificate_of_its_client(certificates: Certificates) -> None:
    async def answer(request: Request) -> JSONResponse:
        names = certificate(request)
        return JSONResponse([request.url.scheme, None if names is None else names.emails])

    async def run() -> list[Any]:
        cert, key = certificates.server()
        files = CertificateFiles(
            cert=str(cert), key=str(key), client_ca=str(certificates.ca), client_certificates="optional"
        )
        tls = ServerTls(ServerCertificate(files))
        port = WebPort(Starlette(routes=[Route("/", answer)]), "127.0.0.1", 0, idle_s=PATIENCE_S, tls=tls)
        serving = asyncio.create_task(port.run())
        seen = []
        for client in (None, "ann"):
            async with httpx.AsyncClient(verify=certificates.context(client)) as browser:
                seen.append((await browser.get(f"https://localhost:{port.port}/")).json())
        port.stop()
        await serving
        return seen

    assert asyncio.run(run()) == [["https", None], ["https", ["ann@example.com"]]]


def test_curl_reads_over_https(server: Serve, certificates: Certificates) -> None:
    url = f"https://localhost:{server.ports['http']}/healthz"

    trusted, untrusted = curl("--cacert", certificates.ca, url), curl(url)

    assert json.loads(trusted.stdout)["status"] == "ok"
    assert "certificate" in untrusted.stderr


def test_a_connection_is_kept_between_requests(server: Serve, certificates: Certificates) -> None:
    url = f"https://localhost:{server.ports['http']}/varz"

    done = curl("--cacert", certificates.ca, "-w", "%{num_connects}\n", url, url)

    assert done.stdout.count('"server_id"') == 2
    assert done.stdout.rstrip().endswith("0")  # the second one used the connection of the first


@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")
def test_nats_py_over_a_web_socket(server: Serve, certificates: Certificates) -> None:
    async def run() -> bytes:
        url = f"wss://localhost:{server.ports['http']}"
        client = await nats.connect(url, tls=certificates.context(), allow_reconnect=False)
        subscription = await client.subscribe("socket.>")
        await client.publish("socket.a", b"x" * 100_000)
        data: bytes = (await subscription.next_msg(PATIENCE_S)).data
        await client.close()
        return data

    assert asyncio.run(run()) == b"x" * 100_000


# ---- plain where TLS is required


def test_a_plain_nats_client_is_told_to_use_tls(server: Serve) -> None:
    with Raw(server.port) as client:
        greeting = client.line()
        client.send("CONNECT {}\r\nPING\r\n")

        assert client.rest() == "-ERR 'Secure Connection - TLS Required'\r\n"

    assert json.loads(greeting.removeprefix("INFO "))["tls_required"] is True


def test_a_plain_flux_client_of_the_client_first_port_is_told_to_use_tls(server: Serve) -> None:
    with Raw(server.ports["quiet"]) as client:
        client.send("PUB orders 1\r\nx\r\n")

        assert client.line() == "-ERR Secure Connection - TLS Required"


def test_a_plain_http_client_is_told_to_use_https(server: Serve) -> None:
    done = curl("-i", f"http://localhost:{server.ports['http']}/healthz")

    assert done.stdout.startswith("HTTP/1.1 400")
    assert "this port requires TLS: use https://" in done.stdout


def test_a_plain_binary_client_is_told_to_use_tls(server: Serve) -> None:
    with socket.create_connection(("localhost", server.ports["quiet"]), PATIENCE_S) as client:
        client.sendall(binary.json_frame(Type.HELLO, 1, {}))
        data = b"".join(iter(lambda: client.recv(4096), b""))

    assert data[0] == Type.DISCONNECT
    assert b"this port requires TLS: connect with tls://" in data


def test_a_plain_qb_client_is_told_to_use_tls(server: Serve) -> None:
    heartbeat = qb.message(qb.Kind.HEARTBEAT, 1, 0, qb.properties({"client_id": "a"}), b"")
    with socket.create_connection(("localhost", server.ports["quiet"]), PATIENCE_S) as client:
        client.sendall(heartbeat)
        data = b"".join(iter(lambda: client.recv(4096), b""))

    assert b"this port requires TLS" in data


def test_a_plain_cursus_client_is_told_to_use_tls(server: Serve) -> None:
    command = b"LIST"
    with socket.create_connection(("localhost", server.ports["quiet"]), PATIENCE_S) as client:
        client.sendall(len(command).to_bytes(4, "big") + command)
        data = b"".join(iter(lambda: client.recv(4096), b""))

    assert b"this port requires TLS" in data


# ---- client certificates


def test_a_client_certificate_of_another_ca_is_refused(
    server: Serve, certificates: Certificates, tmp_path_factory: Any
) -> None:
    other = Certificates(tmp_path_factory.mktemp("other"))
    context = certificates.context()
    cert, key = other.client("eve")
    context.load_cert_chain(cert, key)

    with socket.create_connection(("localhost", server.ports["quiet"]), PATIENCE_S) as plain:
        refusal = ""
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as secured:
                secured.sendall(binary.json_frame(Type.HELLO, 1, {}))
                secured.recv(9)
        except ssl.SSLError as error:
            refusal = str(error)

    assert "unknown ca" in refusal.lower()
