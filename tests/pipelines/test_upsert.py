"""Pipelines of kind upsert: a Delta table with the latest row of each key, compared with pandas."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest

pytest.importorskip("pyspark")

from penstock import Outgoing
from penstock.errors import BadConfig, PenstockError
from penstock.pipelines import execution, queries, resumption, sample, validation
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.state_directory import state_of
from tests.pipelines.conftest import Runner, forget_last_batch
from tests.support.server import clean_environment
from tests.support.slow_workers import patiently

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

pandas = pytest.importorskip("pandas")
deltalake = pytest.importorskip("deltalake")

# Kills the process when the table has the second batch with rows, and Spark does not know.
_KILLED = """
import os, signal, sys
from penstock.pipelines import execution
from penstock.pipelines.pipeline_file import load
from penstock.spark.delta_table import UpsertTable
merge, done = UpsertTable.merge, []
def merge_and_die(*arguments, **options):
    merge(*arguments, **options)
    done.append(1)
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
UpsertTable.merge = merge_and_die
execution.run(load(sys.argv[1]), master="local[2]")
"""


def pipeline(customers: str, more: str = "") -> str:
    return f"""
name = "table-{customers}"
kind = "upsert"
[source]
topic = "{customers}"
schema = "id int, name string, at timestamp"
{more}
[upsert]
key = "id"
[sink]
delta = "table"
"""


# The key, and the row or None.
Change = tuple[int, dict[str, Any] | None]


def changes(count: int, seed: int) -> list[Change]:
    chance = random.Random(seed)
    found: list[Change] = []
    for number in range(count):
        key = chance.randrange(20)
        row = {"id": key, "name": f"n{number}", "at": f"2030-01-31T12:00:{number % 60:02}Z"}
        found.append((key, None if chance.random() < 0.3 else row))
    return found


def publish(broker: SparkBroker, topic: str, made: list[Change]) -> None:
    for key, row in made:
        broker.publish(topic, None if row is None else json.dumps(row).encode(), key=str(key))


def expected(made: list[Change]) -> dict[int, str]:
    """The names by key, as pandas has them."""
    table = pandas.DataFrame([{"key": key, "name": row and row["name"]} for key, row in made])
    last = table.drop_duplicates("key", keep="last").dropna()
    return dict(zip(last["key"], last["name"], strict=True))


def stored(directory: Path) -> dict[int, str]:
    table = deltalake.DeltaTable(directory / "table").to_pandas()
    assert table["id"].is_unique
    assert list(table.columns) == ["id", "name", "at"]
    return dict(zip(table["id"], table["name"], strict=True))


def test_a_table_has_the_latest_row_of_each_key_and_a_repeated_batch_changes_nothing(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    made = changes(120, seed)
    customers = topic("customers", 2)
    text = pipeline(customers, "options = { maxOffsetsPerTrigger = 40 }")
    publish(spark_broker, customers, made[:80])
    spark_broker.publish(customers, b"oops", key="1")
    spark_broker.publish(customers, None, key="one")
    runner.run(text)
    assert stored(runner.directory) == expected(made[:80])
    version = deltalake.DeltaTable(runner.directory / "table").version()

    forget_last_batch(runner.directory / "checkpoint")
    runner.run(text)
    assert deltalake.DeltaTable(runner.directory / "table").version() == version
    publish(spark_broker, customers, made[80:])
    runner.run(text)

    assert stored(runner.directory) == expected(made)
    assert sorted(each.reason for each in spark_broker.dead_letters(customers)) == [
        "it has no value, and its key is not of type int",
        "it is not JSON",
    ]
    assert "StreamingRelationV2" in queries.explain(runner.spark, runner.load(text))["rows"]


def test_kill_9_after_the_commit_of_the_table_changes_nothing(
    spark: SparkSession, spark_broker: SparkBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    made = changes(60, 9)
    customers = topic("customers")
    publish(spark_broker, customers, made)
    path = tmp_path / "pipeline.toml"
    path.write_text(
        pipeline(customers, f'servers = "{spark_broker.servers}"\noptions = {{ maxOffsetsPerTrigger = 20 }}')
    )

    command = [sys.executable, "-c", _KILLED, str(path)]
    killed = patiently(
        lambda _: subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    )
    offsets = max(int(each.name) for each in (state_of(load(path)).checkpoint / "rows/offsets").glob("[0-9]*"))
    commits = max(int(each.name) for each in (state_of(load(path)).checkpoint / "rows/commits").glob("[0-9]*"))
    half = stored(tmp_path)
    done = execution.run(load(path), spark=spark)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert offsets == commits + 1
    assert half == expected(made[:40])
    assert stored(tmp_path) == expected(made)
    # The repeated batch is not merged again.
    assert (done.rows, done.rows_out) == (40, len({key for key, _ in made[40:]}))
    history = deltalake.DeltaTable(tmp_path / "table").history()
    assert [each["operation"] for each in history] == ["MERGE", "MERGE", "MERGE", "CREATE TABLE"]


def test_a_state_that_is_older_than_the_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline("customers"))
    made = load(path)
    query = state_of(made).checkpoint / "rows"
    (query / "offsets").mkdir(parents=True)
    (query / "offsets/3").touch()
    (query / "metadata").write_text('{"id": "q"}')
    deltalake.write_deltalake(
        tmp_path / "table",
        pyarrow.table({"id": [1]}),
        commit_properties=deltalake.CommitProperties(app_transactions=[deltalake.Transaction("spark:q", 4)]),
    )

    with pytest.raises(
        PenstockError, match="table holds batches up to 4, but the state of pipeline table-customers ends"
    ):
        resumption._check_sink(made, 3, state_of(made))


def test_a_sample_shows_the_changes_of_the_table(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline("customers"))
    rows: list[sample.Sample] = [
        {"id": 1, "name": "a"},
        {"id": 2, "name": "b"},
        Outgoing("customers", None, key="2"),
        {"id": 1, "name": "c"},
        {"name": "no id"},
        Outgoing("customers", None, key="x"),
        Outgoing("customers", None),
    ]

    done = sample.run(spark, load(path), rows)

    assert sorted((row.key, row.value and row.value["name"]) for row in done.rows) == [("1", "c"), ("2", None)]
    assert [(letter.offset, letter.reason) for letter in done.dead_letters] == [
        (4, "field id is missing"),
        (5, "it has no value, and its key is not of type int"),
        (6, "it has neither a value nor a key"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            'key = "id"',
            'key = "ident"',
            "7: [upsert] key names 'ident', which [source] schema does not have: it has id",
        ),
        ("name string", "_deleted string", "6: [upsert]: two columns are named _deleted: rename one of them"),
        ("name string", "name string, more int", "9: [sink] delta: the table "),
        ("at timestamp", "at interval day", "9: [sink] delta: a Delta table cannot have these columns: "),
    ],
)
def test_what_does_not_fit_the_table_is_told_with_its_line(
    spark: SparkSession, tmp_path: Path, old: str, new: str, problem: str
) -> None:
    at = pyarrow.array([], pyarrow.timestamp("us", "UTC"))
    table = pyarrow.table(
        {"id": pyarrow.array([], pyarrow.int32()), "name": pyarrow.array([], pyarrow.string()), "at": at}
    )
    deltalake.write_deltalake(tmp_path / "table", table)
    path = tmp_path / "pipeline.toml"
    text = "\n".join(line for line in pipeline("customers").splitlines() if line)
    path.write_text(text)
    validation.check(spark, load(path))
    assert old in text
    path.write_text(text.replace(old, new))

    with pytest.raises(BadConfig) as error:
        validation.check(spark, load(path))

    [told] = error.value.problems
    assert told.startswith(f"{path}:{problem}"), told
