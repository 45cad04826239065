"""What several test files share: a Spark session and a broker that it can reach, each once for a worker of the run.

Nothing of Spark is loaded before a test asks for it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import settings

import penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# The machine may be busy: how long an example takes is no test's business.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

# The JVMs of the tests live for seconds. The second compiler would take 40 % of their time and repay none of it.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")

# Store the files of the tests in memory where there is room: the disk takes milliseconds to sync, and up to nine tenths
# of the time of the tests that sync at every step. No test needs more of a sync than that it returns: a disk that loses
# what was not synced is simulated (`tests/simulation.py`), and a killed process loses nothing that it has written.
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

# The files with the longest tests, of up to a minute each. They begin first: at the end no worker waits for one.
_LONG: Final = {
    "test_bench",
    "test_cli_pipeline",
    "test_demo",
    "test_docs",
    "test_spark_clusters",
    "test_spark_session",
    "test_spark_sink",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in _LONG)


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
