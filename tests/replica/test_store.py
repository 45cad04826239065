"""What a replica keeps: through power cuts at random calls to the disk, a full disk, damaged and missing files, and
refreshes that replace one copy by another."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from penstock.errors import AppendFailed, BadDirectory, DirectoryInUse, LogDamaged
from penstock.log.files import Files
from penstock.log.policy import SEGMENT_BYTES_MIN
from penstock.model.run import Run
from penstock.replica.copies import Copies, OriginTopic
from penstock.replica.copy import CopiedRecord, Copy
from penstock.store.store import Store
from penstock.testing import FaultyFiles, ManualClock
from penstock.testing.disk import PowerCut
from tests.support.logs import memory_meta
from tests.support.sampling import examples

DATA = Path("/data")
PRICES = OriginTopic("prices", 7)
ALL = 1 << 62


def record(offset: int, key: str | None = None, *, size: int = 40, deleted: bool = False) -> CopiedRecord:
    value = b"" if deleted else f"{offset}:".encode().ljust(size, b".")
    key_bytes = None if key is None else key.encode()
    return CopiedRecord(offset=offset, value=value, key=key_bytes, deleted=deleted, timestamp_us=offset)


def run_of(records: Sequence[CopiedRecord]) -> Run:
    run = Run([each.subject.encode() or b"prices" for each in records], [each.value for each in records])
    run.keys = {index: each.key for index, each in enumerate(records) if each.key is not None}
    run.tombstones = {index for index, each in enumerate(records) if each.deleted}
    run.headers = {
        index: "".join(f"{name}: {value}\r\n" for name, value in each.headers.items()).encode()
        for index, each in enumerate(records)
        if each.headers
    }
    run.timestamps = [each.timestamp_us for each in records]
    run.offsets = [each.offset for each in records]
    run.base_offset = records[0].offset
    return run


def append(copies: Copies, batch: Mapping[int, Sequence[CopiedRecord]], topic: OriginTopic = PRICES) -> int:
    return copies.append(topic, {partition: run_of(records) for partition, records in batch.items()})


def opened(directory: Path, pattern: str = "prices") -> Copies:
    """Open the copies in a real directory."""
    return Copies(directory, pattern, segment_bytes_max=SEGMENT_BYTES_MIN, clock=ManualClock())


def on_disk(files: Files, index_directory: Path) -> Copies:
    """Open the copies on a faulty disk, with their indexes in a real directory."""
    return Copies(
        DATA,
        "prices",
        segment_bytes_max=SEGMENT_BYTES_MIN,
        files=files,
        clock=ManualClock(),
        meta=memory_meta(),
        index_directory=index_directory,
    )


def everything(copy: Copy, partition: int = 0) -> list[CopiedRecord]:
    records, rest = copy.find_range(partition, 0, ALL, limit=100_000, bytes_max=ALL)
    assert rest is None
    return records


def served(copies: Copies, partition: int = 0) -> list[CopiedRecord]:
    with copies.read() as copy:
        return everything(copy, partition)


def offsets(copies: Copies, partition: int = 0) -> list[int]:
    return [each.offset for each in served(copies, partition)]


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    copies = opened(tmp_path / "data")
    yield copies
    copies.close()


def copy_of(copies: Copies) -> Copy:
    with copies.read() as copy:
        return copy


# ---- what is kept


def test_each_record_is_found_by_its_offset_in_its_partition(copies: Copies) -> None:
    append(copies, {0: [record(0, "a"), record(5, "b")], 3: [record(0, "c")]})

    copy = copy_of(copies)
    assert copy.find(0, 5) == record(5, "b")
    assert copy.find(3, 0) == record(0, "c")
    assert copy.find(0, 4) is None
    assert copy.find(0, 6) is None
    assert copy.find(1, 0) is None
    assert copy.find(9, 0) is None
    assert [copies.next_offset(partition) for partition in (0, 3, 1, 9)] == [6, 1, 0, 0]


def test_all_of_a_message_is_kept(copies: Copies) -> None:
    message = CopiedRecord(
        offset=3, value=b"\xff\0", key=b"a/\xfe", timestamp_us=-5, subject="prices.eu", headers={"trace": "ö", "b": '"'}
    )
    append(copies, {2: [message]})

    assert copy_of(copies).find(2, 3) == message


def test_a_repeated_message_is_stored_once(copies: Copies) -> None:
    append(copies, {0: [record(0), record(1)]})

    assert append(copies, {0: [record(0), record(1), record(2)]}) == 1
    assert append(copies, {0: [record(2)]}) == 0
    assert offsets(copies) == [0, 1, 2]
    assert copy_of(copies).totals()[0].records == 3


def test_the_latest_of_each_key_is_found_and_a_delete_removes_it(copies: Copies) -> None:
    copy = copy_of(copies)
    append(copies, {0: [record(0, "a"), record(1, "b"), record(2, "a"), record(3)]})
    assert copy.find_key(b"a") == (0, record(2, "a"))

    append(copies, {0: [record(4, "a", deleted=True), record(5, "c", deleted=True), record(6, "c")]})
    assert copy.find_key(b"a") is None
    assert copy.find_key(b"c") == (0, record(6, "c"))
    assert copy.keys(b"", None, 10) == [b"b", b"c"]
    assert copy.find(0, 4) == record(4, "a", deleted=True)


def test_keys_are_found_by_their_beginning(copies: Copies) -> None:
    copy = copy_of(copies)
    keys = [b"a", b"a\xff", b"a\xff\xff", b"a\xff\xff1", b"b", b"\xff", b"\xff\xff", b""]
    append(copies, {0: [CopiedRecord(offset=number, value=b"", key=key) for number, key in enumerate(keys)]})

    for prefix in (b"", b"a", b"a\xff", b"a\xff\xff", b"\xff", b"b", b"c"):
        assert copy.keys(prefix, None, 100) == sorted(key for key in keys if key.startswith(prefix)), prefix
    assert copy.keys(b"a", b"a\xff", 1) == [b"a\xff\xff"]
    assert copy.keys(b"b", b"a", 9) == [b"b"]
    assert copy.keys(b"a", b"b", 9) == []


def test_the_index_knows_every_segment(copies: Copies, tmp_path: Path) -> None:
    for first in range(0, 200, 20):
        append(copies, {0: [record(offset) for offset in range(first, first + 20)], 1: [record(first)]})

    segments = copy_of(copies).segments(None, 100)
    of_first = [each for each in segments if each.partition == 0]
    assert len(of_first) > 2
    assert [each.start for each in of_first[1:]] == [each.end + 1 for each in of_first[:-1]]
    assert (of_first[0].start, of_first[-1].end) == (0, 199)
    assert sum(each.records for each in segments) == 210
    for each in of_first[:-1]:
        assert (tmp_path / "data" / each.file).is_file()
    with sqlite3.connect(tmp_path / "data" / "index-1.db") as index:
        rows = index.execute(
            "SELECT segment_id, segment_file, start_offset, end_offset, record_count, created_at FROM segment_ranges"
        ).fetchall()
    index.close()
    assert [row[:5] for row in rows] == [(each.id, each.file, each.start, each.end, each.records) for each in segments]
    assert rows[0][5].endswith("Z")


def test_a_range_has_an_end(copies: Copies) -> None:
    append(copies, {0: [record(offset, size=100) for offset in range(10)]})
    copy = copy_of(copies)

    def found(first: int, last: int, limit: int, bytes_max: int = ALL) -> tuple[list[int], int | None]:
        records, rest = copy.find_range(0, first, last, limit=limit, bytes_max=bytes_max)
        return [each.offset for each in records], rest

    assert found(2, 4, 10) == ([2, 3, 4], None)
    assert found(2, 4, 3) == ([2, 3, 4], None)
    assert found(2, 4, 2) == ([2, 3], 4)
    assert found(0, ALL, 100, 300) == ([0, 1, 2], 3)
    assert found(0, ALL, 100, 1) == ([0], 1)
    assert found(20, ALL, 100) == ([], None)


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    copies = opened(tmp_path)
    append(copies, {0: [record(offset, f"k{offset % 3}") for offset in range(10)], 2: [record(7)]})
    copies.close()

    copies = opened(tmp_path)
    assert offsets(copies) == list(range(10))
    assert (copies.topic, copies.next_offset(0), copies.next_offset(2)) == (PRICES, 10, 8)
    append(copies, {0: [record(9), record(10)]})
    assert copy_of(copies).find(0, 10) == record(10)
    copies.close()


def test_a_new_segment_size_counts_after_a_restart(tmp_path: Path) -> None:
    opened(tmp_path).close()
    copies = Copies(tmp_path, "prices", segment_bytes_max=1 << 20)
    append(copies, {0: [record(offset) for offset in range(1000)]})
    assert len(copy_of(copies).segments(0, 10)) == 1
    copies.close()


# ---- a full disk


def test_messages_for_which_there_is_no_room_are_stored_later(tmp_path: Path) -> None:
    batch = {0: [record(offset, "k", size=400) for offset in range(1, 12)], 1: [record(0)]}
    for room in range(0, 8000, 311):
        disk = FaultyFiles()
        (tmp_path / str(room)).mkdir()
        copies = on_disk(disk, tmp_path / str(room))
        append(copies, {0: [record(0, "k")]})
        disk.capacity = used(disk) + room
        with suppress(AppendFailed):
            append(copies, batch)
        found = offsets(copies)
        assert found == list(range(len(found)))

        disk.capacity = None
        append(copies, batch)
        assert offsets(copies) == list(range(12))
        assert offsets(copies, 1) == [0]
        assert copy_of(copies).find_key(b"k") == (0, record(11, "k", size=400))
        copies.close()


def used(disk: FaultyFiles) -> int:
    total, free = disk.space(DATA)
    return total - free


# ---- power cuts


Step = tuple[str, dict[int, list[CopiedRecord]]]


def steps_of(random: Random) -> list[Step]:
    """Batches as a broker delivers them; and a RESET, after which it begins anew."""
    steps: list[Step] = []
    ends = {0: 0, 1: 0}
    for number in range(10):
        if number == 4:
            steps.append(("begin", {}))
            ends = {0: 0, 1: 0}
        if number == 8:
            steps.append(("complete", {}))
        batch: dict[int, list[CopiedRecord]] = {}
        for partition in random.sample((0, 1), random.randint(1, 2)):
            first = ends[partition]
            ends[partition] += random.randint(1, 6)
            batch[partition] = [
                record(
                    offset,
                    f"{random.choice('abc')}{partition}",
                    size=random.randint(0, 900),
                    deleted=random.random() < 0.2,
                )
                for offset in range(first, ends[partition])
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
            append(copies, batch)


class Model:
    """What must be there: stupid, and in memory."""

    def __init__(self) -> None:
        self.serving: dict[int, list[CopiedRecord]] = {0: [], 1: []}
        self.building: dict[int, list[CopiedRecord]] | None = None

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


def model_of(steps: Sequence[Step], count: int) -> Model:
    model = Model()
    for step in steps[:count]:
        model.do(step)
    return model


def check(copies: Copies, acknowledged: Model, following: Model) -> None:
    """Readers see what was acknowledged, or what the next step makes of it; of a batch any beginning."""
    with copies.read() as copy:
        for partition in (0, 1):
            found = everything(copy, partition)
            least, most = acknowledged.serving[partition], following.serving[partition]
            assert found == most[: len(found)] or found == least[: len(found)]
            if most[: len(least)] == least:
                assert len(found) >= len(least), "an acknowledged message is gone"
            else:
                assert found in (least, most)
            latest = {each.key: each for each in found if each.key is not None}
            for key, each in latest.items():
                assert copy.find_key(key) == (None if each.deleted else (partition, each))


def run_to_cut(disk: FaultyFiles, index_directory: Path, steps: Sequence[Step], done: int) -> int:
    """Return how many steps were acknowledged when the power was cut."""
    copies: Copies | None = None
    try:
        copies = on_disk(disk, index_directory)
        for step in steps[done:]:
            if step[0] != "complete" or copies.is_building:
                do(copies, step)
            done += 1
    except PowerCut:
        pass
    finally:
        if copies is not None:
            release(copies)
    return done


def release(copies: Copies) -> None:
    """Let go of the indexes of copies whose disk has no power."""
    for copy in (copies._serving, copies._building):
        if copy is not None:
            copy.close()


@pytest.mark.parametrize("seed", range(examples(40)))
def test_a_power_cut_at_any_call_loses_nothing_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    steps = steps_of(random)
    disk = FaultyFiles(seed=seed)
    done = 0
    for _ in range(4):
        disk.cut_after = disk.calls + random.randint(0, 60)
        done = run_to_cut(disk, tmp_path, steps, done)
        disk = disk.power_cut()
        if random.random() < 0.3:
            for path in tmp_path.glob("index-*"):
                path.unlink()

    copies = on_disk(disk, tmp_path)
    check(copies, model_of(steps, done), model_of(steps, done + 1))
    # The broker sends what was not acknowledged again.
    for step in steps[done:]:
        if step[0] != "complete" or copies.is_building:
            do(copies, step)
    final = model_of(steps, len(steps))
    assert served(copies) == final.serving[0]
    assert served(copies, 1) == final.serving[1]
    assert len(list(tmp_path.glob("index-*.db"))) == 1, "the old copy is left over"
    copies.close()


# ---- files that others damaged


def segment_of(directory: Path) -> Path:
    [segment] = (directory / "topics" / "1" / "0").glob("*.log")
    return segment


def test_a_changed_byte_is_noticed_by_whoever_reads_it(tmp_path: Path) -> None:
    copies = opened(tmp_path)
    for offset in range(3):
        append(copies, {0: [record(offset, size=5)]})
    segment = segment_of(tmp_path)
    data = segment.read_bytes()
    at = data.index(b"1:")
    for position in range(at, at + 5):
        segment.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(LogDamaged, match="offsets 1 to 2"):
            copy_of(copies).find(0, 1)
        assert copy_of(copies).find(0, 0) == record(0, size=5)
        assert copy_of(copies).find(0, 2) == record(2, size=5)
    segment.write_bytes(data)
    copies.close()


def test_a_log_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    copies = opened(tmp_path)
    for offset in range(3):
        append(copies, {0: [record(offset)]})
    copies.close()
    segment = segment_of(tmp_path)
    data = segment.read_bytes()
    segment.write_bytes(data[: data.index(b"2:")])

    with pytest.raises(LogDamaged, match="remove the data directory"):
        opened(tmp_path)


@pytest.mark.parametrize("junk", [None, b"", b"no database, and long enough to be looked at" * 100])
def test_a_missing_or_unusable_index_is_rebuilt(tmp_path: Path, junk: bytes | None) -> None:
    copies = opened(tmp_path)
    records = [record(offset, "abc"[offset % 3], deleted=offset == 19) for offset in range(20)]
    append(copies, {0: records, 5: [record(8, "z")]})
    before = copy_of(copies).segments(None, 99)
    copies.close()
    index = tmp_path / "index-1.db"
    index.unlink()
    if junk is not None:
        index.write_bytes(junk)

    copies = opened(tmp_path)
    assert served(copies) == records
    after = copy_of(copies).segments(None, 99)
    assert [(each.file, each.start, each.end, each.records) for each in after] == [
        (each.file, each.start, each.end, each.records) for each in before
    ]
    assert copy_of(copies).keys(b"", None, 9) == [b"a", b"c", b"z"]
    append(copies, {5: [record(9)]})
    assert offsets(copies, 5) == [8, 9]
    copies.close()


def test_an_index_of_before_catches_up(tmp_path: Path) -> None:
    copies = opened(tmp_path)
    append(copies, {0: [record(0, "a"), record(1, "b")]})
    copies.close()
    before = (tmp_path / "index-1.db").read_bytes()
    copies = opened(tmp_path)
    append(copies, {0: [record(2, "a"), record(3, "b", deleted=True)]})
    copies.close()
    (tmp_path / "index-1.db").write_bytes(before)

    copies = opened(tmp_path)
    copy = copy_of(copies)
    assert (copy.find_key(b"a"), copy.find_key(b"b")) == ((0, record(2, "a")), None)
    assert copy.totals()[0].records == 4
    copies.close()


# ---- one copy after another


def test_readers_have_the_old_copy_until_the_new_one_is_complete(tmp_path: Path) -> None:
    copies = opened(tmp_path)
    append(copies, {0: [record(0, "a"), record(1, "b")]})

    copies.begin()
    append(copies, {0: [record(0, "c")]})
    assert copies.is_building
    assert served(copies) == [record(0, "a"), record(1, "b")]
    copies.close()
    copies = opened(tmp_path)
    assert copies.is_building
    append(copies, {0: [record(1, "d")]})
    assert served(copies) == [record(0, "a"), record(1, "b")]

    assert copies.complete()
    assert served(copies) == [record(0, "c"), record(1, "d")]
    assert (tmp_path / "index-2.db").exists()
    assert sorted(path.name for path in (tmp_path / "topics").iterdir()) == ["0", "2"]
    assert not (tmp_path / "index-1.db").exists()
    assert not copies.complete()
    copies.close()
    copies = opened(tmp_path)
    assert served(copies) == [record(0, "c"), record(1, "d")]
    copies.close()


def test_another_begin_abandons_what_was_being_built(tmp_path: Path) -> None:
    copies = opened(tmp_path)
    append(copies, {0: [record(0)]})
    copies.begin()
    append(copies, {0: [record(0), record(1)]})
    copies.begin()
    assert copies.next_offset(0) == 0
    append(copies, {0: [record(0), record(1), record(2)]})
    copies.complete()
    assert offsets(copies) == [0, 1, 2]
    assert [path.name for path in tmp_path.glob("index-*.db")] == ["index-3.db"]
    copies.close()


def test_a_reader_of_the_old_copy_may_finish(copies: Copies) -> None:
    append(copies, {0: [record(0, "old")]})
    with copies.read() as old:
        copies.begin()
        append(copies, {0: [record(0, "new")]})
        completing = threading.Thread(target=copies.complete)
        completing.start()
        while copies.is_building:
            pass
        assert served(copies) == [record(0, "new")]
        assert old.find(0, 0) == record(0, "old")
    completing.join()
    assert served(copies) == [record(0, "new")]


def test_a_begin_that_fails_changes_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    disk = FaultyFiles()
    copies = on_disk(disk, tmp_path)
    append(copies, {0: [record(0)]})
    disk.capacity = used(disk)
    for _ in range(3):
        with pytest.raises(AppendFailed):
            copies.begin()
        assert not copies.is_building
    disk.capacity = None
    copies.begin()
    append(copies, {0: [record(0), record(1)]})
    disk.capacity = used(disk)
    with pytest.raises(AppendFailed):
        copies.complete()
    assert served(copies) == [record(0)]
    disk.capacity = None
    assert copies.complete()
    assert served(copies) == [record(0), record(1)]
    copies.close()
    on_disk(disk, tmp_path).close()
    assert len(list(tmp_path.glob("index-*.db"))) == 1


def test_a_directory_has_one_replica_and_one_topic(tmp_path: Path) -> None:
    copies = opened(tmp_path)
    with pytest.raises(DirectoryInUse, match="in use by process"):
        opened(tmp_path)
    copies.close()
    with pytest.raises(BadDirectory, match="has a copy of prices, not of orders: choose another directory"):
        opened(tmp_path, "orders")
    opened(tmp_path).close()


def test_a_brokers_directory_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.create_topic("orders")
    with pytest.raises(BadDirectory, match="is the data directory of a broker"):
        opened(tmp_path)


def test_a_directory_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "CURRENT").write_text('{"topic": "prices", "serving": 1, "building": null}')
    with pytest.raises(BadDirectory, match="earlier version: remove the directory"):
        opened(tmp_path)
