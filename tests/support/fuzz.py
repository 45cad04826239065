"""Any bytes for the codecs of all doors, from a seed: only protocol errors may come out, however they are cut.

The same bytes go to the doors of a real server (`DOOR`), and the oracle of the hostile clients judges: no fault is
counted, and nobody else notices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from penstock.errors import BadFrame, BadRequest, PeerError
from penstock.model.batch import Buffer, accept, encode
from penstock.model.run import Run
from penstock.wire import cursus as wire_cursus
from penstock.wire import prefixed
from penstock.wire import qb as wire_qb
from penstock.wire.binary import (
    HEAD,
    Append,
    Fetch,
    Frame,
    FrameReader,
    Messages,
    Settle,
    StageTarget,
    Type,
    Verb,
    append_frame,
    batches_head,
    credit_frame,
    end_frame,
    fetch_frame,
    frame,
    head,
    json_frame,
    messages_frame,
    read_append,
    read_batches,
    read_credit,
    read_end,
    read_fetch,
    read_json,
    read_messages,
    read_settle,
    read_stage,
    settle_frame,
    stage_frame,
)
from penstock.wire.events import Event, Refused
from penstock.wire.text import TextParser
from penstock.wire.websocket import ControlFrame, WebSocketParser
from tests.hostile.siege import Attack, Door, Step, Target
from tests.support.websocket import deflate
from tests.support.websocket import encode as websocket_frame

_Read = TypeVar("_Read")

_PIECES: Final = [
    b"PUB a 1\r\nx\r\n", b"PUB a.b 3\r\nabc\r\n", b"PUB a r 0\r\n\r\n", b"HPUB a 8 9\r\nA: b\r\n\r\nx\r\n",
    b"HPUB a 22 22\r\nNATS/1.0\r\nB: cccccc\r\n\r\n", b"SUB a.> 1\r\n", b"SUB a q 2\r\n", b"UNSUB 1 5\r\n",
    b'CONNECT {"verbose":false}\r\n', b"ACK 12\r\n", b"PULL a 3\r\n", b"REPLAY FIRST 3\r\n", b"PING\r\n", b"PONG\r\n",
    b"FLOWCTL 1 PUSH 3 4 5\r\n", b"STATS\r\n", b"INFO\r\n", b"\r\n", b"\n", b"\r", b" ", b"PUB", b"1048577", b"-1",
    b"99999999999999999999", b"\x00", b"\xff",
]  # fmt: skip

_BATCH: Final = encode([b"value"], subjects=[b"a.b"], timestamp=0).data
_FRAMES: Final = [
    json_frame(Type.HELLO, 1, {"version": 1, "name": "fuzz"}), frame(Type.PUBLISH, 2, _BATCH),
    append_frame(3, Append(1, 0, 1), _BATCH), stage_frame(3, StageTarget(Append(1, 0, 1), b"name", 7), _BATCH),
    fetch_frame(4, Fetch(1, 0, 500, 10, 0, 1 << 20)),
    json_frame(Type.OPEN, 5, {"subscription": 1, "pattern": "a.>", "start": {"offset": 7}, "refresh": True}),
    end_frame(6, 1), credit_frame(1, 100), settle_frame(7, Settle(1, Verb.ACK, 0, 0, 1, 0, [1])),
    settle_frame(8, Settle(1, Verb.NACK, 2, 1000, 1, 0, range(20))), json_frame(Type.CALL, 9, {"call": "topics"}),
    json_frame(Type.RESULT, 1, {}), json_frame(Type.ERROR, 2, {"code": "CLOSED", "text": "stopping"}),
    batches_head(4, 0, 10, len(_BATCH)) + _BATCH, batches_head(4, 0, 10, 0),
    messages_frame(1, Messages(1, 0, 3, b"orders", {0: 2}, _BATCH)), json_frame(Type.ENDED, 1, {"code": "CLOSED"}),
    json_frame(Type.RESET, 1, {"subscription": 1, "topic": "a"}), json_frame(Type.READY, 2, {"topic": "a"}),
    frame(Type.ACK, 1), frame(Type.RESET_ACK, 1), frame(Type.READY_ACK, 2),
    frame(Type.HEARTBEAT, 0), json_frame(Type.DATA, 1, {"data": "x"}), json_frame(Type.SUBSCRIBE, 2, {"topic": "a"}),
    frame(Type.CALL, 10, b"[{}]"), frame(Type.CALL, 11, b'{"a":"\xff"}'), frame(Type.CALL, 12, bytes(300)),
    head(Type.CALL, 13, 40),
]  # fmt: skip
_READERS: Final[dict[int, Callable[[Buffer], object]]] = {
    Type.PUBLISH: accept,
    Type.APPEND: read_append,
    Type.STAGE: read_stage,
    Type.FETCH: read_fetch,
    Type.END: read_end,
    Type.CREDIT: read_credit,
    Type.SETTLE: read_settle,
    Type.BATCHES: read_batches,
    Type.MESSAGES: read_messages,
}


def _messages(style: wire_qb.Style) -> list[bytes]:
    """As one client writes them; and two that are no messages, or too large."""
    parts = [
        (wire_qb.Kind.PUBLISH, b"topic=a\0k=v\0", b"value"), (wire_qb.Kind.PUBLISH, b"topic=a\0", b""),
        (wire_qb.Kind.HEARTBEAT, b"", b""), (wire_qb.Kind.ACK, b"offset=1\0topic=a", bytes(40)),
        (wire_qb.Kind.CREATE_TOPIC, b"topic=\xff\0", b"\xff"), (wire_qb.Kind.SUBSCRIBE, b"topic\0", b"x"),
        (wire_qb.Kind.DATA, b"a=\0b=\0", b"\0\0\0\x20"), (wire_qb.Kind.UNSUBSCRIBE, b"", bytes(40)),
    ]  # fmt: skip
    made = [wire_qb.message(kind, 7, 1_700_000_000_000, block, body, style) for kind, block, body in parts]
    return [*made * 4, prefixed.frame(b""), wire_qb.message(wire_qb.Kind.DATA, 1, 2, b"", bytes(1200), style)]


_RECORDS: Final = wire_cursus.batch(
    b"a", 0, [wire_cursus.Record(1, b"value", b"key", b"me", 1, 2), wire_cursus.Record(2, b"")]
)
_PAYLOADS: Final = [
    b"CREATE a 4", b"CREATE topic=a partitions=4", b"DELETE a", b"LIST", b"PUBLISH a hello \xff", b"HELP", b"",
    b"PUBLISH topic=a key=k message=hello message=\xff", b"CONSUME a 0 0 follow", b"CONSUME topic=a partition=0",
    b"SUBSCRIBE a g 2", b"BATCH_COMMIT topic=a group=g member=m generation=1 P0:1,P1:2", b"AUTH user=u", b"hi",
    b"AUTH me", b"nonsense", b"\xff", b"\0\x01aPUBLISH a hello", b"\0\0LIST", b"\x1f\xffLIST", _RECORDS, bytes(5),
    wire_cursus.pack(b"LIST", wire_cursus.Packing.GZIP), wire_cursus.pack(_RECORDS, wire_cursus.Packing.GZIP),
    wire_cursus.pack(_RECORDS, wire_cursus.Packing.LZ4), b"\x82SNAPPY\0", b"\x1f\x8b", b"\x04\x22\x4d\x18", bytes(1200),
]  # fmt: skip
_COMMANDS: Final = [prefixed.frame(payload) for payload in _PAYLOADS]

# Small, so that there are frames larger than scratch, and some too large.
_SCRATCH_BYTES: Final = 128
_FRAME_BYTES_MAX: Final = 1 << 10


def fuzz(seed: int, rounds: int, progress: Callable[[int], None] = lambda _: None) -> int:
    """How many bytes were parsed. Raises AssertionError with the seed of the round that went wrong."""
    total = 0
    for number in range(rounds):
        for door, pieces, judge in _DOORS:
            source = random.Random(f"{seed}/{number}")
            data = _damaged(pieces, source)
            try:
                judge(data, source)
            except Exception as error:
                raise AssertionError(f"seed {seed}, round {number}, {door}: {data!r}: {error}") from error
            total += len(data)
        progress(number + 1)
    return total


def _damaged(pieces: Sequence[bytes], source: random.Random) -> bytes:
    """Some of the pieces, changed in a few places."""
    data = bytearray(b"".join(source.choices(pieces, k=source.randint(1, 30))))
    for _ in range(source.randint(0, 4)):
        place = source.randrange(len(data) + 1)
        match source.randrange(3):
            case 0:
                data[place:place] = source.randbytes(source.randint(1, 4))
            case 1:
                del data[place : place + source.randint(1, 8)]
            case 2 if place < len(data):
                data[place] = source.randrange(256)
    return bytes(data)


def _cut(data: bytes, source: random.Random) -> list[bytes]:
    places = sorted(source.randrange(len(data) + 1) for _ in range(source.randint(0, 12)))
    return [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]


# The text door.


def _judge_text(data: bytes, source: random.Random) -> None:
    assert _parse(_cut(data, source)) == _parse([data]), "cut otherwise, it is read otherwise"


def _parse(parts: list[bytes]) -> list[object]:
    """Messages one by one, so that it does not matter how they were gathered into runs."""
    parser = TextParser()
    seen: list[object] = []
    for part in parts:
        events: list[Event] = parser.feed(part)
        for event in events:
            assert not (seen and isinstance(seen[-1], Refused) and seen[-1].closes), "something came behind the end"
            if isinstance(event, Run):
                for index in range(len(event)):
                    reply, headers = event.replies.get(index), event.headers.get(index)
                    seen.append((event.subjects[index], event.values[index], reply, headers))
            else:
                seen.append(event)
    return seen


# The binary door.


def _judge_binary(data: bytes, source: random.Random) -> None:
    frames, is_refused = _walk(data)
    seen, was_refused = _read_frames(_cut(data, source))
    assert was_refused is is_refused, "a length is refused, or not, as it is cut"
    assert seen == frames, "cut otherwise, it is read otherwise"
    for found in frames:
        _open(found)


def _walk(data: bytes) -> tuple[list[Frame], bool]:
    """The frames up to one that is too large, and whether there is one: as simply as it can be done."""
    frames: list[Frame] = []
    while len(data) >= HEAD.size:
        kind, number, length = HEAD.unpack(data[: HEAD.size])
        if length > _FRAME_BYTES_MAX:
            return frames, True
        if HEAD.size + length > len(data):
            break
        frames.append(Frame(kind, number, data[HEAD.size : HEAD.size + length]))
        data = data[HEAD.size + length :]
    return frames, False


def _read_frames(parts: Iterable[bytes]) -> tuple[list[Frame], bool]:
    reader = FrameReader(bytearray(_SCRATCH_BYTES), _FRAME_BYTES_MAX)
    seen: list[Frame] = []
    try:
        for part in parts:
            seen += reader.feed(part)
            reader.check()
    except BadFrame:
        return seen, True
    return seen, False


def _open(found: Frame) -> object:
    try:
        return _READERS.get(found.type, read_json)(found.payload)
    except PeerError as error:
        return error


# The prefixed door.


class _Seen(NamedTuple):
    frames: list[wire_qb.QbMessage | bytes]
    is_refused: bool
    # Of no meaning behind a refusal: it may come before enough bytes to know them.
    dialect: prefixed.PrefixedDialect | None
    style: wire_qb.Style | None


def _judge_prefixed(data: bytes, source: random.Random) -> None:
    whole = _read_prefixed([data])
    assert _read_prefixed(_cut(data, source)) == whole, "cut otherwise, it is read otherwise"
    for found in whole.frames:
        if isinstance(found, wire_qb.QbMessage):
            _refused_or_read(wire_qb.read_properties, found.properties)
        else:
            _open_payload(found)


def _read_prefixed(parts: Iterable[bytes]) -> _Seen:
    reader = prefixed.PrefixedReader(_FRAME_BYTES_MAX)
    seen: list[wire_qb.QbMessage | bytes] = []
    for part in parts:
        was_refused = reader.refusal is not None
        found = reader.feed(part)
        assert not (was_refused and found), "something came behind the end"
        seen += found
    if reader.refusal is not None:
        return _Seen(seen, True, None, None)
    return _Seen(seen, False, reader.dialect, reader.style)


def _open_payload(payload: bytes) -> None:
    """As the server does, and then every reader with whatever it is."""
    for data in {payload, (_refused_or_read(wire_cursus.unpack, payload) or (b"",))[0]}:
        _refused_or_read(wire_cursus.read_batch, data)
        _refused_or_read(wire_qb.read_properties, data)
        command = _refused_or_read(wire_cursus.read_command, data)
        assert command is None or wire_cursus.is_command(data), "it is a command, or not"
        _, rest = _refused_or_read(wire_cursus.open_envelope, data) or (b"", b"")
        _refused_or_read(wire_cursus.read_command, rest)


def _refused_or_read(read: Callable[[bytes], _Read], data: bytes) -> _Read | None:
    try:
        return read(data)
    except (BadFrame, BadRequest):
        return None


# WebSocket.


_WEBSOCKET: Final = [
    websocket_frame(2, b"PING\r\n"),
    websocket_frame(1, b"PUB a 3\r\nab", final=False),
    websocket_frame(0, b"c\r\n"),
    websocket_frame(2, b"PUB a 300\r\n" + bytes(300)),
    websocket_frame(2, deflate(b"PING\r\n" * 100), reserved=4),
    websocket_frame(2, deflate(b"PUB a 3\r\nabc\r\n"), reserved=4, final=False),
    websocket_frame(9, b"?"),
    websocket_frame(10),
    websocket_frame(8, b"\x03\xe8"),
]


def _judge_websocket(data: bytes, source: random.Random) -> None:
    assert _read_websocket(_cut(data, source)) == _read_websocket([data]), "cut otherwise, it is read otherwise"


def _read_websocket(parts: Iterable[bytes]) -> tuple[bytes, list[ControlFrame]] | None:
    """Return the stream and the control frames; None: it was refused."""
    parser = WebSocketParser(deflates=True)
    stream: list[bytes] = []
    controls: list[ControlFrame] = []
    try:
        for part in parts:
            parser.feed(part)
            while (found := parser.read(_FRAME_BYTES_MAX)) is not None:
                if isinstance(found, ControlFrame):
                    controls.append(found)
                else:
                    stream.append(found)
    except BadFrame:
        return None
    return b"".join(stream), controls


_Judge = Callable[[bytes, random.Random], None]
_DOORS: Final[list[tuple[str, Sequence[bytes], _Judge]]] = [
    ("text", _PIECES, _judge_text),
    ("binary", _FRAMES, _judge_binary),
    ("prefixed, QB", _messages(wire_qb.Style()), _judge_prefixed),
    ("prefixed, QB otherwise", _messages(wire_qb.Style(counts_itself=False, lengths_first=True)), _judge_prefixed),
    ("prefixed, Cursus", _COMMANDS, _judge_prefixed),
    ("WebSocket", _WEBSOCKET, _judge_websocket),
]


# A real server.


def _any_bytes(name: str, pieces: Sequence[bytes], begin: bytes = b"") -> Attack:
    """What `begin` opens, if anything, and then pieces that are damaged, and cut."""

    def any_bytes(source: random.Random, _: Target) -> Iterator[Step]:
        yield begin
        for _number in range(source.randint(1, 5)):
            yield from _cut(_damaged(pieces, source), source)

    any_bytes.__name__ = name
    return Attack(any_bytes, connections=20)


# Text is welcome where clients speak first, too.
DOOR: Final = Door(
    "fuzz",
    "quiet",
    (
        *(_any_bytes(name, pieces) for name, pieces, _ in _DOORS),
        _any_bytes("text, NATS", _PIECES, b"CONNECT {}\r\n"),
        _any_bytes("binary, HELLO", _FRAMES, _FRAMES[0]),
    ),
    None,
    guarded=False,
)
