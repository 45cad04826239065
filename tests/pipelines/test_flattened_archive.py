"""Archives with the fields of JSON values as columns, compared with pandas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.dataset
import pytest

pytest.importorskip("pyspark")

from penstock.errors import BadConfig
from penstock.pipelines import validation
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.topic_schemas import with_schemas
from penstock.spark.archive import Archive
from tests.pipelines.conftest import Runner

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

pandas = pytest.importorskip("pandas")
deltalake = pytest.importorskip("deltalake")

COLUMNS = ["topic", "partition", "offset", "timestamp", "key", "value", "subject", "headers"]


def pipeline(orders: str, schema: str = "", sink: str = "", more: str = "flatten = true") -> str:
    return f"""
name = "archive-{orders}"
kind = "archive"
[source]
topic = "{orders}"
{schema}
[archive]
{more}
[sink]
archive = "kept"
{sink}
"""


def values(number: int, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    made: list[bytes] = []
    for identity in range(number):
        row = {"id": identity, "amount": chance.randrange(1000) / 8, "subject": f"s{identity}"}
        made.append(
            chance.choice([b"oops", b'{"id": "x"}', b"[1]"]) if chance.random() < 0.2 else json.dumps(row).encode()
        )
    return made


def expected(made: list[bytes]) -> Any:
    """The valid ones, as pandas reads them."""
    valid = [row for row in (json.loads(value) for value in made if value != b"oops") if isinstance(row, dict)]
    return pandas.json_normalize([row for row in valid if row["id"] != "x"])


def files(runner: Runner) -> Any:
    found = pyarrow.dataset.dataset(Archive(str(runner.directory / "kept")).files()).to_table()
    return found.sort_by("offset").to_pandas()


def test_fields_are_columns_and_all_values_stay(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    orders, made = topic("orders"), values(120, seed)
    # The schema is the topic's.
    spark_broker.set_schema(orders, "id bigint NOT NULL, amount double, subject string")
    spark_broker.publish_many([(orders, value) for value in made])
    spark_broker.publish(orders, None, key="k")
    options = "options = { maxOffsetsPerTrigger = 50 }"
    run(runner, pipeline(orders, options))

    found = files(runner)
    assert list(found.columns) == [*COLUMNS, "id", "amount", "value_subject", "value_problem"]
    assert list(found["value"]) == [*made, None]
    good = found[found["value_problem"].isna() & found["value"].notna()]
    wanted = expected(made)
    assert list(good["id"]) == list(wanted["id"])
    assert list(good["amount"]) == list(wanted["amount"])
    assert list(good["value_subject"]) == list(wanted["subject"])
    bad = found[found["value_problem"].notna()]
    assert bad[["id", "amount", "value_subject"]].isna().all(axis=None)
    problems = {b"oops": "it is not JSON", b'{"id": "x"}': "field id is not of type bigint"}
    assert list(bad["value_problem"]) == [
        problems.get(value, "it is JSON, but not an object") for value in bad["value"]
    ]
    assert len(good) + len(bad) + 1 == len(made) + 1

    # A later version has another column. Only files with equal columns are merged.
    spark_broker.set_schema(orders, "id bigint NOT NULL, amount double, subject string, note string")
    for number in range(2):
        spark_broker.publish(orders, json.dumps({"id": number, "note": "n"}).encode())
        run(runner, pipeline(orders, options))
    before = files_of(runner)
    merged = list(Archive(str(runner.directory / "kept")).compact())

    assert sorted(len(each.replaced) for each in merged) == [2, 3]
    assert len(before) == 5
    after = pandas.concat(
        [pyarrow.parquet.read_table(path, partitioning=None).to_pandas() for path in files_of(runner)]
    ).sort_values("offset", ignore_index=True)
    assert list(after["value"]) == [*made, None, b'{"id": 0, "note": "n"}', b'{"id": 1, "note": "n"}']
    assert after["id"].equals(pandas.concat([found["id"], pandas.Series([0.0, 1.0])], ignore_index=True))
    assert list(after["note"][-2:]) == ["n", "n"]
    read = runner.spark.read.format("penstock").options(
        servers=spark_broker.servers, subscribe=orders, archive=str(runner.directory / "kept")
    )
    assert read.load().count() == len(after)


def files_of(runner: Runner) -> list[str]:
    return Archive(str(runner.directory / "kept")).files()


def run(runner: Runner, text: str) -> None:
    from penstock.pipelines import queries

    made = with_schemas(runner.load(text))
    for query in queries.start(runner.spark, made, str(runner.directory / "checkpoint"), {"availableNow": True}):
        query.awaitTermination()


def test_a_delta_table_has_the_fields_too(runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]) -> None:
    orders = topic("orders")
    spark_broker.publish_many([(orders, value) for value in (b'{"id": 7, "tags": ["a"]}', b"oops")])

    run(runner, pipeline(orders, 'schema = "id int, tags array<string>"', 'format = "delta"'))

    found = deltalake.DeltaTable(runner.directory / "kept").to_pyarrow_table().sort_by("offset")
    assert found.select(["value", "id", "tags", "value_problem"]).to_pylist() == [
        {"value": b'{"id": 7, "tags": ["a"]}', "id": 7, "tags": ["a"], "value_problem": None},
        {"value": b"oops", "id": None, "tags": None, "value_problem": "it is not JSON"},
    ]


@pytest.mark.parametrize(
    ("schema", "more", "problem"),
    [
        ('schema = "id int"', "", r":6: \[source\] schema is only used with flatten = true in \[archive\]"),
        ('topics = ["a", "b"]', "flatten = true", r":4: \[source\] schema is missing"),
        ('schema = "id interval day"', "flatten = true", r":6: \[source\] schema: invalid schema: unknown type"),
        ('schema = "value_topic int, topic int"', "flatten = true", r":6: .* two columns would be named value_topic"),
    ],
)
def test_a_schema_that_cannot_be_flattened_is_refused(
    spark: SparkSession, tmp_path: Path, schema: str, more: str, problem: str
) -> None:
    path = tmp_path / "pipeline.toml"
    text = pipeline("orders", schema, more=more).lstrip("\n")
    path.write_text("\n" + (text.replace('topic = "orders"\n', "") if "topics" in schema else text))

    with pytest.raises(BadConfig, match=problem):
        validation.check(spark, load(path))
