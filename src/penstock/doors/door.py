"""A client that has not spoken yet: its first bytes tell which dialect it speaks.

`DIALECTS` is the table of all dialects but text. On a client-first port the server says nothing before it knows. On the
text port it greets clients with INFO, and does not serve protocols in which the server must not speak first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from penstock.doors.binary.dialect import Binary
from penstock.doors.cursus.dialect import Cursus
from penstock.doors.dialect import ConnectionType, Dialect, Ending
from penstock.doors.provider.dialect import Provider
from penstock.doors.qb.dialect import Qb
from penstock.doors.session import WEBSOCKET, Session
from penstock.doors.shared import Shared
from penstock.doors.text import info
from penstock.doors.text.dialect import Text
from penstock.security.identity import Identity
from penstock.wire import prefixed, text
from penstock.wire.binary import Type

# The first bytes of frames that a client may send. BATCH_ACK is a newline, and never comes first.
_FRAMES: Final = frozenset(kind for kind in Type if kind < Type.RESULT) - {Type.BATCH_ACK}


class Opening(NamedTuple):
    dialect: Callable[[Session], Dialect]
    # Whether the first bytes of a client are of this dialect; None if they are too few to tell.
    begins: Callable[[bytes], bool | None]
    # Whether it is served only where the client speaks first.
    is_client_first: bool = False


def _is_prefixed(dialect: prefixed.PrefixedDialect, data: bytes) -> bool | None:
    if data[0] != 0:
        return False
    found = prefixed.find_dialect(data)
    return None if found is None else found is dialect


# The first one that recognizes the bytes is taken. Everything else is text.
DIALECTS: Final = (
    Opening(Provider, lambda data: data[0] in _FRAMES and data[0] < Type.HELLO),
    Opening(Binary, lambda data: data[0] in _FRAMES),
    Opening(Qb, partial(_is_prefixed, prefixed.PrefixedDialect.QB), is_client_first=True),
    Opening(Cursus, partial(_is_prefixed, prefixed.PrefixedDialect.CURSUS), is_client_first=True),
)


def open_session(
    shared: Shared, *, greets: bool, type: ConnectionType = "nats", identity: Identity | None = None
) -> Session:
    """Return the session of a new connection. `greets`: whether the server speaks first. `identity`: of a client that
    need not log in."""
    greeting = (lambda session: text.info(info.fields(session))) if greets else None
    return Session(shared, partial(_open_text, greets=greets), greeting=greeting, type=type, identity=identity)


def _open_text(session: Session, *, greets: bool) -> Text:
    """A client that has not spoken is taken for one that speaks text: it can be told errors only in text."""
    dialect = Text(session, is_greeted=greets)
    dialect.codec = Door(session, dialect, is_client_first=not greets)
    return dialect


class Door:
    """The codec of a client that has not spoken: it lets another dialect read the bytes, or text."""

    has_more = False
    expected = 0
    refusal: None = None

    def __init__(self, session: Session, opened: Text, *, is_client_first: bool) -> None:
        self._session = session
        self._opened = opened
        self._is_client_first = is_client_first
        self._data = b""

    def feed(self, data: bytes) -> list[Any]:
        self._data += data
        for opening in DIALECTS if self._session.type != WEBSOCKET else ():
            if self._is_client_first or not opening.is_client_first:
                begins = opening.begins(self._data)
                if begins is None:
                    self._opened.is_mute = True
                    return []
                if begins:
                    self._session.become(opening.dialect)
                    if self._session.refuses_plain:
                        self._session.dialect.disconnect(Ending.PLAIN)
                        return []
                    return self._session.dialect.codec.feed(self._data)
        codec = self._opened.begin()
        if self._session.refuses_plain:
            self._opened.disconnect(Ending.PLAIN)
            return []
        return codec.feed(self._data)

    def clear(self) -> None:
        self._data = b""
