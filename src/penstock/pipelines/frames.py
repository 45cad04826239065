"""The building blocks of pipelines: functions from DataFrames to DataFrames, for streams and batches.

    rows of the source ─ parse_json ┬ good ─ transform, sql, aggregate, join, … ─ to_json ┬ rows for the sink
                                    └ bad ─ dead_letters_of ──────────────────────────────┘

Rows of the source have the columns topic, partition, offset, timestamp, key, value, subject and perhaps headers. A
parsed row has the fields of its JSON, and those columns as _topic, _partition, …. Rows for the sink have value, key,
subject and headers. So both branches can be united and written as one: a batch is stored with all of its dead letters,
or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as fn

from penstock.spark.json_topics import REASON, RESERVED, check_unique

DEAD_LETTERS: Final = "DLQ"
# The column of a row that holds its dead letter.
LETTER: Final = "_penstock_letter"

_HEADERS: Final = "map<string,string>"
# Headers that instruct the broker apply only to the original message: its ID would make the copy a duplicate, its delay
# is over, and its TTL began when it was published.
_ASKING: Final = ("msg-id", "nats-msg-id", "delay", "deliver-at", "nats-ttl")
# With microseconds, which Spark's default format drops.
_JSON: Final = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_SUBJECT_BYTES_MAX: Final = 1024
# The names of columns that exist only within `enrich` begin with this.
_LOOKUP: Final = "_penstock_lookup"


def good(df: DataFrame) -> DataFrame:
    """Return the rows that parsed."""
    return df.where(fn.col(REASON).isNull()).drop(REASON)


def bad(df: DataFrame) -> DataFrame:
    """Return the rows that did not parse, with `_reason`."""
    return df.where(fn.col(REASON).isNotNull())


def to_json(df: DataFrame, *, topic: str, key: str | None = None, subject: str | None = None) -> DataFrame:
    """Return rows for the sink, with the columns of each row as a JSON object. _topic, _key, … are left out.

    `key` and `subject` are columns or SQL expressions. Without `key` the row keeps its `_key`, if it has one. The value
    of `subject` is appended to the topic; characters that a subject cannot have become `_`. `_headers` are kept.
    """
    return df.select(*_aliased(_json_message(df, topic, key, subject)))


def with_letters(df: DataFrame, *, group: str) -> DataFrame:
    """Return parsed rows with LETTER instead of `_reason`: the dead letter of a bad row as a struct, else null."""
    letter = fn.struct(*_aliased(_dead_letter(group, df, DEAD_LETTERS)))
    # Spark would move a filter on this column below it, and evaluate it twice. See `parse_json`.
    is_bad = (fn.spark_partition_id() >= 0) & fn.col(REASON).isNotNull()
    return df.withColumn(LETTER, fn.when(is_bad, letter)).drop(REASON)


def without_letters(df: DataFrame) -> DataFrame:
    """Return the good rows of `with_letters`, as `good` returns them."""
    return df.where(fn.col(LETTER).isNull()).drop(LETTER)


def one_pass(df: DataFrame, *, topic: str, key: str | None = None, subject: str | None = None) -> DataFrame:
    """Return rows for the sink, from those with LETTER: dead letters, and the other rows as `to_json` returns them.

    A row is evaluated once, so it is one or the other even if evaluating it again would decide otherwise.
    """
    message, letter = _json_message(df.drop(LETTER), topic, key, subject), fn.col(LETTER)
    is_bad = letter.isNotNull()
    return df.select(
        *_aliased({name: fn.when(is_bad, letter.getField(name)).otherwise(message[name]) for name in message})
    )


def letters_among(rows: DataFrame) -> Column:
    """Count the dead letters in `one_pass`."""
    return fn.count(fn.when(fn.startswith(rows["subject"], fn.lit(f"{DEAD_LETTERS}.")), 1))


def raw(df: DataFrame, *, topic: str, key: str | None = None, subject: str | None = None) -> DataFrame:
    """Return rows for the sink, from parsed rows, with the original values.

    `key` and `subject` are as in `to_json`. Without `subject` the new topic replaces the old one in the row's subject.
    """
    return df.select(
        fn.col("_value").cast("binary").alias("value"),
        (_key(df) if key is None else _bytes_of(df, key)).alias("key"),
        (_moved("_topic", "_subject", topic) if subject is None else _below(topic, fn.expr(subject))).alias("subject"),
        _headers(df, "_headers").alias("headers"),
    )


def with_value(
    df: DataFrame, value: str, *, topic: str, key: str | None = None, subject: str | None = None
) -> DataFrame:
    """Return rows for the sink, with a column or SQL expression as value. Null makes a tombstone.

    `key` and `subject` are as in `to_json`.
    """
    return df.select(
        _bytes_of(df, value).alias("value"),
        (_key(df) if key is None else _bytes_of(df, key)).alias("key"),
        (fn.lit(topic) if subject is None else _below(topic, fn.expr(subject))).alias("subject"),
        _headers(df, "_headers").alias("headers"),
    )


def dead_letters_of(df: DataFrame, *, group: str, prefix: str = DEAD_LETTERS) -> DataFrame:
    """Return rows for the sink, from those that did not parse, as dead letters that the broker lists and redrives.

    Value, key and headers are unchanged, except that an ID or a delay is removed. Added headers hold the reason, the
    group and the origin.
    """
    return bad(df).select(*_aliased(_dead_letter(group, df, prefix)))


def _dead_letter(group: str, df: DataFrame, prefix: str) -> dict[str, Column]:
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
    # A subject that is too long with the prefix is shortened to its topic. The header has all of it.
    short = fn.concat(fn.lit(f"{prefix}."), "_topic")
    return {
        "value": fn.col("_value").cast("binary"),
        "key": fn.col("_key").cast("binary"),
        "subject": fn.when(fn.octet_length(subject) > _SUBJECT_BYTES_MAX, short).otherwise(subject),
        "headers": fn.map_concat(_headers(df, "_headers", "dead-letter-"), fn.create_map(*pairs)),
    }


def _json_message(df: DataFrame, topic: str, key: str | None, subject: str | None) -> dict[str, Column]:
    fields = [named(name) for name in df.columns if name not in RESERVED]
    if not fields:
        raise ValueError("no column to write as JSON: select at least one besides _topic, _key, …")
    check_unique(df.columns)
    return {
        "value": fn.to_json(fn.struct(*fields), _JSON).cast("binary"),
        "key": _key(df) if key is None else _bytes_of(df, key),
        "subject": fn.lit(topic) if subject is None else _below(topic, fn.expr(subject)),
        "headers": _headers(df, "_headers"),
    }


def _aliased(columns: Mapping[str, Column]) -> list[Column]:
    return [column.alias(name) for name, column in columns.items()]


def transform(df: DataFrame, query: str | Callable[[DataFrame], DataFrame], *, view: str = "source") -> DataFrame:
    """Return the result of a SQL query, which sees the rows as `view`, or of a function."""
    if callable(query):
        made = query(df)
        # A function that was imported by name has no checked type.
        if not _is_data_frame(made):
            raise TypeError(f"{_name_of(query)} returned {type(made).__name__}: it must return a DataFrame")
        return made
    return sql({view: df}, query)


def sql(views: Mapping[str, DataFrame], query: str) -> DataFrame:
    """Return the result of a SQL query over views, at least one, by their names."""
    # The names are local to the query, so that pipelines in one session do not see each other's rows. Spark substitutes
    # braces, so those of the query are escaped. The last line of the query may be a comment.
    own = query.strip().rstrip(";").replace("{", "{{").replace("}", "}}")
    tables: dict[str, Any] = {f"rows{number}": df for number, df in enumerate(views.values())}
    named_tables = ", ".join(
        f"`{view}` AS (SELECT * FROM {{{table}}})" for view, table in zip(views, tables, strict=True)
    )
    session = next(iter(views.values())).sparkSession
    return session.sql(f"WITH {named_tables} ({own}\n)", **tables)


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
    """Aggregate over windows of time. The columns are window_start, window_end, those of `by`, and the measures.

    `measures` is SQL by name, such as {"revenue": "sum(amount)"}. `window`, `slide` and `watermark` are durations such
    as "5 minutes". In a stream, rows behind the watermark are dropped; `late_rows` counts them.
    """
    if not measures:
        raise ValueError("an aggregation needs at least one measure")
    check_unique(["window_start", "window_end", *by, *measures])
    windows = fn.window(fn.col(time), window, slide) if slide is not None else fn.window(fn.col(time), window)
    made = [fn.expr(sql).alias(name) for name, sql in measures.items()]
    rows = df.withWatermark(time, watermark).groupBy(windows.alias("_window"), *map(named, by)).agg(*made)
    bounds = [fn.col("_window.start").alias("window_start"), fn.col("_window.end").alias("window_end")]
    return rows.select(*bounds, *map(named, by), *map(named, measures))


def sessionize(
    df: DataFrame, *, by: Sequence[str], time: str, gap: str, watermark: str, measures: Mapping[str, str]
) -> DataFrame:
    """Aggregate over sessions: rows that are equal in `by` and follow each other within `gap`.

    The columns are session_start, the time of the first row; session_end, which is `gap` after the last; those of `by`,
    and the measures. The arguments are as in `aggregate`.
    """
    if not measures:
        raise ValueError("a session needs at least one measure")
    check_unique(["session_start", "session_end", *by, *measures])
    made = [fn.expr(sql).alias(name) for name, sql in measures.items()]
    session = fn.session_window(fn.col(time), gap).alias("_session")
    rows = df.withWatermark(time, watermark).groupBy(session, *map(named, by)).agg(*made)
    bounds = [fn.col("_session.start").alias("session_start"), fn.col("_session.end").alias("session_end")]
    return rows.select(*bounds, *map(named, by), *map(named, measures))


def deduplicate(df: DataFrame, *, by: Sequence[str], time: str, watermark: str) -> DataFrame:
    """Return the first row of each key.

    A stream forgets keys that are behind the watermark: duplicates within its delay are always dropped, later ones may
    be. A batch is deduplicated as a whole.
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
    """Join rows that are equal in `on` and whose times are at most `within` apart.

    `how` is "inner" or "left_outer". With the latter, a row on the left without a match is returned alone once no match
    can come any more. The columns are those of `on`, of the left and of the right; a column x of both becomes left_x
    and right_x. The columns _key, … are those of the left.
    """
    if how not in ("inner", "left_outer"):
        raise ValueError(f"invalid how {how!r}: it must be inner or left_outer")
    if not on:
        raise ValueError("a join needs at least one common column")
    ours = left.withWatermark(left_time, watermark).alias("_left")
    theirs = right.withWatermark(right_time, watermark).alias("_right")
    far = fn.expr(f"INTERVAL '{within}'")
    at, other = fn.col(f"_left.`{left_time}`"), fn.col(f"_right.`{right_time}`")
    agree = (other >= at - far) & (other <= at + far)
    for name in on:
        agree = agree & (fn.col(f"_left.`{name}`") == fn.col(f"_right.`{name}`"))
    return ours.join(theirs, agree, how).select(*_both(left.columns, right.columns, on))


def latest(df: DataFrame) -> DataFrame:
    """Return the latest message of each key, from rows of the source. A tombstone removes its key.

    A key is always in one partition of a topic, where offsets order its messages. Messages without a key are left out.
    """
    row = fn.struct(*(named(name) for name in df.columns))
    found = df.where("key IS NOT NULL").groupBy("topic", "key").agg(fn.max_by(row, "offset").alias("_row"))
    return found.select("_row.*").where("value IS NOT NULL")


def enrich(
    df: DataFrame,
    lookup: DataFrame,
    *,
    on: Sequence[str],
    lookup_on: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
    required: bool = False,
) -> DataFrame:
    """Add columns of the row of `lookup` that is equal in `on`; nulls if there is none.

    `df` is parsed rows with `_reason`. With `required`, a row that finds nothing gets a `_reason`. `lookup_on` is the
    names of `on` in the lookup, which must be unique there. `columns` is SQL over the lookup by name; by default all of
    its columns that are not in `lookup_on`.
    """
    keys = list(lookup_on or on)
    wanted = columns or {name: named_sql(name) for name in lookup.columns if name not in {*keys, *RESERVED}}
    check_unique([*df.columns, *wanted])
    found = [named(name).alias(f"{_LOOKUP}{number}") for number, name in enumerate(keys)]
    table = lookup.select(*found, *(fn.expr(sql).alias(name) for name, sql in wanted.items()))
    table = table.withColumn(_LOOKUP, fn.lit(True))
    agree = reduce(and_, (named(name) == fn.col(f"{_LOOKUP}{number}") for number, name in enumerate(on)))
    joined = df.join(table, agree, "left")
    reason = fn.col(REASON)
    if required:
        values = fn.concat_ws(", ", *(fn.coalesce(named(name).cast("string"), fn.lit("null")) for name in on))
        missing = fn.concat(fn.lit(f"the lookup has no row with {', '.join(on)} = "), values)
        reason = fn.coalesce(reason, fn.when(fn.col(_LOOKUP).isNull(), missing))
    kept = [named(name) for name in df.columns if name != REASON]
    return joined.select(*kept, *map(named, wanted), reason.alias(REASON))


def with_tombstones(df: DataFrame, *, key: str) -> DataFrame:
    """Make tombstones valid rows: without fields, except for `key`, which is the key of the message.

    `df` is parsed rows with `_reason`.
    """
    kind = df.schema[key].dataType
    of_message = fn.col("_key").cast("string").try_cast(kind)
    refused = fn.when(fn.col("_key").isNull(), "it has neither a value nor a key").when(
        of_message.isNull(), f"it has no value, and its key is not of type {kind.simpleString()}"
    )
    is_tombstone = fn.col("_value").isNull()
    return df.withColumns(
        {
            key: fn.when(is_tombstone, of_message).otherwise(named(key)),
            REASON: fn.when(is_tombstone, refused).otherwise(fn.col(REASON)),
        }
    )


def changes(df: DataFrame, *, key: str, deleted: str) -> DataFrame:
    """Return the last row of each key, from rows of `with_tombstones`, and whether that is a tombstone, as `deleted`.

    Messages of one key must be in one partition, where offsets order them.
    """
    names = [name for name in df.columns if name not in RESERVED]
    check_unique([*names, deleted])
    row = fn.struct(*map(named, names), fn.col("_value").isNull().alias(deleted))
    # Within a batch only: Delta has the rows of those before.
    found = df.groupBy(named(key)).agg(fn.max_by(row, fn.struct("_offset", "_partition")).alias("_row"))
    return found.select("_row.*")


def replay(df: DataFrame, *, topic: str, key: str | None = None, subject: str | None = None) -> DataFrame:
    """Return rows for the sink, from rows of the source, for another topic.

    Values, keys and headers are unchanged, except that an ID or a delay is removed. The broker assigns new times and
    partitions. `key` and `subject` are as in `raw`.
    """
    return df.select(
        fn.col("value").cast("binary").alias("value"),
        (fn.col("key").cast("binary") if key is None else _bytes_of(df, key)).alias("key"),
        (_moved("topic", "subject", topic) if subject is None else _below(topic, fn.expr(subject))).alias("subject"),
        _headers(df, "headers").alias("headers"),
    )


def letters(df: DataFrame) -> DataFrame:
    """Return dead letters as a table, from the rows of their topic with headers.

    `subject`, `topic`, `origin_partition` and `origin_offset` are the origin of the message; `partition` and `offset`
    are those of the dead letter. Other messages in the topic are left out.
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
    """Count `letters` by reason, subject and hour, with the times of the first and the last."""
    return df.groupBy("reason", "subject", "hour").agg(
        fn.count("*").alias("letters"), fn.min("timestamp").alias("first"), fn.max("timestamp").alias("last")
    )


def late_rows(progress: Any) -> int:
    """Return how many rows of a batch were behind the watermark, from its `StreamingQueryProgress` or a dict of it."""
    found = progress if isinstance(progress, Mapping) else _json_of(progress)
    return sum(each.get("numRowsDroppedByWatermark") or 0 for each in found.get("stateOperators") or ())


def named(name: str) -> Column:
    """Return a column by its name, which may have any characters."""
    return fn.col(named_sql(name))


def named_sql(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


# Columns.


def _key(df: DataFrame) -> Column:
    return fn.col("_key").cast("binary") if "_key" in df.columns else fn.lit(None).cast("binary")


def _bytes_of(df: DataFrame, sql: str) -> Column:
    """Return an expression as bytes. Numbers become text first: Spark casts them to their binary form."""
    column = fn.expr(sql)
    is_binary = df.select(column).schema[0].dataType.typeName() == "binary"
    return column if is_binary else column.cast("string").cast("binary")


def _headers(df: DataFrame, name: str, *beginnings: str) -> Column:
    """Return the headers without those that instruct the broker, and without names with these beginnings."""
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
    """Append to the topic: "eu" makes `orders.eu`. Blanks, wildcards and empty parts are replaced."""
    text = fn.regexp_replace(of.cast("string"), r"[\x00-\x20\x7f*>]", "_")
    text = fn.regexp_replace(fn.regexp_replace(text, r"\.{2,}", "."), r"^\.|\.$", "")
    return fn.when(text != "", fn.concat(fn.lit(f"{topic}."), text)).otherwise(fn.lit(topic))


def _moved(topic: str, subject: str, target: str) -> Column:
    """Move a subject to another topic: `orders.eu` of `orders` becomes `copy.eu`."""
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
    # Spark Connect has a DataFrame class of its own.
    return isinstance(made, DataFrame)


def _name_of(query: Callable[..., object]) -> str:
    return getattr(query, "__qualname__", None) or repr(query)


def _json_of(progress: Any) -> Mapping[str, Any]:
    import json

    found: Mapping[str, Any] = json.loads(progress.json)
    return found
