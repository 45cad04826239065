"""A real TCP proxy between a client and its broker, which cuts connections and swallows answers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar

from tests.support.client_calls import wait_until

T = TypeVar("T")

READ_BYTES: Final = 16 << 10
# How long a connection lives whose answers are swallowed.
SWALLOW_S: Final = 0.05
_ENDLESS: Final = 1 << 62


class LoopThread:
    """An event loop of asyncio's own, in a thread: for tests that are not in one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def call(self, function: Callable[[], T]) -> T:
        async def called() -> T:
            return function()

        return self.run(called())

    def close(self) -> None:
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class Proxy:
    """Passes on what it is sent. Everything may be called by any thread."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.connections = 0
        self._target = port
        self._random: random.Random | None = None
        self._is_mute = False
        self._is_deaf = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = LoopThread()
        self._server = self._thread.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End all connections, whatever is on the way."""
        self._thread.call(self._cut)

    def force_reconnect(self) -> None:
        """End all connections, and return when a client has connected again."""
        before = self.connections
        self.cut()
        wait_until(lambda: self.connections > before)

    def mute(self) -> None:
        """From now on the broker's words are swallowed, until the connections are cut."""
        self._thread.call(lambda: setattr(self, "_is_mute", True))

    def deafen(self) -> None:
        """From now on the client's words are swallowed, until the connections are cut."""
        self._thread.call(lambda: setattr(self, "_is_deaf", True))

    def rage(self, seed: int) -> None:
        """Cut each connection after a random number of bytes; of some swallow the answers first."""
        self._thread.call(lambda: setattr(self, "_random", random.Random(seed)))

    def calm(self) -> None:
        self._thread.call(lambda: setattr(self, "_random", None))
        self.cut()

    def close(self) -> None:
        self._thread.call(self._server.close)
        self._thread.call(self._cut)
        self._thread.run(self._server.wait_closed())
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self) -> None:
        self._is_mute = self._is_deaf = False
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(upstream)
        limit = swallow = _ENDLESS
        if self._random is not None:
            limit = self._random.randrange(1, 100_000)
            swallow = self._random.choice([_ENDLESS, self._random.randrange(1, 400)])
        there = asyncio.ensure_future(self._pass_on(reader, upstream, limit))
        back = asyncio.ensure_future(self._pass_back(upstream_reader, writer, swallow))
        try:
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back):
                task.cancel()
            for each in (writer, upstream):
                self._writers.discard(each)
                each.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        """What the client says, until it is so many bytes."""
        gone = 0
        try:
            while (data := await reader.read(READ_BYTES)) and (gone := gone + len(data)) < limit:
                if not self._is_deaf:
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        """What the broker says; what is behind so many bytes does not arrive, and that is the beginning of the end."""
        gone = 0
        try:
            while data := await reader.read(READ_BYTES):
                gone += len(data)
                if gone >= limit:
                    asyncio.get_running_loop().call_later(SWALLOW_S, writer.transport.abort)
                elif not self._is_mute:
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
