"""`penstock demo`: publish orders, process them with Spark, and keep everything in a directory."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import Console
from rich.status import Status

from penstock.cli import output
from penstock.cli.pipeline import line
from penstock.client.values import DeadLetter
from penstock.embedded import Broker
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipelines.pipeline import Pipeline
    from penstock.pipelines.progress import PipelineProgress

# The time span of the orders.
MINUTES: Final = 30
COUNTRIES: Final = ("at", "de", "fr", "it", "nl")
# One in this many is malformed; one in this many is published twice.
MALFORMED_EVERY: Final = 400
REPEATED_EVERY: Final = 100
_NOT_ORDERS: Final = (b'{"id": "cut off', b'{"id": null, "amount": 5}', b'{"id": "x", "amount": "a lot"}', b"\xff\xfe")

# The name of each pipeline, and its changes to the example that `penstock pipeline init` writes.
PIPELINES: Final = {
    "transform": ("clean-orders", {}),
    "aggregate": ("revenue", {'topic = "orders"': 'topic = "orders-clean"'}),
    "archive": ("archive-orders", {}),
}
_NEEDED: Final = ("pyspark", "pyarrow", "nats", "matplotlib")
_HEIGHT: Final = 8
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"


class ShopOrder(NamedTuple):
    id: str
    subject: str
    value: bytes


class Sent(NamedTuple):
    messages: int
    repeated: int
    malformed: int

    @property
    def stored(self) -> int:
        return self.messages - self.repeated


def run(orders: int, directory: Path | None = None, spark: SparkSession | None = None) -> bool:
    """Run the demo; return whether all results are right. `spark`: a session to use, which stays open."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise PenstockError(f"the demo needs {', '.join(missing)}: pip install 'penstock[spark,demo]'")
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise PenstockError(f"{directory} is not empty: choose another directory, or remove it first")
    home = (directory or Path(tempfile.mkdtemp(prefix="penstock-demo-"))).resolve()
    home.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    return _Demo(home, console).run(orders, spark)


class _Demo:
    def __init__(self, home: Path, console: Console) -> None:
        self._home = home
        self._console = console
        self._steps = 0
        self._is_correct = True

    def run(self, orders: int, spark: SparkSession | None) -> bool:
        with Broker(self._home / "data", listen="127.0.0.1:0") as broker:
            self._step("Broker:", f"in this process, on {broker.address}; data in {self._home / 'data'}.")
            sent = self._publish(broker, orders)
            with self._session(spark) as session:
                self._run_pipelines(broker, session)
                self._show_letters(broker, sent)
                self._show_revenue(session, broker)
                self._read_back(session, broker, sent)
        self._show_next_steps()
        return self._is_correct

    # ---- publishing

    def _publish(self, broker: Broker, count: int) -> Sent:
        broker.create_topic("orders", partitions=2)
        made = list(_orders(count))
        half = len(made) // 2
        self._step(
            "Orders",
            f"of the last {MINUTES} minutes: half from a NATS client, half from Penstock's client.\n"
            "   Each is acknowledged once it is on disk. Some are published twice, some are malformed.",
        )
        assert broker.address is not None
        started = time.perf_counter()
        asyncio.run(_publish_nats(broker.address, made[:half]))
        with broker.producer() as producer:
            for order in made[half:]:
                producer.publish(order.subject, order.value, message_id=order.id)
        seconds = time.perf_counter() - started
        ids = {order.id for order in made}
        sent = Sent(len(made), len(made) - len(ids), sum(each.startswith("x") for each in ids))
        stored = sum(position.committed for position in broker.topic("orders").positions)
        self._say(f"{output.rate(len(made), seconds)}; {stored:,} stored, {sent.repeated:,} duplicates dropped")
        self._check(stored == sent.stored, f"{sent.stored:,} should be stored")
        return sent

    # ---- Spark

    @contextmanager
    def _session(self, given: SparkSession | None) -> Iterator[SparkSession]:
        from penstock.pipelines.execution import opened

        if given is not None:
            yield given
            return
        self._step("Spark", "starts locally: no jar, and a bundled Java if the machine has none.")
        started = time.perf_counter()
        quiet = {"spark.log.level": "OFF", "spark.ui.showConsoleProgress": "false"}
        with self._console.status("   starting Spark …"), opened("demo", config=quiet) as session:
            self._say(f"{time.perf_counter() - started:.1f} s")
            yield session

    def _run_pipelines(self, broker: Broker, spark: SparkSession) -> None:
        from penstock.pipelines.execution import run as run_pipeline
        from penstock.pipelines.pipeline_file import load

        self._step(
            "Pipelines",
            "clean the orders into a topic, sum the revenue per minute and country into another,\n"
            "   and archive all orders as Parquet. Each row exactly once, even after a crash.",
        )
        done: list[tuple[PipelineProgress, int]] = []
        for kind, (name, changes) in PIPELINES.items():
            pipeline = load(self._write(kind, changes)).at(broker.address)
            with self._console.status(f"   {name}") as status:

                def show(progress: PipelineProgress, status: Status = status) -> None:
                    status.update(f"   {line(progress)}")

                behind = _behind(broker, pipeline)
                done.append((run_pipeline(pipeline, data=self._home / "data", spark=spark, on_batch=show), behind))
        rows = [
            (
                each.name,
                each.kind,
                f"{each.rows:,}",
                f"{each.seconds:.1f} s",
                f"{behind:,}",
                f"{broker.lag(each.name):,}",
            )
            for each, behind in done
        ]
        names = ("pipeline", "kind", "rows", "time", "lag before", "after")
        self._console.print(output.table(names, rows, numbers=("rows", "time", "lag before", "after")))
        self._check(all(broker.lag(each.name) == 0 for each, _ in done), "each pipeline should have read everything")

    def _write(self, kind: str, changes: dict[str, str]) -> Path:
        text = resources.files("penstock.pipelines").joinpath("examples", f"{kind}.toml").read_text()
        for old, new in changes.items():
            assert old in text, f"the example {kind} has no {old}"
            text = text.replace(old, new)
        path = self._home / f"{kind}.toml"
        path.write_text(text)
        return path

    # ---- results

    def _show_letters(self, broker: Broker, sent: Sent) -> None:
        letters = broker.dead_letters(limit=10_000)
        self._step("Dead letters", f"{len(letters):,} malformed messages. None is lost, and each has a reason:")
        firsts: dict[str, DeadLetter] = {letter.reason: letter for letter in reversed(letters)}
        rows = [
            (
                letter.subject,
                f"{letter.topic}/{letter.origin_partition}/{letter.origin_offset}",
                reason,
                repr(letter.value),
            )
            for reason, letter in firsts.items()
        ]
        self._console.print(output.table(("subject", "origin", "reason", "value"), rows))
        self._check(len(letters) == sent.malformed, f"there should be {sent.malformed:,}")

    def _show_revenue(self, spark: SparkSession, broker: Broker) -> None:
        from pyspark.sql import functions

        from penstock.spark import from_json_topic

        assert broker.address is not None
        schema = "window_start timestamp, country string, orders bigint, revenue double"
        windows = from_json_topic(spark, "revenue", schema, servers=broker.address)
        totals = windows.groupBy("country").agg(
            functions.sum("orders").alias("orders"), functions.sum("revenue").alias("revenue")
        )
        self._step("Revenue", "by country and minute, read from the topic [bold]revenue[/] as a table.")
        rows = [(row.country, f"{row.orders:,}", f"{row.revenue:,.2f}") for row in totals.orderBy("country").collect()]
        self._console.print(output.table(("country", "orders", "revenue"), rows, numbers=("orders", "revenue")))
        by_minute = windows.groupBy("window_start").agg(functions.sum("revenue").alias("revenue"))
        minutes = by_minute.orderBy("window_start").collect()
        moments = [row.window_start for row in minutes]
        values = [row.revenue for row in minutes]
        for text in columns(values):
            self._say(text)
        self._say(f"{moments[0]:%H:%M} … {moments[-1]:%H:%M}, revenue per minute; the last windows are still open")
        path = self._home / "revenue.png"
        _plot(moments, values, path)
        self._say(f"as a picture: {path}")
        self._check(bool(rows), "there should be some revenue")

    def _read_back(self, spark: SparkSession, broker: Broker, sent: Sent) -> None:
        self._step("Archive", "and topic, read as one table: history from Parquet, then the log, each row once.")
        assert broker.address is not None
        extra = 1000
        broker.publish_many(("orders", b'{"id": "late"}') for _ in range(extra))
        reader = spark.read.format("penstock").option("servers", broker.address).option("subscribe", "orders")
        rows = reader.option("archive", str(self._home / "archive" / "orders")).load()
        found = rows.select("partition", "offset").distinct().count()
        self._say(f"{found:,} rows, {extra:,} of them published after archiving")
        self._check(found == sent.stored + extra, f"there should be {sent.stored + extra:,}")

    def _show_next_steps(self) -> None:
        data = self._home / "data"
        self._step("Continue", "with this data. In one terminal, and then in another:")
        for command in (
            f"penstock serve --data {data}",
            "penstock fetch orders-clean --count 3",
            "penstock group list",
            f"penstock pipeline run {self._home / 'transform.toml'} --data {data} --follow",
            """penstock publish orders '{"id": "new", "country": "de", "amount": 42}'""",
        ):
            self._say(f"[bold]{command}[/]")

    # ---- output

    def _step(self, title: str, text: str) -> None:
        self._steps += 1
        self._console.print(f"\n[bold]{self._steps}. {title}[/] {text}", soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(f"   {text}", soft_wrap=True)

    def _check(self, is_met: bool, expectation: str) -> None:
        if not is_met:
            self._is_correct = False
            self._console.print(f"   [red]Wrong result: {expectation}.[/]", soft_wrap=True)


def _orders(count: int) -> Iterator[ShopOrder]:
    """Yield orders of the last `MINUTES`, the same every time but for their times; amounts peak in the middle."""
    chance = random.Random(1)
    begin = datetime.now(UTC) - timedelta(minutes=MINUTES)
    for number in range(count):
        at = begin + timedelta(minutes=MINUTES * number / count)
        country = chance.choice(COUNTRIES)
        wave = 1 + 4 * max(0.0, 1 - abs(2 * number / count - 1))
        amount = round(chance.lognormvariate(3, 0.6) * wave, 2)
        fields = {"id": f"o{number}", "customer": f"c{chance.randrange(500)}", "country": country}
        value = json.dumps({**fields, "amount": amount + 1, "at": at.isoformat()}).encode()
        order = ShopOrder(f"o{number}", f"orders.{country}", value)
        if number % MALFORMED_EVERY == MALFORMED_EVERY // 2:
            order = ShopOrder(
                f"x{number}", f"orders.{country}", _NOT_ORDERS[number // MALFORMED_EVERY % len(_NOT_ORDERS)]
            )
        yield order
        if number % REPEATED_EVERY == 0:
            yield order


async def _publish_nats(address: str, orders: Sequence[ShopOrder]) -> None:
    import nats

    client = await nats.connect(f"nats://{address}")
    try:
        for order in orders:
            await client.publish(order.subject, order.value, headers={"Nats-Msg-Id": order.id})
        # The broker answers when all messages are on disk.
        await client.flush()
    finally:
        await client.close()


def _behind(broker: Broker, pipeline: Pipeline) -> int:
    """Return the number of messages in the pipeline's source topic."""
    assert pipeline.source.topic is not None
    positions = broker.topic(pipeline.source.topic).positions
    return sum(position.committed - position.start for position in positions)


def columns(values: Sequence[float], height: int = _HEIGHT) -> Iterator[str]:
    """Yield the lines of a chart with a column of blocks for each value."""
    top = max(values, default=0) or 1
    eighths = [round(8 * height * value / top) for value in values]
    for row in range(height - 1, -1, -1):
        yield "".join(_BLOCKS[min(8, max(0, each - 8 * row))] * 2 for each in eighths)


def _plot(moments: Sequence[datetime], values: Sequence[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(values)), values)
    shown = range(0, len(moments), 5)
    axes.set_xticks(shown, [f"{moments[index]:%H:%M}" for index in shown])
    axes.set_title("Revenue per minute")
    figure.savefig(path)
