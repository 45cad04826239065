"""Reading a pipeline file, a small TOML file, into a checked `Pipeline`.

All problems are reported at once, each with file, line and key. `validation` checks what only Spark can tell, such as
whether the SQL fits the schema.

Paths in a file are relative to the file, so that it can be run from any directory.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from penstock.errors import BadConfig
from penstock.model import subject
from penstock.pipelines import key_types
from penstock.pipelines.pipeline import (
    KINDS,
    TOP_KEYS,
    AggregateSettings,
    Pipeline,
    PipelineSink,
    PipelineSource,
    Settings,
    TransformSettings,
    Trigger,
    key_name,
)
from penstock.toml_lines import KeyLines, scan

Key = tuple[str, ...]

DEAD_LETTERS: Final = "DLQ"

_SYNTAX: Final = re.compile(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", re.DOTALL)
_MISSING: Final = object()


def load(path: str | Path) -> Pipeline:
    """Read a pipeline file. Raise BadConfig with all of its problems."""
    path = Path(path)
    try:
        text = path.read_bytes().decode()
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise BadConfig([f"{path}: no such file; `penstock pipeline init` writes one"]) from None
    except UnicodeDecodeError:
        raise BadConfig([f"{path}: invalid TOML: not UTF-8 text"]) from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfig([_syntax(path, text, str(error))]) from None
    reading = _FileReader(path, tables, scan(text))
    pipeline = reading.pipeline()
    if reading.problems:
        raise BadConfig([problem for _, problem in sorted(reading.problems, key=lambda each: each[0])])
    assert pipeline is not None, "a problem was reported"
    return pipeline


def _syntax(path: Path, text: str, message: str) -> str:
    found = _SYNTAX.fullmatch(message)
    if found is None:
        return f"{path}: invalid TOML: {message}"
    line = found[2] or text.count("\n", 0, len(text.rstrip())) + 1
    return f"{path}:{line}: invalid TOML: {found[1]}"


class _FileReader:
    """Continues after a problem, so that all are reported at once."""

    def __init__(self, path: Path, tables: dict[str, Any], lines: KeyLines) -> None:
        self._path = path
        self._tables = tables
        self._lines = lines
        self._reported: set[Key] = set()
        self.problems: list[tuple[int, str]] = []

    def pipeline(self) -> Pipeline | None:
        kind = self._kind()
        name = self._value(self._tables, "name", (), key_types.name, _MISSING, needed=True)
        if kind is None:
            return None
        known = (*TOP_KEYS, *KINDS[kind].sources, kind, "sink", "trigger")
        self._refuse_unknown(self._tables, known, (), f"a pipeline of kind {kind} has")
        sources = tuple(self._table(table, PipelineSource) for table in KINDS[kind].sources)
        settings = self._table(kind, KINDS[kind].settings)
        needs_sink = KINDS[kind].needs_sink or "sink" in self._tables
        sink = self._table("sink", PipelineSink) if needs_sink else None
        trigger = self._table("trigger", Trigger)
        if kind == "dead_letters":
            sources = tuple(self._with_dead_letters(source) for source in sources)
        self._check_sources(kind, sources)
        self._check_sink(kind, sources, sink)
        self._check_settings(settings, sink)
        if self.problems:
            return None
        return Pipeline(
            name=name,
            kind=kind,
            sources=sources,
            settings=settings,
            sink=sink,
            trigger=trigger,
            path=self._path,
            lines=self._lines,
        )

    def _kind(self) -> str | None:
        kind = self._tables.get("kind", _MISSING)
        if isinstance(kind, str) and kind in KINDS:
            return kind
        allowed = ", ".join(KINDS)
        if kind is _MISSING:
            self._report(("kind",), f"is missing: it must be one of {allowed}")
        else:
            self._report(("kind",), f"is {kind!r}{key_types.suggestion(str(kind), KINDS)}: it must be one of {allowed}")
        return None

    def _table(self, name: str, kind: type[Any]) -> Any:
        """Read a table of the file into `kind`. Report what cannot be read."""
        table = self._tables.get(name, {})
        if not isinstance(table, dict):
            self._report((name,), f"is a table: write [{name}], and its keys below")
            table = {}
        self._refuse_unknown(table, [each.name for each in fields(kind)], (name,), "it has")
        hints = get_type_hints(kind)
        values = {each.name: self._field(table, name, each, hints[each.name]) for each in fields(kind)}
        return kind(**values)

    def _field(self, table: dict[str, Any], name: str, each: Field[Any], hint: Any) -> Any:
        reads = each.metadata["reads"]
        read = key_types.choice(get_args(hint)) if reads == "choice" else key_types.READERS[reads]
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found = self._value(table, each.name, (name,), read, default, needed=default is MISSING)
        return self._absolute(found) if reads == "path" and found is not None else found

    def _value(
        self, table: dict[str, Any], key: str, above: Key, read: Callable[[Any], Any], default: Any, *, needed: bool
    ) -> Any:
        if key not in table:
            if needed:
                self._report((*above, key), "is missing")
                return None
            return default
        try:
            return read(table[key])
        except ValueError as error:
            self._report((*above, key), str(error))
            return None

    def _refuse_unknown(self, table: dict[str, Any], known: Iterable[str], above: Key, there: str) -> None:
        known = list(known)
        for key in table:
            if key in known:
                continue
            if not above and key in ("source", "left", "right", *KINDS):
                self._report((key,), f"does not belong here: {there} {', '.join(known)}")
            else:
                self._report(
                    (*above, key),
                    f"is unknown{key_types.suggestion(key, known)}: {there} {', '.join(known) or 'no keys'}",
                )

    def _with_dead_letters(self, source: PipelineSource) -> PipelineSource:
        return source if source.topic or source.topics or source.pattern else replace(source, topic=DEAD_LETTERS)

    # Values that are valid by themselves and contradict each other.

    def _check_sources(self, kind: str, sources: tuple[PipelineSource, ...]) -> None:
        for name, source in zip(KINDS[kind].sources, sources, strict=True):
            self._need_one(name, source, ("topic", "topics", "pattern"))
            if KINDS[kind].is_typed and source.schema is None and not self._is_reported(name, "schema"):
                self._report((name, "schema"), "is missing: the columns of the JSON values, such as 'id string'")
            if not KINDS[kind].is_typed and source.schema is not None:
                self._report((name, "schema"), f"is not for kind {kind}, which does not parse values")
            if source.end == "earliest":
                self._report((name, "end"), "is 'earliest', which leaves nothing to read: give an offset or a time")
            if kind != "replay" and source.end is not None:
                self._report((name, "end"), f"is only for kind replay: a pipeline of kind {kind} has no end")
            if isinstance(source.start, datetime) and isinstance(source.end, datetime) and source.end < source.start:
                self._report((name, "end"), "is before start")
            if isinstance(source.start, int) and isinstance(source.end, int) and source.end < source.start:
                self._report((name, "end"), "is below start")

    def _check_sink(self, kind: str, sources: tuple[PipelineSource, ...], sink: PipelineSink | None) -> None:
        if sink is None:
            return
        self._need_one("sink", sink, KINDS[kind].sinks)
        for other in ("topic", "parquet", "archive"):
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
        for source in sources:
            self._refuse_loop(source, sink)

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
                self._need_one("transform", settings, ("sql", "python"))
            case AggregateSettings(mode="update") if sink is not None and sink.parquet is not None:
                self._report(
                    ("aggregate", "mode"),
                    "is 'update', which needs a topic as sink: Parquet files are only appended to",
                )

    def _need_one(self, table: str, of: object, names: tuple[str, ...]) -> None:
        # A value that is invalid by itself has been reported.
        if any(self._is_reported(table, name) for name in names):
            return
        given = [name for name in names if getattr(of, name) not in (None, ())]
        if len(given) == 1:
            return
        if len(names) == 1:
            self._report((table, names[0]), "is missing")
        elif given:
            self._report((table, given[1]), f"contradicts {given[0]}: give one of {', '.join(names)}")
        else:
            self._report((table,), f"needs one of {', '.join(names)}")

    def _is_reported(self, *key: str) -> bool:
        return key in self._reported

    def _absolute(self, path: str) -> str:
        return path if "://" in path else str((self._path.resolve().parent / path).resolve())

    def _report(self, key: Key, what: str) -> None:
        line = self._lines.of(key)
        self._reported.add(key)
        self.problems.append((line, f"{self._path}:{line}: {key_name(key)} {what}"))
