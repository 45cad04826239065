"""QB, the Python broker's protocol, for one connection: what its nine kinds of messages do.

    CREATE_TOPIC         topic, partitions?, retention_hours?                    → ACK
    PUBLISH              topic, partition?, and properties that stay with it     → ACK when it is stored: its offset
    CREATE_SUBSCRIPTION  subscription_id, topic, start_offset?                   → ACK
    DELETE_SUBSCRIPTION  subscription_id                                         → ACK
    SUBSCRIBE            subscription_id, subscriber_id, auto_ack?               → ACK, then DATA
    UNSUBSCRIBE          subscriber_id, subscription_id?                         → ACK
    HEARTBEAT            user and password, or token, if the broker wants them   → HEARTBEAT
    ACK                  of a DATA: subscription_id, topic, partition, status?   not answered

A subscription is a shared group. A client of this protocol knows of no acknowledgement, so a message is done when it
is handed to its connection. One that says `auto_ack=false` acknowledges each, by `ack_deadline_ms` or with
`status=pending` if it needs more time; what it does not is delivered again. What it has when it says UNSUBSCRIBE goes
to the others, and was not delivered.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock import headers
from penstock.broker.group import Group, Mode
from penstock.broker.intake import Receipt, Stored
from penstock.broker.member import Member, Place
from penstock.broker.start import AtOffset
from penstock.errors import BadRequest, GroupConflict, PenstockError, TopicConflict, UnknownGroup, UnknownTopic
from penstock.run import Run
from penstock.server import calls
from penstock.server.gate import credentials
from penstock.server.pending_replies import SLICE_MESSAGES
from penstock.subject import is_pattern
from penstock.wire import prefixed
from penstock.wire.prefixed import Kind, Message

if TYPE_CHECKING:
    from penstock.server.prefixed import Frame, PrefixedSession

# Who says nothing for so long is asked. A subscriber that says nothing for as long again is gone; others are waited for
# so many times as long.
BEAT_S: Final = 30.0
SILENT_BEATS: Final = 10

# A client without acknowledgements that joins a subscription with a backlog gets it so long after the answer: the
# Python broker's own client drops messages that come before the thread that asked has read the answer.
SETTLE_S: Final = 0.25

# What the protocol itself says of a message. All other properties are the message's own, and kept as headers.
_OWN: Final = frozenset({"topic", "partition", "client_id", "publisher_id", "created_at", "version"})
_LINE: Final = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_HOUR_MS: Final = 3_600_000


class Qb:
    def __init__(self, session: PrefixedSession) -> None:
        self._session = session
        self._beat_s = min(BEAT_S, session.server.config.server.heartbeat_s)
        # For how long nothing had been heard when it was asked, if it was.
        self._asked_s: float | None = None
        # Subscriptions whose messages are done when they are sent.
        self._careless: set[str] = set()

    def credentials(self, frame: Frame) -> Mapping[str, Any] | None:
        if not isinstance(frame, Message) or frame.kind != Kind.HEARTBEAT:
            return None
        try:
            return credentials(prefixed.read_properties(frame.properties))
        except PenstockError:
            return None

    def deny(self, frame: Frame) -> None:
        assert isinstance(frame, Message), "the dialect is QB"
        if frame.kind == Kind.HEARTBEAT:
            self._refuse(frame.sequence, "Unauthorized: the broker does not know this user or token")
        else:
            self._refuse(frame.sequence, "Unauthorized: send a HEARTBEAT with user and password, or token, first")

    def do(self, frames: deque[Frame]) -> Coroutine[Any, Any, None] | None:
        message = frames[0]
        assert isinstance(message, Message), "the dialect is QB"
        if message.kind == Kind.PUBLISH:
            return self._publish(frames)
        frames.popleft()
        try:
            self._session.check_size(len(message.properties))
            properties = prefixed.read_properties(message.properties)
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
                    self._heartbeat(message.sequence, properties)
                case Kind.ACK:
                    self._ack(message.sequence, properties)
                case _:
                    raise BadRequest("Unknown message type")
        except PenstockError as error:
            self._refuse(message.sequence, str(error))
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
            topic = await calls.call(self._session.server, request)
        except TopicConflict as error:
            is_there = self._session.broker.topics.get(name.encode()) is not None
            raise TopicConflict(f"Topic '{name}' already exists" if is_there else str(error)) from None
        return {"topic": name, "partitions": topic["partitions"]}

    async def _create_subscription(self, properties: Mapping[str, str]) -> dict[str, object]:
        name, topic = _needed(properties, "subscription_id"), _needed(properties, "topic")
        offset = _number(properties, "start_offset", 0)
        broker, pattern = self._session.broker, topic.encode()
        if not is_pattern(pattern) or broker.topics.owner(pattern) is None:
            raise UnknownTopic(f"Topic '{topic}' does not exist")
        try:
            await broker.create_group(name.encode(), pattern, Mode.SHARED, start=AtOffset(offset))
        except GroupConflict:
            raise GroupConflict(f"Subscription '{name}' already exists") from None
        return {"subscription_id": name, "topic": topic, "start_offset": offset}

    async def _delete_subscription(self, properties: Mapping[str, str]) -> dict[str, object]:
        name = _needed(properties, "subscription_id")
        self._group(name)
        await self._session.broker.delete_group(name.encode())
        return {"subscription_id": name}

    async def _subscribe(self, properties: Mapping[str, str]) -> dict[str, object]:
        name, subscriber = _needed(properties, "subscription_id"), _needed(properties, "subscriber_id")
        group, session = self._group(name), self._session
        sid = subscriber.encode()
        if any(member.sid == sid and type(member.sink) is type(session) for member in group.members):
            raise GroupConflict(f"Subscriber '{subscriber}' already exists")
        if name in session.memberships:
            raise GroupConflict(f"Subscription '{name}' has this connection as a subscriber already")
        session.name = session.name or subscriber
        if properties.get("auto_ack", "true").lower() == "false":
            self._careless.discard(name)
        else:
            self._careless.add(name)
        member = Member(sid, session, session.server.flow)
        is_late = name in self._careless and group.lag() > 0
        if is_late:
            member.credit = 0
        await session.join(name, group, [member])
        if is_late:
            session.server.call_later(SETTLE_S, partial(self._begin_delivery, name, member))
        answer = {"subscription_id": name, "subscriber_id": subscriber, "topic": group.pattern.decode()}
        deadlines = [position.partition.policy.ack_deadline_ms for position in group.positions.values()]
        return {**answer, "ack_deadline_ms": min(deadlines, default=session.server.config.topic.ack_deadline_ms)}

    def _begin_delivery(self, name: str, member: Member) -> None:
        for each, group in self._session.memberships.get(name, ()):
            if each is member:
                member.credit = None
                group.wake()

    def _unsubscribe(self, properties: Mapping[str, str]) -> dict[str, object]:
        subscriber, only = _needed(properties, "subscriber_id"), properties.get("subscription_id")
        for name, memberships in list(self._session.memberships.items()):
            if only in (None, name) and any(member.sid == subscriber.encode() for member, _ in memberships):
                for member, group in memberships:
                    group.give_back(member)
                self._session.leave(name)
        answer: dict[str, object] = {"subscriber_id": subscriber}
        return answer if only is None else {**answer, "subscription_id": only}

    def _group(self, name: str) -> Group:
        group = self._session.broker.groups.get(name.encode())
        if group is None:
            raise UnknownGroup(f"Subscription '{name}' does not exist")
        if group.mode is not Mode.SHARED:
            raise GroupConflict(f"Subscription '{name}' is a group whose members have partitions of their own")
        return group

    # In.

    def _publish(self, frames: deque[Frame]) -> Coroutine[Any, Any, None] | None:
        """All that are to be published, as one run; one that chose its partition goes by itself."""
        run = Run([], [])
        sequences: list[int] = []
        # Topics that messages can go to, so that each is looked up once.
        known: dict[str, bytes] = {}
        while (
            len(run) < SLICE_MESSAGES and frames and run.partition is None and isinstance(message := frames[0], Message)
        ):
            if message.kind != Kind.PUBLISH:
                break
            try:
                self._session.check_size(len(message.properties))
                properties = prefixed.read_properties(message.properties)
                if sequences and "partition" in properties:
                    break
                self._add(run, message, properties, known)
                sequences.append(message.sequence)
            except PenstockError as error:
                self._refuse(message.sequence, str(error))
            frames.popleft()
        if not sequences:
            return None
        # The run is the broker's from now on, and grows.
        subjects = run.subjects.copy()
        return self._session.publish(run, lambda receipt: self._tell_published(subjects, sequences, receipt))

    def _add(self, run: Run, message: Message, properties: Mapping[str, str], known: dict[str, bytes]) -> None:
        topic = _needed(properties, "topic")
        if not (properties.get("publisher_id") or properties.get("client_id")):
            raise BadRequest("Missing 'publisher_id' property")
        if topic not in known:
            try:
                self._session.topic_of(topic.encode())
            except UnknownTopic:
                raise UnknownTopic(f"Topic '{topic}' does not exist") from None
            known[topic] = topic.encode()
        partition = _number(properties, "partition") if "partition" in properties else None
        block = b"".join([_header(name, value) for name, value in properties.items() if name not in _OWN])
        self._session.check_size(len(message.body), len(block))
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
        """One by one, but what they share is written once: they may be thousands."""
        style, now_us = self._session.style, self._session.broker.clock.now_us()
        end = b"created_at=%.3f\0version=1.0\0" % (now_us / 1e6)
        readers: dict[bytes, int] = {}
        parts = []
        for subject, sequence, stored in zip(subjects, sequences, receipt.stored(), strict=True):
            if not isinstance(stored, Stored):
                parts.append(self._ack_message(sequence, {"status": "error", "error": stored}))
                continue
            if subject not in readers:
                readers[subject] = self._session.broker.groups_reading(subject)
            properties = b"status=success\0topic=%b\0partition=%d\0offset=%d\0delivered_to=%d\0%b" % (
                subject,
                stored.partition,
                stored.offset,
                readers[subject],
                end,
            )
            parts.append(prefixed.message(Kind.ACK, sequence, now_us // 1000, properties, b"", style))
        self._session.peer.answer(b"".join(parts))

    # Out.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        name, group = self._session.group_of(member)
        self._session.send_in_turn(run, partial(self._write_messages, name, place, run, attempts))
        if name in self._careless:
            group.ack_many((place.topic_id, place.number), run.all_offsets(), _nobody_asked)

    def _write_messages(self, name: str, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        style = self._session.style
        common = prefixed.properties({"subscription_id": name, "partition": place.number})
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
            parts.append(prefixed.message(Kind.DATA, offset, time_ms, properties, run.values[index], style))
        self._session.peer.write(b"".join(parts))

    def fail(self, member: Member, error: PenstockError) -> None:
        """There is no word for it here. Who deletes a subscription knows; whatever else it is ends the connection."""
        name, _ = self._session.group_of(member)
        self._session.leave(name)
        if not isinstance(error, UnknownGroup):
            self.refuse(error)
            self._session.peer.close()

    def _ack(self, offset: int, properties: Mapping[str, str]) -> None:
        """It says what it is for as the DATA did; what it does not say must go without saying.

        What comes too late is delivered again: there is no word for it here.
        """
        only, topic, partition = properties.get("subscription_id"), properties.get("topic"), properties.get("partition")
        topics = self._session.broker.topics
        owner = None if topic is None else topics.owner(topic.encode())
        for name, memberships in self._session.memberships.items():
            for member, group in memberships if only in (None, name) else ():
                for place in group.positions:
                    if topic is not None and topics.by_id(place[0]) is not owner:
                        continue
                    if partition not in (None, str(place[1])):
                        continue
                    if properties.get("status") == "pending":
                        group.extend(place, offset, member)
                    else:
                        group.ack(place, offset, _nobody_asked)
                    return

    # Heartbeats.

    def _heartbeat(self, sequence: int, properties: Mapping[str, str]) -> None:
        self._session.name = self._session.name or properties.get("client_id", "")
        self._send_heartbeat(sequence)

    def beat(self, silent_s: float) -> float:
        if silent_s < self._beat_s:
            self._asked_s = None
        elif self._asked_s is None:
            # Also after a moment in which this server itself was away: nobody is dropped who was not asked.
            self._asked_s = silent_s
            self._send_heartbeat(0)
        elif silent_s - self._asked_s >= self._beat_s * (1 if self._session.memberships else SILENT_BEATS - 1):
            self._session.server.counters.stale += 1
            self._session.peer.close()
        return self._beat_s / 2

    def _send_heartbeat(self, sequence: int) -> None:
        now_ms = self._session.broker.clock.now_us() // 1000
        self._session.peer.answer(prefixed.message(Kind.HEARTBEAT, sequence, now_ms, style=self._session.style))

    def end(self) -> None:
        """Its memberships end with the connection."""

    # Answers.

    def refuse(self, error: PenstockError) -> None:
        self._refuse(0, str(error))

    async def _answer_later(self, message: Message, coroutine: Coroutine[Any, Any, dict[str, object]]) -> None:
        try:
            self._answer(message.sequence, await coroutine)
        except PenstockError as error:
            self._refuse(message.sequence, str(error))

    def _answer(self, sequence: int, fields: Mapping[str, object]) -> None:
        self._session.peer.answer(self._ack_message(sequence, {"status": "success", **fields}))

    def _refuse(self, sequence: int, reason: str) -> None:
        self._session.peer.answer(self._ack_message(sequence, {"status": "error", "error": reason}))

    def _ack_message(self, sequence: int, fields: Mapping[str, object]) -> bytes:
        now_us = self._session.broker.clock.now_us()
        told = {name: str(value).replace("\0", " ") for name, value in fields.items()}
        properties = prefixed.properties({**told, "created_at": f"{now_us / 1e6:.3f}", "version": "1.0"})
        return prefixed.message(Kind.ACK, sequence, now_us // 1000, properties, style=self._session.style)


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
    """A property as a line among the headers."""
    if ":" in name or name != name.strip() or not _LINE.fullmatch(name + value):
        raise BadRequest(f"Invalid property {name!r}: it must fit into a line, and its name has no colon")
    return f"{name}: {value}\r\n".encode()


def _properties(run: Run, index: int, attempts: Mapping[int, int]) -> bytes:
    """The headers of a message as properties, and its key; what can be none is left out."""
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


def _nobody_asked(_error: PenstockError | None) -> None:
    pass
