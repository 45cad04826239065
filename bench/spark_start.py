"""How long a program takes from its first line to the first count of a topic: `penstock.spark.session`, and a plain
PySpark session. Each round is a process of its own.

    python -m bench.spark_start
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import penstock
from bench.measure import Bench, Line, Round
from penstock.spark import java

_COUNT: Final = 1000
_OURS: Final = """
from penstock.spark import session
spark = session(master="local[2]")
"""
_PLAIN: Final = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").getOrCreate()
"""
_PROGRAM: Final = """
import sys, time
begun = time.perf_counter()
{start}
rows = spark.read.format("penstock").option("servers", {servers!r}).option("subscribe", "started").load()
assert rows.count() == {count}
print("seconds", time.perf_counter() - begun)
spark.stop()
"""


def measure(bench: Bench) -> Iterator[Line]:
    """The first round of ours makes what the others use, and is not counted."""
    what = "start Spark, count a topic"
    with penstock.Broker(bench.directory / "start", listen="127.0.0.1:0") as broker:
        broker.publish_many(("started", b"%d" % number) for number in range(_COUNT))
        assert broker.address is not None
        cache = bench.directory / "cache"
        ours = _round(_OURS, broker.address, cache)
        plain = _round(_PLAIN, broker.address, cache)
        best, limit = bench.processor(what, ours, plain, bench.choose(4, 1))
    yield Line(
        section="spark start",
        what=what,
        against="a plain PySpark session",
        unit="s",
        penstock=best,
        limit=limit,
        ratio_of="time",
        target=0.6,
    )


def _round(start: str, servers: str, cache: Path) -> Round:
    program = _PROGRAM.format(start=start, servers=servers, count=_COUNT)
    environment = os.environ | {
        "JAVA_HOME": str(java.find().home),
        "PYSPARK_PYTHON": sys.executable,
        "XDG_CACHE_HOME": str(cache),
    }

    def run() -> float:
        # It ends when its output does, and that is when the JVM has ended as well.
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        _, _, seconds = done.stdout.rpartition("seconds ")
        return float(seconds)

    return run


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        bench = Bench(Path(directory), quick=False, progress=lambda what: print(what, "…"), note=print)
        for line in measure(bench):
            print(
                f"ours {line.penstock:.1f} s, plain {line.limit:.1f} s, ratio {line.ratio:.2f} (target {line.target})"
            )


if __name__ == "__main__":
    main()
