"""Pipelines between topics and directories of Parquet files that other programs write or read.

Spark lists the files of each batch in its checkpoint, so each file is published once. A file counts when it has its
name: it must appear complete, and not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyarrow import parquet
from pyspark.sql import DataFrame

from penstock.errors import PenstockError
from penstock.pipelines import frames
from penstock.pipelines.pipeline import BridgeSettings, Pipeline
from penstock.spark.json_topics import RESERVED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

# Spark forgets files after a while, and then ignores others that are as old. A file may be copied with its old time.
_DEFAULTS: Final = {"maxFileAge": "36500d", "pathGlobFilter": "*.parquet"}
_LOGIN: Final = ("user", "password", "token")


def columns(spark: SparkSession, pipeline: Pipeline) -> StructType:
    """Return the columns of the files: those that the pipeline names, or those of all files that there are now."""
    source = pipeline.source
    if source.schema is not None:
        found = spark.createDataFrame([], source.schema).schema
    else:
        path, options = Path(_directory(pipeline)), _options(pipeline) | {"mergeSchema": "true"}
        if next(_files(pipeline), None) is None:
            glob = options["pathGlobFilter"]
            raise PenstockError(f"there is no file {glob} in {path} yet: name the columns in schema, or add a file")
        found = spark.read.options(**options).parquet(str(path)).schema
    for name in found.names:
        if name in RESERVED:
            raise PenstockError(f"the files have a column {name}, a name that is reserved: rename it")
    return found


def read(spark: SparkSession, pipeline: Pipeline, schema: StructType) -> DataFrame:
    """Return a stream of the rows in the files, and in those that are added."""
    path = Path(_directory(pipeline))
    if not path.is_dir():
        raise PenstockError(f"{path} is not a directory: create it, and let other programs move complete files there")
    return spark.readStream.options(**_options(pipeline)).schema(schema).parquet(str(path))


def messages(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return rows for the sink, from rows of the files."""
    sink, settings = pipeline.sink, pipeline.settings
    assert sink is not None
    assert sink.topic is not None
    assert isinstance(settings, BridgeSettings)
    if settings.value is None:
        return frames.to_json(rows, topic=sink.topic, key=sink.key, subject=sink.subject)
    return frames.with_value(rows, settings.value, topic=sink.topic, key=sink.key, subject=sink.subject)


def column_check(pipeline: Pipeline, schema: StructType) -> Callable[[], None]:
    """Return a function that raises PenstockError if there is a file with columns that are not read.

    It looks at each file once. A pipeline that names its columns leaves out others on purpose.
    """
    if pipeline.source.schema is not None:
        return lambda: None
    known, seen = set(schema.names), set[Path]()

    def check() -> None:
        for file in _files(pipeline):
            if file in seen:
                continue
            more = [name for name in _names_of(file) if name not in known]
            if more:
                raise PenstockError(
                    f"{file} has columns that the files had not when this run began: {', '.join(more)}. Run the "
                    "pipeline again to publish them too, or name the columns that you want in schema"
                )
            seen.add(file)

    return check


def _directory(pipeline: Pipeline) -> str:
    assert pipeline.source.parquet is not None
    return pipeline.source.parquet


def _files(pipeline: Pipeline) -> Iterator[Path]:
    """Yield the files that Spark reads: no part of their path begins with a dot or an underscore."""
    path = Path(_directory(pipeline))
    for file in path.rglob(_options(pipeline)["pathGlobFilter"]):
        if not any(part.startswith((".", "_")) for part in file.relative_to(path).parts):
            yield file


def _names_of(file: Path) -> list[str]:
    try:
        return list(parquet.read_schema(file).names)
    except FileNotFoundError:  # removed since
        return []


def _options(pipeline: Pipeline) -> dict[str, str]:
    """Return the options of Spark's reader."""
    given = {name: value for name, value in pipeline.source.options.items() if name.lower() not in _LOGIN}
    return {**_DEFAULTS, **given}
