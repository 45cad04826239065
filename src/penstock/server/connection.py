"""What all connections have in common, and the guard around them: a bug in one connection closes only that one.

Code of a connection runs when somebody else calls it: the transport, the server's sweep, the broker during a delivery
or a commit, a task. `Connection` wraps each of these entries, so an unexpected exception is counted as a fault, the
connection is closed with "internal error", and the caller goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, cast

from penstock.errors import BatchTooLarge, PenstockError
from penstock.run import Run, batch_bytes
from penstock.server.arrivals import SMALL_BYTES
from penstock.server.peer import Peer, Traffic
from penstock.subject import clean

if TYPE_CHECKING:
    from penstock.broker.group import Group
    from penstock.broker.member import Member
    from penstock.broker.subscription import Subscription
    from penstock.server.server import Server

# A connection's commands are processed for so long; then others have a turn.
TURN_S: Final = 0.005

INTERNAL_ERROR: Final = PenstockError("internal error")

# By whom they are called: the transport, the broker, the server.
ENTRIES: Final = (
    *("data_received", "buffer_updated", "pause_writing", "resume_writing"),
    *("send", "has_published", "fail"),
    *("ping", "expire", "tell_lame_duck", "stop", "read_on"),
)

# What is ended of a connection that is gone before others have a turn.
END_STEPS: Final = 256

# What a connection is, as /connz has it.
ConnectionType = Literal["nats", "websocket", "binary", "prefixed"]
WEBSOCKET: Final = "websocket"

P = ParamSpec("P")


class Connection:
    """One connection, in whichever dialect. Entries that a subclass defines are wrapped; callbacks for the broker go
    through `guard`, tasks through `spawn`."""

    type: ConnectionType = "nats"

    def __init__(self, server: Server) -> None:
        self.server = server
        self.broker = server.broker
        self.peer = Peer(server)
        self.id = 0
        self.address = ""
        # Whether it has passed the gate.
        self.is_admitted = False
        # When to ask whether the client is still there.
        self.ping_at = 0.0
        # Whether it receives what it has published itself.
        self.echo = True
        self._name = ""
        self._is_faulty = False
        # The bytes of the large frame that is arriving or being dealt with, if there is one.
        self._expected = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ENTRIES:
            if name in cls.__dict__:
                setattr(cls, name, _guarded(cls.__dict__[name]))

    @property
    def name(self) -> str:
        """What the client calls itself."""
        return self._name

    @name.setter
    def name(self, name: object) -> None:
        self._name = clean(name)

    if TYPE_CHECKING:

        @property
        def subscriptions(self) -> Mapping[Any, tuple[Member, Subscription | Group]]: ...

    @property
    def is_open(self) -> bool:
        return self.peer.is_open

    @property
    def is_connected(self) -> bool:
        return self.peer.is_connected

    @property
    def traffic(self) -> Traffic:
        return self.peer.traffic

    def summary(self) -> dict[str, Any]:
        """Return who it is and what it has done, without its subscriptions."""
        return {"id": self.id, "cid": self.id, "ip": self.address, "name": self.name, **self.traffic._asdict()}

    def check_size(self, *sizes: int) -> None:
        """Raise BatchTooLarge if a message is too large. `sizes`: of its value, key and headers, whatever it has."""
        size, limit = sum(sizes), self.server.config.server.payload_bytes_max
        if size > limit:
            raise BatchTooLarge(
                f"a message of {size} bytes (value, key and headers), {limit} are allowed: "
                "send less, or raise server.payload_bytes_max"
            )

    def refused_publishes(self, count: int, error: PenstockError | str) -> None:
        """Count messages that are not stored, and whose publisher is told."""
        self.server.counters.failed_publishes += count
        self.server.journal.refused_publish(self, count, error)

    # From the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer.connect(cast(asyncio.Transport, transport))

    def connection_lost(self, _error: Exception | None) -> None:
        self.peer.lose()
        self.server.arrivals.release(self)
        steps = self.end()
        if self.call(self._take_steps, steps):
            self.spawn(self._take_other_steps(steps))
        self.server.remove(self)

    def end(self) -> Iterator[None]:
        """End what the connection had begun, which is gone. Yield between steps: there may be many."""
        yield from ()

    @staticmethod
    def _take_steps(steps: Iterator[None]) -> bool:
        """Take some steps; return whether there may be more."""
        return sum(1 for _ in islice(steps, END_STEPS)) == END_STEPS

    async def _take_other_steps(self, steps: Iterator[None]) -> None:
        for count, _ in enumerate(steps):
            if count % END_STEPS == 0:
                await asyncio.sleep(0)

    def abort(self) -> None:
        self.peer.abort()

    def received(self, count: int) -> None:
        """Count bytes as they came, whatever they are."""
        self.peer.received(count)
        self.server.turns.took(self, count)

    def expect(self, length: int, *, is_next: bool) -> None:
        """Claim room for the frame that has begun, if it is large. `length`: all of it, 0 if none has begun;
        `is_next`: the one before it is dealt with."""
        if length <= SMALL_BYTES:
            length = 0
        if length == self._expected and not (length and is_next):
            return
        if self._expected:
            self.server.arrivals.release(self)
        self._expected = length
        if length and not self.peer.is_closing:
            self.server.arrivals.claim(self, length)

    def send_in_turn(self, run: Run, write: Callable[[], None]) -> None:
        """Call `write`, which encodes and writes a run, now or in a later turn of the loop."""
        size = batch_bytes(run)
        if not self.peer.has_waiting and self.server.turns.may_send(size):
            write()
        else:
            self.peer.write_later(size, self.guard(write))
            self.server.turns.wait(self, size)

    def send_waiting(self) -> int:
        """Send what waited for its turn, as far as there is room; return the bytes of that."""
        was_open = self.peer.is_open
        size = self.peer.write_waiting()
        if not (was_open or self.peer.is_paused or self.peer.is_closing):
            self.resume_writing()
        return size

    def resume_writing(self) -> None:
        """The client takes more again."""
        self.peer.resume()
        if self.peer.has_waiting:
            self.server.turns.wait(self, self.peer.waiting_bytes)

    def read_on(self) -> None:
        """Read from the client again, unless something else is in the way."""
        raise NotImplementedError

    # From the server.

    def ping(self) -> None:
        """Ask whether the client is still there, and close the connection if it has not answered twice."""
        raise NotImplementedError

    def expire(self) -> None:
        """Close the connection: it was not admitted in time."""
        raise NotImplementedError

    def tell_lame_duck(self) -> None:
        """Tell the client that the server retires, if its protocol has a word for that."""

    def stop(self) -> None:
        """Take no more commands, send the answers that are due, and close."""
        raise NotImplementedError

    # Faults.

    def fault(self, error: Exception) -> None:
        """Close the connection because of an unexpected exception in it."""
        self.broker.store.health.fault("session", f"connection {self.id} from {self.address}", error)
        if not self._is_faulty:
            self._is_faulty = True
            self.call(self.tell_fault)
        self.peer.close()

    def tell_fault(self) -> None:
        """Send INTERNAL_ERROR in the words of the dialect."""
        raise NotImplementedError

    def guard(self, callback: Callable[P, object]) -> Callable[P, None]:
        """Return a callback for the broker that closes this connection if it raises."""
        return partial(self.call, callback)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - this is the guard
            self.fault(error)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine of this connection as a task."""
        return self.server.spawn(self._supervise(coroutine))

    async def _supervise(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001 - this is the guard
            self.fault(error)


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def guarded(self: Connection, *args: Any) -> Any:
        return self.call(method, self, *args)

    return guarded
