"""Stores that are backed up and restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.backup.create import BackupSource, Done, Throttle, create, plan
from penstock.backup.cut import ToOffsets, ToTime
from penstock.backup.restore import Restore, Restored, choose, manifests
from penstock.backup.target import Target
from penstock.log.policy import Policy
from penstock.model.batch import encode
from penstock.store import inspect
from penstock.store.store import Store
from penstock.testing import ManualClock

SMALL = Policy(segment_bytes=4096)


def append(store: Store, topic_id: int, count: int, partition: int = 0, *, source: int = 0, position: int = 0) -> None:
    log = store.log(topic_id, partition)
    for _ in range(count):
        log.append(encode([b"%d" % log.end + bytes(500)], timestamp=1), source=source, position=position)
    store.flush()


def back_up(store: Store, target: Target, source: Callable[[BackupSource], BackupSource] = lambda found: found) -> Done:
    if isinstance(store._clock, ManualClock):
        store._clock.advance(1)  # so that backups have an order
    snapshot = store.snapshot_now()
    try:
        return create(source(snapshot), target, plan(snapshot, target), penstock="1", throttle=Throttle(None))
    finally:
        store.snapshots.end(snapshot)


def put_back(target: Target, directory: Path, to: ToTime | ToOffsets | None = None, **options: Any) -> Restored:
    with Restore(directory) as work:
        return work.run(target, choose(manifests(target), None, to), to, **options)


def values(store: Store, topic_id: int, partition: int = 0) -> dict[int, bytes]:
    log = store.log(topic_id, partition)
    found: dict[int, bytes] = {}
    offset = log.start
    while batches := log.read(offset, 1 << 20):
        for batch in batches:
            columns = batch.columns()
            found |= dict(zip(columns.offsets(), columns.values(), strict=True))
        offset = batches[-1].end
    return found


def is_sound(directory: Path) -> bool:
    with inspect.inspect(directory) as found:
        return not found.problems and all(inspect.verify(log).sound for log in found.logs)
