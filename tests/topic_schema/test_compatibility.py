"""Which versions of a schema may follow which."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from penstock.topic_schema.compatibility import Compatibility, incompatibility
from penstock.topic_schema.ddl import read_ddl
from penstock.topic_schema.json_schema import read_json_schema, write_json_schema
from penstock.topic_schema.tree import Scalar, Struct, StructField, Type, TypeNode
from tests.topic_schema.trees import SCALARS, roots, values

BACKWARD, FORWARD, FULL, NONE = Compatibility


def _problem(old: str, new: str, wanted: Compatibility) -> str | None:
    return incompatibility(read_ddl(old), read_ddl(new), wanted)


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ("a int", "a int", {BACKWARD, FORWARD, FULL}),
        ("a int", "a int, b string", {BACKWARD, FORWARD, FULL}),
        ("a int, b string", "a int", {BACKWARD, FORWARD, FULL}),
        ("a int", "a int, b string NOT NULL", {FORWARD}),
        ("a int, b string NOT NULL", "a int", {BACKWARD}),
        ("a int NOT NULL", "a int", {BACKWARD}),
        ("a int", "a bigint", {BACKWARD}),
        ("a bigint", "a int", {FORWARD}),
        ("a int", "a double", {BACKWARD}),
        ("a int", "a string", set()),
        ("a date", "a string", {BACKWARD}),
        ("a float", "a double", {BACKWARD}),
        ("a decimal(5,2)", "a decimal(7,3)", {BACKWARD}),
        ("a decimal(5,2)", "a decimal(5,3)", set()),
        ("a int", "a decimal(12,2)", {BACKWARD}),
        ("a int", "a decimal(11,2)", set()),
        ("a array<int>", "a array<bigint>", {BACKWARD}),
        ("a map<string,int>", "a map<string,bigint>", {BACKWARD}),
        ("a struct<b:int>", "a struct<b:int,c:int>", {BACKWARD, FORWARD, FULL}),
        ("a struct<b:int>", "a map<string,int>", set()),
        ("a int", "a variant", {BACKWARD}),
    ],
)
def test_changes_of_columns(old: str, new: str, allowed: set[Compatibility]) -> None:
    found = {wanted for wanted in Compatibility if _problem(old, new, wanted) is None}

    assert found == {*allowed, NONE}


def test_the_reason_names_the_field_and_what_is_wrong_with_it() -> None:
    found = _problem("a struct<b: array<struct<c:int>>>", "a struct<b: array<struct<c:string>>>", BACKWARD)

    assert found == "it cannot read messages of the old version: a.b[].c is int and would be read as string"


def test_changed_keywords_cannot_be_judged() -> None:
    def of(**keywords: Any) -> TypeNode:
        return read_json_schema(json.dumps({"type": "object", "properties": {"a": {"type": "string", **keywords}}}))

    assert incompatibility(of(pattern="x"), of(pattern="x", title="y"), FULL) is None
    assert incompatibility(of(pattern="x"), of(), BACKWARD) is None
    for old, new in [(of(), of(pattern="x")), (of(enum=["a"]), of(enum=["a", "b"]))]:
        found = incompatibility(old, new, BACKWARD)
        assert found is not None
        assert 'a is limited by {"' in found
        assert 'set schema_compatibility to "none"' in found


def test_a_closed_object_does_not_read_additional_properties() -> None:
    def of(*names: str, others: bool) -> TypeNode:
        schema = {"type": "object", "properties": {name: {} for name in names}, "additionalProperties": others}
        return read_json_schema(json.dumps(schema))

    opened, closed, wider = of("a", others=True), of("a", others=False), of("a", "b", others=False)

    assert "additional properties" in str(incompatibility(opened, closed, BACKWARD))
    assert "b would be refused as an additional property" in str(incompatibility(wider, closed, BACKWARD))
    assert incompatibility(closed, wider, BACKWARD) is None
    assert incompatibility(closed, opened, BACKWARD) is None


# Most pairs of large schemas are not compatible: then there is nothing to check.
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_what_is_compatible_accepts_every_value_of_the_old_version(data: st.DataObject) -> None:
    old = data.draw(roots())
    new = data.draw(_changed(old))
    assume(incompatibility(old, new, BACKWARD) is None)

    value = data.draw(values(old))

    jsonschema.Draft202012Validator(write_json_schema(new)).validate(value)


@given(root=roots())
def test_a_schema_is_compatible_with_itself(root: TypeNode) -> None:
    assert incompatibility(root, root, FULL) is None


def _changed(root: TypeNode) -> st.SearchStrategy[TypeNode]:
    """Schemas like another one: with changed, dropped and added fields."""
    assert isinstance(root.type, Struct)

    def change(field: StructField) -> st.SearchStrategy[list[StructField]]:
        def as_(kind: Type) -> list[StructField]:
            return [StructField(field.name, TypeNode(kind, is_nullable=True))]

        dropped: list[StructField] = []
        return st.one_of(st.just([field]), st.just(as_(field.node.type)), SCALARS.map(as_), st.just(dropped))

    def made(fields: tuple[list[StructField], ...], added: list[StructField], is_closed: bool) -> TypeNode:
        return TypeNode(Struct((*chain(*fields), *added), is_closed=is_closed))

    added = st.sampled_from(
        [[], [StructField("new", TypeNode(Scalar("string")))], [StructField("new", TypeNode(Scalar("int")), True)]]
    )
    return st.builds(made, st.tuples(*map(change, root.type.fields)), added, st.booleans())
