"""A server that speaks TLS on all its ports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.certificates import Certificates
from tests.support.server import Serve


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Serve]:
    """It takes the certificates of clients that have one."""
    settings = certificates.settings(client_ca=certificates.ca, client_certificates="optional")
    with Serve(tmp_path_factory.mktemp("server"), **settings) as serve:
        yield serve


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A server without TLS."""
    with Serve(tmp_path_factory.mktemp("plain")) as serve:
        yield serve


@pytest.fixture(scope="package")
def strict(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Serve]:
    """A server that requires the certificates of clients, and says nothing before the handshake."""
    settings = certificates.settings(client_ca=certificates.ca, client_certificates="required", handshake_first=True)
    with Serve(tmp_path_factory.mktemp("strict"), **settings) as serve:
        yield serve
