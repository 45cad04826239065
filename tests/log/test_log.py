"""What is appended to a log, and when it is committed. Recovery, and a log against a model, have their own files."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import (
    Closed,
)
from penstock.log.flusher import RESERVE_AHEAD
from penstock.model.batch import Compression, encode
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support.logs import append, messages, open_log, values
from tests.support.small_logs import DIRECTORY, FLUSH, LARGE, append_flushed, append_told, kill, open_small, write
from tests.support.watched import WatchedFiles

# ---- in: offsets, and what producers are told


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


# ---- durability: what is visible when


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


# ---- rounds: who waits for whom


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
