"""The connector on each supported version of PySpark. All other tests of Spark run on the newest.

An older PySpark is installed once per checkout, beside the environment: it comes first on the path of Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import penstock
from penstock.spark import versions
from tests.support.server import clean_environment
from tests.support.slow_workers import patiently
from tests.support.spark_core import ROWS

ROOT = Path(__file__).parents[2]
# Only a test that fails waits so long.
PATIENCE_S = 280
NO_LIMITS = "maxOffsetsPerTrigger needs PySpark 4.2 or newer: remove it, or upgrade the cluster"


@pytest.mark.parametrize(
    ("version", "limited"),
    [
        pytest.param("4.0.5", NO_LIMITS),
        pytest.param("4.1.4", NO_LIMITS, marks=pytest.mark.soak),
        pytest.param("4.2.1", [40, 40, 20], marks=pytest.mark.soak),
        pytest.param(None, [40, 40, 20], marks=pytest.mark.soak),
    ],
)
def test_the_source_and_the_sink_work_on(version: str | None, limited: object, tmp_path: Path) -> None:
    path = [] if version is None else [str(installed(version))]
    environment = clean_environment() | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
    done = patiently(lambda attempt: run(environment, tmp_path / str(attempt)))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    first, total = sum(7 * number for number in range(ROWS)), sum(7 * number for number in range(ROWS + 10))
    assert version in (None, found.pop("version"))
    found.pop("version", None)
    assert found == {
        "written": [ROWS, first, ROWS],
        "read": [ROWS, first, ROWS],
        "filtered": 50,
        "with headers": ROWS // 2,
        "copied": [ROWS, ROWS + 10],
        "sums": [[ROWS + 10, total, ROWS + 10], [ROWS + 10, total, ROWS + 10]],
        "late": [1_000_001, 1_000_002, 2_000_001],
        "limit": limited,
    }


def run(environment: dict[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    with penstock.Broker(listen="127.0.0.1:0") as broker:
        broker.create_topic("numbers", partitions=1)
        return subprocess.run(
            [sys.executable, "-m", "tests.support.spark_core", str(broker.address), str(directory)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


def test_an_older_pyspark_is_refused() -> None:
    versions.check("4.0.0")
    versions.check("5.1.0.dev2")
    with pytest.raises(ImportError, match=r"PySpark 3\.5\.8 is too old: Penstock needs 4\.0 or newer"):
        versions.check("3.5.8")


def installed(version: str) -> Path:
    """Return a directory with this PySpark. Skip the test if pip cannot install it."""
    directory = ROOT / "build" / f"pyspark-{version}"
    if not directory.is_dir():
        directory.parent.mkdir(exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=directory.parent))
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(aside)]
        done = subprocess.run([*command, f"pyspark=={version}"], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(aside)
            pytest.skip(f"PySpark {version} is not tested: pip cannot install it")
        aside.rename(directory)
    return directory
