"""Pipelines of kind sql: one query over several topics, compared with pandas."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from penstock.errors import BadConfig
from penstock.pipelines import queries, sample, validation
from penstock.pipelines.pipeline_file import load
from tests.pipelines.conftest import Runner, at, forget_last_batch, letters, publish, values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

pandas = pytest.importorskip("pandas")

JOIN = """
SELECT o.id, o.amount, s.carrier
FROM orders o JOIN shipments s ON o.id = s.id AND s.at BETWEEN o.at AND o.at + INTERVAL 30 MINUTES
"""


def pipeline(orders: str, shipments: str, sink: str, query: str = JOIN, mode: str = "append") -> str:
    return f'''
name = "shipped-{orders}"
kind = "sql"
[sources.orders]
topic = "{orders}"
schema = "id string, amount int, at timestamp"
time = "at"
watermark = "1 hour"
[sources.shipments]
topic = "{shipments}"
schema = "id string, carrier string, at timestamp"
time = "at"
watermark = "1 hour"
[sql]
query = """{query}"""
mode = "{mode}"
[sink]
topic = "{sink}"
'''


def made(count: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    chance = random.Random(seed)
    orders = [{"id": f"o{chance.randrange(count)}", "amount": chance.randrange(100), "at": at(n)} for n in range(count)]
    shipments = [
        {"id": f"o{chance.randrange(count)}", "carrier": chance.choice("xyz"), "at": at(n)} for n in range(count)
    ]
    return orders, shipments


def joined(orders: list[dict[str, Any]], shipments: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """The join as pandas has it."""
    both = pandas.DataFrame(orders).merge(pandas.DataFrame(shipments), on="id", suffixes=("", "_right"))
    after = pandas.to_datetime(both["at_right"]) - pandas.to_datetime(both["at"])
    kept = both[(after >= pandas.Timedelta(0)) & (after <= pandas.Timedelta("30min"))]
    return Counter(kept[["id", "amount", "carrier"]].itertuples(index=False, name=None))


def found(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter((row["id"], row["amount"], row["carrier"]) for row in rows)


def test_a_query_joins_two_topics_as_pandas_does_and_stores_each_row_once(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    orders, shipments = made(100, seed)
    left, right, sink = topic("orders", 2), topic("shipments"), topic("shipped")
    text = pipeline(left, right, sink)
    publish(spark_broker, left, orders[:50])
    publish(spark_broker, right, shipments)
    spark_broker.publish(left, b"oops")
    spark_broker.publish(right, json={"id": "a", "carrier": "x"})
    runner.run(text)
    publish(spark_broker, left, orders[50:])

    forget_last_batch(runner.directory / "checkpoint")
    runner.run(text)

    assert found(values(spark_broker, sink)) == joined(orders, shipments)
    assert letters(spark_broker, left) == {b"oops": "it is not JSON"}
    assert list(letters(spark_broker, right).values()) == ["field at is missing"]
    plan = queries.explain(runner.spark, runner.load(text))["rows"]
    assert "orders" in plan
    assert "Join Inner" in plan
    assert {group.name for group in spark_broker.groups()} >= {f"shipped-{left}-{left}", f"shipped-{left}-{right}"}


def test_a_union_of_topics_may_be_aggregated_and_updated(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    left, right, sink = topic("orders"), topic("shipments"), topic("totals")
    query = """
SELECT id, count(*) AS seen FROM (SELECT id FROM orders UNION ALL SELECT id FROM shipments) GROUP BY id
"""
    for identity in ("a", "b", "a"):
        spark_broker.publish(left, json={"id": identity, "amount": 1, "at": at(0)})
    spark_broker.publish(right, json={"id": "a", "carrier": "x", "at": at(0)})

    runner.run(pipeline(left, right, sink, query, "update"))

    latest = {row["id"]: row["seen"] for row in values(spark_broker, sink)}
    assert latest == {"a": 3, "b": 1}


def test_on_a_sample_any_join_is_that_of_pandas(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline("orders", "shipments", "shipped"))
    orders, shipments = made(60, 7)

    done = sample.run(spark, load(path), [*orders, "oops"], shipments)

    assert found(done.values) == joined(orders, shipments)
    assert [(letter.reason, letter.subject) for letter in done.dead_letters] == [("it is not JSON", "orders")]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            JOIN,
            "SELECT id, count(*) AS n FROM orders GROUP BY id",
            (
                "14: [sql] query: Invalid streaming output mode: append. This output mode is not supported for "
                "streaming aggregations without watermark on streaming DataFrames/DataSets."
            ),
        ),
        (JOIN, "SELECT id FROM orders ORDER BY at", "14: [sql] query: Sorting is not supported on streaming"),
        (JOIN, "\nSELECT id\nFROM ordres", "16: [sql] query: The table or view `ordres` cannot be found."),
        (JOIN, "SELECT o.*, s.at FROM orders o, shipments s", "14: [sql] query: two columns are named at: rename one"),
        ('time = "at"\nwatermark = "1 hour"\n[sql]', 'time = "id"\nwatermark = "1 hour"\n[sql]', "11: [sources.shipm"),
    ],
)
def test_what_spark_does_not_support_in_a_stream_is_told_with_its_line(
    spark: SparkSession, tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = tmp_path / "pipeline.toml"
    text = pipeline("orders", "shipments", "shipped")
    assert old in text
    path.write_text(text.replace(old, new).lstrip())

    with pytest.raises(BadConfig) as error:
        validation.check(spark, load(path))

    [found] = error.value.problems
    assert found.startswith(f"{path}:{problem}"), found
