"""The other end of a connection: what it is sent, and what it has not read.

A peer that does not read gets no more messages (`is_open`). A peer that does not read the replies to its own requests
is not read from either, until it does. So it costs a bounded amount of memory, whatever it asks for.

Messages may have to wait for a later turn of the loop (see turns.py). Whatever is written meanwhile comes behind them.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from penstock.doors.counters import Counters
from penstock.doors.journal import Journal
from penstock.doors.turns import TURN_WAITING_BYTES_MAX, Turns
from penstock.model.batch import Buffer
from penstock.tls.names import CERTIFICATE, CertificateNames

# With more bytes that its system has not taken, a peer gets no more messages than the last delivery until it reads.
UNREAD_BYTES_MAX: Final = 64 << 10
# Messages that wait for a turn to be encoded. Connections that get the same ones share them.
WAITING_BYTES_MAX: Final = 4 << 20
# The same for messages that are not stored, which wait here while the peer does not read: nowhere else they could.
UNSTORED_BYTES_MAX: Final = 16 << 20
# With more replies that a peer has not read, its requests are not read either.
UNREAD_ANSWERS_MAX: Final = 256 << 10
# How long a connection that is being closed has to read what it was sent.
CLOSE_S: Final = 5.0
# Linux tells when the other end sends no more. Elsewhere a connection is gone when both ends are.
_GONE: Final = select.POLLERR | select.POLLHUP | getattr(select, "POLLRDHUP", 0)


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Return whether the client has closed the connection. While a socket is not read, nothing else notices."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _GONE)
    return bool(poll.poll(0))


class Traffic(NamedTuple):
    """Messages, and the bytes of their values, keys and headers, as nats-server counts them."""

    in_msgs: int = 0
    in_bytes: int = 0
    out_msgs: int = 0
    out_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(*(mine + others for mine, others in zip(self, other, strict=True)))


class Peer:
    """It has more than 25 methods because it is both directions of a socket: what is read and held, what is written,
    waits or is unread."""

    def __init__(self, counters: Counters, journal: Journal, turns: Turns) -> None:
        self._counters = counters
        self._journal = journal
        self._turns = turns
        self._transport: asyncio.Transport | None = None
        # Whether the peer takes more messages now.
        self.is_open = True
        # Whether nothing more is taken from the peer: the connection is being closed, or gone.
        self.is_closing = False
        # Whether there is room for the frame that is arriving: see arrivals.py.
        self.has_room = True
        self.in_messages = self.in_bytes = self.out_messages = self.out_bytes = 0
        # All bytes that came, messages or not.
        self.received_bytes = 0
        self._unread_answers = 0
        # Whether the transport has too much to write.
        self.is_paused = False
        # Whether the user of the connection is sent too much: then it takes nothing for a while.
        self.is_throttled = False
        # Called with the messages and bytes that are sent, if they are limited.
        self.on_sent: Callable[[int, int], None] | None = None
        # What is written in a later turn: its size, and the function that writes it. The size of all of it.
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self.waiting_bytes = 0
        self._drains: asyncio.Future[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    @property
    def certificate(self) -> CertificateNames | None:
        """Return who the client's certificate names, if it has shown one that is trusted."""
        found = None if self._transport is None else self._transport.get_extra_info(CERTIFICATE)
        assert found is None or isinstance(found, CertificateNames), "no other transport uses this key"
        return found

    @property
    def tls(self) -> dict[str, Any]:
        """Return what `/connz` says about TLS, under nats-server's names."""
        cipher = None if self._transport is None else self._transport.get_extra_info("cipher")
        if cipher is None:
            return {}
        shown = {"tls_version": cipher[1].removeprefix("TLSv"), "tls_cipher_suite": cipher[0]}
        names = self.certificate
        return shown if names is None else {**shown, "tls_peer_certs": [{"subject": names.subject}]}

    @property
    def has_left(self) -> bool:
        return self._transport is None or has_left(self._transport)

    @property
    def has_unread(self) -> bool:
        """Whether the peer has left too many replies unread."""
        return self._unread_answers > UNREAD_ANSWERS_MAX

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.in_messages, self.in_bytes, self.out_messages, self.out_bytes)

    # From the transport.

    def connect(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        # Above this uvloop writes at once, so what is left in its buffer was not taken by the system.
        transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX)

    def pause(self) -> None:
        """Too much is unsent."""
        self.is_paused = True
        self.is_open = False
        self._journal.paused(self)

    def resume(self) -> None:
        """The peer has read."""
        self.is_paused = False
        self.is_open = self._may_wait and not self.is_throttled
        self._journal.resumed(self)
        self._unread_answers = 0
        self._end_drain()

    def lose(self) -> None:
        """The connection is gone: nothing more is sent."""
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
        self._counters.received_bytes += count

    def hold(self) -> None:
        """Read nothing from the peer for now."""
        if self._transport is not None:
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Read from the peer again, unless it has too many unread replies or there is no room for its frame."""
        if self._transport is not None and self.has_room and self._unread_answers <= UNREAD_ANSWERS_MAX:
            self._transport.resume_reading()

    @property
    def is_awaited(self) -> bool:
        """Whether the server waits for the peer: to send, or to read its replies."""
        return self.has_unread or (self._transport is not None and self._transport.is_reading())

    # Out.

    def count_sent(self, messages: int, size: int) -> None:
        self.out_messages += messages
        self.out_bytes += size
        if self.on_sent is not None:
            self.on_sent(messages, size)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def write_later(self, size: int, write: Callable[[], None]) -> None:
        """Let messages of this size wait for `write_waiting`, which calls `write`."""
        self._waiting.append((size, write))
        self._count_waiting(size)
        self.is_open = not (self.is_paused or self.is_throttled) and self._may_wait

    def throttle(self) -> None:
        """Take no more messages until `end_throttle`."""
        self.is_throttled = True
        self.is_open = False

    def end_throttle(self) -> None:
        self.is_throttled = False

    def write_waiting(self, *, is_last: bool = False) -> int:
        """Write what waits, as far as there is room, or all of it if `is_last`. Return how many bytes that is."""
        waiting, self._waiting = self._waiting, deque()
        before = self.waiting_bytes
        while waiting and (is_last or not self.is_paused):
            size, write = waiting.popleft()
            self._count_waiting(-size)
            write()
        self._waiting = waiting
        return before - self.waiting_bytes

    @property
    def takes_unstored(self) -> bool:
        """Whether the peer takes more messages that are not stored."""
        return self.is_open or (self.is_connected and not self.is_closing and self._has_room_for(UNSTORED_BYTES_MAX))

    @property
    def _may_wait(self) -> bool:
        """Whether more messages may wait for a turn. Connections that get the same messages share them."""
        return self._has_room_for(WAITING_BYTES_MAX)

    def _has_room_for(self, bytes_max: int) -> bool:
        is_crowded = self._turns.waiting_bytes > TURN_WAITING_BYTES_MAX
        return self.waiting_bytes < (UNREAD_BYTES_MAX if is_crowded else bytes_max)

    def _count_waiting(self, size: int) -> None:
        self.waiting_bytes += size
        self._turns.waiting_bytes += size

    def write(self, data: bytes) -> None:
        if self._waiting:
            self.write_later(len(data), partial(self.write, data))
        elif self._transport is not None and not self._transport.is_closing():
            self._counters.sent_bytes += len(data)
            self._transport.write(data)

    def write_parts(self, parts: Sequence[Buffer]) -> None:
        if self._waiting:
            self.write_later(sum(map(len, parts)), partial(self.write_parts, parts))
        elif self._transport is not None and not self._transport.is_closing():
            self._counters.sent_bytes += sum(map(len, parts))
            self._transport.writelines(parts)

    def answer(self, data: bytes) -> None:
        """Write a reply. A peer that does not read its replies is not read from."""
        self.write(data)
        if self.is_open or self._transport is None:
            return
        before, self._unread_answers = self._unread_answers, self._unread_answers + len(data)
        if before <= UNREAD_ANSWERS_MAX < self._unread_answers:
            self._counters.unread += 1
            self._transport.pause_reading()

    async def read_answers(self) -> None:
        """Wait until the peer has read its replies, or is gone."""
        if self.has_unread:
            await self.drained()

    async def drained(self) -> None:
        """Wait until the peer takes more, or is gone."""
        while not self.is_open and not self.is_closing:
            if self._drains is None or self._drains.done():
                self._drains = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drains)

    def _end_drain(self) -> None:
        if self._drains is not None and not self._drains.done():
            self._drains.set_result(None)

    # The end.

    def close(self) -> None:
        """Send what is on its way, and close."""
        self.is_closing = True
        if self._transport is not None:
            self.write_waiting(is_last=True)
            self._transport.close()
            # What is unread by then will not be read.
            asyncio.get_running_loop().call_later(CLOSE_S, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
