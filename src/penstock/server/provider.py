"""The Provider's own protocol, of a client that knows only that: JSON in frames of types 0x01 to 0x08.

    DATA           from a client {topic, msg_key, event_type, data} → ACK; to it [{msgKey, eventType, data, createdAt}]
    ACK            of a DATA that the client was sent: all of its messages are done
    SUBSCRIBE      {topic, group} → ACK, then DATA from where the group has come to
    COMMIT_OFFSET  {topic, offset} → ACK: all below the offset is done
    RESET, READY   to a client {topic} → ACK, or RESET_ACK and READY_ACK: forget the topic, it comes anew; it has come

A group is one of Penstock's, named `<topic>:<group>`: it is shared, remembered, and begins with the first message that
is there. What a client does not ACK comes again until it does: the protocol knows no dead letters, so there are some
only if the topic has a `deliveries_max`. All clients are told of a refresh.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
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

DEFAULT_TOPIC: Final = "default-topic"
DEFAULT_GROUP: Final = "default"
# A frame is filled up to here.
DATA_BYTES: Final = 1 << 20
# Frames that were sent and may still be acknowledged; who leaves more of them open is sent their messages again.
FRAMES_MAX: Final = 10_000


class _Sent(NamedTuple):
    subscription: int
    place: tuple[int, int]
    # The group's, when they were sent.
    generation: int
    offsets: list[int]


class Provider:
    def __init__(self, session: BinarySession) -> None:
        self._session = session
        # What was sent in each frame, by its id, oldest first.
        self._sent: dict[int, _Sent] = {}
        # What it was told of a refresh and has not answered.
        self._notices: dict[int, Notice] = {}
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
        return None

    def write_messages(self, number: int, generation: int, place: Place, run: Run) -> None:
        """As many frames as it takes."""
        self._session.peer.count_sent(len(run), payload_bytes(run))
        records: list[str] = []
        offsets: list[int] = []
        size = 0
        for index, offset in enumerate(run.all_offsets()):
            record = json.dumps(document.record(run, index))
            if records and size + len(record) > DATA_BYTES:
                self._send_frame(number, generation, place, records, offsets)
                records, offsets, size = [], [], 0
            records.append(record)
            offsets.append(offset)
            size += len(record)
        self._send_frame(number, generation, place, records, offsets)

    def _send_frame(self, number: int, generation: int, place: Place, records: list[str], offsets: list[int]) -> None:
        sent = _Sent(number, (place.topic_id, place.number), generation, offsets)
        self._last_id += 1
        self._sent[self._last_id] = sent
        if len(self._sent) > FRAMES_MAX:
            del self._sent[next(iter(self._sent))]
        self._session.write(binary.frame(Type.DATA, self._last_id, f"[{','.join(records)}]".encode()))

    def _tell(self, notice: Notice) -> None:
        self._last_id += 1
        self._notices[self._last_id] = notice
        fields = {"topic": notice.topic.decode()}
        self._session.write(binary.json_frame(Type[notice.word], self._last_id, fields))

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

    async def _subscribe(self, number: int, request: dict[str, Any]) -> None:
        topic, name = str(request.get("topic") or DEFAULT_TOPIC), str(request.get("group") or DEFAULT_GROUP)
        pattern = topic.encode()
        if not is_pattern(pattern):
            raise BadSubject(f"{topic!r} is not a topic")
        session = self._session
        self._subscriptions += 1
        subscription = self._subscriptions
        member = Member(b"%d" % subscription, session, session.server.flow)
        member.hears = session.guard(self._tell)
        # Its protocol knows no dead letters: unless the topic limits deliveries, they go on until there is an ACK.
        member.deliveries = Deliveries(default=0)
        group = await session.broker.join(_group_name(topic, name), pattern, member, start=Start.EARLIEST)
        session.subscriptions[subscription] = (member, group)
        if not session.is_connected:
            session.unsubscribe(subscription)
        self._acknowledge(number)

    def heard(self, number: int) -> None:
        """The client has done what a frame brought."""
        if (notice := self._notices.pop(number, None)) is not None:
            notice.answered()
        elif (sent := self._sent.pop(number, None)) is not None:
            self._ack(sent)

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


def _group_name(topic: str, group: str) -> bytes:
    return f"{topic}:{group}".encode()
