"""Running a pipeline: its session, its queries, and how they end.

A run goes on where the one before ended, whatever ended that: a batch is known by its number, so what was stored and
not noted is not stored twice.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.pipelines import failure
from penstock.pipelines.pipeline import Pipeline, Source, TransformSettings
from penstock.pipelines.progress import DONE, FAILED, STOPPED, Progress, Reports, begin
from penstock.pipelines.state_directory import StateDirectory, read_ends, state_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

# How soon a stop, a failure or a batch is noticed.
POLL_S: Final = 0.2

_FAILED: Final = "pipeline {} failed, and goes on where it was when it is run again"

Tell = Callable[[Progress], None]
Warn = Callable[[str], None]
# The names of the columns, and the rows.
Show = Callable[[Sequence[str], Sequence[Sequence[Any]]], None]
# Of a table that is shown.
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
    tell: Tell | None = None,
    show: Show | None = None,
    warn: Warn | None = None,
    stop: threading.Event | None = None,
) -> Progress:
    """Run it until all that was there is done; with `follow` until it is stopped. How far it came.

    `data` is the directory that holds its state, below pipelines/; the default is `data` beside the file. A run that
    would store rows twice, because the broker or the sink is ahead of the state, is refused (see `resumption`).
    `restart` discards the state and starts over, after telling `warn` the consequences. `flush` closes at the end what
    is still open (see `window_flush`).

    `spark`: a session to use, which stays; without it `opened` gives one, on `master` and with `config`. `tell` is
    called after each batch. `show` is given the table of dead letters, if it is not to be written anywhere. `stop` ends
    it, as SIGINT and SIGTERM do in the main thread. Raises BadConfig if the file does not fit together, and
    PenstockError, with one sentence, if a query fails.
    """
    from penstock.pipelines import resumption, window_flush

    if flush:
        if follow:
            raise PenstockError("flush is for a run that ends: leave it out, or follow")
        window_flush.check(pipeline)
    stop = stop or threading.Event()
    home = state_of(pipeline, data)
    with home.locked():
        home.refuse_namesake(pipeline)
        if restart:
            resumption.restart(pipeline, home, warn or logger.warning)
        elif data is None:
            home.refuse_left_behind(pipeline)
        home.identify(pipeline)
        resumption.check(pipeline, home)
        running = _Running(pipeline, home, tell or (lambda _: None), show or (lambda _, __: None), stop)
        using = nullcontext(spark) if spark is not None else opened(pipeline.name, master=master, config=config)
        with using as session, _until_signal(stop):
            return running.run(session, _trigger(pipeline, follow), flush=flush)


# ---- the session


@contextmanager
def opened(name: str, *, master: str | None = None, config: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A session for a while; if this process has one already that one, which stays."""
    from pyspark.sql import SparkSession

    from penstock.spark.sessions import session

    is_ours = SparkSession.getActiveSession() is None
    try:
        made = session(f"penstock {name}", master=master, config=config)
    except RuntimeError as error:
        raise PenstockError(f"Spark does not start: {failure.describe(error).sentence}") from error
    try:
        yield made
    finally:
        if is_ours:
            made.stop()


@contextmanager
def _until_signal(stop: threading.Event) -> Iterator[None]:
    """Spark has a handler of its own, which cancels its jobs: a query would fail where it is to stop. For a second
    signal nothing is waited for."""
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


class _Running:
    def __init__(self, pipeline: Pipeline, home: StateDirectory, tell: Tell, show: Show, stop: threading.Event) -> None:
        self._pipeline = pipeline
        self._home = home
        self._tell = tell
        self._show = show
        self._stop = stop
        self._reports = Reports()
        self._progress = begin(pipeline.name, pipeline.kind, pipeline.path, home.before())

    def run(self, spark: SparkSession, trigger: dict[str, Any], *, flush: bool) -> Progress:
        self._home.save(self._progress)
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
        if flush and not self._stop.is_set() and window_flush.plan(spark, self._pipeline, self._home.checkpoint):
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
        self._carry_code(spark)
        try:
            return queries.start(spark, self._pipeline, str(self._home.checkpoint), trigger)
        except (PySparkException, ValueError) as error:
            found = failure.describe(error).sentence
            raise PenstockError(f"{self._pipeline.where(self._pipeline.kind)}: {found}") from error

    def _carry_code(self, spark: SparkSession) -> None:
        """The module of a function that lies beside the file: workers that call functions of it need it, too."""
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
            self._take(queries)
            if any(query.exception() is not None for query in queries):
                break
        for query in queries:
            # What a stop interrupts is done again by the next run.
            query.stop()
        self._take(queries)
        for query in queries:
            if (error := query.exception()) is not None:
                raise PenstockError(
                    f"{_FAILED.format(self._pipeline.name)}: {failure.describe(error).sentence}"
                ) from error

    def _wait(self, query: StreamingQuery) -> None:
        from pyspark.errors import StreamingQueryException

        try:
            query.awaitTermination(POLL_S)  # type: ignore[arg-type]  # whole seconds, it says; it takes any
        except StreamingQueryException:
            # `exception` has it.
            pass

    def _take(self, queries: list[StreamingQuery]) -> None:
        """What is new is told and kept."""
        for query in queries:
            for report in query.recentProgress:
                found = self._reports.add(self._progress, report)
                if found is not None:
                    self._progress = found
                    self._home.save(found)
                    self._tell(found)

    def _commit(self) -> None:
        """Spark tells the source of a batch's end when it builds the next: of the last one nobody would hear."""
        for end in committed(self._home.checkpoint):
            for source in self._pipeline.sources:
                if _reads(source, end):
                    self._commit_end(source, end)

    def _commit_end(self, source: Source, end: Mapping[str, Any]) -> None:
        from penstock.pipelines import queries
        from penstock.spark import options
        from penstock.spark.source import commit

        given = {name.lower(): value for name, value in queries.read_options(self._pipeline, source).items()}
        try:
            commit(options.read(given, is_stream=True), end)
        except PenstockError as error:
            # All is done, and the checkpoint says so.
            logger.warning("pipeline %s: its group does not show how far it is: %s", self._pipeline.name, error)

    def _show_letters(self, spark: SparkSession) -> None:
        from penstock.pipelines import queries

        found = queries.table(spark, self._pipeline)
        rows = found.orderBy("letters", ascending=False).limit(ROWS_MAX).collect()
        self._show(found.columns, [tuple(row) for row in rows])

    def _end(self, state: str, why: str | None = None) -> None:
        self._progress = replace(self._progress, state=state, reason=why, updated_us=SystemClock().now_us())
        self._home.save(self._progress)


@contextmanager
def _while_spark_lives(name: str) -> Iterator[None]:
    """Java may be killed under us: by the system for want of memory, or by somebody."""
    from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

    try:
        yield
    except (Py4JNetworkError, ConnectionError) as error:
        raise PenstockError(f"{_FAILED.format(name)}: Spark's own process has ended") from error


def committed(checkpoint: Path) -> list[dict[str, Any]]:
    """How far each source is: the offsets of the last batch that is done, of the query that writes the rows.

    Other queries of a pipeline read the same; if there is none for rows, there is one other.
    """
    for commits in sorted(checkpoint.glob("*/commits"), key=lambda path: path.parent.name != "rows"):
        numbers = [int(path.name) for path in commits.iterdir() if path.name.isdecimal()]
        if numbers:
            return read_ends(commits.parent / "offsets" / str(max(numbers)))
    return []


def _reads(source: Source, end: Mapping[str, Any]) -> bool:
    """Whether an end is of this source."""
    if source.pattern is not None:
        return all(re.fullmatch(source.pattern, topic) for topic in end["topics"])
    return set(end["topics"]) <= {source.topic, *source.topics}
