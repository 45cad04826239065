"""The options of the source, read and refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.spark import options
from penstock.spark.options import (
    Assigned,
    AtEdge,
    AtOffsets,
    AtTimestamp,
    AtTimestamps,
    Names,
    ReadOptions,
    TopicPartition,
)


def _read(given: Mapping[str, str] | None = None, *, is_stream: bool = True) -> ReadOptions:
    lower = {name.lower(): value for name, value in (given or {}).items()}
    return options.read({"subscribe": "orders"} | lower, is_stream=is_stream)


def test_a_batch_reads_everything_and_a_stream_what_comes() -> None:
    batch, stream = _read(is_stream=False), _read()

    assert (batch.start, batch.end) == (AtEdge(options.EARLIEST), AtEdge(options.LATEST))
    assert (stream.start, stream.end) == (AtEdge(options.LATEST), AtEdge(options.LATEST))
    assert stream.fails_on_loss
    assert not stream.has_headers


def test_the_names_of_kafkas_connector_are_understood() -> None:
    found = options.read(
        {
            "kafka.bootstrap.servers": "one:1,two:2",
            "kafka.group.id": "billing",
            "subscribe": "orders, payments",
            "startingoffsets": '{"orders": {"0": 23, "1": -2}, "payments": {"0": -1}}',
            "maxoffsetspertrigger": "500",
            "maxtriggerdelay": "10m",
            "failondataloss": "False",
            "includeheaders": "true",
        },
        is_stream=True,
    )

    assert found.broker.servers == "one:1,two:2"
    assert found.group == "billing"
    assert found.topics == Names(("orders", "payments"))
    places = {TopicPartition("orders", 0): 23, TopicPartition("orders", 1): -2, TopicPartition("payments", 0): -1}
    assert found.start == AtOffsets("startingOffsets", places)
    assert (found.offsets_max, found.delay_s, found.fails_on_loss, found.has_headers) == (500, 600, False, True)


def test_a_time_goes_before_offsets() -> None:
    given = {"startingOffsets": "earliest", "startingOffsetsByTimestamp": '{"orders": {"0": 5}}'}

    assert _read(given).start == AtTimestamps("startingOffsetsByTimestamp", {TopicPartition("orders", 0): 5})
    assert _read(given | {"startingTimestamp": "7"}).start == AtTimestamp("startingTimestamp", 7)
    assert _read(given | {"startingTimestamp": "2000-01-01"}).start == AtTimestamp("startingTimestamp", 946_684_800_000)


def test_partitions_can_be_assigned() -> None:
    found = options.read({"assign": '{"orders": [2, 0], "payments": [0]}'}, is_stream=False)

    assert found.topics == Assigned(
        (TopicPartition("orders", 2), TopicPartition("orders", 0), TopicPartition("payments", 0))
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"subscrib": "x"}, "unknown option 'subscrib': did you mean 'subscribe'?"),
        ({"kafka.security.protocol": "SSL"}, "unknown option 'kafka.security.protocol'"),
        ({"path": "orders"}, "a topic has no path"),
        ({"assign": '{"a": [0]}'}, "exactly one of subscribe, subscribePattern and assign .* subscribe and assign"),
        ({"subscribe": ""}, "subscribe is empty"),
        ({"subscribe": "a,,b"}, "subscribe is 'a,,b'"),
        ({"subjects": "orders.>.x"}, "subjects has 'orders.>.x', which is not a pattern"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger is '0': it must be an integer of at least 1"),
        ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger is 'many'"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss is 'no': it must be true or false"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay is 'soon'"),
        ({"timeout": "-1"}, "timeout is '-1'"),
        ({"startingOffsets": "middle"}, "startingOffsets is 'middle': it must be earliest, latest or"),
        ({"startingOffsets": '{"orders": {"0": -3}}'}, "startingOffsets is"),
        ({"startingOffsets": '{"orders": [1]}'}, "startingOffsets is"),
        ({"startingOffsetsByTimestamp": '{"orders": {"x": 1}}'}, "milliseconds since 1970"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "it must be error or latest"),
        ({"endingOffsets": "earliest"}, "nothing to read"),
        ({"archive": "/a", "maxBytesPerTrigger": "5"}, "use maxOffsetsPerTrigger"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _read(given)


def test_one_way_to_name_topics_is_needed() -> None:
    with pytest.raises(ValueError, match="but there is none"):
        options.read({}, is_stream=True)


def test_a_pattern_that_is_no_expression_is_refused() -> None:
    with pytest.raises(ValueError, match=r"subscribePattern is 'a\(', which is not a regular expression"):
        options.read({"subscribepattern": "a("}, is_stream=True)


def test_a_batch_cannot_begin_at_its_end() -> None:
    with pytest.raises(ValueError, match="startingOffsets is latest"):
        _read({"startingOffsets": "latest"}, is_stream=False)


@pytest.mark.parametrize("name", ["checkpointLocation", "checkpointlocation"])
def test_what_spark_adds_is_no_unknown_option(name: str) -> None:
    options.check_known({name: "/x"}, ["servers"])
