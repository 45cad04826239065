"""Cursus' protocol: a frame holds a command, which is text, or a batch. Numbers are in network order.

    u16 0xBA7C · u16 length · topic · i32 partition · u8 length · acks · u8 idempotent · u64 first · u64 last
    · i32 count and for each message
    u64 offset · u64 sequence · u16 length · producer · u16 length · key · i64 epoch · u32 length · value

A command may have an envelope in front: u16 length · topic. A frame may be compressed with gzip, lz4 or snappy (as one
block, or as blocks in Xerial's framing). An empty frame is a heartbeat.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

import lz4.frame

from penstock.errors import BadFrame, BadRequest
from penstock.model.run import Run
from penstock.wire.prefixed import frame
from penstock.wire.qb import LENGTH

# Limits of a decompressed frame: bytes per compressed byte, a minimum that is always allowed, and a maximum.
PACKING_RATIO_MAX: Final = 64
PLAIN_BYTES_LEAST: Final = 1 << 20
PLAIN_BYTES_MAX: Final = 16 << 20
# Limit of the messages of one batch: each needs more memory than its bytes.
RECORDS_MAX: Final = 1 << 16
# Limit of a command, without the message of PUBLISH.
COMMAND_BYTES_MAX: Final = 64 << 10
# Limit of the topic names in one CONSUME.
PATTERN_CHARS_MAX: Final = 256


# ---- compression


class Packing(Enum):
    NONE = b""
    GZIP = b"\x1f\x8b"
    LZ4 = b"\x04\x22\x4d\x18"
    # In Xerial's framing; a single block has no magic bytes.
    SNAPPY = b"\x82SNAPPY\0"


# Xerial's magic bytes and two versions; then blocks, each with its length. Only the last block is below 1 KiB.
_XERIAL: Final = struct.pack(">8sII", Packing.SNAPPY.value, 1, 1)
_BLOCK_BYTES: Final = 32 << 10
_BLOCKS_MAX: Final = PLAIN_BYTES_MAX >> 10


def is_packed(payload: bytes) -> bool:
    marks = (Packing.GZIP.value, Packing.LZ4.value, Packing.SNAPPY.value)
    return payload.startswith(marks) or _begins_as_snappy(payload)


def unpack(payload: bytes) -> tuple[bytes, Packing]:
    """Decompress a frame, and return its compression too. Stop at a frame that exceeds the limit."""
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
        f"a frame that is cut off, continues after its end, or unpacks to more than {bytes_max} bytes "
        f"({PACKING_RATIO_MAX} times its size, at most {PLAIN_BYTES_MAX}): send fewer messages in each"
    )


def _begins_as_snappy(payload: bytes) -> bool:
    """Return whether this may be one block of snappy. It has no magic bytes, but begins with the decompressed length
    and the first bytes uncompressed, which are those of a command, a batch or an envelope."""
    head = payload[:16]
    at = next((index for index, byte in enumerate(head[:5]) if byte < 0x80), None)
    if at is None or len(head) < at + 3 or not any(head[: at + 1]):
        return False
    tag = head[at + 1]
    # A literal: its length minus one, or the number of bytes that hold it.
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
        # It only looked like snappy.
        return payload, Packing.NONE
    if not is_marked and (is_command(payload) or is_batch(payload)):
        return payload, Packing.NONE
    raise _not_whole(bytes_max)


def _snappy_blocks(payload: bytes) -> list[bytes]:
    blocks: list[bytes] = []
    at = len(_XERIAL)
    while at < len(payload) and len(blocks) < _BLOCKS_MAX:
        begin = at + LENGTH.size
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
            # The peer has sent a snappy frame, so the package is installed.
            from cramjam import snappy

            blocks = (
                bytes(snappy.compress_raw(payload[at : at + _BLOCK_BYTES]))
                for at in range(0, len(payload), _BLOCK_BYTES)
            )
            return b"".join([_XERIAL, *map(frame, blocks)])
        case Packing.NONE:
            return payload


# ---- commands


class _Syntax(NamedTuple):
    """The arguments of a command: positional in this order, or named, then also these."""

    ordered: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    # The number of required arguments, and whether the last takes the rest of the line.
    least: int = 0
    takes_rest: bool = False


_GROUP: Final = ("topic", "group", "member", "generation")
_FORMS: Final[Mapping[str, _Syntax]] = {
    "CREATE": _Syntax(("topic", "partitions"), ("retention_hours", "retention_bytes")),
    "DELETE": _Syntax(("topic",)),
    "LIST": _Syntax(),
    "DESCRIBE": _Syntax(("topic",)),
    "SUBSCRIBE": _Syntax(("topic", "group", "consumers")),
    "PUBLISH": _Syntax(
        ("topic", "message"),
        ("key", "partition", "acks", "producerId", "seqNum", "epoch", "isIdempotent"),
        least=2,
        takes_rest=True,
    ),
    "CONSUME": _Syntax(
        ("topic", "partition", "offset", "follow"),
        ("group", "member", "autoOffsetReset", "batch", "wait_ms"),
        least=3,
    ),
    "STREAM": _Syntax(("topic", "partition", "offset"), ("group", "member"), least=2),
    "REGISTER_GROUP": _Syntax(("topic", "group"), least=2),
    "JOIN_GROUP": _Syntax(("topic", "group", "member"), least=3),
    "SYNC_GROUP": _Syntax(_GROUP, least=3),
    "LEAVE_GROUP": _Syntax(_GROUP, least=3),
    "HEARTBEAT": _Syntax(_GROUP, least=3),
    "COMMIT_OFFSET": _Syntax(("topic", "partition", "group", "offset"), ("member", "generation"), least=4),
    "FETCH_OFFSET": _Syntax(("topic", "partition", "group"), least=3),
    "BATCH_COMMIT": _Syntax((*_GROUP, "offsets"), least=5),
    "GROUP_STATUS": _Syntax(("group", "topic"), least=1),
    "AUTH": _Syntax((), ("user", "password", "token")),
    "HELP": _Syntax(),
    "EXIT": _Syntax(),
}
VERBS: Final = tuple(_FORMS)
_WORD: Final = re.compile(rb"\S+")
_VERB_BYTES_MAX: Final = 100


class Command(NamedTuple):
    verb: str
    arguments: Mapping[str, str]
    # The message of PUBLISH, unchanged.
    message: bytes = b""
    # Whether the arguments are named; then messages are sent in batches.
    is_named: bool = False


def usage(verb: str) -> str:
    form = _FORMS[verb]
    words = [f"<{name}>" if index < max(form.least, 1) else f"[{name}]" for index, name in enumerate(form.ordered)]
    return " ".join([verb, *words, *(f"[{name}=]" for name in form.named)])


def open_envelope(payload: bytes) -> tuple[bytes, bytes]:
    """Return the topic in the envelope, if there is one, and the rest."""
    if not payload or payload[0] >= 0x20 or payload[0] in b"\t\r\n":
        return b"", payload
    length = int.from_bytes(payload[:2], "big")
    if len(payload) < 2 + length:
        raise BadFrame("an envelope whose topic is longer than its frame")
    return payload[2 : 2 + length], payload[2 + length :]


def is_command(payload: bytes) -> bool:
    return _verb(payload)[0] in _FORMS


def read_command(payload: bytes) -> Command:
    """Parse a command. Raise BadRequest with Cursus' error text."""
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
    """Return the first word in upper case, and the rest after one blank."""
    word = _WORD.search(payload)
    if word is None:
        return "", b""
    return word[0][:_VERB_BYTES_MAX].decode(errors="replace").upper(), payload[word.end() + 1 :]


def _read_ordered(verb: str, form: _Syntax, rest: bytes) -> Command:
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


def _read_named(verb: str, form: _Syntax, rest: bytes) -> Command:
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
        raise BadRequest("a command must be UTF-8, except the published message") from None


# ---- batches

_BATCH: Final = b"\xba\x7c"
_SHORT: Final = struct.Struct(">H")
_PARTITION: Final = struct.Struct(">iB")
_RANGE: Final = struct.Struct(">?QQi")
_RECORD: Final = struct.Struct(">QQH")
_VALUE: Final = struct.Struct(">qI")
# The minimum size of a message.
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
    """Encode stored messages. A key that is too long for a batch is omitted."""
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
    """Read fields in sequence, never beyond the end."""

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
