"""A directory of pipelines as a service: files start, change and stop pipelines, and each fails alone."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from penstock.pipelines import reporter, service
from penstock.pipelines.service import Job, JobState, Service
from penstock.pipelines.versions import FileVersions
from tests.support.server import reserve_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

_NUMBERS = count()
_PATIENCE_S = 120.0


class Harness:
    """A running service, the changes that it told, and a broker."""

    def __init__(self, broker: SparkBroker, directory: Path) -> None:
        self.broker = broker
        self.directory = directory
        self.number = next(_NUMBERS)
        self._changes: queue.SimpleQueue[tuple[str, JobState, str | None]] = queue.SimpleQueue()
        self.source = f"service{self.number}"
        broker.create_topic(self.source)

    def name(self, name: str) -> str:
        return f"{name}{self.number}"

    def write(self, name: str, sql: str = "SELECT id, n FROM source") -> Path:
        path = self.directory / f"{name}.toml"
        path.write_text(
            f"""
            name = "{self.name(name)}"
            kind = "transform"
            [source]
            servers = "{self.broker.servers}"
            topic = "{self.source}"
            start = "earliest"
            schema = "id int NOT NULL, n int"
            [transform]
            sql = "{sql}"
            [sink]
            topic = "{self.name(name)}"
            [trigger]
            interval = "10 milliseconds"
            """
        )
        return path

    def publish(self, *rows: int) -> None:
        for row in rows:
            self.broker.publish(self.source, json={"id": row, "n": row})

    def told(self, job: Job) -> None:
        self._changes.put((job.path.stem, job.state, job.reason))

    def until(self, name: str, state: JobState) -> str | None:
        """Wait for a state of a pipeline. Return its reason."""
        while True:
            file, found, reason = self._changes.get(timeout=_PATIENCE_S)
            if (file, found) == (name, state):
                return reason

    def rows(self, name: str, total: int) -> list[tuple[int, int]]:
        """Wait until the sink has this many rows. Return all of them."""
        messages = self.broker.subscribe(self.name(name), start="earliest")
        found = [json.loads(messages.get(timeout=_PATIENCE_S).value) for _ in range(total)]
        messages.close()
        return sorted((row["id"], row["n"]) for row in found)

    def processed(self, name: str, rows: int) -> None:
        """Wait until the broker was told that a pipeline has processed these rows."""
        for _ in range(1000):
            if any(each.rows == rows for each in self.broker.pipelines() if each.name == self.name(name)):
                return
            threading.Event().wait(0.05)
        raise AssertionError(f"{name} has not processed {rows} rows")

    def reported(self, name: str, is_wanted: Callable[[str], bool]) -> str:
        """Wait until the broker knows a wanted state of a pipeline."""
        for _ in range(1000):
            found = {each.name: each.state for each in self.broker.pipelines()}
            state = found.get(self.name(name), "")
            if is_wanted(state):
                return state
            threading.Event().wait(0.05)
        raise AssertionError(f"{name} is {state!r}")


@contextmanager
def serving(spark: SparkSession, harness: Harness) -> Iterator[None]:
    stop = threading.Event()
    running = Service(harness.directory, on_change=harness.told, look_s=0.05)
    thread = threading.Thread(target=running.run, args=(spark, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_PATIENCE_S)
        assert not thread.is_alive()
        # PySpark keeps the session that last made a DataFrame: that of a pipeline.
        type(spark)._activeSession = spark


@pytest.fixture
def harness(spark_broker: SparkBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setattr(service, "_DELAY_FIRST_S", 0.01)
    monkeypatch.setattr(reporter, "INTERVAL_S", 0.05)
    return Harness(spark_broker, tmp_path)


def test_files_start_change_and_stop_pipelines(spark: SparkSession, harness: Harness) -> None:
    harness.write("clean")
    harness.publish(1, 2)
    with serving(spark, harness):
        harness.until("clean", JobState.RUNNING)
        assert harness.rows("clean", 2) == [(1, 1), (2, 2)]
        harness.reported("clean", lambda state: state == "running")

        harness.write("clean", "SELECT id, n * 10 AS n FROM source")
        harness.until("clean", JobState.STARTING)
        harness.publish(3)
        harness.until("clean", JobState.RUNNING)
        # The new version continues where the old one stopped.
        assert harness.rows("clean", 3) == [(1, 1), (2, 2), (3, 30)]

        (harness.directory / "clean.toml").unlink()
        harness.until("clean", JobState.STOPPED)
        harness.reported("clean", lambda state: state == "stopped")
        harness.publish(4)
        harness.write("other")
        harness.until("other", JobState.RUNNING)
        assert len(harness.rows("other", 4)) == 4
    assert sum(each.committed for each in harness.broker.topic(harness.name("clean")).positions) == 3
    assert harness.reported("other", bool) == "stopped"


def test_a_failure_concerns_only_its_pipeline_and_can_be_rolled_back(spark: SparkSession, harness: Harness) -> None:
    harness.write("good")
    path = harness.write("changed")
    works = path.read_text()
    harness.publish(1)
    with serving(spark, harness):
        harness.until("changed", JobState.RUNNING)
        assert harness.rows("changed", 1) == [(1, 1)]

        harness.write("changed", "SELECT id, nosuch FROM source")
        assert "nosuch" in str(harness.until("changed", JobState.FAILED))
        harness.publish(2)
        assert harness.rows("good", 2) == [(1, 1), (2, 2)]

        kept = FileVersions.of(path).roll_back()
        assert path.read_text() == works
        assert "nosuch" in kept.read_text()
        harness.until("changed", JobState.RUNNING)
        assert harness.rows("changed", 2) == [(1, 1), (2, 2)]


def test_a_pipeline_is_given_up_after_five_failures_in_a_row(spark: SparkSession, harness: Harness) -> None:
    harness.write("failing", "SELECT id, n + assert_true(id < 2, 'too large') AS n FROM source")
    harness.publish(2)
    with serving(spark, harness):
        reasons = [harness.until("failing", JobState.RETRYING) for _ in range(service.FAILURES_MAX - 1)]
        reasons.append(harness.until("failing", JobState.FAILED))
        assert all("too large" in str(reason) for reason in reasons)
        harness.reported("failing", lambda state: state == "failed")

        # A changed file is tried again, and no row was lost.
        harness.write("failing")
        harness.until("failing", JobState.RUNNING)
        assert harness.rows("failing", 1) == [(2, 2)]


def test_pipelines_wait_for_a_broker_that_is_down(
    spark: SparkSession, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FAILURES_MAX", 1)
    path = harness.write("waiting")
    harness.publish(1)
    port = reserve_port(harness)
    path.write_text(
        path.read_text().replace(f'"{harness.broker.servers}"', f'"127.0.0.1:{port}"\noptions.timeout = 0.5')
    )
    with serving(spark, harness):
        for _ in range(2):
            assert "127.0.0.1" in str(harness.until("waiting", JobState.RETRYING))
        path.write_text(path.read_text().replace(str(port), harness.broker.servers.rpartition(":")[2]))
        harness.until("waiting", JobState.RUNNING)
        assert harness.rows("waiting", 1) == [(1, 1)]


def test_an_invalid_change_leaves_the_running_version_alone(spark: SparkSession, harness: Harness) -> None:
    path = harness.write("kept")
    harness.publish(1)
    with serving(spark, harness):
        harness.until("kept", JobState.RUNNING)
        path.write_text('name = "half')
        reason = harness.until("kept", JobState.RUNNING)
        assert reason is not None
        assert "kept.toml:1: invalid TOML" in reason
        harness.publish(2)
        assert harness.rows("kept", 2) == [(1, 1), (2, 2)]

        twin = harness.directory / "twin.toml"
        twin.write_text(harness.write("kept").read_text())
        reason = harness.until("twin", JobState.INVALID)
        assert reason is not None
        assert "another file" in reason


def test_every_kind_that_looks_up_joins_or_merges_is_served(spark: SparkSession, harness: Harness) -> None:
    deltalake = pytest.importorskip("deltalake")
    source = (
        f"""servers = "{harness.broker.servers}"\ntopic = "{harness.source}"\nschema = "id int, n int, at timestamp" """
    )
    tables = {
        "sql": (
            f"[sources.a]\n{source}\n[sources.b]\n{source}\n"
            '[sql]\nquery = "SELECT id, n FROM a UNION ALL SELECT id, n + 10 AS n FROM b"'
        ),
        "enrich": (
            f'[source]\n{source}\n[lookup]\ntopic = "{harness.source}"\nschema = "n int"\n'
            '[enrich]\non = ["id"]\nlookup_on = ["_key"]\ncolumns = { looked_up = "n" }'
        ),
        "sessionize": (
            f'[source]\n{source}\n[sessionize]\nby = ["id"]\ntime = "at"\ngap = "1 minute"\nwatermark = "1 second"\n'
            'measures = { n = "count(*)" }'
        ),
        "upsert": f'[source]\n{source}\n[upsert]\nkey = "id"',
    }
    for kind, text in tables.items():
        sink = 'delta = "table"' if kind == "upsert" else f'topic = "{harness.name(kind)}"'
        (harness.directory / f"{kind}.toml").write_text(
            f'name = "{harness.name(kind)}"\nkind = "{kind}"\n{text}\n[sink]\n{sink}\n'
            '[trigger]\ninterval = "10 milliseconds"\n'
        )
    for number, minute in ((1, 0), (1, 1), (2, 30)):
        row = {"id": number, "n": minute, "at": f"2030-01-31T12:{minute:02}:00Z"}
        harness.broker.publish(harness.source, json=row, key=str(number))
    with serving(spark, harness):
        assert harness.rows("sql", 6) == [(1, 0), (1, 1), (1, 10), (1, 11), (2, 30), (2, 40)]
        assert harness.rows("enrich", 3) == [(1, 0), (1, 1), (2, 30)]
        # The session of 2 is open.
        assert harness.rows("sessionize", 1) == [(1, 2)]
        for kind in tables:
            harness.reported(kind, lambda state: state == "running")
        harness.processed("upsert", 3)
    table = deltalake.DeltaTable(harness.directory / "table").to_pandas()
    assert sorted(zip(table["id"], table["n"], strict=True)) == [(1, 1), (2, 30)]
