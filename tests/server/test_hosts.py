"""Real servers at IPv6 addresses, at several hosts and at names, and the clients that reach them there."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import nats
import pytest

from penstock import Broker, BrokerClient, Client
from tests.support.process import PATIENCE_S, Ended
from tests.support.registries import Registry
from tests.support.server import Serve, clean_environment
from tests.support.trees import eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One that listens at both loopback addresses."""
    flags = ["--host", "127.0.0.1", "--host", "::1"]
    with Serve(tmp_path_factory.mktemp("server"), flags=flags) as server:
        yield server


def get(server: Serve, path: str, host: str = "[::1]") -> Any:
    with urlopen(f"http://{host}:{server.ports['http']}{path}", timeout=PATIENCE_S) as answer:
        return json.load(answer)


def test_every_port_is_open_at_every_host_and_named_as_clients_write_it(server: Serve) -> None:
    text, quiet, http = (server.ports[name] for name in ("text", "quiet", "http"))
    assert f"text on 127.0.0.1:{text} and [::1]:{text}, quiet on 127.0.0.1:{quiet} and [::1]:{quiet}" in server.ready
    for host in ("127.0.0.1", "[::1]"):
        found = get(server, "/varz", host)
        assert found["addresses"] == {
            name: [f"127.0.0.1:{port}", f"[::1]:{port}"] for name, port in server.ports.items()
        }
        assert (found["host"], found["port"], found["http_port"]) == ("127.0.0.1", text, http)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_nats_clients_reach_it(server: Serve, host: str) -> None:
    url = f"nats://[{host}]:{server.port}" if ":" in host else f"nats://{host}:{server.port}"

    async def run() -> Any:
        client = await nats.connect(url, name=f"at {host}")
        try:
            [row] = [row for row in get(server, "/connz")["connections"] if row["name"] == f"at {host}"]
            return client._server_info["client_ip"], row["ip"]
        finally:
            await client.close()

    assert asyncio.run(run()) == (host, host)


@pytest.mark.parametrize("address", ["[::1]:{}", "127.0.0.1:{}", "localhost:{}"])
def test_our_clients_reach_it(server: Serve, address: str) -> None:
    servers = address.format(server.port)
    with Client(servers) as client:
        assert client.publish("hosts", b"hello").topic == "hosts"
    with Client(["127.0.0.1:1", servers]) as client:
        assert client.publish("hosts", b"hello").topic == "hosts"
    done = penstock("publish", "hosts", "hello", "--servers", f"127.0.0.1:1,{servers}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost"])
def test_clients_of_the_quiet_port_reach_it(server: Serve, host: str) -> None:
    port = str(server.ports["quiet"])
    with BrokerClient(host, server.ports["quiet"]) as client:
        client.create_topic("quiet")
        assert client.publish("quiet", b"hello")
    done = penstock("client", "--host", host, "--port", port, "publish", "quiet", "hello")
    assert (done.returncode, done.stderr) == (0, "")
    done = penstock("shell", "--host", host, "--port", port, "LIST")
    assert (done.returncode, done.stderr) == (0, "")
    assert "quiet" in done.stdout


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=clean_environment(), timeout=3 * PATIENCE_S, input=""
    )


def test_a_broker_follows_a_parent_at_an_ipv6_address(server: Serve, tmp_path: Path) -> None:
    with Client(f"[::1]:{server.port}") as client:
        client.publish("piped", b"hello")
    parent = f"http://[::1]:{server.ports['http']}"
    with (
        Serve(tmp_path, pipe_parent=parent, pipe_poll_ms=100, server_node_id="below", server_host="::1") as child,
        Client(f"[::1]:{child.port}") as client,
    ):
        eventually("the topic comes down", lambda: "piped" in {topic.name for topic in client.topics()})
        with client.subscribe("piped", start="earliest") as messages:
            assert messages.get(timeout=PATIENCE_S).value == b"hello"


def test_a_registry_and_its_brokers_at_ipv6_addresses(server: Serve, tmp_path: Path) -> None:
    tree = tmp_path / "tree.toml"
    text = f'[[nodes]]\nid = "top"\nrole = "ROOT"\nurl = "http://[::1]:{server.ports["http"]}"\n'
    tree.write_text(text + '[[nodes]]\nid = "below"\nrole = "LOCAL"\nparent = "top"\n')
    with (
        Registry(tree, "::1") as registry,
        Serve(tmp_path, registry_url=registry.url, registry_poll_ms=100, server_node_id="below") as child,
        Client(f"[::1]:{server.port}") as above,
        Client(f"127.0.0.1:{child.port}") as below,
    ):
        above.publish("registered", b"hello")
        eventually("the topic comes down", lambda: "registered" in {topic.name for topic in below.topics()})


def test_all_addresses_of_the_machine(tmp_path: Path) -> None:
    with Serve(tmp_path, flags=["--host", "::", "--insecure"]) as server:
        assert f"text on [::]:{server.port}" in server.ready
        for host in ("127.0.0.1", "[::1]"):
            with Client(f"{host}:{server.port}") as client:
                client.publish("hosts", b"hello")
            assert get(server, "/varz", host)["host"] == "::"


def test_a_name_is_all_its_addresses(tmp_path: Path) -> None:
    with Serve(tmp_path, flags=["--host", "localhost"]) as server:
        assert f"text on localhost:{server.port}" in server.ready
        for *_, place in socket.getaddrinfo("localhost", server.port, type=socket.SOCK_STREAM):
            socket.create_connection((str(place[0]), server.port)).close()


def test_a_broker_in_this_process_listens_at_an_ipv6_address(tmp_path: Path) -> None:
    with Broker(tmp_path, listen="[::1]:0") as broker:
        assert broker.address is not None
        assert broker.address.startswith("[::1]:")
        with Client(broker.address) as client:
            client.publish("hosts", b"hello")


@pytest.mark.parametrize("port", ["server_port", "server_quiet_port", "server_http_port"])
def test_a_port_in_use_at_one_host_leaves_nothing_open(tmp_path: Path, port: str) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        # Other tests use ports of 127.0.0.1.
        ended = refused(tmp_path, server_host="127.0.0.2,::1", **{port: number})
    assert ended.code == 1
    assert ended.stderr == (
        f"error: cannot listen on [::1]:{number}: Address already in use: another process uses the port: "
        "stop it, or choose another port (0: any free one)\n"
    )


@pytest.mark.parametrize(
    ("host", "error"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1:0: Cannot assign requested address: this machine does not have"),
        ("127.0.0.1,nobody.invalid", "unknown host 'nobody.invalid' ("),
    ],
)
def test_a_host_that_is_not_there_is_refused(tmp_path: Path, host: str, error: str) -> None:
    ended = refused(tmp_path, server_host=host, server_insecure=True)
    assert ended.code == 1
    assert ended.stderr.startswith(f"error: {error}")
    assert ended.stderr.count("\n") == 1


def refused(directory: Path, **settings: object) -> Ended:
    """`penstock serve` that ends by itself."""
    settings = {f"server_{name}port": 0 for name in ("", "quiet_", "http_")} | {"server_qb_port": "none"} | settings
    environment = {f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "--data", str(directory / "data")],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment() | environment,
        timeout=3 * PATIENCE_S,
    )
    return Ended(done.returncode, done.stderr)
