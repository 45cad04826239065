"""What one turn of the event loop reads and sends: a budget for all connections together.

Before it does anything else, the loop reads up to 2 MiB from each connection that has sent that much, and a message for
hundreds of subscribers is written hundreds of times. Either would hold up other connections for seconds. When a turn
has read enough, connections that send more are read from in later turns, one after the other. Enough is a number of
bytes or, since a megabyte of small messages takes a hundred times as long as one of large messages, a time. When a turn
has sent enough, in bytes and in time, messages wait for a later turn, in order and not encoded yet, and connections
that publish much wait with them. Half of a turn is for connections that send or are sent little: they do not wait for
the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final

from penstock.health import Usage

if TYPE_CHECKING:
    from penstock.doors.session import Session

TURN_BYTES_MAX: Final = 4 << 20
# Three turns pass until a publish is answered: it is read, written, committed.
TURN_S_MAX: Final = 0.02
# To encode and copy 1 MiB of small messages takes some milliseconds, of large ones less than one: while there is time,
# a turn sends more.
TURN_SENT_BYTES_MAX: Final = 8 << 20
# Messages that wait for a turn, of all connections. With more, each connection takes one delivery at a time.
TURN_WAITING_BYTES_MAX: Final = 64 << 20
# Above this, a connection reads or is sent much.
MUCH_BYTES: Final = 64 << 10
# A turn that does less than this fraction is not counted: noticing the next one costs a callback, 10 µs per request.
_LITTLE: Final = 16


class Turns:
    def __init__(
        self,
        bytes_max: int = TURN_BYTES_MAX,
        sent_bytes_max: int = TURN_SENT_BYTES_MAX,
        *,
        s_max: float = TURN_S_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._s_max = s_max
        # When the counted turn began, and how often something was read since.
        self._began = 0.0
        self._reads = 0
        self._bytes_max = bytes_max
        self._sent_bytes_max = sent_bytes_max
        # Bytes that were read and sent since the last turn that did much.
        self._bytes = self._sent_bytes = 0
        self._is_counting = False
        # Connections that are read from in a later turn: those that sent little, and those that sent much.
        self._held_little: dict[Session, None] = {}
        self._held_much: dict[Session, None] = {}
        # Of one connection in a turn, every second one is one that sent much.
        self._is_odd = False
        # Connections with messages that wait for a turn, and those that are not read from until these are sent.
        self._waiting_little: dict[Session, None] = {}
        self._waiting_much: dict[Session, None] = {}
        self._held_by_waiting: dict[Session, None] = {}
        # Bytes of messages that wait for a turn or until their connection reads, counted for each connection.
        self.waiting_bytes = 0

    def usage(self) -> dict[str, Usage]:
        return {"unsent_bytes": Usage(self.waiting_bytes, TURN_WAITING_BYTES_MAX)}

    def took(self, session: Session, count: int) -> None:
        """Count bytes that were read from a connection. Hold it until a later turn if this one has read enough."""
        self._bytes += count
        if self._bytes * _LITTLE > self._bytes_max:
            self._count()
        self._reads += 1
        if self._bytes > self._bytes_max or (self._is_counting and self._clock() - self._began > self._s_max):
            session.peer.hold()
            (self._held_much if count > MUCH_BYTES // _LITTLE else self._held_little)[session] = None
        if count > MUCH_BYTES and self._is_sending:
            session.peer.hold()
            self._held_by_waiting[session] = None

    def may_send(self, size: int) -> bool:
        """Return whether messages of this size may be sent in this turn. Otherwise they must `wait`."""
        if self._sent_bytes >= self._share(size) and not self._has_time(size):
            return False
        self._sent_bytes += size
        if self._sent_bytes * _LITTLE > self._sent_bytes_max:
            self._count()
        return True

    def wait(self, session: Session, size: int) -> None:
        """Call `session.send_waiting` in a later turn, for messages of so many bytes."""
        if session not in self._waiting_little and session not in self._waiting_much:
            (self._waiting_much if size > MUCH_BYTES else self._waiting_little)[session] = None
            self._count()

    @property
    def _is_sending(self) -> bool:
        return bool(self._waiting_little or self._waiting_much)

    def _share(self, size: int) -> int:
        return self._sent_bytes_max // 2 if size > MUCH_BYTES else self._sent_bytes_max

    def _has_time(self, size: int) -> bool:
        time_max = self._s_max / 2 if size > MUCH_BYTES else self._s_max
        return self._is_counting and self._clock() - self._began < time_max

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            self._began = self._clock()
            self._reads = 0
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        count = self._count_due()
        self._bytes = self._sent_bytes = self._reads = 0
        self._began = self._clock()
        due = self._take_held(count)
        self._send(self._waiting_much, MUCH_BYTES + 1)
        self._send(self._waiting_little, MUCH_BYTES)
        self._is_counting = bool(self._sent_bytes or self._held_little or self._held_much)
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin)
        if not self._is_sending:
            due += self._held_by_waiting
            self._held_by_waiting.clear()
        for session in due:
            session.read_on()

    def _count_due(self) -> int:
        """Return how many held connections to read from in the next turn: as many as the last turn had time for."""
        spent = self._clock() - self._began
        held = len(self._held_little) + len(self._held_much)
        if self._reads * self._s_max >= held * spent:
            return held
        return max(1, int(self._reads * self._s_max / spent))

    def _take_held(self, count: int) -> list[Session]:
        """Return so many held connections, the oldest first: half of them sent much, if there are so many."""
        self._is_odd = not self._is_odd
        much = min((count + self._is_odd) // 2, len(self._held_much))
        due = list(islice(self._held_little, count - much))
        due += islice(self._held_much, count - len(due))
        for session in due:
            self._held_little.pop(session, None)
            self._held_much.pop(session, None)
        return due

    def _send(self, waiting: dict[Session, None], size: int) -> None:
        """Let the connections that are sent about this much send."""
        while waiting and (self._sent_bytes < self._share(size) or self._has_time(size)):
            session = next(iter(waiting))
            del waiting[session]
            self._sent_bytes += session.send_waiting()
