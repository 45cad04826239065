"""Logs with small segments on a simulated disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from penstock.errors import (
    PenstockError,
)
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Durability, Policy
from penstock.log.segment import ReadMode
from penstock.model.batch import encode
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.logs import append, open_log, values

DIRECTORY = Path("/data/log")
SMALL = Policy(segment_bytes=4096)
FLUSH = Policy(segment_bytes=4096, durability=Durability.FLUSH)
COMPACT = Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, tombstone_ms=1000)

# Two of these do not fit into one small segment.
LARGE = Random(0).randbytes(3000)
READERS: tuple[ReadMode, ...] = ("pread", "mmap")
Answers = list[tuple[int, PenstockError | None]]


def open_small(files: Any, policy: Policy = SMALL, **others: Any) -> Log:
    return open_log(DIRECTORY, files=files, policy=policy, **others)


def append_told(log: Log, *items: bytes, source: int = 0, position: int = 0, **columns: Any) -> Answers:
    """Append, and return a list of what its producer is told, as it is told."""
    answers: Answers = []
    batch = encode(items, timestamp=0, **columns)
    outcome = Outcome()
    offset = log.append(batch, source=source, position=position, outcome=outcome)
    outcome.then(lambda error: answers.append((offset, error)))
    return answers


def append_flushed(log: Log, *items: bytes, **columns: Any) -> int:
    offset = append(log, *items, **columns)
    log.flush()
    return offset


def fill(log: Log, segments: int) -> None:
    """Append so many large messages, each of which needs its own segment."""
    for number in range(segments):
        append_flushed(log, b"%d:" % number + LARGE)


def numbers(log: Log, start: int | None = None) -> list[int]:
    """Which of the messages that `fill` appended are there."""
    return [int(value.partition(b":")[0]) for value in values(log, start)]


def write(log: Log) -> None:
    """Write all that waits, without a sync."""
    round_ = log.flusher.begin_write()
    assert round_ is not None
    round_.run()
    log.flusher.finish_write(round_)


def kill(log: Log, disk: FaultyFiles, **others: Any) -> Log:
    """The log as the next process finds it."""
    disk.kill()
    return open_small(disk, log.policy, **others)


Reopen = Callable[[Log, FaultyFiles], Log]


def reopen_after_close(log: Log, disk: FaultyFiles) -> Log:
    log.close()
    return open_small(disk, log.policy)


REOPENS: list[Reopen] = [reopen_after_close, kill]
