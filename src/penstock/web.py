"""An HTTP port for strangers: what a connection and a request must be before an application sees them.

- A client that keeps us waiting, for a request or to read its answer, is closed.
- Connections and header bytes are limited; an application limits the bodies that it reads.
- The Host header must name this machine. Otherwise a web page whose name its owner suddenly resolves to our address
  could read everything that its visitor's browser can reach (DNS rebinding).
- A request that changes something must not come from a page of another site.
- An unexpected exception in the application answers that request with 500, and is counted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import h11
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock import address
from penstock.errors import Forbidden, PenstockError
from penstock.health import Usage

# A request's line and headers.
HEADER_BYTES_MAX: Final = 16 << 10
CONNECTIONS_MAX: Final = 4096
_SWEEP_S: Final = 1.0
# How often the date in the answers is set.
_TICK_S: Final = 1.0
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_SHOWN_CHARACTERS: Final = 100
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 29\r\n\r\n"
    b"maximum connections exceeded\n"
)

_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 68\r\n\r\n"
    b"the request line and headers are longer than 16384 bytes: send less\n"
)

# An extension of ASGI, there in requests that ask for WebSocket: hand the connection over (`_Connection.upgrade`).
UPGRADE: Final = "penstock.upgrade"

# What an error looks like in the answers of an application.
Describe = Callable[[PenstockError], dict[str, str]]
# Called with a path and the unexpected exception of its handler.
Fault = Callable[[str, Exception], None]


class WebPort:
    """uvicorn in the running loop. Signals are the caller's affair."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, idle_s: float, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        """Listen, and take nobody before `run`. `host`: several with commas between. `idle_s`: how long a client may
        take to send a request, and to read on."""
        self._sockets = address.bind(address.hosts(host), port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._connections_max = connections_max
        config = uvicorn.Config(
            app,
            http=partial(_Connection, idle_s=idle_s, connections_max=connections_max),  # type: ignore[arg-type]
            # It logs as the process does, and configures nothing.
            log_config=None,
            log_level="warning",
            lifespan="off",
            ws="none",
            server_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
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
        """Listen no more."""
        for each in self._sockets:
            each.close()

    def usage(self) -> Usage:
        return Usage(len(self._uvicorn.server_state.connections), self._connections_max)

    def unsent(self) -> int:
        """Bytes of answers that clients have not read yet."""
        return sum(each.transport.get_write_buffer_size() for each in self._uvicorn.server_state.connections)

    async def _tick(self) -> None:
        """Keep the date of the answers. uvicorn looks ten times a second whether it should stop; this is told."""
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
    """uvicorn's, which knows only one timeout: from an answer to the next byte, whatever that is."""

    def __init__(self, *arguments: Any, idle_s: float, connections_max: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._idle_s = idle_s
        self._connections_max = connections_max
        self._received = 0
        # What the client keeps us waiting for, with how far that is; and since when.
        self._awaited: tuple[str, int] | None = None
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._awaited, self._since = self._wanted(), self.loop.time()
        if len(self.connections) > self._connections_max:
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self._received += len(data)
            super().data_received(data)

    async def upgrade(self, headers: list[tuple[bytes, bytes]], protocol: asyncio.Protocol) -> None:
        """Answer the request with 101, and hand the connection over to another protocol."""
        if self.flow.write_paused:
            # The transport would not tell the new protocol.
            await self.flow.drain()
        # Nothing more is to come from the application.
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
        """Leave it to the application, which answers such a request like any other one. What uvicorn does instead with
        a request to upgrade is done with one that is too long: h11 compares only what has not ended yet."""
        if self._head_bytes() > HEADER_BYTES_MAX:
            return True
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if self._get_upgrade() == b"websocket" and not has_body:
            self.scope["extensions"] = {UPGRADE: self.upgrade}  # type: ignore[dict-item]
        return False

    def _head_bytes(self) -> int:
        scope = self.scope
        line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
        return line + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None and len(self.conn.trailing_data[0]) > HEADER_BYTES_MAX:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        self.transport.write(_TOO_LONG)
        self.transport.close()

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
            # Half a request is none.
            return "request", id(cycle)
        if unsent := self.transport.get_write_buffer_size():
            return "reading", unsent
        if cycle.more_body and not self.flow.read_paused:
            return "body", self._received
        return None


class Guard:
    """Refuse what a web page of another site may have sent, and contain what goes wrong behind."""

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], setting: str, describe: Describe, fault: Fault) -> None:
        """`hosts` are names by which this machine is known, in the Host header; `setting` is what adds one. Addresses
        and localhost are allowed always, since no page of another site has such a name. `*` allows all."""
        self._app = app
        self._hosts = frozenset(map(_bare, hosts))
        self._setting = setting
        self._describe = describe
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def sent(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is not None:
                await JSONResponse(self._describe(refusal), 403)(scope, receive, sent)
            else:
                await self._app(scope, receive, sent)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001  a fault of ours in what one client asked for must not end the others
            self._fault(repr(scope["path"][:_SHOWN_CHARACTERS]), error)
            if not is_started:
                await JSONResponse(self._describe(unexpected()), 500)(scope, receive, sent)

    def _refusal(self, scope: Scope) -> Forbidden | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # Every browser sends one.
        host = headers.get(b"host", "localhost")
        if not self._knows(_bare(host)):
            shown = host[:_SHOWN_CHARACTERS]
            return Forbidden(f"unknown host {shown!r} in the Host header: add it to {self._setting}, or use an address")
        if scope["method"] not in _SAFE and not _is_own(headers, host):
            return Forbidden("cross-site request: web pages of other sites must not change anything here")
        return None

    def _knows(self, name: str) -> bool:
        return (
            name in self._hosts
            or "*" in self._hosts
            or name == "localhost"
            or name.endswith(".localhost")
            or address.is_ip(name)
        )


def unexpected() -> PenstockError:
    """What a client is told of an unexpected exception."""
    return PenstockError("internal error: see the server's log")


def local_names(host: str, more: str | None) -> list[str]:
    """The names of this machine for a `Guard`: where it listens, what it calls itself, and a list with commas."""
    own = socket.gethostname()
    return [*address.hosts(host), own, own.partition(".")[0], *address.listed(more)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a client must give, or gives: a user and a password, or a token. With none of them, nothing is required."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.user is not None or self.token is not None

    def accepts(self, *, user: object = None, password: object = None, token: object = None) -> bool:
        if self.token is not None and _same(token, self.token):
            return True
        if self.user is None or self.password is None:
            return False
        # Both are compared, so that the time it takes tells nothing.
        return _same(user, self.user) & _same(password, self.password)

    def accepts_header(self, authorization: str) -> bool:
        """Whether an Authorization header has them."""
        scheme, _, value = authorization.partition(" ")
        match scheme.lower():
            case "bearer":
                return self.accepts(token=value.strip())
            case "basic":
                try:
                    user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
                except ValueError:
                    return False
                return self.accepts(user=user, password=password)
        return False

    @property
    def header(self) -> str | None:
        """The Authorization header that gives them."""
        if self.token is not None:
            return f"Bearer {self.token}"
        if self.user is None:
            return None
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


def _same(given: object, wanted: str) -> bool:
    # JSON can have half a surrogate pair, which has no UTF-8.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), wanted.encode())


def _is_own(headers: dict[bytes, str], host: str) -> bool:
    """Whether a request comes from no page, or from one of ours. Browsers say so, and pages cannot change it."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or is_same_origin(origin, host)


def is_same_origin(origin: str, host: str) -> bool:
    """Whether an Origin header names the host of the request."""
    return origin.partition("://")[2].lower() == host.lower()


def _bare(host: str) -> str:
    """A host without its port, brackets and the dot at its end."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.removesuffix(".")
