"""Compaction: the latest message of each key stays."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from penstock.errors import (
    AppendFailed,
)
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Durability, Policy
from penstock.log.segment import ReadMode
from penstock.model.batch import Compression
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import append, messages
from tests.support.small_logs import (
    COMPACT,
    DIRECTORY,
    LARGE,
    READERS,
    append_flushed,
    kill,
    numbers,
    open_small,
    write,
)


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
