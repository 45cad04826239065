"""`python -m unittest discover tests/` runs the same suite, by the runner that it is written for."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parent.parent


def load_tests(_loader: unittest.TestLoader, _tests: unittest.TestSuite, _pattern: str | None) -> unittest.TestSuite:
    """What unittest asks a module for."""

    def run() -> None:
        assert subprocess.run([sys.executable, "-m", "pytest"], cwd=_ROOT, check=False).returncode == 0

    return unittest.TestSuite([unittest.FunctionTestCase(run, description="pytest")])


def _discover(options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unittest", "discover", "tests/", "-p", Path(__file__).name],
        cwd=_ROOT,
        env=os.environ | {"PYTEST_ADDOPTS": options},
        capture_output=True,
        text=True,
        check=False,
    )


def test_unittest_runs_what_pytest_runs() -> None:
    """TE-01"""
    ran = _discover("-n0 -p no:cacheprovider tests/model/test_subject.py")

    assert ran.returncode == 0, ran.stderr
    assert "100%" in ran.stdout
    assert "Ran 1 test" in ran.stderr


def test_unittest_fails_when_pytest_does() -> None:
    assert _discover("-n0 -p no:cacheprovider tests/test_none_such.py").returncode == 1
