"""Spark's DDL, such as `id bigint NOT NULL, tags array<string>`, to the tree of types and back. Needs no Spark.

A column that is not NOT NULL may be absent or null, and so may elements of arrays and values of maps.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from penstock.errors import BadSchema
from penstock.topic_schema.tree import (
    DEPTH_MAX,
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

_NAMES: Final = {
    "boolean": "boolean",
    "tinyint": "tinyint",
    "byte": "tinyint",
    "smallint": "smallint",
    "short": "smallint",
    "int": "int",
    "integer": "int",
    "bigint": "bigint",
    "long": "bigint",
    "float": "float",
    "real": "float",
    "double": "double",
    "string": "string",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ltz": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
    "binary": "binary",
}
_DECIMALS: Final = frozenset({"decimal", "dec", "numeric"})
_PRECISION_MAX: Final = 38
_ALLOWED: Final = ", ".join(sorted({*_NAMES.values()})) + ", decimal(p,s), array<…>, map<string,…>, struct<…>, variant"

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>\w+)|(?P<mark>[<>(),:]))",
    re.ASCII | re.DOTALL,
)
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def read_ddl(text: str) -> TypeNode:
    """Return what DDL says: columns, or one struct<…>. Raises BadSchema."""
    check_size(text)
    parser = _Parser(text)
    if parser.is_struct():
        node = TypeNode(parser.type(0))
    else:
        node = TypeNode(parser.columns(0))
    parser.expect_end()
    return node


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[_Token] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise _invalid(f"unexpected {text[at:].strip()[:20]!r}", at)
            self._tokens.append(_Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup)))
            at = found.end()
        self._tokens.append(_Token("end", "the end", end))
        self._next = 0
        self._types = 0

    def is_struct(self) -> bool:
        """Return whether the whole is a type, and not columns. A column may be named struct, but not struct<."""
        return self._tokens[0].text.lower() == "struct" and self._tokens[1:2] != [] and self._tokens[1].text == "<"

    def columns(self, depth: int) -> Struct:
        fields: dict[str, StructField] = {}
        while not fields or self._takes(","):
            field = self._column(depth)
            if field.name in fields:
                raise BadSchema(f"invalid schema: two columns are named {field.name}")
            fields[field.name] = field
        return Struct(tuple(fields.values()))

    def type(self, depth: int) -> Type:
        self._types += 1
        if depth > DEPTH_MAX:
            raise BadSchema(f"invalid schema: it is nested too deeply, {DEPTH_MAX} levels are allowed")
        if self._types > TYPES_MAX:
            raise BadSchema(f"invalid schema: it has more than {TYPES_MAX} types")
        token = self._take()
        name = token.text.lower() if token.kind == "word" else ""
        if name in _NAMES:
            return Scalar(_NAMES[name])
        if name in _DECIMALS:
            return self._decimal()
        match name:
            case "variant":
                return Anything()
            case "array":
                self._expect("<")
                element = self.type(depth + 1)
                self._expect(">")
                return Array(TypeNode(element, is_nullable=True))
            case "map":
                return self._map(depth)
            case "struct":
                self._expect("<")
                made = Struct() if self._tokens[self._next].text == ">" else self.columns(depth + 1)
                self._expect(">")
                return made
        raise _invalid(f"unknown type {token.text!r}: there are {_ALLOWED}", token.at)

    def expect_end(self) -> None:
        if self._tokens[self._next].kind != "end":
            raise _invalid(f"unexpected {self._tokens[self._next].text!r}", self._tokens[self._next].at)

    def _column(self, depth: int) -> StructField:
        token = self._take()
        if token.kind == "quoted":
            name = token.text[1:-1].replace("``", "`")
        elif token.kind == "word" and not token.text.isdecimal():
            name = token.text
        else:
            raise _invalid(f"expected the name of a column, not {token.text!r}", token.at)
        self._takes(":")
        kind = self.type(depth + 1)
        is_required = self._takes("not")
        if is_required:
            self._expect("null")
        if self._takes("comment") and self._take().kind != "text":
            raise _invalid("expected a text in quotes behind COMMENT", self._tokens[self._next - 1].at)
        return StructField(name, TypeNode(kind, is_nullable=not is_required), is_required)

    def _decimal(self) -> Scalar:
        if not self._takes("("):
            return Scalar("decimal", 10, 0)
        precision = self._number()
        scale = self._number() if self._takes(",") else 0
        self._expect(")")
        if not (1 <= precision <= _PRECISION_MAX and scale <= precision):
            raise BadSchema(
                f"invalid schema: decimal({precision},{scale}) must have 1 to {_PRECISION_MAX} digits, and no more "
                "behind the point"
            )
        return Scalar("decimal", precision, scale)

    def _map(self, depth: int) -> Map:
        self._expect("<")
        at = self._tokens[self._next].at
        if self.type(depth + 1) != Scalar("string"):
            raise _invalid("the keys of a map must be string, as in JSON", at)
        self._expect(",")
        value = self.type(depth + 1)
        self._expect(">")
        return Map(TypeNode(value, is_nullable=True))

    def _number(self) -> int:
        token = self._take()
        if not token.text.isdecimal() or len(token.text) > 3:
            raise _invalid(f"expected a number of digits, not {token.text!r}", token.at)
        return int(token.text)

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        if token.kind == "end":
            raise _invalid("unexpected end: expected a column with its type, such as 'id bigint'", token.at)
        self._next += 1
        return token

    def _takes(self, text: str) -> bool:
        token = self._tokens[self._next]
        found = token.kind in ("word", "mark") and token.text.lower() == text
        self._next += found
        return found

    def _expect(self, text: str) -> None:
        token = self._tokens[self._next]
        if not self._takes(text):
            raise _invalid(f"expected {text.upper()!r}, not {token.text!r}", token.at)


def _invalid(what: str, at: int) -> BadSchema:
    return BadSchema(f"invalid schema: {what} (at character {at + 1} of the DDL)")


def write_ddl(node: TypeNode) -> str:
    """Return the columns of a struct. Raises BadSchema if DDL cannot express a part of it."""
    if not isinstance(node.type, Struct) or not node.type.fields:
        raise BadSchema("the schema cannot be written as DDL: it must be an object with properties")
    return ", ".join(f"{_quoted(field.name)} {_column_type(field, field.name)}" for field in node.type.fields)


def _column_type(field: StructField, path: str) -> str:
    is_required = field.is_required and not field.node.is_nullable
    return _type(field.node, path) + (" NOT NULL" if is_required else "")


def _type(node: TypeNode, path: str) -> str:
    match node.type:
        case Struct(fields):
            inner = [f"{_quoted(field.name)}: {_column_type(field, f'{path}.{field.name}')}" for field in fields]
            return f"STRUCT<{', '.join(inner)}>"
        case Array(element):
            return f"ARRAY<{_type(element, f'{path}[]')}>"
        case Map(value):
            return f"MAP<STRING, {_type(value, f'{path}{{}}')}>"
        case Scalar("integer"):
            return "BIGINT"
        case Scalar() as scalar:
            return str(scalar).upper()
    if node.keywords:
        raise BadSchema(
            f"the schema cannot be written as DDL: {path} has no single type, but {node.keywords[:100]}: "
            "give it a type, or name the columns yourself"
        )
    return "VARIANT"


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f"`{name.replace('`', '``')}`"
