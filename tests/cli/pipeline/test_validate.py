"""`penstock pipeline validate`, `test` and `init`: what can be known of a file without a broker."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.pipelines.pipeline import KINDS
from penstock.pipelines.pipeline_file import load
from tests.support.pipeline_files import penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# ---- what Spark can tell of a file


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        (
            "transform",
            [("WHERE amount", "WHERE amuont")],
            (
                r"transform.toml:17: \[transform\] sql: A column, variable, or function parameter with name `amuont` "
                r"cannot be resolved\. Did you mean one of the following\? \[`amount`.*"
            ),
        ),
        (
            "transform",
            [("FROM source", "FORM source")],
            r"transform.toml:1\d: \[transform\] sql: Syntax error at or near .*",
        ),
        ("transform", [("amount double", "amount dobule")], r"transform.toml:10: \[source\] schema: .*DOBULE.*"),
        (
            "transform",
            [('key = "id"', 'key = "ident"')],
            r"transform.toml:24: \[sink\] key: A column, .* `ident` cannot be resolved\. .*",
        ),
        (
            "aggregate",
            [("sum(amount)", "sum(amuont)")],
            r"aggregate.toml:17: \[aggregate\] measures.revenue: .* `amuont` cannot be resolved\. .*",
        ),
        (
            "aggregate",
            [('time = "at"', 'time = "country"')],
            (
                r"aggregate.toml:12: \[aggregate\] time names 'country', which is of type string: it must be a "
                "timestamp"
            ),
        ),
        (
            "deduplicate",
            [('by = ["id"]', 'by = ["idd"]')],
            (
                r"deduplicate.toml:11: \[deduplicate\] by names 'idd', which \[source\] schema does not have: it has "
                "id, customer, country, amount, at"
            ),
        ),
        (
            "join",
            [("id string, method", "order string, method")],
            r"join.toml:15: \[join\] on names 'id', which \[right\] schema does not have: it has order, .*",
        ),
        (
            "sessionize",
            [("size(collect_set(page))", "count(DISTINCT page)")],
            r"sessionize.toml:10: \[sessionize\]: Distinct aggregations are not supported on streaming .*",
        ),
        (
            "dead_letters",
            [("reason LIKE", "raeson LIKE")],
            r"dead_letters.toml:12: \[dead_letters\] redrive: .* `raeson` cannot be resolved\. .*",
        ),
        (
            "transform",
            [('# python = "orders:clean"', 'python = "no_such_module:clean"'), ('sql = """', "# "), ('"""', "")],
            r"transform.toml:\d+: \[transform\] python: no module 'no_such_module' in .*",
        ),
    ],
)
def test_what_does_not_fit_together_is_told_with_its_line(
    kind: str, changes: Sequence[tuple[str, str]], problem: str, spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / f"{kind}.toml"
    penstock("init", kind, path)
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    if "no_such_module" in text:
        text = re.sub(r"^(SELECT|FROM|WHERE)", r"# \1", text, flags=re.MULTILINE)
    path.write_text(text)

    done = penstock("validate", path)

    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"error: {re.escape(str(tmp_path))}/{problem}\n", done.err), done.err


@pytest.mark.parametrize(
    ("kind", "flags", "checked", "not_checked"),
    [
        ("archive", [], ["keys and values"], []),
        ("replay", [], ["keys and values"], []),
        ("transform", ["--no-spark"], ["keys and values"], ["schema", "SQL", "key"]),
        ("aggregate", ["--no-spark"], ["keys and values"], ["schema", "columns", "measures", "key"]),
    ],
)
def test_spark_is_not_started_for_what_does_not_need_it(
    kind: str,
    flags: list[str],
    checked: list[str],
    not_checked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "example.toml"
    penstock("init", kind, path)
    monkeypatch.setattr("penstock.pipelines.execution.opened", None)

    done = penstock("validate", path, "--json", *flags)

    found = json.loads(done.out)
    assert (found["checked"], found["not_checked"]) == (checked, not_checked)
    shown = penstock("validate", path, *flags).out
    assert ("not checked without Spark: " + ", ".join(not_checked) in shown) == bool(not_checked)


# ---- on a sample


def sample(directory: Path, *values: object) -> Path:
    path = directory / "sample.jsonl"
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values))
    return path


def test_a_sample_is_run_without_a_broker(spark: SparkSession, tmp_path: Path) -> None:
    penstock("init", "transform", tmp_path / "orders.toml")
    path = sample(tmp_path, {"id": "a", "country": "de", "amount": 5.0}, "no order", {"id": "b", "amount": 0.5})

    shown = penstock("test", tmp_path / "orders.toml", "--input", path)
    done = penstock("test", tmp_path / "orders.toml", "--input", path, "--json")

    found = json.loads(done.out)
    [row], [letter] = found["rows"], found["dead_letters"]
    assert (row["subject"], row["key"], row["headers"]) == ("orders-clean", "a", {})
    assert row["value"] == {"id": "a", "customer": None, "country": "DE", "amount": 5.0, "tax": 1.0, "at": None}
    assert letter == {"reason": "it is not JSON", "value": "no order", "subject": "orders", "offset": 1}
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[0] == ["1", "row"]
    assert lines[1] == ["id", "customer", "country", "amount", "tax", "at", "_subject", "_key"]
    assert lines[3] == ["a", "-", "DE", "5.0", "1.0", "-", "orders-clean", "a"]
    assert ["1", "dead", "letter"] in lines


def test_a_sample_of_a_lookup_has_a_row_on_each_line(spark: SparkSession, tmp_path: Path) -> None:
    penstock("init", "enrich", tmp_path / "orders.toml")
    orders, customers = tmp_path / "orders.jsonl", tmp_path / "customers.jsonl"
    orders.write_text('{"id": "o1", "customer": "ann"}\n{"id": "o2", "customer": "bob"}\n')
    customers.write_text('{"customer": "ann", "segment": "new", "country": "de"}\n')
    command = ("test", tmp_path / "orders.toml", "--input", orders, "--input", customers)

    found = json.loads(penstock(*command, "--json").out)
    customers.write_text(customers.read_text() * 2)
    twice = penstock(*command)

    assert sorted((row["key"], row["value"]["segment"]) for row in found["rows"]) == [("o1", "new"), ("o2", None)]
    assert twice.err == ("error: the lookup has several rows with customer = 'ann': it must have one for each key\n")


def test_a_sample_that_is_not_there_and_a_kind_without_samples_are_told(spark: SparkSession, tmp_path: Path) -> None:
    for kind in ("transform", "archive", "join"):
        penstock("init", kind, tmp_path / f"{kind}.toml")
    path = sample(tmp_path, {})

    absent = penstock("test", tmp_path / "transform.toml", "--input", tmp_path / "none.jsonl")
    archive = penstock("test", tmp_path / "archive.toml", "--input", path)
    join = penstock("test", tmp_path / "join.toml", "--input", path)

    assert absent.err == f"error: {tmp_path}/none.jsonl: No such file or directory\n"
    assert archive.err == (
        "error: a pipeline of kind archive cannot be run on a sample: "
        f"{', '.join(kind for kind in KINDS if kind not in ('archive', 'dead_letters', 'bridge'))} can\n"
    )
    assert join.err == "error: a pipeline of kind join needs a sample for [left], [right]: got 1\n"


def test_a_file_that_is_wrong_is_refused_before_spark_starts(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('name = "x"\nkind = "replay"\n')

    for command in ("validate", "run"):
        done = penstock(command, path)

        assert done.code == 1
        assert done.err.splitlines() == [
            f"error: {path}:1: [source] needs one of topic, topics, pattern",
            f"error: {path}:1: [sink] topic is missing: a topic, or a subject of one",
        ]


def test_an_address_that_is_none_is_refused_before_spark_starts(tmp_path: Path) -> None:
    penstock("init", "archive", tmp_path / "archive.toml")

    done = penstock("run", tmp_path / "archive.toml", "--servers", "here:there")

    assert done.code == 2
    assert "Invalid value for '--servers'" in done.err


def test_without_spark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    penstock("init", "archive", tmp_path / "archive.toml")
    monkeypatch.setattr("penstock.cli.pipeline.find_spec", lambda name: None)

    penstock("init", "join", tmp_path / "join.toml")
    done = penstock("run", tmp_path / "archive.toml")
    validated = penstock("validate", tmp_path / "join.toml")

    assert (done.code, done.err) == (1, "error: Spark is not installed: pip install 'penstock[spark]'\n")
    assert validated.code == 0
    assert validated.out.endswith("not checked without Spark: schema, columns, key\n")


# ---- without Spark


def test_init_leaves_a_file_that_is_there_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mine")

    done = penstock("init", "join", path)

    assert (done.code, path.read_text()) == (1, "mine")
    assert done.err == f"error: {path} exists already: choose another name, or remove it first\n"


def test_init_names_the_file_as_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    done = penstock("init", "join")

    assert done.out == "wrote join.toml: edit it, then `penstock pipeline run join.toml`\n"
    assert load(tmp_path / "join.toml").kind == "join"
