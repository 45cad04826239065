"""Running a pipeline on a sample of messages, without a broker: the rows it would write, and its dead letters.

The sample is one batch. So all windows are closed, no row is late, and rows without a match are written: as after a
complete run with `--flush`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.client.values import Outgoing
from penstock.errors import PenstockError
from penstock.pipelines.pipeline import KINDS, EnrichSettings, Pipeline, PipelineLookup, PipelineSource, UpsertSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

# A message: its value, or all of it. A mapping is published as JSON.
Sample = bytes | str | Mapping[str, Any] | Outgoing

# Spark settings for few rows.
CONFIG: Final = {"spark.sql.shuffle.partitions": "1", "spark.default.parallelism": "1"}

_KINDS: Final = tuple(name for name, kind in KINDS.items() if kind.is_typed or name == "replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """A row that is written to the sink."""

    # An object if the value is JSON, otherwise text.
    value: Any
    # None if the sink is not a topic.
    subject: str | None = None
    key: str | None = None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLetter:
    """A message of the sample that becomes a dead letter."""

    reason: str
    value: str | None
    subject: str
    # Its number in the sample, from 0.
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    rows: list[SampleRow]
    dead_letters: list[SampleLetter]

    @property
    def values(self) -> list[Any]:
        return [row.value for row in self.rows]


def run(spark: SparkSession, pipeline: Pipeline, *samples: Iterable[Sample]) -> SampleOutput:
    """Run a pipeline on messages, one sample for each of its sources. Raise BadConfig if Spark rejects the file."""
    from penstock.pipelines import frames, transformations
    from penstock.pipelines.topic_schemas import with_schemas
    from penstock.pipelines.validation import check
    from penstock.spark.json_topics import SOURCE

    if pipeline.kind not in _KINDS:
        raise PenstockError(f"a pipeline of kind {pipeline.kind} cannot be run on a sample: {', '.join(_KINDS)} can")
    if len(samples) != len(pipeline.sample_keys):
        needed = ", ".join(f"[{'.'.join(key)}]" for key in pipeline.sample_keys)
        raise PenstockError(f"a pipeline of kind {pipeline.kind} needs a sample for {needed}: got {len(samples)}")
    pipeline = with_schemas(pipeline)
    check(spark, pipeline)
    tables: list[DataFrame] = [
        spark.createDataFrame(_rows(source, sample), SOURCE)
        for source, sample in zip(pipeline.sources, samples, strict=False)
    ]
    if pipeline.kind == "replay":
        return SampleOutput(rows=_written(transformations.messages(tables[0], pipeline)), dead_letters=[])
    parsed = [transformations.parsed(table, pipeline, side) for side, table in enumerate(tables)]
    if pipeline.lookup is not None:
        parsed = [transformations.enriched(parsed[0], _lookup(spark, pipeline, samples[1:]), pipeline)]
    rows = transformations.transformed([frames.good(table) for table in parsed], pipeline)
    letters = [row for table in parsed for row in transformations.letters(table, pipeline).collect()]
    if isinstance(pipeline.settings, UpsertSettings):
        written = _upserted(rows, pipeline.settings.key)
    elif pipeline.sink is not None and pipeline.sink.topic is not None:
        written = _written(transformations.messages(rows, pipeline))
    else:
        files = frames.to_json(transformations.fields(rows), topic="-").collect()
        written = [SampleRow(value=_value(row["value"]), headers={}) for row in files]
    return SampleOutput(rows=written, dead_letters=[_letter(row) for row in letters])


def read(path: Path) -> list[bytes]:
    """Read a sample from a file with a value on each line. Blank lines are skipped."""
    try:
        return [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise PenstockError(f"{path}: {error.strerror}") from None


def _lookup(spark: SparkSession, pipeline: Pipeline, samples: Sequence[Iterable[Sample]]) -> DataFrame:
    """Return the lookup: from its sample if it is a topic, else from its files."""
    from pyspark.sql import functions as fn

    from penstock.pipelines import lookups
    from penstock.spark.json_topics import SOURCE

    assert pipeline.lookup is not None
    assert isinstance(pipeline.settings, EnrichSettings)
    if samples:
        messages = spark.createDataFrame(_rows(pipeline.lookup, samples[0]), SOURCE)
        # A file has no keys. Each message without one is a row of its own.
        key = fn.coalesce("key", fn.concat(fn.lit("sample "), "offset").cast("binary"))
        rows = lookups.of_messages(messages.withColumn("key", key), pipeline.lookup)
    else:
        rows = lookups.read(spark, pipeline)
    lookups.check_unique(rows, pipeline.settings.lookup_keys)
    return rows


def _rows(source: PipelineSource | PipelineLookup, sample: Iterable[Sample]) -> list[tuple[Any, ...]]:
    topics = source.topics if isinstance(source, PipelineSource) else ()
    topic = source.topic or next(iter(topics), None) or "sample"
    now = datetime.now(UTC)
    rows = []
    for offset, each in enumerate(sample):
        sent = each if isinstance(each, Outgoing) else Outgoing(topic, bytes(_bytes(each) or b""))
        headers = dict(sent.headers or {})
        rows.append((topic, 0, offset, now, _bytes(sent.key), _bytes(sent.value), sent.subject, headers))
    return rows


def _bytes(value: bytes | str | Mapping[str, Any] | None) -> bytearray | None:
    if isinstance(value, Mapping):
        value = json.dumps(value)
    if isinstance(value, str):
        value = value.encode()
    return None if value is None else bytearray(value)


def _written(messages: DataFrame) -> list[SampleRow]:
    return [
        SampleRow(value=_value(row["value"]), subject=row["subject"], key=_text(row["key"]), headers=row["headers"])
        for row in messages.collect()
    ]


def _upserted(changes: DataFrame, key: str) -> list[SampleRow]:
    """Return the changes of a table. A row that is deleted has no value."""
    from penstock.pipelines import frames, transformations

    made = frames.to_json(changes, topic="-", key=frames.named_sql(key)).collect()
    values = [(_value(row["value"]), _text(row["key"])) for row in made]
    return [
        SampleRow(value=None if value.pop(transformations.DELETED) else value, key=of, headers={})
        for value, of in values
    ]


def _letter(row: Row) -> SampleLetter:
    said: Mapping[str, str] = row["headers"]
    return SampleLetter(
        reason=said["Dead-Letter-Reason"],
        value=_text(row["value"]),
        subject=said["Dead-Letter-Subject"],
        offset=int(said["Dead-Letter-Offset"]),
    )


def _value(value: Sequence[int] | None) -> Any:
    text = _text(value)
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str | None:
    return None if value is None else bytes(value).decode(errors="replace")
