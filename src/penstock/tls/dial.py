"""A client's TLS connection: the handshake, and what to do when it fails."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from penstock.errors import NoBroker
from penstock.tls.stream import FIRST_BYTE, TlsStream
from penstock.tls.transport import AnyProtocol, TlsTransport, error_text

# The text port greets its clients in plain with a line, unless it waits for the handshake.
_GREETING: Final = b"INFO "
GREETING_BYTES_MAX: Final = 64 << 10
# The first bytes of the records with which a server answers.
_RECORDS: Final = (FIRST_BYTE, 0x15)
# X509 errors of OpenSSL.
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_WRONG_NAME: Final = (62, 64)


async def dial(
    factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, context: ssl.SSLContext, address: str
) -> TlsTransport:
    """Connect a protocol over TLS. Raise NoBroker if the handshake fails. `address` is for errors."""
    greeter = ClientHandshake(TlsStream(context, is_server=False, server_name=host), address)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: greeter, host, port)
    try:
        socket = await greeter.done
    except BaseException:
        greeter.abort()
        raise
    protocol = cast(AnyProtocol, factory())
    transport = TlsTransport.opened_over(
        socket, greeter.stream, protocol, lambda error: NoBroker(explain(address, error))
    )
    transport.begin()
    return transport


class Greeting:
    """Removes the plain greeting of a text port from what comes first. Raise NoBroker if it is not one of TLS."""

    def __init__(self, address: str) -> None:
        self._address = address
        # What came so far; None after the greeting.
        self._data: bytes | None = b""

    def strip(self, data: bytes) -> bytes:
        """Return what comes behind the greeting."""
        if self._data is None:
            return data
        self._data += data
        if not self._data:
            return b""
        if self._data[0] in _RECORDS:
            rest, self._data = self._data, None
            return rest
        if not self._data.startswith(_GREETING[: len(self._data)]) or len(self._data) > GREETING_BYTES_MAX:
            raise self.no_tls(f"it says {self._data[:40]!r}")
        line, found, rest = self._data.partition(b"\r\n")
        if not found:
            return b""
        if not _offers_tls(line):
            raise self.no_tls("its INFO does not offer it")
        self._data = None
        return self._check_rest(rest)

    def no_tls(self, reason: str) -> NoBroker:
        return NoBroker(
            f"{self._address} does not speak TLS ({reason}): connect without tls:// and without TLS options, or set "
            "tls.cert and tls.key of the broker"
        )

    def _check_rest(self, rest: bytes) -> bytes:
        if rest and rest[0] not in _RECORDS:
            raise self.no_tls(f"it says {rest[:40]!r}")
        return rest


class ClientHandshake(asyncio.Protocol):
    def __init__(self, stream: TlsStream, address: str) -> None:
        self.stream = stream
        # The socket, when the handshake is done.
        self.done: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()
        self._address = address
        self._greeting = Greeting(address)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._step()

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self.stream.feed(self._greeting.strip(data))
        except NoBroker as error:
            self.done.set_exception(error)
            return
        self._step()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            reason = f" ({error})" if error else ""
            self.done.set_exception(
                NoBroker(
                    f"{self._address} closed the connection during the TLS handshake{reason}: check that the port "
                    "speaks TLS (tls.cert of the broker), or connect without tls://"
                )
            )

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _step(self) -> None:
        assert self._transport is not None, "it is connected"
        try:
            is_done = self.stream.handshake()
        except (ssl.SSLError, ssl.CertificateError) as error:
            self._send()
            self.done.set_exception(NoBroker(explain(self._address, error)))
            return
        self._send()
        if is_done:
            # What comes next is for the protocol.
            self._transport.pause_reading()
            self.done.set_result(self._transport)

    def _send(self) -> None:
        assert self._transport is not None, "it is connected"
        if data := self.stream.take():
            self._transport.write(data)


def explain(address: str, error: BaseException) -> str:
    """Return what is wrong with a TLS connection, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(address, error)
    reason = error_text(error) if isinstance(error, ssl.SSLError) else str(error)
    if "certificate required" in reason or "bad certificate" in reason or "handshake failure" in reason:
        advice = "the broker may require a client certificate: give a certificate and its key that its CA has signed"
    elif "unknown ca" in reason:
        advice = "the broker does not trust the client's certificate: have it signed by the CA in its tls.client_ca"
    elif "certificate expired" in reason:
        advice = "the client's certificate has expired: renew it"
    elif "wrong version number" in reason or "record layer failure" in reason or "packet length" in reason:
        advice = "the port does not speak TLS: connect without tls:// and https://, or set tls.cert of the broker"
    elif "protocol version" in reason or "unsupported protocol" in reason:
        advice = "both sides need a common version, 1.2 or newer: see tls.min_version of the broker"
    else:
        advice = "the log of the broker may have the reason"
    return f"TLS with {address} failed ({reason}): {advice}"


def _explain_certificate(address: str, error: ssl.SSLCertVerificationError) -> str:
    code, message = error.verify_code, error.verify_message
    if code == _EXPIRED:
        why = "has expired: renew the certificate of the broker"
    elif code == _NOT_YET_VALID:
        why = "is not valid yet: check the clocks of both machines"
    elif code in _WRONG_NAME:
        why = (
            f"is for another name ({message.rstrip('.')}): use a name in the certificate, or make a certificate with "
            "this name"
        )
    else:
        why = f"is not trusted ({message}): name the CA that has signed it in the TLS option ca (--tls-ca)"
    return f"the certificate of {address} {why}"


def _offers_tls(line: bytes) -> bool:
    try:
        info: Any = json.loads(line[len(_GREETING) :])
    except ValueError:
        return False
    return isinstance(info, dict) and bool(info.get("tls_required") or info.get("tls_available"))
