"""Pipelines on a sample, as users test theirs; sums and joins as pandas has them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Outgoing
from penstock.errors import BadConfig
from penstock.testing import run_pipeline

pytest.importorskip("pyspark")
pandas = pytest.importorskip("pandas")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipelines.sample import SampleOutput

EXAMPLES = Path(__file__).parents[2] / "src/penstock/pipelines/examples"


@pytest.fixture
def run(spark: SparkSession, penstock_pipeline: Callable[..., SampleOutput]) -> Callable[..., SampleOutput]:
    """The fixture of users, in the session of all tests."""
    return penstock_pipeline


def orders(count: int) -> list[dict[str, Any]]:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    return [
        {
            "id": f"o{chance.randrange(count // 2)}",
            "country": chance.choice(["de", "fr"]),
            "amount": chance.randrange(100) / 4,
            "at": f"2030-01-31T12:{chance.randrange(60):02}:{chance.randrange(60):02}Z",
        }
        for _ in range(count)
    ]


def test_rows_and_dead_letters_are_what_a_broker_would_get(run: Callable[..., SampleOutput]) -> None:
    sent = Outgoing("orders.eu", b'{"id":"b","amount":2}', key="k", headers={"Trace": "1"})

    done = run(EXAMPLES / "transform.toml", [{"id": "a", "amount": 5.0}, "no order", sent, b'{"amount":9}'])

    assert [(value["id"], value["tax"]) for value in done.values] == [("a", 1.0), ("b", 0.4)]
    assert [(row.subject, row.key) for row in done.rows] == [("orders-clean", "a"), ("orders-clean", "b")]
    assert [(letter.offset, letter.reason, letter.value) for letter in done.dead_letters] == [
        (1, "it is not JSON", "no order"),
        (3, "field id is missing", '{"amount":9}'),
    ]


def test_windows_are_those_of_pandas(run: Callable[..., SampleOutput]) -> None:
    sample = orders(300)

    done = run(EXAMPLES / "aggregate.toml", sample)

    table = pandas.DataFrame(sample)
    table["window"] = pandas.to_datetime(table["at"]).dt.floor("1min")
    expected = table.groupby(["window", "country"])["amount"].agg(["size", "sum"])
    found = {
        (pandas.Timestamp(value["window_start"]), value["country"]): (value["orders"], value["revenue"])
        for value in done.values
    }
    assert len(done.values) == len(expected)
    assert found == {key: (row["size"], round(row["sum"], 2)) for key, row in expected.iterrows()}


def test_sessions_are_those_of_pandas(run: Callable[..., SampleOutput]) -> None:
    # Each minute of `orders` is an hour here, so there are gaps.
    sample = [
        {
            "customer": each["id"][:2],
            "page": each["country"],
            "at": each["at"].replace("T12:", "T").removesuffix("Z")[:16],
        }
        for each in orders(200)
        if int(each["at"][14:16]) < 24
    ]

    done = run(EXAMPLES / "sessionize.toml", sample)

    table = pandas.DataFrame(sample).assign(at=lambda each: pandas.to_datetime(each["at"]))
    table = table.sort_values(["customer", "at"])
    table["session"] = (table.groupby("customer")["at"].diff() > pandas.Timedelta("30min")).cumsum()
    expected = table.groupby(["customer", "session"]).size()
    assert Counter((value["customer"], value["clicks"]) for value in done.values) == Counter(
        (key[0], size) for key, size in expected.items()
    )


def test_a_join_is_that_of_pandas(run: Callable[..., SampleOutput]) -> None:
    left = orders(100)
    right = [{"id": each["id"], "method": "card", "paid_at": each["at"]} for each in orders(100)]

    done = run(EXAMPLES / "join.toml", left, right)

    both = pandas.DataFrame(left).merge(pandas.DataFrame(right), on="id")
    apart = (pandas.to_datetime(both["paid_at"]) - pandas.to_datetime(both["at"])).abs()
    expected = both[apart <= pandas.Timedelta("30min")]
    assert Counter(value["id"] for value in done.values) == Counter(expected["id"])


def test_duplicates_are_those_of_pandas_and_values_stay(run: Callable[..., SampleOutput]) -> None:
    sample = orders(100)

    done = run(EXAMPLES / "deduplicate.toml", sample)

    assert sorted(value["id"] for value in done.values) == sorted(pandas.DataFrame(sample)["id"].unique())
    assert all(value in sample for value in done.values)


def test_a_replay_is_the_sample_below_another_topic(run: Callable[..., SampleOutput]) -> None:
    done = run(EXAMPLES / "replay.toml", [Outgoing("orders.eu", b"raw", key="k"), Outgoing("orders", None)])

    assert [(row.subject, row.key, row.value) for row in done.rows] == [
        ("orders-replayed.eu", "k", "raw"),
        ("orders-replayed", None, None),
    ]


def test_without_the_fixture_and_with_a_file_that_is_wrong(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "orders.toml"
    path.write_text((EXAMPLES / "transform.toml").read_text().replace("WHERE amount", "WHERE amuont"))

    with pytest.raises(BadConfig, match="amuont"):
        run_pipeline(path, [{"id": "a"}])
