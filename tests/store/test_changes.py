"""Topics that are created, altered and deleted while the rounds of their store run."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import (
    AppendFailed,
    Closed,
    LogFailed,
    Overloaded,
    UnknownTopic,
)
from penstock.log.files import OsFiles
from penstock.log.policy import Cleanup, Durability, Policy, Topic
from penstock.outcome import Outcome
from penstock.store.meta import Change
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles
from tests.support.logs import append, values
from tests.support.stores import (
    DATA,
    FLUSH,
    LARGE,
    SMALL,
    STATE_FILE,
    Gate,
    append_flushed,
    batch,
    drive,
    hold,
    open_store,
    running,
)
from tests.support.watched import Call, WatchedFiles


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
