"""The prefixed door: frames that begin with their length, four bytes. Numbers are in network order.

Two protocols share it. **QB** is the Python broker's: every frame is a message.

    u32 total · u32 kind · u64 sequence · u64 timestamp, ms · u32 length · properties · u32 length · body

`total` counts all of it. Properties are `key=value` with a zero byte behind each. A request has a sequence that its
client chose, and the ACK to it has the same; a DATA has the offset of its message. Some clients do not count the four
bytes of `total` itself, and some write both lengths before the properties: how one writes is found out from what it
sends, and it is answered alike.

**Cursus** sends commands, which are text, or batches:

    u16 0xBA7C · u16 length · topic · i32 partition · u8 length · acks · u8 idempotent · u64 first · u64 last
    · i32 count and for each message
    u64 offset · u64 sequence · u16 length · producer · u16 length · key · i64 epoch · u32 length · value

Before a command there may be an envelope, u16 length · topic. A frame may be packed with gzip, lz4 or snappy (as one
block, or as blocks in Xerial's framing). One without a byte in it is a sign of life. What stands behind the first
length tells the two protocols apart: no text and no batch begins with three zero bytes, and every kind of a QB message
does.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from typing import Final, NamedTuple

import lz4.frame

from penstock.errors import BadFrame, BadRequest
from penstock.run import Run

# Cursus' limit, for both.
FRAME_BYTES_MAX: Final = 64 << 20
# What a packed frame may unpack to: this many bytes for each packed one, a little in any case, and so much at the most.
PACKING_RATIO_MAX: Final = 64
PLAIN_BYTES_LEAST: Final = 1 << 20
PLAIN_BYTES_MAX: Final = 16 << 20
# Messages of one batch, and properties of one message: each costs more memory than its bytes.
RECORDS_MAX: Final = 1 << 16
PROPERTIES_MAX: Final = 1024
# Of a command, besides what PUBLISH publishes.
COMMAND_BYTES_MAX: Final = 64 << 10
# Of the names of topics in one CONSUME.
PATTERN_CHARS_MAX: Final = 256

_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">IIQQI")
_HEAD_BOTH: Final = struct.Struct(">IIQQII")
# What a QB message has besides properties and body.
_FIXED: Final = _HEAD_BOTH.size


class Dialect(Enum):
    QB = "QB"
    CURSUS = "Cursus"


class Style(NamedTuple):
    """How a QB client writes its frames."""

    counts_itself: bool = True
    lengths_first: bool = False


_STYLE: Final = Style()


class Kind(IntEnum):
    DATA = 1
    ACK = 2
    HEARTBEAT = 3
    CREATE_TOPIC = 4
    CREATE_SUBSCRIPTION = 5
    DELETE_SUBSCRIPTION = 6
    SUBSCRIBE = 7
    UNSUBSCRIBE = 8
    PUBLISH = 9


class Message(NamedTuple):
    """As it is in a frame of QB's; `kind` may be one that is not known."""

    kind: int
    sequence: int
    timestamp_ms: int
    properties: bytes
    body: bytes


class FrameReader:
    """Bytes to frames: messages of QB's, or what is in frames of Cursus'.

    When nothing behind them can be read any more, `refusal` says why.
    """

    __slots__ = (
        "_frames_max",
        "_has_layout",
        "_has_total",
        "_have",
        "_needed",
        "_parts",
        "bytes_max",
        "dialect",
        "has_more",
        "refusal",
        "style",
    )

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX, *, frames_max: int | None = None) -> None:
        """`frames_max`: how many frames one `feed` returns at the most."""
        self.bytes_max = bytes_max
        self._frames_max = frames_max
        self.dialect: Dialect | None = None
        # How the peer writes; and whether a message has told, by its total and by its layout. It sticks to it.
        self.style = Style()
        self._has_total = self._has_layout = False
        self.refusal: BadFrame | None = None
        # What is not a whole frame yet: joined only when there is as much as is needed.
        self._parts: list[bytes] = []
        self._have = 0
        self._needed = _LENGTH.size
        # Whether whole frames are left, which another `feed`, also of nothing, takes.
        self.has_more = False

    @property
    def expected(self) -> int:
        """How many bytes the frame has that is under way; 0: none is, or it is not known yet."""
        return self._needed if self._have < self._needed and self.refusal is None else 0

    def clear(self) -> None:
        """Drop what has come of a frame: the rest never will."""
        self._parts, self._have = [], 0

    def feed(self, data: bytes) -> list[Message | bytes]:
        """Return the frames that are complete, or as many as may be: see `has_more`."""
        self.has_more = False
        if self.refusal is not None:
            return []
        if data:
            self._parts.append(data)
            self._have += len(data)
        if self._have < self._needed or not self._parts:
            return []
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        frames: list[Message | bytes] = []
        at = 0
        try:
            while (size := self._size(data, at)) is not None:
                is_qb = self.dialect is Dialect.QB
                frames.append(self._message(data, at, size) if is_qb else data[at + _LENGTH.size : at + size])
                at += size
                if len(frames) == self._frames_max:
                    self.has_more = True
                    self._needed = _LENGTH.size
                    break
        except BadFrame as error:
            # Without the frames of this, which hold the bytes.
            self.refusal = error.with_traceback(None)
            at = len(data)
        rest = data[at:]
        self._parts, self._have = [rest] if rest else [], len(rest)
        return frames

    def _size(self, data: bytes, at: int) -> int | None:
        """How many bytes the frame there has; None if they are not all there, and `_needed` are."""
        available = len(data) - at
        if available < _LENGTH.size:
            self._needed = _LENGTH.size
            return None
        length: int = _LENGTH.unpack_from(data, at)[0]
        if self.dialect is None:
            self._needed = _LENGTH.size + min(length, 3)
            if available >= self._needed:
                begin = data[at + _LENGTH.size : at + self._needed]
                self.dialect = Dialect.QB if begin == b"\0\0\0" else Dialect.CURSUS
        if length > self.bytes_max:
            raise BadFrame(f"a frame of {length} bytes, {self.bytes_max} are allowed")
        if self.dialect is None:
            return None
        if self.dialect is Dialect.QB:
            return self._size_of_message(data, at, length)
        self._needed = _LENGTH.size + length
        return self._needed if available >= self._needed else None

    def _size_of_message(self, data: bytes, at: int, total: int) -> int | None:
        if total < _HEAD.size:
            raise BadFrame(f"a message of {total} bytes: {_FIXED} are the least")
        available = len(data) - at
        if available < _HEAD.size:
            self._needed = _HEAD.size
            return None
        properties: int = _LENGTH.unpack_from(data, at + _HEAD.size - 4)[0]
        if properties > total - _HEAD.size:
            raise BadFrame("a message whose lengths do not agree")
        if available == _HEAD.size:
            self._needed = _HEAD.size + 1
            return None
        # A name begins with a letter, and a length that is allowed with less than a blank.
        lengths_first = data[at + _HEAD.size] < 0x20 if properties else self.style.lengths_first
        # Where the length of the body is.
        place = _HEAD.size + (0 if lengths_first else properties)
        if available < place + 4:
            self._needed = place + 4
            return None
        size: int = _FIXED + properties + _LENGTH.unpack_from(data, at + place)[0]
        if size - total not in (0, _LENGTH.size):
            raise BadFrame("a message whose lengths do not agree")
        style = Style(size == total, lengths_first)
        if (self._has_total and style.counts_itself != self.style.counts_itself) or (
            self._has_layout and style.lengths_first != self.style.lengths_first
        ):
            raise BadFrame("a message whose lengths do not agree")
        self.style, self._has_total, self._has_layout = style, True, self._has_layout or bool(properties)
        self._needed = size
        return size if available >= size else None

    def _message(self, data: bytes, at: int, size: int) -> Message:
        _, kind, sequence, timestamp_ms, length = _HEAD.unpack_from(data, at)
        begin = at + (_FIXED if self.style.lengths_first else _HEAD.size)
        return Message(
            kind, sequence, timestamp_ms, data[begin : begin + length], data[at + _FIXED + length : at + size]
        )


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


# QB.


def message(
    kind: Kind, sequence: int, timestamp_ms: int, properties: bytes = b"", body: bytes = b"", style: Style = _STYLE
) -> bytes:
    size = _FIXED + len(properties) + len(body)
    total = size if style.counts_itself else size - _LENGTH.size
    if style.lengths_first:
        return _HEAD_BOTH.pack(total, kind, sequence, timestamp_ms, len(properties), len(body)) + properties + body
    head = _HEAD.pack(total, kind, sequence, timestamp_ms, len(properties))
    return b"".join((head, properties, _LENGTH.pack(len(body)), body))


def properties(fields: Mapping[str, object]) -> bytes:
    """Raises BadRequest if one of them would be read as something else."""
    parts = []
    for name, value in fields.items():
        text = str(value)
        if not name or "=" in name or "\0" in name or "\0" in text:
            raise BadRequest(f"a property {name!r} cannot be sent: a name has no =, and nothing has a zero byte")
        parts.append(f"{name}={text}\0")
    try:
        return "".join(parts).encode()
    except UnicodeEncodeError:
        raise BadRequest("a property is not text") from None


def read_properties(block: bytes) -> dict[str, str]:
    """Of two with one name the last counts."""
    try:
        text = block.decode()
    except UnicodeDecodeError:
        raise BadRequest("Invalid properties: they are not UTF-8") from None
    if block.count(b"\0") > PROPERTIES_MAX:
        raise BadRequest(f"Invalid properties: {block.count(bytes(1))} of them, {PROPERTIES_MAX} are allowed")
    found = {}
    for item in text.removesuffix("\0").split("\0") if text else ():
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise BadRequest(f"Invalid properties: {item[:100]!r} is not key=value")
        found[name] = value
    return found


# Cursus: how its frames are packed.


class Packing(Enum):
    NONE = b""
    GZIP = b"\x1f\x8b"
    LZ4 = b"\x04\x22\x4d\x18"
    # In Xerial's framing; a single block has no mark.
    SNAPPY = b"\x82SNAPPY\0"


# Xerial's mark and two versions; then blocks, each behind its length. An encoder makes none below 1 KiB but the last.
_XERIAL: Final = struct.pack(">8sII", Packing.SNAPPY.value, 1, 1)
_BLOCK_BYTES: Final = 32 << 10
_BLOCKS_MAX: Final = PLAIN_BYTES_MAX >> 10


def is_packed(payload: bytes) -> bool:
    marks = (Packing.GZIP.value, Packing.LZ4.value, Packing.SNAPPY.value)
    return payload.startswith(marks) or _begins_as_snappy(payload)


def unpack(payload: bytes) -> tuple[bytes, Packing]:
    """Return what is in a frame, and how it was packed. A frame that unpacks to too much is refused on the way."""
    bytes_max = min(max(PACKING_RATIO_MAX * len(payload), PLAIN_BYTES_LEAST), PLAIN_BYTES_MAX)
    if payload.startswith(Packing.SNAPPY.value) or _begins_as_snappy(payload):
        return _unpack_snappy(payload, bytes_max)
    try:
        if payload.startswith(Packing.GZIP.value):
            gzip = zlib.decompressobj(wbits=31)
            data = gzip.decompress(payload, bytes_max)
            return _whole(data, bytes_max, is_whole=gzip.eof and not gzip.unused_data), Packing.GZIP
        if payload.startswith(Packing.LZ4.value):
            lz = lz4.frame.LZ4FrameDecompressor()
            data = lz.decompress(payload, bytes_max)
            return _whole(data, bytes_max, is_whole=lz.eof and not lz.unused_data), Packing.LZ4
    except (zlib.error, RuntimeError, EOFError) as error:
        raise BadFrame(f"a frame that cannot be unpacked: {error}") from None
    return payload, Packing.NONE


def _whole(data: bytes, bytes_max: int, *, is_whole: bool) -> bytes:
    if not is_whole:
        raise _not_whole(bytes_max)
    return data


def _not_whole(bytes_max: int) -> BadFrame:
    return BadFrame(
        f"a frame that is cut off, goes on behind its end, or unpacks to more than {bytes_max} bytes "
        f"({PACKING_RATIO_MAX} times its size, {PLAIN_BYTES_MAX} at the most): send fewer messages in each"
    )


def _begins_as_snappy(payload: bytes) -> bool:
    """Whether it may be one block of snappy. That has no mark: it begins with the length of what is packed, then come
    the first bytes of that as they are, which are those of a command, a batch or an envelope."""
    head = payload[:16]
    at = next((index for index, byte in enumerate(head[:5]) if byte < 0x80), None)
    if at is None or len(head) < at + 3 or not any(head[: at + 1]):
        return False
    tag = head[at + 1]
    # A literal: its length less one, or how many bytes have that.
    begin = at + 2 + max(0, (tag >> 2) - 59)
    first = payload[begin : begin + _VERB_BYTES_MAX]
    return tag & 3 == 0 and (first.startswith((_BATCH, b"\0")) or is_command(first))


def _unpack_snappy(payload: bytes, bytes_max: int) -> tuple[bytes, Packing]:
    is_marked = payload.startswith(Packing.SNAPPY.value)
    try:
        from cramjam import DecompressionError, snappy
    except ImportError:
        if not is_marked and (is_command(payload) or is_batch(payload)):
            return payload, Packing.NONE
        raise BadFrame(
            "a frame packed with snappy, which this broker cannot unpack: install penstock[snappy] where it runs, or "
            "use gzip, lz4 or none"
        ) from None
    try:
        blocks = _snappy_blocks(payload) if is_marked else [payload]
        if sum(map(snappy.decompress_raw_len, blocks)) <= bytes_max:
            return b"".join([bytes(snappy.decompress_raw(block)) for block in blocks]), Packing.SNAPPY
    except DecompressionError as error:
        if is_marked:
            raise BadFrame(f"a frame that cannot be unpacked: {error}") from None
        # It only looked like a block.
        return payload, Packing.NONE
    if not is_marked and (is_command(payload) or is_batch(payload)):
        return payload, Packing.NONE
    raise _not_whole(bytes_max)


def _snappy_blocks(payload: bytes) -> list[bytes]:
    blocks: list[bytes] = []
    at = len(_XERIAL)
    while at < len(payload) and len(blocks) < _BLOCKS_MAX:
        begin = at + _LENGTH.size
        at = begin + int.from_bytes(payload[at:begin], "big")
        blocks.append(payload[begin:at])
    if at != len(payload) or b"" in blocks:
        raise BadFrame(
            f"a frame that cannot be unpacked: its blocks of snappy are empty, cut off, or more than {_BLOCKS_MAX}"
        )
    return blocks


def pack(payload: bytes, packing: Packing) -> bytes:
    match packing:
        case Packing.GZIP:
            gzip = zlib.compressobj(wbits=31)
            return gzip.compress(payload) + gzip.flush()
        case Packing.LZ4:
            packed: bytes = lz4.frame.compress(payload)
            return packed
        case Packing.SNAPPY:
            # Whoever reads this has packed a frame with it before, so it is installed.
            from cramjam import snappy

            blocks = (
                bytes(snappy.compress_raw(payload[at : at + _BLOCK_BYTES]))
                for at in range(0, len(payload), _BLOCK_BYTES)
            )
            return b"".join([_XERIAL, *map(frame, blocks)])
        case Packing.NONE:
            return payload


# Cursus: commands.


class _Form(NamedTuple):
    """How a command is written: with its arguments in this order, or by name, then with these too."""

    ordered: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    # So many of the first must be there; and whether the last takes all that is left.
    least: int = 0
    takes_rest: bool = False


_GROUP: Final = ("topic", "group", "member", "generation")
_FORMS: Final[Mapping[str, _Form]] = {
    "CREATE": _Form(("topic", "partitions"), ("retention_hours", "retention_bytes")),
    "DELETE": _Form(("topic",)),
    "LIST": _Form(),
    "DESCRIBE": _Form(("topic",)),
    "SUBSCRIBE": _Form(("topic", "group", "consumers")),
    "PUBLISH": _Form(
        ("topic", "message"),
        ("key", "partition", "acks", "producerId", "seqNum", "epoch", "isIdempotent"),
        least=2,
        takes_rest=True,
    ),
    "CONSUME": _Form(
        ("topic", "partition", "offset", "follow"),
        ("group", "member", "autoOffsetReset", "batch", "wait_ms"),
        least=3,
    ),
    "STREAM": _Form(("topic", "partition", "offset"), ("group", "member"), least=2),
    "REGISTER_GROUP": _Form(("topic", "group"), least=2),
    "JOIN_GROUP": _Form(("topic", "group", "member"), least=3),
    "SYNC_GROUP": _Form(_GROUP, least=3),
    "LEAVE_GROUP": _Form(_GROUP, least=3),
    "HEARTBEAT": _Form(_GROUP, least=3),
    "COMMIT_OFFSET": _Form(("topic", "partition", "group", "offset"), ("member", "generation"), least=4),
    "FETCH_OFFSET": _Form(("topic", "partition", "group"), least=3),
    "BATCH_COMMIT": _Form((*_GROUP, "offsets"), least=5),
    "GROUP_STATUS": _Form(("group", "topic"), least=1),
    "AUTH": _Form((), ("user", "password", "token")),
    "HELP": _Form(),
    "EXIT": _Form(),
}
VERBS: Final = tuple(_FORMS)
_WORD: Final = re.compile(rb"\S+")
_VERB_BYTES_MAX: Final = 100


class Command(NamedTuple):
    verb: str
    arguments: Mapping[str, str]
    # What PUBLISH publishes, as it came.
    message: bytes = b""
    # Whether the arguments came with their names; then messages go back in batches.
    is_named: bool = False


def usage(verb: str) -> str:
    form = _FORMS[verb]
    words = [f"<{name}>" if index < max(form.least, 1) else f"[{name}]" for index, name in enumerate(form.ordered)]
    return " ".join([verb, *words, *(f"[{name}=]" for name in form.named)])


def open_envelope(payload: bytes) -> tuple[bytes, bytes]:
    """The topic in front of what is sent, if there is one, and the rest."""
    if not payload or payload[0] >= 0x20 or payload[0] in b"\t\r\n":
        return b"", payload
    length = int.from_bytes(payload[:2], "big")
    if len(payload) < 2 + length:
        raise BadFrame("an envelope whose topic is longer than its frame")
    return payload[2 : 2 + length], payload[2 + length :]


def is_command(payload: bytes) -> bool:
    return _verb(payload)[0] in _FORMS


def read_command(payload: bytes) -> Command:
    """Raises BadRequest with what Cursus says of it."""
    verb, rest = _verb(payload)
    if not verb:
        raise BadRequest("empty command")
    form = _FORMS.get(verb)
    if form is None:
        raise BadRequest(f"unknown command: {verb[:100]}. Type HELP for available commands.")
    if not form.takes_rest and len(payload) > COMMAND_BYTES_MAX:
        raise BadRequest(f"a command of {len(payload)} bytes, {COMMAND_BYTES_MAX} are allowed")
    first = _WORD.search(rest)
    name, equals, _ = first[0].partition(b"=") if first else (b"", b"", b"")
    if equals and name.decode(errors="replace") in (*form.ordered, *form.named):
        return _read_named(verb, form, rest)
    return _read_ordered(verb, form, rest)


def _verb(payload: bytes) -> tuple[str, bytes]:
    """The first word, in capitals, and what stands behind it and one blank."""
    word = _WORD.search(payload)
    if word is None:
        return "", b""
    return word[0][:_VERB_BYTES_MAX].decode(errors="replace").upper(), payload[word.end() + 1 :]


def _read_ordered(verb: str, form: _Form, rest: bytes) -> Command:
    if form.takes_rest:
        topic, blank, value = rest.lstrip().partition(b" ")
        if not blank:
            raise _wrong(verb)
        return Command(verb, {"topic": _text(topic)}, value)
    words = rest.split(None, len(form.ordered))
    if not words and "topic" in form.ordered and not form.least:
        raise BadRequest("missing topic name")
    if not form.least <= len(words) <= len(form.ordered):
        raise _wrong(verb)
    return Command(verb, dict(zip(form.ordered, map(_text, words), strict=False)))


def _read_named(verb: str, form: _Form, rest: bytes) -> Command:
    arguments: dict[str, str] = {}
    message = None
    for word in _WORD.finditer(rest):
        name, equals, value = word[0].partition(b"=")
        if name == b"message" and equals and form.takes_rest:
            message = rest[word.start() + len(b"message=") :]
            break
        key = name.decode(errors="replace") if equals else "offsets"
        if key in arguments or key not in (*form.ordered, *form.named):
            shown = word[0][:100].decode(errors="replace")
            raise BadRequest(f"unknown parameter, or one that came before: {shown}. Expected: {usage(verb)}")
        if len(word[0]) > COMMAND_BYTES_MAX:
            raise BadRequest(f"a parameter of {len(word[0])} bytes, {COMMAND_BYTES_MAX} are allowed")
        arguments[key] = _text(value if equals else name)
    if form.takes_rest and message is None:
        raise _wrong(verb)
    return Command(verb, arguments, message or b"", is_named=True)


def _wrong(verb: str) -> BadRequest:
    return BadRequest(f"invalid {verb} syntax. Expected: {usage(verb)}")


def _text(word: bytes) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError:
        raise BadRequest("a command is UTF-8, but for what is published") from None


# Cursus: batches.

_BATCH: Final = b"\xba\x7c"
_SHORT: Final = struct.Struct(">H")
_PARTITION: Final = struct.Struct(">iB")
_RANGE: Final = struct.Struct(">?QQi")
_RECORD: Final = struct.Struct(">QQH")
_VALUE: Final = struct.Struct(">qI")
# The least that a message takes.
_RECORD_BYTES: Final = _RECORD.size + _SHORT.size + _VALUE.size


class Record(NamedTuple):
    offset: int
    value: bytes
    key: bytes = b""
    producer: bytes = b""
    epoch: int = 0
    sequence: int = 0


class Records(NamedTuple):
    topic: bytes
    partition: int
    records: list[Record]
    acks: str = "1"
    is_idempotent: bool = False


def is_batch(payload: bytes) -> bool:
    return payload.startswith(_BATCH)


def batch(
    topic: bytes, partition: int, records: Sequence[Record], acks: str = "", *, is_idempotent: bool = False
) -> bytes:
    parts = [
        b"".join(
            (
                _RECORD.pack(record.offset, record.sequence, len(record.producer)),
                record.producer,
                _SHORT.pack(len(record.key)),
                record.key,
                _VALUE.pack(record.epoch, len(record.value)),
                record.value,
            )
        )
        for record in records
    ]
    sequences = [record.sequence for record in records] or [0]
    head = (
        _BATCH,
        _SHORT.pack(len(topic)),
        topic,
        _PARTITION.pack(partition, len(acks.encode())),
        acks.encode(),
        _RANGE.pack(is_idempotent, sequences[0], sequences[-1], len(parts)),
    )
    return b"".join((*head, *parts))


def run_batch(topic: bytes, partition: int, run: Run) -> bytes:
    """Messages that are stored. A key that is too long for a batch is left out."""
    keys = {index: key for index, key in run.keys.items() if len(key) <= 0xFFFF}
    records = [
        Record(offset, value, keys.get(index, b""))
        for index, (offset, value) in enumerate(zip(run.all_offsets(), run.values, strict=True))
    ]
    return batch(topic, partition, records)


def read_batch(payload: bytes) -> Records:
    reader = _Fields(payload, len(_BATCH))
    topic = reader.take(reader.unpack(_SHORT)[0])
    partition, acks_bytes = reader.unpack(_PARTITION)
    acks = _text(reader.take(acks_bytes))
    is_idempotent, _first, _last, count = reader.unpack(_RANGE)
    if not 0 <= count * _RECORD_BYTES <= reader.left:
        raise BadFrame(f"a batch that says it has {count} messages, and is too short for them")
    if count > RECORDS_MAX:
        raise BadFrame(f"a batch of {count} messages, {RECORDS_MAX} are allowed: send fewer in each")
    records = []
    for _ in range(count):
        offset, sequence, producer_bytes = reader.unpack(_RECORD)
        producer = reader.take(producer_bytes)
        key = reader.take(reader.unpack(_SHORT)[0])
        epoch, value_bytes = reader.unpack(_VALUE)
        records.append(Record(offset, reader.take(value_bytes), key, producer, epoch, sequence))
    if reader.left:
        raise BadFrame(f"a batch with {reader.left} bytes behind its last message")
    return Records(topic, partition, records, acks, bool(is_idempotent))


class _Fields:
    """Fields one behind the other, none beyond the end."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise BadFrame("a batch with a length that is longer than the batch")
        self._at += count
        return self._data[self._at - count : self._at]

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))
