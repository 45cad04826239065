"""A record: one message as a segment holds it. Numbers are little-endian.

 0  u32 length          of all behind the first eight bytes
 4  u32 crc             crc32c of all behind it
 8  u64 offset
16  i64 timestamp_us    as its producer said
24  u32 flags           1: it has a key · 2: it deletes its key
28  u32 key_bytes
32  u32 subject_bytes   0: the topic's own name
36  u32 headers_bytes   0: none
40  key · subject · headers, as JSON · value
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from crc32c import crc32c

# A batch of the broker is at most 64 MiB, and headers grow when they become JSON.
RECORD_BYTES_MAX: Final = 256 << 20

_PREFIX: Final = struct.Struct("<II")
_HEAD: Final = struct.Struct("<QqIIII")
HEAD_BYTES: Final = _PREFIX.size + _HEAD.size
_HAS_KEY: Final = 1
_DELETES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    offset: int
    value: bytes
    key: bytes | None = None
    deleted: bool = False
    timestamp_us: int = 0
    subject: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class BadRecord(Exception):
    """Bytes that are no record: the text says why."""


def encode(record: Record) -> bytes:
    key = record.key or b""
    subject = record.subject.encode()
    headers = json.dumps(dict(record.headers), ensure_ascii=False).encode() if record.headers else b""
    flags = (_HAS_KEY if record.key is not None else 0) | (_DELETES if record.deleted else 0)
    head = _HEAD.pack(record.offset, record.timestamp_us, flags, len(key), len(subject), len(headers))
    body = b"".join((head, key, subject, headers, record.value))
    return _PREFIX.pack(len(body), crc32c(body)) + body


def decode(data: bytes) -> Record:
    """Of all the bytes of one record. Raises BadRecord."""
    if len(data) < HEAD_BYTES:
        raise BadRecord(f"a record of {len(data)} bytes, which is shorter than its head")
    length, crc = _PREFIX.unpack_from(data)
    body = memoryview(data)[_PREFIX.size :]
    if length != len(body):
        raise BadRecord(f"a record of {len(body)} bytes says that it has {length}")
    if crc32c(body) != crc:
        raise BadRecord("the checksum is wrong")
    offset, timestamp_us, flags, key_bytes, subject_bytes, headers_bytes = _HEAD.unpack_from(body)
    key_at = _HEAD.size
    subject_at = key_at + key_bytes
    headers_at = subject_at + subject_bytes
    value_at = headers_at + headers_bytes
    if value_at > len(body):
        raise BadRecord("its parts are longer than it is itself")
    return Record(
        offset=offset,
        value=bytes(body[value_at:]),
        key=bytes(body[key_at:subject_at]) if flags & _HAS_KEY else None,
        deleted=bool(flags & _DELETES),
        timestamp_us=timestamp_us,
        subject=bytes(body[subject_at:headers_at]).decode(),
        headers=json.loads(bytes(body[headers_at:value_at])) if headers_bytes else {},
    )


class Scan:
    """The records of a segment from a position on, up to the first that is none: `end` is where that begins, and
    `problem` why it is none, if there are bytes at all."""

    def __init__(self, path: Path, position: int) -> None:
        self.end = position
        self.problem: str | None = None
        self._file = path.open("rb")
        self._file.seek(position)

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def next(self) -> tuple[Record, bytes] | None:
        """A record, and its bytes."""
        prefix = self._file.read(_PREFIX.size)
        if not prefix:
            return None
        try:
            data = prefix + self._file.read(_length(prefix))
            record = decode(data)
        except (BadRecord, ValueError) as error:
            self.problem = str(error)
            return None
        self.end += len(data)
        return record, data


def _length(prefix: bytes) -> int:
    """How many bytes follow; bounded before they are read."""
    if len(prefix) < _PREFIX.size:
        raise BadRecord("it ends within a head")
    length: int = _PREFIX.unpack(prefix)[0]
    if length > RECORD_BYTES_MAX:
        raise BadRecord(f"a record of {length} bytes, which is more than one can have")
    return length
