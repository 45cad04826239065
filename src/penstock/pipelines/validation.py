"""The checks of a pipeline file that need Spark: whether its schema, SQL, columns and function fit together.

They run on tables without rows, so nothing is read and no broker is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql.functions import expr, lit

from penstock.errors import BadConfig, PenstockError
from penstock.pipelines import bridge, failure, frames, lookups, stateful, transformations
from penstock.pipelines.pipeline import (
    AggregateSettings,
    ArchiveSettings,
    BridgeSettings,
    DeadLetterSettings,
    DeduplicateSettings,
    EnrichSettings,
    JoinSettings,
    Key,
    Pipeline,
    PipelineSource,
    PythonSettings,
    ReplaySettings,
    SessionizeSettings,
    SqlSettings,
    TransformSettings,
    UpsertSettings,
)
from penstock.spark.archive_sink import SPARK_TYPES
from penstock.spark.json_topics import REASON, RESERVED, SOURCE, parse_json
from penstock.topic_schema.flatten import Flattener

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def check(spark: SparkSession, pipeline: Pipeline) -> None:
    """Raise BadConfig with every problem, and its line in the file."""
    validator = _Validator(spark, pipeline)
    validator.run()
    if validator.problems:
        raise BadConfig(validator.problems)


class _Validator:
    def __init__(self, spark: SparkSession, pipeline: Pipeline) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self.problems: list[str] = []

    def run(self) -> None:
        is_typed = self._pipeline.is_typed
        rows = self._spark.createDataFrame([], SOURCE)
        tables = []
        for key, source in zip(self._pipeline.source_keys, self._pipeline.sources, strict=True):
            tables.append(self._parsed(rows, key, source) if is_typed else rows)
        # Without the columns there is nothing else to check.
        if any(table is None for table in tables):
            return
        made = self._made([table for table in tables if table is not None])
        if made is not None:
            self._check_sink(made)

    def _parsed(self, rows: DataFrame, key: Key, source: PipelineSource) -> DataFrame | None:
        assert source.schema is not None
        with self._reporting(*key, "schema"):
            return frames.good(parse_json(rows, source.schema))
        return None

    def _made(self, tables: list[DataFrame]) -> DataFrame | None:
        """Return the rows that are written; None if a problem prevents that, or the kind has no columns to check."""
        settings, [table, *more] = self._pipeline.settings, tables
        match settings:
            case TransformSettings():
                return self._transformed(table, settings)
            case AggregateSettings() | SessionizeSettings():
                return self._aggregated(table, settings)
            case DeduplicateSettings():
                self._check_time(table, settings.time, "deduplicate", "time")
                self._check_columns(table, settings.by, "deduplicate", "by")
                return table
            case JoinSettings():
                return self._joined(table, more[0], settings)
            case SqlSettings():
                return self._queried(tables, settings)
            case EnrichSettings():
                return self._enriched(table, settings)
            case PythonSettings():
                return self._processed(table, settings)
            case BridgeSettings() if self._pipeline.source.parquet is not None:
                return self._published(settings)
            case UpsertSettings():
                self._check_upsert(table, settings)
            case ReplaySettings():
                return table
            case ArchiveSettings(flatten=True):
                with self._reporting("source", "schema"):
                    Flattener(self._pipeline.source.schema or "", SPARK_TYPES)
            case DeadLetterSettings():
                self._check_letters(table, settings)
            case _:
                pass
        return None

    def _transformed(self, table: DataFrame, settings: TransformSettings) -> DataFrame | None:
        if settings.sql is not None:
            with self._reporting("transform", "sql"):
                return frames.transform(table, settings.sql)
            return None
        try:
            function = transformations.function_of(self._pipeline)
        except BadConfig as error:
            self.problems += error.problems
            return None
        with self._reporting("transform", "python"):
            return frames.transform(table, function)
        return None

    def _aggregated(self, table: DataFrame, settings: AggregateSettings | SessionizeSettings) -> DataFrame | None:
        before, kind = len(self.problems), self._pipeline.kind
        self._check_time(table, settings.time, kind, "time")
        self._check_columns(table, settings.by, kind, "by")
        for name, sql in settings.measures.items():
            with self._reporting(kind, "measures", name):
                table.groupBy().agg(expr(sql))
        if len(self.problems) == before:
            with self._reporting(kind):
                made = transformations.transformed([table], self._pipeline)
                if isinstance(settings, SessionizeSettings):
                    self._check_stream()
                return made
        return None

    def _joined(self, left: DataFrame, right: DataFrame, settings: JoinSettings) -> DataFrame | None:
        before = len(self.problems)
        right_time = settings.right_time or settings.time
        self._check_columns(left, settings.on, "join", "on", side="left")
        self._check_columns(right, settings.on, "join", "on", side="right")
        self._check_time(left, settings.time, "join", "time", side="left")
        self._check_time(right, right_time, "join", "right_time" if settings.right_time else "time", side="right")
        if len(self.problems) == before:
            with self._reporting("join"):
                return transformations.transformed([left, right], self._pipeline)
        return None

    def _queried(self, tables: list[DataFrame], settings: SqlSettings) -> DataFrame | None:
        before = len(self.problems)
        for key, source, table in zip(self._pipeline.source_keys, self._pipeline.sources, tables, strict=True):
            if source.time is not None:
                self._check_time(table, source.time, *key, "time", side=".".join(key))
        if len(self.problems) > before:
            return None
        with self._reporting("sql", "query"):
            made = transformations.transformed(tables, self._pipeline)
            frames.to_json(made, topic="-")
            self._check_stream(settings.mode)
            return made
        return None

    def _enriched(self, table: DataFrame, settings: EnrichSettings) -> DataFrame | None:
        lookup = self._lookup()
        if lookup is None:
            return None
        before = len(self.problems)
        self._check_columns(table, settings.on, "enrich", "on")
        key = "lookup_on" if settings.lookup_on else "on"
        self._check_columns(lookup, settings.lookup_keys, "enrich", key, side="lookup")
        for name, sql in (settings.columns or {}).items():
            with self._reporting("enrich", "columns", name):
                lookup.select(expr(sql))
        if len(self.problems) == before:
            with self._reporting("enrich"):
                return frames.good(
                    transformations.enriched(table.withColumn(REASON, lit(None)), lookup, self._pipeline)
                )
        return None

    def _processed(self, table: DataFrame, settings: PythonSettings) -> DataFrame | None:
        before = len(self.problems)
        self._check_columns(table, settings.by, "python", "by")
        if settings.time is not None:
            self._check_time(table, settings.time, "python", "time")
        try:
            stateful.check_installed(self._pipeline)
            stateful.load(self._pipeline)
        except BadConfig as error:
            self.problems += error.problems
        made = None
        with self._reporting("python", "output"):
            made = self._spark.createDataFrame([], settings.output)
        if len(self.problems) == before:
            with self._reporting("python", "processor"):
                stateful.check_init(table, self._pipeline)
                return made
        return None

    def _published(self, settings: BridgeSettings) -> DataFrame | None:
        source = self._pipeline.source
        with self._reporting("source", "parquet" if source.schema is None else "schema"):
            table = self._spark.createDataFrame([], bridge.columns(self._spark, self._pipeline))
            with self._reporting("bridge", "value"):
                if settings.value is not None:
                    table.select(expr(settings.value))
                return table
        return None

    def _check_upsert(self, table: DataFrame, settings: UpsertSettings) -> None:
        before = len(self.problems)
        self._check_columns(table, (settings.key,), "upsert", "key")
        if len(self.problems) > before:
            return
        with self._reporting("upsert"):
            changes = transformations.transformed([table], self._pipeline)
        if len(self.problems) > before:
            return
        with self._reporting("sink", "delta"):
            from penstock.spark.delta_table import UpsertTable

            assert self._pipeline.sink is not None
            assert self._pipeline.sink.delta is not None
            UpsertTable(self._pipeline.sink.delta, settings.key).check(changes.drop(transformations.DELETED).toArrow())

    def _lookup(self) -> DataFrame | None:
        lookup = self._pipeline.lookup
        assert lookup is not None
        key = "parquet" if lookup.parquet is not None else "delta"
        with self._reporting("lookup", "schema" if lookup.topic is not None else key):
            return lookups.without_rows(self._spark, self._pipeline)
        return None

    def _check_stream(self, mode: str = "append") -> None:
        """Raise PySparkException if Spark can run the query on tables, but not on streams.

        Spark decides that when a query is started, so this starts it, on streams that have no rows and end at once.
        """
        with TemporaryDirectory(prefix="penstock-") as directory:
            (Path(directory) / "in").mkdir()
            rows = self._spark.readStream.schema(SOURCE).parquet(f"{directory}/in")
            tables = [
                frames.good(transformations.parsed(rows, self._pipeline, side))
                for side in range(len(self._pipeline.sources))
            ]
            made = transformations.transformed(tables, self._pipeline)
            writer = made.writeStream.format("noop").outputMode(mode).trigger(availableNow=True)
            writer.option("checkpointLocation", f"{directory}/checkpoint").start().awaitTermination()

    def _check_letters(self, table: DataFrame, settings: DeadLetterSettings) -> None:
        if settings.redrive is not None:
            with self._reporting("dead_letters", "redrive"):
                frames.letters(table).where(settings.redrive)

    def _check_columns(self, table: DataFrame, names: tuple[str, ...], *key: str, side: str = "source") -> None:
        for name in names:
            if name not in table.columns:
                self._report(key, f"names {name!r}, which [{side}] schema does not have: it has {_columns(table)}")

    def _check_time(self, table: DataFrame, name: str, *key: str, side: str = "source") -> None:
        self._check_columns(table, (name,), *key, side=side)
        if name in table.columns and (kind := table.schema[name].dataType.simpleString()) != "timestamp":
            self._report(key, f"names {name!r}, which is of type {kind}: it must be a timestamp")

    def _check_sink(self, made: DataFrame) -> None:
        sink = self._pipeline.sink
        if sink is None or sink.topic is None:
            return
        for name, sql in (("key", sink.key), ("subject", sink.subject)):
            if sql is not None:
                with self._reporting("sink", name):
                    made.select(expr(sql))

    @contextmanager
    def _reporting(self, *key: str) -> Iterator[None]:
        """Report an error of Spark as a problem of this key."""
        try:
            yield
        except (PySparkException, PenstockError, ValueError, TypeError) as error:
            found = failure.describe(error)
            self.problems.append(f"{self._where(key, found.line)}: {found.sentence}")
        except Exception as error:
            # The user's function may raise anything; from anything else this would be our own bug.
            if key not in (("transform", "python"), ("python", "processor")):
                raise
            self._report(key, f"raised {type(error).__name__}: {error}")

    def _where(self, key: Key, line: int | None) -> str:
        """Return the start of the message, with the line within the SQL if Spark reports one."""
        where = self._pipeline.where(*key)
        begin = self._pipeline.lines.texts.get(key)
        sql = self._sql(key)
        if begin is None or line is None or sql is None:
            return where
        # Spark gets the SQL without the blank lines above it.
        begin += sql[: len(sql) - len(sql.lstrip())].count("\n")
        _, _, named = where.partition(": ")
        return f"{self._pipeline.path}:{begin + line - 1}: {named}"

    def _sql(self, key: Key) -> str | None:
        """Return the query that is the value of a key, None if that is something else."""
        match self._pipeline.settings, key:
            case (TransformSettings(sql=sql), ("transform", "sql")) | (SqlSettings(query=sql), ("sql", "query")):
                return sql
        return None

    def _report(self, key: Key, what: str) -> None:
        self.problems.append(f"{self._pipeline.where(*key)} {what}")


def _columns(table: DataFrame) -> str:
    return ", ".join(name for name in table.columns if name not in RESERVED)
