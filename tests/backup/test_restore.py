"""Restores to an earlier moment, old backups, and the places that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backup import prune
from penstock.backup.create import Plan, Throttle, create, plan
from penstock.backup.cut import PartitionName, ToOffsets, ToTime
from penstock.backup.manifest import BackupManifest
from penstock.backup.restore import OFFSETS_AHEAD, check, manifests
from penstock.backup.target import DirectoryTarget, Target, open_target
from penstock.broker.transactions import PARTS_BITS, SOURCE
from penstock.errors import BadBackup, BadConfig
from penstock.log.policy import Policy
from penstock.model.batch import encode
from penstock.store.meta import Change
from penstock.store.store import Store
from penstock.testing import ManualClock
from tests.support.backups import SMALL, append, back_up, is_sound, put_back, values

# ---- to an earlier moment


def clock_of(store: Store) -> ManualClock:
    assert isinstance(store._clock, ManualClock)
    return store._clock


def test_it_restores_to_a_time(store: Store, target: Target, tmp_path: Path) -> None:
    topic = store.create_topic("t", partitions=2, policy=SMALL)
    append(store, topic.id, 20)
    expected = values(store, topic.id)
    time_us = clock_of(store).now_us()
    back_up(store, target)  # before the time, or at it: not what is asked for
    clock_of(store).advance(10)
    append(store, topic.id, 20)
    append(store, topic.id, 20, partition=1)
    later = back_up(store, target)

    restored = put_back(target, tmp_path / "new", ToTime(time_us + 5))

    assert restored.manifest == later.manifest
    assert [(str(each.place), each.offset, each.messages) for each in restored.cuts] == [
        ("t/0", 20, 20),
        ("t/1", 0, 20),
    ]
    assert is_sound(tmp_path / "new")
    with Store(tmp_path / "new") as again:
        assert values(again, topic.id) == expected
        assert values(again, topic.id, 1) == {}
        append(again, topic.id, 1)
        assert list(values(again, topic.id))[-1] >= 40 + OFFSETS_AHEAD
    with pytest.raises(BadBackup, match="all backups are older"):
        put_back(target, tmp_path / "other", ToTime(time_us + 1000))


def test_it_restores_to_an_offset_at_a_batch(store: Store, target: Target, tmp_path: Path) -> None:
    topic = store.create_topic("t", partitions=2, policy=SMALL)
    append(store, topic.id, 20)
    store.log(topic.id).append(encode([b"a", b"b", b"c"], timestamp=1))
    append(store, topic.id, 20)
    append(store, topic.id, 5, partition=1)
    back_up(store, target)

    restored = put_back(target, tmp_path / "new", ToOffsets({PartitionName("t", 0): 22}))

    assert [(each.offset, each.messages) for each in restored.cuts] == [(20, 23)]
    with Store(tmp_path / "new") as again:
        assert list(values(again, topic.id)) == list(range(20))
        assert len(values(again, topic.id, 1)) == 5
    for place, offset, said in (
        (PartitionName("x", 0), 1, "has no x/0"),
        (PartitionName("t", 0), 99, "t/0 has 0 to 43"),
    ):
        with pytest.raises(BadBackup, match=said):
            put_back(target, tmp_path / f"other{offset}", ToOffsets({place: offset}))


def test_a_transaction_is_restored_whole_or_not_at_all(store: Store, target: Target, tmp_path: Path) -> None:
    topic = store.create_topic("t", partitions=3, policy=SMALL)
    transaction = {"source": SOURCE, "position": 1 << PARTS_BITS}
    other = {"source": SOURCE, "position": 2 << PARTS_BITS}
    append(store, topic.id, 2)
    append(store, topic.id, 1, partition=0, **transaction)
    append(store, topic.id, 1, partition=1, **other)
    append(store, topic.id, 1, partition=2)
    clock_of(store).advance(10)
    append(store, topic.id, 1, partition=1, **{**transaction, "position": 3 << PARTS_BITS})
    append(store, topic.id, 1, partition=2, **transaction)
    back_up(store, target)

    restored = put_back(target, tmp_path / "new", ToTime(clock_of(store).now_us() - 5))

    # The first transaction ends in the third partition, after that time, so its part in the first goes as well.
    assert [(str(each.place), each.offset) for each in restored.cuts] == [("t/0", 2), ("t/1", 1), ("t/2", 1)]
    with pytest.raises(BadBackup, match="give --offset t/0:2 as well"):
        put_back(target, tmp_path / "other", ToOffsets({PartitionName("t", 2): 1}))
    put_back(target, tmp_path / "other", ToOffsets({PartitionName("t", 2): 1, PartitionName("t", 0): 2}))


def test_a_transaction_that_was_decided_later_is_not_stored_when_the_broker_starts(
    store: Store, target: Target, tmp_path: Path
) -> None:
    now_us = clock_of(store).now_us()
    changes = []
    for number, time_us in ((1, now_us - 100), (2, now_us)):
        last = {"number": number, "time_us": time_us, "once": False}
        changes.append(Change("transaction", f"name{number}", last))
        changes.append(Change("decided", str(number), {"name": f"name{number}", "number": number, "parts": []}))
    store.state.write(changes)
    store.flush()
    back_up(store, target)
    put_back(target, tmp_path / "new", ToTime(now_us - 50))
    with Store(tmp_path / "new") as again:
        assert [key for key, _ in again.state.items("decided")] == ["1"]


# ---- old backups


def test_old_backups_are_removed_with_what_only_they_had(store: Store, target: Target, tmp_path: Path) -> None:
    topic = store.create_topic("t", policy=Policy(segment_bytes=4096, retain_bytes=8192))
    ids = []
    for _ in range(3):
        append(store, topic.id, 30)
        store.upkeep()
        ids.append(back_up(store, target).manifest.id)
    assert prune.prune(target, 2) == ids[:1]
    assert [each.id for each in manifests(target)] == ids[1:]
    assert all(check(target, each) == [] for each in manifests(target))
    needed = {segment.name for each in manifests(target) for segment in each.segments}
    assert set(target.names("segments/")) == needed
    assert prune.prune(target, 2) == []


def test_nothing_is_removed_that_a_running_backup_may_count_on(store: Store, target: Target) -> None:
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 30)
    back_up(store, target)
    snapshot = store.snapshot_now()
    with prune.running(target):
        planned: Plan = plan(snapshot, target)
        store.delete_topic(topic.id)
        back_up(store, target)
        assert len(prune.prune(target, 1)) == 1
        done = create(snapshot, target, planned, penstock="1", throttle=Throttle(None))
    assert check(target, done.manifest) == []
    assert target.names("running/") == target.names("pruning/") == {}


def test_a_damaged_manifest_keeps_all_segments(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    first, second = back_up(store, target).manifest, back_up(store, target).manifest
    (tmp_path / "backups" / max(first, second, key=lambda each: each.id).name).write_text("{}")
    with pytest.raises(BadBackup, match="is damaged"):
        prune.prune(target, 1)
    assert check(target, first) == []


# ---- places


def test_what_a_killed_backup_was_writing_is_removed(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    back_up(store, target)
    left, busy = tmp_path / "backups" / "partial" / "left", target.begin()
    left.write_bytes(b"half")
    back_up(store, target)
    target.begin().close()
    assert not left.exists()
    assert busy.path.exists()
    busy.close()


def test_an_unknown_object_store_is_refused() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(BadConfig, match=r"foo://x.*s3://BUCKET"):
        open_target("foo://x")


def test_without_obstore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(BadConfig, match=r"pip install 'penstock\[backup\]'"):
        open_target("s3://bucket/path")


def test_a_manifest_cannot_lead_out_of_its_directory(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    manifest = back_up(store, target).manifest
    for old, new in (('"topic_id": 0', '"topic_id": "../.."'), ("segments/", "segments/../../")):
        evil = manifest.encode().decode().replace(old, new)
        with pytest.raises(BadBackup, match="is damaged"):
            BackupManifest.decode("x", evil.encode())
