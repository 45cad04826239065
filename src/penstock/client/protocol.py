"""One connection to a broker, without I/O: requests to bytes, bytes to answers and messages.

    GREETED  if the first byte is `I`, skip the INFO line of the text port; otherwise frames begin at once
    HELLO    sent at once; the broker answers it before anything else
    READY    requests are pipelined; an answer has the number of its request

A shell (see link.py) passes bytes in (`buffer`, `filled`), writes the bytes to send (`take`), and passes the time.
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
# The longest greeting.
GREETING_BYTES_MAX: Final = 64 << 10
# The connection is dead after this many heartbeats without any bytes from the broker.
UNANSWERED_MAX: Final = 2

# The shortest interval of heartbeats.
HEARTBEAT_S_MIN: Final = 0.1

_GREETING: Final = b"I"


class Hello(NamedTuple):
    """The broker's answer to HELLO."""

    server_id: str
    version: str
    payload_bytes_max: int
    heartbeat_s: float


class Batches(NamedTuple):
    """The answer to a FETCH: where the log starts, up to where it is committed, and stored batches."""

    start: int
    committed: int
    data: memoryview


Answer = dict[str, Any] | Batches | bytes | bytearray | PenstockError


class PendingRequest:
    """A request and what to do with its answer. `done` is called once, with the answer or an error. `frame` is called
    each time the request is sent."""

    __slots__ = ("done", "frame", "is_repeatable")

    def __init__(
        self, frame: Callable[[int], bytes], done: Callable[[Answer], None], *, is_repeatable: bool = False
    ) -> None:
        self.frame = frame
        self.done = done
        # Whether it may be sent again when its answer was lost.
        self.is_repeatable = is_repeatable


class ClientConnection:
    def __init__(self, scratch: bytearray, credentials: Mapping[str, str], now: float) -> None:
        """`scratch`: a buffer to read into, which the connections of a thread may share."""
        self.hello: Hello | None = None
        # Why the broker refused HELLO.
        self.refused: PenstockError | None = None
        self._scratch = scratch
        self._reader = FrameReader(scratch)
        # The greeting so far; None after it.
        self._greeting: bytearray | None = bytearray()
        self._number = 0
        self._pending: dict[int, PendingRequest] = {}
        self._feeds: dict[int, Feed] = {}
        self._out: list[bytes] = []
        self._heard = now
        self._beat = now
        self._unanswered = 0
        hello = {"version": VERSION, **credentials}
        self.request(PendingRequest(lambda number: json_frame(Type.HELLO, number, hello), self._welcome))

    def take(self) -> list[bytes]:
        """Return the bytes to write, in this order."""
        out, self._out = self._out, []
        return out

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes."""
        return memoryview(self._scratch) if self._greeting is not None else self._reader.buffer()

    def filled(self, count: int, now: float) -> None:
        """Take `count` bytes from the buffer. Raise if the broker ends the connection or breaks the protocol."""
        self._heard = now
        self._unanswered = 0
        if self._greeting is None:
            frames = self._reader.filled(count)
        else:
            frames = self._read_greeting(bytes(memoryview(self._scratch)[:count]))
        for each in frames:
            self._dispatch(each)
        self._reader.check()

    def request(self, request: PendingRequest) -> None:
        number = self._next_number()
        self._pending[number] = request
        self._out.append(request.frame(number))

    def open(self, feed: Feed, done: Callable[[Answer], None]) -> None:
        """Open a subscription, or continue it. `done` is called with the broker's answer."""
        subscription = self._next_number()
        self._feeds[subscription] = feed

        def answered(answer: Answer) -> None:
            if not isinstance(answer, dict):
                self._feeds.pop(subscription, None)
            else:
                feed.opened(subscription, answer["positions"])
                if feed.is_closed:
                    # The caller has not waited for the answer.
                    self.end(feed, lambda _: None)
            done(answer)

        opening = feed.opening(subscription)
        self.request(PendingRequest(lambda number: json_frame(Type.OPEN, number, opening), answered))

    def end(self, feed: Feed, done: Callable[[Answer], None]) -> None:
        """End a subscription."""
        subscription = feed.number

        def answered(answer: Answer) -> None:
            self._feeds.pop(subscription, None)
            done(answer)

        self.request(PendingRequest(lambda number: end_frame(number, subscription), answered))

    def credit(self, feed: Feed) -> None:
        """Send the credit of a subscription, or take it back."""
        if (messages := feed.credit()) is not None:
            self._out.append(credit_frame(feed.number, messages))

    def confirm(self, feed: Feed) -> None:
        """Confirm the notices of a refresh; after the settlements of the messages before them."""
        self._out += [frame(Type.ACK, number) for number in feed.confirmations()]

    def tick(self, now: float) -> float:
        """Send a heartbeat if one is due. Return the time of the next call. Raise ConnectionLost after long silence."""
        assert self.hello is not None, "heartbeats begin after HELLO"
        pause = self.hello.heartbeat_s
        due = max(self._heard, self._beat) + pause
        if now < due:
            return due
        if self._unanswered >= UNANSWERED_MAX:
            raise ConnectionLost(f"nothing was received for {now - self._heard:.1f} s")
        self._unanswered += 1
        self._beat = now
        self._out.append(frame(Type.HEARTBEAT, self._next_number()))
        return now + pause

    def lost(self, why: str) -> list[PendingRequest]:
        """The connection is lost: return the requests to repeat, and fail the others."""
        pending, self._pending = self._pending, {}
        for feed in self._feeds.values():
            feed.lost()
        self._feeds.clear()
        for request in pending.values():
            if not request.is_repeatable:
                request.done(
                    ConnectionLost(f"{why} before the answer arrived: the request may or may not have been executed")
                )
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
                raise BadFrame(f"invalid greeting: longer than {GREETING_BYTES_MAX} bytes")
            if not found:
                return []
            greeting = rest
        self._greeting = None
        return self._reader.feed(greeting)

    def _dispatch(self, received: Frame) -> None:
        kind, number, payload = received
        match kind:
            case Type.MESSAGES:
                # Messages of a subscription that has ended may still be on the way.
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
                self._notify(Type(kind).name, number, read_json(payload))
            case Type.DISCONNECT:
                raise read_error(payload)
            case _:
                raise BadFrame(f"unexpected frame type {kind:#x}")

    def _notify(self, word: str, number: int, fields: dict[str, Any]) -> None:
        match fields:
            case {"subscription": int(subscription), "topic": str(topic)}:
                if (feed := self._feeds.get(subscription)) is not None:
                    feed.notified(word, number, topic)
            case _:
                raise BadFrame(f"invalid {word}: it must have a subscription and a topic, not {fields}")

    def _answer(self, number: int, answer: Answer) -> None:
        request = self._pending.pop(number, None)
        if request is None:
            raise BadFrame(f"unexpected answer to request {number}")
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
                raise BadFrame(f"invalid answer to HELLO: {error!r}") from None
        else:
            raise BadFrame("invalid answer to HELLO: batches")


def read_error(payload: bytes | bytearray) -> PenstockError:
    found = read_json(payload)
    error = from_wire(str(found.get("code")), str(found.get("text")))
    if isinstance(error, OffsetOutOfRange):
        error.offset, error.start, error.end = (int(found.get(name, -1)) for name in ("offset", "start", "end"))
    if isinstance(error, LogDamaged):
        # The path is on the broker's machine.
        error.path, error.reason = Path(str(found.get("path", ""))), str(found.get("reason", ""))
        error.position, error.first = (int(found.get(name, -1)) for name in ("position", "first"))
        error.last = None if found.get("last") is None else int(found["last"])
    return error
