"""One connection to a broker, without I/O: requests to bytes, bytes to answers and messages.

    GREETED  the first byte decides: `I` is the INFO line of the greeting port, and skipped; else frames begin
    HELLO    sent at once; nothing else is before it is answered
    READY    requests are pipelined, each with a number, by which its answer finds it

A shell (see link.py) gives it bytes (`buffer`, `filled`), writes what it has to say (`take`), and tells it the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.client.feed import Feed
from penstock.errors import BadFrame, ConnectionLost, LogDamaged, OffsetOutOfRange, PenstockError, from_wire
from penstock.wire.binary import (
    Frame,
    FrameReader,
    Type,
    credit_frame,
    end_frame,
    frame,
    json_frame,
    read_batches,
    read_json,
)

VERSION: Final = 1
# A greeting that is longer is none.
GREETING_BYTES_MAX: Final = 64 << 10
# So many heartbeats without a sign of life, and the connection is dead.
UNANSWERED_MAX: Final = 2

# More often than this nobody needs to be heard.
HEARTBEAT_S_MIN: Final = 0.1

_GREETING: Final = b"I"


class Hello(NamedTuple):
    """What the broker says of itself."""

    server_id: str
    version: str
    payload_bytes_max: int
    heartbeat_s: float


class Batches(NamedTuple):
    """What a FETCH brings: the log's start, what is committed, and stored batches."""

    start: int
    committed: int
    data: memoryview


Answer = dict[str, Any] | Batches | bytes | bytearray | PenstockError


class Request:
    """`done` is called once: with the answer, or why there is none. `frame` is asked again if it is sent again."""

    __slots__ = ("done", "frame", "is_repeatable")

    def __init__(
        self, frame: Callable[[int], bytes], done: Callable[[Answer], None], *, is_repeatable: bool = False
    ) -> None:
        self.frame = frame
        self.done = done
        # Whether it may be sent again when nobody knows whether it was done.
        self.is_repeatable = is_repeatable


class Connection:
    def __init__(self, scratch: bytearray, credentials: Mapping[str, str], now: float) -> None:
        """`scratch` is what is read into, and may be shared with other connections of the thread."""
        self.hello: Hello | None = None
        # Why the broker does not want us.
        self.refused: PenstockError | None = None
        self._scratch = scratch
        self._reader = FrameReader(scratch)
        # What came of the greeting so far; None once it is over.
        self._greeting: bytearray | None = bytearray()
        self._number = 0
        self._pending: dict[int, Request] = {}
        self._feeds: dict[int, Feed] = {}
        self._out: list[bytes] = []
        self._heard = now
        self._beat = now
        self._unanswered = 0
        say = {"version": VERSION, **credentials}
        self.request(Request(lambda number: json_frame(Type.HELLO, number, say), self._welcome))

    def take(self) -> list[bytes]:
        """What is to be written, in this order."""
        out, self._out = self._out, []
        return out

    def buffer(self) -> memoryview:
        """Where the next bytes go."""
        return memoryview(self._scratch) if self._greeting is not None else self._reader.buffer()

    def filled(self, count: int, now: float) -> None:
        """So many bytes came. Raises if the connection is over: because the broker says so, or no broker talks so."""
        self._heard = now
        self._unanswered = 0
        if self._greeting is None:
            frames = self._reader.filled(count)
        else:
            frames = self._read_greeting(bytes(memoryview(self._scratch)[:count]))
        for each in frames:
            self._dispatch(each)
        self._reader.check()

    def request(self, request: Request) -> None:
        number = self._next_number()
        self._pending[number] = request
        self._out.append(request.frame(number))

    def open(self, feed: Feed, done: Callable[[Answer], None]) -> None:
        """Begin a subscription, or go on with it. `done` is called when the broker agrees, or does not."""
        subscription = self._next_number()
        self._feeds[subscription] = feed

        def answered(answer: Answer) -> None:
            if not isinstance(answer, dict):
                self._feeds.pop(subscription, None)
            else:
                feed.opened(subscription, answer["positions"])
                if feed.is_closed:
                    # Whoever wanted it has not waited so long.
                    self.end(feed, lambda _: None)
            done(answer)

        opening = feed.opening(subscription)
        self.request(Request(lambda number: json_frame(Type.OPEN, number, opening), answered))

    def end(self, feed: Feed, done: Callable[[Answer], None]) -> None:
        """No more messages of a subscription are wanted."""
        subscription = feed.number

        def answered(answer: Answer) -> None:
            self._feeds.pop(subscription, None)
            done(answer)

        self.request(Request(lambda number: end_frame(number, subscription), answered))

    def credit(self, feed: Feed) -> None:
        """Let the broker send as many as were taken."""
        if (messages := feed.credit()) > 0:
            self._out.append(credit_frame(feed.number, messages))

    def answer(self, feed: Feed) -> None:
        """Tell the broker which of its words were heeded; behind what was said of the messages before them."""
        self._out += [frame(Type.ACK, number) for number in feed.answers()]

    def tick(self, now: float) -> float:
        """Send a heartbeat if it is time to; when to ask again. Raises ConnectionLost if the broker is silent."""
        assert self.hello is not None, "heartbeats begin with HELLO's answer"
        pause = self.hello.heartbeat_s
        due = max(self._heard, self._beat) + pause
        if now < due:
            return due
        if self._unanswered >= UNANSWERED_MAX:
            raise ConnectionLost(f"nothing was heard for {now - self._heard:.1f} s")
        self._unanswered += 1
        self._beat = now
        self._out.append(frame(Type.HEARTBEAT, self._next_number()))
        return now + pause

    def lost(self, why: str) -> list[Request]:
        """It is gone: those requests that may be repeated. The others are told."""
        pending, self._pending = self._pending, {}
        for feed in self._feeds.values():
            feed.lost()
        self._feeds.clear()
        for request in pending.values():
            if not request.is_repeatable:
                request.done(ConnectionLost(f"{why}, before the answer came: it may or may not have been done"))
        return [request for request in pending.values() if request.is_repeatable]

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _read_greeting(self, data: bytes) -> list[Frame]:
        greeting = self._greeting
        assert greeting is not None
        greeting += data
        if greeting.startswith(_GREETING):
            line, found, rest = greeting.partition(b"\r\n")
            if len(line) > GREETING_BYTES_MAX:
                raise BadFrame("a greeting without an end")
            if not found:
                return []
            greeting = rest
        self._greeting = None
        return self._reader.feed(greeting)

    def _dispatch(self, received: Frame) -> None:
        kind, number, payload = received
        match kind:
            case Type.MESSAGES:
                # One that was ended may still have some on the way.
                if (feed := self._feeds.get(number)) is not None:
                    feed.received(payload)
            case Type.RESULT:
                self._answer(number, read_json(payload))
            case Type.BYTES:
                self._answer(number, payload)
            case Type.BATCHES:
                self._answer(number, Batches(*read_batches(payload)))
            case Type.ERROR:
                self._answer(number, read_error(payload))
            case Type.HEARTBEAT:
                if not number:
                    self._out.append(frame(Type.HEARTBEAT, 0))
            case Type.ENDED:
                if (feed := self._feeds.pop(number, None)) is not None:
                    feed.end(read_error(payload))
            case Type.RESET | Type.READY:
                self._hear(Type(kind).name, number, read_json(payload))
            case Type.DISCONNECT:
                raise read_error(payload)
            case _:
                raise BadFrame(f"a frame of type {kind:#x}, which no broker sends")

    def _hear(self, word: str, number: int, fields: dict[str, Any]) -> None:
        match fields:
            case {"subscription": int(subscription), "topic": str(topic)}:
                if (feed := self._feeds.get(subscription)) is not None:
                    feed.hear(word, number, topic)
            case _:
                raise BadFrame(f"{word} lacks something: {fields}")

    def _answer(self, number: int, answer: Answer) -> None:
        request = self._pending.pop(number, None)
        if request is None:
            raise BadFrame(f"an answer to request {number}, which was not made")
        request.done(answer)

    def _welcome(self, answer: Answer) -> None:
        if isinstance(answer, PenstockError):
            self.refused = answer
        elif isinstance(answer, dict):
            try:
                self.hello = Hello(
                    str(answer["server_id"]),
                    str(answer["version"]),
                    int(answer["payload_bytes_max"]),
                    max(float(answer["heartbeat_s"]), HEARTBEAT_S_MIN),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise BadFrame(f"HELLO's answer lacks something: {error}") from None
        else:
            raise BadFrame("HELLO is not answered with batches")


def read_error(payload: bytes | bytearray) -> PenstockError:
    found = read_json(payload)
    error = from_wire(str(found.get("code")), str(found.get("text")))
    if isinstance(error, OffsetOutOfRange):
        error.offset, error.start, error.end = (int(found.get(name, -1)) for name in ("offset", "start", "end"))
    if isinstance(error, LogDamaged):
        # The file is where the broker is.
        error.path, error.reason = Path(str(found.get("path", ""))), str(found.get("reason", ""))
        error.position, error.first = (int(found.get(name, -1)) for name in ("position", "first"))
        error.last = None if found.get("last") is None else int(found["last"])
    return error
