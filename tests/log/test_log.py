"""What one log does: in, out, its failures and its upkeep. Recovery of damaged logs is in test_recovery."""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import (
    AppendFailed,
    Closed,
    LogFailed,
    OffsetOutOfRange,
    OutOfSequence,
    Overloaded,
    PenstockError,
    ReadFailed,
)
from penstock.log.appender import LogState
from penstock.log.flusher import RESERVE_AHEAD
from penstock.log.log import Log
from penstock.log.log_files import start_name
from penstock.log.policy import Cleanup, Durability, Policy
from penstock.log.producers import IN_FLIGHT_MAX
from penstock.log.scan import Damage, Found
from penstock.log.segment import ReadMode
from penstock.model.batch import Batch, Compression, encode, parse
from penstock.outcome import Outcome
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import append, memory_meta, messages, open_log, values
from tests.support.watched import Call, WatchedFiles

DIRECTORY = Path("/data/log")
SMALL = Policy(segment_bytes=4096)
FLUSH = Policy(segment_bytes=4096, durability=Durability.FLUSH)
COMPACT = Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, tombstone_ms=1000)
# Two of these do not fit into one small segment.
LARGE = Random(0).randbytes(3000)
READERS: tuple[ReadMode, ...] = ("pread", "mmap")

Answers = list[tuple[int, PenstockError | None]]


def open_small(files: Any, policy: Policy = SMALL, **others: Any) -> Log:
    return open_log(DIRECTORY, files=files, policy=policy, **others)


def append_told(log: Log, *items: bytes, source: int = 0, position: int = 0, **columns: Any) -> Answers:
    """Append, and return a list of what its producer is told, as it is told."""
    answers: Answers = []
    batch = encode(items, timestamp=0, **columns)
    outcome = Outcome()
    offset = log.append(batch, source=source, position=position, outcome=outcome)
    outcome.then(lambda error: answers.append((offset, error)))
    return answers


def append_flushed(log: Log, *items: bytes, **columns: Any) -> int:
    offset = append(log, *items, **columns)
    log.flush()
    return offset


def fill(log: Log, segments: int) -> None:
    """Append so many large messages, each of which needs its own segment."""
    for number in range(segments):
        append_flushed(log, b"%d:" % number + LARGE)


def numbers(log: Log, start: int | None = None) -> list[int]:
    """Which of the messages that `fill` appended are there."""
    return [int(value.partition(b":")[0]) for value in values(log, start)]


def write(log: Log) -> None:
    """Write all that waits, without a sync."""
    round_ = log.flusher.begin_write()
    assert round_ is not None
    round_.run()
    log.flusher.finish_write(round_)


def bytes_on(disk: FaultyFiles) -> int:
    return sum(disk.sizes(DIRECTORY).values())


def kill(log: Log, disk: FaultyFiles, **others: Any) -> Log:
    """The log as the next process finds it."""
    disk.kill()
    return open_small(disk, log.policy, **others)


# In: offsets, and what producers are told


def test_append_returns_the_offset_of_the_first_message() -> None:
    log = open_small(FaultyFiles())
    assert [append(log, b"a"), append(log, b"b", b"c", b"d"), append(log, b"e")] == [0, 1, 4]
    assert log.end == 5
    log.flush()
    assert messages(log) == {0: b"a", 1: b"b", 2: b"c", 3: b"d", 4: b"e"}


def test_a_producer_is_told_once_and_only_when_its_batch_is_committed() -> None:
    """ST-12: the acknowledgement comes after the fsync."""
    log = open_small(FaultyFiles())
    first, second = append_told(log, b"a", b"b"), append_told(log, b"c")
    assert (first, second) == ([], [])
    write(log)
    assert (first, second) == ([], [])
    log.flush()
    assert (first, second) == ([(0, None)], [(2, None)])
    append_flushed(log, b"d")
    log.close()
    assert (first, second) == ([(0, None)], [(2, None)])


def test_producers_are_told_in_the_order_in_which_they_appended() -> None:
    log = open_small(FaultyFiles())
    told: list[int] = []
    for number in range(20):
        outcome = Outcome(lambda _, number=number: told.append(number))  # type: ignore[misc]
        log.append(encode([b"%d" % number], timestamp=0), outcome=outcome)
    log.flush()
    assert told == list(range(20))


def test_every_column_and_compression_comes_back() -> None:
    """ST-34: key, event type, data and time of each message."""
    disk = FaultyFiles()
    log = open_small(disk)
    columns: dict[str, Any] = {
        "keys": [b"k", None],
        "subjects": [b"s.1", b"s.2"],
        "replies": [None, b"r"],
        "headers": [b"A: 1\r\n", b""],
        "timestamps": [5, -5],
        "tombstones": [True, False],
    }
    for compression in Compression:
        append_flushed(log, bytes(500), LARGE, compression=compression, **columns)
    log = kill(log, disk)
    for place, compression in enumerate(Compression):
        [batch] = log.read(2 * place, 1)
        read = batch.columns()
        assert batch.compression is compression
        assert read.values() == [bytes(500), LARGE]
        assert (read.keys(), read.subjects(), read.replies()) == ([b"k", None], [b"s.1", b"s.2"], [None, b"r"])
        assert (read.headers(), list(read.timestamps())) == ([b"A: 1\r\n", b""], [5, -5])
        assert read.tombstones() == [True, False]


def test_batches_that_wait_when_the_log_is_closed_are_made_durable() -> None:
    """ST-36: flush on shutdown."""
    disk = FaultyFiles()
    log = open_small(disk)
    answers = append_told(log, b"a")
    log.close()
    assert answers == [(0, None)]
    assert values(open_small(disk.power_cut())) == [b"a"]


def test_a_closed_log_takes_nothing() -> None:
    log = open_small(FaultyFiles())
    log.close()
    with pytest.raises(Closed):
        append(log, b"a")


def test_offsets_go_on_after_a_reopen() -> None:
    """ST-21"""
    disk = FaultyFiles()
    log = open_small(disk)
    append(log, b"a", b"b")
    log.close()
    log = open_small(disk)
    assert append_flushed(log, b"c") == 2
    log = kill(log, disk)
    assert append_flushed(log, b"d") == 3
    assert values(log) == [b"a", b"b", b"c", b"d"]


# Durability: what is visible when


def test_readers_see_only_what_is_committed() -> None:
    for tail_bytes in (0, 1 << 20):
        log = open_small(FaultyFiles(), tail_bytes=tail_bytes)
        append_flushed(log, b"committed")
        append(log, b"waiting")
        assert values(log) == [b"committed"]
        write(log)
        assert values(log) == [b"committed"]
        assert (log.committed, log.marks.written, log.end) == (1, 2, 2)
        append(log, b"behind it")
        assert [values(log), log.read_disk(1, 1000), log.read(2, 1000)] == [[b"committed"], [], []]
        log.flush()
        assert values(log) == [b"committed", b"waiting", b"behind it"]


def test_under_fsync_nothing_is_committed_before_it_would_survive_a_power_cut() -> None:
    for seed in range(50):
        disk = FaultyFiles(seed=seed)
        log = open_small(disk)
        answers = [append_told(log, b"%d" % number) for number in range(3)]
        log.flush()
        answers.append(append_told(log, b"written only"))
        write(log)
        acknowledged = [answer for answer in answers if answer]
        assert len(acknowledged) == 3
        assert values(open_small(disk.power_cut()))[:3] == [b"0", b"1", b"2"]


def test_under_flush_what_is_written_is_committed_once_offsets_are_reserved() -> None:
    log = open_small(FaultyFiles(), FLUSH)
    first = append_told(log, b"a")
    write(log)
    assert (first, values(log)) == ([], [])
    log.flush()
    assert (first, values(log)) == ([(0, None)], [b"a"])
    second = append_told(log, b"b")
    assert second == []
    write(log)
    assert (second, values(log)) == ([(1, None)], [b"a", b"b"])
    assert log.marks.durable == 1


def test_under_flush_an_offset_that_was_read_is_not_given_out_again_after_a_power_cut() -> None:
    lost = 0
    for seed in range(50):
        disk = FaultyFiles(seed=seed)
        log = open_small(disk, FLUSH)
        append_flushed(log, b"durable")
        append(log, b"written, and read")
        write(log)
        assert values(log)[-1] == b"written, and read"
        log = open_small(disk.power_cut(), FLUSH)
        offset = append_flushed(log, b"later")
        assert offset >= 2
        assert messages(log)[offset] == b"later"
        lost += b"written, and read" not in values(log)
    assert lost, "no cut lost what was not synced, and so the test shows nothing"


def test_under_flush_offsets_have_no_hole_after_a_clean_stop() -> None:
    disk = FaultyFiles()
    log = open_small(disk, FLUSH)
    append(log, b"a")
    log.close()
    log = open_small(disk, FLUSH)
    assert log.end == 1
    log.close()
    assert append(open_small(disk, FLUSH), b"b") == 1


def test_under_flush_syncing_a_later_write_makes_the_reservation_durable() -> None:
    log = open_small(FaultyFiles(), FLUSH)
    append_told(log, b"a")
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    log.flusher.finish_write(write)
    append_told(log, b"b")
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    sync = write.sync()
    sync.file.sync()
    log.flusher.finish_write(write)
    log.flusher.finish_sync(sync, None)
    append_told(log, b"c")
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    log.flusher.finish_write(write)
    assert values(log) == [b"a", b"b", b"c"]


def test_under_flush_offsets_are_reserved_anew_before_they_run_out() -> None:
    log = open_small(FaultyFiles(), FLUSH)
    append_flushed(log, b"a")
    # Offsets run out soon: this many messages, told by few bytes.
    span = RESERVE_AHEAD - 10
    append(log, b"b", deltas=[span - 1], span=span)
    write(log)
    log.flush()
    answers = append_told(log, *[b"c"] * 20)
    write(log)
    assert answers == [(1 + span, None)]


def test_under_flush_a_sync_is_due_after_so_many_messages_or_so_long() -> None:
    """ST-04, ST-05: 500 messages or 100 ms, whichever is first."""
    clock = ManualClock()
    log = open_small(FaultyFiles(), FLUSH, clock=clock)
    append_flushed(log, b"a")
    assert log.flusher.sync_due_us(500, 100_000) is None
    clock.advance(7)
    append(log, b"b")
    assert log.flusher.sync_due_us(500, 100_000) is None
    write(log)
    assert log.flusher.sync_due_us(500, 100_000) == 100_007
    clock.advance(50)
    append(log, *[b"c"] * 498)
    write(log)
    assert log.flusher.sync_due_us(500, 100_000) == 100_007
    append(log, b"d")
    write(log)
    assert log.flusher.sync_due_us(500, 100_000) == 0
    log.flush()
    assert log.flusher.sync_due_us(500, 100_000) is None


# Rounds: who waits for whom


def test_what_is_appended_while_a_write_is_under_way_goes_into_the_next() -> None:
    """ST-03"""
    log = open_small(FaultyFiles())
    append(log, b"a")
    append(log, b"b")
    round_ = log.flusher.begin_write()
    assert round_ is not None
    append(log, b"c")
    assert log.flusher.begin_write() is None
    round_.run()
    append(log, b"d")
    log.flusher.finish_write(round_)
    assert (log.marks.written, log.end) == (2, 4)
    following = log.flusher.begin_write()
    assert following is not None
    following.run()
    log.flusher.finish_write(following)
    assert log.marks.written == 4
    log.flush()
    assert values(log) == [b"a", b"b", b"c", b"d"]


def test_all_that_waits_shares_one_write_and_one_sync() -> None:
    """ST-02, ST-06"""
    files = WatchedFiles(FaultyFiles())
    log = open_log(DIRECTORY, files=files)
    files.calls.clear()
    for number in range(100):
        append(log, b"%d" % number)
    assert files.calls == []
    log.flush()
    assert [call.name for call in files.calls] == ["write", "sync"]


def test_a_flush_of_nothing_does_not_touch_the_disk() -> None:
    files = WatchedFiles(FaultyFiles())
    log = open_log(DIRECTORY, files=files)
    append_flushed(log, b"a")
    files.calls.clear()
    log.flush()
    assert files.calls == []


def test_a_log_has_one_sync_under_way_at_the_most() -> None:
    log = open_small(FaultyFiles(), FLUSH)
    append(log, b"a")
    write(log)
    sync = log.flusher.begin_sync()
    assert sync is not None
    append(log, b"b")
    write(log)
    assert log.flusher.begin_sync() is None
    sync.file.sync()
    log.flusher.finish_sync(sync, None)
    assert log.marks.durable == 1
    assert log.flusher.begin_sync() is not None


def test_a_roll_waits_for_the_sync_that_is_under_way() -> None:
    log = open_small(FaultyFiles(), FLUSH)
    append(log, LARGE)
    write(log)
    sync = log.flusher.begin_sync()
    assert sync is not None
    append(log, LARGE)
    assert log.flusher.begin_write() is None
    sync.file.sync()
    log.flusher.finish_sync(sync, None)
    write(log)
    assert values(log) == [LARGE, LARGE]


def test_what_is_written_during_a_sync_is_not_durable_by_it() -> None:
    log = open_small(FaultyFiles(), FLUSH)
    append(log, b"a")
    write(log)
    sync = log.flusher.begin_sync()
    assert sync is not None
    sync.file.sync()
    append(log, b"b")
    write(log)
    log.flusher.finish_sync(sync, None)
    assert (log.marks.durable, log.marks.written) == (1, 2)


# Segments


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


# Out


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


# Tail


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


# Time


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


# Producers


def test_a_batch_that_is_sent_again_is_stored_once_and_answered_with_the_first_offset() -> None:
    """DD-06"""
    log = open_small(FaultyFiles())
    append_flushed(log, b"other")
    assert append_told(log, b"a", producer=7, sequence=0) == []
    log.flush()
    append_flushed(log, b"b", producer=7, sequence=1)
    assert append_told(log, b"a", producer=7, sequence=0) == [(1, None)]
    assert append_told(log, b"b", producer=7, sequence=1) == [(2, None)]
    assert values(log) == [b"other", b"a", b"b"]


def test_a_batch_that_is_sent_again_while_the_first_waits_is_told_with_it() -> None:
    log = open_small(FaultyFiles())
    first = append_told(log, b"a", producer=7)
    again = append_told(log, b"a", producer=7)
    write(log)
    assert (first, again) == ([], [])
    log.flush()
    assert (first, again) == ([(0, None)], [(0, None)])
    assert values(log) == [b"a"]


def test_a_gap_in_the_sequence_is_refused_and_changes_nothing() -> None:
    """DD-06"""
    log = open_small(FaultyFiles())
    append(log, b"a", producer=7, sequence=0)
    with pytest.raises(OutOfSequence, match="1 is next"):
        append(log, b"c", producer=7, sequence=2)
    append(log, b"b", producer=7, sequence=1)
    log.flush()
    assert values(log) == [b"a", b"b"]


def test_a_producer_that_is_not_known_begins_at_sequence_0() -> None:
    """DD-06"""
    log = open_small(FaultyFiles())
    with pytest.raises(OutOfSequence, match="new producer ID"):
        append(log, b"a", producer=7, sequence=1)
    assert append(log, b"a", producer=7, sequence=0) == 0


def test_producers_do_not_know_of_each_other_and_a_batch_without_one_is_always_new() -> None:
    log = open_small(FaultyFiles())
    assert [append(log, b"a", producer=1), append(log, b"a", producer=2)] == [0, 1]
    assert [append(log, b"a"), append(log, b"a")] == [2, 3]


def test_as_many_batches_as_may_be_in_flight_are_known_again() -> None:
    log = open_small(FaultyFiles())
    for sequence in range(IN_FLIGHT_MAX + 5):
        append(log, b"%d" % sequence, producer=7, sequence=sequence)
    log.flush()
    for sequence in range(5, IN_FLIGHT_MAX + 5):
        assert append(log, b"again", producer=7, sequence=sequence) == sequence
    for sequence in range(5):
        with pytest.raises(OutOfSequence):
            append(log, b"again", producer=7, sequence=sequence)


Reopen = Callable[[Log, FaultyFiles], Log]


def reopen_after_close(log: Log, disk: FaultyFiles) -> Log:
    log.close()
    return open_small(disk, log.policy)


REOPENS: list[Reopen] = [reopen_after_close, kill]


@pytest.mark.parametrize("reopen", REOPENS)
@pytest.mark.parametrize("batches", [2, 30])
def test_a_producer_is_known_after_a_reopen(reopen: Reopen, batches: int) -> None:
    """DD-06"""
    disk = FaultyFiles()
    log = open_small(disk)
    for sequence in range(batches):
        append_flushed(log, bytes(500), producer=7, sequence=sequence)
    log = reopen(log, disk)
    assert append_told(log, b"again", producer=7, sequence=batches - 1) == [(batches - 1, None)]
    with pytest.raises(OutOfSequence):
        append(log, b"gap", producer=7, sequence=batches + 1)
    assert append(log, b"next", producer=7, sequence=batches) == batches


def test_a_producer_is_known_when_its_batches_were_rolled_and_dropped() -> None:
    """DD-06: by the snapshot at the head of a segment."""
    disk = FaultyFiles()
    log = open_small(disk, Policy(segment_bytes=4096, retain_bytes=1))
    append_flushed(log, b"a", producer=7, sequence=0)
    append_told(log, b"b", source=9, position=50)
    log.flush()
    fill(log, 4)
    log.upkeep.retain()
    assert log.start > 1
    for _ in range(2):
        assert append_told(log, b"a", producer=7, sequence=0) == [(0, None)]
        assert append_told(log, b"b", source=9, position=50) == [(1, None)]
        log = kill(log, disk)
    assert append(log, b"next", producer=7, sequence=1) == log.end - 1


def test_a_producer_is_known_when_compaction_dropped_its_batch() -> None:
    disk = FaultyFiles()
    log = open_small(disk, COMPACT)
    append_flushed(log, b"old", keys=[b"k"], producer=7, sequence=0)
    append_flushed(log, b"new", keys=[b"k"])
    fill(log, 3)
    assert log.upkeep.compact() == 1
    log = kill(log, disk)
    assert append_told(log, b"old", keys=[b"k"], producer=7, sequence=0) == [(0, None)]


def test_a_batch_that_could_not_be_written_may_be_sent_again() -> None:
    """DD-06: what a log knows of a producer is never more durable than its batches."""
    disk = FaultyFiles()
    log = open_small(disk)
    append_flushed(log, b"a", producer=7, sequence=0)
    disk.fail("write", errno.ENOSPC)
    refused = append_told(log, b"b", producer=7, sequence=1)
    again = append_told(log, b"b", producer=7, sequence=1)
    behind = append_told(log, b"c", producer=7, sequence=2)
    from_source = append_told(log, b"d", source=9, position=5)
    log.flush()
    for answers in (refused, again, behind, from_source):
        [(_, error)] = answers
        assert isinstance(error, AppendFailed)
    with pytest.raises(OutOfSequence):
        append(log, b"c", producer=7, sequence=2)
    assert append(log, b"d") == 1
    assert append_told(log, b"b", producer=7, sequence=1) == []
    assert append_told(log, b"d", source=9, position=5) == []
    log.flush()
    assert values(log) == [b"a", b"d", b"b", b"d"]


def test_a_batch_that_was_lost_with_the_process_may_be_sent_again() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    append_flushed(log, b"a", producer=7, sequence=0)
    append(log, b"b", producer=7, sequence=1)
    log = kill(log, disk)
    assert append_flushed(log, b"b", producer=7, sequence=1) == 1
    assert values(log) == [b"a", b"b"]


def test_a_batch_of_a_source_is_stored_once_and_its_positions_ascend_with_gaps() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    assert [append_told(log, b"a", source=9, position=5), append_told(log, b"b", source=9, position=100)] == [[], []]
    append_told(log, b"other", source=8, position=5)
    log.flush()
    for _ in range(2):
        assert append_told(log, b"b", source=9, position=100) == [(1, None)]
        [(_, error)] = append_told(log, b"a", source=9, position=5)
        assert error is None
        assert values(log) == [b"a", b"b", b"other"]
        [batch] = log.read(1, 1)
        assert (batch.source, batch.position) == (9, 100)
        log = kill(log, disk)
    append_told(log, b"c", source=9, position=101)
    log.flush()
    assert values(log) == [b"a", b"b", b"other", b"c"]


# A write that fails: refused, taken back, and tried again when there is room


def test_a_full_disk_refuses_what_it_has_no_room_for_and_keeps_the_rest() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    append_flushed(log, b"a")
    size = bytes_on(disk)
    disk.capacity = size + 100
    refused = append_told(log, LARGE)
    log.flush()
    [(_, error)] = refused
    assert isinstance(error, AppendFailed)
    assert "No space left" in str(error)
    assert str(log.segments[-1].path) in str(error)
    assert (log.state, values(log), bytes_on(disk)) == (LogState.OPEN, [b"a"], size)
    disk.capacity = None
    assert append_flushed(log, LARGE) == 1
    assert values(log) == [b"a", LARGE]
    assert values(open_small(disk.power_cut())) == [b"a", LARGE]


def test_a_full_disk_refuses_all_that_waits_in_order_and_each_once() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    append_flushed(log, b"a")
    disk.capacity = bytes_on(disk)
    told: list[tuple[int, bool]] = []

    def outcome(offset: int) -> Outcome:
        return Outcome(lambda error: told.append((offset, isinstance(error, AppendFailed))))

    for offset in (1, 2, 3):
        assert log.append(encode([b"b"], timestamp=0), outcome=outcome(offset)) == offset
    round_ = log.flusher.begin_write()
    assert round_ is not None
    log.append(encode([b"appended during the write"], timestamp=0), outcome=outcome(4))
    round_.run()
    assert told == []
    log.flusher.finish_write(round_)
    assert told == [(1, True), (2, True), (3, True), (4, True)]
    disk.capacity = None
    log.flush()
    assert (values(log), log.end) == ([b"a"], 1)
    assert append_flushed(log, b"c") == 1
    assert len(told) == 4


def test_what_was_refused_does_not_come_back_after_a_power_cut() -> None:
    for seed in range(30):
        disk = FaultyFiles(seed=seed)
        log = open_small(disk)
        append_flushed(log, b"a")
        disk.fail("write", errno.ENOSPC)
        append_flushed(log, b"refused", b"refused too")
        append_flushed(log, b"b")
        disk = disk.power_cut()
        assert values(open_small(disk)) == [b"a", b"b"]


ROLL_FAULTS = [("create", ".log"), ("write", "1.log"), ("sync", "1.log"), ("sync_directory", "")]


@pytest.mark.parametrize(("call", "suffix"), ROLL_FAULTS)
def test_a_roll_that_fails_refuses_the_batch_and_the_log_goes_on(call: str, suffix: str) -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    append_flushed(log, b"0:" + LARGE)
    disk.fail(call, errno.ENOSPC, path_suffix=suffix)
    refused = append_told(log, b"refused:" + LARGE)
    log.flush()
    [(_, error)] = refused
    assert isinstance(error, AppendFailed)
    assert (log.state, numbers(log), len(log.segments)) == (LogState.OPEN, [0], 1)
    small = append_told(log, b"1:")
    log.flush()
    assert small == [(1, None)]
    append_flushed(log, b"2:" + LARGE)
    assert numbers(log) == [0, 1, 2]
    assert numbers(open_small(disk.power_cut())) == [0, 1, 2]


@pytest.mark.parametrize(("call", "suffix"), ROLL_FAULTS)
@pytest.mark.parametrize("policy", [SMALL, FLUSH], ids=["fsync", "flush"])
def test_when_a_later_part_of_a_write_fails_the_earlier_parts_are_committed(
    call: str, suffix: str, policy: Policy
) -> None:
    disk = FaultyFiles()
    log = open_small(disk, policy)
    disk.fail(call, errno.ENOSPC, path_suffix=suffix)
    answers = [append_told(log, b"%d:" % number + LARGE) for number in range(3)]
    log.flush()
    assert answers[0] == [(0, None)]
    for refused in answers[1:]:
        [(_, error)] = refused
        assert isinstance(error, AppendFailed)
    assert (numbers(log), log.end) == ([0], 1)
    append_flushed(log, b"1:" + LARGE)
    assert numbers(log) == [0, 1]
    assert numbers(open_small(disk.power_cut(), policy)) == [0, 1]


def test_a_segment_that_was_begun_and_got_nothing_is_used_when_there_is_room() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    append_flushed(log, b"0:" + LARGE)
    disk.fail("write", errno.ENOSPC, after=1, path_suffix="1.log")
    refused = append_told(log, b"refused:" + LARGE)
    log.flush()
    assert isinstance(refused[0][1], AppendFailed)
    assert numbers(log) == [0]
    append_flushed(log, b"1:" + LARGE)
    assert [segment.base for segment in log.segments] == [0, 1]
    assert numbers(kill(log, disk)) == [0, 1]


def test_appends_and_a_disk_that_fills_and_empties_again_lose_nothing() -> None:
    for seed in range(20):
        random = Random(seed)
        disk = FaultyFiles(seed=seed)
        log = open_small(disk, random.choice((SMALL, FLUSH)))
        expected: list[bytes] = []
        refusals = 0
        for number in range(60):
            disk.capacity = bytes_on(disk) + random.choice((0, 50, 300, 1000, 5000))
            batches = [b"%d.%d:" % (number, place) + bytes(random.choice((0, 500, 2500))) for place in range(2)]
            told = [(value, append_told(log, value)) for value in batches]
            log.flush()
            for value, answers in told:
                [(_, error)] = answers
                refusals += isinstance(error, AppendFailed)
                if error is None:
                    expected.append(value)
        assert values(log) == expected
        disk.capacity = None
        log.close()
        assert values(open_small(disk, log.policy)) == expected
        assert refusals > 5


def test_a_write_that_cannot_be_taken_back_fails_the_log() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    append_flushed(log, b"a")
    disk.fail("write", errno.ENOSPC)
    disk.fail("truncate", errno.EIO)
    answers = append_told(log, b"b")
    log.flush()
    assert isinstance(answers[0][1], LogFailed)
    assert (log.state, values(log)) == (LogState.FAILED, [b"a"])
    assert values(kill(log, disk))[:1] == [b"a"]


# A sync that fails: nothing more until a restart


@pytest.mark.parametrize("policy", [SMALL, FLUSH], ids=["fsync", "flush"])
def test_a_failed_sync_is_final(policy: Policy) -> None:
    disk = FaultyFiles()
    files = WatchedFiles(disk)
    log = open_small(files, policy)
    append_flushed(log, b"committed")
    disk.fail("sync", errno.EIO)
    answers = append_told(log, b"lost?")
    write(log)
    log.flush()
    if policy is SMALL:
        assert isinstance(answers[0][1], LogFailed)
        assert values(log) == [b"committed"]
    else:
        assert answers == [(1, None)]
        assert values(log) == [b"committed", b"lost?"]
    assert len(answers) == 1
    assert log.state is LogState.FAILED
    assert log.failure is not None
    assert "fsync failed" in str(log.failure)
    files.calls.clear()
    with pytest.raises(LogFailed) as refusal:
        append(log, b"more")
    assert refusal.value is log.failure
    log.flush()
    log.close()
    assert not {call.name for call in files.calls} & {"write", "sync", "create", "truncate"}
    assert values(log)[:1] == [b"committed"]


def test_all_that_waits_is_told_when_a_sync_fails() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    written = append_told(log, b"a")
    write(log)
    sync = log.flusher.begin_sync()
    assert sync is not None
    writing = append_told(log, b"b")
    round_ = log.flusher.begin_write()
    assert round_ is not None
    waiting = append_told(log, b"c")
    log.flusher.finish_sync(sync, OSError(errno.EIO, "a bad disk"))
    for answers in (written, writing, waiting):
        [(_, error)] = answers
        assert isinstance(error, LogFailed)
    round_.run()
    log.flusher.finish_write(round_)
    assert [len(answers) for answers in (written, writing, waiting)] == [1, 1, 1]
    assert (values(log), log.committed) == ([], 0)


def test_a_sync_that_fails_when_a_segment_is_sealed_fails_the_log() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    append_flushed(log, b"0:" + LARGE)
    disk.fail("sync", errno.EIO, path_suffix="0.log")
    answers = [append_told(log, b"small"), append_told(log, LARGE)]
    log.flush()
    assert all(isinstance(told[0][1], LogFailed) for told in answers)
    assert (log.state, numbers(log), len(log.segments)) == (LogState.FAILED, [0], 1)


def test_a_failed_log_works_again_after_a_restart() -> None:
    for seed in range(30):
        disk = FaultyFiles(seed=seed)
        log = open_small(disk)
        append_flushed(log, b"committed")
        disk.fail("sync", errno.EIO)
        append_flushed(log, b"never acknowledged")
        log = kill(log, disk)
        append_flushed(log, b"later")
        assert values(log)[0] == b"committed"
        assert values(log)[-1] == b"later"
        served = values(log)
        assert values(open_small(disk.power_cut())) == served


# Retention


def test_segments_go_when_all_in_them_is_older_than_the_policy_keeps() -> None:
    """RE-01, RE-05"""
    clock = ManualClock()
    disk = FaultyFiles()
    log = open_small(disk, Policy(segment_bytes=4096, retain_ms=10_000), clock=clock)
    for number in range(6):
        append_flushed(log, b"%d:" % number + LARGE)
        clock.advance(1_000_000)
    # The messages are 6 s to 1 s old. The head of a segment is as old as the last message of the one before it.
    assert log.upkeep.retain() == 0
    clock.advance(5_000_000)
    assert (log.upkeep.retain(), log.start) == (2, 2)
    assert numbers(log) == [2, 3, 4, 5]
    clock.advance(1_000_000)
    assert (log.upkeep.retain(), log.start) == (1, 3)
    assert sorted(disk.sizes(DIRECTORY)) == sorted(
        [
            start_name(3),
            *(segment.path.name for segment in log.segments),
            *(segment.index_path.name for segment in log.segments[:-1]),
        ]
    )
    clock.advance(1_000_000_000)
    assert (log.upkeep.retain(), log.start, numbers(log)) == (2, 5, [5])
    assert log.upkeep.retain() == 0, "never the active one"
    log = kill(log, disk, clock=clock)
    assert (log.start, log.end, numbers(log)) == (5, 6, [5])
    assert append_flushed(log, b"6:") == 6


def test_the_oldest_segments_go_when_the_log_is_larger_than_the_policy_keeps() -> None:
    """RE-02, RE-05, ST-32"""
    disk = FaultyFiles()
    log = open_small(disk, Policy(segment_bytes=4096, retain_bytes=10_000))
    fill(log, 3)
    assert sum(segment.size for segment in log.segments) <= 10_000
    assert log.upkeep.retain() == 0
    append_flushed(log, b"3:" + LARGE)
    assert (log.upkeep.retain(), numbers(log)) == (1, [1, 2, 3])
    fill(log, 10)
    assert log.upkeep.retain() == 10
    assert sum(segment.size for segment in log.segments) <= 10_000
    log = kill(log, disk)
    assert (log.start, len(values(log))) == (11, 3)


def test_the_active_segment_stays_however_large_it_is() -> None:
    log = open_small(FaultyFiles(), Policy(segment_bytes=4096, retain_bytes=1, retain_ms=1), clock=ManualClock(0))
    append_flushed(log, LARGE)
    assert (log.upkeep.retain(), values(log)) == (0, [LARGE])


def test_without_a_bound_everything_is_kept() -> None:
    """ST-08"""
    clock = ManualClock()
    log = open_small(FaultyFiles(), clock=clock)
    fill(log, 5)
    clock.advance(10**15)
    assert (log.upkeep.retain(), numbers(log)) == (0, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("durability", Durability)
def test_what_is_not_committed_is_not_dropped(durability: Durability) -> None:
    log = open_small(FaultyFiles(), Policy(segment_bytes=4096, retain_bytes=1, durability=durability))
    append(log, b"0:" + LARGE)
    append(log, b"1:" + LARGE)
    write(log)
    assert (log.upkeep.retain(), log.start, log.committed) == (0, 0, 0)
    log.flush()
    assert (log.upkeep.retain(), numbers(log)) == (1, [1])


@pytest.mark.parametrize(("call", "suffix"), [("remove", ".log"), ("sync_directory", ""), ("remove", ".index")])
@pytest.mark.parametrize("after", [0, 1])
def test_a_retention_that_failed_is_finished_later_and_leaves_no_gap(call: str, suffix: str, after: int) -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    fill(log, 6)
    log.policy = Policy(segment_bytes=4096, retain_bytes=9000)
    disk.fail(call, errno.EIO, after=after, path_suffix=suffix)
    with contextlib.suppress(OSError):
        log.upkeep.retain()
    assert list(messages(log)) == list(range(log.start, log.end))
    fill(log, 3)
    log.upkeep.retain()
    assert sum(segment.size for segment in log.segments) <= 9000
    start, found = log.start, messages(log)
    log = kill(log, disk)
    assert messages(log, start) == found
    assert list(messages(log)) == list(range(log.start, log.end)), "what is left has no gap"
    assert not log.verify().damage


# Compaction


def kept(log: Log) -> dict[int, bytes]:
    """What is on disk, by offset."""
    found: dict[int, bytes] = {}
    offset = log.start
    while batches := log.read_disk(offset, 1 << 20):
        for batch in batches:
            columns = batch.columns()
            found |= dict(zip(columns.offsets(), columns.values(), strict=True))
        offset = batches[-1].end
    return found


def seal(log: Log) -> None:
    """Make sure that all that was appended is in sealed segments."""
    append_flushed(log, b"s" * 4096)


def test_compaction_keeps_the_latest_message_of_each_key_at_its_offset() -> None:
    """ST-40, RE-05"""
    disk = FaultyFiles()
    log = open_small(disk, COMPACT)
    append_flushed(log, b"a1", b"b1", b"a2", keys=[b"a", b"b", b"a"])
    append_flushed(log, b"c1", keys=[b"c"])
    append_flushed(log, b"b2", b"d1", keys=[b"b", b"d"])
    seal(log)
    assert log.upkeep.compact() == 2
    for _ in range(2):
        assert list(kept(log).items())[:-1] == [(2, b"a2"), (3, b"c1"), (4, b"b2"), (5, b"d1")]
        assert (log.start, log.end) == (0, 7)
        log = kill(log, disk)
    [batch] = log.read_disk(0, 1)
    assert (batch.base_offset, batch.span, batch.count, batch.columns().deltas()) == (0, 3, 1, (2,))
    assert batch.columns().keys() == [b"a"]


def test_readers_get_what_compaction_left_and_not_what_is_still_in_memory() -> None:
    log = open_small(FaultyFiles(), COMPACT, tail_bytes=1 << 20)
    append_flushed(log, b"old", b"other", keys=[b"k", b"o"])
    append_flushed(log, b"new", keys=[b"k"])
    seal(log)
    assert messages(log)[0] == b"old"
    assert log.upkeep.compact() == 1
    assert messages(log) == kept(log)
    assert list(messages(log))[:2] == [1, 2]
    # What is in the active segment is not compacted, and read from memory still.
    assert log.read_tail(log.segments[-1].base, 1) is not None


def test_messages_without_a_key_all_stay_and_an_empty_key_is_a_key() -> None:
    log = open_small(FaultyFiles(), COMPACT)
    append_flushed(log, b"no column")
    append_flushed(log, b"1", b"2", b"3", b"4", keys=[None, b"", None, b""])
    append_flushed(log, b"no column either")
    seal(log)
    assert log.upkeep.compact() == 1
    assert list(kept(log).values())[:-1] == [b"no column", b"1", b"3", b"4", b"no column either"]


def test_a_tombstone_stays_for_a_while_and_then_goes() -> None:
    clock = ManualClock()
    disk = FaultyFiles()
    log = open_small(disk, COMPACT, clock=clock)
    append_flushed(log, b"value", b"other", keys=[b"k", b"o"])
    append_flushed(log, b"", keys=[b"k"], tombstones=[True])
    seal(log)
    clock.advance(999_999)
    assert log.upkeep.compact() == 1
    assert list(kept(log))[:-1] == [1, 2]
    clock.advance(1)
    assert log.upkeep.compact() == 1
    assert list(kept(log))[:-1] == [1]
    log = kill(log, disk, clock=clock)
    assert list(kept(log))[:-1] == [1]
    assert append(log, b"again", keys=[b"k"]) == 4


def test_a_tombstone_that_was_overtaken_is_dropped_like_any_message() -> None:
    log = open_small(FaultyFiles(), COMPACT)
    append_flushed(log, b"", keys=[b"k"], tombstones=[True])
    append_flushed(log, b"value", keys=[b"k"], tombstones=[False])
    seal(log)
    assert log.upkeep.compact() == 1
    assert list(kept(log).values())[:-1] == [b"value"]


def test_a_tombstone_without_a_key_deletes_nothing_and_stays() -> None:
    clock = ManualClock()
    log = open_small(FaultyFiles(), COMPACT, clock=clock)
    append_flushed(log, b"value", b"odd", keys=[b"k", None], tombstones=[False, True])
    seal(log)
    clock.advance(10**12)
    assert log.upkeep.compact() == 0


def test_the_active_segment_is_not_compacted_but_counts() -> None:
    log = open_small(FaultyFiles(), COMPACT)
    append_flushed(log, b"sealed", keys=[b"k"])
    seal(log)
    append_flushed(log, b"active 1", keys=[b"k"])
    append_flushed(log, b"active 2", keys=[b"k"])
    assert len(log.segments) == 3
    assert log.upkeep.compact() == 1
    assert [value for value in kept(log).values() if len(value) < 100] == [b"active 1", b"active 2"]


def test_what_is_not_durable_does_not_overtake_what_is() -> None:
    for durability in Durability:
        log = open_small(FaultyFiles(), Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, durability=durability))
        append_flushed(log, b"durable", keys=[b"k"])
        seal(log)
        append(log, b"written", keys=[b"k"])
        write(log)
        assert log.upkeep.compact() == 0
        log.flush()
        assert log.upkeep.compact() == 1


def test_every_column_of_a_message_survives_compaction() -> None:
    log = open_small(FaultyFiles(), COMPACT)
    for compression in Compression:
        append_flushed(
            log,
            *(b"%d" % place * 100 for place in range(4)),
            keys=[b"x", b"y", None, b"z"],
            subjects=[b"s0", b"s1", b"s2", b"s3"],
            replies=[None, b"r1", None, b"r3"],
            headers=[b"", b"h1", b"h2", None],
            timestamps=[10, 11, 12, 13],
            tombstones=[False, True, False, False],
            compression=compression,
            producer=5,
            sequence=int(compression),
        )
    append_flushed(log, b"x", b"z", keys=[b"x", b"z"])
    before = log.read_disk(8, 1)[0]
    seal(log)
    assert log.upkeep.compact() == 8
    [batch] = log.read_disk(8, 1)
    columns = batch.columns()
    assert columns.values() == [b"1" * 100, b"2" * 100]
    assert (columns.keys(), columns.subjects(), columns.replies()) == ([b"y", None], [b"s1", b"s2"], [b"r1", None])
    assert (columns.headers(), list(columns.timestamps())) == ([b"h1", b"h2"], [11, 12])
    assert (columns.tombstones(), list(columns.offsets())) == ([True, False], [9, 10])
    for name in ("base_offset", "span", "append_time", "producer", "sequence", "timestamp", "epoch", "compression"):
        assert getattr(batch, name) == getattr(before, name), name


def test_compaction_is_right_again_and_again() -> None:
    """Against a dictionary."""
    for reader in READERS:
        random = Random(0)
        disk = FaultyFiles()
        log = open_small(disk, COMPACT, reader=reader)
        latest: dict[bytes, tuple[int, bytes]] = {}
        for step in range(40):
            items = [b"%d.%d:" % (step, place) + bytes(random.choice((0, 300))) for place in range(5)]
            keys = [random.choice((b"a", b"b", b"c", b"d%d" % step)) for _ in items]
            base = append_flushed(log, *items, keys=keys)
            latest |= {key: (base + place, items[place]) for place, key in enumerate(keys)}
            if step % 5 == 4:
                log.upkeep.compact()
                assert set(latest.values()) <= set(kept(log).items())
            if step % 13 == 12:
                log = kill(log, disk, reader=reader)
        seal(log)
        log.upkeep.compact()
        found = kept(log)
        found.popitem()
        assert sorted(found.items()) == sorted(latest.values())
        assert log.upkeep.compact() == 0
        assert not log.verify().damage


def test_a_segment_of_which_nothing_is_left_is_read_over() -> None:
    for reader in READERS:
        disk = FaultyFiles()
        log = open_small(disk, COMPACT, reader=reader)
        for number in range(5):
            append_flushed(log, b"%d:" % number + LARGE, keys=[b"k"])
        assert log.upkeep.compact() == 4
        for _ in range(2):
            assert (numbers(log), numbers(log, 2)) == ([4], [4])
            assert (log.start, log.offset_at(0)) == (0, 4)
            log = kill(log, disk, reader=reader)


@pytest.mark.parametrize("reader", READERS)
def test_readers_that_hold_a_batch_of_before_the_compaction_go_on(reader: ReadMode) -> None:
    log = open_small(FaultyFiles(), COMPACT, reader=reader)
    append_flushed(log, b"old", b"other", keys=[b"k", b"o"])
    append_flushed(log, b"new", keys=[b"k"])
    seal(log)
    held = log.read_disk(0, 1)
    assert log.upkeep.compact() == 1
    assert held[0].columns().values() == [b"old", b"other"]
    assert [batch.base_offset for batch in log.read_disk(held[0].end, 1)] == [2]


@pytest.mark.parametrize(("call", "suffix"), [("create", ".aside"), ("write", ".aside"), ("sync", ".aside")])
def test_a_compaction_that_fails_changes_nothing_and_may_be_repeated(call: str, suffix: str) -> None:
    disk = FaultyFiles()
    log = open_small(disk, COMPACT)
    append_flushed(log, b"old", b"other", keys=[b"k", b"o"])
    append_flushed(log, b"new", keys=[b"k"])
    seal(log)
    before, names = kept(log), disk.sizes(DIRECTORY)
    disk.fail(call, errno.ENOSPC, path_suffix=suffix)
    with pytest.raises(AppendFailed):
        log.upkeep.compact()
    assert (kept(log), disk.sizes(DIRECTORY)) == (before, names)
    assert log.upkeep.compact() == 1


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("call", ["remove", "rename", "sync_directory"])
def test_a_compaction_that_fails_half_way_loses_nothing_that_it_should_keep(call: str, reader: ReadMode) -> None:
    disk = FaultyFiles()
    log = open_small(disk, COMPACT, reader=reader)
    for number in range(4):
        append_flushed(log, b"%d:" % number + LARGE, keys=[b"k"])
    disk.fail(call, errno.EIO)
    with pytest.raises((OSError, AppendFailed), match="Input/output error"):
        log.upkeep.compact()
    for segment in log.segments[:-1]:
        segment.release()  # as it is when other segments were read since
    assert numbers(log)[-1] == 3
    log.upkeep.compact()
    assert numbers(log) == [3]
    assert numbers(kill(log, disk)) == [3]


def damage(disk: FaultyFiles, path: Path, position: int) -> None:
    content = bytearray(disk.content(path))
    content[position] ^= 1
    disk.set_content(path, content)


def test_a_damaged_segment_is_not_compacted_and_the_others_are() -> None:
    disk = FaultyFiles()
    log = open_small(disk, COMPACT)
    for number in range(4):
        append_flushed(log, b"%d:" % number + LARGE, keys=[b"k"])
    damage(disk, log.segments[0].path, -100)
    before = disk.content(log.segments[0].path)
    assert log.upkeep.compact() == 2
    assert disk.content(log.segments[0].path) == before
    assert numbers(log, 1) == [3]


def test_a_deleted_key_does_not_come_back_from_a_segment_that_is_damaged() -> None:
    clock = ManualClock()
    disk = FaultyFiles()
    log = open_small(disk, COMPACT, clock=clock)
    append_flushed(log, b"value", keys=[b"k"])
    append_flushed(log, LARGE, keys=[b"damaged"])
    append_flushed(log, LARGE, keys=[b"k"], tombstones=[True])
    seal(log)
    damage(disk, log.segments[0].path, -100)
    clock.advance(10**12)
    log.upkeep.compact()
    assert [batch.columns().values() for batch in log.read_disk(0, 0)] == [[b"value"]]
    assert [batch.columns().tombstones() for batch in log.read_disk(2, 0)] == [[True]], "readers must learn of it"


def test_compaction_survives_a_power_cut_at_any_call() -> None:
    seed = 0
    while True:
        disk = FaultyFiles(seed=seed)
        log = open_small(disk, COMPACT)
        for number in range(3):
            append_flushed(log, b"%d" % number, bytes(1900), keys=[b"k", b"%d" % number])
        seal(log)
        before = kept(log)
        disk.cut_after = disk.calls + seed
        try:
            log.upkeep.compact()
            break
        except PowerCut:
            disk = disk.power_cut()
        log = open_small(disk, COMPACT)
        found = kept(log)
        assert found.items() <= before.items()
        assert before.keys() - found.keys() <= {0, 2}
        log.upkeep.compact()
        assert before.keys() - kept(log).keys() == {0, 2}
        seed += 1
    assert seed > 5


# Upkeep in one thread, reading in another: each of these steps in between what a reader found and what it opens


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


# Truncation


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("reopen", [None, *REOPENS])
@pytest.mark.parametrize("policy", [SMALL, FLUSH], ids=["fsync", "flush"])
def test_truncation_drops_what_reaches_beyond_the_offset(
    policy: Policy, reopen: Reopen | None, reader: ReadMode
) -> None:
    for offset in range(25):
        disk = FaultyFiles()
        log = open_small(disk, policy, reader=reader, tail_bytes=1 << 20)
        for number in range(8):
            append_flushed(log, *(b"%d:" % (3 * number + place) + bytes(500) for place in range(3)))
        log.upkeep.truncate(offset)
        if reopen is not None:
            log = reopen(log, disk)
        left = list(range(offset - offset % 3))
        assert numbers(log) == left
        assert log.end >= 24, "their offsets are not given out again"
        base = append_flushed(log, b"99:")
        assert base >= 24
        assert numbers(log) == [*left, 99]
        assert messages(log)[base] == b"99:"
        assert not log.verify().damage


def test_truncation_at_the_end_changes_nothing() -> None:
    files = WatchedFiles(FaultyFiles())
    log = open_small(files)
    fill(log, 2)
    files.calls.clear()
    log.upkeep.truncate(2)
    assert not {call.name for call in files.calls} & {"create", "truncate", "remove", "write"}
    assert (numbers(log), append(log, b"c")) == ([0, 1], 2)


def test_truncation_to_an_offset_that_the_log_does_not_hold_is_refused() -> None:
    log = open_small(FaultyFiles(), Policy(segment_bytes=4096, retain_bytes=1))
    fill(log, 3)
    log.upkeep.retain()
    for offset in (1, 4):
        with pytest.raises(OffsetOutOfRange):
            log.upkeep.truncate(offset)
    assert numbers(log) == [2]


def test_a_log_may_be_truncated_again_and_again() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    for number in range(5):
        append_flushed(log, b"%d:" % number)
        append_flushed(log, b"dropped")
        log.upkeep.truncate(log.end - 1)
        log.upkeep.truncate(log.end)
    assert numbers(log) == [0, 1, 2, 3, 4]
    assert numbers(kill(log, disk)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("reopen", [None, *REOPENS])
def test_a_truncated_batch_may_be_sent_again_by_its_producer(reopen: Reopen | None) -> None:
    for offset in (1, 2, 3):
        disk = FaultyFiles()
        log = open_small(disk)
        append_flushed(log, b"a", producer=7, sequence=0)
        append_flushed(log, b"b", b"c", b"d", producer=7, sequence=1)
        log.upkeep.truncate(offset)
        if reopen is not None:
            log = reopen(log, disk)
        assert append_told(log, b"a", producer=7, sequence=0) == [(0, None)]
        assert append(log, b"b", b"c", b"d", producer=7, sequence=1) >= 4
        log.flush()
        assert values(log) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("reopen", [None, *REOPENS])
def test_a_truncated_batch_may_be_sent_again_by_its_source_and_what_stays_may_not(reopen: Reopen | None) -> None:
    for offset in (1, 2):
        disk = FaultyFiles()
        log = open_small(disk)
        append_told(log, b"a", source=9, position=10)
        log.flush()
        append_told(log, b"b", b"c", source=9, position=20)
        log.flush()
        log.upkeep.truncate(offset)
        if reopen is not None:
            log = reopen(log, disk)
        append_told(log, b"a", source=9, position=10)
        append_told(log, b"b", b"c", source=9, position=20)
        log.flush()
        assert values(log) == [b"a", b"b", b"c"]


def test_a_truncation_that_is_interrupted_may_be_repeated() -> None:
    seed = 0
    while True:
        disk = FaultyFiles(seed=seed)
        log = open_small(disk)
        fill(log, 5)
        disk.cut_after = disk.calls + seed
        try:
            log.upkeep.truncate(2)
            break
        except PowerCut:
            disk = disk.power_cut()
        log = open_small(disk)
        found = numbers(log)
        assert found[:2] == [0, 1]
        assert found == list(range(len(found)))
        log.upkeep.truncate(2)
        assert numbers(log) == [0, 1]
        base = append_flushed(log, b"5:")
        assert base >= 5
        assert numbers(kill(log, disk)) == [0, 1, 5]
        seed += 1
    assert seed > 5


def test_readers_that_hold_a_truncated_batch_go_on() -> None:
    log = open_small(FaultyFiles(), reader="mmap")
    append_flushed(log, b"kept")
    append_flushed(log, b"held")
    append_flushed(log, LARGE)
    append_flushed(log, LARGE)
    held = log.read_disk(1, 1)
    log.upkeep.truncate(1)
    assert held[0].columns().values() == [b"held"]
    assert values(log) == [b"kept"]


# A disk that does not give back what is there


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


# Where a batch of a producer is, and offsets by size


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
