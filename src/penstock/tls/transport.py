"""TLS between a socket and a protocol: a protocol to the socket, a transport to the protocol.

It is the same for all ports of a server and for its clients, and for any event loop. The transports of the event loops
cannot be used, because a port finds out from the first byte whether its client speaks TLS, and because handshakes are
limited (handshakes.py).

A server's connection goes through these states:

    waiting      no byte came yet. What the protocol writes is sent in plain, or held until the handshake is done
    plain        the first byte was not of TLS: the socket and the protocol talk to each other
    handshake    what the protocol writes is held
    open         encrypted

It keeps what one read of the socket returned. While the protocol does not read, nothing is decrypted and the socket is
not read from either.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, cast

from penstock.tls.handshakes import HandshakeTurns
from penstock.tls.names import CERTIFICATE, CertificateNames
from penstock.tls.stream import FIRST_BYTE, TlsStream

Buffer = bytes | bytearray | memoryview
# What the protocol is handed at once.
READ_BYTES: Final = 256 << 10
# Smaller parts are joined: each write is at least one record.
_SMALL_BYTES: Final = 16 << 10

AnyProtocol = asyncio.Protocol | asyncio.BufferedProtocol


class Secured(Protocol):
    """The protocol of a server's connection that may speak TLS."""

    def refuse_plain(self) -> None:
        """The client does not speak TLS, which is required: say so when it is known how, and close."""
        ...

    def takes_overhead(self, count: int) -> bool:
        """Count bytes of TLS that carry no data. Return whether the client may send more."""
        ...


class TlsPort(Protocol):
    """What the connections of a server share."""

    # Whether clients must use TLS; whether the server waits for the handshake before it sends anything.
    required: bool
    handshake_first: bool
    # How long a handshake may take, from its first byte.
    handshake_s: float
    turns: HandshakeTurns

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        ...

    def succeeded(self) -> None: ...

    def failed(self, address: object, reason: str) -> None: ...


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """It has more than 25 methods because it implements two interfaces: a transport for the protocol, and a protocol
    for the socket."""

    def __init__(
        self,
        protocol: AnyProtocol,
        *,
        port: TlsPort | None = None,
        secured: Secured | None = None,
        explain: Callable[[ssl.SSLError], Exception] = lambda error: error,
    ) -> None:
        """`port` and `secured` are those of a server. A client's transport is opened by `opened_over`.
        `explain` makes the error that the protocol is told when TLS ends the connection."""
        super().__init__()
        self._port = port
        self._secured = secured
        self._explain = explain
        # Why TLS has ended the connection.
        self._error: Exception | None = None
        self._protocol: AnyProtocol = protocol
        self._is_buffered = False
        self._transport: asyncio.Transport
        self._stream: TlsStream | None = None
        # Whether the client's certificate is trusted, and whom it names.
        self._names: CertificateNames | None = None
        self._is_plain = self._is_open = self._is_closing = False
        # What was written before the handshake was done.
        self._held: list[bytes] = []
        # Bytes that came, less those that were handed on.
        self._overhead = 0
        # Whether the protocol reads nothing for now; whether the peer must read first; whether the handshake must wait.
        self._is_held = self._is_stalled = self._is_queued = False
        self._is_full = False
        # The next turn of reading, and the end of the time for the handshake.
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def opened_over(
        cls,
        socket: asyncio.Transport,
        stream: TlsStream,
        protocol: AnyProtocol,
        explain: Callable[[ssl.SSLError], Exception],
    ) -> TlsTransport:
        """Return the transport of a protocol over a socket, after the handshake. Its `begin` comes next."""
        transport = cls(protocol, explain=explain)
        transport.set_protocol(protocol)
        transport._transport, transport._stream, transport._is_open = socket, stream, True
        socket.set_protocol(transport)
        return transport

    def begin(self) -> None:
        """Tell the protocol that it is connected, and hand on what came behind the handshake."""
        self._protocol.connection_made(self)
        self._take_turn()

    # From the socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.set_protocol(self._protocol)
        self._protocol.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        if self._stream is None and data[0] != FIRST_BYTE:
            self._go_plain(data)
            return
        if self._stream is None:
            self._begin_handshake()
        assert self._stream is not None
        self._stream.feed(data)
        self._overhead += len(data)
        if self._is_open:
            self._read()
        else:
            assert self._port is not None, "a client's handshake is done"
            self._port.turns.take(self)

    def eof_received(self) -> None:
        """Close: no protocol here goes on with a peer that sends nothing more."""

    def pause_writing(self) -> None:
        self._is_full = True
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        self._protocol.resume_writing()
        if self._is_stalled:
            self._is_stalled = False
            self._read_soon()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._cancel()
        if self._port is not None and self._stream is not None and not self._is_open:
            self._port.failed(self._transport.get_extra_info("peername"), "the client left during the handshake")
        self._stream, self._secured = None, None
        self._held.clear()
        self._protocol.connection_lost(self._error or error)

    # The handshake of a server.

    def _begin_handshake(self) -> None:
        assert self._port is not None, "a client's handshake is done"
        self._stream = TlsStream(self._port.context(), is_server=True)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._port.handshake_s, self._expire)

    def _expire(self) -> None:
        assert self._port is not None, "a client's handshake is done"
        seconds = self._port.handshake_s
        if self._is_queued:
            # The client waits for the server.
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)
        else:
            self._fail(f"no complete handshake within {seconds:g} s")

    def step(self) -> None:
        assert self._stream is not None, "it has begun"
        if self._is_closing:
            return
        try:
            is_done = self._stream.handshake()
        except ssl.SSLError as error:
            self._fail(error_text(error))
            return
        self._flush()
        if is_done:
            self._open()
        elif self._take_overhead() and self._is_queued:
            self._is_queued = False
            self._transport.resume_reading()

    def hold(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._transport.pause_reading()

    def _open(self) -> None:
        assert self._stream is not None
        assert self._port is not None
        self._is_open = True
        self._cancel()
        self._names = self._stream.names
        self._port.succeeded()
        held, self._held = self._held, []
        if held:
            self.write(b"".join(held))
        if self._is_queued:
            self._is_queued = False
            self._read_soon()
        else:
            self._read()

    def _fail(self, reason: str) -> None:
        """Close a connection whose handshake has failed."""
        if self._port is not None:
            self._port.failed(self._transport.get_extra_info("peername"), reason)
        self._end()

    def _go_plain(self, data: bytes) -> None:
        """Step aside: the client does not speak TLS."""
        assert self._port is not None, "a client's handshake is done"
        self._is_plain = True
        if self._secured is not None and self._port.required:
            self._port.failed(self._transport.get_extra_info("peername"), "the client does not use TLS")
            self._secured.refuse_plain()
        held, self._held = self._held, []
        if held:
            self._transport.write(b"".join(held))
        self._transport.set_protocol(self._protocol)
        if not self._transport.is_closing():
            cast(asyncio.Protocol, self._protocol).data_received(data)

    # In.

    def _take_turn(self) -> None:
        self._turn = None
        if not self._is_closing:
            self._read()

    def _read(self) -> None:
        """Decrypt and hand on what came, until the protocol or the peer must do something else first."""
        assert self._stream is not None
        try:
            while not (self._is_held or self._is_closing) and self._hand_on():
                pass
        except ssl.SSLError as error:
            self._error = self._explain(error)
            self._fail(error_text(error))
            return
        if self._is_closing or self._is_held:
            return
        if self._stream.has_ended:
            self.close()
            return
        if answer := self._stream.take():
            self._transport.write(answer)
            if self._is_full:
                # A peer can ask for answers: for new keys, for example.
                self._is_stalled = True
                self._transport.pause_reading()
                return
        if self._take_overhead() and not self._transport.is_reading():
            self._transport.resume_reading()

    def _hand_on(self) -> bool:
        """Hand on some bytes. Return whether there may be more."""
        assert self._stream is not None
        protocol = self._protocol
        if self._is_buffered:
            buffered = cast(asyncio.BufferedProtocol, protocol)
            count = self._stream.read_into(cast(memoryview, buffered.get_buffer(-1)))
            self._overhead -= count
            if count:
                buffered.buffer_updated(count)
            return bool(count)
        data = self._stream.read(READ_BYTES)
        self._overhead -= len(data)
        if data:
            cast(asyncio.Protocol, protocol).data_received(data)
        return len(data) == READ_BYTES

    def _take_overhead(self) -> bool:
        """Count what was no data. Return whether the client may send more."""
        count, self._overhead = self._overhead, 0
        if self._secured is None or count <= 0 or self._secured.takes_overhead(count):
            return True
        self._end()
        return False

    def _read_soon(self) -> None:
        # Not at once: a transport does not call the protocol that calls it.
        if self._turn is None and not self._is_closing:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    # From the protocol.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == CERTIFICATE:
            return self._names
        if self._is_open and self._stream is not None and (found := self._stream.info(name)) is not None:
            return found
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(AnyProtocol, protocol)
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)
        if self._is_plain:
            self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_reading(self) -> bool:
        return self._transport.is_reading() if self._is_plain else not (self._is_held or self._is_closing)

    def pause_reading(self) -> None:
        if self._is_plain:
            self._transport.pause_reading()
        elif not (self._is_held or self._is_closing):
            self._is_held = True
            if self._turn is not None:
                self._turn.cancel()
                self._turn = None
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_plain:
            self._transport.resume_reading()
        elif self._is_held and not self._is_closing:
            self._is_held = False
            if not self._is_open:
                self._transport.resume_reading()
            elif not self._is_stalled:
                self._read_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._transport.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._held))

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: Buffer) -> None:
        if self._is_open:
            if not self._is_closing and self._stream is not None and len(data):
                self._stream.write(data)
                self._transport.write(self._stream.take())
        elif self._is_plain or (self._stream is None and not self._holds_greeting()):
            self._transport.write(data)
        else:
            self._held.append(bytes(data))

    def writelines(self, parts: Iterable[Buffer]) -> None:
        if self._is_plain:
            self._transport.writelines(parts)
            return
        small: list[Buffer] = []
        size = 0
        for part in parts:
            small.append(part)
            size += len(part)
            if size >= _SMALL_BYTES:
                self.write(part if len(small) == 1 else b"".join(small))
                small, size = [], 0
        if small:
            self.write(small[0] if len(small) == 1 else b"".join(small))

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Close, after what was written is sent."""
        if self._is_plain:
            self._transport.close()
            return
        if self._stream is not None and self._is_open and not self._is_closing:
            self._stream.end()
        self._end()

    def abort(self) -> None:
        self._is_closing = True
        self._cancel()
        self._transport.abort()

    def _holds_greeting(self) -> bool:
        return self._port is not None and self._port.handshake_first

    def _end(self) -> None:
        """Send what TLS has to say, and close."""
        if not self._is_closing:
            self._is_closing = True
            self._cancel()
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        if self._stream is not None and (data := self._stream.take()):
            self._transport.write(data)

    def _cancel(self) -> None:
        for handle in (self._turn, self._timer):
            if handle is not None:
                handle.cancel()
        self._turn = self._timer = None
        if self._port is not None:
            self._port.turns.leave(self)


def error_text(error: ssl.SSLError) -> str:
    """Return an error of OpenSSL in words: "no shared cipher"."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return (error.reason or str(error)).replace("_", " ").lower()


def protocol_factory(port: TlsPort, opened: Callable[[], Any]) -> Callable[[], asyncio.Protocol]:
    """Return a factory of protocols that speak TLS. `opened` creates the protocol behind it, which is `Secured`."""

    def create() -> asyncio.Protocol:
        protocol = opened()
        return TlsTransport(protocol, port=port, secured=protocol)

    return create
