"""The lines of the nodes in a file and of their keys, for error messages. Most parsers do not report them.

A line that is not found is left out of the message; nothing else depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock import toml_lines as toml


@dataclass(frozen=True, slots=True)
class NodeLines:
    """Line numbers, starting at 1."""

    # For each node the lines of its keys, and its own under "".
    nodes: list[dict[str, int]] = field(default_factory=list)
    # Keys that a table has twice. Parsers silently take the last.
    repeated: list[tuple[str, int]] = field(default_factory=list)

    def of(self, at: int, key: str) -> int | None:
        """Return the line of a key; if it is absent, that of the node."""
        if at >= len(self.nodes):
            return None
        return self.nodes[at].get(key) or self.nodes[at].get("")


def toml_lines(text: str) -> NodeLines:
    """Find the lines in TOML, whose parser refuses repeated keys itself."""
    lines = NodeLines()
    for key, line in toml.scan(text).keys.items():
        match key:
            case ("nodes", int() as at):
                # An element that is not a table has no line.
                lines.nodes.extend({} for _ in range(len(lines.nodes), at + 1))
                lines.nodes[at][""] = line
            case ("nodes", int() as at, str() as name):
                lines.nodes[at][name] = line
    return lines


def yaml_lines(text: str) -> NodeLines:
    """Find the lines in YAML, or in JSON, which is YAML except for its tabs."""
    import yaml

    lines = NodeLines()
    try:
        root = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return lines
    _, nodes = _keys(root, lines).get("nodes", (0, None))
    if isinstance(nodes, yaml.SequenceNode):
        for node in nodes.value:
            keys = _keys(node, lines).items()
            lines.nodes.append({"": node.start_mark.line + 1} | {key: line for key, (line, _) in keys})
    return lines


def _keys(mapping: Any, lines: NodeLines) -> dict[str, tuple[int, Any]]:
    """Return the line and the value of each key in a mapping."""
    import yaml

    found: dict[str, tuple[int, Any]] = {}
    if isinstance(mapping, yaml.MappingNode):
        for key, value in mapping.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in found:
                    lines.repeated.append((key.value, line))
                found[key.value] = line, value
    return found
