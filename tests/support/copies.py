"""Copies of a topic in a directory, without a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.log.files import Files
from penstock.log.policy import SEGMENT_BYTES_MIN
from penstock.model.run import Run
from penstock.replica.copies import Copies, OriginTopic
from penstock.replica.copy import CopiedRecord, Copy
from penstock.testing import FaultyFiles, ManualClock
from tests.support.logs import memory_meta

DATA = Path("/data")


PRICES = OriginTopic("prices", 7)


ALL = 1 << 62


def record(offset: int, key: str | None = None, *, size: int = 40, deleted: bool = False) -> CopiedRecord:
    value = b"" if deleted else f"{offset}:".encode().ljust(size, b".")
    key_bytes = None if key is None else key.encode()
    return CopiedRecord(offset=offset, value=value, key=key_bytes, deleted=deleted, timestamp_us=offset)


def run_of(records: Sequence[CopiedRecord]) -> Run:
    run = Run([each.subject.encode() or b"prices" for each in records], [each.value for each in records])
    run.keys = {index: each.key for index, each in enumerate(records) if each.key is not None}
    run.tombstones = {index for index, each in enumerate(records) if each.deleted}
    run.headers = {
        index: "".join(f"{name}: {value}\r\n" for name, value in each.headers.items()).encode()
        for index, each in enumerate(records)
        if each.headers
    }
    run.timestamps = [each.timestamp_us for each in records]
    run.offsets = [each.offset for each in records]
    run.base_offset = records[0].offset
    return run


def append(copies: Copies, batch: Mapping[int, Sequence[CopiedRecord]], topic: OriginTopic = PRICES) -> int:
    return copies.append(topic, {partition: run_of(records) for partition, records in batch.items()})


def opened(directory: Path, pattern: str = "prices") -> Copies:
    """Open the copies in a real directory."""
    return Copies(directory, pattern, segment_bytes_max=SEGMENT_BYTES_MIN, clock=ManualClock())


def on_disk(files: Files, index_directory: Path) -> Copies:
    """Open the copies on a faulty disk, with their indexes in a real directory."""
    return Copies(
        DATA,
        "prices",
        segment_bytes_max=SEGMENT_BYTES_MIN,
        files=files,
        clock=ManualClock(),
        meta=memory_meta(),
        index_directory=index_directory,
    )


def everything(copy: Copy, partition: int = 0) -> list[CopiedRecord]:
    records, rest = copy.find_range(partition, 0, ALL, limit=100_000, bytes_max=ALL)
    assert rest is None
    return records


def served(copies: Copies, partition: int = 0) -> list[CopiedRecord]:
    with copies.read() as copy:
        return everything(copy, partition)


def offsets(copies: Copies, partition: int = 0) -> list[int]:
    return [each.offset for each in served(copies, partition)]


def copy_of(copies: Copies) -> Copy:
    with copies.read() as copy:
        return copy


def used(disk: FaultyFiles) -> int:
    total, free = disk.space(DATA)
    return total - free
