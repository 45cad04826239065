"""What retention and truncation remove from a log."""

from __future__ import annotations

import contextlib
import errno

import pytest

from penstock.errors import (
    OffsetOutOfRange,
)
from penstock.log.log_files import start_name
from penstock.log.policy import Durability, Policy
from penstock.log.segment import ReadMode
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import append, messages, values
from tests.support.small_logs import (
    DIRECTORY,
    FLUSH,
    LARGE,
    READERS,
    REOPENS,
    SMALL,
    Reopen,
    append_flushed,
    append_told,
    fill,
    kill,
    numbers,
    open_small,
    write,
)
from tests.support.watched import WatchedFiles

# ---- retention


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


def test_messages_that_a_group_needs_stay_however_old_they_are() -> None:
    clock = ManualClock()
    policy = Policy(segment_bytes=4096, retain_ms=1, retain_bytes=1, retain_for="archive")
    log = open_small(FaultyFiles(), policy, clock=clock)
    for number in range(6):
        append_flushed(log, b"%d:" % number + LARGE)
    clock.advance(1_000_000_000)
    assert log.upkeep.retain() == 0, "nobody said yet what the group has"
    assert log.upkeep.oldest_segment_time() is None
    assert log.upkeep.held_bytes == sum(segment.size for segment in log.segments[:-1])
    log.upkeep.needed_from = 3
    assert log.upkeep.oldest_segment_time() is not None
    assert (log.upkeep.retain(), log.start) == (3, 3)
    log.upkeep.purge(4)
    assert (log.upkeep.retain(), log.start) == (1, 4)
    assert log.upkeep.held_bytes == log.segments[0].size
    log.upkeep.needed_from = 6
    assert (log.upkeep.retain(), log.start) == (1, 5)
    assert log.upkeep.held_bytes == 0


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


# ---- truncation


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
