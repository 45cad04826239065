"""What a log does beside its traffic: it is opened, and compacted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

from crc32c import crc32c

from bench.data import MESSAGES, STORED, TIMESTAMP, make_values, ready
from bench.measure import Bench, Line, repeat
from penstock.clock import SystemClock
from penstock.log.files import OsFiles
from penstock.log.log import Log
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Cleanup, Policy
from penstock.log.tail import TailBudget
from penstock.model.batch import Batch, encode
from penstock.store.store import Store

_CHUNK_BYTES: Final = 1 << 20


def measure_open(bench: Bench) -> Iterator[Line]:
    """The active segment is half full, as it is on average. It alone is walked."""
    many, few = bench.choose(1000, 20), 10
    active_bytes = bench.choose(32 << 20, 1 << 20)
    logs = {sealed: _make(bench, sealed, active_bytes) for sealed in (many, few)}
    rounds = bench.choose(60, 2)

    what = f"open a log of {many:,} sealed segments"
    slow, fast = bench.processor(what, repeat(lambda: _open(logs[many])), repeat(lambda: _open(logs[few])), rounds)
    yield Line(
        section="open",
        what=what,
        against=f"one of {few}; {active_bytes >> 20} MiB active",
        unit="ms",
        penstock=slow * 1e3,
        limit=fast * 1e3,
        ratio_of="time",
        target=1.5,
    )

    def list_files() -> None:
        with os.scandir(logs[many]) as entries:
            for entry in entries:
                entry.stat()

    listed, _ = bench.processor(what, repeat(list_files), repeat(list_files), rounds)
    yield Line(
        section="open",
        what="open a log, for each sealed segment",
        against="scandir + stat of its files",
        unit="µs",
        penstock=max(0.0, slow - fast) / (many - few) * 1e6,
        limit=listed / many * 1e6,
        ratio_of="time",
    )

    active = max(logs[few].glob("*.log"))
    size = active.stat().st_size

    def walk() -> None:
        with active.open("rb", buffering=0) as file:
            while data := file.read(_CHUNK_BYTES):
                crc32c(data)

    what = "recover, walk the active segment"
    ours, theirs = bench.processor(what, repeat(lambda: _open(logs[few])), repeat(walk), rounds)
    yield Line(
        section="open",
        what=what,
        against="read of 1 MiB + crc32c",
        unit="MB/s",
        penstock=size / ours / 1e6,
        limit=size / theirs / 1e6,
        ratio_of="speed",
    )


def measure_compact(bench: Bench) -> Iterator[Line]:
    """Messages with keys, each key twice, anywhere."""
    batches = _keyed(bench.choose(600, 30))
    policy = Policy(cleanup=Cleanup.COMPACT, segment_bytes=bench.choose(8 << 20, 256 << 10))
    directories = (bench.directory / f"compact-{number}" for number in count())
    # The same batches make the same segments each time.
    _, sealed_bytes = _compact(next(directories), batches, policy)
    plain = bench.directory / "compact.plain"
    plain.write_bytes(bytes(sealed_bytes))

    def copy_half() -> None:
        with plain.open("rb", buffering=0) as file, plain.with_suffix(".copy").open("wb", buffering=0) as copy:
            while data := file.read(_CHUNK_BYTES):
                copy.write(memoryview(data)[: len(data) // 2])
            os.fdatasync(copy.fileno())

    what = "compact, each key twice"
    ours, theirs = bench.processor(
        what, lambda: _compact(next(directories), batches, policy)[0], repeat(copy_half), bench.choose(5, 1)
    )
    yield Line(
        section="compact",
        what=what,
        against="read it, write half, fdatasync",
        unit="MB/s",
        penstock=sealed_bytes / ours / 1e6,
        limit=sealed_bytes / theirs / 1e6,
        ratio_of="speed",
    )


def _compact(directory: Path, batches: list[Batch], policy: Policy) -> tuple[float, int]:
    """Make a log of these batches and compact it: seconds that it took, and bytes that its sealed segments had."""
    with Store(directory) as store:
        log = store.log(store.create_topic("compact", policy=policy).id)
        for batch in batches:
            log.append(Batch(bytearray(batch.data)))
        store.flush()
        sealed_bytes = sum(segment.size for segment in log.segments[:-1])
        begun = time.perf_counter()
        log.upkeep.compact()
        return time.perf_counter() - begun, sealed_bytes


def _make(bench: Bench, sealed: int, active_bytes: int) -> Path:
    """A log of so many small segments, and an active one of so many bytes; the directory it is in."""
    small = encode(make_values()[:35], timestamp=TIMESTAMP)
    policy = Policy(segment_bytes=4096)
    with Store(bench.directory / f"open-{sealed}") as store:
        topic = store.create_topic("open", policy=policy)
        log = store.log(topic.id)
        while len(log.segments) <= sealed:
            bench.progress(f"making a log of {sealed} segments")
            for _ in range(min(50, sealed + 1 - len(log.segments))):
                log.append(Batch(bytearray(small.data)))
            store.flush()
        store.alter_topic(replace(topic, policy=Policy()))
        for batch in ready(active_bytes // len(STORED)):
            log.append(batch)
        store.flush()
        assert len(log.segments) == sealed + 1
        return log.directory


def _open(directory: Path) -> None:
    """A log without its store, which has a database and other logs to open."""
    Log(
        directory,
        policy=Policy(),
        files=OsFiles(),
        clock=SystemClock(),
        owner=_NoRounds(),
        open_segments=OpenSegments(),
        tail_budget=TailBudget(0),
    )


class _NoRounds:
    """The owner of a log to which nothing is appended."""

    def appended(self, log: Log, size: int) -> None:
        raise NotImplementedError

    def settled(self, size: int) -> None:
        raise NotImplementedError

    def announce(self) -> None:
        raise NotImplementedError

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        raise error

    def damaged(self, log: Log) -> None:
        raise NotImplementedError


def _keyed(batches: int) -> list[Batch]:
    random = Random(1)
    values = make_values()
    keys = [b"meter-%06d" % number for number in range(batches * MESSAGES // 2)] * 2
    random.shuffle(keys)
    return [
        encode(values, keys=keys[begin : begin + MESSAGES], timestamp=TIMESTAMP)
        for begin in range(0, len(keys), MESSAGES)
    ]
