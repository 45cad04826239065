"""What a replica keeps: through a crash at every call to the disk, files that are cut or changed at every byte, a full
disk, and one copy that follows another."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadDirectory, DirectoryInUse, LogDamaged
from penstock.replica.copies import Copies
from penstock.replica.copy import INDEX, Copy
from penstock.replica.disk import Disk, OsDisk
from penstock.replica.index import Topic
from penstock.replica.record import BadRecord, Record, decode, encode
from penstock.testing import ManualClock

PRICES = Topic("prices", 7)
SEGMENT_BYTES = 300
ALL = 1 << 62


class Crash(Exception):
    """The process has ended. Not an OSError: nobody goes on after it."""


class CrashingDisk:
    """The real one, until the call of a number: of that it does nothing, a part or all, and then nothing ever again."""

    def __init__(self, crash_at: int, share: float) -> None:
        self.calls = 0
        self._crash_at = crash_at
        self._share = share
        self._disk = OsDisk()

    def write(self, path: Path, data: bytes, position: int) -> None:
        if self._is_last():
            self._disk.write(path, data[: round(len(data) * self._share)], position)
            raise Crash
        self._disk.write(path, data, position)

    def truncate(self, path: Path, size: int) -> None:
        self._whole(lambda: self._disk.truncate(path, size))

    def replace(self, path: Path, data: bytes) -> None:
        if self._is_last():
            # It is whole or not at all; a part of it may lie beside.
            path.with_name(f"{path.name}.new").write_bytes(data[: round(len(data) * self._share)])
            if self._share == 1:
                self._disk.replace(path, data)
            raise Crash
        self._disk.replace(path, data)

    def make_directory(self, path: Path) -> None:
        self._whole(lambda: self._disk.make_directory(path))

    def remove(self, path: Path) -> None:
        if self._is_last():
            files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
            for each in files[: round(len(files) * self._share)]:
                each.unlink()
            raise Crash
        self._disk.remove(path)

    def _whole(self, act: Callable[[], object]) -> None:
        if self._is_last():
            if self._share > 0.5:
                act()
            raise Crash
        act()

    def _is_last(self) -> bool:
        if self.calls > self._crash_at:
            raise Crash
        self.calls += 1
        return self.calls > self._crash_at


class FullDisk:
    """The real one, which takes only so many more bytes while `room` is a number."""

    def __init__(self) -> None:
        self.room: int | None = None
        self._disk = OsDisk()

    def write(self, path: Path, data: bytes, position: int) -> None:
        if self.room is not None and len(data) > self.room:
            self._disk.write(path, data[: self.room], position)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self._disk.write(path, data, position)

    def truncate(self, path: Path, size: int) -> None:
        self._disk.truncate(path, size)

    def replace(self, path: Path, data: bytes) -> None:
        if self.room is not None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self._disk.replace(path, data)

    def make_directory(self, path: Path) -> None:
        self._disk.make_directory(path)

    def remove(self, path: Path) -> None:
        self._disk.remove(path)


def record(offset: int, key: str | None = None, *, size: int = 40, deleted: bool = False) -> Record:
    value = b"" if deleted else f"{offset}:".encode().ljust(size, b".")
    return Record(offset=offset, value=value, key=None if key is None else key.encode(), deleted=deleted)


def opened(directory: Path, disk: Disk | None = None, segment_bytes_max: int = SEGMENT_BYTES) -> Copy:
    return Copy(directory, disk=disk or OsDisk(), clock=ManualClock(), segment_bytes_max=segment_bytes_max)


def copies_in(directory: Path, disk: Disk | None = None) -> Copies:
    return Copies(directory, "prices", segment_bytes_max=SEGMENT_BYTES, disk=disk, clock=ManualClock())


def everything(copy: Copy, partition: int = 0) -> list[Record]:
    records, rest = copy.find_range(partition, 0, ALL, limit=100_000, bytes_max=ALL)
    assert rest is None
    return records


def assert_nothing_is_left(copy: Copy) -> None:
    """Of what was written and is no record: the segments are as long as the index says."""
    sizes = {str(path.relative_to(copy.directory)): path.stat().st_size for path in copy.directory.glob("*/*.log")}
    assert sizes == {segment.file: segment.bytes for segment in copy.segments(None, 1000)}


def served(copies: Copies, partition: int = 0) -> list[Record]:
    with copies.read() as copy:
        return everything(copy, partition)


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    copy = opened(tmp_path / "copy")
    yield copy
    copy.close()


# ---- a record


@given(
    st.builds(
        Record,
        offset=st.integers(0, (1 << 63) - 1),
        value=st.binary(max_size=50),
        key=st.none() | st.binary(max_size=20),
        deleted=st.booleans(),
        timestamp_us=st.integers(-(1 << 63), (1 << 63) - 1),
        subject=st.text(st.characters(codec="utf-8"), max_size=10),
        headers=st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))),
    )
)
def test_a_record_comes_back_and_no_part_of_it_is_one(record: Record) -> None:
    data = encode(record)
    assert decode(data) == record
    for end in range(len(data)):
        with pytest.raises(BadRecord):
            decode(data[:end])
    with pytest.raises(BadRecord):
        decode(data + b"\0")


# ---- what is kept


def test_each_record_is_found_by_its_offset_in_its_partition(copy: Copy) -> None:
    copy.append(PRICES, {0: [record(0, "a"), record(5, "b")], 3: [record(0, "c")]})

    assert copy.find(0, 5) == record(5, "b")
    assert copy.find(3, 0) == record(0, "c")
    assert copy.find(0, 4) is None
    assert copy.find(1, 0) is None
    assert (copy.next_offset(0), copy.next_offset(3), copy.next_offset(1)) == (6, 1, 0)


def test_what_comes_again_is_not_stored_again(copy: Copy) -> None:
    copy.append(PRICES, {0: [record(0), record(1)]})
    assert copy.append(PRICES, {0: [record(0), record(1), record(2), record(2), record(1)]}) == 1
    assert copy.append(PRICES, {0: [record(2)]}) == 0

    assert [each.offset for each in everything(copy)] == [0, 1, 2]
    assert copy.totals()[0].records == 3


def test_the_latest_of_each_key_is_found_and_a_delete_removes_it(copy: Copy) -> None:
    copy.append(PRICES, {0: [record(0, "a"), record(1, "b"), record(2, "a"), record(3)]})
    assert copy.find_key(b"a") == (0, record(2, "a"))

    copy.append(PRICES, {0: [record(4, "a", deleted=True), record(5, "c", deleted=True), record(6, "c")]})
    assert copy.find_key(b"a") is None
    assert copy.find_key(b"c") == (0, record(6, "c"))
    assert copy.keys(b"", None, 10) == [b"b", b"c"]
    assert copy.find(0, 4) == record(4, "a", deleted=True)


def test_keys_are_found_by_their_beginning(copy: Copy) -> None:
    keys = [b"a", b"a\xff", b"a\xff\xff", b"a\xff\xff1", b"b", b"\xff", b"\xff\xff", b""]
    copy.append(PRICES, {0: [Record(offset=number, value=b"", key=key) for number, key in enumerate(keys)]})

    for prefix in (b"", b"a", b"a\xff", b"a\xff\xff", b"\xff", b"b", b"c"):
        assert copy.keys(prefix, None, 100) == sorted(key for key in keys if key.startswith(prefix)), prefix
    assert copy.keys(b"a", b"a\xff", 1) == [b"a\xff\xff"]
    assert copy.keys(b"b", b"a", 9) == [b"b"]
    assert copy.keys(b"a", b"b", 9) == []


def test_segments_are_as_large_as_they_may_be_and_no_larger(copy: Copy) -> None:
    length = len(encode(record(0)))
    copy.append(PRICES, {0: [record(offset) for offset in range(20)], 1: [record(0, size=1000), record(1)]})

    segments = copy.segments(None, 100)
    fits = SEGMENT_BYTES // length
    assert [(each.start, each.end) for each in segments if each.partition == 0] == [
        (first, min(first + fits, 20) - 1) for first in range(0, 20, fits)
    ]
    # One that is larger than a segment has one to itself.
    assert [(each.start, each.end) for each in segments if each.partition == 1] == [(0, 0), (1, 1)]
    for each in segments:
        assert (copy.directory / each.file).stat().st_size == each.bytes
    assert sum(each.records for each in segments) == 22
    assert len(everything(copy)) == 20


def test_the_index_has_the_table_of_segments(copy: Copy) -> None:
    copy.append(PRICES, {0: [record(3), record(4)]})
    with sqlite3.connect(copy.directory / INDEX) as index:
        rows = index.execute(
            "SELECT segment_id, segment_file, start_offset, end_offset, record_count, created_at FROM segment_ranges"
        ).fetchall()
    index.close()
    assert [row[:5] for row in rows] == [(0, "0/segment-0.log", 3, 4, 2)]
    assert rows[0][5].endswith("Z")


def test_a_range_has_an_end(copy: Copy) -> None:
    copy.append(PRICES, {0: [record(offset, size=100) for offset in range(10)]})
    length = len(encode(record(0, size=100)))

    def found(first: int, last: int, limit: int, bytes_max: int = ALL) -> tuple[list[int], int | None]:
        records, rest = copy.find_range(0, first, last, limit=limit, bytes_max=bytes_max)
        return [each.offset for each in records], rest

    assert found(2, 4, 10) == ([2, 3, 4], None)
    assert found(2, 4, 3) == ([2, 3, 4], None)
    assert found(2, 4, 2) == ([2, 3], 4)
    assert found(0, ALL, 100, 3 * length) == ([0, 1, 2], 3)
    assert found(0, ALL, 100, 1) == ([0], 1)
    assert found(20, ALL, 100) == ([], None)


def test_all_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    copy = opened(tmp_path)
    copy.append(PRICES, {0: [record(offset, f"k{offset % 3}") for offset in range(10)], 2: [record(7)]})
    copy.close()

    copy = opened(tmp_path)
    assert [each.offset for each in everything(copy)] == list(range(10))
    assert (copy.topic, copy.next_offset(0), copy.next_offset(2)) == (PRICES, 10, 8)
    copy.append(PRICES, {0: [record(9), record(10)]})
    assert copy.find(0, 10) == record(10)
    copy.close()


# ---- a full disk


def test_a_batch_for_which_there_is_no_room_is_not_stored_and_can_be_later(tmp_path: Path) -> None:
    batch = {0: [record(offset, "k") for offset in range(1, 12)], 1: [record(0)]}
    whole = sum(len(encode(each)) for each in batch[0])
    for room in range(0, whole, 13):
        disk = FullDisk()
        copy = opened(tmp_path / str(room), disk)
        copy.append(PRICES, {0: [record(0, "k")]})
        disk.room = min(room, SEGMENT_BYTES - 100)
        with pytest.raises(OSError, match="No space"):
            copy.append(PRICES, batch)
        assert everything(copy) == [record(0, "k")]
        assert copy.find_key(b"k") == (0, record(0, "k"))

        disk.room = None
        assert copy.append(PRICES, batch) == 12
        assert [each.offset for each in everything(copy)] == list(range(12))
        copy.close()


def test_what_a_failed_write_left_does_not_come_back(tmp_path: Path) -> None:
    """A record is skipped, and shorter ones are written over what is left of it; then the process is killed."""
    for size in (*range(0, 100, 9), 30):
        disk = FullDisk()
        directory = tmp_path / str(size)
        copy = opened(directory, disk)
        copy.append(PRICES, {0: [record(0)]})
        disk.room = 200  # for two of three
        with pytest.raises(OSError, match="No space"):
            copy.append(PRICES, {0: [record(1, size=30), record(2, size=30), record(3, size=30)]})
        disk.room = None
        copy.append(PRICES, {0: [record(2, size=size)]})
        copy.close()

        copy = opened(directory)
        assert everything(copy) == [record(0), record(2, size=size)]
        assert_nothing_is_left(copy)
        copy.append(PRICES, {0: [record(3)]})
        assert everything(copy)[-1] == record(3)
        copy.close()


# ---- crashes


Step = tuple[str, dict[int, list[Record]]]


def steps_of(random: Random) -> list[Step]:
    """Batches as a broker delivers them; and a RESET, after which it begins anew."""
    steps: list[Step] = []
    offsets = {0: 0, 1: 0}
    for number in range(10):
        if number == 4:
            steps.append(("begin", {}))
            offsets = {0: 0, 1: 0}
        if number == 8:
            steps.append(("complete", {}))
        batch: dict[int, list[Record]] = {}
        for partition in random.sample((0, 1), random.randint(1, 2)):
            first = offsets[partition]
            offsets[partition] += random.randint(1, 6)
            batch[partition] = [
                record(
                    offset,
                    f"{random.choice('abc')}{partition}",
                    size=random.randint(0, 90),
                    deleted=random.random() < 0.2,
                )
                for offset in range(first, offsets[partition])
            ]
        steps.append(("append", batch))
    return steps


def do(copies: Copies, step: Step) -> None:
    match step:
        case ("begin", _):
            copies.begin()
        case ("complete", _):
            copies.complete()
        case (_, batch):
            copies.append(PRICES, batch)


class Model:
    """What must be there: stupid, and in memory."""

    def __init__(self) -> None:
        self.serving: dict[int, list[Record]] = {0: [], 1: []}
        self.building: dict[int, list[Record]] | None = None

    def do(self, step: Step) -> None:
        match step:
            case ("begin", _):
                self.building = {0: [], 1: []}
            case ("complete", _):
                assert self.building is not None
                self.serving, self.building = self.building, None
            case (_, batch):
                filled = self.serving if self.building is None else self.building
                for partition, records in batch.items():
                    filled[partition] += records


def check(copies: Copies, acknowledged: Model, following: Model) -> None:
    """Readers see what was acknowledged, or what the step makes of it that was not; of a batch any beginning."""
    with copies.read() as copy:
        for partition in (0, 1):
            found = everything(copy, partition)
            least, most = acknowledged.serving[partition], following.serving[partition]
            assert found == most[: len(found)] or found == least[: len(found)]
            if most[: len(least)] == least:
                assert len(found) >= len(least), "something is gone that was acknowledged"
            else:
                assert found in (least, most)
            latest = {each.key: each for each in found if each.key is not None}
            for key, each in latest.items():
                assert copy.find_key(key) == (None if each.deleted else (partition, each))


def models(steps: Sequence[Step], count: int) -> Model:
    model = Model()
    for step in steps[:count]:
        model.do(step)
    return model


def run_to_crash(directory: Path, disk: CrashingDisk, steps: Sequence[Step], done: int) -> int:
    """How many steps were acknowledged when it crashed."""
    copies: Copies | None = None
    try:
        copies = copies_in(directory, disk)
        for step in steps[done:]:
            do(copies, step)
            done += 1
    except Crash:
        pass
    finally:
        if copies is not None:
            copies.close()
    return done


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 1])
def test_a_crash_at_any_call_loses_nothing_and_doubles_nothing(tmp_path: Path, share: float) -> None:
    seed = 11
    print("seed", seed)
    random = Random(seed)
    steps = steps_of(random)
    for crash_at in count():
        directory = tmp_path / str(crash_at)
        disk = CrashingDisk(crash_at, share)
        done = run_to_crash(directory, disk, steps, 0)
        if disk.calls <= crash_at:
            assert crash_at > 30, "it has done little"
            break
        # And again, while it recovers, or shortly after.
        done = run_to_crash(directory, CrashingDisk(random.randint(0, 6), random.choice((0, 0.4, 1))), steps, done)

        copies = copies_in(directory)
        check(copies, models(steps, done), models(steps, done + 1))
        with copies.read() as copy:
            assert_nothing_is_left(copy)
        # The broker sends what was not acknowledged again.
        for step in steps[done:]:
            if step[0] != "complete" or copies.is_building:
                do(copies, step)
        final = models(steps, len(steps))
        assert served(copies) == final.serving[0]
        assert served(copies, 1) == final.serving[1]
        assert len(list(directory.glob("copy-*"))) == 1, "the old copy is left over"
        copies.close()
        shutil.rmtree(directory)


def test_a_file_cut_at_any_byte_keeps_what_is_whole_behind_what_was_acknowledged(tmp_path: Path) -> None:
    made = tmp_path / "made"
    copy = opened(made, segment_bytes_max=10_000)
    copy.append(PRICES, {0: [record(0, "a"), record(1, "b")]})
    copy.close()
    before = (made / INDEX).read_bytes()
    segment = made / "0" / "segment-0.log"
    acknowledged = segment.stat().st_size
    copy = opened(made, segment_bytes_max=10_000)
    copy.append(PRICES, {0: [record(2, "b"), record(3, "a", deleted=True)]})
    copy.close()
    data = segment.read_bytes()
    (made / INDEX).write_bytes(before)
    ends = [0]
    for each in (record(0, "a"), record(1, "b"), record(2, "b"), record(3, "a", deleted=True)):
        ends.append(ends[-1] + len(encode(each)))

    for cut in range(len(data) + 1):
        shutil.copytree(made, tmp_path / "cut")
        (tmp_path / "cut/0/segment-0.log").write_bytes(data[:cut])
        if cut < acknowledged:
            with pytest.raises(LogDamaged, match=f"has {cut} bytes, and {acknowledged} were stored"):
                opened(tmp_path / "cut")
        else:
            copy = opened(tmp_path / "cut")
            whole = sum(end <= cut for end in ends[1:])
            assert [each.offset for each in everything(copy)] == list(range(whole))
            assert copy.keys(b"", None, 9) == ([b"b"] if whole == 4 else [b"a", b"b"])
            assert_nothing_is_left(copy)
            copy.append(PRICES, {0: [record(offset) for offset in range(1, 6)]})
            assert [each.offset for each in everything(copy)] == list(range(6))
            copy.close()
        shutil.rmtree(tmp_path / "cut")


def test_a_byte_that_changes_is_noticed_by_who_reads_it(tmp_path: Path) -> None:
    copy = opened(tmp_path)
    copy.append(PRICES, {0: [record(0, size=5), record(1, size=5), record(2, size=5)]})
    segment = tmp_path / "0" / "segment-0.log"
    data = segment.read_bytes()
    length = len(data) // 3
    for position in range(length, 2 * length):
        segment.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(LogDamaged, match="offsets 1 to 2"):
            copy.find(0, 1)
        assert copy.find(0, 0) == record(0, size=5)
        assert copy.find(0, 2) == record(2, size=5)
    copy.close()


@pytest.mark.parametrize("junk", [None, b"", b"no database, and long enough to be looked at" * 100])
def test_an_index_that_is_gone_or_none_is_made_from_the_segments(tmp_path: Path, junk: bytes | None) -> None:
    copy = opened(tmp_path)
    records = [record(offset, "abc"[offset % 3], deleted=offset == 19) for offset in range(20)]
    copy.append(PRICES, {0: records, 5: [record(8, "z")]})
    before = [(each.file, each.start, each.end, each.records, each.bytes) for each in copy.segments(None, 99)]
    copy.close()
    (tmp_path / INDEX).unlink()
    if junk is not None:
        (tmp_path / INDEX).write_bytes(junk)

    copy = opened(tmp_path)
    assert everything(copy) == records
    assert [(each.file, each.start, each.end, each.records, each.bytes) for each in copy.segments(None, 99)] == before
    assert copy.keys(b"", None, 9) == [b"a", b"c", b"z"]
    assert copy.next_offset(5) == 9
    copy.append(PRICES, {5: [record(9)]})
    assert [each.offset for each in everything(copy, 5)] == [8, 9]
    copy.close()


def test_an_index_that_was_not_completed_is_begun_anew(tmp_path: Path) -> None:
    copy = opened(tmp_path)
    copy.append(PRICES, {0: [record(offset) for offset in range(20)]})
    copy.close()
    for crash_at in count():
        (tmp_path / INDEX).unlink()
        disk = CrashingDisk(crash_at, 0.5)
        try:
            copy = opened(tmp_path, disk)
        except Crash:
            copy = opened(tmp_path)
        assert [each.offset for each in everything(copy)] == list(range(20))
        copy.close()
        if disk.calls <= crash_at:
            assert crash_at > 3
            return


def test_without_an_index_damage_in_the_middle_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    copy = opened(tmp_path)
    copy.append(PRICES, {0: [record(offset) for offset in range(20)]})
    copy.close()
    (tmp_path / INDEX).unlink()
    first = tmp_path / "0" / "segment-0.log"
    first.write_bytes(first.read_bytes()[:-1])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("0/*")}
    for _ in range(2):
        with pytest.raises(LogDamaged, match=r"segment-0\.log"):
            opened(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.glob("0/*")} == before


def test_a_file_that_does_not_belong_there_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "segment-x.log").touch()
    with pytest.raises(BadDirectory, match=r"segment-x\.log does not belong there"):
        opened(tmp_path)


# ---- one copy after another


def test_readers_have_the_old_copy_until_the_new_one_is_complete(tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    copies.append(PRICES, {0: [record(0, "a"), record(1, "b")]})

    copies.begin()
    copies.append(PRICES, {0: [record(0, "c")]})
    assert copies.is_building
    assert served(copies) == [record(0, "a"), record(1, "b")]
    copies.close()
    copies = copies_in(tmp_path)
    assert copies.is_building
    copies.append(PRICES, {0: [record(1, "d")]})
    assert served(copies) == [record(0, "a"), record(1, "b")]

    assert copies.complete()
    assert served(copies) == [record(0, "c"), record(1, "d")]
    assert [path.name for path in tmp_path.glob("copy-*")] == ["copy-2"]
    assert not copies.complete()
    copies.close()
    copies = copies_in(tmp_path)
    assert served(copies) == [record(0, "c"), record(1, "d")]
    copies.close()


def test_another_begin_gives_up_what_was_being_built(tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    copies.append(PRICES, {0: [record(0)]})
    copies.begin()
    copies.append(PRICES, {0: [record(0), record(1)]})
    copies.begin()
    assert copies.next_offset(0) == 0
    copies.append(PRICES, {0: [record(0), record(1), record(2)]})
    copies.complete()
    assert [each.offset for each in served(copies)] == [0, 1, 2]
    assert [path.name for path in tmp_path.glob("copy-*")] == ["copy-3"]
    copies.close()


def test_who_reads_the_old_copy_may_finish(tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    copies.append(PRICES, {0: [record(0, "old")]})
    with copies.read() as old:
        copies.begin()
        copies.append(PRICES, {0: [record(0, "new")]})
        copies.complete()
        assert served(copies) == [record(0, "new")]
        assert old.find(0, 0) == record(0, "old")
        assert (tmp_path / "copy-1").exists()
    assert not (tmp_path / "copy-1").exists()
    copies.close()


def test_a_begin_that_fails_changes_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    disk = FullDisk()
    copies = copies_in(tmp_path, disk)
    copies.append(PRICES, {0: [record(0)]})
    disk.room = 0
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            copies.begin()
        assert not copies.is_building
    disk.room = None
    copies.begin()
    copies.append(PRICES, {0: [record(0), record(1)]})
    disk.room = 0
    with pytest.raises(OSError, match="No space"):
        copies.complete()
    assert served(copies) == [record(0)]
    disk.room = None
    assert copies.complete()
    assert served(copies) == [record(0), record(1)]
    copies.close()
    copies_in(tmp_path).close()
    assert len(list(tmp_path.glob("copy-*"))) == 1


def test_a_directory_has_one_replica_and_one_topic(tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    with pytest.raises(DirectoryInUse, match="in use by process"):
        copies_in(tmp_path)
    copies.close()
    with pytest.raises(BadDirectory, match="has a copy of prices, not of orders: choose another directory"):
        Copies(tmp_path, "orders", segment_bytes_max=SEGMENT_BYTES)
    copies_in(tmp_path).close()


@pytest.mark.parametrize("junk", [b"", b"{}", b"no", b'{"topic": "prices", "serving": null, "building": null}'])
def test_a_directory_that_does_not_say_which_copy_counts_is_refused(tmp_path: Path, junk: bytes) -> None:
    copies = copies_in(tmp_path)
    copies.append(PRICES, {0: [record(0)]})
    copies.close()
    (tmp_path / "CURRENT").write_bytes(junk)
    with pytest.raises(BadDirectory, match="does not say which copy counts"):
        copies_in(tmp_path)
    (tmp_path / "CURRENT").unlink()
    with pytest.raises(BadDirectory, match="has copies and no CURRENT"):
        copies_in(tmp_path)
