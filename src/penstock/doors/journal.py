"""Log lines about clients: failed logins, refused messages, consumers that do not read.

Any client can cause such lines, so each kind is limited to ten in ten seconds, followed by the number that was left
out. No line contains credentials.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.model.subject import clean

if TYPE_CHECKING:
    from penstock.doors.peer import Peer
    from penstock.doors.session import Session

logger = logging.getLogger(__name__)

LINES_MAX: Final = 10
INTERVAL_US: Final = 10_000_000
# A connection that has not read for this long is a slow consumer.
SLOW_US: Final = 5_000_000


class LimitedLines:
    """Lines of one kind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_us = 0
        self._count = 0

    def log(self, level: int, text: str, *args: object) -> None:
        now_us = self._clock.monotonic_us()
        if now_us >= self._until_us:
            left_out = self._count - LINES_MAX
            if left_out > 0:
                logger.log(level, "%d more lines like the last one were left out", left_out)
            self._until_us, self._count = now_us + INTERVAL_US, 0
        self._count += 1
        if self._count <= LINES_MAX:
            logger.log(level, text, *args)


class Journal:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        lines = (LimitedLines(clock) for _ in range(5))
        self._logins, self._publishes, self._consumers, self._http, self._handshakes = lines
        # Connections that take nothing now, and since when; those for which this was logged.
        self._paused: dict[Peer, int] = {}
        self._slow: dict[Peer, None] = {}

    def failed_login(self, door: str, address: str) -> None:
        self._logins.log(logging.WARNING, "login failed: %s client %s", door, address or "in this process")

    def invalid_http(self, address: str) -> None:
        self._http.log(logging.WARNING, "invalid HTTP request: client %s", address)

    def failed_handshake(self, address: str, reason: str) -> None:
        self._handshakes.log(logging.WARNING, "TLS handshake failed: client %s: %s", address, clean(reason))

    def refused_publish(self, session: Session, count: int, error: PenstockError | str) -> None:
        self._publishes.log(
            logging.WARNING, "publish refused: %s, %d messages: %s", _who(session), count, clean(str(error))
        )

    def paused(self, peer: Peer) -> None:
        self._paused.setdefault(peer, self._clock.monotonic_us())

    def resumed(self, peer: Peer) -> None:
        """The client reads again, or is gone."""
        since_us = self._paused.pop(peer, None)
        if peer in self._slow and since_us is not None:
            del self._slow[peer]
            seconds = (self._clock.monotonic_us() - since_us) / 1e6
            self._consumers.log(logging.INFO, "a slow consumer reads again, or is gone, after %.1f s", seconds)

    def sweep(self, sessions: Iterable[Session]) -> None:
        before_us = self._clock.monotonic_us() - SLOW_US
        found = {peer for peer, since_us in self._paused.items() if since_us <= before_us and peer not in self._slow}
        for session in sessions if found else ():
            if session.peer in found:
                self._slow[session.peer] = None
                self._consumers.log(
                    logging.WARNING,
                    "slow consumer: %s has not read for %d s; what it subscribed to waits on the disk",
                    _who(session),
                    SLOW_US // 1_000_000,
                )


def _who(session: Session) -> str:
    name = f"{session.name}, " if session.name else ""
    return f"connection {session.id} ({name}{session.address or 'in this process'})"
