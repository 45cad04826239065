"""The functions of which pipelines are made, without a broker: batches in memory, streams from files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.model import headers as blocks

pytest.importorskip("pyspark")

from penstock.pipelines import frames
from penstock.spark.json_topics import parse_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOURCE = (
    "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, subject string, "
    "headers map<string,string>"
)
ORDER = "id string, n int, at timestamp, place struct<zip:int, city:string>, lines array<int>"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def rows(spark: SparkSession, *values: bytes | None, **columns: Any) -> DataFrame:
    """Rows as the source has them, at the offsets 0, 1, …"""
    row = {"topic": "orders", "partition": 0, "timestamp": NOON, "key": b"k", "subject": "orders.eu", "headers": {}}
    row |= columns
    made = [
        (
            row["topic"],
            row["partition"],
            offset,
            row["timestamp"],
            row["key"],
            value,
            row["subject"],
            row["headers"],
        )
        for offset, value in enumerate(values)
    ]
    return spark.createDataFrame(made, SOURCE)


def reasons(spark: SparkSession, values: Sequence[bytes | None], schema: str = ORDER, **options: Any) -> list[str]:
    parsed = parse_json(rows(spark, *values), schema, **options)
    return [row["_reason"] for row in parsed.orderBy("_offset").collect()]


class Stream:
    """A stream of JSON rows from files; each batch is one file."""

    def __init__(self, spark: SparkSession, directory: Path, schema: str) -> None:
        self._spark = spark
        self._directory = directory
        self._count = 0
        (directory / "in").mkdir(parents=True)
        self.frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(directory / "in"))

    def add(self, *batch: Mapping[str, Any]) -> None:
        self._count += 1
        lines = "\n".join(json.dumps(row, default=str) for row in batch)
        path = self._directory / "in" / f"{self._count:04}.json"
        path.write_text(lines)
        # Spark takes them in the order of their times.
        os.utime(path, (self._count, self._count))


def outcome(stream: DataFrame, directory: Path, mode: str = "append") -> tuple[list[Any], list[Any]]:
    """What a stream gives when all its files are read; and the progress of each batch."""
    out = directory / "out"
    writer = stream.writeStream.format("parquet").option("path", str(out)).outputMode(mode)
    query = writer.option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    return stream.sparkSession.read.parquet(str(out)).collect(), query.recentProgress


# Parsing.


def test_fields_become_columns_and_the_row_is_kept_beside_them(spark: SparkSession) -> None:
    value = b'{"id":"a","n":1,"at":"2026-01-01T12:00:00.123456Z","place":{"zip":1,"city":"x"},"lines":[1,2]}'

    parsed = parse_json(rows(spark, value, headers={"A": "b"}), ORDER)

    assert parsed.columns == [
        *("id", "n", "at", "place", "lines"),
        *("_topic", "_partition", "_offset", "_timestamp", "_key", "_value", "_subject", "_headers", "_reason"),
    ]
    [row] = frames.good(parsed).collect()
    assert (row["id"], row["n"], row["place"]["zip"], row["lines"]) == ("a", 1, 1, [1, 2])
    assert row["at"].replace(tzinfo=UTC) == NOON + timedelta(microseconds=123456)
    assert (row["_topic"], row["_offset"], row["_subject"]) == ("orders", 0, "orders.eu")
    assert (bytes(row["_key"]), bytes(row["_value"]), row["_headers"]) == (b"k", value, {"A": "b"})


@pytest.mark.parametrize("value", [b"{}", b' {"n": null}\n', b'{"id":"}{"}', b'{"more":[{"x":{}}]}', b'{"n":1}'])
def test_json_that_fits_has_no_reason(spark: SparkSession, value: bytes) -> None:
    assert reasons(spark, [value]) == [None]


def test_a_row_that_does_not_fit_says_why(spark: SparkSession) -> None:
    expected = {
        None: "it has no value",
        b"": "it is empty",
        b" \n": "it is empty",
        b"hello": "it is not JSON",
        b'{"id":': "it is not JSON",
        b"\xff\xfe": "it is not JSON",
        b'{"id":"\xff"}': "it is not UTF-8 text",
        b'[{"id":"a"}]': "it is JSON, but not an object",
        b"null": "it is JSON, but not an object",
        b"3": "it is JSON, but not an object",
        b'{"id":"a"} x': "something follows the JSON object",
        b'{"id":"a"}\n{"id":"b"}': "something follows the JSON object",
        b'{"id":"a"},{"id":"b"}': "something follows the JSON object",
        b'{"id":"a"}}': "something follows the JSON object",
        b'{"id":"a","n":"x"}': "field n is not of type int",
        b'{"n":99999999999}': "field n is not of type int",
        b'{"n":1.5}': "field n is not of type int",
        b'{"id":null,"n":true}': "field n is not of type int",
        b'{"at":"yesterday"}': "field at is not of type timestamp",
        b'{"place":5}': "field place is not of type struct<zip:int,city:string>",
        b'{"place":{"zip":"x"}}': "field place.zip is not of type int",
        b'{"lines":[1,"x"]}': "field lines is not of type array<int>",
    }

    assert dict(zip(expected, reasons(spark, list(expected)), strict=True)) == expected


def test_what_must_be_there_is_missed(spark: SparkSession) -> None:
    values = [b'{"id":"a","n":1}', b'{"n":1}', b'{"id":null,"n":1}', b'{"id":"a"}']

    found = reasons(spark, values, "id string NOT NULL, n int", required=["n"])

    assert found == [None, "field id is missing", "field id is missing", "field n is missing"]


def test_a_column_beside_the_fields_can_be_required(spark: SparkSession) -> None:
    parsed = parse_json(rows(spark, b"{}", key=None), "id string", required=["_key"])

    assert [row["_reason"] for row in parsed.collect()] == ["it has no key"]


def test_a_field_of_any_name_is_read(spark: SparkSession) -> None:
    schema = "`order-id` int, `a.b` int, `it's` int"

    parsed = parse_json(rows(spark, b'{"order-id":1,"a.b":2,"it\'s":3}', b'{"a.b":"x"}'), schema)

    first, second = parsed.orderBy("_offset").collect()
    assert (first["order-id"], first["a.b"], first["it's"], first["_reason"]) == (1, 2, 3, None)
    assert second["_reason"] == "field a.b is not of type int"


@pytest.mark.parametrize(
    ("schema", "required", "sentence"),
    [
        ("id string, _key string", [], "the schema has a field _key"),
        ("id string, id int", [], "two columns are named id"),
        ("id string", ["at"], "field at is required, but is not in the schema: it has id"),
        ("int", [], "invalid schema 'int': it must name fields"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(
    spark: SparkSession, schema: str, required: list[str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_json(rows(spark, b"{}"), schema, required=required)


# What goes to the sink.


def test_rows_are_written_as_json(spark: SparkSession) -> None:
    parsed = frames.good(parse_json(rows(spark, b'{"id":"a"}', headers={"A": "b", "Msg-ID": "1"}), "id string"))

    made = frames.transform(parsed, "SELECT *, timestamp_micros(1500001) AS t, CAST(NULL AS int) AS none FROM source")
    out = frames.to_json(made, topic="clean")

    assert out.schema.simpleString() == "struct<value:binary,key:binary,subject:string,headers:map<string,string>>"
    [row] = out.collect()
    assert json.loads(row["value"]) == {"id": "a", "t": "1970-01-01T00:00:01.500001Z", "none": None}
    assert (bytes(row["key"]), row["subject"], row["headers"]) == (b"k", "clean", {"A": "b"})


def test_key_and_subject_are_columns_or_expressions(spark: SparkSession) -> None:
    made = spark.createDataFrame([(7, "eu north.1"), (8, None), (9, ".."), (10, "a..b.*")], "n int, place string")

    out = frames.to_json(made, topic="clean", key="n", subject="lower(place)").collect()

    assert [(bytes(row["key"]), row["subject"]) for row in out] == [
        (b"7", "clean.eu_north.1"),
        (b"8", "clean"),
        (b"9", "clean"),
        (b"10", "clean.a.b._"),
    ]


def test_a_binary_key_stays_as_it_is_and_no_key_is_none(spark: SparkSession) -> None:
    made = spark.createDataFrame([(bytearray(b"\xff\x00"),)], "k binary")

    assert bytes(frames.to_json(made, topic="t", key="k").collect()[0]["key"]) == b"\xff\x00"
    assert frames.to_json(made, topic="t").collect()[0]["key"] is None


def test_json_needs_a_column_and_unique_names(spark: SparkSession) -> None:
    parsed = parse_json(rows(spark, b"{}"), "id string")

    with pytest.raises(ValueError, match="no column to write as JSON"):
        frames.to_json(parsed.select("_key", "_reason"), topic="t")
    with pytest.raises(ValueError, match="two columns are named id"):
        frames.to_json(parsed.select("id", "id"), topic="t")


def test_a_dead_letter_is_as_the_broker_writes_it(spark: SparkSession) -> None:
    had = {"Trace": "1", "Nats-Msg-Id": "x", "Delay": "5s", "Dead-Letter-Reason": "an earlier one"}
    parsed = parse_json(rows(spark, b'{"id":"a"}', b"not\xff", headers=had), "id string")

    [row] = frames.dead_letters_of(parsed, group="clean").collect()

    assert (bytes(row["value"]), bytes(row["key"]), row["subject"]) == (b"not\xff", b"k", "DLQ.orders.eu")
    written = blocks.lines(
        trace=1,
        dead_letter_reason="it is not JSON",
        dead_letter_attempts=1,
        dead_letter_group="clean",
        dead_letter_subject="orders.eu",
        dead_letter_topic="orders",
        dead_letter_partition=0,
        dead_letter_offset=1,
    )
    assert row["headers"] == dict(line.split(": ", 1) for line in written.decode().splitlines())


def test_a_dead_letter_of_a_long_subject_has_a_short_one(spark: SparkSession) -> None:
    subject = "orders." + "x" * 1015
    parsed = parse_json(rows(spark, b"not", subject=subject), "id string")

    row = frames.dead_letters_of(parsed, group="g").collect()[0]

    assert row["subject"] == "DLQ.orders"
    assert row["headers"]["Dead-Letter-Subject"] == subject


def test_rows_without_headers_become_dead_letters_too(spark: SparkSession) -> None:
    parsed = parse_json(rows(spark, b"not").drop("headers"), "id string")

    row = frames.dead_letters_of(parsed, group="g").collect()[0]

    assert row["headers"]["Dead-Letter-Reason"] == "it is not JSON"


def test_each_row_is_good_or_a_dead_letter(spark: SparkSession) -> None:
    values = [b'{"id":"a"}', b"not", b"", None, b'{"id":"b"}', b"[]"]
    parsed = parse_json(rows(spark, *values), "id string")

    good = frames.raw(frames.good(parsed), topic="clean")
    both = good.unionByName(frames.dead_letters_of(parsed, group="g")).collect()

    found = sorted((row["subject"], row["value"] and bytes(row["value"])) for row in both if row["value"] is not None)
    assert found == [
        ("DLQ.orders.eu", b""),
        ("DLQ.orders.eu", b"[]"),
        ("DLQ.orders.eu", b"not"),
        ("clean.eu", b'{"id":"a"}'),
        ("clean.eu", b'{"id":"b"}'),
    ]
    assert len(both) == len(values)


def test_a_replayed_row_keeps_what_it_was_below_another_topic(spark: SparkSession) -> None:
    source = rows(spark, b"\x00raw", headers={"Msg-ID": "1", "deliver-at": "9", "A": "b"})
    source = source.unionAll(rows(spark, None, subject="orders")).unionAll(rows(spark, b"", subject="ordersx.y"))

    out = frames.replay(source, topic="copy").collect()

    assert [(row["value"] and bytes(row["value"]), row["subject"]) for row in out] == [
        (b"\x00raw", "copy.eu"),
        (None, "copy"),
        (b"", "copy"),
    ]
    assert [bytes(row["key"]) for row in out] == [b"k"] * 3
    assert out[0]["headers"] == {"A": "b"}


# Transforming.


def test_sql_finds_the_rows_under_a_name_that_nobody_else_sees(spark: SparkSession) -> None:
    ours, theirs = spark.range(3), spark.range(10, 12)
    theirs.createOrReplaceTempView("source")
    try:
        query = (
            "WITH big AS (SELECT id FROM source WHERE id > 0 AND '{x}' <> '{{')\nSELECT sum(id) AS s FROM big -- all"
        )
        first = frames.transform(ours, query)
        second = frames.transform(theirs, "SELECT sum(id) AS s FROM rows;", view="rows")

        assert (first.collect()[0]["s"], second.collect()[0]["s"]) == (3, 21)
        assert spark.table("source").count() == 2
    finally:
        spark.catalog.dropTempView("source")


def test_an_error_in_sql_tells_its_line(spark: SparkSession) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=r"(?s)`nothing`.*line 2") as caught:
        frames.transform(spark.range(1), "SELECT id,\n  nothing\nFROM source")
    assert "`id`" in str(caught.value)


def test_a_function_transforms(spark: SparkSession) -> None:
    made = frames.transform(spark.range(5), lambda df: df.where("id > 2"))

    assert [row["id"] for row in made.collect()] == [3, 4]


def test_a_function_that_returns_no_frame_is_named(spark: SparkSession) -> None:
    def clean(df: DataFrame) -> Any:
        return df.collect()

    with pytest.raises(TypeError, match=r"clean returned list: it must return a DataFrame"):
        frames.transform(spark.range(1), clean)


# Windows, repetitions, joins.


def at(minute: float) -> datetime:
    return NOON + timedelta(minutes=minute)


def test_windows_are_aggregated(spark: SparkSession) -> None:
    made = [(at(0), "de", 1.0), (at(4), "de", 2.0), (at(4), "fr", 5.0), (at(5), "de", 8.0)]
    df = spark.createDataFrame(made, "at timestamp, country string, amount double")
    measures = {"revenue": "sum(amount)", "orders": "count(*)"}

    out = frames.aggregate(df, time="at", window="5 minutes", watermark="1 minute", by=["country"], measures=measures)

    assert out.columns == ["window_start", "window_end", "country", "revenue", "orders"]
    found = sorted((row["window_start"].minute, row["window_end"].minute, *row[2:]) for row in out.collect())
    assert found == [(0, 5, "de", 3.0, 2), (0, 5, "fr", 5.0, 1), (5, 10, "de", 8.0, 1)]


def test_windows_may_slide(spark: SparkSession) -> None:
    df = spark.createDataFrame([(at(7),)], "at timestamp")

    out = frames.aggregate(
        df, time="at", window="10 minutes", slide="5 minutes", watermark="1 minute", measures={"n": "count(*)"}
    )

    assert sorted(row["window_start"].minute for row in out.collect()) == [0, 5]


@pytest.mark.parametrize(
    ("by", "measures", "sentence"),
    [
        ([], {}, "at least one measure"),
        (["id"], {"id": "count(*)"}, "two columns are named id"),
        ([], {"window_end": "count(*)"}, "two columns are named window_end"),
    ],
)
def test_measures_that_cannot_be_are_refused(
    spark: SparkSession, by: list[str], measures: dict[str, str], sentence: str
) -> None:
    df = spark.createDataFrame([(at(0), 1)], "at timestamp, id int")

    with pytest.raises(ValueError, match=sentence):
        frames.aggregate(df, time="at", window="1 minute", watermark="1 minute", by=by, measures=measures)


def test_a_stream_gives_closed_windows_once_and_counts_late_rows(spark: SparkSession, tmp_path: Path) -> None:
    stream = Stream(spark, tmp_path, "at timestamp, amount int")
    stream.add({"at": at(1), "amount": 1}, {"at": at(2), "amount": 2})
    stream.add({"at": at(20), "amount": 4})
    # A row counts if it was in time when the batch before ended.
    stream.add({"at": at(4), "amount": 8}, {"at": at(21), "amount": 16})
    stream.add({"at": at(3), "amount": 32}, {"at": at(40), "amount": 64})

    made = frames.aggregate(
        stream.frame, time="at", window="5 minutes", watermark="5 minutes", measures={"total": "sum(amount)"}
    )
    found, progress = outcome(made, tmp_path)

    assert sorted((row["window_start"].minute, row["total"]) for row in found) == [(0, 11), (20, 20)]
    assert sum(map(frames.late_rows, progress)) == 1


def test_a_stream_gives_the_first_of_those_that_repeat(spark: SparkSession, tmp_path: Path) -> None:
    stream = Stream(spark, tmp_path, "at timestamp, id string")
    stream.add({"at": at(0), "id": "a"}, {"at": at(0), "id": "b"})
    stream.add({"at": at(5), "id": "a"}, {"at": at(5), "id": "c"})

    made = frames.deduplicate(stream.frame, by=["id"], time="at", watermark="10 minutes")
    found, _ = outcome(made, tmp_path)

    assert sorted((row["id"], row["at"].minute) for row in found) == [("a", 0), ("b", 0), ("c", 5)]


def test_a_batch_is_deduplicated_as_a_whole(spark: SparkSession) -> None:
    df = spark.createDataFrame([(at(0), "a"), (at(999), "a"), (at(0), "b")], "at timestamp, id string")

    made = frames.deduplicate(df, by=["id"], time="at", watermark="1 minute")

    assert sorted(row["id"] for row in made.collect()) == ["a", "b"]


def sides(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    orders = [("a", at(0), 1, "x"), ("b", at(0), 2, "x"), ("c", at(0), 3, "x")]
    payments = [("a", at(10), 1), ("a", at(-10), 2), ("a", at(11), 3), ("b", at(99), 4)]
    left = spark.createDataFrame(orders, "id string, at timestamp, n int, _key string")
    return left, spark.createDataFrame(payments, "id string, at timestamp, n int").withColumn("_key", left_out())


def left_out() -> Any:
    from pyspark.sql.functions import lit

    return lit("not mine")


def test_rows_are_joined_within_a_time(spark: SparkSession) -> None:
    left, right = sides(spark)
    options: dict[str, Any] = {"on": ["id"], "within": "10 minutes", "watermark": "1 minute"}
    options |= {"left_time": "at", "right_time": "at"}

    inner = frames.join(left, right, **options)
    outer = frames.join(left, right, how="left_outer", **options)

    assert inner.columns == ["id", "left_at", "left_n", "_key", "right_at", "right_n"]
    assert sorted((row["id"], row["left_n"], row["right_n"], row["_key"]) for row in inner.collect()) == [
        ("a", 1, 1, "x"),
        ("a", 1, 2, "x"),
    ]
    alone = [(row["id"], row["right_n"]) for row in outer.collect() if row["right_at"] is None]
    assert sorted(alone) == [("b", None), ("c", None)]


def test_streams_are_joined_and_the_left_alone_comes_when_nothing_can(spark: SparkSession, tmp_path: Path) -> None:
    orders = Stream(spark, tmp_path / "orders", "id string, at timestamp")
    payments = Stream(spark, tmp_path / "payments", "id string, paid_at timestamp, method string")
    orders.add({"id": "a", "at": at(0)}, {"id": "b", "at": at(0)})
    payments.add({"id": "a", "paid_at": at(5), "method": "card"})
    orders.add({"id": "z", "at": at(200)})
    payments.add({"id": "y", "paid_at": at(200), "method": "cash"})

    made = frames.join(
        orders.frame,
        payments.frame,
        on=["id"],
        within="30 minutes",
        watermark="10 minutes",
        left_time="at",
        right_time="paid_at",
        how="left_outer",
    )
    found, _ = outcome(made, tmp_path)

    assert made.columns == ["id", "at", "paid_at", "method"]
    assert sorted((row["id"], row["method"]) for row in found) == [("a", "card"), ("b", None)]


def test_a_join_that_cannot_be_is_refused(spark: SparkSession) -> None:
    left, right = sides(spark)
    times = {"within": "1 minute", "watermark": "1 minute", "left_time": "at", "right_time": "at"}

    with pytest.raises(ValueError, match="it must be inner or left_outer"):
        frames.join(left, right, on=["id"], how="full", **times)
    with pytest.raises(ValueError, match="at least one common column"):
        frames.join(left, right, on=[], **times)


# Dead letters.


def test_dead_letters_are_read_and_grouped(spark: SparkSession) -> None:
    parsed = parse_json(rows(spark, b"not", b"[]", b"also not"), "id string")
    sent = frames.dead_letters_of(parsed, group="clean").collect()
    columns = ("key", "value", "subject", "headers")
    stored = [("DLQ", 0, n, NOON, *(row[name] for name in columns)) for n, row in enumerate(sent)]
    stored += [("DLQ", 0, 9, NOON, None, bytearray(b"no letter"), "DLQ", {})]
    letters = frames.letters(spark.createDataFrame(stored, SOURCE))

    found = letters.orderBy("offset").collect()[0]
    assert (found["offset"], found["subject"], found["topic"], found["origin_offset"]) == (0, "orders.eu", "orders", 0)
    assert (found["group"], found["reason"], found["attempts"], found["value"]) == ("clean", "it is not JSON", 1, "not")
    assert found["headers"] == {}
    table = frames.dead_letter_table(letters).orderBy("reason").collect()
    assert [(row["reason"], row["subject"], row["letters"]) for row in table] == [
        ("it is JSON, but not an object", "orders.eu", 1),
        ("it is not JSON", "orders.eu", 2),
    ]
    assert table[0]["hour"].hour == 12
    assert table[0]["first"] == table[0]["last"]
