"""The way to a broker, in an event loop: it connects at first use, and again whenever the connection is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from socket import gaierror
from typing import Any, Final, NamedTuple, Protocol, cast

from penstock import address
from penstock.client.listener import Listener, recognise
from penstock.client.protocol import Answer, Connection, Hello, Request
from penstock.client.wait import Bell, Within
from penstock.errors import BadFrame, Closed, ConnectionLost, NoBroker, PenstockError, TimedOut
from penstock.wire.binary import SCRATCH_BYTES

# How long one server is given to take the connection and to answer HELLO.
DIAL_S: Final = 5.0
# How long a connection is given to write what is left when it is closed.
CLOSE_S: Final = 1.0
# Between two tries to connect again, at first and at the most; of which a random part is waited.
BACKOFF_S: Final = 0.05
BACKOFF_S_MAX: Final = 2.0

PORT: Final = 4222
_LOGIN: Final = {"user", "password", "token"}
# How long something that is not a broker is given to say what it is, before it is asked and after.
_GREETING_S: Final = 0.5
_ANSWER_S: Final = 2.0

_LOG: Final = logging.getLogger("penstock.client")

# Not the one that programs seed, and draw from in an order of their own.
_RANDOM: Final = random.Random()


class Dials(Protocol):
    """Where a broker is: an address, or one in this process."""

    async def dial(self, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseTransport: ...


Servers = str | Sequence[str] | Dials


class Attached(Protocol):
    """Who must know how the connection fares. All are called in the loop."""

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...

    def writable(self) -> None: ...


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        return cls(*address.split(text, PORT))

    def __str__(self) -> str:
        return address.join(self.host, self.port)

    async def dial(self, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseTransport:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(factory, self.host, self.port)
        return transport


class Link:
    """Everything is called in one loop, except `call_soon`."""

    def __init__(self, servers: Servers, credentials: Mapping[str, str], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._servers = _read_servers(servers)
        self._credentials = credentials if _LOGIN & credentials.keys() else {**_login(servers), **credentials}
        self._scratch = bytearray(SCRATCH_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._task: asyncio.Task[None] | None = None
        # The connection whose HELLO is answered.
        self._socket: _Socket | None = None
        self._hello: Hello | None = None
        self._is_closed = False
        # Why there is no connection.
        self._problem: Exception | None = None
        # What is sent as soon as there is one.
        self._waiting: dict[Request, None] = {}
        self._attached: dict[Attached, None] = {}
        self._changed = Bell()

    @property
    def address(self) -> str:
        return ", ".join(map(str, self._servers))

    @property
    def connection(self) -> Connection | None:
        """The one in use, if there is one: who gives it something to say calls `flush_soon`."""
        return self._socket.connection if self._socket is not None else None

    @property
    def hello(self) -> Hello:
        """What the broker said when it was last connected."""
        assert self._hello is not None, "it was connected once"
        return self._hello

    @property
    def is_writable(self) -> bool:
        return self._socket is not None and not self._socket.is_full

    def call_soon(self, callback: Callable[[], None]) -> None:
        """In the loop, from any thread."""
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
            raise self._problem or NoBroker(self._nobody())

    async def ask(
        self,
        frame: Callable[[int], bytes],
        what: str,
        *,
        is_repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """The answer to a request."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = Request(frame, lambda answer: resolve(future, answer), is_repeatable=is_repeatable)
        try:
            async with self.within(timeout_s, what):
                await self.room()
                self.send(request)
                return await future
        finally:
            self._waiting.pop(request, None)

    async def room(self) -> None:
        """Wait until the connection can take more; if there is none, that is for `send` to care about."""
        if self._socket is not None and self._socket.is_full:
            await self._changed.until(lambda: self._socket is None or not self._socket.is_full)

    def send(self, request: Request) -> None:
        """At once, or as soon as there is a connection."""
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
        """None: the client's timeout."""
        seconds = self.timeout_s if timeout_s is None else timeout_s

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
        """A connection can take more, or is gone."""
        self._changed.ring()
        if self.is_writable:
            for attached in list(self._attached):
                attached.writable()

    def check_open(self) -> None:
        """Raise Closed if it is. Any thread may call it."""
        if self._is_closed:
            raise _closed()

    def _start(self) -> None:
        self.check_open()
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.get_ident()
            self._task = self._loop.create_task(self._run(), name=f"penstock client of {self.address}")

    async def _run(self) -> None:
        """Be connected, for ever; until then only a first time that fails ends it."""
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
                    _LOG.info("connected to %s again", self.address)
                self._hello = socket.connection.hello
                if not socket.is_lost:
                    await self._use(socket)
            await asyncio.sleep(pause * _RANDOM.uniform(0.5, 1))
            pause = min(2 * pause, BACKOFF_S_MAX)

    async def _dial(self) -> _Socket:
        """A connection to the first server that takes one."""
        refusal: PenstockError | None = None
        for server in self._servers:
            try:
                async with asyncio.timeout(DIAL_S):
                    return await self._greet(server)
            except gaierror as error:
                refusal = NoBroker(f"unknown host {server} ({error.strerror}): check the name, or the network")
            except TimeoutError:
                silent = NoBroker(f"no answer from {server} within {DIAL_S:g} s: check the address, or a firewall")
                refusal = silent if self._hello is not None else await _identify(server, silent)
            except OSError:
                continue
            except (BadFrame, ConnectionLost) as error:
                # Who was connected before knows what is there, and wants to be connected again soon.
                refusal = error if self._hello is not None else await _identify(server, error)
            except PenstockError as error:
                refusal = error
            except Exception as error:  # noqa: BLE001
                # Whatever an object that dials raises: those who wait must be told.
                refusal = NoBroker(f"{server} cannot be reached: {error!r}")
        raise refusal or NoBroker(self._nobody())

    async def _greet(self, server: Dials) -> _Socket:
        socket = _Socket(self, Connection(self._scratch, self._credentials, asyncio.get_running_loop().time()))
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
        # A broker in this process ends when the program lets it.
        if not self._is_closed and isinstance(self._servers[0], Address):
            _LOG.warning("%s; connecting again", what)
        for attached in list(self._attached):
            attached.disconnected()
        again = socket.connection.lost(str(self._problem))
        self._waiting = dict.fromkeys(again) | self._waiting
        self._changed.ring()

    def _give_up(self, error: PenstockError) -> None:
        self._task = None
        waiting, self._waiting = self._waiting, {}
        for request in waiting:
            request.done(error)
        self._changed.ring()

    def _nobody(self) -> str:
        return f"no broker at {self.address}: start one with `penstock serve`, or name another with servers="


class _Socket(asyncio.BufferedProtocol):
    """Between a transport and the core of its connection."""

    def __init__(self, link: Link, connection: Connection) -> None:
        self.connection = connection
        # Done when HELLO is answered.
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
        """Write once in a turn of the loop, whatever many say."""
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Once all is written."""
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
    if future.done():
        return
    if isinstance(answer, PenstockError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _read_servers(servers: Servers) -> list[Dials]:
    if isinstance(servers, str):
        return [Address.read(servers)]
    if isinstance(servers, Sequence):
        if not servers:
            raise ValueError("servers is empty: name at least one")
        return [Address.read(server) for server in servers]
    return [servers]


def _login(servers: Servers) -> dict[str, str]:
    """Return the credentials in the first URL that has some."""
    texts = [servers] if isinstance(servers, str) else servers if isinstance(servers, Sequence) else []
    return next((found for found in map(address.login, texts) if found), {})


async def _identify(server: Dials, error: PenstockError) -> NoBroker:
    """Return what listens at an address that did not greet as a broker does, and what to do. `error`: what happened
    instead; of one that was not reached at all that is what is returned."""
    said = b""
    if isinstance(server, Address):
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(DIAL_S):
                said = await _overhear(server)
    if not said and isinstance(error, NoBroker):
        return error
    match recognise(said):
        case Listener.BROKER:
            return NoBroker(f"the broker at {server} closed the connection ({error}): it may be stopping, try again")
        case Listener.NATS:
            what = "is another NATS server, not a Penstock broker: name another address, or use a NATS client with it"
        case Listener.HTTP:
            what = f"is an HTTP port: connect to the broker's text port ({PORT} by default) or its client-first port"
        case Listener.REDIS:
            what = f"answers like Redis, not like a Penstock broker: check the port ({PORT} by default)"
        case Listener.OTHER:
            reason = f"it says {said[:40]!r}" if said else str(error)
            what = f"is another service, not a Penstock broker ({reason}): check the port ({PORT} by default)"
    return NoBroker(f"what listens at {server} {what}")


async def _overhear(server: Address) -> bytes:
    """Return what something says by itself, or to a request of HTTP."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_GREETING_S):
                return await reader.read(4096)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                return await reader.read(4096)
        return b""
    finally:
        writer.close()


def _closed() -> Closed:
    return Closed("the client is closed")
