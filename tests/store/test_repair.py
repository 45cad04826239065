"""Damage in a data directory: what a store serves around it, what `verify` sees meanwhile, and repair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import BadDirectory, DirectoryInUse, LogDamaged
from penstock.log.files import OsFile, OsFiles
from penstock.log.policy import Policy
from penstock.log.scan import Found
from penstock.log.segment import log_name
from penstock.model.batch import encode
from penstock.store import inspect
from penstock.store.repair import Repaired, repair
from penstock.store.store import Store
from tests.support.logs import TIMESTAMP, append, messages

VALUES = [b"%d" % number * 300 for number in range(10)]
SMALL = Policy(segment_bytes=4096)
# Three in a segment, and two in the last one.
STORED = [value * 4 for value in (*VALUES, VALUES[0])]


def fill(data: Path, values: Sequence[bytes] = VALUES) -> Path:
    """Store one batch for each value, stop cleanly, and return the log's directory."""
    with Store(data) as store:
        topic = store.create_topic("orders", policy=SMALL)
        for value in values:
            store.log(topic.id).append(encode([value], timestamp=TIMESTAMP))
            store.flush()
        return store.log(topic.id).directory


def flip(path: Path, position: int) -> bytes:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    return bytes(content)


def places(data: Path) -> dict[int, tuple[Path, int, int]]:
    """Where the message of each offset is: its file, and from where to where."""
    found = {}
    with inspect.inspect(data) as inspection:
        for segment, item in inspect.walk(inspection.logs[-1]):
            if isinstance(item, Found) and item.batch.count:
                stop = item.position + len(item.batch.data)
                found[item.batch.base_offset] = (segment.path, item.position, stop)
    return found


def is_sound(data: Path) -> bool:
    with inspect.inspect(data) as inspection:
        return not inspection.problems and all(inspect.verify(log).sound for log in inspection.logs)


def served(data: Path) -> dict[int, bytes]:
    with Store(data) as store:
        return messages(store.log(1))


@pytest.mark.parametrize("offset", range(len(VALUES)))
def test_repair_sets_aside_what_is_damaged_and_the_rest_is_served(tmp_path: Path, offset: int) -> None:
    data = tmp_path / "data"
    fill(data)
    path, start, stop = places(data)[offset]
    damaged = flip(path, (start + stop) // 2)
    assert not is_sound(data)
    expected = {number: value for number, value in enumerate(VALUES) if number != offset}

    outcome = repair(data)

    [found] = outcome.quarantined
    assert outcome.problems == []
    assert (found.topic, found.partition, found.file) == ("orders", 0, str(path))
    assert (found.position, found.stop, found.first, found.next) == (start, stop, offset, offset + 1)
    assert Path(found.kept).read_bytes() == damaged[start:stop]
    assert outcome.report is not None
    assert [each["kept"] for each in json.loads(outcome.report.read_bytes())] == [found.kept]
    assert is_sound(data)
    assert served(data) == expected
    with Store(data) as store:
        assert not store.catalogue.damage
        assert store.log(1).append(encode([b"new"], timestamp=TIMESTAMP)) >= len(VALUES)
    assert repair(data) == Repaired([], [], None, is_state_hit=False)


def test_heads_and_feet_and_files_that_are_cut_short_or_missing_are_repaired(tmp_path: Path) -> None:
    data = tmp_path / "data"
    directory = fill(data, [value * 8 for value in VALUES])
    first, second, third, fourth, *_ = sorted(directory.glob("*.log"))
    flip(first, 0)
    flip(first, first.stat().st_size - 1)
    second.write_bytes(second.read_bytes()[:200])
    third.unlink()
    lost = {int(path.stem) for path in (second, third)}
    expected = {number: value * 8 for number, value in enumerate(VALUES)}
    for path, following in ((second, third), (third, fourth)):
        for number in range(int(path.stem), int(following.stem)):
            del expected[number]

    outcome = repair(data)

    assert outcome.problems == []
    assert lost <= {number for each in outcome.quarantined for number in range(each.first, each.next)}
    assert is_sound(data)
    assert served(data) == expected


def fill_two(data: Path) -> list[list[Path]]:
    """Store the same in two topics, stop cleanly, and return the segments of both."""
    with Store(data) as store:
        logs = [store.log(store.create_topic(name, policy=SMALL).id) for name in ("orders", "others")]
        for value in STORED:
            for log in logs:
                log.append(encode([value], timestamp=TIMESTAMP))
            store.flush()
        return [[segment.path for segment in log.segments] for log in logs]


def damaged_in(data: Path) -> list[tuple[Path, int, int | None]]:
    with inspect.inspect(data) as inspection:
        reports = [inspect.verify(log).report for log in inspection.logs]
    return [(each.path, each.first, each.last) for report in reports if report for each in report.damage]


# From which segment of which log a file is taken, and which segment of the first log it replaces.
@pytest.mark.parametrize("is_opened", [True, False], ids=["opened before", "not opened"])
@pytest.mark.parametrize(
    ("log", "source", "place"),
    [(0, 0, 1), (0, 2, 1), (1, 1, 1), (1, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, -1), (1, 0, -1), (1, -1, -1)],
)
def test_a_foreign_file_in_place_of_a_segment_is_damage_of_all_its_offsets(
    tmp_path: Path, log: int, source: int, place: int, is_opened: bool
) -> None:
    data = tmp_path / "data"
    segments = fill_two(data)
    path = segments[0][place]
    bases = [*(int(each.stem) for each in segments[0]), len(STORED)]
    first = int(path.stem)
    end = bases[bases.index(first) + 1]
    path.write_bytes(foreign := segments[log][source].read_bytes())
    expected = {number: value for number, value in enumerate(STORED) if not first <= number < end}
    assert damaged_in(data) == [(path, first, end)]
    if is_opened:
        with Store(data) as store:
            assert not store.catalogue.refused
            with pytest.raises(LogDamaged) as caught:
                store.log(1).read(first, 1)
            assert (caught.value.path, caught.value.first, caught.value.last) == (path, first, end)
            offset = append(store.log(1), b"new")
            assert offset >= len(STORED)
            store.flush()
            expected[offset] = b"new"
        with Store(data) as store:
            assert [(each.path, each.first, each.last) for each in store.log(1).damage] == [(path, first, end)]
        assert damaged_in(data) == [(path, first, end)]

    outcome = repair(data)

    assert outcome.problems == []
    [found] = outcome.quarantined
    assert (found.file, found.first, found.next) == (str(path), first, end)
    assert Path(found.kept).read_bytes() == foreign
    assert is_sound(data)
    assert served(data) == expected
    assert repair(data) == Repaired([], [], None, is_state_hit=False)
    with Store(data) as store:
        assert messages(store.log(2)) == dict(enumerate(STORED))


def test_a_foreign_file_between_the_segments_is_moved_away_and_nothing_is_lost(tmp_path: Path) -> None:
    data = tmp_path / "data"
    [segments, _] = fill_two(data)
    for segment in (segments[0], segments[-1]):
        intruder = segment.with_name(log_name(int(segment.stem) + 1))
        intruder.write_bytes(segments[1].read_bytes())
        assert not is_sound(data)

        outcome = repair(data)

        assert outcome.problems == []
        [found] = outcome.quarantined
        assert (found.file, found.first, found.next) == (str(intruder), int(intruder.stem), int(intruder.stem))
        assert Path(found.kept).read_bytes() == segments[1].read_bytes()
        assert is_sound(data)
        assert served(data) == dict(enumerate(STORED))


class Interrupted(OsFiles):
    """Files of a process that is killed in the call after so many."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def _call(self) -> None:
        if not self.calls:
            raise KeyboardInterrupt
        self.calls -= 1

    def create(self, path: Path) -> OsFile:
        file = super().create(path)
        self._call()
        return file

    def rename(self, path: Path, to: Path) -> None:
        self._call()
        super().rename(path, to)

    def remove(self, path: Path) -> None:
        self._call()
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._call()


def test_a_repair_that_is_killed_anywhere_is_done_by_the_next_one(tmp_path: Path) -> None:
    for calls in range(100):
        data = tmp_path / f"data{calls}"
        fill(data)
        where = places(data)
        for offset in (1, len(VALUES) - 1):
            path, start, _ = where[offset]
            flip(path, start)
        try:
            repair(data, files=Interrupted(calls))
            break
        except KeyboardInterrupt:
            pass
        outcome = repair(data)
        assert outcome.problems == [], calls
        report = json.loads((data / "quarantine" / "report.json").read_bytes()) if outcome.quarantined else []
        assert {each["first"] for each in report} in ({1, len(VALUES) - 1}, set()), calls
        assert served(data) == {
            number: value for number, value in enumerate(VALUES) if number not in (1, len(VALUES) - 1)
        }, calls
        assert is_sound(data), calls
    assert calls > 10


def test_repair_refuses_a_directory_that_is_open_or_not_one(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    with Store(tmp_path / "data"), pytest.raises(DirectoryInUse, match="in use by process"):
        repair(tmp_path / "data")
    with pytest.raises(BadDirectory, match="is not a data directory"):
        repair(tmp_path)


def test_a_store_whose_state_is_damaged_is_refused_and_told_of_the_remedy(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data)
    path = data / "topics" / "0" / "0" / log_name(0)
    damaged = flip(path, 0)
    with pytest.raises(LogDamaged, match="penstock log repair") as caught:
        Store(data)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == damaged

    outcome = repair(data)

    assert outcome.is_state_hit
    assert outcome.problems == []
    assert served(data) == dict(enumerate(VALUES))


def test_a_directory_is_verified_while_a_store_writes_to_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data)
    with Store(data) as store:
        log = store.log(1)
        for number in range(20):
            log.append(encode([b"%d" % number * 500], timestamp=TIMESTAMP))
            store.flush()
            assert is_sound(data)
        # As in the middle of a write.
        active = log.segments[-1].path
        content = active.read_bytes()
        active.write_bytes(content + content[:50])
        assert is_sound(data)
        active.write_bytes(content)
        path, start, _ = places(data)[0]
        flip(path, start)
        with inspect.inspect(data) as inspection:
            verdict = inspect.verify(inspection.logs[-1])
        assert verdict.state is inspect.LogHealth.DAMAGED
        assert verdict.report is not None
        assert [(each.path, each.first, each.last) for each in verdict.report.damage] == [(path, 0, 1)]
