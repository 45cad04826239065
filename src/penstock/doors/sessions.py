"""The sessions of a server: how many there may be, their pings, and their end in lame duck mode and at a stop."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from penstock.doors.arrivals import Arrivals
from penstock.doors.claims import Claims
from penstock.doors.counters import Counters
from penstock.doors.gate import Gate
from penstock.doors.journal import Journal
from penstock.doors.peer import Traffic
from penstock.health import Usage

if TYPE_CHECKING:
    from penstock.doors.session import Session

logger = logging.getLogger(__name__)

# In lame duck mode: the longest and the shortest pause between two batches of connections that are closed.
_PAUSE_S_MAX: Final = 1.0
_PAUSE_S_MIN: Final = 0.001


class Sessions:
    def __init__(
        self,
        counters: Counters,
        gate: Gate,
        journal: Journal,
        arrivals: Arrivals,
        claims: Claims,
        connections_max: int,
        heartbeat_s: float,
    ) -> None:
        self._counters = counters
        self._gate = gate
        self._journal = journal
        self._arrivals = arrivals
        self._claims = claims
        self._connections_max = connections_max
        self._heartbeat_s = heartbeat_s
        self._sessions: dict[Session, None] = {}
        self._last_id = 0
        self._past_traffic = Traffic()
        self._all_gone = asyncio.Event()
        self.is_stopping = False
        # Whether the server takes no more connections, and closes the open ones one by one.
        self.is_lame_duck = False

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions))

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_leaving(self) -> bool:
        """Whether the server takes no more connections, and closes the open ones."""
        return self.is_stopping or self.is_lame_duck

    @property
    def traffic(self) -> Traffic:
        """The traffic of all connections since the start."""
        total = self._past_traffic
        for session in self._sessions:
            total += session.peer.traffic
        return total

    def usage(self) -> dict[str, Usage]:
        return {"connections": Usage(len(self._sessions), self._connections_max)}

    def add(self, session: Session) -> bool:
        """Add a new connection. Return whether it may stay."""
        self._last_id += 1
        session.id = self._last_id
        self._counters.connections += 1
        session.ping_at = asyncio.get_running_loop().time() + self._heartbeat_s
        self._sessions[session] = None
        if len(self._sessions) > self._connections_max:
            self._counters.refused += 1
            return False
        self._gate.enter(session)
        return True

    def remove(self, session: Session) -> None:
        if session in self._sessions:
            del self._sessions[session]
            self._past_traffic += session.peer.traffic
        self._gate.leave(session)
        self._claims.release(session)
        self._journal.resumed(session.peer)
        if self.is_leaving and not self._sessions:
            self._all_gone.set()

    def sweep(self, now: float) -> None:
        """Close and ping the connections for which it is time."""
        self._gate.sweep(now)
        self._journal.sweep(self._sessions)
        self._arrivals.sweep(now)
        for session in [session for session in self._sessions if session.ping_at <= now]:
            session.ping()

    async def retire(self, stopped: asyncio.Task[Any], *, grace_s: float, seconds: float) -> None:
        """Tell clients to go elsewhere, and close their connections one by one, as nats-server does. Return early when
        `stopped` is done, or when no connection is left."""
        logger.info("lame duck mode: no new connections, %d are closed within %d s", len(self), seconds)
        self.is_lame_duck = True
        for session in self:
            session.tell_lame_duck()
        gone = asyncio.create_task(self._all_gone.wait())
        ends = (stopped, gone)
        try:
            if self._sessions:
                await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            sessions = list(self)
            pause_s, batch = _pace(len(sessions), seconds - grace_s)
            for begin in range(0, len(sessions), batch):
                for session in sessions[begin : begin + batch]:
                    session.stop()
                # Some of it at random, so that servers that retire together do not send clients away in step.
                await asyncio.wait(ends, timeout=pause_s * random.uniform(0.5, 1), return_when=asyncio.FIRST_COMPLETED)
                if stopped.done() or gone.done():
                    return
        finally:
            gone.cancel()

    async def stop(self, stop_s: float) -> None:
        """Handle no more requests, and give the open connections `stop_s` to get their replies."""
        self.is_stopping = True
        self._all_gone.clear()
        for session in self:
            session.stop()
        try:
            async with asyncio.timeout(stop_s):
                if self._sessions:
                    await self._all_gone.wait()
        except TimeoutError:
            logger.warning("%d connections did not end in time", len(self))
            for session in self:
                session.abort()


def _pace(connections: int, seconds: float) -> tuple[float, int]:
    """Return the pause between two batches of connections that are closed, and the size of a batch."""
    pause_s = seconds / max(1, connections)
    return max(min(pause_s, _PAUSE_S_MAX), _PAUSE_S_MIN), max(1, math.ceil(_PAUSE_S_MIN / pause_s))
