"""A CA for a trial: it signs certificates for servers and clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.errors import PenstockError

# A certificate is valid from a little before it is made: clocks differ.
_EARLY: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, as PEM text."""

    cert: bytes
    key: bytes


def make_ca(name: str, days: int) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key.public_key(), key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(is_ca=True), critical=True)
    return _issued(builder.sign(key, hashes.SHA256()), key)


def issue_server(ca: Issued, hosts: Sequence[str], days: int) -> Issued:
    """Issue the certificate of a server at these hosts, names or addresses."""
    names = [_alternative(host) for host in hosts]
    return _issue(ca, hosts[0], names, ExtendedKeyUsageOID.SERVER_AUTH, days)


def issue_client(ca: Issued, name: str, emails: Sequence[str], days: int) -> Issued:
    return _issue(ca, name, [x509.RFC822Name(email) for email in emails], ExtendedKeyUsageOID.CLIENT_AUTH, days)


def _issue(
    ca: Issued, name: str, alternative: Sequence[x509.GeneralName], usage: x509.ObjectIdentifier, days: int
) -> Issued:
    issuer, signer = _read(ca)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(name), issuer.subject, key.public_key(), signer.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(is_ca=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if alternative:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternative), critical=False)
    return _issued(builder.sign(signer, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    days: int,
) -> x509.CertificateBuilder:
    """`days` may be negative: the certificate has expired."""
    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until - timedelta(days=1)) - _EARLY)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _read(ca: Issued) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        cert = x509.load_pem_x509_certificate(ca.cert)
        key = serialization.load_pem_private_key(ca.key, None)
    except (ValueError, TypeError) as error:
        raise PenstockError(f"the CA is not valid ({error}): make one with `penstock cert ca`") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PenstockError("the key of the CA is not one that `penstock cert ca` makes: use the CA's own tools")
    return cert, key


def _issued(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    form = serialization.PrivateFormat.PKCS8
    return Issued(
        cert.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()),
    )
