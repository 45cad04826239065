"""What several test files share: a Spark session and a broker that it can reach, each once for a worker of the run, and
an S3 server.

Nothing of Spark is loaded before a test asks for it.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import settings

import penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.certificates import Certificates


# The machine may be busy: how long an example takes is no test's business.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

# The JVMs of the tests live for seconds. The second compiler would take 40 % of their time and repay none of it.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")

# Store the files of the tests in memory where there is room: the disk takes milliseconds to sync, and up to nine tenths
# of the time of the tests that sync at every step. No test needs more of a sync than that it returns: a disk that loses
# what was not synced is simulated (`tests/support/simulation.py`), and a killed process loses nothing that it wrote.
_MEMORY: Final = Path("/dev/shm")
_MEMORY_BYTES_MIN: Final = 4 << 30
if (
    "TMPDIR" not in os.environ
    and _MEMORY.is_dir()
    and os.access(_MEMORY, os.W_OK | os.X_OK)
    and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC  # some tests run scripts of theirs
    and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES_MIN
):
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None  # it is looked up again

# Nothing of what is collected becomes garbage. To look for it takes a quarter of the time of the collection.
gc.disable()

# The files with the longest tests, of up to a minute each.
_LONG: Final = {
    "tests/test_bench.py",
    "tests/test_docs.py",
    "tests/cli/test_demo.py",
    "tests/cli/pipeline/test_run.py",
    "tests/cli/test_pipelines.py",
    "tests/spark/test_clusters.py",
    "tests/spark/test_session.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use one more than there are cores: tests also wait, for processes to start and for deadlines to pass."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests. Each worker begins with an equal part of the list, and takes from the end of another's later.

    The first part begins with all that needs the Spark session, so that one worker starts it, and the second with the
    longest tests, so that at the end nobody waits for one.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    in_spark: list[pytest.Item] = []
    long: list[pytest.Item] = []
    short: list[pytest.Item] = []
    for item in items:
        needs_spark = "spark" in getattr(item, "fixturenames", ())
        (in_spark if needs_spark else long if item.nodeid.partition("::")[0] in _LONG else short).append(item)
    first = max(0, len(items) // workers - len(in_spark)) if workers > 1 else 0
    items[:] = [*in_spark, *short[:first], *long, *short[first:]]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which tests were skipped, and why."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.write_line("skipped: " + "; ".join(f"{reason} ({n})" for reason, n in reasons.items()))


class SparkBroker(penstock.Broker):
    """A broker in this process, with a port for Spark's workers."""

    @property
    def servers(self) -> str:
        """What the option `servers` takes."""
        assert self.address is not None
        return self.address


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for all. What a test changes in its configuration, it changes back."""
    from penstock.spark import session

    directory = tmp_path_factory.mktemp("spark")
    config = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.local.dir": str(directory / "local"),
        "spark.log.level": "ERROR",
    }
    found = session("tests", master="local[2]", config=config)
    yield found
    found.stop()


@pytest.fixture(scope="session")
def spark_broker() -> Iterator[SparkBroker]:
    """One broker for all: each test takes topics of its own."""
    with SparkBroker(listen="127.0.0.1:0") as broker:
        yield broker


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    from tests.support.certificates import Certificates

    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def s3_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real S3 server for the tests of a file, with the environment by which clients find it."""
    from tests.support.s3_server import s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment
