"""Durable appends, against a plain loop of write and fdatasync: in the calling thread, then through the event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from bench.data import MESSAGES, STORED, ready
from bench.measure import Bench, Line, best_tenth
from penstock.log.log import Log
from penstock.model.batch import Batch
from penstock.store.store import Store

_IN_FLIGHT: Final = 32
_BATCH_MB: Final = len(STORED) / 1e6


def measure(bench: Bench) -> Iterator[Line]:
    """Ready batches, in the calling thread. One in each sync shows the cost of a sync, many the cost of a byte."""
    yield _append(bench, batches=1, rounds=bench.choose(1500, 5))
    yield _append(bench, batches=20, rounds=bench.choose(250, 5))


def _append(bench: Bench, *, batches: int, rounds: int) -> Line:
    with _topic(bench, f"append-{batches}") as (store, log), _Plain(bench.directory / "append.plain") as plain:

        def penstock() -> float:
            group = ready(batches)
            begun = time.perf_counter()
            for batch in group:
                log.append(batch)
            store.flush()
            return time.perf_counter() - begun

        def by_hand() -> float:
            group = [batch.data for batch in ready(batches)]
            begun = time.perf_counter()
            plain.append(group)
            return time.perf_counter() - begun

        what = f"append, fsync each {batches * MESSAGES:,} messages"
        ours, theirs = bench.disk(what, penstock, by_hand, rounds)
    megabytes = batches * _BATCH_MB
    return Line(
        section="append",
        what=what,
        against="writev + fdatasync",
        unit="MB/s",
        penstock=megabytes / ours,
        limit=megabytes / theirs,
        ratio_of="speed",
        target=0.7,
    )


def measure_loop(bench: Bench) -> Iterator[Line]:
    """The same in an event loop, where a worker thread runs the flush rounds and callers wait for them."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with _topic(bench, "loop") as (store, log), _Plain(bench.directory / "loop.plain") as plain:
            yield from runner.run(_many_in_flight(bench, store, log, plain))
        with _topic(bench, "latency") as (store, log), _Plain(bench.directory / "latency.plain") as plain:
            yield runner.run(_one_in_flight(bench, store, log, plain))


async def _many_in_flight(bench: Bench, store: Store, log: Log, plain: _Plain) -> list[Line]:
    total = bench.choose(5, 2) * _IN_FLIGHT
    times = []
    async with asyncio.TaskGroup() as group:
        rounds = group.create_task(store.run())
        for _ in range(bench.choose(40, 2)):
            bench.progress("event loop, many in flight")
            seconds, commits = await _append_all(store, log, ready(total))
            data = [batch.data for batch in ready(total)]
            begun = time.perf_counter()
            for number in range(commits):
                plain.append(data[number * total // commits : (number + 1) * total // commits])
            times.append((seconds, time.perf_counter() - begun, total / commits))
        rounds.cancel()
    penstock = best_tenth([seconds for seconds, _, _ in times])
    limit = best_tenth([seconds for _, seconds, _ in times])
    carried = median(batches for _, _, batches in times)
    scales = (("MB/s", _BATCH_MB), ("M msg/s", MESSAGES / 1e6))
    return [
        Line(
            section="loop",
            what=f"event loop, {_IN_FLIGHT} batches in flight",
            against=f"writev of {carried:.0f} + fdatasync",
            unit=unit,
            penstock=total * scale / penstock,
            limit=total * scale / limit,
            ratio_of="speed",
        )
        for unit, scale in scales
    ]


async def _append_all(store: Store, log: Log, batches: list[Batch]) -> tuple[float, int]:
    """Seconds, and in how many rounds they were committed."""
    commits = set()
    queue = iter(batches)

    async def append() -> None:
        for batch in queue:
            await store.append(log, batch)
            commits.add(log.committed)

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(_IN_FLIGHT):
            group.create_task(append())
    return time.perf_counter() - begun, len(commits)


async def _one_in_flight(bench: Bench, store: Store, log: Log, plain: _Plain) -> Line:
    ours, theirs = [], []
    async with asyncio.TaskGroup() as group:
        rounds = group.create_task(store.run())
        for _ in range(bench.choose(200, 2)):
            bench.progress("event loop, one in flight")
            for batch in ready(5):
                begun = time.perf_counter()
                await store.append(log, batch)
                ours.append(time.perf_counter() - begun)
            for batch in ready(5):
                begun = time.perf_counter()
                plain.append([batch.data])
                theirs.append(time.perf_counter() - begun)
        rounds.cancel()
    return Line(
        section="loop",
        what="event loop, 1 batch in flight, p50",
        against="writev + fdatasync, p50",
        unit="µs",
        penstock=median(ours) * 1e6,
        limit=median(theirs) * 1e6,
        ratio_of="time",
    )


@contextmanager
def _topic(bench: Bench, name: str) -> Iterator[tuple[Store, Log]]:
    with Store(bench.directory / name) as store:
        yield store, store.log(store.create_topic(name).id)


class _Plain:
    """A file that grows."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o640)

    def append(self, data: list[bytes | bytearray | memoryview]) -> None:
        os.writev(self._descriptor, data)
        os.fdatasync(self._descriptor)

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
