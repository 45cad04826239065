"""A large topic, read by Spark step by step: memory stays as it is, and a row costs what it cost before.

    python -m bench.spark_large --messages 50000000 --directory /tmp

Each step counts a range of the topic, every column of it. The memory is what each process has to itself and its share
of what it has in common with others (PSS); of the broker, files that it has mapped are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from bench import peers
from bench.measure import Bench
from bench.peers import Peer
from bench.spark import PARTITIONS, TOPIC, count_columns, fill, read, start
from penstock.client.sync import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What a message takes on the disk, generously: its value, key and subject, and what the log adds.
_MESSAGE_BYTES: Final = 160
_SPARE_BYTES: Final = 2 << 30
_MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class Step:
    rows: int
    seconds: float
    jvm_bytes: int
    workers_bytes: int
    broker_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark_large", description=__doc__)
    parser.add_argument("--messages", type=int, default=50_000_000)
    parser.add_argument("--step", type=int, default=5_000_000, help="so many are read at a time")
    parser.add_argument("--directory", type=Path, default=Path(), help="where the files go, and are removed after")
    options = parser.parse_args(arguments)
    if not 0 < options.step <= options.messages:
        parser.error(f"--step: {options.step} is not between 1 and --messages, which is {options.messages}")
    if not options.directory.is_dir():
        parser.error(f"--directory: {options.directory} is not a directory")
    needed, free = options.messages * _MESSAGE_BYTES + _SPARE_BYTES, shutil.disk_usage(options.directory).free
    if needed > free:
        parser.error(f"--messages: {options.messages:,} need {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.directory) as directory:
        _print(_run(Path(directory), options.messages, options.step))


def _run(directory: Path, messages: int, step: int) -> Iterator[Step]:
    console = Console(stderr=True)
    bench = Bench(directory, quick=False, progress=console.print, note=console.print)
    with peers.penstock(directory / "penstock", "fsync") as server:
        with console.status(f"Store {messages:,} messages") as status:
            fill(server, messages, lambda stored: status.update(f"Store {messages:,} messages: {stored:,}"))
        with start(bench) as spark:
            # Whatever is compiled, loaded or grown is there when the first step is taken.
            for _ in range(2):
                _count(spark, server, 0, step)
            for first in range(0, messages, step):
                yield _count(spark, server, first, min(first + step, messages))


def _count(spark: SparkSession, server: Peer, first: int, last: int) -> Step:
    """Count the messages from one to the other, as if the partitions held equally many of them."""
    ranges = _ranges(server, first, last)
    starting, ending = ({TOPIC: {str(each): pair[side] for each, pair in ranges.items()}} for side in (0, 1))
    rows = read(spark, server, startingOffsets=json.dumps(starting), endingOffsets=json.dumps(ending))
    begun = time.perf_counter()
    count_columns(rows, expected := sum(end - start for start, end in ranges.values()))
    seconds = time.perf_counter() - begun
    jvm = _jvm(spark)
    return Step(expected, seconds, _memory(jvm), _workers_memory(jvm), _memory(server.pid, "Anonymous"))


def _ranges(server: Peer, first: int, last: int) -> dict[int, tuple[int, int]]:
    with Client(f"127.0.0.1:{server.port}") as client:
        ends = [position.end for position in client.topic(TOPIC).positions]
    assert len(ends) == PARTITIONS
    total = sum(ends)
    return {number: (end * first // total, end * last // total) for number, end in enumerate(ends)}


def _jvm(spark: SparkSession) -> int:
    jvm = spark._jvm
    assert jvm is not None
    return int(jvm.java.lang.ProcessHandle.current().pid())


def _workers_memory(pid: int) -> int:
    """Of what a process has started, and what that has."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread or a process that has ended meanwhile has nothing.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, (task / "children").read_text().split()):
                with suppress(FileNotFoundError, ProcessLookupError):
                    total += _memory(child) + _workers_memory(child)
    return total


def _memory(pid: int, what: str = "Pss") -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def _print(steps: Iterator[Step]) -> None:
    print(f"{'rows':>12} {'rows/s':>12} {'JVM':>10} {'workers':>10} {'broker':>10}")
    done, first, last = 0, None, None
    for last in steps:
        first = first or last
        done += last.rows
        memory = " ".join(f"{size / _MB:>7,.0f} MB" for size in (last.jvm_bytes, last.workers_bytes, last.broker_bytes))
        print(f"{done:>12,} {last.rows / last.seconds:>12,.0f} {memory}", flush=True)
    assert first is not None
    assert last is not None
    print(
        f"From the first step to the last: a row costs {_ratio(last.seconds / last.rows, first.seconds / first.rows)}, "
        f"memory of the JVM is {_ratio(last.jvm_bytes, first.jvm_bytes)}, of the workers "
        f"{_ratio(last.workers_bytes, first.workers_bytes)}, of the broker "
        f"{_ratio(last.broker_bytes, first.broker_bytes)}."
    )


def _ratio(last: float, first: float) -> str:
    return f"{last / first:.2f} ×"


if __name__ == "__main__":
    main()
