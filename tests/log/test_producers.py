"""What a log knows of its producers and sources: a batch that is sent again is stored once."""

from __future__ import annotations

import errno

import pytest

from penstock.errors import (
    AppendFailed,
    OutOfSequence,
)
from penstock.log.policy import Policy
from penstock.log.producers import IN_FLIGHT_MAX
from penstock.testing import FaultyFiles
from tests.support.logs import append, values
from tests.support.small_logs import (
    COMPACT,
    REOPENS,
    Reopen,
    append_flushed,
    append_told,
    fill,
    kill,
    open_small,
    write,
)


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
