"""What the simulated disk does when calls fail, when it is full, and otherwise: as a real one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Thread

import pytest

from penstock.errors import DirectoryInUse
from penstock.log.files import File, Files, OsFiles
from penstock.testing import FaultyFiles, ManualClock
from tests.support.faulty_disks import DATA, LOG, disk_with_log, files_of, outcomes
from tests.support.sampling import examples

# ---- errors


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


# ---- room


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


# ---- handles


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


# ---- the real disk

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


@pytest.mark.parametrize("seed", range(examples(40)))
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


# ---- the clock


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


# ---- room and descriptors


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
