"""A pipeline as its file describes it: source, kind and settings, sink.

The dataclasses below are the only list of the keys in a file: each table of the file is one of them, and `KINDS` says
what each kind needs. `pipeline_file` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from penstock.toml_lines import KeyLines

SERVERS: Final = "127.0.0.1:4222"

# Keys at the top of a file, outside of any table.
TOP_KEYS: Final = ("name", "kind")


def _about(meaning: str, reads: str = "text") -> dict[str, str]:
    """Return the metadata of a key: its meaning, and its type in `key_types.READERS`."""
    return {"meaning": meaning, "reads": reads}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSource:
    """What is read. A valid one has exactly one of `topic`, `topics` and `pattern`."""

    servers: str = field(default=SERVERS, metadata=_about("where the broker is, `host:port[,host:port]`", "servers"))
    topic: str | None = field(default=None, metadata=_about("the topic to read", "topic"))
    topics: tuple[str, ...] = field(default=(), metadata=_about("or several", "topics"))
    pattern: str | None = field(
        default=None, metadata=_about("or all topics whose names match this regular expression", "regex")
    )
    subjects: tuple[str, ...] = field(
        default=(), metadata=_about("only these subjects; wildcards `*` and `>`", "patterns")
    )
    start: str | int | datetime = field(
        default="earliest",
        metadata=_about("where the first run begins: `earliest`, `latest`, an offset or a time", "place"),
    )
    end: str | int | datetime | None = field(
        default=None, metadata=_about("for a replay: where it ends, an offset or a time", "fixed place")
    )
    schema: str | None = field(
        default=None, metadata=_about("the columns of the JSON values: `id string, amount double`")
    )
    archive: str | None = field(
        default=None, metadata=_about("an archive with the messages that the topic no longer retains", "path")
    )
    options: Mapping[str, str] = field(
        default_factory=dict, metadata=_about("other options of the Spark source", "options")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSink:
    """Where rows are written. A valid one has exactly one of `topic`, `parquet` and `archive`."""

    servers: str | None = field(default=None, metadata=_about("a broker other than the source's", "servers"))
    topic: str | None = field(default=None, metadata=_about("a topic, or a subject of one", "topic"))
    parquet: str | None = field(
        default=None, metadata=_about("a directory of Parquet files, as Spark writes them", "path")
    )
    archive: str | None = field(default=None, metadata=_about("the directory of an archive", "path"))
    format: Literal["parquet", "delta"] = field(
        default="parquet", metadata=_about("for an archive: `parquet` or `delta`", "choice")
    )
    partition: Literal["hour", "day"] = field(
        default="hour", metadata=_about("for an archive: a directory for each `hour` or `day`", "choice")
    )
    key: str | None = field(
        default=None, metadata=_about("for a topic: the key, a column or a SQL expression; by default unchanged")
    )
    subject: str | None = field(
        default=None, metadata=_about("for a topic: the subject, a column or a SQL expression; by default the topic")
    )
    options: Mapping[str, str] = field(
        default_factory=dict, metadata=_about("other options of the Spark sink", "options")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    interval: str = field(default="1 second", metadata=_about("with `--follow`: the time between batches", "duration"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSettings:
    """A valid one has exactly one of the two."""

    sql: str | None = field(default=None, metadata=_about("a query over the view `source`"))
    python: str | None = field(
        default=None, metadata=_about("or a function from a DataFrame to a DataFrame, `module:function`", "code")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateSettings:
    time: str = field(metadata=_about("the column with the time of the event"))
    window: str = field(metadata=_about("how long a window is", "duration"))
    slide: str | None = field(
        default=None, metadata=_about("the time between window starts; by default windows do not overlap", "duration")
    )
    watermark: str = field(metadata=_about("how late a row may be and still count", "duration"))
    by: tuple[str, ...] = field(default=(), metadata=_about("the columns to group by", "texts"))
    measures: Mapping[str, str] = field(
        metadata=_about('the measures to compute: `revenue = "sum(amount)"`', "measures")
    )
    mode: Literal["append", "update"] = field(
        default="append",
        metadata=_about(
            "`append`: write a window once, when it is closed; `update`: whenever it changes, only to a topic", "choice"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeduplicateSettings:
    by: tuple[str, ...] = field(metadata=_about("rows with equal values in these columns are duplicates", "some_texts"))
    time: str = field(metadata=_about("the column with the time of the event"))
    watermark: str = field(metadata=_about("how far apart duplicates may be and still be dropped", "duration"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    rate: int | None = field(default=None, metadata=_about("rows per second; by default as fast as possible", "count"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterSettings:
    redrive: str | None = field(
        default=None, metadata=_about("a SQL condition: dead letters that match are published again")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    on: tuple[str, ...] = field(metadata=_about("the columns that are equal on both sides", "some_texts"))
    time: str = field(metadata=_about("the column with the time of the event, on the left"))
    right_time: str | None = field(default=None, metadata=_about("the same on the right, if it has another name"))
    within: str = field(metadata=_about("how far apart the two times may be", "duration"))
    watermark: str = field(metadata=_about("how late a row may be and still be joined", "duration"))
    how: Literal["inner", "left"] = field(
        default="inner", metadata=_about("`inner`, or `left`: also rows without a match on the right", "choice")
    )


Settings = (
    ArchiveSettings
    | TransformSettings
    | AggregateSettings
    | DeduplicateSettings
    | ReplaySettings
    | DeadLetterSettings
    | JoinSettings
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineKind:
    settings: type[Settings]
    # The sinks that it can write to.
    sinks: tuple[str, ...]
    needs_sink: bool = True
    # Whether it parses values as JSON.
    is_typed: bool = True
    # The tables of the file that describe its sources.
    sources: tuple[str, ...] = ("source",)


KINDS: Final = {
    "archive": PipelineKind(settings=ArchiveSettings, sinks=("archive",), is_typed=False),
    "transform": PipelineKind(settings=TransformSettings, sinks=("topic",)),
    "aggregate": PipelineKind(settings=AggregateSettings, sinks=("topic", "parquet")),
    "deduplicate": PipelineKind(settings=DeduplicateSettings, sinks=("topic", "parquet")),
    "replay": PipelineKind(settings=ReplaySettings, sinks=("topic",), is_typed=False),
    "dead_letters": PipelineKind(settings=DeadLetterSettings, sinks=("parquet",), needs_sink=False, is_typed=False),
    "join": PipelineKind(settings=JoinSettings, sinks=("topic", "parquet"), sources=("left", "right")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The contents of a valid pipeline file."""

    name: str
    kind: str
    # A join has two, left and right; all other kinds have one.
    sources: tuple[PipelineSource, ...]
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
        sink = self.sink
        if sink is not None and sink.topic is not None and sink.servers is None:
            sink = replace(sink, options={**sink.options, **login})
        return replace(self, sources=sources, sink=sink)

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
            "settings": _stateful(self.settings, self.source),
        }


def keys() -> Iterator[tuple[str, str, Field[Any]]]:
    """Yield every key that a file may have: its table, its name and its field."""
    for table, kind in [("source", PipelineSource), ("sink", PipelineSink), ("trigger", Trigger)]:
        yield from ((table, each.name, each) for each in fields(kind))
    for name, each_kind in KINDS.items():
        yield from ((name, each.name, each) for each in fields(each_kind.settings))


def key_name(key: tuple[str, ...]) -> str:
    """Return a key as error messages show it: `[sink] topic`, `[sink]` or `name`."""
    if len(key) == 1:
        return key[0] if key[0] in TOP_KEYS else f"[{key[0]}]"
    return f"[{key[0]}] {'.'.join(key[1:])}" if key else "the file"


def _topics_of(source: PipelineSource) -> dict[str, Any]:
    names = ("topic", "topics", "pattern", "subjects")
    return {name: getattr(source, name) for name in names if getattr(source, name)}


def _stateful(settings: Settings, source: PipelineSource) -> dict[str, Any]:
    """Return the settings that determine the state in a checkpoint.

    A rate or a condition may change. So may SQL: a stateless query continues with another one, and for a stateful query
    Spark itself refuses what it cannot do.
    """
    match settings:
        case AggregateSettings() | DeduplicateSettings() | JoinSettings():
            return asdict(settings)
        case ReplaySettings():
            # Another range is another replay: the checkpoint would continue the old one.
            return {"start": str(source.start), "end": str(source.end)}
        case _:
            return {}
