"""Closing the last windows or sessions, or writing the last rows of a left join, at the end of a run.

Spark closes a window when the watermark passes its end, and only rows advance the watermark, so the last windows of a
topic stay open. A flush is one more batch, without rows, whose watermark closes all of them. It is planned the way
Spark plans its batches: as a file in the offset log of the checkpoint. Spark runs it when the query is started again,
like any batch that was planned and not committed. So it has a number, is stored once, and is run by the next run if
this one is killed.

The watermark stays where the flush put it. A later row for a flushed window is late, like any row behind the watermark:
it is dropped and counted. No window is written twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.pipelines.pipeline import (
    AggregateSettings,
    JoinSettings,
    Pipeline,
    PythonSettings,
    SessionizeSettings,
    SqlSettings,
)
from penstock.spark.durable_files import write_durably

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_VERSION: Final = "v1"


def check(pipeline: Pipeline) -> None:
    """Raise PenstockError if the pipeline never has anything to flush."""
    match pipeline.settings:
        case AggregateSettings(mode="append") | SessionizeSettings() | JoinSettings(how="left"):
            return
        case AggregateSettings():
            why = "with mode = 'update' all windows have been written already"
        case JoinSettings():
            why = "an inner join writes rows as soon as they match"
        case SqlSettings():
            raise PenstockError(
                f"pipeline {pipeline.name} cannot be flushed: only Spark knows which rows a query of kind sql holds "
                "back. Omit --flush"
            )
        case PythonSettings():
            raise PenstockError(
                f"pipeline {pipeline.name} cannot be flushed: only its processor knows which rows it holds back. Omit "
                "--flush"
            )
        case _:
            why = f"a pipeline of kind {pipeline.kind} holds no rows back"
    raise PenstockError(f"pipeline {pipeline.name} has nothing to flush: {why}. Omit --flush")


def plan(spark: SparkSession, pipeline: Pipeline, checkpoint: Path) -> bool:
    """Plan a batch that closes all open windows. Return whether there is one to run."""
    query = checkpoint / "rows"
    last = _last(query / "commits")
    if last is None:
        return False
    if _last(query / "offsets") != last:
        raise PenstockError(f"the last batch in {query} is not committed: run the pipeline again")
    closing_ms = _closing_ms(spark, pipeline, query)
    if closing_ms is None:
        return False
    write_durably(query / "offsets" / str(last + 1), _planned(query / "offsets" / str(last), closing_ms))
    return True


def _last(log: Path) -> int | None:
    if not log.is_dir():
        return None
    return max((int(path.name) for path in log.iterdir() if path.name.isdecimal()), default=None)


def _closing_ms(spark: SparkSession, pipeline: Pipeline, query: Path) -> int | None:
    """Return the watermark in milliseconds since 1970 that closes everything in the state; None if that is empty."""
    from pyspark.sql import functions as fn

    from penstock.pipelines import frames

    found: DataFrame
    closing: Column
    match pipeline.settings:
        case AggregateSettings():
            found, closing = spark.read.format("statestore").load(str(query)), fn.col("key.window.end")
        case SessionizeSettings():
            found, closing = spark.read.format("statestore").load(str(query)), fn.col("value.session_window.end")
        case JoinSettings(time=time, within=within):
            found = spark.read.format("statestore").option("joinSide", "left").load(str(query)).select("value.*")
            # A row on the right at this very time would still match, so the watermark must be later.
            closing = frames.named(time) + fn.expr(f"INTERVAL '{within}'") + fn.expr("INTERVAL '1 millisecond'")
        case _:
            raise AssertionError("check() refuses other kinds")
    row = found.agg(fn.max(fn.unix_micros(closing.cast("timestamp"))).alias("closing")).first()
    assert row is not None, "an aggregate without groups has one row"
    return None if row["closing"] is None else -(-int(row["closing"]) // 1000)


def _planned(before: Path, watermark_ms: int) -> str:
    """Return the log entry of a batch with the end offsets of the one before and another watermark."""
    version, *rest = before.read_text().splitlines()
    metadata: dict[str, Any] = json.loads(rest[0]) if rest else {}
    if version != _VERSION or "batchWatermarkMs" not in metadata:
        raise PenstockError(f"{before} has an unknown format: --flush does not work with this version of Spark")
    metadata["batchWatermarkMs"] = max(watermark_ms, metadata["batchWatermarkMs"])
    metadata["batchTimestampMs"] = SystemClock().now_us() // 1000
    return "\n".join([version, json.dumps(metadata, separators=(",", ":")), *rest[1:]])
