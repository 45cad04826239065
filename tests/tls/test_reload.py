"""Certificates are replaced while messages flow: none is lost, no connection ends, and bad files change nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from penstock import Client
from tests.support.certificates import Certificates
from tests.support.process import PATIENCE_S
from tests.support.registries import until
from tests.support.server import Serve


class Renewed:
    """A server whose certificate is replaced."""

    def __init__(self, server: Serve, certificates: Certificates, directory: Path) -> None:
        self.server, self.certificates = server, certificates
        self.cert, self.key = directory / "live.pem", directory / "live-key.pem"

    def replace(self, name: str) -> None:
        for source, target in zip(self.certificates.server(name), (self.cert, self.key), strict=True):
            copy = target.with_suffix(".new")
            shutil.copyfile(source, copy)
            copy.replace(target)

    def shown(self, door: str = "quiet") -> str:
        """The certificate that a new client is shown."""
        context = self.certificates.context()
        with (
            socket.create_connection(("localhost", self.server.ports[door]), PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            return ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")

    def shows(self, certificate: str) -> bool:
        return self.shown() == certificate == self.shown("http")

    def get(self, path: str) -> Any:
        url = f"https://localhost:{self.server.ports['http']}{path}"
        with urlopen(url, context=self.certificates.context(), timeout=PATIENCE_S) as answer:
            return json.load(answer) if path != "/metrics" else answer.read().decode()


def _is_longer(found: list[int], count: int) -> bool:
    return len(found) > count


@pytest.fixture
def renewed(tmp_path: Path, certificates: Certificates) -> Iterator[Renewed]:
    for source, target in zip(certificates.server("first"), ("live.pem", "live-key.pem"), strict=True):
        shutil.copyfile(source, tmp_path / target)
    with Serve(tmp_path, tls_cert=tmp_path / "live.pem", tls_key=tmp_path / "live-key.pem") as server:
        yield Renewed(server, certificates, tmp_path)


def test_certificates_are_replaced_under_load(renewed: Renewed) -> None:
    """By SIGHUP and by a change of the files."""
    stop = threading.Event()
    published: list[int] = []
    servers, tls = f"localhost:{renewed.server.ports['quiet']}", renewed.certificates.options()
    with Client(servers, name="publisher", tls=tls) as publisher, Client(servers, name="reader", tls=tls) as reader:
        subscription = reader.subscribe("load")

        def publish() -> None:
            while not stop.is_set():
                published.append(publisher.publish("load", b"%d" % len(published)).offset)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            for name in ("second", "third", "fourth"):
                before = len(published)
                renewed.replace(name)
                if name == "third":
                    renewed.server.process.send_signal(signal.SIGHUP)
                wanted = renewed.cert.read_text()
                until(partial(renewed.shows, wanted))
                until(partial(_is_longer, published, before))
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        received = [subscription.get(PATIENCE_S) for _ in published]
        connections = renewed.get("/connz")["connections"]

    assert [int(message.value or b"") for message in received] == list(range(len(published)))
    # Nobody connected again.
    assert {"publisher", "reader"} <= {each["name"] for each in connections}
    assert [each["cid"] for each in connections if each["name"]] == [1, 2]
    assert renewed.get("/varz")["tls"]["reloads"] >= 3


def test_bad_files_change_nothing_and_are_reported(renewed: Renewed) -> None:
    good = renewed.shown()
    # The certificate is replaced and its key is not yet.
    shutil.copyfile(renewed.certificates.server("half")[0], renewed.cert)
    os.kill(renewed.server.process.pid, signal.SIGHUP)

    problem = until(lambda: renewed.get("/healthz").get("tls"))

    assert "does not belong to tls.cert" in problem
    assert renewed.shown() == good
    assert re.search(r"^broker_problems 1\.0$", renewed.get("/metrics"), re.MULTILINE)

    shutil.copyfile(renewed.certificates.directory / "half-key.pem", renewed.key)
    until(lambda: renewed.get("/healthz")["status"] == "ok")
    assert renewed.shown() != good


def test_the_expiry_is_shown(renewed: Renewed) -> None:
    metrics, varz = renewed.get("/metrics"), renewed.get("/varz")

    [expires] = re.findall(r"^broker_tls_certificate_expiry_seconds (\S+)$", metrics, re.MULTILINE)
    assert 29 * 86_400 < float(expires) <= 30 * 86_400
    assert abs(varz["tls"]["expires_in_s"] - float(expires)) < PATIENCE_S
    assert varz["tls_cert_not_after"].endswith("Z")
    assert re.search(r"^broker_tls_handshakes_total [1-9]", metrics, re.MULTILINE)
