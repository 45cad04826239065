"""`Broker`: a broker in this process, without a port. It is a server in a thread, and a client of that server.

It stores data as any server does, in a directory that stays or in a temporary one.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from penstock import address
from penstock.client.sync import Client
from penstock.doors.door import open_session
from penstock.errors import BadConfig, Closed, NoBroker
from penstock.server.config import load
from penstock.server.server import Server


class Broker(Client):
    """A broker in this process, with the methods of a client.

    `directory`: where to store data; by default a temporary directory, which `close` removes. `listen`: an address such
    as "127.0.0.1:4222" for other clients; port 0 selects a free port. `settings`: settings of the server by name, such
    as {"topic.durability": "flush"}.

    Pass it to `Client`, `AsyncClient` and `App` instead of an address.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        listen: str | None = None,
        settings: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
    ) -> None:
        self._server_thread = _ServerThread(directory, listen, dict(settings or {}))
        super().__init__(self._server_thread, name="embedded", timeout=timeout)

    async def dial(self, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseTransport:
        return await self._server_thread.dial(factory)

    @property
    def address(self) -> str | None:
        """The address for other clients; None without `listen`."""
        return self._server_thread.address

    def close(self) -> None:
        """Close the subscriptions, make everything durable, and unlock the directory."""
        super().close()
        self._server_thread.stop()


class _ServerThread:
    def __init__(self, directory: str | os.PathLike[str] | None, listen: str | None, settings: dict[str, Any]) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="penstock-") if directory is None else None
        settings["storage.data_dir"] = str(Path(directory) if directory is not None else self._data())
        if listen is not None:
            host, port = address.split(listen, 0)
            settings |= {
                "server.host": host,
                "server.port": port,
                "server.quiet_port": 0,
                "server.http_port": 0,
                "server.qb_port": "none",
            }
        try:
            self._loaded = load(path=None, environ={}, flags=settings)
        except BadConfig:
            self._remove()
            raise
        self._listens = listen is not None
        self._pid = os.getpid()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-broker", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            self._remove()
            raise self._failure
        # A program that exits without `close` stops its broker cleanly too.
        self._at_exit = partial(_call, weakref.WeakMethod(self.stop))
        atexit.register(self._at_exit)

    def __str__(self) -> str:
        return "the broker in this process"

    @property
    def address(self) -> str | None:
        if not self._listens or self._server is None:
            return None
        return address.join(self._loaded.config.server.host, self._server.ports["text"])

    async def dial(self, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseTransport:
        """Connect a client to the server, in the event loop of the client."""
        if os.getpid() != self._pid:
            raise NoBroker("this broker runs in the parent process: start it with listen=, and use its address")
        if self._loop is None or self._stop is None or self._stop.is_set():
            raise Closed("the broker is closed")
        ours, theirs = socket.socketpair()
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._accept(theirs), self._loop))
        except BaseException:
            ours.close()
            raise
        transport, _ = await asyncio.get_running_loop().create_unix_connection(factory, sock=ours)
        return transport

    def stop(self) -> None:
        if os.getpid() != self._pid or self._loop is None:
            return
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop = None
        atexit.unregister(self._at_exit)
        self._remove()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            # Not asyncio.Runner: it starts a thread to end its executor, and none can start during the exit of Python.
            with closing(uvloop.new_event_loop()) as loop, ThreadPoolExecutor(thread_name_prefix="penstock") as threads:
                loop.set_default_executor(threads)
                loop.run_until_complete(self._serve())
                loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that started the broker
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = Server(self._loaded.config, listens=self._listens, settings=self._loaded.document())
        self._loop = asyncio.get_running_loop()
        await server.run(self._stop, self._ready)

    def _ready(self, server: Server) -> None:
        self._server = server
        self._started.set()

    async def _accept(self, connection: socket.socket) -> None:
        server = self._server
        assert server is not None, "it is ready"
        await asyncio.get_running_loop().connect_accepted_socket(
            partial(open_session, server.shared, greets=False, identity=server.inside()), connection
        )

    def _data(self) -> Path:
        assert self._temporary is not None
        return Path(self._temporary.name) / "data"

    def _remove(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()
