"""Frames over a connection: the codec, replies and the end, for Penstock's own dialect and the Provider's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.doors.dialect import TLS_REQUIRED, Ending
from penstock.doors.gate import HANDSHAKE_BYTES_MAX
from penstock.errors import (
    BadFrame,
    BadRequest,
    Closed,
    LogDamaged,
    OffsetOutOfRange,
    PeerError,
    PenstockError,
    Unauthorized,
)
from penstock.wire import binary
from penstock.wire.binary import Frame, FrameReader, Type

if TYPE_CHECKING:
    from penstock.doors.session import Session

# Memory for a frame that is only announced.
AHEAD_BYTES: Final = 4 << 20
# Frames that are parsed before others have a turn.
TURN_FRAMES: Final = 1024

SAY_HELLO: Final = Unauthorized("say HELLO first, with a user and a password or a token")
_REASONS: Final = {
    Ending.PLAIN: TLS_REQUIRED,
    Ending.UNAUTHORIZED: SAY_HELLO,
    Ending.EXPIRED: BadRequest("no whole frame came in time"),
    Ending.STALE: BadRequest("nothing was heard for too long"),
    Ending.STOPPED: Closed("the server stops"),
    Ending.FAULT: PenstockError("internal error"),
}


class Frames:
    def __init__(self, session: Session) -> None:
        self._session = session
        # A message of the Provider's is JSON, in which a byte may take several.
        json_bytes_max = max(binary.JSON_BYTES_MAX, 2 * session.shared.settings.payload_bytes_max + (64 << 10))
        self._reader = FrameReader(
            session.shared.scratch,
            HANDSHAKE_BYTES_MAX if session.shared.gate.needs_auth else json_bytes_max,
            ahead_bytes=AHEAD_BYTES,
            json_bytes_max=min(json_bytes_max, binary.FRAME_BYTES_MAX),
            frames_max=1,
        )
        self.refusal: BadFrame | None = None
        session.use_buffer(_Buffered(session, self))

    # The codec.

    @property
    def has_more(self) -> bool:
        return self._reader.has_more

    @property
    def expected(self) -> int:
        return self._reader.expected

    def buffer(self) -> memoryview:
        return self._reader.buffer()

    def filled(self, count: int) -> list[Frame]:
        """Return the frames that are complete with so many more bytes in the buffer."""
        return self._frames(lambda: self._reader.filled(count))

    def feed(self, data: bytes) -> list[Frame]:
        return self._frames(lambda: self._reader.feed(data) if data else self._reader.more())

    def _frames(self, read: Callable[[], list[Frame]]) -> list[Frame]:
        frames: list[Frame] = []
        try:
            frames = read()
            self._reader.check()
        except BadFrame as error:
            self.refusal = error.with_traceback(None)  # which would keep the bytes
        return frames

    def admitted(self) -> None:
        self._reader.frames_max = TURN_FRAMES

    def allow_batches(self) -> None:
        """Take frames that are as large as a batch may be."""
        self._reader.bytes_max = binary.FRAME_BYTES_MAX

    def clear(self) -> None:
        self._reader.clear()

    # Replies.

    def write(self, data: bytes) -> None:
        self._session.peer.write(data)

    def answer(self, data: bytes) -> None:
        self._session.peer.answer(data)

    def keep_alive(self, silent_s: float, *, must_answer: bool) -> float:
        heartbeat_s = self._session.shared.settings.heartbeat_s
        # While a large frame arrives, a client cannot answer.
        if must_answer and self._session.unanswered >= 2 and silent_s > heartbeat_s:
            self._session.close_stale()
        else:
            self._session.unanswered += 1
            self.write(binary.frame(Type.HEARTBEAT, 0))
        return heartbeat_s

    def disconnect(self, reason: Ending | PenstockError) -> None:
        """Say why, and close."""
        error = _REASONS[reason] if isinstance(reason, Ending) else reason
        if isinstance(error, PeerError):
            self._session.shared.counters.protocol_errors += 1
        self.write(binary.json_frame(Type.DISCONNECT, 0, error_fields(error)))
        self._session.peer.close()


class _Buffered(asyncio.BufferedProtocol):
    """Lets the transport read into the buffer of the frame reader: no copy for large frames."""

    def __init__(self, session: Session, frames: Frames) -> None:
        self._session = session
        self._frames = frames

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._frames.buffer()

    def buffer_updated(self, count: int) -> None:
        self._session.buffer_updated(self._frames.filled, count)

    def pause_writing(self) -> None:
        self._session.pause_writing()

    def resume_writing(self) -> None:
        self._session.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._session.connection_lost(error)


def error_fields(error: PenstockError) -> dict[str, Any]:
    """Return the fields of ERROR, ENDED and DISCONNECT, and of a receipt for a message that is not stored."""
    fields: dict[str, Any] = {"code": error.code, "text": str(error)}
    if isinstance(error, OffsetOutOfRange):
        fields |= {"offset": error.offset, "start": error.start, "end": error.end}
    if isinstance(error, LogDamaged):
        where = {"path": str(error.path), "position": error.position, "first": error.first, "last": error.last}
        fields |= where | {"reason": error.reason}
    return fields
