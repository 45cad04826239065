"""JSON Schema, draft 2020-12, to the tree of types and back.

A schema comes from a client, so nothing in it is trusted: its size, depth and number of types are limited, and
references lead only to places within it and never in a circle. They are replaced by what they refer to, so the
validator sees none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from penstock.errors import BadSchema
from penstock.topic_schema.tree import (
    DEPTH_MAX,
    EXPANDED_BYTES_MAX,
    INTEGERS,
    PATTERNS_MAX,
    TYPES_MAX,
    Anything,
    Array,
    Map,
    Scalar,
    Struct,
    StructField,
    Type,
    TypeNode,
    check_size,
)

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"

Document = dict[str, Any]

# Where schemas are within a schema. The values of all other keywords are data.
_IN_MAPS: Final = frozenset({"properties", "patternProperties", "dependentSchemas"})
_IN_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_IN_PLACE: Final = frozenset(
    [
        "items",
        "additionalProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
# Keywords that decide which values are valid. All others are for people and programs, and do not count.
_ASSERTIONS: Final = (
    _IN_MAPS
    | _IN_LISTS
    | _IN_PLACE
    | frozenset(
        [
            "type",
            "enum",
            "const",
            "multipleOf",
            "maximum",
            "exclusiveMaximum",
            "minimum",
            "exclusiveMinimum",
            "maxLength",
            "minLength",
            "pattern",
            "maxItems",
            "minItems",
            "uniqueItems",
            "maxContains",
            "minContains",
            "maxProperties",
            "minProperties",
            "required",
            "dependentRequired",
        ]
    )
)
# Those that may also refuse null. The others are about values of one type.
_ABOUT_NULL: Final = frozenset({"enum", "const", "not", "if", "allOf", "anyOf", "oneOf"})
# They choose a type among those that JSON writes in the same way.
_HINTS: Final = frozenset({"format", "contentEncoding"})
_FORMATS: Final = {"date": "date", "date-time": "timestamp", "local-date-time": "timestamp_ntz"}
_REFUSED: Final = ("$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$vocabulary")


def read_document(text: str) -> Document:
    """Return a JSON Schema without references. Raises BadSchema."""
    check_size(text)
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        # Escapes can spell what is not text.
        json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise BadSchema(f"invalid schema: it is nested too deeply, {DEPTH_MAX} levels are allowed") from None
    except ValueError as error:
        raise BadSchema(f"invalid schema: it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadSchema('invalid schema: a JSON Schema is an object, such as {"type": "object"}')
    if document.get("$schema", DRAFT) not in (DRAFT, f"{DRAFT}#"):
        raise BadSchema(f"invalid schema: $schema is {document['$schema']!r}, and only {DRAFT} is supported")
    expanded = _Expansion(document).schema(document, ())
    assert isinstance(expanded, dict)
    return {**expanded, "$schema": DRAFT}


def read_json_schema(text: str) -> TypeNode:
    """Return what a JSON Schema says. Raises BadSchema."""
    return read_node(read_document(text))


def _unique(pairs: list[tuple[str, Any]]) -> Document:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _Expansion:
    """Replaces references by what they refer to."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._types = 0
        self._bytes = 0
        self._patterns: set[str] = set()

    def schema(self, schema: Any, above: tuple[str, ...], depth: int = 0) -> Any:
        """`above` are the references that led here."""
        self._types += 1
        if self._types > TYPES_MAX:
            raise BadSchema(f"invalid schema: with its references it has more than {TYPES_MAX} types")
        if depth > DEPTH_MAX:
            raise BadSchema(f"invalid schema: it is nested too deeply, {DEPTH_MAX} levels are allowed")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise BadSchema(f"invalid schema: {json.dumps(schema)[:100]} is where a schema must be")
        self._weigh(schema)
        for name in _REFUSED:
            if name in schema:
                raise BadSchema(f"invalid schema: {name} is not supported: use $ref to a place such as #/$defs/name")
        if depth and "$id" in schema:
            raise BadSchema("invalid schema: $id is allowed only at the top")
        found = {name: self._value(name, value, above, depth + 1) for name, value in schema.items() if _is_kept(name)}
        if "$ref" not in schema:
            return found
        target = self._referred(schema["$ref"], above, depth + 1)
        if not found.keys() & _ASSERTIONS and isinstance(target, dict):
            return {**target, **found}
        return {**found, "allOf": [*found.get("allOf", ()), target]}

    def _weigh(self, schema: Document) -> None:
        for name, value in schema.items():
            if name in _IN_MAPS and isinstance(value, dict):
                self._bytes += sum(map(len, value))
            elif name not in _IN_LISTS | _IN_PLACE and _is_kept(name):
                self._bytes += len(json.dumps(value))
        patterns = [schema.get("pattern"), *(schema.get("patternProperties") or ())]
        self._patterns.update(each for each in patterns if isinstance(each, str))
        if self._bytes > EXPANDED_BYTES_MAX:
            raise BadSchema(f"invalid schema: with its references it has more than {EXPANDED_BYTES_MAX} bytes")
        if len(self._patterns) > PATTERNS_MAX:
            raise BadSchema(f"invalid schema: it has more than {PATTERNS_MAX} different patterns")

    def _value(self, name: str, value: Any, above: tuple[str, ...], depth: int) -> Any:
        if name in _IN_MAPS:
            if not isinstance(value, dict):
                raise BadSchema(f"invalid schema: {name} must be an object")
            return {each: self.schema(inner, above, depth) for each, inner in value.items()}
        if name in _IN_LISTS:
            if not isinstance(value, list):
                raise BadSchema(f"invalid schema: {name} must be a list")
            return [self.schema(inner, above, depth) for inner in value]
        return self.schema(value, above, depth) if name in _IN_PLACE else value

    def _referred(self, reference: Any, above: tuple[str, ...], depth: int) -> Any:
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            raise BadSchema(f"invalid schema: $ref {reference!r} is not within it: only #/… is supported")
        if reference in above:
            raise BadSchema(f"invalid schema: $ref {reference!r} leads back to itself, and recursion is not supported")
        found: Any = self._document
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                raise BadSchema(f"invalid schema: $ref {reference!r} leads nowhere")
        return self.schema(found, (*above, reference), depth)


def _is_kept(name: str) -> bool:
    return name not in ("$ref", "$defs", "definitions", "$id", "$schema")


# A document to the tree.


def read_node(schema: Any) -> TypeNode:
    """Return what a schema without references says."""
    if schema is False:
        return TypeNode(Anything(), keywords='{"not":{}}')
    if schema is True:
        return TypeNode(Anything(), is_nullable=True)
    limits: Document = {name: value for name, value in schema.items() if name in _ASSERTIONS}
    if (node := _read_optional(limits)) is not None:
        return node
    kinds = limits.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    names = [kind for kind in kinds if kind != "null"]
    is_nullable = len(names) < len(kinds) or not kinds
    if len(names) != 1 or (is_nullable and not _is_split(limits)):
        return TypeNode(Anything(), is_nullable, _canonical(limits))
    if is_nullable and "enum" in limits:
        is_nullable = None in limits["enum"]
        limits["enum"] = [each for each in limits["enum"] if each is not None]
    del limits["type"]
    hints = {name: schema[name] for name in _HINTS if name in schema}
    return TypeNode(_read_type(names[0], limits, hints), is_nullable, _canonical(limits))


def _is_split(limits: Document) -> bool:
    """Return whether the keywords of a nullable type can be told apart in null and the rest."""
    values = limits.get("enum", [0])
    return (
        limits.keys() & _ABOUT_NULL <= {"enum"}
        and isinstance(values, list)
        and any(each is not None for each in values)
    )


def _read_optional(limits: Document) -> TypeNode | None:
    """Return a type that is given as the alternative to null: how programs write an optional one."""
    for name in ("anyOf", "oneOf"):
        if limits.keys() == {name} and len(limits[name]) == 2:
            rest = [each for each in limits[name] if not _is_null(each)]
            if len(rest) == 1:
                node = read_node(rest[0])
                # With two that accept null, oneOf refuses it.
                if not isinstance(node.type, Anything) and not (name == "oneOf" and node.is_nullable):
                    return TypeNode(node.type, True, node.keywords)
    return None


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and {n: v for n, v in schema.items() if n in _ASSERTIONS} == {"type": "null"}


def _read_type(kind: Any, limits: Document, hints: Document) -> Type:
    """Return the type of a schema, and take what it expresses out of its limits."""
    match kind:
        case "object":
            return _read_object(limits)
        case "array":
            return Array(read_node(limits.pop("items", True)))
        case "string" if hints.get("contentEncoding") == "base64":
            return Scalar("binary")
        case "string":
            return Scalar(_FORMATS.get(str(hints.get("format")), "string"))
        case "boolean":
            return Scalar("boolean")
        case "integer":
            bounds = (limits.get("minimum"), limits.get("maximum"))
            name = next((name for name, allowed in INTEGERS.items() if bounds == allowed), None)
            if name is not None:
                del limits["minimum"], limits["maximum"]
            return Scalar(name or "integer")
        case "number":
            return _read_number(str(hints.get("format")))
    raise BadSchema(f"invalid schema: type is {kind!r}, which JSON Schema does not have")


def _read_number(form: str) -> Scalar:
    if form == "float":
        return Scalar("float")
    digits = form.removeprefix("decimal(").removesuffix(")").split(",")
    if form == f"decimal({','.join(digits)})" and len(digits) == 2 and all(map(str.isdecimal, digits)):
        return Scalar("decimal", int(digits[0]), int(digits[1]))
    return Scalar("double")


def _read_object(limits: Document) -> Type:
    others = limits.get("additionalProperties", True)
    if isinstance(others, dict) and not limits.keys() & {"properties", "patternProperties", "required"}:
        return Map(read_node(limits.pop("additionalProperties")))
    properties = limits.pop("properties", {})
    required = limits.pop("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise BadSchema("invalid schema: required must be a list of names")
    if isinstance(others, bool) and "patternProperties" not in limits:
        limits.pop("additionalProperties", None)
    if unnamed := sorted(set(required) - properties.keys()):
        limits["required"] = unnamed
    fields = tuple(StructField(name, read_node(inner), name in required) for name, inner in properties.items())
    return Struct(fields, is_closed=others is False)


def _canonical(limits: Mapping[str, Any]) -> str:
    return json.dumps(limits, sort_keys=True, separators=(",", ":")) if limits else ""


# The tree to a document.


def write_json_schema(node: TypeNode) -> Document:
    return {"$schema": DRAFT, **_document(node)}


def _document(node: TypeNode) -> Document:
    document: Document = {}
    match node.type:
        case Struct(fields, is_closed):
            document = {
                "type": "object",
                "properties": {field.name: _document(field.node) for field in fields},
                "required": [field.name for field in fields if field.is_required],
            }
            if is_closed:
                document["additionalProperties"] = False
        case Array(element):
            document = {"type": "array", "items": _document(element)}
        case Map(value):
            document = {"type": "object", "additionalProperties": _document(value)}
        case Scalar() as scalar:
            document = _scalar(scalar)
    kept = json.loads(node.keywords) if node.keywords else {}
    if required := [*document.pop("required", ()), *kept.pop("required", ())]:
        document["required"] = required
    if not (node.is_nullable or kept or document):
        return {"not": {"type": "null"}}
    if not node.is_nullable or "type" not in document:
        return document | kept
    if kept.keys() & _ABOUT_NULL:
        return {"anyOf": [document | kept, {"type": "null"}]}
    return document | kept | {"type": [document["type"], "null"]}


def _scalar(scalar: Scalar) -> Document:
    name = scalar.name
    if name in INTEGERS:
        low, high = INTEGERS[name]
        return {"type": "integer", "minimum": low, "maximum": high}
    match name:
        case "integer" | "boolean" | "string":
            return {"type": name}
        case "double":
            return {"type": "number"}
        case "float" | "decimal":
            return {"type": "number", "format": str(scalar)}
        case "binary":
            return {"type": "string", "contentEncoding": "base64"}
    form = next(form for form, kind in _FORMATS.items() if kind == name)
    return {"type": "string", "format": form}
