"""The Provider's dialect for one connection."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.group import Group
from penstock.broker.member import Deliveries, Member, Place, RefreshNotice
from penstock.broker.start import Start
from penstock.doors.binary.dialect import Binary
from penstock.doors.binary.frames import Frames
from penstock.doors.binary.producing import publish_run
from penstock.doors.dialect import ConnectionType, Ending
from penstock.errors import BadFrame, BadRequest, BadSubject, PenstockError, UnknownGroup
from penstock.model.run import Run, payload_bytes
from penstock.model.subject import is_pattern
from penstock.outcome import Outcome
from penstock.pipe import records
from penstock.wire import binary
from penstock.wire.binary import Frame, Type

if TYPE_CHECKING:
    from penstock.doors.session import Session

DEFAULT_TOPIC: Final = "default-topic"
DEFAULT_GROUP: Final = "default"
# A DATA frame is filled up to this size.
DATA_BYTES: Final = 1 << 20
# Frames that were sent and may still be acknowledged. With more, the messages of the oldest are redelivered.
FRAMES_MAX: Final = 10_000
# Subscriptions of one connection that wait for an answer to READY.
UNREADY_MAX: Final = 1000
# The latest time in milliseconds that fits into a signed number.
CREATED_MS_MAX: Final = (1 << 63) - 1

# The name of a topic, as it was subscribed to, and of a group.
_Names = tuple[bytes, bytes]


class _Sent(NamedTuple):
    subscription: int
    place: tuple[int, int]
    # The group's, when they were sent.
    generation: int
    offsets: list[int]


class Provider:
    """It has more than 25 methods: those of a dialect, and one for each frame in either direction."""

    type: ConnectionType = "binary"

    def __init__(self, session: Session) -> None:
        self._session = session
        self.codec = Frames(session)
        # What was sent in each DATA, by its ID, oldest first.
        self._sent: dict[int, _Sent] = {}
        # The batches whose BATCH_ACK has not come, oldest first. A client with an entry gets batches instead of DATA.
        self._batches: dict[_Names, deque[_Sent]] = {}
        # What the client was told of a refresh and has not answered, and of which group.
        self._notices: dict[int, tuple[bytes, RefreshNotice]] = {}
        # Subscriptions that begin when READY is answered, by its ID: the ID of SUBSCRIBE, and the names.
        self._unready: dict[int, tuple[int, _Names]] = {}
        self._names: dict[int, _Names] = {}
        self._last_id = 0
        self._subscriptions = 0

    # Frames.

    def credentials(self, _event: Frame) -> Mapping[str, Any] | None:
        return None

    def admitted(self) -> None:
        self.codec.admitted()

    def deny(self, _event: Frame, _error: PenstockError) -> None:
        self.disconnect(Ending.UNAUTHORIZED)

    def do(self, events: deque[Frame]) -> Coroutine[Any, Any, None] | None:
        if events[0].type == Type.HELLO:
            self._session.dialect = Binary(self._session, self.codec)
            return self._session.dialect.do(events)
        frame = events.popleft()
        match frame.type:
            case Type.DATA:
                return self._publish(frame.id, binary.read_request(frame.payload))
            case Type.SUBSCRIBE:
                return self._subscribe(frame.id, binary.read_request(frame.payload))
            case Type.COMMIT_OFFSET:
                self._commit(frame.id, binary.read_request(frame.payload))
            case Type.BATCH_ACK:
                self._ack_batch(binary.read_names(frame.payload))
            case Type.RESET_ACK | Type.READY_ACK if frame.payload:
                return self._answered_by_names(Type(frame.type), binary.read_names(frame.payload))
            case Type.ACK | Type.RESET_ACK | Type.READY_ACK:
                return self._answered(frame.id)
            case Type.HEARTBEAT:
                if frame.id:
                    self.codec.answer(binary.frame(Type.HEARTBEAT, frame.id))
            case Type.DISCONNECT:
                self._session.peer.close()
            case kind if kind > Type.HELLO:
                self.disconnect(BadFrame("say HELLO first"))
            case kind:
                self.disconnect(BadFrame(f"a frame of type {kind:#04x}, which a client does not send"))
        return None

    def refuse(self, _event: Frame | None, error: PenstockError) -> None:
        self.disconnect(error)

    def disconnect(self, reason: Ending | PenstockError) -> None:
        self.codec.disconnect(reason)

    def keep_alive(self, silent_s: float) -> float:
        return self.codec.keep_alive(silent_s, must_answer=False)

    # Deliveries.

    def send(self, member: Member, place: Place, run: Run, _attempts: Mapping[int, int] | None) -> None:
        number = int(member.sid)
        held = self._session.subscriptions.get(number)
        generation = held[1].state.generation if held is not None and isinstance(held[1], Group) else 0
        self._session.send_in_turn(run, partial(self._write_messages, number, generation, place, run))

    def fail(self, member: Member, error: PenstockError) -> None:
        self._session.unsubscribe(int(member.sid))
        self.disconnect(error)

    def _write_messages(self, number: int, generation: int, place: Place, run: Run) -> None:
        """Send as many frames as it takes."""
        self._session.peer.count_sent(len(run), payload_bytes(run))
        batches = self._batches.get(self._names[number])
        form, send = (_record, self._send_data) if batches is None else (_batch_record, self._send_batch)
        sent = _Sent(number, (place.topic_id, place.number), generation, [])
        records: list[bytes] = []
        size = 0
        for index, offset in enumerate(run.all_offsets()):
            record = form(run, index)
            if records and size + len(record) > DATA_BYTES:
                send(sent, records)
                sent = sent._replace(offsets=[])
                records, size = [], 0
            records.append(record)
            sent.offsets.append(offset)
            size += len(record)
        send(sent, records)

    def _send_data(self, sent: _Sent, records: list[bytes]) -> None:
        number = self._next_id()
        self._sent[number] = sent
        if len(self._sent) > FRAMES_MAX:
            del self._sent[next(iter(self._sent))]
        self.codec.write(binary.frame(Type.DATA, number, b"[%b]" % b",".join(records)))

    def _send_batch(self, sent: _Sent, records: list[bytes]) -> None:
        names = self._names[sent.subscription]
        batches = self._batches[names]
        if len(batches) >= FRAMES_MAX:
            # None can be forgotten: the acknowledgements behind it would be taken for those of others.
            self.disconnect(BadRequest(f"{FRAMES_MAX} batches were sent and no BATCH_ACK came"))
            return
        batches.append(sent)
        self.codec.write(binary.batch_frame(self._next_id(), records, *names))

    def _notify(self, group: bytes, notice: RefreshNotice) -> None:
        """Tell the client of a refresh."""
        number = self._next_id()
        self._notices[number] = group, notice
        self._write_topic(Type[notice.signal], number, notice.topic)

    def _write_topic(self, kind: Type, number: int, topic: bytes) -> None:
        self.codec.write(binary.json_frame(kind, number, {"topic": topic.decode()}))

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _publish(self, number: int, record: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        subject = str(record.get("topic") or DEFAULT_TOPIC)
        key, data, event = record.get("msg_key"), record.get("data"), record.get("event_type", "MESSAGE")
        run = Run([subject.encode()], [records.read_value(data)])
        if key is not None:
            run.keys[0] = str(key).encode()
        match event:
            case "MESSAGE":
                pass
            case "DELETE" if key is not None:
                run.tombstones.add(0)
            case "DELETE":
                raise BadRequest("a DELETE needs a msg_key")
            case _:
                raise BadRequest(f"event_type is {event!r}, it must be MESSAGE or DELETE")

        self._session.shared.settings.check_size(len(run.values[0]), len(run.keys.get(0, b"")))
        receipt, waits = publish_run(self._session, run)
        receipt.outcome.then(self._session.guard(partial(self._settle, number)))
        return waits

    def _settle(self, number: int, error: PenstockError | None) -> None:
        """Answer a frame whose outcome is settled."""
        if error is None:
            self._acknowledge(number)
        else:
            self.disconnect(error)

    def _subscribe(self, number: int, request: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        topic, group = str(request.get("topic") or DEFAULT_TOPIC), str(request.get("group") or DEFAULT_GROUP)
        names = topic.encode(), group.encode()
        if not is_pattern(names[0]):
            raise BadSubject(f"{topic!r} is not a topic")
        self._session.authorize_join(b":".join(names), names[0])
        if not self._session.shared.settings.provider_ready:
            return self._join(number, names)
        if len(self._unready) >= UNREADY_MAX:
            raise BadRequest(f"{UNREADY_MAX} subscriptions of this connection wait for READY to be answered")
        self._acknowledge(number)
        ready = self._next_id()
        self._unready[ready] = number, names
        self._write_topic(Type.READY, ready, names[0])
        return None

    async def _join(self, number: int, names: _Names, *, is_acknowledged: bool = False) -> None:
        session = self._session
        self._subscriptions += 1
        subscription = self._subscriptions
        self._names[subscription] = names
        member = Member(b"%d" % subscription, session, session.shared.settings.flow)
        member.on_refresh = session.guard(partial(self._notify, names[1]))
        # The protocol has no dead letters: unless the topic limits deliveries, they continue until there is an ACK.
        member.deliveries = Deliveries(default=0)
        group = await session.broker.groups.join(b":".join(names), names[0], member, start=Start.EARLIEST)
        session.subscriptions[subscription] = (member, group)
        if not session.is_connected:
            session.unsubscribe(subscription)
        if not is_acknowledged:
            self._acknowledge(number)

    def _answered(self, number: int) -> Coroutine[Any, Any, None] | None:
        """The client has handled the frame with this ID."""
        if (unready := self._unready.pop(number, None)) is not None:
            return self._join(*unready, is_acknowledged=True)
        if (notice := self._notices.pop(number, None)) is not None:
            notice[1].answered()
        elif (sent := self._sent.pop(number, None)) is not None:
            self._ack(sent)
        return None

    def _answered_by_names(self, kind: Type, names: _Names) -> Coroutine[Any, Any, None] | None:
        """As `_answered`, from a client that names the topic and group, not the frame. An empty group means any."""
        word = kind.name.removesuffix("_ACK")
        topic, group = names
        numbers = [
            number
            for number, (of, notice) in self._notices.items()
            if (notice.signal, notice.topic) == (word, topic) and group in (b"", of)
        ]
        if numbers:
            self._notices.pop(numbers[0])[1].answered()
        if kind is not Type.READY_ACK:
            return None
        number = next((number for number, (_, waits) in self._unready.items() if waits == names), None)
        if number is not None or names in self._names.values():
            self._batches.setdefault(names, deque())
        return self._answered(number) if number is not None else None

    def _ack_batch(self, names: _Names) -> None:
        if batches := self._batches.get(names):
            self._ack(batches.popleft())

    def _ack(self, sent: _Sent) -> None:
        held = self._session.subscriptions.get(sent.subscription)
        if held is None or not isinstance(held[1], Group) or held[1].is_stale(sent.place, sent.generation):
            return
        # An acknowledgement that came too late is ignored, and the messages are redelivered.
        held[1].ack_many(sent.place, sent.offsets, Outcome())

    def _commit(self, number: int, request: dict[str, Any]) -> None:
        topic, offset = str(request.get("topic") or DEFAULT_TOPIC), request.get("offset")
        if type(offset) is not int or offset < 0:
            raise BadRequest(f"offset is {offset!r}, it must be a whole number from 0 on")
        groups = [reader for _, reader in self._session.subscriptions.values() if isinstance(reader, Group)]
        group = next((group for group in groups if group.pattern == topic.encode()), None)
        if group is None:
            raise UnknownGroup(f"this connection is not subscribed to {topic}")
        if len(group.positions) != 1:
            raise BadRequest(f"{topic} is {len(group.positions)} partitions: an offset alone says nothing")
        saved = Outcome(self._session.guard(partial(self._settle, number)))
        group.commit(next(iter(group.positions)), offset, group.state.generation, saved)

    def _acknowledge(self, number: int) -> None:
        self.codec.answer(binary.frame(Type.ACK, number))


def _record(run: Run, index: int) -> bytes:
    return json.dumps(records.record(run, index)).encode()


def _batch_record(run: Run, index: int) -> bytes:
    created_ms = min(max(run.time_us(index) // 1000, 0), CREATED_MS_MAX)
    return binary.batch_record(
        run.keys.get(index, b""), run.values[index], created_ms, is_delete=index in run.tombstones
    )
