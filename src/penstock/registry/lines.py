"""On which lines of a file its nodes and their keys stand: most parsers do not tell.

What is found here is only shown to people. Where it cannot be found there is no line, and nothing else is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

_NODE: Final = re.compile(r"\s*\[\[\s*[\"']?nodes[\"']?\s*\]\]")
_KEY: Final = re.compile(r"\s*[\"']?(\w+)[\"']?\s*=")


@dataclass(frozen=True, slots=True)
class Lines:
    """All count from 1."""

    # Of each node in turn: where its keys stand, and itself under "".
    nodes: list[dict[str, int]] = field(default_factory=list)
    # Keys that stand twice in one table, of which parsers take the last without a word.
    repeated: list[tuple[str, int]] = field(default_factory=list)

    def of(self, at: int, key: str) -> int | None:
        """That of the key or, if it is not there, of the node."""
        if at >= len(self.nodes):
            return None
        return self.nodes[at].get(key) or self.nodes[at].get("")


def toml_lines(text: str) -> Lines:
    """TOML's own parser refuses what is repeated."""
    lines = Lines()
    for number, line in enumerate(text.splitlines(), 1):
        if _NODE.match(line):
            lines.nodes.append({"": number})
        elif lines.nodes and (found := _KEY.match(line)):
            lines.nodes[-1].setdefault(found[1], number)
    return lines


def yaml_lines(text: str) -> Lines:
    """Also of JSON, which is YAML but for its tabs."""
    import yaml

    lines = Lines()
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


def _keys(mapping: Any, lines: Lines) -> dict[str, tuple[int, Any]]:
    """The keys of a mapping, each with its line and its value."""
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
