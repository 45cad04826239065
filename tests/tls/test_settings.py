"""The settings of TLS: which are accepted, and what is said about the others."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from penstock.errors import BadConfig
from penstock.server.config import load
from penstock.server.settings import TlsConfig
from penstock.tls.certificate import CertificateFiles, ServerCertificate
from penstock.tls.stream import TlsStream
from tests.support.certificates import Certificates


def problems(directory: Path, **settings: object) -> list[str]:
    """What is wrong with a configuration file with these settings of `tls`, each in a line of its own."""
    path = directory / "penstock.toml"
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(str(value))}"
        for name, value in settings.items()
    ]
    path.write_text("\n".join(["[tls]", *lines]))
    try:
        load(path=path, environ={}, flags={})
    except BadConfig as error:
        return [problem.replace(str(directory), "DIR") for problem in error.problems]
    return []


def test_a_certificate_is_read_from_the_environment_and_flags(certificates: Certificates) -> None:
    cert, key = certificates.server()
    environ = {"PENSTOCK_TLS_CERT": str(cert), "PENSTOCK_TLS_CLIENT_CERTIFICATES": "none"}

    loaded = load(path=None, environ=environ, flags={"tls.key": str(key)})

    assert loaded.config.tls == TlsConfig(cert=str(cert), key=str(key))
    assert loaded.origins["tls.key"] == "flag --tls-key"


def test_a_file_that_is_missing_is_named_with_its_line(tmp_path: Path, certificates: Certificates) -> None:
    _, key = certificates.server()

    [problem] = problems(tmp_path, cert=tmp_path / "missing.pem", key=key)

    assert problem == (
        "tls.cert (file DIR/penstock.toml:2): 'DIR/missing.pem' cannot be read (No such file or directory): it must be "
        "the path of a file in PEM format, or the PEM text itself"
    )


def test_a_key_of_another_certificate_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    (cert, _), (_, other) = certificates.server(), certificates.server("other")

    [problem] = problems(tmp_path, cert=cert, key=other)

    assert problem.startswith(f"tls.key (file DIR/penstock.toml:3): '{other}' does not belong to tls.cert '{cert}'")


def test_an_encrypted_key_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    cert, key = certificates.server()
    encrypted = tmp_path / "encrypted.pem"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)

    [problem] = problems(tmp_path, cert=cert, key=encrypted)

    assert "tls.key (file DIR/penstock.toml:3): 'DIR/encrypted.pem' is encrypted with a passphrase" in problem
    assert "openssl pkey" in problem


def test_a_certificate_that_has_expired_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    cert, key = certificates.server("expired", days=-1)

    assert problems(tmp_path, cert=cert, key=key) == [
        f"tls.cert (file DIR/penstock.toml:2): '{cert}' has expired: renew it"
    ]


def test_the_certificate_of_a_client_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    cert, key = certificates.client()

    [problem] = problems(tmp_path, cert=cert, key=key)

    assert "cannot be used by a server" in problem


@pytest.mark.parametrize(
    ("cert", "key", "problem"),
    [
        ("key", "key", "has no certificate"),
        ("cert", "cert", "has no private key: it must be the path"),
        ("cert", None, "has no private key: add the key to it"),
        ("text", "key", "has no certificate"),
        ("broken", "key", "or its key is invalid"),
    ],
)
def test_files_with_something_else_are_refused(
    tmp_path: Path, certificates: Certificates, cert: str, key: str | None, problem: str
) -> None:
    real_cert, real_key = certificates.server()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nhello\n-----END CERTIFICATE-----\n")
    paths = {"cert": real_cert, "key": real_key, "text": tmp_path / "text", "broken": tmp_path / "broken"}
    settings = {"cert": paths[cert]} | ({} if key is None else {"key": paths[key]})

    [found] = problems(tmp_path, **settings)

    assert problem in found


def test_one_file_may_have_the_certificate_and_the_key(tmp_path: Path, certificates: Certificates) -> None:
    cert, key = certificates.server()
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())

    assert problems(tmp_path, cert=both) == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"key": "k.pem"}, "tls.key (file DIR/penstock.toml:2) has no effect without a certificate"),
        ({"handshake_first": True}, "tls.handshake_first (file DIR/penstock.toml:2) has no effect without a"),
    ],
)
def test_settings_that_need_a_certificate_say_so(tmp_path: Path, settings: Mapping[str, object], problem: str) -> None:
    assert any(each.startswith(problem) for each in problems(tmp_path, **settings))


def test_the_cas_and_the_certificates_of_clients_belong_together(tmp_path: Path, certificates: Certificates) -> None:
    cert, key = certificates.server()
    base = {"cert": cert, "key": key}

    [without_ca] = problems(tmp_path, **base, client_certificates="required")
    [ca_alone] = problems(tmp_path, **base, client_ca=certificates.ca)
    [wrong_ca] = problems(tmp_path, **base, client_ca=key, client_certificates="optional")

    assert "tls.client_certificates (file DIR/penstock.toml:4) needs the CAs that sign them" in without_ca
    assert "tls.client_ca (file DIR/penstock.toml:4) has no effect" in ca_alone
    assert "tls.client_ca (file DIR/penstock.toml:4):" in wrong_ca
    assert "has no valid certificate in PEM format" in wrong_ca


@pytest.mark.parametrize(("least", "is_served"), [("1.2", True), ("1.3", False)])
def test_older_versions_are_refused(certificates: Certificates, least: Literal["1.2", "1.3"], is_served: bool) -> None:
    cert, key = certificates.server()
    files = CertificateFiles(cert=str(cert), key=str(key), min_version=least)
    context = certificates.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    here = TlsStream(ServerCertificate(files).context, is_server=True)
    there = TlsStream(context, is_server=False, server_name="localhost")

    there.handshake()
    here.feed(there.take())

    if is_served:
        assert not here.handshake()
        assert here.take()
    else:
        with pytest.raises(ssl.SSLError, match="unsupported protocol"):
            here.handshake()
