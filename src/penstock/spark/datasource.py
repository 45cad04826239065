"""`format("penstock")`: the entry point of Spark to the source and the sink."""

# Method names are Spark's.
# ruff: noqa: N802

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# The module that Spark runs to push filters down. Only then may a reader have `pushFilters`: elsewhere Spark refuses
# such a reader.
_PUSHDOWN: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class PenstockDataSource(DataSource):
    """Topics as tables and streams, and tables and streams as topics."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        from penstock.spark import options, row

        return row.ddl(has_headers=options.has_headers(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark import options
        from penstock.spark.source import BatchReader

        given = options.read(self.options, is_stream=False)
        if _PUSHDOWN not in sys.modules:
            return BatchReader(given, schema)
        from penstock.spark.pushdown import FilteringReader

        return FilteringReader(given, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from penstock.spark import options, versions

        given = options.read(self.options, is_stream=True)
        if versions.has_read_limits():
            from penstock.spark.stream import StreamReader

            return StreamReader(given, schema)
        from penstock.spark.source import UnlimitedStreamReader

        return UnlimitedStreamReader(given, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if "archive" in self.options:
            from penstock.spark import archive_sink

            return archive_sink.writer(self.options, schema, overwrite)
        from penstock.spark import sink

        return sink.writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        if "archive" in self.options:
            from penstock.spark import archive_sink

            return archive_sink.stream_writer(self.options, schema)
        from penstock.spark import sink

        return sink.stream_writer(self.options, schema)
