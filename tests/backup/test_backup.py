"""Backups of a store in this process: what is copied, what is refused, and what comes back."""

from __future__ import annotations

import errno
import gc
import io
import os
import resource
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.backup import restore
from penstock.backup.create import BackupSource
from penstock.backup.cut import ToTime
from penstock.backup.restore import OFFSETS_AHEAD, TOPIC_IDS_AHEAD, Restore, check, choose, manifests
from penstock.backup.target import DirectoryTarget, Target, TarTarget, open_target
from penstock.errors import BadBackup, BadDirectory, DirectoryInUse, LogDamaged, ReadFailed
from penstock.log.policy import OnDamage, Policy
from penstock.model.batch import encode
from penstock.store.meta import Change
from penstock.store.store import Store
from tests.support.backups import SMALL, append, back_up, is_sound, put_back, values
from tests.support.logs import messages


def test_a_restored_store_has_the_same_messages_topics_and_state(store: Store, target: Target, tmp_path: Path) -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=123_456)
    topic = store.create_topic("t", partitions=2, policy=policy)
    append(store, topic.id, 30)
    append(store, topic.id, 5, partition=1)
    store.purge_topic(topic.id, {0: 3})
    store.state.write([Change("group", "g", {"pattern": ">"})])
    store.flush()
    expected = [values(store, topic.id, partition) for partition in range(2)]

    done = back_up(store, target)
    append(store, topic.id, 7)  # not in the backup
    put_back(target, tmp_path / "new")

    assert done.copied_bytes == done.manifest.total_bytes
    assert is_sound(tmp_path / "new")
    with Store(tmp_path / "new") as again:
        assert again.topics == [topic]
        assert [values(again, topic.id, partition) for partition in range(2)] == expected
        assert again.log(topic.id).start == 3
        assert again.state.get("group", "g") == {"pattern": ">"}


def test_offsets_and_topic_ids_that_may_have_been_given_out_are_not_given_out_again(
    store: Store, target: Target, tmp_path: Path
) -> None:
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 3)
    back_up(store, target)
    put_back(target, tmp_path / "new")
    put_back(target, tmp_path / "exact", offsets_ahead=0)
    with Store(tmp_path / "new") as again:
        append(again, topic.id, 1)
        assert list(values(again, topic.id)) == [0, 1, 2, 3 + OFFSETS_AHEAD]
        assert again.create_topic("other").id == topic.id + 1 + TOPIC_IDS_AHEAD
    assert is_sound(tmp_path / "new")
    with Store(tmp_path / "exact") as again:
        append(again, topic.id, 1)
        assert list(values(again, topic.id)) == [0, 1, 2, 3]


def test_groups_that_had_read_everything_lag_behind_nothing(store: Store, target: Target, tmp_path: Path) -> None:
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 10)
    rest: dict[str, Any] = {"lots": [], "buried": 0, "burying": None}
    records = {
        f"all/{topic.id}/0": {"floor": 10, "next": 10, **rest},
        f"with/slash/{topic.id}/0": {"floor": 4, "next": 10, **rest, "lots": [[1, 0, [[0, 1]]]]},
        f"behind/{topic.id}/0": {"floor": 7, "next": 7, **rest},
    }
    store.state.write([Change("position", key, record) for key, record in records.items()])
    store.flush()
    back_up(store, target)
    put_back(target, tmp_path / "new")
    end = 10 + OFFSETS_AHEAD
    with Store(tmp_path / "new") as again:
        found = [[(each["floor"], each["next"]) for each in again.state.additions("position", key)] for key in records]
    assert found == [[(end, end)], [(4, end)], []]


def test_only_what_the_target_lacks_is_copied(store: Store, target: Target) -> None:
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 28)
    first = back_up(store, target)
    assert back_up(store, target).copied_segments == 0
    append(store, topic.id, 1)
    again = back_up(store, target)
    assert again.copied_segments == 1
    before, after = ({each.name for each in done.manifest.segments} for done in (first, again))
    assert len(before & after) == len(before) - 1
    assert [each.id for each in manifests(target)] == sorted(each.id for each in manifests(target))


class Breaking:
    """A source that is gone after so many reads."""

    def __init__(self, source: BackupSource, reads: int) -> None:
        self._source = source
        self._reads = reads

    @property
    def listing(self) -> tuple[int, int]:
        return self._source.listing

    def read(self, file: int, position: int, length: int) -> bytes:
        self._reads -= 1
        if self._reads < 0:
            raise ConnectionError("gone")
        return self._source.read(file, position, length)


def test_an_interrupted_backup_goes_on_where_it_was(store: Store, target: Target, tmp_path: Path) -> None:
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 10)
    [former] = [back_up(store, target).manifest]
    append(store, topic.id, 50)
    with pytest.raises(ConnectionError):
        back_up(store, target, lambda source: Breaking(source, 4))
    assert manifests(target) == [former]
    assert check(target, former) == []
    done = back_up(store, target)
    assert done.copied_segments == len(done.manifest.segments) - 4 - 2  # the first log of all did not change
    put_back(target, tmp_path / "new")
    with Store(tmp_path / "new") as again:
        assert values(again, topic.id) == values(store, topic.id)


def test_a_tar_stream_holds_one_whole_backup(store: Store, tmp_path: Path) -> None:
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 30)
    stream = io.BytesIO()
    tar = TarTarget(stream)
    back_up(store, tar)
    tar.close()
    data = stream.getvalue()

    manifest, problems = restore.check_tar(io.BytesIO(data))
    assert problems == []
    with Restore(tmp_path / "new") as work:
        target = work.unpack(io.BytesIO(data))
        work.run(target, choose(manifests(target), None, None))
    with Store(tmp_path / "new") as again:
        assert values(again, topic.id) == values(store, topic.id)

    at = data.index(manifest.segments[1].name.encode()) + 4096 + 3000
    flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    assert [problem.endswith("is damaged") for problem in restore.check_tar(io.BytesIO(flipped))[1]] == [True]


def small_tar(store: Store) -> bytes:
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 12)
    stream = io.BytesIO()
    tar = TarTarget(stream)
    back_up(store, tar)
    tar.close()
    return stream.getvalue()


def test_a_tar_stream_that_is_cut_anywhere_is_refused(store: Store, tmp_path: Path) -> None:
    data = small_tar(store)
    whole = len(data.rstrip(b"\0"))
    for end in [*range(0, whole, 61), *range(512, whole, 512), whole - 1]:
        for read in (restore.check_tar, lambda stream: Restore(tmp_path / "new").unpack(stream)):
            with pytest.raises(BadBackup, match="the tar stream is damaged or truncated: "):
                read(io.BytesIO(data[:end]))
    # From where only zeros are missing.
    assert restore.check_tar(io.BytesIO(data[: whole + 512]))[1] == []


def test_a_tar_stream_with_a_flipped_bit_is_refused(store: Store) -> None:
    data, random = small_tar(store), Random(0)
    outcomes: Counter[str] = Counter()
    for at in range(0, len(data.rstrip(b"\0")), 41):
        flipped = bytearray(data)
        flipped[at] ^= 1 << random.randrange(8)
        try:
            outcomes["found" if restore.check_tar(io.BytesIO(flipped))[1] else "sound"] += 1
        except BadBackup as error:
            outcomes["refused" if "damaged" in str(error) else str(error)] += 1
    assert outcomes.keys() == {"found", "refused", "sound"}
    assert outcomes["found"] > 100
    assert outcomes["refused"] > 10
    # The bytes between two files mean nothing.
    assert outcomes["sound"] < 100


class Full(io.BytesIO):
    """A stream that has room for so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_tar_stream_that_cannot_be_written_is_one_error(store: Store) -> None:
    append(store, store.create_topic("t", policy=SMALL).id, 60)
    for room in (0, 10240):
        tar = TarTarget(Full(room))
        with pytest.raises(BadBackup, match="cannot write the tar stream: No space left on device"):
            back_up(store, tar)
        del tar
        gc.collect()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can have more than so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_target_that_is_full_is_named(store: Store, tmp_path: Path) -> None:
    append(store, store.create_topic("t").id, 30)
    sound = DirectoryTarget(tmp_path / "sound")
    back_up(store, sound)
    reason = "File too large$"
    with pytest.raises(BadDirectory, match=f"^cannot write {tmp_path}/full: {reason}"), full_disk():
        back_up(store, DirectoryTarget(tmp_path / "full"))
    assert os.listdir(tmp_path / "full" / "partial") == []
    with pytest.raises(BadDirectory, match=rf"/penstock-backup-\w+: {reason}"), full_disk():
        back_up(store, TarTarget(io.BytesIO()))
    with pytest.raises(BadDirectory, match=rf"^cannot write {tmp_path}/new/.*\.log: {reason}"), full_disk():
        put_back(sound, tmp_path / "new")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_directory_that_holds_no_backups_is_refused(store: Store, tmp_path: Path, scheme: str) -> None:
    back_up(store, DirectoryTarget(tmp_path / "backups"))
    put_back(DirectoryTarget(tmp_path / "backups"), tmp_path / "restored")
    for data in ("data", "restored"):
        with pytest.raises(BadDirectory, match=f"{tmp_path}/{data} is the data directory of a broker: choose another"):
            open_target(f"{scheme}{tmp_path}/{data}", is_new=True)
        for inside in ("backups", "topics/backups"):
            with pytest.raises(
                BadDirectory, match=f"{inside} is inside {tmp_path}/{data}, the data directory of a broker"
            ):
                open_target(f"{scheme}{tmp_path}/{data}/{inside}", is_new=True)
    with pytest.raises(BadDirectory, match=f"{tmp_path}/none does not exist"):
        open_target(f"{scheme}{tmp_path}/none")
    (tmp_path / "b.tar").touch()
    with pytest.raises(BadDirectory, match=r"b\.tar is not a directory"):
        open_target(f"{scheme}{tmp_path}/b.tar")
    assert not (tmp_path / "none").exists()
    assert sorted(os.listdir(tmp_path / "restored")) == ["FORMAT", "topics"]


def test_a_damaged_backup_is_refused_by_the_name_of_the_file(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 30)
    manifest = back_up(store, target).manifest
    name = manifest.segments[2].name
    path = tmp_path / "backups" / name
    sound = path.read_bytes()

    path.write_bytes(sound[:200] + b"?" + sound[201:])
    assert check(target, manifest) == [f"{name} is damaged: its checksum is wrong"]
    with pytest.raises(BadBackup, match=f"{name} is damaged"):
        put_back(target, tmp_path / "new")

    path.unlink()
    assert check(target, manifest) == [f"{path} is missing"]
    with pytest.raises(BadBackup, match=f"{name} is missing"):
        put_back(target, tmp_path / "new")
    with pytest.raises(BadDirectory, match=r"restore into .* was not finished"):
        Store(tmp_path / "new")

    # The next backup copies what is missing, and the restore goes on into what is there.
    assert back_up(store, target).copied_segments == 1
    put_back(target, tmp_path / "new")
    with Store(tmp_path / "new") as again:
        assert values(again, topic.id) == values(store, topic.id)
    [listed] = [each for each in manifests(target) if each.id == manifest.id]
    (tmp_path / "backups" / listed.name).write_bytes(listed.encode().replace(b'"t"', b'"u"'))
    with pytest.raises(BadBackup, match=f"{listed.name} is damaged: its checksum is wrong"):
        manifests(target)


def test_a_segment_that_was_cut_short_in_the_target_is_copied_again(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    manifest = back_up(store, target).manifest
    os.truncate(tmp_path / "backups" / manifest.segments[0].name, 10)
    assert back_up(store, target).copied_segments == 1
    assert check(target, manifest) == []


@pytest.mark.parametrize("names", [["something"], ["topics", "FORMAT"]])
def test_a_directory_that_is_not_empty_is_refused(store: Store, tmp_path: Path, names: list[str]) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    back_up(store, target)
    (tmp_path / "new").mkdir()
    for name in names:
        (tmp_path / "new" / name).touch()
    with pytest.raises(BadDirectory, match="not empty"):
        put_back(target, tmp_path / "new")
    assert sorted(os.listdir(tmp_path / "new")) == sorted(names)


def test_two_restores_do_not_share_a_directory(tmp_path: Path) -> None:
    with Restore(tmp_path / "new"), pytest.raises(DirectoryInUse), Restore(tmp_path / "new"):
        pass


def test_files_are_private(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    old = os.umask(0)
    try:
        back_up(store, target)
        put_back(target, tmp_path / "new")
    finally:
        os.umask(old)
    for directory in (tmp_path / "backups", tmp_path / "new"):
        for path in [directory, *directory.rglob("*")]:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_damage_in_the_source_is_told_and_kept(store: Store, target: Target, tmp_path: Path) -> None:
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 30)
    path = store.log(topic.id).segments[1].path
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    base = store.log(topic.id).segments[1].base

    for _ in range(2):  # also when the segment is in the target already
        manifest = back_up(store, target).manifest
        [problem] = manifest.problems
        assert problem.startswith(f"t/0: segment {base} is damaged at byte ")
        assert manifests(target)[-1].problems == [problem]
    put_back(target, tmp_path / "new")
    with Store(tmp_path / "new") as again:
        assert len(again.log(topic.id).damage) == 1
        with pytest.raises(LogDamaged):
            values(again, topic.id)


class Unreadable(Breaking):
    """A source whose disk has a bad sector in one file."""

    def __init__(self, source: BackupSource, file: int, at: int) -> None:
        super().__init__(source, 1 << 30)
        self._bad = file, at

    def read(self, file: int, position: int, length: int) -> bytes:
        if file == self._bad[0] and position <= self._bad[1] < position + length:
            raise ReadFailed("input/output error")
        return super().read(file, position, length)


def test_a_sector_that_cannot_be_read_costs_what_is_in_it(store: Store, target: Target, tmp_path: Path) -> None:
    topic = store.create_topic("t", policy=Policy(segment_bytes=64 << 10, on_damage=OnDamage.SKIP))
    append(store, topic.id, 60)
    manifest = back_up(store, target, lambda source: Unreadable(source, 1, 10_000)).manifest
    assert len(manifest.problems) == 1
    put_back(target, tmp_path / "new")
    with Store(tmp_path / "new") as again:
        found, expected = values(again, topic.id), values(store, topic.id)
    assert found.items() < expected.items()
    assert len(expected) - len(found) <= 4096 // 500 + 2


def test_a_log_with_an_empty_segment_is_backed_up_as_it_is(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 20)
    store.close()
    first, second, *_ = sorted((tmp_path / "data" / "topics" / str(topic.id) / "0").glob("*.log"))
    first.write_bytes(b"")
    with Store(tmp_path / "data") as broken:
        manifest = back_up(broken, target).manifest
    assert "is empty" in manifest.problems[0]
    put_back(target, tmp_path / "new")
    with Store(tmp_path / "new") as again:
        log = again.log(topic.id)
        with pytest.raises(LogDamaged, match="offsets 0 to"):
            log.read(0, 1)
        assert log.read(int(second.stem), 1)


def test_a_log_that_cannot_be_opened_is_backed_up_as_it_is(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    topic = store.create_topic("t", policy=SMALL)
    append(store, topic.id, 20)
    store.close()
    foreign = tmp_path / "data" / "topics" / str(topic.id) / "0" / "notes.txt"
    foreign.write_bytes(b"not a file of a log")
    with Store(tmp_path / "data") as broken:
        assert (topic.id, 0) in broken.catalogue.refused
        manifest = back_up(broken, target).manifest
    assert "notes.txt" in manifest.problems[0]
    put_back(target, tmp_path / "new")
    with Store(tmp_path / "new") as again:
        assert len(messages(again.log(topic.id))) == 20


def test_a_piped_topic_goes_on_where_its_origin_is(store: Store, tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path / "backups")
    topic = store.create_topic("t", origin="elsewhere")
    batch = encode([b"a"], timestamp=1)
    batch.stamp(100, append_time=1, log=1)
    store.log(topic.id).append_at(batch)
    store.flush()
    back_up(store, target)
    put_back(target, tmp_path / "new", ToTime(0))  # a copy is not cut: it would be fetched again
    with Store(tmp_path / "new") as again:
        assert again.topics == [topic]
        assert again.log(topic.id).end == 101
