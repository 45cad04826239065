"""A record of the shared log, as the bytes of one object.

All numbers are little-endian.

     0  4s  magic        "PSLR"
     4  u32 crc          crc32c of byte 8 to the end
     8  u16 version
    10  u8  kind         see `Kind`
    11  u8  zero
    12  u32 length       bytes of the body
    16  u64 position     where it is in the log: a copy elsewhere is not this record
    24  u64 epoch        one more with each leader
    32  u64 incarnation  a random number that a node draws each time it tries to lead
    40  u64 number       1, 2, 3, … within the epoch; 0 for LEAD
    48  u64 committed    the highest number that was committed when this was sent
    56  body

`committed` decides nothing. It shows that a record is missing which was there: see `take_over`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from crc32c import crc32c

from penstock.errors import CorruptRecord

VERSION: Final = 1
HEADER_BYTES: Final = 56
# A round holds at least one batch of any size (`model.batch.BATCH_BYTES_MAX`), and the names of the logs.
BODY_BYTES_MAX: Final = 80 << 20
RECORD_BYTES_MAX: Final = HEADER_BYTES + BODY_BYTES_MAX
# Positions are 20 digits in the names of objects.
POSITION_MAX: Final = (1 << 63) - 1

_HEADER: Final = struct.Struct("<4sIHBBIQQQQQ")
_MAGIC: Final = b"PSLR"
_CRC_END: Final = 8
_U32: Final = struct.Struct("<I")


class Kind(IntEnum):
    # Begins an epoch. Body: the leader, a `Member`.
    LEAD = 1
    # The batches of a round, of all partitions.
    ROUND = 2
    # Body: a `Checkpoint`.
    CHECKPOINT = 3
    # A node joins or leaves the cluster. Body: a `Member`.
    JOIN = 4
    LEAVE = 5


@dataclass(frozen=True, slots=True)
class Record:
    kind: Kind
    epoch: int
    incarnation: int
    number: int
    position: int
    body: bytes
    committed: int = 0

    def at(self, position: int, committed: int) -> Record:
        """Return a copy for another position."""
        return replace(self, position=position, committed=committed)

    def encode(self) -> bytes:
        assert len(self.body) <= BODY_BYTES_MAX, f"{len(self.body)} bytes in one record"
        fixed = (_MAGIC, 0, VERSION, self.kind, 0, len(self.body))
        order = (self.position, self.epoch, self.incarnation, self.number, self.committed)
        data = bytearray(_HEADER.pack(*fixed, *order))
        data += self.body
        _U32.pack_into(data, 4, crc32c(memoryview(data)[_CRC_END:]))
        return bytes(data)


def decode(data: bytes, position: int) -> Record:
    """Return the record that was read at `position`. Raises CorruptRecord if it is not intact, or not from there."""
    if len(data) < HEADER_BYTES:
        raise _corrupt(position, f"{len(data)} bytes, a record has at least {HEADER_BYTES}")
    magic, crc, version, kind, zero, length, there, epoch, incarnation, number, committed = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise _corrupt(position, f"it begins with {magic!r}, not with {_MAGIC!r}")
    if version != VERSION:
        raise _corrupt(position, f"version {version}, this Penstock reads version {VERSION}: upgrade it")
    if length != len(data) - HEADER_BYTES:
        raise _corrupt(position, f"{len(data) - HEADER_BYTES} bytes of body instead of {length}")
    if crc32c(memoryview(data)[_CRC_END:]) != crc:
        raise _corrupt(position, "its checksum is wrong")
    if there != position:
        raise _corrupt(position, f"it was written for position {there}")
    if zero or kind not in _KINDS:
        raise _corrupt(position, f"unknown kind {kind}")
    return Record(_KINDS[kind], epoch, incarnation, number, position, data[HEADER_BYTES:], committed)


_KINDS: Final = {int(kind): kind for kind in Kind}


def _corrupt(position: int, reason: str) -> CorruptRecord:
    return CorruptRecord(f"record {position} of the shared log is damaged: {reason}")
