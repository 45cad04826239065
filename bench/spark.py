"""Spark reading and writing topics, against what it does without Penstock: Parquet, its rate source, plain Python.

One broker and one Spark, with as many tasks at a time as there are cores; all of them share these cores. Every message
has a key of its own device, a subject below the topic, and 100 bytes that no other message has.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench import clients, peers
from bench.data import TIMESTAMP, VALUE_BYTES, make_values
from bench.measure import Bench, Line, repeat
from bench.peers import Peer
from penstock.client.sync import Client
from penstock.spark import options, session
from penstock.spark.row import COLUMNS

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

TOPIC: Final = "readings"
_SUBJECT: Final = "readings.meter"
PARTITIONS: Final = 2
_DEVICES: Final = 10_000
_NUMBER_BYTES: Final = 12

# What Spark calls a type where it has no session that could read it.
_SPARKS: Final = {"string": "string", "int": "integer", "bigint": "long", "timestamp": "timestamp", "binary": "binary"}

# Of messages that a stream is fed with, and how often.
_FEED_RATE: Final = 1000
_FEED_PAUSE_S: Final = 0.02
# Batches of a query that are not counted: its first ones are planned, compiled and loaded.
_WARM_BATCHES: Final = 3
_BATCH_S_MAX: Final = 60.0

# Messages of which filling makes two batches, one for each partition, each of the size a producer gives them; and
# those that are committed at once.
_CHUNK: Final = 4_000
_TRANSACTION: Final = 500_000


def measure_read(bench: Bench) -> Iterator[Line]:
    """Batches: every column of every message, counted, and handed to a sink that drops them."""
    messages, few = bench.choose(5_000_000, 4_000), bench.choose(500_000, 2_000)
    rounds = bench.choose(3, 1)
    with peers.penstock(bench.directory / "penstock", "fsync") as server, start(bench) as spark:
        bench.progress("Spark reads a topic: fill it")
        fill(server, messages)
        topic = read(spark, server)
        path = str(bench.directory / "parquet")
        topic.write.parquet(path)
        parquet, tuples = spark.read.parquet(path), spark.read.format("tuples").option("rows", few).load()
        memory = spark.read.format("batches").option("rows", messages).load()
        for how, run in (("count", count_columns), ("noop sink", _drop)):
            what = f"Spark, 100 B, {how}"
            for against, rows, other, target in (
                ("Parquet, the same columns, vectorised", messages, parquet, 0.6),
                ("a Python source of Arrow batches in memory", messages, memory, 0.8),
                ("a Python source that yields tuples", few, tuples, 5),
            ):
                ours, theirs = partial(run, topic, messages), partial(run, other, rows)
                our_seconds, their_seconds = bench.processor(what, repeat(ours), repeat(theirs), rounds)
                yield Line(
                    section="spark read",
                    what=what,
                    against=against,
                    unit="rows/s",
                    penstock=messages / our_seconds,
                    limit=rows / their_seconds,
                    ratio_of="speed",
                    target=target,
                )


def count_columns(rows: DataFrame, expected: int) -> None:
    """Count what every column holds, so that all of them are read: of Parquet, a mere count reads none."""
    from pyspark.sql.functions import count

    found = rows.agg(*(count(name) for name in COLUMNS)).collect()
    assert [*found[0]] == [expected] * len(COLUMNS), found


def _drop(rows: DataFrame, _: int) -> None:
    rows.write.format("noop").mode("append").save()


def measure_fetch(bench: Bench) -> Iterator[Line]:
    """What a task spends on fetching and on Arrow, without Spark: time of the processor, not of the clock."""
    messages, rounds = bench.choose(5_000_000, 4_000), bench.choose(5, 1)
    with peers.penstock(bench.directory / "penstock", "fsync") as server:
        bench.progress("a task of Spark: fill a topic")
        stored = fill(server, messages)
        with clients._loopback(stored) as receive:
            for which, columns, target in (
                ("all columns", tuple(COLUMNS), 0.3),
                ("value only", ("value",), 0.1),
            ):
                what = f"Spark's task, 100 B, {which}"
                ours = _spent(partial(_take, server, columns, messages))
                our_seconds, their_seconds = bench.processor(what, ours, _spent(receive), rounds)
                yield Line(
                    section="spark fetch",
                    what=what,
                    against="loopback TCP, nothing done with it",
                    unit="µs/row",
                    penstock=our_seconds / messages * 1e6,
                    limit=their_seconds / messages * 1e6,
                    ratio_of="time",
                    target=target,
                    target_of="figure",
                )
        options.broker(_servers(server)).connect().close()


def _take(server: Peer, columns: Sequence[str], expected: int) -> None:
    from pyspark.sql.types import StructType

    from penstock.spark.source import BatchReader

    given = options.read(_servers(server) | {"subscribe": TOPIC}, is_stream=False)
    schema = StructType()
    for name in columns:
        schema.add(name, _SPARKS[COLUMNS[name]])
    reader = BatchReader(given, schema)
    rows = sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))
    assert rows == expected, rows


def _spent(work: Callable[[], object]) -> Callable[[], float]:
    """A round whose seconds are those of the processor, in all threads of this process."""

    def run() -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    return run


def measure_write(bench: Bench) -> Iterator[Line]:
    """A batch write: staged, committed, and on the disk when it returns."""
    what, rows = "Spark writes, 100 B, fsync", bench.choose(2_000_000, 2_000)
    with peers.penstock(bench.directory / "penstock", "fsync") as server, start(bench) as spark:
        path = str(bench.directory / "parquet")
        value = f"cast(lpad(cast(id as string), {VALUE_BYTES}, '.') as binary) as value"
        key = f"cast(concat('meter-', id % {_DEVICES}) as binary) as key"
        spark.range(0, rows, numPartitions=PARTITIONS).selectExpr(key, value).write.parquet(path)
        frame = spark.read.parquet(path)
        our_seconds, their_seconds = bench.disk(
            what, _append(frame, server, rows), repeat(lambda: _write(frame, "nowhere")), bench.choose(5, 1)
        )
    yield Line(
        section="spark write",
        what=what,
        against="a Python sink that drops rows",
        unit="rows/s",
        penstock=rows / our_seconds,
        limit=rows / their_seconds,
        ratio_of="speed",
        target=500_000,
        target_of="figure",
    )


def _append(frame: DataFrame, server: Peer, rows: int) -> Callable[[], float]:
    def run() -> float:
        with Client(_address(server)) as client:
            client.create_topic(TOPIC, partitions=PARTITIONS)
            begun = time.perf_counter()
            _write(frame, "penstock", **_servers(server), topic=TOPIC)
            seconds = time.perf_counter() - begun
            assert sum(each.end for each in client.topic(TOPIC).positions) == rows
            client.delete_topic(TOPIC)
            return seconds

    return run


def measure_archive(bench: Bench) -> Iterator[Line]:
    """An archive of a topic, as a pipeline writes it, against the same rows from Parquet to Parquet."""
    rows, rounds = bench.choose(1_000_000, 2_000), bench.choose(3, 1)
    for which, headers in (("without headers", False), ("with three headers", True)):
        what = f"Spark, archive, 100 B, {which}"
        own = bench.directory / which.replace(" ", "-")
        with peers.penstock(own, "fsync") as server, start(bench) as spark:
            bench.progress(f"{what}: fill a topic")
            fill(server, rows, headers=headers)
            path = str(own / "parquet")
            read(spark, server, includeHeaders="true").write.parquet(path)
            ours, theirs = _archive(spark, server, own, rows), _copy(spark.read.parquet(path), own)
            our_seconds, their_seconds = bench.disk(what, ours, theirs, rounds)
        yield Line(
            section="spark archive",
            what=what,
            against="the same rows, Parquet to Parquet",
            unit="s",
            penstock=our_seconds,
            limit=their_seconds,
            ratio_of="time",
            target=1.5,
        )


def _archive(spark: SparkSession, server: Peer, directory: Path, rows: int) -> Callable[[], float]:
    def run() -> float:
        place = directory / f"archive-{uuid.uuid4().hex}"
        given = {"subscribe": TOPIC, "startingOffsets": "earliest", "includeHeaders": "true"} | _servers(server)
        source = spark.readStream.format("penstock").options(**given).load()
        begun = time.perf_counter()
        writer = source.writeStream.format("penstock").options(archive=str(place), checkpointLocation=f"{place}-at")
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        seconds = time.perf_counter() - begun
        assert sum(each.numInputRows for each in query.recentProgress) == rows
        shutil.rmtree(place)
        return seconds

    return run


def _copy(frame: DataFrame, directory: Path) -> Callable[[], float]:
    def run() -> float:
        place = directory / f"copy-{uuid.uuid4().hex}"
        begun = time.perf_counter()
        frame.write.parquet(str(place))
        seconds = time.perf_counter() - begun
        shutil.rmtree(place)
        return seconds

    return run


def _write(frame: DataFrame, kind: str, **given: str) -> None:
    frame.write.format(kind).mode("append").options(**given).save()


def measure_trigger(bench: Bench) -> Iterator[Line]:
    """Topic to topic, a small batch every second: how long Spark takes for one.

    The second line is what Spark itself needs for a source in Python.
    """
    what, rounds, batches = "Spark, topic to topic, p50", bench.choose(3, 1), bench.choose(12, 1)
    warm = bench.choose(_WARM_BATCHES, 0)
    ours, theirs, memory = list[float](), list[float](), list[float]()
    with (
        peers.penstock(bench.directory / "penstock", "fsync") as server,
        start(bench) as spark,
        _feed(server),
    ):
        for number in range(rounds):
            bench.progress(what)
            path = bench.directory / f"checkpoint-{number}"
            source = spark.readStream.format("penstock").options(subscribe=TOPIC, **_servers(server)).load()
            copies = source.select("key", "value")
            ours += _run(copies, "penstock", f"{path}-ours", warm, batches, topic="copies", **_servers(server))
            source = spark.readStream.format("rate").option("rowsPerSecond", _FEED_RATE).load()
            theirs += _run(source, "nowhere", f"{path}-theirs", warm, batches)
            source = spark.readStream.format("batches").option("rows", _FEED_RATE).load().select("key", "value")
            memory += _run(source, "nowhere", f"{path}-memory", warm, batches)
    for against, other in (
        ("rate source to a Python sink that drops rows", theirs),
        ("Python source of rows in memory to such a sink", memory),
    ):
        yield Line(
            section="spark trigger",
            what=what,
            against=against,
            unit="ms",
            penstock=statistics.median(ours),
            limit=statistics.median(other),
            ratio_of="time",
            target=1.15,
        )


def _run(rows: DataFrame, kind: str, checkpoint: str, warm: int, batches: int, **given: str) -> list[float]:
    """Return the milliseconds of each batch that has rows, but for the `warm` first ones."""
    writer = rows.writeStream.format(kind).options(checkpointLocation=checkpoint, **given)
    query = writer.trigger(processingTime="1 second").start()
    try:
        while len(found := _durations(query)) < warm + batches:
            _wait_for_batch(query)
    finally:
        query.stop()
    return found[warm:]


def _durations(query: StreamingQuery) -> list[float]:
    return [each.durationMs["triggerExecution"] for each in query.recentProgress if each.numInputRows]


def _wait_for_batch(query: StreamingQuery) -> None:
    before, until = query.lastProgress, time.monotonic() + _BATCH_S_MAX
    while query.lastProgress == before:
        if not query.isActive or time.monotonic() > until:
            raise RuntimeError(f"the query came to nothing: {query.exception() or query.status}")
        time.sleep(0.05)


@contextmanager
def _feed(server: Peer) -> Iterator[None]:
    """A few messages at a time, until it is left."""
    is_left = threading.Event()

    def publish() -> None:
        with Client(_address(server)) as client, client.producer() as producer:
            number = 0
            while not is_left.wait(_FEED_PAUSE_S):
                for _ in range(round(_FEED_RATE * _FEED_PAUSE_S)):
                    producer.publish(TOPIC, b"%0*d" % (VALUE_BYTES, number), key=b"meter-%d" % (number % _DEVICES))
                    number += 1

    with Client(_address(server)) as client:
        for name in (TOPIC, "copies"):
            client.create_topic(name, partitions=PARTITIONS)
    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        is_left.set()
        thread.join()


# What the sections share.


@contextmanager
def start(bench: Bench) -> Iterator[SparkSession]:
    """A session. Its JVM stays when it is left, and the next one is soon there."""
    from bench.naive import Batches, Nowhere, Tuples

    bench.progress("start Spark")
    local = bench.directory / "spark"
    config = {
        "spark.local.dir": str(local),
        "spark.sql.warehouse.dir": str(local / "warehouse"),
        "spark.log.level": "ERROR",
    }
    spark = session("bench", config=config)
    try:
        for source in (Batches, Nowhere, Tuples):
            spark.dataSource.register(source)
        yield spark
    finally:
        spark.stop()


def fill(server: Peer, messages: int, tell: Callable[[int], None] = lambda _: None, *, headers: bool = False) -> int:
    """Make the topic; how many bytes its messages take.

    Its batches are like those of a producer, but made of whole columns: a producer takes minutes.
    """
    from penstock.spark.outgoing import Router

    with Client(_address(server)) as client:
        client.create_topic(TOPIC, partitions=PARTITIONS)
        router = Router(client.resolve)
        for number, begin in enumerate(range(0, messages, _TRANSACTION)):
            stage, end = client.stage("fill", number), min(begin + _TRANSACTION, messages)
            for first in range(begin, end, _CHUNK):
                rows = _make_rows(first, min(first + _CHUNK, end), headers=headers)
                for topic, partition, batch in router.parts(rows, timestamp=TIMESTAMP + first):
                    stage.append(topic, partition, batch)
            client.commit_transaction("fill", number, stage.close())
            tell(end)
        return sum(position.bytes for position in client.topic(TOPIC).positions)


def _make_rows(first: int, end: int, *, headers: bool) -> pyarrow.RecordBatch:
    import pyarrow
    from pyarrow import compute

    numbers = pyarrow.array(range(first, end))
    names = compute.utf8_lpad(numbers.cast(pyarrow.string()), _NUMBER_BYTES, "0")
    tails, keys = _distinct()
    columns = {
        "value": compute.binary_join_element_wise(names.cast(pyarrow.binary()), _repeated(tails, numbers), b""),
        "key": _repeated(keys, numbers),
        "subject": pyarrow.repeat(_SUBJECT, len(numbers)),
    }
    if headers:
        columns["headers"] = _make_headers(names)
    return pyarrow.RecordBatch.from_pydict(columns)


def _make_headers(names: pyarrow.Array) -> pyarrow.Array:
    """Three headers for each message, one of them with a value of its own."""
    import pyarrow

    values = [text for name in names.to_pylist() for text in (f"{name:0>32}", "application/json", "meter")]
    edges = pyarrow.array(range(0, len(values) + 1, 3), pyarrow.int32())
    titles = pyarrow.array(["Trace-Id", "Content-Type", "Source"] * len(names))
    return pyarrow.MapArray.from_arrays(edges, titles, pyarrow.array(values))


@cache
def _distinct() -> tuple[pyarrow.Array, pyarrow.Array]:
    import pyarrow

    tails = [value[_NUMBER_BYTES:] for value in make_values()]
    return pyarrow.array(tails), pyarrow.array([b"meter-%d" % number for number in range(_DEVICES)])


def _repeated(items: pyarrow.Array, numbers: pyarrow.Array) -> pyarrow.Array:
    """For each number its item, if they are counted again and again."""
    from pyarrow import compute

    whole = compute.multiply(compute.divide(numbers, len(items)), len(items))
    return items.take(compute.subtract(numbers, whole))


def read(spark: SparkSession, server: Peer, **given: str) -> DataFrame:
    """The topic, or what the options say of it."""
    return spark.read.format("penstock").options(subscribe=TOPIC, **_servers(server), **given).load()


def _servers(server: Peer) -> dict[str, str]:
    return {"servers": _address(server)}


def _address(server: Peer) -> str:
    return f"127.0.0.1:{server.port}"
