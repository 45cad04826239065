"""A pipeline file: a small TOML file, as a checked description of what is to run.

The dataclasses below are the one list of its keys; a table of the file is one of them, and what a kind needs is in
`KINDS`. Whatever is wrong is refused, all of it at once, each with file, line and key. What only Spark can tell (does
the SQL fit the schema?) is asked by `penstock.pipelines.validation`.

Paths in a file are relative to the file, so that it may be run from anywhere.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from datetime import UTC, date, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_type_hints

from penstock import address, moments, subject
from penstock.clock import SystemClock
from penstock.errors import BadConfig
from penstock.moments import Place
from penstock.toml_lines import KeyLines, scan

SERVERS: Final = "127.0.0.1:4222"
DEAD_LETTERS: Final = "DLQ"

Key = tuple[str, ...]


def _about(meaning: str, reads: str = "text") -> dict[str, str]:
    """The metadata of a key: what it means, and which of the functions in `_READ` reads it."""
    return {"meaning": meaning, "reads": reads}


# ---- what stands in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is read. Exactly one of `topic`, `topics` and `pattern` is given."""

    servers: str = field(default=SERVERS, metadata=_about("where the broker is, `host:port[,host:port]`", "servers"))
    topic: str | None = field(default=None, metadata=_about("the topic to read", "topic"))
    topics: tuple[str, ...] = field(default=(), metadata=_about("or several", "topics"))
    pattern: str | None = field(
        default=None, metadata=_about("or all whose names match this regular expression", "regex")
    )
    subjects: tuple[str, ...] = field(
        default=(), metadata=_about("only these subjects; wildcards `*` and `>`", "patterns")
    )
    start: str | int | datetime = field(
        default="earliest",
        metadata=_about("where the first run begins: `earliest`, `latest`, an offset or a time", "place"),
    )
    end: str | int | datetime | None = field(
        default=None, metadata=_about("of a replay: where it ends for good, an offset or a time", "fixed place")
    )
    schema: str | None = field(
        default=None, metadata=_about("the columns of the JSON values: `id string, amount double`")
    )
    archive: str | None = field(
        default=None, metadata=_about("an archive with the history before what the topic retains", "path")
    )
    options: Mapping[str, str] = field(
        default_factory=dict, metadata=_about("other options of the Spark source, as they are", "options")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """What is written. Exactly one of `topic`, `parquet` and `archive` is given."""

    servers: str | None = field(default=None, metadata=_about("another broker than that of the source", "servers"))
    topic: str | None = field(default=None, metadata=_about("a topic, or a subject of one", "topic"))
    parquet: str | None = field(
        default=None, metadata=_about("a directory of Parquet files, as Spark itself writes them", "path")
    )
    archive: str | None = field(default=None, metadata=_about("the directory of an archive", "path"))
    format: Literal["parquet", "delta"] = field(
        default="parquet", metadata=_about("of an archive: `parquet` or `delta`", "choice")
    )
    partition: Literal["hour", "day"] = field(
        default="hour", metadata=_about("of an archive: a directory for each `hour` or `day`", "choice")
    )
    key: str | None = field(
        default=None, metadata=_about("to a topic: the key, a column or a SQL expression; else it stays")
    )
    subject: str | None = field(
        default=None, metadata=_about("to a topic: the subject, a column or a SQL expression; else the topic itself")
    )
    options: Mapping[str, str] = field(
        default_factory=dict, metadata=_about("other options of the Spark sink, as they are", "options")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    interval: str = field(
        default="1 second", metadata=_about("with `--follow`: how long from one batch to the next", "duration")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Exactly one of the two is given."""

    sql: str | None = field(default=None, metadata=_about("a query over the view `source`"))
    python: str | None = field(
        default=None, metadata=_about("or a function from a DataFrame to a DataFrame, `module:function`", "code")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    time: str = field(metadata=_about("the column with the time of the event"))
    window: str = field(metadata=_about("how long a window is", "duration"))
    slide: str | None = field(
        default=None, metadata=_about("from one window to the next; without it windows do not overlap", "duration")
    )
    watermark: str = field(metadata=_about("how late a row may come and still count", "duration"))
    by: tuple[str, ...] = field(default=(), metadata=_about("the columns to group by", "texts"))
    measures: Mapping[str, str] = field(metadata=_about('what is computed: `revenue = "sum(amount)"`', "measures"))
    mode: Literal["append", "update"] = field(
        default="append",
        metadata=_about(
            "`append`: a window once, when it is closed; `update`: again whenever it changes, only to a topic", "choice"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deduplicate:
    by: tuple[str, ...] = field(metadata=_about("rows that agree in these columns are the same", "some_texts"))
    time: str = field(metadata=_about("the column with the time of the event"))
    watermark: str = field(metadata=_about("how far apart two of the same may be and still be seen", "duration"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    rate: int | None = field(default=None, metadata=_about("rows a second; without it as fast as it goes", "count"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    redrive: str | None = field(default=None, metadata=_about("a SQL condition: those that match are published again"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    on: tuple[str, ...] = field(metadata=_about("the columns that are equal on both sides", "some_texts"))
    time: str = field(metadata=_about("the column with the time of the event, on the left"))
    right_time: str | None = field(default=None, metadata=_about("the same on the right, if it has another name"))
    within: str = field(metadata=_about("how far apart the two times may be", "duration"))
    watermark: str = field(metadata=_about("how late a row may come and still be joined", "duration"))
    how: Literal["inner", "left"] = field(
        default="inner", metadata=_about("`inner`, or `left`: also rows that find nothing on the right", "choice")
    )


Settings = Archive | Transform | Aggregate | Deduplicate | Replay | DeadLetters | Join


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    settings: type[Settings]
    # What its sink may be.
    sinks: tuple[str, ...]
    needs_sink: bool = True
    # Whether values are JSON that is parsed.
    is_typed: bool = True
    # The tables that say what it reads.
    sources: tuple[str, ...] = ("source",)


KINDS: Final = {
    "archive": Kind(settings=Archive, sinks=("archive",), is_typed=False),
    "transform": Kind(settings=Transform, sinks=("topic",)),
    "aggregate": Kind(settings=Aggregate, sinks=("topic", "parquet")),
    "deduplicate": Kind(settings=Deduplicate, sinks=("topic", "parquet")),
    "replay": Kind(settings=Replay, sinks=("topic",), is_typed=False),
    "dead_letters": Kind(settings=DeadLetters, sinks=("parquet",), needs_sink=False, is_typed=False),
    "join": Kind(settings=Join, sinks=("topic", "parquet"), sources=("left", "right")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A file that is right."""

    name: str
    kind: str
    # Of a join the left and the right one, else one.
    sources: tuple[Source, ...]
    # Of the class that `KINDS` has for the kind.
    settings: Settings
    # None: only of dead letters.
    sink: Sink | None
    trigger: Trigger
    path: Path = field(compare=False)
    lines: KeyLines = field(compare=False, repr=False)

    @property
    def source(self) -> Source:
        return self.sources[0]

    @property
    def directory(self) -> Path:
        """Where the modules that it names are looked for first."""
        return self.path.resolve().parent

    def at(self, servers: str | None, **login: str | None) -> Pipeline:
        """The same with another broker, and who asks it: user, password, token. A sink that names its own keeps it."""
        who = {name: value for name, value in login.items() if value is not None}
        sources = tuple(
            replace(source, servers=servers or source.servers, options={**source.options, **who})
            for source in self.sources
        )
        sink = self.sink
        if sink is not None and sink.topic is not None and sink.servers is None:
            sink = replace(sink, options={**sink.options, **who})
        return replace(self, sources=sources, sink=sink)

    def where(self, *key: str) -> str:
        """How a complaint about a key begins."""
        return f"{self.path}:{self.lines.of(key)}: {_named(key)}"

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint belongs to. Its state and its offsets make no sense for a pipeline in which any of these
        differs; all else may change between two runs."""
        return {
            "name": self.name,
            "kind": self.kind,
            "sources": [_read_from(source) for source in self.sources],
            "settings": _kept(self.settings, self.source),
        }


def load(path: str | Path) -> Pipeline:
    """Raises BadConfig, which lists all that is wrong with it."""
    path = Path(path)
    try:
        text = path.read_bytes().decode()
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise BadConfig([f"{path}: there is no such file; `penstock pipeline init` writes one"]) from None
    except UnicodeDecodeError:
        raise BadConfig([f"{path}: it is not UTF-8 text, as TOML must be"]) from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfig([_syntax(path, text, str(error))]) from None
    reading = _Reading(path, tables, scan(text))
    pipeline = reading.pipeline()
    if reading.problems:
        raise BadConfig([problem for _, problem in sorted(reading.problems, key=lambda each: each[0])])
    assert pipeline is not None, "a problem was told"
    return pipeline


# ---- reading


_SYNTAX: Final = re.compile(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TOP: Final = ("name", "kind")
_MISSING: Final = object()


def _syntax(path: Path, text: str, message: str) -> str:
    found = _SYNTAX.fullmatch(message)
    if found is None:
        return f"{path}: this is not TOML: {message}"
    line = found[2] or text.count("\n", 0, len(text.rstrip())) + 1
    return f"{path}:{line}: this is not TOML: {found[1]}"


class _Reading:
    """Goes on after a problem, so that all are told at once."""

    def __init__(self, path: Path, tables: dict[str, Any], lines: KeyLines) -> None:
        self._path = path
        self._tables = tables
        self._lines = lines
        self._told: set[Key] = set()
        self.problems: list[tuple[int, str]] = []

    def pipeline(self) -> Pipeline | None:
        kind = self._kind()
        name = self._value(self._tables, "name", (), _name, _MISSING, needed=True)
        if kind is None:
            return None
        known = (*_TOP, *KINDS[kind].sources, kind, "sink", "trigger")
        self._refuse_unknown(self._tables, known, (), f"a pipeline of kind {kind} has")
        sources = tuple(self._table(table, Source) for table in KINDS[kind].sources)
        settings = self._table(kind, KINDS[kind].settings)
        needs_sink = KINDS[kind].needs_sink or "sink" in self._tables
        sink = self._table("sink", Sink) if needs_sink else None
        trigger = self._table("trigger", Trigger)
        if kind == "dead_letters":
            sources = tuple(self._with_letters(source) for source in sources)
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
        there = ", ".join(KINDS)
        if kind is _MISSING:
            self._tell(("kind",), f"is missing: it is one of {there}")
        else:
            self._tell(("kind",), f"is {kind!r}{_nearest(str(kind), KINDS)}: it must be one of {there}")
        return None

    def _table(self, name: str, kind: type[Any]) -> Any:
        """With what could be read of it; the rest is told."""
        table = self._tables.get(name, {})
        if not isinstance(table, dict):
            self._tell((name,), f"is a table: write [{name}], and its keys below")
            table = {}
        self._refuse_unknown(table, [each.name for each in fields(kind)], (name,), "it has")
        hints = get_type_hints(kind)
        values = {each.name: self._field(table, name, each, hints[each.name]) for each in fields(kind)}
        return kind(**values)

    def _field(self, table: dict[str, Any], name: str, each: Field[Any], hint: Any) -> Any:
        reads = each.metadata["reads"]
        read = _choice(get_args(hint)) if reads == "choice" else _READ[reads]
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found = self._value(table, each.name, (name,), read, default, needed=default is MISSING)
        return self._from_here(found) if reads == "path" and found is not None else found

    def _value(
        self, table: dict[str, Any], key: str, above: Key, read: Callable[[Any], Any], default: Any, *, needed: bool
    ) -> Any:
        if key not in table:
            if needed:
                self._tell((*above, key), "is missing")
                return None
            return default
        try:
            return read(table[key])
        except ValueError as error:
            self._tell((*above, key), str(error))
            return None

    def _refuse_unknown(self, table: dict[str, Any], known: Iterable[str], above: Key, there: str) -> None:
        known = list(known)
        for key in table:
            if key in known:
                continue
            if not above and key in ("source", "left", "right", *KINDS):
                self._tell((key,), f"does not belong here: {there} {', '.join(known)}")
            else:
                self._tell(
                    (*above, key), f"is not known{_nearest(key, known)}: {there} {', '.join(known) or 'no keys'}"
                )

    def _with_letters(self, source: Source) -> Source:
        return source if source.topic or source.topics or source.pattern else replace(source, topic=DEAD_LETTERS)

    # What does not fit together.

    def _check_sources(self, kind: str, sources: tuple[Source, ...]) -> None:
        for name, source in zip(KINDS[kind].sources, sources, strict=True):
            self._need_one(name, source, ("topic", "topics", "pattern"))
            if KINDS[kind].is_typed and source.schema is None and not self._is_told(name, "schema"):
                self._tell((name, "schema"), "is missing: the columns of the JSON values, such as 'id string'")
            if not KINDS[kind].is_typed and source.schema is not None:
                self._tell((name, "schema"), f"is not for kind {kind}, which takes values as they are")
            if source.end == "earliest":
                self._tell((name, "end"), "is 'earliest', so there is nothing to read: give an offset or a time")
            if kind != "replay" and source.end is not None:
                self._tell((name, "end"), f"is only for kind replay: a pipeline of kind {kind} goes on with each run")
            if isinstance(source.start, datetime) and isinstance(source.end, datetime) and source.end < source.start:
                self._tell((name, "end"), "is before start")
            if isinstance(source.start, int) and isinstance(source.end, int) and source.end < source.start:
                self._tell((name, "end"), "is below start")

    def _check_sink(self, kind: str, sources: tuple[Source, ...], sink: Sink | None) -> None:
        if sink is None:
            return
        self._need_one("sink", sink, KINDS[kind].sinks)
        for other in ("topic", "parquet", "archive"):
            if getattr(sink, other) is not None and other not in KINDS[kind].sinks:
                allowed = " or ".join(KINDS[kind].sinks)
                self._tell(("sink", other), f"is not for kind {kind}, which writes to {allowed}")
        for name in ("key", "subject", "servers"):
            if getattr(sink, name) is not None and sink.topic is None:
                self._tell(("sink", name), "is only for a sink that is a topic")
        given = self._tables.get("sink")
        for name in ("format", "partition"):
            if isinstance(given, dict) and name in given and sink.archive is None:
                self._tell(("sink", name), "is only for a sink that is an archive")
        for source in sources:
            self._refuse_circle(source, sink)

    def _refuse_circle(self, source: Source, sink: Sink) -> None:
        """What it writes it would read again, for ever."""
        if sink.topic is None or sink.servers not in (None, source.servers):
            return
        read = [topic for topic in (source.topic, *source.topics) if topic is not None]
        for topic in read:
            if subject.owns(topic.encode(), sink.topic.encode()):
                self._tell(("sink", "topic"), f"is {sink.topic!r}, of the topic {topic!r} that it reads: name another")

    def _check_settings(self, settings: Settings, sink: Sink | None) -> None:
        match settings:
            case Transform():
                self._need_one("transform", settings, ("sql", "python"))
            case Aggregate(mode="update") if sink is not None and sink.parquet is not None:
                self._tell(("aggregate", "mode"), "is 'update', which only a topic can take: Parquet is appended to")

    def _need_one(self, table: str, of: object, names: tuple[str, ...]) -> None:
        # What is wrong in itself was told.
        if any(self._is_told(table, name) for name in names):
            return
        given = [name for name in names if getattr(of, name) not in (None, ())]
        if len(given) == 1:
            return
        if len(names) == 1:
            self._tell((table, names[0]), "is missing")
        elif given:
            self._tell((table, given[1]), f"contradicts {given[0]}: give one of {', '.join(names)}")
        else:
            self._tell((table,), f"needs one of {', '.join(names)}")

    def _is_told(self, *key: str) -> bool:
        return key in self._told

    def _from_here(self, path: str) -> str:
        return path if "://" in path else str((self._path.resolve().parent / path).resolve())

    def _tell(self, key: Key, what: str) -> None:
        line = self._lines.of(key)
        self._told.add(key)
        self.problems.append((line, f"{self._path}:{line}: {_named(key)} {what}"))


def _named(key: Key) -> str:
    """[sink] topic; [sink]; name."""
    if len(key) == 1:
        return key[0] if key[0] in _TOP else f"[{key[0]}]"
    return f"[{key[0]}] {'.'.join(key[1:])}" if key else "the file"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# One for each way in which a key is read; each raises ValueError with what stands behind the key's name.


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"is {_shown(value)}: it must be text in quotes")
    if not value.strip():
        raise ValueError("is empty")
    return value


def _name(value: Any) -> str:
    if not _NAME.fullmatch(_text(value)):
        raise ValueError(f"is {value!r}: it must be letters, digits, '.', '_' and '-', at most 100, and begin with one")
    return str(value)


def _servers(value: Any) -> str:
    servers = [server.strip() for server in _text(value).split(",")]
    try:
        # A file names the port.
        is_right = all(address.split(server, -1)[1] >= 0 for server in servers)
    except ValueError:
        is_right = False
    if not is_right:
        raise ValueError(f"is {value!r}: it must be like {SERVERS!r}, several with commas between them")
    return ",".join(servers)


def _topic(value: Any) -> str:
    if not subject.is_subject(_text(value).encode()):
        raise ValueError(f"is {value!r}: a topic's name has no blanks, no wildcards, and nothing empty between dots")
    return str(value)


def _topics(value: Any) -> tuple[str, ...]:
    return tuple(_topic(each) for each in _some_texts(value))


def _regex(value: Any) -> str:
    try:
        re.compile(_text(value))
    except re.error as error:
        raise ValueError(f"is {value!r}, which is no regular expression: {error}") from None
    return str(value)


def _patterns(value: Any) -> tuple[str, ...]:
    for each in _some_texts(value):
        if not subject.is_pattern(each.encode()):
            raise ValueError(f"has {each!r}, which is no pattern of subjects: write orders.* or orders.>")
    return _some_texts(value)


def _place(value: Any) -> Place:
    # TOML has times of its own; without a zone they are UTC, as text is.
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if isinstance(value, datetime) and value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    try:
        return moments.read_place(value, SystemClock().now_us())
    except ValueError as error:
        raise ValueError(f"is {error}") from None


def _fixed_place(value: Any) -> Place:
    if isinstance(value, str) and moments.is_relative(value):
        raise ValueError(f"is {value!r}, which would move with every run: give an offset, or a time that stays")
    return _place(value)


def _options(value: Any) -> dict[str, str]:
    """As Spark takes them: all of them are text."""
    if not isinstance(value, dict):
        raise ValueError(f"is {_shown(value)}: it must be a table, such as {{ maxOffsetsPerTrigger = 100000 }}")
    return dict(_option(name, each) for name, each in value.items())


def _option(name: str, value: Any) -> tuple[str, str]:
    if isinstance(value, bool):
        return name, str(value).lower()
    if isinstance(value, (str, int, float)):
        return name, str(value)
    raise ValueError(f"has {name} = {_shown(value)}: an option is text, a number or a switch")


def _duration(value: Any) -> str:
    if not _DURATION.fullmatch(_text(value)):
        raise ValueError(f"is {value!r}: it must be like '10 minutes', or '1 hour 30 minutes'")
    return str(value)


_DURATION: Final = re.compile(r"\d+ (?:millisecond|second|minute|hour|day|week)s?(?: \d+ (?:second|minute|hour)s?)*")


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"is {_shown(value)}: it must be a whole number above 0")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """One may stand alone."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) and each.strip() for each in values):
        raise ValueError(f"is {_shown(value)}: it must be a list of texts, such as ['id', 'country']")
    if len(set(values)) < len(values):
        raise ValueError(f"is {_shown(value)}: one of them is there twice")
    return tuple(values)


def _some_texts(value: Any) -> tuple[str, ...]:
    if not (values := _texts(value)):
        raise ValueError("is an empty list: name at least one")
    return values


def _measures(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) and each.strip() for each in value.values()):
        raise ValueError(
            f'is {_shown(value)}: it must be a table of names and SQL, such as {{ total = "sum(amount)" }}'
        )
    if not value:
        raise ValueError('is empty: compute at least one thing, such as { rows = "count(*)" }')
    return dict(value)


def _code(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", _text(value)):
        raise ValueError(f"is {value!r}: it must be module:function, such as shop.orders:clean")
    return str(value)


def _choice(choices: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"is {_shown(value)}{_nearest(str(value), choices)}: it must be {' or '.join(choices)}")
        return str(value)

    return read


def _shown(value: Any) -> str:
    """As in the file, more or less."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "a table"
        case _:
            return repr(value)


_READ: Final[dict[str, Callable[[Any], Any]]] = {
    "text": _text,
    "servers": _servers,
    "topic": _topic,
    "topics": _topics,
    "regex": _regex,
    "patterns": _patterns,
    "place": _place,
    "fixed place": _fixed_place,
    "path": _text,
    "options": _options,
    "duration": _duration,
    "count": _count,
    "texts": _texts,
    "some_texts": _some_texts,
    "measures": _measures,
    "code": _code,
}


# ---- identity


def _read_from(source: Source) -> dict[str, Any]:
    names = ("topic", "topics", "pattern", "subjects")
    return {name: getattr(source, name) for name in names if getattr(source, name)}


def _kept(settings: Settings, source: Source) -> dict[str, Any]:
    """What the state in a checkpoint was made by. A rate or a condition may change, and so may SQL: a query without
    state goes on with another, and of one with state Spark itself says what it cannot do."""
    match settings:
        case Aggregate() | Deduplicate() | Join():
            return asdict(settings)
        case Replay():
            # Another range is another replay: the checkpoint would go on with the old one.
            return {"start": str(source.start), "end": str(source.end)}
        case _:
            return {}


def keys() -> Iterator[tuple[str, str, Field[Any]]]:
    """Every key that a file may have: the table, its name, and what is known of it."""
    for table, kind in [("source", Source), ("sink", Sink), ("trigger", Trigger)]:
        yield from ((table, each.name, each) for each in fields(kind))
    for name, each_kind in KINDS.items():
        yield from ((name, each.name, each) for each in fields(each_kind.settings))
