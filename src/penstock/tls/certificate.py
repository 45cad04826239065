"""The certificate of a server: loaded from files, checked, and loaded again when they change.

A connection uses the context of the moment of its handshake, so new files do not disturb connections that are open. If
new files are invalid, the old certificate stays in use, and `problem` says why.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Final, Literal

from penstock.errors import BadConfig
from penstock.tls.files import load_cas, load_chain
from penstock.tls.stream import TlsStream

ClientCertificates = Literal["none", "optional", "required"]

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_VERIFY: Final = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    cert: str
    # None: the key is in the file of the certificate.
    key: str | None = None
    # The CAs of the certificates of clients.
    client_ca: str | None = None
    client_certificates: ClientCertificates = "none"
    min_version: Literal["1.2", "1.3"] = "1.2"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path is not None)


class ServerCertificate:
    def __init__(self, files: CertificateFiles) -> None:
        """Load the files. Raise BadConfig with what is wrong with them."""
        self.files = files
        self._seen = self._look()
        self.context, self.expires_s = _load(files)
        # Why the newest files are not in use.
        self.problem: str | None = None
        self.reloads = 0

    def has_changed(self) -> bool:
        """Return whether a file has changed since it was last loaded, or could not be."""
        return self._look() != self._seen

    def reload(self) -> bool:
        """Load the files again. Return whether they are in use; if not, `problem` says why."""
        self._seen = self._look()
        try:
            self.context, self.expires_s = _load(self.files)
        except BadConfig as error:
            self.problem = "; ".join(error.problems)
            return False
        self.problem = None
        self.reloads += 1
        return True

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self.files.paths))


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _load(files: CertificateFiles) -> tuple[ssl.SSLContext, int]:
    """Return a context, and when its certificate expires, in seconds since the epoch."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[files.min_version]
    # Clients cannot make the server calculate new keys.
    context.options |= ssl.OP_NO_RENEGOTIATION
    # No client here resumes sessions, and each ticket is sent to each client.
    context.num_tickets = 0
    load_chain(context, ("tls.cert", files.cert), ("tls.key", files.key))
    # Before clients must show certificates, and with TLS 1.3 for any key.
    expires_s = _expiry(context, files.cert)
    context.verify_mode = _VERIFY[files.client_certificates]
    if files.client_ca is not None:
        load_cas(context, "tls.client_ca", files.client_ca)
    return context, expires_s


def _expiry(server: ssl.SSLContext, cert: str) -> int:
    """Return when a certificate expires. Python's ssl decodes only certificates of peers, so this connects to itself;
    that also proves that the certificate can be used by a server."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # Whoever signed it: the certificate itself is trusted.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    load_cas(client, "tls.cert", cert)
    here, there = TlsStream(server, is_server=True), TlsStream(client, is_server=False)
    try:
        while not there.handshake():
            here.feed(there.take())
            here.handshake()
            there.feed(here.take())
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            why = "has expired: renew it"
        elif error.verify_code == _NOT_YET_VALID:
            why = "is not valid yet: check the clock of this machine"
        else:
            why = f"cannot be used by a server ({error.verify_message})"
        raise BadConfig([f"tls.cert {cert!r} {why}"]) from None
    except ssl.SSLError as error:
        raise BadConfig([f"tls.cert {cert!r} cannot be used by a server ({error.reason})"]) from None
    certificate = there.info("peercert")
    return int(ssl.cert_time_to_seconds(certificate["notAfter"]))
