"""JSON Schema as a tree of types; which schemas are refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadSchema
from penstock.topic_schema.ddl import write_ddl
from penstock.topic_schema.json_schema import read_document, read_json_schema, write_json_schema
from penstock.topic_schema.tree import TypeNode
from tests.topic_schema.trees import JSON_VALUES, roots, values


def _ddl(schema: dict[str, Any]) -> str:
    return write_ddl(read_json_schema(json.dumps(schema)))


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@given(root=roots())
def test_what_is_written_is_read_as_the_same(root: TypeNode) -> None:
    assert read_json_schema(json.dumps(write_json_schema(root))) == root


@given(data=st.data())
def test_values_of_the_tree_are_valid_for_a_reference(data: st.DataObject) -> None:
    root = data.draw(roots())
    value = data.draw(values(root))

    jsonschema.Draft202012Validator(write_json_schema(root)).validate(value)


_KEYWORDS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.booleans(),
        st.just({}),
        st.sampled_from(["string", "integer", "number", "object", "array", "null", ["string", "null"]]).map(
            lambda kind: {"type": kind}
        ),
        st.just({"type": ["string", "null"], "enum": ["a", None]}),
        st.just({"type": ["string", "null"], "enum": ["a"]}),
        st.just({"type": "string", "const": "a"}),
        st.sampled_from([{"enum": ["a", 1, None]}, {"minimum": 3}, {"pattern": "^a"}, {"const": {"a": 1}}]),
        st.sampled_from(["#/$defs/one", "#/$defs/two~1", "#/$defs/%61"]).map(lambda ref: {"$ref": ref}),
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["object", "array", ["object", "null"]]),
                "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
                "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=1),
                "items": inner,
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "$ref": st.sampled_from(["#/$defs/one", "#/$defs/a"]),
                "uniqueItems": st.booleans(),
                "title": st.just("x"),
            },
        ),
        st.lists(inner, min_size=1, max_size=2).flatmap(
            lambda some: st.sampled_from(["anyOf", "oneOf", "allOf"]).map(lambda name: {name: some})
        ),
        inner.map(lambda each: {"not": each}),
        inner.map(lambda each: {"anyOf": [each, {"type": "null"}]}),
        inner.map(lambda each: {"oneOf": [{"type": "null", "title": "none"}, each]}),
    ),
    max_leaves=5,
)
_DEFS = {"one": {"type": "string"}, "two/": {"$ref": "#/$defs/a"}, "a": {"type": ["integer", "array"], "items": True}}


@given(schema=_KEYWORDS.filter(lambda schema: isinstance(schema, dict)), value=JSON_VALUES)
def test_without_references_and_as_a_tree_a_schema_accepts_the_same_values(schema: dict[str, Any], value: Any) -> None:
    text = json.dumps({**schema, "$defs": _DEFS})
    expected = jsonschema.Draft202012Validator(json.loads(text)).is_valid(value)

    document, node = read_document(text), read_json_schema(text)

    assert "$ref" not in json.dumps(document)
    assert jsonschema.Draft202012Validator(document).is_valid(value) is expected
    assert jsonschema.Draft202012Validator(write_json_schema(node)).is_valid(value) is expected


def test_an_optional_type_as_pydantic_writes_it_is_nullable() -> None:
    schema = _object(a={"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "default": None})
    schema["$defs"] = {"A": {**_object(n={"type": "integer"}), "required": ["n"], "title": "A"}}
    schema["required"] = ["a"]

    assert _ddl(schema) == "a STRUCT<n: BIGINT NOT NULL>"


def test_limits_do_not_prevent_ddl_but_a_missing_type_does() -> None:
    limited = _object(s={"type": "string", "pattern": "^a", "enum": ["a"]}, n={"type": "integer", "minimum": 1})
    unclear = _object(x=_object(y={"oneOf": [{"type": "string"}, {"type": "integer"}]}))

    assert _ddl(limited) == "s STRING, n BIGINT"
    with pytest.raises(BadSchema, match=r"x\.y has no single type, but .*oneOf"):
        _ddl(unclear)
    assert _ddl(_object(v={}, t={"type": "string", "format": "date-time"})) == "v VARIANT, t TIMESTAMP"
    with pytest.raises(BadSchema, match="an object with properties"):
        _ddl({"type": "array"})


def _laughing(levels: int) -> dict[str, Any]:
    defs: dict[str, Any] = {"a0": {"type": "object"}}
    for level in range(1, levels):
        below = {"$ref": f"#/$defs/a{level - 1}"}
        defs[f"a{level}"] = {"allOf": [below, below]}
    return {"$defs": defs, "$ref": f"#/$defs/a{levels - 1}"}


def _repeated(schema: dict[str, Any]) -> str:
    """A schema that refers to a large one hundreds of times."""
    referring = {f"p{number}": {"$ref": "#/$defs/a"} for number in range(900)}
    return json.dumps({"properties": referring, "$defs": {"a": schema}})


def _nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"),
        ('{"maximum": NaN}', "NaN is not a JSON number"),
        ('{"type": "string", "type": "object"}', "a name is repeated"),
        ('{"title": "\\ud800"}', "not JSON"),
        (json.dumps({"$ref": "https://example.com/x"}), "is not within it"),
        (json.dumps({"$ref": "file:///etc/passwd"}), "is not within it"),
        (json.dumps({"$ref": "other.json#/x"}), "is not within it"),
        (json.dumps({"$ref": "#name"}), "is not within it"),
        (json.dumps({"$ref": 5}), "is not within it"),
        (json.dumps({"$ref": "#/nowhere"}), "leads nowhere"),
        (json.dumps({"$ref": "#"}), "leads back to itself"),
        (json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}), "leads back to itself"),
        (json.dumps({"properties": {"a": {"$ref": "#"}}}), "leads back to itself"),
        (json.dumps({"$dynamicRef": "#x"}), "not supported"),
        (json.dumps({"items": {"$id": "https://example.com/x"}}), "only at the top"),
        (json.dumps({"$schema": "http://json-schema.org/draft-07/schema#"}), "only https://json-schema.org/draft/2020"),
        (json.dumps({"type": "text"}), "type is 'text'"),
        (json.dumps({"type": {}}), "type is {}"),
        (json.dumps({"items": 5}), "5 is where a schema must be"),
        (json.dumps({"properties": []}), "properties must be an object"),
        (json.dumps({"anyOf": {}}), "anyOf must be a list"),
        (json.dumps({"type": "object", "required": [[]]}), "required must be a list of names"),
        (json.dumps(_laughing(31)), "more than 5000 types|nested too deeply"),
        (json.dumps({"allOf": [{"$ref": "#/$defs/a"}] * 100, "$defs": {"a": {"allOf": [{}] * 100}}}), "more than 5000"),
        (_repeated({"enum": ["x" * 30_000]}), "with its references it has more than 1048576 bytes"),
        (_repeated({"properties": {"x" * 30_000: True}}), "with its references it has more than 1048576 bytes"),
        (
            json.dumps({"allOf": [{"pattern": f"a{number}"} for number in range(101)]}),
            "more than 100 different patterns",
        ),
        (json.dumps({"patternProperties": {f"a{number}": {} for number in range(101)}}), "more than 100 different"),
        (_nested(40), "nested too deeply"),
        (_nested(6000), "nested too deeply"),
        (json.dumps({"title": "x" * (64 << 10)}), "bytes, and 65536 are allowed"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said(text: str, what: str) -> None:
    with pytest.raises(BadSchema, match=what):
        read_json_schema(text)
