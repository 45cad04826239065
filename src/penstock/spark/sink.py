"""The sink: what a Spark job writes is stored in the log exactly once, whatever is done twice on the way.

Each task stages its rows: they are on the broker's disk, and nobody reads them. When all tasks are done, the driver
commits what they staged as one transaction. What a task staged that failed, or was done twice, is never named and is
forgotten. The transaction has a name and a number, and the broker remembers the last number of a name:

    a stream        the query's id, the number of the micro-batch
    a batch write   txnId (and topic), txnVersion; without them a name that nobody has had before

So a driver that is started again and does not know whether its last batch was stored does it once more, and the broker
stores it once. Such a query goes on from its checkpoint: one whose checkpoint is gone is another query.
"""

# The names of arguments are Spark's.
# ruff: noqa: N803

from __future__ import annotations

import difflib
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
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

from penstock.batch import Compression
from penstock.client.sync import Client
from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.spark import connection, options
from penstock.spark.outgoing import Router
from penstock.subject import is_subject

OPTIONS: Final = (*options.CONNECTION, "topic", "txnId", "txnVersion", "compression")

# The rows of a task are gathered to about so much before they are shared out to partitions: Spark hands over ten
# thousand at a time, and a batch lives long.
GATHER_BYTES: Final = 4 << 20

_logger: Final = logging.getLogger(__name__)


def writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """For `df.write.format("penstock").mode("append")`."""
    if overwrite:
        raise ValueError("a topic is only ever appended to: write with .mode('append')")
    target = _read(given, schema)
    name, version = options.text(given, "txnId"), options.number(given, "txnVersion", least=0)
    if name is None:
        if version is not None:
            raise ValueError("txnVersion is the number of a transaction: give it a name with txnId")
        return _Writer(target, f"spark:{uuid.uuid4()}", 0, is_named=False)
    # Two writes of one job, to two topics, are two transactions. No topic has a blank in its name.
    return _Writer(target, f"spark:{name} {target.topic or ''}", version or 0, is_named=True)


def stream_writer(given: Mapping[str, str], schema: StructType) -> DataSourceStreamArrowWriter:
    """For `df.writeStream.format("penstock")`."""
    for name in ("txnId", "txnVersion"):
        if name.lower() in given:
            raise ValueError(f"{name} is for batch writes: a stream has the id and the number of its own, leave it out")
    return _StreamWriter(_read(given, schema))


@dataclass(frozen=True, slots=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver: where its rows are staged, and how many they are."""

    name: str
    number: int
    offsets: Sequence[int]
    rows: int


@dataclass(frozen=True, slots=True)
class _Target:
    broker: options.BrokerOptions
    topic: str | None
    compression: Compression

    def client(self) -> Client:
        broker = self.broker
        return connection.client(
            broker.servers, broker.timeout_s, user=broker.user, password=broker.password, token=broker.token
        )

    def stage(self, name: str, number: int, batches: Iterator[pyarrow.RecordBatch], turn: int) -> Staged:
        """Store the rows of a task where nobody reads them yet."""
        client, clock = self.client(), SystemClock()
        stage = client.stage(name, number)
        router = Router(client.resolve, topic=self.topic, compression=self.compression, turn=turn)
        rows = 0
        for gathered in _gather(batches):
            for topic, partition, batch in router.parts(gathered, timestamp=clock.now_us()):
                stage.append(topic, partition, batch)
            rows += gathered.num_rows
            if stage.is_done:
                # It was committed by the driver before this one: nothing is to be done any more.
                break
        return Staged(name, number, stage.close(), rows)

    def commit(self, messages: Iterable[WriterCommitMessage | None], *, once: bool = False) -> None:
        """Let readers have what the tasks staged."""
        staged = [message for message in messages if isinstance(message, Staged)]
        offsets = [offset for message in staged for offset in message.offsets]
        if not offsets:
            return
        name, number = staged[0].name, staged[0].number
        assert all((each.name, each.number) == (name, number) for each in staged), "of one batch"
        if not self.client().commit_transaction(name, number, offsets, once=once):
            _logger.info("batch %d of %s had been stored before", number, name)

    def abort(self, name: str, number: int) -> None:
        """Forget what the tasks staged. If that fails the broker forgets it by itself, only later: an error here would
        stand before the user in place of the one that made the job fail."""
        try:
            self.client().abort_transaction(name, number)
        except PenstockError as error:
            _logger.warning("what was staged for batch %d of %s is not forgotten yet: %s", number, name, error)


class _Writer(DataSourceArrowWriter):
    def __init__(self, target: _Target, name: str, number: int, *, is_named: bool) -> None:
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


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, target: _Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
        task = _task()
        query, batch = task.getLocalProperty("sql.streaming.queryId"), task.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            raise RuntimeError("this Spark does not say which batch of which query a task belongs to: use PySpark 4.3")
        return self._target.stage(f"spark:{query}", int(batch), iterator, task.partitionId() + int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._target.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        # If no task came to tell the query's id, the next batch that is committed under it does the same.
        for name in {message.name for message in messages if isinstance(message, Staged)}:
            self._target.abort(name, batchId)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "rows are written by tasks"
    return task


def _gather(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """The same rows in fewer record batches."""
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
    # Still several, if one could not hold them.
    joined: list[pyarrow.RecordBatch] = pyarrow.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


# What is checked before a task runs.

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


def _read(given: Mapping[str, str], schema: StructType) -> _Target:
    options.check_known(given, OPTIONS)
    compression = options.choice(given, "compression", tuple(each.name.lower() for each in Compression))
    topic = options.text(given, "topic")
    if topic is not None and not is_subject(topic.encode()):
        raise ValueError(f"topic is {topic!r}: it must be tokens with dots between them, such as orders.eu")
    _check_columns(schema)
    if topic is None and not {"subject", "topic"} & set(schema.names):
        raise ValueError("nothing says where the rows go: give the option topic, or a column topic or subject")
    return _Target(options.broker(given), topic, Compression[compression.upper()])


def _check_columns(schema: StructType) -> None:
    for column in schema.fields:
        if column.name not in _COLUMNS:
            raise ValueError(_unknown(column.name))
        kinds, written = _COLUMNS[column.name]
        if not isinstance(column.dataType, kinds) or not _is_text_map(column.dataType):
            found = column.dataType.simpleString()
            raise ValueError(f"column {column.name} is {found}: it must be {written}")
    if "value" not in schema.names:
        raise ValueError("there is no column value: select one, such as to_json(struct('*')).alias('value')")


def _is_text_map(kind: Any) -> bool:
    """Whether it is a map of texts, or no map at all."""
    if not isinstance(kind, MapType):
        return True
    return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), _COLUMNS, 1)
    hint = (
        f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(_COLUMNS)}; select those to be written"
    )
    return f"a message has no column {name!r}: {hint}"
