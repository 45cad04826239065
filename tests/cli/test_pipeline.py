"""`penstock pipeline`: the examples of all kinds, run as they are against a real broker, and all that may go wrong."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow.dataset
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.pipeline import line
from penstock.errors import PenstockError
from penstock.pipelines import failure
from penstock.pipelines.execution import run
from penstock.pipelines.failure import Failure
from penstock.pipelines.pipeline import KINDS
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.progress import PipelineProgress, Reports, begin
from penstock.pipelines.state_directory import StateDirectory, status
from penstock.spark.archive_place import DirectoryPlace
from penstock.spark.manifest import ArchivedFile, ArchiveManifest, Entry
from penstock.spark.offsets import Offsets
from penstock.spark.options import TopicPartition
from tests.conftest import SparkBroker
from tests.support.server import clean_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pandas = pytest.importorskip("pandas")
deltalake = pytest.importorskip("deltalake")

# Spark's start on a machine that has other things to do.
_PATIENCE_S: Final = 240.0


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[dict[str, Any]]:
        assert (self.code, self.err) == (0, "")
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def end(self) -> dict[str, Any]:
        return self.documents[-1]


def penstock(*arguments: object) -> Done:
    """In this process, where Spark runs already."""
    done = CliRunner().invoke(app, ["pipeline", *map(str, arguments)], env={"COLUMNS": "200"})
    err = done.stderr
    if isinstance(done.exception, PenstockError):
        # As `main` does it.
        err += f"error: {done.exception}\n"
    elif done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, err)


@pytest.fixture(scope="module")
def broker() -> Iterator[SparkBroker]:
    """With the orders that the examples are about: of a hundred ten are there twice, and one is none."""
    with SparkBroker(listen="127.0.0.1:0") as broker:
        publish(broker, "orders", *ORDERS)
        broker.publish("orders", b"no order")
        publish(broker, "payments", *PAYMENTS)
        yield broker


ORDERS: Final = [
    {
        "id": f"o{number % 90}",
        "customer": "ann",
        "country": "de" if number % 2 else "fr",
        "amount": number % 90 / 2,
        "at": f"2030-01-31T12:{number % 90 // 2:02}:00Z",
    }
    for number in range(100)
]
# One in three is paid, each second of these too late.
PAYMENTS: Final = [
    {"id": f"o{number}", "method": "card", "paid_at": f"2030-01-31T{13 if number % 2 else 12}:{number // 2 + 5:02}:00Z"}
    for number in range(0, 90, 3)
]


class Example:
    """One of the files that `init` writes, in a directory with its data."""

    def __init__(self, kind: str, directory: Path, broker: SparkBroker) -> None:
        self.directory = directory
        self.path = directory / f"{kind}.toml"
        self.data = directory / "data"
        self._broker = broker
        assert penstock("init", kind, self.path).code == 0

    def run(self, *flags: str) -> Done:
        return penstock("run", self.path, "--servers", self._broker.servers, "--json", *flags)

    def change(self, *pairs: tuple[str, str]) -> None:
        text = self.path.read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        self.path.write_text(text)


@pytest.fixture
def example(request: pytest.FixtureRequest, spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> Example:
    return Example(request.param, tmp_path, broker)


def of(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [kind], indirect=True)


def publish(broker: SparkBroker, topic: str, *documents: Mapping[str, object]) -> None:
    broker.publish_many([(topic, json.dumps(document).encode()) for document in documents])


def values(broker: SparkBroker, topic: str) -> list[dict[str, Any]]:
    return [message.json() for message in broker.fetch(topic, 0, 0)]


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


@of("transform")
def test_explain_shows_the_plan_and_runs_nothing(example: Example, broker: SparkBroker) -> None:
    done = penstock("run", example.path, "--servers", broker.servers, "--explain")

    assert done.code == 0
    assert done.out.startswith("== query rows ==\n")
    assert "StreamingRelationV2" in done.out
    assert "Filter (amount" in done.out
    assert not example.data.exists()


@of("aggregate")
def test_what_was_read_and_written_is_counted_once_by_several_queries(example: Example, broker: SparkBroker) -> None:
    example.change(
        ('topic = "revenue" # or: ', ""),
        ('key = "country"', ""),
        ('name = "revenue"', 'name = "counted"'),
        ('topic = "orders"', 'topic = "counted"\nsubjects = ["counted"]'),
    )
    publish(broker, "counted", *ORDERS)
    publish(broker, "counted.other", *ORDERS[:7])
    broker.publish("counted", b"no order")

    end = example.run("--flush").end
    shown = penstock("status", example.path)

    expected = pandas.DataFrame(ORDERS).groupby(["at", "country"])["amount"].sum()
    found = pyarrow.parquet.read_table(example.directory / "revenue").to_pandas()
    assert sorted(found["revenue"]) == sorted(expected.round(2))
    assert (end["rows"], end["rows_in"], end["dead_letters"]) == (108, 101, 1)
    assert (end["rows_out"], end["late_rows"]) == (len(expected), 0)
    assert "101: 7 offsets have another subject, are expired or compacted" in shown.out


@of("transform")
def test_a_run_goes_on_where_the_last_one_ended(example: Example, broker: SparkBroker) -> None:
    example.change(('"orders"', '"more-orders"'), ('"orders-clean"', '"more-clean"'), ('"clean-orders"', '"more"'))
    for number in range(2):
        publish(broker, "more-orders", {"id": f"m{number}", "amount": 5.0})

        end = example.run().end

        assert [order["id"] for order in values(broker, "more-clean")] == [f"m{each}" for each in range(number + 1)]
        assert (end["rows"], end["lag"], broker.lag("more")) == (1, 0, 0)


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


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("join", "an inner join writes rows as soon as they match"),
        ("archive", "a pipeline of kind archive holds no rows back"),
        ("sql", "only Spark knows which rows a query of kind sql holds back"),
    ],
)
def test_flush_is_refused_where_nothing_stays_open(kind: str, why: str, broker: SparkBroker, tmp_path: Path) -> None:
    done = Example(kind, tmp_path, broker).run("--flush")

    assert re.fullmatch(rf"error: pipeline \S+ (has nothing to|cannot be) flush(ed)?: {why}. Omit --flush\n", done.err)


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


# ---- what Spark can tell of a file


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        (
            "transform",
            [("WHERE amount", "WHERE amuont")],
            (
                r"transform.toml:17: \[transform\] sql: A column, variable, or function parameter with name `amuont` "
                r"cannot be resolved\. Did you mean one of the following\? \[`amount`.*"
            ),
        ),
        (
            "transform",
            [("FROM source", "FORM source")],
            r"transform.toml:1\d: \[transform\] sql: Syntax error at or near .*",
        ),
        ("transform", [("amount double", "amount dobule")], r"transform.toml:10: \[source\] schema: .*DOBULE.*"),
        (
            "transform",
            [('key = "id"', 'key = "ident"')],
            r"transform.toml:24: \[sink\] key: A column, .* `ident` cannot be resolved\. .*",
        ),
        (
            "aggregate",
            [("sum(amount)", "sum(amuont)")],
            r"aggregate.toml:17: \[aggregate\] measures.revenue: .* `amuont` cannot be resolved\. .*",
        ),
        (
            "aggregate",
            [('time = "at"', 'time = "country"')],
            (
                r"aggregate.toml:12: \[aggregate\] time names 'country', which is of type string: it must be a "
                "timestamp"
            ),
        ),
        (
            "deduplicate",
            [('by = ["id"]', 'by = ["idd"]')],
            (
                r"deduplicate.toml:11: \[deduplicate\] by names 'idd', which \[source\] schema does not have: it has "
                "id, customer, country, amount, at"
            ),
        ),
        (
            "join",
            [("id string, method", "order string, method")],
            r"join.toml:15: \[join\] on names 'id', which \[right\] schema does not have: it has order, .*",
        ),
        (
            "sessionize",
            [("size(collect_set(page))", "count(DISTINCT page)")],
            r"sessionize.toml:10: \[sessionize\]: Distinct aggregations are not supported on streaming .*",
        ),
        (
            "dead_letters",
            [("reason LIKE", "raeson LIKE")],
            r"dead_letters.toml:12: \[dead_letters\] redrive: .* `raeson` cannot be resolved\. .*",
        ),
        (
            "transform",
            [('# python = "orders:clean"', 'python = "no_such_module:clean"'), ('sql = """', "# "), ('"""', "")],
            r"transform.toml:\d+: \[transform\] python: no module 'no_such_module' in .*",
        ),
    ],
)
def test_what_does_not_fit_together_is_told_with_its_line(
    kind: str, changes: Sequence[tuple[str, str]], problem: str, spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / f"{kind}.toml"
    penstock("init", kind, path)
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    if "no_such_module" in text:
        text = re.sub(r"^(SELECT|FROM|WHERE)", r"# \1", text, flags=re.MULTILINE)
    path.write_text(text)

    done = penstock("validate", path)

    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"error: {re.escape(str(tmp_path))}/{problem}\n", done.err), done.err


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_is_right(kind: str, spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    penstock("init", kind, path)

    done = penstock("validate", path)

    pipeline = load(path)
    checked = ", ".join(["keys and values", *pipeline.checked_by_spark])
    assert done == Done(0, f"{path} is valid: {pipeline.name}, of kind {kind}\nchecked: {checked}\n", "")


@pytest.mark.parametrize(
    ("kind", "flags", "checked", "not_checked"),
    [
        ("archive", [], ["keys and values"], []),
        ("replay", [], ["keys and values"], []),
        ("transform", ["--no-spark"], ["keys and values"], ["schema", "SQL", "key"]),
        ("aggregate", ["--no-spark"], ["keys and values"], ["schema", "columns", "measures", "key"]),
    ],
)
def test_spark_is_not_started_for_what_does_not_need_it(
    kind: str,
    flags: list[str],
    checked: list[str],
    not_checked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "example.toml"
    penstock("init", kind, path)
    monkeypatch.setattr("penstock.pipelines.execution.opened", None)

    done = penstock("validate", path, "--json", *flags)

    found = json.loads(done.out)
    assert (found["checked"], found["not_checked"]) == (checked, not_checked)
    shown = penstock("validate", path, *flags).out
    assert ("not checked without Spark: " + ", ".join(not_checked) in shown) == bool(not_checked)


# ---- on a sample


def sample(directory: Path, *values: object) -> Path:
    path = directory / "sample.jsonl"
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values))
    return path


def test_a_sample_is_run_without_a_broker(spark: SparkSession, tmp_path: Path) -> None:
    penstock("init", "transform", tmp_path / "orders.toml")
    path = sample(tmp_path, {"id": "a", "country": "de", "amount": 5.0}, "no order", {"id": "b", "amount": 0.5})

    shown = penstock("test", tmp_path / "orders.toml", "--input", path)
    done = penstock("test", tmp_path / "orders.toml", "--input", path, "--json")

    found = json.loads(done.out)
    [row], [letter] = found["rows"], found["dead_letters"]
    assert (row["subject"], row["key"], row["headers"]) == ("orders-clean", "a", {})
    assert row["value"] == {"id": "a", "customer": None, "country": "DE", "amount": 5.0, "tax": 1.0, "at": None}
    assert letter == {"reason": "it is not JSON", "value": "no order", "subject": "orders", "offset": 1}
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[0] == ["1", "row"]
    assert lines[1] == ["id", "customer", "country", "amount", "tax", "at", "_subject", "_key"]
    assert lines[3] == ["a", "-", "DE", "5.0", "1.0", "-", "orders-clean", "a"]
    assert ["1", "dead", "letter"] in lines


def test_a_sample_of_a_lookup_has_a_row_on_each_line(spark: SparkSession, tmp_path: Path) -> None:
    penstock("init", "enrich", tmp_path / "orders.toml")
    orders, customers = tmp_path / "orders.jsonl", tmp_path / "customers.jsonl"
    orders.write_text('{"id": "o1", "customer": "ann"}\n{"id": "o2", "customer": "bob"}\n')
    customers.write_text('{"customer": "ann", "segment": "new", "country": "de"}\n')
    command = ("test", tmp_path / "orders.toml", "--input", orders, "--input", customers)

    found = json.loads(penstock(*command, "--json").out)
    customers.write_text(customers.read_text() * 2)
    twice = penstock(*command)

    assert sorted((row["key"], row["value"]["segment"]) for row in found["rows"]) == [("o1", "new"), ("o2", None)]
    assert twice.err == ("error: the lookup has several rows with customer = 'ann': it must have one for each key\n")


def test_a_sample_that_is_not_there_and_a_kind_without_samples_are_told(spark: SparkSession, tmp_path: Path) -> None:
    for kind in ("transform", "archive", "join"):
        penstock("init", kind, tmp_path / f"{kind}.toml")
    path = sample(tmp_path, {})

    absent = penstock("test", tmp_path / "transform.toml", "--input", tmp_path / "none.jsonl")
    archive = penstock("test", tmp_path / "archive.toml", "--input", path)
    join = penstock("test", tmp_path / "join.toml", "--input", path)

    assert absent.err == f"error: {tmp_path}/none.jsonl: No such file or directory\n"
    assert archive.err == (
        "error: a pipeline of kind archive cannot be run on a sample: "
        f"{', '.join(kind for kind in KINDS if kind not in ('archive', 'dead_letters'))} can\n"
    )
    assert join.err == "error: a pipeline of kind join needs a sample for [left], [right]: got 1\n"


def test_a_file_that_is_wrong_is_refused_before_spark_starts(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('name = "x"\nkind = "replay"\n')

    for command in ("validate", "run"):
        done = penstock(command, path)

        assert done.code == 1
        assert done.err.splitlines() == [
            f"error: {path}:1: [source] needs one of topic, topics, pattern",
            f"error: {path}:1: [sink] topic is missing: a topic, or a subject of one",
        ]


def test_an_address_that_is_none_is_refused_before_spark_starts(tmp_path: Path) -> None:
    penstock("init", "archive", tmp_path / "archive.toml")

    done = penstock("run", tmp_path / "archive.toml", "--servers", "here:there")

    assert done.code == 2
    assert "Invalid value for '--servers'" in done.err


def test_without_spark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    penstock("init", "archive", tmp_path / "archive.toml")
    monkeypatch.setattr("penstock.cli.pipeline.find_spec", lambda name: None)

    penstock("init", "join", tmp_path / "join.toml")
    done = penstock("run", tmp_path / "archive.toml")
    validated = penstock("validate", tmp_path / "join.toml")

    assert (done.code, done.err) == (1, "error: Spark is not installed: pip install 'penstock[spark]'\n")
    assert validated.code == 0
    assert validated.out.endswith("not checked without Spark: schema, columns, key\n")


# ---- what goes wrong while it runs


@of("transform")
def test_a_query_that_fails_is_told_in_one_sentence(example: Example) -> None:
    example.change(('topic = "orders"', 'topic = "ordres"'))

    done = example.run()
    verbose = example.run("--verbose")

    assert done.code == verbose.code == 1
    [sentence] = done.err.splitlines()
    assert re.fullmatch(
        r"error: pipeline clean-orders failed; the next run continues where it stopped: unknown topic "
        r"'ordres' at 127\.0\.0\.1:\d+: did you mean 'orders'\?",
        sentence,
    )
    assert "Traceback" in verbose.err
    shown = penstock("status", "clean-orders", "--data", example.data, "--json")
    assert json.loads(shown.out)["state"] == "failed"
    assert "unknown topic 'ordres'" in json.loads(shown.out)["reason"]


@of("aggregate")
def test_a_checkpoint_of_another_pipeline_is_refused(example: Example) -> None:
    home = StateDirectory(example.data, "revenue")
    home.directory.mkdir(parents=True)
    home.identify(load(example.path))
    (home.checkpoint / "rows/offsets").mkdir(parents=True)
    (home.checkpoint / "rows/offsets/0").touch()
    example.change(('window = "1 minute"', 'window = "5 minutes"'))

    done = example.run()

    assert done.code == 1
    assert done.err == (
        f"error: the checkpoint in {example.data}/pipelines/revenue belongs to another pipeline: its window is "
        '"1 minute", this one\'s is "5 minutes". Give this one another name, or use --restart to start over\n'
    )


@of("archive")
def test_a_pipeline_runs_once_at_a_time(example: Example) -> None:
    directory = example.data / "pipelines/archive-orders"
    directory.mkdir(parents=True)
    with open(directory / "LOCK", "w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)

        done = example.run()

    assert done.err == "error: pipeline archive-orders is already running, in process 4711: stop that one first\n"


@of("transform")
def test_a_stop_ends_a_run_that_follows_and_the_next_goes_on(example: Example, broker: SparkBroker) -> None:
    example.change(('"orders"', '"endless"'), ('"orders-clean"', '"endless-clean"'), ('"clean-orders"', '"endless"'))
    publish(broker, "endless", {"id": "first", "amount": 5.0})
    stop = threading.Event()

    def tell(progress: PipelineProgress) -> None:
        if progress.rows:
            stop.set()

    done = run(load(example.path).at(broker.servers), data=example.data, follow=True, on_batch=tell, stop=stop)
    publish(broker, "endless", {"id": "second", "amount": 5.0})
    end = example.run().end

    assert (done.state, done.rows) == ("stopped", 1)
    assert (end["state"], end["rows"]) == ("done", 1)
    assert [order["id"] for order in values(broker, "endless-clean")] == ["first", "second"]


def test_in_a_process_of_its_own_it_follows_until_ctrl_c(broker: SparkBroker, tmp_path: Path) -> None:
    path = tmp_path / "replay.toml"
    penstock("init", "replay", path)
    text = path.read_text().replace("orders-replayed", "orders-followed")
    path.write_text(text.replace('"replay-orders"', '"follow-orders"'))
    command = (
        "run",
        path,
        "--follow",
        "--json",
        "--servers",
        broker.servers,
        "--data",
        tmp_path,
        "--master",
        "local[2]",
    )
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "pipeline", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    ) as process:
        assert process.stdout is not None
        giving_up = threading.Timer(_PATIENCE_S, process.kill)
        giving_up.start()
        try:
            for line in process.stdout:
                if json.loads(line)["rows"] == 101:
                    break
            assert status("follow-orders", tmp_path).state == "running"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        finally:
            giving_up.cancel()
            process.kill()

    assert process.returncode == 0, err.decode()
    end = json.loads(out.decode().splitlines()[-1])
    assert (end["event"], end["state"], end["lag"]) == ("end", "stopped", 0)
    assert len(list(broker.fetch("orders-followed", 0, 0))) == 101


# ---- where it goes on


@of("transform")
def test_a_file_finds_its_state_from_any_directory_and_restart_starts_over(
    example: Example, broker: SparkBroker, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    example.change(('"orders"', '"moving"'), ('"orders-clean"', '"moving-clean"'), ('"clean-orders"', '"moving"'))
    for number in range(2):
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        publish(broker, "moving", {"id": f"m{number}", "amount": 5.0})

        assert example.run().end["rows"] == 1
    shown = penstock("status", example.path, "--json")
    shutil.rmtree(example.data)
    refused = example.run()
    restarted = example.run("--restart")

    assert json.loads(shown.out)["state"] == "done"
    assert refused.err == (
        f"error: pipeline moving would start from scratch, with no state in {example.data}/pipelines/moving, but it "
        f"has run before: group moving at {broker.servers} is ahead, at moving/0 offset 2. If its state is in "
        "another directory, give that with --data; if the name belongs to another pipeline or consumer, rename "
        "this one; --restart discards the state and the group, and starts over\n"
    )
    assert restarted.err == (
        f"restarting pipeline moving: discarding its group moving at {broker.servers} (moving/0 offset 2); reading "
        "moving from earliest; rows stored before stay in moving-clean, and are stored there a second time\n"
    )
    assert [order["id"] for order in values(broker, "moving-clean")] == ["m0", "m1", "m0", "m1"]
    assert broker.lag("moving") == 0


def begun(home: StateDirectory, *, batch: int, place: TopicPartition, end: int, query: str = "q") -> None:
    """A state as Spark leaves it, up to a batch that ends there."""
    offsets = home.checkpoint / "rows/offsets"
    offsets.mkdir(parents=True)
    document = Offsets({place.topic: 1}, {place: end}).to_json()
    (offsets / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(document)}\n")
    (home.checkpoint / "rows/metadata").write_text(json.dumps({"id": query}))


@pytest.fixture
def stopped(broker: SparkBroker, tmp_path: Path) -> Iterator[Example]:
    """A pipeline whose state ends at batch 3, offset 5 of orders, as does its group."""
    example = Example("replay", tmp_path, broker)
    example.change(('"replay-orders"', '"halted"'))
    home = StateDirectory(example.data, "halted")
    home.directory.mkdir(parents=True)
    home.identify(load(example.path))
    begun(home, batch=3, place=TopicPartition("orders", 0), end=5)
    broker.create_group("halted", "orders", mode="partitioned", start="earliest")
    broker.commit("halted", "orders", 0, 5)
    yield example
    broker.delete_group("halted")


def test_a_state_behind_the_group_is_refused(stopped: Example, broker: SparkBroker) -> None:
    broker.commit("halted", "orders", 0, 7)

    done = stopped.run()

    assert done.err.startswith(
        f"error: the state of pipeline halted in {stopped.data}/pipelines/halted ends at orders/0 offset 5, "
        f"but group halted at {broker.servers} is ahead, at orders/0 offset 7: the pipeline has run "
        "with another state since. If its state is in another directory"
    )


def test_a_state_behind_its_transactions_is_refused(stopped: Example, broker: SparkBroker) -> None:
    with broker.transaction("spark:q", 4) as transaction:
        transaction.publish("somewhere", b"row")

    done = stopped.run()

    assert "ends with batch 3, but the broker at" in done.err
    assert "has stored batch 4: this state is an old copy" in done.err


def test_a_state_in_the_working_directory_is_named(
    stopped: Example, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    stopped.data.rename(elsewhere / "data")
    monkeypatch.chdir(elsewhere)

    done = stopped.run()

    assert done.err == (
        f"error: pipeline halted has its state in {elsewhere}/data/pipelines/halted, but the state is now kept "
        f"beside the file: move that directory to {stopped.data}/pipelines/halted, or use "
        f"--data {elsewhere}/data\n"
    )


def test_a_second_file_with_the_name_of_another_is_refused(stopped: Example) -> None:
    home = StateDirectory(stopped.data, "halted")
    home.save(begin("halted", "replay", stopped.path, None))
    second = stopped.directory / "second.toml"
    second.write_text(stopped.path.read_text().replace('"orders-replayed"', '"orders-elsewhere"'))

    done = penstock("run", second)
    home.refuse_namesake(load(stopped.path))
    stopped.path.unlink()
    home.refuse_namesake(load(second))

    assert done.err == (
        f"error: the state in {home.directory} belongs to {stopped.path}, a pipeline with the same name, "
        f"'halted', and another sink: give one of them another name, or remove {stopped.path}\n"
    )


def test_restart_leaves_the_group_of_consumers_alone(stopped: Example, broker: SparkBroker) -> None:
    with broker.subscribe("orders", group="halted", mode="partitioned"):
        done = stopped.run("--restart")

    assert done.err == (
        f"error: group halted at {broker.servers} belongs to consumers, not to pipeline halted: rename the pipeline\n"
    )
    assert StateDirectory(stopped.data, "halted").has_begun


@of("aggregate")
def test_parquet_that_spark_would_not_write_again_is_refused(example: Example) -> None:
    example.change(
        ('topic = "revenue" # or: ', ""), ('key = "country"', ""), ('name = "revenue"', 'name = "revenue-files"')
    )
    log = example.directory / "revenue/_spark_metadata"
    log.mkdir(parents=True)
    for name in ("9.compact", "10", ".10.crc"):
        (log / name).touch()

    for flags in ((), ("--restart",)):
        assert example.run(*flags).err == (
            f"error: {example.directory}/revenue holds batches up to 10, but the state of pipeline revenue-files has "
            "none: Spark would take new batches for duplicates and drop them. Run it with the state that wrote them "
            "(--data), or remove that directory, or set another one in [sink] parquet\n"
        )


@of("archive")
def test_an_archive_that_holds_what_would_be_read_is_refused(example: Example) -> None:
    example.change(('name = "archive-orders"', 'name = "archive-again"'))
    root = example.directory / "archive/orders"
    manifest = ArchiveManifest(DirectoryPlace(root))
    manifest.create()
    file = ArchivedFile("data/x.parquet", "orders", 0, 40, 1, 0, 39, 0, 0)
    manifest.commit(Entry("spark:lost", 7, ("topic",), (file,)))

    for flags in ((), ("--restart",)):
        assert example.run(*flags).err == (
            f"error: the archive {root} holds orders/0 up to offset 39, but pipeline archive-again would start from "
            "scratch at 0. Run it with the state that wrote it (--data); or set [source] options = { startingOffsets = "
            """'{"orders":{"0":40}}' } and use --restart to continue where the archive ends; or set another """
            "directory in [sink] archive\n"
        )


# ---- without Spark


def test_init_leaves_a_file_that_is_there_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mine")

    done = penstock("init", "join", path)

    assert (done.code, path.read_text()) == (1, "mine")
    assert done.err == f"error: {path} exists already: choose another name, or remove it first\n"


def test_init_names_the_file_as_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    done = penstock("init", "join")

    assert done.out == "wrote join.toml: edit it, then `penstock pipeline run join.toml`\n"
    assert load(tmp_path / "join.toml").kind == "join"


@pytest.mark.parametrize(("flags", "code"), [((), 130), (("--follow",), 0)])
def test_a_run_that_was_stopped_is_done_only_if_it_would_not_have_ended(
    flags: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    penstock("init", "replay", tmp_path / "replay.toml")
    stopped = replace(begin("replay-orders", "replay", tmp_path / "replay.toml", None), state="stopped")
    monkeypatch.setattr("penstock.pipelines.execution.run", lambda *_, **__: stopped)

    assert penstock("run", tmp_path / "replay.toml", *flags).code == code


def test_the_line_of_a_run_shows_what_moves(tmp_path: Path) -> None:
    begun = begin("revenue", "aggregate", tmp_path / "x.toml", None)
    later = replace(begun, batch=7, rows=123_456, rows_per_second=4567.8, lag=1000, watermark="12:42", late_rows=3)

    assert line(begun) == "revenue · batch - · 0 rows · 0 rows/s · lag -"
    assert line(later) == "revenue · batch 7 · 123,456 rows · 4,568 rows/s · lag 1,000 · watermark 12:42 · 3 late"


def test_list_and_status_show_how_far_pipelines_are(tmp_path: Path) -> None:
    for name, state in (("first", "done"), ("second", "running")):
        home = StateDirectory(tmp_path, name)
        home.directory.mkdir(parents=True)
        begun = begin(name, "replay", tmp_path / f"{name}.toml", None)
        home.save(replace(begun, state=state, rows=1234, batches=2, batch=7, lag=56))

    listed = penstock("list", "--data", tmp_path)
    found = json.loads(penstock("list", "--data", tmp_path, "--json").out)
    shown = penstock("status", "first", "--data", tmp_path)

    # Nobody runs the second one: it was killed.
    assert [(each["name"], each["state"]) for each in found] == [("first", "done"), ("second", "killed")]
    assert [line.split()[:5] for line in listed.out.splitlines()[2:]] == [
        ["first", "replay", "done", "7", "56"],
        ["second", "replay", "killed", "7", "56"],
    ]
    assert "1,234 in 2 batches" in shown.out


def test_a_checkpoint_binds_a_pipeline_from_its_first_batch_on(tmp_path: Path) -> None:
    penstock("init", "replay", tmp_path / "replay.toml")
    first = load(tmp_path / "replay.toml")
    second = replace(first, kind="archive")
    home = StateDirectory(tmp_path, first.name)
    home.directory.mkdir(parents=True)

    home.identify(first)
    home.identify(second)
    (home.checkpoint / "rows/offsets").mkdir(parents=True)
    home.identify(first)
    (home.checkpoint / "rows/offsets/0").touch()
    home.identify(first)
    with pytest.raises(PenstockError, match=r"another pipeline: its kind is \"replay\", this one's is \"archive\""):
        home.identify(second)
    (home.directory / "pipeline.json").unlink()
    with pytest.raises(PenstockError, match=r"pipeline.json is missing or damaged, .*: use --restart"):
        home.identify(first)


def test_progress_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    home = StateDirectory(tmp_path, "first")
    home.directory.mkdir(parents=True)
    (home.directory / "progress.json").write_text("{")

    done = penstock("list", "--data", tmp_path)

    assert done.err == f"error: {home.directory}/progress.json cannot be read: the next run replaces it\n"
    assert home.before() is None


def test_status_of_what_never_ran_says_what_did(tmp_path: Path) -> None:
    home = StateDirectory(tmp_path, "first")
    home.directory.mkdir(parents=True)
    home.save(begin("first", "replay", tmp_path / "first.toml", None))

    done = penstock("status", "frist", "--data", tmp_path)

    assert done.err == (
        f"error: no pipeline 'frist' has run with the data directory {tmp_path}: there are first. "
        "Give its file instead of its name, or its data directory with --data\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            (
                "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `x` cannot be resolved. Did you mean [`y`]? "
                "SQLSTATE: 42703; line 3 pos 7;\n'Project ['x]\n+- Relation\n"
            ),
            Failure("A column with name `x` cannot be resolved. Did you mean [`y`]?", 3),
        ),
        (
            "\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'FORM'. SQLSTATE: 42601 (line 2, pos 10)\n\n== SQL ==\n",
            Failure("Syntax error at or near 'FORM'.", 2),
        ),
        (
            (
                "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [PYTHON_ERROR] Failed: "
                'Traceback (most recent call last):\n  File "x.py", line 1, in y\n'
                "penstock.errors.NoBroker: nobody at x:1\n\n"
                "During handling of the above exception, another one occurred:\n\nTraceback (most recent call last):\n"
                "pyspark.errors.PySparkRuntimeError: [X] failed\n SQLSTATE: 38000"
            ),
            Failure("nobody at x:1"),
        ),
        (
            (
                'Job aborted due to stage failure: Traceback (most recent call last):\n  File "x.py", line 1, in y\n'
                "ValueError: a row of 'x' is wrong: make it right\n\n\tat org.apache.spark.X\n"
            ),
            Failure("a row of 'x' is wrong: make it right"),
        ),
        (
            (
                "Traceback (most recent call last):\nConnectionRefusedError: [Errno 111]\n\nThe above exception was "
                "the cause:\n\nTraceback (most recent call last):\npenstock.errors.NoBroker: nobody at x:1\n"
            ),
            Failure("nobody at x:1"),
        ),
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012\n== SQL ==", Failure("Division by zero.")),
    ],
)
def test_of_what_spark_tells_one_sentence_is_left(text: str, reason: Failure) -> None:
    assert failure.parse(text) == reason


def test_a_batch_that_is_told_twice_counts_once(tmp_path: Path) -> None:
    def offsets(end: int) -> str:
        return json.dumps({"version": 1, "topics": {"orders": {"id": 1, "offsets": {"0": end}}}})

    source = {"startOffset": offsets(10), "endOffset": offsets(30), "latestOffset": offsets(35)}
    report = {
        "id": "a",
        "timestamp": "2030-01-31T12:00:00.000Z",
        "batchId": 4,
        "batchDuration": 500,
        "durationMs": {"addBatch": 400},
        "eventTime": {"watermark": "2030-01-31T11:00:00.000Z"},
        "stateOperators": [{"numRowsDroppedByWatermark": 3}],
        # Two looks at one topic.
        "sources": [source, source],
    }
    reports = Reports()
    begun = begin("x", "transform", tmp_path / "x.toml", None)

    found = reports.add(begun, report)

    assert found is not None
    assert reports.add(found, report) is None
    assert (found.batches, found.batch, found.rows, found.rows_per_second, found.lag) == (1, 4, 20, 40.0, 5)
    assert (found.late_rows, found.watermark) == (3, "2030-01-31T11:00:00.000Z")
