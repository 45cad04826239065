"""A topic of JSON messages as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.spark.connection import SERVERS
from penstock.spark.pipeline import parse_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def from_json_topic(
    spark: SparkSession,
    topic: str,
    schema: str | StructType,
    *,
    servers: str = SERVERS,
    stream: bool = False,
    **options: str | float,
) -> DataFrame:
    """The fields of a topic's JSON values as columns: those of `schema`, such as "id long, price double".

    Behind them are the message's own, as _topic, _partition, _offset, …, and `_reason`: why a value is no such JSON,
    null if it is. Nothing is dropped: `where("_reason is null")` does that.

    `stream`: as a stream. `options`: those of the source, such as `startingOffsets="latest"`.
    """
    reader = (spark.readStream if stream else spark.read).format("penstock")
    messages = reader.options(**{"servers": servers, "subscribe": topic, **options}).load()
    return parse_json(messages, schema)
