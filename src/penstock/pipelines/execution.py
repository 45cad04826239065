"""Running a pipeline: its Spark session, its queries, and how they end.

A run continues where the last one ended, however that ended. Batches are numbered, so a batch that was stored just
before a crash is not stored twice.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import SystemClock
from penstock.errors import PenstockError, SparkLost
from penstock.pipelines import failure
from penstock.pipelines.pipeline import Pipeline, PipelineSource, TransformSettings
from penstock.pipelines.progress import DONE, FAILED, STOPPED, PipelineProgress, Reports, begin
from penstock.pipelines.state_directory import StateDirectory, read_ends, state_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

# How long a stop, a failure or a batch may go unnoticed.
POLL_S: Final = 0.2
_FINISH_POLL_S: Final = 0.02

_FAILED: Final = "pipeline {} failed; the next run continues where it stopped"

OnBatch = Callable[[PipelineProgress], None]
Warn = Callable[[str], None]
# Shows a table: the names of its columns, and its rows.
Show = Callable[[Sequence[str], Sequence[Sequence[Any]]], None]
# Rows in a table that is shown.
ROWS_MAX: Final = 1000


def run(
    pipeline: Pipeline,
    *,
    data: str | Path | None = None,
    restart: bool = False,
    master: str | None = None,
    follow: bool = False,
    flush: bool = False,
    spark: SparkSession | None = None,
    config: Mapping[str, str] | None = None,
    on_batch: OnBatch | None = None,
    show: Show | None = None,
    warn: Warn | None = None,
    stop: threading.Event | None = None,
    finish_s: float = 0.0,
) -> PipelineProgress:
    """Run a pipeline until it has processed all messages, or with `follow` until it is stopped. Return its progress.

    `data` is the directory that holds its state, below pipelines/; the default is `data` beside the file. A run that
    would store rows twice, because the broker or the sink is ahead of the state, is refused (see `resumption`).
    `restart` discards the state and starts over, after telling `warn` the consequences. `flush` closes at the end what
    is still open (see `window_flush`).

    `spark` is a session to use; it is not stopped. Without it a session is opened on `master` with `config`. `on_batch`
    is called after each batch. `show` gets the table of dead letters if the pipeline has no sink. `stop` ends the run,
    as SIGINT and SIGTERM do in the main thread; a batch that is being processed has `finish_s` seconds to end, else the
    next run repeats it. Raise BadConfig if Spark rejects the file, SparkLost if its Java process ends, and
    PenstockError, with one sentence, if a query fails.
    """
    from penstock.pipelines import resumption, window_flush
    from penstock.pipelines.topic_schemas import with_schemas

    pipeline = with_schemas(pipeline)
    if flush:
        if follow:
            raise PenstockError("flush needs a run that ends: use either flush or follow")
        window_flush.check(pipeline)
    stop = stop or threading.Event()
    state = state_of(pipeline, data)
    with state.locked():
        state.refuse_namesake(pipeline)
        if restart:
            resumption.restart(pipeline, state, warn or logger.warning)
        elif data is None:
            state.refuse_moved_state(pipeline)
        _prepare(pipeline, state)
        execution = _Execution(
            pipeline, state, on_batch or (lambda _: None), show or (lambda _, __: None), stop, finish_s
        )
        using = nullcontext(spark) if spark is not None else opened(pipeline.name, master=master, config=config)
        with using as session, until_signal(stop):
            return execution.run(session, _trigger(pipeline, follow), flush=flush)


def _prepare(pipeline: Pipeline, state: StateDirectory) -> None:
    """Refuse what would store rows twice, and let the topics keep what is not archived."""
    from penstock.pipelines import resumption
    from penstock.pipelines.retention_hold import hold_retention

    state.identify(pipeline)
    resumption.check(pipeline, state)
    hold_retention(pipeline)


# ---- the session


@contextmanager
def opened(
    name: str, *, master: str | None = None, config: Mapping[str, str] | None = None, is_brief: bool = False
) -> Iterator[SparkSession]:
    """Open a session for the time of a `with` block. One that this process has already is used, and not stopped.

    `is_brief` says that it is for a moment: its JVM starts faster, and would be slow in the long run.
    """
    from pyspark.sql import SparkSession

    from penstock.spark import startup
    from penstock.spark.sessions import session

    is_ours = SparkSession.getActiveSession() is None
    if is_brief:
        config = {"spark.driver.extraJavaOptions": startup.BRIEF, **(config or {})}
    try:
        made = session(f"penstock {name}", master=master, config=config)
    except RuntimeError as error:
        raise PenstockError(f"Spark failed to start: {failure.describe(error).sentence}") from error
    try:
        yield made
    finally:
        if is_ours:
            made.stop()


@contextmanager
def until_signal(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on SIGINT and SIGTERM. A second signal interrupts at once.

    This replaces Spark's own handler, which cancels the jobs: queries would fail instead of stopping.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _trigger(pipeline: Pipeline, follow: bool) -> dict[str, Any]:
    return {"processingTime": pipeline.trigger.interval} if follow else {"availableNow": True}


# ---- the queries


class _Execution:
    def __init__(
        self,
        pipeline: Pipeline,
        state: StateDirectory,
        on_batch: OnBatch,
        show: Show,
        stop: threading.Event,
        finish_s: float,
    ) -> None:
        self._pipeline = pipeline
        self._state = state
        self._on_batch = on_batch
        self._show = show
        self._stop = stop
        self._finish_s = finish_s
        self._reports = Reports()
        # What batches counted that Spark does not report. Their threads append it.
        self._counts: deque[Mapping[str, int]] = deque()
        self._progress = begin(pipeline.name, pipeline.kind, pipeline.path, state.before())

    def run(self, spark: SparkSession, trigger: dict[str, Any], *, flush: bool) -> PipelineProgress:
        self._state.save(self._progress)
        try:
            with _while_spark_lives(self._pipeline.name):
                self._run(spark, trigger, flush=flush)
        except Exception as error:
            self._end(FAILED, failure.describe(error).sentence)
            raise
        except BaseException:
            self._end(STOPPED)
            raise
        self._end(STOPPED if self._stop.is_set() else DONE)
        return self._progress

    def _run(self, spark: SparkSession, trigger: dict[str, Any], *, flush: bool) -> None:
        from penstock.pipelines import window_flush

        queries = self._run_queries(spark, trigger)
        if flush and not self._stop.is_set() and window_flush.plan(spark, self._pipeline, self._state.checkpoint):
            self._run_queries(spark, trigger)
        self._commit()
        if not queries:
            self._show_letters(spark)

    def _run_queries(self, spark: SparkSession, trigger: dict[str, Any]) -> list[StreamingQuery]:
        queries = self._start(spark, trigger)
        try:
            self._watch(queries)
        finally:
            for query in queries:
                query.stop()
        return queries

    def _start(self, spark: SparkSession, trigger: dict[str, Any]) -> list[StreamingQuery]:
        from pyspark.errors import PySparkException

        from penstock.pipelines import queries
        from penstock.pipelines.validation import check

        check(spark, self._pipeline)
        self._send_code(spark)
        try:
            return queries.start(spark, self._pipeline, str(self._state.checkpoint), trigger, self._counts.append)
        except (PySparkException, ValueError) as error:
            found = failure.describe(error).sentence
            raise PenstockError(f"{self._pipeline.where(self._pipeline.kind)}: {found}") from error

    def _send_code(self, spark: SparkSession) -> None:
        """Send the module of a function beside the pipeline file to the workers, which may call functions of it."""
        settings = self._pipeline.settings
        if not isinstance(settings, TransformSettings) or settings.python is None:
            return
        name = settings.python.partition(":")[0].partition(".")[0]
        path = self._pipeline.directory / f"{name}.py"
        if path.is_file():
            spark.addArtifacts(str(path), pyfile=True)

    def _watch(self, queries: list[StreamingQuery]) -> None:
        while any(query.isActive for query in queries) and not self._stop.is_set():
            for query in queries:
                self._wait(query)
            self._collect(queries)
            if any(query.exception() is not None for query in queries):
                break
        until = time.monotonic() + self._finish_s
        for query in queries:
            _finish_batch(query, until)
            # The next run repeats a batch that this interrupts.
            query.stop()
        self._collect(queries)
        for query in queries:
            if (error := query.exception()) is not None:
                raise PenstockError(
                    f"{_FAILED.format(self._pipeline.name)}: {failure.describe(error).sentence}"
                ) from error

    def _wait(self, query: StreamingQuery) -> None:
        from pyspark.errors import StreamingQueryException

        try:
            query.awaitTermination(POLL_S)  # type: ignore[arg-type]  # typed as int, but any number works
        except StreamingQueryException:
            # `query.exception()` has it too.
            pass

    def _collect(self, queries: list[StreamingQuery]) -> None:
        """Save and report the batches that are new."""
        while self._counts:
            self._progress = self._progress.with_counts(self._counts.popleft())
        for query in queries:
            for report in query.recentProgress:
                found = self._reports.add(self._progress, report, is_first=query is queries[0])
                if found is not None:
                    self._progress = found
                    self._state.save(found)
                    self._on_batch(found)

    def _commit(self) -> None:
        """Commit the end of the last batch to the group. Spark reports a batch only when it plans the next one."""
        for end in committed(self._state.checkpoint):
            for source in self._pipeline.sources:
                if _reads(source, end):
                    self._commit_end(source, end)

    def _commit_end(self, source: PipelineSource, end: Mapping[str, Any]) -> None:
        from penstock.pipelines import queries
        from penstock.spark.source import commit

        try:
            commit(queries.parsed_options(self._pipeline, source), end)
        except PenstockError as error:
            # The rows are stored, and the checkpoint is right: only the group is behind.
            logger.warning("pipeline %s: the offsets of its group could not be updated: %s", self._pipeline.name, error)

    def _show_letters(self, spark: SparkSession) -> None:
        from penstock.pipelines import queries

        found = queries.dead_letter_table(spark, self._pipeline)
        rows = found.orderBy("letters", ascending=False).limit(ROWS_MAX).collect()
        self._show(found.columns, [tuple(row) for row in rows])

    def _end(self, outcome: str, why: str | None = None) -> None:
        self._progress = replace(self._progress, state=outcome, reason=why, updated_us=SystemClock().now_us())
        self._state.save(self._progress)


def _finish_batch(query: StreamingQuery, until: float) -> None:
    """Wait until a query has ended the batch that it processes now, if any."""
    batch = _last_batch(query)
    while query.isActive and time.monotonic() < until:
        status = query.status
        if not (status["isTriggerActive"] and status["isDataAvailable"]):
            return
        if _last_batch(query) != batch:
            return
        time.sleep(_FINISH_POLL_S)


def _last_batch(query: StreamingQuery) -> int | None:
    progress = query.lastProgress
    return None if progress is None else int(progress["batchId"])


@contextmanager
def _while_spark_lives(name: str) -> Iterator[None]:
    """Turn the death of the Java process, such as by the OOM killer, into a PenstockError."""
    from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

    try:
        yield
    except (Py4JNetworkError, ConnectionError) as error:
        raise SparkLost(f"{_FAILED.format(name)}: the Java process of Spark has ended") from error


def committed(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the end offsets of each source in the last committed batch of the query that writes the rows.

    The other queries of a pipeline read the same messages. If no query writes rows, there is exactly one other.
    """
    for commits in sorted(checkpoint.glob("*/commits"), key=lambda path: path.parent.name != "rows"):
        numbers = [int(path.name) for path in commits.iterdir() if path.name.isdecimal()]
        if numbers:
            return read_ends(commits.parent / "offsets" / str(max(numbers)))
    return []


def _reads(source: PipelineSource, end: Mapping[str, Any]) -> bool:
    """Whether end offsets are those of this source."""
    if source.pattern is not None:
        return all(re.fullmatch(source.pattern, topic) for topic in end["topics"])
    return set(end["topics"]) <= {source.topic, *source.topics}
