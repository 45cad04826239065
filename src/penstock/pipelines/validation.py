"""What only Spark can tell of a pipeline file: whether its schema, its SQL, its columns and its function fit together.

It is tried on tables without rows, so nothing is read and no broker is needed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.sql.functions import expr

from penstock.errors import BadConfig
from penstock.pipelines import failure, frames
from penstock.pipelines.pipeline import (
    KINDS,
    AggregateSettings,
    DeadLetterSettings,
    DeduplicateSettings,
    JoinSettings,
    Pipeline,
    ReplaySettings,
    Source,
    TransformSettings,
)
from penstock.spark.json_topics import RESERVED, parse_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SOURCE: Final = (
    "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, subject string, "
    "headers map<string,string>"
)


def check(spark: SparkSession, pipeline: Pipeline) -> None:
    """Raises BadConfig, with the line of the file where something does not fit."""
    checking = _Checking(spark, pipeline)
    checking.run()
    if checking.problems:
        raise BadConfig(checking.problems)


def function_of(pipeline: Pipeline) -> Callable[[DataFrame], DataFrame]:
    """That which [transform] python names. Its module is looked for beside the file first."""
    assert isinstance(pipeline.settings, TransformSettings)
    assert pipeline.settings.python is not None
    where = pipeline.where("transform", "python")
    module_name, _, name = pipeline.settings.python.partition(":")
    directory = str(pipeline.directory)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise BadConfig(
                [f"{where}: the module {module_name} needs {error.name!r}, which is not installed"]
            ) from error
        raise BadConfig(
            [f"{where}: there is no module {module_name!r} in {directory} or where Python looks else"]
        ) from error
    except Exception as error:  # whatever a module of others does when it is loaded
        raise BadConfig([f"{where}: the module {module_name} raised {type(error).__name__}: {error}"]) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise BadConfig([f"{where}: the module {module_name} has no function {name!r}"])
    return found  # type: ignore[no-any-return]


class _Checking:
    def __init__(self, spark: SparkSession, pipeline: Pipeline) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self.problems: list[str] = []

    def run(self) -> None:
        kind = KINDS[self._pipeline.kind]
        rows = self._spark.createDataFrame([], _SOURCE)
        tables = []
        for name, source in zip(kind.sources, self._pipeline.sources, strict=True):
            tables.append(self._parsed(rows, name, source) if kind.is_typed else rows)
        # Without its columns there is nothing to ask.
        if any(table is None for table in tables):
            return
        made = self._made([table for table in tables if table is not None])
        if made is not None:
            self._check_sink(made)

    def _parsed(self, rows: DataFrame, name: str, source: Source) -> DataFrame | None:
        assert source.schema is not None
        with self._asking(name, "schema"):
            return frames.good(parse_json(rows, source.schema))
        return None

    def _made(self, tables: list[DataFrame]) -> DataFrame | None:
        """What is written; None if that cannot be told."""
        settings, [table, *more] = self._pipeline.settings, tables
        match settings:
            case TransformSettings():
                return self._transformed(table, settings)
            case AggregateSettings():
                return self._aggregated(table, settings)
            case DeduplicateSettings():
                self._check_time(table, settings.time, "deduplicate", "time")
                self._check_columns(table, settings.by, "deduplicate", "by")
                return table
            case JoinSettings():
                return self._joined(table, more[0], settings)
            case ReplaySettings():
                return table
            case DeadLetterSettings():
                self._check_letters(table, settings)
            case _:
                pass
        return None

    def _transformed(self, table: DataFrame, settings: TransformSettings) -> DataFrame | None:
        if settings.sql is not None:
            with self._asking("transform", "sql"):
                return frames.transform(table, settings.sql)
            return None
        try:
            function = function_of(self._pipeline)
        except BadConfig as error:
            self.problems += error.problems
            return None
        with self._asking("transform", "python"):
            return frames.transform(table, function)
        return None

    def _aggregated(self, table: DataFrame, settings: AggregateSettings) -> DataFrame | None:
        before = len(self.problems)
        self._check_time(table, settings.time, "aggregate", "time")
        self._check_columns(table, settings.by, "aggregate", "by")
        for name, sql in settings.measures.items():
            with self._asking("aggregate", "measures", name):
                table.groupBy().agg(expr(sql))
        if len(self.problems) == before:
            with self._asking("aggregate"):
                return frames.aggregate(
                    table,
                    time=settings.time,
                    window=settings.window,
                    slide=settings.slide,
                    watermark=settings.watermark,
                    by=settings.by,
                    measures=settings.measures,
                )
        return None

    def _joined(self, left: DataFrame, right: DataFrame, settings: JoinSettings) -> DataFrame | None:
        before = len(self.problems)
        right_time = settings.right_time or settings.time
        self._check_columns(left, settings.on, "join", "on", side="left")
        self._check_columns(right, settings.on, "join", "on", side="right")
        self._check_time(left, settings.time, "join", "time", side="left")
        self._check_time(right, right_time, "join", "right_time" if settings.right_time else "time", side="right")
        if len(self.problems) == before:
            with self._asking("join"):
                return frames.join(
                    left,
                    right,
                    on=settings.on,
                    within=settings.within,
                    watermark=settings.watermark,
                    left_time=settings.time,
                    right_time=right_time,
                )
        return None

    def _check_letters(self, table: DataFrame, settings: DeadLetterSettings) -> None:
        if settings.redrive is not None:
            with self._asking("dead_letters", "redrive"):
                frames.letters(table).where(settings.redrive)

    def _check_columns(self, table: DataFrame, names: tuple[str, ...], *key: str, side: str = "source") -> None:
        for name in names:
            if name not in table.columns:
                self._tell(key, f"names {name!r}, which [{side}] schema does not have: it has {_columns(table)}")

    def _check_time(self, table: DataFrame, name: str, *key: str, side: str = "source") -> None:
        self._check_columns(table, (name,), *key, side=side)
        if name in table.columns and (kind := table.schema[name].dataType.simpleString()) != "timestamp":
            self._tell(key, f"names {name!r}, which is of type {kind}: the time of an event is a timestamp")

    def _check_sink(self, made: DataFrame) -> None:
        sink = self._pipeline.sink
        if sink is None or sink.topic is None:
            return
        for name, sql in (("key", sink.key), ("subject", sink.subject)):
            if sql is not None:
                with self._asking("sink", name):
                    made.select(expr(sql))

    @contextmanager
    def _asking(self, *key: str) -> Iterator[None]:
        """What is refused within is a problem of this key."""
        try:
            yield
        except (PySparkException, ValueError, TypeError) as error:
            found = failure.describe(error)
            self.problems.append(f"{self._place(key, found.line)}: {found.sentence}")
        except Exception as error:
            # A function of the file's own may raise anything; in all else this would be a mistake of ours.
            if key != ("transform", "python"):
                raise
            self._tell(key, f"raised {type(error).__name__}: {error}")

    def _place(self, key: tuple[str, ...], line: int | None) -> str:
        """Of SQL that fills several lines, the one that Spark means."""
        where = self._pipeline.where(*key)
        begin = self._pipeline.lines.texts.get(key)
        if begin is None or line is None or key != ("transform", "sql"):
            return where
        assert isinstance(self._pipeline.settings, TransformSettings)
        assert self._pipeline.settings.sql is not None
        sql = self._pipeline.settings.sql
        # Spark is given it without the blank lines above.
        begin += sql[: len(sql) - len(sql.lstrip())].count("\n")
        _, _, named = where.partition(": ")
        return f"{self._pipeline.path}:{begin + line - 1}: {named}"

    def _tell(self, key: tuple[str, ...], what: str) -> None:
        self.problems.append(f"{self._pipeline.where(*key)} {what}")


def _columns(table: DataFrame) -> str:
    return ", ".join(name for name in table.columns if name not in RESERVED)
