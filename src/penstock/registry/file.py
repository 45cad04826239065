"""The registry's file: TOML, JSON or YAML, with a table for each node.

    [[nodes]]
    id = "shop-1"                    # the broker's server.node_id
    role = "POS"                     # ROOT, L2, L3, POS or LOCAL
    url = "http://10.0.3.1:8222"     # its HTTP port
    parent = "l3-eu"                 # an ID or a URL; or `parents`, of which all but the first are fallbacks
    topics = ["prices", "stock.>"]   # topics that it pulls; by default all topics of its parent
    up = ["sales"]                   # topics that it pushes to its parent

All problems are reported at once, with their lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Final

from penstock import schema, table_file
from penstock.errors import BadConfig
from penstock.pipe.topology import PARENTS_MAX, NodeId, Role, Topics, Url, each_of
from penstock.registry.tree import Node, Tree
from penstock.schema import Form, Invalid, declared, did_you_mean, shown
from penstock.table_file import TableFile


def read(path: Path, data: bytes) -> Tree:
    """Return the tree that a file with these bytes describes. Raise BadConfig."""
    notes = _Notes(table_file.parse(path, data))
    entries = _entries(notes)
    _check_names(entries, notes)
    _check_parents(entries, notes)
    if notes.problems:
        raise BadConfig(notes.problems)
    return Tree({node.id: node for node in _nodes(entries)})


# ---- the contents of the file


_NODE_ID: Final = schema.field("id", NodeId)
_URL: Final = schema.field("url", Url)


def _parent(value: Any) -> str:
    found: str = (_URL if isinstance(value, str) and "://" in value else _NODE_ID).read(value)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The keys of a node."""

    id: NodeId
    role: Role
    url: Url = ""
    parent: Annotated[str, Form(read=_parent)] = ""
    parents: Annotated[tuple[str, ...], each_of(_parent, PARENTS_MAX, "an ID or a URL")] = ()
    topics: Topics = ()
    up: Topics = ()
    cloud_data_url: Url = ""
    cloud_data_url_fallback: Url = ""


_KEYS: Final = declared(_Keys)


@dataclass(slots=True)
class _Notes:
    file: TableFile
    problems: list[str] = field(default_factory=list)

    def add(self, text: str, entry: _Entry | None = None, key: str = "") -> None:
        if entry is None:
            self.problems.append(f"{self.file.path}: {text}")
        else:
            self.problems.append(f"{self.file.where(('nodes', entry.at, key))}: {entry.name}: {text}")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A node as it is written, without the values that are invalid: those are reported."""

    at: int
    values: Mapping[str, Any]

    @property
    def id(self) -> str | None:
        return self.values.get("id")

    @property
    def url(self) -> str | None:
        return self.values.get("url")

    @property
    def name(self) -> str:
        return f"node {self.id}" if self.id is not None else f"node {self.at + 1} of the file"

    @property
    def parents(self) -> tuple[str, ...]:
        """Return IDs and URLs."""
        return (self.values["parent"],) if "parent" in self.values else self.values.get("parents", ())

    @property
    def parent_key(self) -> str:
        return "parent" if "parent" in self.values else "parents"


def _entries(notes: _Notes) -> list[_Entry]:
    tables = notes.file.tables
    nodes = tables.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        notes.add("the file needs a list of nodes, with at least one: [[nodes]] in TOML, nodes: in YAML and JSON")
        return []
    for key in tables.keys() - {"nodes"}:
        notes.add(f"{shown(key)} is unknown: there is only nodes")
    for key, line in notes.file.repeated:
        notes.problems.append(f"{notes.file.path}:{line}: {shown(key)} is repeated: keep one of them")
    return [_entry(at, value, notes) for at, value in enumerate(nodes)]


def _entry(at: int, table: object, notes: _Notes) -> _Entry:
    values: dict[str, Any] = {}
    entry = _Entry(at, values)
    if not isinstance(table, dict):
        notes.add(f"is {shown(table)}: it must be a table", entry)
        return entry
    # The ID first: it names the node in the problems of its other keys.
    for key in dict.fromkeys(("id", "role", *table)):
        if key not in _KEYS:
            notes.add(
                f"{shown(key)} is unknown{did_you_mean(str(key), _KEYS)}: there are {', '.join(_KEYS)}", entry, key
            )
            continue
        try:
            values[key] = _KEYS[key].read(table.get(key))
        except Invalid as problem:
            notes.add(problem.of(key) if key in table else f"{key} is missing", entry, key)
    if "parent" in table and "parents" in table:
        notes.add("parent and parents contradict each other: keep one of them", entry, "parents")
    if both := sorted({*values.get("topics", ())} & {*values.get("up", ())}):
        notes.add(f"topics and up both have {both[0]}: a topic is piped down or up, not both", entry, "up")
    return entry


# ---- values that are valid by themselves and contradict each other


def _check_names(entries: Collection[_Entry], notes: _Notes) -> None:
    for key in ("id", "url"):
        first: dict[str, _Entry] = {}
        for entry in entries:
            value = entry.values.get(key)
            if value is not None and first.setdefault(value, entry) is not entry:
                notes.add(f"{key} {value} is also that of {_place(first[value], notes)}", entry, key)


def _place(entry: _Entry, notes: _Notes) -> str:
    return f"{entry.name}, line {notes.file.lines.of(('nodes', entry.at))}"


def _check_parents(entries: Collection[_Entry], notes: _Notes) -> None:
    known = {entry.id: entry for entry in entries if entry.id is not None}
    for entry in entries:
        if entry.parents and entry.values.get("role") is Role.ROOT:
            notes.add(f"a ROOT has no parent, but this one has {entry.parents[0]}", entry, entry.parent_key)
        for parent in entry.parents:
            if "://" in parent:
                continue
            if parent not in known:
                notes.add(f"unknown parent {parent}: it must be a node of this file, or a URL", entry, entry.parent_key)
            elif known[parent].url is None:
                notes.add(f"its parent {parent} has no url", entry, entry.parent_key)
    for cycle in _cycles(entries):
        entry = known[cycle[0]]
        # From parent to child, as messages would flow forever.
        notes.add(f"is in a cycle, {' → '.join(cycle)}: a node cannot be its own ancestor", entry, entry.parent_key)


def _cycles(entries: Collection[_Entry]) -> Iterator[list[str]]:
    by_url = {entry.url: entry.id for entry in entries if entry.url is not None and entry.id is not None}
    known = {entry.id for entry in entries}
    above = {
        entry.id: {by_url.get(parent, parent) for parent in entry.parents} & known
        for entry in entries
        if entry.id is not None
    }
    while True:
        try:
            TopologicalSorter(above).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1][:-1]
            begin = cycle.index(min(cycle))
            yield [*cycle[begin:], *cycle[:begin], cycle[begin]]
            # There may be others without these.
            above = {node: parents - {*cycle} for node, parents in above.items() if node not in cycle}
        else:
            return


def _nodes(entries: Collection[_Entry]) -> Iterator[Node]:
    urls = {entry.id: entry.url for entry in entries}
    by_url = {entry.url: entry.id for entry in entries if entry.url is not None}
    for entry in entries:
        parents = tuple(dict.fromkeys(urls.get(parent) or parent for parent in entry.parents))
        values = {key: value for key, value in entry.values.items() if key not in ("parent", "parents")}
        yield Node(**values, parents=parents, parent=by_url.get(parents[0]) if parents else None)
