"""The binary protocol: frames `[type 1][id 8][length 4][payload]`, with a head in network order.

Types 0x01 to 0x0C are the Provider's, most of them with JSON. A client that uses only these publishes with DATA,
subscribes with SUBSCRIBE and receives DATA, which it acknowledges. A client that begins with HELLO can use all types,
and gets ERROR instead of DISCONNECT on a failure. `id` matches a reply to its request; requests can be pipelined.

    BATCH_HEADER u32 records · u64 bytes · names. That many bytes follow, outside of any frame: for each record
                 u32 length · key · u8 'M' or 'D' · u32 length · data · u64 created, in ms      → BATCH_ACK
    BATCH_ACK    names. RESET_ACK and READY_ACK have the same, or nothing                       no reply
    names        u32 length · topic · u32 length · group

    HELLO        JSON: version, name, user, password, token, claim, owner                → RESULT
    PUBLISH      a batch in which every message has a subject                            → RESULT, a receipt for each
    APPEND       u64 topic · u32 partition · u32 partitions · a producer's batch         → RESULT: its offset
    STAGE        u64 topic · u32 partition · u32 partitions · u64 number · u16 length · the name of a transaction
                 · a batch for it                                                        → RESULT: where it is staged
    FETCH        u64 topic · u32 partition · u32 wait_ms · u64 offset · u64 end · u32 bytes_max     → BATCHES
    OPEN         JSON: a subscription, its pattern, group, mode, start, credit, refresh  → RESULT: its positions
    END          u64 subscription                                                        → RESULT
    CREDIT       u64 subscription · u32 messages: allow this many more                   no reply
    SETTLE       u64 subscription · u8 verb · u64 generation · u64 delay_us
                 · u64 topic · u32 partition · u32 count · u16 length · u64 offset[count]
                 · the reason of the failure, in UTF-8                                   → RESULT: those refused
    CALL         JSON: `call` and its arguments                                          → RESULT
    SNAPSHOT     JSON: empty, or `end`, the number of a snapshot to release              → RESULT: its number, and the
                 number and bytes of the file with its listing (see store/snapshot.py)
    READ         u64 snapshot · u32 file · u64 position · u32 bytes_max                  → BYTES
    ACK          for a RESET or READY, with its id                                       no reply

    RESULT       JSON
    ERROR        JSON: code, text
    BATCHES      u64 start · u64 committed · stored batches, back to back
    MESSAGES     `id` is the subscription: u64 topic · u32 partition · u64 generation · u16 length of the topic's name
                 · u32 redelivered · the name · (u32 index, u32 deliveries)[redelivered] · a batch
    BYTES        bytes of the file
    ENDED        `id` is the subscription. JSON: code, text: the subscription has ended
    RESET        `id` is the server's. JSON: subscription, topic: discard it, all is sent again         → ACK
    READY        the same: all has been sent                                                            → ACK

A batch is sent as it is stored (see batch.py). 0x16 is not used, because TLS starts with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, NoReturn

from penstock.errors import BadFrame, BadRequest
from penstock.model.batch import BATCH_BYTES_MAX, Buffer

HEAD: Final = struct.Struct("!BQI")
# Limits of JSON requests, in bytes (unless they carry a message) and values: decoding cannot be interrupted.
JSON_BYTES_MAX: Final = 2 << 20
JSON_VALUES_MAX: Final = 1 << 16
# A batch and the fields before it.
FRAME_BYTES_MAX: Final = BATCH_BYTES_MAX + (1 << 20)
# Bytes to read at once. A larger frame gets its own memory, which is filled in place.
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
# The maximum number of messages in one SETTLE frame.
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
    # Replies to RESET and READY of some clients; ACK means the same.
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


# Frames with a batch: others are small.
_WITH_BATCH: Final = frozenset({Type.PUBLISH, Type.APPEND, Type.STAGE})


class Verb(IntEnum):
    """Requests of a consumer about messages that it has received."""

    ACK = 0
    NACK = 1
    EXTEND = 2
    REJECT = 3
    COMMIT = 4
    # Not processed, so it does not count as a delivery.
    RELEASE = 5


class Frame(NamedTuple):
    type: int
    id: int
    payload: bytes | bytearray


class FrameReader:
    """Split the bytes of a connection into frames. Read the next bytes into `buffer()`, then call `filled` with their
    number. In between, nothing else may use `scratch`, which connections of one thread can share.
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
        """`bytes_max` limits a payload, `json_bytes_max` one without a batch; `frames_max` limits the number of frames
        returned at once. Memory for an announced payload is allocated only as its bytes arrive."""
        self.bytes_max = bytes_max
        self._json_bytes_max = json_bytes_max
        self._ahead_bytes = ahead_bytes
        self.frames_max = frames_max
        # Whether complete frames are left, which `more` returns.
        self.has_more = False
        # Why nothing more can be read. Not an exception, whose traceback would keep objects alive.
        self._refusal: str | None = None
        self._scratch = memoryview(scratch)
        # The start of an incomplete frame.
        self._rest = b""
        # A frame too large for scratch, its length, and the bytes received of it.
        self._large: Frame | None = None
        self._large_length = self._large_end = 0

    @property
    def expected(self) -> int:
        """Return the size of the large frame being received; 0 if there is none."""
        return 0 if self._large is None else self._large_length

    def clear(self) -> None:
        """Drop an incomplete frame: the connection has ended."""
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
        """Grow the memory of the large frame without a large temporary copy."""
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
        """Return the frames that are now complete. Raise BadFrame if the next bytes are not an allowed frame; if
        complete frames precede them, raise at the next call. `check` raises immediately.
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
                    # Copy only the bytes that are already here.
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
        """Return more complete frames, like `filled`."""
        self.buffer()
        return self.filled(0)

    def check(self) -> None:
        """Raise if the next bytes are not an allowed frame: then nothing more can be read."""
        if self._refusal is not None:
            raise BadFrame(self._refusal)

    def feed(self, data: Buffer) -> list[Frame]:
        """Return the frames of these bytes, like `filled`."""
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
    """Return the head of a frame whose payload follows."""
    return HEAD.pack(kind, number, length)


def json_frame(kind: Type, number: int, value: Any) -> bytes:
    return frame(kind, number, json.dumps(value, separators=(",", ":")).encode())


def read_json(payload: Buffer) -> dict[str, Any]:
    try:
        text = str(payload, "utf-8")
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
        if "\\u" in text:
            # An escape can still produce a lone surrogate, which is not text.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("invalid JSON: an object is required")
    return value


def read_request(payload: Buffer) -> dict[str, Any]:
    """Parse the JSON of a client, like `read_json`. The number of values is limited, and so are time and memory."""
    data = bytes(payload)
    if _structure(data) > JSON_VALUES_MAX:
        # Strings may contain these characters too: count again without strings.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        if data.count(b'"') > 2 * JSON_VALUES_MAX or _structure(b"".join(data.split(b'"')[::2])) > JSON_VALUES_MAX:
            raise BadRequest(f"a request of more than {JSON_VALUES_MAX} values in JSON")
    return read_json(payload)


def _structure(data: bytes) -> int:
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# The payloads that are not JSON: pairs of encode and decode.


class Append(NamedTuple):
    topic_id: int
    partition: int
    partitions: int


def append_frame(number: int, to: Append, batch: Buffer) -> bytes:
    return frame(Type.APPEND, number, _APPEND.pack(*to), batch)


def read_append(payload: Buffer) -> tuple[Append, memoryview]:
    _check(len(payload) >= _APPEND.size)
    return Append(*_APPEND.unpack_from(payload)), memoryview(payload)[_APPEND.size :]


class StageTarget(NamedTuple):
    """The partition that a staged batch goes to when its transaction is committed."""

    to: Append
    name: bytes
    number: int


def stage_frame(number: int, stage: StageTarget, batch: Buffer) -> bytes:
    head = _STAGE.pack(*stage.to, stage.number, len(stage.name))
    return frame(Type.STAGE, number, head + stage.name, batch)


def read_stage(payload: Buffer) -> tuple[StageTarget, memoryview]:
    _check(len(payload) >= _STAGE.size)
    *to, number, length = _STAGE.unpack_from(payload)
    end = _STAGE.size + length
    _check(len(payload) >= end)
    return StageTarget(Append(*to), bytes(payload[_STAGE.size : end]), number), memoryview(payload)[end:]


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
    """Return the bytes before `length` bytes of batches."""
    return head(Type.BATCHES, number, _BATCHES.size + length) + _BATCHES.pack(start, committed)


def read_batches(payload: Buffer) -> tuple[int, int, memoryview]:
    """Return the log's start, its committed offset, and the batches."""
    _check(len(payload) >= _BATCHES.size)
    start, committed = _BATCHES.unpack_from(payload)
    return start, committed, memoryview(payload)[_BATCHES.size :]


class Messages(NamedTuple):
    topic_id: int
    partition: int
    generation: int
    topic: bytes
    # The delivery attempt by index, for redelivered messages.
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
    """Return a BATCH_HEADER and its records, which follow it outside of a frame."""
    size = sum(map(len, records))
    fields = _BATCH_HEADER.pack(len(records), size)
    return b"".join((frame(Type.BATCH_HEADER, number, fields, names(topic, group)), *records))


def batch_record(key: bytes, data: bytes, created_ms: int, *, is_delete: bool) -> bytes:
    head = _LENGTH.pack(len(key)) + key + (b"D" if is_delete else b"M")
    return b"".join((head, _LENGTH.pack(len(data)), data, created_ms.to_bytes(8, "big")))


def names(topic: bytes, group: bytes) -> bytes:
    return b"".join((_LENGTH.pack(len(topic)), topic, _LENGTH.pack(len(group)), group))


def read_names(payload: Buffer) -> tuple[bytes, bytes]:
    """Return the topic and the group of a BATCH_ACK, RESET_ACK or READY_ACK."""
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
