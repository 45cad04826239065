"""A pytest plugin for `make check`: run only the tests that start no process, and let none of them start one.

The sources tell which tests these are, so that a file without any is not even imported. A test starts a process if a
name leads from it to a module that does: through what it uses, its fixtures, and the modules of the tests.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

from tests.support import sampling

_ROOT: Final = Path(__file__).parent.parent
# Whatever starts a process uses one of these.
_STARTERS: Final = {
    "subprocess",
    "multiprocessing",
    "penstock.spark.java",
    "penstock.pipelines.execution",
    "penstock.spark.session",
    "penstock.spark.startup",
    "pyspark.sql.SparkSession",
    "fromDDL",  # a method of PySpark's types that asks a JVM
}
# `make test` tries 100.
_EXAMPLES: Final = 10
# What has seeds, and a state machine, whose examples have dozens of steps, tries a tenth of its own number.
_DIVISOR: Final = 10
# `make test` tries each byte of a file, and a power cut in each call of the disk.
_STRIDE: Final = 13

settings.register_profile("check", settings.get_profile("default"), deadline=None, max_examples=_EXAMPLES)


def pytest_configure() -> None:
    settings.load_profile("check")
    sampling.stride = _STRIDE
    sampling.divisor = _DIVISOR


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and not _tests_without_processes(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        function_or_class = item.nodeid.partition("::")[2].partition("[")[0].partition("::")[0]
        (kept if function_or_class in _tests_without_processes(item.path) else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
    for item in items:
        _try_fewer_examples(getattr(item, "obj", None))


@pytest.fixture(scope="session", autouse=True)
def no_process() -> Iterator[None]:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        pytest.fail("a test of `make check` starts no process: see tests/check.py")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
            patch.setattr(os, name, refuse)
        yield


def _try_fewer_examples(test: Any) -> None:
    """Also where a test says itself how many."""
    chosen = getattr(test, "_hypothesis_internal_use_settings", None)
    if chosen is not None:
        fewer = settings(chosen, max_examples=min(chosen.max_examples, _EXAMPLES))
        test._hypothesis_internal_use_settings = fewer


@cache
def _tests_without_processes(path: Path) -> frozenset[str]:
    """Return the names of the functions and classes of a file that pytest may run."""
    module = _Module.of(path)
    # What applies to every test of the file.
    always = {"pytestmark", *module.autouse} & module.uses.keys()
    if any(_starts(path, name) for name in always):
        return frozenset()
    tests = [name for name in module.uses if name.startswith(("test_", "Test"))]
    return frozenset(name for name in tests if not _starts(path, name))


# What is known of names already followed.
_KNOWN: Final[dict[tuple[Path, str], bool]] = {}


def _starts(path: Path, name: str) -> bool:
    """Follow every name from this one."""
    seen: set[tuple[Path, str]] = set()
    ahead = [(path, name)]
    while ahead:
        place = ahead.pop()
        if place in seen or _KNOWN.get(place) is False:
            continue
        seen.add(place)
        if _KNOWN.get(place) or not _STARTERS.isdisjoint(_Module.of(place[0]).packages.get(place[1], ())):
            _KNOWN[path, name] = True
            return True
        ahead += _behind(*place)
    _KNOWN.update(dict.fromkeys(seen, False))
    return False


@cache
def _behind(path: Path, name: str) -> list[tuple[Path, str]]:
    """Return the names that this one uses, each with the file that defines it."""
    module = _Module.of(path)
    found: list[tuple[Path, str]] = []
    for used in module.uses.get(name, ()):
        # What this file does not define may be a fixture of a conftest.py.
        files = [path] if used in module.uses else [file for file in _conftests(path) if used in _Module.of(file).uses]
        found += [(file, used) for file in files]
    for imported in module.imports.get(name, ()):
        found += _within_tests(imported)
    return found


@cache
def _within_tests(imported: str) -> list[tuple[Path, str]]:
    """Return where a module of the tests, or a name of one, is defined. A whole module is all of its names."""
    parts = imported.split(".")
    if parts[0] not in ("tests", "bench"):
        return []
    for end, names in ((len(parts), None), (len(parts) - 1, parts[-1:])):
        file = _ROOT.joinpath(*parts[:end]).with_suffix(".py")
        if file.exists():
            return [(file, name) for name in (names or _Module.of(file).uses)]
    return []


@cache
def _conftests(path: Path) -> list[Path]:
    return [file for parent in path.parents if (file := parent / "conftest.py").exists() and _ROOT in file.parents]


class _Module:
    """The names that a file defines: which names each uses, and what each imports."""

    @staticmethod
    @cache
    def of(path: Path) -> _Module:
        return _Module(ast.parse(path.read_text()))

    def __init__(self, tree: ast.Module) -> None:
        self.uses: dict[str, set[str]] = {}
        self.imports: dict[str, set[str]] = {}
        # The same, with the packages that hold it: `a`, `a.b` and `a.b.c`.
        self.packages: dict[str, set[str]] = {}
        self.autouse: set[str] = set()
        for statement in _statements(tree.body):
            used, imported_inside = _used(statement)
            for name in _bound(statement):
                self.uses.setdefault(name, set()).update(used)
                imported = _imported(statement, name) or imported_inside
                self.imports.setdefault(name, set()).update(imported)
                self.packages.setdefault(name, set()).update(each for full in imported for each in _prefixes(full))
            if isinstance(statement, ast.FunctionDef) and any(_is_autouse(each) for each in statement.decorator_list):
                self.autouse.add(statement.name)


def _prefixes(imported: str) -> list[str]:
    parts = imported.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield also those in an `if` or a `try` of the module."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _statements([each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)])
        else:
            yield statement


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _used(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return names, and what may name a fixture: arguments and strings. And what a function or class imports."""
    used: set[str] = set()
    imported: set[str] = set()
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Constant(value=str(name)):
                used.add(name)
            case ast.Import() | ast.ImportFrom() if node is not statement:
                imported.update(_imported(node))
            case ast.Attribute(attr=name) if name in _STARTERS:
                imported.add(name)
    return used, imported


def _imported(statement: ast.stmt, name: str | None = None) -> set[str]:
    """Return what a statement imports: all of it, or what it binds to a name."""
    match statement:
        case ast.Import(names=aliases):
            found = {alias.name: alias.asname or alias.name.partition(".")[0] for alias in aliases}
        case ast.ImportFrom(module=module, names=aliases):
            found = {f"{module}.{alias.name}": alias.asname or alias.name for alias in aliases}
        case _:
            found = {}
    return {full for full, bound in found.items() if name in (None, bound)}


def _is_autouse(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and any(keyword.arg == "autouse" for keyword in decorator.keywords)
