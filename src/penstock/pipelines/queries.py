"""The Spark queries of a pipeline, one builder for each kind.

Rows that do not match the schema become dead letters of the pipeline. If these go to the same broker as the rows, one
query writes both, so that a batch is stored with all of its dead letters or not at all. Otherwise a second query writes
them.

Each query has a directory in the checkpoint: `rows`, `letters`, `redrive-…`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from typing import Any, Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.client.sync import Client
from penstock.errors import PenstockError
from penstock.pipelines import bridge, frames, lookups, projection, stateful, transformations
from penstock.pipelines.pipeline import (
    AggregateSettings,
    ArchiveSettings,
    BridgeSettings,
    DeadLetterSettings,
    EnrichSettings,
    Pipeline,
    PipelineSink,
    PipelineSource,
    ReplaySettings,
    SqlSettings,
    TransformSettings,
    UpsertSettings,
)
from penstock.spark import connection
from penstock.spark import options as source_options
from penstock.spark.json_topics import REASON
from penstock.times import Place

# Dead letters in one redrive request, and how long that may take.
_REDRIVEN_MAX: Final = 1000
_REDRIVE_S: Final = 60.0
# Dead letters read in one batch, unless the file sets another limit.
_LETTERS_MAX: Final = 100_000
# Messages merged in one batch, or written to one file, unless the pipeline sets another limit.
_UPSERTED_MAX: Final = 100_000
_BRIDGED_MAX: Final = 500_000

_QUERY_ID: Final = "sql.streaming.queryId"
_LOGIN: Final = frozenset(name.lower() for name in connection.LOGIN)

# Processes a batch, given its number. After a crash the same batch may be processed again.
BatchFunction = Callable[[DataFrame, int], None]
# Takes what was counted in a batch, by the names `in`, `out` and `letters`.
Count = Callable[[Mapping[str, int]], None]


def start(
    spark: SparkSession, pipeline: Pipeline, checkpoint: str, trigger: Mapping[str, Any], count: Count | None = None
) -> list[StreamingQuery]:
    """Start the queries of a pipeline. `trigger` holds the arguments of `DataStreamWriter.trigger`.

    `count` gets what a batch counted and Spark does not report, by name, in another thread. Dead letters with neither a
    sink nor a redrive have no query: `dead_letter_table` reads them.
    """
    builder = _QueryBuilder(spark, pipeline, checkpoint, dict(trigger), count=count or (lambda _: None))
    try:
        builder.start()
    except BaseException:
        for query in builder.queries:
            query.stop()
        raise
    return builder.queries


def explain(spark: SparkSession, pipeline: Pipeline) -> dict[str, str]:
    """Return Spark's plan of each query, by the name of the query."""
    plans: dict[str, str] = {}

    def add(name: str, rows: DataFrame) -> None:
        plans[name] = _plan_of(rows)

    _QueryBuilder(spark, pipeline, "", {}, add).start()
    return plans


def topics(pipeline: Pipeline) -> list[str]:
    """Return the topics that a pipeline reads. A pattern is matched against the topics that exist now."""
    return list(dict.fromkeys(topic for source in pipeline.sources for topic in _topics(source)))


def dead_letter_table(spark: SparkSession, pipeline: Pipeline) -> DataFrame:
    """Return the dead letters that exist now, grouped, for a pipeline of that kind."""
    options = read_options(pipeline, pipeline.source) | {"includeHeaders": "true"}
    if pipeline.source.start == "latest":
        del options["startingOffsets"]
    rows = spark.read.format("penstock").options(**options).load()
    return frames.dead_letter_table(frames.letters(rows))


def read_options(pipeline: Pipeline, source: PipelineSource) -> dict[str, str]:
    """Return the options for the Spark source.

    The group shows the progress of the pipeline in the broker. Each topic of a join has its own, and so has each topic
    of a source with several.
    """
    is_alone = len(pipeline.sources) == 1 or source.topic is None
    options = {
        "servers": source.servers,
        "group": pipeline.name if is_alone else f"{pipeline.name}-{source.topic}",
        # If no message is as new as the start time, begin with the next one.
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


def parsed_options(pipeline: Pipeline, source: PipelineSource) -> source_options.ReadOptions:
    """Return the options for the Spark source as the source itself reads them."""
    given = {name.lower(): value for name, value in read_options(pipeline, source).items()}
    return source_options.read(given, is_stream=True)


def client_of(servers: str, given: Mapping[str, str], timeout_s: float = connection.TIMEOUT_S) -> Client:
    """Return a client of a broker, with the credentials in the options of a source or a sink."""
    return connection.client(servers, timeout_s, **connection.login(given))


@dataclass(frozen=True, slots=True)
class _QueryBuilder:
    spark: SparkSession
    pipeline: Pipeline
    checkpoint: str
    trigger: dict[str, Any]
    # Takes the name and the rows of each query, which is then not started.
    explain: Callable[[str, DataFrame], None] | None = None
    count: Count = lambda _: None
    # The queries that were started.
    queries: list[StreamingQuery] = field(default_factory=list)

    def start(self) -> None:
        match self.pipeline.settings:
            case ArchiveSettings():
                self._archive()
            case ReplaySettings() as settings:
                self._replay(settings)
            case DeadLetterSettings() as settings:
                self._dead_letters(settings)
            case EnrichSettings():
                self._enrich()
            case UpsertSettings() as settings:
                self._upsert(settings)
            case BridgeSettings() if self.pipeline.source.parquet is not None:
                self._publish_files()
            case BridgeSettings() as settings:
                self._write_files(settings)
            case _:
                self._process()

    # One method for each kind.

    def _archive(self) -> None:
        sink = self._sink
        assert sink.archive is not None
        options = {"archive": sink.archive, "archiveFormat": sink.format, "archivePartition": sink.partition}
        if self.pipeline.is_typed:
            assert self.pipeline.source.schema is not None
            options["archiveSchema"] = self.pipeline.source.schema
        rows = _counted(self._read(self.pipeline.source, includeHeaders="true"), "in", "out")
        self._run("rows", rows, _to(rows, options | dict(sink.options)))

    def _process(self) -> None:
        """Write what parsed as the kind transforms it, and the rest as dead letters."""
        settings = self.pipeline.settings
        sources = [self._parsed(side) for side in range(len(self.pipeline.sources))]
        if self._is_one_pass and (both := self._in_one_pass(sources[0])) is not None:
            return self._run("rows", both, _to(both, self._sink_options))
        rows = transformations.transformed([frames.good(source) for source in sources], self.pipeline)
        mode = settings.mode if isinstance(settings, AggregateSettings | SqlSettings) else "append"
        self._store(rows, sources, mode=mode)

    @property
    def _is_one_pass(self) -> bool:
        """Whether a query that reads its source once may be possible."""
        return (
            isinstance(self.pipeline.settings, TransformSettings)
            and self._sink.topic is not None
            and self._is_one_broker
        )

    def _in_one_pass(self, parsed: DataFrame) -> DataFrame | None:
        """Return what is written, rows and dead letters, from a source that is read and parsed once.

        None if the transformation does more than to select and filter: then the source is read once for the rows and
        once for the dead letters.
        """
        whole = frames.with_letters(self._observed(0, parsed), group=self.pipeline.name)
        given = frames.without_letters(whole)
        rows = projection.carry(transformations.transformed([given], self.pipeline), given, whole, frames.LETTER)
        if rows is None:
            return None
        counted = rows.observe("rows", fn.count(fn.when(rows[frames.LETTER].isNull(), 1)).alias("out"))
        return transformations.messages_and_letters(counted, self.pipeline)

    def _enrich(self) -> None:
        """Look up the rows of each batch, and store them with their dead letters.

        In a stream Spark would read the files of the lookup only once.
        """
        rows = self._parsed(0)
        if self.explain is not None:
            table = lookups.read(self.spark, self.pipeline)
            return self.explain("rows", transformations.enriched(rows, table, self.pipeline))
        lookup = lookups.FreshLookup(self.pipeline)

        def enrich(batch: DataFrame, number: int) -> None:
            found = transformations.enriched(batch, lookup.rows(batch.sparkSession), self.pipeline)
            if self._is_one_broker:
                marked = frames.with_letters(found, group=self.pipeline.name)
                self._store_counted(transformations.messages_and_letters(marked, self.pipeline), number)
            else:
                # Two transactions. Dead letters come first: if the run is killed in between, and the lookup then has
                # the missing row, it is stored as both, not as neither.
                found = found.localCheckpoint()
                letters = _storing(self._letter_options(0), "letters")
                self._store_counted(transformations.letters(found, self.pipeline), number, letters)
                self._store_counted(transformations.messages(frames.good(found), self.pipeline), number)

        self._run("rows", rows, rows.writeStream.foreachBatch(enrich))

    def _upsert(self, settings: UpsertSettings) -> None:
        """Merge each batch into a Delta table, and store its dead letters with another query."""
        from penstock.spark.delta_table import UpsertTable

        path = self._sink.delta
        assert path is not None
        table = UpsertTable(path, settings.key)
        # A batch passes through the memory of this process.
        limit = {"maxOffsetsPerTrigger": str(_UPSERTED_MAX)} | dict(self.pipeline.source.options)
        rows = frames.good(self._parsed(0, **limit))

        def upsert(batch: DataFrame, number: int) -> None:
            query = _query_of(batch)
            if table.has(query, number):
                return
            changes = transformations.transformed([batch], self.pipeline).toArrow()
            if changes.num_rows:
                table.merge(changes, query, number, deleted=transformations.DELETED)
            self.count({"out": changes.num_rows})

        self._run("rows", rows, rows.writeStream.foreachBatch(upsert))
        self._store_letters()

    def _publish_files(self) -> None:
        """Publish the rows of Parquet files."""
        columns = bridge.columns(self.spark, self.pipeline)
        check = bridge.column_check(self.pipeline, columns)
        rows = bridge.messages(bridge.read(self.spark, self.pipeline, columns), self.pipeline)
        rows, store = _counted(rows, "in", "out"), _storing(self._sink_options)

        def publish(batch: DataFrame, number: int) -> None:
            check()
            store(batch, number)

        self._run("rows", rows, rows.writeStream.foreachBatch(publish))

    def _write_files(self, settings: BridgeSettings) -> None:
        """Write each batch as a Parquet file, and store its dead letters with another query."""
        from penstock.spark.parquet_directory import ParquetDirectory

        assert self._sink.parquet is not None
        directory = ParquetDirectory(self._sink.parquet, self.pipeline.name)
        # A batch passes through the memory of this process.
        limit = {"maxOffsetsPerTrigger": str(_BRIDGED_MAX)} | dict(self.pipeline.source.options)
        if settings.flatten:
            rows = transformations.fields(frames.good(self._parsed(0, **limit)))
        else:
            rows = self._read(self.pipeline.source, includeHeaders="true", **limit)

        def write(batch: DataFrame, number: int) -> None:
            query = _query_of(batch)
            if directory.has(query, number):
                return
            found = batch.toArrow()
            if found.num_rows:
                directory.add(found, query, number)
            self.count({"out": found.num_rows} | ({} if settings.flatten else {"in": found.num_rows}))

        self._run("rows", rows, rows.writeStream.foreachBatch(write))
        if settings.flatten:
            self._store_letters()

    def _store_counted(self, rows: DataFrame, number: int, store: BatchFunction | None = None) -> None:
        """Store rows of `one_pass`, or of a part of it, and count them."""
        seen = Observation()
        counted = rows.observe(seen, fn.count(fn.lit(1)).alias("in"), frames.letters_among(rows).alias("letters"))
        (store or _storing(self._sink_options))(counted, number)
        counts: dict[str, int] = seen.get
        self.count({**counts, "out": counts["in"] - counts["letters"]})

    def _replay(self, settings: ReplaySettings) -> None:
        rate = {} if settings.rate is None else {"maxOffsetsPerTrigger": str(settings.rate)}
        source = self._read(self.pipeline.source, includeHeaders="true", **rate)
        rows = _counted(transformations.messages(source, self.pipeline), "in", "out")
        if settings.rate is None:
            self._run("rows", rows, _to(rows, self._sink_options))
        else:
            self._run("rows", rows, rows.writeStream.foreachBatch(_paced(_storing(self._sink_options))))

    def _dead_letters(self, settings: DeadLetterSettings) -> None:
        source = self.pipeline.source
        if self.pipeline.sink is not None:
            assert self.pipeline.sink.parquet is not None
            read = _counted(self._read(source, includeHeaders="true"), "in")
            rows = frames.dead_letter_table(frames.letters(read))
            writer = rows.writeStream.outputMode("complete").foreachBatch(_replacing(self.pipeline.sink.parquet))
            self._run("rows", rows, writer)
        if settings.redrive is not None:
            if source.topic is None:
                raise ValueError("redrive needs a single topic: the broker's dead-letter topic")
            # If there is a table, its query has the group.
            group = {} if self.pipeline.sink is None else {"group": ""}
            limit = {"maxOffsetsPerTrigger": str(_LETTERS_MAX)} | dict(source.options)
            rows = frames.letters(self._read(source, includeHeaders="true", **limit, **group))
            wanted = rows.where(settings.redrive).select("partition", "offset")
            # Another condition has its own checkpoint and reads all letters. The broker redrives each only once.
            number = hashlib.sha256(settings.redrive.encode()).hexdigest()[:16]
            self._run(f"redrive-{number}", wanted, wanted.writeStream.foreachBatch(_redriving(source)))

    # Reading.

    def _read(self, source: PipelineSource, **more: str) -> DataFrame:
        options = read_options(self.pipeline, source) | more
        given = {name: value for name, value in options.items() if value}
        return self.spark.readStream.format("penstock").options(**given).load()

    def _parsed(self, side: int, **more: str) -> DataFrame:
        rows = self._read(self.pipeline.sources[side], includeHeaders="true", **more)
        return transformations.parsed(rows, self.pipeline, side)

    # Writing.

    @property
    def _sink(self) -> PipelineSink:
        assert self.pipeline.sink is not None
        return self.pipeline.sink

    @property
    def _sink_options(self) -> dict[str, str]:
        return {"servers": self._sink.servers or self.pipeline.source.servers, **self._sink.options}

    def _store(self, rows: DataFrame, parsed: list[DataFrame], *, mode: str) -> None:
        """Write rows to the sink, and those that did not parse to the dead-letter topic."""
        sink = self._sink
        if sink.parquet is not None:
            out = _counted(transformations.fields(rows), "out")
            writer = out.writeStream.format("parquet").outputMode(mode)
            self._run("rows", out, writer.options(**sink.options).option("path", sink.parquet))
            return self._store_letters()
        out = _counted(transformations.messages(rows, self.pipeline), "out")
        if self._is_one_broker:
            out = reduce(DataFrame.unionByName, map(self._letters, range(len(parsed)), parsed), out)
        if mode == "append":
            self._run("rows", out, _to(out, self._sink_options))
        else:
            # Spark allows Python sinks only the mode append.
            self._run("rows", out, out.writeStream.outputMode(mode).foreachBatch(_storing(self._sink_options)))
        if not self._is_one_broker:
            self._store_letters()

    @property
    def _is_one_broker(self) -> bool:
        """Whether rows and dead letters go to the same broker."""
        return {source.servers for source in self.pipeline.sources} == {self._sink_options["servers"]}

    def _store_letters(self) -> None:
        """Write dead letters with separate queries, to the brokers of their sources."""
        for side in range(len(self.pipeline.sources)):
            letters = self._letters(side, self._parsed(side, group=""))
            name = "letters" if len(self.pipeline.sources) == 1 else f"letters-{side}"
            self._run(name, letters, _to(letters, self._letter_options(side)))

    def _letter_options(self, side: int) -> dict[str, str]:
        source = self.pipeline.sources[side]
        return _login(source.options) | {"servers": source.servers}

    def _letters(self, side: int, parsed: DataFrame) -> DataFrame:
        """Return the dead letters of a source. All of its rows are counted here, as every pipeline does this once."""
        return transformations.letters(self._observed(side, parsed), self.pipeline)

    def _observed(self, side: int, parsed: DataFrame) -> DataFrame:
        return parsed.observe(f"source{side}", fn.count(fn.lit(1)).alias("in"), fn.count(REASON).alias("letters"))

    def _run(self, name: str, rows: DataFrame, writer: DataStreamWriter) -> None:
        if self.explain is not None:
            self.explain(name, rows)
            return
        named = writer.queryName(self.pipeline.name if name == "rows" else f"{self.pipeline.name} {name}")
        placed = named.option("checkpointLocation", f"{self.checkpoint}/{name}")
        with stateful.configured(self.spark, self.pipeline, is_finite="availableNow" in self.trigger):
            self.queries.append(placed.trigger(**self.trigger).start())


# Sources.


def _subscribed(source: PipelineSource) -> dict[str, str]:
    if source.pattern is not None:
        return {"subscribePattern": source.pattern}
    return {"subscribe": ",".join(source.topics or [source.topic or ""])}


def _topics(source: PipelineSource) -> list[str]:
    if source.parquet is not None:
        return []
    if source.pattern is None:
        return list(source.topics or [source.topic or ""])
    wanted = re.compile(source.pattern)
    return [topic.name for topic in _client(source).topics() if wanted.fullmatch(topic.name)]


def _bound(which: str, source: PipelineSource, place: Place) -> dict[str, str]:
    """Return the options for where a source starts or ends."""
    match place:
        case str():
            return {f"{which}Offsets": place}
        case datetime():
            return {f"{which}Timestamp": str(round(place.timestamp() * 1000))}
        case int():
            offsets = {topic: _all_partitions(source, topic, place) for topic in _topics(source)}
            return {f"{which}Offsets": json.dumps(offsets)}


def _all_partitions(source: PipelineSource, topic: str, offset: int) -> dict[str, int]:
    partitions = _client(source).topic(topic).partitions
    return {str(partition): offset for partition in range(partitions)}


def _login(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if name.lower() in _LOGIN}


def _client(source: PipelineSource, timeout_s: float = connection.TIMEOUT_S) -> Client:
    return client_of(source.servers, source.options, timeout_s)


def _plan_of(rows: DataFrame) -> str:
    """Return the plan of a streaming query: the columns on the first line, and the analysed tree below."""
    text = io.StringIO()
    with redirect_stdout(text):
        rows.explain("extended")
    _, _, rest = text.getvalue().partition("== Analyzed Logical Plan ==\n")
    return rest.partition("\n== ")[0].strip()


# Sinks.


def _counted(rows: DataFrame, *names: str) -> DataFrame:
    """Count the rows of each batch: Spark reports the number under these names."""
    return rows.observe("rows", *(fn.count(fn.lit(1)).alias(name) for name in names))


def _to(rows: DataFrame, options: Mapping[str, str]) -> DataStreamWriter:
    return rows.writeStream.format("penstock").options(**options)


def _storing(options: Mapping[str, str], part: str = "") -> BatchFunction:
    """Store batches exactly once, like the streaming sink. Each part of a batch is stored with its own name."""

    def store(batch: DataFrame, number: int) -> None:
        query = _query_of(batch)
        once = {"txnId": f"{query} {part}" if part else query, "txnVersion": str(number)}
        batch.write.format("penstock").options(**options, **once).mode("append").save()

    return store


def _query_of(batch: DataFrame) -> str:
    """Return the ID of the query that a batch belongs to. It is that of the checkpoint."""
    query = batch.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
    assert query is not None, "Spark calls this for a batch of a query"
    return query


def _paced(each: BatchFunction) -> BatchFunction:
    """Limit a query to one batch per second. A trigger does that only for queries without an end."""
    due = time.monotonic()

    def paced(batch: DataFrame, number: int) -> None:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + 1.0
        each(batch, number)

    return paced


def _replacing(path: str) -> BatchFunction:
    """Overwrite the table. If this is interrupted, the table may be gone until the next run."""

    def replace(batch: DataFrame, _: int) -> None:
        batch.coalesce(1).write.mode("overwrite").parquet(path)

    return replace


def _redrive_all(client: Client, offsets: list[int]) -> None:
    """Redrive these dead letters, or raise: then the batch is tried again."""
    done = client.redrive(offsets=offsets)
    if done.skipped:
        raise PenstockError(f"{done.skipped} of {len(offsets)} dead letters could not be redriven: {done.reason}")


def _redriving(source: PipelineSource) -> BatchFunction:
    """Redrive dead letters. The broker redrives each only once, even if it is asked again."""

    def redrive(batch: DataFrame, _: int) -> None:
        client = _client(source, _REDRIVE_S)
        found: list[int] = []
        for row in batch.toLocalIterator():
            if row["partition"] != 0:
                raise ValueError("the dead-letter topic has several partitions: redrive with `penstock dlq redrive`")
            found.append(row["offset"])
            if len(found) == _REDRIVEN_MAX:
                _redrive_all(client, found)
                found = []
        if found:
            _redrive_all(client, found)

    return redrive
