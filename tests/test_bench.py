"""The benchmark runs and says what it should. What the figures are is no test's business."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import SECTIONS

ROOT = Path(__file__).parents[1]


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_prints_every_line_and_writes_the_same_as_json(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()

    done = bench("--quick", "--directory", directory, "--json", tmp_path / "figures.json")

    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["quick"] is True
    assert {line["section"] for line in figures["lines"]} == set(SECTIONS)
    for line in figures["lines"]:
        assert line["what"] in done.stdout
        for name in ("penstock", "limit", "ratio"):
            assert math.isfinite(line[name])
            assert line[name] >= 0
        assert (line["met"] is None) == (line["target"] is None)
    assert not list(directory.iterdir()), "its files were left behind"


def test_runs_only_the_sections_that_are_named(tmp_path: Path) -> None:
    done = bench("--quick", "--directory", tmp_path, "--only", "batch")

    assert done.returncode == 0, done.stderr
    assert "encode a list" in done.stdout
    assert "append, fsync" not in done.stdout


@pytest.mark.parametrize(("option", "value"), [("--only", "nothing"), ("--directory", "/nowhere")])
def test_refuses_what_it_does_not_know(option: str, value: str) -> None:
    done = bench("--quick", option, value)

    assert done.returncode == 2
    assert option in done.stderr
    assert value in done.stderr
