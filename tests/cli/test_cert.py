"""`penstock cert`: what it creates works, is private, and replaces nothing."""

from __future__ import annotations

import re
import ssl
import subprocess
from pathlib import Path

import pytest

from penstock.tls.certificate import CertificateFiles, ServerCertificate
from penstock.tls.names import CertificateNames
from penstock.tls.stream import TlsStream
from tests.support.commands import NOBODY, Done, Penstock, wrong_usage


@pytest.fixture
def cert(tmp_path: Path) -> Penstock:
    return Penstock(NOBODY, PWD=str(tmp_path))


def make(cert: Penstock, directory: Path, *arguments: str) -> Done:
    return cert("cert", *arguments, "--dir", directory)


def made(cert: Penstock, directory: Path) -> None:
    server, client = ("server", "localhost", "10.0.0.7", "*.example.com"), ("client", "ann", "--email", "a@b.c")
    for arguments in (("ca",), server, client):
        assert make(cert, directory, *arguments).code == 0


def test_openssl_verifies_what_it_creates(cert: Penstock, tmp_path: Path) -> None:
    made(cert, tmp_path / "tls")

    def openssl(*arguments: str) -> str:
        done = subprocess.run(
            ["openssl", *arguments], cwd=tmp_path / "tls", check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    strict = ("verify", "-x509_strict", "-CAfile", "ca.pem")
    assert openssl(*strict, "-purpose", "sslserver", "server.pem") == "server.pem: OK\n"
    assert openssl(*strict, "-purpose", "sslclient", "ann.pem") == "ann.pem: OK\n"
    text = openssl("x509", "-in", "server.pem", "-noout", "-text")
    assert "DNS:localhost, IP Address:10.0.0.7, DNS:*.example.com" in text
    assert re.search(r"TLS Web Server Authentication", text)


def test_a_client_certificate_names_its_client(cert: Penstock, tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    made(cert, directory)
    files = CertificateFiles(
        cert=str(directory / "server.pem"),
        key=str(directory / "server-key.pem"),
        client_ca=str(directory / "ca.pem"),
        client_certificates="required",
    )
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    context.load_cert_chain(directory / "ann.pem", directory / "ann-key.pem")
    here = TlsStream(ServerCertificate(files).context, is_server=True)
    there = TlsStream(context, is_server=False, server_name="localhost")

    while not there.handshake():
        here.feed(there.take())
        here.handshake()
        there.feed(here.take())
    here.feed(there.take())

    assert here.handshake()
    assert here.names == CertificateNames(subject="CN=ann", common_name="ann", emails=("a@b.c",))


def test_files_are_private_and_not_overwritten(cert: Penstock, tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    made(cert, directory)
    before = {path: path.read_bytes() for path in directory.iterdir()}

    again = [make(cert, directory, *arguments) for arguments in (("ca",), ("server",), ("client", "ann"))]

    assert {path.stat().st_mode & 0o777 for path in before} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [done.code for done in again] == [1, 1, 1]
    assert all("exists: choose another --dir or name, or remove it" in done.err for done in again)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_certificates_need_a_ca(cert: Penstock, tmp_path: Path) -> None:
    done = make(cert, tmp_path / "tls", "server")

    assert done.code == 1
    assert "there is no CA in" in done.err
    assert "penstock cert ca --dir" in done.err


@pytest.mark.parametrize(
    "arguments", [("client", ""), ("client", "../ann"), ("client", "ca"), ("server", "a b"), ("ca", "--days", "0")]
)
def test_invalid_names_are_refused(arguments: tuple[str, ...]) -> None:
    assert wrong_usage("cert", *arguments)
