"""TLS of a server's ports: one certificate, which is watched and loaded again, and one budget of handshakes."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from penstock.tls.certificate import ServerCertificate
from penstock.tls.handshakes import HandshakeTurns

logger = logging.getLogger(__name__)

# How often the files are looked at.
WATCH_S: Final = 2.0


@dataclass(slots=True)
class HandshakeCounters:
    done: int = 0
    failed: int = 0


class ServerTls:
    def __init__(
        self,
        certificate: ServerCertificate,
        *,
        required: bool = True,
        handshake_first: bool = False,
        handshake_s: float = 5,
        on_failure: Callable[[str, str], None] = lambda address, reason: None,
    ) -> None:
        """`on_failure` is called with the address of a client whose handshake has failed, and the reason."""
        self.certificate = certificate
        self.required = required
        self.handshake_first = handshake_first
        self.handshake_s = handshake_s
        self.turns = HandshakeTurns()
        self.handshakes = HandshakeCounters()
        # The problem that was logged last.
        self._logged: str | None = None
        self._on_failure = on_failure
        self._reloading = asyncio.Lock()

    @property
    def verifies(self) -> bool:
        """Whether clients must show a certificate."""
        return self.certificate.files.client_certificates == "required"

    @property
    def expires_in_s(self) -> int:
        """Return in how many seconds the certificate expires. Negative: it has expired."""
        return self.certificate.expires_s - int(time.time())

    @property
    def problem(self) -> str | None:
        """Return what is wrong with the certificate. Connections are served as far as their clients accept it."""
        if self.certificate.problem is not None:
            return f"the new files are not used, the old certificate is: {self.certificate.problem}"
        return f"{self.certificate.files.cert} has expired: replace it" if self.expires_in_s <= 0 else None

    def context(self) -> ssl.SSLContext:
        return self.certificate.context

    def succeeded(self) -> None:
        self.handshakes.done += 1

    def failed(self, address: object, reason: str) -> None:
        self.handshakes.failed += 1
        host = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""
        self._on_failure(host, reason)

    def figures(self) -> Mapping[str, Any]:
        """Return what `/varz` shows."""
        files = self.certificate.files
        expires = datetime.fromtimestamp(self.certificate.expires_s, UTC)
        return {
            "tls_required": self.required,
            "tls_verify": self.verifies,
            "tls_cert_not_after": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tls": {
                "expires_in_s": self.expires_in_s,
                "client_certificates": files.client_certificates,
                "min_version": files.min_version,
                "handshake_first": self.handshake_first,
                "handshakes": self.handshakes.done,
                "handshakes_failed": self.handshakes.failed,
                "reloads": self.certificate.reloads,
            },
        }

    async def reload(self) -> bool:
        """Load the files again. Return whether they are in use now."""
        async with self._reloading:
            is_loaded = await asyncio.to_thread(self.certificate.reload)
        self._report()
        if is_loaded:
            logger.info("the TLS certificate was loaded again from %s", ", ".join(self.certificate.files.paths))
        return is_loaded

    async def watch(self) -> None:
        """Load the files again whenever they change."""
        while True:
            self._report()
            await asyncio.sleep(WATCH_S)
            if await asyncio.to_thread(self.certificate.has_changed):
                await self.reload()

    def _report(self) -> None:
        """Log what is wrong with the certificate, when that changes."""
        problem, self._logged = self._logged, self.problem
        if self._logged is not None and self._logged != problem:
            logger.error("TLS certificate: %s", self._logged)
        elif self._logged is None and problem is not None:
            logger.warning("TLS certificate: solved")
