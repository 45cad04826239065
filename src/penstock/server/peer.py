"""The other end of a connection: what it is sent, and what it has not read of that.

A peer that does not read is sent no more messages (`is_open`); one that does not even read the answers to what it asks
is not read from either, until it does. So it costs a bounded amount of memory, whatever it asks for.

Messages may have to wait for a later turn of the loop (see turns.py); whatever is written meanwhile comes behind them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.batch import Buffer
from penstock.server.turns import TURN_WAITING_BYTES_MAX

if TYPE_CHECKING:
    from penstock.server.server import Server

# A peer whose system has not taken so much gets no more messages until it has read some: besides the last delivery.
UNREAD_BYTES_MAX: Final = 64 << 10
# Messages that wait for a turn to be encoded. Connections that get the same ones share them.
WAITING_BYTES_MAX: Final = 4 << 20
# Answers to a peer that does not read them: then its requests are not read either.
UNREAD_ANSWERS_MAX: Final = 256 << 10
# How long a connection that is being closed has to read what was sent.
CLOSE_S: Final = 5.0


class Traffic(NamedTuple):
    """Messages, and the bytes of their values, keys and headers: as nats-server counts them."""

    in_msgs: int = 0
    in_bytes: int = 0
    out_msgs: int = 0
    out_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(*(mine + others for mine, others in zip(self, other, strict=True)))


class Peer:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        # Whether it takes more messages now.
        self.is_open = True
        # Whether nothing more is taken from it: it is being closed, or gone.
        self.is_closing = False
        # Whether there is room for the frame that it is sending: see arrivals.py.
        self.has_room = True
        self.in_messages = self.in_bytes = self.out_messages = self.out_bytes = 0
        # All that came, messages or not.
        self.received_bytes = 0
        self._unread_answers = 0
        # Whether the transport has too much to write.
        self.is_paused = False
        # What is written in a later turn: its bytes and how; and the bytes of all that.
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self.waiting_bytes = 0
        self._drains: asyncio.Future[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    @property
    def has_unread(self) -> bool:
        """Whether it was given more answers than it may leave unread."""
        return self._unread_answers > UNREAD_ANSWERS_MAX

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.in_messages, self.in_bytes, self.out_messages, self.out_bytes)

    # From the transport.

    def connect(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        # Above this uvloop writes at once, so what is left in it was not taken by the system.
        transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX)

    def pause(self) -> None:
        """It has too much unsent."""
        self.is_paused = True
        self.is_open = False
        self._server.journal.paused(self)

    def resume(self) -> None:
        """It has read."""
        self.is_paused = False
        self.is_open = self._may_wait
        self._server.journal.resumed(self)
        self._unread_answers = 0
        self._end_drain()

    def lose(self) -> None:
        """The connection is gone."""
        self.is_closing = True
        self.is_open = False
        self._transport = None
        self._waiting.clear()
        self._count_waiting(-self.waiting_bytes)
        self._end_drain()

    # In.

    def received(self, count: int) -> None:
        """Count bytes as they came, whatever they are."""
        self.received_bytes += count
        self._server.counters.received_bytes += count

    def hold(self) -> None:
        """Read nothing from it for now."""
        if self._transport is not None:
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Read from it again, unless it has unread answers or there is no room for its frame."""
        if self._transport is not None and self.has_room and self._unread_answers <= UNREAD_ANSWERS_MAX:
            self._transport.resume_reading()

    @property
    def is_awaited(self) -> bool:
        """Whether it is the peer that has to go on: to send, or to read its answers."""
        return self.has_unread or (self._transport is not None and self._transport.is_reading())

    # Out.

    def count_sent(self, messages: int, size: int) -> None:
        self.out_messages += messages
        self.out_bytes += size

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def write_later(self, size: int, write: Callable[[], None]) -> None:
        """Let messages of so many bytes wait for `write_waiting`, which calls `write`."""
        self._waiting.append((size, write))
        self._count_waiting(size)
        self.is_open = not self.is_paused and self._may_wait

    def write_waiting(self, *, is_last: bool = False) -> int:
        """Write what waits, as far as there is room; return the bytes of that. `is_last`: all of it."""
        waiting, self._waiting = self._waiting, deque()
        before = self.waiting_bytes
        while waiting and (is_last or not self.is_paused):
            size, write = waiting.popleft()
            self._count_waiting(-size)
            write()
        self._waiting = waiting
        return before - self.waiting_bytes

    @property
    def _may_wait(self) -> bool:
        """Whether more messages may wait for a turn. They are the same for many connections, or they are few."""
        is_crowded = self._server.turns.waiting_bytes > TURN_WAITING_BYTES_MAX
        return self.waiting_bytes < (UNREAD_BYTES_MAX if is_crowded else WAITING_BYTES_MAX)

    def _count_waiting(self, size: int) -> None:
        self.waiting_bytes += size
        self._server.turns.waiting_bytes += size

    def write(self, data: bytes) -> None:
        if self._waiting:
            self.write_later(len(data), partial(self.write, data))
        elif self._transport is not None and not self._transport.is_closing():
            self._server.counters.sent_bytes += len(data)
            self._transport.write(data)

    def write_parts(self, parts: Sequence[Buffer]) -> None:
        if self._waiting:
            self.write_later(sum(map(len, parts)), partial(self.write_parts, parts))
        elif self._transport is not None and not self._transport.is_closing():
            self._server.counters.sent_bytes += sum(map(len, parts))
            self._transport.writelines(parts)

    def answer(self, data: bytes) -> None:
        """As `write`, of what it asked for: who asks and does not read the answers is not asked for more."""
        self.write(data)
        if self.is_open or self._transport is None:
            return
        before, self._unread_answers = self._unread_answers, self._unread_answers + len(data)
        if before <= UNREAD_ANSWERS_MAX < self._unread_answers:
            self._server.counters.unread += 1
            self._transport.pause_reading()

    async def read_answers(self) -> None:
        """Until it has read the answers that it was given, or is gone."""
        if self.has_unread:
            await self.drained()

    async def drained(self) -> None:
        """Until it takes more, or is gone."""
        while not self.is_open and not self.is_closing:
            if self._drains is None or self._drains.done():
                self._drains = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drains)

    def _end_drain(self) -> None:
        if self._drains is not None and not self._drains.done():
            self._drains.set_result(None)

    # The end.

    def close(self) -> None:
        """It is sent what is on its way, and no more."""
        self.is_closing = True
        if self._transport is not None:
            self.write_waiting(is_last=True)
            self._transport.close()
            # What it has not read by then it will not.
            self._server.call_later(CLOSE_S, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
