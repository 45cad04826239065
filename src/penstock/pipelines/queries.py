"""Each kind of pipeline: from its description to queries that run.

A kind is a source, some functions of `penstock.pipelines.frames`, and a sink. Rows that do not fit the schema become
dead letters of the pipeline. If they go to the same broker as the rows, one query writes both, so that a batch is
stored with all its dead letters, or nothing of it; else a query of its own does.

Each query has a directory under the checkpoint: `rows`, `letters`, `redrive-…`.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.client.sync import Client
from penstock.moments import Place
from penstock.pipelines import frames
from penstock.pipelines.pipeline import (
    AggregateSettings,
    ArchiveSettings,
    DeadLetterSettings,
    DeduplicateSettings,
    JoinSettings,
    Pipeline,
    ReplaySettings,
    Sink,
    Source,
    TransformSettings,
)
from penstock.pipelines.validation import function_of
from penstock.spark import connection
from penstock.spark.json_topics import RESERVED, parse_json

# So many dead letters are redriven by one request, which may take its time.
_REDRIVEN_MAX: Final = 1000
_REDRIVE_S: Final = 60.0
# So many are looked at in one batch, unless the file says otherwise.
_LETTERS_MAX: Final = 100_000

_QUERY_ID: Final = "sql.streaming.queryId"
LOGIN: Final = ("user", "password", "token")

# What is done with a batch, by its number. It may be done again with the same, after a crash.
Each = Callable[[DataFrame, int], None]


def start(spark: SparkSession, pipeline: Pipeline, checkpoint: str, trigger: Mapping[str, Any]) -> list[StreamingQuery]:
    """Start its queries. `trigger`: what `DataStreamWriter.trigger` takes.

    There is none to start for dead letters with neither a sink nor a redrive: they are just looked at (`table`).
    """
    starting = _Starting(spark, pipeline, checkpoint, dict(trigger))
    try:
        starting.start()
    except BaseException:
        for query in starting.queries:
            query.stop()
        raise
    return starting.queries


def topics(pipeline: Pipeline) -> list[str]:
    """The topics that it reads. Those of a pattern are what the broker has now."""
    return list(dict.fromkeys(topic for source in pipeline.sources for topic in _topics(source)))


def table(spark: SparkSession, pipeline: Pipeline) -> DataFrame:
    """The dead letters that are there now, grouped: of a pipeline of that kind."""
    options = read_options(pipeline, pipeline.source) | {"includeHeaders": "true"}
    if pipeline.source.start == "latest":
        del options["startingOffsets"]
    rows = spark.read.format("penstock").options(**options).load()
    return frames.dead_letter_table(frames.letters(rows))


def read_options(pipeline: Pipeline, source: Source) -> dict[str, str]:
    """What the Spark source is told. The group shows how far the pipeline is; each topic of a join has its own, as the
    topics of a source that has several."""
    is_alone = len(pipeline.sources) == 1 or source.topic is None
    options = {
        "servers": source.servers,
        "group": pipeline.name if is_alone else f"{pipeline.name}-{source.topic}",
        # Nothing is there from this time on: what comes is.
        "startingOffsetsByTimestampStrategy": "latest",
        **_subscribed(source),
        **_bound("starting", source, source.start),
    }
    if source.end is not None:
        options |= _bound("ending", source, source.end)
    if source.subjects:
        options["subjects"] = ",".join(source.subjects)
    if source.archive is not None:
        options["archive"] = source.archive
    return options | dict(source.options)


@dataclass(frozen=True, slots=True)
class _Starting:
    spark: SparkSession
    pipeline: Pipeline
    checkpoint: str
    trigger: dict[str, Any]
    # Those that run.
    queries: list[StreamingQuery] = field(default_factory=list)

    def start(self) -> None:
        match self.pipeline.settings:
            case ArchiveSettings():
                self._archive()
            case TransformSettings() as settings:
                self._transform(settings)
            case AggregateSettings() as settings:
                self._aggregate(settings)
            case DeduplicateSettings() as settings:
                self._deduplicate(settings)
            case JoinSettings() as settings:
                self._join(settings)
            case ReplaySettings() as settings:
                self._replay(settings)
            case DeadLetterSettings() as settings:
                self._dead_letters(settings)

    # The kinds.

    def _archive(self) -> None:
        sink = self._sink
        assert sink.archive is not None
        options = {"archive": sink.archive, "archiveFormat": sink.format, "archivePartition": sink.partition}
        rows = self._read(self.pipeline.source, includeHeaders="true")
        self._run("rows", _to(rows, options | dict(sink.options)))

    def _transform(self, settings: TransformSettings) -> None:
        parsed = self._parsed(0)
        query = settings.sql if settings.sql is not None else function_of(self.pipeline)
        self._store(frames.transform(frames.good(parsed), query), [parsed])

    def _aggregate(self, settings: AggregateSettings) -> None:
        parsed = self._parsed(0)
        rows = frames.aggregate(
            frames.good(parsed),
            time=settings.time,
            window=settings.window,
            slide=settings.slide,
            watermark=settings.watermark,
            by=settings.by,
            measures=settings.measures,
        )
        self._store(rows, [parsed], mode=settings.mode)

    def _deduplicate(self, settings: DeduplicateSettings) -> None:
        parsed = self._parsed(0)
        rows = frames.deduplicate(frames.good(parsed), by=settings.by, time=settings.time, watermark=settings.watermark)
        # What was published is not written anew.
        self._store(rows, [parsed], shape=frames.raw)

    def _join(self, settings: JoinSettings) -> None:
        left, right = self._parsed(0), self._parsed(1)
        rows = frames.join(
            frames.good(left),
            frames.good(right),
            on=settings.on,
            within=settings.within,
            watermark=settings.watermark,
            left_time=settings.time,
            right_time=settings.right_time or settings.time,
            how="inner" if settings.how == "inner" else "left_outer",
        )
        self._store(rows, [left, right])

    def _replay(self, settings: ReplaySettings) -> None:
        sink = self._sink
        assert sink.topic is not None
        rate = {} if settings.rate is None else {"maxOffsetsPerTrigger": str(settings.rate)}
        source = self._read(self.pipeline.source, includeHeaders="true", **rate)
        rows = frames.replay(source, topic=sink.topic, key=sink.key, subject=sink.subject)
        if settings.rate is None:
            self._run("rows", _to(rows, self._sink_options))
        else:
            self._run("rows", rows.writeStream.foreachBatch(_paced(_storing(self._sink_options))))

    def _dead_letters(self, settings: DeadLetterSettings) -> None:
        source = self.pipeline.source
        if self.pipeline.sink is not None:
            assert self.pipeline.sink.parquet is not None
            rows = frames.dead_letter_table(frames.letters(self._read(source, includeHeaders="true")))
            writer = rows.writeStream.outputMode("complete").foreachBatch(_replacing(self.pipeline.sink.parquet))
            self._run("rows", writer)
        if settings.redrive is not None:
            if source.topic is None:
                raise ValueError("redrive needs one topic: that in which the broker keeps its dead letters")
            # A table has its own query, and shows how far it is.
            group = {} if self.pipeline.sink is None else {"group": ""}
            limit = {"maxOffsetsPerTrigger": str(_LETTERS_MAX)} | dict(source.options)
            rows = frames.letters(self._read(source, includeHeaders="true", **limit, **group))
            wanted = rows.where(settings.redrive).select("partition", "offset")
            # Another condition looks at all of them; what was redriven before is not redriven again.
            number = hashlib.sha256(settings.redrive.encode()).hexdigest()[:16]
            self._run(f"redrive-{number}", wanted.writeStream.foreachBatch(_redriving(source)))

    # Reading.

    def _read(self, source: Source, **more: str) -> DataFrame:
        options = read_options(self.pipeline, source) | more
        given = {name: value for name, value in options.items() if value}
        return self.spark.readStream.format("penstock").options(**given).load()

    def _parsed(self, side: int, **more: str) -> DataFrame:
        source = self.pipeline.sources[side]
        assert source.schema is not None
        rows = self._read(source, includeHeaders="true", **more)
        return parse_json(rows, source.schema, required=_required(self.pipeline)[side])

    # Writing.

    @property
    def _sink(self) -> Sink:
        assert self.pipeline.sink is not None
        return self.pipeline.sink

    @property
    def _sink_options(self) -> dict[str, str]:
        return {"servers": self._sink.servers or self.pipeline.source.servers, **self._sink.options}

    def _store(
        self,
        rows: DataFrame,
        parsed: list[DataFrame],
        *,
        mode: str = "append",
        shape: Callable[..., DataFrame] = frames.to_json,
    ) -> None:
        """The rows to the sink, and what did not parse to where the broker keeps dead letters."""
        sink = self._sink
        if sink.parquet is not None:
            fields = [name for name in rows.columns if name not in RESERVED]
            writer = rows.select(*map(frames.named, fields)).writeStream.format("parquet").outputMode(mode)
            self._run("rows", writer.options(**sink.options).option("path", sink.parquet))
            return self._store_letters()
        out = shape(rows, topic=sink.topic, key=sink.key, subject=sink.subject)
        is_one_broker = {source.servers for source in self.pipeline.sources} == {self._sink_options["servers"]}
        if is_one_broker:
            out = reduce(DataFrame.unionByName, (self._letters_of(each) for each in parsed), out)
        if mode == "append":
            self._run("rows", _to(out, self._sink_options))
        else:
            # Spark lets a sink in Python append only.
            self._run("rows", out.writeStream.outputMode(mode).foreachBatch(_storing(self._sink_options)))
        if not is_one_broker:
            self._store_letters()

    def _store_letters(self) -> None:
        """By queries of their own: each to the broker that it is from."""
        for side, source in enumerate(self.pipeline.sources):
            letters = self._letters_of(self._parsed(side, group=""))
            name = "letters" if len(self.pipeline.sources) == 1 else f"letters-{side}"
            self._run(name, _to(letters, _login(source) | {"servers": source.servers}))

    def _letters_of(self, parsed: DataFrame) -> DataFrame:
        return frames.dead_letters_of(parsed, group=self.pipeline.name)

    def _run(self, name: str, writer: DataStreamWriter) -> None:
        named = writer.queryName(self.pipeline.name if name == "rows" else f"{self.pipeline.name} {name}")
        placed = named.option("checkpointLocation", f"{self.checkpoint}/{name}")
        self.queries.append(placed.trigger(**self.trigger).start())


# Sources.


def _required(pipeline: Pipeline) -> list[tuple[str, ...]]:
    """What each row needs, besides what its schema says: without it, it would just vanish.

    A row without a time is in no window, rows that all lack a key are not the same row, and one without what is joined
    finds none, for ever.
    """
    match pipeline.settings:
        case AggregateSettings(time=time):
            return [(time,)]
        case DeduplicateSettings(time=time, by=by):
            return [(time, *by)]
        case JoinSettings(time=time, right_time=right_time, on=on):
            return [(time, *on), (right_time or time, *on)]
    return [()]


def _subscribed(source: Source) -> dict[str, str]:
    if source.pattern is not None:
        return {"subscribePattern": source.pattern}
    return {"subscribe": ",".join(source.topics or [source.topic or ""])}


def _topics(source: Source) -> list[str]:
    if source.pattern is None:
        return list(source.topics or [source.topic or ""])
    wanted = re.compile(source.pattern)
    return [topic.name for topic in _client(source).topics() if wanted.fullmatch(topic.name)]


def _bound(which: str, source: Source, place: Place) -> dict[str, str]:
    """The options for where a source starts or ends."""
    match place:
        case str():
            return {f"{which}Offsets": place}
        case datetime():
            return {f"{which}Timestamp": str(round(place.timestamp() * 1000))}
        case int():
            offsets = {topic: _everywhere(source, topic, place) for topic in _topics(source)}
            return {f"{which}Offsets": json.dumps(offsets)}


def _everywhere(source: Source, topic: str, offset: int) -> dict[str, int]:
    partitions = _client(source).topic(topic).partitions
    return {str(partition): offset for partition in range(partitions)}


def _login(source: Source) -> dict[str, str]:
    return {name: value for name, value in source.options.items() if name.lower() in LOGIN}


def _client(source: Source, timeout_s: float = connection.TIMEOUT_S) -> Client:
    login = {name.lower(): value for name, value in _login(source).items()}
    return connection.client(source.servers, timeout_s, **login)


# Sinks.


def _to(rows: DataFrame, options: Mapping[str, str]) -> DataStreamWriter:
    return rows.writeStream.format("penstock").options(**options)


def _storing(options: Mapping[str, str]) -> Each:
    """As the streaming sink does: a batch that was stored is not stored again."""

    def store(batch: DataFrame, number: int) -> None:
        query = batch.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        assert query is not None, "it is called for a batch of a query"
        once = {"txnId": query, "txnVersion": str(number)}
        batch.write.format("penstock").options(**options, **once).mode("append").save()

    return store


def _paced(each: Each) -> Each:
    """One batch a second at the most. A trigger would do that for a query without an end only."""
    due = time.monotonic()

    def paced(batch: DataFrame, number: int) -> None:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + 1.0
        each(batch, number)

    return paced


def _replacing(path: str) -> Each:
    """The table as it is now. If this is interrupted it may be gone until the next run writes it again."""

    def replace(batch: DataFrame, _: int) -> None:
        batch.coalesce(1).write.mode("overwrite").parquet(path)

    return replace


def _redriving(source: Source) -> Each:
    """The broker redrives each once, also if it is asked again."""

    def redrive(batch: DataFrame, _: int) -> None:
        client = _client(source, _REDRIVE_S)
        found: list[int] = []
        for row in batch.toLocalIterator():
            if row["partition"] != 0:
                raise ValueError("the dead-letter topic has several partitions: redrive with `penstock dlq redrive`")
            found.append(row["offset"])
            if len(found) == _REDRIVEN_MAX:
                client.redrive(offsets=found)
                found = []
        if found:
            client.redrive(offsets=found)

    return redrive
