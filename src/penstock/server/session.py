"""A connection at the text door: bytes to events, events to the broker, and what the broker says back to bytes.

Answers go out in the order of the questions. Those to a publish wait until it is as durable as its topic promises, and
all that come behind it wait with it: so a PONG says that everything before it is stored. It also comes behind the
messages that wait for the connection: those that it has published itself, and what it had not taken yet.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never

from penstock import headers
from penstock.batch import OFFSET_MAX
from penstock.broker.flow import Flow, Overflow
from penstock.broker.group import Group
from penstock.broker.history import History
from penstock.broker.intake import Receipt, Refusals
from penstock.broker.member import Member, Place
from penstock.broker.order import Publisher
from penstock.broker.partition import Partition
from penstock.broker.subscription import Subscription, select_matching
from penstock.broker.topic import RESERVED
from penstock.errors import BadRequest, BadSubject, PenstockError, TooManySubscriptions
from penstock.run import Run, payload_bytes
from penstock.server.connection import Connection
from penstock.server.pending_replies import is_long, slices
from penstock.subject import is_literal, is_route, matches
from penstock.wire import text
from penstock.wire.events import (
    Ack,
    Asked,
    Call,
    Connect,
    Event,
    FlowControl,
    Origin,
    Pull,
    Refused,
    Replay,
    Stats,
    Subscribe,
    Unsubscribe,
)

if TYPE_CHECKING:
    from penstock.server.server import Server

# Where nats-server puts the clients of a server without accounts.
ACCOUNT: Final = "$G"
# Lines that are parsed and done before others have a turn.
LINES_MAX: Final = 256
# With more than these, others have a turn after each PING.
SUBSCRIPTIONS_FEW: Final = 1000
# Runs of its own that a connection without echo is protected from: what it has on the way at once.
OWN_RUNS_MAX: Final = 1000
# Answers that wait for messages, or for the disk: with more, the connection is not read from.
ANSWERS_MAX: Final = 10_000
# How long a PONG waits for messages that the connection is slow to take.
PONG_S: Final = 30
# How long a PING of a client that writes it ahead of its publishes waits for the first of them, and for the last.
EARLY_PING_S: Final = 0.005
EARLY_PING_S_MAX: Final = 1.0
# With more of them, they are answered at once.
EARLY_PINGS_MAX: Final = 16
# Subjects that a connection pulls without a subscription; each has a position.
PULLS_MAX: Final = 100


class _Answer:
    """The place of an answer among the others; None: it is not known yet."""

    __slots__ = ("closes", "data", "follows", "waits")

    def __init__(self, data: bytes | None, *, closes: bool = False, follows: bool = False) -> None:
        self.data = data
        self.closes = closes
        # Whether it comes behind the messages that its connection has not taken yet; for how many readers it waits.
        self.follows = follows
        self.waits = 0


class Session(Connection, asyncio.Protocol):
    def __init__(self, server: Server, *, greets: bool) -> None:
        super().__init__(server)
        self.is_greeted = greets
        # How many of the server's PINGs have not been answered.
        self.unanswered = 0
        self.subscriptions: dict[bytes, tuple[Member, Subscription | Group]] = {}
        # Those that were unsubscribed, and have not yet received what was published before.
        self._leaving: dict[Member, Subscription] = {}
        self._parser = text.Parser(
            server.config.server.payload_bytes_max, needs_connect=server.gate.needs_auth, lines_max=LINES_MAX
        )
        self._verbose = True
        self._pedantic = False
        self._has_headers = True
        self._wants_no_responders = False
        # Whether the first PONG is followed by INFO, for clients that say they understand it; whether it was.
        self._wants_info = False
        self._takes_info = False
        # Whether the client writes a PING ahead of publishes that it has gathered; such PINGs that wait for them.
        self._pings_early = False
        self._early_pings = 0
        self._early_until = 0.0
        self._early_timer: asyncio.TimerHandle | None = None
        self._answers: deque[_Answer] = deque()
        # Events that wait for one that is being awaited; None: none is.
        self._waiting: deque[Event] | None = None
        # What this connection published last, if it does not want it back: place -> first and last offset of each run.
        self._published: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._is_publishing = False
        self._publisher = Publisher()
        # Where PULL has come to, for each subject.
        self._pulls: dict[bytes, History] = {}

    # From the transport.

    def data_received(self, data: bytes) -> None:
        self.received(len(data))
        if self.peer.is_closing:
            return
        events = self._parse(data)
        if events:
            self.unanswered = 0
            if self._waiting is not None:
                self._waiting.extend(events)
            else:
                self._handle(deque(events))
        if not self.is_admitted and not self.server.gate.received(self, len(data)):
            self._refuse("Authorization Violation")
        if self._waiting is None:
            self.expect(self._parser.expected, is_next=bool(events))
        if len(self._answers) > ANSWERS_MAX:
            self.peer.hold()

    def _parse(self, data: bytes) -> list[Event]:
        events = self._parser.feed(data)
        self.peer.in_messages, self.peer.in_bytes = self._parser.messages, self._parser.payload_bytes
        if self._early_pings or (events and self._pings_early and not self._wants_info):
            return self._put_pings_last(events)
        return events

    def _put_pings_last(self, events: list[Event]) -> list[Event]:
        """Move PINGs behind what the client had gathered when it sent them: what comes with them, or next.

        nats-py's `flush` writes its PING at once, and the publishes before it in the next turn of its loop. nats-server
        delivers messages within microseconds, so a client rarely notices. Here they are stored first: a `flush` would
        not cover them, and a `drain` would be over before they arrive.
        """
        others: list[Event] = [event for event in events if event is not Asked.PING]
        self._early_pings += len(events) - len(others)
        self._stop_early_timer()
        now = asyncio.get_running_loop().time()
        if self._early_pings and not self._early_until:
            self._early_until = now + EARLY_PING_S_MAX
        is_incomplete = self._parser.is_within if others else not self._parser.has_more
        if not is_incomplete or self._early_pings > EARLY_PINGS_MAX or now > self._early_until:
            return [*others, *self._early_events()]
        if not self._parser.is_within:
            self._early_timer = self.server.call_later(EARLY_PING_S, self.guard(self._take_early_pings))
        return others

    def _early_events(self) -> list[Event]:
        count, self._early_pings, self._early_until = self._early_pings, 0, 0.0
        return [Asked.PING] * count

    def _stop_early_timer(self) -> None:
        if self._early_timer is not None:
            self._early_timer.cancel()
            self._early_timer = None

    def _take_early_pings(self) -> None:
        """Nothing came behind them."""
        self._stop_early_timer()
        events = self._early_events()
        if self._waiting is not None:
            self._waiting.extend(events)
        else:
            self._handle(deque(events))

    def pause_writing(self) -> None:
        self.peer.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.read_on()
        for reader in [*(reader for _, reader in self.subscriptions.values()), *self._leaving.values()]:
            reader.wake()

    def end(self) -> Iterator[None]:
        self._parser.clear()
        self._answers.clear()
        self._stop_early_timer()
        for sid in list(self.subscriptions):
            self.call(self._unsubscribe, sid)
            yield
        for held in list(self._leaving.items()):
            self.call(self._leave, *held)
            yield

    def tell_fault(self) -> None:
        self.peer.write(text.error("Internal Error", is_nats=self._parser.is_nats or self.is_greeted))

    def read_on(self) -> None:
        if self._waiting is None and len(self._answers) <= ANSWERS_MAX:
            self.peer.read_on()

    # From the broker.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        if attempts is not None:
            run = self._with_attempts(run, attempts)
        if self._parser.is_nats:
            told = run if member.out is None else self._with_ack_subject(member, place, run)
            self.send_in_turn(run, partial(self._write_messages, told, member.sid))
        else:
            self.send_in_turn(run, partial(self._write_numbered, place, run, member.sid))
        if member.remaining == 0:
            self._has_all(member)

    def _write_messages(self, run: Run, sid: bytes) -> None:
        if self._has_headers:
            run = text.with_names(run)
        self.peer.count_sent(len(run), text.payload_bytes(run, has_headers=self._has_headers))
        self.peer.write(text.messages(run, sid, has_headers=self._has_headers))

    def _write_numbered(self, place: Place, run: Run, sid: bytes) -> None:
        self.peer.count_sent(len(run), payload_bytes(run))
        self.peer.write(text.numbered_messages(run, sid, self._sequences(place, run)))

    def _has_all(self, member: Member) -> None:
        """The member has as many messages as it wanted."""
        held = self.subscriptions.get(member.sid)
        if held is not None and held[0] is member:
            self._unsubscribe(member.sid)
        elif member in self._leaving:
            self._leave(member, self._leaving[member])

    def has_published(self, place: Place, offset: int) -> bool:
        if not place.keeps:
            # What is not kept is delivered while it is published, unless it had to wait.
            return place is self._publisher.live or (place is self.broker.live and self._is_publishing)
        own = self._published.get((place.topic_id, place.number), [])
        at = bisect_right(own, (offset, OFFSET_MAX)) - 1
        return at >= 0 and offset <= own[at][1]

    def fail(self, _member: Member, error: PenstockError) -> None:
        self._refuse(f"{error.code} {error}")

    # For the server.

    def ping(self) -> None:
        """Ask whether anyone is there; whoever does not answer twice is not."""
        if not self._parser.is_nats:
            return
        if self.unanswered >= 2:
            self.server.counters.stale += 1
            self._refuse("Stale Connection")
            return
        self.unanswered += 1
        self.peer.write(b"PING\r\n")

    def expire(self) -> None:
        """It has had its time to say something."""
        self.server.counters.silent += 1
        self._refuse("Authentication Timeout" if self.server.needs_auth else "Connection Timeout")

    def tell_lame_duck(self) -> None:
        if self._takes_info and not self.peer.is_closing:
            self._answer(text.info(self.server.info(self)))

    def stop(self) -> None:
        """The server stops: no more commands, but the answers that are owed."""
        if self.peer.is_closing:
            return
        self.peer.hold()
        if self._early_pings:
            self._take_early_pings()
        if self._parser.is_nats:
            # No error: a NATS client takes one for the end, and would not come back.
            self._answer(b"" if self.server.is_lame_duck else text.info(self.server.info(self)), closes=True)
        else:
            self._answer(text.error("Server Shutdown", is_nats=False), closes=True)

    # Events.

    def _handle(self, events: deque[Event]) -> None:
        while events and not self.peer.is_closing:
            event = events.popleft()
            waits = self._do(event)
            if waits is not None:
                self._waiting = events
                self.peer.hold()
                self.spawn(self._wait(waits))
                return
        if self._parser.has_more and not self.peer.is_closing:
            # Let the others have a turn.
            self._waiting = events
            self.peer.hold()
            self.spawn(self._wait(asyncio.sleep(0)))

    async def _wait(self, waits: Coroutine[Any, Any, None]) -> None:
        """Let an event take its time; those behind it wait."""
        try:
            await waits
        except PenstockError as error:
            self._answer_error(error)
        events, self._waiting = self._waiting or deque(), None
        if self.peer.is_closing:
            return
        if not events and self._parser.has_more:
            events.extend(self._parse(b""))
        self._handle(events)
        if self._waiting is None:
            self.expect(self._parser.expected, is_next=True)
        self.read_on()

    def _do(self, event: Event) -> Coroutine[Any, Any, None] | None:
        """One event; what is still to be awaited, if anything is."""
        if not self.is_admitted:
            options = event.options if isinstance(event, Connect) else None
            if not self.server.gate.admit(self, options):
                self._refuse("Authorization Violation")
                return None
        match event:
            case Run():
                if event.is_live:
                    self._note_unstored(event)
                if event.replies and self._wants_no_responders:
                    self._tell_no_responders(event)
                if is_long(event):
                    return self._publish_slices(event)
                if self.broker.is_ready(event, self._publisher):
                    self._publish(event)
                else:
                    return self._prepare(event)
            case Asked.PING:
                self._pong()
                if len(self.subscriptions) > SUBSCRIPTIONS_FEW:
                    return asyncio.sleep(0)  # it was looked whether each of them is behind
            case Asked.PONG:
                pass
            case Subscribe():
                return self._subscribe(event)
            case Unsubscribe():
                self._end(event)
            case Ack():
                self._ack(event)
            case Call():
                self._call(event)
            case Connect():
                self._connect(event)
            case Asked.INFO:
                if not self._parser.is_nats:  # there it is the server's word
                    self._answer(text.info(self.server.info(self)))
            case FlowControl():
                self._control_flow(event)
            case Stats():
                self._stats(event)
            case Pull():
                return self._pull(event)
            case Replay():
                return self._replay(event)
            case Asked.MEMBERSHIP:
                self._answer(text.error("clustering not enabled", is_nats=self._parser.is_nats))
            case Refused():
                self._refused(event)
            case _:
                assert_never(event)
        return None

    def _connect(self, event: Connect) -> None:
        options = event.options
        # As in nats-server, the first two and `echo` are on unless the client turns them off.
        self._verbose = options.get("verbose") is not False
        self._pedantic = options.get("pedantic") is not False
        self.echo = options.get("echo") is not False
        self._has_headers = options.get("headers") is True
        self._wants_no_responders = options.get("no_responders") is True
        if self._wants_no_responders and not self._has_headers:
            self._refuse("no responders requires headers support")
            return
        protocol = options.get("protocol")
        self._wants_info = isinstance(protocol, int) and protocol >= 1
        self.name = options.get("name")
        # nats-py; its verbose clients need answers in the order of their commands.
        self._pings_early = options.get("lang") == "python3" and not self._verbose
        self._ok()

    def _pong(self) -> None:
        self._answers.append(_Answer(b"PONG\r\n", follows=True))
        self._send_answers()
        if self._wants_info:
            self._wants_info, self._takes_info = False, True
            self._answer(text.info({**self.server.info(self), "connect_info": True, "remote_account": ACCOUNT}))

    # Publish.

    async def _publish_slices(self, run: Run) -> None:
        for piece in slices(run):
            refusals = None
            if not self.broker.is_ready(piece, self._publisher):
                refusals = await self.broker.make_ready(piece, self._publisher)
            if self.peer.is_closing:
                return
            self._publish(piece, refusals)
            await asyncio.sleep(0)

    async def _prepare(self, run: Run) -> None:
        self._publish(run, await self.broker.make_ready(run, self._publisher))

    def _note_unstored(self, run: Run) -> None:
        """A message with a subject or reply that cannot be stored. As by nats-server, a pedantic client is told if the
        subject is not a literal one."""
        self.server.counters.unstored += len(run)
        for subject in run.subjects if self._pedantic else ():
            if not (is_route(subject) and is_literal(subject)):
                self._answer(text.error("Invalid Publish Subject", is_nats=True))

    def _publish(self, run: Run, refusals: Refusals | None = None) -> None:
        answer = _Answer(None)
        self._answers.append(answer)

        subjects = run.subjects

        def done(receipt: Receipt) -> None:
            answer.data = self._told(receipt, subjects)
            self._send_answers()

        self._is_publishing = True
        receipt = self.broker.publish(run, self.guard(done), refusals, self._publisher)
        self._is_publishing = False
        if not self.echo:
            for target, offset, indices in receipt.places:
                own = self._published.setdefault((target.topic_id, target.number), [])
                own.append((offset, offset + len(indices) - 1))
                if len(own) > 2 * OWN_RUNS_MAX:
                    del own[:OWN_RUNS_MAX]

    def _told(self, receipt: Receipt, subjects: Sequence[bytes]) -> bytes:
        """What a publisher is told of messages with these subjects, before the next PONG: so that says of each message
        before it that it is stored, or was named in an error."""
        if receipt.error is not None:
            self.refused_publishes(len(receipt.failed), receipt.error)
        reasons = {index: _reason(error) for index, error in receipt.failed.items()}
        if not self._parser.is_nats:
            return text.acknowledgements(receipt.count, list(receipt.duplicates), reasons)
        if not reasons:
            return text.acknowledgements(receipt.count) if self._verbose else b""
        if self._verbose:
            lines = [b"+OK\r\n"] * receipt.count
            for index, reason in reasons.items():
                lines[index] = text.violation("Publish", subjects[index], reason)
            return b"".join(lines)
        counts = Counter((subjects[index], reason) for index, reason in reasons.items())
        return b"".join(
            text.violation("Publish", subject, reason if count == 1 else f"{count} messages, {reason}")
            for (subject, reason), count in counts.items()
        )

    def _tell_no_responders(self, run: Run) -> None:
        besides = None if self.echo else self
        for index, reply in run.replies.items():
            if is_route(reply) and not self.broker.is_served(run.subjects[index], besides):
                self._tell_no_responder(run.subjects[index], reply)

    def _tell_no_responder(self, subject: bytes, reply: bytes) -> bool:
        for member, reader in self.subscriptions.values():
            # Not to a member of a queue group, as in nats-server.
            if not (isinstance(reader, Subscription) and reader.queue) and matches(reader.pattern, reply):
                self.peer.write(text.no_responders(reply, member.sid, subject))
                return True
        return False

    def _call(self, event: Call) -> None:
        self._acknowledge_by_subject(event)
        self._ok()

    def _forbid(self, verb: str, subject: bytes, error: PenstockError) -> None:
        reason = f"{error.code} {error}"
        is_nats = self._parser.is_nats
        self._answer(text.violation(verb, subject, reason) if is_nats else text.error(reason, is_nats=False))

    # Subscribe.

    def _subscribe(self, event: Subscribe) -> Coroutine[Any, Any, None] | None:
        if event.sid in self.subscriptions:
            # As nats-server has it: the first one stands.
            self._ok()
            return None
        if event.durable or not self._parser.is_nats:
            if event.subject.startswith(RESERVED):
                self._forbid("Subscription", event.subject, BadSubject("nothing is stored under subjects with a $"))
                return None
            return self._join(event)
        member = Member(event.sid, self, self.server.flow)
        try:
            self.subscriptions[event.sid] = (member, self.broker.subscribe(event.subject, member, event.group))
        except TooManySubscriptions as error:
            self._forbid("Subscription", event.subject, error)
            return None
        self._ok()
        return None

    async def _join(self, event: Subscribe) -> None:
        """As a member of a group, whose messages must be acknowledged."""
        member = Member(event.sid, self, self.server.flow)
        name = event.subject + b":" + event.group if event.group is not None else None
        try:
            group = await self.broker.join(name, event.subject, member)
        except PenstockError as error:
            self._forbid("Subscription", event.subject, error)
            return
        if not self.peer.is_connected:
            self.broker.leave(group, member)
            return
        self.subscriptions[event.sid] = (member, group)
        self._ok()

    def _end(self, event: Unsubscribe) -> None:
        held = self.subscriptions.get(event.sid)
        if held is not None:
            member, reader = held
            if isinstance(reader, Subscription) and member.credit is None:
                self._finish(member, reader, event.after)
            elif event.after is None or event.after <= member.delivered:
                self._unsubscribe(event.sid)
            else:
                member.remaining = event.after - member.delivered
        self._ok()

    def _finish(self, member: Member, reader: Subscription, after: int | None) -> None:
        """What was published before UNSUB is still delivered. Until then the sid may be used again."""
        if after is None:
            del self.subscriptions[member.sid]
        self._leaving[member] = reader

        def done() -> None:
            del self._leaving[member]
            if member not in reader.members and self.subscriptions.get(member.sid) == (member, reader):
                del self.subscriptions[member.sid]

        self.broker.finish(reader, member, self.guard(done), after=after)

    def _unsubscribe(self, sid: bytes) -> None:
        held = self.subscriptions.pop(sid, None)
        if held is not None:
            self._leave(*held)

    def _leave(self, member: Member, reader: Subscription | Group) -> None:
        if isinstance(reader, Group):
            self.broker.leave(reader, member)
        else:
            self.broker.unsubscribe(reader, member)

    # Acknowledge.

    def _sequences(self, place: Place, run: Run) -> range | list[int]:
        base = text.sequence_base(max(place.topic_id, 0), place.number)
        if run.offsets is None:
            return range(base + run.base_offset, base + run.base_offset + len(run))
        return [base + offset for offset in run.offsets]

    def _with_ack_subject(self, member: Member, place: Place, run: Run) -> Run:
        """A copy whose replies go to the acknowledgement of each message."""
        numbered = Run(run.subjects, run.values)
        numbered.headers = run.headers
        prefix = text.ACK_SUBJECT + member.sid + b"."
        numbered.replies = {
            index: b"%b%d" % (prefix, sequence) for index, sequence in enumerate(self._sequences(place, run))
        }
        return numbered

    def _with_attempts(self, run: Run, attempts: Mapping[int, int]) -> Run:
        """A copy that says of each message how often it was delivered, where there is a place for it."""
        told = copy(run)
        told.headers = dict(run.headers)
        for index, count in attempts.items():
            if index in told.headers or self._parser.is_nats:
                told.headers[index] = told.headers.get(index, b"") + headers.lines(delivery_count=count)
        return told

    def _ack(self, event: Ack) -> None:
        """It counts once it is stored, also if it was acknowledged before."""
        topic_id, partition, offset = text.split_sequence(event.sequence)
        answer = self._reserve()
        groups = [reader for _, reader in self.subscriptions.values() if isinstance(reader, Group)]
        if event.group is not None:
            groups = [self.broker.groups[event.group]] if event.group in self.broker.groups else []
        for group in groups:
            if group.ack((topic_id, partition), offset, self._when_saved(answer)):
                return
        reason = "unknown group" if event.group is not None and not groups else "not delivered, or a dead letter"
        answer.data = text.error(reason, is_nats=self._parser.is_nats)
        self._send_answers()

    def _when_saved(self, answer: _Answer) -> Callable[[PenstockError | None], None]:
        def saved(error: PenstockError | None) -> None:
            if error is None:
                answer.data = self._ok_line()
            else:
                answer.data = text.error(_reason(error), is_nats=self._parser.is_nats)
            self._send_answers()

        return self.guard(saved)

    def _acknowledge_by_subject(self, event: Call) -> None:
        """`$ACK.<sid>.<sequence>`, with what NATS clients write into it: nothing or +ACK, -NAK, +WPI, +TERM."""
        sid, _, number = event.subject.removeprefix(text.ACK_SUBJECT).rpartition(b".")
        held = self.subscriptions.get(sid)
        if held is None or not number.isdigit() or len(number) > 24 or not isinstance(held[1], Group):
            return
        member, group = held
        assert isinstance(group, Group)
        topic_id, partition, offset = text.split_sequence(int(number))
        place = (topic_id, partition)
        word, _, rest = event.value.partition(b" ")
        match word:
            case b"" | b"+ACK":
                answer = self._reserve()
                if not group.ack(place, offset, self._when_acked(answer, event.reply)):
                    # It comes again; whoever waits for a reply does not get one.
                    answer.data = b""
                    self._send_answers()
            case b"-NAK":
                delay_us, reason = _read_nak(rest)
                group.nack(place, offset, delay_us, member, reason=reason)
            case b"+WPI":
                group.extend(place, offset, member)
            case b"+TERM":
                group.kill(place, offset, member, reason=_read_reason(rest))

    def _when_acked(self, answer: _Answer, reply: bytes | None) -> Callable[[PenstockError | None], None]:
        """A client that asks for it (`ack_sync`) is told when the acknowledgement is stored."""

        def saved(error: PenstockError | None) -> None:
            answer.data = b""
            if error is not None:
                answer.data = text.error(_reason(error), is_nats=True)
            elif reply is not None:
                self.broker.publish(Run([reply], [b""]), lambda _: None)
            self._send_answers()

        return self.guard(saved)

    # Flow, statistics, history.

    def _control_flow(self, event: FlowControl) -> None:
        held = self.subscriptions.get(event.sid)
        if held is None:
            self._answer(text.error("unknown sid", is_nats=self._parser.is_nats))
            return
        member, reader = held
        if event.overflow in ("drop", "shed") and isinstance(reader, Group) and reader.name is not None:
            self._answer(text.error("a group that is remembered loses nothing: block", is_nats=self._parser.is_nats))
            return
        now = member.flow or self.server.flow
        flow = Flow(
            rate=now.rate if event.rate is None else event.rate,
            burst=now.burst if event.burst is None else event.burst,
            buffer=now.buffer if event.buffer is None else event.buffer,
            overflow=now.overflow if event.overflow is None else Overflow(event.overflow),
        )
        member.set_flow(flow, None if event.push else 0)
        reader.wake()
        mode = "PUSH" if event.push else "PULL"
        self._ok(f"mode={mode} rate={flow.rate:g} burst={flow.burst} buffer={flow.buffer}")

    def _stats(self, event: Stats) -> None:
        if event.sid is None:
            self._answer_stats({**self.statistics(), "server": self.server.statistics()})
        elif event.sid in self.subscriptions:
            self._answer_stats(self._member_statistics(event.sid))
        else:
            self._answer(text.error("unknown sid", is_nats=self._parser.is_nats))

    def _answer_stats(self, fields: dict[str, Any]) -> None:
        if self._parser.is_nats:
            self._answer(text.info({**self.server.info(self), "stats": fields}))
        else:
            self._answer(b"+STATS " + json.dumps(fields).encode() + b"\r\n")

    def summary(self) -> dict[str, Any]:
        return {**super().summary(), "unanswered": len(self._answers)}

    def statistics(self) -> dict[str, Any]:
        return {
            **self.summary(),
            "subscriptions": [self._member_statistics(sid) for sid in self.subscriptions],
        }

    def _member_statistics(self, sid: bytes) -> dict[str, Any]:
        member, reader = self.subscriptions[sid]
        flow = member.flow or self.server.flow
        tokens = member.bucket.tokens(self.broker.clock.monotonic_us()) if member.bucket else None
        buffered = reader.lag()
        usage = min(1.0, buffered / flow.buffer)
        return {
            "id": sid.decode(errors="replace"),
            "subject": reader.pattern.decode(errors="replace"),
            "mode": "PUSH" if member.credit is None else "PULL",
            "overflow": flow.overflow,
            "active": self.is_open,
            "rate_limit_tokens": tokens,
            "unacknowledged": member.out,
            "buffered": buffered,
            "dropped": member.dropped,
            "delivered": member.delivered,
            "buffer_usage": usage,
            "slow_consumer": usage > self.server.config.flow.slow_threshold,
        }

    async def _pull(self, event: Pull) -> None:
        """So many messages as there are, up to what is asked for."""
        for member, reader in self.subscriptions.values():
            if reader.pattern == event.subject and member.credit is not None:
                before = member.delivered
                member.credit = event.messages_max
                await reader.drain()
                member.credit = 0
                self._ok(str(member.delivered - before))
                return
        if self._parser.is_nats:
            self._answer(text.error("PULL needs a subscription in pull mode: FLOWCTL <sid> PULL", is_nats=True))
            return
        cursor = self._pulls.get(event.subject)
        if cursor is None and len(self._pulls) >= PULLS_MAX:
            self._answer(text.error("too many subjects are pulled", is_nats=False))
            return
        if cursor is None:
            cursor = self._pulls[event.subject] = History(self.broker, event.subject)
        self._ok(str(await self._send_history(cursor, event.messages_max, b"pull")))

    async def _replay(self, event: Replay) -> None:
        history = History(self.broker, b">")
        if event.origin in (Origin.MESSAGE, Origin.SEQUENCE) and not text.split_sequence(event.value)[0]:
            # No topic has the number 0: whoever asks so counts the messages of one stream.
            self._answer_error(
                BadRequest(
                    f"{event.value} is not a sequence: take one from a message that was delivered, or use REPLAY FIRST"
                )
            )
            return
        match event.origin:
            case Origin.MESSAGE:
                await history.seek_message(*text.split_sequence(event.value))
            case Origin.SEQUENCE:
                await history.seek_sequence(*text.split_sequence(event.value))
            case Origin.FIRST:
                pass
            case Origin.LAST:
                await history.seek_last()
            case Origin.TIME:
                await history.seek_time(event.value)
        self._ok(str(await self._send_history(history, event.messages_max, b"replay")))

    async def _send_history(self, history: History, count: int, sid: bytes) -> int:
        sent = 0
        while sent < count and not self.peer.is_closing:
            found = await history.read(count - sent)
            if found is None:
                break
            partition, run = found
            sent += self._send_run(partition, run, sid)
            await self.peer.drained()
        return sent

    def _send_run(self, partition: Partition, run: Run, sid: bytes) -> int:
        """Messages that no subscription asked for; a NATS client takes them only under a sid that it knows."""
        if not self._parser.is_nats:
            self._write_numbered(partition, run, sid)
            partition.sent += len(run)
            return len(run)
        sent = 0
        for member, reader in self.subscriptions.values():
            part = select_matching(run, reader.pattern)
            if part.values:
                self._write_messages(part, member.sid)
                sent += len(part)
        partition.sent += sent
        return sent

    # Answers.

    def _refused(self, event: Refused) -> None:
        self.server.counters.protocol_errors += 1
        if event.publish:
            self.refused_publishes(event.publish, event.reason)
        self._answer(text.error(event.reason, is_nats=self._parser.is_nats), closes=event.closes)

    def _refuse(self, reason: str) -> None:
        """Say why, and close."""
        self._answer(text.error(reason, is_nats=self._parser.is_nats or self.is_greeted), closes=True)

    def _answer_error(self, error: PenstockError) -> None:
        self._answer(text.error(f"{error.code} {error}", is_nats=self._parser.is_nats))

    def _ok(self, more: str = "") -> None:
        self._answer(self._ok_line(more))

    def _ok_line(self, more: str = "") -> bytes:
        if not self._verbose:
            return b""
        # NATS clients take no word behind it.
        return b"+OK\r\n" if self._parser.is_nats or not more else f"+OK {more}\r\n".encode()

    def _reserve(self) -> _Answer:
        answer = _Answer(None)
        self._answers.append(answer)
        return answer

    def _answer(self, data: bytes, *, closes: bool = False) -> None:
        if closes:
            # A connection that is closed has only the answers that are due.
            for answer in self._answers:
                answer.follows, answer.waits = False, 0
        if self._answers or closes:
            self._answers.append(_Answer(data, closes=closes))
            self._send_answers()
        elif data:
            self.peer.answer(data)

    def _send_answers(self) -> None:
        answers = self._answers
        before = len(answers)
        ready = []
        closes = False
        while answers and not closes and (data := answers[0].data) is not None:
            if answers[0].follows:
                self._wait_for_messages(answers[0])
            if answers[0].waits:
                break
            ready.append(data)
            closes = answers.popleft().closes
        data = b"".join(ready)
        if data:
            self.peer.answer(data)
        if closes:
            self._close()
        elif len(answers) <= ANSWERS_MAX < before:
            self.read_on()

    def _wait_for_messages(self, answer: _Answer) -> None:
        """Let an answer wait for the messages that the connection has not taken yet, as far as there are any now."""
        answer.follows = False
        behind = [
            (member, reader)
            for member, reader in [*self.subscriptions.values(), *self._leaving.items()]
            if isinstance(reader, Subscription) and reader.behind and member.credit is None and member.bucket is None
        ]
        if not behind:
            return

        def delivered() -> None:
            if answer.waits:
                answer.waits -= 1
                if not answer.waits:
                    self._send_answers()

        def give_up() -> None:
            if answer.waits:
                answer.waits = 0
                self._send_answers()

        # A client that gets no PONG for minutes takes the connection for dead, however busy it is with its backlog.
        self.server.call_later(min(PONG_S, self.server.config.server.heartbeat_s), self.guard(give_up))
        answer.waits = 1  # it is not sent before this returns
        for member, reader in behind:
            answer.waits += 1
            reader.when_delivered(member, reader.undelivered(), self.guard(delivered))
        answer.waits -= 1

    def _close(self) -> None:
        self._answers.clear()
        self.peer.close()


def _reason(error: PenstockError) -> str:
    return f"STORAGE {error.code} {error}"


def _read_nak(options: bytes) -> tuple[int, str]:
    """Return delay and reason of a NAK. NATS clients write the delay in nanoseconds: -NAK {"delay": 1000000000}; what
    is no JSON object is a reason."""
    if not options:
        return 0, ""
    try:
        fields = json.loads(options)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return 0, _read_reason(options)
    try:
        delay_us = int(fields.get("delay", 0)) // 1000
    except (ValueError, TypeError, OverflowError):
        delay_us = 0
    return min(max(0, delay_us), headers.DELAY_US_MAX), ""


def _read_reason(data: bytes) -> str:
    """`+TERM reason`, as NATS clients write it."""
    return data[: 4 * headers.REASON_BYTES_MAX].decode(errors="replace")
