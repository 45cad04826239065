"""Whether messages of one version of a schema can be read with another.

Fields that a schema does not name do not count: messages of the older version are taken not to have a field that the
newer one adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from penstock.topic_schema.tree import INTEGERS, TEXTS, Anything, Array, Map, Scalar, Struct, StructField, TypeNode

# Each reads the ones before it.
_NUMBERS: Final = (*INTEGERS, "integer")
# The digits of the largest number of an integer type.
_DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}


class Compatibility(StrEnum):
    """Which version reads the messages of which."""

    BACKWARD = "backward"  # the new one reads those of the old one
    FORWARD = "forward"  # the old one reads those of the new one
    FULL = "full"  # both
    NONE = "none"  # nothing is checked


def incompatibility(old: TypeNode, new: TypeNode, wanted: Compatibility) -> str | None:
    """Return why a new version cannot follow an old one, or None if it can."""
    if wanted in (Compatibility.BACKWARD, Compatibility.FULL):
        for reason in _misreads(new, old, ""):
            return f"it cannot read messages of the old version: {reason}"
    if wanted in (Compatibility.FORWARD, Compatibility.FULL):
        for reason in _misreads(old, new, ""):
            return f"the old version cannot read its messages: {reason}"
    return None


def _misreads(reader: TypeNode, writer: TypeNode, path: str) -> Iterator[str]:
    """Yield what prevents reading values of `writer` as `reader`."""
    at = path or "the value"
    if writer.is_nullable and not reader.is_nullable and not _reads_all(reader):
        yield f"{at} may be null"
    if reader.keywords and reader.keywords != writer.keywords:
        yield (
            f"{at} is limited by {_shown(reader.keywords)} instead of {_shown(writer.keywords)}, and such a change "
            'cannot be judged: set schema_compatibility to "none" to register it'
        )
    match reader.type, writer.type:
        case Anything(), _:
            return
        case Struct() as struct, Struct() as other:
            yield from _misreads_struct(struct, other, path)
        case Array(element), Array(other_element):
            yield from _misreads(element, other_element, f"{path}[]")
        case Map(value), Map(other_value):
            yield from _misreads(value, other_value, f"{path}{{}}")
        case Scalar() as scalar, Scalar() as other_scalar if _reads(scalar, other_scalar):
            return
        case _:
            yield f"{at} is {writer.type} and would be read as {reader.type}"


def _misreads_struct(reader: Struct, writer: Struct, path: str) -> Iterator[str]:
    written: dict[str, StructField] = {field.name: field for field in writer.fields}
    known = {field.name for field in reader.fields}
    for field in reader.fields:
        name = f"{path}.{field.name}".removeprefix(".")
        other = written.get(field.name)
        if field.is_required and (other is None or not other.is_required):
            yield f"{name} is required and may be absent"
        if other is not None:
            yield from _misreads(field.node, other.node, name)
    if reader.is_closed:
        for name in written.keys() - known:
            yield f"{path}.{name}".removeprefix(".") + " would be refused as an additional property"
        if not writer.is_closed:
            yield f"{path or 'the value'} may have additional properties, which would be refused"


def _reads_all(node: TypeNode) -> bool:
    return isinstance(node.type, Anything) and not node.keywords


def _reads(reader: Scalar, writer: Scalar) -> bool:
    if reader == writer:
        return True
    if reader.name in _NUMBERS and writer.name in _NUMBERS:
        return _NUMBERS.index(reader.name) > _NUMBERS.index(writer.name)
    if reader.name == "string":
        return writer.name in TEXTS
    if reader.name == "double":
        return writer.name in _NUMBERS or writer.name in ("float", "decimal")
    if reader.name == "decimal":
        whole = reader.precision - reader.scale
        if writer.name == "decimal":
            return whole >= writer.precision - writer.scale and reader.scale >= writer.scale
        return whole >= _DIGITS.get(writer.name, 100)
    return False


def _shown(keywords: str) -> str:
    return (keywords if len(keywords) <= 100 else f"{keywords[:100]}…") or "nothing"
