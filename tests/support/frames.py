"""A client of bare frames: it does no more than it is told to, and answers no heartbeat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from penstock.model.batch import Batch, Buffer, encode, parse
from penstock.model.run import open_batch
from penstock.wire import binary
from penstock.wire.binary import HEAD, Append, Fetch, Frame, Settle, Type, Verb
from tests.support.server import Raw, Serve

TIMESTAMP: Final = 1_700_000_000_000_000
_ANSWERS: Final = (Type.RESULT, Type.ERROR, Type.BATCHES)


class Delivered(NamedTuple):
    """A message of a MESSAGES frame."""

    subject: str
    value: bytes
    topic: str
    topic_id: int
    partition: int
    offset: int
    attempts: int
    generation: int
    key: bytes | None = None
    headers: bytes = b""
    reply: bytes | None = None
    deleted: bool = False


class Fetched(NamedTuple):
    """What a BATCHES frame holds."""

    start: int
    committed: int
    batches: list[Batch]

    @property
    def values(self) -> list[bytes]:
        return [value for batch in self.batches for value in batch.columns().values()]

    @property
    def offsets(self) -> list[int]:
        return [offset for batch in self.batches for offset in batch.columns().offsets()]


class Bare(Raw):
    """A connection of frames that says nothing by itself, HELLO neither. `door` is `text`, which greets, or `quiet`."""

    def __init__(self, server: Serve, *, door: str = "text", receive_bytes: int | None = None) -> None:
        super().__init__(server.ports[door], receive_bytes=receive_bytes)
        self.info: dict[str, Any] = {}
        if door == "text":
            verb, _, fields = self.line().partition(" ")
            assert verb == "INFO"
            self.info = json.loads(fields)
        # What came while something else was waited for.
        self._kept: list[Frame] = []

    def frame(self) -> Frame:
        """The next one, whatever it is."""
        return self._kept.pop(0) if self._kept else self._read_frame()

    def answer(self, number: int) -> Frame:
        """The one with this id that is neither a heartbeat nor a message; the others are kept."""
        return self._find(lambda frame: frame.id == number and frame.type in _ANSWERS)

    def of_type(self, kind: Type, number: int | None = None) -> Frame:
        """The next one of a type, and with this id if it matters; the others are kept."""
        return self._find(lambda frame: frame.type == kind and number in (None, frame.id))

    def kept(self, kind: Type) -> list[Frame]:
        """Those of a type that have come and were not looked at."""
        return [frame for frame in self._kept if frame.type == kind]

    def frames_until_end(self) -> list[Frame]:
        """All that still come until the other side closes."""
        frames, self._kept = self._kept, []
        while self._received or self._receive():
            try:
                frames.append(self._read_frame())
            except AssertionError:  # it was reset in the midst of one
                break
        return frames

    def goodbye(self) -> dict[str, Any]:
        """What the server says when it ends the connection."""
        *_, last = self.frames_until_end()
        assert last.type == Type.DISCONNECT, last
        return read_json(last)

    def _find(self, wanted: Callable[[Frame], bool]) -> Frame:
        for index, frame in enumerate(self._kept):
            if wanted(frame):
                return self._kept.pop(index)
        while not wanted(frame := self._read_frame()):
            self._kept.append(frame)
        return frame

    def _read_frame(self) -> Frame:
        kind, number, length = HEAD.unpack(self.read(HEAD.size))
        return Frame(kind, number, self.read(length))


class Frames(Bare):
    """One that has said HELLO."""

    def __init__(
        self, server: Serve, *, door: str = "text", receive_bytes: int | None = None, **options: object
    ) -> None:
        super().__init__(server, door=door, receive_bytes=receive_bytes)
        self._last_number = 0
        self.hello = self.result(Type.HELLO, {"version": 1, "name": "tests"} | options)

    # Requests and their answers.

    def request(self, kind: Type, payload: Mapping[str, Any] | Buffer = b"") -> int:
        """Send a request; its number."""
        self._last_number += 1
        data = payload if not isinstance(payload, Mapping) else json.dumps(payload).encode()
        self.send(binary.frame(kind, self._last_number, data))
        return self._last_number

    def result(self, kind: Type, payload: Mapping[str, Any] | Buffer = b"") -> dict[str, Any]:
        return self.result_of(self.request(kind, payload))

    def error(self, kind: Type, payload: Mapping[str, Any] | Buffer = b"") -> dict[str, Any]:
        return self.error_of(self.request(kind, payload))

    def result_of(self, number: int) -> dict[str, Any]:
        frame = self.answer(number)
        assert frame.type == Type.RESULT, frame
        return read_json(frame)

    def error_of(self, number: int) -> dict[str, Any]:
        frame = self.answer(number)
        assert frame.type == Type.ERROR, frame
        return read_json(frame)

    def sync(self) -> None:
        """Until the server has done what was sent before, as far as nobody waits for it."""
        self.of_type(Type.HEARTBEAT, self.request(Type.HEARTBEAT))

    def call(self, name: str, /, **fields: Any) -> dict[str, Any]:
        return self.result(Type.CALL, {"call": name, **fields})

    def refused(self, name: str, /, **fields: Any) -> dict[str, Any]:
        """A call that fails."""
        return self.error(Type.CALL, {"call": name, **fields})

    # In.

    def publish(self, subject: str, *values: bytes, **columns: Any) -> list[Any]:
        """Receipts, one for each value."""
        return self.publish_batch(messages([subject] * len(values), values, **columns))

    def publish_batch(self, batch: Batch) -> list[Any]:
        receipts: list[Any] = self.result(Type.PUBLISH, batch.data)["receipts"]
        return receipts

    def ask_append(self, topic_id: int, batch: Batch, *, partition: int = 0, partitions: int = 1) -> int:
        self._last_number += 1
        self.send(binary.append_frame(self._last_number, Append(topic_id, partition, partitions), batch.data))
        return self._last_number

    def append(self, topic_id: int, batch: Batch, *, partition: int = 0, partitions: int = 1) -> tuple[int, bool]:
        """Its offset, and whether it is a duplicate."""
        answer = self.result_of(self.ask_append(topic_id, batch, partition=partition, partitions=partitions))
        return answer["offset"], answer["duplicate"]

    def append_refused(self, topic_id: int, batch: Batch, *, partition: int = 0, partitions: int = 1) -> str:
        """The code."""
        answer = self.error_of(self.ask_append(topic_id, batch, partition=partition, partitions=partitions))
        return str(answer["code"])

    # Out.

    def ask_fetch(
        self, topic_id: int, offset: int = 0, *, partition: int = 0, wait_ms: int = 0, end: int = 0, size: int = 1 << 20
    ) -> int:
        self._last_number += 1
        self.send(binary.fetch_frame(self._last_number, Fetch(topic_id, partition, wait_ms, offset, end, size)))
        return self._last_number

    def fetch(self, topic_id: int, offset: int = 0, **fields: int) -> Fetched:
        return self.fetched(self.ask_fetch(topic_id, offset, **fields))

    def fetched(self, number: int) -> Fetched:
        frame = self.answer(number)
        assert frame.type == Type.BATCHES, frame
        start, committed, view = binary.read_batches(frame.payload)
        batches = []
        position = 0
        while position < len(view):
            batch = Batch.at(view, position)
            assert batch is not None, "a batch is cut short"
            batch.check()
            batches.append(batch)
            position += batch.size
        return Fetched(start, committed, batches)

    def open(self, subscription: int, pattern: str, *, credit: int = 100, **fields: Any) -> dict[str, Any]:
        options = {"subscription": subscription, "pattern": pattern, "credit": credit}
        return self.result(Type.OPEN, options | fields)

    def open_refused(self, subscription: int, pattern: str, **fields: Any) -> dict[str, Any]:
        return self.error(Type.OPEN, {"subscription": subscription, "pattern": pattern, **fields})

    def credit(self, subscription: int, count: int) -> None:
        self.send(binary.credit_frame(subscription, count))

    def end(self, subscription: int) -> None:
        self._last_number += 1
        self.send(binary.end_frame(self._last_number, subscription))
        assert self.result_of(self._last_number) == {}

    def delivered(self, count: int, subscription: int = 1) -> list[Delivered]:
        """So many messages of a subscription, and no more than those frames hold."""
        found: list[Delivered] = []
        while len(found) < count:
            found += delivered(self.of_type(Type.MESSAGES, subscription))
        assert len(found) == count, "more came than were asked for"
        return found

    def ask_settle(
        self, verb: Verb, place: Delivered, offsets: Sequence[int], *, subscription: int = 1, delay_us: int = 0
    ) -> int:
        self._last_number += 1
        settle = Settle(
            subscription, verb, place.generation, delay_us, place.topic_id, place.partition, offsets or [place.offset]
        )
        self.send(binary.settle_frame(self._last_number, settle))
        return self._last_number

    def settle(
        self, verb: Verb, place: Delivered, *offsets: int, subscription: int = 1, delay_us: int = 0
    ) -> list[int]:
        """Of the partition of a message, these offsets or its own; those refused."""
        number = self.ask_settle(verb, place, offsets, subscription=subscription, delay_us=delay_us)
        refused: list[int] = self.result_of(number)["refused"]
        return refused

    def settle_refused(self, verb: Verb, place: Delivered, *offsets: int, subscription: int = 1) -> str:
        """The code."""
        return str(self.error_of(self.ask_settle(verb, place, offsets, subscription=subscription))["code"])

    # Short forms.

    def topic_id(self, name: str, **options: Any) -> int:
        """Make a topic; its id."""
        made: int = self.call("create_topic", name=name, **options)["id"]
        return made


def read_json(frame: Frame) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(bytes(frame.payload))
    return value


def messages(subjects: Sequence[str], values: Sequence[bytes], **columns: Any) -> Batch:
    """What PUBLISH takes."""
    return encode(values, timestamp=TIMESTAMP, subjects=[subject.encode() for subject in subjects], **columns)


def batch(*values: bytes, producer: int = 0, sequence: int = 0, **columns: Any) -> Batch:
    """What APPEND takes."""
    return encode(values, timestamp=TIMESTAMP, producer=producer, sequence=sequence, **columns)


def delivered(frame: Frame) -> list[Delivered]:
    told = binary.read_messages(frame.payload)
    stored = parse(told.batch)
    stored.check()
    run = open_batch(stored, told.topic)
    return [
        Delivered(
            run.subjects[index].decode(),
            run.values[index],
            told.topic.decode(),
            told.topic_id,
            told.partition,
            run.offset(index),
            told.attempts.get(index, 1),
            told.generation,
            run.keys.get(index),
            run.headers.get(index, b""),
            run.replies.get(index),
            index in run.tombstones,
        )
        for index in range(len(run))
    ]
