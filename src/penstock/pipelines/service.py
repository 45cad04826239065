"""Run all pipeline files of a directory in one Spark session.

The files are compared every second. A new file starts a pipeline, a changed one restarts it with its new version, and a
removed one stops it. While a changed file is invalid, the version before it goes on.

    starting ──▶ running ──▶ stopped       its file was removed, or the service ends
        ▲           │
        │           ▼
        └─────── retrying ──▶ failed       too many failures in a row, or Spark rejects the file: it waits for a change

Each pipeline runs in a thread and a Spark session of its own, so that a failure concerns only that pipeline. A pipeline
that stops finishes its batch. The state of each is reported to its broker. While a broker does not answer, its
pipelines are tried again without an end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import BadConfig, ClientError, PenstockError, SparkLost
from penstock.pipelines.execution import run
from penstock.pipelines.pipeline import Pipeline
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.progress import PipelineProgress, begin
from penstock.pipelines.reporter import Reporter
from penstock.pipelines.versions import FileVersions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
# Failures in a row before a pipeline is given up, and the delays before it is tried again.
FAILURES_MAX: Final = 5
_DELAY_FIRST_S: Final = 1.0
_DELAY_LONGEST_S: Final = 60.0
# How long a broker may take to answer before it counts as down.
_ANSWER_S: Final = 2.0
# How long a pipeline that is stopped may take to finish its batch.
FINISH_S: Final = 30.0


class JobState(StrEnum):
    INVALID = "invalid"
    STARTING = "starting"
    RUNNING = "running"
    RETRYING = "retrying"
    FAILED = "failed"
    STOPPED = "stopped"


class Service:
    def __init__(
        self,
        directory: Path,
        *,
        data: Path | None = None,
        on_change: Callable[[Job], None] = lambda _: None,
        look_s: float = LOOK_S,
    ) -> None:
        """`data` is the directory with the state of all pipelines; the default is `data` in `directory`.

        `on_change` is called when the state of a pipeline changes, by any thread.
        """
        self._directory = directory
        self._data = data
        self._on_change = on_change
        self._look_s = look_s
        self.jobs: dict[Path, Job] = {}
        # The content of each file at the last look, or why it could not be read.
        self._seen: dict[Path, str | None] = {}
        # Files that were removed, whose pipelines finish their batches.
        self._leaving: list[Job] = []

    def run(self, spark: SparkSession, stop: threading.Event) -> None:
        """Run until `stop` is set. Raise SparkLost if the Java process of Spark ends."""
        with Reporter() as reporter:
            try:
                while not stop.is_set():
                    self._look(spark, reporter)
                    stop.wait(self._look_s)
            finally:
                self._stop_all(reporter)

    def _look(self, spark: SparkSession, reporter: Reporter) -> None:
        found = {path: _read(path) for path in sorted(self._directory.glob("*.toml"))}
        for path, content in found.items():
            # An editor that writes in place exposes half of a file for a moment: two looks must see the same.
            if path not in self._seen or content != self._seen[path]:
                continue
            job = self.jobs.get(path)
            if job is None:
                job = self.jobs[path] = Job(path, self._data, self._on_change)
            if content != job.content:
                job.change(content, self._names(job))
        for path in self.jobs.keys() - found.keys():
            job = self.jobs.pop(path)
            job.stop()
            self._leaving.append(job)
        self._seen = found
        for job in self.jobs.values():
            job.advance(spark)
            job.report(reporter)
            if job.spark_lost is not None:
                raise job.spark_lost
        for job in [job for job in self._leaving if not job.is_running]:
            self._leaving.remove(job)
            job.advance(spark)
            job.report(reporter)
            if job.pipeline is not None and job.pipeline.name not in self._names(job):
                reporter.end(job.pipeline.name)

    def _names(self, job: Job) -> set[str]:
        """Return the names of the other pipelines."""
        others = [other for other in (*self.jobs.values(), *self._leaving) if other is not job]
        return {other.pipeline.name for other in others if other.pipeline is not None}

    def _stop_all(self, reporter: Reporter) -> None:
        jobs = [*self.jobs.values(), *self._leaving]
        for job in jobs:
            job.stop()
        with ExitStack() as ends:
            for job in jobs:
                ends.callback(job.report, reporter)
                ends.callback(job.join)


class Job:
    """One pipeline file: the version that runs, and what became of it."""

    def __init__(self, path: Path, data: Path | None, on_change: Callable[[Job], None]) -> None:
        self.path = path
        self.state = JobState.STARTING
        # Why it failed, waits or is invalid. A running pipeline may have one: its changed file is invalid.
        self.reason: str | None = None
        self.failures = 0
        self.progress: PipelineProgress | None = None
        # The pipeline that runs, and the content of the file that was looked at last.
        self.pipeline: Pipeline | None = None
        self.content: str | None = None
        self._data = data
        self._versions = FileVersions.of(path, data)
        self._on_change = on_change
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        # A new version, which starts when the old one has stopped; when to try again.
        self._next: Pipeline | None = None
        self._retry_at = 0.0
        self._retries = 0
        self._error: Exception | None = None
        # Whether a broker was down when the last run failed.
        self._is_outage = False
        self.spark_lost: SparkLost | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def change(self, content: str | None, names: set[str]) -> None:
        """Take a new content of the file. `names` are those of other pipelines."""
        self.content = content
        try:
            pipeline = load(self.path)
        except BadConfig as error:
            self._refuse("; ".join(error.problems))
            return
        if pipeline.name in names:
            self._refuse(f"{self.path}: another file in the directory has the name {pipeline.name!r}")
            return
        self._next, self.failures, self._retries = pipeline, 0, 0
        self._stop.set()

    def stop(self) -> None:
        """Stop when the batch is done, and do not start again."""
        self._next = None
        self._stop.set()
        if not self.is_running and self.state in (JobState.STARTING, JobState.RETRYING):
            self._move(JobState.STOPPED)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._finish()

    def advance(self, spark: SparkSession) -> None:
        """Note how a run ended, and start the next one if it is due."""
        if self.is_running:
            return
        if self._thread is not None:
            self._finish()
        if self._next is not None:
            self.pipeline, self._next = self._next, None
            self._start(spark, self.pipeline)
        elif self.state is JobState.RETRYING and self.pipeline is not None and time.monotonic() >= self._retry_at:
            self._start(spark, self.pipeline)

    def report(self, reporter: Reporter) -> None:
        pipeline = self.pipeline
        if pipeline is not None:
            progress = self.progress or begin(pipeline.name, pipeline.kind, pipeline.path, None)
            reporter.put(pipeline, progress, state=self.state, reason=self.reason, failures=self.failures)

    def _start(self, spark: SparkSession, pipeline: Pipeline) -> None:
        self._stop = threading.Event()
        self._error = None
        self._move(JobState.STARTING, self.reason if self.failures else None)
        self._thread = threading.Thread(target=self._run, args=(spark, pipeline), name=f"pipeline {pipeline.name}")
        self._thread.start()

    def _run(self, spark: SparkSession, pipeline: Pipeline) -> None:
        from penstock.spark.sessions import register

        content = self.content

        def on_batch(progress: PipelineProgress) -> None:
            self.progress = progress
            if self.state is JobState.STARTING:
                self.failures = self._retries = 0
                if content is not None:
                    self._versions.accept(content)
                self._move(JobState.RUNNING)

        try:
            own = spark.newSession()
            register(own)
            # Pipelines take turns, however long the batches of one of them are.
            own.sparkContext.setLocalProperty("spark.scheduler.pool", pipeline.name)
            run(
                pipeline,
                data=self._data,
                follow=True,
                spark=own,
                on_batch=on_batch,
                stop=self._stop,
                finish_s=FINISH_S,
            )
        except Exception as error:  # noqa: BLE001 - supervises one pipeline
            self._is_outage = not _brokers_answer(pipeline)
            self._error = error

    def _finish(self) -> None:
        """Decide what becomes of a run that has ended."""
        self._thread = None
        error, self._error = self._error, None
        self.spark_lost = error if isinstance(error, SparkLost) else None
        if error is None:
            self._move(JobState.STOPPED)
        elif isinstance(error, BadConfig):
            self._move(JobState.FAILED, "; ".join(error.problems))
        else:
            if not isinstance(error, PenstockError):
                logger.error("pipeline %s: unexpected error", self.path, exc_info=error)
            self._failed(str(error) or type(error).__name__)

    def _failed(self, reason: str) -> None:
        self.failures += not self._is_outage
        if self.failures >= FAILURES_MAX or self._stop.is_set():
            self._move(JobState.FAILED, reason)
            return
        delay_s = min(_DELAY_LONGEST_S, _DELAY_FIRST_S * 2**self._retries)
        self._retries += 1
        self._retry_at = time.monotonic() + delay_s
        self._move(JobState.RETRYING, reason)

    def _refuse(self, reason: str) -> None:
        """Keep the version that runs, if there is one."""
        self._move(self.state if self.is_running else JobState.INVALID, reason)

    def _move(self, state: JobState, reason: str | None = None) -> None:
        self.state, self.reason = state, reason
        self._on_change(self)


def _brokers_answer(pipeline: Pipeline) -> bool:
    from penstock.pipelines.queries import client_of

    brokers = {source.servers: source.options for source in pipeline.sources}
    if pipeline.sink is not None and pipeline.sink.servers is not None:
        brokers[pipeline.sink.servers] = pipeline.sink.options
    try:
        for servers, given in brokers.items():
            client_of(servers, given, _ANSWER_S).statistics()
    except ClientError:
        return False
    except PenstockError:
        return True  # it answers, if only with an error
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
