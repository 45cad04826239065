"""The binary door: frames `[type 1][id 8][length 4][payload]`, their head in network order.

Types 0x01 to 0x0C are the Provider's, most of them with JSON. A client that knows only those publishes with DATA,
subscribes with SUBSCRIBE and is sent DATA, which it acknowledges. One that begins with HELLO has the others, and gets
ERROR rather than DISCONNECT when something fails. `id` matches an answer to its request; requests are pipelined.

    BATCH_HEADER u32 records · u64 bytes · names. So many bytes follow the frame, outside of any frame: for each record
                 u32 length · key · u8 'M' or 'D' · u32 length · data · u64 created, in ms      → BATCH_ACK
    BATCH_ACK    names. RESET_ACK and READY_ACK have the same, or nothing                       not answered
    names        u32 length · topic · u32 length · group

    HELLO        JSON: version, name, user, password, token, claim, owner                → RESULT
    PUBLISH      a batch in which every message says its subject                         → RESULT, a receipt for each
    APPEND       u64 topic · u32 partition · u32 partitions · a producer's batch         → RESULT: its offset
    STAGE        u64 topic · u32 partition · u32 partitions · u64 number · u16 length · the name of a transaction
                 · a batch for it                                                        → RESULT: where it is staged
    FETCH        u64 topic · u32 partition · u32 wait_ms · u64 offset · u64 end · u32 bytes_max     → BATCHES
    OPEN         JSON: a subscription, its pattern, group, mode, start, credit, refresh  → RESULT: its positions
    END          u64 subscription                                                        → RESULT
    CREDIT       u64 subscription · u32 messages: so many more may come                  not answered
    SETTLE       u64 subscription · u8 verb · u64 generation · u64 delay_us
                 · u64 topic · u32 partition · u32 count · u16 length · u64 offset[count]
                 · why they failed, so long, in UTF-8                                    → RESULT: those refused
    CALL         JSON: `call`, and what that needs                                       → RESULT
    SNAPSHOT     JSON: nothing, or `end`, which snapshot is not needed any more          → RESULT: its number, and the
                 number and bytes of the file with its listing (see storage/snapshot.py)
    READ         u64 snapshot · u32 file · u64 position · u32 bytes_max                  → BYTES
    ACK          of a RESET or READY, under its id                                       not answered

    RESULT       JSON
    ERROR        JSON: code, text
    BATCHES      u64 start · u64 committed · stored batches, back to back
    MESSAGES     `id` is the subscription: u64 topic · u32 partition · u64 generation · u16 length of the topic's name
                 · u32 again · the name · (u32 index, u32 deliveries)[again] · a batch
    BYTES        what was read, as it is in the file
    ENDED        `id` is the subscription. JSON: code, text: no more come
    RESET        `id` is the server's. JSON: subscription, topic: forget the topic, it comes anew       → ACK
    READY        the same: it has come                                                                  → ACK

A batch travels as it is stored (see batch.py). 0x16 is not used: TLS begins with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, NoReturn

from penstock.batch import BATCH_BYTES_MAX, Buffer
from penstock.errors import BadFrame, BadRequest

HEAD: Final = struct.Struct("!BQI")
# Requests in JSON: their bytes, unless they carry a message, and their values. Decoding cannot be interrupted.
JSON_BYTES_MAX: Final = 2 << 20
JSON_VALUES_MAX: Final = 1 << 16
# A batch, and what stands before it.
FRAME_BYTES_MAX: Final = BATCH_BYTES_MAX + (1 << 20)
# What is read at once. A frame that is larger gets memory of its own, which is filled in place.
SCRATCH_BYTES: Final = 256 << 10

_APPEND: Final = struct.Struct("!QII")
_STAGE: Final = struct.Struct("!QIIQH")
_FETCH: Final = struct.Struct("!QIIQQI")
_NUMBER: Final = struct.Struct("!Q")
_CREDIT: Final = struct.Struct("!QI")
_SETTLE: Final = struct.Struct("!QBQQQIIH")
_BATCHES: Final = struct.Struct("!QQ")
_MESSAGES: Final = struct.Struct("!QIQHI")
_AGAIN: Final = struct.Struct("!II")
_BATCH_HEADER: Final = struct.Struct("!IQ")
_LENGTH: Final = struct.Struct("!I")
# The longest name of a topic or a group in BATCH_ACK, RESET_ACK and READY_ACK.
NAME_BYTES_MAX: Final = 65_535
_READ: Final = struct.Struct("!QIQI")
# So many messages are settled by one frame.
SETTLE_MAX: Final = 10_000


class Type(IntEnum):
    DATA = 0x01
    ACK = 0x02
    SUBSCRIBE = 0x03
    COMMIT_OFFSET = 0x04
    RESET = 0x05
    READY = 0x06
    DISCONNECT = 0x07
    HEARTBEAT = 0x08
    BATCH_HEADER = 0x09
    BATCH_ACK = 0x0A
    # Answers to RESET and READY, of clients that have words of their own for them; ACK says the same.
    RESET_ACK = 0x0B
    READY_ACK = 0x0C
    HELLO = 0x10
    PUBLISH = 0x11
    APPEND = 0x12
    FETCH = 0x13
    OPEN = 0x14
    END = 0x15
    CREDIT = 0x17
    SETTLE = 0x18
    CALL = 0x19
    STAGE = 0x1A
    SNAPSHOT = 0x1B
    READ = 0x1C
    RESULT = 0x20
    ERROR = 0x21
    BATCHES = 0x22
    MESSAGES = 0x23
    ENDED = 0x24
    BYTES = 0x25


# Frames with a batch in them: others are small.
_WITH_BATCH: Final = frozenset({Type.PUBLISH, Type.APPEND, Type.STAGE})


class Verb(IntEnum):
    """What a reader says of messages that it has."""

    ACK = 0
    NACK = 1
    EXTEND = 2
    REJECT = 3
    COMMIT = 4
    # It was never looked at, so it does not count as delivered.
    RELEASE = 5


class Frame(NamedTuple):
    type: int
    id: int
    payload: bytes | bytearray


class FrameReader:
    """Bytes to frames, for a connection that is read into a buffer: `buffer` is where the next bytes go, `filled` says
    how many came. Between the two nothing else may use `scratch`, which connections of one thread can share.
    """

    __slots__ = (
        "_ahead_bytes",
        "_json_bytes_max",
        "_large",
        "_large_end",
        "_large_length",
        "_refusal",
        "_rest",
        "_scratch",
        "bytes_max",
        "frames_max",
        "has_more",
    )

    def __init__(
        self,
        scratch: bytearray,
        bytes_max: int = FRAME_BYTES_MAX,
        *,
        ahead_bytes: int = FRAME_BYTES_MAX,
        json_bytes_max: int = FRAME_BYTES_MAX,
        frames_max: int | None = None,
    ) -> None:
        """`bytes_max` is for a payload, `json_bytes_max` for one that is not a batch; of one that is announced so much
        memory is taken ahead of what has come. `frames_max`: how many frames are returned at once, at the most."""
        self.bytes_max = bytes_max
        self._json_bytes_max = json_bytes_max
        self._ahead_bytes = ahead_bytes
        self.frames_max = frames_max
        # Whether whole frames are left, which `more` takes.
        self.has_more = False
        # Why nothing more can be read. Not an exception: that would keep alive what its traceback refers to.
        self._refusal: str | None = None
        self._scratch = memoryview(scratch)
        # The beginning of a frame that is not all there.
        self._rest = b""
        # One that is too large for scratch, how long it is, and how much of it is there.
        self._large: Frame | None = None
        self._large_length = self._large_end = 0

    @property
    def expected(self) -> int:
        """How many bytes the large frame has that is under way; 0: none is."""
        return 0 if self._large is None else self._large_length

    def clear(self) -> None:
        """Drop what has come of a frame: the rest never will."""
        self._rest, self._large, self.has_more = b"", None, False

    def buffer(self) -> memoryview:
        if self._large is not None:
            payload = self._large.payload
            assert isinstance(payload, bytearray)
            if self._large_end == len(payload):
                payload = self._grow(payload)
            return memoryview(payload)[self._large_end :]
        rest = self._rest
        if rest:
            self._scratch[: len(rest)] = rest
        return self._scratch[len(rest) :]

    def _grow(self, payload: bytearray) -> bytearray:
        """Make room for more of the large frame, without taking much more than that for a moment."""
        assert self._large is not None
        count = min(self._ahead_bytes, self._large_length - len(payload))
        if count <= len(payload):
            payload.extend(bytes(count))
            return payload
        grown = bytearray(len(payload) + count)
        grown[: len(payload)] = payload
        self._large = self._large._replace(payload=grown)
        return grown

    def filled(self, count: int) -> list[Frame]:
        """The frames that are complete now. Raises BadFrame if what comes behind them is none that is allowed; if there
        are some before it, the next time: `check` tells at once.
        """
        self.check()
        if self._large is not None:
            self._large_end += count
            if self._large_end < self._large_length:
                return []
            frame, self._large = self._large, None
            return [frame]
        view = self._scratch
        begin, end = 0, len(self._rest) + count
        self._rest = b""
        self.has_more = False
        frames: list[Frame] = []
        while end - begin >= HEAD.size:
            if len(frames) == self.frames_max:
                self.has_more = True
                break
            kind, number, length = HEAD.unpack_from(view, begin)
            if length > self._json_bytes_max or length > self.bytes_max:
                limit = self.bytes_max if kind in _WITH_BATCH else min(self.bytes_max, self._json_bytes_max)
            else:
                limit = length
            if length > limit:
                self._refusal = f"a frame of {length} bytes, {limit} are allowed"
                if not frames:
                    self.check()
                return frames
            body = begin + HEAD.size
            if body + length > end:
                if HEAD.size + length > len(view):
                    # Nothing is copied but what is here already.
                    payload = bytearray(view[body:end])
                    self._large = Frame(kind, number, payload)
                    self._large_length, self._large_end = length, end - body
                    return frames
                break
            begin = body + length
            frames.append(Frame(kind, number, bytes(view[body:begin])))
        self._rest = bytes(view[begin:end])
        return frames

    def more(self) -> list[Frame]:
        """As `filled`, of frames that came before."""
        self.buffer()
        return self.filled(0)

    def check(self) -> None:
        """Raise if what came is no frame that is allowed: then nothing more can be read."""
        if self._refusal is not None:
            raise BadFrame(self._refusal)

    def feed(self, data: Buffer) -> list[Frame]:
        """As `filled`, for bytes that are there already."""
        frames: list[Frame] = []
        view = memoryview(data)
        while view:
            buffer = self.buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            try:
                frames += self.filled(count)
                while self.has_more and count < len(view):
                    frames += self.more()
            except BadFrame:
                if not frames:
                    raise
                break
            view = view[count:]
        return frames


def frame(kind: Type, number: int, *parts: Buffer) -> bytes:
    return b"".join((HEAD.pack(kind, number, sum(map(len, parts))), *parts))


def head(kind: Type, number: int, length: int) -> bytes:
    """Of a frame whose payload follows."""
    return HEAD.pack(kind, number, length)


def json_frame(kind: Type, number: int, value: Any) -> bytes:
    return frame(kind, number, json.dumps(value, separators=(",", ":")).encode())


def read_json(payload: Buffer) -> dict[str, Any]:
    try:
        text = str(payload, "utf-8")
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
        if "\\u" in text:
            # An escape can still bring half of a surrogate pair, which is no text.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"what must be JSON is not: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("what must be a JSON object is not one")
    return value


def read_request(payload: Buffer) -> dict[str, Any]:
    """As `read_json`, of a client: how many values it may have is bounded, which bounds time and memory."""
    data = bytes(payload)
    if _structure(data) > JSON_VALUES_MAX:
        # Strings may have those, too: count again without them.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        if data.count(b'"') > 2 * JSON_VALUES_MAX or _structure(b"".join(data.split(b'"')[::2])) > JSON_VALUES_MAX:
            raise BadRequest(f"a request of more than {JSON_VALUES_MAX} values in JSON")
    return read_json(payload)


def _structure(data: bytes) -> int:
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# What is in each payload that is not JSON; each pair is encode and decode.


class Append(NamedTuple):
    topic_id: int
    partition: int
    partitions: int


def append_frame(number: int, to: Append, batch: Buffer) -> bytes:
    return frame(Type.APPEND, number, _APPEND.pack(*to), batch)


def read_append(payload: Buffer) -> tuple[Append, memoryview]:
    _check(len(payload) >= _APPEND.size)
    return Append(*_APPEND.unpack_from(payload)), memoryview(payload)[_APPEND.size :]


class Stage(NamedTuple):
    """A batch for a place, once the transaction is committed."""

    to: Append
    name: bytes
    number: int


def stage_frame(number: int, stage: Stage, batch: Buffer) -> bytes:
    head = _STAGE.pack(*stage.to, stage.number, len(stage.name))
    return frame(Type.STAGE, number, head + stage.name, batch)


def read_stage(payload: Buffer) -> tuple[Stage, memoryview]:
    _check(len(payload) >= _STAGE.size)
    *to, number, length = _STAGE.unpack_from(payload)
    end = _STAGE.size + length
    _check(len(payload) >= end)
    return Stage(Append(*to), bytes(payload[_STAGE.size : end]), number), memoryview(payload)[end:]


class Fetch(NamedTuple):
    topic_id: int
    partition: int
    wait_ms: int
    offset: int
    # 0: none.
    end: int
    bytes_max: int


def fetch_frame(number: int, fetch: Fetch) -> bytes:
    return frame(Type.FETCH, number, _FETCH.pack(*fetch))


def read_fetch(payload: Buffer) -> Fetch:
    _check(len(payload) == _FETCH.size)
    return Fetch(*_FETCH.unpack(payload))


class Read(NamedTuple):
    """Bytes of one file of a snapshot."""

    snapshot: int
    file: int
    position: int
    bytes_max: int


def read_frame(number: int, read: Read) -> bytes:
    return frame(Type.READ, number, _READ.pack(*read))


def read_read(payload: Buffer) -> Read:
    _check(len(payload) == _READ.size)
    return Read(*_READ.unpack(payload))


def end_frame(number: int, subscription: int) -> bytes:
    return frame(Type.END, number, _NUMBER.pack(subscription))


def read_end(payload: Buffer) -> int:
    _check(len(payload) == _NUMBER.size)
    subscription: int = _NUMBER.unpack(payload)[0]
    return subscription


def credit_frame(subscription: int, messages: int) -> bytes:
    return frame(Type.CREDIT, 0, _CREDIT.pack(subscription, messages))


def read_credit(payload: Buffer) -> tuple[int, int]:
    _check(len(payload) == _CREDIT.size)
    subscription, messages = _CREDIT.unpack(payload)
    return subscription, messages


class Settle(NamedTuple):
    subscription: int
    verb: int
    generation: int
    delay_us: int
    topic_id: int
    partition: int
    offsets: Sequence[int]
    # Of NACK and REJECT.
    reason: str = ""


def settle_frame(number: int, settle: Settle) -> bytes:
    *fields, offsets, reason = settle
    count = len(offsets)
    text = reason.encode()
    head = _SETTLE.pack(*fields, count, len(text))
    return frame(Type.SETTLE, number, head, struct.pack(f"!{count}Q", *offsets), text)


def read_settle(payload: Buffer) -> Settle:
    _check(len(payload) >= _SETTLE.size)
    subscription, verb, generation, delay_us, topic_id, partition, count, length = _SETTLE.unpack_from(payload)
    end = _SETTLE.size + 8 * count
    _check(0 < count <= SETTLE_MAX and len(payload) == end + length and verb <= Verb.RELEASE)
    offsets = struct.unpack_from(f"!{count}Q", payload, _SETTLE.size)
    reason = str(payload[end:], "utf-8", "replace")
    return Settle(subscription, verb, generation, delay_us, topic_id, partition, offsets, reason)


def batches_head(number: int, start: int, committed: int, length: int) -> bytes:
    """What goes before so many bytes of batches."""
    return head(Type.BATCHES, number, _BATCHES.size + length) + _BATCHES.pack(start, committed)


def read_batches(payload: Buffer) -> tuple[int, int, memoryview]:
    """The log's start, its committed offset, and the batches."""
    _check(len(payload) >= _BATCHES.size)
    start, committed = _BATCHES.unpack_from(payload)
    return start, committed, memoryview(payload)[_BATCHES.size :]


class Messages(NamedTuple):
    topic_id: int
    partition: int
    generation: int
    topic: bytes
    # The how-manieth delivery this is, by index, where it is not the first.
    attempts: Mapping[int, int]
    batch: Buffer


def messages_frame(subscription: int, messages: Messages) -> bytes:
    topic_id, partition, generation, topic, attempts, batch = messages
    fields = _MESSAGES.pack(topic_id, partition, generation, len(topic), len(attempts))
    again = b"".join([_AGAIN.pack(index, count) for index, count in attempts.items()])
    return frame(Type.MESSAGES, subscription, fields, topic, again, batch)


def read_messages(payload: Buffer) -> Messages:
    _check(len(payload) >= _MESSAGES.size)
    topic_id, partition, generation, name_bytes, again = _MESSAGES.unpack_from(payload)
    at = _MESSAGES.size + name_bytes
    begin = at + again * _AGAIN.size
    _check(len(payload) >= begin)
    view = memoryview(payload)
    attempts = dict(_AGAIN.iter_unpack(view[at:begin]))
    return Messages(topic_id, partition, generation, bytes(view[_MESSAGES.size : at]), attempts, view[begin:])


def batch_frame(number: int, records: Sequence[bytes], topic: bytes, group: bytes) -> bytes:
    """A BATCH_HEADER and the records behind it, which belong to no frame."""
    size = sum(map(len, records))
    fields = _BATCH_HEADER.pack(len(records), size)
    return b"".join((frame(Type.BATCH_HEADER, number, fields, names(topic, group)), *records))


def batch_record(key: bytes, data: bytes, created_ms: int, *, is_delete: bool) -> bytes:
    head = _LENGTH.pack(len(key)) + key + (b"D" if is_delete else b"M")
    return b"".join((head, _LENGTH.pack(len(data)), data, created_ms.to_bytes(8, "big")))


def names(topic: bytes, group: bytes) -> bytes:
    return b"".join((_LENGTH.pack(len(topic)), topic, _LENGTH.pack(len(group)), group))


def read_names(payload: Buffer) -> tuple[bytes, bytes]:
    """The topic and the group that a BATCH_ACK, RESET_ACK or READY_ACK is of."""
    found = []
    view = memoryview(payload)
    for _ in range(2):
        _check(len(view) >= _LENGTH.size)
        length: int = _LENGTH.unpack_from(view)[0]
        end = _LENGTH.size + length
        _check(length <= NAME_BYTES_MAX and len(view) >= end)
        found.append(bytes(view[_LENGTH.size : end]))
        view = view[end:]
    _check(not view)
    return found[0], found[1]


def _check(is_sound: bool) -> None:
    if not is_sound:
        raise BadFrame("a frame whose fields do not fit its length")
