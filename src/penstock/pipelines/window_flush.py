"""Closing what is open at the end of a run: the last windows of an aggregation, the last rows of a left join.

Spark closes a window when the watermark passes its end, and only rows move the watermark: behind the last row of a
topic the last windows stay open. A flush is one more batch, without rows, whose watermark is where the last of them
closes. It is planned as Spark plans its batches, by a file in the checkpoint's offset log, and Spark runs it when the
query is started again, as it runs any batch that was planned and not done. So it has a number, is stored once, and is
run by the next run if this one is killed.

The watermark stays where the flush put it. A row that comes later for a window which was flushed is late, like any
other that comes behind the watermark: it is left out and counted. No window is written twice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.pipelines.pipeline import AggregateSettings, JoinSettings, Pipeline
from penstock.spark.manifest import sync_directory

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_VERSION: Final = "v1"


def check(pipeline: Pipeline) -> None:
    """Raise PenstockError if a flush would write nothing."""
    match pipeline.settings:
        case AggregateSettings(mode="append") | JoinSettings(how="left"):
            return
        case AggregateSettings():
            why = "with mode = 'update' all windows are written already"
        case JoinSettings():
            why = "an inner join writes rows as soon as they match"
        case _:
            why = f"a pipeline of kind {pipeline.kind} keeps no rows back"
    raise PenstockError(f"pipeline {pipeline.name} has nothing to flush: {why}. Leave --flush out")


def plan(spark: SparkSession, pipeline: Pipeline, checkpoint: Path) -> bool:
    """Plan a batch that closes all that is open; whether there is one to run."""
    query = checkpoint / "rows"
    last = _last(query / "commits")
    if last is None:
        return False
    if _last(query / "offsets") != last:
        raise PenstockError(f"the last batch in {query} is not done: run the pipeline again")
    closing_ms = _closing_ms(spark, pipeline, query)
    if closing_ms is None:
        return False
    _write(query / "offsets" / str(last + 1), _planned(query / "offsets" / str(last), closing_ms))
    return True


def _last(log: Path) -> int | None:
    if not log.is_dir():
        return None
    return max((int(path.name) for path in log.iterdir() if path.name.isdecimal()), default=None)


def _closing_ms(spark: SparkSession, pipeline: Pipeline, query: Path) -> int | None:
    """The watermark, in ms since 1970, that closes all that is in the state; None if nothing is."""
    from pyspark.sql import functions as fn

    from penstock.pipelines import frames

    found: DataFrame
    closing: Column
    match pipeline.settings:
        case AggregateSettings():
            found, closing = spark.read.format("statestore").load(str(query)), fn.col("key.window.end")
        case JoinSettings(time=time, within=within):
            found = spark.read.format("statestore").option("joinSide", "left").load(str(query)).select("value.*")
            # A row on the right at this time would still match: the watermark must be behind it.
            closing = frames.named(time) + fn.expr(f"INTERVAL '{within}'") + fn.expr("INTERVAL '1 millisecond'")
        case _:
            raise AssertionError("it was checked")
    row = found.agg(fn.max(fn.unix_micros(closing.cast("timestamp"))).alias("closing")).first()
    assert row is not None, "a maximum has one row"
    return None if row["closing"] is None else -(-int(row["closing"]) // 1000)


def _planned(before: Path, watermark_ms: int) -> str:
    """The entry of a batch that ends where the one before it does, with another watermark."""
    version, *rest = before.read_text().splitlines()
    metadata: dict[str, Any] = json.loads(rest[0]) if rest else {}
    if version != _VERSION or "batchWatermarkMs" not in metadata:
        raise PenstockError(f"{before} has a form that is not known: this Spark cannot flush. Leave --flush out")
    metadata["batchWatermarkMs"] = max(watermark_ms, metadata["batchWatermarkMs"])
    metadata["batchTimestampMs"] = SystemClock().now_us() // 1000
    return "\n".join([version, json.dumps(metadata, separators=(",", ":")), *rest[1:]])


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    # Spark passes over names that begin with a dot.
    aside = path.with_name(f".{path.name}.flush")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)
