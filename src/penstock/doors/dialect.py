"""Between a session and the protocol that its client speaks.

`Session` is the connection: it does all input and output, and it is the same for every protocol. A `Dialect` is one
protocol for one connection: a codec without I/O, and verbs that act on the broker. They work together like this:

    bytes in      `codec.feed` turns bytes into events, whatever type the dialect likes.
    first event   `credentials` finds the credentials in it; the gate admits the connection, or `deny` says why not.
    events        `do` takes the next event, or several that belong together, and acts. If those behind must wait, it
                  returns a coroutine: the session awaits it, and reads nothing meanwhile. A PenstockError from either
                  goes to `refuse`.
    replies       go through `session.replies`, in the order of the events or as they are known; `publish` of
                  publishing.py stores a run, and counts as a reply until its receipt is settled.
    deliveries    the broker calls `session.send`; the dialect encodes them in `send`.
    errors        `refuse` answers an event that failed; `disconnect` says why the connection is closed.
    keep-alive    the session calls `keep_alive` when it is due.
    the rest      a dialect that has something to do in lame duck mode, when the server stops, or when its connection is
                  gone adds a callback to `session.at_lame_duck`, `at_stop` or `at_end`.

The table in door.py names the dialects. A new protocol is a codec in `wire`, a folder here, and a line in that table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from penstock.errors import TlsRequired

if TYPE_CHECKING:
    from penstock.broker.member import Member, Place
    from penstock.errors import BadFrame, PenstockError
    from penstock.model.run import Run

# What `/connz` calls a connection.
ConnectionType = Literal["nats", "websocket", "binary", "prefixed"]


class Ending(Enum):
    """Why a session closes its connection. Each dialect has its own words for it."""

    PLAIN = "it does not use TLS, which is required"
    UNAUTHORIZED = "it sent too much before it authenticated"
    EXPIRED = "it was not admitted in time"
    STALE = "it did not answer"
    STOPPED = "the server stops"
    FAULT = "an unexpected exception"
    TOO_MANY = "there are too many connections"


TLS_REQUIRED: Final = TlsRequired("this port requires TLS: connect with tls://, or with your client's TLS options")


class Codec(Protocol):
    @property
    def has_more(self) -> bool:
        """Whether complete events are left, which `feed(b"")` returns."""
        ...

    @property
    def expected(self) -> int:
        """The size of the incomplete event if that is known and may be large, else 0."""
        ...

    @property
    def refusal(self) -> BadFrame | None:
        """Why nothing behind the last event can be read, if it cannot."""
        ...

    def feed(self, data: bytes) -> list[Any]:
        """Return the events that are complete, or as many as one turn should handle."""
        ...

    def clear(self) -> None:
        """Drop what is incomplete: the rest will never come."""
        ...


class Dialect(Protocol):
    type: ConnectionType

    @property
    def codec(self) -> Codec: ...

    def credentials(self, event: Any) -> Mapping[str, Any] | None:
        """Return the credentials in a first event, as NATS names them; None if this kind of event carries none."""
        ...

    def admitted(self) -> None:
        """Lift the limits that protect the server from clients without credentials."""
        ...

    def deny(self, event: Any, error: PenstockError) -> None:
        """Say why a first event does not admit its connection, and close it."""
        ...

    def do(self, events: deque[Any]) -> Coroutine[Any, Any, None] | None:
        """Remove and handle the first event, or several. Return what those behind must wait for, if anything."""
        ...

    def refuse(self, event: Any, error: PenstockError) -> None:
        """Answer an event that failed."""
        ...

    def disconnect(self, reason: Ending | PenstockError) -> None:
        """Say why, and close the connection: at once, or behind the replies that are due."""
        ...

    def keep_alive(self, silent_s: float) -> float:
        """Ask the client for a sign of life, or give up on it. Return in how many seconds to call again."""
        ...

    # As in `member.Sink`.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None: ...

    def fail(self, member: Member, error: PenstockError) -> None: ...


class Gone:
    """The dialect of a client that is gone: a delivery that was under way to it goes nowhere."""

    type: ConnectionType = "binary"

    @property
    def codec(self) -> Codec:
        raise AssertionError("nothing is read from a client that is gone")

    def credentials(self, event: Any) -> Mapping[str, Any] | None:
        return None

    def admitted(self) -> None: ...

    def deny(self, event: Any, error: PenstockError) -> None: ...

    def do(self, events: deque[Any]) -> Coroutine[Any, Any, None] | None:
        return None

    def refuse(self, event: Any, error: PenstockError) -> None: ...

    def disconnect(self, reason: Ending | PenstockError) -> None: ...

    def keep_alive(self, silent_s: float) -> float:
        return silent_s

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None: ...

    def fail(self, member: Member, error: PenstockError) -> None: ...
