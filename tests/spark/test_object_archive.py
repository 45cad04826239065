"""Archives in an object store: a real S3 s3_environment, writers killed at every step, and stores that misbehave."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.dataset
import pyarrow.fs
import pytest

import penstock
from penstock.errors import BadConfig, BadDirectory, ReadFailed
from penstock.object_store import ObjectStore
from penstock.spark import connection
from penstock.spark.archive import Archive
from penstock.spark.archive_place import ObjectPlace, open_place
from penstock.spark.manifest import ArchiveManifest
from tests.spark.test_archive import HOUR_US, START_US, Query, drop_head, held, publish, row, rows_of
from tests.spark.test_manifest import entry, file
from tests.support import object_writer
from tests.support.s3_server import BUCKET

pytest.importorskip("obstore")

_numbers = itertools.count()


@pytest.fixture
def url(s3_environment: dict[str, str]) -> str:
    return f"s3://{BUCKET}/archive{next(_numbers)}"


def independent(s3_environment: dict[str, str], urls: list[str]) -> pyarrow.Table:
    """Read files with Arrow's own S3 client."""
    files = pyarrow.fs.S3FileSystem(
        access_key="any", secret_key="any", endpoint_override=s3_environment["AWS_ENDPOINT"], region="us-east-1"
    )
    return pyarrow.dataset.dataset([each.removeprefix("s3://") for each in urls], filesystem=files).to_table()


def data_objects(url: str) -> list[str]:
    return [f"{url}/{name}" for name in open_place(url).parquet_files(float("inf"))]


def manifest(url: str, fold_every: int = 100) -> ArchiveManifest:
    found = ArchiveManifest(open_place(url), fold_every=fold_every)
    found.create()
    return found


def test_rows_come_back_and_other_programs_read_them(s3_environment: dict[str, str], url: str) -> None:
    rows = [row(n, at_us=START_US + n * HOUR_US // 10, key=b"k", headers={"N": str(n)}) for n in range(30)]
    query = Query(url)
    query.batch(0, rows[:10], rows[10:12])
    query.batch(1, rows[12:])
    query.batch(1, rows[12:])

    assert held(url) == rows
    assert Archive(url).ranges("orders") == {0: (0, 30)}
    assert sorted(Archive(url).files()) == data_objects(url)
    table = independent(s3_environment, Archive(url).files()).sort_by("offset")
    assert table["offset"].to_pylist() == list(range(30))
    assert table["value"].to_pylist() == [each["value"] for each in rows]


def test_files_that_no_commit_names_are_swept(url: str) -> None:
    query = Query(url)
    query.batch(0, [row(0)])
    lost = query.task([row(1)])
    query.writer().abort([query.task([row(1)])], 1)

    assert Archive(url).sweep(datetime.timedelta(hours=1)) == []
    assert Archive(url).sweep(datetime.timedelta(0)) == [f"{url}/{each.path}" for each in lost.files]
    assert held(url) == [row(0)]


def test_killed_at_every_step_each_row_is_there_once(s3_environment: dict[str, str], url: str) -> None:
    """The steps: the files of a task, the entry, and the two files and the removals of a fold."""
    states = set()
    for step in itertools.count(1):
        archive = f"{url}-{step}"
        for number in range(3):
            assert object_writer.write(archive, number)

        ended = killed(archive, step, "write")

        rows = independent(s3_environment, Archive(archive).files()).num_rows
        assert rows in (30, 40)
        states.add(rows)
        assert object_writer.write(archive, 3) is (rows == 30)
        assert object_writer.write(archive, 4)
        table = independent(s3_environment, Archive(archive).files()).sort_by("offset")
        assert table["offset"].to_pylist() == list(range(50))
        assert table["value"].to_pylist() == [b"%d" % offset for offset in range(50)]
        Archive(archive).sweep(datetime.timedelta(0))
        assert data_objects(archive) == sorted(Archive(archive).files())
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL
    assert states == {30, 40}
    assert step == int(ended.stdout) + 1 >= 7


def killed(archive: str, step: int, action: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.object_writer", archive, str(step), action]
    return subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)


def test_compaction_that_is_killed_at_every_step_harms_nothing(s3_environment: dict[str, str], url: str) -> None:
    """The steps: the merged file and the entry, of one hour and of another."""
    counts = set()
    for step in itertools.count(1):
        archive = f"{url}-{step}"
        query = Query(archive)
        rows = [row(n, at_us=START_US + n % 2 * HOUR_US) for n in range(12)]
        for number in range(3):
            query.batch(number, rows[number * 4 : number * 4 + 4])

        ended = killed(archive, step, "compact")

        files = Archive(archive).files()
        counts.add(len(files))
        assert independent(s3_environment, files).sort_by("offset")["offset"].to_pylist() == list(range(12))
        list(Archive(archive).compact())
        assert Archive(archive).sweep(datetime.timedelta(0))
        assert data_objects(archive) == sorted(Archive(archive).files())
        assert len(data_objects(archive)) == 2
        assert held(archive) == rows
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL
    assert counts == {6, 4, 2}


def test_of_many_that_commit_at_once_one_wins_and_no_other_is_lost(url: str) -> None:
    """All want the same offsets of one topic, and each has a topic of its own."""
    manifest(url)
    outcomes: dict[str, bool | str] = {}
    together = threading.Barrier(6)

    def write(name: str) -> None:
        books = ArchiveManifest(open_place(url), fold_every=3)
        together.wait()
        for number in range(3):
            books.commit(entry(name, number, file(f"{name}-{number}", number, number, topic=name)))
        try:
            outcomes[name] = books.commit(entry(name, 3, file(name, 0, 9)))
        except ValueError as error:
            outcomes[name] = str(error)

    threads = [threading.Thread(target=write, args=(f"w{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (winner,) = [name for name, outcome in outcomes.items() if outcome is True]
    assert len(outcomes) == 6
    assert all("begins at 0" in str(outcome) for name, outcome in outcomes.items() if name != winner)
    own = {f"data/w{n}-{number}.parquet" for n in range(6) for number in range(3)}
    files = [each.path for each in ArchiveManifest(open_place(url)).files()]
    assert sorted(files) == sorted(own | {f"data/{winner}.parquet"})


def test_a_writer_that_was_paused_while_its_number_was_folded_away_commits_under_another(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(url).commit(entry("fast", 0, file("f0", 0, 0)))
    create = ObjectStore.create

    def paused(self: ObjectStore, name: str, data: bytes) -> None:
        monkeypatch.setattr(ObjectStore, "create", create)
        fast = manifest(url, fold_every=2)
        for number in range(1, 9):
            fast.commit(entry("fast", number, file(f"f{number}", number, number)))
        assert name.rpartition("/")[2] not in open_place(url).names("_manifest")
        create(self, name, data)

    monkeypatch.setattr(ObjectStore, "create", paused)
    assert manifest_without_mark(url).commit(entry("slow", 0, file("slow", 0, 4, topic="other")))

    found = ArchiveManifest(open_place(url))
    assert [each.path for each in found.files()] == [*(f"data/f{n}.parquet" for n in range(9)), "data/slow.parquet"]
    assert found.ranges() == {("orders", 0): (0, 9), ("other", 0): (0, 5)}


def manifest_without_mark(url: str) -> ArchiveManifest:
    return ArchiveManifest(open_place(url))


def test_a_reply_that_was_lost_commits_once_and_keeps_the_files(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore repeats a request without a reply, and finds what it stored itself."""
    query = Query(url)
    message, create = query.task([row(n) for n in range(5)]), ObjectStore.create

    def repeated(self: ObjectStore, name: str, data: bytes) -> None:
        create(self, name, data)
        create(self, name, data)

    writer = query.writer()
    monkeypatch.setattr(ObjectStore, "create", repeated)
    writer.commit([message], 0)

    assert held(url) == [row(n) for n in range(5)]
    assert len(ArchiveManifest(open_place(url)).files()) == 1


def test_history_comes_from_the_store_and_the_rest_from_the_log(url: str) -> None:
    with penstock.Broker(listen="127.0.0.1:0", settings={"storage.upkeep_ms": 10}) as broker:
        broker.create_topic("history", partitions=1, segment_bytes=4096)
        for first in range(0, 400, 50):
            publish(broker, "history", range(first, first + 50))
        expected = rows_of(broker, "history")
        Query(url).batch(0, expected[:250], expected[250:])
        first = drop_head(broker, "history")
        publish(broker, "history", range(400, 450))

        found = rows_of(broker, "history", archive=url)
        connection.close()

    assert 0 < first < 400
    assert [each["offset"] for each in found] == list(range(450))
    assert found[:400] == expected


PIPELINE = """
name = "archive-orders"
kind = "archive"
[source]
servers = "{servers}"
topic = "orders"
[sink]
archive = "{url}"
"""


def test_a_pipeline_archives_to_the_store(s3_environment: dict[str, str], url: str, tmp_path: Path) -> None:
    path = tmp_path / "archive.toml"
    with penstock.Broker(listen="127.0.0.1:0") as broker:
        path.write_text(PIPELINE.format(servers=broker.address, url=url))
        publish(broker, "orders", range(100))
        command = [sys.executable, "-m", "penstock", "pipeline", "run", str(path)]
        done = subprocess.run(command, check=False, env=os.environ | s3_environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

        table = independent(s3_environment, Archive(url).files()).sort_by(
            [("partition", "ascending"), ("offset", "ascending")]
        )
        expected = rows_of(broker, "orders")
        connection.close()
    assert table["value"].to_pylist() == [each["value"] for each in expected]
    assert table["key"].to_pylist() == [each["key"] for each in expected]


# What is refused


class Careless(ObjectStore):
    """A store that ignores the condition."""

    def create(self, name: str, data: bytes) -> None:
        pass


def test_a_store_that_replaces_objects_is_refused() -> None:
    import obstore.store

    place = ObjectPlace(Careless(obstore.store.MemoryStore(), "s3://careless", BadDirectory))
    with pytest.raises(BadDirectory, match="s3://careless: this object store replaces objects that exist"):
        ArchiveManifest(place).create()


def test_what_is_missing_or_damaged_is_named(url: str) -> None:
    with pytest.raises(ValueError, match=f"{url} is not an archive"):
        Archive(url)
    Query(url).batch(0, [row(0)])
    (path,) = Archive(url).files()
    name, place = path.removeprefix(f"{url}/"), open_place(url)
    cut = place.read(name)[:-1]
    place.remove([name])
    with pytest.raises(BadDirectory, match=f"{path} of the archive is missing"):
        held(url)
    place.create(name, cut)
    with pytest.raises(ReadFailed, match="does not have the size in the manifest"):
        held(url)


def test_a_bucket_that_does_not_exist_is_named(s3_environment: dict[str, str]) -> None:
    with pytest.raises((BadDirectory, BadConfig), match="s3://nowhere/archive"):
        Query("s3://nowhere/archive").writer()


def test_a_delta_table_and_an_unknown_store_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="cannot be a Delta table"):
        Query(url, archiveFormat="delta").writer()
    with pytest.raises(BadConfig, match=r"hdfs://x.*use s3://BUCKET/PATH"):
        Query("hdfs://x/archive").writer()


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    Query(f"file://{tmp_path}/archive").batch(0, [row(0)])

    assert held(tmp_path / "archive") == [row(0)]
    assert held(f"file://{tmp_path}/archive") == [row(0)]
