"""The registry's file: TOML, JSON or YAML, a table for each node.

    [[nodes]]
    id = "shop-1"                    # the broker's server.node_id
    role = "POS"                     # ROOT, L2, L3, POS or LOCAL
    url = "http://10.0.3.1:8222"     # its HTTP port
    parent = "l3-eu"                 # an id or a URL; or `parents`, of which all but the first are fallbacks
    topics = ["prices", "stock.>"]   # what comes down to it; left out: all that its parent has
    up = ["sales"]                   # what it pushes to its parent

Whatever is wrong is refused, all of it at once, with the line where that is known.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

from penstock.errors import BadConfig, BadTopology
from penstock.pipe.topology import PARENTS_MAX, Role, read_node_id, read_role, read_topics, read_url, shown
from penstock.registry.lines import NodeLines, toml_lines, yaml_lines
from penstock.registry.tree import Node, Tree


def read(path: Path, data: bytes) -> Tree:
    """The tree that a file with these bytes describes."""
    notes = _Notes(path)
    entries = _entries(path, data, notes)
    _check_names(entries, notes)
    _check_parents(entries, notes)
    if notes.problems:
        raise BadConfig(notes.problems)
    return Tree({node.id: node for node in _nodes(entries)})


# ---- what stands in the file


@dataclass(slots=True)
class _Notes:
    path: Path
    lines: NodeLines = field(default_factory=NodeLines)
    problems: list[str] = field(default_factory=list)

    def add(self, text: str, entry: _Entry | None = None, key: str = "") -> None:
        line = self.lines.of(entry.at, key) if entry else None
        where = f"{self.path}:{line}" if line else f"{self.path}"
        self.problems.append(f"{where}: {entry.name}: {text}" if entry else f"{where}: {text}")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A node as it is written, but for values that are wrong: those are left out, and noted."""

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
        """Ids and URLs."""
        found: tuple[str, ...] = self.values.get("parent") or self.values.get("parents") or ()
        return found

    @property
    def parent_key(self) -> str:
        return "parent" if "parent" in self.values else "parents"


def _read_parent(name: str, value: object) -> tuple[str, ...]:
    reader = read_url if isinstance(value, str) and "://" in value else read_node_id
    return (reader(name, value),)


def _read_parents(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > PARENTS_MAX:
        raise BadTopology(f"{name} is {shown(value)}: it must be a list of up to {PARENTS_MAX} ids and URLs")
    read = (parent for at, each in enumerate(value) for parent in _read_parent(f"{name}[{at}]", each))
    return tuple(dict.fromkeys(read))


_KEYS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "id": read_node_id,
    "role": read_role,
    "url": read_url,
    "parent": _read_parent,
    "parents": _read_parents,
    "topics": read_topics,
    "up": read_topics,
    "cloud_data_url": read_url,
    "cloud_data_url_fallback": read_url,
}
_REQUIRED: Final = ("id", "role")


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_PARSERS: Final[Mapping[str, tuple[Callable[[str], Any], Callable[[str], NodeLines]]]] = {
    ".toml": (tomllib.loads, toml_lines),
    ".json": (json.loads, yaml_lines),
    ".yaml": (_parse_yaml, yaml_lines),
    ".yml": (_parse_yaml, yaml_lines),
}


def _entries(path: Path, data: bytes, notes: _Notes) -> list[_Entry]:
    if path.suffix.lower() not in _PARSERS:
        notes.add(f"its name must end with {', '.join(_PARSERS)}")
        return []
    parse, find_lines = _PARSERS[path.suffix.lower()]
    try:
        text = data.decode()
        table = parse(text)
        notes.lines = find_lines(text)
    except (ValueError, RecursionError) as error:
        notes.add(" ".join(str(error).split()))
        return []
    if not isinstance(table, dict) or not isinstance(table.get("nodes"), list) or not table["nodes"]:
        notes.add("it must have a list of nodes, and at least one: [[nodes]] in TOML, nodes: in YAML and JSON")
        return []
    for key in table.keys() - {"nodes"}:
        notes.add(f"{shown(key)} is not known: there is only nodes")
    for key, line in notes.lines.repeated:
        notes.add(f"line {line} says again what {shown(key)} is: keep one of them")
    return [_entry(at, value, notes) for at, value in enumerate(table["nodes"])]


def _entry(at: int, table: object, notes: _Notes) -> _Entry:
    values: dict[str, Any] = {}
    entry = _Entry(at, values)
    if not isinstance(table, dict):
        notes.add(f"it is {shown(table)}, and must be a table", entry)
        return entry
    # The id first: it names the node in what is said of the others.
    for key in dict.fromkeys((*_REQUIRED, *table)):
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, 1)
            notes.add(f"{shown(key)} is not known{f': did you mean {near[0]}?' if near else ''}", entry, str(key))
            continue
        try:
            values[key] = _KEYS[key](key, table.get(key))
        except BadTopology as error:
            notes.add(str(error), entry, key)
    if "parent" in table and "parents" in table:
        notes.add("it has parent and parents: keep one of them", entry, "parents")
    if both := sorted({*values.get("topics", ())} & {*values.get("up", ())}):
        notes.add(f"topics and up both have {both[0]}: what comes down cannot go up", entry, "up")
    return entry


# ---- what is right by itself, and wrong together


def _check_names(entries: Collection[_Entry], notes: _Notes) -> None:
    for key in ("id", "url"):
        first: dict[str, _Entry] = {}
        for entry in entries:
            value = entry.values.get(key)
            if value is not None and first.setdefault(value, entry) is not entry:
                notes.add(f"{key} {value} is that of {_place(first[value], notes)} too", entry, key)


def _place(entry: _Entry, notes: _Notes) -> str:
    line = notes.lines.of(entry.at, "")
    return f"{entry.name}, line {line}," if line else entry.name


def _check_parents(entries: Collection[_Entry], notes: _Notes) -> None:
    known = {entry.id: entry for entry in entries if entry.id is not None}
    for entry in entries:
        if entry.parents and entry.values.get("role") is Role.ROOT:
            notes.add(f"a ROOT follows nobody, and this one has the parent {entry.parents[0]}", entry, entry.parent_key)
        for parent in entry.parents:
            if "://" in parent:
                continue
            if parent not in known:
                notes.add(f"its parent {parent} is no node of this file", entry, entry.parent_key)
            elif known[parent].url is None:
                notes.add(f"its parent {parent} has no url to follow", entry, entry.parent_key)
    for cycle in _cycles(entries):
        entry = known[cycle[0]]
        # From above to below, as messages would flow for ever.
        notes.add(f"it is in a cycle, {' → '.join(cycle)}: nobody may follow who follows it", entry, entry.parent_key)


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
            # Without these, there may be others.
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
