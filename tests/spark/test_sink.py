"""What Spark writes is in the log once, whoever fails on the way. What cannot be written is refused in a sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from penstock.client.partitioner import Layout
from penstock.pipelines import failure
from penstock.spark import sink
from tests.conftest import SparkBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# PySpark parses schemas in the JVM of a session.
pytestmark = pytest.mark.usefixtures("spark")

# Only a test that fails waits so long.
PATIENCE_S = 240


class Stored(NamedTuple):
    key: bytes | None
    subject: str
    value: bytes
    headers: bytes | None
    is_tombstone: bool


def read(broker: SparkBroker, topic: str) -> list[tuple[int, Stored]]:
    """What a topic holds, each with its partition."""
    found = []
    for partition in range(broker.topic(topic).partitions):
        for batch in broker.fetch(topic, partition, arrow=True):
            for row in batch.to_pylist():
                subject = (row["subject"] or topic.encode()).decode()
                found.append((partition, Stored(row["key"], subject, row["value"], row["headers"], row["tombstone"])))
    return found


def messages(broker: SparkBroker, *topics: str) -> list[Stored]:
    return sorted((message for topic in topics for _, message in read(broker, topic)), key=repr)


def values(broker: SparkBroker, topic: str) -> list[str]:
    return sorted(message.value.decode() for message in messages(broker, topic))


def write(frame: DataFrame, broker: SparkBroker, **options: Any) -> None:
    frame.write.format("penstock").mode("append").options(servers=broker.servers, **options).save()


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).selectExpr("cast(id as string) as value")


# Batch writes


def test_each_row_is_a_message_where_the_client_would_have_put_it(
    spark: SparkSession, spark_broker: SparkBroker
) -> None:
    spark_broker.create_topic("rows", partitions=4)
    spark_broker.create_topic("other", partitions=2)
    frame = spark.sql("""
        select if(id % 5 = 0, null, concat('key ', id % 20)) as key,
               case id % 3 when 0 then 'rows' when 1 then concat('rows.', id % 7) else 'other.x' end as subject,
               if(id % 5 = 1, null, encode(concat('value ', id), 'utf-8')) as value,
               if(id % 2 = 0, map('Number', cast(id as string)), null) as headers
        from range(200)""")

    write(frame, spark_broker)

    assert messages(spark_broker, "rows", "other") == sorted(map(meant, range(200)), key=repr)
    for topic, partitions in (("rows", 4), ("other", 2)):
        layout = Layout(topic.encode(), 0, partitions)
        for partition, message in read(spark_broker, topic):
            assert layout.choose(message.subject.encode(), message.key) in (None, partition)


def meant(number: int) -> Stored:
    return Stored(
        key=None if number % 5 == 0 else b"key %d" % (number % 20),
        subject=("rows", f"rows.{number % 7}", "other.x")[number % 3],
        value=b"" if number % 5 == 1 else b"value %d" % number,
        headers=b"Number: %d\r\n" % number if number % 2 == 0 else None,
        is_tombstone=number % 5 == 1,
    )


def test_a_write_with_a_txn_id_is_stored_once(spark: SparkSession, spark_broker: SparkBroker) -> None:
    spark_broker.create_topic("named", partitions=2)
    for _ in range(2):
        write(numbers(spark, 10), spark_broker, topic="named", txnId="load of monday")
    assert values(spark_broker, "named") == sorted(map(str, range(10)))

    # Another version, and another topic, are other transactions.
    write(numbers(spark, 1), spark_broker, topic="named", txnId="load of monday", txnVersion=1)
    write(numbers(spark, 1), spark_broker, topic="named", txnId="load of monday", txnVersion=0)
    write(numbers(spark, 1), spark_broker, topic="named_too", txnId="load of monday")

    assert len(values(spark_broker, "named")) == 11
    assert values(spark_broker, "named_too") == ["0"]


def test_a_write_without_a_txn_id_is_stored_each_time(spark: SparkSession, spark_broker: SparkBroker) -> None:
    for _ in range(2):
        write(numbers(spark, 3), spark_broker, topic="unnamed", compression="zstd")

    assert values(spark_broker, "unnamed") == ["0", "0", "1", "1", "2", "2"]


def test_nothing_is_stored_of_a_write_that_fails(spark: SparkSession, spark_broker: SparkBroker) -> None:
    spark_broker.create_topic("failed")
    frame = spark.range(0, 100, numPartitions=4).selectExpr("if(id = 99, null, cast(id as string)) as value")

    with pytest.raises(Exception, match="a message with a null value is a tombstone") as raised:
        write(frame, spark_broker, topic="failed")

    assert failure.describe(raised.value).sentence.startswith(
        "a message with a null value is a tombstone and needs a key: add a key, or a value"
    )
    assert values(spark_broker, "failed") == []


def test_a_frame_without_rows_stores_nothing(spark: SparkSession, spark_broker: SparkBroker) -> None:
    spark_broker.create_topic("empty")

    write(numbers(spark, 0), spark_broker, topic="empty", txnId="none")

    assert values(spark_broker, "empty") == []


# Streams


class Stream:
    """Lines of text files, of each file in a batch, to a topic of the same name as the directory."""

    def __init__(self, spark: SparkSession, broker: SparkBroker, directory: Path) -> None:
        self._spark = spark
        self._broker = broker
        self._input = directory / "in"
        self._input.mkdir(exist_ok=True)
        self._checkpoint = directory / "checkpoint"

    def add(self, *lines: str) -> None:
        # Spark takes the files in the order of their times: it is shown a whole one.
        number = len(list(self._input.iterdir()))
        aside = self._input.parent / f"{number}.txt"
        aside.write_text("".join(f"{line}\n" for line in lines))
        os.utime(aside, (number, number))
        aside.rename(self._input / aside.name)

    def run(self, topic: str, name: str = "penstock") -> None:
        """Until all files are written, or it fails."""
        lines = self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(self._input))
        query = (
            lines.writeStream.format(name)
            .options(servers=self._broker.servers, topic=topic, checkpointLocation=str(self._checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def forget(self) -> None:
        """That the last batch was done: as a driver that ended before it took note of it."""
        commits = self._checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)


def test_a_stream_that_is_stopped_and_replayed_has_each_row_once(
    spark: SparkSession, spark_broker: SparkBroker, tmp_path: Path
) -> None:
    spark_broker.create_topic("replayed", partitions=3)
    stream = Stream(spark, spark_broker, tmp_path)
    lines: list[str] = []
    for start in range(3):
        for part in range(2):
            new = [f"line {start} {part} {number}" for number in range(20)]
            lines += new
            stream.add(*new)
        stream.run("replayed")
        assert values(spark_broker, "replayed") == sorted(lines)
        stream.forget()

    stream.run("replayed")

    assert values(spark_broker, "replayed") == sorted(lines)


def test_a_batch_whose_commit_failed_before_or_after_it_was_stored_is_stored_once(
    spark: SparkSession, spark_broker: SparkBroker, tmp_path: Path
) -> None:
    spark.dataSource.register(failing(tmp_path / "failed"))
    stream = Stream(spark, spark_broker, tmp_path)
    stream.add("a", "b")

    for expected in ([], ["a", "b"]):
        with pytest.raises(Exception, match="the driver is out of luck"):
            stream.run("unlucky", "failing")
        assert values(spark_broker, "unlucky") == expected
    stream.add("c")
    stream.run("unlucky", "failing")

    assert values(spark_broker, "unlucky") == ["a", "b", "c"]


def failing(marks: Path) -> Any:
    """A sink whose first commit fails before it is done, and whose second afterwards."""
    from penstock.spark.datasource import PenstockDataSource

    class Failing(PenstockDataSource):
        @classmethod
        def name(cls) -> str:
            return "failing"

        def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
            writer: Any = super().streamWriter(schema, overwrite)
            commit = writer.commit

            def unlucky(messages: list[Any], batch: int) -> None:
                marks.mkdir(exist_ok=True)
                count = len(list(marks.iterdir()))
                (marks / str(count)).touch()
                if count:
                    commit(messages, batch)
                if count < 2:
                    raise RuntimeError("the driver is out of luck")

            writer.commit = unlucky
            return writer

    return Failing


def test_from_the_source_to_the_sink(spark: SparkSession, spark_broker: SparkBroker, tmp_path: Path) -> None:
    spark_broker.create_topic("from", partitions=2)
    spark_broker.create_topic("to", partitions=3)
    source = spark.readStream.format("penstock").options(
        servers=spark_broker.servers, subscribe="from", startingOffsets="earliest", includeHeaders="true"
    )
    frame = source.load().selectExpr("key", "concat('to.', split(subject, '[.]')[1]) as subject", "value", "headers")
    expected = []
    for start in range(2):
        for number in range(25):
            key, value = b"%d" % number, b"%d.%d" % (start, number)
            spark_broker.publish(f"from.{number % 4}", value, key=key, headers={"Start": str(start)})
            expected.append(Stored(key, f"to.{number % 4}", value, b"Start: %d\r\n" % start, is_tombstone=False))
        query = (
            frame.writeStream.format("penstock")
            .options(servers=spark_broker.servers, topic="to", checkpointLocation=str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

        assert messages(spark_broker, "to") == sorted(expected, key=repr)


def test_a_killed_driver_and_tasks_that_are_tried_again_store_each_row_once(
    spark: SparkSession, spark_broker: SparkBroker, tmp_path: Path
) -> None:
    stream = Stream(spark, spark_broker, tmp_path)
    lines = []
    for part in range(4):
        new = [f"line {part} {number}" for number in range(50)]
        lines += new
        stream.add(*new)
    command = [sys.executable, "-m", "tests.support.spark_driver", spark_broker.servers, str(tmp_path), "1"]

    with (tmp_path / "driver.txt").open("wb") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False)

    told = (tmp_path / "driver.txt").read_text()
    assert ended.returncode == -9, told
    assert "the first try fails, after all of it is done" in told
    assert values(spark_broker, "numbers") == sorted(map(str, range(1000)))
    # The second batch was stored, and Spark knows nothing of it.
    assert values(spark_broker, "lines") == sorted(lines[:100])
    assert not (tmp_path / "checkpoint" / "commits" / "1").exists()

    stream.run("lines")

    assert values(spark_broker, "lines") == sorted(lines)


# What is refused


def columns(ddl: str) -> StructType:
    from pyspark.sql.types import StructType

    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    return found


def plain(**options: str) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


GOOD = "value binary, key string, subject string, topic string, headers map<string,string>, partition int"


@pytest.mark.parametrize(
    ("schema", "options", "sentence"),
    [
        ("key string", {"topic": "t"}, "missing column value: select one"),
        ("value string", {}, "the rows have no destination: set the option topic, or add a column topic or subject"),
        ("value string", {"topic": "a..b"}, "invalid topic 'a..b': it must be tokens separated by dots"),
        ("value string", {"topic": " "}, "topic is empty"),
        ("value int", {"topic": "t"}, "column value is int: it must be binary or string"),
        ("value string, key bigint", {"topic": "t"}, "column key is bigint: it must be binary or string"),
        ("value string, topic binary", {}, "column topic is binary: it must be string"),
        ("value string, partition string", {"topic": "t"}, "column partition is string: it must be int"),
        (
            "value string, headers map<string,binary>",
            {"topic": "t"},
            "column headers is map<string,binary>: it must be map<string,string>",
        ),
        (
            "value string, headers array<struct<key:string,value:binary>>",
            {"topic": "t"},
            "column headers is array<struct<key:string,value:binary>>: it must be map<string,string>",
        ),
        ("value string, keys string", {"topic": "t"}, "a message has no column 'keys': did you mean 'key'?"),
        (
            "value string, amount double",
            {"topic": "t"},
            "a message has no column 'amount': there are value, key, subject, topic, headers, partition; ",
        ),
        (GOOD, {"compression": "gzip"}, "compression is 'gzip': it must be none or lz4 or zstd"),
        (GOOD, {"tpic": "t"}, "unknown option 'tpic': did you mean 'topic'?"),
        (GOOD, {"subscribe": "t"}, "unknown option 'subscribe'"),
        (GOOD, {"timeout": "0"}, "timeout is '0': it must be more than 0 seconds"),
        (GOOD, {"txnVersion": "1"}, "txnVersion"),
        (GOOD, {"txnId": "a", "txnVersion": "-1"}, "txnVersion is '-1': it must be an integer of at least 0"),
    ],
)
def test_what_cannot_be_written_is_refused_before_a_task_runs(
    schema: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        sink.writer(plain(**options), columns(schema), False)
    if "txn" not in sentence:
        with pytest.raises(ValueError, match="^" + re.escape(sentence)):
            sink.stream_writer(plain(**options), columns(schema))


def test_a_stream_takes_no_txn_id() -> None:
    with pytest.raises(ValueError, match="txnId is only for batch writes"):
        sink.stream_writer(plain(txnId="a", topic="t"), columns("value string"))


Act = Callable[[Any], None]


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (
            lambda writer: writer.mode("overwrite").save(),
            "a topic can only be appended to: write with .mode('append')",
        ),
        (lambda writer: writer.mode("append").option("tpic", "x").save(), "unknown option 'tpic': did you mean"),
        (
            lambda writer: writer.mode("append").options(servers="127.0.0.1:1", timeout="300ms").save(),
            "no broker at 127.0.0.1:1: start one with `penstock serve`, or name another with servers= (waited 0.3 s)",
        ),
    ],
)
def test_a_user_sees_the_sentence(spark: SparkSession, spark_broker: SparkBroker, act: Act, sentence: str) -> None:
    writer = numbers(spark, 1).write.format("penstock").options(servers=spark_broker.servers, topic="refused")

    with pytest.raises(Exception, match=re.escape(sentence)) as raised:
        act(writer)

    assert sentence in failure.describe(raised.value).sentence


def test_a_message_that_is_too_large_is_refused_with_the_limit(spark: SparkSession, spark_broker: SparkBroker) -> None:
    frame = spark.sql("select repeat('x', 2000000) as value")

    with pytest.raises(Exception, match=r"a message of 2000000 bytes .*, 1048576 are allowed"):
        write(frame, spark_broker, topic="large")


def test_what_was_staged_is_lost_fails_the_commit(spark_broker: SparkBroker) -> None:
    writer = sink.writer(plain(servers=spark_broker.servers, topic="lost"), columns("value string"), False)

    with pytest.raises(Exception, match="is not stored any more: stage all of the transaction again"):
        writer.commit([sink.Staged("spark:nobody", 0, [12345], 1)])
