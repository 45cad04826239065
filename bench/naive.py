"""What Spark is compared with: Python data sources that have nothing of Penstock in them, and do next to nothing.

`tuples` is a source as the first page of any tutorial writes it: it yields a tuple for each row. `batches` yields the
same Arrow batch from memory again and again. `nowhere` is a sink that takes Arrow batches and drops them.
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
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

from bench.data import make_values
from penstock.spark import columns
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


class Batches(DataSource):
    """As many rows as the option `rows` says, in Arrow batches that each task made before: what no source exceeds."""

    @classmethod
    def name(cls) -> str:
        return "batches"

    def schema(self) -> str:
        return ddl(has_headers=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _BatchReader(int(self.options["rows"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _StreamReader(int(self.options["rows"]))


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


class _StreamReader(DataSourceStreamReader):
    """Has so many new rows each time that it is asked."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._end = 0

    def initialOffset(self) -> dict[str, int]:
        return {"end": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
        self._end += self._rows
        return {"end": self._end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        rows = end["end"] - start["end"]
        return [_Part(number, rows // _TASKS) for number in range(_TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return _BatchReader(0).read(partition)


class _BatchReader(_Reader):
    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        assert isinstance(partition, _Part)
        count, first = min(columns.ROWS, max(1, partition.rows)), 0
        values = make_values()
        fields = {
            "topic": pyarrow.repeat("readings", count),
            "partition": pyarrow.repeat(pyarrow.scalar(partition.number, pyarrow.int32()), count),
            "offset": pyarrow.array(range(count), pyarrow.int64()),
            "timestamp": pyarrow.array(range(count), pyarrow.int64()).cast(columns.TYPES["timestamp"]),
            "key": pyarrow.array([b"meter-%d" % (number % 10_000) for number in range(count)]),
            "value": pyarrow.array([values[number % len(values)] for number in range(count)]),
            "subject": pyarrow.repeat("readings.meter", count),
        }
        whole = pyarrow.RecordBatch.from_pydict(fields)
        while first < partition.rows:
            yield whole.slice(0, min(count, partition.rows - first))
            first += count


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
