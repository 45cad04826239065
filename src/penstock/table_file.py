"""Files of tables in TOML, JSON or YAML, with the line of each key for error messages."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Final

from penstock.errors import BadConfig
from penstock.toml_lines import Key, KeyLines, scan

_TOML_PLACE: Final = re.compile(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", re.DOTALL)
# The values that aliases may repeat. Ten short lines of YAML can stand for billions.
REPEATED_MAX: Final = 10_000
_JSON_PLACE: Final = re.compile(r"(.*): line (\d+) column \d+ \(char \d+\)")


@dataclass(frozen=True, slots=True)
class TableFile:
    path: Path
    tables: dict[Any, Any]
    lines: KeyLines = field(default_factory=KeyLines, repr=False)
    # Keys that a table has twice, with the line of the second. JSON and YAML take the last one silently.
    repeated: list[tuple[str, int]] = field(default_factory=list)

    def where(self, key: Key) -> str:
        """Return the file and the line of a key."""
        return f"{self.path}:{self.lines.of(key)}"


def read(path: Path) -> TableFile:
    """Raise BadConfig if the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadConfig([f"{path}: {error.strerror}"]) from None
    return parse(path, data)


def parse(path: Path, data: bytes) -> TableFile:
    """Read a file with these bytes. The suffix of its name tells the format. Raise BadConfig."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise BadConfig([f"{path}: unknown format: the name must end with {', '.join(_READERS)}"])
    try:
        return reader(path, data.decode())
    except _SyntaxError as error:
        line = f":{error.line}" if error.line else ""
        raise BadConfig([f"{path}{line}: invalid {error.format}: {' '.join(error.reason.split())}"]) from None
    except UnicodeDecodeError:
        raise BadConfig([f"{path}: not UTF-8 text"]) from None
    except RecursionError:
        raise BadConfig([f"{path}: too many nested tables"]) from None


class _SyntaxError(Exception):
    def __init__(self, format: str, reason: str, line: int | None) -> None:
        self.format = format
        self.reason = reason
        self.line = line


def _read_toml(path: Path, text: str) -> TableFile:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _TOML_PLACE.fullmatch(str(error))
        end = text.count("\n", 0, len(text.rstrip())) + 1
        raise _SyntaxError("TOML", found[1] if found else str(error), int((found and found[2]) or end)) from None
    except ValueError as error:
        # An integer with thousands of digits.
        raise _SyntaxError("TOML", str(error), None) from None
    return TableFile(path, tables, scan(text))


def _read_json(path: Path, text: str) -> TableFile:
    import yaml

    try:
        file = TableFile(path, _tables(path, json.loads(text)))
    except ValueError as error:
        found = _JSON_PLACE.fullmatch(str(error))
        raise _SyntaxError("JSON", found[1] if found else str(error), int(found[2]) if found else None) from None
    # JSON is YAML, except for its tabs. Nothing but line numbers is lost if PyYAML cannot read it.
    with contextlib.suppress(yaml.YAMLError):
        _note(file, yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader), ())
    return file


def _read_yaml(path: Path, text: str) -> TableFile:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return TableFile(path, {})
        _check_aliases(root)
        # Before the values are made: that changes the nodes, where tables are merged.
        noted = TableFile(path, {})
        _note(noted, root, ())
        return replace(noted, tables=_tables(path, loader.construct_document(root)))
    except yaml.YAMLError as error:
        # Its whole text quotes the file, and there may be a password in it.
        mark = getattr(error, "problem_mark", None)
        raise _SyntaxError(
            "YAML", getattr(error, "problem", None) or "unexpected characters", mark.line + 1 if mark else None
        ) from None
    except (ValueError, LookupError, AttributeError, TypeError):
        # PyYAML does not check values that look like a date or that a tag announces: 2026-13-01, !!bool maybe.
        raise _SyntaxError("YAML", "a date, number or tagged value is invalid", None) from None


def _check_aliases(root: Any) -> None:
    """Raise _SyntaxError if aliases repeat too many values, or a value contains itself."""
    import yaml

    # The number of values in a node, with repetitions. None: it is being counted.
    counts: dict[int, int | None] = {}

    def count(node: Any) -> int:
        known = counts.setdefault(id(node), 0)
        if known is None:
            raise _SyntaxError("YAML", "an alias refers to a value that contains it", node.start_mark.line + 1)
        if known:
            return known
        counts[id(node)] = None
        if isinstance(node, yaml.MappingNode):
            total = 1 + sum(count(each) for pair in node.value for each in pair)
        else:
            total = 1 + sum(map(count, node.value)) if isinstance(node, yaml.SequenceNode) else 1
        counts[id(node)] = total
        if total - len(counts) > REPEATED_MAX:
            raise _SyntaxError("YAML", f"aliases repeat more than {REPEATED_MAX} values", node.start_mark.line + 1)
        return total

    count(root)


def _tables(path: Path, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise BadConfig([f"{path}: the file must contain tables, not {_KINDS.get(type(value), 'a number or time')}"])
    return value


_READERS: Final[Mapping[str, Callable[[Path, str], TableFile]]] = {
    ".toml": _read_toml,
    ".json": _read_json,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}


_KINDS: Final = {NoneType: "null", list: "a list", str: "text", bool: "true or false"}


def _note(file: TableFile, node: Any, key: Key) -> None:
    """Note the lines of all keys in a YAML node, which is at `key`."""
    import yaml

    file.lines.keys.setdefault(key, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for number, each in enumerate(node.value):
            _note(file, each, (*key, number))
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode):
                inner, line = (*key, name.value), name.start_mark.line + 1
                if inner in file.lines.keys:
                    file.repeated.append((name.value, line))
                file.lines.keys[inner] = line
                _note(file, value, inner)
