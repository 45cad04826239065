"""What the connector does on every version of PySpark, for `tests/spark/test_versions.py`.

`python -m tests.support.spark_core SERVERS DIRECTORY` writes, reads, streams and archives, and prints what it found as
one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark

from penstock.client.sync import Client
from penstock.spark import register, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 1000


def main(servers: str, directory: Path) -> dict[str, Any]:
    config = {"spark.log.level": "ERROR", "spark.sql.warehouse.dir": str(directory / "warehouse")}
    spark = session("core", master="local[2]", config=config)
    register(spark)  # again: it is there already
    found = {"version": pyspark.__version__}
    try:
        found |= _batches(spark, servers, directory) | _streams(spark, servers, directory)
        found |= {"limit": _limited(spark, servers, directory)}
    finally:
        spark.stop()
    return found


def _batches(spark: SparkSession, servers: str, directory: Path) -> dict[str, Any]:
    """Rows from Parquet to a topic and back. Spark itself sums up both."""
    path = str(directory / "rows")
    spark.range(ROWS).selectExpr(
        "cast(id as string) as key",
        "cast(id * 7 as string) as value",
        "if(id % 2 = 0, map('Number', cast(id as string)), map()) as headers",
    ).write.parquet(path)
    rows = spark.read.parquet(path)
    for _ in range(2):
        # The second is a repetition, and stores nothing.
        rows.write.format("penstock").mode("append").options(servers=servers, topic="numbers", txnId="once").save()
    numbers = spark.read.format("penstock").options(servers=servers, subscribe="numbers", includeHeaders="true").load()
    return {
        "written": _sum(rows),
        "read": _sum(numbers),
        "filtered": numbers.where("partition = 0 and offset >= 100 and offset < 150").count(),
        "with headers": numbers.where("headers['Number'] = cast(key as string)").count(),
    }


def _streams(spark: SparkSession, servers: str, directory: Path) -> dict[str, Any]:
    """Topic to topic and topic to archive, in two runs; the archive is read together with the log."""
    counts = []
    with Client(servers) as client:
        for run in range(2):
            if run == 1:
                for number in range(ROWS, ROWS + 10):
                    client.publish("numbers", b"%d" % (7 * number), key=b"%d" % number)
            numbers = _stream(spark, servers, startingOffsets="earliest", includeHeaders="true")
            copies = numbers.select("key", "value", "headers")
            _finish(copies, directory / "copied", servers=servers, topic="copies")
            _finish(numbers, directory / "archived", archive=str(directory / "archive"))
            counts.append(sum(each.end - each.start for each in client.topic("copies").positions))
        late = _late(spark, client, servers, directory)
    archived = {"subscribe": "numbers", "archive": str(directory / "archive"), "servers": servers}
    return {
        "copied": counts,
        "sums": [
            _sum(spark.read.format("penstock").options(servers=servers, subscribe="copies").load()),
            _sum(spark.read.format("penstock").options(**archived).load().where("key <> 'late'")),
        ],
        "late": late,
    }


def _late(spark: SparkSession, client: Client, servers: str, directory: Path) -> list[int]:
    """A query that begins at the end of the log. It is stopped and goes on, and misses nothing that came meanwhile."""
    rows = _stream(spark, servers).selectExpr("cast(cast(value as string) as long) as value")
    for number in (1, 2):
        writer = rows.writeStream.format("parquet").option("path", str(directory / "late"))
        query = writer.option("checkpointLocation", str(directory / "late-at")).start()
        try:
            if number == 1:
                query.processAllAvailable()
            client.publish("numbers", b"%d" % (1_000_000 + number), key=b"late")
            query.processAllAvailable()
        finally:
            query.stop()
        client.publish("numbers", b"%d" % (2_000_000 + number), key=b"late")
    return sorted(row["value"] for row in spark.read.parquet(str(directory / "late")).collect())


def _limited(spark: SparkSession, servers: str, directory: Path) -> Any:
    """Return the rows of each batch with a limit, or the error if this version has no limits."""
    limited = _stream(
        spark, servers, startingOffsets="earliest", endingOffsets='{"numbers":{"0":100}}', maxOffsetsPerTrigger="40"
    )
    try:
        query = _finish(limited, directory / "limited", kind="noop")
    except Exception as error:  # noqa: BLE001  it is the result
        return next(line for line in str(error).splitlines() if "maxOffsetsPerTrigger" in line).partition("Error: ")[2]
    return [each.numInputRows for each in query.recentProgress if each.numInputRows]


def _stream(spark: SparkSession, servers: str, **options: str) -> DataFrame:
    return spark.readStream.format("penstock").options(servers=servers, subscribe="numbers", **options).load()


def _finish(rows: DataFrame, checkpoint: Path, kind: str = "penstock", **options: str) -> Any:
    writer = rows.writeStream.format(kind).options(checkpointLocation=str(checkpoint), **options)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def _sum(rows: DataFrame) -> list[int]:
    found = rows.selectExpr("count(*)", "sum(cast(cast(value as string) as long))", "count(distinct key)").collect()
    return [*found[0]]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
