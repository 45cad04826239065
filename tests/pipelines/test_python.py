"""Pipelines of kind python: classes of the user with state for each key, compared with pandas."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("pyspark")

from penstock.cli import pipeline as cli
from penstock.errors import BadConfig, PenstockError
from penstock.pipelines import execution, sample, stateful, validation, window_flush
from penstock.pipelines.pipeline_file import load
from penstock.spark import versions
from tests.pipelines.conftest import Runner, at, forget_last_batch, letters, publish, values
from tests.support.server import clean_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

pandas = pytest.importorskip("pandas")

# The type of the state is in a module of its own: workers need that too.
_TYPES = """
from pyspark.sql.types import DoubleType, LongType, StructType

TOTAL = StructType().add("rows", LongType()).add("amount", DoubleType())
"""
_PROCESSORS = """
import pandas
from {types} import TOTAL
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor


class Totals(StatefulProcessor):
    def init(self, handle):
        self.handle = handle
        self.total = handle.getValueState("total", TOTAL)

    def handleInputRows(self, key, rows, timerValues):
        for amount in self.amounts(rows):
            before = self.total.get() or (0, 0.0)
            self.total.update((before[0] + 1, before[1] + amount))
        number, amount = self.total.get()
        yield self.row(customer=key[0], number=number, amount=amount)

    def amounts(self, rows):
        return [row.amount for row in rows]

    def row(self, **fields):
        return Row(**fields)

    def close(self):
        pass


class Frames(Totals):
    def amounts(self, rows):
        return [float(amount) for frame in rows for amount in frame["amount"]]

    def row(self, **fields):
        return pandas.DataFrame([fields])


class Wrong(Totals):
    def row(self, **fields):
        return Row(customer=fields["customer"], total=fields["amount"])


class Unready(Totals):
    def init(self, handle):
        raise RuntimeError("there is no state")


class Needy(Totals):
    def __init__(self, one):
        pass


class Forgetful(Totals):
    # The first state is gone before the next batch, the second stays for an hour.
    def init(self, handle):
        self.total = handle.getValueState("total", TOTAL, ttlDurationMs=1)
        self.kept = handle.getValueState("kept", TOTAL, ttlDurationMs=3_600_000)

    def handleInputRows(self, key, rows, timerValues):
        rows = list(rows)
        number = (self.kept.get() or (0,))[0] + len(rows)
        self.kept.update((number, 0.0))
        forgotten = not self.total.exists()
        self.total.update((number, 0.0))
        yield Row(customer=key[0], number=number, amount=float(forgotten))


def function():
    pass
"""
_RUN = """
import sys
from penstock.pipelines import execution
from penstock.pipelines.pipeline_file import load
execution.run(load(sys.argv[1]), master="local[2]")
"""
# Only a test that fails waits so long.
_PATIENCE_S = 280
_NUMBERS = count()


def pipeline(directory: Path, topics: tuple[str, str], processor: str, more: str = "", source: str = "") -> str:
    """Write the modules of the processor, whose names no other test has, and return the text of the file."""
    module = f"processors{next(_NUMBERS)}"
    (directory / f"{module}_types.py").write_text(_TYPES)
    (directory / f"{module}.py").write_text(_PROCESSORS.format(types=f"{module}_types"))
    return f"""
name = "state-{topics[0]}"
kind = "python"
[source]
topic = "{topics[0]}"
schema = "customer string, amount double, at timestamp"
{source}
[python]
processor = "{module}:{processor}"
by = ["customer"]
output = "customer string, number long, amount double"
{more}
[sink]
topic = "{topics[1]}"
key = "customer"
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


Order = dict[str, Any]


def orders(number: int, seed: int) -> list[Order]:
    chance = random.Random(seed)
    return [{"customer": chance.choice("abcdefg"), "amount": chance.randrange(100)} for _ in range(number)]


def assert_totals(found: list[Any], made: list[Order]) -> None:
    """Each customer's last row has the totals, and no total was returned twice."""
    rows, amounts = pandas.DataFrame(found), pandas.DataFrame(made).groupby("customer")["amount"]
    assert not rows.duplicated(["customer", "number"]).any()
    last = rows.sort_values("number").groupby("customer").last()
    assert last["number"].to_dict() == amounts.count().to_dict()
    assert last["amount"].to_dict() == amounts.sum().astype(float).to_dict()


@pytest.mark.parametrize(
    ("processor", "more"), [("Totals", ""), pytest.param("Frames", "pandas = true", marks=pytest.mark.soak)]
)
def test_a_key_keeps_its_state_from_run_to_run_and_a_repeated_batch_is_counted_once(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str], processor: str, more: str
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    made, totals, source = orders(90, seed), topic("totals"), topic("orders", 2)
    text = pipeline(runner.directory, (source, totals), processor, more)
    publish(spark_broker, source, made[:60])
    spark_broker.publish(source, b"oops")
    spark_broker.publish(source, b'{"amount": 1}')
    runner.run(text)
    assert_totals(values(spark_broker, totals), made[:60])

    forget_last_batch(runner.directory / "checkpoint")
    publish(spark_broker, source, made[60:])
    runner.run(text)

    assert_totals(values(spark_broker, totals), made)
    assert letters(spark_broker, source) == {b"oops": "it is not JSON", b'{"amount": 1}': "field customer is missing"}
    assert runner.spark.conf.get("spark.sql.streaming.stateStore.providerClass", "") != stateful._ROCKSDB


def test_kill_9_after_the_commit_of_a_batch_counts_nothing_twice(
    spark: SparkSession, spark_broker: SparkBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    made, totals, source = orders(60, 3), topic("totals"), topic("orders")
    publish(spark_broker, source, made)
    path = tmp_path / "pipeline.toml"
    limit = f'servers = "{spark_broker.servers}"\noptions = {{ maxOffsetsPerTrigger = 20 }}'
    path.write_text(pipeline(tmp_path, (source, totals), "Totals", source=limit))
    first = len({order["customer"] for order in made[:20]})

    run_and_kill(path, lambda: len(values(spark_broker, totals)) > first)
    assert_totals(values(spark_broker, totals), made[:40])
    execution.run(load(path), spark=spark)

    assert_totals(values(spark_broker, totals), made)


@pytest.mark.soak
def test_kill_9_at_any_time_counts_each_row_once(
    spark: SparkSession, spark_broker: SparkBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    made, totals, source = orders(400, seed), topic("totals", 2), topic("orders", 2)
    publish(spark_broker, source, made)
    path = tmp_path / "pipeline.toml"
    limit = f'servers = "{spark_broker.servers}"\noptions = {{ maxOffsetsPerTrigger = 40 }}'
    path.write_text(pipeline(tmp_path, (source, totals), "Totals", source=limit))

    for _ in range(5):
        before = len(values(spark_broker, totals))
        # At a random moment from the next batch on.
        run_and_kill(path, lambda: len(values(spark_broker, totals)) > before and chance.random() < 0.02)  # noqa: B023
    execution.run(load(path), spark=spark)

    assert_totals(values(spark_broker, totals), made)


def run_and_kill(path: Path, is_due: Callable[[], bool]) -> None:
    """Run a pipeline in processes of its own, and kill all of them."""
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(path)],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    giving_up = time.monotonic() + _PATIENCE_S
    try:
        while not is_due() and process.poll() is None and time.monotonic() < giving_up:
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()


def test_the_example_tells_unpaid_orders_when_the_watermark_passes_their_timer(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    source, unpaid = topic("events"), topic("unpaid")
    CliRunner().invoke(cli.app, ["init", "python", str(runner.directory / "python.toml")], catch_exceptions=False)
    text = (runner.directory / "python.toml").read_text().replace('"order-events"', f'"{source}"')
    text = text.replace('"orders-unpaid"', f'"{unpaid}"')
    ordered = [{"id": name, "what": "ordered", "amount": 5, "at": at(minute)} for name, minute in [("a", 0), ("b", 1)]]
    publish(spark_broker, source, [*ordered, {"id": "b", "what": "paid", "at": at(30)}])
    runner.run(text)
    assert values(spark_broker, unpaid) == []

    publish(spark_broker, source, [{"id": "c", "what": "ordered", "at": at(25 * 60)}, {"id": "c", "what": "paid"}])
    runner.run(text)
    assert values(spark_broker, unpaid) == [{"id": "a", "amount": 5.0, "since": "2026-01-01T12:00:00.000000Z"}]

    # Behind the watermark.
    publish(spark_broker, source, [{"id": "d", "what": "ordered", "at": at(0)}])
    late = runner.run(text)
    assert sum(operator["numRowsDroppedByWatermark"] for each in late for operator in each["stateOperators"]) == 1
    assert len(values(spark_broker, unpaid)) == 1
    assert letters(spark_broker, source) == {b'{"id": "c", "what": "paid"}': "field at is missing"}


def test_state_expires_by_the_clock_and_a_run_ends(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    source, totals = topic("orders"), topic("totals")
    text = pipeline(runner.directory, (source, totals), "Forgetful", 'timers = "processing"')
    for _ in range(2):
        publish(spark_broker, source, [{"customer": "a", "amount": 1}])
        runner.run(text)

    assert values(spark_broker, totals) == [
        {"customer": "a", "number": 1, "amount": 1.0},
        {"customer": "a", "number": 2, "amount": 1.0},
    ]


def test_a_sample_is_one_batch(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline(tmp_path, ("orders", "totals"), "Totals"))
    made = orders(20, 5)

    done = sample.run(spark, load(path), [*made, "oops"])

    assert_totals(done.values, made)
    assert [(row.subject, row.key) for row in done.rows] == [("totals", row.value["customer"]) for row in done.rows]
    assert [letter.reason for letter in done.dead_letters] == ["it is not JSON"]


def test_a_row_with_other_columns_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline(tmp_path, ("orders", "totals"), "Wrong"))

    with pytest.raises(
        Exception,
        match=r"Wrong returned a row with customer, total, but \[python\] output has customer, number, amount",
    ):
        sample.run(spark, load(path), orders(1, 1))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (":Totals", ":Total", r":7: \[python\] processor: the module processors\d+ has no class 'Total'"),
        (":Totals", ":function", r":7: .*:function is not a class derived from pyspark.sql.streaming.StatefulProc"),
        (":Totals", ":Unready", r":7: \[python\] processor: there is no state"),
        (":Totals", ":Needy", r":7: \[python\] processor: creating Needy\(\) raised TypeError: .*'one'"),
        ('"customer"]', '"client"]', r":8: \[python\] by names 'client', which \[source\] schema does not have"),
        ('"customer string, number', '"customer strin, number', r":9: \[python\] output: "),
        ("amount double\"\n[sink]", "amount double\"\ntimers = 'event'\ntime = 'amount'\nwatermark = '1 hour'\n[sink]",
         r":11: \[python\] time names 'amount', which is of type double: it must be a timestamp"),
        ('key = "customer"', 'key = "client"', r":12: \[sink\] key: .*`client`"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_its_line(
    spark: SparkSession, tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = tmp_path / "pipeline.toml"
    text = "\n".join(line for line in pipeline(tmp_path, ("orders", "totals"), "Totals").splitlines() if line)
    assert old in text
    path.write_text(text.replace(old, new))

    with pytest.raises(BadConfig, match=problem):
        validation.check(spark, load(path))


def test_what_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline(tmp_path, ("orders", "totals"), "Totals"))
    made = load(path)
    stateful.check_installed(made)

    monkeypatch.setattr(stateful, "_is_installed", lambda _: False)
    with pytest.raises(BadConfig, match=r"\[python\] needs pandas and protobuf: pip install 'penstock\[stateful\]'"):
        stateful.check_installed(made)
    monkeypatch.setattr(versions, "has_row_processors", lambda: False)
    with pytest.raises(BadConfig, match=r"\[python\] needs PySpark 4.1 or newer to pass rows: .* set pandas = true"):
        stateful.check_installed(made)


def test_flush_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(pipeline(tmp_path, ("orders", "totals"), "Totals"))

    with pytest.raises(PenstockError, match="only its processor knows which rows it holds back"):
        window_flush.check(load(path))
