"""Stateful logic of a user: a class that keeps state for each key, and may set timers (`transformWithState`).

Spark starts a process of its own on the driver, which asks the class for its state variables before the first batch,
and a Python worker for each task. So the class is pickled with its code, and the state is in RocksDB, the only store of
Spark that has variables.

Spark hides two mistakes: an error of `init` on the driver is reported as "crashed", and a column that a row lacks is
written as null. `check_init` finds the first before a query is started, and `CheckedProcessor` refuses the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as fn

from penstock.errors import BadConfig
from penstock.pipelines import frames, user_code
from penstock.pipelines.pipeline import Pipeline, PythonSettings
from penstock.spark import versions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

try:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
except ImportError:  # a PySpark without it is refused by `check_installed`
    StatefulProcessor = object  # type: ignore[assignment,misc]

_PROCESSOR: Final = ("python", "processor")
_TIME_MODES: Final[Mapping[str, str]] = {"none": "None", "processing": "ProcessingTime", "event": "EventTime"}
_STORE: Final = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_BATCHES_WITHOUT_ROWS: Final = "spark.sql.streaming.noDataMicroBatches.enabled"
# What PySpark needs for it, and does not install.
_PACKAGES: Final = {"pandas": "pandas", "google.protobuf": "protobuf"}


def process(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return the rows that the processor of a pipeline makes of parsed rows."""
    return _processed(rows, pipeline, CheckedProcessor(load(pipeline), _columns_of(rows.sparkSession, pipeline)))


def check_init(table: DataFrame, pipeline: Pipeline) -> None:
    """Call `init` of the processor in a worker, as a query does. Its error is raised by Spark. No row is processed."""
    names = [field.name for field in table.schema.fields]
    nulls = [fn.lit(None).cast(table.schema[name].dataType).alias(name) for name in names]
    row = table.sparkSession.range(1).select(*nulls)
    _processed(row, pipeline, _InitOnly(load(pipeline))).collect()


def load(pipeline: Pipeline) -> Any:
    """Return an instance of the class that the file names. Raise BadConfig if that is not possible."""
    settings = _settings(pipeline)
    where = pipeline.where(*_PROCESSOR)
    found = user_code.load(pipeline, _PROCESSOR, settings.processor, what="class")
    if not (isinstance(found, type) and issubclass(found, StatefulProcessor)):
        raise BadConfig(
            [f"{where}: {settings.processor} is not a class derived from pyspark.sql.streaming.StatefulProcessor"]
        )
    try:
        made = found()
    except Exception as error:  # a user's class may raise anything when it is created
        raise BadConfig([f"{where}: creating {found.__name__}() raised {type(error).__name__}: {error}"]) from error
    user_code.pickle_by_value(pipeline.directory)
    return made


def check_installed(pipeline: Pipeline) -> None:
    """Raise BadConfig if PySpark is too old for the processor, or lacks a package for it."""
    where = pipeline.where("python")
    if not _settings(pipeline).pandas and not versions.has_row_processors():
        problem = (
            "needs PySpark 4.1 or newer to pass rows: upgrade it, or set pandas = true and let the processor take and "
            "return DataFrames of pandas"
        )
        raise BadConfig([f"{where} {problem}"])
    missing = [package for module, package in _PACKAGES.items() if not _is_installed(module)]
    if missing:
        needed = " and ".join(missing)
        raise BadConfig([f"{where} needs {needed}: pip install 'penstock[stateful]', on the workers too"])


@contextmanager
def configured(spark: SparkSession, pipeline: Pipeline, *, is_finite: bool) -> Iterator[None]:
    """Set what Spark reads when it starts a query of the pipeline, and restore it."""
    if not isinstance(pipeline.settings, PythonSettings):
        yield
        return
    wanted = {_STORE: _ROCKSDB}
    if is_finite and pipeline.settings.timers == "processing":
        # With timers of the clock Spark always has another batch to run, so a run would not end.
        wanted[_BATCHES_WITHOUT_ROWS] = "false"
    before = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


# The argument names of the methods are Spark's, which passes some of them by name.


class CheckedProcessor(StatefulProcessor):
    """Passes on what a processor returns, if it has exactly the columns that the file names."""

    def __init__(self, processor: Any, columns: Sequence[str]) -> None:
        self._processor = processor
        self._columns = tuple(columns)

    def init(self, handle: Any) -> None:
        self._processor.init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        return self._checked(self._processor.handleInputRows(key, rows, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802, N803
        return self._checked(self._processor.handleExpiredTimer(key, timerValues, expiredTimerInfo))

    def close(self) -> None:
        self._processor.close()

    def _checked(self, made: Iterator[Any] | None) -> Iterator[Any]:
        checked: tuple[str, ...] | None = None
        for each in made if made is not None else ():
            names = _names_of(each)
            if names != checked and sorted(names) != sorted(self._columns):
                raise ValueError(
                    f"{type(self._processor).__name__} returned a row with {', '.join(names) or 'no names'}, but "
                    f"[python] output has {', '.join(self._columns)}"
                )
            checked = names
            yield each


class _InitOnly(StatefulProcessor):
    """Has the state of a processor, and does nothing."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def init(self, handle: Any) -> None:
        self._processor.init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        for _ in rows:
            pass
        return iter(())

    def close(self) -> None:
        self._processor.close()


def _processed(rows: DataFrame, pipeline: Pipeline, processor: StatefulProcessor) -> DataFrame:
    settings = _settings(pipeline)
    # The value is in the columns already.
    rows = rows.drop("_value")
    if settings.time is not None and settings.watermark is not None:
        rows = rows.withWatermark(settings.time, settings.watermark)
    grouped = rows.groupBy(*map(frames.named, settings.by))
    run = grouped.transformWithStateInPandas if settings.pandas else grouped.transformWithState
    # In append mode a sink gets each row once. Processors decide themselves when they return one.
    return run(processor, settings.output, "Append", _TIME_MODES[settings.timers])


def _columns_of(spark: SparkSession, pipeline: Pipeline) -> list[str]:
    return spark.createDataFrame([], _settings(pipeline).output).columns


def _names_of(made: Any) -> tuple[str, ...]:
    """Return the names of the columns of a row or a DataFrame of pandas; none for anything else."""
    names: Iterable[Any] = getattr(made, "__fields__", getattr(made, "columns", ()))
    return tuple(map(str, names))


def _settings(pipeline: Pipeline) -> PythonSettings:
    assert isinstance(pipeline.settings, PythonSettings)
    return pipeline.settings


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False
