"""A data directory: its topics, through every end and in spite of a disk that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import (
    AppendFailed,
    BadDirectory,
    Closed,
    DirectoryInUse,
    PenstockError,
    UnknownTopic,
)
from penstock.log.appender import LogState
from penstock.log.policy import Cleanup, Durability, Policy, Topic
from penstock.model.batch import encode
from penstock.outcome import Outcome
from penstock.store import catalogue
from penstock.store.store import Store
from penstock.testing import FaultyFiles, PowerCut
from tests.support.logs import append, values
from tests.support.stores import DATA, ENDS, LARGE, SMALL, STATE_FILE, End, Way, append_flushed, open_store, ways
from tests.support.watched import Call, WatchedFiles


def test_a_new_store_has_no_topics_and_a_new_topic_has_empty_logs() -> None:
    with open_store(FaultyFiles()) as store:
        assert store.topics == []
        topic = store.create_topic("orders", partitions=3, policy=SMALL)
        assert store.topics == [topic] == [Topic(topic.id, "orders", 3, SMALL)]
        assert [store.log(topic.id, partition).end for partition in range(3)] == [0, 0, 0]


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
