"""TLS between two peers without I/O: what arrives goes in, what must be sent comes out."""

from __future__ import annotations

import ssl
from typing import Any, Final, cast

from penstock.tls.names import CertificateNames

# The first byte of a TLS connection: the type of a handshake record.
FIRST_BYTE: Final = 0x16
# What one call of `SSLObject.read` returns at most.
_RECORD_BYTES: Final = 16 << 10


class TlsStream:
    def __init__(self, context: ssl.SSLContext, *, is_server: bool, server_name: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server, server_hostname=server_name)
        # Whether the peer has said that it sends nothing more.
        self.has_ended = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing that came is left to be decrypted."""
        return not (self._incoming.pending or self._ssl.pending())

    @property
    def names(self) -> CertificateNames | None:
        """Return who the certificate of the client names."""
        certificate = self._ssl.getpeercert()
        return CertificateNames.read(certificate) if certificate else None

    def info(self, name: str) -> Any:
        """Return what a transport tells about TLS, by the names of asyncio."""
        match name:
            case "sslcontext":
                return self._ssl.context
            case "ssl_object":
                return self._ssl
            case "cipher":
                return self._ssl.cipher()
            case "peercert":
                return self._ssl.getpeercert()
        return None

    @property
    def version(self) -> str:
        """Return "1.2" or "1.3"."""
        return (self._ssl.version() or "").removeprefix("TLSv")

    @property
    def cipher(self) -> str:
        found = self._ssl.cipher()
        return found[0] if found else ""

    @property
    def has_output(self) -> bool:
        return bool(self._outgoing.pending)

    def feed(self, data: bytes) -> None:
        """Take bytes from the peer."""
        self._incoming.write(data)

    def take(self) -> bytes:
        """Return bytes for the peer."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def handshake(self) -> bool:
        """Go on with the handshake. Return whether it is done. Raise ssl.SSLError if it has failed."""
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def read(self, bytes_max: int) -> bytes:
        """Return what can be decrypted, b"" if more must come. Raise ssl.SSLError for invalid bytes."""
        parts: list[bytes] = []
        while bytes_max > 0 and not self.has_ended:
            try:
                part = self._ssl.read(min(bytes_max, _RECORD_BYTES))
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                part = b""
            if not part:
                self.has_ended = True
                break
            parts.append(part)
            bytes_max -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: memoryview) -> int:
        """Decrypt into a buffer what fits. Return how many bytes that is."""
        filled = 0
        while filled < len(buffer) and not self.has_ended:
            try:
                # With a buffer it returns how many bytes it has put there, whatever its annotations say.
                count = cast(int, self._ssl.read(len(buffer) - filled, buffer[filled:]))
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                count = 0
            if not count:
                self.has_ended = True
            filled += count
        return filled

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt bytes for the peer."""
        # OpenSSL encrypts one record in each call.
        count = self._ssl.write(cast(bytes, data))
        if count < len(data):
            rest = memoryview(data)
            while count < len(rest):
                rest = rest[count:]
                count = self._ssl.write(rest)

    def end(self) -> None:
        """Tell the peer that nothing more is sent."""
        try:
            self._ssl.unwrap()
        except ssl.SSLError:
            pass  # the peer's own notice is not waited for, and there is none within a handshake
