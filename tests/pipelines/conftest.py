"""What the tests of pipelines share: topics of their own, and runs of pipeline files with a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.client.message import Message
from penstock.pipelines.pipeline import Pipeline
from penstock.pipelines.pipeline_file import load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
_NUMBERS = count()


def at(minute: float) -> str:
    return (NOON + timedelta(minutes=minute)).isoformat()


@pytest.fixture
def topic(spark_broker: SparkBroker) -> Callable[[str], str]:
    """A topic of its own, by what it is for."""

    def make(what: str, partitions: int = 1) -> str:
        name = f"{what}{next(_NUMBERS)}"
        spark_broker.create_topic(name, partitions=partitions)
        return name

    return make


class Runner:
    """Runs a pipeline until all that is there is done; again it goes on where it was."""

    def __init__(self, spark: SparkSession, directory: Path, servers: str) -> None:
        self.spark = spark
        self.directory = directory
        self._servers = servers

    def load(self, text: str) -> Pipeline:
        path = self.directory / "pipeline.toml"
        path.write_text(text)
        return load(path).at(self._servers)

    def run(self, text: str) -> list[Any]:
        """The progress of all batches."""
        from penstock.pipelines import queries

        checkpoint = str(self.directory / "checkpoint")
        started = queries.start(self.spark, self.load(text), checkpoint, {"availableNow": True})
        for query in started:
            query.awaitTermination()
        return [progress for query in started for progress in query.recentProgress]


@pytest.fixture
def runner(spark: SparkSession, tmp_path: Path, spark_broker: SparkBroker) -> Iterator[Runner]:
    made = Runner(spark, tmp_path, spark_broker.servers)
    yield made
    for query in spark.streams.active:
        query.stop()


def stored(broker: SparkBroker, topic: str) -> list[Message]:
    partitions = broker.topic(topic).partitions
    return [message for partition in range(partitions) for message in broker.fetch(topic, partition)]


def publish(broker: SparkBroker, topic: str, rows: Iterable[Mapping[str, Any]]) -> None:
    broker.publish_many([(topic, json.dumps(row).encode()) for row in rows])


def values(broker: SparkBroker, topic: str) -> list[Any]:
    return [json.loads(message.value) for message in stored(broker, topic)]


def letters(broker: SparkBroker, topic: str) -> dict[bytes, str]:
    """The dead letters of a topic's messages: why, by value."""
    return {letter.value: letter.reason for letter in broker.dead_letters(f"{topic}.>") + broker.dead_letters(topic)}


def forget_last_batch(checkpoint: Path) -> None:
    """The last batch of the rows is stored, and Spark does not know: it does it again."""
    commits = checkpoint / "rows" / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    last.unlink()
    (commits / f".{last.name}.crc").unlink()
