"""Spark sessions with `format("penstock")`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.spark import java, startup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS: Final = {
    # The time of a message is an instant: it reads the same wherever the driver runs.
    "spark.sql.session.timeZone": "UTC",
    # Spark passes filters on offsets, times and subjects to the source.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Rows per batch that reach the sink: with 100,000 it writes 1.25 times as fast as with the default of 10,000.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
}
_OPTIONS: Final = "spark.driver.extraJavaOptions"


def session(
    name: str = "penstock",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, str] | None = None,
    ui: bool = False,
    quick: bool = True,
) -> SparkSession:
    """Return a Spark session with `format("penstock")`, in which times are UTC.

    `master` is a cluster, such as "spark://host:7077"; by default Spark runs on this machine ("local[*]"), and only
    this machine can reach it. `remote` is a Spark Connect server instead, such as "sc://host:15002". `config` holds
    Spark settings, which override those made here. `ui` serves Spark's web pages. `quick` uses
    `penstock.spark.startup`.

    The JVM uses the Java that `penstock.spark.java` finds, and its workers use this Python unless PYSPARK_PYTHON names
    another. If this process has a session already, that one is returned, with Penstock registered; of `config`, only
    the SQL settings are applied to it.
    """
    if remote is not None and master is not None:
        raise ValueError("a session has either a master or a remote server: give only one of them")
    _check_version()
    settings = dict(config or {})
    if remote is not None:
        spark = _connect(name, remote, settings)
    else:
        spark = _running(settings) or _start(name, master or "local[*]", settings, ui=ui, quick=quick)
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Register `format("penstock")` in a session, where Spark does not find it by itself."""
    _check_version()
    from pyspark.errors import AnalysisException

    from penstock.spark.datasource import PenstockDataSource

    try:
        spark.dataSource.register(PenstockDataSource)
    except AnalysisException as error:
        # PySpark 4.0 refuses a source that it has found by itself.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def _check_version() -> None:
    from penstock.spark import versions

    versions.check()


def _connect(name: str, remote: str, settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().appName(name).remote(remote)
    for key, value in ({"spark.sql.session.timeZone": "UTC"} | dict(settings)).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _running(settings: Mapping[str, str]) -> SparkSession | None:
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    if spark is not None:
        for key, value in settings.items():
            if spark.conf.isModifiable(key):
                spark.conf.set(key, value)
    return spark


def _start(name: str, master: str, settings: Mapping[str, str], *, ui: bool, quick: bool) -> SparkSession:
    from pyspark.errors import PySparkRuntimeError

    # By default Spark runs `python3` to find sources and for its workers, which may lack Penstock.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", os.environ["PYSPARK_PYTHON"])
    is_local = master.startswith("local")
    chosen = _SETTINGS | {"spark.ui.enabled": str(ui).lower(), "spark.ui.showConsoleProgress": "false"}
    if is_local:
        chosen |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        # Spark's default of 200 is for clusters: each partition costs a task, and its state a file in every batch.
        chosen["spark.sql.shuffle.partitions"] = str(max(2, os.cpu_count() or 2))
    chosen |= settings

    found = java.find()
    environment = {"JAVA_HOME": str(found.home)}
    if is_local:
        environment["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    start = None
    if quick and is_local and not master.startswith("local-cluster"):
        start = startup.quick(found, options=chosen.get(_OPTIONS, ""), memory=chosen.get("spark.driver.memory"))
    if start is not None:
        options = " ".join([*start.options, chosen.get(_OPTIONS, "")]).strip()
        try:
            return _build(name, master, chosen | {_OPTIONS: options}, environment | dict(start.environment))
        except PySparkRuntimeError as error:
            if error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
            # The JVM exited. Start it without the quick start: either it works, or its error says why not.
            startup.forget(start)
    return _build(name, master, chosen, environment)


def _build(name: str, master: str, settings: Mapping[str, str], environment: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().appName(name).master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _environment(environment):
        return builder.getOrCreate()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started within, and restore them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
