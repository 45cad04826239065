"""A writer of an archive in a process of its own, killed at a step, for `tests/spark/test_object_archive.py`.

`python -m tests.support.object_writer ARCHIVE STEP write` writes batch 3 as a task and the driver of a query do: it
stores the files, commits them and folds the manifest. `compact` merges the files of the archive. Before request STEP to
the store that changes something, the process kills itself with SIGKILL. It prints the number of these requests if it
gets to the end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pyarrow

from penstock.object_store import ObjectStore
from penstock.spark import parquet
from penstock.spark.archive import Archive
from penstock.spark.archive_place import open_place
from penstock.spark.columns import TYPES
from penstock.spark.manifest import ArchiveManifest, Entry

COLUMNS = ("topic", "partition", "offset", "timestamp", "value")
SCHEMA = pyarrow.schema([(name, TYPES[name]) for name in COLUMNS])
ROWS = 10
HOUR_US = 3_600_000_000
FOLD_EVERY = 2


def rows(number: int) -> pyarrow.RecordBatch:
    """Return the rows of a batch: two hours, so two files."""
    offsets = range(number * ROWS, (number + 1) * ROWS)
    return pyarrow.RecordBatch.from_pydict(
        {
            "topic": ["orders"] * ROWS,
            "partition": [0] * ROWS,
            "offset": list(offsets),
            "timestamp": [(offset * 2 // ROWS) * HOUR_US for offset in offsets],
            "value": [b"%d" % offset for offset in offsets],
        },
        schema=SCHEMA,
    )


def write(archive: str, number: int) -> bool:
    """Write a batch; return False if it was there."""
    place = open_place(archive)
    manifest = ArchiveManifest(place, fold_every=FOLD_EVERY)
    manifest.create()
    files = tuple(parquet.write([rows(number)], place, SCHEMA, "hour"))
    if manifest.commit(Entry("query", number, COLUMNS, files)):
        return True
    place.remove(manifest.unnamed(file.path for file in files))
    return False


def _count_changes(kill_at: int) -> Callable[[], int]:
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call

    for name in ("put", "create", "remove"):
        setattr(ObjectStore, name, counted(getattr(ObjectStore, name)))
    return lambda: count


if __name__ == "__main__":
    changes = _count_changes(int(sys.argv[2]))
    if sys.argv[3] == "write":
        write(sys.argv[1], 3)
    else:
        list(Archive(sys.argv[1]).compact())
    print(changes())
