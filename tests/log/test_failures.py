"""A log whose disk is full, or fails to write or to sync."""

from __future__ import annotations

import errno
from random import Random

import pytest

from penstock.errors import (
    AppendFailed,
    LogFailed,
)
from penstock.log.appender import LogState
from penstock.log.policy import Policy
from penstock.model.batch import encode
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.logs import append, values
from tests.support.small_logs import (
    DIRECTORY,
    FLUSH,
    LARGE,
    SMALL,
    append_flushed,
    append_told,
    kill,
    numbers,
    open_small,
    write,
)
from tests.support.watched import WatchedFiles


def bytes_on(disk: FaultyFiles) -> int:
    return sum(disk.sizes(DIRECTORY).values())


# ---- a write that fails: refused, taken back, and tried again when there is room


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


# ---- a sync that fails: nothing more until a restart


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
