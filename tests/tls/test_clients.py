"""Every client over TLS, and what each says when TLS fails."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import AsyncClient, BrokerClient, ChannelBroker, Client, TlsOptions
from penstock.errors import ConnectionLost, NoBroker, TlsRequired, Unauthorized
from tests.support.certificates import Certificates
from tests.support.commands import NOBODY, Penstock
from tests.support.process import PATIENCE_S
from tests.support.server import Serve


def tls_url(server: Serve, door: str = "text") -> str:
    return f"tls://localhost:{server.ports[door]}"


@pytest.mark.parametrize("door", ["text", "quiet"])
def test_a_client_publishes_and_subscribes(server: Serve, certificates: Certificates, door: str) -> None:
    values = [b"%d" % number + bytes(number * 10) for number in range(2000)]
    with Client(tls_url(server, door), tls=certificates.options()) as client:
        subscription = client.subscribe(f"client.{door}")
        with client.producer() as producer:
            for value in values:
                producer.publish(f"client.{door}", value)
        assert [subscription.get(PATIENCE_S).value for _ in values] == values
        client.publish(f"client.{door}", bytes(900_000))
        assert len(subscription.get(PATIENCE_S).value or b"") == 900_000


def test_tls_options_are_enough_without_a_scheme(server: Serve, certificates: Certificates) -> None:
    with Client(f"localhost:{server.port}", tls=certificates.options("ann")) as client:
        assert client.publish("client.options", b"x").offset >= 0


def test_options_may_be_pem_text(server: Serve, certificates: Certificates) -> None:
    cert, key = certificates.client("text")
    tls = TlsOptions(ca=certificates.ca.read_text(), cert=cert.read_text(), key=key.read_text())

    with Client(f"localhost:{server.port}", tls=tls) as client:
        client.publish("client.text", b"x")

    assert "PRIVATE KEY" not in repr(tls)


def test_the_environment_supplies_the_options(
    server: Serve, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CLIENT_TLS_CA", str(certificates.ca))

    with Client(f"localhost:{server.port}") as client:
        client.publish("client.environment", b"x")


def test_an_async_client_on_the_loop_of_asyncio(server: Serve, certificates: Certificates) -> None:
    async def receive() -> bytes | None:
        async with (
            AsyncClient(tls_url(server), tls=certificates.options()) as client,
            await client.subscribe("client.async") as subscription,
        ):
            await client.publish("client.async", b"x" * 100_000)
            return (await subscription.get(PATIENCE_S)).value

    assert asyncio.run(receive()) == b"x" * 100_000


def test_a_broker_client(server: Serve, certificates: Certificates) -> None:
    arrived, done = [], threading.Event()

    def handle(message: Any) -> None:
        arrived.append(message.body)
        if len(arrived) == 100:
            done.set()

    with BrokerClient("localhost", server.ports["quiet"], tls=certificates.options("ann")) as client:
        assert client.create_topic("qb")
        assert client.subscribe("qb", handler=handle)
        for number in range(100):
            assert client.publish("qb", b"%d" % number + bytes(30_000))
        assert done.wait(PATIENCE_S)

    assert arrived == [b"%d" % number + bytes(30_000) for number in range(100)]


def test_a_channel_broker(server: Serve, certificates: Certificates) -> None:
    with ChannelBroker(tls_url(server), "channel", tls=certificates.options()) as channel:
        subscriber = channel.subscribe("a")
        channel.publish("a", b"x")
        assert next(iter(subscriber)).payload == b"x"


def test_an_app(server: Serve, certificates: Certificates) -> None:
    app = penstock.App(tls_url(server), tls=certificates.options())
    arrived = threading.Event()

    @app.consumer("client.app", group="app")
    def handle(_: Any) -> None:
        arrived.set()

    with app.running(), Client(tls_url(server), tls=certificates.options()) as client:
        client.publish("client.app", b"x")
        assert arrived.wait(PATIENCE_S)


# ---- commands


def test_commands_take_flags_a_context_or_the_environment(
    server: Serve, certificates: Certificates, tmp_path: Path
) -> None:
    url, ca = tls_url(server), str(certificates.ca)
    bare = Penstock(NOBODY, XDG_CONFIG_HOME=str(tmp_path))
    del bare.environment["PENSTOCK_SERVERS"]

    flags = bare("publish", "commands", "a", "--servers", url, "--tls-ca", ca)
    environment = Penstock(url, PENSTOCK_CLIENT_TLS_CA=ca)("publish", "commands", "b")
    added = bare("context", "add", "secure", url, "--tls-ca", ca)
    context = bare("topic", "list", "--json")

    assert [each.code for each in (flags, environment, added)] == [0, 0, 0], flags.err
    assert "commands" in {topic["name"] for topic in context.json}


def test_the_commands_of_other_brokers(server: Serve, certificates: Certificates) -> None:
    at = ["--host", "localhost", "--port", server.ports["quiet"], "--tls-ca", certificates.ca]

    python = Penstock(NOBODY)("client", *at, "create-topic", "python")
    cursus = Penstock(NOBODY)("shell", *at, "LIST")

    assert python.code == 0, python.err
    assert "python" in cursus.out


# ---- failures


Connect = Callable[[Serve, str, TlsOptions | None], None]


def connect(server: Serve, host: str, tls: TlsOptions | None) -> None:
    with Client(f"{host}:{server.port}", tls=tls):
        pass


def connect_blocking(server: Serve, host: str, tls: TlsOptions | None) -> None:
    with BrokerClient(host, server.ports["quiet"], tls=tls):
        pass


both = pytest.mark.parametrize("connect", [connect, connect_blocking])


@both
def test_a_broker_of_another_ca_is_not_trusted(connect: Connect, server: Serve, tmp_path: Path) -> None:
    with pytest.raises(NoBroker, match=r"is not trusted \(.*certificate.*\): name the CA"):
        connect(server, "localhost", Certificates(tmp_path).options())


@both
def test_the_cas_of_the_system_do_not_trust_a_trial_ca(connect: Connect, server: Serve) -> None:
    with pytest.raises(NoBroker, match="is not trusted"):
        connect(server, "localhost", TlsOptions())


@pytest.mark.parametrize("dial", [Client, BrokerClient])
@pytest.mark.parametrize(
    ("hosts", "days", "problem"),
    [
        (["broker.example"], 30, r"is for another name \(.*use a name in the certificate"),
        (["localhost"], -1, "has expired: renew the certificate of the broker"),
    ],
)
def test_what_is_wrong_with_a_certificate_is_said(
    certificates: Certificates, dial: type[Client | BrokerClient], hosts: list[str], days: int, problem: str
) -> None:
    """No broker starts with a certificate that has expired, so this is a bare server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.server("wrong", hosts, days))

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            context.wrap_socket(listening.accept()[0], server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        tls = certificates.options()
        client = Client(f"localhost:{port}", tls=tls) if dial is Client else BrokerClient("localhost", port, tls=tls)
        with pytest.raises(NoBroker, match=problem):
            client.connect()
        thread.join(PATIENCE_S)


@both
def test_a_client_without_tls_is_told_to_use_it(connect: Connect, server: Serve) -> None:
    with pytest.raises(
        (TlsRequired, Unauthorized, ConnectionLost), match="this port requires TLS: connect with tls://"
    ):
        connect(server, "localhost", None)


@both
def test_a_broker_without_tls_is_recognised(connect: Connect, plain: Serve, certificates: Certificates) -> None:
    with pytest.raises(NoBroker, match=r"does not speak TLS .*connect without tls://"):
        connect(plain, "localhost", certificates.options())


@both
def test_a_missing_client_certificate_is_named(connect: Connect, strict: Serve, certificates: Certificates) -> None:
    connect(strict, "localhost", certificates.options("ann"))

    with pytest.raises((NoBroker, ConnectionLost), match="client certificate"):
        connect(strict, "localhost", certificates.options())


def test_a_command_names_the_option(server: Serve) -> None:
    done = Penstock(tls_url(server))("topic", "list")

    assert done.code == 1
    assert "--tls-ca" in done.err


def test_a_key_needs_a_certificate() -> None:
    with pytest.raises(ValueError, match="a TLS key without a certificate"):
        TlsOptions(key="key.pem")
