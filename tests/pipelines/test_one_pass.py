"""Rows and dead letters of a transformation: its source is read once if the query only selects and filters."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from tests.conftest import SparkBroker
from tests.pipelines.conftest import Runner, values

pandas = pytest.importorskip("pandas")

NUMBERS = range(40)


def is_bad(number: int) -> bool:
    return number % 7 == 0


def transforming(source: str, target: str, how: str) -> str:
    return f"""
name = "pass-{source}"
kind = "transform"
[source]
topic = "{source}"
schema = "id string NOT NULL, n int NOT NULL"
options = {{ maxOffsetsPerTrigger = 25 }}
[transform]
{how}
[sink]
topic = "{target}"
key = "n + 1"
"""


def run(runner: Runner, broker: SparkBroker, topic: Callable[..., str], how: str) -> tuple[int, Any]:
    """Run a transformation; return how often its source was read, and the rows. Check dead letters and counts."""
    source, target = topic("numbers"), topic("rows")
    broker.publish_many(
        [(source, b"bad %d" % n if is_bad(n) else json.dumps({"id": f"x{n}", "n": n}).encode()) for n in NUMBERS]
    )
    progress = runner.run(transforming(source, target, how))

    letters = [letter.value for letter in broker.dead_letters(source, limit=1000)]
    assert sorted(letters) == sorted(b"bad %d" % n for n in NUMBERS if is_bad(n))
    rows = values(broker, target)
    counts = [each.observedMetrics for each in progress if each.numInputRows]
    assert sum(each["source0"]["in"] for each in counts) == len(NUMBERS)
    assert sum(each["source0"]["letters"] for each in counts) == len(letters)
    assert sum(each["rows"]["out"] for each in counts) == len(rows)
    return sum(each.numInputRows for each in progress) // len(NUMBERS), pandas.DataFrame(rows)


@pytest.mark.parametrize(
    ("sql", "passes"),
    [
        (
            "WITH big AS (SELECT *, 2 * n AS m FROM source WHERE n > 3) SELECT b.id, upper(b.id) AS u, n, m FROM big b",
            1,
        ),
        ("SELECT id, n FROM source WHERE n < 9 UNION ALL SELECT id, n + 100 AS n FROM source WHERE n > 30", 2),
    ],
)
def test_rows_are_those_of_the_query(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str], sql: str, passes: int
) -> None:
    found, rows = run(runner, spark_broker, topic, f'sql = "{sql}"')

    assert found == passes
    with closing(sqlite3.connect(":memory:")) as oracle:
        good = pandas.DataFrame([{"id": f"x{n}", "n": n} for n in NUMBERS if not is_bad(n)])
        good.to_sql("source", oracle, index=False)
        wanted = pandas.read_sql(sql, oracle)
    order = ["n", "id"]
    assert rows.sort_values(order).to_dict("list") == wanted.sort_values(order).to_dict("list")


def test_the_query_does_not_see_a_row_that_does_not_fit(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    check = "coalesce(n, raise_error('a bad row'))"
    how = f"""sql = "SELECT {check} AS n FROM source WHERE {check} >= 0" """

    passes, rows = run(runner, spark_broker, topic, how)

    assert passes == 1
    assert sorted(rows["n"]) == [n for n in NUMBERS if not is_bad(n)]


_FUNCTIONS = """
from pyspark.sql import functions as fn

def chosen(rows):
    return rows.where("n > 5").withColumn("m", fn.col("n") * 3).select("m", "_key", "n")

@fn.udf("int")
def tripled(n):
    return n * 3

def called(rows):
    return rows.where("n > 5").select(tripled("n").alias("m"), "n")
"""


@pytest.mark.parametrize(("function", "passes"), [("chosen", 1), ("called", 2)])
def test_a_function_of_the_user(
    runner: Runner,
    spark_broker: SparkBroker,
    topic: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    passes: int,
) -> None:
    monkeypatch.syspath_prepend(str(runner.directory))
    module = f"one_pass_{function}"
    (runner.directory / f"{module}.py").write_text(_FUNCTIONS)
    runner.spark.addArtifacts(str(runner.directory / f"{module}.py"), pyfile=True)

    found, rows = run(runner, spark_broker, topic, f'python = "{module}:{function}"')

    assert found == passes
    assert sorted(rows["m"]) == [3 * n for n in NUMBERS if n > 5 and not is_bad(n)]
