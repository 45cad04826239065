"""Certificates, keys and CAs from files or from text, with errors that name the file and what is wrong with it."""

from __future__ import annotations

import os
import ssl
import tempfile
from pathlib import Path
from typing import Final

from penstock.errors import BadConfig

_PEM: Final = "-----BEGIN "
_ENCRYPTED: Final = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
_NO_ADVICE: Final = "it must be the path of a file in PEM format, or the PEM text itself"


def load_cas(context: ssl.SSLContext, name: str, ca: str) -> None:
    """Trust the CAs in a file or a text. `name`: what it is called in errors."""
    text = _read(name, ca)
    try:
        context.load_verify_locations(cadata=text.decode("ascii"))
    except (ssl.SSLError, UnicodeError, ValueError) as error:
        raise BadConfig([f"{name} {_shown(ca)} has no valid certificate in PEM format ({_reason(error)})"]) from None


def load_chain(context: ssl.SSLContext, cert: tuple[str, str], key: tuple[str, str | None]) -> None:
    """Load a certificate and its key, each with its name in errors."""
    certificate = _read(*cert)
    named = (key[0], key[1]) if key[1] is not None else cert
    private = certificate if key[1] is None else _read(key[0], key[1])
    if b"PRIVATE KEY-----" not in private:
        missing = "add the key to it, or name the file of the key" if key[1] is None else _NO_ADVICE
        raise BadConfig([f"{named[0]} {_shown(named[1])} has no private key: {missing}"])
    if any(mark in private for mark in _ENCRYPTED):
        problem = f"{named[0]} {_shown(named[1])} is encrypted with a passphrase, which cannot be asked for"
        remedy = "decrypt it with `openssl pkey -in FILE -out NEW`, and protect the file by its mode (0600)"
        raise BadConfig([f"{problem}: {remedy}"])
    if b"-----BEGIN CERTIFICATE-----" not in certificate:
        raise BadConfig([f"{cert[0]} {_shown(cert[1])} has no certificate: {_NO_ADVICE}"])
    # Python's ssl reads these two only from files.
    with tempfile.TemporaryDirectory(prefix="penstock-tls-") as directory:
        paths = Path(directory, "cert.pem"), Path(directory, "key.pem")
        for path, data in zip(paths, (certificate, private), strict=True):
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(data)
        try:
            context.load_cert_chain(*paths, password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                problem = f"{named[0]} {_shown(named[1])} does not belong to {cert[0]} {_shown(cert[1])}"
                raise BadConfig([f"{problem}: use the key with which the certificate was requested"]) from None
            problem = f"{cert[0]} {_shown(cert[1])} or its key is invalid ({_reason(error)})"
            raise BadConfig([f"{problem}: {_NO_ADVICE}"]) from None


def _read(name: str, given: str) -> bytes:
    """Return PEM text, which may be in a file."""
    if _PEM in given:
        return given.encode()
    try:
        return Path(given).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadConfig([f"{name} {given!r} cannot be read ({reason}): {_NO_ADVICE}"]) from None


def _shown(given: str) -> str:
    return "(given as text)" if _PEM in given else repr(given)


def _reason(error: Exception) -> str:
    found = error.reason if isinstance(error, ssl.SSLError) else None
    return found.replace("_", " ").lower() if found else str(error)
