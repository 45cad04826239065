"""The `penstock` command itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.cli import MODULES
from tests.support.data_directories import penstock


def test_the_command_starts_without_what_only_some_of_it_needs() -> None:
    heavy = ["asyncio", "lz4", "penstock.model.batch", "penstock.store", "pyarrow", "rich.table", "uvloop", "zstandard"]
    code = f"import sys, penstock.cli; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_version_and_help() -> None:
    assert penstock("--version").stdout.startswith("penstock ")
    listed = penstock("--help").stdout
    assert "demo" in listed
    assert "log" in listed
    assert penstock("log", "verify").returncode == 2


@pytest.mark.parametrize("command", ["", "serve", "config", "demo", "worker", *MODULES])
def test_an_unknown_option_is_wrong_usage(command: str) -> None:
    done = penstock(*command.split(), "--bogusflag")

    assert (done.returncode, done.stdout) == (2, "")
    assert "--bogusflag" in done.stderr


@pytest.mark.parametrize(
    ("command", "default"),
    [("serve", "[default: 4222]"), ("topology", "127.0.0.1:8222]"), ("replica", "[default: 8082]")],
)
def test_help_shows_defaults_that_are_not_in_the_signature(command: str, default: str) -> None:
    # Rich takes unescaped square brackets for markup, and drops them.
    assert default in penstock(command, "--help").stdout
