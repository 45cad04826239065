"""A CA, and certificates that it signs: for servers and clients, valid and not."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.tls import authority
from penstock.tls.authority import Issued
from penstock.tls.options import TlsOptions

HOSTS = ("localhost", "127.0.0.1", "::1")


class Certificates:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.authority = authority.make_ca("Test CA", 30)
        self.ca = self._save("ca", self.authority)[0]

    def server(self, name: str = "server", hosts: Iterable[str] = HOSTS, days: int = 30) -> tuple[Path, Path]:
        return self._save(name, authority.issue_server(self.authority, list(hosts), days))

    def client(self, name: str = "ann", days: int = 30) -> tuple[Path, Path]:
        return self._save(name, authority.issue_client(self.authority, name, [f"{name}@example.com"], days))

    def settings(self, name: str = "server", **more: object) -> dict[str, Any]:
        """The settings of a server, for `Serve`, that uses the certificate `name`."""
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}-key.pem"
        if not cert.exists():
            self.server(name)
        return {"tls_cert": cert, "tls_key": key} | {f"tls_{each}": value for each, value in more.items()}

    def options(self, client: str | None = None) -> TlsOptions:
        """The options of a client, with the certificate `client`."""
        if client is None:
            return TlsOptions(ca=str(self.ca))
        cert, key = self.directory / f"{client}.pem", self.directory / f"{client}-key.pem"
        if not cert.exists():
            self.client(client)
        return TlsOptions(ca=str(self.ca), cert=str(cert), key=str(key))

    def context(self, client: str | None = None) -> ssl.SSLContext:
        """What a program that is not ours uses."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if client is not None:
            options = self.options(client)
            assert options.cert is not None
            context.load_cert_chain(options.cert, options.key)
        return context

    def _save(self, name: str, issued: Issued) -> tuple[Path, Path]:
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}-key.pem"
        cert.write_bytes(issued.cert)
        key.write_bytes(issued.key)
        key.chmod(0o600)
        return cert, key
