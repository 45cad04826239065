"""Spark DDL without Spark, compared with Spark's own parser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings

from penstock.errors import BadSchema
from penstock.topic_schema.ddl import read_ddl, write_ddl
from penstock.topic_schema.json_schema import read_json_schema, write_json_schema
from penstock.topic_schema.tree import Anything, Array, Map, Scalar, Struct, StructField, TypeNode
from tests.topic_schema.trees import roots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPARK_NAMES = {"tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long"}

ACCEPTED = [
    "id bigint",
    "id BIGINT NOT NULL, name STRING COMMENT 'it\\'s, <odd>'",
    "a: int, b : string not null",
    "struct<a:int,b:struct<c:array<map<string,double>>>>",
    "`a b` int, `c``d` string, struct string, array int, not int",
    "d decimal, e decimal(5), f DEC(5,2), g numeric(38,38)",
    "a byte, b short, c integer, d long, e real, f float, g double, h boolean, i binary",
    "t timestamp, u timestamp_ntz, v timestamp_ltz, w date, x variant",
    's struct<>, t struct<a:int NOT NULL COMMENT "x", b int>',
    "1a int, _ int",
    "\n a\tint ,\n b map < string , array < int > > \n",
]
REFUSED = [
    "",
    "   ",
    "id",
    "id,",
    "id bigint,",
    "id bigint name string",
    "id bigint NOT",
    "id foo",
    "id array",
    "id array<>",
    "id map<string>",
    "id decimal(39)",
    "id decimal(2,3)",
    "12 int",
    "a int)",
    "a int comment x",
    "a b c",
    "a 'int'",
    "a int; drop",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_ddl_means_what_it_means_to_spark(spark: SparkSession, text: str) -> None:
    assert _as_spark(read_ddl(text).type) == _parsed_by_spark(text)


@pytest.mark.parametrize("text", REFUSED)
def test_spark_refuses_what_is_refused(spark: SparkSession, text: str) -> None:
    with pytest.raises(BadSchema):
        read_ddl(text)
    if text.strip():
        with pytest.raises(Exception, match=r"(?s)."):
            _parsed_by_spark(text)


@settings(max_examples=60, deadline=None)
@given(root=roots(ddl=True))
def test_spark_reads_what_is_written(spark: SparkSession, root: TypeNode) -> None:
    text = write_ddl(root)

    assert read_ddl(text) == root
    assert _parsed_by_spark(text) == _as_spark(root.type)


@given(root=roots(ddl=True))
def test_a_schema_is_the_same_after_a_detour_through_json_schema(root: TypeNode) -> None:
    assert read_json_schema(json.dumps(write_json_schema(root))) == root


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a int, a string", "two columns are named a"),
        ("m map<int,string>", "the keys of a map must be string"),
        ("a varchar(10)", "unknown type 'varchar': there are .*decimal"),
        ("a " + "array<" * 40 + "int" + ">" * 40, "nested too deeply"),
        ("a " + "array<" * 9000 + "int" + ">" * 9000, "nested too deeply"),
        ("a string, " * 10_000 + "b int", "bytes"),
        (", ".join(f"a{number} int" for number in range(6000)), "bytes|more than"),
        ("a \ud800 int", "surrogate"),
        ("a int é", "unexpected 'é'"),
    ],
)
def test_what_is_wrong_with_ddl_is_said(text: str, what: str) -> None:
    with pytest.raises(BadSchema, match=what):
        read_ddl(text)


def _parsed_by_spark(text: str) -> Any:
    from pyspark.sql.types import StructType

    found = StructType.fromDDL(text)
    if not isinstance(found, StructType):
        raise TypeError(text)
    return _without_metadata(found.jsonValue())


def _without_metadata(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_metadata(value) for name, value in found.items() if name != "metadata"}
    return [_without_metadata(each) for each in found] if isinstance(found, list) else found


def _as_spark(kind: Any) -> Any:
    match kind:
        case Struct(fields):
            return {"type": "struct", "fields": list(map(_field, fields))}
        case Array(element):
            return {"type": "array", "elementType": _as_spark(element.type), "containsNull": element.is_nullable}
        case Map(value):
            inner = _as_spark(value.type)
            return {"type": "map", "keyType": "string", "valueType": inner, "valueContainsNull": value.is_nullable}
        case Anything():
            return "variant"
        case Scalar(name):
            return _SPARK_NAMES.get(name, str(kind))
    raise AssertionError(kind)


def _field(field: StructField) -> Any:
    return {"name": field.name, "type": _as_spark(field.node.type), "nullable": not field.is_required}
