"""Pipelines of kind bridge: Parquet files of other programs to a topic and back, compared with pandas and pyarrow."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.dataset
import pytest
from pyarrow import parquet

pytest.importorskip("pyspark")

from penstock.errors import BadConfig, PenstockError
from penstock.pipelines import execution, resumption, validation
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.state_directory import state_of
from tests.pipelines.conftest import Runner, forget_last_batch, letters, publish, stored, values
from tests.support.server import clean_environment
from tests.support.slow_workers import patiently

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

pandas = pytest.importorskip("pandas")

# Kills the process after the second batch with rows: it is stored, and Spark does not know.
_KILLED = """
import os, signal, sys
from pyspark.sql.readwriter import DataFrameWriter
from penstock.pipelines import execution
from penstock.pipelines.pipeline_file import load
from penstock.spark.parquet_directory import ParquetDirectory
done = []
def deadly(call):
    def call_and_die(*arguments, **options):
        call(*arguments, **options)
        done.append(1)
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return call_and_die
DataFrameWriter.save = deadly(DataFrameWriter.save)
ParquetDirectory.add = deadly(ParquetDirectory.add)
execution.run(load(sys.argv[1]), master="local[2]")
"""


def to_topic(topic: str, source: str = "", bridge: str = "") -> str:
    return f"""
name = "publish-{topic}"
kind = "bridge"
[source]
parquet = "in"
{source}
[bridge]
{bridge}
[sink]
topic = "{topic}"
key = "id"
"""


def to_files(topic: str, source: str = "", bridge: str = "") -> str:
    return f"""
name = "files-{topic}"
kind = "bridge"
[source]
topic = "{topic}"
{source}
[bridge]
{bridge}
[sink]
parquet = "out"
"""


def add(directory: Path, name: str, rows: list[dict[str, Any]], schema: pyarrow.Schema | None = None) -> None:
    """Add a file as other programs do: complete, with an old time."""
    (directory / "in").mkdir(exist_ok=True)
    aside = directory / "in" / f".{name}"
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), aside)
    os.utime(aside, (1_000_000_000, 1_000_000_000))
    aside.rename(directory / "in" / name)


def table_of(broker: SparkBroker, topic: str) -> Any:
    return pandas.DataFrame(values(broker, topic)).sort_values("id", ignore_index=True)


def test_each_file_is_published_once_whenever_it_comes(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    target = topic("shipments", 2)
    at = datetime(2030, 1, 31, 12, 0, 0, 123456, UTC)
    add(runner.directory, "a.parquet", [{"id": n, "weight": n / 4, "at": at, "tags": ["x", str(n)]} for n in range(50)])
    text = to_topic(target, "options = { maxFilesPerTrigger = 1 }")
    runner.run(text)
    os.utime(runner.directory / "in" / "a.parquet")
    schema = parquet.read_schema(runner.directory / "in" / "a.parquet")
    add(runner.directory, "b.parquet", [{"id": n, "at": at, "tags": []} for n in range(50, 80)], schema)
    (runner.directory / "in" / "_part.parquet").write_bytes(b"half of a fi")
    (runner.directory / "in" / "README").write_text("shipments")
    forget_last_batch(runner.directory / "checkpoint")
    runner.run(text)

    expected = pandas.concat(
        [parquet.read_table(runner.directory / "in" / name).to_pandas() for name in ("a.parquet", "b.parquet")],
        ignore_index=True,
    )
    found = table_of(spark_broker, target)
    assert list(found["id"]) == list(range(80))
    assert found["weight"].equals(expected["weight"])
    assert (pandas.to_datetime(found["at"]) == expected["at"]).all()
    assert list(found["tags"]) == [list(each) for each in expected["tags"]]
    assert {int(message.key or b"-1") for message in stored(spark_broker, target)} == set(range(80))


def test_a_file_with_more_columns_is_not_published_without_them(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    target = topic("shipments")
    add(runner.directory, "a.parquet", [{"id": 1}])
    query = None
    try:
        from penstock.pipelines import queries

        made = runner.load(to_topic(target))
        [query] = queries.start(
            runner.spark, made, str(runner.directory / "checkpoint"), {"processingTime": "100 milliseconds"}
        )
        query.processAllAvailable()
        add(runner.directory, "b.parquet", [{"id": 2, "weight": 0.5}])
        with pytest.raises(Exception, match=r"b.parquet has columns that the files had not .*: weight. Run the pipe"):
            query.processAllAvailable()
    finally:
        if query is not None:
            query.stop()
    runner.run(to_topic(target))

    assert sorted(values(spark_broker, target), key=lambda row: int(row["id"])) == [
        {"id": 1},
        {"id": 2, "weight": 0.5},
    ]


def test_a_column_may_be_the_value(runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]) -> None:
    target = topic("payloads")
    add(runner.directory, "a.parquet", [{"id": 1, "payload": b"\x00\xff"}, {"id": 2, "payload": None}])

    runner.run(to_topic(target, 'schema = "id long, payload binary"', 'value = "payload"'))

    found = [(message.key, message.value, message.deleted) for message in stored(spark_broker, target)]
    assert found == [(b"1", b"\x00\xff", False), (b"2", b"", True)]


def test_messages_are_files_that_any_reader_reads(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    source = topic("orders", 2)
    spark_broker.publish_many([(f"{source}.eu", b"%d" % n) for n in range(40)])
    spark_broker.publish(source, None, key="k", headers={"Trace": "1"})
    text = to_files(source, "options = { maxOffsetsPerTrigger = 10 }")
    runner.run(text)
    half = files(runner)
    forget_last_batch(runner.directory / "checkpoint")
    runner.run(text)
    assert files(runner) == half
    spark_broker.publish(source, b"last")
    runner.run(text)

    found = pyarrow.dataset.dataset(runner.directory / "out").to_table().to_pylist()
    expected = [
        (
            message.partition,
            message.offset,
            message.subject,
            message.key,
            None if message.deleted else message.value,
            list(message.headers.items()),
        )
        for message in stored(spark_broker, source)
    ]
    names = ("partition", "offset", "subject", "key", "value", "headers")
    rows = [tuple(row[name] for name in names) for row in found]
    assert sorted(rows, key=lambda row: row[:2]) == expected
    assert len(expected) == 42
    assert runner.spark.read.parquet(str(runner.directory / "out")).count() == 42


def files(runner: Runner) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (runner.directory / "out").iterdir()}


def test_fields_are_columns_and_what_does_not_match_is_a_dead_letter(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    source = topic("orders")
    made = [{"id": n, "amount": n / 8, "item": {"name": f"n{n}"}} for n in range(30)]
    publish(spark_broker, source, made)
    spark_broker.publish(source, b'{"id": "x"}')
    runner.run(to_files(source, 'schema = "id long, amount double, item struct<name: string>"', "flatten = true"))

    found = pyarrow.dataset.dataset(runner.directory / "out").to_table()
    assert found.schema.field("id").type == pyarrow.int64()
    assert found.schema.field("amount").type == pyarrow.float64()
    assert found.sort_by("id").to_pylist() == made
    assert letters(spark_broker, source) == {b'{"id": "x"}': "field id is not of type bigint"}


def test_kill_9_after_the_second_batch_stores_nothing_twice(
    spark: SparkSession, spark_broker: SparkBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    chance = random.Random(11)
    target = topic("shipments")
    rows = [{"id": n, "weight": chance.random()} for n in range(90)]
    for first in (0, 30, 60):
        add(tmp_path, f"{first}.parquet", rows[first : first + 30])
    path = tmp_path / "pipeline.toml"
    servers = f'servers = "{spark_broker.servers}"\n'
    path.write_text(to_topic(target, f"{servers}options = {{ maxFilesPerTrigger = 1 }}"))

    kill(path)
    assert len(values(spark_broker, target)) == 60
    done = execution.run(load(path), spark=spark)

    assert table_of(spark_broker, target).to_dict("records") == rows
    assert (done.state, done.rows_out) == ("done", 60)


@pytest.mark.soak
def test_kill_9_after_the_second_file_writes_nothing_twice(
    spark: SparkSession, spark_broker: SparkBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    source = topic("orders")
    publish(spark_broker, source, [{"id": n} for n in range(90)])
    path = tmp_path / "pipeline.toml"
    servers = f'servers = "{spark_broker.servers}"\n'
    path.write_text(to_files(source, f"{servers}options = {{ maxOffsetsPerTrigger = 30 }}"))

    kill(path)
    half = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    execution.run(load(path), spark=spark)

    assert half.num_rows == 60
    found = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    assert sorted(json.loads(value)["id"] for value in found["value"].to_pylist()) == list(range(90))


def kill(path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(path)]
    killed = patiently(
        lambda _: subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def test_files_that_the_state_does_not_know_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(to_files("orders"))
    made = load(path)
    query = state_of(made).checkpoint / "rows"
    (query / "offsets").mkdir(parents=True)
    (query / "offsets/3").touch()
    (query / "metadata").write_text('{"id": "0123abcd-0000"}')
    (tmp_path / "out").mkdir()
    for name in ("files-orders-0123abcd-000000003", "other-99999999-000000009", "files-orders-x-1"):
        (tmp_path / f"out/{name}.parquet").touch()
    resumption._check_sink(made, 3, state_of(made))

    with pytest.raises(PenstockError, match=r"-000000003.parquet, which the state .* does not kn"):
        resumption._check_sink(made, None)
    (tmp_path / "out/files-orders-0123abcd-000000004.parquet").touch()
    with pytest.raises(PenstockError, match=r"-000000004.parquet, which the state"):
        resumption._check_sink(made, 3, state_of(made))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (to_topic("a").replace('"in"', '"s3://b/in"'), r":5: \[source\] parquet is 's3://b/in': it must be a d"),
        (to_topic("a", 'start = "latest"'), r":6: \[source\] start is only for a topic as source"),
        (to_topic("a", 'topic = "b"'), r":5: \[source\] parquet contradicts topic"),
        (to_topic("a", "", "flatten = true"), r":8: \[bridge\] flatten is only for Parquet files as sink"),
        (to_topic("a").replace('topic = "a"\nkey = "id"', 'parquet = "out"'), r"\[sink\] parquet needs a topic to r"),
        (to_files("a", "", 'value = "v"'), r":8: \[bridge\] value is only for a topic as sink"),
        (to_files("a", 'schema = "id int"'), r":6: \[source\] schema is only used with flatten = true in \[bridge\]"),
        (to_files("a").replace('parquet = "out"', 'topic = "b"'), r"\[sink\] topic needs files to read: set parquet"),
        (to_files("a") + "options = { a = 1 }", r"\[sink\] options is not for these Parquet files"),
        (to_files("a").replace('"out"', '"s3://b/out"'), r"\[sink\] parquet is 's3://b/out': it must be a directory"),
        (to_files("a").replace('"bridge"', '"replay"').replace("[bridge]", "[replay]").replace('topic = "a"',
         'parquet = "in"'), r":5: \[source\] parquet is only for kind bridge: a pipeline of kind replay reads topics"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(text)

    with pytest.raises(BadConfig, match=problem):
        load(path)


@pytest.mark.parametrize(
    ("source", "bridge", "columns", "problem"),
    [
        ("", "", None, r":5: \[source\] parquet: there is no file \*.parquet in .*/in yet: name the columns in schema"),
        ("", "", ["_value"], r":5: \[source\] parquet: the files have a column _value, a name that is reserved"),
        ('schema = "id strin"', "", None, r":6: \[source\] schema: "),
        ("", 'value = "payload"', ["id"], r":8: \[bridge\] value: .*`payload`"),
        ("", "", ["weight"], r":11: \[sink\] key: .*`id`"),
    ],
)
def test_what_does_not_fit_the_files_is_told_with_its_line(
    spark: SparkSession, tmp_path: Path, source: str, bridge: str, columns: list[str] | None, problem: str
) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(to_topic("a", source, bridge))
    if columns is not None:
        add(tmp_path, "a.parquet", [dict.fromkeys(columns, 1)])

    with pytest.raises(BadConfig, match=problem):
        validation.check(spark, load(path))
