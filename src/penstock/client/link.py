"""The connection of a client, in an event loop: it opens on first use, and reopens whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Mapping
from socket import gaierror
from typing import Any, Final, Protocol, cast

from penstock.client.identify import identify
from penstock.client.protocol import Answer, ClientConnection, Hello, PendingRequest
from penstock.client.servers import BrokerAddress, BrokerEndpoint, Servers, complete_credentials, read_servers
from penstock.client.wait import Bell, Within
from penstock.errors import BadFrame, Closed, ConnectionLost, NoBroker, PenstockError, TimedOut
from penstock.times import check_seconds
from penstock.tls.options import TlsOptions
from penstock.wire.binary import SCRATCH_BYTES

# How long one server may take to accept the connection and to answer HELLO.
DIAL_S: Final = 5.0
# How long a closing connection may take to write the rest.
CLOSE_S: Final = 1.0
# The first and the longest delay between attempts to reconnect, of which a random part is waited.
BACKOFF_S: Final = 0.05
BACKOFF_S_MAX: Final = 2.0

_LOG: Final = logging.getLogger("penstock.client")

# Not the global generator, which an application may have seeded.
_RANDOM: Final = random.Random()


class Attached(Protocol):
    """An object that follows the state of the connection. All methods are called in the loop."""

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...

    def writable(self) -> None: ...


class Link:
    """Every method is called in one loop, except `call_soon` and `check_open`."""

    def __init__(
        self, servers: Servers, credentials: Mapping[str, str], timeout_s: float, tls: TlsOptions | None = None
    ) -> None:
        check_seconds("timeout", timeout_s)
        self.timeout_s = timeout_s
        self._servers = read_servers(servers, tls)
        self._credentials = complete_credentials(servers, credentials)
        self._scratch = bytearray(SCRATCH_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._task: asyncio.Task[None] | None = None
        # The connection whose HELLO was answered.
        self._socket: _Socket | None = None
        self._hello: Hello | None = None
        self._is_closed = False
        # Why there is no connection.
        self._problem: Exception | None = None
        # Requests to send when there is a connection.
        self._waiting: dict[PendingRequest, None] = {}
        self._attached: dict[Attached, None] = {}
        self._changed = Bell()

    @property
    def address(self) -> str:
        return ", ".join(map(str, self._servers))

    @property
    def connection(self) -> ClientConnection | None:
        """The present connection, if any. After giving it something to send, call `flush_soon`."""
        return self._socket.connection if self._socket is not None else None

    @property
    def hello(self) -> Hello:
        """The broker's answer to HELLO on the last connection."""
        assert self._hello is not None, "there was a connection"
        return self._hello

    @property
    def is_writable(self) -> bool:
        return self._socket is not None and not self._socket.is_full

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call it in the loop, from any thread."""
        loop = self._loop
        if loop is None or self._is_closed:
            return
        if threading.get_ident() == self._thread:
            loop.call_soon(callback)
        else:
            loop.call_soon_threadsafe(callback)

    async def connect(self, timeout_s: float | None = None) -> None:
        """Wait until there is a connection."""
        if self._socket is not None:
            return
        self._start()
        async with self.within(timeout_s, "connect"):
            await self._changed.until(lambda: self._socket is not None or self._task is None)
        if self._socket is None:
            self.check_open()
            raise self._problem or NoBroker(self._no_broker())

    async def ask(
        self,
        frame: Callable[[int], bytes],
        what: str,
        *,
        is_repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Send a request and return the answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = PendingRequest(frame, lambda answer: resolve(future, answer), is_repeatable=is_repeatable)
        try:
            async with self.within(timeout_s, what):
                await self.room()
                self.send(request)
                return await future
        finally:
            self._waiting.pop(request, None)

    async def room(self) -> None:
        """Wait until the connection can take more. Return at once if there is no connection: `send` handles that."""
        if self._socket is not None and self._socket.is_full:
            await self._changed.until(lambda: self._socket is None or not self._socket.is_full)

    def send(self, request: PendingRequest) -> None:
        """Send a request now, or as soon as there is a connection."""
        self.check_open()
        if self._socket is None:
            self._waiting[request] = None
            self._start()
        else:
            self._socket.connection.request(request)
            self._socket.flush_soon()

    def flush_soon(self) -> None:
        if self._socket is not None:
            self._socket.flush_soon()

    def attach(self, attached: Attached) -> None:
        self.check_open()
        self._attached[attached] = None
        if self._socket is not None:
            attached.connected()
            self._socket.flush_soon()
        else:
            self._start()

    def detach(self, attached: Attached) -> None:
        self._attached.pop(attached, None)

    def within(self, timeout_s: float | None, what: str) -> Within:
        """Return a timeout; None means that of the client."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        check_seconds("timeout", seconds)

        def describe() -> str:
            if self._socket is not None:
                return f"{what} (connected to {self.address})"
            return f"{what} (no connection to {self.address}: {self._problem or 'not tried yet'})"

        return Within(seconds, describe)

    async def close(self) -> None:
        self._is_closed = True
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
            try:
                async with Within(CLOSE_S, "close"):
                    await self._changed.until(lambda: socket.is_lost)
            except TimedOut:
                socket.abort()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        for request in list(self._waiting):
            request.done(_closed())
        self._waiting.clear()
        self._changed.ring()

    def changed(self) -> None:
        """The connection can take more, or is lost."""
        self._changed.ring()
        if self.is_writable:
            for attached in list(self._attached):
                attached.writable()

    def check_open(self) -> None:
        """Raise Closed if the client is closed. Any thread may call this."""
        if self._is_closed:
            raise _closed()

    def _start(self) -> None:
        self.check_open()
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.get_ident()
            self._task = self._loop.create_task(self._run(), name=f"penstock client of {self.address}")

    async def _run(self) -> None:
        """Stay connected until `close`. Give up only if the first attempt fails."""
        pause = BACKOFF_S
        while True:
            try:
                socket = await self._dial()
            except PenstockError as error:
                self._problem = error
                if self._hello is None:
                    self._give_up(error)
                    return
            else:
                pause = BACKOFF_S
                if self._hello is not None:
                    _LOG.info("reconnected to %s", self.address)
                self._hello = socket.connection.hello
                if not socket.is_lost:
                    await self._use(socket)
            await asyncio.sleep(pause * _RANDOM.uniform(0.5, 1))
            pause = min(2 * pause, BACKOFF_S_MAX)

    async def _dial(self) -> _Socket:
        """Connect to the first server that accepts."""
        refusal: PenstockError | None = None
        for server in self._servers:
            try:
                async with asyncio.timeout(DIAL_S):
                    return await self._greet(server)
            except gaierror as error:
                refusal = NoBroker(f"unknown host {server} ({error.strerror}): check the name, or the network")
            except TimeoutError:
                silent = NoBroker(f"no answer from {server} within {DIAL_S:g} s: check the address, or a firewall")
                refusal = silent if self._hello is not None else await identify(server, silent)
            except OSError:
                continue
            except (BadFrame, ConnectionLost) as error:
                # Identify the service only on the first attempt: a client that reconnects must not wait for that.
                refusal = error if self._hello is not None else await identify(server, error)
            except PenstockError as error:
                refusal = error
            except Exception as error:  # noqa: BLE001
                # An endpoint may raise anything, and the callers that wait must get an error.
                refusal = NoBroker(f"{server} cannot be reached: {error!r}")
        raise refusal or NoBroker(self._no_broker())

    async def _greet(self, server: BrokerEndpoint) -> _Socket:
        socket = _Socket(self, ClientConnection(self._scratch, self._credentials, asyncio.get_running_loop().time()))
        await server.dial(lambda: socket)
        try:
            await socket.settled
        except BaseException:
            socket.abort()
            raise
        return socket

    async def _use(self, socket: _Socket) -> None:
        self._socket = socket
        self._problem = None
        waiting, self._waiting = self._waiting, {}
        for attached in list(self._attached):
            attached.connected()
        for request in waiting:
            socket.connection.request(request)
        socket.flush_soon()
        self._changed.ring()
        try:
            await self._changed.until(lambda: socket.is_lost)
        finally:
            self._socket = None
            socket.abort()
            self._leave(socket)

    def _leave(self, socket: _Socket) -> None:
        why = f": {socket.problem}" if socket.problem else ""
        what = "the client was closed" if self._is_closed else f"the connection to {self.address} was lost{why}"
        self._problem = ConnectionLost(what)
        # No warning about a broker in this process: the program itself closed it.
        if not self._is_closed and isinstance(self._servers[0], BrokerAddress):
            _LOG.warning("%s; reconnecting", what)
        for attached in list(self._attached):
            attached.disconnected()
        repeatable = socket.connection.lost(str(self._problem))
        self._waiting = dict.fromkeys(repeatable) | self._waiting
        self._changed.ring()

    def _give_up(self, error: PenstockError) -> None:
        self._task = None
        waiting, self._waiting = self._waiting, {}
        for request in waiting:
            request.done(error)
        self._changed.ring()

    def _no_broker(self) -> str:
        return f"no broker at {self.address}: start one with `penstock serve`, or name another with servers="


class _Socket(asyncio.BufferedProtocol):
    """The asyncio protocol between a transport and a `ClientConnection`."""

    def __init__(self, link: Link, connection: ClientConnection) -> None:
        self.connection = connection
        # Done when HELLO was answered.
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_full = False
        self.is_lost = False
        self.problem: Exception | None = None
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_flushing = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.connection.filled(nbytes, self._loop.time())
        except PenstockError as error:
            self._fail(error)
            return
        if not self.settled.done():
            self._settle()
        self.flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.problem = self.problem or exc
        if self._timer is not None:
            self._timer.cancel()
        if not self.settled.done():
            known = self.problem if isinstance(self.problem, PenstockError) else None
            self.settled.set_exception(known or ConnectionLost("closed before HELLO was answered"))
        self._link.changed()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._link.changed()

    def flush_soon(self) -> None:
        """Write once in this turn of the loop, however often this is called."""
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close after everything is written."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        self._is_flushing = False
        out = self.connection.take()
        if out and self._transport is not None and not self.is_lost:
            self._transport.writelines(out)

    def _settle(self) -> None:
        if self.connection.refused is not None:
            self.settled.set_exception(self.connection.refused)
        elif self.connection.hello is not None:
            self.settled.set_result(None)
            self._beat()

    def _beat(self) -> None:
        try:
            due = self.connection.tick(self._loop.time())
        except PenstockError as error:
            self._fail(error)
            return
        self.flush_soon()
        self._timer = self._loop.call_at(due, self._beat)

    def _fail(self, error: PenstockError) -> None:
        self.problem = error
        self.abort()


def resolve(future: asyncio.Future[Any], answer: Answer) -> None:
    """Set the result or the exception of a future that is not done."""
    if future.done():
        return
    if isinstance(answer, PenstockError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _closed() -> Closed:
    return Closed("the client is closed")
