"""`meta.db` and the state topic: what is lost is rebuilt, and upkeep keeps both."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import (
    LogDamaged,
    LogFailed,
)
from penstock.log.appender import LogState
from penstock.log.policy import Cleanup, Durability, Policy, Topic
from penstock.store import store as store_module
from penstock.store.repair import repair
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock
from tests.support.logs import append, memory_meta, values
from tests.support.stores import (
    DATA,
    ENDS,
    LARGE,
    SMALL,
    End,
    Way,
    append_flushed,
    batch,
    drive,
    fail,
    open_store,
    running,
    ways,
)


def by_name(store: Store) -> dict[str, Topic]:
    return {topic.name: topic for topic in store.topics}


# ---- meta.db, a projection


def prepare(directory: Path) -> dict[str, Topic]:
    """Topics that were created, altered and deleted; the messages of each are its name."""
    with Store(directory) as store:
        topics = [store.create_topic(f"topic {number}", partitions=1 + number % 2) for number in range(5)]
        store.delete_topic(topics[1].id)
        store.alter_topic(Topic(topics[2].id, "renamed", 3, SMALL))
        for topic in store.topics:
            append_flushed(store, topic, topic.name.encode())
        return by_name(store)


def check(directory: Path, topics: dict[str, Topic]) -> None:
    with Store(directory) as store:
        assert by_name(store) == topics
        for topic in store.topics:
            assert values(store.log(topic.id)) == [topic.name.encode()]
        check_segments(store)
        later = store.create_topic("later")
        assert later.id > max(topic.id for topic in topics.values())
        store.delete_topic(later.id)


def check_segments(store: Store) -> None:
    """ST-22, ST-39: what `segments` tells after an upkeep is what is on the disk."""
    store.upkeep()
    rows = store._meta.segments()
    paths = sorted(store.directory.glob("topics/*/*/*.log"))
    assert (
        sorted(
            store.directory / "topics" / str(row.topic) / str(row.partition) / f"{row.base_offset:020d}.log"
            for row in rows
        )
        == paths
    )
    for row in rows:
        log = store.catalogue.logs[row.topic, row.partition]
        bases = [segment.base for segment in log.segments]
        following = [base for base in bases if base > row.base_offset]
        path = log.directory / f"{row.base_offset:020d}.log"
        assert row.size_bytes == path.stat().st_size
        assert row.end_offset == min([*following, log.end])
        assert row.sealed == bool(following)
        assert row.created_us > 1_700_000_000_000_000


META_FILES = ("meta.db", "meta.db-wal", "meta.db-shm")


def remove_all(directory: Path) -> None:
    for name in META_FILES:
        (directory / name).unlink(missing_ok=True)


def remove_main_file(directory: Path) -> None:
    (directory / "meta.db").unlink()


def garble(directory: Path) -> None:
    remove_all(directory)
    (directory / "meta.db").write_bytes(Random(1).randbytes(20_000))


def garble_a_page(directory: Path) -> None:
    data = bytearray((directory / "meta.db").read_bytes())
    data[5000:9000] = Random(1).randbytes(4000)
    remove_all(directory)
    (directory / "meta.db").write_bytes(data)


def empty(directory: Path) -> None:
    remove_all(directory)
    (directory / "meta.db").touch()


def cut_short(directory: Path) -> None:
    data = (directory / "meta.db").read_bytes()
    remove_all(directory)
    (directory / "meta.db").write_bytes(data[: len(data) // 2 + 100])


def make_newer(directory: Path) -> None:
    with contextlib.closing(sqlite3.connect(directory / "meta.db")) as database:
        database.execute("PRAGMA user_version = 99")


HARMS = [remove_all, remove_main_file, garble, garble_a_page, empty, cut_short, make_newer]


@pytest.mark.parametrize("harm", HARMS)
def test_without_meta_db_everything_comes_back(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    topics = prepare(tmp_path)
    harm(tmp_path)
    check(tmp_path, topics)
    check(tmp_path, topics)


@pytest.mark.parametrize("harm", [None, remove_main_file, garble])
def test_after_a_kill_everything_comes_back(tmp_path: Path, harm: Callable[[Path], None] | None) -> None:
    killed = tmp_path / "killed"
    with Store(tmp_path / "alive") as store:
        topics = [store.create_topic(f"topic {number}") for number in range(3)]
        store.upkeep()
        store.delete_topic(topics[0].id)
        store.alter_topic(Topic(topics[1].id, "renamed", 2, SMALL))
        for topic in store.topics:
            append_flushed(store, topic, topic.name.encode())
        # A copy taken now is what a process that is killed now leaves behind.
        shutil.copytree(tmp_path / "alive", killed)
        known = by_name(store)
    if harm is not None:
        harm(killed)
    check(killed, known)


def test_topics_are_told_in_the_order_of_their_creation_after_a_restart_too(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        topics = [store.create_topic(f"topic {number}") for number in range(12)]
        assert store.topics == topics
    with Store(tmp_path) as store:
        assert store.topics == topics


def test_a_meta_db_of_yesterday_catches_up(tmp_path: Path) -> None:
    prepare(tmp_path)
    yesterday = (tmp_path / "meta.db").read_bytes()
    with Store(tmp_path) as store:
        topics = by_name(store)
        store.delete_topic(topics["topic 0"].id)
        store.alter_topic(Topic(topics["topic 3"].id, "topic 3", 5, SMALL))
        new = store.create_topic("new")
        append_flushed(store, new, b"new")
        topics = by_name(store)
    remove_all(tmp_path)
    (tmp_path / "meta.db").write_bytes(yesterday)
    check(tmp_path, topics)


def test_a_state_topic_that_knows_less_than_meta_db_is_refused_until_it_is_repaired(tmp_path: Path) -> None:
    """It was restored from a copy that is older."""
    topics = prepare(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    with Store(tmp_path / "data") as store:
        new = {f"new {number}": store.create_topic(f"new {number}") for number in range(5)}
    shutil.copy(tmp_path / "data" / "meta.db", tmp_path / "copy" / "meta.db")
    for _ in range(2):
        with pytest.raises(LogDamaged, match=r"cut short.*penstock log repair"):
            Store(tmp_path / "copy")
    assert not repair(tmp_path / "copy").problems
    with Store(tmp_path / "copy") as store:
        assert by_name(store) == topics | new
        for topic in topics.values():
            assert values(store.log(topic.id)) == [topic.name.encode()]


def test_segments_tells_of_rolls_and_retention_after_an_upkeep(tmp_path: Path) -> None:
    """ST-22"""
    with Store(tmp_path) as store:
        topic = store.create_topic("orders", partitions=2, policy=Policy(segment_bytes=4096, retain_bytes=10_000))
        for number in range(8):
            append_flushed(store, topic, b"%d:" % number + LARGE)
        check_segments(store)
        rows = [row for row in store._meta.segments() if (row.topic, row.partition) == (topic.id, 0)]
        assert [(row.base_offset, row.end_offset, row.sealed) for row in rows] == [(5, 6, 1), (6, 7, 1), (7, 8, 0)]
        store.delete_topic(topic.id)
        check_segments(store)


def test_upkeep_keeps_what_its_policy_keeps_in_every_topic() -> None:
    clock = ManualClock()
    disk = FaultyFiles()
    with open_store(disk, clock=clock, tail_bytes_max=0) as store:
        forever = store.create_topic("forever", policy=SMALL)
        bounded = store.create_topic("bounded", policy=Policy(segment_bytes=4096, retain_ms=1000))
        compacted = store.create_topic("compacted", policy=Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT))
        for _ in range(3):
            for topic in store.topics:
                append(store.log(topic.id), LARGE, keys=[b"k"])
            store.flush()
        clock.advance(2_000_000)
        store.upkeep()
        assert [len(values(store.log(topic.id))) for topic in (forever, bounded, compacted)] == [3, 0, 1]
        assert [store.log(topic.id).start for topic in (forever, bounded, compacted)] == [0, 3, 0]


@pytest.fixture
def small_state_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(cleanup=Cleanup.COMPACT, segment_bytes=4096, tombstone_ms=1000)
    monkeypatch.setattr(store_module, "_STATE_POLICY", policy)


@pytest.mark.usefixtures("small_state_topic")
@pytest.mark.parametrize("end", ENDS)
def test_compaction_of_the_state_topic_keeps_the_state(end: End) -> None:
    clock = ManualClock()
    disk = FaultyFiles()
    store = open_store(disk, clock=clock)
    kept = store.create_topic("kept")
    for number in range(100):
        store.alter_topic(Topic(kept.id, f"kept {number}", 1, SMALL))
        store.delete_topic(store.create_topic("gone").id)
    clock.advance(10_000_000)
    size_before = sum(disk.sizes(DATA / "topics/0/0").values())
    store.upkeep()
    assert sum(disk.sizes(DATA / "topics/0/0").values()) < size_before / 5
    disk = end(store, disk)
    with open_store(disk, clock=clock) as store:
        assert store.topics == [Topic(kept.id, "kept 99", 1, SMALL)]
        assert store.create_topic("next").id == 102


@pytest.mark.usefixtures("small_state_topic")
def test_a_meta_db_from_before_a_compaction_does_not_bring_back_what_was_deleted() -> None:
    """Its next batches to apply are gone, and with them the tombstones of what it still knows."""
    clock = ManualClock()
    disk = FaultyFiles()
    meta = memory_meta()
    store = open_store(disk, meta=meta, clock=clock)
    gone = store.create_topic("gone")
    store.upkeep()
    yesterday, applied = meta.state(), meta.applied()
    store.delete_topic(gone.id)
    for number in range(100):
        store.delete_topic(store.create_topic(f"other {number}").id)
    clock.advance(10_000_000)
    store.upkeep()
    store.close()
    stale = memory_meta()
    stale.apply(yesterday, applied)
    with open_store(disk, meta=stale, clock=clock) as store:
        assert store.topics == []


class WatchedMeta:
    """A meta.db that tells of each call; `before` may raise."""

    def __init__(self) -> None:
        self.meta = memory_meta()
        self.before: Callable[[str], None] | None = None

    def __getattr__(self, name: str) -> Any:
        if self.before is not None:
            self.before(name)
        return getattr(self.meta, name)


def refuse(name: str) -> None:
    if name in ("apply", "replace_segments"):
        raise sqlite3.OperationalError("database or disk is full")


def test_what_meta_db_had_no_room_for_is_projected_later() -> None:
    disk = FaultyFiles()
    meta: Any = WatchedMeta()
    store = open_store(disk, meta=meta)
    first = store.create_topic("first")
    meta.before = refuse
    store.upkeep()
    meta.before = None
    second = store.create_topic("second")
    store.upkeep()
    disk.kill()
    with open_store(disk, meta=meta) as store:
        assert store.topics == [first, second]


def test_a_close_that_fails_lets_go_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="input/output"), monkeypatch.context() as patch, Store(tmp_path) as store:
        patch.setattr(store, "flush", fail)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        store._meta.segments()
    Store(tmp_path).close()


def test_a_store_closes_when_meta_db_has_no_room() -> None:
    disk = FaultyFiles()
    meta: Any = WatchedMeta()
    store = open_store(disk, meta=meta)
    topic = store.create_topic("orders")
    append(store.log(topic.id), b"a")
    meta.before = refuse
    store.close()
    with open_store(disk) as store:
        assert values(store.log(topic.id)) == [b"a"]


# ---- logs that are damaged do not stop the others


def damage(disk: FaultyFiles, path: Path, position: int) -> None:
    content = bytearray(disk.content(path))
    content[position] ^= 1
    disk.set_content(path, content)


@pytest.mark.parametrize("position", [10, -100], ids=["head", "message"])
@pytest.mark.parametrize("cleanup", Cleanup)
def test_a_damaged_sealed_segment_stops_neither_upkeep_nor_close(position: int, cleanup: Cleanup) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        bad = store.create_topic("bad", policy=Policy(segment_bytes=4096, retain_ms=10**9, cleanup=cleanup))
        good = store.create_topic("good", policy=Policy(segment_bytes=4096, retain_bytes=1))
        for _ in range(4):
            append(store.log(bad.id), LARGE, keys=[b"k"])
            append(store.log(good.id), LARGE)
            store.flush()
        path = store.log(bad.id).segments[0].path
    damage(disk, path, position)
    store = open_store(disk)
    append_flushed(store, good, b"small")
    store.upkeep()
    assert values(store.log(good.id)) == [LARGE, b"small"]
    assert {row.topic for row in store._meta.segments()} >= {good.id}
    assert values(store.log(bad.id), 3) == [LARGE]
    store.close()
    with open_store(disk) as store:
        assert values(store.log(good.id)) == [LARGE, b"small"]


def test_a_failed_log_stops_neither_the_others_nor_close() -> None:
    disk = FaultyFiles()
    store = open_store(disk)
    bad, good = store.create_topic("bad"), store.create_topic("good")
    append_flushed(store, bad, b"a")
    disk.fail("sync", errno.EIO, path_suffix=f"topics/{bad.id}/0/" + "0" * 20 + ".log")
    append(store.log(bad.id), b"lost")
    append(store.log(good.id), b"b")
    store.flush()
    assert (store.log(bad.id).state, store.log(good.id).state) == (LogState.FAILED, LogState.OPEN)
    with pytest.raises(LogFailed):
        append(store.log(bad.id), b"more")
    store.upkeep()
    append_flushed(store, good, b"c")
    store.close()
    with open_store(disk) as store:
        assert values(store.log(bad.id))[:1] == [b"a"]
        assert values(store.log(good.id)) == [b"b", b"c"]


def open_segments(directory: Path) -> int:
    """How many segments this process has open below a directory, those that were removed too."""
    paths = (os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir())
    return sum(path.startswith(str(directory)) and ".log" in path for path in paths)


@ways
def test_the_segments_of_a_deleted_topic_do_not_keep_their_room_on_the_disk(tmp_path: Path, way: Way) -> None:
    with Store(tmp_path, settings=StoreSettings(tail_bytes_max=0)) as store:
        topic = store.create_topic("orders", policy=SMALL)
        for _ in range(5):
            append_flushed(store, topic, LARGE)
        assert len(values(store.log(topic.id))) == 5
        assert open_segments(tmp_path) == 6, "and that of the state topic"
        way.delete(store, topic.id)
        assert open_segments(tmp_path) == 1


def test_segments_that_are_open_are_bounded_whatever_looks_at_them(tmp_path: Path) -> None:
    settings = StoreSettings(open_segments_max=4, tail_bytes_max=0)
    with Store(tmp_path, settings=settings) as store:
        policies = [SMALL, Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT)]
        topics = [store.create_topic(f"topic {number}", policy=policy) for number, policy in enumerate(policies)]
        for topic in topics:
            for _ in range(30):
                append(store.log(topic.id), LARGE, keys=[b"k"])
    with Store(tmp_path, settings=settings) as store:
        allowed = 4 + len(topics) + 1  # and the active segment of each log
        for topic in topics:
            log = store.log(topic.id)
            assert len(values(log)) == 30
            assert open_segments(tmp_path) <= allowed
            assert log.offset_at(1) == 0
            assert open_segments(tmp_path) <= allowed
            assert not log.verify().damage
            assert open_segments(tmp_path) <= allowed
        store.upkeep()
        assert open_segments(tmp_path) <= allowed


# ---- in an event loop


def upkeeps(meta: WatchedMeta, count: int, *, refused: bool = False) -> asyncio.Event:
    """When so many upkeeps have begun to write to meta.db. All but the last of them have ended."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    left = count

    def before(name: str) -> None:
        nonlocal left
        if name == "apply":
            left -= 1
            if not left:
                loop.call_soon_threadsafe(done.set)
        if refused:
            refuse(name)

    meta.before = before
    return done


def test_run_keeps_the_policies_and_meta_db_up_to_date() -> None:
    async def main() -> None:
        disk = FaultyFiles()
        meta: Any = WatchedMeta()
        with open_store(disk, meta=meta, upkeep_ms=1) as store:
            topic = store.create_topic("orders", policy=Policy(segment_bytes=4096, retain_bytes=1))
            log = store.log(topic.id)
            async with running(store):
                for number in range(5):
                    await store.append(log, batch(b"%d:" % number + LARGE))
                # The first of them may have begun before the last append.
                await upkeeps(meta, 3).wait()
                assert [row.base_offset for row in store._meta.segments() if row.topic == topic.id] == [4]
            assert {name for name in disk.sizes(log.directory) if name.endswith(".log")} == {f"{4:020d}.log"}

    drive(main)


@pytest.mark.parametrize("durability", Durability)
def test_run_empties_an_idle_topic_when_its_messages_are_too_old(durability: Durability) -> None:
    async def main() -> None:
        disk, clock = FaultyFiles(), ManualClock()
        meta: Any = WatchedMeta()
        with open_store(disk, meta=meta, clock=clock, upkeep_ms=1) as store:
            topic = store.create_topic("orders", policy=Policy(retain_ms=60_000, durability=durability))
            log = store.log(topic.id)
            async with running(store):
                await store.append(log, batch(b"a"))
                clock.advance(60_000_000)
                while log.start == 0:
                    await upkeeps(meta, 1).wait()
                assert (log.start, len(log.segments), log.committed) == (1, 1, 1)

    drive(main)


def test_a_full_meta_db_does_not_stop_the_rounds() -> None:
    async def main() -> None:
        meta: Any = WatchedMeta()
        with open_store(FaultyFiles(), meta=meta, upkeep_ms=1) as store:
            log = store.log(store.create_topic("orders").id)
            async with running(store):
                await upkeeps(meta, 3, refused=True).wait()
                assert await store.append(log, batch(b"a")) == 0
                meta.before = None

    drive(main)
