"""A pipeline as its file describes it: source, kind and settings, sink.

The dataclasses below are the only list of the keys in a file: each table of the file is one of them, and `KINDS` says
what each kind needs. `pipeline_file` reads them, and the reference in docs/pipelines.md is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from penstock.pipelines.key_types import (
    SERVERS,
    AnyPlace,
    Code,
    Columns,
    Duration,
    FixedPlace,
    Measures,
    Name,
    Options,
    Patterns,
    Regex,
    Servers,
    SomeColumns,
    Text,
    Topic,
    Topics,
)
from penstock.pipelines.kind import Kind
from penstock.schema import Form, Positive, about, declared
from penstock.toml_lines import KeyLines

# The path of a key in a file.
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineHead:
    """The keys at the top of a file, outside of any table."""

    name: Annotated[Name, about("the name of the pipeline")]
    kind: Annotated[Kind, about("what the pipeline does")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSource:
    """What is read. A valid one has exactly one of `topic`, `topics`, `pattern` and `parquet`."""

    servers: Annotated[Servers, about("where the broker is, `host:port[,host:port]`")] = SERVERS
    topic: Annotated[Topic | None, about("the topic to read")] = None
    topics: Annotated[Topics, about("or several")] = ()
    pattern: Annotated[Regex | None, about("or all topics whose names match this regular expression")] = None
    parquet: Annotated[Text | None, about("for kind bridge: or a directory of Parquet files")] = None
    subjects: Annotated[Patterns, about("only these subjects; wildcards `*` and `>`")] = ()
    start: Annotated[AnyPlace, about("where the first run begins: `earliest`, `latest`, an offset or a time")] = (
        "earliest"
    )
    end: Annotated[FixedPlace, about("for a replay: where it ends, an offset or a time")] = None
    schema: Annotated[
        Text | None, about("the columns of the JSON values: `id string, amount double`; by default the topic's schema")
    ] = None
    time: Annotated[Text | None, about("for kind sql: the column with the time of the event")] = None
    watermark: Annotated[Duration | None, about("for kind sql: how late a row may be and still count")] = None
    archive: Annotated[Text | None, about("an archive with the messages that the topic no longer retains")] = None
    options: Annotated[Options, about("other options of the Spark source")] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLookup:
    """The table in which rows are looked up. A valid one has exactly one of `topic`, `parquet` and `delta`."""

    servers: Annotated[Servers | None, about("a broker other than the source's")] = None
    topic: Annotated[Topic | None, about("a topic: the latest message of each key is a row")] = None
    schema: Annotated[Text | None, about("for a topic: the columns of the JSON values")] = None
    parquet: Annotated[Text | None, about("or a directory of Parquet files")] = None
    delta: Annotated[Text | None, about("or the directory of a Delta table")] = None
    options: Annotated[Options, about("for a topic: other options of the Spark source")] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSink:
    """Where rows are written. A valid one has exactly one of `topic`, `parquet`, `archive` and `delta`."""

    servers: Annotated[Servers | None, about("a broker other than the source's")] = None
    topic: Annotated[Topic | None, about("a topic, or a subject of one")] = None
    parquet: Annotated[Text | None, about("a directory of Parquet files")] = None
    archive: Annotated[Text | None, about("the directory of an archive, or the URL of an object store")] = None
    delta: Annotated[Text | None, about("the directory of a Delta table")] = None
    format: Annotated[Literal["parquet", "delta"], about("for an archive: `parquet` or `delta`")] = "parquet"
    partition: Annotated[Literal["hour", "day"], about("for an archive: a directory for each `hour` or `day`")] = "hour"
    key: Annotated[Text | None, about("for a topic: the key, a column or a SQL expression; by default unchanged")] = (
        None
    )
    subject: Annotated[
        Text | None, about("for a topic: the subject, a column or a SQL expression; by default the topic")
    ] = None
    options: Annotated[Options, about("other options of the Spark sink")] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    interval: Annotated[Duration, about("with `--follow`: the time between batches")] = "1 second"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    hold: Annotated[bool, about("the topic drops no message that is not archived yet, whatever its retention says")] = (
        True
    )
    flatten: Annotated[bool, about("columns for the fields of JSON values, by the schema, besides the values")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSettings:
    """A valid one has exactly one of the two."""

    sql: Annotated[Text | None, about("a query over the view `source`")] = None
    python: Annotated[Code | None, about("or a function from a DataFrame to a DataFrame, `module:function`")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateSettings:
    time: Annotated[Text, about("the column with the time of the event")]
    window: Annotated[Duration, about("how long a window is")]
    slide: Annotated[Duration | None, about("the time between window starts; by default windows do not overlap")] = None
    watermark: Annotated[Duration, about("how late a row may be and still count")]
    by: Annotated[Columns, about("the columns to group by")] = ()
    measures: Annotated[Measures, about('the measures to compute: `revenue = "sum(amount)"`')]
    mode: Annotated[
        Literal["append", "update"],
        about("`append`: write a window once, when it is closed; `update`: whenever it changes, only to a topic"),
    ] = "append"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeduplicateSettings:
    by: Annotated[SomeColumns, about("rows with equal values in these columns are duplicates")]
    time: Annotated[Text, about("the column with the time of the event")]
    watermark: Annotated[Duration, about("how far apart duplicates may be and still be dropped")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    rate: Annotated[
        Positive | None, Form(allowed="a positive integer"), about("rows per second; by default as fast as possible")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterSettings:
    redrive: Annotated[Text | None, about("a SQL condition: dead letters that match are published again")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    on: Annotated[SomeColumns, about("the columns that are equal on both sides")]
    time: Annotated[Text, about("the column with the time of the event, on the left")]
    right_time: Annotated[Text | None, about("the same on the right, if it has another name")] = None
    within: Annotated[Duration, about("how far apart the two times may be")]
    watermark: Annotated[Duration, about("how late a row may be and still be joined")]
    how: Annotated[Literal["inner", "left"], about("`inner`, or `left`: also rows without a match on the right")] = (
        "inner"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlSettings:
    query: Annotated[Text, about("a query over the views that [sources] names")]
    mode: Annotated[
        Literal["append", "update"],
        about("`append`: write a row once, when it is final; `update`: whenever it changes, only to a topic"),
    ] = "append"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrichSettings:
    on: Annotated[SomeColumns, about("the columns that find a row of the lookup")]
    lookup_on: Annotated[
        Columns, about("the same in the lookup, if they have other names; `_key` is the key of its messages")
    ] = ()
    columns: Annotated[
        Measures | None, about('the columns to add: `segment = "upper(segment)"`; by default all others of the lookup')
    ] = None
    refresh: Annotated[
        Duration | None, about("how old the lookup may be; by default it is read again for each batch")
    ] = None
    missing: Annotated[
        Literal["null", "dead_letter"],
        about("a row that finds nothing: `null`: is written with nulls; `dead_letter`: becomes a dead letter"),
    ] = "null"

    @property
    def lookup_keys(self) -> tuple[str, ...]:
        """Return the names of `on` in the lookup."""
        return self.lookup_on or self.on


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionizeSettings:
    by: Annotated[SomeColumns, about("the columns whose values have sessions of their own")]
    time: Annotated[Text, about("the column with the time of the event")]
    gap: Annotated[Duration, about("the longest time between two rows of a session")]
    watermark: Annotated[Duration, about("how late a row may be and still count")]
    measures: Annotated[Measures, about('the measures of each session: `clicks = "count(*)"`')]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpsertSettings:
    key: Annotated[Text, about("the column that identifies a row; in a tombstone, the key of the message is its value")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonSettings:
    processor: Annotated[Code, about("a class derived from PySpark's `StatefulProcessor`, `module:class`")]
    by: Annotated[SomeColumns, about("the columns whose values have state of their own")]
    output: Annotated[Text, about("the columns of the rows that it returns: `customer string, total double`")]
    pandas: Annotated[bool, about("it takes and returns DataFrames of pandas instead of rows")] = False
    timers: Annotated[
        Literal["none", "processing", "event"],
        about("`processing`: timers and TTLs by the clock; `event`: timers by the watermark"),
    ] = "none"
    time: Annotated[Text | None, about("for timers = 'event': the column with the time of the event")] = None
    watermark: Annotated[Duration | None, about("for timers = 'event': how late a row may be and still count")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings:
    flatten: Annotated[
        bool, about("to Parquet: the fields of JSON values as columns, by the schema, instead of the messages")
    ] = False
    value: Annotated[
        Text | None, about("to a topic: the value, a column or a SQL expression; by default all columns as JSON")
    ] = None


Settings = (
    ArchiveSettings
    | TransformSettings
    | AggregateSettings
    | DeduplicateSettings
    | ReplaySettings
    | DeadLetterSettings
    | JoinSettings
    | SqlSettings
    | EnrichSettings
    | SessionizeSettings
    | UpsertSettings
    | PythonSettings
    | BridgeSettings
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineKind:
    settings: type[Settings]
    # The sinks that it can write to.
    sinks: tuple[str, ...]
    needs_sink: bool = True
    # Whether it parses values as JSON. Others may do so by a setting: see `Pipeline.is_typed`.
    is_typed: bool = True
    # The tables of the file that describe its sources. None: there is one for each, below `sources`, with a name.
    sources: tuple[str, ...] | None = ("source",)
    has_lookup: bool = False


KINDS: Final[Mapping[str, PipelineKind]] = {
    "archive": PipelineKind(settings=ArchiveSettings, sinks=("archive",), is_typed=False),
    "transform": PipelineKind(settings=TransformSettings, sinks=("topic",)),
    "aggregate": PipelineKind(settings=AggregateSettings, sinks=("topic", "parquet")),
    "deduplicate": PipelineKind(settings=DeduplicateSettings, sinks=("topic", "parquet")),
    "replay": PipelineKind(settings=ReplaySettings, sinks=("topic",), is_typed=False),
    "dead_letters": PipelineKind(settings=DeadLetterSettings, sinks=("parquet",), needs_sink=False, is_typed=False),
    "join": PipelineKind(settings=JoinSettings, sinks=("topic", "parquet"), sources=("left", "right")),
    "sql": PipelineKind(settings=SqlSettings, sinks=("topic", "parquet"), sources=None),
    "enrich": PipelineKind(settings=EnrichSettings, sinks=("topic",), has_lookup=True),
    "sessionize": PipelineKind(settings=SessionizeSettings, sinks=("topic", "parquet")),
    "upsert": PipelineKind(settings=UpsertSettings, sinks=("delta",)),
    "python": PipelineKind(settings=PythonSettings, sinks=("topic", "parquet")),
    "bridge": PipelineKind(settings=BridgeSettings, sinks=("topic", "parquet"), is_typed=False),
}

# The table with a table for each source, where the file names them.
SOURCES: Final = "sources"

# The tables of a file, by their names. Instead of source a join has left and right, and sql has sources.
TABLES: Final[Mapping[str, type[Any]]] = {
    "source": PipelineSource,
    "lookup": PipelineLookup,
    "sink": PipelineSink,
    "trigger": Trigger,
    **{name: kind.settings for name, kind in KINDS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The contents of a valid pipeline file."""

    name: str
    kind: str
    # A join has two, left and right; sql has any number; all other kinds have one.
    sources: tuple[PipelineSource, ...]
    # Where the file describes each of them: ("source",), or ("sources", "orders").
    source_keys: tuple[Key, ...]
    # Only for kind enrich.
    lookup: PipelineLookup | None = None
    # An instance of the kind's class in `KINDS`.
    settings: Settings
    # Only dead letters may have none.
    sink: PipelineSink | None
    trigger: Trigger
    path: Path = field(compare=False)
    lines: KeyLines = field(compare=False, repr=False)

    @property
    def source(self) -> PipelineSource:
        return self.sources[0]

    @property
    def is_typed(self) -> bool:
        """Return whether values are parsed as JSON."""
        return KINDS[self.kind].is_typed or getattr(self.settings, "flatten", False)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Return the name of each source. In sql it is that of its view."""
        return tuple(key[-1] for key in self.source_keys)

    @property
    def sample_keys(self) -> tuple[Key, ...]:
        """Return where the file describes the topics that a run on samples needs a sample of."""
        has_topic = self.lookup is not None and self.lookup.topic is not None
        return (*self.source_keys, ("lookup",)) if has_topic else self.source_keys

    @property
    def directory(self) -> Path:
        """Return the directory of the file. Modules that the file names are searched here first."""
        return self.path.resolve().parent

    def at(self, servers: str | None, **credentials: str | None) -> Pipeline:
        """Return the pipeline with another broker, and the user, password or token for it. A sink with a broker of its
        own keeps that."""
        login = {name: value for name, value in credentials.items() if value is not None}
        sources = tuple(
            replace(source, servers=servers or source.servers, options={**source.options, **login})
            for source in self.sources
        )
        sink, lookup = self.sink, self.lookup
        if sink is not None and sink.topic is not None and sink.servers is None:
            sink = replace(sink, options={**sink.options, **login})
        if lookup is not None and lookup.topic is not None and lookup.servers is None:
            lookup = replace(lookup, options={**lookup.options, **login})
        return replace(self, sources=sources, lookup=lookup, sink=sink)

    @property
    def checked_by_spark(self) -> list[str]:
        """Return what only Spark can check in the file, in words."""
        found = []
        if self.is_typed:
            found.append("schema")
        match self.settings:
            case TransformSettings(python=None) | SqlSettings():
                found.append("SQL")
            case TransformSettings():
                found.append("function")
            case AggregateSettings() | SessionizeSettings():
                found += ["columns", "measures"]
            case DeduplicateSettings() | JoinSettings() | UpsertSettings():
                found.append("columns")
            case PythonSettings():
                found += ["columns", "processor"]
            case EnrichSettings():
                found += ["lookup", "columns"]
            case BridgeSettings(value=str()):
                found.append("value")
            case DeadLetterSettings(redrive=str()):
                found.append("redrive condition")
        if self.sink is not None and self.sink.topic is not None:
            found += [name for name in ("key", "subject") if getattr(self.sink, name) is not None]
        return found

    def where(self, *key: str) -> str:
        """Return the start of an error message about a key: file, line and key."""
        return f"{self.path}:{self.lines.of(key)}: {key_name(key)}"

    @property
    def identity(self) -> dict[str, Any]:
        """Return what identifies the owner of a checkpoint.

        The state and the offsets in a checkpoint are meaningless to a pipeline in which any of this differs. Everything
        else may change between two runs.
        """
        return {
            "name": self.name,
            "kind": self.kind,
            "sources": [_topics_of(source) for source in self.sources],
            "settings": _stateful(self),
        }


def key_name(key: Key) -> str:
    """Return a key as error messages show it: `[sink] topic`, `[sources.orders] topic`, `[sink]` or `name`."""
    if len(key) > 1 and key[0] == SOURCES:
        key = (f"{SOURCES}.{key[1]}", *key[2:])
    if len(key) == 1:
        return key[0] if key[0] in declared(PipelineHead) else f"[{key[0]}]"
    return f"[{key[0]}] {'.'.join(key[1:])}" if key else "the file"


def _topics_of(source: PipelineSource) -> dict[str, Any]:
    names = ("topic", "topics", "pattern", "parquet", "subjects")
    return {name: getattr(source, name) for name in names if getattr(source, name)}


def _stateful(pipeline: Pipeline) -> dict[str, Any]:
    """Return the settings that determine the state in a checkpoint.

    A rate or a condition may change. So may the SQL of a transform: a stateless query continues with another one, and
    for a stateful query Spark itself refuses what it cannot do.
    """
    match pipeline.settings:
        case AggregateSettings() | DeduplicateSettings() | JoinSettings() | SessionizeSettings() | UpsertSettings():
            return asdict(pipeline.settings)
        case PythonSettings(processor=processor, by=by, timers=timers, time=time, watermark=watermark):
            # Spark itself compares the variables of the processor. What it returns is not in the state.
            return {"processor": processor, "by": by, "timers": timers, "time": time, "watermark": watermark}
        case SqlSettings():
            # Spark numbers the sources of a query in the order in which the query reads them. Another query would
            # continue one topic at the offsets of another.
            times = [(source.time, source.watermark) for source in pipeline.sources]
            return asdict(pipeline.settings) | {"views": pipeline.source_names, "watermarks": times}
        case ReplaySettings():
            # Another range is another replay: the checkpoint would continue the old one.
            return {"start": str(pipeline.source.start), "end": str(pipeline.source.end)}
        case _:
            return {}
