"""Pipelines of kind enrich: rows with what a lookup has for them, compared with pandas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

import pyarrow
import pyarrow.parquet

from penstock import Outgoing
from penstock.errors import BadConfig, PenstockError
from penstock.pipelines import lookups, queries, sample, validation
from penstock.pipelines.pipeline_file import load
from tests.pipelines.conftest import Runner, forget_last_batch, letters, publish, values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

pandas = pytest.importorskip("pandas")
deltalake = pytest.importorskip("deltalake")

CUSTOMERS = [{"customer": f"c{n}", "segment": "ab"[n % 2]} for n in range(8)]


def pipeline(orders: str, sink: str, lookup: str, enrich: str = "") -> str:
    return f"""
name = "enriched-{orders}"
kind = "enrich"
[source]
topic = "{orders}"
schema = "id int, customer string"
[lookup]
{lookup}
[enrich]
on = ["customer"]
{enrich}
[sink]
topic = "{sink}"
"""


def orders_of(*customers: str) -> list[dict[str, Any]]:
    return [{"id": number, "customer": customer} for number, customer in enumerate(customers)]


def merged(orders: list[dict[str, Any]], customers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The left join as pandas has it."""
    both = pandas.DataFrame(orders).merge(pandas.DataFrame(customers), on="customer", how="left").astype(object)
    return sorted(both.where(both.notna(), None).to_dict("records"), key=lambda row: int(row["id"]))


def found(broker: SparkBroker, sink: str) -> list[dict[str, Any]]:
    return sorted(values(broker, sink), key=lambda row: int(row["id"]))


def test_rows_get_the_latest_of_their_key_in_a_compacted_topic(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    orders, customers, sink = topic("orders", 2), topic("customers", 3), topic("enriched")
    text = pipeline(orders, sink, f'topic = "{customers}"\nschema = "segment string"', 'lookup_on = ["_key"]')
    latest: dict[str, dict[str, Any]] = {}
    for number in range(60):
        row = {"customer": f"c{chance.randrange(12)}", "segment": f"s{number}"}
        latest[row["customer"]] = row
        spark_broker.publish(customers, json=row, key=row["customer"])
    for gone, value in (("c1", None), ("c2", b"oops")):
        spark_broker.publish(customers, value, key=gone)
        latest.pop(gone, None)
    made = orders_of(*(f"c{chance.randrange(14)}" for _ in range(40)))
    publish(spark_broker, orders, made[:30])
    spark_broker.publish(orders, b"no order")
    runner.run(text)
    before = merged(made[:30], list(latest.values()))

    changed = {"customer": made[30]["customer"], "segment": "new"}
    spark_broker.publish(customers, json=changed, key=changed["customer"])
    latest[changed["customer"]] = changed
    publish(spark_broker, orders, made[30:])
    runner.run(text)

    assert found(spark_broker, sink) == before + merged(made[30:], list(latest.values()))
    assert letters(spark_broker, orders) == {b"no order": "it is not JSON"}


@pytest.mark.parametrize("is_one_broker", [True, False])
def test_a_row_that_finds_nothing_may_become_a_dead_letter_once(
    is_one_broker: bool, runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    orders, sink = topic("orders"), topic("enriched")
    deltalake.write_deltalake(runner.directory / "customers", pyarrow.Table.from_pylist(CUSTOMERS))
    text = pipeline(orders, sink, 'delta = "customers"', 'missing = "dead_letter"')
    if not is_one_broker:
        # The same broker by another name.
        text += f'servers = "localhost:{spark_broker.servers.rpartition(":")[2]}"\n'
    made = orders_of("c0", "c9", "c1")
    publish(spark_broker, orders, [*made, {"id": 3}])
    counts: list[Any] = []
    pipe = runner.load(text)
    for query in queries.start(
        runner.spark, pipe, str(runner.directory / "checkpoint"), {"availableNow": True}, counts.append
    ):
        query.awaitTermination()

    # The batch is repeated when the customer is known: nothing changes.
    forget_last_batch(runner.directory / "checkpoint")
    new = pyarrow.Table.from_pylist([{"customer": "c9", "segment": "new"}])
    deltalake.write_deltalake(runner.directory / "customers", new, mode="append")
    runner.run(text)

    assert found(spark_broker, sink) == merged([made[0], made[2]], CUSTOMERS)
    assert letters(spark_broker, orders) == {
        json.dumps(made[1]).encode(): "the lookup has no row with customer = c9",
        b'{"id": 3}': "the lookup has no row with customer = null",
    }
    assert {name: sum(each[name] for each in counts) for name in ("in", "out", "letters")} == {
        "in": 4,
        "out": 2,
        "letters": 2,
    }
    assert "Join LeftOuter" in queries.explain(runner.spark, pipe)["rows"]


def test_a_lookup_is_read_again_when_it_is_too_old(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("penstock.pipelines.lookups.time.monotonic", lambda: now[0])
    path = tmp_path / "pipeline.toml"

    def write(segment: str) -> None:
        (tmp_path / "customers").mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist([{"customer": "c0", "segment": segment}])
        pyarrow.parquet.write_table(table, tmp_path / "customers/part.parquet")

    def segments(lookup: lookups.FreshLookup) -> list[str]:
        return [row["segment"] for row in lookup.rows(spark).collect()]

    write("old")
    path.write_text(pipeline("orders", "sink", 'parquet = "customers"', 'refresh = "1 minute 30 seconds"'))
    aged = lookups.FreshLookup(load(path))
    path.write_text(pipeline("orders", "sink", 'parquet = "customers"'))
    fresh = lookups.FreshLookup(load(path))
    assert (segments(aged), segments(fresh)) == (["old"], ["old"])
    write("new")
    now[0] += 89.0
    assert (segments(aged), segments(fresh)) == (["old"], ["new"])
    now[0] += 1.0
    assert segments(aged) == ["new"]


def test_several_rows_for_one_key_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path / "customers", pyarrow.Table.from_pylist([*CUSTOMERS, CUSTOMERS[3]]))
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline("orders", "sink", 'delta = "customers"'))

    with pytest.raises(PenstockError, match="the lookup has several rows with customer = 'c3': it must have one"):
        lookups.FreshLookup(load(path)).rows(spark)


def test_samples_are_enriched_as_pandas_does(spark: SparkSession, tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path / "customers", pyarrow.Table.from_pylist(CUSTOMERS))
    path = tmp_path / "pipeline.toml"
    made = orders_of("c1", "c9", "c2", "c1")

    path.write_text(pipeline("orders", "sink", 'delta = "customers"'))
    from_table = sample.run(spark, load(path), made)
    path.write_text(
        pipeline(
            *("orders", "sink", 'topic = "customers"\nschema = "customer string, segment string"'),
            'columns = { segment = "upper(segment)" }\nmissing = "dead_letter"',
        )
    )
    customers = [Outgoing("customers", json.dumps(row).encode(), key=row["customer"]) for row in CUSTOMERS]
    from_topic = sample.run(spark, load(path), made, customers)

    assert sorted(from_table.values, key=lambda row: int(row["id"])) == merged(made, CUSTOMERS)
    assert sorted((row["id"], row["segment"]) for row in from_topic.values) == [(0, "B"), (2, "A"), (3, "B")]
    assert [(letter.offset, letter.reason) for letter in from_topic.dead_letters] == [
        (1, "the lookup has no row with customer = c9")
    ]
    with pytest.raises(PenstockError, match=r"needs a sample for \[source\], \[lookup\]: got 1"):
        sample.run(spark, load(path), made)


TOPIC = 'topic = "customers"\nschema = "customer string, id int"'


@pytest.mark.parametrize(
    ("lookup", "enrich", "problem"),
    [
        (TOPIC, "", "9: [enrich]: two columns are named id: rename one of them"),
        (TOPIC, 'lookup_on = ["cust"]', "11: [enrich] lookup_on names 'cust', which [lookup] schema does not have: it"),
        (TOPIC, 'columns = { x = "upper(nam)" }', "11: [enrich] columns.x: A column, variable, or function parameter"),
        (TOPIC.replace("int", "itn"), "", "8: [lookup] schema: "),
        ('delta = "nowhere"', "", "7: [lookup] delta: "),
        ('parquet = "nowhere"', "", "7: [lookup] parquet: Path does not exist: "),
    ],
)
def test_what_does_not_fit_the_lookup_is_told_with_its_line(
    spark: SparkSession, tmp_path: Path, lookup: str, enrich: str, problem: str
) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline("orders", "sink", lookup, enrich).lstrip())

    with pytest.raises(BadConfig) as error:
        validation.check(spark, load(path))

    [told] = error.value.problems
    assert told.startswith(f"{path}:{problem}"), told
