"""Retention by time and size, in logs that never fill a segment too."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import AppendFailed
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Durability, Policy, Topic
from penstock.model.batch import encode
from penstock.outcome import Outcome
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock
from tests.support.logs import append, memory_meta, values
from tests.support.registries import until
from tests.support.server import Flux, Serve
from tests.support.web import ask, metrics

DATA = Path("/data")
SECOND_US = 1_000_000
DAY_US = 24 * 60 * 60 * SECOND_US
UPKEEP_US = 10 * SECOND_US


def open_store(files: FaultyFiles, clock: ManualClock, **settings: Any) -> Store:
    return Store(DATA, files=files, clock=clock, meta=memory_meta(), settings=StoreSettings(**settings))


def append_flushed(store: Store, topic: Topic, *items: bytes) -> None:
    append(store.log(topic.id), *items)
    store.flush()


def keep_up(store: Store, clock: ManualClock, duration_us: int) -> None:
    for _ in range(duration_us // UPKEEP_US):
        clock.advance(UPKEEP_US)
        store.upkeep()


def files_of(disk: FaultyFiles, log: Log) -> list[str]:
    return sorted(name for name in disk.sizes(log.directory) if name.endswith(".log"))


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("retain_s", [1, 5, 3600])
def test_an_idle_topic_ends_empty_with_one_segment(retain_s: int, durability: Durability) -> None:
    """RE-01"""
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock) as store:
        topic = store.create_topic("orders", policy=Policy(retain_ms=retain_s * 1000, durability=durability))
        log = store.log(topic.id)
        append_flushed(store, topic, b"a", b"b", b"c")
        keep_up(store, clock, retain_s * SECOND_US * 11 // 10 + 2 * UPKEEP_US)
        assert (values(log, log.start), log.start, log.end) == ([], 3, 3)
        assert files_of(disk, log) == [f"{3:020d}.log"]
        calls = disk.calls
        log.flusher.roll()
        store.flush()
        assert disk.calls == calls, "an empty segment is not followed by another one"
        append_flushed(store, topic, b"d")
        assert values(log, 3) == [b"d"]


def test_messages_stay_for_the_time_and_go_at_most_a_tenth_and_two_upkeeps_later() -> None:
    """RE-01: and the log has a dozen segments, however long it takes."""
    clock, disk = ManualClock(), FaultyFiles()
    retain_us = 600 * SECOND_US
    with open_store(disk, clock) as store:
        topic = store.create_topic("orders", policy=Policy(retain_ms=retain_us // 1000))
        log = store.log(topic.id)
        appended_us: list[int] = []
        for _ in range(300):
            appended_us.append(clock.now_us())
            append_flushed(store, topic, b"%d" % (len(appended_us) - 1))
            keep_up(store, clock, UPKEEP_US)
            present = {int(value) for value in values(log, log.start)}
            ages_us = [clock.now_us() - appended_us[number] for number in present]
            assert max(ages_us) <= retain_us * 11 // 10 + 2 * UPKEEP_US
            young = {number for number, time_us in enumerate(appended_us) if clock.now_us() - time_us < retain_us}
            assert young <= present
            assert len(log.segments) <= 12
        assert log.start > 200


def end_by_close(store: Store, disk: FaultyFiles) -> FaultyFiles:
    store.close()
    return disk


def end_by_kill(store: Store, disk: FaultyFiles) -> FaultyFiles:
    disk.kill()
    return disk


def end_by_power_cut(store: Store, disk: FaultyFiles) -> FaultyFiles:
    return disk.power_cut()


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("end", [end_by_close, end_by_kill, end_by_power_cut])
def test_the_age_of_messages_survives_a_restart(
    end: Callable[[Store, FaultyFiles], FaultyFiles], durability: Durability
) -> None:
    clock, disk = ManualClock(), FaultyFiles()
    store = open_store(disk, clock)
    policy = Policy(retain_ms=30 * DAY_US // 1000, durability=durability)
    old, young = store.create_topic("old", policy=policy), store.create_topic("young", policy=policy)
    clock.advance(40 * DAY_US)  # a segment may be much older than its messages
    append_flushed(store, old, b"a")
    clock.advance(20 * DAY_US)
    append_flushed(store, young, b"b")
    disk = end(store, disk)
    clock.advance(10 * DAY_US)
    with open_store(disk, clock) as store:
        store.upkeep()
        store.upkeep()
        logs = [store.log(topic.id) for topic in (old, young)]
        assert [values(log, log.start) for log in logs] == [[], [b"b"]]
        keep_up(store, clock, 2 * UPKEEP_US)
        append_flushed(store, old, b"c")
        assert values(logs[0], logs[0].start) == [b"c"]
    with open_store(disk, clock) as store:
        logs = [store.log(topic.id) for topic in (old, young)]
        assert [values(log, log.start) for log in logs] == [[b"c"], [b"b"]]


def test_a_compacted_topic_forgets_what_is_too_old_as_well() -> None:
    """Segments are not merged over more time than a tenth of the retention: together they would never be too old."""
    clock, disk = ManualClock(), FaultyFiles()
    retain_us = 600 * SECOND_US
    policy = Policy(retain_ms=retain_us // 1000, cleanup=Cleanup.COMPACT, tombstone_ms=0)
    with open_store(disk, clock) as store:
        topic = store.create_topic("prices", policy=policy)
        log = store.log(topic.id)
        for number in range(200):
            append(log, b"%d" % number, keys=[b"%d" % number])
            append(log, b"%d" % number, keys=[b"same"])
            store.flush()
            keep_up(store, clock, UPKEEP_US)
        present = {int(value) for value in values(log, log.start)}
        oldest_us = (200 - min(present)) * UPKEEP_US
        assert retain_us <= oldest_us <= retain_us * 11 // 10 + 2 * UPKEEP_US
        assert len(log.segments) <= 12


def test_a_piped_topic_forgets_too_and_goes_on_where_its_origin_does() -> None:
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock) as store:
        topic = store.create_topic("copy", policy=Policy(retain_ms=5000), origin="7@parent")
        log = store.log(topic.id)

        def arrive(offset: int, value: bytes) -> None:
            batch = encode([value], timestamp=0)
            batch.stamp(offset, append_time=0)
            assert log.append_at(batch)
            store.flush()

        arrive(100, b"a")
        keep_up(store, clock, 3 * UPKEEP_US)
        assert (log.start, log.end) == (101, 101)
        arrive(200, b"b")
    with open_store(disk, clock) as store:
        log = store.log(topic.id)
        assert (log.end, values(log, log.start)) == (201, [b"b"])


def test_a_log_that_is_held_keeps_what_nobody_could_read_yet() -> None:
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock) as store:
        topic = store.create_topic("orders", policy=Policy(retain_ms=1000))
        log = store.log(topic.id)
        append_flushed(store, topic, b"a")
        log.hold()
        append_flushed(store, topic, b"b")
        keep_up(store, clock, 5 * UPKEEP_US)
        log.release()
        assert values(log, log.start)[-1:] == [b"b"]
        keep_up(store, clock, 2 * UPKEEP_US)
        assert values(log, log.start) == []


@pytest.mark.parametrize("call", ["create", "write"])
def test_a_full_disk_delays_retention_and_loses_nothing_else(call: str) -> None:
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock) as store:
        topic = store.create_topic("orders", policy=Policy(retain_ms=60_000))
        log = store.log(topic.id)
        append_flushed(store, topic, b"a")
        disk.fail(call, errno.ENOSPC, path_suffix=".log")
        keep_up(store, clock, UPKEEP_US)
        assert values(log) == [b"a"]
        append_flushed(store, topic, b"b")
        assert values(log) == [b"a", b"b"]
        keep_up(store, clock, 100 * SECOND_US)
        assert values(log, log.start) == []


def test_what_arrives_while_a_log_rolls_is_stored_behind_it() -> None:
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock) as store:
        topic = store.create_topic("orders", policy=Policy(retain_ms=1000))
        log = store.log(topic.id)
        append_flushed(store, topic, b"a")
        clock.advance(900_000)
        log.flusher.roll()
        roll = log.flusher.begin_write()
        assert roll is not None
        append(log, b"b")
        roll.run()
        log.flusher.finish_write(roll)
        store.flush()
        clock.advance(200_000)
        store.upkeep()
        assert (values(log, log.start), log.start) == ([b"b"], 1)


@pytest.mark.parametrize("retain_bytes", [1, 50_000])
def test_a_log_is_not_larger_than_its_limit_for_long(retain_bytes: int) -> None:
    """RE-02: though a segment would hold much more."""
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock) as store:
        topic = store.create_topic("orders", policy=Policy(retain_bytes=retain_bytes))
        log = store.log(topic.id)
        for number in range(200):
            append_flushed(store, topic, b"%d:" % number + bytes(1000))
            store.upkeep()
            assert sum(segment.size for segment in log.segments) <= retain_bytes + 8192
        assert len(log.segments) <= 12
        assert len(values(log, log.start)) >= retain_bytes * 8 // 10 // 1100


def test_a_roll_that_the_disk_refuses_does_not_break_the_append_behind_it() -> None:
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock) as store:
        topic = store.create_topic("orders", policy=Policy(retain_ms=60_000))
        log = store.log(topic.id)
        append_flushed(store, topic, b"a")
        clock.advance(30 * SECOND_US)
        refused: list[object] = []
        log.flusher.roll()
        log.append(encode([b"b"], timestamp=0), outcome=Outcome(refused.append))
        disk.fail("create", errno.ENOSPC, path_suffix=".log")
        store.flush()
        assert [type(error) for error in refused] == [AppendFailed]
        append_flushed(store, topic, b"c")
        assert values(log) == [b"a", b"c"]


@pytest.mark.parametrize("size", [500, 30_000, 900_000], ids=["small", "batches", "larger than a part"])
@pytest.mark.parametrize("whole_store", [False, True])
def test_a_burst_between_two_upkeeps_leaves_the_newest_messages(whole_store: bool, size: int) -> None:
    """RE-02: as much as the limit has room for, though all came at once."""
    limit = 1_000_000
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock, retain_bytes=limit if whole_store else None) as store:
        topic = store.create_topic("orders", policy=Policy(retain_bytes=None if whole_store else limit))
        log = store.log(topic.id)
        for _ in range(3_000_000 // size):
            append(log, bytes(size))
        store.flush()
        for _ in range(3):
            clock.advance(UPKEEP_US)
            store.upkeep()
        assert log.start > 0
        left = len(values(log, log.start)) * size
        assert limit * 7 // 10 <= left <= limit


# The limit of the whole store.


def test_the_oldest_messages_of_all_topics_go_when_the_store_is_too_large() -> None:
    """RE-02: those that the broker needs itself stay."""
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock, retain_bytes=100_000) as store:
        own = store.create_topic("$delayed")
        topics = [store.create_topic(name) for name in ("a", "b", "c")]
        append_flushed(store, own, b"own:" + bytes(20_000))
        appended: list[tuple[int, int]] = []  # the topic, and the number within it
        for number in range(300):
            topic = topics[number // 7 % 3]
            appended.append((topic.id, store.log(topic.id).end))
            append_flushed(store, topic, bytes(1000))
            clock.advance(SECOND_US)
            store.upkeep()
            assert store.maintenance.store_bytes <= 100_000 + 5000
        assert store.maintenance.store_bytes == sum(segment_bytes(disk, log) for log in store.catalogue.logs.values())
        present = [offset >= store.log(topic_id).start for topic_id, offset in appended]
        oldest = present.index(True)
        # Whole segments go, which hold a tenth of the limit at most.
        assert 50 <= sum(present) <= 80
        assert 0 <= sum(1 for found in present[oldest:] if not found) <= 15
        assert values(store.log(own.id)) == [b"own:" + bytes(20_000)]
        assert store.usage()["store_bytes"] == (store.maintenance.store_bytes, 100_000)
    with open_store(disk, clock, retain_bytes=100_000) as store:
        assert 90_000 < store.maintenance.store_bytes <= 105_000
        assert [offset >= store.log(topic_id).start for topic_id, offset in appended] == present


def segment_bytes(disk: FaultyFiles, log: Log) -> int:
    return sum(size for name, size in disk.sizes(log.directory).items() if name.endswith(".log"))


@pytest.mark.parametrize("restarts", [False, True])
def test_idle_topics_make_room_for_a_busy_one(restarts: bool) -> None:
    clock, disk = ManualClock(), FaultyFiles()
    store = open_store(disk, clock, retain_bytes=50_000)
    idle = [store.create_topic(f"idle {number}") for number in range(20)]
    busy = store.create_topic("busy")
    for topic in idle:
        append_flushed(store, topic, bytes(1000))
        clock.advance(SECOND_US)
    if restarts:
        store.close()
        store = open_store(disk, clock, retain_bytes=50_000)
    with store:
        for _ in range(30):
            append_flushed(store, busy, bytes(1000))
            clock.advance(SECOND_US)
            store.upkeep()
        left = [bool(values(store.log(topic.id), store.log(topic.id).start)) for topic in idle]
        assert left == sorted(left), "the oldest go first"
        assert not left[0]
        assert left[-1]
        assert len(values(store.log(busy.id), store.log(busy.id).start)) == 30


def test_a_store_that_cannot_be_kept_within_its_limit_says_so_until_it_can() -> None:
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock, retain_bytes=10_000) as store:
        own, topic = store.create_topic("$delayed"), store.create_topic("orders")
        append_flushed(store, own, bytes(20_000))
        append_flushed(store, topic, b"a")
        store.upkeep()
        store.upkeep()
        assert values(store.log(topic.id), 1) == []
        assert "storage.retain_bytes" in store.health.problems["store"]
        store.delete_topic(own.id)
        store.upkeep()
        assert store.health.problems == {}


def test_a_segment_that_cannot_be_removed_stops_neither_the_others_nor_the_log() -> None:
    clock, disk = ManualClock(), FaultyFiles()
    with open_store(disk, clock, retain_bytes=30_000) as store:
        stuck, other = store.create_topic("stuck"), store.create_topic("other")
        for topic in (stuck, other):
            for _ in range(15):
                append_flushed(store, topic, bytes(1000))
                clock.advance(SECOND_US)
                store.rounds.roll(store.maintenance._due_to_roll())
        disk.fail("remove", errno.EACCES, path_suffix=f"topics/{stuck.id}/0/" + "0" * 20 + ".log")
        store.upkeep()
        assert store.log(stuck.id).start == 0
        assert store.log(other.id).start > 0
        append_flushed(store, stuck, bytes(10_000))
        store.upkeep()
        assert store.log(stuck.id).start > 0


def test_a_server_keeps_within_its_limit_and_tells_how_much_it_has(tmp_path: Path) -> None:
    """RE-02, RE-03"""
    limit = 16 << 20
    settings: dict[str, Any] = {"storage_retain_bytes": limit, "storage_upkeep_ms": 20, "topic_durability": "flush"}
    with Serve(tmp_path, **settings) as server, Flux(server) as flux:

        def start(topic: str) -> int:
            found: int = ask(server, "GET", f"/admin/topics/{topic}").json["positions"][0]["start"]
            return found

        for topic in ("old", "young"):
            for _ in range(12):
                assert flux.publish(topic, bytes(1_000_000)).startswith("+OK")
        until(lambda: start("old") > 0 and metrics(server)["broker_store_bytes"] <= limit)
        assert start("young") == 0
        varz = ask(server, "GET", "/varz").json
        assert varz["limits"]["store_bytes"] == {"used": varz["store_bytes"], "limit": limit}
        assert metrics(server)["broker_store_limit_bytes"] == limit
