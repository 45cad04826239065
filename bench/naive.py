"""What Spark is compared with: Python data sources that have nothing of Penstock in them, and do next to nothing.

`tuples` is a source as the first page of any tutorial writes it: it yields a tuple for each row. `nowhere` is a sink
that takes Arrow batches and drops them.
"""

# The names of methods and arguments are Spark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)

from bench.data import make_values
from penstock.spark.row import ddl

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

_TASKS: Final = 2


class Tuples(DataSource):
    """As many rows as the option `rows` says, with the columns of a topic."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def schema(self) -> str:
        return ddl(has_headers=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(int(self.options["rows"]))


class Nowhere(DataSource):
    @classmethod
    def name(cls) -> str:
        return "nowhere"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _Writer()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _StreamWriter()


@dataclass(frozen=True)
class _Part(InputPartition):
    number: int
    rows: int


class _Reader(DataSourceReader):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        return [_Part(number, self._rows // _TASKS) for number in range(_TASKS)]

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        assert isinstance(partition, _Part)
        values, time = make_values(), datetime.now(UTC)
        # They need not even be fetched.
        for offset in range(partition.rows):
            yield "rows", partition.number, offset, time, b"key", values[offset % len(values)], "rows"


class _Writer(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return _drop(iterator)


class _StreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return _drop(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass


def _drop(batches: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
    for _ in batches:
        pass
    return WriterCommitMessage()
