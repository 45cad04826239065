"""What the disk of the other tests promises: nothing but what was synced, and all of that."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import Thread

import pytest

from penstock.errors import DirectoryInUse
from penstock.log.files import File, Files, OsFiles
from penstock.testing import FaultyFiles, ManualClock, PowerCut

SEEDS = range(300)
DATA = Path("/data")
LOG = DATA / "a.log"


def disk_with_log(content: bytes = b"", *, seed: int = 0) -> tuple[FaultyFiles, File]:
    """A disk with one file, of which name and content are durable."""
    disk = FaultyFiles(seed=seed)
    disk.make_directory(DATA)
    disk.set_content(LOG, content)
    return disk, disk.open(LOG)


def outcomes(run: Callable[[int], object]) -> set[object]:
    """What happens over many seeds. A test that names the whole set shows that each of them really does."""
    return {run(seed) for seed in SEEDS}


def content_or_none(disk: FaultyFiles, path: Path) -> bytes | None:
    return disk.content(path) if path.name in disk.sizes(path.parent) else None


# Bytes


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


# Names


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


# Planned cuts


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


def files_of(disk: FaultyFiles, directory: Path = Path("/")) -> Iterator[tuple[Path, bytes | None]]:
    """All there is on a disk; None for a directory."""
    for name in sorted(disk.sizes(directory)):
        path = directory / name
        try:
            yield path, disk.content(path)
        except IsADirectoryError:
            yield path, None
            yield from files_of(disk, path)


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


# Errors


def test_a_failed_sync_loses_what_a_later_one_does_not_bring_back() -> None:
    def run(seed: int) -> bytes:
        disk, log = disk_with_log(b"kept", seed=seed)
        log.write(b"lost", 4)
        disk.fail("sync", errno.EIO)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            log.sync()
        log.sync()
        assert log.read(100, 0) == b"keptlost"
        log.write(b"more", 8)
        log.sync()
        return disk.power_cut().content(LOG)

    assert outcomes(run) == {b"kept\0\0\0\0more"}


def test_what_a_failed_sync_lost_is_durable_once_it_is_written_again() -> None:
    disk, log = disk_with_log()
    log.write(b"again", 0)
    disk.fail("sync", errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        log.sync()
    log.write(b"again", 0)
    log.sync()
    assert disk.power_cut().content(LOG) == b"again"


def test_a_failed_sync_of_a_directory_loses_its_names() -> None:
    disk = FaultyFiles()
    disk.make_directory(DATA)
    disk.create(LOG)
    disk.fail("sync_directory", errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.sync_directory(DATA)
    disk.sync_directory(DATA)
    assert list(disk.sizes(DATA)) == [LOG.name]
    assert not disk.power_cut().sizes(DATA)


def test_sync_tells_the_error_of_each_file() -> None:
    disk = FaultyFiles()
    files = [disk.create(Path(name)) for name in ("a", "b", "c")]
    disk.fail("sync", errno.EIO, path_suffix="b")
    errors = disk.sync(files)
    assert [error and error.errno for error in errors] == [None, errno.EIO, None]


def test_a_failed_write_leaves_any_prefix() -> None:
    def run(seed: int) -> bytes:
        disk, log = disk_with_log(seed=seed)
        disk.fail("write", errno.EIO)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            log.write(b"ABC", 0)
        return disk.content(LOG)

    assert outcomes(run) == {b"", b"A", b"AB", b"ABC"}


def test_a_fault_waits_for_its_call_then_passes() -> None:
    disk, log = disk_with_log(b"1")
    disk.set_content(DATA / "b.index", b"2")
    index = disk.open(DATA / "b.index")
    disk.fail("read", errno.EIO, times=2, after=1, path_suffix=".log")

    def read(file: File) -> bytes | int | None:
        try:
            return file.read(1, 0)
        except OSError as error:
            return error.errno

    read_in_turn = [read(file) for file in (log, index, log, index, log, log)]
    assert read_in_turn == [b"1", b"2", errno.EIO, b"2", errno.EIO, b"1"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("create", lambda disk, log: disk.create(LOG)),
        ("truncate", lambda disk, log: log.truncate(0)),
        ("rename", lambda disk, log: disk.rename(LOG, DATA / "b")),
        ("remove", lambda disk, log: disk.remove(LOG)),
        ("open", lambda disk, log: disk.open(LOG)),
        ("make_directory", lambda disk, log: disk.make_directory(DATA / "b")),
        ("remove_directory", lambda disk, log: disk.remove_directory(DATA / "empty")),
        ("sizes", lambda disk, log: disk.sizes(DATA)),
        ("view", lambda disk, log: log.view()),
    ],
)
def test_other_failed_calls_change_nothing(name: str, call: Callable[[FaultyFiles, File], object]) -> None:
    disk, log = disk_with_log(b"1")
    disk.make_directory(DATA / "empty")
    before = list(files_of(disk))
    disk.fail(name, errno.EACCES)
    with pytest.raises(PermissionError):
        call(disk, log)
    assert list(files_of(disk)) == before
    call(disk, log)


def test_a_fault_of_an_unknown_call_is_refused() -> None:
    with pytest.raises(ValueError, match="fsync"):
        FaultyFiles().fail("fsync", errno.EIO)


# Room


def test_a_full_disk_takes_what_fits() -> None:
    disk = FaultyFiles(capacity=10)
    disk.create(Path("a")).write(b"1234", 0)
    log = disk.create(Path("b"))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as raised:
        log.write(b"ABCDEFGH", 0)
    assert raised.value.errno == errno.ENOSPC
    assert disk.content(Path("b")) == b"ABCDEF"
    log.write(b"overwritten"[:6], 0)  # needs no room
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        log.truncate(7)


def test_room_comes_back_with_truncate_remove_and_rename() -> None:
    disk = FaultyFiles(capacity=10)
    full = disk.create(Path("full"))
    full.write(bytes(10), 0)
    full.truncate(4)
    log = disk.create(Path("log"))
    log.write(bytes(6), 0)
    disk.remove(Path("full"))
    assert full.read(100, 0) == bytes(4)
    log.write(bytes(4), 6)
    disk.create(Path("empty"))
    disk.rename(Path("empty"), Path("log"))
    disk.create(Path("again")).write(bytes(10), 0)
    disk.create(Path("again"))
    disk.create(Path("other")).write(bytes(10), 0)


def test_the_rebooted_disk_is_as_full_as_its_files_are() -> None:
    disk = FaultyFiles(capacity=10)
    disk.set_content(LOG.relative_to(DATA), bytes(7))
    disk = disk.power_cut()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        disk.create(Path("b")).write(bytes(4), 0)
    assert disk.content(Path("b")) == bytes(3)
    disk.capacity = None
    disk.create(Path("b")).write(bytes(4), 0)


# Handles


def test_open_handles_read_removed_and_replaced_files() -> None:
    disk, log = disk_with_log(b"first")
    disk.set_content(DATA / "b", b"second")
    disk.rename(DATA / "b", LOG)
    second = disk.open(LOG)
    disk.remove(LOG)
    assert log.read(10, 0) == b"first"
    assert second.read(10, 0) == b"second"


def test_a_view_is_the_content_and_cannot_be_written() -> None:
    disk, log = disk_with_log(b"content")
    view = log.view()
    assert bytes(view) == b"content"
    assert view.readonly
    disk.set_content(LOG, b"damaged")
    assert bytes(view) == b"damaged"
    with pytest.raises(BufferError):
        log.truncate(0)
    view.release()
    log.truncate(0)
    assert bytes(log.view()) == b""


def test_a_closed_handle_is_of_no_use() -> None:
    disk, log = disk_with_log(b"1")
    log.close()
    log.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        log.read(1, 0)
    assert disk.content(LOG) == b"1"


def test_sizes_are_those_of_the_files_in_any_order() -> None:
    def run(seed: int) -> tuple[tuple[str, int], ...]:
        disk, _ = disk_with_log(b"12345", seed=seed)
        disk.make_directory(DATA / "empty")
        return tuple(disk.sizes(DATA).items())

    assert outcomes(run) == {(("a.log", 5), ("empty", 0)), (("empty", 0), ("a.log", 5))}
    assert FaultyFiles().sizes(DATA) == {}


def test_a_lock_is_held_until_it_is_closed() -> None:
    disk, _ = disk_with_log()
    lock = disk.lock(DATA / "LOCK")
    for _ in range(2):
        with pytest.raises(DirectoryInUse, match="/data"):
            disk.lock(DATA / "LOCK")
    lock.close()
    disk.lock(DATA / "LOCK")
    disk.power_cut().lock(DATA / "LOCK")


def test_the_end_of_the_process_loses_handles_and_no_bytes() -> None:
    disk, log = disk_with_log()
    disk.lock(DATA / "LOCK")
    log.write(b"not synced", 0)
    disk.create(DATA / "b")
    disk.kill()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        log.sync()
    disk.lock(DATA / "LOCK")
    assert disk.open(LOG).read(100, 0) == b"not synced"
    assert sorted(disk.sizes(DATA)) == ["LOCK", LOG.name, "b"]


def test_threads_share_a_disk() -> None:
    disk, log = disk_with_log()

    def append(thread: int) -> None:
        for step in range(200):
            log.write(bytes([thread]), thread * 200 + step)
            log.sync()

    threads = [Thread(target=append, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert disk.power_cut().content(LOG) == b"".join(bytes([number]) * 200 for number in range(4))


# The real disk


Call = Callable[[Files, dict[int, File]], object]


def random_call(random: Random, directory: Path) -> Call:
    """A call to make on any disk, with the handles opened there so far, each under its number."""
    paths = [directory / name for name in ("a", "b", "x", "y", "x/a", "x/b", "y/a")]
    path, to = random.choices(paths, k=2)
    data, position, number = random.randbytes(random.randrange(30)), random.randrange(60), random.randrange(8)

    def keep(handles: dict[int, File], file: File) -> None:
        handles[number] = file

    def use(handles: dict[int, File], call: Callable[[File], object]) -> object:
        return call(handles[number]) if number in handles else None

    return random.choice(
        [
            lambda files, handles: keep(handles, files.create(path)),
            lambda files, handles: keep(handles, files.open(path)),
            lambda files, handles: use(handles, lambda file: file.write(data, position)),
            lambda files, handles: use(handles, lambda file: file.truncate(position)),
            lambda files, handles: use(handles, lambda file: file.read(len(data), position)),
            lambda files, handles: use(handles, lambda file: (file.size(), bytes(file.view()))),
            lambda files, handles: use(handles, lambda file: file.close()),
            lambda files, handles: files.make_directory(path),
            lambda files, handles: files.remove_directory(path),
            lambda files, handles: files.rename(path, to),
            lambda files, handles: files.remove(path),
            lambda files, handles: files.sync_directory(path),
            lambda files, handles: set(files.sizes(path)),
        ]
    )


def result_or_errno(call: Call, files: Files, handles: dict[int, File]) -> object:
    try:
        return call(files, handles)
    except OSError as error:
        return error.errno


@pytest.mark.parametrize("seed", range(40))
def test_with_power_and_room_it_does_what_a_real_disk_does(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    real, faulty = OsFiles(), FaultyFiles(seed=seed)
    faulty.make_directory(tmp_path)
    real_handles: dict[int, File] = {}
    faulty_handles: dict[int, File] = {}
    for _ in range(500):
        call = random_call(random, tmp_path)
        expected = result_or_errno(call, real, real_handles)
        assert result_or_errno(call, faulty, faulty_handles) == expected


# The clock


def test_the_manual_clock_moves_only_by_hand() -> None:
    clock = ManualClock(now_us=1_000)
    start = clock.monotonic_us()
    assert clock.now_us() == 1_000
    clock.advance(5)
    assert (clock.now_us(), clock.monotonic_us() - start) == (1_005, 5)
    clock.set_wall(3)
    assert (clock.now_us(), clock.monotonic_us() - start) == (3, 5)
    with pytest.raises(ValueError, match="-1"):
        clock.advance(-1)


# Room and descriptors


def test_allocated_bytes_take_room_and_are_zeros() -> None:
    disk = FaultyFiles(capacity=100)
    file = disk.create(Path("/file"))
    file.write(b"ab", 0)
    file.allocate(60)
    assert (disk.content(Path("/file")), disk.space(Path("/"))) == (b"ab" + bytes(58), (40, 100))
    file.allocate(10)
    assert file.size() == 60
    with pytest.raises(OSError, match="No space left"):
        file.allocate(101)
    assert file.size() == 60
    disk.remove(Path("/file"))
    assert disk.space(Path("/")) == (100, 100)


def test_open_files_are_counted_and_bounded() -> None:
    disk = FaultyFiles(descriptors_max=2)
    first, second = disk.create(Path("/first")), disk.create(Path("/second"))
    for call in (disk.create, disk.open, disk.sync_directory, disk.sizes):
        with pytest.raises(OSError, match="Too many open files"):
            call(Path("/") if call in (disk.sync_directory, disk.sizes) else Path("/first"))
    first.close()
    first.close()
    assert disk.open_files == 1
    disk.sync_directory(Path("/"))
    del second
    assert disk.open_files == 0
    held = disk.open(Path("/first"))
    disk.kill()
    assert disk.open_files == 0
    del held
    assert disk.open_files == 0
