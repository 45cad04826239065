"""What a log serves if files are missing, of another log, of a newer version, or locked."""

from __future__ import annotations

import itertools
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from crc32c import crc32c

from penstock.errors import (
    BadDirectory,
    DirectoryInUse,
    DiskError,
    LogDamaged,
    UnsupportedBatch,
)
from penstock.log.segment import log_name
from penstock.model.batch import Batch
from penstock.store.store import Store
from tests.support.log_images import (
    DIRECTORY,
    FOUR_SEGMENTS,
    ONE_SEGMENT,
    SMALL,
    TWO_SEGMENTS,
    disk_with,
    flipped,
    image_of,
    make,
    messages_of,
    places,
    read_around,
    reopen,
)
from tests.support.logs import append, messages


def resigned(batch: Batch, *, version: int) -> bytes:
    """The batch as a newer Penstock would have made it."""
    data = bytearray(batch.data)
    struct.pack_into("<H", data, 64, version)
    struct.pack_into("<I", data, 56, crc32c(memoryview(data)[60:]))
    struct.pack_into("<I", data, 0, crc32c(memoryview(data)[4:96]))
    return bytes(data)


def test_a_sealed_segment_of_another_log_is_not_served() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    other = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    ours = messages_of([place.batch for place in everything if place.name != log_name(1)])
    log = reopen(disk_with({**image, log_name(1): other[log_name(1)]}))
    for bytes_max in (1, 1 << 20):
        around = read_around(log, bytes_max)
        assert (around.found, around.refused) == (ours, [(1, 10)])
    assert [(damage.path.name, damage.first, damage.last) for damage in log.verify().damage] == [(log_name(1), 1, 10)]


def test_a_last_segment_of_another_log_is_left_behind() -> None:
    image = make(TWO_SEGMENTS, closed=True)
    foreign = make(TWO_SEGMENTS, closed=True)[log_name(1)]
    ours = messages_of([place.batch for place in places(image) if place.name != log_name(1)])
    disk = disk_with({**image, log_name(1): foreign})
    log = reopen(disk)
    offset = append(log, b"new")
    log.flush()
    for opened in (log, reopen(disk)):
        assert read_around(opened, bytes_max=1).found == {**ours, offset: b"new"}
        [damage] = opened.damage
        assert (damage.path.name, damage.position, damage.first) == (log_name(1), 0, 1)
    assert disk.content(DIRECTORY / log_name(1)) == foreign


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "0.log",
        "00000000000000000000.LOG",
        "00000000000000000000.log.bak",
        "00000000000000000000.log~",
        "-0000000000000000001.log",
        "000000000000000000000.log",
        "0000000000000000000a.log",
        "00000000000000000000.aside",
        "99999999999999999999.log",
        "\N{ARABIC-INDIC DIGIT ZERO}" * 20 + ".log",
    ],
)
def test_a_file_that_is_not_of_a_log_is_refused_by_name_and_left_there(name: str) -> None:
    image = {**make(SMALL, closed=True), name: b"whatever"}
    disk = disk_with(image)
    with pytest.raises(BadDirectory) as caught:
        reopen(disk)
    assert str(DIRECTORY / name) in str(caught.value)
    assert image_of(disk) == image


def test_an_empty_segment_that_is_not_the_last_is_named_and_served_around() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    names = [name for name in image if name.endswith(".log")]
    for name, following in itertools.pairwise(names):
        disk = disk_with({**image, name: b""})
        log = reopen(disk)
        offset = append(log, b"new")
        log.flush()
        there = messages_of([place.batch for place in everything if place.name != name])
        hit = (int(name[:20]), int(following[:20]))
        for opened in (log, reopen(disk)):
            assert [(each.path.name, each.first, each.last) for each in opened.damage] == [(name, *hit)]
            around = read_around(opened, bytes_max=1)
            assert (around.found, around.refused) == ({**there, offset: b"new"}, [hit])
            assert [(each.first, each.last) for each in opened.verify().damage][:1] == [hit]


def test_an_empty_last_segment_was_being_created_and_goes() -> None:
    image = make(TWO_SEGMENTS, closed=False)
    log = reopen(disk_with({**image, log_name(99): b""}))
    assert messages(log) == messages_of([place.batch for place in places(image)])
    assert append(log, b"new") == log.marks.written


def test_a_missing_segment_is_named_by_whoever_reads_across_and_by_verify() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    missing = log_name(1)
    there = [place.batch for place in everything if place.name != missing]
    log = reopen(disk_with({name: content for name, content in image.items() if name != missing}))

    with pytest.raises(LogDamaged, match=rf"{missing}\b.* is missing"):
        messages(log)
    assert read_around(log, bytes_max=1 << 20).found == messages_of(there)
    [damage] = log.verify().damage
    assert re.search(rf"{missing}\b.* is missing", str(damage))


def test_of_missing_segments_exactly_their_offsets_are_reported() -> None:
    image = make([[[bytes([number]) * 4000]] for number in range(6)], closed=True)
    missing = (log_name(2), log_name(3))
    log = reopen(disk_with({name: content for name, content in image.items() if name not in missing}))

    around = read_around(log, bytes_max=1 << 20)

    assert around.refused == [(2, 4)]
    assert sorted(around.found) == [0, 1, 4, 5]
    [damage] = log.verify().damage
    assert (damage.first, damage.last) == (2, 4)


def test_a_log_whose_last_but_one_segment_is_missing_is_served_around_it() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    *_, missing, last = [name for name in image if name.endswith(".log")]
    log = reopen(disk_with({name: content for name, content in image.items() if name != missing}))
    [damage] = log.damage
    assert (damage.path.name, damage.first, damage.last) == (missing, int(missing[:20]), int(last[:20]))
    there = messages_of([place.batch for place in places(image) if place.name != missing])
    around = read_around(log, bytes_max=1)
    assert (around.found, around.refused) == (there, [(damage.first, damage.last)])
    assert append(log, b"new") == max(there) + 1


def test_a_copy_of_a_segment_under_another_offset_is_reported() -> None:
    image = make([[[b"%d" % (3 * number + place)] for place in range(3)] for number in range(120)], closed=True)
    names = [name for name in image if name.endswith(".log")]
    assert len(names) > 4
    for original in names[:2]:
        copy = log_name(int(original.removesuffix(".log")) + 1)
        copied = {**image, copy: image[original]}
        disk = disk_with(copied)
        log = reopen(disk)

        with pytest.raises(LogDamaged, match=f"{copy}.* overlaps {original}"):
            messages(log)
        with pytest.raises(LogDamaged, match=f"{copy}.* is another segment"):
            messages(log, bytes_max=1)
        assert [str(damage) for damage in log.verify().damage if f"overlaps {original}" in str(damage)]
        assert {name: image_of(disk)[name] for name in copied} == copied


@pytest.mark.parametrize("shift", [-1, 1, 1000])
def test_a_segment_under_a_wrong_name_is_refused_and_its_messages_are_not_lost(shift: int) -> None:
    image = make([[[b"%d" % number]] for number in range(200)], closed=True)
    expected = messages_of([place.batch for place in places(image)])
    names = [name for name in image if name.endswith(".log")]
    for name in names[1:]:
        wrong = log_name(int(name.removesuffix(".log")) + shift)
        renamed = {wrong if other == name else other: content for other, content in image.items()}
        disk = disk_with(renamed)
        with pytest.raises(DiskError, match=DIRECTORY.name):
            # If it is not the last it may be opened, but not be read.
            messages(reopen(disk))
        left = [content for other, content in image_of(disk).items() if other.endswith(".log")]
        assert image[name] in left, f"{name} was called {wrong}, and is gone"
        disk.rename(DIRECTORY / wrong, DIRECTORY / name)
        disk.kill()
        # If it is the last then the log went on behind it.
        assert read_around(reopen(disk), bytes_max=1).found == expected


def test_a_segment_of_a_newer_version_is_refused_with_its_name_and_left_as_it_is() -> None:
    image = make(TWO_SEGMENTS, closed=True)
    for place in [place for place in places(image) if place.name == log_name(1)]:
        content = image[place.name]
        newer = content[: place.start] + resigned(place.batch, version=2) + content[place.stop :]
        for end in (len(newer), len(newer) - 1):  # the last batch torn, too
            changed = {**image, place.name: newer[:end]}
            disk = disk_with(changed)
            if end < place.stop:
                continue
            with pytest.raises(UnsupportedBatch, match=rf"{place.name}.*version 2.*upgrade"):
                reopen(disk)
            assert image_of(disk) == changed


def test_damage_before_a_batch_of_a_newer_version_is_refused_with_the_name_of_the_file() -> None:
    image = make(ONE_SEGMENT, closed=True)
    name = log_name(0)
    _, damaged, newer, *_ = places(image)
    content = image[name][: newer.start] + resigned(newer.batch, version=2) + image[name][newer.stop :]
    changed = {**image, name: flipped(content, damaged.start)}
    disk = disk_with(changed)
    with pytest.raises((UnsupportedBatch, LogDamaged), match=name):
        reopen(disk)
    assert image_of(disk) == changed


def test_of_a_sealed_segment_batches_of_a_newer_version_are_refused_where_they_are_opened() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    newer = next(place for place in everything if place.name == log_name(1) and place.batch.count)
    content = image[newer.name]
    content = content[: newer.start] + resigned(newer.batch, version=2) + content[newer.stop :]
    log = reopen(disk_with({**image, newer.name: content}))
    [batch] = log.read(newer.batch.base_offset, 1)
    with pytest.raises(UnsupportedBatch, match="upgrade"):
        batch.columns()
    assert messages(log, newer.batch.end) == messages_of(
        [place.batch for place in everything if place.batch.base_offset > newer.batch.base_offset]
    )
    report = log.verify()
    [unsupported] = report.unsupported
    assert f"{newer.name}: at byte {newer.start}: " in str(unsupported)
    assert not report.damage


def test_an_index_without_a_log_and_an_unfinished_rewrite_are_cleared_away() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    index = next(name for name in image if name.endswith(".index"))
    orphan, aside = log_name(77).replace(".log", ".index"), log_name(1) + ".aside"
    disk = disk_with({**image, orphan: image[index], aside: b"half a segment"})
    log = reopen(disk)
    assert messages(log) == messages_of([place.batch for place in places(image)])
    assert image_of(disk) == image


HOLD: Final = """
import sys
from pathlib import Path
from penstock.store.store import Store
with Store(Path(sys.argv[1])) as store:
    store.create_topic("held")
    print("open", flush=True)
    sys.stdin.read()
"""


def holding(directory: Path) -> subprocess.Popen[bytes]:
    """Another process that has a store open, until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    return process


def test_a_directory_that_another_process_has_open_is_refused_with_its_pid(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        for _ in range(2):
            with pytest.raises(DirectoryInUse, match=rf"{tmp_path} is in use by process {process.pid}: "):
                Store(tmp_path)
    assert process.returncode == 0
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == ["held"]


def test_a_directory_that_this_process_has_open_is_refused_with_its_own_pid(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("mine")
        with pytest.raises(DirectoryInUse, match=rf"process {os.getpid()}: "):
            Store(tmp_path)
        append(store.log(topic.id), b"a")
    with Store(tmp_path) as store:
        assert messages(store.log(topic.id)) == {0: b"a"}


def test_the_lock_of_a_killed_process_hinders_nobody(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "LOCK").read_text() == f"{process.pid}\n"
        with Store(tmp_path) as store:
            assert [topic.name for topic in store.topics] == ["held"]
