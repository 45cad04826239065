"""A directory of Parquet files that every program may read as a whole: no manifest says which of them count.

A batch is one file, which appears complete, in one rename. Its name has the query and the number of the batch:

    <name>-<query>-<number>.parquet      orders-1f0c7a2e-000000012.parquet

So a batch that is repeated, because the run was killed before Spark knew that it was stored, finds its file and adds
nothing. Names of temporary files begin with a dot, which readers ignore.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow
from pyarrow import parquet

from penstock.spark.durable_files import sync_directory


class ParquetDirectory:
    def __init__(self, path: str, name: str) -> None:
        """`name` distinguishes the files of several writers."""
        self._path = Path(path)
        self._name = name

    def has(self, query: str, number: int) -> bool:
        """Return whether a batch has a file. One without rows never has."""
        return self._file(query, number).exists()

    def add(self, rows: pyarrow.Table, query: str, number: int) -> None:
        """Write a batch to a durable file."""
        self._path.mkdir(parents=True, exist_ok=True)
        file = self._file(query, number)
        aside = file.with_name(f".{file.name}.new")
        with open(aside, "wb") as stream:
            parquet.write_table(rows, stream, compression="zstd", write_page_checksum=True)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
        sync_directory(self._path)

    def unknown(self, batches: Mapping[str, int]) -> str | None:
        """Return the name of a file of this writer that is not of these queries, up to these batches; None if there
        is none."""
        pattern = re.compile(rf"{re.escape(self._name)}-([0-9a-f]{{8}})-(\d{{9,}})\.parquet")
        known = {query[:8]: number for query, number in batches.items()}
        for path in sorted(self._path.glob("*.parquet")):
            found = pattern.fullmatch(path.name)
            if found is not None and int(found[2]) > known.get(found[1], -1):
                return path.name
        return None

    def _file(self, query: str, number: int) -> Path:
        return self._path / f"{self._name}-{query[:8]}-{number:09}.parquet"
