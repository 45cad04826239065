"""Every kind of pipeline with a real broker: from a file to what is in the sink."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")


from penstock.pipelines import queries
from tests.pipelines.conftest import Runner, at, forget_last_batch, letters, stored, values

if TYPE_CHECKING:
    from tests.conftest import SparkBroker

pandas = pytest.importorskip("pandas")

# Transform.


def test_transform_stores_good_rows_and_dead_letters(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str]
) -> None:
    orders, clean = topic("orders"), topic("clean")
    spark_broker.publish(f"{orders}.eu", b'{"id":"a","n":1}', key="k", headers={"Trace": "1"})
    spark_broker.publish(orders, b"oops", message_id="m1", headers={"Trace": "2"})
    spark_broker.publish(orders, b'{"id":"b","n":0}')
    spark_broker.publish(orders, b'{"id":"c","n":"x"}')
    text = f"""
name = "clean-{orders}"
kind = "transform"
[source]
topic = "{orders}"
schema = "id string, n int"
[transform]
sql = "SELECT id, n * 2 AS twice, _headers FROM source WHERE n > 0"
[sink]
topic = "{clean}"
key = "id"
subject = "id"
"""
    runner.run(text)

    [message] = stored(spark_broker, clean)
    assert (message.subject, message.key, json.loads(message.value)) == (f"{clean}.a", b"a", {"id": "a", "twice": 2})
    assert dict(message.headers) == {"Trace": "1"}
    assert letters(spark_broker, orders) == {
        b"oops": "it is not JSON",
        b'{"id":"c","n":"x"}': "field n is not of type int",
    }
    first = spark_broker.dead_letters(orders)[0]
    assert (first.topic, first.origin_offset, first.group, first.attempts) == (orders, 1, f"clean-{orders}", 1)

    spark_broker.publish(orders, b'{"id":"d","n":4}')
    runner.run(text)

    assert [value["id"] for value in values(spark_broker, clean)] == ["a", "d"]
    assert len(letters(spark_broker, orders)) == 2
    assert spark_broker.redrive(orders, count=1).count == 1
    again = list(spark_broker.fetch(orders, 0))[-1]
    assert (again.value, dict(again.headers)) == (b"oops", {"Trace": "2"})


def test_each_row_is_transformed_or_a_dead_letter_once(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    orders, clean = topic("orders", 3), topic("clean", 2)
    made = [
        f'{{"id": {n}}}' if chance.random() < 0.7 else chance.choice([f"bad {n}", f'{{"id": "x{n}"}}', f"[{n}]"])
        for n in range(500)
    ]
    spark_broker.publish_many([(orders, value.encode()) for value in made])
    text = f"""
name = "once-{orders}"
kind = "transform"
[source]
topic = "{orders}"
schema = "id int"
options = {{ maxOffsetsPerTrigger = 120 }}
[transform]
sql = "SELECT id FROM source"
[sink]
topic = "{clean}"
"""
    progress = runner.run(text)

    assert sum(each["numInputRows"] > 0 for each in progress) >= 4
    found = Counter(f'{{"id": {value["id"]}}}' for value in values(spark_broker, clean))
    found += Counter(letter.value.decode() for letter in spark_broker.dead_letters(orders, limit=1000))
    assert found == Counter(made)
    assert spark_broker.lag(f"once-{orders}") < 500


def clean(orders: str, target: str, sql: str = "SELECT id FROM source") -> str:
    return f"""
name = "clean-{orders}"
kind = "transform"
[source]
topic = "{orders}"
schema = "id int"
options = {{ maxOffsetsPerTrigger = 10 }}
[transform]
sql = "{sql}"
[sink]
topic = "{target}"
"""


def publish_numbers(broker: SparkBroker, orders: str, numbers: range) -> None:
    """Every seventh is no number."""
    broker.publish_many([(orders, b"bad %d" % n if n % 7 == 0 else b'{"id":%d}' % n) for n in numbers])


def assert_each_once(broker: SparkBroker, orders: str, target: str, count: int) -> None:
    numbers = pandas.Series(range(count))
    found = [value["id"] for value in values(broker, target)]
    assert sorted(found) == list(numbers[numbers % 7 != 0])
    bad = [letter.value for letter in broker.dead_letters(orders, limit=1000)]
    assert sorted(bad) == sorted(b"bad %d" % n for n in numbers[numbers % 7 == 0])


def test_a_batch_that_is_repeated_is_stored_once_with_its_dead_letters(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    orders, target = topic("orders"), topic("clean")
    publish_numbers(spark_broker, orders, range(25))
    runner.run(clean(orders, target))

    forget_last_batch(runner.directory / "checkpoint")
    publish_numbers(spark_broker, orders, range(25, 40))
    runner.run(clean(orders, target))

    assert_each_once(spark_broker, orders, target, 40)


def test_a_query_that_leaves_out_all_rows_stores_dead_letters(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    orders, target = topic("orders"), topic("clean")
    publish_numbers(spark_broker, orders, range(8))

    runner.run(clean(orders, target, "SELECT id FROM source WHERE false"))

    assert values(spark_broker, target) == []
    assert set(letters(spark_broker, orders)) == {b"bad 0", b"bad 7"}


def test_transform_by_a_function(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, clean = topic("orders"), topic("clean")
    spark_broker.publish(orders, b'{"id":1}')
    module = f"cleaning_{orders}"
    (runner.directory / f"{module}.py").write_text("def clean(df):\n    return df.selectExpr('id + 1 AS next')\n")
    monkeypatch.setattr("sys.path", list(sys.path))
    text = f"""
name = "function-{orders}"
kind = "transform"
[source]
topic = "{orders}"
schema = "id int"
[transform]
python = "{module}:clean"
[sink]
topic = "{clean}"
"""
    runner.run(text)

    assert values(spark_broker, clean) == [{"next": 2}]


# Aggregate.


def aggregate(orders: str, sink: str, more: str = "") -> str:
    return f"""
name = "revenue-{orders}"
kind = "aggregate"
[source]
topic = "{orders}"
schema = "country string, amount double, at timestamp"
options = {{ maxOffsetsPerTrigger = 3 }}
[aggregate]
time = "at"
window = "5 minutes"
watermark = "5 minutes"
by = ["country"]
measures = {{ revenue = "sum(amount)" }}
{more}
[sink]
{sink}
"""


def publish_orders(broker: SparkBroker, orders: str) -> None:
    made = [("de", 1, 1), ("de", 2, 2), ("fr", 4, 3)]
    made += [("de", 8, 30)]
    for country, amount, minute in made:
        broker.publish(orders, json={"country": country, "amount": amount, "at": at(minute)})
    broker.publish(orders, b'{"country":"de","amount":1}')
    broker.publish(orders, b"oops")


def test_aggregate_writes_a_window_to_a_topic_when_it_is_closed(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str]
) -> None:
    orders, revenue = topic("orders"), topic("revenue")
    publish_orders(spark_broker, orders)

    runner.run(aggregate(orders, f'topic = "{revenue}"\nkey = "country"'))

    found = {message.key: json.loads(message.value) for message in stored(spark_broker, revenue)}
    assert found == {
        key: {
            "window_start": "2026-01-01T12:00:00.000000Z",
            "window_end": "2026-01-01T12:05:00.000000Z",
            "country": key.decode(),
            "revenue": revenue,
        }
        for key, revenue in [(b"de", 3.0), (b"fr", 4.0)]
    }
    assert letters(spark_broker, orders) == {
        b'{"country":"de","amount":1}': "field at is missing",
        b"oops": "it is not JSON",
    }


def test_aggregate_may_update_a_topic(runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str]) -> None:
    orders, revenue = topic("orders"), topic("revenue")
    publish_orders(spark_broker, orders)

    runner.run(aggregate(orders, f'topic = "{revenue}"', 'mode = "update"'))

    assert sorted(value["revenue"] for value in values(spark_broker, revenue)) == [3.0, 4.0, 8.0]


def test_aggregate_writes_parquet_and_dead_letters_beside_it(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str]
) -> None:
    orders = topic("orders")
    publish_orders(spark_broker, orders)

    runner.run(aggregate(orders, 'parquet = "revenue"'))

    found = runner.spark.read.parquet(str(runner.directory / "revenue")).collect()
    assert sorted((row["country"], row["revenue"]) for row in found) == [("de", 3.0), ("fr", 4.0)]
    assert set(letters(spark_broker, orders)) == {b'{"country":"de","amount":1}', b"oops"}


# Deduplicate.


def test_deduplicate_keeps_the_first_as_it_was(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str]
) -> None:
    orders, once = topic("orders"), topic("once")
    for subject, identity, minute in [(f"{orders}.eu", "a", 0), (orders, "b", 1), (orders, "a", 2), (orders, None, 3)]:
        value = {"id": identity, "at": at(minute), "unknown": 1}
        spark_broker.publish(subject, json=value, headers={"Trace": "1"}, key="k")
    text = f"""
name = "once-{orders}"
kind = "deduplicate"
[source]
topic = "{orders}"
schema = "id string, at timestamp"
[deduplicate]
by = ["id"]
time = "at"
watermark = "1 hour"
[sink]
topic = "{once}"
"""
    runner.run(text)
    spark_broker.publish(orders, json={"id": "b", "at": at(5)})
    spark_broker.publish(orders, json={"id": "c", "at": at(5)})
    runner.run(text)

    found = {json.loads(message.value)["id"]: message for message in stored(spark_broker, once)}
    assert sorted(found) == ["a", "b", "c"]
    assert len(stored(spark_broker, once)) == 3
    assert json.loads(found["a"].value) == {"id": "a", "at": at(0), "unknown": 1}
    assert (found["a"].subject, found["a"].key, dict(found["a"].headers)) == (f"{once}.eu", b"k", {"Trace": "1"})
    assert list(letters(spark_broker, orders).values()) == ["field id is missing"]


# Join.


def test_join_finds_what_belongs_together(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str]
) -> None:
    orders, payments, paid = topic("orders"), topic("payments"), topic("paid")
    for identity in ("a", "b"):
        spark_broker.publish(orders, json={"id": identity, "amount": 5, "at": at(0)})
    spark_broker.publish(payments, json={"id": "a", "method": "card", "at": at(20)})
    spark_broker.publish(payments, json={"id": "b", "method": "cash", "at": at(31)})
    spark_broker.publish(orders, b"oops")
    spark_broker.publish(payments, json={"method": "cash", "at": at(0)})
    text = f"""
name = "paid-{orders}"
kind = "join"
[left]
topic = "{orders}"
schema = "id string, amount int, at timestamp"
[right]
topic = "{payments}"
schema = "id string, method string, at timestamp"
[join]
on = ["id"]
time = "at"
within = "30 minutes"
watermark = "10 minutes"
[sink]
topic = "{paid}"
key = "id"
"""
    runner.run(text)

    assert values(spark_broker, paid) == [
        {
            "id": "a",
            "left_at": "2026-01-01T12:00:00.000000Z",
            "amount": 5,
            "method": "card",
            "right_at": "2026-01-01T12:20:00.000000Z",
        }
    ]
    assert list(letters(spark_broker, orders).values()) == ["it is not JSON"]
    assert list(letters(spark_broker, payments).values()) == ["field id is missing"]
    assert queries.topics(runner.load(text)) == [orders, payments]


# Replay.


def replay(orders: str, copy: str, source: str = "", table: str = "") -> str:
    return f"""
name = "replay-{orders}"
kind = "replay"
[source]
topic = "{orders}"
{source}
[replay]
{table}
[sink]
topic = "{copy}"
"""


def test_replay_copies_a_range(runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]) -> None:
    orders, copy = topic("orders"), topic("copy")
    for number in range(6):
        spark_broker.publish(f"{orders}.eu", b"%d" % number, key="k", message_id=f"{orders}-{number}")

    runner.run(replay(orders, copy, "start = 1\nend = 4"))
    runner.run(replay(orders, copy, "start = 1\nend = 4"))

    found = stored(spark_broker, copy)
    assert [message.value for message in found] == [b"1", b"2", b"3"]
    assert {(message.subject, message.key, tuple(message.headers)) for message in found} == {(f"{copy}.eu", b"k", ())}


def test_replay_at_a_rate_stores_each_message_once(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    orders, copy = topic("orders"), topic("copy")
    spark_broker.publish_many([(orders, b"%d" % number) for number in range(5)])
    text = replay(orders, copy, table="rate = 2")
    runner.run(text)

    forget_last_batch(runner.directory / "checkpoint")
    runner.run(text)

    assert [message.value for message in stored(spark_broker, copy)] == [b"%d" % number for number in range(5)]


def test_a_rate_is_kept_by_waiting_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, done = [100.0], [0.0], list[int]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("penstock.pipelines.queries.time.monotonic", lambda: now[0])
    monkeypatch.setattr("penstock.pipelines.queries.time.sleep", sleep)
    batch: Any = None

    each = queries._paced(lambda _, number: done.append(number))
    each(batch, 0)
    now[0] += 0.25
    each(batch, 1)
    now[0] += 5
    each(batch, 2)

    assert (slept[1:], done) == ([0.0, 0.75, 0.0], [0, 1, 2])


# Dead letters.


def test_dead_letters_become_a_table_and_those_that_match_are_redriven(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str]
) -> None:
    orders, clean = topic("orders"), topic("clean")
    for value in (b"oops", b"[]", b"oh"):
        spark_broker.publish(orders, value)
    runner.run(f"""
name = "clean-{orders}"
kind = "transform"
[source]
topic = "{orders}"
schema = "id string"
[transform]
sql = "SELECT id FROM source"
[sink]
topic = "{clean}"
""")
    text = f"""
name = "letters-{orders}"
kind = "dead_letters"
[source]
topic = "DLQ"
subjects = ["DLQ.{orders}"]
[dead_letters]
redrive = "reason LIKE '%not JSON' AND value <> 'oh'"
[sink]
parquet = "letters"
"""
    other = Runner(runner.spark, runner.directory / "letters-run", spark_broker.servers)
    other.directory.mkdir()
    other.run(text)

    found = runner.spark.read.parquet(str(other.directory / "letters")).orderBy("reason").collect()
    assert [(row["reason"], row["subject"], row["letters"]) for row in found] == [
        ("it is JSON, but not an object", orders, 1),
        ("it is not JSON", orders, 2),
    ]
    assert [message.value for message in stored(spark_broker, orders)] == [b"oops", b"[]", b"oh", b"oops"]

    # Another condition looks at all of them, and what was redriven stays so.
    other.run(text.replace("value <> 'oh'", "true"))

    assert [message.value for message in stored(spark_broker, orders)] == [b"oops", b"[]", b"oh", b"oops", b"oh"]
    looked = other.load(f"""
name = "looked-{orders}"
kind = "dead_letters"
[source]
subjects = ["DLQ.{orders}"]
""")
    assert queries.start(runner.spark, looked, str(other.directory / "none"), {"availableNow": True}) == []
    assert sum(row["letters"] for row in queries.dead_letter_table(runner.spark, looked).collect()) == 3


# Archive.


def test_archive_keeps_what_replay_then_reads(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[..., str]
) -> None:
    orders, copy = topic("orders", 2), topic("copy")
    spark_broker.publish_many([(orders, b"%d" % number) for number in range(10)])
    runner.run(f"""
name = "archive-{orders}"
kind = "archive"
[source]
topic = "{orders}"
[sink]
archive = "archive"
""")
    from penstock.spark.archive import Archive

    ranges = Archive(str(runner.directory / "archive")).ranges(orders)
    assert sum(end - first for first, end in ranges.values()) == 10
    other = Runner(runner.spark, runner.directory / "replay-run", spark_broker.servers)
    other.directory.mkdir()
    other.run(replay(orders, copy, f'archive = "{runner.directory / "archive"}"'))

    assert sorted(int(message.value) for message in stored(spark_broker, copy)) == list(range(10))


# What the source is told.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('start = "latest"', {"startingOffsets": "latest"}),
        ("start = 2026-01-01T00:00:00Z", {"startingTimestamp": "1767225600000"}),
        ('end = "latest"', {"startingOffsets": "earliest", "endingOffsets": "latest"}),
        ("end = 2026-01-01T00:00:00.5Z", {"endingTimestamp": "1767225600500"}),
        ('subjects = ["a.*", "a.b.>"]', {"subjects": "a.*,a.b.>"}),
        ("options = { minPartitions = 4 }", {"minPartitions": "4"}),
    ],
)
def test_what_the_source_is_told(runner: Runner, line: str, expected: dict[str, str]) -> None:
    made = runner.load(replay("orders", "copy", line))

    options = queries.read_options(made, made.source)

    assert expected.items() <= options.items()
    assert (options["subscribe"], options["group"]) == ("orders", "replay-orders")


def test_a_query_that_cannot_start_leaves_none_behind(
    runner: Runner, spark_broker: SparkBroker, topic: Callable[[str], str]
) -> None:
    orders = topic("orders")
    made = runner.load(aggregate(orders, 'parquet = "revenue"'))
    # In the way of the second query.
    (runner.directory / "checkpoint").mkdir()
    (runner.directory / "checkpoint" / "letters").write_text("")

    with pytest.raises(Exception, match="letters"):
        queries.start(runner.spark, made, str(runner.directory / "checkpoint"), {"processingTime": "1 second"})

    assert not runner.spark.streams.active
