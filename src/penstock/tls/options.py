"""What a client needs for TLS: whom it trusts, and who it is.

Every client takes the same value. Without one, a `tls://` or `https://` address is verified against the CAs of the
system. The host name is always verified.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    import ssl

# Environment variables, by field. A server's own certificate has others, so that a client beside it does not show it.
VARIABLES: Final = {
    "ca": "PENSTOCK_CLIENT_TLS_CA",
    "cert": "PENSTOCK_CLIENT_TLS_CERT",
    "key": "PENSTOCK_CLIENT_TLS_KEY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Each is the path of a file, or its PEM text.

    `ca`: the CAs that may have signed the certificate of the broker; by default those of the system. `cert` and `key`:
    the certificate of the client, if the broker wants one; without `key`, it is read from `cert`.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.key is not None and self.cert is None:
            raise ValueError("a TLS key without a certificate: give both, or neither")

    def __bool__(self) -> bool:
        return self.ca is not None or self.cert is not None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        found = os.environ if environ is None else environ
        return cls(**{name: found[variable] for name, variable in VARIABLES.items() if found.get(variable)})

    def context(self) -> ssl.SSLContext:
        """Return a context for clients. Raise BadConfig with everything that is wrong with the files."""
        # Importing it takes longer than many commands.
        import ssl

        from penstock.tls.files import load_cas, load_chain

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is None:
            context.load_default_certs()
        else:
            load_cas(context, "the CA", self.ca)
        if self.cert is not None:
            load_chain(context, ("the certificate", self.cert), ("the key", self.key))
        return context
