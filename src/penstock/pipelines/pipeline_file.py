"""Reading a pipeline file, a small file of tables, into a checked `Pipeline`.

All problems are reported at once, each with file, line and key. `validation` checks what only Spark can tell, such as
whether the SQL fits the schema.

Paths in a file are relative to the file, so that it can be run from any directory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from penstock import table_file
from penstock.errors import BadConfig
from penstock.model import subject
from penstock.pipelines.pipeline import (
    KINDS,
    SOURCES,
    TABLES,
    AggregateSettings,
    BridgeSettings,
    EnrichSettings,
    Key,
    Pipeline,
    PipelineHead,
    PipelineLookup,
    PipelineSink,
    PipelineSource,
    PythonSettings,
    Settings,
    SqlSettings,
    TransformSettings,
    Trigger,
    key_name,
)
from penstock.schema import Invalid, declared, did_you_mean, make, shown
from penstock.table_file import TableFile

DEAD_LETTERS: Final = "DLQ"

_HEAD: Final = declared(PipelineHead)
_PATHS: Final = ("archive", "parquet", "delta")
_VIEW: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def load(path: str | Path) -> Pipeline:
    """Read a pipeline file. Raise BadConfig with all of its problems."""
    path = Path(path)
    if not path.exists():
        raise BadConfig([f"{path}: no such file; `penstock pipeline init` writes one"])
    reading = _FileReader(table_file.read(path))
    pipeline = reading.pipeline()
    if pipeline is None:
        raise BadConfig([problem for _, problem in sorted(reading.problems, key=lambda each: each[0])])
    return pipeline


class _FileReader:
    """Continues after a problem, so that all are reported at once."""

    def __init__(self, file: TableFile) -> None:
        self._file = file
        self._tables = file.tables
        self._reported: set[Key] = set()
        self.problems: list[tuple[int, str]] = [
            (line, f"{file.path}:{line}: {shown(key)} is repeated: keep one of them") for key, line in file.repeated
        ]

    def pipeline(self) -> Pipeline | None:
        """Return None if there are problems."""
        head = self._values(self._tables, PipelineHead, ())
        kind = head["kind"]
        if kind is None:
            return None
        tables = [*(KINDS[kind].sources or (SOURCES,)), *(["lookup"] if KINDS[kind].has_lookup else [])]
        self._refuse_unknown(
            self._tables, (*_HEAD, *tables, kind, "sink", "trigger"), (), f"a pipeline of kind {kind} has"
        )
        source_keys = self._source_keys(kind)
        sources = tuple(self._table(key, PipelineSource) for key in source_keys)
        lookup = self._table(("lookup",), PipelineLookup) if KINDS[kind].has_lookup else None
        settings = self._table((kind,), KINDS[kind].settings)
        needs_sink = KINDS[kind].needs_sink or "sink" in self._tables
        sink = self._table(("sink",), PipelineSink) if needs_sink else None
        trigger = self._table(("trigger",), Trigger)
        if kind == "dead_letters":
            sources = tuple(self._with_dead_letters(source) for source in sources)
        for key, source in zip(source_keys, sources, strict=True):
            self._check_source(kind, key, source)
        self._check_lookup(lookup)
        self._check_sink(kind, sources, sink)
        self._check_settings(settings, sink)
        if self.problems:
            return None
        return Pipeline(
            **head,
            sources=sources,
            source_keys=source_keys,
            lookup=lookup,
            settings=settings,
            sink=sink,
            trigger=trigger,
            path=self._file.path,
            lines=self._file.lines,
        )

    def _source_keys(self, kind: str) -> tuple[Key, ...]:
        """Return the path of the table of each source."""
        if (tables := KINDS[kind].sources) is not None:
            return tuple((table,) for table in tables)
        names = [str(name) for name in self._mapping((SOURCES,))]
        if not names:
            self._report((SOURCES,), "has no table: write one for each view, such as [sources.orders]")
        for name in names:
            if not _VIEW.fullmatch(name):
                self._report((SOURCES, name), "is not a name for a view: use letters, digits and _")
        return tuple((SOURCES, name) for name in names)

    def _mapping(self, key: Key) -> dict[Any, Any]:
        """Return a table of the file; an empty one if there is none, or something else in its place."""
        found: Any = self._tables
        for name in key:
            found = found.get(name) or {}
            if not isinstance(found, dict):
                self._report(key, f"is a table: write [{'.'.join(key)}], and its keys below")
                return {}
        return dict(found)

    def _table(self, key: Key, kind: type[Any]) -> Any:
        """Read a table of the file into `kind`. Report what cannot be read."""
        table = self._mapping(key)
        self._refuse_unknown(table, declared(kind), key, "it has")
        values = self._values(table, kind, key)
        for name in _PATHS:
            if isinstance(path := values.get(name), str) and "://" not in path:
                values[name] = str((self._file.path.resolve().parent / path).resolve())
        return make(kind, values)

    def _values(self, table: Mapping[str, Any], kind: type[Any], above: Key) -> dict[str, Any]:
        """Return the values of the keys that are given or required; None for those that are invalid or missing."""
        values: dict[str, Any] = {}
        for key, each in declared(kind).items():
            if key not in table and not each.is_required:
                continue
            values[key] = None
            try:
                if key not in table:
                    raise Invalid(f"is missing: {f'it must be {each.allowed}' if each.choices else each.about}")
                values[key] = each.read(table[key])
            except Invalid as problem:
                self._report((*above, key), str(problem))
        return values

    def _refuse_unknown(self, table: Mapping[str, Any], known: Collection[str], above: Key, there: str) -> None:
        for key in table:
            if key in known:
                continue
            if not above and key in ("left", "right", SOURCES, *TABLES):
                self._report((key,), f"does not belong here: {there} {', '.join(known)}")
            else:
                hint = did_you_mean(str(key), known)
                self._report((*above, str(key)), f"is unknown{hint}: {there} {', '.join(known) or 'no keys'}")

    def _with_dead_letters(self, source: PipelineSource) -> PipelineSource:
        return source if source.topic or source.topics or source.pattern else replace(source, topic=DEAD_LETTERS)

    # Values that are valid by themselves and contradict each other.

    def _check_source(self, kind: str, key: Key, source: PipelineSource) -> None:
        if kind == "bridge":
            self._need_one(key, source, ("topic", "topics", "pattern", "parquet"))
            self._check_files(key, source)
        else:
            self._need_one(key, source, ("topic", "topics", "pattern"))
            if source.parquet is not None:
                self._report((*key, "parquet"), f"is only for kind bridge: a pipeline of kind {kind} reads topics")
        # One topic may have a schema of its own.
        is_named = source.schema is not None or source.topic is not None or self._is_reported(*key, "topic")
        is_typed = KINDS[kind].is_typed or (source.parquet is None and self._mapping((kind,)).get("flatten") is True)
        if is_typed and not is_named and not self._is_reported(*key, "schema"):
            self._report_missing(key, PipelineSource, "schema")
        if not KINDS[kind].is_typed and source.schema is not None and source.parquet is None:
            self._check_flattened(kind, key)
        if source.end == "earliest":
            self._report((*key, "end"), "is 'earliest', which leaves nothing to read: give an offset or a time")
        if kind != "replay" and source.end is not None:
            self._report((*key, "end"), f"is only for kind replay: a pipeline of kind {kind} has no end")
        if isinstance(source.start, datetime) and isinstance(source.end, datetime) and source.end < source.start:
            self._report((*key, "end"), "is before start")
        if isinstance(source.start, int) and isinstance(source.end, int) and source.end < source.start:
            self._report((*key, "end"), "is below start")
        self._check_watermark(kind, key, source)

    def _check_flattened(self, kind: str, key: Key) -> None:
        """Refuse a schema that nothing would use."""
        may_parse = "flatten" in declared(KINDS[kind].settings)
        if may_parse and not self._mapping((kind,)).get("flatten"):
            self._report((*key, "schema"), f"is only used with flatten = true in [{kind}]")
        elif not may_parse:
            self._report((*key, "schema"), f"is not for kind {kind}, which does not parse values")

    def _check_files(self, key: Key, source: PipelineSource) -> None:
        """Check a directory as source. It has none of what a topic has."""
        if source.parquet is None:
            return
        if "://" in source.parquet:
            self._report((*key, "parquet"), f"is {source.parquet!r}: it must be a directory, not a URL")
        given = self._mapping(key)
        for name in ("subjects", "start", "archive"):
            if name in given:
                self._report((*key, name), "is only for a topic as source")

    def _check_watermark(self, kind: str, key: Key, source: PipelineSource) -> None:
        for name, other in (("time", "watermark"), ("watermark", "time")):
            if getattr(source, name) is None:
                continue
            if kind != "sql":
                self._report((*key, name), f"is only for kind sql: a pipeline of kind {kind} has it in [{kind}]")
            elif getattr(source, other) is None and not self._is_reported(*key, other):
                self._report((*key, name), f"needs {other}")

    def _check_lookup(self, lookup: PipelineLookup | None) -> None:
        if lookup is None:
            return
        self._need_one(("lookup",), lookup, ("topic", "parquet", "delta"))
        if lookup.topic is None:
            for name in ("servers", "schema", "options"):
                if getattr(lookup, name):
                    self._report(("lookup", name), "is only for a topic as lookup")
        elif lookup.schema is None and not self._is_reported("lookup", "schema"):
            self._report_missing(("lookup",), PipelineLookup, "schema")

    def _check_sink(self, kind: str, sources: tuple[PipelineSource, ...], sink: PipelineSink | None) -> None:
        if sink is None:
            return
        self._need_one(("sink",), sink, KINDS[kind].sinks)
        for other in ("topic", "parquet", "archive", "delta"):
            if getattr(sink, other) is not None and other not in KINDS[kind].sinks:
                allowed = " or ".join(KINDS[kind].sinks)
                self._report(("sink", other), f"is not for kind {kind}, which writes to {allowed}")
        for name in ("key", "subject", "servers"):
            if getattr(sink, name) is not None and sink.topic is None:
                self._report(("sink", name), "is only for a topic as sink")
        given = self._tables.get("sink")
        for name in ("format", "partition"):
            if isinstance(given, dict) and name in given and sink.archive is None:
                self._report(("sink", name), "is only for an archive as sink")
        if sink.delta is not None:
            if "://" in sink.delta:
                self._report(("sink", "delta"), f"is {sink.delta!r}: it must be a directory, not a URL")
            if sink.options:
                self._report(("sink", "options"), "is not for a Delta table, which Spark does not write")
        for source in sources:
            self._refuse_loop(source, sink)
            if kind == "bridge" and source.parquet is not None and sink.parquet is not None:
                self._report(("sink", "parquet"), "needs a topic to read: files are published to a topic")
            if kind == "bridge" and source.parquet is None and sink.topic is not None:
                self._report(("sink", "topic"), "needs files to read: set parquet in [source], or use kind replay")

    def _refuse_loop(self, source: PipelineSource, sink: PipelineSink) -> None:
        """Refuse a pipeline that would read what it writes, without end."""
        if sink.topic is None or sink.servers not in (None, source.servers):
            return
        read = [topic for topic in (source.topic, *source.topics) if topic is not None]
        for topic in read:
            if subject.owns(topic.encode(), sink.topic.encode()):
                self._report(
                    ("sink", "topic"),
                    f"is {sink.topic!r}, in the topic {topic!r} that the pipeline reads: write to another topic",
                )

    def _check_settings(self, settings: Settings, sink: PipelineSink | None) -> None:
        match settings:
            case TransformSettings():
                self._need_one(("transform",), settings, ("sql", "python"))
            case AggregateSettings() | SqlSettings() if settings.mode == "update" and sink and sink.parquet:
                table = "aggregate" if isinstance(settings, AggregateSettings) else "sql"
                self._report(
                    (table, "mode"), "is 'update', which needs a topic as sink: Parquet files are only appended to"
                )
            case PythonSettings():
                self._check_event_time(settings)
            case BridgeSettings():
                self._check_bridge(settings, sink)
            case EnrichSettings(on=on, lookup_on=names) if on and names and len(on) != len(names):
                self._report(("enrich", "lookup_on"), f"has {len(names)} columns, but on has {len(on)}: name as many")

    def _check_bridge(self, settings: BridgeSettings, sink: PipelineSink | None) -> None:
        if sink is None:
            return
        if settings.flatten and sink.parquet is None:
            self._report(("bridge", "flatten"), "is only for Parquet files as sink")
        if settings.value is not None and sink.topic is None:
            self._report(("bridge", "value"), "is only for a topic as sink")
        if sink.parquet is not None and "://" in sink.parquet:
            self._report(("sink", "parquet"), f"is {sink.parquet!r}: it must be a directory, not a URL")
        if sink.parquet is not None and sink.options:
            self._report(("sink", "options"), "is not for these Parquet files, which Spark does not write")

    def _check_event_time(self, settings: PythonSettings) -> None:
        for name in ("time", "watermark"):
            has, needs = getattr(settings, name) is not None, settings.timers == "event"
            if needs and not has and not self._is_reported("python", name):
                self._report_missing(("python",), PythonSettings, name)
            if has and not needs and not self._is_reported("python", "timers"):
                self._report(("python", name), "is only for timers = 'event'")

    def _need_one(self, table: Key, of: object, names: tuple[str, ...]) -> None:
        # A value that is invalid by itself has been reported.
        if any(self._is_reported(*table, name) for name in names):
            return
        given = [name for name in names if getattr(of, name) not in (None, ())]
        if len(given) == 1:
            return
        if len(names) == 1:
            self._report_missing(table, type(of), names[0])
        elif given:
            self._report((*table, given[1]), f"contradicts {given[0]}: give one of {', '.join(names)}")
        else:
            self._report(table, f"needs one of {', '.join(names)}")

    def _is_reported(self, *key: str) -> bool:
        return key in self._reported

    def _report_missing(self, table: Key, kind: type[Any], name: str) -> None:
        self._report((*table, name), f"is missing: {declared(kind)[name].about}")

    def _report(self, key: Key, what: str) -> None:
        line = self._file.lines.of(key)
        self._reported.add(key)
        self.problems.append((line, f"{self._file.path}:{line}: {key_name(key)} {what}"))
