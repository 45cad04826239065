"""The archive: rows to files and back, exactly once whatever fails, and through a real session and broker."""

from __future__ import annotations

import datetime
import itertools
import os
import pickle
import random
import re
import shutil
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types

import penstock
from penstock.errors import BadDirectory, ReadFailed
from penstock.spark import archive, archive_sink, connection, options, parquet, source, stream
from penstock.spark.archive import Archive
from penstock.spark.columns import TYPES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_TYPES: dict[str, types.DataType] = {
    "topic": types.StringType(),
    "partition": types.IntegerType(),
    "offset": types.LongType(),
    "timestamp": types.TimestampType(),
    "key": types.BinaryType(),
    "value": types.BinaryType(),
    "subject": types.StringType(),
    "headers": types.MapType(types.StringType(), types.StringType()),
}
SCHEMA = pyarrow.schema(list(TYPES.items()))
HOUR_US = 3_600_000_000
START_US = 1_790_000_000_000_000 // HOUR_US * HOUR_US  # an hour begins

Row = dict[str, Any]


def row(offset: int, *, topic: str = "orders", partition: int = 0, at_us: int | None = None, **more: Any) -> Row:
    timestamp = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(
        microseconds=START_US + offset * 1000 if at_us is None else at_us
    )
    plain = {"key": None, "value": b"v%d" % offset, "subject": topic, "headers": None}
    return {"topic": topic, "partition": partition, "offset": offset, "timestamp": timestamp} | plain | more


def arrow(rows: Sequence[Row], columns: Sequence[str] = tuple(TYPES)) -> pyarrow.RecordBatch:
    schema = pyarrow.schema([(name, TYPES[name]) for name in columns])
    return pyarrow.RecordBatch.from_pylist([{name: each[name] for name in columns} for each in rows], schema=schema)


def spark_schema(names: Sequence[str] = tuple(TYPES), **changed: types.DataType) -> types.StructType:
    """As Spark hands it over."""
    kinds = SPARK_TYPES | changed
    return types.StructType([types.StructField(name, kinds[name]) for name in (*names, *changed.keys() - set(names))])


class Query:
    """A query as its writer sees it: tasks, commits, and restarts with the same checkpoint."""

    def __init__(self, root: Path | str, name: str = "q", **options: str) -> None:
        self.options = {"archive": str(root)} | {key.lower(): value for key, value in options.items()}
        self.name = name

    def writer(self) -> Any:
        """As in each of Spark's processes: made anew, or unpickled."""
        return pickle.loads(pickle.dumps(archive_sink.stream_writer(self.options, spark_schema())))

    def task(self, *batches: Sequence[Row]) -> Any:
        message = archive_sink._write(self.writer()._target, self.name, iter([arrow(rows) for rows in batches]))
        return pickle.loads(pickle.dumps(message))

    def commit(self, number: int, *messages: Any) -> None:
        self.writer().commit(list(messages), number)

    def batch(self, number: int, *tasks: Sequence[Row]) -> None:
        self.commit(number, *(self.task(rows) for rows in tasks))


def held(root: Path | str, topic: str = "orders", schema: pyarrow.Schema = SCHEMA) -> list[Row]:
    """All that a reader finds, checked for the promises that hold of every read."""
    found = Archive(str(root))
    rows: list[Row] = []
    for partition, (first, end) in sorted(found.ranges(topic).items()):
        offsets = []
        for part in found.slices(topic, partition, first, end):
            for batch in Archive.read(pickle.loads(pickle.dumps(part)), schema):
                assert batch.schema.equals(schema)
                assert batch.num_rows
                rows += batch.to_pylist(maps_as_pydicts="strict")
                offsets += batch["offset"].to_pylist()
        assert offsets == sorted(set(offsets))
    return rows


def data_files(root: Path) -> list[str]:
    return sorted(str(path) for path in (root / "data").rglob("*.parquet"))


# Rows to files and back


def test_every_kind_of_row_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [
        row(3, key=b"k", headers={"Trace": "1", "Other": "ü"}),
        row(4, value=None, key=b"gone"),
        row(5, value=b"", key=b""),
        row(9, subject="orders.eu", headers={}),
        row(1_000_000, value=b"\x00\xff"),
    ]
    Query(tmp_path).batch(0, rows)

    assert held(tmp_path) == rows
    assert Archive(str(tmp_path)).ranges("orders") == {0: (3, 1_000_001)}
    assert Archive(str(tmp_path)).ranges("other") == {}
    assert Archive(str(tmp_path)).topics() == ["orders"]


def test_files_lie_by_topic_and_hour_and_other_programs_read_them(tmp_path: Path) -> None:
    rows = [row(n, at_us=START_US + n * HOUR_US // 2) for n in range(4)]
    Query(tmp_path).batch(0, rows, [row(0, topic="a/b ü", partition=2)])

    files = Archive(str(tmp_path)).files()

    hours = [datetime.datetime.fromtimestamp((START_US + n * HOUR_US) // 1_000_000, datetime.UTC) for n in range(2)]
    topics = ["orders", "orders", urllib.parse.quote("a/b ü", safe="")]
    assert [str(Path(path).parent.relative_to(tmp_path)) for path in files] == [
        f"data/topic={topic}/day={hour:%Y-%m-%d}/hour={hour:%H}"
        for topic, hour in zip(topics, [*hours, hours[0]], strict=True)
    ]
    assert files == [str(Path(path)) for path in data_files(tmp_path)][1:] + data_files(tmp_path)[:1]
    table = pyarrow.dataset.dataset(files).to_table().sort_by([("topic", "descending"), ("offset", "ascending")])
    assert table.select(SCHEMA.names).to_pylist(maps_as_pydicts="strict") == [*rows, row(0, topic="a/b ü", partition=2)]


def test_a_day_is_one_file(tmp_path: Path) -> None:
    day = START_US // (24 * HOUR_US) * 24 * HOUR_US
    rows = [row(n, at_us=day + n * HOUR_US) for n in range(24)]
    Query(tmp_path, archivePartition="day").batch(0, rows)

    (path,) = Archive(str(tmp_path)).files()

    assert Path(path).parent.name.startswith("day=")
    assert held(tmp_path) == rows


def test_a_topic_with_a_long_name_has_a_place(tmp_path: Path) -> None:
    names = ["ü" * 300 + end for end in "ab"]
    Query(tmp_path).batch(0, *([row(0, topic=name)] for name in names))

    assert [held(tmp_path, name) for name in names] == [[row(0, topic=name)] for name in names]


def test_rows_in_any_order_over_any_tasks_come_back_in_order(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    rows = [row(n, partition=n % 3, at_us=START_US + chance.randrange(4) * HOUR_US) for n in range(600)]
    shuffled = chance.sample(rows, len(rows))
    query = Query(tmp_path)
    query.commit(0, query.task(shuffled[:100], shuffled[100:250]), query.task(shuffled[250:]), query.task())

    assert sorted(held(tmp_path), key=lambda each: each["offset"]) == rows


def test_rows_of_one_hour_in_another_order_are_sorted(tmp_path: Path) -> None:
    Query(tmp_path).batch(0, [row(n) for n in (3, 1, 2, 0)])

    assert held(tmp_path) == [row(n) for n in range(4)]
    assert len(Archive(str(tmp_path)).files()) == 1


def test_timestamps_that_go_back_are_merged_with_little_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "READ_ROWS", 7)
    monkeypatch.setattr(parquet, "GATHERED_ROWS", 1)
    rows = [row(n, at_us=START_US + (n // 50 + n % 2) * HOUR_US) for n in range(400)]
    Query(tmp_path).batch(0, rows)
    archived = Archive(str(tmp_path))
    (part,) = archived.slices("orders", 0, 0, 400)

    batches = [batch.to_pylist(maps_as_pydicts="strict") for batch in Archive.read(part, SCHEMA)]

    assert len(part.files) == 9
    assert [each for batch in batches for each in batch] == rows
    assert max(len(batch) for batch in batches) <= 7 * 3


def test_small_files_are_read_as_large_batches(tmp_path: Path) -> None:
    query = Query(tmp_path)
    for number in range(5):
        query.batch(number, [row(n) for n in range(number * 10, number * 10 + 10)])
    (part,) = Archive(str(tmp_path)).slices("orders", 0, 0, 50)

    (batch,) = Archive.read(part, SCHEMA)

    assert batch["offset"].to_pylist() == list(range(50))


def test_only_the_row_groups_and_columns_that_are_wanted_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 100)
    Query(tmp_path).batch(0, *[[row(n) for n in range(1000)]])
    asked: list[Any] = []

    class Watched(pyarrow.parquet.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            asked.append((kwargs["row_groups"], kwargs["columns"]))
            return super().iter_batches(*args, **kwargs)  # type: ignore[no-any-return]

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", Watched)
    (part,) = Archive(str(tmp_path)).slices("orders", 0, 250, 420)
    schema = pyarrow.schema([(name, TYPES[name]) for name in ("value", "partition")])

    rows = [each for batch in Archive.read(part, schema) for each in batch.to_pylist()]

    assert rows == [{"value": b"v%d" % n, "partition": 0} for n in range(250, 420)]
    assert asked == [([2, 3, 4], ["value", "offset"])]


def test_no_columns_at_all_are_so_many_rows(tmp_path: Path) -> None:
    Query(tmp_path).batch(0, [row(n) for n in range(9)])
    (part,) = Archive(str(tmp_path)).slices("orders", 0, 2, 7)

    assert sum(batch.num_rows for batch in Archive.read(part, pyarrow.schema([("topic", TYPES["topic"])]))) == 5


def test_many_hours_are_written_with_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "FILES_OPEN", 3)
    monkeypatch.setattr(parquet, "WAITING_BYTES", 500)
    monkeypatch.setattr(parquet, "GROUP_ROWS", 10)
    rows = [row(n, at_us=START_US + (n * 7 % 12) * HOUR_US) for n in range(300)]
    query = Query(tmp_path)
    query.commit(0, query.task(*(rows[n : n + 30] for n in range(0, 300, 30))))

    assert held(tmp_path) == rows


@settings(deadline=None, max_examples=40)
@given(
    offsets=st.lists(st.integers(0, 60), unique=True, min_size=1),
    hours=st.lists(st.integers(0, 3), min_size=61, max_size=61),
    cuts=st.lists(st.integers(0, 61), max_size=3),
    asked=st.tuples(st.integers(0, 61), st.integers(0, 61)),
    slice_rows=st.integers(1, 30),
)
def test_any_range_is_what_lies_in_it(
    tmp_path_factory: pytest.TempPathFactory,
    offsets: list[int],
    hours: list[int],
    cuts: list[int],
    asked: tuple[int, int],
    slice_rows: int,
) -> None:
    """Holes, hours that interleave, several commits, several slices: against a filter over the rows."""
    root = tmp_path_factory.mktemp("archive")
    rows = [row(n, at_us=START_US + hours[n] * HOUR_US) for n in sorted(offsets)]
    query, edges = Query(root), [0, *sorted(cuts), 61]
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        query.batch(number, [each for each in rows if low <= each["offset"] < high])
    start, end = min(asked), max(asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive, "SLICE_ROWS", slice_rows)
        parts = Archive(str(root)).slices("orders", 0, start, end)

    found = [each for part in parts for batch in Archive.read(part, SCHEMA) for each in batch.to_pylist()]
    assert [each["offset"] for each in found] == [n for n in sorted(offsets) if start <= n < end]
    assert all(first.end == second.start for first, second in itertools.pairwise(parts))


def test_slices_begin_where_they_are_asked_to_however_files_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "SLICE_ROWS", 1)
    Query(tmp_path).batch(0, [row(n, at_us=START_US + n % 3 * HOUR_US) for n in range(12)])

    parts = Archive(str(tmp_path)).slices("orders", 0, 5, 9)

    found = [each for part in parts for batch in Archive.read(part, SCHEMA) for each in batch["offset"].to_pylist()]
    assert found == [5, 6, 7, 8]


# Exactly once


def test_a_repeated_batch_adds_nothing_and_leaves_no_files(tmp_path: Path) -> None:
    query, rows = Query(tmp_path), [row(n) for n in range(10)]
    query.batch(0, rows[:5])
    query.batch(1, rows[5:])
    before = data_files(tmp_path)

    query.batch(1, rows[5:])

    assert held(tmp_path) == rows
    assert data_files(tmp_path) == before == sorted(Archive(str(tmp_path)).files())


def test_the_same_commit_twice_does_not_remove_its_own_files(tmp_path: Path) -> None:
    query, rows = Query(tmp_path), [row(n) for n in range(10)]
    message = query.task(rows)
    query.commit(0, message)

    query.commit(0, message)
    query.writer().abort([message, None], 0)

    assert held(tmp_path) == rows


def test_of_a_task_that_was_tried_twice_one_counts(tmp_path: Path) -> None:
    query, rows = Query(tmp_path), [row(n) for n in range(10)]
    lost = query.task(rows)
    query.commit(0, query.task(rows))

    assert held(tmp_path) == rows
    swept = Archive(str(tmp_path)).sweep(datetime.timedelta(0))
    assert swept == [str(tmp_path / file.path) for file in lost.files]
    assert held(tmp_path) == rows
    assert data_files(tmp_path) == Archive(str(tmp_path)).files()


def test_sweep_spares_what_may_still_be_committed(tmp_path: Path) -> None:
    query, rows = Query(tmp_path), [row(n) for n in range(10)]
    message = query.task(rows)

    assert Archive(str(tmp_path)).sweep(datetime.timedelta(hours=1)) == []
    query.commit(0, message)

    assert held(tmp_path) == rows


def test_a_task_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def batches() -> Iterator[pyarrow.RecordBatch]:
        yield arrow([row(n, at_us=START_US + n * HOUR_US) for n in range(3)])
        raise ArithmeticError("of the user's")

    with pytest.raises(ArithmeticError):
        archive_sink._write(Query(tmp_path).writer()._target, "q", batches())

    assert data_files(tmp_path) == []


def test_abort_removes_what_the_tasks_wrote(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.batch(0, [row(0)])
    query.writer().abort([query.task([row(1)]), None], 1)

    assert data_files(tmp_path) == Archive(str(tmp_path)).files()
    assert held(tmp_path) == [row(0)]


def test_an_empty_batch_is_no_entry(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.batch(0, [], [])
    query.commit(1)

    assert [name for name in os.listdir(tmp_path / "_manifest") if name.endswith(".json")] == []
    assert held(tmp_path) == []


def test_another_query_must_go_on_where_the_archive_ends(tmp_path: Path) -> None:
    Query(tmp_path, "first").batch(0, [row(n) for n in range(5)])
    second = Query(tmp_path, "second")

    with pytest.raises(ValueError, match=r'continue with startingOffsets \{"orders":\{"0":5\}\}'):
        second.batch(0, [row(n) for n in range(8)])
    with pytest.raises(ValueError, match="archiveGaps=true"):
        second.batch(0, [row(7)])
    second.batch(0, [row(5)])
    Query(tmp_path, "third", archiveGaps="true").batch(0, [row(7)])

    assert held(tmp_path) == [row(n) for n in (0, 1, 2, 3, 4, 5, 7)]


def test_of_two_that_commit_at_once_one_is_refused(tmp_path: Path) -> None:
    queries = [Query(tmp_path, name) for name in ("a", "b", "c")]
    messages = [query.task([row(n) for n in range(10)]) for query in queries]
    together, refused = threading.Barrier(3), []

    def commit(query: Query, message: Any) -> None:
        together.wait()
        try:
            query.commit(0, message)
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=commit, args=each) for each in zip(queries, messages, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(refused) == 2
    assert held(tmp_path) == [row(n) for n in range(10)]


def test_a_file_that_the_driver_does_not_see_is_not_committed(tmp_path: Path) -> None:
    query = Query(tmp_path)
    message = query.task([row(0)])
    (tmp_path / message.files[0].path).unlink()

    with pytest.raises(BadDirectory, match="driver and executors must share the directory"):
        query.commit(0, message)


def test_an_executor_without_the_directory_says_so(tmp_path: Path) -> None:
    query = Query(tmp_path / "there")
    target = query.writer()._target
    shutil.rmtree(tmp_path / "there")

    with pytest.raises(BadDirectory, match="driver and executors must share the directory"):
        archive_sink._write(target, "q", iter([arrow([row(0)])]))


# What is refused


def test_a_row_without_a_place_is_refused(tmp_path: Path) -> None:
    for name in ("topic", "partition", "offset", "timestamp"):
        with pytest.raises(ValueError, match=f"column {name} is null in 1 rows"):
            Query(tmp_path).task([row(0) | {name: None}])


def test_an_offset_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an offset of orders partition 0 is repeated"):
        Query(tmp_path).task([row(4), row(5), row(4)])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("hdfs:/archive", "use a directory, or s3://BUCKET/PATH"),
        (" ", "archive is empty"),
    ],
)
def test_an_address_is_refused(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        archive_sink.stream_writer({"archive": given}, spark_schema())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"archivepartition": "week"}, "archivePartition is 'week': it must be hour or day"),
        ({"archiveformat": "orc"}, "archiveFormat is 'orc': it must be parquet or delta"),
        ({"archivepartitions": "day"}, "unknown option 'archivepartitions': did you mean 'archivePartition'?"),
        ({"txnid": "x"}, "unknown option 'txnid'"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, more: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        archive_sink.stream_writer({"archive": str(tmp_path)} | more, spark_schema())


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (spark_schema(list(TYPES)[:5]), "an archive needs the column value"),
        (spark_schema(list(TYPES)[1:]), "an archive needs the column topic"),
        (spark_schema(price=types.DoubleType()), "an archive has no column price"),
        (spark_schema(value=types.StringType()), "column value is string, but an archive needs binary: cast it"),
    ],
)
def test_a_wrong_column_is_named(tmp_path: Path, schema: types.StructType, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        archive_sink.stream_writer({"archive": str(tmp_path)}, schema)


def test_what_is_no_archive_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="it is a file, not a directory"):
        Query(tmp_path / "file").writer()
    with pytest.raises(ValueError, match="has other files and is not an archive"):
        Query(tmp_path).writer()
    with pytest.raises(ValueError, match="is not an archive: write one"):
        Archive(str(tmp_path))
    with pytest.raises(ValueError, match="is not an archive: write one"):
        Archive(str(tmp_path / "nothing"))
    assert os.listdir(tmp_path) == ["file"]


def test_an_archive_is_only_added_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.mode\('append'\)"):
        archive_sink.writer({"archive": str(tmp_path)}, spark_schema(), True)
    with pytest.raises(ValueError, match="txnVersion needs txnId"):
        archive_sink.writer({"archive": str(tmp_path), "txnversion": "1"}, spark_schema(), False)


def test_a_column_that_was_not_archived_is_named(tmp_path: Path) -> None:
    names = ("topic", "partition", "offset", "timestamp", "value")
    writer: Any = archive_sink.stream_writer({"archive": str(tmp_path)}, spark_schema(names))
    writer.commit([archive_sink._write(writer._target, "q", iter([arrow([row(0)], names)]))], 0)

    assert held(tmp_path, schema=pyarrow.schema([("offset", TYPES["offset"])])) == [{"offset": 0}]
    with pytest.raises(ValueError, match="the archive was written without key, subject, headers"):
        held(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    Query(tmp_path).batch(0, [row(n, value=os.urandom(100)) for n in range(100)])
    (path,) = Archive(str(tmp_path)).files()
    content = Path(path).read_bytes()

    Path(path).write_bytes(content[:-1])
    with pytest.raises(ReadFailed, match=path):
        held(tmp_path)
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    Path(path).write_bytes(damaged)
    with pytest.raises(ReadFailed, match=path):
        held(tmp_path)
    Path(path).unlink()
    with pytest.raises(BadDirectory, match=f"{path} of the archive is missing"):
        held(tmp_path)


# A Delta table


def test_a_delta_table_has_each_batch_once(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    query = Query(tmp_path, archiveFormat="delta")
    rows = [row(n, key=b"k", headers={"A": str(n)}, at_us=START_US + n * HOUR_US // 3 + 7) for n in range(9)]
    odd = row(0, topic="a/b %ü", value=None)
    query.batch(0, rows[:5], [odd])
    query.batch(1, rows[5:])
    version = deltalake.DeltaTable(tmp_path).version()

    query.batch(1, rows[5:])

    assert deltalake.DeltaTable(tmp_path).version() == version
    assert held(tmp_path) == rows
    assert held(tmp_path, "a/b %ü") == [odd]
    assert data_files(tmp_path) == sorted(Archive(str(tmp_path)).files())
    table = deltalake.DeltaTable(tmp_path).to_pyarrow_table(filters=[("topic", "=", "orders")]).sort_by("offset")
    assert table.select(SCHEMA.names).to_pylist(maps_as_pydicts="strict") == rows
    assert table["hour"].to_pylist() == [each["timestamp"].hour for each in rows]
    assert deltalake.DeltaTable(tmp_path).to_pyarrow_table().num_rows == 10


def test_a_delta_table_refuses_what_a_manifest_refuses(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    Query(tmp_path, "first", archiveFormat="delta").batch(0, [row(n) for n in range(5)])
    second = Query(tmp_path, "second", archiveFormat="delta")

    with pytest.raises(ValueError, match=r'continue with startingOffsets \{"orders":\{"0":5\}\}'):
        second.batch(0, [row(4)])
    with pytest.raises(ValueError, match="archiveGaps=true"):
        second.batch(0, [row(6)])
    with pytest.raises(ValueError, match="now has other rows"):
        Query(tmp_path, "first", archiveFormat="delta").batch(0, [row(5)])
    with pytest.raises(ValueError, match="write with archiveFormat=delta"):
        Query(tmp_path, "second").writer()
    with pytest.raises(ValueError, match="partitioned by topic, day, hour, but this write"):
        Query(tmp_path, "second", archiveFormat="delta", archivePartition="day").writer()
    with pytest.raises(ValueError, match="vacuum"):
        Archive(str(tmp_path)).sweep()
    assert held(tmp_path) == [row(n) for n in range(5)]


def test_of_two_writers_of_a_delta_table_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = pytest.importorskip("penstock.spark.delta")
    slow, fast = (Query(tmp_path, name, archiveFormat="delta") for name in ("slow", "fast"))
    fast.batch(0, [row(0)])
    late, add = slow.task([row(1)]), delta.DeltaManifest._add

    def overtaken(self: Any, table: Any, entry: Any) -> None:
        monkeypatch.setattr(delta.DeltaManifest, "_add", add)
        fast.batch(1, [row(1)])
        add(self, table, entry)

    monkeypatch.setattr(delta.DeltaManifest, "_add", overtaken)
    with pytest.raises(BadDirectory, match="another writer committed first"):
        slow.commit(0, late)

    assert held(tmp_path) == [row(0), row(1)]


# Stopped at every step


class Stopped(BaseException):
    """As a process that is killed here."""


def test_stopped_at_any_step_of_a_batch_the_archive_has_each_row_once_after_the_restart(tmp_path: Path) -> None:
    """The steps: every file made, written, synced, linked and removed, by the tasks and by the driver."""
    rows = [row(n, at_us=START_US + n * HOUR_US // 4) for n in range(20)]
    step, finished, found = 0, False, set()
    while not finished:
        step += 1
        root = tmp_path / str(step)
        query = Query(root)
        query.batch(0, rows[:5])
        with pytest.MonkeyPatch.context() as patch:
            calls = itertools.count(1)

            def stopping(real: Any, calls: Iterator[int] = calls, step: int = step) -> Any:
                def call(*args: Any, **kwargs: Any) -> Any:
                    if next(calls) >= step:
                        raise Stopped
                    return real(*args, **kwargs)

                return call

            for name in ("fsync", "link", "unlink", "mkdir"):
                patch.setattr(os, name, stopping(getattr(os, name)))
            # A killed process does not tidy up; but this one goes on.
            patch.setattr(
                parquet._WrittenFile, "abandon", lambda file: (file._writer.close(), file._file.stream.close())
            )
            try:
                query.batch(1, rows[5:8], rows[8:12])
                finished = True
            except Stopped:
                pass

        found.add(len(held(root)))
        query.batch(1, rows[5:8], rows[8:12])
        query.batch(2, rows[12:])
        assert held(root) == rows
        Archive(str(root)).sweep(datetime.timedelta(0))
        assert data_files(root) == sorted(Archive(str(root)).files())
        assert held(root) == rows
    assert found == {5, 12}


# Compaction


def small_batches(root: Path, count: int) -> list[Row]:
    """Two partitions and three hours, in many batches."""
    query, rows = Query(root), [row(n, partition=n % 2, at_us=START_US + n % 3 * HOUR_US) for n in range(count * 6)]
    for number in range(count):
        query.batch(number, rows[number * 6 : number * 6 + 6])
    return sorted(rows, key=lambda each: (each["partition"], each["offset"]))


def test_compaction_leaves_one_file_of_each_partition_and_hour(tmp_path: Path) -> None:
    rows = small_batches(tmp_path, 10)
    planned = [part for p in (0, 1) for part in Archive(str(tmp_path)).slices("orders", p, 0, 60)]
    assert len(Archive(str(tmp_path)).files()) == 60

    merged = list(Archive(str(tmp_path)).compact())

    files = Archive(str(tmp_path)).files()
    assert (len(merged), len(files)) == (6, 6)
    assert held(tmp_path) == rows
    pandas = pytest.importorskip("pandas")
    table = pandas.concat(pandas.read_parquet(path, columns=["partition", "offset"]) for path in files)
    assert (len(table), len(table.drop_duplicates()), table["offset"].sum()) == (60, 60, sum(range(60)))
    # A reader that planned before reads on, until the replaced files are swept.
    assert Archive(str(tmp_path)).sweep() == []
    read = [each for part in planned for batch in Archive.read(part, SCHEMA) for each in batch.to_pylist()]
    assert [each["offset"] for each in read] == [each["offset"] for each in rows]
    assert len(Archive(str(tmp_path)).sweep(datetime.timedelta(0))) == 60
    assert data_files(tmp_path) == sorted(files)
    assert held(tmp_path) == rows
    assert list(Archive(str(tmp_path)).compact()) == []


def test_compaction_leaves_large_files_alone_and_a_query_goes_on(tmp_path: Path) -> None:
    query, rows = Query(tmp_path), [row(n) for n in range(9)]
    query.batch(0, rows[:3])
    size = Path(Archive(str(tmp_path)).files()[0]).stat().st_size
    query.batch(1, rows[3:6])

    assert list(Archive(str(tmp_path)).compact(size)) == []
    assert len(list(Archive(str(tmp_path)).compact(3 * size))) == 1
    query.batch(1, rows[3:6])
    query.batch(2, rows[6:])

    assert held(tmp_path) == rows
    assert len(Archive(str(tmp_path)).files()) == 2


def test_compactions_beside_a_writer_and_readers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    Query(tmp_path).batch(0, [row(0)])
    failed: list[BaseException] = []
    is_done = threading.Event()

    def compacting() -> None:
        try:
            while not is_done.is_set():
                list(Archive(str(tmp_path)).compact())
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=compacting) for _ in range(2)]
    for thread in threads:
        thread.start()
    query = Query(tmp_path)
    try:
        for number in range(1, 40):
            query.batch(number, [row(number)])
            assert held(tmp_path) == [row(n) for n in range(number + 1)]
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    assert not failed
    list(Archive(str(tmp_path)).compact())
    assert len(Archive(str(tmp_path)).files()) == 1
    Archive(str(tmp_path)).sweep(datetime.timedelta(0))
    assert held(tmp_path) == [row(n) for n in range(40)]


def test_a_delta_table_is_not_compacted(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    Query(tmp_path, archiveFormat="delta").batch(0, [row(0)])

    with pytest.raises(ValueError, match="only archives in the format parquet"):
        list(Archive(str(tmp_path)).compact())


# With the source: first the archive, then the log


@pytest.fixture(scope="module")
def broker() -> Iterator[penstock.Broker]:
    """Its retention is quick."""
    with penstock.Broker(
        listen="127.0.0.1:0", settings={"storage.upkeep_ms": 10, "topic.durability": "flush"}
    ) as found:
        yield found
        # The clients of this process would look for their broker for ever.
        connection.close()


_topics = (f"history{number}" for number in itertools.count())


def topic_of(broker: penstock.Broker, count: int) -> str:
    """One partition, several segments."""
    name = next(_topics)
    broker.create_topic(name, partitions=1, segment_bytes=4096)
    for first in range(0, count, 50):
        publish(broker, name, range(first, min(first + 50, count)))
    return name


def publish(broker: penstock.Broker, topic: str, numbers: Sequence[int]) -> None:
    broker.publish_many(
        penstock.Outgoing(
            topic,
            None if number % 7 == 3 else b"v%d" % number,
            key=str(number % 5),
            headers={"N": str(number)},
        )
        for number in numbers
    )


def drop_head(broker: penstock.Broker, topic: str) -> int:
    """Retention drops all but the last segment; the first offset that is left."""
    found = broker.alter_topic(topic, retain_bytes=1)
    until = time.monotonic() + 30
    # A segment is full when the next batch does not fit, so two have more bytes than one may have.
    while broker.topic(topic).positions[0].bytes > found.policy["segment_bytes"]:
        assert time.monotonic() < until, "retention does not come about"
        time.sleep(0.005)
    broker.alter_topic(topic, retain_bytes=1 << 40)
    return int(broker.topic(topic).positions[0].start)


def given_options(broker: penstock.Broker, topic: str, more: dict[str, Any], *, is_stream: bool) -> options.ReadOptions:
    assert broker.address is not None
    texts = {"servers": broker.address, "subscribe": topic, "includeheaders": "true"}
    return options.read(texts | {name.lower(): str(value) for name, value in more.items()}, is_stream=is_stream)


def batches_of(broker: penstock.Broker, topic: str, **more: Any) -> list[pyarrow.RecordBatch]:
    reader = source.BatchReader(given_options(broker, topic, more, is_stream=False), spark_schema())
    return [batch for part in reader.partitions() for batch in reader.read(pickle.loads(pickle.dumps(part)))]


def rows_of(broker: penstock.Broker, topic: str, **more: Any) -> list[Row]:
    return [each for batch in batches_of(broker, topic, **more) for each in batch.to_pylist(maps_as_pydicts="strict")]


def archived(broker: penstock.Broker, topic: str, root: Path, number: int = 0, **more: Any) -> None:
    target = Query(root).writer()._target
    message = archive_sink._write(target, "q", iter(batches_of(broker, topic, **more)))
    Query(root).commit(number, message)


def test_history_comes_from_the_archive_and_the_rest_from_the_log(broker: penstock.Broker, tmp_path: Path) -> None:
    topic = topic_of(broker, 400)
    archived(broker, topic, tmp_path)
    expected = rows_of(broker, topic)
    first = drop_head(broker, topic)
    publish(broker, topic, range(400, 450))

    found = rows_of(broker, topic, archive=tmp_path)

    assert 0 < first < 400
    assert [each["offset"] for each in found] == list(range(450))
    assert found == expected + rows_of(broker, topic, startingOffsets=f'{{"{topic}": {{"0": 400}}}}')
    for start, end in ((0, 450), (10, 20), (first - 5, first + 5), (399, 401), (400, 450), (7, 7)):
        edges = {"startingOffsets": f'{{"{topic}":{{"0":{start}}}}}', "endingOffsets": f'{{"{topic}":{{"0":{end}}}}}'}
        assert rows_of(broker, topic, archive=tmp_path, **edges) == found[start:end]


def test_a_stream_goes_from_the_archive_into_the_log(broker: penstock.Broker, tmp_path: Path) -> None:
    topic = topic_of(broker, 400)
    archived(broker, topic, tmp_path)
    drop_head(broker, topic)
    publish(broker, topic, range(400, 450))
    more = {"archive": tmp_path, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 33}
    reader = stream.StreamReader(given_options(broker, topic, more, is_stream=True), spark_schema())
    reader.prepareForTriggerAvailableNow()

    start, offsets = reader.latestOffset({}, reader.getDefaultReadLimit())["begin"], []
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        for part in reader.partitions(start, end):
            for batch in reader.read(part):
                offsets += batch["offset"].to_pylist()
        start = end

    assert offsets == list(range(450))


def test_an_archive_that_begins_behind_the_log_hides_nothing_of_it(broker: penstock.Broker, tmp_path: Path) -> None:
    topic = topic_of(broker, 100)
    archived(broker, topic, tmp_path, startingOffsets=f'{{"{topic}": {{"0": 40}}}}')

    found = rows_of(broker, topic, archive=tmp_path)

    assert sorted(each["offset"] for each in found) == list(range(100))


def test_what_neither_archive_nor_log_has_is_told(broker: penstock.Broker, tmp_path: Path) -> None:
    topic = topic_of(broker, 400)
    archived(broker, topic, tmp_path, endingOffsets=f'{{"{topic}": {{"0": 50}}}}')
    first = drop_head(broker, topic)

    with pytest.raises(RuntimeError, match=f"50 to {first - 1}"):
        rows_of(broker, topic, archive=tmp_path)
    found = rows_of(broker, topic, archive=tmp_path, failOnDataLoss="false")

    assert [each["offset"] for each in found] == [*range(50), *range(first, 400)]


# Through Spark


def run(spark: SparkSession, broker: penstock.Broker, topic: str, root: Path, **more: str) -> None:
    """All that there is by now."""
    assert broker.address is not None
    given = {"servers": broker.address, "subscribe": topic, "includeHeaders": "true", "startingOffsets": "earliest"}
    query = (
        spark.readStream.format("penstock")
        .options(**given)
        .load()
        .writeStream.format("penstock")
        .options(archive=str(root), checkpointLocation=str(root.with_name("checkpoint")), **more)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()


def forget_last_commit(root: Path) -> None:
    """As if the driver had been killed between the commit of the archive and Spark's own."""
    commits = root.with_name("checkpoint") / "commits"
    last = max((path for path in commits.glob("[0-9]*")), key=lambda path: int(path.name))
    for path in (last, last.with_name(f".{last.name}.crc")):
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_query_that_repeats_a_batch_archives_each_row_once(
    spark: SparkSession, broker: penstock.Broker, tmp_path: Path, format: str
) -> None:
    topic, root = topic_of(broker, 50), tmp_path / "archive"
    run(spark, broker, topic, root, archiveFormat=format)
    files = data_files(root)

    forget_last_commit(root)
    publish(broker, topic, range(50, 80))
    run(spark, broker, topic, root, archiveFormat=format)

    assert set(files) < set(data_files(root)) == set(Archive(str(root)).files())
    assert held(root, topic) == rows_of(broker, topic)
    assert Archive(str(root)).ranges(topic) == {0: (0, 80)}


def test_a_batch_write_with_a_txn_id_is_there_once_and_reads_back(
    spark: SparkSession, broker: penstock.Broker, tmp_path: Path
) -> None:
    topic, root = topic_of(broker, 30), tmp_path / "archive"
    given = {"servers": str(broker.address), "subscribe": topic}
    log = spark.read.format("penstock").options(**given).load()

    for _ in range(2):
        log.write.format("penstock").option("archive", str(root)).option("txnId", "once").mode("append").save()
    with pytest.raises(Exception, match="continue with startingOffsets"):
        log.write.format("penstock").option("archive", str(root)).mode("append").save()

    assert data_files(root) == Archive(str(root)).files()
    history = spark.read.format("penstock").options(**given).option("archive", str(root)).load()
    assert sorted(map(tuple, history.collect())) == sorted(map(tuple, log.collect()))
    with pytest.raises(Exception, match="an archive needs the column topic"):
        log.drop("topic").write.format("penstock").option("archive", str(root)).mode("append").save()
