"""Snapshots of a store: what they hold, and that nothing takes it away from them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.errors import BadRequest, Closed, Overloaded
from penstock.log.policy import Cleanup, Durability, Policy
from penstock.model.batch import encode
from penstock.store.snapshot import DIRECTORY, SNAPSHOTS_MAX, ListedLog, Snapshot, SnapshotListing
from penstock.store.store import Store, StoreSettings

SMALL = Policy(segment_bytes=4096)


def append(store: Store, topic_id: int, count: int, key: bytes | None = None) -> None:
    log = store.log(topic_id)
    for number in range(count):
        keys = None if key is None else [key]
        log.append(encode([b"%d" % number + bytes(500)], keys=keys, timestamp=1))
    store.flush()


def listing_of(snapshot: Snapshot) -> SnapshotListing:
    number, size = snapshot.listing
    return SnapshotListing.decode(snapshot.read(number, 0, size))


def contents(snapshot: Snapshot) -> dict[tuple[int, int], list[bytes]]:
    """The bytes of each segment, by topic and partition."""
    found: dict[tuple[int, int], list[bytes]] = {}
    number = 0
    for log in listing_of(snapshot).logs:
        for segment in log.segments:
            data = snapshot.read(number, 0, segment.bytes + 1000)
            assert len(data) == segment.bytes
            found.setdefault((log.topic_id, log.partition), []).append(data)
            number += 1
    return found


def listed(snapshot: Snapshot, topic_id: int) -> ListedLog:
    return next(log for log in listing_of(snapshot).logs if log.topic_id == topic_id)


def test_a_snapshot_holds_what_is_committed_then_and_keeps_it(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("t", policy=Policy(segment_bytes=4096, retain_bytes=1))
        append(store, topic.id, 30)
        files = {segment.base: segment.path.read_bytes() for segment in store.log(topic.id).segments}
        assert len(files) > 2
        snapshot = store.snapshot_now()
        append(store, topic.id, 30)
        store.upkeep()
        assert store.log(topic.id).start > 30
        assert contents(snapshot)[topic.id, 0] == list(files.values())
        log = listed(snapshot, topic.id)
        assert (log.topic, log.start, log.committed) == ("t", 0, 30)
        store.delete_topic(topic.id)
        assert contents(snapshot)[topic.id, 0] == list(files.values())


def test_a_compacted_log_is_as_it_was(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("t", policy=Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT))
        append(store, topic.id, 30, b"key")
        snapshot = store.snapshot_now()
        before = contents(snapshot)[topic.id, 0]
        append(store, topic.id, 30, b"key")
        store.upkeep()
        assert contents(snapshot)[topic.id, 0] == before
        versions = {segment.version for segment in listed(snapshot, topic.id).segments}
        again = listed(store.snapshot_now(), topic.id)
        assert not versions & {segment.version for segment in again.segments}


def test_segments_that_did_not_change_have_the_same_version(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("t", policy=SMALL)
        append(store, topic.id, 20)
        before = listed(store.snapshot_now(), topic.id).segments
        assert listed(store.snapshot_now(), topic.id).segments == before
        append(store, topic.id, 20)
        after = listed(store.snapshot_now(), topic.id).segments
        assert after[: len(before) - 1] == before[:-1]
        assert after[len(before) - 1] != before[-1]


@pytest.mark.parametrize("held", [1, 40])
def test_what_a_transaction_holds_back_is_not_in_it(tmp_path: Path, held: int) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("t", policy=SMALL)
        append(store, topic.id, 10)
        log = store.log(topic.id)
        before = [segment.path.read_bytes() for segment in log.segments]
        log.hold()
        append(store, topic.id, held)
        snapshot = store.snapshot_now()
        assert listed(snapshot, topic.id).committed == 10
        assert contents(snapshot)[topic.id, 0] == before
        log.release()


def test_the_marks_are_of_one_moment_while_messages_come(tmp_path: Path) -> None:
    """Each message of `b` is appended once the same one of `a` is committed: no snapshot has more of `b`."""

    async def run() -> None:
        with Store(tmp_path, settings=StoreSettings(upkeep_ms=5)) as store:
            driver = asyncio.create_task(store.run())
            policy = Policy(durability=Durability.FLUSH, segment_bytes=4096)
            a = await store.create_topic_async("a", policy=policy)
            b = await store.create_topic_async("b", policy=SMALL)

            async def publish() -> None:
                while True:
                    await store.append(store.log(a.id), encode([bytes(300)], timestamp=1))
                    await store.append(store.log(b.id), encode([bytes(300)], timestamp=1))

            publishers = [asyncio.create_task(publish()) for _ in range(3)]
            for _ in range(20):
                snapshot = await store.snapshot()
                marks = {log.topic: log.committed for log in listing_of(snapshot).logs}
                assert marks["a"] is not None
                assert marks["b"] is not None
                assert 0 <= marks["a"] - marks["b"] <= 3
                store.snapshots.end(snapshot)
                await asyncio.sleep(0.005)
            for task in (*publishers, driver):
                task.cancel()
            await asyncio.gather(*publishers, driver, return_exceptions=True)

    asyncio.run(run())
    assert not list((tmp_path / DIRECTORY).iterdir())


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    with Store(tmp_path):
        pass
    left = tmp_path / DIRECTORY / "0123"
    left.mkdir(parents=True)
    (left / "0").write_bytes(b"a segment")
    with Store(tmp_path):
        assert not left.exists()


def test_an_ended_snapshot_is_not_read(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        snapshot = store.snapshot_now()
        with pytest.raises(BadRequest, match="invalid file 7"):
            snapshot.read(7, 0, 1)
        assert snapshot.read(0, 1 << 40, 10) == b""
        store.snapshots.end(snapshot)
        store.snapshots.end(snapshot)
        with pytest.raises(Closed):
            snapshot.read(0, 0, 1)


def test_there_are_not_too_many(tmp_path: Path) -> None:
    async def run() -> None:
        with Store(tmp_path) as store:
            driver = asyncio.create_task(store.run())
            snapshots = [await store.snapshot() for _ in range(SNAPSHOTS_MAX)]
            with pytest.raises(Overloaded, match="8 snapshots"):
                await store.snapshot()
            store.snapshots.end(snapshots[0])
            await store.snapshot()
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)

    asyncio.run(run())


def test_there_are_not_too_many_even_if_all_are_asked_for_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        with Store(tmp_path) as store:
            driver = asyncio.create_task(store.run())
            asked = [store.snapshot() for _ in range(3 * SNAPSHOTS_MAX)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(isinstance(answer, Snapshot) for answer in answers) == SNAPSHOTS_MAX
            assert sum(isinstance(answer, Overloaded) for answer in answers) == 2 * SNAPSHOTS_MAX
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)

    asyncio.run(run())


def test_a_log_that_cannot_be_opened_is_in_it_as_it_is(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("t", policy=SMALL)
        append(store, topic.id, 20)
        first = store.log(topic.id).segments[0].path
    (first.parent / "notes.txt").write_bytes(b"not a file of a log")
    with Store(tmp_path) as store:
        assert (topic.id, 0) in store.catalogue.refused
        snapshot = store.snapshot_now()
        log = listed(snapshot, topic.id)
        assert log.committed is None
        assert log.problem is not None
        assert "notes.txt" in log.problem
        assert len(contents(snapshot)[topic.id, 0]) > 1
