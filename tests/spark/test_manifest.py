"""The manifest of an archive: against a model, stopped at every step, with several writers, and damaged."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadDirectory
from penstock.spark import manifest
from penstock.spark.archive_place import DirectoryPlace
from penstock.spark.manifest import ArchivedFile, ArchiveManifest, Entry

COLUMNS = ("topic", "partition", "offset", "timestamp", "value")


class Stopped(BaseException):
    """As a process that is killed here: nothing after it runs but what Python itself closes."""


def file(name: str, first: int, last: int, *, topic: str = "orders", partition: int = 0) -> ArchivedFile:
    return ArchivedFile(f"data/{name}.parquet", topic, partition, last - first + 1, 100, first, last, 0, 1)


def entry(writer: str, batch: int, *files: ArchivedFile) -> Entry:
    return Entry(writer, batch, COLUMNS, files)


def made(root: Path, *, fold_every: int = 100) -> ArchiveManifest:
    found = ArchiveManifest(DirectoryPlace(root), fold_every=fold_every)
    found.create()
    return found


def test_a_committed_batch_is_there_after_a_reopen(tmp_path: Path) -> None:
    written = file("a", 0, 9), file("b", 5, 7, partition=1)
    assert made(tmp_path).commit(entry("q", 0, *written))

    reopened = ArchiveManifest(DirectoryPlace(tmp_path))

    assert reopened.files() == list(written)
    assert reopened.ranges() == {("orders", 0): (0, 10), ("orders", 1): (5, 8)}


class LosesReplies(DirectoryPlace):
    """As an object store whose client repeats each request and so finds what it has just created."""

    def create(self, name: str, data: bytes) -> None:
        super().create(name, data)
        raise FileExistsError(errno.EEXIST, "taken", self.location(name))


def test_a_compaction_whose_reply_was_lost_is_added_once_and_told_so(tmp_path: Path) -> None:
    """Otherwise the compaction would remove the merged file, which the manifest names."""
    small, merged = (file("a", 0, 4), file("b", 5, 9)), file("ab", 0, 9)
    made(tmp_path).commit(entry("q", 0, *small))
    compaction = Entry(f"{manifest.ONCE}c", 0, COLUMNS, (merged,), tuple(each.path for each in small), 1)

    assert ArchiveManifest(LosesReplies(tmp_path)).replace(compaction)

    assert ArchiveManifest(DirectoryPlace(tmp_path)).files() == [merged]


def test_a_repeated_batch_adds_nothing(tmp_path: Path) -> None:
    books = made(tmp_path)
    books.commit(entry("q", 0, file("a", 0, 9)))
    books.commit(entry("q", 1, file("b", 10, 19)))

    assert not books.commit(entry("q", 0, file("a2", 0, 9)))
    assert not ArchiveManifest(DirectoryPlace(tmp_path)).commit(entry("q", 1, file("b2", 10, 19)))

    assert books.files() == [file("a", 0, 9), file("b", 10, 19)]
    assert books.unnamed(["data/a2.parquet", "data/a.parquet"]) == ["data/a2.parquet"]


def test_a_repeated_batch_with_other_rows_is_refused(tmp_path: Path) -> None:
    books = made(tmp_path)
    books.commit(entry("q", 3, file("a", 10, 19)))

    with pytest.raises(ValueError, match=r"batch 2 of q was archived .* before, but now has other rows"):
        books.commit(entry("q", 2, file("b", 15, 20)))
    with pytest.raises(ValueError, match="offsets 9 to 12"):
        books.commit(entry("q", 3, file("b", 9, 12)))
    with pytest.raises(ValueError, match="partition 1"):
        books.commit(entry("q", 3, file("b", 10, 12, partition=1)))


def test_rows_below_the_end_are_refused_with_where_to_go_on(tmp_path: Path) -> None:
    books = made(tmp_path)
    books.commit(entry("q", 0, file("a", 0, 9), file("b", 0, 4, partition=1)))

    with pytest.raises(ValueError, match="up to offset 9, but this write begins at 9") as refused:
        books.commit(entry("another", 0, file("c", 9, 12)), gaps=True)

    assert '{"orders":{"0":10,"1":5}}' in str(refused.value)
    assert books.files() == [file("a", 0, 9), file("b", 0, 4, partition=1)]


def test_one_writer_may_leave_holes_and_another_must_say_so(tmp_path: Path) -> None:
    books = made(tmp_path)
    books.commit(entry("q", 0, file("a", 0, 9)))
    books.commit(entry("q", 1, file("b", 20, 29)))

    with pytest.raises(ValueError, match="archiveGaps=true"):
        books.commit(entry("another", 0, file("c", 31, 40)))
    assert books.commit(entry("another", 0, file("c", 31, 40)), gaps=True)
    assert books.commit(entry("third", 0, file("d", 41, 41)))

    assert books.ranges() == {("orders", 0): (0, 42)}


def test_other_columns_are_refused(tmp_path: Path) -> None:
    books = made(tmp_path)
    books.commit(entry("q", 0, file("a", 0, 9)))

    with pytest.raises(ValueError, match=r"has the columns topic, .* but this write has topic, .*, headers"):
        books.commit(Entry("q", 1, (*COLUMNS, "headers"), (file("b", 10, 19),)))


def test_folded_entries_are_removed_and_nothing_is_forgotten(tmp_path: Path) -> None:
    books = made(tmp_path, fold_every=3)
    files = [file(f"f{n}", n, n) for n in range(20)]
    for number, each in enumerate(files):
        assert books.commit(entry("q", number, each))

    reopened = ArchiveManifest(DirectoryPlace(tmp_path))

    assert reopened.files() == files == books.files()
    assert reopened.ranges() == {("orders", 0): (0, 20)}
    assert not reopened.commit(entry("q", 0, file("again", 0, 0)))
    assert sorted(name for name in os.listdir(tmp_path / "_manifest") if name.endswith(".json")) == sorted(
        [f"{n:020d}.files.json" for n in (2, 5, 8, 11, 14, 17)]
        + [f"{n:020d}.checkpoint.json" for n in (14, 17)]
        + [f"{n:020d}.json" for n in (15, 16, 17, 18, 19)]
    )


def test_writers_of_one_time_are_forgotten_when_they_are_folded(tmp_path: Path) -> None:
    books = made(tmp_path, fold_every=2)
    for number in range(4):
        books.commit(entry(f"{manifest.ONCE}{number}", 0, file(f"f{number}", number, number)))
    books.commit(entry("named", 7, file("f4", 4, 4)))

    assert ArchiveManifest(DirectoryPlace(tmp_path)).state().writers == {"named": 7}


def test_a_reader_that_was_away_for_many_folds_sees_all(tmp_path: Path) -> None:
    writing, reading = made(tmp_path, fold_every=2), ArchiveManifest(DirectoryPlace(tmp_path))
    writing.commit(entry("q", 0, file("f0", 0, 0)))
    assert len(reading.files()) == 1

    for number in range(1, 12):
        writing.commit(entry("q", number, file(f"f{number}", number, number)))

    assert reading.files() == [file(f"f{number}", number, number) for number in range(12)]


def test_readers_beside_a_writer_see_only_whole_prefixes(tmp_path: Path) -> None:
    writing, reading, batches = made(tmp_path, fold_every=3), ArchiveManifest(DirectoryPlace(tmp_path)), 60
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for n in range(batches):
                writing.commit(entry("q", n, file(f"a{n}", n, n), file(f"b{n}", n, n, partition=1)))
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while thread.is_alive() or seen < 2 * batches:
        assert not failed
        files = reading.files()
        assert [each.first for each in files] == [n // 2 for n in range(len(files))]
        assert len(files) % 2 == 0
        assert len(files) >= seen
        seen = len(files)
    thread.join()


def test_of_many_that_commit_at_once_one_wins_each_place(tmp_path: Path) -> None:
    made(tmp_path)
    outcomes: dict[str, bool | str] = {}
    together = threading.Barrier(8)

    def write(name: str) -> None:
        books = ArchiveManifest(DirectoryPlace(tmp_path), fold_every=3)
        together.wait()
        try:
            outcomes[name] = books.commit(entry(name, 0, file(name, 0, 9), file(f"{name}-own", 0, 0, topic=name)))
        except ValueError as error:
            outcomes[name] = str(error)

    threads = [threading.Thread(target=write, args=(f"w{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    winners = [name for name, outcome in outcomes.items() if outcome is True]
    assert len(winners) == 1
    assert all("begins at 0" in str(outcome) for name, outcome in outcomes.items() if name not in winners)
    assert {each.path for each in ArchiveManifest(DirectoryPlace(tmp_path)).files()} == {
        f"data/{winners[0]}.parquet",
        f"data/{winners[0]}-own.parquet",
    }


def test_a_number_is_taken_once_even_without_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system whose locks do not reach other machines the link decides."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    slow, link = made(tmp_path), os.link

    def overtaken(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        assert ArchiveManifest(DirectoryPlace(tmp_path)).commit(entry("fast", 0, file("a", 0, 9)))
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    with pytest.raises(ValueError, match="up to offset 9, but this write begins at 0"):
        slow.commit(entry("slow", 0, file("b", 0, 9)))

    assert ArchiveManifest(DirectoryPlace(tmp_path)).files() == [file("a", 0, 9)]
    assert not [name for name in os.listdir(tmp_path / "_manifest") if name.startswith(".")]


def merging(name: str, time_s: int, *files: ArchivedFile) -> Entry:
    """As compaction replaces files by one."""
    merged = file(name, files[0].first, files[-1].last)
    return Entry(f"{manifest.ONCE}{name}", 0, COLUMNS, (merged,), tuple(each.path for each in files), time_s)


def test_replaced_files_are_out_of_the_archive_after_any_number_of_folds(tmp_path: Path) -> None:
    books = made(tmp_path, fold_every=3)
    files = [file(f"f{n}", n, n) for n in range(20)]
    for number, each in enumerate(files[:10]):
        books.commit(entry("q", number, each))

    assert books.replace(merging("m", 100, *files[2:8]))
    assert not ArchiveManifest(DirectoryPlace(tmp_path)).replace(merging("late", 101, *files[7:9]))
    for number, each in enumerate(files[10:], 10):
        books.commit(entry("q", number, each))
        found = ArchiveManifest(DirectoryPlace(tmp_path))
        expected = [*files[:2], *files[8 : number + 1], file("m", 2, 7)]
        assert sorted(found.files(), key=lambda each: each.path) == sorted(expected, key=lambda each: each.path)
        assert found.ranges() == {("orders", 0): (0, number + 1)}
        paths = [each.path for each in files]
        assert found.unneeded(paths[:10], before=99) == []
        assert found.unneeded(paths[:10], before=100) == paths[2:8]
        assert not found.commit(entry("q", 5, file("again", 5, 5)))
    # A reader that is older than compaction must refuse to read.
    versions = {json.loads(path.read_bytes())["version"] for path in (tmp_path / "_manifest").glob("*.json")}
    assert versions == {1, 2}


def test_replaced_files_are_forgotten_after_a_week(tmp_path: Path) -> None:
    books = made(tmp_path, fold_every=2)
    files = [file(f"f{n}", n, n) for n in range(4)]
    books.commit(entry("q", 0, *files))

    books.replace(merging("old", 100, *files[:2]))
    books.replace(merging("new", 100 + manifest.REPLACED_S, *files[2:]))
    books.commit(entry("q", 1, file("f4", 4, 4)))

    found = ArchiveManifest(DirectoryPlace(tmp_path)).state()
    assert set(found.replaced) == {files[2].path, files[3].path}


STEPS = ("link", "fsync", "unlink", "listdir", "open")


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, *, after: bool) -> None:
    """From the given call on (before or after it is made) no call reaches the disk any more: the process is gone."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < step or (after and calls == step):
                result = real(*args, **kwargs)
                if calls < step:
                    return result
            raise Stopped

        return call

    for name in STEPS:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_stopped_at_any_step_a_batch_is_there_whole_or_not_and_once_when_it_is_repeated(
    tmp_path: Path, after: bool
) -> None:
    step, finished, states = 0, False, set()
    while not finished:
        step += 1
        root = tmp_path / str(step)
        before = [file(f"f{n}", n, n) for n in range(5)]
        books = made(root, fold_every=3)
        for number, each in enumerate(before):
            books.commit(entry("q", number, each))
        batch = entry("q", 5, file("x", 5, 9), file("y", 0, 4, partition=1))

        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, step, after=after)
            try:
                ArchiveManifest(DirectoryPlace(root), fold_every=3).commit(batch)
                finished = True
            except Stopped:
                pass

        found = ArchiveManifest(DirectoryPlace(root)).files()
        assert found in (before, before + list(batch.files))
        states.add(len(found))
        again = entry("q", 5, file("x2", 5, 9), file("y2", 0, 4, partition=1))
        assert ArchiveManifest(DirectoryPlace(root), fold_every=3).commit(again) is (found == before)
        kept = list(again.files) if found == before else list(batch.files)
        for number in range(6, 14):
            assert ArchiveManifest(DirectoryPlace(root), fold_every=3).commit(
                entry("q", number, file(f"f{number}", number + 4, number + 4))
            )
        assert ArchiveManifest(DirectoryPlace(root)).files() == before + kept + [
            file(f"f{n}", n + 4, n + 4) for n in range(6, 14)
        ]
    assert states == {5, 7}
    assert step > 10


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"number":0}'])
def test_a_damaged_entry_is_named(tmp_path: Path, damage: bytes) -> None:
    made(tmp_path).commit(entry("q", 0, file("a", 0, 9)))
    path = tmp_path / "_manifest" / f"{0:020d}.json"
    path.write_bytes(damage)

    with pytest.raises(BadDirectory, match=f"{path} is damaged"):
        ArchiveManifest(DirectoryPlace(tmp_path)).files()


def test_a_newer_entry_is_refused(tmp_path: Path) -> None:
    made(tmp_path).commit(entry("q", 0, file("a", 0, 9)))
    path = tmp_path / "_manifest" / f"{0:020d}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))

    with pytest.raises(BadDirectory, match="has unknown version 3, this Penstock reads up to 2"):
        ArchiveManifest(DirectoryPlace(tmp_path)).files()


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    books = made(tmp_path)
    for number in range(3):
        books.commit(entry("q", number, file(f"f{number}", number, number)))
    path = tmp_path / "_manifest" / f"{1:020d}.json"
    path.unlink()

    with pytest.raises(BadDirectory, match=f"{path} of the archive is missing"):
        ArchiveManifest(DirectoryPlace(tmp_path)).files()


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    books = made(tmp_path, fold_every=1)
    books.commit(entry("q", 0, file("a", 0, 9)))
    (tmp_path / "_manifest" / f"{0:020d}.files.json").unlink()

    with pytest.raises(BadDirectory, match=r"files\.json of the archive is missing"):
        ArchiveManifest(DirectoryPlace(tmp_path)).files()


def test_a_directory_without_a_manifest_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(BadDirectory, match="is not an archive"):
        ArchiveManifest(DirectoryPlace(tmp_path)).files()
    with pytest.raises(BadDirectory, match="is not an archive"):
        ArchiveManifest(DirectoryPlace(tmp_path)).commit(entry("q", 0, file("a", 0, 9)))


def test_files_of_others_in_the_manifest_are_left_alone(tmp_path: Path) -> None:
    books = made(tmp_path, fold_every=1)
    foreign = tmp_path / "_manifest" / "notes.json"
    foreign.write_text("mine")
    for number in range(3):
        books.commit(entry("q", number, file(f"f{number}", number, number)))

    assert len(ArchiveManifest(DirectoryPlace(tmp_path)).files()) == 3
    assert foreign.read_text() == "mine"


places = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 1))
# (writer, batch number, of each place how far beyond its end the rows begin and how many offsets they span, gaps)
operations = st.lists(
    st.tuples(
        st.sampled_from(["q", "r", f"{manifest.ONCE}x"]),
        st.integers(0, 6),
        st.dictionaries(places, st.tuples(st.integers(-2, 2), st.integers(1, 4)), min_size=1),
        st.booleans(),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(operations=operations, fold_every=st.integers(1, 5), reopened=st.integers(1, 4))
def test_the_manifest_is_as_its_model(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Any], fold_every: int, reopened: int
) -> None:
    root = tmp_path_factory.mktemp("manifest")
    books = made(root, fold_every=fold_every)
    kept: list[ArchivedFile] = []
    ranges: dict[tuple[str, int], tuple[int, int, str]] = {}
    last: dict[str, int] = {}
    for step, (writer, batch, spans, gaps) in enumerate(operations):
        if writer.startswith(manifest.ONCE):
            writer, batch = f"{writer}{step}", 0
        files = []
        for (topic, partition), (beyond, length) in spans.items():
            first = max(0, ranges.get((topic, partition), (0, 0, ""))[1] + beyond)
            name = f"{step}-{topic}-{partition}"
            files.append(file(name, first, first + length - 1, topic=topic, partition=partition))
        expected: bool | None
        if batch <= last.get(writer, -1):
            within = [ranges.get((f.topic, f.partition), (1, 0, "")) for f in files]
            is_same = all(r[0] <= f.first and f.last < r[1] for f, r in zip(files, within, strict=True))
            expected = False if is_same else None
        else:
            known = [(f, ranges[f.topic, f.partition]) for f in files if (f.topic, f.partition) in ranges]
            fits = all(f.first == r[1] or (f.first > r[1] and (gaps or r[2] == writer)) for f, r in known)
            expected = True if fits else None
        if step % reopened == 0:
            books = ArchiveManifest(DirectoryPlace(root), fold_every=fold_every)
        if expected is None:
            with pytest.raises(ValueError, match="archive"):
                books.commit(entry(writer, batch, *files), gaps=gaps)
        else:
            assert books.commit(entry(writer, batch, *files), gaps=gaps) is expected
        if expected:
            kept += files
            last[writer] = batch
            for f in files:
                first = ranges.get((f.topic, f.partition), (f.first, 0, ""))[0]
                ranges[f.topic, f.partition] = first, f.last + 1, writer
    for found in (books, ArchiveManifest(DirectoryPlace(root))):
        assert found.files() == kept
        assert found.ranges() == {place: known[:2] for place, known in ranges.items()}
