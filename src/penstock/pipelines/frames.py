"""What pipelines are made of: functions from DataFrames to DataFrames, for streams and for batches, without a broker.

    rows of the source ─ parse_json ┬ good ─ transform, aggregate, deduplicate, join ─ to_json ┬ rows for the sink
                                    └ bad ─ dead_letters_of ───────────────────────────────────┘

Rows of the source have the columns topic, partition, offset, timestamp, key, value, subject and perhaps headers. A
parsed row has the fields of its JSON, and beside them what it was: _topic, _partition, … (`KEPT`). Rows for the sink
have value, key, subject and headers. So both branches can be united and written as one: a batch is stored with all its
dead letters, or nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as fn

from penstock.spark.json_topics import REASON, RESERVED, check_unique

DEAD_LETTERS: Final = "DLQ"

_HEADERS: Final = "map<string,string>"
# What headers ask of the broker counts for the message that had them: its id would make a copy look like a repetition,
# and its delay is over.
_ASKING: Final = ("msg-id", "nats-msg-id", "delay", "deliver-at")
# Microseconds, which Spark's default would cut off.
_JSON: Final = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_SUBJECT_BYTES_MAX: Final = 1024


def good(df: DataFrame) -> DataFrame:
    """Those that parsed."""
    return df.where(fn.col(REASON).isNull()).drop(REASON)


def bad(df: DataFrame) -> DataFrame:
    """Those that did not, with `_reason`."""
    return df.where(fn.col(REASON).isNotNull())


def to_json(df: DataFrame, *, topic: str, key: str | None = None, subject: str | None = None) -> DataFrame:
    """Rows for the sink: each row's columns as a JSON object, but for those that a parsed row has beside its fields.

    `key` and `subject` are columns or SQL expressions. Without a key the row's `_key` stays, if it has one. The subject
    is the topic, with that of the row below it; a character that it cannot have becomes `_`. Headers stay, too, if the
    row has `_headers`.
    """
    fields = [named(name) for name in df.columns if name not in RESERVED]
    if not fields:
        raise ValueError("no column is left to write as JSON: select at least one that is not _topic, _key, …")
    check_unique(df.columns)
    return df.select(
        fn.to_json(fn.struct(*fields), _JSON).cast("binary").alias("value"),
        (_key(df) if key is None else _bytes_of(df, key)).alias("key"),
        (fn.lit(topic) if subject is None else _below(topic, fn.expr(subject))).alias("subject"),
        _headers(df, "_headers").alias("headers"),
    )


def raw(df: DataFrame, *, topic: str, key: str | None = None, subject: str | None = None) -> DataFrame:
    """Rows for the sink: parsed rows with the values that they had, not written anew.

    `key` and `subject` as for `to_json`; without a subject, what followed the old topic in it follows the new one.
    """
    return df.select(
        fn.col("_value").cast("binary").alias("value"),
        (_key(df) if key is None else _bytes_of(df, key)).alias("key"),
        (_moved("_topic", "_subject", topic) if subject is None else _below(topic, fn.expr(subject))).alias("subject"),
        _headers(df, "_headers").alias("headers"),
    )


def dead_letters_of(df: DataFrame, *, group: str, prefix: str = DEAD_LETTERS) -> DataFrame:
    """Rows for the sink: those that did not parse, as dead letters of a group, which the broker lists and redrives.

    Value, key and headers are as they were, but for an id or a delay; the headers also say why, and where the row was.
    """
    said = {
        "Reason": fn.regexp_replace(REASON, r"[\r\n]", " "),
        "Attempts": fn.lit("1"),
        "Group": fn.lit(group),
        "Subject": fn.col("_subject"),
        "Topic": fn.col("_topic"),
        "Partition": fn.col("_partition").cast("string"),
        "Offset": fn.col("_offset").cast("string"),
    }
    pairs = [part for name, value in said.items() for part in (fn.lit(f"Dead-Letter-{name}"), value)]
    subject = fn.concat(fn.lit(f"{prefix}."), "_subject")
    # One that has no room for the prefix goes below its topic's; the header has all of it.
    short = fn.concat(fn.lit(f"{prefix}."), "_topic")
    return bad(df).select(
        fn.col("_value").cast("binary").alias("value"),
        fn.col("_key").cast("binary").alias("key"),
        fn.when(fn.octet_length(subject) > _SUBJECT_BYTES_MAX, short).otherwise(subject).alias("subject"),
        fn.map_concat(_headers(df, "_headers", "dead-letter-"), fn.create_map(*pairs)).alias("headers"),
    )


def transform(df: DataFrame, query: str | Callable[[DataFrame], DataFrame], *, view: str = "source") -> DataFrame:
    """What a SQL query makes of the rows, which it finds under the name `view`; or what a function makes of them."""
    if callable(query):
        made = query(df)
        # A function that came by its name has no type that was checked.
        if not _is_data_frame(made):
            raise TypeError(f"{_name_of(query)} returned {type(made).__name__}: it must return a DataFrame")
        return made
    # The name is one within the query only, so that pipelines of one session do not find each other's rows. Spark fills
    # in what stands in braces: those of the query are its own. A comment may be its last line.
    own = query.strip().rstrip(";").replace("{", "{{").replace("}", "}}")
    return df.sparkSession.sql(f"WITH `{view}` AS (SELECT * FROM {{rows}}) ({own}\n)", rows=df)


def aggregate(
    df: DataFrame,
    *,
    time: str,
    window: str,
    watermark: str,
    measures: Mapping[str, str],
    slide: str | None = None,
    by: Sequence[str] = (),
) -> DataFrame:
    """Measures over windows of time: window_start, window_end, the columns of `by`, and the measures.

    `measures`: SQL by name, such as {"revenue": "sum(amount)"}. `window`, `slide` and `watermark` are times such as "5
    minutes". In a stream a row that is older than the watermark's delay is late: it counts for nothing, and `late_rows`
    says how many there were.
    """
    if not measures:
        raise ValueError("an aggregation has at least one measure")
    check_unique(["window_start", "window_end", *by, *measures])
    windows = fn.window(fn.col(time), window, slide) if slide is not None else fn.window(fn.col(time), window)
    made = [fn.expr(sql).alias(name) for name, sql in measures.items()]
    rows = df.withWatermark(time, watermark).groupBy(windows.alias("_window"), *map(named, by)).agg(*made)
    bounds = [fn.col("_window.start").alias("window_start"), fn.col("_window.end").alias("window_end")]
    return rows.select(*bounds, *map(named, by), *map(named, measures))


def deduplicate(df: DataFrame, *, by: Sequence[str], time: str, watermark: str) -> DataFrame:
    """The first row of each key. In a stream keys are forgotten when they are older than the watermark's delay.

    So a repetition within that delay is always found, and one that comes later may be. A batch is looked at as a whole.
    """
    if not df.isStreaming:
        return df.dropDuplicates(list(by))
    return df.withWatermark(time, watermark).dropDuplicatesWithinWatermark(list(by))


def join(
    left: DataFrame,
    right: DataFrame,
    *,
    on: Sequence[str],
    within: str,
    watermark: str,
    left_time: str,
    right_time: str,
    how: str = "inner",
) -> DataFrame:
    """Rows of both sides that agree in `on` and whose times are at most `within` apart.

    `how`: "inner", or "left_outer": then a row of the left that finds none comes alone, when none can come any more.
    The columns are those of `on`, of the left and of the right; one that both have becomes left_x and right_x. Of the
    columns beside the fields (_key, …) those of the left stay.
    """
    if how not in ("inner", "left_outer"):
        raise ValueError(f"how = {how!r}: a join is inner or left_outer")
    if not on:
        raise ValueError("a join needs at least one column that both sides have")
    ours = left.withWatermark(left_time, watermark).alias("_left")
    theirs = right.withWatermark(right_time, watermark).alias("_right")
    far = fn.expr(f"INTERVAL '{within}'")
    at, other = fn.col(f"_left.`{left_time}`"), fn.col(f"_right.`{right_time}`")
    agree = (other >= at - far) & (other <= at + far)
    for name in on:
        agree = agree & (fn.col(f"_left.`{name}`") == fn.col(f"_right.`{name}`"))
    return ours.join(theirs, agree, how).select(*_both(left.columns, right.columns, on))


def replay(df: DataFrame, *, topic: str, key: str | None = None, subject: str | None = None) -> DataFrame:
    """Rows for the sink: rows of the source, for another topic.

    Values, keys and headers are as they were, but for an id or a delay; times and partitions are given anew. `key` and
    `subject` as for `raw`.
    """
    return df.select(
        fn.col("value").cast("binary").alias("value"),
        (fn.col("key").cast("binary") if key is None else _bytes_of(df, key)).alias("key"),
        (_moved("topic", "subject", topic) if subject is None else _below(topic, fn.expr(subject))).alias("subject"),
        _headers(df, "headers").alias("headers"),
    )


def letters(df: DataFrame) -> DataFrame:
    """Dead letters, from the rows of their topic with headers: what became of which message, and when.

    `subject`, `topic`, `origin_partition` and `origin_offset` say where the message was, `partition` and `offset` where
    the letter is. What somebody published there, and is no dead letter, is left out.
    """

    def said(name: str) -> Column:
        return fn.col("headers").getItem(f"Dead-Letter-{name}")

    return df.where(said("Subject").isNotNull()).select(
        "partition",
        "offset",
        "timestamp",
        fn.date_trunc("hour", "timestamp").alias("hour"),
        said("Subject").alias("subject"),
        said("Topic").alias("topic"),
        said("Partition").try_cast("int").alias("origin_partition"),
        said("Offset").try_cast("bigint").alias("origin_offset"),
        said("Group").alias("group"),
        said("Reason").alias("reason"),
        said("Attempts").try_cast("int").alias("attempts"),
        "key",
        fn.col("value").cast("string").alias("value"),
        _headers(df, "headers", "dead-letter-").alias("headers"),
    )


def dead_letter_table(df: DataFrame) -> DataFrame:
    """How many `letters` there are for each reason, subject and hour; the first and the last of them."""
    return df.groupBy("reason", "subject", "hour").agg(
        fn.count("*").alias("letters"), fn.min("timestamp").alias("first"), fn.max("timestamp").alias("last")
    )


def late_rows(progress: Any) -> int:
    """How many rows came too late for the watermark in a batch, by its `StreamingQueryProgress` (or that as a dict)."""
    found = progress if isinstance(progress, Mapping) else _json_of(progress)
    return sum(each.get("numRowsDroppedByWatermark") or 0 for each in found.get("stateOperators") or ())


def named(name: str) -> Column:
    """A column by its name, whatever characters that has."""
    return fn.col("`" + name.replace("`", "``") + "`")


# Columns.


def _key(df: DataFrame) -> Column:
    return fn.col("_key").cast("binary") if "_key" in df.columns else fn.lit(None).cast("binary")


def _bytes_of(df: DataFrame, sql: str) -> Column:
    """The expression's text as bytes. Spark casts numbers to bytes in its own way: these are written out."""
    column = fn.expr(sql)
    is_binary = df.select(column).schema[0].dataType.typeName() == "binary"
    return column if is_binary else column.cast("string").cast("binary")


def _headers(df: DataFrame, name: str, *beginnings: str) -> Column:
    """The headers, without those that ask something of the broker and those whose names begin so."""
    if name not in df.columns:
        return fn.create_map().cast(_HEADERS)

    def stays(header: Column, _: Column) -> Column:
        lower = fn.lower(header)
        left_out = lower.isin(*_ASKING)
        for beginning in beginnings:
            left_out = left_out | lower.startswith(beginning)
        return ~left_out

    return fn.coalesce(fn.map_filter(name, stays), fn.create_map().cast(_HEADERS))


def _below(topic: str, of: Column) -> Column:
    """The topic's subject that ends so: "eu" makes `orders.eu`. Blanks, wildcards and empty parts cannot be in one."""
    text = fn.regexp_replace(of.cast("string"), r"[\x00-\x20\x7f*>]", "_")
    text = fn.regexp_replace(fn.regexp_replace(text, r"\.{2,}", "."), r"^\.|\.$", "")
    return fn.when(text != "", fn.concat(fn.lit(f"{topic}."), text)).otherwise(fn.lit(topic))


def _moved(topic: str, subject: str, target: str) -> Column:
    """The subject below another topic: `orders.eu` of `orders` becomes `copy.eu`."""
    rest = fn.substring(fn.col(subject), fn.length(topic) + 1, fn.length(subject))
    is_below = fn.startswith(fn.col(subject), fn.concat(fn.col(topic), fn.lit(".")))
    return fn.when(is_below, fn.concat(fn.lit(target), rest)).otherwise(fn.lit(target))


def _both(left: Sequence[str], right: Sequence[str], on: Sequence[str]) -> list[Column]:
    columns = [fn.col(f"_left.`{name}`") for name in on]
    theirs = [name for name in right if name not in on and name not in RESERVED]
    for name in left:
        if name not in on:
            columns.append(fn.col(f"_left.`{name}`").alias(f"left_{name}" if name in theirs else name))
    for name in theirs:
        columns.append(fn.col(f"_right.`{name}`").alias(f"right_{name}" if name in left else name))
    return columns


def _is_data_frame(made: object) -> bool:
    # That of Spark Connect is a class of its own.
    return isinstance(made, DataFrame)


def _name_of(query: Callable[..., object]) -> str:
    return getattr(query, "__qualname__", None) or repr(query)


def _json_of(progress: Any) -> Mapping[str, Any]:
    import json

    found: Mapping[str, Any] = json.loads(progress.json)
    return found
