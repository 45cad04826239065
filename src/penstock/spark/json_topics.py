"""A topic of JSON messages as a table, with a reason for every message that does not match the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from pyspark.sql import functions as fn
from pyspark.sql.types import DataType, StructType

from penstock.spark import connection
from penstock.spark.connection import SERVERS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# The source columns that a parsed row keeps, each with an underscore before its name.
KEPT: Final = ("topic", "partition", "offset", "timestamp", "key", "value", "subject", "headers")
REASON: Final = "_reason"
# Column names that a schema cannot use for its fields, and that are not written back as fields.
RESERVED: Final = frozenset({REASON, *(f"_{name}" for name in KEPT)})

# The columns of messages with headers, as the Spark source has them.
SOURCE: Final = (
    "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, subject string, "
    "headers map<string,string>"
)

_CORRUPT: Final = "_penstock_corrupt"


def from_json_topic(
    spark: SparkSession,
    topic: str,
    schema: str | StructType | None = None,
    *,
    servers: str = SERVERS,
    stream: bool = False,
    **options: str | float,
) -> DataFrame:
    """Return the JSON values of a topic as a DataFrame with the columns of `schema`, such as "id long, price double".
    Without it, they are those of the topic's own schema; raise UnknownSchema if it has none.

    The message's own columns follow as _topic, _partition, _offset, …, and `_reason` says why a value does not match
    the schema; it is null if it does. No row is dropped: filter with `where("_reason is null")`.

    `stream` returns a streaming DataFrame. `options` are those of the source, such as `startingOffsets="latest"`.
    """
    reader = (spark.readStream if stream else spark.read).format("penstock")
    messages = reader.options(**{"servers": servers, "subscribe": topic, **options}).load()
    return parse_json(messages, _registered(topic, servers, options) if schema is None else schema)


def _registered(topic: str, servers: str, options: Mapping[str, str | float]) -> str:
    """Return the schema of a topic, as DDL."""
    return connection.client(servers, connection.TIMEOUT_S, **connection.login(options)).schema(topic).to_ddl()


def parse_json(df: DataFrame, schema: str | StructType, *, required: Sequence[str] = ()) -> DataFrame:
    """Parse each value, a JSON object in UTF-8, into columns, and keep the row's own as _topic, _partition, ….

    `schema` is DDL such as "id string NOT NULL, amount double". `_reason` is null if the row matches it; otherwise it
    says why not, and the fields must not be used. NOT NULL fields must be present, and so must the `required` ones:
    fields, or columns such as _key. Other fields may be absent.
    """
    wanted = _struct(schema)
    _check_names(wanted.names, [name for name in required if name not in RESERVED])
    present = {*required, *(field.name for field in wanted.fields if not field.nullable)}
    text = fn.col("value").cast("string")
    read = StructType([*_nullable(wanted).fields]).add(_CORRUPT, "string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    columns = [name for name in KEPT if name in df.columns]
    kept = [fn.col(name).alias(f"_{name}") for name in columns]
    # Spark would move a filter on `_reason` below the parsing, and so parse each value for the filter and again for the
    # columns. It does not move it below a column that may differ between two evaluations, as far as Spark can tell.
    once = fn.when(fn.spark_partition_id() >= 0, text)
    parsed = df.select(*kept, fn.from_json(once, read, options).alias("_json"))
    fields = [fn.col("_json").getField(field.name).alias(field.name) for field in wanted.fields]
    return parsed.select(*fields, *(fn.col(f"_{name}") for name in columns), _reason(wanted, present).alias(REASON))


def check_unique(names: Sequence[str]) -> None:
    """Raise ValueError if two columns have the same name."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"two columns are named {name}: rename one of them")


# Why a row does not parse. The cheap conditions come first: most rows need no other.


def _reason(wanted: StructType, present: set[str]) -> Column:
    text = fn.col("_value").cast("string")
    # Parsed a second time, but only for rows that did not match.
    opened = fn.try_parse_json(text)
    read = fn.col("_json")
    corrupt = (
        fn.when(opened.isNull(), "it is not JSON")
        .when(~fn.schema_of_variant(opened).startswith("OBJECT"), "it is JSON, but not an object")
        .otherwise(fn.coalesce(*_misfits(wanted, read, opened, "$", ""), fn.lit("a field does not fit the schema")))
    )
    # Spark stops at the end of the first object and ignores the rest of the text. If the first brace that closes is the
    # last character, nothing follows; otherwise the text is parsed again.
    values = fn.json_array_length(fn.concat(fn.lit("["), text, fn.lit("]")))
    may_go_on = fn.instr(text, "}") != fn.length(text)
    reason = (
        fn.when(fn.col("_value").isNull(), "it has no value")
        .when(read.isNull(), "it is empty")
        .when(read.getField(_CORRUPT).isNotNull(), corrupt)
        .when(~fn.is_valid_utf8(text), "it is not UTF-8 text")
        .when(may_go_on & (fn.coalesce(values, fn.lit(0)) != 1), "something follows the JSON object")
    )
    for name in sorted(present):
        if name in RESERVED:
            reason = reason.when(fn.col(name).isNull(), f"it has no {name[1:]}")
        else:
            reason = reason.when(read.getField(name).isNull(), f"field {name} is missing")
    return reason


def _misfits(wanted: StructType, read: Column, opened: Column, path: str, prefix: str) -> Iterator[Column]:
    """Yield an expression per field: a sentence if the text has the field and Spark cannot read its type, else null."""
    for field in wanted.fields:
        name, kind = f"{prefix}{field.name}", field.dataType
        if "'" in field.name or "\\" in field.name:
            continue
        at = f"{path}['{field.name}']"
        value = read.getField(field.name)
        there = fn.try_variant_get(opened, at, "variant")
        has_misfit = value.isNull() & there.isNotNull() & ~fn.is_variant_null(there)
        yield fn.when(has_misfit, f"field {name} is not of type {kind.simpleString()}")
        if isinstance(kind, StructType):
            yield from _misfits(kind, value, opened, at, f"{name}.")


def _struct(schema: str | StructType) -> StructType:
    made = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    if not isinstance(made, StructType):
        raise ValueError(f"invalid schema {schema!r}: it must name fields, such as 'id string, amount double'")
    return made


def _nullable(schema: StructType) -> StructType:
    """Make every field nullable: Spark replaces the null of one that is not by a default value."""
    return cast(StructType, _loosened(schema))


def _loosened(kind: DataType) -> DataType:
    if not isinstance(kind, StructType):
        return kind
    made = StructType()
    for field in kind.fields:
        made.add(field.name, _loosened(field.dataType), nullable=True)
    return made


def _check_names(names: Sequence[str], required: Sequence[str]) -> None:
    for name in names:
        if name in RESERVED or name == _CORRUPT:
            raise ValueError(f"the schema has a field {name}: that name is reserved for a column of the message")
    for name in required:
        if name not in names:
            raise ValueError(f"field {name} is required, but is not in the schema: it has {', '.join(names)}")
    check_unique(names)
