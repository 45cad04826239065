"""ARCHITECTURE.md names the modules that there are, in the layers that import-linter checks."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from tests.docs import ROOT

PACKAGE = ROOT / "src" / "penstock"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
_IMPORT_RULES: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS: list[dict[str, Any]] = _IMPORT_RULES["contracts"]


def block(begin: str) -> list[str]:
    """Return the lines of the first block after these words."""
    return TEXT.partition(begin)[2].split("```", 2)[1].strip("\n").splitlines()


def test_the_list_of_modules_is_complete() -> None:
    named: set[str] = set()
    package = inner = ""
    for line in block("## Where things are")[1:]:
        # A package, or a package in a package, or modules of the one before.
        head = re.match(r"( +)(\w+/)?", line)
        assert head, line
        depth = len(head[1])
        assert depth == 2 or (depth == 4 and package) or depth > 4, line
        if depth == 2:
            package, inner = head[2] or "", ""
        elif depth == 4:
            inner = head[2] or ""
        named |= {f"{package}{inner}{name}" for name in re.findall(r"\b\w+\.py\b", line)}

    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("**/*.py") if path.name[:2] != "__"}
    assert named == files


def test_the_layers_are_those_that_are_checked() -> None:
    rows = [re.split(r"  +", line.strip())[0].split(" │ ") for line in block("not from its own")]
    layers = next(each["layers"] for each in CONTRACTS if each["type"] == "layers")
    assert rows == [row.split(" | ") for row in layers if row != "__main__"]


def test_the_pure_modules_are_those_that_are_checked() -> None:
    alone, *packages = [line.split() for line in block("that these modules are pure")]
    named = [*alone, *(f"{package}.{name}" for package, *names in packages for name in names)]
    checked = next(each["source_modules"] for each in CONTRACTS if each["name"].startswith("Pure"))
    assert sorted(f"penstock.{name}" for name in named) == sorted(checked)
