"""A pytest plugin for `make fast`: run only the test files that start no process, and let nothing else start one."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

_ROOT: Final = Path(__file__).parent.parent
# Whatever starts a process imports one of these, or a module of the tests that does.
_STARTERS: Final = {"subprocess", "multiprocessing", "pyspark", "penstock.pipelines", "penstock.spark"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and _starts_a_process(collection_path) else None


@pytest.fixture(scope="session", autouse=True)
def no_process() -> Iterator[None]:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        pytest.fail("a fast test starts no process: see tests/fast.py")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        patch.setattr(os, "fork", refuse)
        yield


@cache
def _starts_a_process(path: Path) -> bool:
    imported = _imported(ast.parse(path.read_text()))
    if not _STARTERS.isdisjoint(imported):
        return True
    files = (_ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in imported if name.startswith("tests."))
    return any(_starts_a_process(file) for file in files if file.exists() and file != path)


def _imported(tree: ast.AST) -> set[str]:
    """Return the names of what a module imports, and of the packages that hold it: `a`, `a.b` and `a.b.c`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in names]
    return {".".join(name[:end]) for name in parts for end in range(1, len(name) + 1)}
