"""Compaction merges small sealed segments, and nothing that happens meanwhile loses or doubles a message."""

from __future__ import annotations

import asyncio
import errno
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import AppendFailed, Closed
from penstock.log import examine, log_files
from penstock.log.log import Log
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Cleanup, Policy
from penstock.log.segment import ReadMode
from penstock.store.meta import Change
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import append, memory_meta, messages, open_log
from tests.support.watched import Call, WatchedFiles

DIRECTORY = Path("/log")
COMPACT = Policy(segment_bytes=16_384, cleanup=Cleanup.COMPACT)


def open_small(files: Any, *, reader: ReadMode = "pread") -> Log:
    return open_log(DIRECTORY, files=files, policy=COMPACT, reader=reader)


def fill(log: Log, segments: int) -> None:
    """Make sealed segments of which compaction leaves a few bytes: one key that changes, and one of their own."""
    for number in range(segments + 1):
        append(log, b"%d" % number, b"own" + bytes(20), bytes(13_000), keys=[b"k", b"own %d" % number, b"large"])
        log.flush()
    assert len(log.segments) == segments + 1


def judge(log: Log, disk: FaultyFiles, before: dict[int, bytes], segments: int) -> None:
    """Whether all is there that compaction keeps, and no more than before."""
    found = messages(log)
    assert found.items() <= before.items()
    lost = before.keys() - found.keys()
    assert all(offset % 3 != 1 and offset < 3 * segments for offset in lost), lost
    assert not log.verify().damage


@pytest.mark.parametrize("reader", ["pread", "mmap"])
def test_small_segments_become_one_and_every_message_keeps_its_offset(reader: ReadMode) -> None:
    disk = FaultyFiles()
    log = open_small(disk, reader=reader)
    fill(log, 12)
    held = log.read_disk(0, 1)
    assert log.upkeep.compact() == 24
    expected = {3 * number + 1: b"own" + bytes(20) for number in range(13)} | {36: b"12", 38: bytes(13_000)}
    assert messages(log) == dict(sorted(expected.items()))
    assert [segment.base for segment in log.segments] == [0, 36]
    assert held[0].columns().values()[0] == b"0"
    assert not log.verify().damage
    disk.kill()
    log = open_small(disk, reader=reader)
    assert messages(log) == dict(sorted(expected.items()))
    assert sorted(disk.sizes(DIRECTORY)) == [
        f"{0:020d}.index",
        f"{0:020d}.log",
        f"{0:020d}.start",
        f"{36:020d}.log",
    ]
    log.close()


def test_merged_segments_are_merged_again_and_stay_within_half_a_segment() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    for _ in range(30):
        append(log, b"k", bytes(13_000), keys=[b"k", b"large"])
        log.flush()
        log.upkeep.compact()
    assert len(log.segments) <= 5
    for number in range(60):
        append(log, bytes(1000), bytes(13_000), keys=[b"%d" % number, b"large"])
        log.flush()
    log.upkeep.compact()
    sealed = log.segments[:-1]
    assert len(sealed) < 15
    assert all(segment.size <= COMPACT.segment_bytes // 2 for segment in sealed)
    disk.kill()
    assert len(messages(open_small(disk))) == 62


def test_the_state_topic_of_one_key_has_few_segments() -> None:
    disk = FaultyFiles()

    def open_store() -> Store:
        return Store(Path("/data"), files=disk, clock=ManualClock(), meta=memory_meta())

    with open_store() as store:
        for number in range(60):
            store._write_state([Change("position", "a", [number, "x" * 300_000])])
        assert len(store._state_log.segments) > 15
        store.upkeep()
        assert len(store._state_log.segments) <= 4
    with open_store() as store:
        assert store.state.get("position", "a")[0] == 59


def test_a_merge_survives_a_power_cut_at_any_call() -> None:
    seed = merged = 0
    while True:
        disk = FaultyFiles(seed=seed)
        log = open_small(disk)
        fill(log, 6)
        before = messages(log)
        disk.cut_after = disk.calls + seed
        try:
            log.upkeep.compact()
            break
        except PowerCut:
            disk = disk.power_cut()
        # What only looks at the files finds nothing wrong, nor anything twice.
        found = log_files.list_log(disk, OpenSegments(), DIRECTORY, "pread")
        assert found.problems == []
        report = examine.verify(found.segments, start=found.start)
        assert not report.damage, f"seed {seed}: {report.damage}"
        # The power may go again while that is finished.
        for step in count():
            disk.cut_after = disk.calls + step
            try:
                log = open_small(disk)
                break
            except PowerCut:
                disk = disk.power_cut()
        disk.cut_after = None
        judge(log, disk, before, 6)
        merged += len(log.segments) == 2
        assert not [name for name in disk.sizes(DIRECTORY) if not name.endswith((".log", ".index", ".start"))]
        log.upkeep.compact()
        assert len(log.segments) == 2
        append(log, b"more")
        log.flush()
        disk.kill()
        assert messages(open_small(disk))[21] == b"more"
        seed += 1
    assert seed > 40
    assert merged > 3


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "remove", "sync_directory", "sizes"])
def test_a_merge_that_fails_loses_nothing_and_is_finished_later(call: str, after: int) -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    fill(log, 6)
    log.upkeep.compact()  # the segments are merged; now there is only that to do
    for number in range(6):
        append(log, b"%d" % number, bytes(13_000), keys=[b"k", b"large"])
        log.flush()
    disk.fail(call, errno.EIO, after=after)
    before = messages(log)
    for _ in range(20):
        try:
            log.upkeep.retain()
            log.upkeep.compact()
            break
        except (OSError, AppendFailed):
            assert messages(log).items() <= before.items()
    else:
        raise AssertionError("it is never finished")
    assert len(log.segments) <= 5
    assert messages(log)[max(before)] == before[max(before)]
    found = messages(log)
    disk.heal()
    disk.kill()
    log = open_small(disk)
    assert messages(log) == found
    assert not log.verify().damage


@pytest.mark.parametrize("reader", ["pread", "mmap"])
@pytest.mark.parametrize("name", ["open", "read", "view"])
def test_a_reader_that_a_merge_overtakes_finds_every_message(name: str, reader: ReadMode) -> None:
    """The merge steps in between what a reader found and what it opens, at each of its calls."""
    for place in range(12):
        disk = FaultyFiles()
        files = WatchedFiles(disk)
        log = open_small(files, reader=reader)
        fill(log, 6)
        for segment in log.segments[:-1]:
            segment.release()
        calls = 0

        def merge(call: Call, log: Log = log, files: WatchedFiles = files, place: int = place) -> None:
            nonlocal calls
            calls += call.name == name
            if call.name == name and calls == place + 1:
                files.before = None
                log.upkeep.compact()

        files.before = merge
        found = messages(log, bytes_max=1)
        assert {offset for offset in found if offset % 3 == 1} == {3 * number + 1 for number in range(7)}
        assert found[18] == b"6"


def test_a_segment_that_is_missing_is_noticed_beside_merged_ones() -> None:
    disk = FaultyFiles()
    log = open_small(disk)
    fill(log, 6)
    log.upkeep.compact()
    fill_more = [b"%d" % number * 13_000 for number in range(3)]
    for value in fill_more:
        append(log, value, keys=[value[:1]])
        log.flush()
    paths = [segment.path for segment in log.segments]
    disk.kill()
    disk.remove(paths[1])
    with pytest.raises(Exception, match="is missing"):
        messages(open_small(disk))


# Locks


def test_upkeep_of_one_topic_delays_neither_deleting_nor_creating_others() -> None:
    disk = FaultyFiles()
    files = WatchedFiles(disk)
    held, released = threading.Event(), threading.Event()

    def hold(call: Call) -> None:
        if call.name == "create" and str(call.path).endswith(".aside") and "/topics/1/" in str(call.path):
            held.set()
            released.wait(10)

    async def main() -> None:
        settings = StoreSettings(upkeep_ms=1)
        with Store(Path("/data"), files=files, clock=ManualClock(), meta=memory_meta(), settings=settings) as store:
            long, other = store.create_topic("long", policy=COMPACT), store.create_topic("other", policy=COMPACT)
            for number in range(4):
                append(store.log(long.id), b"%d" % number * 13_000, keys=[b"k"])
                store.flush()
            files.before = hold
            async with asyncio.timeout(10), asyncio.TaskGroup() as group:
                run = group.create_task(store.run())
                while not held.is_set():
                    await asyncio.sleep(0)
                await store.delete_topic_async(other.id)
                await store.create_topic_async("new")
                # And that of the topic itself waits no longer than for a batch.
                deleted = group.create_task(store.delete_topic_async(long.id))
                while any(topic.name == "long" for topic in store.topics):
                    await asyncio.sleep(0)
                released.set()
                await deleted
                run.cancel()
            assert [topic.name for topic in store.topics] == ["new"]
        assert "1" not in disk.sizes(Path("/data/topics"))

    asyncio.run(main())


def test_compaction_gives_up_when_its_log_is_deleted_or_the_store_ends() -> None:
    for stops_after in range(40):
        disk = FaultyFiles()
        log = open_small(disk)
        fill(log, 6)
        asked = 0

        def stopped(stops_after: int = stops_after) -> bool:
            nonlocal asked
            asked += 1
            return asked > stops_after

        before = messages(log)
        with pytest.raises(Closed, match="compaction stopped"):
            log.upkeep.compact(stopped)
        judge(log, disk, before, 6)
        assert not [name for name in disk.sizes(DIRECTORY) if not name.endswith((".log", ".index", ".start"))]
        assert log.upkeep.is_compaction_due
