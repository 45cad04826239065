"""What the simulated disk keeps of unsynced bytes and names when its power is cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.log.files import File, Files
from penstock.testing import FaultyFiles, PowerCut
from tests.support.faulty_disks import DATA, LOG, SEEDS, disk_with_log, files_of, outcomes


def content_or_none(disk: FaultyFiles, path: Path) -> bytes | None:
    return disk.content(path) if path.name in disk.sizes(path.parent) else None


# ---- bytes


def test_synced_bytes_survive_every_cut() -> None:
    def run(seed: int) -> bytes:
        disk, log = disk_with_log(b"durable", seed=seed)
        log.write(b"and synced", 7)
        log.sync()
        return disk.power_cut().content(LOG)

    assert outcomes(run) == {b"durableand synced"}


def test_unsynced_bytes_vanish_stay_or_tear_at_any_byte() -> None:
    def run(seed: int) -> bytes:
        disk, log = disk_with_log(b"kept", seed=seed)
        log.write(b"ABCD", 4)
        return disk.power_cut().content(LOG)

    seen = outcomes(run)
    assert {b"kept", b"keptA", b"keptAB", b"keptABC", b"keptABCD"} <= seen
    assert all(isinstance(content, bytes) and content.startswith(b"kept") for content in seen)


def test_unsynced_writes_arrive_out_of_order_with_zeros_between() -> None:
    def run(seed: int) -> tuple[bool, bool]:
        disk, log = disk_with_log(seed=seed)
        log.write(b"1" * 4096, 0)
        log.write(b"2" * 4096, 4096)
        content = disk.power_cut().content(LOG)
        return b"1" * 512 in content, b"2" * 512 in content[4096:]

    assert outcomes(run) == {(False, False), (True, False), (False, True), (True, True)}


def test_a_file_can_grow_without_its_data() -> None:
    def run(seed: int) -> bool:
        disk, log = disk_with_log(seed=seed)
        log.write(b"x" * 8, 0)
        return disk.power_cut().content(LOG) == bytes(8)

    assert outcomes(run) == {True, False}


def test_a_torn_sector_may_hold_garbage_only_where_something_was_written() -> None:
    def run(seed: int) -> bool:
        disk, log = disk_with_log(b"." * 1024, seed=seed)
        log.write(b"x" * 200, 400)
        content = disk.power_cut().content(LOG)
        assert content[:400] == b"." * 400
        assert content[600:] == b"." * 424
        return bool(content.translate(None, b".x"))

    assert outcomes(run) == {True, False}


def test_an_overwritten_sector_that_did_not_arrive_shows_what_was_there() -> None:
    def run(seed: int) -> bytes:
        disk, log = disk_with_log(b"old", seed=seed)
        log.write(b"new", 0)
        return disk.power_cut().content(LOG)

    assert {b"old", b"new", b"nld", b"ned", b"oew"} <= outcomes(run)


def test_an_unsynced_truncate_may_not_arrive_though_later_writes_did() -> None:
    def run(seed: int) -> bytes:
        disk, log = disk_with_log(b"0123456789", seed=seed)
        log.truncate(2)
        log.write(b"AB", 2)
        return disk.power_cut().content(LOG)

    assert {b"0123456789", b"01", b"01AB", b"01AB456789"} <= outcomes(run)


def test_a_synced_truncate_survives() -> None:
    def run(seed: int) -> bytes:
        disk, log = disk_with_log(b"0123456789", seed=seed)
        log.truncate(2)
        log.sync()
        return disk.power_cut().content(LOG)

    assert outcomes(run) == {b"01"}


def test_what_is_left_after_a_cut_is_durable() -> None:
    for seed in SEEDS:
        disk, log = disk_with_log(seed=seed)
        log.write(os.urandom(100), 0)
        disk.create(DATA / "b.log")
        once = disk.power_cut()
        names, content = sorted(once.sizes(DATA)), once.content(LOG)
        twice = once.power_cut()
        assert sorted(twice.sizes(DATA)) == names
        assert twice.content(LOG) == content


# ---- names


def test_a_new_name_needs_a_sync_of_its_directory() -> None:
    def run(seed: int) -> bytes | None:
        disk = FaultyFiles(seed=seed)
        disk.make_directory(DATA)
        log = disk.create(LOG)
        log.write(b"synced", 0)
        log.sync()
        return content_or_none(disk.power_cut(), LOG)

    assert outcomes(run) == {None, b"synced"}


def test_a_synced_name_survives_without_its_bytes() -> None:
    def run(seed: int) -> bytes | None:
        disk = FaultyFiles(seed=seed)
        disk.make_directory(DATA)
        log = disk.create(LOG)
        log.write(b"x", 0)
        disk.sync_directory(DATA)
        return content_or_none(disk.power_cut(), LOG)

    assert {b"", b"x"} <= outcomes(run)
    assert None not in outcomes(run)


def test_names_are_kept_in_the_order_of_their_changes() -> None:
    def run(seed: int) -> str:
        disk = FaultyFiles(seed=seed)
        disk.make_directory(DATA)
        for name in "abc":
            disk.create(DATA / name)
        disk.remove(DATA / "a")
        return "".join(sorted(disk.power_cut().sizes(DATA)))

    assert outcomes(run) == {"", "a", "ab", "abc", "bc"}


def test_directories_lose_their_names_apart_from_each_other() -> None:
    def run(seed: int) -> tuple[int, int]:
        disk = FaultyFiles(seed=seed)
        for directory in "xy":
            disk.make_directory(DATA / directory)
            disk.create(DATA / directory / "file")
        disk = disk.power_cut()
        return len(disk.sizes(DATA / "x")), len(disk.sizes(DATA / "y"))

    assert outcomes(run) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_sync_directory_syncs_that_directory_only() -> None:
    def run(seed: int) -> tuple[int, int]:
        disk = FaultyFiles(seed=seed)
        for directory in "xy":
            disk.make_directory(DATA / directory)
            disk.create(DATA / directory / "file")
        disk.sync_directory(DATA / "x")
        disk = disk.power_cut()
        return len(disk.sizes(DATA / "x")), len(disk.sizes(DATA / "y"))

    assert outcomes(run) == {(1, 0), (1, 1)}


def test_a_removed_name_may_come_back_until_its_directory_is_synced() -> None:
    def run(seed: int) -> bytes | None:
        disk, _ = disk_with_log(b"back", seed=seed)
        disk.remove(LOG)
        return content_or_none(disk.power_cut(), LOG)

    assert outcomes(run) == {None, b"back"}


def test_a_renamed_file_replaces_the_other_whole() -> None:
    def run(seed: int) -> tuple[bytes, bytes | None]:
        disk, _ = disk_with_log(b"old", seed=seed)
        disk.set_content(DATA / "new", b"new")
        disk.rename(DATA / "new", LOG)
        disk = disk.power_cut()
        return disk.content(LOG), content_or_none(disk, DATA / "new")

    assert outcomes(run) == {(b"old", b"new"), (b"new", None)}


def test_a_rename_without_a_sync_of_the_file_may_leave_it_empty() -> None:
    def run(seed: int) -> bytes:
        disk, _ = disk_with_log(b"old", seed=seed)
        disk.create(DATA / "new").write(b"n", 0)
        disk.rename(DATA / "new", LOG)
        disk.sync_directory(DATA)
        return disk.power_cut().content(LOG)

    assert {b"", b"n"} <= outcomes(run)


@pytest.mark.parametrize(
    ("synced", "expected"),
    [
        ("", {(True, False), (True, True), (False, True)}),
        ("y", {(True, True), (False, True)}),
        ("x", {(False, True)}),
        ("yx", {(False, True)}),
    ],
)
def test_a_rename_between_directories_never_loses_the_file(synced: str, expected: set[tuple[bool, bool]]) -> None:
    def run(seed: int) -> tuple[bool, bool]:
        disk = FaultyFiles(seed=seed)
        for directory in "xy":
            disk.make_directory(DATA / directory)
        disk.set_content(DATA / "x" / "file", b"moved")
        disk.create(DATA / "y" / "earlier")
        disk.rename(DATA / "x" / "file", DATA / "y" / "file")
        for directory in synced:
            disk.sync_directory(DATA / directory)
        disk = disk.power_cut()
        found = [content_or_none(disk, DATA / directory / "file") == b"moved" for directory in "xy"]
        assert not found[1] or "earlier" in disk.sizes(DATA / "y")
        return found[0], found[1]

    assert outcomes(run) == expected


def test_a_directory_has_one_name_after_a_cut() -> None:
    def run(seed: int) -> tuple[int, int]:
        disk = FaultyFiles(seed=seed)
        disk.make_directory(DATA / "x" / "moved")
        disk.make_directory(DATA / "y")
        disk.set_content(DATA / "x" / "moved" / "file", b"1")
        disk.rename(DATA / "x" / "moved", DATA / "y" / "moved")
        disk = disk.power_cut()
        return len(disk.sizes(DATA / "x" / "moved")), len(disk.sizes(DATA / "y" / "moved"))

    assert outcomes(run) == {(1, 0), (0, 1)}


def test_make_directory_is_durable_when_it_returns() -> None:
    def run(seed: int) -> tuple[str, ...]:
        disk = FaultyFiles(seed=seed)
        disk.make_directory(DATA / "topics" / "1")
        disk.remove_directory(DATA / "topics" / "1")
        disk.make_directory(DATA / "topics" / "1")
        return tuple(disk.power_cut().sizes(DATA / "topics"))

    assert outcomes(run) == {("1",)}


def test_a_removed_directory_may_come_back_with_files_of_which_the_removal_was_lost() -> None:
    def run(seed: int) -> tuple[int, int]:
        disk, _ = disk_with_log(b"1", seed=seed)
        disk.remove(LOG)
        disk.remove_directory(DATA)
        disk = disk.power_cut()
        return len(disk.sizes(Path("/"))), len(disk.sizes(DATA))

    assert outcomes(run) == {(0, 0), (1, 0), (1, 1)}


def test_create_in_place_of_a_file_may_leave_the_old_content() -> None:
    def run(seed: int) -> bytes:
        disk, _ = disk_with_log(b"old", seed=seed)
        disk.create(LOG)
        return disk.power_cut().content(LOG)

    assert outcomes(run) == {b"", b"old"}


# ---- planned cuts


def workload(disk: Files) -> None:
    """Every mutating call is in it."""
    disk.make_directory(DATA / "topics")
    log = disk.create(DATA / "topics" / "log")
    log.write(b"a" * 700, 0)
    disk.sync([log])
    disk.sync_directory(DATA / "topics")
    log.write(b"b" * 700, 700)
    log.truncate(1000)
    log.sync()
    disk.create(DATA / "topics" / "index").write(b"i", 0)
    disk.rename(DATA / "topics" / "index", DATA / "topics" / "renamed")
    disk.remove(DATA / "topics" / "renamed")
    disk.make_directory(DATA / "empty")
    disk.remove_directory(DATA / "empty")


def cut_workload(seed: int, cut_after: int) -> tuple[tuple[Path, bytes | None], ...]:
    disk = FaultyFiles(seed=seed, cut_after=cut_after)
    with pytest.raises(PowerCut):
        workload(disk)
    assert disk.calls == cut_after
    return tuple(files_of(disk.power_cut()))


def test_the_same_seed_gives_the_same_outcome_and_others_do_not() -> None:
    disk = FaultyFiles()
    workload(disk)
    for cut_after in range(disk.calls):
        first = [cut_workload(seed, cut_after) for seed in range(20)]
        again = [cut_workload(seed, cut_after) for seed in range(20)]
        assert first == again
        assert len(set(first)) > 1


def test_a_cut_keeps_what_was_synced_before_it() -> None:
    for seed in SEEDS:
        for cut_after in (5, 6, 7, 8, 9, 10, 11, 12):
            left = dict(cut_workload(seed, cut_after))
            log = left[DATA / "topics" / "log"]
            assert log is not None
            assert log[:700] == b"a" * 700
            if cut_after > 7:
                assert log == b"a" * 700 + b"b" * 300


def test_the_call_of_the_cut_did_its_work_or_not() -> None:
    def run(seed: int) -> bytes:
        disk, log = disk_with_log(seed=seed)
        log.write(b"x" * 16, 0)
        disk.cut_after = disk.calls
        with pytest.raises(PowerCut):
            log.sync()
        return disk.power_cut().content(LOG)

    seen = outcomes(run)
    assert {b"", b"x" * 16} <= seen
    assert len(seen) > 2


@pytest.mark.parametrize(
    "call",
    [
        lambda disk, log: log.write(b"x", 0),
        lambda disk, log: log.truncate(0),
        lambda disk, log: log.sync(),
        lambda disk, log: disk.sync([log]),
        lambda disk, log: disk.create(DATA / "b"),
        lambda disk, log: disk.rename(LOG, DATA / "b"),
        lambda disk, log: disk.remove(LOG),
        lambda disk, log: disk.sync_directory(DATA),
        lambda disk, log: disk.make_directory(DATA / "b" / "c"),
        lambda disk, log: disk.remove_directory(Path("/empty")),
    ],
)
def test_every_mutating_call_counts_and_can_be_the_last(call: Callable[[FaultyFiles, File], object]) -> None:
    for seed in range(20):
        disk, log = disk_with_log(b"1", seed=seed)
        disk.make_directory(Path("/empty"))
        before = disk.calls
        disk.cut_after = before + 1
        call(disk, log)
        assert disk.calls == before + 1
        with pytest.raises(PowerCut, match=f"seed {seed}"):
            disk.make_directory(DATA / "next")

        disk, log = disk_with_log(b"1", seed=seed)
        disk.make_directory(Path("/empty"))
        disk.cut_after = disk.calls
        with pytest.raises(PowerCut):
            call(disk, log)
        disk.power_cut()


def test_nothing_works_without_power() -> None:
    disk, log = disk_with_log(b"1")
    disk.cut_after = disk.calls
    with pytest.raises(PowerCut):
        log.sync()
    rebooted: list[FaultyFiles] = []
    for _ in range(2):
        for use in (
            lambda: disk.open(LOG),
            lambda: disk.sizes(DATA),
            lambda: disk.sizes(Path("/absent")),
            lambda: disk.content(LOG),
            lambda: disk.set_content(LOG, b""),
            lambda: disk.make_directory(DATA),
            lambda: disk.sync([log]),
            lambda: disk.lock(DATA / "LOCK"),
            disk.kill,
            lambda: log.read(1, 0),
            log.view,
            log.size,
            log.sync,
            log.close,
        ):
            with pytest.raises(PowerCut):
                use()
        if not rebooted:
            rebooted.append(disk.power_cut())
    with pytest.raises(PowerCut):
        disk.power_cut()
    assert rebooted[0].content(LOG) == b"1"
    assert not isinstance(PowerCut(), OSError)
