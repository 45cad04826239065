"""The example pipelines of all kinds, run as they are against a real broker."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset
import pyarrow.parquet
import pytest

from penstock.pipelines.pipeline import KINDS
from penstock.pipelines.pipeline_file import load
from tests.conftest import SparkBroker
from tests.support.pipeline_files import ORDERS, PAYMENTS, Done, Example, of, penstock, publish, values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pandas = pytest.importorskip("pandas")
deltalake = pytest.importorskip("deltalake")


# ---- the examples


@of("transform")
def test_transform_writes_what_fits_and_keeps_what_does_not_as_dead_letters(
    example: Example, broker: SparkBroker
) -> None:
    end = example.run().end

    taken = [order for order in ORDERS if float(str(order["amount"])) >= 1]
    found = values(broker, "orders-clean")
    assert Counter(order["id"] for order in found) == Counter(order["id"] for order in taken)
    assert {order["country"] for order in found} == {"DE", "FR"}
    assert all(order["tax"] == round(order["amount"] * 0.2, 2) for order in found)
    assert {message.key for message in broker.fetch("orders-clean", 0, 0)} == {str(o["id"]).encode() for o in taken}
    [letter] = [letter for letter in broker.dead_letters() if letter.group == "clean-orders"]
    assert (letter.value, letter.subject, letter.reason) == (b"no order", "orders", "it is not JSON")
    assert (end["state"], end["rows"], end["lag"]) == ("done", 101, 0)
    assert (end["rows_in"], end["rows_out"], end["dead_letters"]) == (101, len(taken), 1)
    assert broker.lag("clean-orders") == 0


@of("aggregate")
def test_aggregate_writes_closed_windows_once_and_counts_what_is_late(example: Example, broker: SparkBroker) -> None:
    example.change(('topic = "orders"', 'topic = "late-orders"'), ('topic = "revenue"', 'topic = "late-revenue"'))
    publish(broker, "late-orders", *ORDERS)

    first = example.run().end
    # Far behind the watermark, which is two minutes before the last order.
    publish(broker, "late-orders", {"country": "de", "amount": 9.0, "at": ORDERS[0]["at"]})
    second = example.run().end

    windows: dict[tuple[datetime, str], list[float]] = defaultdict(list)
    for order in ORDERS:
        windows[datetime.fromisoformat(str(order["at"])), str(order["country"])].append(float(str(order["amount"])))
    closed = {key: found for key, found in windows.items() if key[0].minute < 42}
    found = values(broker, "late-revenue")
    assert {
        (datetime.fromisoformat(each["window_start"]), each["country"]): (each["orders"], each["revenue"])
        for each in found
    } == {key: (len(amounts), round(sum(amounts), 2)) for key, amounts in closed.items()}
    assert len(found) == len(closed)
    assert first["watermark"] == second["watermark"] == "2030-01-31T12:42:00.000Z"
    assert (first["late_rows"], second["late_rows"]) == (0, 1)


@of("aggregate")
def test_flush_writes_the_last_windows_once_and_what_comes_for_them_is_late(
    example: Example, broker: SparkBroker
) -> None:
    example.change(
        ('topic = "orders"', 'topic = "flushed"'),
        ('topic = "revenue"', 'topic = "flushed-revenue"'),
        ('name = "revenue"', 'name = "flushed"'),
    )

    def order(minute: int) -> dict[str, object]:
        return {"country": "de", "amount": 1.0, "at": f"2030-01-31T12:{minute:02}:30Z"}

    def written() -> list[tuple[str, int]]:
        return [(each["window_start"][14:16], each["orders"]) for each in values(broker, "flushed-revenue")]

    publish(broker, "flushed", order(0), order(1), order(1))
    first = example.run("--flush").end
    after_first = written()
    # One for a window that was flushed, one for the next.
    publish(broker, "flushed", order(1), order(2))
    second = example.run("--flush").end
    third = example.run("--flush").end

    assert sorted(after_first) == [("00", 1), ("01", 2)]
    assert sorted(written()) == [("00", 1), ("01", 2), ("02", 1)]
    assert (first["late_rows"], second["late_rows"], third["batches"]) == (0, 1, 0)
    assert second["watermark"] == third["watermark"] == "2030-01-31T12:03:00.000Z"


@of("join")
def test_flush_writes_the_rows_of_a_left_join_that_found_nothing(example: Example, broker: SparkBroker) -> None:
    example.change(
        ('topic = "orders"', 'topic = "lonely"'),
        ('topic = "payments"', 'topic = "few-payments"'),
        ('topic = "orders-paid"', 'topic = "lonely-paid"'),
        ('name = "orders-paid"', 'name = "lonely-paid"'),
        ('how = "inner"', 'how = "left"'),
    )
    publish(broker, "lonely", ORDERS[0], ORDERS[2])
    publish(broker, "few-payments", PAYMENTS[0])

    assert example.run("--flush").end["state"] == "done"

    assert {(order["id"], order["method"]) for order in values(broker, "lonely-paid")} == {
        (ORDERS[0]["id"], "card"),
        (ORDERS[2]["id"], None),
    }


@of("deduplicate")
def test_deduplicate_writes_each_order_once(example: Example, broker: SparkBroker) -> None:
    assert example.run().end["state"] == "done"

    found = Counter(order["id"] for order in values(broker, "orders-once"))
    assert found == Counter({order["id"]: 1 for order in ORDERS})


@of("replay")
def test_replay_publishes_a_range_once_more(example: Example, broker: SparkBroker) -> None:
    example.change(('start = "earliest"', "start = 10"), ("# end = 2030-02-01T00:00:00Z", "end = 60"))

    end = example.run().end

    source = [message.value for message in broker.fetch("orders", 0, 10, end=60)]
    assert [message.value for message in broker.fetch("orders-replayed", 0, 0)] == source
    assert (end["state"], end["rows"]) == ("done", 50)


@of("join")
def test_join_finds_the_payments_of_orders_in_time(example: Example, broker: SparkBroker) -> None:
    assert example.run().end["state"] == "done"

    paid = {payment["id"] for payment in PAYMENTS if "T12" in payment["paid_at"]}
    found = values(broker, "orders-paid")
    assert Counter(order["id"] for order in found) == Counter(order["id"] for order in ORDERS if order["id"] in paid)
    assert all(order["method"] == "card" and order["paid_at"] > order["at"] for order in found)


@of("sql")
def test_sql_joins_orders_with_their_shipments(example: Example, broker: SparkBroker) -> None:
    shipments = [{"id": each["id"], "carrier": "x", "shipped_at": each["paid_at"]} for each in PAYMENTS]
    publish(broker, "shipments", *shipments)

    end = example.run().end

    found = values(broker, "orders-shipped")
    both = pandas.DataFrame(ORDERS).merge(pandas.DataFrame(shipments), on="id")
    expected = both[(both["shipped_at"] >= both["at"]) & (both["shipped_at"] <= both["at"].str.replace("T12", "T14"))]
    assert Counter(order["id"] for order in found) == Counter(expected["id"])
    assert (end["state"], end["rows"], end["rows_in"], end["rows_out"]) == ("done", 131, 131, len(expected))
    assert (end["dead_letters"], broker.lag("shipped-orders-orders")) == (1, 0)


@of("enrich")
def test_enrich_adds_what_is_known_of_the_customer(example: Example, broker: SparkBroker) -> None:
    for country in ("fr", "de"):
        broker.publish("customers", json={"customer": "ann", "segment": "new", "country": country}, key="ann")

    end = example.run().end

    found = values(broker, "orders-enriched")
    assert Counter(order["id"] for order in found) == Counter(order["id"] for order in ORDERS)
    assert {(order["segment"], order["customer_country"]) for order in found} == {("new", "DE")}
    assert (end["state"], end["rows"], end["lag"], broker.lag("orders-enriched")) == ("done", 101, 0, 0)
    assert (end["rows_in"], end["rows_out"], end["dead_letters"]) == (101, 100, 1)


@of("sessionize")
def test_sessions_are_those_of_pandas_and_flush_writes_the_last_ones(example: Example, broker: SparkBroker) -> None:
    clicks = [
        {"customer": f"c{n % 3}", "page": f"p{n % 4}", "at": f"2030-01-31T{n // 4:02}:{n * n % 60:02}:00Z"}
        for n in range(90)
    ]
    # Rows that are exactly the gap apart are one session.
    clicks += [{"customer": "edge", "page": "p", "at": f"2030-01-31T{at}:00Z"} for at in ("12:00", "12:30", "13:01")]
    publish(broker, "clicks", *clicks, {"page": "p0", "at": clicks[0]["at"]})

    first = example.run().end
    before = values(broker, "visits")
    flushed = example.run("--flush").end
    again = example.run("--flush").end
    found = values(broker, "visits")

    expected = sessions(clicks, pandas.Timedelta("30min"))
    assert (
        Counter(
            (each["customer"], each["session_start"][:19], each["last_click"][:19], each["clicks"], each["pages"])
            for each in found
        )
        == expected
    )
    ends = {pandas.Timestamp(each["session_end"]) - pandas.Timestamp(each["last_click"]) for each in found}
    assert ends == {pandas.Timedelta("30min")}
    assert 0 < len(before) < len(found)
    assert (first["rows_in"], first["dead_letters"], first["late_rows"]) == (94, 1, 0)
    assert (first["rows_out"] + flushed["rows_out"], again["batches"]) == (len(found), 0)


def sessions(clicks: Sequence[Mapping[str, str]], gap: Any) -> Counter[tuple[Any, ...]]:
    """Customer, first and last click, and the numbers of clicks and pages, as pandas has them."""
    table = pandas.DataFrame(clicks).assign(at=lambda each: pandas.to_datetime(each["at"]))
    table = table.sort_values(["customer", "at"])
    table["session"] = (table.groupby("customer")["at"].diff() > gap).cumsum()
    rows = table.groupby(["customer", "session"]).agg(
        first=("at", "min"), last=("at", "max"), clicks=("at", "size"), pages=("page", "nunique")
    )
    shown = "%Y-%m-%dT%H:%M:%S"
    return Counter(
        (key[0], row["first"].strftime(shown), row["last"].strftime(shown), row["clicks"], row["pages"])
        for key, row in rows.iterrows()
    )


@of("upsert")
def test_upsert_keeps_a_table_of_the_latest_rows(example: Example, broker: SparkBroker) -> None:
    example.change(('topic = "customers"', 'topic = "people"'))
    for number in range(10):
        broker.publish("people", json={"customer": f"c{number % 4}", "name": f"n{number}"}, key=f"c{number % 4}")
    broker.publish("people", None, key="c1")
    broker.publish("people", b"nobody", key="c2")

    end = example.run().end
    broker.publish("people", None, key="c3")
    again = example.run().end

    table = pyarrow.dataset.dataset(deltalake.DeltaTable(example.directory / "tables/customers").file_uris()).to_table()
    assert sorted(zip(table["customer"].to_pylist(), table["name"].to_pylist(), strict=True)) == [
        ("c0", "n8"),
        ("c2", "n6"),
    ]
    assert (end["rows"], end["rows_in"], end["rows_out"], end["dead_letters"]) == (12, 12, 4, 1)
    assert (again["rows"], again["rows_out"], again["lag"], broker.lag("customers-table")) == (1, 1, 0, 0)


@of("archive")
def test_archive_keeps_all_messages_in_files(example: Example, broker: SparkBroker) -> None:
    assert example.run().end["rows"] == 101
    assert example.run().end["rows"] == 0

    table = pyarrow.dataset.dataset(example.directory / "archive/orders/data", format="parquet").to_table()
    stored = {message.offset: message.value for message in broker.fetch("orders", 0, 0)}
    assert dict(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True)) == stored
    assert table.num_rows == len(stored)


@of("dead_letters")
def test_dead_letters_become_a_table_and_those_that_match_are_redriven(example: Example, broker: SparkBroker) -> None:
    example.change(("reason LIKE '%timeout%'", "value LIKE 'again%'"), ("'orders%'", "'jobs%'"))
    reject(broker, "jobs", b"again 1", b"never", b"again 2")

    assert example.run().end["state"] == "done"

    rows = pyarrow.parquet.read_table(example.directory / "dead-letters").to_pylist()
    assert [row["letters"] for row in rows if row["subject"] == "jobs"] == [3]
    assert [message.value for message in broker.fetch("jobs", 0, 3)] == [b"again 1", b"again 2"]


@of("dead_letters")
def test_dead_letters_without_a_sink_are_shown(example: Example, broker: SparkBroker) -> None:
    example.path.write_text('name = "letters"\nkind = "dead_letters"\n')
    reject(broker, "chores", b"one", b"two")

    documents = example.run().documents

    assert [each["letters"] for each in documents if each["event"] == "row" and each["subject"] == "chores"] == ["2"]
    assert documents[-1]["state"] == "done"


def reject(broker: SparkBroker, subject: str, *values: bytes) -> None:
    broker.publish_many([(subject, value) for value in values])
    broker.create_group(f"group-{subject}", subject, start="earliest")
    with broker.subscribe(subject, group=f"group-{subject}") as subscription:
        for _ in values:
            subscription.get(timeout=20).reject()
        subscription.flush()


# ---- a function


@of("transform")
def test_a_function_beside_the_file_makes_rows_of_rows(example: Example, broker: SparkBroker) -> None:
    (example.directory / "beside_the_file.py").write_text(
        "from pyspark.sql import functions as F\n"
        "@F.udf('string', useArrow=False)\n"
        "def shout(text): return text.upper()\n"
        "def clean(rows): return rows.where('amount >= 40').select(shout('id').alias('id'))\n"
    )
    sql = re.search(r'sql = """.*?"""', example.path.read_text(), re.DOTALL)
    assert sql is not None
    example.change(
        (sql[0], 'python = "beside_the_file:clean"'), ('"orders-clean"', '"shouted"'), ('"clean-orders"', '"shout"')
    )

    assert example.run().end["state"] == "done"

    assert {order["id"] for order in values(broker, "shouted")} == {f"O{number}" for number in range(80, 90)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_is_right(kind: str, spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    penstock("init", kind, path)

    done = penstock("validate", path)

    pipeline = load(path)
    checked = ", ".join(["keys and values", *pipeline.checked_by_spark])
    assert done == Done(0, f"{path} is valid: {pipeline.name}, of kind {kind}\nchecked: {checked}\n", "")
