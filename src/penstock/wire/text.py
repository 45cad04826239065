"""The text protocol: lines of words, followed by a payload for some verbs.

It has two dialects: NATS for a client that sends CONNECT, Flux for one that does not. They differ in the order of the
words of SUB, in the sequence that Flux has in MSG, and in the format of errors.

    PUB <subject> [reply] <bytes>                   SUB <subject> [queue | DURABLE:name] <sid>       NATS
    HPUB <subject> [reply] <header bytes> <bytes>   SUB <subject> <sid> [group]                      Flux
    UNSUB <sid> [max]   PING   PONG   INFO          SUB <subject> DURABLE:<name> <sid>               Flux
    ACK <sequence> [group]   PULL <subject> <n>     STATS [sid]   JOIN <node> <address>   LEAVE <node>
    FLOWCTL <sid> PUSH|PULL [rate] [burst] [buffer] [block|drop|shed]
    REPLAY <sequence> | SEQ <sequence> [n] | TIME <unix seconds> [n] | FIRST [n] | LAST
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final

from penstock.model.headers import named
from penstock.model.run import MESSAGE_BYTES, RUN_BYTES, Run
from penstock.model.subject import is_pattern, is_route, is_subject, is_text
from penstock.wire.events import (
    Ack,
    Call,
    Connect,
    Event,
    FlowControl,
    Pull,
    Refused,
    Replay,
    ReplayStart,
    SimpleCommand,
    Stats,
    Subscribe,
    Unsubscribe,
)

# The limit of nats-server: a line is a verb and a few names.
LINE_BYTES_MAX: Final = 4096
PAYLOAD_BYTES_MAX: Final = 1 << 20
REPLAY_COUNT: Final = 100
REPLAY_COUNT_MAX: Final = 1_000_000

DURABLE: Final = b"DURABLE:"
# A message to such a subject is an acknowledgement: `msg.ack()` of a NATS client sends one.
ACK_SUBJECT: Final = b"$ACK."
_VERSION: Final = b"NATS/1.0"
HEADER_LINE: Final = _VERSION + b"\r\n"

# Parsed lines to cache, if they are short: most clients use few subjects and sizes. This limits the cache of a
# connection to about 2 MB.
_LINES_MAX: Final = 4096
_LINE_BYTES_REMEMBERED: Final = 256
# Empty lines are skipped.
_LINE_ENDS: Final = re.compile(rb"[\r\n]*")
# More digits than any length, count or sequence; int() of a long string takes quadratic time.
_DIGITS_MAX: Final = 20
_NO_RESPONDERS: Final = b"NATS/1.0 503\r\nNats-Subject: %b\r\n\r\n"


class _InvalidLine(Exception):
    """A line that is invalid in itself."""

    def __init__(self, reason: str, *, closes: bool = False, publish: bool = False) -> None:
        self.refused = Refused(reason, closes, publish)


class TextParser:
    """Turn the bytes of one connection into events, in order."""

    def __init__(
        self,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        *,
        needs_connect: bool = False,
        lines_max: int | None = None,
    ) -> None:
        """`needs_connect`: refuse a line before CONNECT immediately, without collecting its payload. `lines_max` limits
        the lines of one `feed`, except for cached lines of messages, which are fast."""
        self.payload_bytes_max = payload_bytes_max
        self._lines_max = lines_max
        self._needs_connect = needs_connect
        # Whether CONNECT was received, which selects the NATS dialect.
        self.is_nats = False
        self._has_headers = True
        # Unparsed bytes. They begin with the line end of the previous line or payload, which is looked up together
        # with the next line, so that a payload longer than announced is detected at no cost.
        self._rest = b"\r\n"
        # The pieces of a long incomplete payload, and the number of missing bytes.
        self._pieces: list[bytes] = []
        self._missing = 0
        # The size of that payload with its line; 0 if there is none.
        self.expected = 0
        # Cached PUB lines: line -> size of the payload, subject.
        self._lines: dict[bytes, tuple[int, bytes]] = {}
        self._subjects: dict[bytes, bytes] = {}
        self._closed = False
        # Whether complete lines are left, which another `feed`, also of no bytes, parses.
        self.has_more = False
        # Messages so far, and their bytes including headers.
        self.messages = self.payload_bytes = 0

    def clear(self) -> None:
        """Drop an incomplete line or payload: the connection has ended."""
        self._rest, self._pieces = b"", []
        self._lines, self._subjects = {}, {}
        self._closed = True

    @property
    def is_within(self) -> bool:
        """Return whether unparsed or incomplete bytes are left."""
        return self._missing > 0 or len(self._rest) > 2

    def feed(self, data: bytes) -> list[Event]:
        """Return the events of the complete lines, up to `lines_max`: see `has_more`."""
        self.has_more = False
        if self._closed:
            return []
        if self._missing > 0:
            self._pieces.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data = b"".join(self._pieces)
            self._pieces = []
            self.expected = 0
        else:
            data = self._rest + data
        events: list[Event] = []
        at = 0
        taken = 0
        try:
            while True:
                at = self._parse_publishes(data, at, events)
                ends = _LINE_ENDS.match(data, at)
                if ends is not None and ends.end() - at > 2:
                    at = ends.end() - 1
                following = self._parse_line(data, at, events)
                if following < 0:
                    break
                at = following
                taken += 1
                if taken == self._lines_max:
                    self.has_more = True
                    break
        except _InvalidLine as wrong:
            events.append(wrong.refused)
            if wrong.refused.closes:
                self._closed = True
                self._rest = b""
                return events
        self._rest = data[at:]
        if self._missing > 0:
            self._pieces = [self._rest]
            self.expected = len(self._rest) + self._missing
        return events

    def _parse_publishes(self, data: bytes, at: int, events: list[Event]) -> int:
        """Parse messages with cached lines from `at` on as one run; return the start of the first other line.

        This loop is the hot path: 300 ns per message. `at` is always the end of the previous line or payload.
        """
        values: list[bytes] = []
        subjects: list[bytes] = []
        begun = at
        find, known, size = data.find, self._lines.get, len(data)
        while True:
            line_end = find(b"\n", at + 2)
            if line_end < 0:
                break
            entry = known(data[at:line_end])
            if entry is None:
                break
            begin = line_end + 1
            end = begin + entry[0]
            if end + 2 > size and not (end < size and data[end] == 10):
                break
            values.append(data[begin:end])
            subjects.append(entry[1])
            at = end
        if values:
            if data[at] not in b"\r\n":
                # The last payload is longer than announced: neither it nor the following bytes are valid.
                values.pop()
                subjects.pop()
                if values:
                    events.append(Run(subjects, values))
                    self.messages += len(values)
                    self.payload_bytes += sum(map(len, values))
                raise _InvalidLine("Parser Error", closes=True)
            run = Run(subjects, values)
            self.messages += len(values)
            self.payload_bytes += sum(map(len, values))
            # Each has its subject and more in front of it here, so a batch of them is at most this large.
            run.size = at - begun + RUN_BYTES + MESSAGE_BYTES * len(values)
            events.append(run)
        return at

    def _parse_line(self, data: bytes, at: int, events: list[Event]) -> int:
        """Parse the line at `at` with its payload; return the start of the next line, or -1 if it is incomplete."""
        begin = at
        while begin < len(data) and data[begin] in b"\r\n":
            begin += 1
        line_end = data.find(b"\n", begin)
        if (len(data) if line_end < 0 else line_end) - begin > LINE_BYTES_MAX:
            raise _InvalidLine("maximum control line exceeded", closes=True)
        if line_end < 0:
            return -1
        if begin == at:
            raise _InvalidLine("Parser Error", closes=True)
        words = data[begin:line_end].split()
        if not words:
            return line_end
        verb = words[0].upper()
        if self._needs_connect and not self.is_nats and verb != b"CONNECT":
            raise _InvalidLine("Authorization Violation", closes=True)
        if verb == b"CONNECT":
            words = data[begin:line_end].split(None, 1)  # blanks within strings count
        if verb in (b"PUB", b"HPUB"):
            return self._parse_publish(data, at, line_end, verb, words[1:], events)
        command = _COMMANDS.get(verb)
        if command is None:
            raise _InvalidLine("Unknown Protocol Operation", closes=True)
        try:
            event = command(words[1:], self.is_nats)
        except _InvalidLine as wrong:
            if wrong.refused.closes:
                raise
            events.append(wrong.refused)
        else:
            if isinstance(event, Connect):
                self.is_nats = True
                self._has_headers = event.options.get("headers") is True
            events.append(event)
        return line_end

    def _parse_publish(
        self, data: bytes, at: int, line_end: int, verb: bytes, words: list[bytes], events: list[Event]
    ) -> int:
        numbers = 1 if verb == b"PUB" else 2
        if numbers == 2 and not self._has_headers:
            raise _InvalidLine("message headers not supported", closes=True)
        if len(words) not in (numbers + 1, numbers + 2):
            raise _InvalidLine("Parser Error", closes=True)
        sizes = [_length(word) for word in words[-numbers:]]
        size = sizes[-1]
        if size > self.payload_bytes_max:
            raise _InvalidLine("Maximum Payload Violation", closes=True)
        if sizes[0] > size:
            raise _InvalidLine("Parser Error", closes=True)
        begin = line_end + 1
        end = begin + size
        if end + 2 > len(data) and not (end < len(data) and data[end] == 10):
            # A client may end lines with only a line feed, so one byte after the payload is enough to try again.
            self._missing = max(1, end + 1 - len(data))
            return -1
        if data[end] not in b"\r\n":
            raise _InvalidLine("Parser Error", closes=True)
        self.messages += 1
        self.payload_bytes += size
        header_end = begin + sizes[0] if verb == b"HPUB" else begin
        subject = self._intern(words[0])
        reply = words[1] if len(words) == numbers + 2 else None
        if words[0].startswith(ACK_SUBJECT):
            events.append(Call(words[0], data[header_end:end], reply))
            return end
        if subject is None or (reply is not None and not is_subject(reply)):
            if not self.is_nats:
                events.append(Refused("Invalid Publish Subject", publish=True))
                return end
            # nats-server delivers it; the broker delivers it too, but does not store it.
            run = Run([], [])
            run.is_live = True
            events.append(run)
            _append(run, words[0], reply, data[begin:header_end], data[header_end:end])
            return end
        if verb == b"PUB" and reply is None and line_end - at <= _LINE_BYTES_REMEMBERED:
            if len(self._lines) >= _LINES_MAX:
                self._lines.clear()
            self._lines[data[at:line_end]] = (size, subject)
        _append(_last_run(events), subject, reply, data[begin:header_end], data[header_end:end])
        return end

    def _intern(self, subject: bytes) -> bytes | None:
        """Return one object per subject; None if it is invalid."""
        known = self._subjects.get(subject)
        if known is None and is_subject(subject):
            known = subject
            if len(subject) <= _LINE_BYTES_REMEMBERED:
                if len(self._subjects) >= _LINES_MAX:
                    self._subjects.clear()
                self._subjects[subject] = subject
        return known


def _last_run(events: list[Event]) -> Run:
    """Return the run at the end of the events, or a new one: messages with a reply or headers join the one before."""
    last = events[-1] if events else None
    if isinstance(last, Run) and not last.is_live:
        return last
    run = Run([], [])
    events.append(run)
    return run


def _append(run: Run, subject: bytes, reply: bytes | None, block: bytes, value: bytes) -> None:
    index = len(run.values)
    if reply is not None:
        run.replies[index] = reply
    if block:
        run.headers[index] = _header_lines(block)
    run.values.append(value)
    run.subjects.append(subject)
    run.size = 0  # no longer known


def _header_lines(block: bytes) -> bytes:
    """Return header lines as they are stored: without the version and the final empty line."""
    lines = block.removeprefix(HEADER_LINE).rstrip(b"\r\n")
    return lines + b"\r\n" if lines else b""


def _is_length(word: bytes) -> bool:
    return word.isdigit() and len(word) <= _DIGITS_MAX


def _length(word: bytes) -> int:
    if not _is_length(word):
        raise _InvalidLine("Parser Error", closes=True)
    return int(word)


def _number(word: bytes, wrong: str, low: int = 0, high: int = 1 << 64) -> int:
    if word.isdigit() and len(word) <= _DIGITS_MAX and low <= (number := int(word)) <= high:
        return number
    raise _InvalidLine(wrong)


def _connect(words: list[bytes], _: bool) -> Connect:
    try:
        options = json.loads(b" ".join(words) or b"{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise _InvalidLine("Parser Error", closes=True)
    return Connect(options)


def _subscribe(words: list[bytes], is_nats: bool) -> Subscribe:
    if len(words) not in (2, 3):
        raise _InvalidLine("Parser Error", closes=True)
    subject, sid, group = words[0], words[-1], None
    if len(words) == 3:
        group = words[1]
        # Flux's document has the sid first, its code the group, like NATS: the number is the sid.
        if not is_nats and not group.startswith(DURABLE) and (group.isdigit() or not sid.isdigit()):
            sid, group = group, sid
    is_live = is_nats and not (group is not None and group.startswith(DURABLE))
    if not (is_route(subject) if is_live else is_pattern(subject)):
        raise _InvalidLine("Invalid Subject")
    if group is not None and group.startswith(DURABLE):
        name = group.removeprefix(DURABLE)
        if not name or not is_text(name):
            raise _InvalidLine("Invalid Group")
        return Subscribe(subject, sid, name, durable=True)
    if group is not None and not is_live and not is_text(group):
        raise _InvalidLine("Invalid Group")
    # A NATS queue group ends with its last member, a Flux group does not.
    return Subscribe(subject, sid, group, durable=group is not None and not is_nats)


def _unsubscribe(words: list[bytes], _: bool) -> Unsubscribe:
    if len(words) not in (1, 2):
        raise _InvalidLine("Parser Error", closes=True)
    # As in nats-server, 0 and an invalid number mean "immediately".
    return Unsubscribe(words[0], int(words[1]) or None if len(words) == 2 and _is_length(words[1]) else None)


def _ack(words: list[bytes], _: bool) -> Ack:
    if len(words) not in (1, 2):
        raise _InvalidLine("invalid sequence")
    return Ack(_number(words[0], "invalid sequence"), words[1] if len(words) == 2 else None)


def _pull(words: list[bytes], _: bool) -> Pull:
    if len(words) != 2:
        raise _InvalidLine("invalid count")
    if not is_pattern(words[0]):
        raise _InvalidLine("Invalid Subject")
    return Pull(words[0], _number(words[1], "invalid count", 1, REPLAY_COUNT_MAX))


def _flow_control(words: list[bytes], _: bool) -> FlowControl:
    if not 2 <= len(words) <= 6 or words[1].upper() not in (b"PUSH", b"PULL"):
        raise _InvalidLine("invalid mode (PUSH or PULL)")
    rest = words[2:]
    overflow = None
    if rest and rest[-1].isalpha():
        overflow = rest.pop().decode().lower()
        if overflow not in ("block", "drop", "shed"):
            raise _InvalidLine("invalid mode (block, drop or shed)")
    if len(rest) > 3:
        raise _InvalidLine("invalid mode (PUSH or PULL)")
    rate = None
    if rest:
        try:
            rate = float(rest[0])
        except ValueError:
            raise _InvalidLine("invalid rate") from None
        if not 0 <= rate <= 1e9:
            raise _InvalidLine("invalid rate")
    burst = _number(rest[1], "invalid burst", 1, 10**9) if len(rest) > 1 else None
    buffer = _number(rest[2], "invalid buffer", 1, 10**9) if len(rest) > 2 else None
    return FlowControl(words[0], words[1].upper() == b"PUSH", rate, burst, buffer, overflow)


def _stats(words: list[bytes], _: bool) -> Stats:
    return Stats(words[0] if words else None)


def _replay(words: list[bytes], _: bool) -> Replay:
    wrong = "invalid replay mode"
    match [words[0].upper(), *words[1:]] if words else []:
        case [b"FIRST", *count] if len(count) <= 1:
            return Replay(ReplayStart.FIRST, 0, _replay_count(count))
        case [b"LAST"]:
            return Replay(ReplayStart.LAST, 0, 1)
        case [b"TIME", seconds, *count] if len(count) <= 1:
            return Replay(ReplayStart.TIME, _time_us(seconds), _replay_count(count))
        case [b"SEQ", sequence, *count] if len(count) <= 1:
            return Replay(ReplayStart.SEQUENCE, _number(sequence, wrong), _replay_count(count))
        case [sequence]:
            return Replay(ReplayStart.MESSAGE, _number(sequence, wrong), 1)
    raise _InvalidLine(wrong)


def _replay_count(words: list[bytes]) -> int:
    return _number(words[0], "invalid count", 1, REPLAY_COUNT_MAX) if words else REPLAY_COUNT


def _time_us(seconds: bytes) -> int:
    try:
        value = float(seconds)
    except ValueError:
        raise _InvalidLine("invalid time") from None
    if not 0 <= value < 1e12:
        raise _InvalidLine("invalid time")
    return int(value * 1_000_000)


_COMMANDS: Final[dict[bytes, Callable[[list[bytes], bool], Event]]] = {
    b"CONNECT": _connect,
    b"SUB": _subscribe,
    b"UNSUB": _unsubscribe,
    b"PING": lambda _words, _nats: SimpleCommand.PING,
    b"PONG": lambda _words, _nats: SimpleCommand.PONG,
    b"+OK": lambda _words, _nats: SimpleCommand.PONG,  # needs no reaction either
    b"INFO": lambda _words, _nats: SimpleCommand.INFO,
    b"ACK": _ack,
    b"PULL": _pull,
    b"FLOWCTL": _flow_control,
    b"STATS": _stats,
    b"REPLAY": _replay,
    b"JOIN": lambda _words, _nats: SimpleCommand.MEMBERSHIP,
    b"LEAVE": lambda _words, _nats: SimpleCommand.MEMBERSHIP,
}


# A sequence encodes topic, partition and offset in one number, so that a connection can acknowledge and replay any
# message: 40 bits for the offset (10^12), 8 for the partition, the rest for the topic.
_OFFSET_BITS: Final = 40
_PARTITION_BITS: Final = 8


def sequence_base(topic_id: int, partition: int) -> int:
    """Return the sequence of offset 0."""
    return (topic_id << _PARTITION_BITS | partition) << _OFFSET_BITS


def split_sequence(sequence: int) -> tuple[int, int, int]:
    """Return topic, partition and offset."""
    place, offset = divmod(sequence, 1 << _OFFSET_BITS)
    return place >> _PARTITION_BITS, place & ((1 << _PARTITION_BITS) - 1), offset


# ---- encoding


def info(fields: dict[str, Any]) -> bytes:
    return b"INFO " + json.dumps(fields, separators=(",", ":")).encode() + b"\r\n"


def error(reason: str, *, is_nats: bool) -> bytes:
    # A line break in a reason would start a new line.
    text = reason.replace("\r", " ").replace("\n", " ")
    return f"-ERR '{text}'\r\n".encode() if is_nats else f"-ERR {text}\r\n".encode()


def violation(verb: str, subject: bytes, reason: str = "") -> bytes:
    """Return an error about one subject, in a form that clients report without disconnecting. Without a reason, the
    user has no permission."""
    text = f'Permissions Violation for {verb} to "{subject.decode(errors="replace")}"'
    return error(f"{text}: {reason}" if reason else text, is_nats=True)


def denied_subscription(subject: bytes, queue: bytes = b"") -> bytes:
    """Return nats-server's error for a subscription that the user has no permission for."""
    using = f' using queue "{queue.decode(errors="replace")}"' if queue else ""
    text = f'Permissions Violation for Subscription to "{subject.decode(errors="replace")}"{using}'
    return error(text, is_nats=True)


def no_responders(reply: bytes, sid: bytes, subject: bytes) -> bytes:
    block = _NO_RESPONDERS % subject
    return b"HMSG %b %b %d %d\r\n%b\r\n" % (reply, sid, len(block), len(block), block)


def messages(run: Run, sid: bytes, *, has_headers: bool = True) -> bytes:
    """Return MSG and HMSG for every message of a run, in the NATS dialect."""
    run = with_names(run) if has_headers else run
    values = run.values
    subject = run.subject
    if subject is not None and not (run.replies or run.headers):
        size = len(values[0])
        if len(set(map(len, values))) == 1:
            # All lines are the same, so they join the values in one copy: 120 ns per message of 100 bytes.
            head = b"\r\nMSG %b %b %d\r\n" % (subject, sid, size)
            ends = values.copy()
            ends[0] = head[2:] + ends[0]
            ends[-1] += b"\r\n"
            return head.join(ends)
        head = b"MSG %b %b " % (subject, sid)
        return b"".join([b"%b%d\r\n%b\r\n" % (head, len(value), value) for value in values])
    replies, headers = run.replies, run.headers if has_headers else {}
    if not replies and not headers:
        return b"".join(
            [
                b"MSG %b %b %d\r\n%b\r\n" % (subject, sid, len(value), value)
                for subject, value in zip(run.subjects, values, strict=True)
            ]
        )
    parts = []
    for index, value in enumerate(values):
        reply = replies.get(index)
        names = b"%b %b" % (run.subjects[index], sid)
        if reply is not None:
            names += b" " + reply
        block = headers.get(index)
        if block is None:
            parts.append(b"MSG %b %d\r\n%b\r\n" % (names, len(value), value))
        else:
            # A status line already includes the version.
            version = b"" if block.startswith(_VERSION) else HEADER_LINE
            block = version + block + b"\r\n"
            parts.append(b"HMSG %b %d %d\r\n%b%b\r\n" % (names, len(block), len(block) + len(value), block, value))
    return b"".join(parts)


def payload_bytes(run: Run, *, has_headers: bool = True) -> int:
    """Return the bytes of the payloads that `messages` writes, which begin with the headers."""
    size = sum(map(len, run.values))
    if has_headers:
        for block in with_names(run).headers.values():
            size += len(block) + (2 if block.startswith(_VERSION) else len(HEADER_LINE) + 2)
    return size


def numbered_messages(run: Run, sid: bytes, sequences: Iterable[int]) -> bytes:
    """Return MSG and HMSG with the sequence after the length, in the Flux dialect."""
    run = with_names(run)
    if not run.headers:
        return b"".join(
            [
                b"MSG %b %b %d %d\r\n%b\r\n" % (subject, sid, len(value), sequence, value)
                for subject, value, sequence in zip(run.subjects, run.values, sequences, strict=True)
            ]
        )
    parts = []
    for index, sequence in enumerate(sequences):
        subject, value, block = run.subjects[index], run.values[index], run.headers.get(index)
        if block is None:
            parts.append(b"MSG %b %b %d %d\r\n%b\r\n" % (subject, sid, len(value), sequence, value))
        else:
            block += b"\r\n"
            total = len(block) + len(value)
            parts.append(b"HMSG %b %b %d %d %d\r\n%b%b\r\n" % (subject, sid, len(block), total, sequence, block, value))
    return b"".join(parts)


def with_names(run: Run) -> Run:
    """Add keys and publishers' timestamps, which these lines have no fields for, as headers."""
    if not run.keys and run.timestamps is None:
        return run
    named_run = copy(run)
    named_run.headers = dict(run.headers)
    for index, key in run.keys.items():
        named_run.headers[index] = named(named_run.headers.get(index, b""), penstock_key=key)
    for index, time_us in enumerate(run.timestamps or ()):
        seconds = b"%d.%06d" % divmod(time_us, 1_000_000)
        named_run.headers[index] = named(named_run.headers.get(index, b""), penstock_timestamp=seconds)
    named_run.headers = {index: block for index, block in named_run.headers.items() if block}
    named_run.keys, named_run.timestamps = {}, None
    return named_run


def acknowledgements(count: int, duplicates: Sequence[int] = (), refused: Mapping[int, str] | None = None) -> bytes:
    """Return +OK for `count` messages; `duplicates`: those stored before; `refused`: why some are not stored."""
    if not duplicates and not refused:
        return b"+OK\r\n" * count
    lines = [b"+OK\r\n"] * count
    for index in duplicates:
        lines[index] = b"+OK DUP\r\n"
    for index, reason in (refused or {}).items():
        lines[index] = error(reason, is_nats=False)
    return b"".join(lines)
