"""Random schemas and values of them, for tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from penstock.topic_schema.tree import INTEGERS, Array, Map, Scalar, Struct, StructField, TypeNode

NAMES = st.sampled_from(["a", "b", "c", "d e", "f`g", "Struct", "array", "not", "größe"])
SCALARS = st.one_of(
    st.sampled_from(
        [Scalar(name) for name in ("string", "boolean", *INTEGERS, "float", "double", "date", "timestamp", "binary")]
    ),
    st.integers(1, 38).flatmap(lambda digits: st.integers(0, digits).map(lambda s: Scalar("decimal", digits, s))),
)


def nodes(*, depth: int = 3, ddl: bool = False) -> st.SearchStrategy[TypeNode]:
    """`ddl`: only what DDL can say."""
    scalars = SCALARS if ddl else st.one_of(SCALARS, st.just(Scalar("integer")))
    if not depth:
        kinds: st.SearchStrategy[Any] = scalars
    else:
        inner = nodes(depth=depth - 1, ddl=ddl)
        elements = inner.map(lambda node: TypeNode(node.type, is_nullable=True)) if ddl else inner
        kinds = st.one_of(scalars, st.builds(Array, elements), st.builds(Map, elements), structs(depth=depth, ddl=ddl))
    return st.builds(TypeNode, kinds, st.booleans())


def structs(*, depth: int = 3, ddl: bool = False) -> st.SearchStrategy[Struct]:
    def made(found: dict[str, tuple[TypeNode, bool]], is_closed: bool) -> Struct:
        fields = []
        for name, (node, is_required) in found.items():
            # DDL has one flag for both.
            fields.append(StructField(name, node, not node.is_nullable if ddl else is_required))
        return Struct(tuple(fields), is_closed=is_closed and not ddl)

    fields = st.dictionaries(NAMES, st.tuples(nodes(depth=depth - 1, ddl=ddl), st.booleans()), min_size=1, max_size=4)
    return st.builds(made, fields, st.booleans())


def roots(*, ddl: bool = False) -> st.SearchStrategy[TypeNode]:
    return structs(ddl=ddl).map(TypeNode)


def values(node: TypeNode) -> st.SearchStrategy[Any]:
    """Values that match a schema, without fields that it does not name."""
    found = _values(node)
    return st.one_of(st.none(), found) if node.is_nullable else found


def _values(node: TypeNode) -> st.SearchStrategy[Any]:
    match node.type:
        case Struct(fields):
            return st.fixed_dictionaries(
                {field.name: values(field.node) for field in fields if field.is_required},
                optional={field.name: values(field.node) for field in fields if not field.is_required},
            )
        case Array(element):
            return st.lists(values(element), max_size=2)
        case Map(value):
            return st.dictionaries(st.sampled_from("xyz"), values(value), max_size=2)
        case Scalar(name) if name in INTEGERS:
            return st.integers(*INTEGERS[name])
        case Scalar("integer"):
            return st.integers()
        case Scalar("boolean"):
            return st.booleans()
        case Scalar("float" | "double" | "decimal"):
            return st.one_of(st.integers(-1000, 1000), st.floats(allow_nan=False, allow_infinity=False))
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-300, 300), st.floats(-1e6, 1e6), st.sampled_from(["", "a", "2020"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)
