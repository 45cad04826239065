"""Reading a log: by offset, by time and by size, from memory and from the disk."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import (
    OffsetOutOfRange,
    Overloaded,
    ReadFailed,
)
from penstock.log.log import Log
from penstock.log.policy import Policy
from penstock.log.scan import Damage, Found
from penstock.log.segment import ReadMode
from penstock.model.batch import Batch, Compression, encode
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock
from tests.support.logs import append, memory_meta, messages, open_log, values
from tests.support.small_logs import (
    COMPACT,
    DIRECTORY,
    LARGE,
    READERS,
    SMALL,
    append_flushed,
    fill,
    kill,
    numbers,
    open_small,
    write,
)
from tests.support.watched import Call, WatchedFiles

# ---- out


@pytest.mark.parametrize("reader", READERS)
def test_reads_cross_segment_boundaries_from_any_offset_in_any_steps(reader: ReadMode) -> None:
    """ST-09, ST-23, ST-27, ST-33"""
    for tail_bytes in (0, 5000, 1 << 20):
        disk = FaultyFiles()
        log = open_small(disk, reader=reader, tail_bytes=tail_bytes)
        for number in range(60):
            append_flushed(log, *(b"%d.%d:" % (number, place) + bytes(100) for place in range(3)))
        assert len(log.segments) > 5
        everything = messages(log)
        assert list(everything) == list(range(180))
        for bytes_max in (0, 1000, 5000, 1 << 20):
            assert messages(log, bytes_max=bytes_max) == everything
            for offset in range(0, 180, 7):
                expected = {place: value for place, value in everything.items() if place >= offset - offset % 3}
                assert messages(log, offset, bytes_max) == expected


def test_a_read_in_the_midst_of_a_batch_gives_the_whole_batch() -> None:
    for tail_bytes in (0, 1 << 20):
        log = open_small(FaultyFiles(), tail_bytes=tail_bytes)
        append_flushed(log, b"a", b"b", b"c")
        for offset in range(3):
            assert [batch.base_offset for batch in log.read(offset, 1000)] == [0]


def test_a_read_gives_at_least_one_batch_and_else_no_more_than_bytes_max() -> None:
    for tail_bytes in (0, 1 << 20):
        log = open_log(DIRECTORY, files=FaultyFiles(), tail_bytes=tail_bytes)
        for _ in range(10):
            append(log, bytes(100))
        log.flush()
        [batch] = log.read(0, 0)
        size = len(batch.data)
        for bytes_max, count in ((1, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (9 * size, 9), (99 * size, 10)):
            assert len(log.read(0, bytes_max)) == count
        assert len(log.read(8, 99 * size)) == 2


@pytest.mark.parametrize("reader", READERS)
def test_a_read_at_the_end_returns_at_once_with_nothing(reader: ReadMode) -> None:
    """ST-26, ST-28, ST-29: the end of the active segment, whether it is empty, full or just begun."""
    log = open_small(FaultyFiles(), reader=reader)
    assert log.read(0, 1000) == log.read_disk(0, 1000) == []
    for number in range(10):
        append_flushed(log, bytes(1500))
        assert log.read(number + 1, 1000) == log.read_disk(number + 1, 1000) == []


def test_an_offset_that_the_log_does_not_hold_is_refused() -> None:
    log = open_small(FaultyFiles(), Policy(segment_bytes=4096, retain_bytes=1))
    fill(log, 3)
    log.upkeep.retain()
    assert (log.start, log.end) == (2, 3)
    for read in (log.read, log.read_disk):
        for offset in (-1, 0, 1, 4, 1 << 60):
            with pytest.raises(OffsetOutOfRange) as refusal:
                read(offset, 1000)
            assert (refusal.value.offset, refusal.value.start, refusal.value.end) == (offset, 2, 3)


def test_mmap_gives_the_same_bytes_as_pread() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    for number in range(50):
        append_flushed(log, b"%d:" % number + bytes(700), compression=list(Compression)[number % 3])
    log.close()
    found = []
    for reader in READERS:
        log = open_small(disk, reader=reader)
        found.append([bytes(batch.data) for offset in range(50) for batch in log.read_disk(offset, 2000)])
        log.close()
    assert found[0] == found[1]


def test_sealed_segments_are_mapped_and_the_active_one_is_read() -> None:
    """ST-09: a mapping of a file that grows would be of its old size."""
    files = WatchedFiles(FaultyFiles())
    log = open_small(files, reader="mmap")
    fill(log, 3)
    files.calls.clear()
    assert numbers(log) == [0, 1, 2]
    mapped = [call.path for call in files.calls if call.name == "view"]
    read = {call.path for call in files.calls if call.name == "read" and call.path.suffix == ".log"}
    assert mapped == [segment.path for segment in log.segments[:2]]
    assert read == {log.segments[2].path}


def test_what_was_read_stays_readable_when_its_segment_is_dropped() -> None:
    for reader in READERS:
        log = open_small(FaultyFiles(), Policy(segment_bytes=4096, retain_bytes=1), reader=reader)
        fill(log, 3)
        held = log.read_disk(0, 1)
        log.upkeep.retain()
        assert held[0].columns().values() == [b"0:" + LARGE]


# ---- tail


def open_store(files: Any, **settings: Any) -> Store:
    return Store(
        Path("/data"), files=files, clock=ManualClock(), meta=memory_meta(), settings=StoreSettings(**settings)
    )


def test_a_reader_who_keeps_up_never_touches_the_disk() -> None:
    files = WatchedFiles(FaultyFiles())
    with open_store(files) as store:
        log = store.log(store.create_topic("t", policy=SMALL).id)
        for number in range(20):
            append(log, b"%d:" % number + LARGE)
            store.flush()
            files.calls.clear()
            assert numbers(log, number) == [number]
        assert numbers(log) == list(range(20))
        assert files.calls == []


def test_logs_share_one_tail_budget_and_the_oldest_batch_goes_first() -> None:
    files = WatchedFiles(FaultyFiles())
    with open_store(files, tail_bytes_max=20_000) as store:
        quiet, busy = (store.log(store.create_topic(name).id) for name in ("quiet", "busy"))
        append(quiet, b"0:" + LARGE)
        for number in range(5):
            append(busy, b"%d:" % number + LARGE)
        store.flush()
        assert (quiet.read_tail(0, 1), busy.read_tail(0, 1)) != (None, None)
        for number in range(5, 8):
            append(busy, b"%d:" % number + LARGE)
        store.flush()
        assert quiet.read_tail(0, 1) is None
        assert busy.read_tail(0, 1) is None
        assert busy.read_tail(7, 1) is not None
        files.calls.clear()
        assert (numbers(quiet), numbers(busy)) == ([0], list(range(8)))
        assert files.count("read", ".log") > 0


def test_bytes_that_wait_for_the_disk_are_bounded_over_all_logs() -> None:
    with open_store(FaultyFiles(), unflushed_bytes_max=10_000) as store:
        one, other = (store.log(store.create_topic(name).id) for name in ("one", "other"))
        append(one, LARGE)
        append(other, LARGE)
        append(one, LARGE)
        with pytest.raises(Overloaded):
            append(other, LARGE)
        assert store.rounds.unflushed.used <= 10_000
        append(other, b"this still fits")
        store.flush()
        assert store.rounds.unflushed.used == 0
        assert append(other, LARGE) == 2
        store.flush()
        assert (len(values(one)), len(values(other))) == (2, 3)


def test_a_batch_above_the_bound_is_taken_when_no_more_than_half_of_it_waits() -> None:
    with open_store(FaultyFiles(), unflushed_bytes_max=1000) as store:
        log = store.log(store.create_topic("t").id)
        append(log, b"a")
        assert not store.rounds.unflushed.is_crowded
        append(log, LARGE)
        assert store.rounds.unflushed.is_crowded
        with pytest.raises(Overloaded):
            append(log, b"b")
        store.flush()
        assert values(log) == [b"a", LARGE]


def test_refused_batches_do_not_wait_any_more() -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        log = store.log(store.create_topic("t").id)
        disk.fail("write", errno.ENOSPC, path_suffix=".log")
        append(log, LARGE)
        append(log, LARGE)
        store.flush()
        assert store.rounds.unflushed.used == 0


# ---- time


def test_offset_at_finds_the_first_message_of_a_time_or_later() -> None:
    clock = ManualClock(1000)
    disk = FaultyFiles()
    log = open_small(disk, clock=clock)
    assert log.offset_at(0) == log.offset_at(5000) == 0
    for number in range(10):
        append_flushed(log, b"%d:" % number + bytes(1500), b"second")
        clock.advance(100)
    assert len(log.segments) > 3
    for _ in range(2):
        for number in range(10):
            assert log.offset_at(1000 + 100 * number) == 2 * number
            assert log.offset_at(1001 + 100 * number) == 2 * number + 2
        assert log.offset_at(0) == 0
        assert log.offset_at(1 << 60) == 20
        log.close()
        log = open_small(disk, clock=clock)


def test_offset_at_knows_nothing_of_what_is_not_committed() -> None:
    clock = ManualClock(1000)
    log = open_small(FaultyFiles(), clock=clock)
    append_flushed(log, b"a")
    clock.advance(100)
    append(log, b"b")
    write(log)
    assert log.offset_at(1100) == 1
    assert log.offset_at(1000) == 0


def test_append_times_never_go_back_when_the_clock_does() -> None:
    clock = ManualClock(1_000_000)
    disk = FaultyFiles()
    log = open_small(disk, clock=clock)
    append_flushed(log, b"a")
    clock.set_wall(500_000)
    append_flushed(log, b"b")
    log = kill(log, disk, clock=clock)
    append_flushed(log, b"c")
    clock.set_wall(1_000_001)
    append_flushed(log, b"d")
    assert [batch.append_time for batch in log.read(0, 1 << 20)] == [1_000_000] * 3 + [1_000_001]
    assert log.offset_at(1_000_001) == 3


# ---- upkeep in one thread, reading in another: each of these steps in between what a reader found and what it opens

STEPS = [("pread", "open"), ("pread", "read"), ("mmap", "open"), ("mmap", "view")]


def step_in(files: WatchedFiles, name: str, act: Callable[[], object]) -> None:
    """Before the next call of that name on a log file, let `act` happen."""

    def before(call: Call) -> None:
        if call.name == name and call.path.suffix == ".log":
            files.before = None
            act()

    files.before = before


@pytest.mark.parametrize(("reader", "name"), STEPS)
def test_a_read_of_a_segment_that_is_dropped_meanwhile_is_answered_or_out_of_range(reader: ReadMode, name: str) -> None:
    files = WatchedFiles(FaultyFiles())
    log = open_small(files, reader=reader)
    fill(log, 4)
    log.policy = Policy(segment_bytes=4096, retain_bytes=1)
    for segment in log.segments[:-1]:
        segment.release()
    step_in(files, name, log.upkeep.retain)
    found: list[Batch] = []
    with contextlib.suppress(OffsetOutOfRange):
        found = log.read_disk(0, 1)
    assert [batch.columns().values() for batch in found] in ([], [[b"0:" + LARGE]])
    assert numbers(log) == [3]


@pytest.mark.parametrize(("reader", "name"), STEPS)
def test_a_read_of_a_segment_that_is_compacted_meanwhile_finds_all_that_stays(reader: ReadMode, name: str) -> None:
    files = WatchedFiles(FaultyFiles())
    log = open_small(files, COMPACT, reader=reader)
    for number in range(4):
        append_flushed(log, b"%d:" % number + LARGE, keys=[b"k"])
    for segment in log.segments[:-1]:
        segment.release()
    step_in(files, name, log.upkeep.compact)
    found: list[Batch] = []
    offset = 0
    while batches := log.read_disk(offset, 1):
        found += batches
        offset = batches[-1].end
    assert found[-1].columns().values() == [b"3:" + LARGE]
    assert all(batch.columns().values()[0].endswith(LARGE) for batch in found)


def test_segments_that_are_dropped_while_an_offset_is_sought_are_passed_over() -> None:
    clock = ManualClock(1000)
    files = WatchedFiles(FaultyFiles())
    log = open_small(files, clock=clock)
    for number in range(4):
        append_flushed(log, b"%d:" % number + LARGE)
        clock.advance(100)
    log.close()
    log = open_small(files, Policy(segment_bytes=4096, retain_bytes=1), clock=clock)
    step_in(files, "open", log.upkeep.retain)
    assert log.offset_at(1150) in (2, 3)


# ---- a disk that does not give back what is there


@pytest.mark.parametrize("read", [lambda log: log.read_disk(0, 1), lambda log: log.offset_at(1 << 60)])
def test_a_read_that_fails_is_an_error_of_the_disk_and_may_be_repeated(read: Callable[[Log], object]) -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    fill(log, 3)
    for segment in log.segments[:-1]:
        segment.release()
    expected = read(log)
    for segment in log.segments[:-1]:
        segment.release()
    disk.fail("read", errno.EIO, path_suffix=".log")
    with pytest.raises(ReadFailed, match="Input/output error"):
        read(log)
    assert str(read(log)) == str(expected)


def test_a_scan_of_a_segment_that_grows_meanwhile_ends_where_it_began_to_look() -> None:
    """Upkeep and verify look at the active segment while it is written."""
    log = open_log(Path("/log"), files=FaultyFiles())
    append(log, b"a")
    log.flush()
    scan = log.segments[-1].scan(check=True)
    found = [next(scan)]
    for _ in range(3):
        append(log, b"b" * 1000)
        log.flush()
        found += [item] if (item := next(scan, None)) is not None else []
    assert not [item for item in found if isinstance(item, Damage)]
    assert [item.batch.count for item in found if isinstance(item, Found)] == [0, 1]


# ---- where a batch of a producer is, and offsets by size


def test_a_log_knows_which_batches_it_holds() -> None:
    log = open_small(FaultyFiles())
    first, second = (encode([b"a"], timestamp=0, producer=7, sequence=number) for number in range(2))
    assert not log.producers.is_duplicate(first)
    assert not log.producers.is_duplicate(second)
    append_flushed(log, b"a", producer=7, sequence=0)
    assert log.producers.is_duplicate(first)
    assert not log.producers.is_duplicate(second)
    append(log, b"b", producer=7, sequence=1)
    assert log.producers.is_duplicate(second)
    assert not log.producers.is_duplicate(encode([b"a"], timestamp=0, producer=8, sequence=0))
    assert not log.producers.is_duplicate(encode([b"a"], timestamp=0, producer=7, sequence=5))
    append_flushed(log, b"c")
    assert not log.producers.is_duplicate(encode([b"c"], timestamp=0))


def places(log: Log) -> list[tuple[int, int]]:
    """Offset, and bytes from the beginning of the log, of each batch: found by walking over all of them."""
    found = []
    before = 0
    for segment in log.segments:
        for each in segment.scan():
            assert isinstance(each, Found)
            if each.batch.count:
                found.append((each.batch.base_offset, before + each.position))
        before += segment.size
    return found


@pytest.mark.parametrize("seed", range(5))
def test_an_offset_so_many_bytes_further_is_that_of_a_batch_and_never_nearer(seed: int) -> None:
    random = Random(seed)
    policy = Policy(segment_bytes=random.choice([4096, 20_000, 1 << 20]))
    log = open_log(DIRECTORY, files=FaultyFiles(), policy=policy)
    for _ in range(150):
        append_flushed(log, *(random.randbytes(random.choice([1, 50, 700, 3000])) for _ in range(random.randint(1, 3))))
    walked = places(log)
    begins = [offset for offset, _ in walked]
    for _ in range(400):
        offset = random.randrange(log.end)
        size = random.choice([1, 500, 4096, 10_000, 100_000, 1 << 30])
        found = log.offset_after(offset, size)
        here = max(at for begin, at in walked if begin <= offset)
        assert found in begins or found == log.committed
        assert found > offset
        if found < log.committed:
            there = dict(walked)[found]
            assert there >= here + size, f"{there - here} bytes behind {offset}, not {size}"
            # As near as the indexes know: an entry every 4 KiB, each at the beginning of a batch.
            largest = max(after - before for (_, before), (_, after) in pairwise(walked))
            assert there <= here + size + 2 * 4096 + 2 * largest


def test_an_offset_further_than_there_is_anything_is_the_end_of_what_is_committed() -> None:
    log = open_small(FaultyFiles())
    assert log.offset_after(0, 1) == 0
    fill(log, 3)
    append(log, LARGE)
    assert log.offset_after(0, 1 << 40) == 3
    assert log.offset_after(3, 1) == 3
    assert log.offset_after(2, 1) == 3
    for offset in (5, 1 << 60):
        with pytest.raises(OffsetOutOfRange):
            log.offset_after(offset, 1)


def test_an_offset_that_retention_dropped_is_refused_when_it_is_asked_how_far_it_is() -> None:
    log = open_small(FaultyFiles(), policy=Policy(segment_bytes=4096, retain_bytes=8192))
    fill(log, 6)
    assert log.upkeep.retain()
    with pytest.raises(OffsetOutOfRange):
        log.offset_after(0, 1)
    assert log.offset_after(log.start, 1) == log.start + 1


def test_who_walks_by_size_comes_to_the_end_and_misses_nothing() -> None:
    log = open_small(FaultyFiles())
    for number in range(300):
        append_flushed(log, b"%d" % number)
    offset, steps = 0, [0]
    while offset < log.committed:
        offset = log.offset_after(offset, 1000)
        steps.append(offset)
    assert steps == sorted(set(steps))
    assert steps[-1] == 300
