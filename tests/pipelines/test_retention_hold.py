"""Topics keep messages until an archive pipeline has them, unless its file says otherwise."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.pipelines import execution
from penstock.pipelines.pipeline import Pipeline
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.retention_hold import hold_retention
from penstock.spark import connection
from penstock.spark.archive import Archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGE = bytes(1500)


@pytest.fixture
def broker() -> Iterator[penstock.Broker]:
    """Its retention is quick."""
    settings = {"storage.upkeep_ms": 10, "topic.segment_bytes": 4096, "topic.retain_bytes": 1}
    with penstock.Broker(listen="127.0.0.1:0", settings=settings) as found:
        yield found
        connection.close()


def archive(tmp_path: Path, broker: penstock.Broker, source: str = 'topic = "orders"', more: str = "") -> Pipeline:
    path = tmp_path / "archive.toml"
    text = 'name = "archive-orders"\nkind = "archive"\n[source]\n{}\n[sink]\narchive = "kept"\n{}'
    path.write_text(text.format(source, more))
    assert broker.address is not None
    return load(path).at(broker.address)


def dropped(broker: penstock.Broker, topic: str, above: int = 0) -> int:
    """Wait until retention has dropped messages; return the first offset that is left."""
    until = time.monotonic() + 60
    while (start := int(broker.topic(topic).positions[0].start)) <= above:
        assert time.monotonic() < until, "retention drops nothing"
        time.sleep(0.005)
    return start


def test_retention_waits_for_the_archive(spark: SparkSession, broker: penstock.Broker, tmp_path: Path) -> None:
    pipeline = archive(tmp_path, broker)
    for name in ("orders", "other"):
        broker.create_topic(name)
    # A run on an empty topic tells the broker what to keep.
    execution.run(pipeline, spark=spark)
    for number in range(20):
        for name in ("orders", "other"):
            broker.publish(name, b"%d " % number + LARGE)

    assert dropped(broker, "other", above=15) > 15
    assert broker.topic("orders").positions[0].start == 0
    execution.run(pipeline, spark=spark)
    start = dropped(broker, "orders")

    assert Archive(str(tmp_path / "kept")).ranges("orders") == {0: (0, 20)}
    assert start <= 20
    assert broker.topic("orders").policy["retain_for"] == "archive-orders"
    execution.run(archive(tmp_path, broker, more="[archive]\nhold = false\n"), spark=spark)
    assert broker.topic("orders").policy["retain_for"] is None


def test_each_topic_of_a_pipeline_is_kept_for_its_group(broker: penstock.Broker, tmp_path: Path) -> None:
    for name in ("orders", "bills", "more"):
        broker.create_topic(name)

    hold_retention(archive(tmp_path, broker, 'topics = ["orders", "bills"]'))

    found: dict[str, Any] = {name: broker.topic(name).policy["retain_for"] for name in ("orders", "bills", "more")}
    assert found == {"orders": "archive-orders-orders", "bills": "archive-orders-bills", "more": None}


def test_what_somebody_else_has_set_stays(
    broker: penstock.Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker.create_topic("orders", retain_for="mine")

    with caplog.at_level(logging.WARNING):
        hold_retention(archive(tmp_path, broker))
    assert "topic orders is retained for group mine" in caplog.text
    hold_retention(archive(tmp_path, broker, more="[archive]\nhold = false\n"))

    assert broker.topic("orders").policy["retain_for"] == "mine"
