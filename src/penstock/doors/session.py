"""A connection, in any dialect: everything that does not depend on the protocol.

A session reads bytes, lets its dialect turn them into events, and puts these into its inbox (inbox.py), which lets the
dialect act on them. It sends the replies of the dialect and the messages of the broker. All calls into it are guarded
(fault_guard.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar, cast

from penstock.broker.group import Group
from penstock.doors.arrivals import SMALL_BYTES
from penstock.doors.dialect import ConnectionType, Dialect, Ending, Gone
from penstock.doors.fault_guard import FaultGuard
from penstock.doors.inbox import Inbox
from penstock.doors.peer import Peer
from penstock.doors.replies import Replies
from penstock.errors import Closed, PenstockError, PermissionDenied, QuotaExceeded, Unauthorized
from penstock.model.run import Run, batch_bytes
from penstock.model.subject import clean
from penstock.security.identity import authorize, authorize_all
from penstock.security.nkeys import nonce
from penstock.security.permissions import Action

if TYPE_CHECKING:
    from penstock.broker.intake import Refusals
    from penstock.broker.member import Member, Place
    from penstock.broker.subscription import Subscription
    from penstock.doors.shared import Shared
    from penstock.security.identity import Identity
    from penstock.security.quotas import Meter

P = ParamSpec("P")
T = TypeVar("T")

# Subscriptions of a closed connection that end before others have a turn.
END_STEPS: Final = 256

WEBSOCKET: Final = "websocket"


class Arrival(NamedTuple):
    """Where a connection came from, and when."""

    port: int
    time_us: int


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def entry(self: Session, *args: Any) -> Any:
        return self.call(method, self, *args)

    return entry


class Session(asyncio.Protocol):
    """Its state is in its parts: peer, inbox, replies, guard. It has more than 25 methods because its callers meet
    here: the transport (asyncio.Protocol), the dialect, the broker (member.Sink) and the server."""

    def __init__(
        self,
        shared: Shared,
        opening: Callable[[Session], Dialect],
        *,
        greeting: Callable[[Session], bytes] | None = None,
        type: ConnectionType = "nats",
        identity: Identity | None = None,
    ) -> None:
        """`opening` makes the dialect of a client that has not spoken yet. `greeting`: what the server says first.
        `identity`: of a client that need not log in."""
        self.shared = shared
        self._greeting = greeting
        self.broker = shared.broker
        self.type = type
        self.peer = Peer(shared.counters, shared.journal, shared.turns)
        self.guard = FaultGuard(self)
        self.call, self.spawn = self.guard.call, self.guard.spawn
        self.inbox = Inbox(self)
        self.replies = Replies(self.peer, self.read_on)
        # By a key that the dialect chooses.
        self.subscriptions: dict[Any, tuple[Member, Subscription | Group]] = {}
        # Members that were unsubscribed, and have not yet received what was published before.
        self.leaving: dict[Member, Subscription] = {}
        self.id = 0
        self.address = ""
        self.arrival = Arrival(0, 0)
        # Whether it has passed the gate.
        self.is_admitted = False
        # Whether the client must be told to use TLS, which it does not.
        self.refuses_plain = False
        # Who it is, if credentials are required; and the same if what it does must be checked.
        self.identity = identity
        self.checked: Identity | None = None
        self.meter: Meter | None = None
        # What an NKEY must sign.
        self.nonce = ""
        # For how long its next event must wait, because its user sends too much.
        self.pause_s = 0.0
        # When to ask for a sign of life, how often that was done since the last event, and when the last bytes came.
        self.ping_at = 0.0
        self.unanswered = 0
        self._heard_at = 0.0
        # Whether the client receives what it has published itself; if not, whether a message is one of these.
        self.echo = True
        self.has_published: Callable[[Place, int], bool] = _has_not_published
        self._name = ""
        # Whether no more events are handled: the connection ends when the replies that are due are sent.
        self.is_ending = False
        # Whether the connection is gone, and everything that it began has ended.
        self._has_ended = False
        # Dialects that it spoke before.
        self._former: list[Dialect] = []
        # The bytes of the large event that is arriving or being handled, if there is one.
        self._expected = 0
        self._transport: asyncio.Transport | None = None
        # What a dialect has to do in lame duck mode, before the server stops, and when the connection is gone.
        self.at_lame_duck: list[Callable[[], None]] = []
        self.at_stop: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.dialect = opening(self)

    @property
    def name(self) -> str:
        """What the client calls itself."""
        return self._name

    @name.setter
    def name(self, name: object) -> None:
        self._name = clean(name)

    @property
    def is_connected(self) -> bool:
        return self.peer.is_connected

    def summary(self) -> dict[str, Any]:
        """Return the row of `/connz`, without the subscriptions."""
        return {
            "id": self.id,
            "cid": self.id,
            "ip": self.address,
            "name": self.name,
            **self.peer.tls,
            **({} if self.identity is None else {"authorized_user": self.identity.name}),
            **self.peer.traffic._asdict(),
            "unanswered": len(self.replies) + self.inbox.requests,
        }

    # From the transport.

    @guarded
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer.connect(self._transport)
        address = transport.get_extra_info("peername")
        self.address, port = (address[0], address[1]) if address else ("", 0)
        self.arrival = Arrival(port, self.broker.clock.now_us())
        if not self.shared.sessions.add(self):
            self.dialect.disconnect(Ending.TOO_MANY)
        elif self._greeting is not None:
            if self.shared.security.users.has_nkeys:
                self.nonce = nonce()
            self._transport.write(self._greeting(self))

    def connection_lost(self, _error: Exception | None) -> None:
        self.peer.lose()
        self.replies.clear()
        self.shared.arrivals.release(self)
        steps = self._end()
        if self.call(_take_steps, steps):
            self.spawn(_take_other_steps(steps))
        self.shared.sessions.remove(self)
        self._has_ended = True
        self.dissolve_if_done()

    def _end(self) -> Iterator[None]:
        """End what the connection began. Yield between steps: there may be many."""
        self.dialect.codec.clear()
        for callback in self.at_end:
            callback()
        for key in list(self.subscriptions):
            self.call(self.unsubscribe, key)
            yield
        for held in list(self.leaving.items()):
            self.call(self.leave, *held)
            yield

    def dissolve_if_done(self) -> None:
        """When the connection has ended and nothing runs for it, cut the references between its parts: their memory is
        free then. The garbage collector would have to look at everything else, too."""
        if not (self._has_ended and self.guard.is_idle):
            return
        self.guard.close()
        for dialect in (*self._former, self.dialect):
            vars(dialect).clear()
        self._former.clear()
        self.dialect = Gone()
        self._transport = None
        self.at_end, self.at_stop, self.at_lame_duck, self.has_published = [], [], [], _has_not_published
        del self.inbox, self.replies

    @guarded
    def data_received(self, data: bytes) -> None:
        if self._takes(len(data)):
            self._read(self.dialect.codec.feed(data), len(data))

    @guarded
    def buffer_updated(self, filled: Callable[[int], list[Any]], count: int) -> None:
        """Take bytes that the transport has put into the buffer of a codec."""
        if self._takes(count):
            self._read(filled(count), count)

    def become(self, dialect: Callable[[Session], Dialect]) -> None:
        """Speak another dialect than the one of a client that had not spoken."""
        self.at_lame_duck, self.at_stop, self.has_published = [], [], _has_not_published
        self._former.append(self.dialect)
        self.dialect = dialect(self)
        self.type = self.dialect.type

    def use_buffer(self, protocol: asyncio.BufferedProtocol) -> None:
        """Let the transport read into the buffer of a codec, which `protocol` names."""
        assert self._transport is not None, "it is connected"
        # A transport asks for the buffer only when reading starts.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        self._transport.resume_reading()

    @guarded
    def pause_writing(self) -> None:
        self.peer.pause()

    @guarded
    def resume_writing(self) -> None:
        self.peer.resume()
        if self.peer.has_waiting:
            self.shared.turns.wait(self, self.peer.waiting_bytes)
        self.read_on()
        for reader in [*(reader for _, reader in self.subscriptions.values()), *self.leaving.values()]:
            reader.wake()

    # From TLS.

    def refuse_plain(self) -> None:
        self.refuses_plain = True

    def takes_overhead(self, count: int) -> bool:
        """Count bytes that the dialect does not see: a client without credentials could send them forever."""
        return self.is_admitted or self.shared.gate.received(self, count)

    # What it may do.

    def identify(self, identity: Identity) -> None:
        """The client has logged in."""
        self.identity = identity
        self.meter = identity.meter
        self.checked = identity if identity.is_limited or identity.meter.quotas.has_any else None
        self.peer.on_sent = None if self.checked is None or not identity.meter.limits_out else self.charge_sent
        self.nonce = ""

    def authorize(self, action: Action, resource: bytes = b"") -> None:
        """Raise PermissionDenied unless the client may do this."""
        if self.checked is not None:
            authorize(self.checked, action, resource)

    def authorize_publish(self, subject: bytes) -> None:
        """Raise PermissionDenied unless the client may publish to a subject: before it is told whether that exists."""
        if self.checked is not None and not self.checked.may_publish(subject):
            raise self.checked.refuse(Action.PUBLISH, subject)

    def authorize_all(self, pattern: bytes) -> None:
        """Raise PermissionDenied unless the client may read all that a pattern matches."""
        if self.checked is not None:
            authorize_all(self.checked, pattern)

    def restrict(self, member: Member, pattern: bytes) -> None:
        """Let a member of a new plain subscription get only what the client may read. Raise PermissionDenied if that
        is nothing."""
        if self.checked is not None:
            authorize(self.checked, Action.SUBSCRIBE, pattern)
            member.denied = self.checked.denied(pattern)

    def authorize_join(self, group: bytes | None, pattern: bytes) -> None:
        """Raise PermissionDenied unless the client may join a group: its members share messages, so all of them must be
        allowed."""
        if self.checked is not None:
            authorize_all(self.checked, pattern)
            if group is not None:
                authorize(self.checked, Action.GROUP_JOIN, group)

    def refused(self, run: Run) -> Refusals:
        """Return the messages of a run that the client may not publish: by subject, or by index."""
        identity = self.checked
        assert identity is not None, "it is checked"
        found: Refusals = {}
        subject = run.subject
        for each in (subject,) if subject is not None else dict.fromkeys(run.subjects):
            if identity.may_publish(each):
                continue
            if not identity.has_replies:
                found[each] = identity.refuse(Action.PUBLISH, each)
                continue
            for index, other in enumerate(run.subjects):
                if other == each and not identity.may_reply(each):
                    found[index] = identity.refuse(Action.PUBLISH, each)
        if identity.meter.buckets:
            try:
                identity.meter.check_rates(self.broker.clock.monotonic_us())
            except QuotaExceeded as error:
                found |= dict.fromkeys(run.subjects, error)
        return found

    def charge(self, messages: int, size: int) -> None:
        """Count messages that the client has published, and let it wait if they are more than its user may send."""
        assert self.checked is not None, "it is checked"
        if not self.checked.meter.buckets:
            return
        wait_s = self.checked.meter.took("in", messages, size, self.broker.clock.monotonic_us())
        self.pause_s = max(self.pause_s, wait_s)

    def charge_sent(self, messages: int, size: int) -> None:
        """Count messages that the client was sent, and send it no more for as long as they are too many."""
        assert self.checked is not None, "it is checked"
        now_us = self.broker.clock.monotonic_us()
        wait_s = self.checked.meter.took("out", messages, size, now_us)
        if wait_s and not self.peer.is_throttled:
            self.peer.throttle()
            asyncio.get_running_loop().call_later(wait_s, self.guard(self._end_throttle))

    def _end_throttle(self) -> None:
        self.peer.end_throttle()
        if not self.peer.is_paused and not self.peer.is_closing:
            self.resume_writing()

    async def paid(self) -> None:
        """Wait until what the client was sent is no longer too much."""
        while self.peer.is_throttled and not self.peer.is_closing:
            await self.peer.drained()

    @guarded
    def permissions_changed(self) -> None:
        """The user of this connection has changed: end the subscriptions that it may not have any more."""
        assert self.identity is not None, "it has logged in"
        self.identify(self.identity)
        for member, reader in list(self.subscriptions.values()):
            try:
                if isinstance(reader, Group):
                    self.authorize_join(reader.name, reader.pattern)
                else:
                    member.denied = ()
                    self.restrict(member, reader.pattern)
            except PermissionDenied as error:
                self.dialect.fail(member, error)

    @guarded
    def revoke(self, reason: str) -> None:
        """Close the connection: its login is no longer valid."""
        if not self.peer.is_closing:
            self.dialect.disconnect(Unauthorized(reason))

    # In.

    def _takes(self, count: int) -> bool:
        """Count bytes as they came. Return whether they are wanted."""
        self.peer.received(count)
        self.shared.turns.took(self, count)
        self._heard_at = asyncio.get_running_loop().time()
        return not self.peer.is_closing

    def _read(self, events: list[Any], count: int) -> None:
        if events:
            self.unanswered = 0
        self.inbox.take(events)
        if not self.is_admitted and not self.peer.is_closing and not self.shared.gate.received(self, count):
            self.dialect.disconnect(Ending.UNAUTHORIZED)
        if not self.inbox.is_waiting:
            self.expect(is_next=bool(events))
        if self.replies.is_full:
            self.peer.hold()

    @guarded
    def read_on(self) -> None:
        """Read from the client again, unless something else is in the way."""
        if not (self.inbox.is_busy or self.replies.is_full or self.is_ending):
            self.peer.read_on()

    def expect(self, *, is_next: bool) -> None:
        """Claim room for the event that has begun, if it is large. `is_next`: the one before it is handled."""
        length = self.dialect.codec.expected
        if length <= SMALL_BYTES:
            length = 0
        if length == self._expected and not (length and is_next):
            return
        if self._expected:
            self.shared.arrivals.release(self)
        self._expected = length
        if length and not self.peer.is_closing:
            self.shared.arrivals.claim(self, length)

    async def work(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long, for a client that waits for the result, in a worker thread. If the client
        has left when its turn comes, end the connection instead: a crowd of clients that send large frames and leave
        would keep the workers busy for minutes."""
        async with self.shared.tasks.working:
            if self.peer.has_left:
                self.abort()
                raise Closed("the client has left")
            return await asyncio.to_thread(function, *args, **kwargs)

    def refused_publishes(self, count: int, error: PenstockError | str) -> None:
        """Count messages that are not stored, and whose publisher is told."""
        self.shared.counters.failed_publishes += count
        self.shared.journal.refused_publish(self, count, error)

    # From the broker.

    @property
    def is_open(self) -> bool:
        return self.peer.is_open

    @property
    def takes_unstored(self) -> bool:
        return self.peer.takes_unstored

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        self.call(self.dialect.send, member, place, run, attempts)

    def fail(self, member: Member, error: PenstockError) -> None:
        self.call(self.dialect.fail, member, error)

    def send_in_turn(self, run: Run, write: Callable[[], None]) -> None:
        """Call `write`, which encodes and writes a run, now or in a later turn of the loop."""
        size, peer = batch_bytes(run), self.peer
        if not (peer.is_paused or peer.has_waiting) and self.shared.turns.may_send(size):
            write()
            return
        peer.write_later(size, self.guard(write))
        if not peer.is_paused:  # else it waits until the client reads: see `resume_writing`
            self.shared.turns.wait(self, size)

    def send_waiting(self) -> int:
        """Send what waited for its turn, as far as there is room. Return how many bytes that is."""
        was_open = self.peer.is_open
        size = self.peer.write_waiting()
        if not (was_open or self.peer.is_paused or self.peer.is_closing):
            self.resume_writing()
        return size

    def unsubscribe(self, key: Any) -> None:
        held = self.subscriptions.pop(key, None)
        if held is not None:
            self.leave(*held)

    def leave(self, member: Member, reader: Subscription | Group) -> None:
        if isinstance(reader, Group):
            self.broker.groups.leave(reader, member)
        else:
            self.broker.subscriptions.unsubscribe(reader, member)

    # From the server.

    @guarded
    def ping(self) -> None:
        """Ask whether the client is still there, and close the connection if it does not answer."""
        now = asyncio.get_running_loop().time()
        self.ping_at = now + self.dialect.keep_alive(now - self._heard_at)

    def close_stale(self) -> None:
        self.shared.counters.stale += 1
        self.dialect.disconnect(Ending.STALE)

    @guarded
    def expire(self) -> None:
        """Close the connection: it was not admitted in time."""
        self.shared.counters.silent += 1
        self.dialect.disconnect(Ending.EXPIRED)

    @guarded
    def tell_lame_duck(self) -> None:
        if not self.peer.is_closing:
            for callback in self.at_lame_duck:
                callback()

    @guarded
    def stop(self) -> None:
        """Handle no more events, send the replies that are due, and close."""
        if self.is_ending or not self.is_connected or self.peer.is_closing:
            return
        self.peer.hold()
        for callback in self.at_stop:
            callback()
        self.is_ending = True
        if not self.inbox.is_waiting:
            self.say_goodbye()

    def say_goodbye(self) -> None:
        """Close the connection when the replies that are due are sent."""
        self.replies.finish(self.guard(partial(self.dialect.disconnect, Ending.STOPPED)))

    def finish(self, say: Callable[[], None]) -> None:
        """Handle no more events. When the replies that are due are sent, call `say`, and close."""
        self.is_ending = True
        self.peer.hold()
        self.replies.finish(self.guard(partial(self._close, say)))

    def _close(self, say: Callable[[], None]) -> None:
        if not self.peer.is_closing:
            say()
        self.peer.close()

    def abort(self) -> None:
        self.peer.abort()


def _has_not_published(_place: Place, _offset: int) -> bool:
    return False


def _take_steps(steps: Iterator[None]) -> bool:
    """Take some steps. Return whether there may be more."""
    return sum(1 for _ in islice(steps, END_STEPS)) == END_STEPS


async def _take_other_steps(steps: Iterator[None]) -> None:
    for count, _ in enumerate(steps):
        if count % END_STEPS == 0:
            await asyncio.sleep(0)
