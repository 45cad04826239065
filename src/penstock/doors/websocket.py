"""NATS over WebSocket: what a session has in place of a socket.

`WebSocket` stands between a session and its socket: a protocol to the socket, a transport to the session. The session
has the limits of any other. `WebSocket` keeps at most one read of the socket and the head of one frame. While the
session does not read, it inflates nothing and does not read either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.doors.door import open_session
from penstock.doors.gate import HANDSHAKE_BYTES_MAX
from penstock.doors.peer import has_left
from penstock.doors.session import WEBSOCKET
from penstock.doors.shared import Shared
from penstock.errors import BadFrame
from penstock.wire import websocket
from penstock.wire.websocket import ControlFrame, Opcode, Status, WebSocketParser

if TYPE_CHECKING:
    from penstock.model.batch import Buffer

# What is handed to the session before others have a turn.
FRAMES_MAX: Final = 512
TURN_BYTES: Final = 256 << 10


class WebSocket(asyncio.Transport, asyncio.Protocol):
    """It has more than 25 methods because it implements two interfaces: a transport for the session, and a protocol for
    the socket."""

    def __init__(self, shared: Shared, *, deflates: bool) -> None:
        super().__init__()
        self._shared = shared
        self._deflates = deflates
        self._parser = WebSocketParser(deflates=deflates)
        self._session = open_session(shared, greets=True, type=WEBSOCKET)
        self._transport: asyncio.Transport
        self._is_closing = False
        # The CLOSE of the client. Nothing behind it counts.
        self._close: ControlFrame | None = None
        # Bytes that the session was given.
        self._handed_on = 0
        # Whether the session reads nothing for now.
        self._is_held = False
        # The next turn, if there is more to hand on than fits into this one.
        self._turn: asyncio.Handle | None = None
        # Whether too much is unsent, and the last PING that is not answered for this reason.
        self._is_full = False
        self._unanswered: ControlFrame | None = None

    # From the socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._session.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if not self._is_closing and self._close is None:
            self._parser.feed(data)
            self._take_turn()

    def pause_writing(self) -> None:
        self._is_full = True
        self._session.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        ping, self._unanswered = self._unanswered, None
        if ping is not None:
            self._pong(ping)
        self._session.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._cancel_turn()
        self._parser.clear()
        self._session.connection_lost(error)

    # In.

    def _take_turn(self) -> None:
        self._turn = None
        self._session.call(self._read)

    def _take_next_turn(self) -> None:
        # A client that closes properly waits for the reply to its CLOSE. The data of others is not inflated in vain.
        if self._parser.is_inflating and has_left(self._transport):
            self._is_closing = True
            self._transport.abort()
        else:
            self._take_turn()

    def _read(self) -> None:
        """Hand on the data that has come, as far as it fits into a turn. CLOSE waits until the session has taken it."""
        is_empty = True
        if self._close is None:
            parts, is_empty = self._read_frames()
            data = b"".join(parts)
            if data and not self._is_closing:
                self._handed_on += len(data)
                self._session.data_received(data)
        if self._is_closing or self._is_held or self._turn is not None:
            return
        if self._close is not None:
            self._end(websocket.answer_close(self._close.payload))
        elif is_empty:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
            self._turn = asyncio.get_running_loop().call_soon(self._take_next_turn)

    def _read_frames(self) -> tuple[list[bytes], bool]:
        """Return parts of messages, up to a CLOSE, and whether more has to come."""
        parts: list[bytes] = []
        room, overhead = self._room(), self._parser.overhead
        try:
            for _ in range(FRAMES_MAX):
                found = self._parser.read(room)
                if found is None:
                    return parts, True
                if isinstance(found, bytes):
                    parts.append(found)
                    room -= len(found)
                elif found.opcode is Opcode.CLOSE:
                    self._close = found
                    return parts, True
                elif found.opcode is Opcode.PING:
                    self._pong(found)
                if not room:
                    break
        except BadFrame as error:
            self._shared.counters.protocol_errors += 1
            self._end(websocket.close(Status.PROTOCOL_ERROR, str(error)))
        finally:
            self._count_overhead(self._parser.overhead - overhead)
        return parts, False

    def _room(self) -> int:
        """Return how many bytes may be handed on in a turn: before the session is admitted, one more than it may send
        at all."""
        if self._session.is_admitted or not self._shared.gate.needs_auth:
            return TURN_BYTES
        return HANDSHAKE_BYTES_MAX + 1 - self._handed_on

    def _count_overhead(self, count: int) -> None:
        """Count bytes that the session does not see: a client without credentials could send PINGs forever."""
        if not self._session.takes_overhead(count):
            self._end(websocket.close(Status.POLICY_VIOLATION, "Authorization Violation"))

    def _pong(self, ping: ControlFrame) -> None:
        if self._is_full:
            # Of several, the last one is enough.
            self._unanswered = ping
        elif not self._is_closing:
            self._transport.write(websocket.frame(Opcode.PONG, ping.payload))

    # From the session: what it does with a transport.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_reading(self) -> bool:
        return not self._is_held and not self._is_closing

    def pause_reading(self) -> None:
        if not self._is_closing:
            self._is_held = True
            self._cancel_turn()
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_held and not self._is_closing:
            self._is_held = False
            # Not at once: a transport does not call the session that calls it.
            self._turn = asyncio.get_running_loop().call_soon(self._take_next_turn)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def write(self, data: Buffer) -> None:
        if not self._is_closing:
            self._transport.writelines(list(websocket.messages(bytes(data), deflates=self._deflates)))

    def writelines(self, parts: Iterable[Buffer]) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Close the connection for the session, which has said why."""
        leaves = self._shared.sessions.is_leaving
        self._end(websocket.close(Status.GOING_AWAY if leaves else Status.POLICY_VIOLATION, ""))

    def abort(self) -> None:
        self._transport.abort()

    def _end(self, close: bytes) -> None:
        """Send CLOSE and close the socket. As in nats-server, the client's own CLOSE is not waited for: clients that
        are not admitted would stay as long as they like."""
        if not self._is_closing:
            self._is_closing = True
            self._cancel_turn()
            self._transport.write(close)
            self._transport.close()

    def _cancel_turn(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
