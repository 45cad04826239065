"""Logs of their own, without a store, for the tests of one log."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Final

from penstock.clock import Clock
from penstock.log.files import Files, OsFiles
from penstock.log.log import Log
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Policy
from penstock.log.segment import ReadMode
from penstock.log.tail import TailBudget
from penstock.log.witness import NOBODY, Witness
from penstock.model.batch import encode
from penstock.store.meta import Meta
from penstock.store.repair import NoRounds
from penstock.testing import ManualClock

DEFAULT_POLICY: Final = Policy()
TIMESTAMP: Final = 1_600_000_000_000_000


def open_log(
    directory: Path,
    *,
    files: Files | None = None,
    clock: Clock | None = None,
    policy: Policy = DEFAULT_POLICY,
    reader: ReadMode = "pread",
    tail_bytes: int = 0,
    piped: bool = False,
    witness: Witness = NOBODY,
    strict: bool = False,
) -> Log:
    """A log on `files` (the real ones by default), which keeps nothing in memory unless `tail_bytes` says so."""
    return Log(
        directory,
        policy=policy,
        files=files or OsFiles(),
        clock=clock or ManualClock(),
        owner=NoRounds(),
        open_segments=OpenSegments(),
        tail_budget=TailBudget(tail_bytes),
        read_mode=reader,
        piped=piped,
        witness=witness,
        strict=strict,
    )


def memory_meta() -> Meta:
    """Return a `meta.db` in memory. It closes itself when a test drops its store as a kill does."""
    meta = Meta(None)
    weakref.finalize(meta, meta._database.close)
    return meta


def append(log: Log, *values: bytes, **columns: Any) -> int:
    """Append `values` as one batch, with the other arguments of `encode`; they wait for a flush."""
    return log.append(encode(values, **{"timestamp": TIMESTAMP, **columns}))


def values(log: Log, start: int | None = None, bytes_max: int = 1 << 20) -> list[bytes]:
    """Every message that the log serves, from its start or from `start` on."""
    return list(messages(log, start, bytes_max).values())


def messages(log: Log, start: int | None = None, bytes_max: int = 1 << 20) -> dict[int, bytes]:
    """Every message that the log serves, by its offset. A batch is served whole, though `start` be in its midst."""
    found: dict[int, bytes] = {}
    offset = log.start if start is None else start
    last = -1
    while batches := log.read(offset, bytes_max):
        for batch in batches:
            columns = batch.columns()
            for place, value in zip(columns.offsets(), columns.values(), strict=True):
                assert place > last, f"offset {place} is served after {last}"
                found[place] = value
                last = place
            assert batch.end > offset, "reading does not get on"
            offset = batch.end
    return found
