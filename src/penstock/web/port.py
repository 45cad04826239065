"""An HTTP port for strangers: uvicorn, with limits on what a connection may do.

- A client that does not send its request in time, or does not read its answer, is closed.
- Connections and header bytes are limited; an application limits the bodies that it reads.
- Connections are accepted, and requests are handled, a few in each turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import h11
import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock import address
from penstock.acceptor import Acceptor
from penstock.health import Usage
from penstock.tls.names import CERTIFICATE, CertificateNames
from penstock.tls.transport import TlsPort, protocol_factory
from penstock.web.request_turns import RequestTurns

# Of the request line and the headers.
HEADER_BYTES_MAX: Final = 16 << 10
CONNECTIONS_MAX: Final = 4096
_SWEEP_S: Final = 1.0
# How often the date in the responses is updated.
_TICK_S: Final = 1.0
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 29\r\n\r\n"
    b"maximum connections exceeded\n"
)

_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 68\r\n\r\n"
    b"the request line and headers are longer than 16384 bytes: send less\n"
)

_INVALID: Final = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 21\r\n\r\n"
    b"invalid HTTP request\n"
)

_TLS_REQUIRED: Final = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 42\r\n\r\n"
    b"this port requires TLS: use https:// URLs\n"
)

# An ASGI extension of requests that ask for WebSocket: it hands the connection over (`_Connection.upgrade`).
UPGRADE: Final = "penstock.upgrade"


def certificate(request: Request) -> CertificateNames | None:
    """Return who the certificate of a request's client names, if it has shown one that is trusted."""
    found = request.scope.get("extensions", {}).get(CERTIFICATE)
    assert found is None or isinstance(found, CertificateNames), "nothing else uses this key"
    return found


class WebPort:
    """uvicorn in the running loop. It leaves signals to the caller."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        idle_s: float,
        tls: TlsPort | None = None,
        connections_max: int = CONNECTIONS_MAX,
        on_invalid: Callable[[str], None] = lambda address: None,
    ) -> None:
        """Listen, and accept no connection before `run`. `host` may have several, separated by commas. `idle_s` is how
        long a client may take to send a request, or to read more of an answer. `on_invalid` is called with the address
        of a client that sent an invalid request."""
        self._sockets = address.bind(address.hosts(host), port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._connections_max = connections_max
        self._tls = tls
        turns = RequestTurns()
        config = uvicorn.Config(
            app,
            http=partial(  # type: ignore[arg-type]
                _Connection, idle_s=idle_s, connections_max=connections_max, on_invalid=on_invalid, turns=turns
            ),
            # It must not change the logging of the process.
            log_config=None,
            # Any client can cause its warnings, as often as it likes. `on_invalid` replaces them.
            log_level="error",
            lifespan="off",
            ws="none",
            server_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
        self._uvicorn.startup = self._start_up  # type: ignore[method-assign]
        self._uvicorn.main_loop = self._tick  # type: ignore[method-assign]
        self._uvicorn.shutdown = self._shut_down  # type: ignore[method-assign]
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        sweeper = asyncio.create_task(self._sweep())
        try:
            await self._uvicorn.serve(sockets=self._sockets)
        finally:
            sweeper.cancel()

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._stopping.set()

    def close(self) -> None:
        """Stop listening."""
        for each in self._sockets:
            each.close()

    def usage(self) -> Usage:
        return Usage(len(self._uvicorn.server_state.connections), self._connections_max)

    def unsent(self) -> int:
        """Return how many bytes of answers clients have not read yet."""
        return sum(each.transport.get_write_buffer_size() for each in self._uvicorn.server_state.connections)

    async def _start_up(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections. uvicorn would accept all that wait before anything else happens."""
        server, config = self._uvicorn, self._uvicorn.config
        open_connection: Callable[[], asyncio.BaseProtocol] = partial(
            config.http_protocol_class,  # type: ignore[call-arg]
            config=config,
            server_state=server.server_state,
            app_state={},
        )
        if self._tls is not None:
            open_connection = protocol_factory(self._tls, open_connection)
        acceptor = Acceptor(sockets or (), open_connection)
        acceptor.start(address.BACKLOG)
        server.servers = [acceptor]  # type: ignore[list-item]
        server.started = True

    async def _tick(self) -> None:
        """Update the date of the responses. uvicorn polls ten times a second whether it should stop; this waits."""
        while not await self._uvicorn.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _TICK_S)

    async def _shut_down(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop at once if there are no clients. uvicorn would wait 0.1 s for them in any case."""
        state = self._uvicorn.server_state
        if state.connections or state.tasks:
            await uvicorn.Server.shutdown(self._uvicorn, sockets)
            return
        for each in (*self._uvicorn.servers, *(sockets or ())):
            each.close()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for connection in list(self._uvicorn.server_state.connections):
                assert isinstance(connection, _Connection)
                connection.look(loop.time())


class _Connection(H11Protocol):
    """uvicorn's connection has one timeout only: from an answer to the next byte. This adds the others."""

    def __init__(
        self,
        *arguments: Any,
        idle_s: float,
        connections_max: int,
        on_invalid: Callable[[str], None],
        turns: RequestTurns,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._turns = turns
        self._idle_s = idle_s
        self._on_invalid = on_invalid
        self._connections_max = connections_max
        self._received = 0
        # Whether something that was received waits for a turn.
        self._is_held = False
        # What the client must do next, with its progress; and since when.
        self._awaited: tuple[str, int] | None = None
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._awaited, self._since = self._wanted(), self.loop.time()
        if len(self.connections) > self._connections_max:
            self.refuse_full()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self._received += len(data)
            self._turns.received(self, data)

    def handle_received(self, data: bytes) -> None:
        if self._is_held:
            self._is_held = False
            if not self.flow.read_paused:
                self.transport.resume_reading()
        if not self.transport.is_closing():
            super().data_received(data)

    def refuse_plain(self) -> None:
        self.transport.write(_TLS_REQUIRED)
        self.transport.close()

    def takes_overhead(self, _count: int) -> bool:
        """The time for a request limits what a client can send."""
        return True

    def hold(self) -> None:
        self._is_held = True
        self.transport.pause_reading()

    def refuse_full(self) -> None:
        self.transport.write(_FULL)
        self.transport.close()

    async def upgrade(self, headers: list[tuple[bytes, bytes]], protocol: asyncio.Protocol) -> None:
        """Answer the request with 101, and hand the connection over to another protocol."""
        if self.flow.write_paused:
            # The transport would not resume the new protocol.
            await self.flow.drain()
        # The application sends nothing more.
        self.cycle.response_started = self.cycle.response_complete = True
        if self.transport.is_closing():
            return
        self.connections.discard(self)
        lines = [b"HTTP/1.1 101 Switching Protocols", *(b": ".join(header) for header in headers), b"", b""]
        self.transport.write(b"\r\n".join(lines))
        data, _ = self.conn.trailing_data
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        self.transport.resume_reading()
        if data:
            protocol.data_received(data)

    def _should_upgrade(self) -> bool:
        """Leave upgrades to the application. What uvicorn does with a request to upgrade is used for a request whose
        head is too long: h11 limits only a head that has not ended yet."""
        if self._head_bytes() > HEADER_BYTES_MAX:
            return True
        if self.transport.get_extra_info("sslcontext") is not None:
            # It is not known yet when the connection is made.
            self.scope["scheme"] = "https"
        extensions = self.scope.setdefault("extensions", {})
        if (names := self.transport.get_extra_info(CERTIFICATE)) is not None:
            extensions[CERTIFICATE] = names
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if self._get_upgrade() == b"websocket" and not has_body:
            extensions[UPGRADE] = self.upgrade  # type: ignore[assignment]
        return False

    def _head_bytes(self) -> int:
        scope = self.scope
        line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
        return line + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._refuse(_TOO_LONG)

    def send_400_response(self, msg: str) -> None:
        is_head = self.cycle is None and len(self.conn.trailing_data[0]) > HEADER_BYTES_MAX
        self._refuse(_TOO_LONG if is_head else _INVALID)

    def _refuse(self, answer: bytes) -> None:
        """Answer an invalid request, unless its answer has begun, and close. h11 cannot be used: it allows one answer
        to a request, and the application may be about to send another, or have sent it before the body ended."""
        self._on_invalid(f"{self.client[0]}:{self.client[1]}" if self.client else "")
        if self.cycle is not None and not self.cycle.response_complete:
            # The application waits for no more of the body, and sends nothing.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(answer)
        self.transport.close()

    def shutdown(self) -> None:
        # h11 refuses to close in the middle of a request, which was refused above.
        if not self.transport.is_closing():
            super().shutdown()

    def look(self, now: float) -> None:
        """Close the connection if its client has been idle for too long."""
        awaited = self._wanted()
        if awaited != self._awaited:
            self._awaited, self._since = awaited, now
        elif awaited is not None and now - self._since >= self._idle_s:
            self.transport.abort()

    def _wanted(self) -> tuple[str, int] | None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            # Part of a request does not count.
            return "request", id(cycle)
        if unsent := self.transport.get_write_buffer_size():
            return "reading", unsent
        if cycle.more_body and not self.flow.read_paused:
            return "body", self._received
        return None
