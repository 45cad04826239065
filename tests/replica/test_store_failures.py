"""The copy of a replica on a full disk, through power cuts, and with files that others damaged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from penstock.errors import AppendFailed, LogDamaged
from penstock.replica.copies import Copies
from penstock.replica.copy import CopiedRecord
from penstock.testing import FaultyFiles
from penstock.testing.disk import PowerCut
from tests.support.copies import append, copy_of, everything, offsets, on_disk, opened, record, served, used
from tests.support.sampling import examples

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
