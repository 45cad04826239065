"""Bytes to events, with the PINGs of nats-py where they belong.

nats-py's `flush` writes its PING at once, and the publishes before it in the next turn of its loop. nats-server
delivers messages within microseconds, so a client rarely notices. Here messages are stored first: a `flush` would not
cover them, and a `drain` would be over before they arrive. So the PINGs of such a client are moved behind the events
that arrive with them, or next.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from penstock.wire import text
from penstock.wire.events import Event, SimpleCommand

if TYPE_CHECKING:
    from penstock.doors.session import Session

# Lines that are parsed before others have a turn.
LINES_MAX: Final = 256
# How long an early PING waits for the first publish, and for the last.
EARLY_PING_S: Final = 0.005
EARLY_PING_S_MAX: Final = 1.0
# With more of them, they are answered at once.
EARLY_PINGS_MAX: Final = 16


class Input:
    # What is wrong with the bytes is an event, Refused.
    refusal: None = None

    def __init__(self, session: Session) -> None:
        self._session = session
        self.parser = text.TextParser(
            session.shared.settings.payload_bytes_max,
            needs_connect=session.shared.gate.needs_auth,
            lines_max=LINES_MAX,
        )
        # Whether the client writes a PING ahead of publishes that it has gathered.
        self.moves_pings = False
        self._pings = 0
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_more(self) -> bool:
        return self.parser.has_more

    @property
    def expected(self) -> int:
        return self.parser.expected

    def feed(self, data: bytes) -> list[Event]:
        parser, peer = self.parser, self._session.peer
        events = parser.feed(data)
        peer.in_messages, peer.in_bytes = parser.messages, parser.payload_bytes
        if self._pings or (events and self.moves_pings):
            return self._move_pings(events)
        return events

    def clear(self) -> None:
        self.parser.clear()
        self._stop_timer()

    def take_pings(self) -> None:
        """Answer the early PINGs: nothing comes behind them."""
        self._stop_timer()
        if self._pings:
            self._session.inbox.take(self._release_pings())

    def _move_pings(self, events: list[Event]) -> list[Event]:
        others: list[Event] = [event for event in events if event is not SimpleCommand.PING]
        self._pings += len(events) - len(others)
        self._stop_timer()
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._pings and not self._until:
            self._until = now + EARLY_PING_S_MAX
        is_incomplete = self.parser.is_within if others else not self.parser.has_more
        if not is_incomplete or self._pings > EARLY_PINGS_MAX or now > self._until:
            return [*others, *self._release_pings()]
        if not self.parser.is_within:
            self._timer = loop.call_later(EARLY_PING_S, self._session.guard(self.take_pings))
        return others

    def _release_pings(self) -> list[Event]:
        count, self._pings, self._until = self._pings, 0, 0.0
        return [SimpleCommand.PING] * count

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
