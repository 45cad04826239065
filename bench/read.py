"""Reads from disk, against plain preads of the same files, all of them in the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

from bench.data import STORED, ready
from bench.measure import Bench, Line, repeat
from penstock.log.log import Log
from penstock.log.policy import Policy
from penstock.log.scan import Found
from penstock.log.segment import ReadMode
from penstock.store.store import Store, StoreSettings

_CHUNK_BYTES: Final = 1 << 20
_ROUND_READS: Final = 8
# So many bytes in one write while the log is made: most of what the disk can do.
_FLUSH_BATCHES: Final = 160


def measure(bench: Bench) -> Iterator[Line]:
    """A log of a gigabyte, read in order and then at random."""
    directory = bench.directory / "read"
    topic_id = _make(bench, directory)
    readers: tuple[ReadMode, ...] = ("pread", "mmap")
    for reader in readers:
        with Store(directory, settings=StoreSettings(reader=reader)) as store, ExitStack() as stack:
            log = store.log(topic_id)
            files = [_open(segment.path, stack) for segment in log.segments[:-1]]
            yield _in_order(bench, log, files, reader)
            if reader == "pread":
                yield _at_random(bench, log, files)


def _make(bench: Bench, directory: Path) -> int:
    batches = bench.choose(1 << 30, 16 << 20) // len(STORED)
    policy = Policy(segment_bytes=bench.choose(64 << 20, 4 << 20))
    with Store(directory) as store:
        topic = store.create_topic("read", policy=policy)
        log = store.log(topic.id)
        for begin in range(0, batches, _FLUSH_BATCHES):
            bench.progress("making a log to read")
            for batch in ready(min(_FLUSH_BATCHES, batches - begin)):
                log.append(batch)
            store.flush()
    return topic.id


def _open(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _in_order(bench: Bench, log: Log, files: list[int], reader: ReadMode) -> Line:
    """A round reads on where the last one stopped, some megabytes, and counts the seconds for each."""
    ours = _by_log(log)
    theirs = _by_hand(files)
    # Once through, which brings all of it into the page cache, and half again: the two sides are never near each
    # other, where one would find in the processor's cache what the other just read.
    for _ in range(3 * sum(segment.size for segment in log.segments) // (2 * _CHUNK_BYTES)):
        next(theirs)

    def timed(read: Iterator[int]) -> float:
        begun = time.perf_counter()
        size = sum(islice(read, _ROUND_READS))
        return (time.perf_counter() - begun) / (size / 1e6)

    what = f"read sealed segments, {reader}"
    penstock, limit = bench.processor(what, lambda: timed(ours), lambda: timed(theirs), bench.choose(1000, 3))
    return Line(
        section="read",
        what=what + (", nothing copied" if reader == "mmap" else ""),
        against="pread of 1 MiB",
        unit="MB/s",
        penstock=1 / penstock,
        limit=1 / limit,
        ratio_of="speed",
        target=0.7 if reader == "pread" else None,
    )


def _by_log(log: Log) -> Iterator[int]:
    """Read the sealed segments, again and again; the bytes of each read."""
    end = log.segments[-1].base
    while True:
        offset = log.start
        while offset < end:
            batches = log.read_disk(offset, _CHUNK_BYTES)
            offset = batches[-1].end
            yield len(STORED) * len(batches)


def _by_hand(files: list[int]) -> Iterator[int]:
    while True:
        for file in files:
            position = 0
            while data := os.pread(file, _CHUNK_BYTES, position):
                position += len(data)
                yield len(data)


def _at_random(bench: Bench, log: Log, files: list[int]) -> Line:
    size = len(STORED)
    # (offset, file, position) of every batch
    places = [
        (found.batch.base_offset, file, found.position)
        for segment, file in zip(log.segments[:-1], files, strict=True)
        for found in segment.scan()
        if isinstance(found, Found) and found.batch.count
    ]
    random = Random(1)
    reads = bench.choose(200, 20)

    # Each side and each round goes to other places: what one of them touched, the processor's cache still has.
    def penstock() -> float:
        offsets = iter([place[0] for place in random.choices(places, k=reads)])
        return repeat(lambda: log.read_disk(next(offsets), size), reads)()

    def plain() -> float:
        chosen = iter([place[1:] for place in random.choices(places, k=reads)])

        def read() -> None:
            file, position = next(chosen)
            os.pread(file, size, position)

        return repeat(read, reads)()

    gigabytes = sum(segment.size for segment in log.segments) / (1 << 30)
    what = f"random read of one batch in {gigabytes:.2g} GiB"
    ours, theirs = bench.processor(what, penstock, plain, bench.choose(200, 3))
    return Line(
        section="read",
        what=what,
        against="one pread of as much",
        unit="µs",
        penstock=ours / reads * 1e6,
        limit=theirs / reads * 1e6,
        ratio_of="time",
        target=3,
    )
