"""What a replica keeps, and how one copy replaces another during a refresh."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from penstock.errors import AppendFailed, BadDirectory, DirectoryInUse
from penstock.replica.copies import Copies
from penstock.replica.copy import CopiedRecord
from penstock.store.store import Store
from penstock.testing import FaultyFiles
from tests.support.copies import ALL, PRICES, append, copy_of, offsets, on_disk, opened, record, served, used

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
