"""The sink: the rows of a Spark job are stored in the log exactly once, even if tasks or batches are repeated.

Each task stages its rows: they are on the broker's disk, but not readable. When all tasks are done, the driver commits
what they staged as one transaction. Rows staged by a failed or repeated task are never committed, and are dropped. A
transaction has a name and a number, and the broker remembers the last number of each name:

    a stream        the ID of the query, the number of the micro-batch
    a batch write   txnId (and topic), txnVersion; by default a unique name

So a driver that restarts, and does not know whether its last batch was stored, repeats the batch, and the broker stores
it once. This needs the checkpoint of the query: without it, it is a new query.
"""

# Argument names are Spark's.
# ruff: noqa: N803

from __future__ import annotations

import difflib
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.model.batch import Compression
from penstock.model.subject import is_subject
from penstock.spark import options
from penstock.spark.versions import StreamArrowWriter

if TYPE_CHECKING:
    import pyarrow

OPTIONS: Final = (*options.CONNECTION, "topic", "txnId", "txnVersion", "compression")

# Rows of a task are gathered to about this size before they are split by partition: Spark passes ten thousand at a
# time, and stored batches should be large.
GATHER_BYTES: Final = 4 << 20

_logger: Final = logging.getLogger(__name__)


def writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """Return the writer for `df.write.format("penstock").mode("append")`."""
    if overwrite:
        raise ValueError("a topic can only be appended to: write with .mode('append')")
    target = _read(given, schema)
    name, version = options.text(given, "txnId"), options.number(given, "txnVersion", least=0)
    if name is None:
        if version is not None:
            raise ValueError("txnVersion needs txnId: it is the number of a transaction with that name")
        return _TopicWriter(target, f"spark:{uuid.uuid4()}", 0, is_named=False)
    # Writes of one job to two topics are two transactions. Topic names have no blanks.
    return _TopicWriter(target, f"spark:{name} {target.topic or ''}", version or 0, is_named=True)


def stream_writer(given: Mapping[str, str], schema: StructType) -> StreamArrowWriter:
    """Return the writer for `df.writeStream.format("penstock")`."""
    for name in ("txnId", "txnVersion"):
        if name.lower() in given:
            raise ValueError(f"{name} is only for batch writes: a stream uses its query ID and batch number")
    return _TopicStreamWriter(_read(given, schema))


@dataclass(frozen=True, slots=True)
class Staged(WriterCommitMessage):
    """A task's message to the driver: where its rows are staged, and how many they are."""

    name: str
    number: int
    offsets: Sequence[int]
    rows: int


@dataclass(frozen=True, slots=True)
class _TopicTarget:
    broker: options.BrokerOptions
    topic: str | None
    compression: Compression

    def stage(self, name: str, number: int, batches: Iterator[pyarrow.RecordBatch], turn: int) -> Staged:
        """Store the rows of a task without making them readable."""
        from penstock.spark.outgoing import Router

        client, clock = self.broker.connect(), SystemClock()
        stage = client.stage(name, number)
        router = Router(client.resolve, topic=self.topic, compression=self.compression, turn=turn)
        rows = 0
        for gathered in _gather(batches):
            for topic, partition, batch in router.parts(gathered, timestamp=clock.now_us()):
                stage.append(topic, partition, batch)
            rows += gathered.num_rows
            if stage.is_done:
                # An earlier driver has committed this transaction already.
                break
        return Staged(name, number, stage.close(), rows)

    def commit(self, messages: Iterable[WriterCommitMessage | None], *, once: bool = False) -> None:
        """Make the staged rows readable, in one transaction."""
        staged = [message for message in messages if isinstance(message, Staged)]
        offsets = [offset for message in staged for offset in message.offsets]
        if not offsets:
            return
        name, number = staged[0].name, staged[0].number
        assert all((each.name, each.number) == (name, number) for each in staged), "all tasks belong to one batch"
        if not self.broker.connect().commit_transaction(name, number, offsets, once=once):
            _logger.info("batch %d of %s was stored before", number, name)

    def abort(self, name: str, number: int) -> None:
        """Drop the staged rows. A failure is only logged: the broker drops them later by itself, and an error here
        would hide the one that made the job fail."""
        try:
            self.broker.connect().abort_transaction(name, number)
        except PenstockError as error:
            _logger.warning("rows staged for batch %d of %s are not dropped yet: %s", number, name, error)


class _TopicWriter(DataSourceArrowWriter):
    def __init__(self, target: _TopicTarget, name: str, number: int, *, is_named: bool) -> None:
        self._target = target
        self._name = name
        self._number = number
        self._is_named = is_named

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
        return self._target.stage(self._name, self._number, iterator, _task().partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._target.commit(messages, once=not self._is_named)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._target.abort(self._name, self._number)


class _TopicStreamWriter(StreamArrowWriter):
    def __init__(self, target: _TopicTarget) -> None:
        self._target = target

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
        task = _task()
        query, batch = task.getLocalProperty("sql.streaming.queryId"), task.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            raise RuntimeError("Spark did not pass the query and batch of this task: use PySpark 4.0 or newer")
        return self._target.stage(f"spark:{query}", int(batch), iterator, task.partitionId() + int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._target.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        # If no task reported the query ID, the next batch that is committed under it drops the rows.
        for name in {message.name for message in messages if isinstance(message, Staged)}:
            self._target.abort(name, batchId)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "rows are only written by tasks"
    return task


def _gather(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the same rows in fewer record batches."""
    gathered: list[pyarrow.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= GATHER_BYTES:
            yield from _joined(gathered)
            gathered, size = [], 0
    yield from _joined(gathered)


def _joined(batches: Sequence[pyarrow.RecordBatch]) -> Sequence[pyarrow.RecordBatch]:
    if len(batches) < 2:
        return batches
    import pyarrow

    # Several, if one cannot hold them all.
    joined: list[pyarrow.RecordBatch] = pyarrow.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


# Checks before any task runs.

_BYTES: Final = (BinaryType, StringType)
_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
# column -> the types it may have, and how users write them
_COLUMNS: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "value": (_BYTES, "binary or string"),
    "key": (_BYTES, "binary or string"),
    "subject": ((StringType,), "string"),
    "topic": ((StringType,), "string"),
    "headers": ((MapType,), "map<string,string>"),
    "partition": (_WHOLE, "int"),
}


def _read(given: Mapping[str, str], schema: StructType) -> _TopicTarget:
    options.check_known(given, OPTIONS)
    compression = options.choice(given, "compression", tuple(each.name.lower() for each in Compression))
    topic = options.text(given, "topic")
    if topic is not None and not is_subject(topic.encode()):
        raise ValueError(f"invalid topic {topic!r}: it must be tokens separated by dots, such as orders.eu")
    _check_columns(schema)
    if topic is None and not {"subject", "topic"} & set(schema.names):
        raise ValueError("the rows have no destination: set the option topic, or add a column topic or subject")
    return _TopicTarget(options.broker(given), topic, Compression[compression.upper()])


def _check_columns(schema: StructType) -> None:
    for column in schema.fields:
        if column.name not in _COLUMNS:
            raise ValueError(_unknown(column.name))
        kinds, written = _COLUMNS[column.name]
        if not isinstance(column.dataType, kinds) or not _is_text_map(column.dataType):
            found = column.dataType.simpleString()
            raise ValueError(f"column {column.name} is {found}: it must be {written}")
    if "value" not in schema.names:
        raise ValueError("missing column value: select one, such as to_json(struct('*')).alias('value')")


def _is_text_map(kind: Any) -> bool:
    """Whether a type is a map of strings to strings, or not a map."""
    if not isinstance(kind, MapType):
        return True
    return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), _COLUMNS, 1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(_COLUMNS)}; select only these"
    return f"a message has no column {name!r}: {hint}"
