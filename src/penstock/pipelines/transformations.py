"""What each kind of pipeline does to rows, as its settings say. `frames` has the functions that do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.pipelines import frames, stateful, user_code
from penstock.pipelines.pipeline import (
    AggregateSettings,
    DeduplicateSettings,
    EnrichSettings,
    JoinSettings,
    Pipeline,
    PipelineSource,
    PythonSettings,
    ReplaySettings,
    SessionizeSettings,
    SqlSettings,
    TransformSettings,
    UpsertSettings,
)
from penstock.spark.json_topics import RESERVED, parse_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The column of an upsert that tells tombstones from rows. It is not written.
DELETED: Final = "_deleted"


def parsed(rows: DataFrame, pipeline: Pipeline, side: int) -> DataFrame:
    """Parse the rows of a source, which has a schema. `side` is its number in the pipeline."""
    schema = pipeline.sources[side].schema
    assert schema is not None
    found = parse_json(rows, schema, required=_required(pipeline)[side])
    if isinstance(pipeline.settings, UpsertSettings):
        return frames.with_tombstones(found, key=pipeline.settings.key)
    return found


def enriched(rows: DataFrame, lookup: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Add columns of the lookup to parsed rows. Those that find nothing may get a reason to be dead letters."""
    settings = pipeline.settings
    assert isinstance(settings, EnrichSettings)
    return frames.enrich(
        rows,
        lookup,
        on=settings.on,
        lookup_on=settings.lookup_on,
        columns=settings.columns,
        required=settings.missing == "dead_letter",
    )


def transformed(tables: Sequence[DataFrame], pipeline: Pipeline) -> DataFrame:
    """Do what the kind does to the rows that parsed, one table for each source."""
    settings, (rows, *more) = pipeline.settings, tables
    match settings:
        case TransformSettings():
            return frames.transform(rows, settings.sql if settings.sql is not None else function_of(pipeline))
        case AggregateSettings():
            return frames.aggregate(
                rows,
                time=settings.time,
                window=settings.window,
                slide=settings.slide,
                watermark=settings.watermark,
                by=settings.by,
                measures=settings.measures,
            )
        case SessionizeSettings():
            return frames.sessionize(
                rows,
                by=settings.by,
                time=settings.time,
                gap=settings.gap,
                watermark=settings.watermark,
                measures=settings.measures,
            )
        case DeduplicateSettings():
            return frames.deduplicate(rows, by=settings.by, time=settings.time, watermark=settings.watermark)
        case JoinSettings():
            return frames.join(
                rows,
                more[0],
                on=settings.on,
                within=settings.within,
                watermark=settings.watermark,
                left_time=settings.time,
                right_time=settings.right_time or settings.time,
                how="inner" if settings.how == "inner" else "left_outer",
            )
        case PythonSettings():
            return stateful.process(rows, pipeline)
        case EnrichSettings():
            # `enriched` has done it, before the rows that become dead letters were told from the others.
            return rows
        case UpsertSettings():
            return frames.changes(rows, key=settings.key, deleted=DELETED)
        case SqlSettings():
            watermarked = map(_watermarked, tables, pipeline.sources)
            return frames.sql(dict(zip(pipeline.source_names, watermarked, strict=True)), settings.query)
    raise AssertionError(f"kind {pipeline.kind} does not parse rows")


def messages(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return what the kind writes to the topic of the sink."""
    sink = pipeline.sink
    assert sink is not None
    assert sink.topic is not None
    match pipeline.settings:
        case ReplaySettings():
            shape = frames.replay
        case DeduplicateSettings():
            # Values stay as they were published.
            shape = frames.raw
        case _:
            shape = frames.to_json
    return shape(rows, topic=sink.topic, key=sink.key, subject=sink.subject)


def messages_and_letters(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return rows with their dead letters as both go to the broker of the sink."""
    sink = pipeline.sink
    assert sink is not None
    assert sink.topic is not None
    return frames.one_pass(rows, topic=sink.topic, key=sink.key, subject=sink.subject)


def fields(rows: DataFrame) -> DataFrame:
    """Return the columns that the kind writes to Parquet files."""
    return rows.select(*(frames.named(name) for name in rows.columns if name not in RESERVED))


def letters(table: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return the rows that did not parse as dead letters."""
    return frames.dead_letters_of(table, group=pipeline.name)


def function_of(pipeline: Pipeline) -> Callable[[DataFrame], DataFrame]:
    """Import the function that [transform] python names."""
    assert isinstance(pipeline.settings, TransformSettings)
    assert pipeline.settings.python is not None
    found: Callable[[DataFrame], DataFrame]
    found = user_code.load(pipeline, ("transform", "python"), pipeline.settings.python)
    return found


def _required(pipeline: Pipeline) -> list[tuple[str, ...]]:
    """Return the columns that rows need besides those of the schema, for each source. Without them rows would vanish.

    A row without a time belongs to no window or session, rows without a key are not duplicates of each other, nor
    one session, and a row without a join column never matches.
    """
    match pipeline.settings:
        case AggregateSettings(time=time):
            return [(time,)]
        case PythonSettings(time=time, by=by):
            return [by if time is None else (time, *by)]
        case DeduplicateSettings(time=time, by=by) | SessionizeSettings(time=time, by=by):
            return [(time, *by)]
        case JoinSettings(time=time, right_time=right_time, on=on):
            return [(time, *on), (right_time or time, *on)]
        case UpsertSettings(key=key):
            return [(key,)]
        case SqlSettings():
            return [() if source.time is None else (source.time,) for source in pipeline.sources]
    return [()]


def _watermarked(rows: DataFrame, source: PipelineSource) -> DataFrame:
    if source.time is None or source.watermark is None:
        return rows
    return rows.withWatermark(source.time, source.watermark)
