"""What each kind of pipeline does to rows, as its settings say. `frames` has the functions that do it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import BadConfig
from penstock.pipelines import frames
from penstock.pipelines.pipeline import (
    AggregateSettings,
    DeduplicateSettings,
    JoinSettings,
    Pipeline,
    TransformSettings,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def transform(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    assert isinstance(pipeline.settings, TransformSettings)
    sql = pipeline.settings.sql
    return frames.transform(rows, sql if sql is not None else function_of(pipeline))


def aggregate(rows: DataFrame, settings: AggregateSettings) -> DataFrame:
    return frames.aggregate(
        rows,
        time=settings.time,
        window=settings.window,
        slide=settings.slide,
        watermark=settings.watermark,
        by=settings.by,
        measures=settings.measures,
    )


def deduplicate(rows: DataFrame, settings: DeduplicateSettings) -> DataFrame:
    return frames.deduplicate(rows, by=settings.by, time=settings.time, watermark=settings.watermark)


def join(left: DataFrame, right: DataFrame, settings: JoinSettings) -> DataFrame:
    return frames.join(
        left,
        right,
        on=settings.on,
        within=settings.within,
        watermark=settings.watermark,
        left_time=settings.time,
        right_time=settings.right_time or settings.time,
        how="inner" if settings.how == "inner" else "left_outer",
    )


def function_of(pipeline: Pipeline) -> Callable[[DataFrame], DataFrame]:
    """Import the function that [transform] python names. The directory of the pipeline file is searched first."""
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
        raise BadConfig([f"{where}: no module {module_name!r} in {directory} or on Python's path"]) from error
    except Exception as error:  # a user's module may raise anything when it is loaded
        raise BadConfig([f"{where}: the module {module_name} raised {type(error).__name__}: {error}"]) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise BadConfig([f"{where}: the module {module_name} has no function {name!r}"])
    return found  # type: ignore[no-any-return]
