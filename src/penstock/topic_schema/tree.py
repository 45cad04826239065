"""What a schema says, whatever it was written in: a tree of types.

    Struct    an object with named fields            Scalar    text, numbers, times …, under the names of Spark's DDL
    Array     a list of elements                     Anything  any JSON value, as far as the tree can say
    Map       an object with any names, one type

Keywords of JSON Schema that the tree cannot express (pattern, enum, oneOf …) are kept beside it, as canonical JSON:
they are enforced, and two schemas can be compared if these keywords are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.errors import BadSchema

# A schema describes a message: one that is larger was not written by a person, and is checked for every message.
SCHEMA_BYTES_MAX: Final = 64 << 10
DEPTH_MAX: Final = 32
# Types in a schema, with those that references repeat.
TYPES_MAX: Final = 5000
# Names and values in a JSON Schema, with those that references repeat; and different patterns: each is compiled.
EXPANDED_BYTES_MAX: Final = 1 << 20
PATTERNS_MAX: Final = 100

# The range of each integer type. An `integer` of JSON Schema has none.
INTEGERS: Final = {
    "tinyint": (-(1 << 7), (1 << 7) - 1),
    "smallint": (-(1 << 15), (1 << 15) - 1),
    "int": (-(1 << 31), (1 << 31) - 1),
    "bigint": (-(1 << 63), (1 << 63) - 1),
}
# Types whose values are JSON strings.
TEXTS: Final = frozenset({"string", "date", "timestamp", "timestamp_ntz", "binary"})


@dataclass(frozen=True, slots=True)
class Scalar:
    # Of DDL, in lower case; and `integer`, a whole number without limits.
    name: str
    # Of a decimal.
    precision: int = 0
    scale: int = 0

    def __str__(self) -> str:
        return f"decimal({self.precision},{self.scale})" if self.name == "decimal" else self.name


@dataclass(frozen=True, slots=True)
class Array:
    element: TypeNode

    def __str__(self) -> str:
        return "array"


@dataclass(frozen=True, slots=True)
class Map:
    """Its keys are text."""

    value: TypeNode

    def __str__(self) -> str:
        return "map"


@dataclass(frozen=True, slots=True)
class StructField:
    name: str
    node: TypeNode
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Struct:
    fields: tuple[StructField, ...] = ()
    # Whether other fields are refused.
    is_closed: bool = False

    def __str__(self) -> str:
        return "struct"


@dataclass(frozen=True, slots=True)
class Anything:
    def __str__(self) -> str:
        return "any type"


Type = Scalar | Array | Map | Struct | Anything


@dataclass(frozen=True, slots=True)
class TypeNode:
    type: Type
    is_nullable: bool = False
    # Canonical JSON of the keywords that the tree cannot express, or nothing.
    keywords: str = field(default="")


def is_json(text: str) -> bool:
    """Return whether a schema is JSON Schema; otherwise it is DDL, which never begins with a brace."""
    return text.lstrip().startswith("{")


def check_size(text: str) -> None:
    """Raise BadSchema for a schema that is too large to be read."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadSchema("invalid schema: it has half of a surrogate pair, which is not text") from None
    if size > SCHEMA_BYTES_MAX:
        raise BadSchema(f"invalid schema: it has {size} bytes, and {SCHEMA_BYTES_MAX} are allowed")
