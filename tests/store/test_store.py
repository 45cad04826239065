"""A data directory: its topics, what it remembers, and the rounds that make many logs durable together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import uvloop

from penstock.awaiting import settled
from penstock.errors import (
    AppendFailed,
    BadDirectory,
    Closed,
    DirectoryInUse,
    LogDamaged,
    LogFailed,
    Overloaded,
    PenstockError,
    UnknownTopic,
)
from penstock.log.appender import LogState
from penstock.log.files import SYNC_EACH_MAX, OsFiles
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Durability, Policy, Topic
from penstock.model.batch import Batch, encode
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.store import catalogue
from penstock.store import store as store_module
from penstock.store.meta import Change, Meta
from penstock.store.repair import repair
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import append, memory_meta, values
from tests.support.watched import Call, WatchedFiles

DATA = Path("/data")
SMALL = Policy(segment_bytes=4096)
FLUSH = Policy(durability=Durability.FLUSH)
# Two of these do not fit into one small segment.
LARGE = Random(0).randbytes(3000)

T = TypeVar("T")


def open_store(files: Any, *, meta: Meta | None = None, clock: ManualClock | None = None, **settings: Any) -> Store:
    """A store in memory. Its `meta.db` is gone with it, and is built again from the state topic each time."""
    return Store(
        DATA,
        files=files,
        meta=meta or memory_meta(),
        clock=clock or ManualClock(),
        settings=StoreSettings(**settings),
    )


def append_flushed(store: Store, topic: Topic, *items: bytes, partition: int = 0) -> None:
    append(store.log(topic.id, partition), *items)
    store.flush()


def by_name(store: Store) -> dict[str, Topic]:
    return {topic.name: topic for topic in store.topics}


# Topics


def test_a_new_store_has_no_topics_and_a_new_topic_has_empty_logs() -> None:
    with open_store(FaultyFiles()) as store:
        assert store.topics == []
        topic = store.create_topic("orders", partitions=3, policy=SMALL)
        assert store.topics == [topic] == [Topic(topic.id, "orders", 3, SMALL)]
        assert [store.log(topic.id, partition).end for partition in range(3)] == [0, 0, 0]


def end_by_close(store: Store, disk: FaultyFiles) -> FaultyFiles:
    store.close()
    return disk


def end_by_kill(store: Store, disk: FaultyFiles) -> FaultyFiles:
    disk.kill()
    return disk


def end_by_power_cut(store: Store, disk: FaultyFiles) -> FaultyFiles:
    return disk.power_cut()


End = Callable[[Store, FaultyFiles], FaultyFiles]
ENDS: list[End] = [end_by_close, end_by_kill, end_by_power_cut]


class AtOnce:
    """Topics are changed by the calls that wait for the disk."""

    def create(self, store: Store, name: str, **options: Any) -> Topic:
        return store.create_topic(name, **options)

    def alter(self, store: Store, topic: Topic) -> None:
        store.alter_topic(topic)

    def delete(self, store: Store, topic_id: int) -> None:
        store.delete_topic(topic_id)


class Awaited:
    """Topics are changed by the calls that `run` serves."""

    def create(self, store: Store, name: str, **options: Any) -> Topic:
        return serve(store, lambda: store.create_topic_async(name, **options))

    def alter(self, store: Store, topic: Topic) -> None:
        serve(store, lambda: store.alter_topic_async(topic))

    def delete(self, store: Store, topic_id: int) -> None:
        serve(store, lambda: store.delete_topic_async(topic_id))


def serve(store: Store, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the store for one change. If the power goes that is raised, wherever it was noticed."""

    async def main() -> T:
        async with asyncio.timeout(10):
            rounds = asyncio.create_task(store.run())
            asked = asyncio.create_task(change())
            await asyncio.wait([asked])
            if not isinstance(asked.exception(), PowerCut | Closed):
                rounds.cancel()
            [ended] = await asyncio.gather(rounds, return_exceptions=True)
            if isinstance(ended, BaseExceptionGroup):
                raise ended.exceptions[0]
            return await asked

    return uvloop.run(main())


ways = pytest.mark.parametrize("way", [AtOnce(), Awaited()], ids=["at once", "awaited"])
Way = AtOnce | Awaited


@ways
def test_a_topic_or_partition_that_is_not_there_is_refused(way: Way) -> None:
    with open_store(FaultyFiles()) as store:
        topic = store.create_topic("orders", partitions=2)
        for topic_id, partition in ((topic.id, 2), (topic.id + 1, 0), (topic.id, -1)):
            with pytest.raises(UnknownTopic):
                store.log(topic_id, partition)
        with pytest.raises(UnknownTopic):
            way.delete(store, topic.id + 1)
        with pytest.raises(UnknownTopic):
            way.alter(store, Topic(topic.id + 1, "other", 1, SMALL))


@ways
@pytest.mark.parametrize("end", ENDS)
def test_topics_their_policies_and_messages_are_back_after_every_end(end: End, way: Way) -> None:
    disk = FaultyFiles()
    store = open_store(disk)
    plain = way.create(store, "plain")
    full = way.create(
        store,
        "full",
        partitions=3,
        policy=Policy(
            durability=Durability.FLUSH,
            segment_bytes=5000,
            cleanup=Cleanup.COMPACT,
            retain_ms=1,
            retain_bytes=2,
            tombstone_ms=3,
        ),
    )
    append_flushed(store, plain, b"a")
    append_flushed(store, full, b"b", partition=2)
    disk = end(store, disk)
    with open_store(disk) as store:
        assert store.topics == [plain, full]
        assert values(store.log(plain.id)) == [b"a"]
        assert [values(store.log(full.id, partition)) for partition in range(3)] == [[], [], [b"b"]]
        assert store.create_topic("next").id > full.id


@ways
@pytest.mark.parametrize("end", ENDS)
def test_a_topic_may_be_renamed_get_another_policy_and_more_partitions(end: End, way: Way) -> None:
    """ST-42: more partitions, never fewer."""
    disk = FaultyFiles()
    store = open_store(disk)
    topic = store.create_topic("before", partitions=2)
    append_flushed(store, topic, b"a", partition=1)
    altered = Topic(topic.id, "after", 4, Policy(segment_bytes=4096, durability=Durability.FLUSH))
    way.alter(store, altered)
    assert store.topics == [altered]
    assert {store.log(topic.id, partition).policy for partition in range(4)} == {altered.policy}
    append_flushed(store, altered, b"b", partition=3)
    disk = end(store, disk)
    with open_store(disk) as store:
        assert store.topics == [altered]
        assert [values(store.log(topic.id, partition)) for partition in range(4)] == [[], [b"a"], [], [b"b"]]


@ways
def test_a_topic_never_gets_fewer_partitions(way: Way) -> None:
    with open_store(FaultyFiles()) as store:
        topic = store.create_topic("orders", partitions=2)
        with pytest.raises(ValueError, match="fewer partitions"):
            way.alter(store, Topic(topic.id, "orders", 1, topic.policy))
        assert store.topics == [topic]


@ways
@pytest.mark.parametrize("end", ENDS)
def test_a_deleted_topic_is_gone_with_its_files_and_its_id_is_not_used_again(end: End, way: Way) -> None:
    disk = FaultyFiles()
    store = open_store(disk)
    kept = store.create_topic("kept")
    gone = store.create_topic("gone", partitions=2, policy=SMALL)
    for number in range(3):
        append_flushed(store, gone, b"%d:" % number + LARGE)
    append_flushed(store, kept, b"a")
    waiting: list[PenstockError | None] = []
    log = store.log(gone.id, 1)
    log.append(encode([b"waits"], timestamp=0), outcome=Outcome(waiting.append))
    way.delete(store, gone.id)
    assert len(waiting) == 1, "whoever waits is told"
    assert log.state is LogState.CLOSED
    with pytest.raises(Closed):
        append(log, b"b")
    disk = end(store, disk)
    assert disk.sizes(DATA / "topics").keys() == {"0", str(kept.id)}
    with open_store(disk) as store:
        assert store.topics == [kept]
        assert values(store.log(kept.id)) == [b"a"]
        with pytest.raises(UnknownTopic):
            store.log(gone.id)
        again = store.create_topic("gone")
        assert again.id not in (kept.id, gone.id)
        assert values(store.log(again.id)) == []


@ways
def test_a_deletion_is_finished_at_the_next_start_wherever_it_was_cut(way: Way) -> None:
    cuts = finished = 0
    while True:
        disk = FaultyFiles(seed=cuts)
        store = open_store(disk)
        kept = store.create_topic("kept", policy=SMALL)
        gone = store.create_topic("gone", partitions=2, policy=SMALL)
        for number in range(3):
            append_flushed(store, gone, b"%d:" % number + LARGE)
            append_flushed(store, kept, b"%d:" % number + LARGE)
        expected = values(store.log(gone.id))
        disk.cut_after = disk.calls + cuts
        try:
            way.delete(store, gone.id)
            break
        except PowerCut:
            disk = disk.power_cut()
        for _ in range(2):
            with open_store(disk) as store:
                assert len(values(store.log(kept.id))) == 3
                if gone in store.topics:
                    assert values(store.log(gone.id)) == expected, "all of it, or nothing"
                else:
                    assert store.topics == [kept]
                    assert disk.sizes(DATA / "topics").keys() == {"0", str(kept.id)}
                    finished += 1
        cuts += 1
    assert cuts > 10
    assert finished > 10


@ways
def test_a_creation_that_was_cut_leaves_a_whole_topic_or_none(way: Way) -> None:
    cuts = 0
    while True:
        disk = FaultyFiles(seed=cuts)
        store = open_store(disk)
        disk.cut_after = disk.calls + cuts
        try:
            way.create(store, "orders", partitions=2)
            break
        except PowerCut:
            disk = disk.power_cut()
        with open_store(disk) as store:
            for topic in store.topics:
                assert (topic.name, topic.partitions) == ("orders", 2)
                append_flushed(store, topic, b"a", partition=1)
            store.create_topic("next")
        cuts += 1
    assert cuts > 5


@ways
def test_an_alteration_that_was_cut_is_made_or_not(way: Way) -> None:
    cuts = made = 0
    while True:
        disk = FaultyFiles(seed=cuts)
        store = open_store(disk)
        before = store.create_topic("before", partitions=1)
        after = Topic(before.id, "after", 3, SMALL)
        append_flushed(store, before, b"a")
        disk.cut_after = disk.calls + cuts
        try:
            way.alter(store, after)
            break
        except PowerCut:
            disk = disk.power_cut()
        with open_store(disk) as store:
            [topic] = store.topics
            assert topic in (before, after)
            made += topic == after
            assert values(store.log(topic.id)) == [b"a"]
            append_flushed(store, topic, b"b", partition=topic.partitions - 1)
            assert store.catalogue.refused == {}
        cuts += 1
    assert cuts > made > 5


# What creating topic 1 with two partitions does for the second of them.
OPENING = [
    ("make_directory", "topics/1/1"),
    ("create", "topics/1/1/" + "0" * 20 + ".log"),
    ("write", "topics/1/1/" + "0" * 20 + ".log"),
    ("sync", "topics/1/1/" + "0" * 20 + ".log"),
    ("sync_directory", "topics/1/1"),
    ("sizes", "topics/1/1"),
]
STATE_FILE = "topics/0/0/" + "0" * 20 + ".log"


@ways
@pytest.mark.parametrize(("call", "path"), OPENING, ids=[call for call, _ in OPENING])
def test_a_topic_whose_files_cannot_be_made_is_not_created(way: Way, call: str, path: str) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        disk.fail(call, errno.ENOSPC, path_suffix=path)
        with pytest.raises(AppendFailed, match=r"orders is not created: .* create it again"):
            way.create(store, "orders", partitions=2)
        assert (store.topics, store.catalogue.refused) == ([], {})
        assert disk.sizes(DATA / "topics").keys() == {"0"}
        with pytest.raises(UnknownTopic):
            store.log(1)
        topic = way.create(store, "orders", partitions=2)
        append_flushed(store, topic, b"a", partition=1)
    with open_store(disk) as store:
        assert store.topics == [topic]
        assert values(store.log(topic.id, 1)) == [b"a"]


@ways
def test_a_topic_that_is_not_created_and_whose_files_stay_is_gone_after_a_restart(way: Way) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        disk.fail("make_directory", errno.ENOSPC, path_suffix="topics/1/1")
        disk.fail("remove", errno.EIO)
        with pytest.raises(AppendFailed, match="orders is not created"):
            way.create(store, "orders", partitions=2)
        assert store.topics == []
        assert disk.sizes(DATA / "topics").keys() == {"0", "1"}
    with open_store(disk) as store:
        assert store.topics == []
        assert disk.sizes(DATA / "topics").keys() == {"0"}
        assert store.create_topic("next").id == 2


def fill_up_at(disk: FaultyFiles, files: WatchedFiles, name: str, suffix: str) -> None:
    """From that call on there is no room: neither for it nor for the state."""

    def before(call: Call) -> None:
        if call.name == name and str(call.path).endswith(suffix):
            files.before = None
            disk.fail(name, errno.ENOSPC, path_suffix=suffix)
            disk.fail("write", errno.ENOSPC, path_suffix=STATE_FILE)

    files.before = before


def alter_to_complete(way: Way, store: Store, disk: FaultyFiles, topic: Topic) -> Store:
    way.alter(store, topic)
    return store


def restart_to_complete(way: Way, store: Store, disk: FaultyFiles, topic: Topic) -> Store:
    store.close()
    return open_store(disk)


@ways
@pytest.mark.parametrize("complete", [alter_to_complete, restart_to_complete])
def test_a_topic_that_can_be_neither_made_nor_taken_back_may_be_completed(
    way: Way, complete: Callable[[Way, Store, FaultyFiles, Topic], Store]
) -> None:
    disk = FaultyFiles()
    files = WatchedFiles(disk)
    store = open_store(files)
    fill_up_at(disk, files, "make_directory", "topics/1/1")
    with pytest.raises(
        AppendFailed, match=r"refused .* cannot be removed again .* alter the topic or restart .* or delete"
    ):
        way.create(store, "orders", partitions=3)
    [topic] = store.topics
    assert (topic.name, topic.partitions) == ("orders", 3)
    assert store.catalogue.refused.keys() == {(1, 1)}
    append_flushed(store, topic, b"a")
    with pytest.raises(AppendFailed, match="No space left"):
        store.log(topic.id, 1)
    store = complete(way, store, disk, topic)
    assert (store.topics, store.catalogue.refused) == ([topic], {})
    append_flushed(store, topic, b"b", partition=1)
    assert [values(store.log(topic.id, partition)) for partition in range(3)] == [[b"a"], [b"b"], []]
    store.close()


@ways
def test_a_topic_that_can_be_neither_made_nor_taken_back_may_be_deleted(way: Way) -> None:
    disk = FaultyFiles()
    files = WatchedFiles(disk)
    with open_store(files) as store:
        fill_up_at(disk, files, "make_directory", "topics/1/1")
        with pytest.raises(AppendFailed, match="cannot be removed again"):
            way.create(store, "orders", partitions=3)
        way.delete(store, 1)
        assert (store.topics, store.catalogue.refused) == ([], {})
        assert disk.sizes(DATA / "topics").keys() == {"0"}


@ways
@pytest.mark.parametrize(("call", "path"), OPENING, ids=[call for call, _ in OPENING])
def test_partitions_that_cannot_be_made_are_refused_until_the_topic_is_altered_again(
    way: Way, call: str, path: str
) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        topic = store.create_topic("before")
        append_flushed(store, topic, b"a")
        altered = Topic(topic.id, "after", 3, SMALL)
        disk.fail(call, errno.ENOSPC, path_suffix=path)
        with pytest.raises(AppendFailed, match=r"altered, but has refused partitions.*alter the topic again"):
            way.alter(store, altered)
        assert store.topics == [altered]
        assert store.catalogue.refused.keys() == {(topic.id, 1)}
        append_flushed(store, altered, b"b")
        append_flushed(store, altered, b"c", partition=2)
        way.alter(store, altered)
        assert store.catalogue.refused == {}
        append_flushed(store, altered, b"d", partition=1)
        expected = [[b"a", b"b"], [b"d"], [b"c"]]
        assert [values(store.log(topic.id, partition)) for partition in range(3)] == expected
    with open_store(disk) as store:
        assert [values(store.log(topic.id, partition)) for partition in range(3)] == expected


def test_a_log_that_has_no_room_at_a_start_does_not_stop_the_others() -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        kept = store.create_topic("kept")
        append_flushed(store, kept, b"a")
        store._write_state([catalogue._topic_change(Topic(2, "half made", 1, SMALL))])
    disk.fail("make_directory", errno.ENOSPC, path_suffix="topics/2/0")
    with open_store(disk) as store:
        assert values(store.log(kept.id)) == [b"a"]
        with pytest.raises(AppendFailed, match="No space left"):
            store.log(2)


@ways
def test_files_that_cannot_be_removed_are_removed_at_the_next_start(way: Way) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        topic = store.create_topic("orders")
        disk.fail("remove", errno.EIO)
        with pytest.raises(BadDirectory, match="the next start tries again"):
            way.delete(store, topic.id)
        assert store.topics == []
        with pytest.raises(UnknownTopic):
            store.log(topic.id)
    with open_store(disk) as store:
        assert store.topics == []
        assert disk.sizes(DATA / "topics").keys() == {"0"}


@ways
def test_a_deletion_whose_mark_cannot_be_removed_is_one_all_the_same(way: Way) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        topic = store.create_topic("orders")
        disk.fail("write", errno.ENOSPC, path_suffix=STATE_FILE, after=1)
        way.delete(store, topic.id)
        assert store.topics == []
    with open_store(disk) as store:
        assert store.topics == []
        assert store.state.items("topic") == []


@ways
def test_a_change_that_could_not_be_written_did_not_happen(way: Way) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        topic = store.create_topic("orders")
        for change in (
            lambda: way.create(store, "other"),
            lambda: way.alter(store, Topic(topic.id, "renamed", 1, topic.policy)),
            lambda: way.delete(store, topic.id),
        ):
            disk.fail("write", errno.ENOSPC, path_suffix=STATE_FILE)
            with pytest.raises(AppendFailed):
                change()
            assert store.topics == [topic]
            assert disk.sizes(DATA / "topics").keys() == {"0", str(topic.id)}
        append_flushed(store, topic, b"a")
        other = way.create(store, "other")
    with open_store(disk) as store:
        assert store.topics == [topic, other]
        assert values(store.log(topic.id)) == [b"a"]


def test_a_directory_of_an_unknown_topic_is_told_of_and_left_alone() -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        topic = store.create_topic("orders")
        append_flushed(store, topic, b"a")
    stranger = DATA / "topics" / "77" / "0" / ("0" * 20 + ".log")
    disk.make_directory(stranger.parent)
    disk.set_content(stranger, b"somebody's messages")
    for number in (78, 79):
        with open_store(disk) as store:
            assert store.catalogue.orphans == [DATA / "topics" / "77"]
            assert values(store.log(topic.id)) == [b"a"]
            assert store.create_topic(f"new {number}").id == number
    assert disk.content(stranger) == b"somebody's messages"
    disk.rename(DATA / "topics" / "77", DATA / "elsewhere")
    with open_store(disk) as store:
        assert not store.catalogue.orphans


def test_a_directory_has_one_store_at_a_time(tmp_path: Path) -> None:
    with Store(tmp_path), pytest.raises(DirectoryInUse, match=str(os.getpid())):
        Store(tmp_path)
    Store(tmp_path).close()


def test_a_store_that_could_not_be_opened_lets_go_of_the_directory(tmp_path: Path) -> None:
    Store(tmp_path).close()
    (tmp_path / "topics" / "77").mkdir()
    with pytest.raises(BadDirectory):
        Store(tmp_path)
    (tmp_path / "topics" / "77").rmdir()
    Store(tmp_path).close()


# meta.db, a projection


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


def fail() -> None:
    raise OSError(errno.EIO, "input/output error")


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


# Logs that are damaged do not stop the others


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


# In an event loop


def drive(main: Callable[[], Awaitable[None]]) -> None:
    """Run in an event loop, which must not hang."""

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await main()

    uvloop.run(bounded())


@contextlib.asynccontextmanager
async def running(store: Store) -> AsyncIterator[asyncio.Task[None]]:
    """The store with its rounds; it is stopped as a server stops it, and is left open."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        yield task
        task.cancel()


def batch(*items: bytes, **columns: Any) -> Batch:
    return encode(items, timestamp=0, **columns)


class Gate:
    """Where a worker waits until it is let through; `reached` is when it is there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self.reached = asyncio.Event()

    def wait(self) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._open.wait(10)

    def open(self) -> None:
        self._open.set()


def hold(files: WatchedFiles, name: str, log: Log) -> Gate:
    """Hold the next call of that name on a segment of this log. Only that one."""
    gate = Gate()

    def before(call: Call) -> None:
        if call.name == name and call.path.parent == log.directory and call.path.suffix == ".log":
            files.before = None
            gate.wait()

    files.before = before
    return gate


def test_concurrent_appends_are_all_committed_and_share_their_syncs(tmp_path: Path) -> None:
    """ST-02, ST-03, ST-06: group commit."""
    files = WatchedFiles(OsFiles())
    store = Store(tmp_path, files=files)
    synced, flushed = store.create_topic("synced"), store.create_topic("flushed", policy=FLUSH)
    appended: dict[int, dict[int, bytes]] = {synced.id: {}, flushed.id: {}}

    async def produce(topic: Topic, producer: int) -> None:
        for number in range(5):
            value = b"%d.%d" % (producer, number)
            offset = await store.append(store.log(topic.id), batch(value))
            assert store.log(topic.id).committed > offset
            assert offset not in appended[topic.id]
            appended[topic.id][offset] = value

    async def main() -> None:
        async with running(store), asyncio.TaskGroup() as group:
            for topic in (synced, flushed):
                for producer in range(50):
                    group.create_task(produce(topic, producer))

    files.calls.clear()
    drive(main)
    syncs = files.count("sync", ".log")
    for topic in (synced, flushed):
        assert values(store.log(topic.id)) == [appended[topic.id][offset] for offset in range(250)]
    assert 0 < syncs < 100, "500 appends"
    assert store.rounds.unflushed.used == 0
    store.close()
    with Store(tmp_path) as store:
        for topic in (synced, flushed):
            assert len(values(store.log(topic.id))) == 250


def test_what_arrives_while_a_round_runs_goes_into_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            log = store.log(store.create_topic("orders").id)
            async with running(store), asyncio.TaskGroup() as group:
                gate = hold(files, "sync", log)
                first = group.create_task(store.append(log, batch(b"first")))
                await gate.reached.wait()
                files.calls.clear()
                others = [group.create_task(store.append(log, batch(b"%d" % number))) for number in range(20)]
                await asyncio.sleep(0)
                assert (first.done(), log.end, log.committed) == (False, 21, 0)
                assert files.calls == []
                gate.open()
                assert await first == 0
                assert [await other for other in others] == list(range(1, 21))
                assert [call.name for call in files.calls] == ["write", "sync"]

    drive(main)


def test_readers_of_a_flush_topic_do_not_wait_for_the_sync_of_another(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            synced = store.log(store.create_topic("synced").id)
            flushed = store.log(store.create_topic("flushed", policy=FLUSH).id)
            async with running(store), asyncio.TaskGroup() as group:
                await store.append(flushed, batch(b"reserves offsets"))
                gate = hold(files, "sync", synced)
                slow = group.create_task(store.append(synced, batch(b"a")))
                await gate.reached.wait()
                assert await store.append(flushed, batch(b"b")) == 1
                assert [found.columns().values() for found in await store.read(flushed, 1, 1)] == [[b"b"]]
                assert not slow.done()
                gate.open()

    drive(main)


@pytest.mark.parametrize("before", [0, 1])
def test_messages_enough_for_a_sync_do_not_wait_for_the_interval_of_earlier_ones(tmp_path: Path, before: int) -> None:
    """ST-04, ST-05: whichever is first."""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files, settings=StoreSettings(flush_ms=10**9, flush_messages=500)) as store:
            log = store.log(store.create_topic("orders", policy=FLUSH).id)
            async with running(store):
                await store.append(log, batch(b"reserves offsets"))
                for _ in range(before):
                    await store.append(log, batch(b"waits for its interval"))
                gate = hold(files, "sync", log)
                await store.append(log, batch(*[b"a"] * 500))
                await gate.reached.wait()
                gate.open()

    drive(main)


def test_the_first_append_to_a_flush_topic_does_not_wait_for_the_interval_of_another(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path, settings=StoreSettings(flush_ms=10**9)) as store:
            one, other = (store.log(store.create_topic(name, policy=FLUSH).id) for name in ("one", "other"))
            async with running(store):
                await store.append(one, batch(b"reserves offsets"))
                await store.append(one, batch(b"waits for its interval"))
                assert await store.append(other, batch(b"reserves offsets")) == 0

    drive(main)


def test_a_flush_topic_is_synced_in_time_though_its_timer_was_early(tmp_path: Path) -> None:
    """Timers of the loop are rounded; the clock decides."""

    async def main() -> None:
        clock = ManualClock()
        with Store(tmp_path, clock=clock, settings=StoreSettings(flush_ms=1)) as store:
            log = store.log(store.create_topic("orders", policy=FLUSH).id)
            async with running(store):
                await store.append(log, batch(b"reserves offsets"))
                await store.append(log, batch(b"a"))
                await asyncio.sleep(0.02)  # the timer fires, and for the clock no time has passed
                assert log.marks.durable == 1
                clock.advance(1000)
                while log.marks.durable < log.end:
                    await asyncio.sleep(0.001)

    drive(main)


def test_a_flush_topic_is_synced_after_its_interval_and_after_so_many_messages(tmp_path: Path) -> None:
    """ST-04, ST-05"""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        for settings, messages in (
            (StoreSettings(flush_ms=1), 1),
            (StoreSettings(flush_ms=10**9, flush_messages=500), 500),
        ):
            with Store(tmp_path / str(messages), files=files, settings=settings) as store:
                log = store.log(store.create_topic("orders", policy=FLUSH).id)
                async with running(store):
                    await store.append(log, batch(b"reserves offsets"))
                    gate = hold(files, "sync", log)
                    await store.append(log, batch(*[b"a"] * messages))
                    assert log.marks.durable == 1
                    await gate.reached.wait()
                    gate.open()
                assert log.marks.durable == log.end == 1 + messages

    drive(main)


@pytest.mark.parametrize("policy", [Policy(), FLUSH], ids=["fsync", "flush"])
def test_what_fails_in_a_round_is_told_to_those_who_wait(policy: Policy) -> None:
    async def main() -> None:
        disk = FaultyFiles()
        with open_store(disk) as store:
            bad, good = (store.log(store.create_topic(name, policy=policy).id) for name in ("bad", "good"))
            async with running(store):
                await asyncio.gather(store.append(bad, batch(b"a")), store.append(good, batch(b"a")))
                disk.fail("write", errno.ENOSPC, path_suffix=str(bad.segments[0].path))
                answers = await asyncio.gather(
                    store.append(bad, batch(b"b")),
                    store.append(good, batch(b"b")),
                    store.append(bad, batch(b"c")),
                    return_exceptions=True,
                )
                assert [type(answer) for answer in answers] == [AppendFailed, int, AppendFailed]
                assert await store.append(bad, batch(b"d")) == 1
            assert (values(bad), values(good)) == ([b"a", b"d"], [b"a", b"b"])

    drive(main)


def test_a_log_that_failed_refuses_those_who_append_and_serves_those_who_read() -> None:
    async def main() -> None:
        disk = FaultyFiles()
        with open_store(disk, tail_bytes_max=0) as store:
            bad, good = (store.log(store.create_topic(name).id) for name in ("bad", "good"))
            async with running(store):
                await store.append(bad, batch(b"a"))
                disk.fail("sync", errno.EIO, path_suffix=str(bad.segments[0].path))
                answers = await asyncio.gather(
                    *(store.append(log, batch(b"b")) for log in (bad, good, bad)), return_exceptions=True
                )
                assert [type(answer) for answer in answers] == [LogFailed, int, LogFailed]
                with pytest.raises(LogFailed):
                    await store.append(bad, batch(b"c"))
                [found] = await store.read(bad, 0, 1000)
                assert found.columns().values() == [b"a"]
                assert await store.append(good, batch(b"c")) == 1

    drive(main)


def test_cancel_waits_for_the_round_that_runs_and_close_makes_the_rest_durable(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        store = Store(tmp_path, files=files)
        log = store.log(store.create_topic("orders").id)
        rounds = asyncio.create_task(store.run())
        gate = hold(files, "sync", log)
        under_way = asyncio.create_task(store.append(log, batch(b"under way")))
        await gate.reached.wait()
        waiting = asyncio.create_task(store.append(log, batch(b"waiting")))
        await asyncio.sleep(0)
        rounds.cancel()
        await asyncio.wait([rounds, under_way], timeout=0)
        assert (rounds.done(), under_way.done()) == (False, False)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await rounds
        assert await under_way == 0
        late = asyncio.create_task(store.append(log, batch(b"late")))
        await asyncio.sleep(0)
        store.close()
        assert (await waiting, await late) == (1, 2)

    drive(main)
    with Store(tmp_path) as store:
        assert values(store.log(1)) == [b"under way", b"waiting", b"late"]


def test_cancel_and_close_leave_nothing_half_done_whichever_lane_waits_for_the_other(tmp_path: Path) -> None:
    """A flush topic that must roll waits for its sync in the other lane, and the store is stopped meanwhile."""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        store = Store(tmp_path, files=files)
        topic = store.create_topic("orders", policy=Policy(segment_bytes=4096, durability=Durability.FLUSH))
        log = store.log(topic.id)
        rounds = asyncio.create_task(store.run())
        gate = hold(files, "sync", log)
        first = asyncio.create_task(store.append(log, batch(b"0:" + LARGE)))
        await gate.reached.wait()
        second = asyncio.create_task(store.append(log, batch(b"1:" + LARGE)))
        await asyncio.sleep(0)
        rounds.cancel()
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await rounds
        store.close()
        assert (await first, await second) == (0, 1)

    drive(main)
    with Store(tmp_path) as store:
        log = store.log(1)
        assert (values(log), log.end) == ([b"0:" + LARGE, b"1:" + LARGE], 2)
        assert not log.verify().damage


def test_what_waits_when_run_begins_is_written(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            logs = [
                store.log(store.create_topic(name, policy=policy).id) for name, policy in (("a", SMALL), ("b", FLUSH))
            ]
            appends = [asyncio.create_task(store.append(log, batch(b"early"))) for log in logs]
            await asyncio.sleep(0)
            async with running(store):
                assert [await task for task in appends] == [0, 0]

    drive(main)


@pytest.mark.parametrize("call_name", ["write", "sync"])
def test_an_unexpected_error_in_a_round_fails_its_log_and_no_other(tmp_path: Path, call_name: str) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            log = store.log(store.create_topic("orders").id)
            other = store.log(store.create_topic("other").id)
            async with running(store):
                assert await store.append(log, batch(b"a")) == 0

                def before(call: Call) -> None:
                    if call.name == call_name and call.path.parent == log.directory:
                        raise RuntimeError("a bug")

                files.before = before
                with pytest.raises(LogFailed, match="a bug"):
                    await store.append(log, batch(b"b"))
                assert await store.append(other, batch(b"c")) == 0
                assert log in store.rounds.failed
                assert other not in store.rounds.failed
                assert sum(store.health.faults.values()) == 1
                with pytest.raises(LogFailed):
                    await store.append(log, batch(b"d"))
                assert [found.count for found in log.read(0, 1)] == [1]
            files.before = None

    drive(main)
    with Store(tmp_path) as store:
        assert store.log(store.topics[0].id).end >= 1


def test_a_run_that_cannot_be_encoded_is_taken_back_and_the_log_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            log = store.log(store.create_topic("orders").id)
            async with running(store):
                outcome = Outcome()
                log.gather(Run([b"orders"], [None]), outcome)  # type: ignore[list-item]
                with pytest.raises(AppendFailed, match="encoding"):
                    await settled(outcome)
                outcome = Outcome()
                assert log.gather(Run([b"orders"], [b"sound"]), outcome) == 0
                await settled(outcome)
                assert store.health.faults == {"write": 1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.log.appender.batch_bytes", lambda _run: 100)
        drive(main)


def test_one_who_waits_and_raises_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            log = store.log(store.create_topic("orders").id)

            def raises(_error: PenstockError | None) -> None:
                raise RuntimeError("a bug")

            async with running(store):
                log.append(batch(b"a"), outcome=Outcome(raises))
                assert await store.append(log, batch(b"b")) == 1
                assert store.health.faults == {"finish": 1}
                assert log not in store.rounds.failed

    drive(main)


def test_an_append_whose_caller_went_away_is_stored_all_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            log = store.log(store.create_topic("orders").id)
            async with running(store):
                gone = asyncio.create_task(store.append(log, batch(b"a")))
                await asyncio.sleep(0)
                gone.cancel()
                assert await store.append(log, batch(b"b")) == 1
            assert values(log) == [b"a", b"b"]

    drive(main)


def test_cold_data_is_read_off_the_loop_and_hot_data_in_it(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        readers: list[threading.Thread] = []

        def before(call: Call) -> None:
            if call.name in ("read", "view", "open"):
                readers.append(threading.current_thread())

        with Store(tmp_path, files=files, settings=StoreSettings(tail_bytes_max=10_000)) as store:
            log = store.log(store.create_topic("orders", policy=SMALL).id)
            async with running(store):
                for number in range(10):
                    await store.append(log, batch(b"%d:" % number + LARGE))
                files.before = before
                [hot] = await store.read(log, 9, 1)
                assert readers == []
                cold = await asyncio.gather(*(store.read(log, number, 1) for number in range(5)))
                files.before = None
            assert hot.columns().values() == [b"9:" + LARGE]
            assert [found[0].columns().values()[0][:2] for found in cold] == [b"%d:" % number for number in range(5)]
            assert readers
            assert threading.main_thread() not in readers

    drive(main)


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


@pytest.mark.parametrize("name", ["write", "sync"])
def test_a_topic_that_is_deleted_while_a_round_writes_it_does_not_stop_the_others(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            gone, kept = store.create_topic("gone"), store.create_topic("kept")
            log = store.log(gone.id)
            async with running(store) as rounds:
                gate = hold(files, name, log)
                refused = asyncio.create_task(store.append(log, batch(b"a")))
                await gate.reached.wait()
                store.delete_topic(gone.id)
                gate.open()
                await asyncio.wait([refused])
                assert isinstance(refused.exception(), PenstockError)
                append_kept = asyncio.create_task(store.append(store.log(kept.id), batch(b"b")))
                await asyncio.wait([rounds, append_kept], return_when=asyncio.FIRST_COMPLETED)
                assert not rounds.done()
                assert await append_kept == 0
            assert store.rounds.unflushed.used == 0

    drive(main)
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == ["kept"]


def test_many_dirty_logs_are_synced_by_one_sync_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_files = OsFiles()
    if os_files._syncfs is None:
        pytest.skip("this system has no syncfs that tells of failures")
    partitions = 40
    assert partitions > SYNC_EACH_MAX
    syncfs = os_files._syncfs
    synced: list[int] = []

    def count(files: Any) -> list[OSError | None]:
        synced.append(len(files))
        return syncfs(files)

    monkeypatch.setattr(os_files, "_syncfs", count)

    async def main() -> None:
        with Store(tmp_path, files=WatchedFiles(os_files)) as store:
            topic = store.create_topic("orders", partitions=partitions)
            async with running(store):
                offsets = await asyncio.gather(
                    *(store.append(store.log(topic.id, number), batch(b"%d" % number)) for number in range(partitions))
                )
                assert offsets == [0] * partitions
                assert synced == [partitions]

    drive(main)
    with Store(tmp_path) as store:
        assert [values(store.log(1, number)) for number in range(partitions)] == [
            [b"%d" % number] for number in range(partitions)
        ]


def test_a_failed_sync_of_the_file_system_fails_every_log_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_files = OsFiles()
    with Store(tmp_path, files=os_files) as store:
        topic = store.create_topic("orders", partitions=20)
        logs = [store.log(topic.id, number) for number in range(20)]
        answers: list[PenstockError | None] = []
        for log in logs:
            log.append(batch(b"a"), outcome=Outcome(answers.append))

        def fail(files: list[Any]) -> list[OSError | None]:
            return [OSError(errno.EIO, "syncfs: Input/output error") for _ in files]

        monkeypatch.setattr(os_files, "_syncfs", fail)
        store.flush()
        assert [type(error) for error in answers] == [LogFailed] * 20
        assert {log.state for log in logs} == {LogState.FAILED}


def test_a_few_dirty_logs_are_synced_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os_files = OsFiles()
    monkeypatch.setattr(os_files, "_syncfs", None)
    with Store(tmp_path, files=os_files) as store:
        topic = store.create_topic("orders", partitions=SYNC_EACH_MAX)
        for number in range(SYNC_EACH_MAX):
            append(store.log(topic.id, number), b"%d" % number)
        store.flush()
        assert [store.log(topic.id, number).marks.durable for number in range(SYNC_EACH_MAX)] == [1] * SYNC_EACH_MAX


# Topics that are changed while the rounds run


def hold_below(files: WatchedFiles, name: str, directory: Path) -> Gate:
    """Hold the next call of that name on a directory, or on anything below it. Only that one."""
    gate = Gate()

    def before(call: Call) -> None:
        if call.name == name and call.path.is_relative_to(directory):
            files.before = None
            gate.wait()

    files.before = before
    return gate


def test_topics_are_created_altered_and_deleted_while_the_rounds_run(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            async with running(store):
                gone = await store.create_topic_async("gone", partitions=2)
                await store.append(store.log(gone.id), batch(b"lost"))
                topic = await store.create_topic_async("orders", partitions=2, policy=FLUSH)
                assert topic == Topic(gone.id + 1, "orders", 2, FLUSH)
                await store.append(store.log(topic.id, 1), batch(b"a"))
                altered = Topic(topic.id, "renamed", 3, SMALL)
                await store.alter_topic_async(altered)
                await asyncio.gather(*(store.append(store.log(topic.id, number), batch(b"b")) for number in range(3)))
                await store.delete_topic_async(gone.id)
                assert store.topics == [altered]
                with pytest.raises(UnknownTopic):
                    store.log(gone.id)
                with pytest.raises(UnknownTopic):
                    await store.delete_topic_async(gone.id)

    drive(main)
    with Store(tmp_path) as store:
        assert store.topics == [Topic(2, "renamed", 3, SMALL)]
        assert [values(store.log(2, number)) for number in range(3)] == [[b"b"], [b"a", b"b"], [b"b"]]
        assert sorted(path.name for path in (tmp_path / "topics").iterdir()) == ["0", "2"]


def test_creations_at_once_get_different_ids(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            async with running(store):
                topics = await asyncio.gather(*(store.create_topic_async(f"topic {number}") for number in range(8)))
            assert [topic.id for topic in topics] == list(range(1, 9))
            assert store.topics == topics

    drive(main)
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == [f"topic {number}" for number in range(8)]


def test_a_change_of_the_topics_asks_nothing_of_the_disk_in_the_loop(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        threads: dict[str, set[str]] = {}

        def before(call: Call) -> None:
            threads.setdefault(call.name, set()).add(threading.current_thread().name)

        with Store(tmp_path, files=files) as store:
            async with running(store):
                files.before = before
                topic = await store.create_topic_async("orders", partitions=2, policy=SMALL)
                for _ in range(3):
                    await store.append(store.log(topic.id), batch(LARGE))
                await store.alter_topic_async(Topic(topic.id, "renamed", 3, SMALL))
                await store.delete_topic_async(topic.id)
                await store.write_state([Change("positions", "a", 1)])
                files.before = None
        assert threads.keys() >= {"make_directory", "create", "write", "sync", "sizes", "remove", "remove_directory"}
        assert threading.main_thread().name not in set().union(*threads.values())

    drive(main)


@pytest.mark.parametrize("name", ["make_directory", "sizes", "create", "write", "sync", "sync_directory"])
def test_messages_are_taken_while_a_topic_is_being_created(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            kept = store.create_topic("kept")
            async with running(store):
                gate = hold_below(files, name, tmp_path / "topics" / "2")
                creation = asyncio.create_task(store.create_topic_async("slow", partitions=2))
                await gate.reached.wait()
                assert await store.append(store.log(kept.id), batch(b"a")) == 0
                assert (store.topics, creation.done()) == ([kept], False)
                with pytest.raises(UnknownTopic):
                    store.log(2)
                gate.open()
                topic = await creation
                assert store.topics == [kept, topic]
                assert await store.append(store.log(2, 1), batch(b"b")) == 0

    drive(main)


@pytest.mark.parametrize("name", ["sizes", "remove", "remove_directory"])
def test_messages_are_taken_while_a_topic_is_being_deleted(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            kept, gone = store.create_topic("kept"), store.create_topic("gone", partitions=2)
            async with running(store):
                gate = hold_below(files, name, tmp_path / "topics" / str(gone.id))
                deletion = asyncio.create_task(store.delete_topic_async(gone.id))
                await gate.reached.wait()
                assert await store.append(store.log(kept.id), batch(b"a")) == 0
                assert (store.topics, deletion.done()) == ([kept], False)
                gate.open()
                await deletion
                assert not (tmp_path / "topics" / str(gone.id)).exists()

    drive(main)


def test_readers_of_a_flush_topic_do_not_wait_for_the_state_topic(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            flushed = store.log(store.create_topic("flushed", policy=FLUSH).id)
            async with running(store):
                await store.append(flushed, batch(b"reserves offsets"))
                gate = hold(files, "sync", store._state_log)
                creation = asyncio.create_task(store.create_topic_async("slow"))
                await gate.reached.wait()
                assert await store.append(flushed, batch(b"a")) == 1
                assert not creation.done()
                gate.open()
                await creation

    drive(main)


def test_a_topic_is_not_changed_at_once_while_another_change_is_under_way(tmp_path: Path) -> None:
    """Two topics would get one id, or a deleted one would come back."""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            kept = store.create_topic("kept")
            async with running(store):
                gate = hold_below(files, "make_directory", tmp_path / "topics" / "2")
                creation = asyncio.create_task(store.create_topic_async("slow"))
                await gate.reached.wait()
                for change in (
                    lambda: store.create_topic("other"),
                    lambda: store.alter_topic(kept),
                    lambda: store.delete_topic(kept.id),
                ):
                    with pytest.raises(Overloaded, match="try again"):
                        change()
                gate.open()
                assert (await creation).id == 2
                assert store.create_topic("other").id == 3

    drive(main)


def test_a_topic_that_is_being_written_is_removed_when_that_has_ended(tmp_path: Path) -> None:
    """The write makes a new segment, in a directory that must still be there and must not be left."""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            policy = Policy(segment_bytes=4096, durability=Durability.FLUSH)
            gone, kept = store.create_topic("gone", policy=policy), store.create_topic("kept")
            log = store.log(gone.id)
            async with running(store) as rounds:
                await store.append(log, batch(LARGE))
                gate = hold(files, "create", log)
                refused = [asyncio.create_task(store.append(log, batch(LARGE)))]
                await gate.reached.wait()
                refused.append(asyncio.create_task(store.append(log, batch(b"waits"))))
                deletion = asyncio.create_task(store.delete_topic_async(gone.id))
                await asyncio.wait(refused)
                assert [type(task.exception()) for task in refused] == [Closed, Closed]
                # A round on the disk, in which a removal that did not wait would have begun.
                assert await store.append(store.log(kept.id), batch(b"a")) == 0
                assert files.count("remove") == 0
                assert (deletion.done(), store.topics) == (False, [kept])
                gate.open()
                await deletion
                assert not (tmp_path / "topics" / str(gone.id)).exists()
                assert not rounds.done()
            assert store.rounds.unflushed.used == 0

    drive(main)


def test_a_topic_that_is_being_compacted_is_removed_when_that_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files, settings=StoreSettings(upkeep_ms=1)) as store:
            kept = store.create_topic("kept")
            gone = store.create_topic("gone", policy=Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT))
            for _ in range(3):
                append(store.log(gone.id), LARGE, keys=[b"k"])
                store.flush()
            gate = hold_below(files, "rename", store.log(gone.id).directory)
            async with running(store):
                await gate.reached.wait()
                files.calls.clear()
                deletion = asyncio.create_task(store.delete_topic_async(gone.id))
                while gone in store.topics:
                    await store.append(store.log(kept.id), batch(b"a"))
                await store.append(store.log(kept.id), batch(b"a round on the disk"))
                assert files.count("remove") == 0
                gate.open()
                await deletion
                assert not (tmp_path / "topics" / str(gone.id)).exists()

    drive(main)


def test_topics_are_created_changed_and_deleted_while_another_one_is_compacted(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files, settings=StoreSettings(upkeep_ms=1)) as store:
            busy = store.create_topic("busy", policy=Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT))
            for _ in range(3):
                append(store.log(busy.id), LARGE, keys=[b"k"])
                store.flush()
            gate = hold_below(files, "rename", store.log(busy.id).directory)
            async with running(store):
                await gate.reached.wait()
                # The gate stays shut: whoever waits for the compaction never goes on.
                created = await store.create_topic_async("created")
                assert await store.append(store.log(created.id), batch(b"a")) == 0
                await store.alter_topic_async(replace(created, partitions=2))
                assert await store.append(store.log(busy.id), batch(b"b")) == 3
                await store.delete_topic_async(created.id)
                gate.open()

    drive(main)


def test_upkeep_leaves_a_topic_alone_that_was_deleted_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("orders", policy=Policy(segment_bytes=4096, retain_bytes=1))
        for _ in range(3):
            append_flushed(store, topic, LARGE)
        log = store.log(topic.id)
        store.delete_topic(topic.id)
        store.maintenance._keep_up([log])
    assert caplog.text == ""


def test_a_change_whose_caller_went_away_is_made_and_one_that_was_not_begun_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            async with running(store):
                gate = hold_below(files, "make_directory", tmp_path / "topics" / "1")
                under_way = asyncio.create_task(store.create_topic_async("under way"))
                not_begun = asyncio.create_task(store.create_topic_async("not begun"))
                await gate.reached.wait()
                under_way.cancel()
                not_begun.cancel()
                await asyncio.wait([under_way, not_begun])
                assert store.topics == []
                gate.open()
                last = await store.create_topic_async("last")
                assert [(topic.id, topic.name) for topic in store.topics] == [(1, "under way"), (2, "last")]
                await store.append(store.log(1), batch(b"a"))
                await store.append(store.log(last.id), batch(b"a"))

    drive(main)
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == ["under way", "last"]


def test_a_failure_of_a_change_whose_caller_went_away_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        disk = FaultyFiles()
        files = WatchedFiles(disk)
        with open_store(files) as store:
            async with running(store):
                gate = hold_below(files, "make_directory", DATA / "topics" / "1")
                disk.fail("make_directory", errno.ENOSPC, path_suffix="topics/1/0")
                creation = asyncio.create_task(store.create_topic_async("orders"))
                await gate.reached.wait()
                creation.cancel()
                await asyncio.wait([creation])
                gate.open()
                last = await store.create_topic_async("last")
                assert store.topics == [last]

    drive(main)
    assert "orders is not created" in caplog.text
    assert "its caller was cancelled" in caplog.text


def test_run_ends_after_the_change_that_is_under_way_and_close_refuses_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        store = Store(tmp_path, files=files)
        rounds = asyncio.create_task(store.run())
        gate = hold_below(files, "make_directory", tmp_path / "topics" / "1")
        under_way = asyncio.create_task(store.create_topic_async("under way", partitions=2))
        waiting = asyncio.create_task(store.create_topic_async("waiting"))
        await gate.reached.wait()
        rounds.cancel()
        await asyncio.wait([rounds, under_way, waiting], timeout=0)
        assert (rounds.done(), under_way.done(), waiting.done()) == (False, False, False)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await rounds
        assert under_way.done()
        assert store.topics == [under_way.result()]
        assert not waiting.done()
        store.close()
        with pytest.raises(Closed, match="nothing was changed"):
            await waiting
        with pytest.raises(Closed):
            await store.create_topic_async("late")

    drive(main)
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == ["under way"]


def test_a_deletion_that_is_under_way_when_run_ends_is_finished_with_its_rounds(tmp_path: Path) -> None:
    """It has still to write to the state topic."""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            topic = store.create_topic("orders")
            rounds = asyncio.create_task(store.run())
            gate = hold_below(files, "remove", tmp_path / "topics" / str(topic.id))
            deletion = asyncio.create_task(store.delete_topic_async(topic.id))
            await gate.reached.wait()
            rounds.cancel()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await rounds
            await deletion
            assert store.state.items("topic") == []

    drive(main)


def test_a_change_that_was_asked_for_before_run_is_made_by_it(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            early = asyncio.create_task(store.create_topic_async("early"))
            await asyncio.sleep(0)
            async with running(store):
                topic = await early
                assert store.topics == [topic]

    drive(main)


def test_a_change_is_refused_when_the_state_cannot_be_written_for_a_bug(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:

            def before(call: Call) -> None:
                if call.name == "write":
                    raise RuntimeError("a bug")

            async with running(store):
                files.before = before
                for _ in range(2):
                    with pytest.raises(LogFailed, match="a bug"):
                        await store.create_topic_async("orders")
            files.before = None

    drive(main)
    with Store(tmp_path) as store:
        assert store.topics == []


def test_a_bug_in_a_change_of_a_topic_takes_it_back(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:

            def before(call: Call) -> None:
                if call.name == "make_directory":
                    raise RuntimeError("a bug")

            async with running(store):
                files.before = before
                with pytest.raises(AppendFailed, match="a bug"):
                    await store.create_topic_async("orders")
                files.before = None
                assert store.topics == []
                await store.create_topic_async("orders")
                assert store.health.faults == {"open": 1}

    drive(main)
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == ["orders"]


@pytest.mark.parametrize(("before", "after"), [(SMALL, FLUSH), (FLUSH, SMALL)], ids=["to flush", "to fsync"])
def test_what_waits_when_the_policy_changes_lanes_is_written(tmp_path: Path, before: Policy, after: Policy) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            topic = store.create_topic("orders", policy=before)
            log = store.log(topic.id)
            async with running(store):
                await asyncio.sleep(0)
                committed = asyncio.Event()
                log.append(batch(b"a"), outcome=Outcome(lambda _: committed.set()))
                store.alter_topic(Topic(topic.id, "orders", 1, after))
                await committed.wait()
            assert values(log) == [b"a"]

    drive(main)


def test_the_state_is_written_and_read_back(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            async with running(store):
                await store.write_state([Change("position", "a", {"offset": 7}), Change("position", "b", 1)])
                assert store.state.get("position", "a") == {"offset": 7}
                await store.write_state([Change("position", "b", None)])
                assert store.state.items("position") == [("a", {"offset": 7})]

    drive(main)
    with Store(tmp_path) as store:
        assert store.state.items("position") == [("a", {"offset": 7})]


def test_state_that_could_not_be_written_is_as_before() -> None:
    async def main() -> None:
        disk = FaultyFiles()
        with open_store(disk) as store:
            async with running(store):
                await store.write_state([Change("position", "a", 1)])
                disk.fail("write", errno.ENOSPC, path_suffix=STATE_FILE)
                with pytest.raises(AppendFailed):
                    await store.write_state([Change("position", "a", 2), Change("position", "b", 2)])
                assert store.state.items("position") == [("a", 1)]

    drive(main)


def test_a_topic_is_not_made_while_the_state_topic_is_being_written(tmp_path: Path) -> None:
    """It would be told as made before it is durable."""
    with Store(tmp_path) as store:
        state_log = store._state_log
        store.state.write([Change("positions", "a", 1)])
        write = state_log.flusher.begin_write()
        assert write
        with pytest.raises(Overloaded, match="try again"):
            store.create_topic("orders")
        write.run()
        state_log.flusher.finish_write(write)
        assert store.create_topic("orders").id == 1
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == ["orders"]
