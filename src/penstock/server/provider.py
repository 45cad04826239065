"""The Provider's own protocol, of a client that knows only that: frames of types 0x01 to 0x0C, most of them JSON.

    DATA           from a client {topic, msg_key, event_type, data} → ACK; to it [{msgKey, eventType, data, createdAt}]
    ACK            of a DATA that the client was sent: all of its messages are done
    SUBSCRIBE      {topic, group} → ACK, then DATA from where the group has come to
    COMMIT_OFFSET  {topic, offset} → ACK: all below the offset is done
    RESET, READY   to a client {topic} → ACK, or RESET_ACK and READY_ACK: forget the topic, it comes anew; it has come
    BATCH_HEADER   to a client that has sent READY_ACK with the names of topic and group: what others get as DATA
    BATCH_ACK      the oldest batch of that topic and group that is not acknowledged yet: all of its messages are done

Later versions of the Provider have the last two. Their clients number acknowledgements themselves, so the names in one
and the order of the batches tell what it is of. They subscribe as earlier clients do, and expect a READY first. With
`server.provider_ready` the subscription begins when READY is answered, and the answer tells the two kinds apart.

A group is one of Penstock's, named `<topic>:<group>`: it is shared, remembered, and begins with the first message that
is there. What a client does not ACK comes again until it does: the protocol knows no dead letters, so there are some
only if the topic has a `deliveries_max`. All clients are told of a refresh.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.group import Group
from penstock.broker.intake import Receipt
from penstock.broker.member import Deliveries, Member, Notice, Place
from penstock.broker.start import Start
from penstock.errors import BadRequest, BadSubject, PenstockError, UnknownGroup
from penstock.pipe import document
from penstock.run import Run, payload_bytes
from penstock.subject import is_pattern
from penstock.wire import binary
from penstock.wire.binary import Frame, Type

if TYPE_CHECKING:
    from penstock.server.binary import BinarySession

# What a client of this kind sends, beside what all clients do.
TYPES: Final = frozenset(
    {
        Type.DATA,
        Type.ACK,
        Type.SUBSCRIBE,
        Type.COMMIT_OFFSET,
        Type.BATCH_ACK,
        Type.RESET_ACK,
        Type.READY_ACK,
    }
)
DEFAULT_TOPIC: Final = "default-topic"
DEFAULT_GROUP: Final = "default"
# A frame is filled up to here.
DATA_BYTES: Final = 1 << 20
# Frames that were sent and may still be acknowledged; who leaves more of them open is sent their messages again.
FRAMES_MAX: Final = 10_000
# Subscriptions of one connection that wait for an answer to READY.
UNREADY_MAX: Final = 1000
# The latest time that a signed number of milliseconds has.
CREATED_MS_MAX: Final = (1 << 63) - 1


# A topic as it was subscribed to, and a group.
_Names = tuple[bytes, bytes]


class _Sent(NamedTuple):
    subscription: int
    place: tuple[int, int]
    # The group's, when they were sent.
    generation: int
    offsets: list[int]


class Provider:
    def __init__(self, session: BinarySession) -> None:
        self._session = session
        # What was sent in each DATA, by its id, oldest first.
        self._sent: dict[int, _Sent] = {}
        # What was sent in batches: those whose BATCH_ACK has not come, oldest first. Who is in it gets batches.
        self._batches: dict[_Names, deque[_Sent]] = {}
        # What it was told of a refresh and has not answered, and in which group.
        self._notices: dict[int, tuple[bytes, Notice]] = {}
        # Subscriptions that begin when READY is answered, by its id: the id of SUBSCRIBE, and what to subscribe to.
        self._unready: dict[int, tuple[int, _Names]] = {}
        self._names: dict[int, _Names] = {}
        self._last_id = 0
        self._subscriptions = 0

    def do(self, frame: Frame) -> Coroutine[Any, Any, None] | None:
        """One frame; what those behind it must wait for, if they must."""
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
                return self._hear_names(Type(frame.type), binary.read_names(frame.payload))
            case Type.ACK | Type.RESET_ACK | Type.READY_ACK:
                return self._hear(frame.id)
        return None

    def write_messages(self, number: int, generation: int, place: Place, run: Run) -> None:
        """As many frames as it takes."""
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
        self._session.write(binary.frame(Type.DATA, number, b"[%b]" % b",".join(records)))

    def _send_batch(self, sent: _Sent, records: list[bytes]) -> None:
        names = self._names[sent.subscription]
        batches = self._batches[names]
        if len(batches) >= FRAMES_MAX:
            # None can be forgotten: the acknowledgements behind it would be taken for those of others.
            self._session.answer_error(0, BadRequest(f"{FRAMES_MAX} batches were sent and no BATCH_ACK came"))
            return
        batches.append(sent)
        self._session.write(binary.batch_frame(self._next_id(), records, *names))

    def _tell(self, group: bytes, notice: Notice) -> None:
        number = self._next_id()
        self._notices[number] = group, notice
        self._say(Type[notice.word], number, notice.topic)

    def _say(self, kind: Type, number: int, topic: bytes) -> None:
        self._session.write(binary.json_frame(kind, number, {"topic": topic.decode()}))

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _publish(self, number: int, record: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        subject = str(record.get("topic") or DEFAULT_TOPIC)
        key, data, event = record.get("msg_key"), record.get("data"), record.get("event_type", "MESSAGE")
        run = Run([subject.encode()], [document.read_value(data)])
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

        def told(receipt: Receipt) -> None:
            if receipt.error is not None:
                self._session.answer_error(number, receipt.error)
            else:
                self._acknowledge(number)

        return self._session.publish(run, told)

    def _subscribe(self, number: int, request: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        topic, group = str(request.get("topic") or DEFAULT_TOPIC), str(request.get("group") or DEFAULT_GROUP)
        names = topic.encode(), group.encode()
        if not is_pattern(names[0]):
            raise BadSubject(f"{topic!r} is not a topic")
        if not self._session.server.config.server.provider_ready:
            return self._join(number, names)
        if len(self._unready) >= UNREADY_MAX:
            raise BadRequest(f"{UNREADY_MAX} subscriptions of this connection wait for READY to be answered")
        self._acknowledge(number)
        ready = self._next_id()
        self._unready[ready] = number, names
        self._say(Type.READY, ready, names[0])
        return None

    async def _join(self, number: int, names: _Names, *, is_acknowledged: bool = False) -> None:
        session = self._session
        self._subscriptions += 1
        subscription = self._subscriptions
        self._names[subscription] = names
        member = Member(b"%d" % subscription, session, session.server.flow)
        member.hears = session.guard(partial(self._tell, names[1]))
        # Its protocol knows no dead letters: unless the topic limits deliveries, they go on until there is an ACK.
        member.deliveries = Deliveries(default=0)
        group = await session.broker.join(b":".join(names), names[0], member, start=Start.EARLIEST)
        session.subscriptions[subscription] = (member, group)
        if not session.is_connected:
            session.unsubscribe(subscription)
        if not is_acknowledged:
            self._acknowledge(number)

    def _hear(self, number: int) -> Coroutine[Any, Any, None] | None:
        """The client has done what a frame brought."""
        if (unready := self._unready.pop(number, None)) is not None:
            return self._join(*unready, is_acknowledged=True)
        if (told := self._notices.pop(number, None)) is not None:
            told[1].answered()
        elif (sent := self._sent.pop(number, None)) is not None:
            self._ack(sent)
        return None

    def _hear_names(self, kind: Type, names: _Names) -> Coroutine[Any, Any, None] | None:
        """The same of a client that says of which topic and group, and not of which frame; an empty group: any."""
        word = kind.name.removesuffix("_ACK")
        topic, group = names
        numbers = [
            number
            for number, (of, notice) in self._notices.items()
            if (notice.word, notice.topic) == (word, topic) and group in (b"", of)
        ]
        if numbers:
            self._notices.pop(numbers[0])[1].answered()
        if kind is not Type.READY_ACK:
            return None
        number = next((number for number, (_, waits) in self._unready.items() if waits == names), None)
        if number is not None or names in self._names.values():
            self._batches.setdefault(names, deque())
        return self._hear(number) if number is not None else None

    def _ack_batch(self, names: _Names) -> None:
        if batches := self._batches.get(names):
            self._ack(batches.popleft())

    def _ack(self, sent: _Sent) -> None:
        held = self._session.subscriptions.get(sent.subscription)
        if held is None or not isinstance(held[1], Group) or held[1].is_stale(sent.place, sent.generation):
            return
        # What came too late is delivered again: there is no word for it here.
        held[1].ack_many(sent.place, sent.offsets, lambda _: None)

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

        def saved(error: PenstockError | None) -> None:
            if error is None:
                self._acknowledge(number)
            else:
                self._session.answer_error(number, error)

        group.commit(next(iter(group.positions)), offset, group.generation, self._session.guard(saved))

    def _acknowledge(self, number: int) -> None:
        self._session.answer_frame(binary.frame(Type.ACK, number))


def _record(run: Run, index: int) -> bytes:
    return json.dumps(document.record(run, index)).encode()


def _batch_record(run: Run, index: int) -> bytes:
    created_ms = min(max(run.time_us(index) // 1000, 0), CREATED_MS_MAX)
    return binary.batch_record(
        run.keys.get(index, b""), run.values[index], created_ms, is_delete=index in run.tombstones
    )
