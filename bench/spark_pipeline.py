"""A pipeline from topic to topic with dead letters, against a stream written by hand that has none."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from bench import peers
from bench.measure import Bench, Line
from bench.peers import Peer
from bench.spark import PARTITIONS, start
from penstock.client.sync import Client

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_ORDERS: Final = "orders"
_CLEAN: Final = "orders-clean"
# Of so many messages one is not JSON.
_BAD: Final = 100
_SCHEMA: Final = "id string NOT NULL, customer string, country string, amount double, at timestamp"
_SQL: Final = (
    "SELECT id, customer, upper(country) AS country, round(amount * 0.2, 2) AS tax, at FROM source WHERE amount > 1"
)
_FILE: Final = """
name = "{name}"
kind = "transform"
[source]
servers = "{servers}"
topic = "orders"
schema = "{schema}"
[transform]
sql = "{sql}"
[sink]
topic = "orders-clean"
key = "id"
"""
_ORDER: Final = (
    'concat(\'{"id":"o\', id, \'","customer":"c\', id % 10000, \'","country":"de","amount":\', id % 97, '
    "'.5,\"at\":\"2030-01-31T12:00:', lpad(id % 60, 2, '0'), '.5Z\"}')"
)


def measure(bench: Bench) -> Iterator[Line]:
    what, rows = "Spark, transform pipeline", bench.choose(1_000_000, 2_000)
    with peers.penstock(bench.directory / "penstock", "fsync") as server, start(bench) as spark:
        bench.progress(f"{what}: fill a topic")
        _fill(spark, server, rows)
        ours, theirs = _pipeline(bench, spark, server, rows), _by_hand(bench, spark, server, rows)
        our_seconds, their_seconds = bench.disk(what, ours, theirs, bench.choose(3, 1))
    yield Line(
        section="spark pipeline",
        what=what,
        against="a stream by hand, without dead letters",
        unit="rows/s",
        penstock=rows / our_seconds,
        limit=rows / their_seconds,
        ratio_of="speed",
        target=0.8,
    )


def _fill(spark: SparkSession, server: Peer, rows: int) -> None:
    with Client(_address(server)) as client:
        client.create_topic(_ORDERS, partitions=PARTITIONS)
        client.create_topic(_CLEAN, partitions=PARTITIONS)
    value = f"if(id % {_BAD} = 0, 'not JSON', {_ORDER}) AS value"
    made = spark.range(0, rows, numPartitions=PARTITIONS).selectExpr(value, "concat('c', id % 10000) AS key")
    made.write.format("penstock").mode("append").options(servers=_address(server), topic=_ORDERS).save()


def _pipeline(bench: Bench, spark: SparkSession, server: Peer, rows: int) -> Callable[[], float]:
    from penstock.pipelines import queries
    from penstock.pipelines.pipeline_file import load

    def run() -> float:
        name = f"clean-{uuid.uuid4().hex[:8]}"
        file = bench.directory / f"{name}.toml"
        file.write_text(_FILE.format(name=name, servers=_address(server), schema=_SCHEMA, sql=_SQL))
        pipeline, checkpoint = load(file), str(bench.directory / name)
        return _ended(lambda: queries.start(spark, pipeline, checkpoint, {"availableNow": True})[0], rows)

    return run


def _by_hand(bench: Bench, spark: SparkSession, server: Peer, rows: int) -> Callable[[], float]:
    def run() -> float:
        checkpoint = str(bench.directory / f"checkpoint-{uuid.uuid4().hex}")
        given = {"servers": _address(server), "topic": _CLEAN, "checkpointLocation": checkpoint}
        writer = _made(spark, server).writeStream.format("penstock").options(**given)
        return _ended(lambda: writer.trigger(availableNow=True).start(), rows)

    return run


def _made(spark: SparkSession, server: Peer) -> DataFrame:
    from pyspark.sql import functions as fn

    given = {"servers": _address(server), "subscribe": _ORDERS, "startingOffsets": "earliest"}
    read = fn.from_json(fn.col("value").cast("string"), _SCHEMA).alias("read")
    parsed = spark.readStream.format("penstock").options(**given).load().select(read).select("read.*")
    parsed.where("id IS NOT NULL").createOrReplaceTempView("source")
    made = spark.sql(_SQL)
    return made.select(fn.to_json(fn.struct("*")).alias("value"), fn.col("id").alias("key"))


def _ended(begin: Callable[[], StreamingQuery], rows: int) -> float:
    begun = time.perf_counter()
    query = begin()
    query.awaitTermination()
    seconds = time.perf_counter() - begun
    assert sum(each.numInputRows for each in query.recentProgress) == rows, "the source is read once"
    return seconds


def _address(server: Peer) -> str:
    return f"127.0.0.1:{server.port}"
