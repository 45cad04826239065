"""The segments of a log: when a new one begins, and how its index finds a batch."""

from __future__ import annotations

import errno
import struct
from random import Random

import pytest

from penstock.log.policy import Policy
from penstock.model.batch import parse
from penstock.testing import FaultyFiles, PowerCut
from tests.support.logs import append, open_log, values
from tests.support.small_logs import (
    DIRECTORY,
    FLUSH,
    LARGE,
    READERS,
    SMALL,
    append_flushed,
    append_told,
    fill,
    kill,
    numbers,
    open_small,
    write,
)
from tests.support.watched import Call, WatchedFiles


def test_a_segment_is_rolled_at_its_size() -> None:
    """ST-16"""
    disk = FaultyFiles()
    log = open_small(disk)
    for _ in range(100):
        append_flushed(log, bytes(300))
    sizes = [segment.size for segment in log.segments]
    head = 4096 - max(sizes)
    assert len(sizes) > 5
    assert all(size <= 4096 for size in sizes)
    assert all(size > 4096 - 600 for size in sizes[:-1]), f"rolled too early, though {head} bytes were left"
    assert [log.segments[0].base, log.segments[-1].path.name] == [0, f"{log.segments[-1].base:020d}.log"]
    assert values(log) == [bytes(300)] * 100


def test_one_write_may_fill_several_segments() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    answers = [append_told(log, b"%d:" % number + LARGE) for number in range(5)]
    log.flush()
    assert answers == [[(number, None)] for number in range(5)]
    assert [segment.base for segment in log.segments] == [0, 1, 2, 3, 4]
    assert numbers(kill(log, disk)) == [0, 1, 2, 3, 4]


def test_a_batch_larger_than_a_segment_has_one_of_its_own() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    huge = Random(1).randbytes(100_000)
    for value in (b"before", huge, huge, b"after"):
        append_flushed(log, value)
    assert [segment.base for segment in log.segments] == [0, 1, 2, 3]
    for reader in READERS:
        log = kill(log, disk, reader=reader)
        assert values(log, bytes_max=0) == [b"before", huge, huge, b"after"]


def test_a_sealed_segment_is_never_written_again() -> None:
    """ST-07, ST-25"""
    disk = FaultyFiles()
    log = open_small(disk)
    fill(log, 2)
    sealed = {path: disk.content(path) for path in (log.segments[0].path, log.segments[0].index_path)}
    fill(log, 3)
    log.close()
    log = open_small(disk)
    fill(log, 3)
    log = kill(log, disk)
    assert {path: disk.content(path) for path in sealed} == sealed
    assert [segment.sealed for segment in log.segments] == [True] * 7 + [False]


def test_the_name_of_a_new_log_is_durable_before_anything_is_appended() -> None:
    files = WatchedFiles(FaultyFiles())
    log = open_log(DIRECTORY, files=files)
    first = log.segments[0].path
    assert files.calls[0] == Call("make_directory", DIRECTORY)
    assert [call[:2] for call in files.calls[-4:]] == [
        ("create", first),
        ("write", first),
        ("sync", first),
        ("sync_directory", DIRECTORY),
    ]


@pytest.mark.parametrize("policy", [SMALL, FLUSH], ids=["fsync", "flush"])
def test_a_segment_is_synced_before_the_next_is_created_and_that_before_it_is_filled(policy: Policy) -> None:
    files = WatchedFiles(FaultyFiles())
    log = open_small(files, policy)
    append(log, LARGE)
    write(log)
    log.flush()
    append(log, LARGE)
    files.calls.clear()
    write(log)
    old, new = (segment.path for segment in log.segments)
    calls = [call[:2] for call in files.calls if call.name != "read"]
    created = calls.index(("create", new))
    filled = len(calls) - 1 - calls[::-1].index(("write", new))
    assert [name for name, path in calls[:created] if path == old][-1] == "sync"
    assert old not in [path for _, path in calls[created:]]
    assert created < calls.index(("sync", new)) < filled
    assert created < calls.index(("sync_directory", DIRECTORY), created) < filled


def test_no_roll_leaves_a_gap_whenever_the_power_goes() -> None:
    for cut_after in range(40):
        disk = FaultyFiles(seed=cut_after)
        log = open_small(disk)
        append_flushed(log, b"0:" + LARGE)
        disk.cut_after = disk.calls + cut_after
        acknowledged = 1
        try:
            for number in range(1, 5):
                append_flushed(log, b"%d:" % number + LARGE)
                acknowledged = number + 1
        except PowerCut:
            pass
        found = numbers(open_small(disk.power_cut()))
        assert found == list(range(len(found)))
        assert acknowledged <= len(found) <= acknowledged + 1


def test_a_sealed_segment_has_an_index_entry_at_least_every_4_kib() -> None:
    """ST-18, ST-13"""
    disk = FaultyFiles()
    log = open_small(disk, Policy(segment_bytes=64 << 10))
    for number in range(400):
        append(log, b"%d" % number, bytes(100 + number % 200))
    log.flush()
    sealed = log.segments[0]
    content = disk.content(sealed.path)
    offsets, positions, times = read_index(disk.content(sealed.index_path), len(content))
    for offset, position, time in zip(offsets, positions, times, strict=True):
        batch = parse(content, position)
        assert (batch.base_offset, batch.append_time) == (offset, time)
    largest = max(len(batch.data) for batch in log.read_disk(0, 1 << 20))
    gaps = [after - before for before, after in zip(positions, [*positions[1:], len(content)], strict=True)]
    assert positions[0] == 0
    assert max(gaps) < 4096 + largest
    assert min(gaps[:-1]) >= 4096, "it is sparse"


def read_index(data: bytes, log_bytes: int) -> tuple[tuple[int, ...], ...]:
    """The columns of an index file: offsets, positions, append times."""
    magic, version, _, _, entries, indexed = struct.unpack_from("<4sHHIIQ", data)
    assert (magic, version, indexed) == (b"PIDX", 1, log_bytes)
    numbers = struct.unpack_from(f"<{3 * entries}q", data, struct.calcsize("<4sHHIIQ"))
    return tuple(numbers[column * entries : (column + 1) * entries] for column in range(3))


def test_a_random_read_takes_few_bytes_from_the_disk() -> None:
    """ST-24, ST-31: through the index, not by a scan; also in the segment that is still written."""
    files = WatchedFiles(FaultyFiles())
    log = open_log(DIRECTORY, files=files, policy=Policy(segment_bytes=1 << 20))
    for number in range(3000):
        append(log, b"%d:" % number + bytes(500))
    log.flush()
    assert len(log.segments) == 2
    log.read_disk(0, 1)  # opens the file and its index
    for offset in (10, 1000, 1500, 2000, 2999):
        files.calls.clear()
        [batch] = log.read_disk(offset, 1)
        assert batch.base_offset == offset
        assert sum(call.length for call in files.calls if call.name == "read") < 3 * 4096


def test_an_index_that_cannot_be_saved_is_missed_by_nobody() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    disk.fail("create", errno.ENOSPC, path_suffix=".index")
    disk.fail("write", errno.ENOSPC, after=1, path_suffix=".index")
    fill(log, 4)
    assert numbers(kill(log, disk)) == [0, 1, 2, 3]
