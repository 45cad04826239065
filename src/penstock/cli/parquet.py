"""Write messages to a Parquet file through Arrow, without a Python object per message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError

try:
    import pyarrow
    import pyarrow.compute
    from pyarrow import parquet
except ImportError:
    raise PenstockError("Parquet needs pyarrow: pip install 'penstock[arrow]'") from None

from penstock.model import arrow
from penstock.topic_schema.flatten import Flattener

if TYPE_CHECKING:
    from penstock.cli.fetch import Span
    from penstock.client.sync import Client

# The columns of a log, plus the partition, with subjects as text.
SCHEMA: Final = pyarrow.schema({"partition": pyarrow.int32()} | arrow.TYPES | {"subject": pyarrow.string()})
# Limits of a row group. Readers skip or read a whole one, so it should be neither tiny nor the whole file.
GROUP_ROWS: Final = 128 << 10
GROUP_BYTES: Final = 64 << 20


def write(
    client: Client,
    topic: str,
    spans: Sequence[Span],
    count: int | None,
    path: Path,
    advance: Callable[[int], None],
    *,
    expired: bool,
    ddl: str | None = None,
) -> int:
    """Write the messages; return how many. With a schema, the fields of their values are columns, too."""
    flattener = None if ddl is None else Flattener(ddl, SCHEMA.names)
    schema = SCHEMA if flattener is None else pyarrow.schema([*SCHEMA, *flattener.schema])
    written = 0
    with parquet.ParquetWriter(path, schema) as writer:
        groups = _Groups(writer, schema)
        for span in spans:
            left = None if count is None else count - written
            if span.length and left != 0:
                batches = client.fetch(
                    topic, span.partition, span.first, end=span.end, count=left, arrow=True, expired=expired
                )
                for batch in batches:
                    rows = _rows(batch, topic, span.partition)
                    groups.add(rows if flattener is None else flattener.add_to(rows))
                    written += batch.num_rows
                    advance(batch.num_rows)
        groups.close()
    return written


class _Groups:
    """Combine batches, which may be small, into row groups."""

    def __init__(self, writer: Any, schema: pyarrow.Schema) -> None:
        self._writer = writer
        self._schema = schema
        self._batches: list[Any] = []
        self._rows = self._bytes = 0

    def add(self, batch: Any) -> None:
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self.close()

    def close(self) -> None:
        """Write the last row group."""
        if self._batches:
            self._writer.write_table(pyarrow.Table.from_batches(self._batches, self._schema), row_group_size=GROUP_ROWS)
        self._batches = []
        self._rows = self._bytes = 0


def _rows(batch: Any, topic: str, partition: int) -> Any:
    """Add the partition; a message without a subject gets the topic's name."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["partition"] = pyarrow.repeat(pyarrow.scalar(partition, pyarrow.int32()), batch.num_rows)
    columns["subject"] = pyarrow.compute.fill_null(columns["subject"].cast(pyarrow.string()), topic)
    return pyarrow.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)
