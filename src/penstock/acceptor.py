"""Accepting connections, a few in each turn of the event loop.

A loop of its own accord accepts all connections that wait, and then reads from all of them, before it does anything
else: after thousands of clients connect at once, everyone else waits for seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

logger = logging.getLogger(__name__)

# To open a connection takes some tenths of a millisecond, and to answer its first request a millisecond.
ACCEPTED_MAX: Final = 32
# How long to wait if there is no descriptor or memory for another connection.
_PAUSE_S: Final = 1.0
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


_Opening: TypeAlias = asyncio.Task[tuple[asyncio.Transport, asyncio.BaseProtocol]]


class Acceptor:
    def __init__(self, sockets: Sequence[socket.socket], open_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """`sockets` are bound. A protocol is created for each connection."""
        self.sockets = list(sockets)
        self._open_protocol = open_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[_Opening] = set()
        self._is_closed = False

    def start(self, backlog: int) -> None:
        for each in self.sockets:
            each.setblocking(False)
            each.listen(backlog)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Accept no more connections. Open ones stay."""
        if not self._is_closed:
            self._is_closed = True
            for each in self.sockets:
                if each.fileno() != -1:
                    self._loop.remove_reader(each)
                    each.close()

    async def wait_closed(self) -> None:
        """Wait for the connections that were accepted before `close` and are not open yet."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                accepted, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                logger.error("no more connections are accepted for %g s: %s", _PAUSE_S, error.strerror)
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_S, self._resume, listening)
                return
            accepted.setblocking(False)
            opening = self._loop.connect_accepted_socket(self._open_protocol, accepted)
            task = self._loop.create_task(opening)
            self._opening.add(task)
            task.add_done_callback(partial(self._opened, accepted))

    def _resume(self, listening: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listening, self._accept, listening)

    def _opened(self, accepted: socket.socket, opening: _Opening) -> None:
        self._opening.discard(opening)
        if opening.cancelled():
            accepted.close()  # the loop ends
        elif (error := opening.exception()) is not None:
            accepted.close()
            if not isinstance(error, OSError):  # otherwise the client is gone already
                logger.error("a connection was not opened", exc_info=error)
