"""The tables in which pipelines of kind enrich look up rows.

A lookup is read as a whole, kept in Spark, and read again for each batch or when it is too old. All rows of a batch see
the same version of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as fn

from penstock.errors import PenstockError
from penstock.pipelines import frames
from penstock.pipelines.key_types import seconds
from penstock.pipelines.pipeline import EnrichSettings, Pipeline, PipelineLookup
from penstock.spark.json_topics import SOURCE, parse_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(spark: SparkSession, pipeline: Pipeline) -> DataFrame:
    """Return the lookup as it is now. Spark may read it later, and again."""
    lookup = pipeline.lookup
    assert lookup is not None
    if lookup.topic is not None:
        servers = lookup.servers or pipeline.source.servers
        options = {"servers": servers, "subscribe": lookup.topic, "startingOffsets": "earliest", **lookup.options}
        return of_messages(spark.read.format("penstock").options(**options).load(), lookup)
    if lookup.parquet is not None:
        return spark.read.parquet(lookup.parquet)
    from penstock.spark import delta_table

    assert lookup.delta is not None
    return spark.createDataFrame(delta_table.read(lookup.delta))


def without_rows(spark: SparkSession, pipeline: Pipeline) -> DataFrame:
    """Return a table with the columns of the lookup. No broker is needed."""
    lookup = pipeline.lookup
    assert lookup is not None
    if lookup.topic is not None:
        return of_messages(spark.createDataFrame([], SOURCE), lookup)
    if lookup.delta is None:
        return read(spark, pipeline).limit(0)
    from penstock.spark import delta_table

    return spark.createDataFrame(delta_table.schema(lookup.delta).empty_table())


def of_messages(messages: DataFrame, lookup: PipelineLookup) -> DataFrame:
    """Return the latest row of each key of a topic, with the key as text. Values that do not parse are left out."""
    assert lookup.schema is not None
    rows = frames.good(parse_json(frames.latest(messages), lookup.schema))
    return rows.withColumn("_key", fn.col("_key").cast("string"))


class FreshLookup:
    """The lookup of a run: one version at a time, which is replaced when it is too old."""

    def __init__(self, pipeline: Pipeline) -> None:
        settings = pipeline.settings
        assert isinstance(settings, EnrichSettings)
        self._pipeline = pipeline
        self._keys = settings.lookup_keys
        self._age_s = 0.0 if settings.refresh is None else seconds(settings.refresh)
        self._rows: DataFrame | None = None
        self._read_s = 0.0

    def rows(self, spark: SparkSession) -> DataFrame:
        """Return the rows. Raise PenstockError if a key has several."""
        now_s = time.monotonic()
        if self._rows is None or now_s - self._read_s >= self._age_s:
            # A checkpoint, unlike a cache, is never read again. Spark drops it when nothing refers to it any more.
            self._rows = read(spark, self._pipeline).localCheckpoint()
            self._read_s = now_s
            check_unique(self._rows, self._keys)
        return self._rows


def check_unique(rows: DataFrame, keys: Sequence[str]) -> None:
    """Raise PenstockError if several rows have one key: they would multiply the rows that find them."""
    several = rows.groupBy(*map(frames.named, keys)).count().where("count > 1").drop("count").first()
    if several is not None:
        shown = ", ".join(f"{name} = {value!r}" for name, value in several.asDict().items())
        raise PenstockError(f"the lookup has several rows with {shown}: it must have one for each key")
