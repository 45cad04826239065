"""The other end of a connection: what it is sent, and what it has not read of that.

A peer that does not read is sent no more messages (`is_open`); one that does not even read the answers to what it asks
is not read from either, until it does. So it costs a bounded amount of memory, whatever it asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.batch import Buffer

if TYPE_CHECKING:
    from penstock.server.server import Server

# A peer that has so much unsent gets no more messages until it has read some. Large enough for a whole batch.
UNSENT_BYTES_MAX: Final = 1 << 20
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
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)

    def pause(self) -> None:
        """It has too much unsent."""
        self.is_open = False
        self._server.journal.paused(self)

    def resume(self) -> None:
        """It has read."""
        self.is_open = True
        self._server.journal.resumed(self)
        self._unread_answers = 0
        self._end_drain()

    def lose(self) -> None:
        """The connection is gone."""
        self.is_closing = True
        self.is_open = False
        self._transport = None
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

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._server.counters.sent_bytes += len(data)
            self._transport.write(data)

    def write_parts(self, parts: Sequence[Buffer]) -> None:
        if self._transport is not None and not self._transport.is_closing():
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
            self._transport.close()
            # What it has not read by then it will not.
            self._server.call_later(CLOSE_S, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
