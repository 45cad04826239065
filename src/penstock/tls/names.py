"""Who a verified client certificate names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

# The key of the names among what a transport knows of its connection (`get_extra_info`), and in an ASGI scope's
# extensions.
CERTIFICATE: Final = "penstock.certificate"

# Abbreviations of RFC 4514, with which nats-server and OpenSSL write a subject.
_ATTRIBUTES: Final = {
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateNames:
    """The names in a client certificate that a trusted CA has signed."""

    # All of the subject, as in RFC 4514: "CN=orders,O=Example". The part that is most specific comes first.
    subject: str
    common_name: str | None = None
    # The subject alternative names, by their kinds.
    dns_names: tuple[str, ...] = ()
    emails: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return what a user may be found by: the subject, its common name as `CN=ann`, the alternative names."""
        common = () if self.common_name is None else (f"CN={_escape(self.common_name)}",)
        return (self.subject, *common, *self.dns_names, *self.emails, *self.uris)

    @classmethod
    def read(cls, certificate: Mapping[str, Any]) -> Self:
        """Read a certificate as `ssl.SSLObject.getpeercert` returns it."""
        attributes = [attribute for part in certificate.get("subject", ()) for attribute in part]
        common_names = [value for name, value in attributes if name == "commonName"]
        alternative = certificate.get("subjectAltName", ())
        return cls(
            subject=",".join(f"{_ATTRIBUTES.get(name, name)}={_escape(value)}" for name, value in reversed(attributes)),
            # Of several, the last one is the most specific.
            common_name=common_names[-1] if common_names else None,
            dns_names=tuple(value for kind, value in alternative if kind == "DNS"),
            emails=tuple(value for kind, value in alternative if kind == "email"),
            uris=tuple(value for kind, value in alternative if kind == "URI"),
        )


def _escape(value: str) -> str:
    escaped = "".join(f"\\{each}" if each in '",+;<>\\' else each for each in value)
    if escaped.startswith(("#", " ")):
        escaped = f"\\{escaped}"
    return f"{escaped[:-1]}\\ " if len(value) > 1 and value.endswith(" ") else escaped
