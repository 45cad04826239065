"""QB for one connection: what each kind of message does."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Final

from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.intake import Receipt, Stored
from penstock.broker.member import Member, Place
from penstock.broker.start import AtOffset
from penstock.doors.dialect import ConnectionType, Ending
from penstock.doors.gate import credentials
from penstock.doors.prefixed import Memberships, admit, disconnect, open_reader, topic_of
from penstock.doors.publishing import SLICE_MESSAGES, publish
from penstock.doors.session import Session
from penstock.errors import BadRequest, GroupConflict, PenstockError, TopicConflict, UnknownGroup, UnknownTopic
from penstock.model import headers
from penstock.model.run import Run, payload_bytes
from penstock.model.subject import is_pattern
from penstock.outcome import Outcome
from penstock.security.permissions import Action
from penstock.wire import qb
from penstock.wire.qb import Kind, QbMessage

# A client that is silent for this long is asked for a sign of life. A subscriber that is silent for as long again is
# gone; other clients have this many times as long.
BEAT_S: Final = 30.0
SILENT_BEATS: Final = 10

# A client without acknowledgements that joins a subscription with a backlog gets it this long after the reply: the
# Python broker's own client drops messages that come before the thread that asked has read the reply.
SETTLE_S: Final = 0.25

# Properties of the protocol. All others belong to the message, and are stored as headers.
_OWN: Final = frozenset({"topic", "partition", "client_id", "publisher_id", "created_at", "version"})
_LINE: Final = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_HOUR_MS: Final = 3_600_000


class Qb:
    """It has more than 25 methods: those of a dialect, and one for each command."""

    type: ConnectionType = "prefixed"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._broker = session.broker
        self.codec = open_reader(session)
        self._memberships = Memberships(session)
        self._beat_s = min(BEAT_S, session.shared.settings.heartbeat_s)
        session.ping_at = asyncio.get_running_loop().time() + self._beat_s / 2
        # How long the client had been silent when it was asked, if it was.
        self._asked_s: float | None = None
        # Subscriptions whose messages are done when they are sent.
        self._auto_acked: set[str] = set()

    def credentials(self, event: QbMessage) -> Mapping[str, Any] | None:
        if event.kind != Kind.HEARTBEAT:
            return None
        try:
            return credentials(qb.read_properties(event.properties))
        except PenstockError:
            return None

    def admitted(self) -> None:
        admit(self._session, self.codec)

    def deny(self, event: QbMessage, error: PenstockError) -> None:
        if event.kind == Kind.HEARTBEAT:
            self._refuse(event.sequence, f"Unauthorized: {error}")
        else:
            self._refuse(event.sequence, "Unauthorized: send a HEARTBEAT with user and password, or token, first")
        self._session.peer.close()

    def do(self, events: deque[QbMessage]) -> Coroutine[Any, Any, None] | None:
        if events[0].kind == Kind.PUBLISH:
            return self._publish(events)
        message = events.popleft()
        self._session.shared.settings.check_size(len(message.properties))
        properties = qb.read_properties(message.properties)
        match message.kind:
            case Kind.CREATE_TOPIC:
                return self._answer_later(message, self._create_topic(properties))
            case Kind.CREATE_SUBSCRIPTION:
                return self._answer_later(message, self._create_subscription(properties))
            case Kind.DELETE_SUBSCRIPTION:
                return self._answer_later(message, self._delete_subscription(properties))
            case Kind.SUBSCRIBE:
                return self._answer_later(message, self._subscribe(properties))
            case Kind.UNSUBSCRIBE:
                self._answer(message.sequence, self._unsubscribe(properties))
            case Kind.HEARTBEAT:
                self._session.name = self._session.name or properties.get("client_id", "")
                self._send_heartbeat(message.sequence)
            case Kind.ACK:
                self._ack(message.sequence, properties)
            case _:
                raise BadRequest("Unknown message type")
        return None

    # Topics and subscriptions.

    async def _create_topic(self, properties: Mapping[str, str]) -> dict[str, object]:
        name = _needed(properties, "topic")
        request: dict[str, Any] = {"call": "create_topic", "name": name}
        if "partitions" in properties:
            request["partitions"] = _number(properties, "partitions")
        if hours := _number(properties, "retention_hours", 0):
            request["policy"] = {"retain_ms": hours * _HOUR_MS}
        try:
            topic = await self._session.shared.calls.call(request, self._session.identity)
        except TopicConflict as error:
            is_there = self._broker.topics.get(name.encode()) is not None
            raise TopicConflict(f"Topic '{name}' already exists" if is_there else str(error)) from None
        return {"topic": name, "partitions": topic["partitions"]}

    async def _create_subscription(self, properties: Mapping[str, str]) -> dict[str, object]:
        name, topic = _needed(properties, "subscription_id"), _needed(properties, "topic")
        offset = _number(properties, "start_offset", 0)
        broker, pattern = self._broker, topic.encode()
        self._session.authorize_join(name.encode(), pattern)
        if not is_pattern(pattern) or broker.topics.owner(pattern) is None:
            raise UnknownTopic(f"Topic '{topic}' does not exist")
        try:
            await broker.groups.create(name.encode(), pattern, Mode.SHARED, start=AtOffset(offset))
        except GroupConflict:
            raise GroupConflict(f"Subscription '{name}' already exists") from None
        return {"subscription_id": name, "topic": topic, "start_offset": offset}

    async def _delete_subscription(self, properties: Mapping[str, str]) -> dict[str, object]:
        name = _needed(properties, "subscription_id")
        self._session.authorize(Action.GROUP_DELETE, name.encode())
        self._group(name)
        await self._broker.groups.delete(name.encode())
        return {"subscription_id": name}

    async def _subscribe(self, properties: Mapping[str, str]) -> dict[str, object]:
        name, subscriber = _needed(properties, "subscription_id"), _needed(properties, "subscriber_id")
        self._session.authorize(Action.GROUP_JOIN, name.encode())
        group, session = self._group(name), self._session
        session.authorize_join(group.name, group.pattern)
        sid = subscriber.encode()
        if any(member.sid == sid and _is_qb(member) for member in group.members):
            raise GroupConflict(f"Subscriber '{subscriber}' already exists")
        if name in self._memberships:
            raise GroupConflict(f"Subscription '{name}' has this connection as a subscriber already")
        session.name = session.name or subscriber
        if properties.get("auto_ack", "true").lower() == "false":
            self._auto_acked.discard(name)
        else:
            self._auto_acked.add(name)
        member = Member(sid, session, session.shared.settings.flow)
        is_late = name in self._auto_acked and group.lag() > 0
        if is_late:
            member.credit = 0
        await self._memberships.join(name, group, [member])
        if is_late:
            asyncio.get_running_loop().call_later(SETTLE_S, session.guard(partial(self._begin_delivery, member)))
        answer = {"subscription_id": name, "subscriber_id": subscriber, "topic": group.pattern.decode()}
        deadlines = [position.partition.policy.ack_deadline_ms for position in group.positions.values()]
        return {**answer, "ack_deadline_ms": min(deadlines, default=session.shared.settings.ack_deadline_ms)}

    def _begin_delivery(self, member: Member) -> None:
        for _, each, group in self._memberships:
            if each is member:
                member.credit = None
                group.wake()

    def _unsubscribe(self, properties: Mapping[str, str]) -> dict[str, object]:
        subscriber, only = _needed(properties, "subscriber_id"), properties.get("subscription_id")
        for name, member, group in self._memberships:
            if only in (None, name) and member.sid == subscriber.encode():
                group.release_all(member)
                self._memberships.leave(name)
        answer: dict[str, object] = {"subscriber_id": subscriber}
        return answer if only is None else {**answer, "subscription_id": only}

    def _group(self, name: str) -> Group:
        group = self._broker.groups.get(name.encode())
        if group is None:
            raise UnknownGroup(f"Subscription '{name}' does not exist")
        if group.mode is not Mode.SHARED:
            raise GroupConflict(f"Subscription '{name}' is a group whose members have partitions of their own")
        return group

    # In.

    def _publish(self, events: deque[QbMessage]) -> Coroutine[Any, Any, None] | None:
        """Publish all messages in a row as one run. A message that names its partition goes alone."""
        run = Run([], [])
        sequences: list[int] = []
        # Topics that can be published to: each is looked up once.
        known: dict[str, bytes] = {}
        while len(run) < SLICE_MESSAGES and events and run.partition is None:
            message = events[0]
            if message.kind != Kind.PUBLISH:
                break
            try:
                self._session.shared.settings.check_size(len(message.properties))
                properties = qb.read_properties(message.properties)
                if sequences and "partition" in properties:
                    break
                self._add(run, message, properties, known)
                sequences.append(message.sequence)
            except PenstockError as error:
                self._refuse(message.sequence, str(error))
            events.popleft()
        if not sequences:
            return None
        # The run belongs to the broker from now on, and grows.
        subjects = run.subjects.copy()
        receipt, waits = publish(self._session, run)
        receipt.outcome.then(self._session.guard(lambda _: self._tell_published(subjects, sequences, receipt)))
        return waits

    def _add(self, run: Run, message: QbMessage, properties: Mapping[str, str], known: dict[str, bytes]) -> None:
        topic = _needed(properties, "topic")
        if not (properties.get("publisher_id") or properties.get("client_id")):
            raise BadRequest("Missing 'publisher_id' property")
        if topic not in known:
            self._session.authorize_publish(topic.encode())
            try:
                topic_of(self._session, topic.encode())
            except UnknownTopic:
                raise UnknownTopic(f"Topic '{topic}' does not exist") from None
            known[topic] = topic.encode()
        partition = _number(properties, "partition") if "partition" in properties else None
        block = b"".join([_header(name, value) for name, value in properties.items() if name not in _OWN])
        self._session.shared.settings.check_size(len(message.body), len(block))
        time_us = message.timestamp_ms * 1000
        if time_us > headers.TIME_US_MAX:
            raise BadRequest("Invalid timestamp: it is milliseconds since 1970")
        index = len(run)
        run.subjects.append(known[topic])
        run.values.append(message.body)
        run.partition = partition
        if block:
            run.headers[index] = block
        if time_us:
            run.times[index] = time_us

    def _tell_published(self, subjects: list[bytes], sequences: list[int], receipt: Receipt) -> None:
        """Acknowledge each message. What they share is encoded once: they may be thousands."""
        style, now_us = self.codec.style, self._broker.clock.now_us()
        end = b"created_at=%.3f\0version=1.0\0" % (now_us / 1e6)
        readers: dict[bytes, int] = {}
        parts = []
        for subject, sequence, stored in zip(subjects, sequences, receipt.stored(), strict=True):
            if not isinstance(stored, Stored):
                parts.append(self._ack_message(sequence, {"status": "error", "error": stored}))
                continue
            if subject not in readers:
                readers[subject] = len(self._broker.groups.served(subject))
            properties = b"status=success\0topic=%b\0partition=%d\0offset=%d\0delivered_to=%d\0%b" % (
                subject,
                stored.partition,
                stored.offset,
                readers[subject],
                end,
            )
            parts.append(qb.message(Kind.ACK, sequence, now_us // 1000, properties, b"", style))
        self._session.peer.answer(b"".join(parts))

    # Out.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        name, group = self._memberships.find(member)
        self._session.peer.count_sent(len(run), payload_bytes(run))
        self._session.send_in_turn(run, partial(self._write_messages, name, place, run, attempts))
        if name in self._auto_acked:
            group.ack_many((place.topic_id, place.number), run.all_offsets(), Outcome())

    def _write_messages(self, name: str, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        style = self.codec.style
        common = qb.properties({"subscription_id": name, "partition": place.number})
        parts = []
        for index, offset in enumerate(run.all_offsets()):
            time_us = run.time_us(index)
            # The protocol's own come last, and so they count.
            properties = b"%btopic=%b\0%bcreated_at=%.3f\0version=1.0\0" % (
                _properties(run, index, attempts or {}),
                run.subjects[index],
                common,
                time_us / 1e6,
            )
            time_ms = max(0, time_us) // 1000
            parts.append(qb.message(Kind.DATA, offset, time_ms, properties, run.values[index], style))
        self._session.peer.write(b"".join(parts))

    def fail(self, member: Member, error: PenstockError) -> None:
        """End a membership. A client that deletes a subscription knows. The protocol has no word for other errors, so
        they end the connection."""
        name, _ = self._memberships.find(member)
        self._memberships.leave(name)
        if not isinstance(error, UnknownGroup):
            self._refuse(0, str(error))
            self._session.peer.close()

    def _ack(self, offset: int, properties: Mapping[str, str]) -> None:
        """Acknowledge the first message that matches what the ACK says, as the DATA did. An ACK that comes too late is
        ignored, and the message is redelivered."""
        only, topic, partition = properties.get("subscription_id"), properties.get("topic"), properties.get("partition")
        topics = self._broker.topics
        owner = None if topic is None else topics.owner(topic.encode())
        for name, member, group in self._memberships:
            for place in group.positions if only in (None, name) else ():
                if topic is not None and topics.by_id(place[0]) is not owner:
                    continue
                if partition not in (None, str(place[1])):
                    continue
                if properties.get("status") == "pending":
                    group.extend(place, offset, member)
                else:
                    group.ack(place, offset, Outcome())
                return

    # Keep-alive and the end.

    def keep_alive(self, silent_s: float) -> float:
        if silent_s < self._beat_s:
            self._asked_s = None
        elif self._asked_s is None:
            # Also after a pause of this server itself: no client is dropped that was not asked.
            self._asked_s = silent_s
            self._send_heartbeat(0)
        elif silent_s - self._asked_s >= self._beat_s * (1 if self._memberships else SILENT_BEATS - 1):
            self._session.close_stale()
        return self._beat_s / 2

    def _send_heartbeat(self, sequence: int) -> None:
        now_ms = self._broker.clock.now_us() // 1000
        self._session.peer.answer(qb.message(Kind.HEARTBEAT, sequence, now_ms, style=self.codec.style))

    def disconnect(self, reason: Ending | PenstockError) -> None:
        disconnect(self._session, reason, lambda error: self._refuse(0, str(error)))

    # Replies.

    def refuse(self, event: QbMessage | None, error: PenstockError) -> None:
        self._refuse(0 if event is None else event.sequence, str(error))

    async def _answer_later(self, message: QbMessage, coroutine: Coroutine[Any, Any, dict[str, object]]) -> None:
        self._answer(message.sequence, await coroutine)

    def _answer(self, sequence: int, fields: Mapping[str, object]) -> None:
        self._session.peer.answer(self._ack_message(sequence, {"status": "success", **fields}))

    def _refuse(self, sequence: int, reason: str) -> None:
        self._session.peer.answer(self._ack_message(sequence, {"status": "error", "error": reason}))

    def _ack_message(self, sequence: int, fields: Mapping[str, object]) -> bytes:
        now_us = self._broker.clock.now_us()
        texts = {name: str(value).replace("\0", " ") for name, value in fields.items()}
        properties = qb.properties({**texts, "created_at": f"{now_us / 1e6:.3f}", "version": "1.0"})
        return qb.message(Kind.ACK, sequence, now_us // 1000, properties, style=self.codec.style)


def _is_qb(member: Member) -> bool:
    """Return whether a member is a subscriber of this protocol. Others choose their names themselves."""
    return isinstance(member.sink, Session) and isinstance(member.sink.dialect, Qb)


def _needed(properties: Mapping[str, str], name: str) -> str:
    value = properties.get(name)
    if not value:
        raise BadRequest(f"Missing '{name}' property")
    return value


def _number(properties: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = properties.get(name, None if default is None else str(default))
    if value is None or not value.isascii() or not value.isdigit() or len(value) > 18:
        raise BadRequest(f"Invalid '{name}' property: it must be a whole number from 0 on")
    return int(value)


def _header(name: str, value: str) -> bytes:
    """Return a property as a header line."""
    if ":" in name or name != name.strip() or not _LINE.fullmatch(name + value):
        raise BadRequest(f"Invalid property {name!r}: it must fit into a line, and its name has no colon")
    return f"{name}: {value}\r\n".encode()


def _properties(run: Run, index: int, attempts: Mapping[int, int]) -> bytes:
    """Return the headers and the key of a message as properties. Headers that cannot be properties are left out."""
    block = run.headers.get(index, b"")
    if index in run.keys:
        block = headers.named(block, penstock_key=run.keys[index])
    if index in attempts:
        block += headers.lines(delivery_count=attempts[index])
    parts = []
    for line in block.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon and name and name.strip() == name and b"=" not in name and b"\0" not in line:
            parts.append(b"%b=%b\0" % (name, value.removeprefix(b" ")))
    return b"".join(parts)
