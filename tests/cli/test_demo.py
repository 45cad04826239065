"""`penstock demo`, in the session that the tests share: what it shows is so, and what it leaves can be gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli import app, demo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_demo_shows_what_is_so_and_leaves_it(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "demo"

    assert demo.run(2000, home, spark)

    shown = capsys.readouterr().out
    assert "2,000 stored, 20 duplicates dropped" in shown
    assert "5 malformed messages" in shown
    assert "3,000 rows, 1,000 of them published after archiving" in shown
    assert (home / "revenue.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in home.glob("*.toml")} == {"transform.toml", "aggregate.toml", "archive.toml"}
    with penstock.Broker(home / "data") as broker:
        clean = [json.loads(message.value) for message in broker.fetch("orders-clean")]
        assert len({order["id"] for order in clean}) == len(clean) == 1995
        # What came last is for who goes on.
        assert {name: broker.lag(name) for name, _ in demo.PIPELINES.values()} == {
            "clean-orders": 1000,
            "revenue": 0,
            "archive-orders": 1000,
        }


def test_the_demo_says_so_if_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing reads the orders, and so there are no dead letters. What follows is right.
    for step in ("_run_pipelines", "_show_revenue", "_read_back"):
        monkeypatch.setattr(demo._Demo, step, lambda self, *_: self._check(True, "right"))

    assert not demo.run(1000, tmp_path / "demo", cast("SparkSession", object()))

    assert "Wrong result: there should be 2." in capsys.readouterr().out


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    result = CliRunner().invoke(app, ["demo", "--directory", str(tmp_path)])
    assert result.exit_code == 1
    assert "is not empty: choose another directory" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_column_is_as_high_as_its_value() -> None:
    assert list(demo.columns([0.0, 1.0, 8.0, 12.0, 16.0], height=2)) == ["      ▄▄██", "  ▁▁██████"]
    assert list(demo.columns([], height=1)) == [""]
    assert list(demo.columns([0.0], height=1)) == ["  "]
