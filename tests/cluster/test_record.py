"""The bytes of a record, and of what its body holds."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from crc32c import crc32c

from penstock.cluster.checkpoint import Checkpoint, Mark, Member
from penstock.cluster.record import BODY_BYTES_MAX, HEADER_BYTES, Kind, Record, decode
from penstock.errors import CorruptRecord

RECORD = Record(Kind.ROUND, 7, 0xFEDCBA9876543210, 3, 41, b"a round", 2)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("body", [b"", b"x", bytes(1000)])
def test_a_record_is_read_as_it_was_written(kind: Kind, body: bytes) -> None:
    record = replace(RECORD, kind=kind, body=body)

    assert decode(record.encode(), record.position) == record


def test_the_layout_is_as_drawn() -> None:
    data = RECORD.encode()

    assert data[:4] == b"PSLR"
    assert struct.unpack_from("<I", data, 4) == (crc32c(data[8:]),)
    assert struct.unpack_from("<HBBIQQQQQ", data, 8) == (1, Kind.ROUND, 0, 7, 41, 7, 0xFEDCBA9876543210, 3, 2)
    assert data[HEADER_BYTES:] == b"a round"


def test_every_damaged_byte_is_noticed() -> None:
    data = RECORD.encode()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(CorruptRecord, match="record 41 of the shared log is damaged"):
            decode(bytes(damaged), 41)


def test_every_truncated_record_is_noticed_and_so_is_a_longer_one() -> None:
    data = RECORD.encode()
    for length in range(len(data)):
        with pytest.raises(CorruptRecord):
            decode(data[:length], 41)
    with pytest.raises(CorruptRecord, match="8 bytes of body instead of 7"):
        decode(data + b"x", 41)


def test_a_record_that_was_copied_to_another_position_is_noticed() -> None:
    with pytest.raises(CorruptRecord, match=r"record 42 .* it was written for position 41"):
        decode(RECORD.encode(), 42)


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [(8, b"\x02", "version 2, this Penstock reads version 1"), (10, b"\x09", "unknown kind 9"), (11, b"\x01", "kind")],
)
def test_what_a_newer_version_may_have_written_is_refused(offset: int, value: bytes, reason: str) -> None:
    data = bytearray(RECORD.encode())
    data[offset : offset + 1] = value
    data[4:8] = struct.pack("<I", crc32c(bytes(data[8:])))

    with pytest.raises(CorruptRecord, match=reason):
        decode(bytes(data), 41)


def test_a_body_has_a_limit() -> None:
    with pytest.raises(AssertionError):
        replace(RECORD, body=bytes(BODY_BYTES_MAX + 1)).encode()


def test_a_copy_for_another_position_differs_in_nothing_else() -> None:
    assert RECORD.at(50, 9) == replace(RECORD, position=50, committed=9)


def test_bodies_in_json_are_read_as_they_were_written() -> None:
    member = Member("a", "a.example:4222")
    checkpoint = Checkpoint(9, 2, 1 << 63, 5, "a", [member], [(1, 4), (6, 7)], None, "content")

    assert Member.decode(replace(RECORD, kind=Kind.JOIN, body=member.encode())) == member
    assert Checkpoint.decode(replace(RECORD, kind=Kind.CHECKPOINT, body=checkpoint.encode())) == checkpoint
    assert Mark.decode(Mark(3, 9, 12).encode(), 3) == Mark(3, 9, 12)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"node":1}', b'{"node":"a","rank":1}'])
def test_an_invalid_body_is_named(body: bytes) -> None:
    with pytest.raises(CorruptRecord, match="record 41 of the shared log has an invalid body"):
        Member.decode(replace(RECORD, kind=Kind.JOIN, body=body))


@pytest.mark.parametrize("data", [b"", b"[]", b'{"number":-1}', Mark(4).encode()])
def test_a_damaged_trim_mark_is_named(data: bytes) -> None:
    with pytest.raises(CorruptRecord, match="trim mark 3 of the shared log is damaged"):
        Mark.decode(data, 3)
