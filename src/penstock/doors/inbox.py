"""The events of a connection, handled one after the other.

An event may take its time. Those behind it wait, and the connection is not read from meanwhile. After 5 ms, other
connections have a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError, Unauthorized

if TYPE_CHECKING:
    from penstock.doors.session import Session

TURN_S: Final = 0.005
# Requests of one connection that wait for something at the same time. With more, it is not read from.
REQUESTS_MAX: Final = 256


class Inbox:
    def __init__(self, session: Session) -> None:
        self._session = session
        # Events that wait for one that is awaited; None if none is.
        self._waiting: deque[Any] | None = None
        self._requests: set[asyncio.Task[None]] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether an event is awaited."""
        return self._waiting is not None

    @property
    def is_busy(self) -> bool:
        """Whether no more events can be taken now."""
        return self._waiting is not None or len(self._requests) >= REQUESTS_MAX

    @property
    def requests(self) -> int:
        return len(self._requests)

    def take(self, events: list[Any]) -> None:
        """Handle events, or let them wait behind the one that is awaited."""
        if self._waiting is None:
            self._handle(deque(events))
        else:
            self._waiting.extend(events)

    def begin(self, event: Any, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a request that the events behind it do not wait for."""
        task = self._session.spawn(self._await(event, coroutine))
        self._requests.add(task)
        task.add_done_callback(self._end_request)
        if len(self._requests) >= REQUESTS_MAX:
            self._session.peer.hold()
        return task

    def _end_request(self, task: asyncio.Task[None]) -> None:
        was_busy = self.is_busy
        self._requests.discard(task)
        if was_busy:
            self._session.read_on()

    def _handle(self, events: deque[Any]) -> None:
        session = self._session
        time = asyncio.get_running_loop().time
        until = time() + TURN_S
        while events and not (session.is_ending or session.peer.is_closing):
            event = events[0]
            if not session.is_admitted and not self._admit(event, events):
                return
            waits = None
            try:
                waits = session.dialect.do(events)
            except PenstockError as error:
                session.dialect.refuse(event, error)
            if session.pause_s and waits is None:
                waits, session.pause_s = asyncio.sleep(session.pause_s), 0.0
            if waits is None and events and time() > until:
                waits = asyncio.sleep(0)
            if waits is not None:
                self._wait_for(event, waits, events)
                return
        if session.is_ending or session.peer.is_closing:
            return
        codec = session.dialect.codec
        if codec.has_more:
            self._wait_for(None, asyncio.sleep(0), events)
        elif codec.refusal is not None:
            session.dialect.disconnect(codec.refusal)

    def _admit(self, event: Any, events: deque[Any]) -> bool:
        """Return whether the first event admits the connection now. It may do so later: then all events wait."""
        session = self._session
        try:
            credentials = session.dialect.credentials(event)
        except PenstockError as error:
            session.dialect.refuse(event, error)
            return False
        found = session.shared.gate.admit(session, credentials)
        if isinstance(found, Coroutine):
            self._wait_for(event, self._admit_later(event, found), events)
            return False
        return self._admitted(event, found)

    async def _admit_later(self, event: Any, admitting: Coroutine[Any, Any, PenstockError | None]) -> None:
        self._admitted(event, await admitting)

    def _admitted(self, event: Any, refusal: PenstockError | None) -> bool:
        dialect = self._session.dialect
        if refusal is None:
            dialect.admitted()
            return True
        if isinstance(refusal, Unauthorized):
            dialect.deny(event, refusal)
        else:
            dialect.disconnect(refusal)
        return False

    def _wait_for(self, event: Any, waits: Coroutine[Any, Any, None], events: deque[Any]) -> None:
        self._waiting = events
        self._session.peer.hold()
        self._session.spawn(self._wait(event, waits))

    async def _wait(self, event: Any, waits: Coroutine[Any, Any, None]) -> None:
        """Let an event take its time, then handle those behind it."""
        await self._await(event, waits)
        session = self._session
        events, self._waiting = self._waiting or deque(), None
        if session.is_ending:
            session.say_goodbye()
        elif not session.peer.is_closing:
            if not events and session.dialect.codec.has_more:
                events.extend(session.dialect.codec.feed(b""))
            self._handle(events)
            if self._waiting is None:
                session.expect(is_next=True)
            session.read_on()

    async def _await(self, event: Any, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except PenstockError as error:
            self._session.dialect.refuse(event, error)
