"""What a log serves after a power cut at any call to the disk, or after a sync that failed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from functools import partial

import pytest

from penstock.errors import (
    DiskError,
    LogFailed,
    PenstockError,
)
from penstock.log.appender import LogState
from penstock.log.flusher import RESERVE_AHEAD
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Policy
from penstock.log.segment import log_name
from penstock.model.batch import encode
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support.log_images import (
    DIRECTORY,
    FLUSH,
    FOUR_SEGMENTS,
    FSYNC,
    LARGE,
    ONE_SEGMENT,
    SMALL,
    TWO_SEGMENTS,
    Image,
    cut_at_every_call,
    disk_with,
    extend,
    image_of,
    make,
    messages_of,
    places,
    reopen,
)
from tests.support.logs import TIMESTAMP, append, messages, open_log
from tests.support.sampling import covered, examples

# ---- power cuts while a log is put in order.


def torn_tail() -> Image:
    image = make(TWO_SEGMENTS, closed=False)
    return {**image, log_name(1): image[log_name(1)][:-20]}


def torn_head() -> Image:
    image = make(TWO_SEGMENTS, closed=False)
    return {**image, log_name(10): image[log_name(1)][:50]}


def torn_reservation() -> Image:
    image = make(ONE_SEGMENT, policy=FLUSH, closed=False)
    return {**image, log_name(0): image[log_name(0)][:-1]}


def nothing_but_half_a_head() -> Image:
    return {log_name(0): make([], closed=False)[log_name(0)][:-8]}


def leftovers() -> Image:
    image = torn_tail()
    return {**image, log_name(1) + ".aside": b"half a segment", log_name(77).replace(".log", ".index"): b"PIDX"}


def half_a_truncation() -> Image:
    """The new segment is there, and all that the truncation should have dropped is still there, too."""
    disk = disk_with(make(FOUR_SEGMENTS, closed=False))
    before = image_of(disk)
    reopen(disk).upkeep.truncate(3)
    return {**image_of(disk), **before}


@pytest.mark.parametrize(
    "torn", [torn_tail, torn_head, torn_reservation, nothing_but_half_a_head, leftovers, half_a_truncation]
)
@pytest.mark.parametrize("policy", [FSYNC, FLUSH], ids=["fsync", "flush"])
def test_a_recovery_that_is_cut_at_any_call_comes_to_the_same_end_later(
    torn: Callable[[], Image], policy: Policy
) -> None:
    image = torn()
    uncut = reopen(disk_with(image), policy)
    expected = messages(uncut)
    for cut, disk in cut_at_every_call(image, lambda disk: partial(reopen, disk, policy)):
        log = reopen(disk, policy)
        assert messages(log) == expected, cut
        assert log.end == uncut.end, cut
        offset = append(log, b"new")
        log.flush()
        assert messages(reopen(disk.power_cut(), policy)) == {**expected, offset: b"new"}, cut


@pytest.mark.parametrize("offset", range(13))
def test_a_truncation_that_is_cut_at_any_call_loses_nothing_below_and_gives_no_offset_again(offset: int) -> None:
    image = make(FOUR_SEGMENTS, closed=False)
    batches = [place.batch for place in places(image)]
    everything = messages_of(batches)
    below = messages_of([batch for batch in batches if batch.end <= offset])
    end = max(everything) + 1
    assert end == 12
    for cut, disk in cut_at_every_call(image, lambda disk: partial(reopen(disk).upkeep.truncate, offset)):
        log = reopen(disk)
        served = messages(log)
        assert below.items() <= served.items() <= everything.items(), cut
        again = append(log, b"new")
        log.flush()
        assert again >= end, cut
        log.upkeep.truncate(offset)
        assert messages(log) == below, cut
        newest = append(log, b"newest")
        log.flush()
        assert newest > again, cut
        log = reopen(disk.power_cut())
        assert messages(log) == {**below, newest: b"newest"}, cut
        assert not log.verify().damage, cut


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("call", ["create", "write", "sync", "sync_directory", "remove", "rename"])
def test_a_truncation_that_fails_at_any_call_leaves_a_sound_log_that_goes_on(call: str, after: int) -> None:
    image = make(FOUR_SEGMENTS, closed=False)
    batches = [place.batch for place in places(image)]
    below = messages_of([batch for batch in batches if batch.end <= 3])
    everything = messages_of(batches)
    disk = disk_with(image)
    log = reopen(disk)
    disk.fail(call, errno.EIO, after=after)
    with contextlib.suppress(OSError, DiskError):
        log.upkeep.truncate(3)
    disk.heal()
    for value in (b"new", LARGE, b"newer"):
        if log.state is LogState.OPEN:
            everything[append(log, value)] = value
            log.flush()
    disk.kill()
    log = reopen(disk)
    assert below.items() <= messages(log).items() <= everything.items()
    assert [str(damage) for damage in log.verify().damage] == []


@pytest.mark.parametrize("offset", range(1, 6))
def test_a_truncation_of_what_is_not_synced_yet_that_is_cut_at_any_call_leaves_a_sound_log(offset: int) -> None:
    given = {number: b"%d" % number * 99 for number in range(6)}

    def truncation(disk: FaultyFiles) -> Callable[[], object]:
        log = reopen(disk, FLUSH)
        append(log, given[0])
        log.flush()
        for number in range(1, 6):
            append(log, given[number])
        write_only(log)
        assert messages(log) == given
        return partial(log.upkeep.truncate, offset)

    for cut, disk in cut_at_every_call({}, truncation):
        log = reopen(disk, FLUSH)
        served = messages(log)
        assert served[0] == given[0], cut
        assert served.items() <= given.items(), cut
        assert log.end > max(given), cut
        assert not log.verify().damage, cut


def write_only(log: Log) -> None:
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    log.flusher.finish_write(write)


@pytest.mark.parametrize("tombstone_ms", [0, 1000], ids=["old tombstones", "young tombstones"])
def test_a_compaction_that_is_cut_at_any_call_keeps_the_latest_of_each_key_at_its_offset(tombstone_ms: int) -> None:
    policy = Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, tombstone_ms=tombstone_ms)
    disk = FaultyFiles()
    log = reopen(disk, policy)
    gone = set()
    for number in range(9):
        values = [b"%d" % number, b"%d" % number * 1500, b"%d none" % number, b"%d gone" % number]
        last = number == 5
        if number <= 5:
            gone.add(append(log, *values, keys=[b"a", b"b", None, b"gone"], tombstones=[False, False, False, last]) + 3)
        else:
            append(log, *values[:3], keys=[b"a", b"b", None])
        log.flush()
    assert len(log.segments) > 4
    tombstone = max(gone)
    image = image_of(disk)
    everything = messages(log)
    log.upkeep.compact()
    compacted = messages(log)
    assert compacted.keys() & gone == (set() if tombstone_ms == 0 else {tombstone})
    latest = messages_of([places(image)[-1].batch])
    keyless = {offset: value for offset, value in everything.items() if value.endswith(b"none")}
    assert latest.items() | keyless.items() <= compacted.items()

    for cut, disk in cut_at_every_call(image, lambda disk: reopen(disk, policy).upkeep.compact):
        log = reopen(disk, policy)
        served = messages(log)
        assert compacted.items() <= served.items() <= everything.items(), cut
        assert tombstone in served or not gone & served.keys(), f"{cut}: a deleted key came back"
        log.upkeep.compact()
        assert messages(log) == compacted, cut
        log = reopen(disk.power_cut(), policy)
        assert messages(log) == compacted, cut
        assert not log.verify().damage, cut


def test_a_retention_that_is_cut_at_any_call_drops_the_oldest_first() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=9000)
    image = make([[[b"%d" % number * 500]] for number in range(40)], closed=True)
    log = reopen(disk_with(image), policy)
    everything = messages(log)
    assert log.upkeep.retain() > 2
    retained = messages(log)
    for cut, disk in cut_at_every_call(image, lambda disk: reopen(disk, policy).upkeep.retain):
        log = reopen(disk, policy)
        served = messages(log)
        assert served == {offset: value for offset, value in everything.items() if offset >= log.start}, cut
        assert retained.items() <= served.items(), cut
        log.upkeep.retain()
        log = reopen(disk.power_cut(), policy)
        assert messages(log) == retained, cut
        assert not log.verify().damage, cut


# ---- a sync that failed.


@pytest.mark.parametrize("seed", range(examples(20)))
@pytest.mark.parametrize("policy", [FSYNC, FLUSH], ids=["fsync", "flush"])
@pytest.mark.parametrize("value", [b"small", LARGE], ids=["round", "roll"])
def test_what_is_served_after_a_failed_sync_and_a_restart_is_there_for_good(
    policy: Policy, value: bytes, seed: int
) -> None:
    disk = FaultyFiles(seed=seed)
    log = reopen(disk, policy)
    append(log, b"first")
    log.flush()
    told: list[PenstockError | None] = []
    log.append(encode([value], timestamp=TIMESTAMP), outcome=Outcome(told.append))
    append(log, b"with it")
    disk.fail("sync", errno.EIO, path_suffix=log_name(0))

    log.flush()

    assert log.state is LogState.FAILED
    assert [type(error) for error in told] == [LogFailed if policy is FSYNC or value is LARGE else type(None)]
    with pytest.raises(LogFailed, match=rf"{log_name(0)}: fsync failed: {os.strerror(errno.EIO)}"):
        append(log, b"refused")
    log.flush()
    committed = messages(log)
    assert committed[0] == b"first"
    assert log.committed == len(committed)

    disk.kill()
    log = reopen(disk, policy)
    served = messages(log)
    assert committed.items() <= served.items()
    served[append(log, b"second")] = b"second"
    log.flush()
    log = reopen(disk.power_cut(), policy)
    assert messages(log) == served
    assert b"refused" not in served.values()


@pytest.mark.parametrize("seed", range(examples(20)))
def test_a_recovery_whose_sync_fails_is_not_over(seed: int) -> None:
    disk = FaultyFiles(seed=seed)
    log = reopen(disk)
    for values in SMALL[0]:
        append(log, *values)
    write_only(log)
    disk.kill()
    disk.fail("sync", errno.EIO, path_suffix=".log")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        reopen(disk)
    disk.kill()
    served = messages(reopen(disk))
    assert served
    assert messages(reopen(disk.power_cut())) == served


# ---- offsets under `flush`, where readers see what a power cut can take.


def test_after_a_clean_stop_offsets_go_on_without_a_jump() -> None:
    image = make(SMALL, policy=FLUSH, closed=True)
    log = reopen(disk_with(image), FLUSH)
    assert append(log, b"new") == len(messages_of([place.batch for place in places(image)]))


def test_a_sync_of_a_later_write_also_makes_the_reservation_durable() -> None:
    log = reopen(FaultyFiles(), FLUSH)
    append(log, b"a")
    write_only(log)
    append(log, b"b")
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    sync = write.sync()
    log.flusher.finish_write(write)
    log.flusher.finish_sync(sync, None)
    append(log, b"c")
    write_only(log)
    assert messages(log) == {0: b"a", 1: b"b", 2: b"c"}


@pytest.mark.parametrize("rolls", [False, True], ids=["one segment", "rolls"])
def test_no_offset_that_a_reader_saw_is_given_out_again_wherever_the_power_goes(rolls: bool) -> None:
    lives: list[dict[int, bytes]] = []

    def work(disk: FaultyFiles) -> Callable[[], object]:
        lives.append({})
        return partial(live, disk, lives[-1])

    def live(disk: FaultyFiles, seen: dict[int, bytes]) -> None:
        """Append and read, with a sync after every third write."""
        clock = ManualClock()
        log = open_log(DIRECTORY, files=disk, clock=clock, policy=FLUSH)
        seen.update(messages(log))
        for number in range(6):
            append(log, b"%d/%d" % (len(lives), number))
            append(log, b"%d/%d" % (len(lives), number) * (400 if rolls else 1))
            if number % 3 == 2:
                log.flush()
            else:
                write_only(log)
            seen.update(messages(log))

    cuts = 0
    for cut, disk in cut_at_every_call({}, work):
        seen = lives[-1]
        log = reopen(disk, FLUSH)
        served = messages(log)
        assert all(served.get(offset, value) == value for offset, value in seen.items()), cut
        if seen:
            cuts += 1
            assert log.end > RESERVE_AHEAD, cut
        # A second life, which ends as suddenly, must not collide with the first.
        later: dict[int, bytes] = {}
        live(disk, later)
        assert all(later.get(offset, value) == value for offset, value in seen.items()), cut
        assert served.items() <= later.items(), cut
        log = reopen(disk.power_cut(), FLUSH)
        assert log.end > max(later), cut
        assert messages(log).items() <= later.items(), cut
        assert not log.verify().damage, cut
    assert covered(cuts >= 20)


def test_a_roll_keeps_the_reservation() -> None:
    disk = FaultyFiles()
    log = reopen(disk, FLUSH)
    append(log, b"first")
    log.flush()
    for _ in range(5):
        append(log, LARGE)
        log.flush()
    image = image_of(disk)
    last = places(image)[-1].name
    assert last == log_name(5)
    head = next(place for place in places(image) if place.name == last)
    assert head.batch.control().reserved >= RESERVE_AHEAD
    # Even if nothing of the new segment but its head is left.
    log = reopen(disk_with({**image, last: image[last][: head.stop]}), FLUSH)
    assert log.end == head.batch.control().reserved


def test_a_torn_first_round_behind_a_jump_of_offsets_is_cut_off() -> None:
    image = extend(make([[[b"a"]]], policy=FLUSH, closed=False), [[[b"b"], [b"c"]]], policy=FLUSH, closed=False)
    everything = places(image)
    assert everything[-1].batch.base_offset > RESERVE_AHEAD
    before = [place for place in everything if place.batch.base_offset < RESERVE_AHEAD]
    content = image[log_name(0)]
    for torn in everything[len(before) :]:
        # The disk wrote what is behind it first, and then the power went.
        zeros = content[: torn.start] + bytes(torn.stop - torn.start) + content[torn.stop :]
        log = reopen(disk_with({log_name(0): zeros}), FLUSH)
        assert messages(log) == messages_of([place.batch for place in everything if place.start < torn.start])
