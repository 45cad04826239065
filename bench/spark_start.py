"""How long Spark takes to start: with `penstock.spark.session`, in the commands for pipelines, and in plain PySpark.

Each round is a process of its own.

    python -m bench.spark_start
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from importlib import resources
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
_SCHEMA: Final = "id string NOT NULL, amount double"
_SQL: Final = "SELECT id, round(amount * 0.2, 2) AS tax FROM source WHERE amount >= 1"
_PIPELINE: Final = """
name = "started"
kind = "transform"
[source]
servers = "{servers}"
topic = "started"
schema = "{schema}"
[transform]
sql = "{sql}"
[sink]
topic = "taxes"
key = "id"
"""
_BY_HAND: Final = """
from pyspark.sql import functions as fn
source = spark.readStream.format("penstock").option("servers", {servers!r}).option("subscribe", "started")
rows = source.option("startingOffsets", "earliest").load()
rows = rows.select(fn.from_json(fn.col("value").cast("string"), {schema!r}).alias("read")).select("read.*")
rows.createOrReplaceTempView("source")
made = spark.sql({sql!r})
out = made.select(fn.to_json(fn.struct("*")).alias("value"), fn.col("id").alias("key")).writeStream.format("penstock")
out = out.options(servers={servers!r}, topic="taxes", checkpointLocation=sys.argv[1])
out.trigger(availableNow=True).start().awaitTermination()
print("batch", flush=True)
spark.stop()
"""
_CHECKED: Final = """
from pyspark.sql import functions as fn
rows = spark.createDataFrame([], "value string").select(fn.from_json("value", {schema!r}).alias("read"))
rows.select("read.*").createOrReplaceTempView("source")
print(spark.sql({sql!r}).columns)
spark.stop()
"""


def measure(bench: Bench) -> Iterator[Line]:
    yield from _measure_session(bench)
    yield from _measure_first_batch(bench)
    yield from _measure_validate(bench)


def _measure_first_batch(bench: Bench) -> Iterator[Line]:
    """From the command to the end of the first batch of a new pipeline."""
    what = "pipeline, first batch in a fresh JVM"
    directory = bench.directory / "first"
    with penstock.Broker(directory / "broker", listen="127.0.0.1:0") as broker:
        broker.publish_many(("started", b'{"id":"%d","amount":%d}' % (number, number)) for number in range(_COUNT))
        assert broker.address is not None
        given = {"servers": broker.address, "schema": _SCHEMA, "sql": _SQL}
        file = directory / "started.toml"
        file.write_text(_PIPELINE.format(**given))
        run = [_command("penstock"), "pipeline", "run", str(file), "--restart", "--json", "--data"]
        by_hand = [sys.executable, "-c", "import sys" + _PLAIN + _BY_HAND.format(**given)]
        ours = _until_printed(bench, run)
        best, limit = bench.processor(what, ours, _until_printed(bench, by_hand), bench.choose(4, 1))
    yield _line(what, "the same stream in plain PySpark, no dead letters", best, limit, 8.0)


def _measure_validate(bench: Bench) -> Iterator[Line]:
    directory = bench.directory / "validate"
    directory.mkdir()
    archive, sql = directory / "archive.toml", directory / "transform.toml"
    archive.write_text(resources.files("penstock.pipelines").joinpath("examples", "archive.toml").read_text())
    sql.write_text(_PIPELINE.format(servers="127.0.0.1:4222", schema=_SCHEMA, sql=_SQL))
    checked = "import sys" + _PLAIN + _CHECKED.format(schema=_SCHEMA, sql=_SQL)
    for what, file, against, other, target in (
        ("pipeline validate, without Spark", archive, "a Python that does nothing", "pass", 1.0),
        ("pipeline validate, SQL", sql, "the same SQL analysed by plain PySpark", checked, 5.0),
    ):
        ours = _whole(bench, [_command("penstock"), "pipeline", "validate", str(file)])
        best, limit = bench.processor(what, ours, _whole(bench, [sys.executable, "-c", other]), bench.choose(4, 1))
        yield _line(what, against, best, limit, target)


def _line(what: str, against: str, best: float, limit: float, target: float) -> Line:
    return Line(
        section="spark start",
        what=what,
        against=against,
        unit="s",
        penstock=best,
        limit=limit,
        ratio_of="time",
        target=target,
        target_of="figure",
    )


def _until_printed(bench: Bench, command: list[str]) -> Round:
    """Rounds until a command prints its first line. Its last argument is a new directory."""

    def run() -> float:
        begun = time.perf_counter()
        place = str(bench.directory / f"state-{uuid.uuid4().hex}")
        with subprocess.Popen([*command, place], env=_environment(bench), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            is_printed = bool(process.stdout.readline())
            seconds = time.perf_counter() - begun
            process.stdout.read()
        if process.returncode != 0 or not is_printed:
            raise RuntimeError(f"{command} failed")
        return seconds

    return run


def _whole(bench: Bench, command: list[str]) -> Round:
    def run() -> float:
        begun = time.perf_counter()
        subprocess.run(command, env=_environment(bench), capture_output=True, check=True)
        return time.perf_counter() - begun

    return run


def _command(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _environment(bench: Bench) -> dict[str, str]:
    return os.environ | {
        "JAVA_HOME": str(java.find().home),
        "PYSPARK_PYTHON": sys.executable,
        "XDG_CACHE_HOME": str(bench.directory / "cache"),
    }


def _measure_session(bench: Bench) -> Iterator[Line]:
    """The first round of ours makes what the others use, and is not counted."""
    what = "start Spark, count a topic"
    with penstock.Broker(bench.directory / "start", listen="127.0.0.1:0") as broker:
        broker.publish_many(("started", b"%d" % number) for number in range(_COUNT))
        assert broker.address is not None
        ours = _round(bench, _OURS, broker.address)
        plain = _round(bench, _PLAIN, broker.address)
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


def _round(bench: Bench, start: str, servers: str) -> Round:
    program = _PROGRAM.format(start=start, servers=servers, count=_COUNT)

    def run() -> float:
        # It ends when its output does, and that is when the JVM has ended as well.
        done = subprocess.run(
            [sys.executable, "-c", program], env=_environment(bench), capture_output=True, text=True, check=False
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
            target = f"{line.target} {'s' if line.target_of == 'figure' else '×'}"
            print(f"{line.what}: {line.penstock:.1f} s, plain {line.limit:.1f} s, {line.ratio:.2f} × (target {target})")


if __name__ == "__main__":
    main()
