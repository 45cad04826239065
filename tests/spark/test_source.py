"""The source, with a real broker: what the driver plans and the tasks read, and whole queries in a real session."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

import penstock
from penstock.errors import BadSchema, NoBroker, UnknownSchema, UnknownTopic
from penstock.model.headers import hash_key
from penstock.spark import connection, options
from penstock.spark.json_topics import from_json_topic
from penstock.spark.pushdown import FilteringReader
from penstock.spark.source import BatchReader, LogSlice, TopicStream, UnlimitedStreamReader, _fetch, commit
from penstock.spark.stream import StreamReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATIENCE_S = 60.0
WANTED = StructType(
    [
        StructField("offset", LongType()),
        StructField("value", BinaryType()),
        StructField("subject", StringType()),
        StructField("timestamp", TimestampType()),
    ]
)
ALL = ReadAllAvailable()

_numbers = itertools.count()


@pytest.fixture(scope="module")
def broker() -> Iterator[penstock.Broker]:
    """One that looks often for what it need not keep."""
    settings = {"storage.upkeep_ms": 10, "topic.durability": "flush"}
    with penstock.Broker(listen="127.0.0.1:0", settings=settings) as found:
        yield found
        _disconnect()


def _disconnect() -> None:
    """The clients of this process belong to it until it ends. Without their broker they would look for it for ever."""
    connection.close()


@pytest.fixture
def topic(broker: penstock.Broker) -> str:
    """A topic of its own, with two partitions."""
    return _topic(broker, partitions=2)


def _topic(broker: penstock.Broker, **settings: Any) -> str:
    name = f"orders{next(_numbers)}"
    broker.create_topic(name, **settings)
    return name


def _publish(broker: penstock.Broker, topic: str, values: Sequence[int], partition: int = 0) -> None:
    """Into one partition, in one batch or few."""
    partitions = broker.topic(topic).partitions
    key = next(key for key in map(str, itertools.count()) if hash_key(key.encode()) % partitions == partition)
    broker.publish_many(penstock.Outgoing(topic, str(value).encode(), key=key) for value in values)


def _options(broker: penstock.Broker, *, is_stream: bool, **given: object) -> options.ReadOptions:
    assert broker.address is not None
    texts = {"servers": broker.address} | {name.lower(): str(value) for name, value in given.items()}
    return options.read(texts, is_stream=is_stream)


def _stream(broker: penstock.Broker, **given: object) -> StreamReader:
    return StreamReader(_options(broker, is_stream=True, **given), WANTED)


def _batch(broker: penstock.Broker, **given: object) -> BatchReader:
    return BatchReader(_options(broker, is_stream=False, **given), WANTED)


def _read(reader: BatchReader | TopicStream, partitions: Sequence[InputPartition]) -> list[int]:
    """The values of what tasks read, which get their partitions and their reader as bytes."""
    values = []
    for each in partitions:
        task: BatchReader | TopicStream = reader
        if isinstance(reader, BatchReader):
            task = pickle.loads(pickle.dumps(reader))
        for rows in task.read(pickle.loads(pickle.dumps(each))):
            values += [int(value) for value in rows.column("value").to_pylist()]
    return values


def _begin(stream: StreamReader) -> dict[str, Any]:
    """Where a new query begins, as its first end says."""
    first = stream.latestOffset({}, stream.getDefaultReadLimit())
    found: dict[str, Any] = first.get("begin", first)
    return found


def _ends(offset: dict[str, Any], topic: str) -> dict[str, int]:
    found: dict[str, int] = offset["topics"][topic]["offsets"]
    return found


def _drop_head(broker: penstock.Broker, topic: str) -> int:
    """Let retention drop all but the last segment; the first offset that is left."""
    found = broker.alter_topic(topic, retain_bytes=1)
    # A segment is as full as it may be, so two have more bytes than one may have.
    _until(lambda: broker.topic(topic).positions[0].bytes <= found.policy["segment_bytes"])
    broker.alter_topic(topic, retain_bytes=1 << 40)
    return broker.topic(topic).positions[0].start


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.005)


def _large_topic(broker: penstock.Broker) -> str:
    """One partition, several segments; its values are its offsets."""
    name = _topic(broker, partitions=1, segment_bytes=4096)
    for start in range(0, 400, 50):
        _publish(broker, name, range(start, start + 50))
    return name


# Batches.


def test_a_batch_reads_what_is_there(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5), partition=0)
    _publish(broker, topic, range(10, 13), partition=1)
    reader = _batch(broker, subscribe=topic)

    assert _read(reader, reader.partitions()) == [0, 1, 2, 3, 4, 10, 11, 12]


def test_a_batch_begins_and_ends_where_it_is_told(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(10), partition=0)
    _publish(broker, topic, range(10, 20), partition=1)
    start = f'{{"{topic}": {{"0": 3, "1": -2}}}}'
    end = f'{{"{topic}": {{"0": -1, "1": 4}}}}'
    reader = _batch(broker, subscribe=topic, startingOffsets=start, endingOffsets=end)

    assert _read(reader, reader.partitions()) == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_a_batch_begins_and_ends_at_times(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, [0])
    between = _next_millisecond()
    _publish(broker, topic, [1])
    end = _next_millisecond()
    _publish(broker, topic, [2])
    late = _next_millisecond()

    # The other partition has nothing that late.
    times = {"startingTimestamp": between, "startingOffsetsByTimestampStrategy": "latest", "endingTimestamp": end}
    reader = _batch(broker, subscribe=topic, **times)
    assert _read(reader, reader.partitions()) == [1]

    by_partition = f'{{"{topic}": {{"0": {between}}}}}'
    reader = _batch(broker, assign=f'{{"{topic}": [0]}}', startingOffsetsByTimestamp=by_partition)
    assert _read(reader, reader.partitions()) == [1, 2]

    with pytest.raises(ValueError, match=f"{topic}/0 has no message stored at startingTimestamp or later"):
        _batch(broker, subscribe=topic, startingTimestamp=late).partitions()


def _next_millisecond() -> int:
    """A time behind everything so far, and before everything that comes."""
    now = time.time_ns() // 1_000_000 + 1
    _until(lambda: time.time_ns() // 1_000_000 > now)
    return now


def test_topics_are_chosen_by_name_by_pattern_and_by_partition(broker: penstock.Broker) -> None:
    first, second = _topic(broker, partitions=2), _topic(broker, partitions=1)
    _publish(broker, first, [1], partition=0)
    _publish(broker, first, [2], partition=1)
    _publish(broker, second, [3])

    for given, values in (
        ({"subscribe": f"{first},{second}"}, [1, 2, 3]),
        ({"subscribePattern": f"{first}|{second}"}, [1, 2, 3]),
        # The whole name must match: all names begin with this, and none is this.
        ({"subscribePattern": "orders"}, []),
        ({"assign": f'{{"{first}": [1], "{second}": [0]}}'}, [2, 3]),
    ):
        reader = _batch(broker, **given)
        assert _read(reader, reader.partitions()) == values


def test_subjects_are_chosen_inside_a_topic(broker: penstock.Broker, topic: str) -> None:
    for number, subject in enumerate(["eu", "us", "eu.new", "us.new.x"]):
        broker.publish(f"{topic}.{subject}", str(number).encode())
    broker.publish(topic, b"4")

    for patterns, values in (
        (f"{topic}.eu.>,{topic}.us", [1, 2]),
        (f"{topic}.*", [0, 1]),
        (topic, [4]),
        (">", [*range(5)]),
    ):
        reader = _batch(broker, subscribe=topic, subjects=patterns)
        assert sorted(_read(reader, reader.partitions())) == values


@pytest.mark.parametrize("given", [{"minPartitions": 7}, {"maxRecordsPerPartition": 13}])
def test_a_partition_is_read_by_several_tasks(broker: penstock.Broker, topic: str, given: dict[str, int]) -> None:
    # In one batch each, so that every cut goes through a stored batch.
    _publish(broker, topic, range(60), partition=0)
    _publish(broker, topic, range(60, 100), partition=1)
    reader = _batch(broker, subscribe=topic, **given)

    partitions = reader.partitions()

    assert len(partitions) >= 7
    assert _read(reader, partitions) == [*range(100)]


def test_what_compaction_and_tombstones_left_is_read(tmp_path: Path) -> None:
    deleted = 39 * 50 + 7
    with penstock.Broker(tmp_path, settings={"storage.upkeep_ms": 10}) as before:
        before.create_topic("compacted", partitions=1, segment_bytes=4096, cleanup="compact")
        for turn in range(40):
            before.publish_many(
                penstock.Outgoing("compacted", None if value == deleted else b"%050d" % value, key=str(value % 50))
                for value in range(50 * turn, 50 * turn + 50)
            )
        _until(lambda: before.topic("compacted").positions[0].bytes < 60_000)
    # Its memory still had all of it; and the next one does not compact while this looks.
    settings = {"storage.upkeep_ms": 3_600_000}
    with penstock.Broker(tmp_path, listen="127.0.0.1:0", settings=settings) as broker:
        kept = {message.offset: message.value for message in broker.fetch("compacted")}
        assert 50 <= len(kept) < 1000
        reader = _batch(broker, subscribe="compacted", minPartitions=5)

        rows: dict[int, bytes | None] = {}
        for each in reader.partitions():
            for found in reader.read(each):
                rows |= {row["offset"]: row["value"] for row in found.to_pylist()}
        _disconnect()

    assert rows.keys() == kept.keys()
    assert rows.pop(deleted) is None
    assert rows == {offset: value for offset, value in kept.items() if offset != deleted}


def test_compressed_batches_are_read(broker: penstock.Broker, topic: str) -> None:
    for compression in ("lz4", "zstd"):
        with broker.producer(compression=compression) as producer:
            for number in range(500):
                producer.publish(topic, str(number).encode(), key="k")
    reader = _batch(broker, subscribe=topic)

    assert _read(reader, reader.partitions()) == [*range(500), *range(500)]


# What is wrong, in a sentence.


def test_a_topic_that_is_not_there_is_named_with_the_nearest(broker: penstock.Broker, topic: str) -> None:
    with pytest.raises(UnknownTopic, match=f"unknown topic 'x{topic}' at .*: did you mean '{topic}'?"):
        _batch(broker, subscribe=f"x{topic}").partitions()
    with pytest.raises(UnknownTopic, match=f"unknown topic 'x{topic}'"):
        _stream(broker, subscribe=f"x{topic}").latestOffset({}, ALL)


def test_a_partition_that_is_not_there_is_refused(broker: penstock.Broker, topic: str) -> None:
    with pytest.raises(ValueError, match=f"assign has partition 2 of {topic}, which has 2"):
        _batch(broker, assign=f'{{"{topic}": [0, 2]}}').partitions()


def test_offsets_must_be_there_and_for_every_partition(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(3))
    for given, said in (
        ({"startingOffsets": '{"T": {"0": 4, "1": 0}}'}, "startingOffsets is 4 for T/0, whose offsets are 0 to 3"),
        ({"endingOffsets": '{"T": {"0": 4, "1": 0}}'}, "endingOffsets is 4 for T/0"),
        ({"startingOffsets": '{"T": {"0": 1}}'}, "startingOffsets lacks T/1"),
        ({"startingOffsets": '{"T": {"0": 1, "1": 0, "2": 0}}'}, "startingOffsets has T/2, which is not read"),
        (
            {"startingOffsets": '{"T": {"0": 2, "1": 0}}', "endingOffsets": '{"T": {"0": 1, "1": 0}}'},
            "T/0 would be read from 2 to 1",
        ),
    ):
        named = {name: value.replace("T", topic) for name, value in given.items()}
        with pytest.raises(ValueError, match=said.replace("T", topic)):
            _batch(broker, subscribe=topic, **named).partitions()


def test_a_broker_that_is_not_there_is_named_with_how_long_was_waited() -> None:
    given = options.read({"servers": "127.0.0.1:1", "subscribe": "orders", "timeout": "200ms"}, is_stream=False)

    with pytest.raises(NoBroker, match=r"no broker at 127\.0\.0\.1:1.*waited 0\.2 s"):
        BatchReader(given, WANTED).partitions()


# Streams.


def test_the_first_batch_says_where_the_query_begins(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    reader = _stream(broker, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=3)

    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    _publish(broker, topic, range(5, 9))

    again = _stream(broker, subscribe=topic, startingOffsets="earliest")
    assert _read(again, again.partitions({}, end)) == [0, 1, 2]
    assert _read(again, again.partitions(end, again.latestOffset(end, ALL))) == [*range(3, 9)]


def test_a_first_batch_that_is_empty_pins_the_start(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    reader = _stream(broker, subscribe=topic)
    assert reader.initialOffset() == {}

    pinned = _begin(reader)

    assert _ends(pinned, topic) == {"0": 5, "1": 0}
    assert reader.partitions({}, pinned) == []
    _publish(broker, topic, range(5, 8))
    end = reader.latestOffset(pinned, ALL)
    assert _read(reader, reader.partitions(pinned, end)) == [5, 6, 7]


def test_a_batch_is_the_same_when_it_is_read_again(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    reader = _stream(broker, subscribe=topic, startingOffsets="earliest")
    start = _begin(reader)
    end = reader.latestOffset(start, ALL)
    _publish(broker, topic, range(5, 9))

    again = _stream(broker, subscribe=topic, startingOffsets="earliest")

    assert _read(again, again.partitions(start, end)) == [0, 1, 2, 3, 4]


def test_a_small_batch_of_a_stream_is_read_by_one_task(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5), partition=0)
    _publish(broker, topic, range(5, 9), partition=1)
    for given, tasks in (({}, 1), ({"minPartitions": 2}, 2), ({"maxRecordsPerPartition": 100}, 2)):
        reader = _stream(broker, subscribe=topic, **given)
        beginning = reader.latestOffset({}, ALL)
        _publish(broker, topic, [10], partition=0)
        _publish(broker, topic, [11], partition=1)

        parts = reader.partitions(beginning, reader.latestOffset(beginning, ALL))

        assert len(parts) == tasks
        assert sorted(_read(reader, parts)) == [10, 11]


def test_a_stream_waits_a_little_for_something_new(broker: penstock.Broker, topic: str) -> None:
    reader = _stream(broker, subscribe=topic)
    start = _begin(reader)
    assert reader.latestOffset(start, ALL) == start

    later = threading.Timer(0.05, _publish, (broker, topic, [1]))
    later.start()
    end = reader.latestOffset(start, ALL)

    later.join()
    # A machine may be so busy that it comes too late for one wait.
    while end == start:
        end = reader.latestOffset(start, ALL)
    assert _ends(end, topic) == {"0": 1, "1": 0}


def test_new_partitions_and_topics_are_read_from_their_beginning(broker: penstock.Broker) -> None:
    name = _topic(broker, partitions=1)
    reader = _stream(broker, subscribePattern=f"{name}(more)?")
    start = _begin(reader)
    broker.alter_topic(name, partitions=2)
    broker.create_topic(f"{name}more", partitions=1)
    _publish(broker, name, [1], partition=1)
    _publish(broker, f"{name}more", [2])

    end = reader.latestOffset(start, ALL)

    assert _read(reader, reader.partitions(start, end)) == [1, 2]


def test_a_pattern_may_match_nothing_yet(broker: penstock.Broker) -> None:
    name = f"orders{next(_numbers)}"
    reader = _stream(broker, subscribePattern=name)
    start = _begin(reader)
    assert start
    broker.create_topic(name, partitions=1)
    _publish(broker, name, [7])

    end = reader.latestOffset(start, ALL)

    assert _read(reader, reader.partitions(start, end)) == [7]


def test_a_batch_of_a_stream_has_so_many_messages_at_the_most(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(90), partition=0)
    _publish(broker, topic, range(90, 100), partition=1)
    reader = _stream(broker, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(30)

    batches, start = [], _begin(reader)
    while (end := reader.latestOffset(start, limit)) != start:
        batches.append(_read(reader, reader.partitions(start, end)))
        start = end

    assert [len(each) for each in batches] == [30, 30, 30, 10]
    assert sorted(itertools.chain(*batches)) == [*range(100)]
    assert any(value >= 90 for value in batches[0]), "the small partition has its share"
    # What asks for everything gets it, whatever the options say.
    start = _begin(reader)
    assert _ends(reader.latestOffset(start, ALL), topic) == {"0": 90, "1": 10}


def test_a_batch_of_a_stream_has_about_so_many_bytes_at_the_most(broker: penstock.Broker) -> None:
    name = _topic(broker, partitions=1)
    for first in range(0, 400, 20):
        broker.publish_many((name, b"%0500d" % value) for value in range(first, first + 20))
    reader = _stream(broker, subscribe=name, startingOffsets="earliest", maxBytesPerTrigger=40_000)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxBytes(40_000)

    batches, start = [], _begin(reader)
    while (end := reader.latestOffset(start, limit)) != start:
        batches.append(_read(reader, reader.partitions(start, end)))
        start = end

    # In all they have 200,000 bytes; the broker's indexes know only so many places where a batch can end.
    assert 3 <= len(batches) <= 6
    assert [*itertools.chain(*batches)] == [*range(400)]


def test_a_batch_waits_for_enough_messages_but_not_for_ever(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    given = {"subscribe": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 8}
    reader = _stream(broker, **given)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(8)
    start = _begin(reader)
    assert reader.latestOffset(start, limit) == start

    impatient = _stream(broker, **given, maxTriggerDelay="1ms")
    assert _ends(impatient.latestOffset(start, limit), topic)["0"] == 5
    at_its_end = _stream(broker, **given)
    at_its_end.prepareForTriggerAvailableNow()
    assert _ends(at_its_end.latestOffset(start, limit), topic)["0"] == 5

    _publish(broker, topic, range(5, 8))
    assert _ends(reader.latestOffset(start, limit), topic)["0"] == 8


def test_available_now_is_what_was_there_when_the_query_began(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    reader = _stream(broker, subscribe=topic, startingOffsets="earliest")
    late = _stream(broker, subscribe=topic)
    reader.prepareForTriggerAvailableNow()
    late.prepareForTriggerAvailableNow()
    _publish(broker, topic, range(5, 9))
    broker.alter_topic(topic, partitions=3)
    _publish(broker, topic, [9], partition=2)

    start = _begin(reader)
    end = reader.latestOffset(start, ALL)

    assert _ends(end, topic) == {"0": 5, "1": 0}
    assert reader.latestOffset(end, ALL) == end
    # Nor does one that begins at the latest begin behind it.
    assert _ends(_begin(late), topic) == {"0": 5, "1": 0}
    # The next run reads the rest, the new partition too.
    following = _stream(broker, subscribe=topic)
    rest = following.latestOffset(end, ALL)
    assert sorted(_read(following, following.partitions(end, rest))) == [5, 6, 7, 8, 9]


def test_a_stream_ends_where_it_is_told(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    end_at = f'{{"{topic}": {{"0": 3, "1": 2}}}}'
    reader = _stream(broker, subscribe=topic, startingOffsets="earliest", endingOffsets=end_at)
    start = _begin(reader)

    end = reader.latestOffset(start, ALL)
    assert _ends(end, topic) == {"0": 3, "1": 0}
    _publish(broker, topic, range(10, 15), partition=1)
    last = reader.latestOffset(end, ALL)

    assert _ends(last, topic) == {"0": 3, "1": 2}
    assert reader.latestOffset(last, ALL) == last


@pytest.mark.parametrize("ending", ["endingOffsets", "endingOffsetsByTimestamp"])
def test_a_stream_that_has_an_end_reads_nothing_of_newer_partitions(broker: penstock.Broker, ending: str) -> None:
    name = _topic(broker, partitions=1)
    given = {"subscribe": name, "startingOffsets": "earliest", ending: f'{{"{name}": {{"0": 0}}}}'}
    reader = _stream(broker, **given)
    start = _begin(reader)
    broker.alter_topic(name, partitions=2)
    _publish(broker, name, [7], partition=1)

    assert _ends(reader.latestOffset(start, ALL), name) == {"0": 0, "1": 0}
    with pytest.raises(ValueError, match=f"{ending} lacks {name}/1"):
        _stream(broker, **given).latestOffset({}, ALL)


def test_how_far_behind_a_stream_is_can_be_seen(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    reader = _stream(broker, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=1)

    assert _ends(reader.reportLatestOffset(), topic) == {"0": 5, "1": 0}


# What is lost.


def test_messages_that_retention_dropped_are_an_error_that_says_which(broker: penstock.Broker) -> None:
    name = _large_topic(broker)
    reader = _stream(broker, subscribe=name, startingOffsets="earliest")
    start = _begin(reader)
    kept = _drop_head(broker, name)
    end = reader.latestOffset(start, ALL)

    with pytest.raises(RuntimeError, match=f"{name}/0: offsets 0 to {kept - 1} are gone.*failOnDataLoss=false"):
        reader.partitions(start, end)
    explicit = f'{{"{name}": {{"0": 1}}}}'
    with pytest.raises(RuntimeError, match=f"offsets 1 to {kept - 1} are gone"):
        _batch(broker, subscribe=name, startingOffsets=explicit).partitions()


def test_a_stream_that_may_lose_goes_on_with_what_is_there(
    broker: penstock.Broker, caplog: pytest.LogCaptureFixture
) -> None:
    name = _large_topic(broker)
    reader = _stream(broker, subscribe=name, startingOffsets="earliest", failOnDataLoss="false")
    start = _begin(reader)
    kept = _drop_head(broker, name)

    with caplog.at_level(logging.WARNING, "penstock.spark"):
        end = reader.latestOffset(start, ALL)
        found = _read(reader, reader.partitions(start, end))

    assert found == [*range(kept, 400)]
    assert f"offsets 0 to {kept - 1} are gone" in caplog.text


@pytest.mark.parametrize("fails", ["true", "false"])
def test_messages_that_go_while_a_task_reads_are_told_too(broker: penstock.Broker, fails: str) -> None:
    name = _large_topic(broker)
    reader = _batch(broker, subscribe=name, failOnDataLoss=fails)
    partitions = reader.partitions()
    kept = _drop_head(broker, name)

    if fails == "true":
        with pytest.raises(RuntimeError, match=f"{name}/0: offsets 0 to {kept - 1} are gone"):
            _read(reader, partitions)
    else:
        assert _read(reader, partitions) == [*range(kept, 400)]


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_task_that_is_slower_than_retention_misses_nothing_silently(broker: penstock.Broker, fails: str) -> None:
    name = _topic(broker, partitions=1, segment_bytes=1 << 20)
    # More than is fetched ahead.
    broker.publish_many((name, bytes(100_000)) for _ in range(200))
    given = _options(broker, is_stream=False, subscribe=name, failOnDataLoss=fails)
    reader = BatchReader(given, StructType([StructField("offset", LongType())]))
    (task,) = reader.partitions()
    assert isinstance(task, LogSlice)
    parts = _fetch(given, reader._shape, task)
    offsets = next(parts).column("offset").to_pylist()
    kept = _drop_head(broker, name)

    if fails == "true":
        with pytest.raises(RuntimeError, match=f"{name}/0: offset [0-9]+ is out of range"):
            list(parts)
    else:
        for part in parts:
            offsets += part.column("offset").to_pylist()
        read_before = len(offsets) - (200 - kept)
        assert 0 < read_before < kept
        assert offsets == [*range(read_before), *range(kept, 200)]


def test_a_topic_that_goes_while_a_task_reads_is_noticed(broker: penstock.Broker) -> None:
    name = _topic(broker, partitions=1)
    _publish(broker, name, range(5))
    given = _options(broker, is_stream=False, subscribe=name)
    reader = BatchReader(given, WANTED)
    (task,) = reader.partitions()
    assert isinstance(task, LogSlice)
    parts = _fetch(given, reader._shape, task)
    next(parts)
    broker.delete_topic(name)
    broker.create_topic(name, partitions=1)

    with pytest.raises(RuntimeError, match=f"{name}/0: offsets 0 to 4 are gone, their topic was deleted"):
        list(parts)


def test_a_topic_that_was_made_again_is_another_one(broker: penstock.Broker) -> None:
    name = _topic(broker, partitions=1)
    _publish(broker, name, range(5))
    given = {"subscribe": name, "startingOffsets": "earliest"}
    reader, bold = _stream(broker, **given), _stream(broker, **given, failOnDataLoss="false")
    start = _begin(reader)
    end = reader.latestOffset(start, ALL)
    slices = reader.partitions(start, end)
    broker.delete_topic(name)

    with pytest.raises(RuntimeError, match=f"topic {name} was deleted with unread messages"):
        reader.latestOffset(end, ALL)
    broker.create_topic(name, partitions=1)
    _publish(broker, name, range(10, 20))

    with pytest.raises(RuntimeError, match=f"topic {name} was deleted and created again"):
        reader.latestOffset(end, ALL)
    with pytest.raises(RuntimeError, match=f"{name}/0: offsets 0 to 4 are gone, their topic was deleted"):
        reader.partitions(start, end)
    with pytest.raises(RuntimeError, match=f"{name}/0: offsets 0 to 4 are gone, their topic was deleted"):
        _read(reader, slices)
    assert _read(bold, slices) == []
    assert bold.partitions(start, end) == []
    following = bold.latestOffset(end, ALL)
    assert _read(bold, bold.partitions(end, following)) == [*range(10, 20)]


def test_a_log_that_is_shorter_than_what_was_read_is_an_error(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    reader = _stream(broker, subscribe=topic, failOnDataLoss="false")
    start = _begin(reader)
    start["topics"][topic]["offsets"]["0"] = 6

    with pytest.raises(RuntimeError, match=f"{topic}/0 was read up to 6, but now ends at 5"):
        reader.latestOffset(start, ALL)


# The group.


def test_how_far_a_query_has_come_is_stored_in_its_group(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    group = f"spark-{topic}"
    reader = _stream(broker, subscribe=topic, startingOffsets="earliest", group=group)
    start = _begin(reader)
    assert broker.group(group).lag == 5

    end = reader.latestOffset(start, ALL)
    reader.commit(end)

    found = broker.group(group)
    assert (found.mode, found.pattern, found.lag) == ("partitioned", topic, 0)
    assert {position.partition: position.committed for position in found.positions} == {0: 5, 1: 0}


def test_with_several_topics_each_has_a_group(broker: penstock.Broker) -> None:
    first, second = _topic(broker, partitions=1), _topic(broker, partitions=1)
    _publish(broker, first, range(3))
    given = _options(
        broker, is_stream=True, subscribe=f"{first},{second}", group=f"g-{first}", startingOffsets="earliest"
    )
    reader = StreamReader(given, WANTED)
    end = reader.latestOffset(_begin(reader), ALL)

    commit(given, end)

    assert broker.lag(f"g-{first}-{first}") == 0
    assert broker.lag(f"g-{first}-{second}") == 0


def test_a_commit_that_fails_is_no_end_of_the_query(
    broker: penstock.Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = _stream(broker, subscribe=topic, group=f"spark-{topic}")
    end = _begin(reader)
    end["topics"][topic]["offsets"]["0"] = 1_000_000

    with caplog.at_level(logging.WARNING, "penstock.spark"):
        reader.commit(end)

    assert f"group spark-{topic}: the offsets of the query could not be committed" in caplog.text

    broker.delete_group(f"spark-{topic}")
    broker.create_group(f"spark-{topic}", topic)
    with caplog.at_level(logging.WARNING, "penstock.spark"):
        reader.commit(end)
    assert f"group spark-{topic} is shared" in caplog.text


def test_a_group_of_another_kind_is_refused_at_the_start(broker: penstock.Broker, topic: str) -> None:
    broker.create_group(f"shared-{topic}", topic)

    with pytest.raises(ValueError, match=f"group shared-{topic} is shared"):
        _stream(broker, subscribe=topic, group=f"shared-{topic}").latestOffset({}, ALL)


# PySpark 4.0 and 4.1.


def _unlimited(broker: penstock.Broker, **given: object) -> UnlimitedStreamReader:
    return UnlimitedStreamReader(_options(broker, is_stream=True, **given), WANTED)


def test_without_limits_a_stream_reads_all_there_is_and_continues(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(5))
    reader = _unlimited(broker, subscribe=topic, startingOffsets="earliest")
    first = json.loads(json.dumps(reader.latestOffset()))
    assert _read(reader, reader.partitions({}, first)) == [*range(5)]

    _publish(broker, topic, range(5, 8))
    second = reader.latestOffset()
    assert _read(reader, reader.partitions(first, second)) == [5, 6, 7]

    # A reader that is new, as after a restart, finds the end by itself.
    _publish(broker, topic, range(8, 9))
    again = _unlimited(broker, subscribe=topic, startingOffsets="earliest")
    assert _read(again, again.partitions(second, again.latestOffset())) == [8]


def test_without_limits_the_first_end_pins_the_beginning(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(3))
    first = _unlimited(broker, subscribe=topic).latestOffset()
    _publish(broker, topic, range(3, 6))

    again = _unlimited(broker, subscribe=topic)
    assert again.partitions({}, first) == []
    assert _read(again, again.partitions(first, again.latestOffset())) == [3, 4, 5]


def test_an_end_without_limits_is_continued_with_them(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(4))
    end = _unlimited(broker, subscribe=topic, startingOffsets="earliest").latestOffset()
    _publish(broker, topic, range(4, 6))

    newer = _stream(broker, subscribe=topic)
    assert _read(newer, newer.partitions({}, end)) == [*range(4)]
    assert _read(newer, newer.partitions(end, newer.latestOffset(end, ALL))) == [4, 5]


def test_without_limits_a_query_continues_though_its_beginning_is_gone(broker: penstock.Broker) -> None:
    name = _topic(broker, partitions=1)
    _publish(broker, name, range(4))
    given = {"subscribe": name, "startingOffsets": f'{{"{name}": {{"0": 1}}}}'}
    end = _unlimited(broker, **given).latestOffset()
    broker.purge_topic(name, 3, partition=0)
    _publish(broker, name, range(4, 6))

    again = _unlimited(broker, **given)
    latest = again.latestOffset()
    assert _read(again, again.partitions(end, latest)) == [4, 5]
    with pytest.raises(RuntimeError, match="are gone"):
        again.partitions({}, latest)


@pytest.mark.parametrize("name", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger"])
def test_limits_are_refused_where_spark_has_none(broker: penstock.Broker, topic: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs PySpark 4.2 or newer"):
        _unlimited(broker, subscribe=topic, **{name: 5})


# Filters.


def _filtered(broker: penstock.Broker, topic: str, *filters: Filter) -> tuple[list[int], list[Filter]]:
    """What is read, and the filters that are left to Spark."""
    reader = FilteringReader(_options(broker, is_stream=False, subscribe=topic), WANTED)
    left = list(reader.pushFilters(list(filters)))
    return _read(reader, reader.partitions()), left


def test_filters_narrow_what_is_read(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(10), partition=0)
    _publish(broker, topic, range(10, 20), partition=1)

    for filters, values in (
        ([GreaterThanOrEqual(("offset",), 3), LessThan(("offset",), 5)], [3, 4, 13, 14]),
        ([GreaterThan(("offset",), 7), LessThanOrEqual(("offset",), 8)], [8, 18]),
        ([EqualTo(("offset",), 9), EqualTo(("partition",), 1)], [19]),
        ([EqualTo(("offset",), 50)], []),
        ([EqualTo(("offset",), -1)], []),
        ([In(("partition",), (0, 7))], [*range(10)]),
        ([GreaterThan(("partition",), 0)], [*range(10, 20)]),
        ([EqualTo(("topic",), topic), IsNotNull(("topic",))], [*range(20)]),
        ([In(("topic",), ("other",))], []),
        ([EqualTo(("topic",), "other")], []),
    ):
        assert _filtered(broker, topic, *filters) == (values, [])


def test_filters_choose_subjects_and_times(broker: penstock.Broker, topic: str) -> None:
    broker.publish(f"{topic}.eu", b"1")
    broker.publish(f"{topic}.us", b"2")
    broker.publish(f"{topic}.us", b"3")
    stamps = {int(message.value): message.timestamp for n in (0, 1) for message in broker.fetch(topic, n)}

    assert _filtered(broker, topic, EqualTo(("subject",), f"{topic}.eu")) == ([1], [])
    assert _filtered(broker, topic, In(("subject",), (f"{topic}.eu", "x"))) == ([1], [])
    # It is a subject here, and no pattern.
    assert _filtered(broker, topic, EqualTo(("subject",), f"{topic}.*")) == ([], [])
    both = (EqualTo(("subject",), f"{topic}.eu"), In(("subject",), (f"{topic}.us",)))
    assert _filtered(broker, topic, *both) == ([], [])
    assert _filtered(broker, topic, EqualTo(("timestamp",), stamps[3]), EqualTo(("subject",), f"{topic}.us"))[0] == [3]
    assert _filtered(broker, topic, LessThan(("timestamp",), min(stamps.values()))) == ([], [])
    assert sorted(_filtered(broker, topic, LessThanOrEqual(("timestamp",), max(stamps.values())))[0]) == [1, 2, 3]


def test_what_cannot_be_decided_is_left_to_spark(broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(3))
    filters = [
        EqualTo(("value",), b"1"),
        Not(EqualTo(("offset",), 1)),
        StringStartsWith(("subject",), "x"),
        In(("offset",), (1, 2)),
        In(("subject",), ("x", None)),
        EqualTo(("timestamp",), datetime(2020, 1, 1)),  # noqa: DTZ001
        IsNotNull(("key",)),
    ]

    assert _filtered(broker, topic, *filters) == ([0, 1, 2], filters)


# Whole queries.


def _load(spark: SparkSession, broker: penstock.Broker, **given: object) -> DataFrame:
    texts = {name: str(value) for name, value in given.items()}
    return spark.read.format("penstock").options(servers=str(broker.address), **texts).load()


def test_a_table_of_messages(spark: SparkSession, broker: penstock.Broker) -> None:
    name = _topic(broker, partitions=1)
    broker.publish(f"{name}.eu", b"v", key="k", headers={"Trace": "7", "Other": "x: y"})
    broker.publish(name, None, key="k")

    messages = _load(spark, broker, subscribe=name, includeHeaders="true")
    first, second = messages.orderBy("offset").collect()

    types = "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, subject string"
    assert (
        messages.schema.simpleString()
        == f"struct<{types.replace(', ', ',').replace(' ', ':')},headers:map<string,string>>"
    )
    moment = next(broker.fetch(name)).timestamp
    assert first["timestamp"].astimezone(UTC) == moment
    assert first.asDict() | {"timestamp": 0} == {
        "topic": name,
        "partition": 0,
        "offset": 0,
        "timestamp": 0,
        "key": b"k",
        "value": b"v",
        "subject": f"{name}.eu",
        "headers": {"Trace": "7", "Other": "x: y"},
    }
    assert (second["offset"], second["key"], second["value"], second["subject"]) == (1, b"k", None, name)
    assert second["headers"] == {}


def test_a_narrower_schema_has_only_its_columns(spark: SparkSession, broker: penstock.Broker, topic: str) -> None:
    _publish(broker, topic, range(3))
    reader = spark.read.format("penstock").options(servers=str(broker.address), subscribe=topic)

    assert [tuple(row) for row in reader.schema("value binary, offset long").load().collect()] == [
        (b"0", 0),
        (b"1", 1),
        (b"2", 2),
    ]
    with pytest.raises(PySparkException, match="unknown column 'valeu': there are topic, partition, offset"):
        reader.schema("valeu binary").load().collect()


@pytest.mark.parametrize("pushes", ["true", "false"])
def test_filters_give_the_same_rows_pushed_down_or_not(
    spark: SparkSession, broker: penstock.Broker, topic: str, pushes: str
) -> None:
    _publish(broker, topic, range(10), partition=0)
    _publish(broker, topic, range(10, 20), partition=1)
    setting = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(setting)
    assert before is not None
    spark.conf.set(setting, pushes)
    try:
        found = _load(spark, broker, subscribe=topic).where(
            f"partition = 1 and offset >= 3 and offset < 6 and subject = '{topic}' and timestamp > '2020-01-01' "
            "and cast(value as string) <> '14'"
        )
        assert [row["value"] for row in found.orderBy("offset").collect()] == [b"13", b"15"]
    finally:
        spark.conf.set(setting, before)


def test_a_query_with_nothing_to_read_ends(spark: SparkSession, broker: penstock.Broker, topic: str) -> None:
    assert _load(spark, broker, subscribe=topic).count() == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"subscrib": "x"}, "unknown option 'subscrib': did you mean 'subscribe'?"),
        ({"subscribe": "nothing-like-it"}, "unknown topic 'nothing-like-it'"),
        ({"subscribe": "x", "servers": "127.0.0.1:1", "timeout": "0.1"}, "no broker at 127.0.0.1:1"),
    ],
)
def test_who_asks_for_the_impossible_sees_a_sentence(
    spark: SparkSession, broker: penstock.Broker, given: dict[str, str], said: str
) -> None:
    reader = spark.read.format("penstock").options(**{"servers": str(broker.address)} | given)

    with pytest.raises(PySparkException) as raised:
        reader.load().collect()

    assert said in str(raised.value)


def _run(spark: SparkSession, broker: penstock.Broker, directory: Path, **given: object) -> list[dict[str, Any]]:
    """A query over all that is there, which stores what it reads; its progress."""
    texts = {name: str(value) for name, value in given.items()}
    messages = spark.readStream.format("penstock").options(servers=str(broker.address), **texts).load()
    query = (
        messages.selectExpr("cast(value as string) as value")
        .writeStream.format("parquet")
        .option("path", str(directory / "out"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(120)
        return [dict(each) for each in query.recentProgress]
    finally:
        query.stop()


def _results(spark: SparkSession, directory: Path) -> list[int]:
    return sorted(int(row["value"]) for row in spark.read.parquet(str(directory / "out")).collect())


def test_a_stream_reads_each_message_once_over_several_runs(
    spark: SparkSession, broker: penstock.Broker, topic: str, tmp_path: Path
) -> None:
    _publish(broker, topic, range(30), partition=0)
    _publish(broker, topic, range(30, 40), partition=1)
    given = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 25, "group": f"run-{topic}"}

    progress = _run(spark, broker, tmp_path, **given)
    assert _results(spark, tmp_path) == [*range(40)]
    assert [each["numInputRows"] for each in progress] == [25, 15]
    latest = progress[-1]["sources"][0]["latestOffset"]
    assert f'"{topic}"' in latest
    assert '"0": 30' in latest

    _publish(broker, topic, range(40, 50), partition=1)
    _run(spark, broker, tmp_path, **given)
    assert _results(spark, tmp_path) == [*range(50)]
    # The last batch of a run is committed by the next one: what is documented as one batch of lag.
    assert broker.lag(f"run-{topic}") == 10


def test_a_stream_that_is_stopped_before_its_first_message_misses_none(
    spark: SparkSession, broker: penstock.Broker, topic: str, tmp_path: Path
) -> None:
    _publish(broker, topic, range(5))
    _run(spark, broker, tmp_path, subscribe=topic)
    _publish(broker, topic, range(5, 8))

    _run(spark, broker, tmp_path, subscribe=topic)

    assert _results(spark, tmp_path) == [5, 6, 7]


def test_messages_lost_under_a_query_end_it_with_a_sentence(
    spark: SparkSession, broker: penstock.Broker, tmp_path: Path
) -> None:
    name = _large_topic(broker)
    end_at = f'{{"{name}": {{"0": 10}}}}'
    _run(spark, broker, tmp_path, subscribe=name, startingOffsets="earliest", endingOffsets=end_at)
    kept = _drop_head(broker, name)

    with pytest.raises(PySparkException, match=f"{name}/0: offsets 10 to {kept - 1} are gone"):
        _run(spark, broker, tmp_path, subscribe=name)
    _run(spark, broker, tmp_path, subscribe=name, failOnDataLoss="false")

    assert _results(spark, tmp_path) == [*range(10), *range(kept, 400)]


def _archive(spark: SparkSession, broker: penstock.Broker, topic: str, path: Path, end: int) -> None:
    end_at = f'{{"{topic}": {{"0": {end}}}}}'
    messages = _load(spark, broker, subscribe=topic, endingOffsets=end_at, includeHeaders="true")
    messages.write.format("penstock").option("archive", str(path)).mode("append").save()


def test_history_comes_from_the_archive_and_the_rest_from_the_log(
    spark: SparkSession, broker: penstock.Broker, tmp_path: Path
) -> None:
    name = _large_topic(broker)
    broker.publish(name, b"400", headers={"Trace": "7"})
    _archive(spark, broker, name, tmp_path / "archive", 401)
    kept = _drop_head(broker, name)
    assert 0 < kept <= 401, "the archive and the log meet"
    _publish(broker, name, range(401, 450))
    given = {"subscribe": name, "archive": tmp_path / "archive"}

    batch = _batch(broker, **given, minPartitions=3)
    assert _read(batch, batch.partitions()) == [*range(450)]
    middle = f'{{"{name}": {{"0": 380}}}}', f'{{"{name}": {{"0": 402}}}}'
    narrow = _batch(broker, **given, startingOffsets=middle[0], endingOffsets=middle[1])
    assert _read(narrow, narrow.partitions()) == [*range(380, 402)]
    no_subject = _batch(broker, **given, subjects="other.>")
    assert _read(no_subject, no_subject.partitions()) == []

    stream = _stream(broker, **given, startingOffsets="earliest", maxOffsetsPerTrigger=100)
    found, start = [], _begin(stream)
    while (end := stream.latestOffset(start, stream.getDefaultReadLimit())) != start:
        found += _read(stream, stream.partitions(start, end))
        start = end
    assert found == [*range(450)]
    rows = _load(spark, broker, **given, includeHeaders="true").where("offset < 405").orderBy("offset").collect()
    assert [row["offset"] for row in rows] == [*range(405)]
    assert [row["headers"] for row in rows[399:402]] == [{}, {"Trace": "7"}, {}]


def test_an_archive_may_begin_in_the_middle_of_the_log(
    spark: SparkSession, broker: penstock.Broker, tmp_path: Path
) -> None:
    name = _large_topic(broker)
    edges = f'{{"{name}": {{"0": 100}}}}', f'{{"{name}": {{"0": 200}}}}'
    messages = _load(spark, broker, subscribe=name, startingOffsets=edges[0], endingOffsets=edges[1])
    messages.write.format("penstock").option("archive", str(tmp_path / "archive")).mode("append").save()

    reader = _batch(broker, subscribe=name, archive=tmp_path / "archive")

    assert sorted(_read(reader, reader.partitions())) == [*range(400)]


def test_what_neither_archive_nor_log_has_is_lost(spark: SparkSession, broker: penstock.Broker, tmp_path: Path) -> None:
    name = _large_topic(broker)
    _archive(spark, broker, name, tmp_path / "archive", 50)
    kept = _drop_head(broker, name)
    assert kept > 50
    given = {"subscribe": name, "archive": tmp_path / "archive"}

    with pytest.raises(RuntimeError, match=f"{name}/0: offsets 50 to {kept - 1} are gone"):
        _batch(broker, **given).partitions()
    bold = _batch(broker, **given, failOnDataLoss="false")
    assert _read(bold, bold.partitions()) == [*range(50), *range(kept, 400)]
    with pytest.raises(ValueError, match="are in the archive, which has no storage times"):
        _batch(broker, **given, startingTimestamp=1).partitions()


def test_json_values_become_columns(spark: SparkSession, broker: penstock.Broker) -> None:
    name = _topic(broker, partitions=1)
    for value in (b'{"id": 1, "price": 2.5}', b"no json", b'{"id": 3, "more": true}'):
        broker.publish(f"{name}.eu", value, key="k")
    broker.publish(name, None, key="k")

    found = from_json_topic(spark, name, "id long, price double", servers=str(broker.address))

    assert found.columns[:4] == ["id", "price", "_topic", "_partition"]
    rows = found.orderBy("_offset").select("id", "price", "_offset", "_subject", "_reason").collect()
    assert [tuple(row) for row in rows if row._reason is None] == [
        (1, 2.5, 0, f"{name}.eu", None),
        (3, None, 2, f"{name}.eu", None),
    ]
    assert [(row._offset, row._reason) for row in rows if row._reason is not None] == [
        (1, "it is not JSON"),
        (3, "it has no value"),
    ]
    with pytest.raises(ValueError, match="_offset"):
        from_json_topic(spark, name, "_offset long")


def test_json_values_have_the_columns_of_their_topics_schema(spark: SparkSession, broker: penstock.Broker) -> None:
    name, servers = _topic(broker, partitions=1), str(broker.address)
    broker.publish(name, b'{"id": 1, "tags": ["a"]}')
    with pytest.raises(UnknownSchema, match="has no schema: register one"):
        from_json_topic(spark, name, servers=servers)
    broker.set_schema(name, '{"type": "object", "properties": {"id": {"oneOf": [{}, {}]}}}')
    with pytest.raises(BadSchema, match="id has no single type"):
        from_json_topic(spark, name, servers=servers)
    broker.alter_topic(name, schema_compatibility="none")
    tags = {"type": "array", "items": {"type": "string"}}
    broker.set_schema(name, json.dumps({"type": "object", "properties": {"id": {"type": "integer"}, "tags": tags}}))

    [row] = from_json_topic(spark, name, servers=servers).select("id", "tags", "_reason").collect()

    assert tuple(row) == (1, ["a"], None)
