"""Pipes, registries and replicas over https, and what is said when it fails."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from penstock import Client
from tests.support.certificates import Certificates
from tests.support.commands import NOBODY, Penstock
from tests.support.process import PATIENCE_S
from tests.support.registries import Registry, until
from tests.support.replicas import ReplicaProcess
from tests.support.server import Serve


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Serve]:
    """A parent that requires the certificates of its children."""
    settings = certificates.settings(client_ca=certificates.ca, client_certificates="required")
    with (
        Serve(tmp_path_factory.mktemp("root"), server_node_id="root", **settings) as server,
        Client(f"localhost:{server.port}", tls=certificates.options("ann")) as client,
    ):
        for number in range(3):
            client.publish("prices", b"%d" % number)
        yield server


def parent_url(server: Serve) -> str:
    return f"https://localhost:{server.ports['http']}"


def of_child(certificates: Certificates, **settings: object) -> dict[str, Any]:
    tls = certificates.options("child")
    given = {"ca": tls.ca, "cert": tls.cert, "key": tls.key}
    return {
        "server_node_id": "child",
        "pipe_poll_ms": 50,
        **{f"pipe_{name}": path for name, path in given.items()},
    } | settings


def status(child: Serve) -> Any:
    with urlopen(f"http://127.0.0.1:{child.ports['http']}/pipe/status", timeout=PATIENCE_S) as answer:
        return json.load(answer)


def test_a_child_pipes_over_https(root: Serve, certificates: Certificates, tmp_path: Path) -> None:
    settings = of_child(certificates, pipe_parent=parent_url(root))
    with Serve(tmp_path, **settings) as child, Client(f"127.0.0.1:{child.port}") as client:
        until(lambda: any(topic.name == "prices" for topic in client.topics()))
        subscription = client.subscribe("prices", start="earliest")

        assert [subscription.get(PATIENCE_S).value for _ in range(3)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("trusts", "shows", "problem"), [(False, True, "is not trusted"), (True, False, "client certificate")]
)
def test_what_is_wrong_with_a_parent_is_said(
    root: Serve, certificates: Certificates, tmp_path: Path, trusts: bool, shows: bool, problem: str
) -> None:
    settings = of_child(certificates, pipe_parent=parent_url(root))
    if not trusts:
        settings["pipe_ca"] = Certificates(tmp_path / "other").ca
    if not shows:
        del settings["pipe_cert"], settings["pipe_key"]

    with Serve(tmp_path, **settings) as child:
        assert until(lambda: problem in json.dumps(status(child)))


def test_a_registry_serves_https(root: Serve, certificates: Certificates, tmp_path: Path) -> None:
    certificates.settings("registry")
    files = [str(certificates.directory / name) for name in ("registry.pem", "registry-key.pem")]
    tree = tmp_path / "tree.toml"
    tree.write_text(
        f"""
        [[nodes]]
        id = "root"
        role = "ROOT"
        url = "{parent_url(root)}"

        [[nodes]]
        id = "child"
        role = "L2"
        parent = "root"
        url = "https://localhost:1"
        topics = ["prices"]
        """
    )
    with Registry(tree, flags=["--tls-cert", files[0], "--tls-key", files[1]]) as registry:
        url = f"https://localhost:{registry.port}"
        settings = of_child(certificates, registry_url=url)
        with Serve(tmp_path / "child", **settings) as child, Client(f"127.0.0.1:{child.port}") as client:
            until(lambda: any(topic.name == "prices" for topic in client.topics()))
        shown = Penstock(NOBODY)("topology", "--registry", url, "--tls-ca", certificates.ca, "--json")
        refused = Penstock(NOBODY)("topology", "--registry", url)

    assert {node["node"] for node in shown.json["nodes"]} == {"root", "child"}
    assert "is not trusted" in refused.err


def test_a_replica_copies_and_answers_over_tls(server: Serve, certificates: Certificates, tmp_path: Path) -> None:
    with Client(f"localhost:{server.port}", tls=certificates.options()) as client:
        client.publish("price-topic", b'{"id": 1}', key="a")
    certificates.settings("replica")
    https = ssl.create_default_context(cafile=str(certificates.ca))
    with ReplicaProcess(
        tmp_path,
        server.ports["quiet"],
        flags=["--tls-ca", str(certificates.ca)],
        https=https,
        CONSUMER_HTTP_TLS_CERT=certificates.directory / "replica.pem",
        CONSUMER_HTTP_TLS_KEY=certificates.directory / "replica-key.pem",
    ) as replica:
        replica.wait_records(1)

        assert replica.get("stats")["totalRecords"] == 1
