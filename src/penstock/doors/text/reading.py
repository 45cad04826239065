"""SUB, UNSUB and deliveries; FLOWCTL and STATS; PULL and REPLAY."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.cursor import select_matching
from penstock.broker.flow import Flow, Overflow
from penstock.broker.group import Group
from penstock.broker.history import History
from penstock.broker.member import Member, Place
from penstock.broker.partition import Partition
from penstock.broker.subscription import Subscription
from penstock.broker.topic import is_reserved
from penstock.doors.replies import Reply
from penstock.doors.text import info
from penstock.errors import (
    BadRequest,
    BadSubject,
    PenstockError,
    PermissionDenied,
    QuotaExceeded,
    TooManySubscriptions,
)
from penstock.model import headers
from penstock.model.run import Run, payload_bytes
from penstock.security.permissions import Action
from penstock.wire import text
from penstock.wire.events import FlowControl, Pull, Replay, ReplayStart, Stats, Subscribe, Unsubscribe

if TYPE_CHECKING:
    from penstock.doors.text.dialect import Text

# How long a PONG waits for messages that the connection is slow to take.
PONG_S: Final = 30
# Subjects that a connection pulls without a subscription; each has a position.
PULLS_MAX: Final = 100


class Reading:
    def __init__(self, dialect: Text) -> None:
        self._dialect = dialect
        self._session = dialect.session
        self._broker = dialect.session.broker
        self._flow = dialect.session.shared.settings.flow
        # The position of PULL, for each subject.
        self._pulls: dict[bytes, History] = {}

    # SUB and UNSUB.

    def subscribe(self, event: Subscribe) -> Coroutine[Any, Any, None] | None:
        dialect, subscriptions = self._dialect, self._session.subscriptions
        if event.sid in subscriptions:
            # As in nats-server, the first one stays.
            dialect.ok()
            return None
        member = Member(event.sid, self._session, self._flow)
        try:
            if event.durable or not dialect.is_nats:
                name = event.subject + b":" + event.group if event.group is not None else None
                self._session.authorize_join(name, event.subject)
            else:
                self._session.restrict(member, event.subject)
        except PermissionDenied as error:
            self._deny(event, error)
            return None
        if event.durable or not dialect.is_nats:
            if is_reserved(event.subject):
                self._forbid(event.subject, BadSubject("nothing is stored under subjects with a $"))
                return None
            return self._join(event)
        try:
            subscriptions[event.sid] = (
                member,
                self._broker.subscriptions.subscribe(event.subject, member, event.group),
            )
        except (TooManySubscriptions, QuotaExceeded) as error:
            self._forbid(event.subject, error)
            return None
        dialect.ok()
        return None

    async def _join(self, event: Subscribe) -> None:
        """Become a member of a group, whose messages must be acknowledged."""
        member = Member(event.sid, self._session, self._flow)
        name = event.subject + b":" + event.group if event.group is not None else None
        try:
            group = await self._broker.groups.join(name, event.subject, member)
        except PenstockError as error:
            self._forbid(event.subject, error)
            return
        if not self._session.is_connected:
            self._broker.groups.leave(group, member)
            return
        self._session.subscriptions[event.sid] = (member, group)
        self._dialect.ok()

    def _forbid(self, subject: bytes, error: PenstockError) -> None:
        reason = f"{error.code} {error}"
        is_nats = self._dialect.is_nats
        self._session.replies.send(
            text.violation("Subscription", subject, reason) if is_nats else text.error(reason, is_nats=False)
        )

    def _deny(self, event: Subscribe, error: PermissionDenied) -> None:
        queue = b"" if event.group is None or event.durable else event.group
        self._session.replies.send(
            text.denied_subscription(event.subject, queue)
            if self._dialect.is_nats
            else text.error(f"{error.code} {error}", is_nats=False)
        )

    def unsubscribe(self, event: Unsubscribe) -> None:
        held = self._session.subscriptions.get(event.sid)
        if held is not None:
            member, reader = held
            if isinstance(reader, Subscription) and member.credit is None:
                self._finish(member, reader, event.after)
            elif event.after is None or event.after <= member.delivered:
                self._session.unsubscribe(event.sid)
            else:
                member.remaining = event.after - member.delivered
        self._dialect.ok()

    def _finish(self, member: Member, reader: Subscription, after: int | None) -> None:
        """End a subscription when it has received what was published before UNSUB. Its sid can be used again."""
        subscriptions, leaving = self._session.subscriptions, self._session.leaving
        if after is None:
            del subscriptions[member.sid]
        leaving[member] = reader

        def done() -> None:
            leaving.pop(member, None)
            if member not in reader.members and subscriptions.get(member.sid) == (member, reader):
                del subscriptions[member.sid]

        self._broker.subscriptions.finish(reader, member, self._session.guard(done), after=after)

    def has_all(self, member: Member) -> None:
        """End a subscription that has received as many messages as it wanted."""
        held = self._session.subscriptions.get(member.sid)
        if held is not None and held[0] is member:
            self._session.unsubscribe(member.sid)
        elif member in self._session.leaving:
            self._session.leave(member, self._session.leaving[member])

    def hold_for_backlog(self, reply: Reply) -> None:
        """Let a PONG wait for the messages that the connection has not taken yet, if there are any now."""
        behind = [
            (member, reader)
            for member, reader in [*self._session.subscriptions.values(), *self._session.leaving.items()]
            if isinstance(reader, Subscription) and reader.behind and member.credit is None and member.bucket is None
        ]
        if not behind:
            return
        replies, guard = self._session.replies, self._session.guard

        def delivered() -> None:
            if reply.holds:
                reply.holds -= 1
                if not reply.holds:
                    replies.flush()

        def give_up() -> None:
            if reply.holds:
                reply.holds = 0
                replies.flush()

        # A client that gets no PONG for minutes takes the connection for dead, however busy it is with its backlog.
        patience_s = min(PONG_S, self._session.shared.settings.heartbeat_s)
        asyncio.get_running_loop().call_later(patience_s, guard(give_up))
        reply.holds = 1  # it is not sent before this returns
        for member, reader in behind:
            reply.holds += 1
            reader.when_delivered(member, reader.undelivered(), guard(delivered))
        reply.holds -= 1

    # Deliveries.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        is_nats = self._dialect.is_nats
        checked = self._session.checked
        if checked is not None and run.replies and checked.replies_to_requests:
            for reply in run.replies.values():
                checked.expect_reply(reply)
        if attempts is not None:
            run = _with_attempts(run, attempts, is_nats=is_nats)
        if is_nats:
            sent = run if member.out is None else _with_ack_subjects(member, place, run)
            self._session.send_in_turn(run, partial(self._write_messages, sent, member.sid))
        else:
            self._session.send_in_turn(run, partial(self._write_numbered, place, run, member.sid))
        if member.remaining == 0:
            self.has_all(member)

    def _write_messages(self, run: Run, sid: bytes) -> None:
        has_headers, peer = self._dialect.has_headers, self._session.peer
        if has_headers:
            run = text.with_names(run)
        peer.count_sent(len(run), text.payload_bytes(run, has_headers=has_headers))
        peer.write(text.messages(run, sid, has_headers=has_headers))

    def _write_numbered(self, place: Place, run: Run, sid: bytes) -> None:
        self._session.peer.count_sent(len(run), payload_bytes(run))
        self._session.peer.write(text.numbered_messages(run, sid, _sequences(place, run)))

    # FLOWCTL and STATS.

    def control_flow(self, event: FlowControl) -> None:
        replies, error_line = self._session.replies, self._dialect.error_line
        held = self._session.subscriptions.get(event.sid)
        if held is None:
            replies.send(error_line("unknown sid"))
            return
        member, reader = held
        if event.overflow in ("drop", "shed") and isinstance(reader, Group) and reader.name is not None:
            replies.send(error_line("a group that is remembered loses nothing: block"))
            return
        now = member.flow or self._flow
        flow = Flow(
            rate=now.rate if event.rate is None else event.rate,
            burst=now.burst if event.burst is None else event.burst,
            buffer=now.buffer if event.buffer is None else event.buffer,
            overflow=now.overflow if event.overflow is None else Overflow(event.overflow),
        )
        member.set_flow(flow, None if event.push else 0)
        reader.wake()
        mode = "PUSH" if event.push else "PULL"
        self._dialect.ok(f"mode={mode} rate={flow.rate:g} burst={flow.burst} buffer={flow.buffer}")

    def statistics(self, event: Stats) -> None:
        subscriptions = self._session.subscriptions
        if event.sid is None:
            # They are of the whole server.
            self._session.authorize(Action.METRICS)
        if event.sid is not None and event.sid not in subscriptions:
            self._session.replies.send(self._dialect.error_line("unknown sid"))
            return
        if event.sid is not None:
            fields = self._statistics_of(event.sid)
        else:
            rows = [self._statistics_of(sid) for sid in subscriptions]
            server = self._session.shared.calls.statistics()
            fields = {**self._session.summary(), "subscriptions": rows, "server": server}
        if self._dialect.is_nats:
            self._session.replies.send(text.info({**info.fields(self._session), "stats": fields}))
        else:
            self._session.replies.send(b"+STATS " + json.dumps(fields).encode() + b"\r\n")

    def _statistics_of(self, sid: bytes) -> dict[str, Any]:
        member, reader = self._session.subscriptions[sid]
        flow = member.flow or self._flow
        tokens = member.bucket.tokens(self._broker.clock.monotonic_us()) if member.bucket else None
        buffered = reader.lag()
        usage = min(1.0, buffered / flow.buffer)
        return {
            "id": sid.decode(errors="replace"),
            "subject": reader.pattern.decode(errors="replace"),
            "mode": "PUSH" if member.credit is None else "PULL",
            "overflow": flow.overflow,
            "active": self._session.is_open,
            "rate_limit_tokens": tokens,
            "unacknowledged": member.out,
            "buffered": buffered,
            "dropped": member.dropped,
            "delivered": member.delivered,
            "buffer_usage": usage,
            "slow_consumer": usage > self._session.shared.settings.slow_threshold,
        }

    # PULL and REPLAY.

    async def pull(self, event: Pull) -> None:
        """Send as many messages as there are, up to the number that the client asks for."""
        dialect, replies = self._dialect, self._session.replies
        self._session.authorize(Action.SUBSCRIBE, event.subject)
        for member, reader in self._session.subscriptions.values():
            if reader.pattern == event.subject and member.credit is not None:
                before = member.delivered
                member.credit = event.messages_max
                await reader.drain()
                member.credit = 0
                dialect.ok(str(member.delivered - before))
                return
        if dialect.is_nats:
            replies.send(text.error("PULL needs a subscription in pull mode: FLOWCTL <sid> PULL", is_nats=True))
            return
        history = self._pulls.get(event.subject)
        if history is None and len(self._pulls) >= PULLS_MAX:
            replies.send(text.error("too many subjects are pulled", is_nats=False))
            return
        if history is None:
            history = self._pulls[event.subject] = History(self._broker, event.subject)
        dialect.ok(str(await self._send_history(history, event.messages_max, b"pull")))

    async def replay(self, event: Replay) -> None:
        history = History(self._broker, b">")
        if event.origin in (ReplayStart.MESSAGE, ReplayStart.SEQUENCE) and not text.split_sequence(event.value)[0]:
            # No topic has the number 0: this client counts the messages of one stream.
            raise BadRequest(
                f"{event.value} is not a sequence: take one from a message that was delivered, or use REPLAY FIRST"
            )
        match event.origin:
            case ReplayStart.MESSAGE:
                await history.seek_message(*text.split_sequence(event.value))
            case ReplayStart.SEQUENCE:
                await history.seek_sequence(*text.split_sequence(event.value))
            case ReplayStart.FIRST:
                pass
            case ReplayStart.LAST:
                await history.seek_last()
            case ReplayStart.TIME:
                await history.seek_time(event.value)
        self._dialect.ok(str(await self._send_history(history, event.messages_max, b"replay")))

    async def _send_history(self, history: History, count: int, sid: bytes) -> int:
        """Send stored messages as fast as the client takes them. Return how many."""
        peer = self._session.peer
        sent = 0
        while sent < count and not peer.is_closing:
            found = await history.read(count - sent)
            if found is None:
                break
            partition, run = found
            run = self._readable(run)
            if run.values:
                sent += self._send_run(partition, run, sid)
            await peer.drained()
        return sent

    def _readable(self, run: Run) -> Run:
        """Return the messages that the client may read."""
        checked = self._session.checked
        if checked is None:
            return run
        known = {subject: checked.may_read(subject) for subject in set(run.subjects)}
        if all(known.values()):
            return run
        indices = [index for index, subject in enumerate(run.subjects) if known[subject]]
        return run.select(indices) if indices else Run([], [])

    def _send_run(self, partition: Partition, run: Run, sid: bytes) -> int:
        """Send messages that no subscription asked for. A NATS client takes them only under a sid that it knows."""
        if not self._dialect.is_nats:
            self._write_numbered(partition, run, sid)
            partition.sent += len(run)
            return len(run)
        sent = 0
        for member, reader in self._session.subscriptions.values():
            part = select_matching(run, reader.pattern)
            if part.values:
                self._write_messages(part, member.sid)
                sent += len(part)
        partition.sent += sent
        return sent


def _sequences(place: Place, run: Run) -> range | list[int]:
    base = text.sequence_base(max(place.topic_id, 0), place.number)
    if run.offsets is None:
        return range(base + run.base_offset, base + run.base_offset + len(run))
    return [base + offset for offset in run.offsets]


def _with_ack_subjects(member: Member, place: Place, run: Run) -> Run:
    """Return a copy in which a reply to a message is its acknowledgement."""
    numbered = Run(run.subjects, run.values)
    numbered.headers = run.headers
    prefix = text.ACK_SUBJECT + member.sid + b"."
    numbered.replies = {index: b"%b%d" % (prefix, sequence) for index, sequence in enumerate(_sequences(place, run))}
    return numbered


def _with_attempts(run: Run, attempts: Mapping[int, int], *, is_nats: bool) -> Run:
    """Return a copy with the delivery attempt of each message in its headers, where there is a place for it."""
    counted = copy(run)
    counted.headers = dict(run.headers)
    for index, count in attempts.items():
        if index in counted.headers or is_nats:
            counted.headers[index] = counted.headers.get(index, b"") + headers.lines(delivery_count=count)
    return counted
