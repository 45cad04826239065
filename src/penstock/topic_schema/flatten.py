"""JSON values as typed Arrow columns, by a schema: one column for each field of the object.

A value either matches as a whole, or none of its fields is filled, and the column PROBLEM says why. So nothing is half
right, and nothing is lost: the value itself stays in its own column. What matches is what JSON says: a text is no
number, a number with a fraction is no int. Fields that the schema does not name, and its keywords (pattern, enum …),
do not matter here.

A field with the name of another column of the message, such as `timestamp`, becomes `value_timestamp`.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from typing import Any, Final

import msgspec
import pyarrow
from pyarrow import compute

from penstock.errors import BadSchema
from penstock.topic_schema.ddl import read_ddl
from penstock.topic_schema.tree import INTEGERS, Anything, Array, Map, Scalar, Struct, TypeNode

# Why a value has no fields. Null if it has them, and for a tombstone, which has no value.
PROBLEM: Final = "value_problem"
_PREFIX: Final = "value_"

_ARROW: Final = {
    "boolean": pyarrow.bool_(),
    "tinyint": pyarrow.int8(),
    "smallint": pyarrow.int16(),
    "int": pyarrow.int32(),
    "bigint": pyarrow.int64(),
    "integer": pyarrow.int64(),
    "float": pyarrow.float32(),
    "double": pyarrow.float64(),
    "string": pyarrow.string(),
    "date": pyarrow.date32(),
    "timestamp": pyarrow.timestamp("us", tz="UTC"),
    "timestamp_ntz": pyarrow.timestamp("us"),
    "binary": pyarrow.binary(),
}
_DATE_LENGTH: Final = len("2030-01-31")

_FLOAT_MAX: Final = 3.4028234663852886e38
_EXACT: Final = Context(prec=1000)
# Digits of the longest integer.
_DIGITS_MAX: Final = 19
_ENCODE: Final = msgspec.json.Encoder(decimal_format="number").encode

# Converts a value of JSON; raises ValueError, TypeError or OverflowError if it is of another type.
_Convert = Callable[[Any], Any]


class Flattener:
    """Makes the columns of one schema. It may be pickled."""

    def __init__(self, ddl: str, taken: Collection[str]) -> None:
        """Raise BadSchema if the schema has no columns. `taken` are the names of the other columns."""
        node = read_ddl(ddl)
        if not isinstance(node.type, Struct) or not node.type.fields:
            raise BadSchema(f"the schema {ddl!r} has no columns")
        self._ddl, self._taken = ddl, tuple(taken)
        self._fields = node.type.fields
        names = [f"{_PREFIX}{field.name}" if field.name in taken else field.name for field in self._fields]
        for name in (*names, PROBLEM):
            if name in taken or [*names, PROBLEM].count(name) > 1:
                raise BadSchema(f"two columns would be named {name}: the schema cannot be flattened")
        types = [(name, _arrow(field.node)) for name, field in zip(names, self._fields, strict=True)]
        self.schema = pyarrow.schema([*types, (PROBLEM, pyarrow.string())])
        self._converts = [_convert(field.node) for field in self._fields]
        self._number = Decimal if _has_decimal(node) else None
        self._decode = msgspec.json.Decoder(float_hook=self._number).decode

    def __reduce__(self) -> tuple[type[Flattener], tuple[str, Sequence[str]]]:
        return Flattener, (self._ddl, self._taken)

    def columns(self, values: Iterable[bytes | None]) -> list[pyarrow.Array]:
        """Return the columns of `schema` for values."""
        rows: list[Sequence[Any]] = []
        problems: list[str | None] = []
        nothing = (None,) * len(self._fields)
        for value in values:
            row, problem = (nothing, None) if value is None else self._row(value)
            rows.append(nothing if row is None else row)
            problems.append(problem)
        found = zip(*rows, strict=True) if rows else ((),) * len(self._fields)
        arrays = [
            pyarrow.array(column, field.type) for column, field in zip(found, list(self.schema)[:-1], strict=True)
        ]
        return [*arrays, pyarrow.array(problems, pyarrow.string())]

    def add_to(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return a batch with the columns of its `value` added."""
        values = batch["value"]
        if "tombstone" in batch.schema.names:
            values = compute.if_else(batch["tombstone"], None, values)
        arrays = [*batch.columns, *self.columns(values.to_pylist())]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=pyarrow.schema([*batch.schema, *self.schema]))

    def _read(self, value: bytes) -> Any:
        try:
            return self._decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # msgspec refuses numbers beyond a double and halves of surrogate pairs, which may be in any field.
            return json.loads(value.decode(), parse_float=self._number, parse_constant=_refuse)

    def _row(self, value: bytes) -> tuple[Sequence[Any] | None, str | None]:
        """Return the fields of a value; or None, and why."""
        try:
            found = self._read(value)
        except (ValueError, RecursionError):
            return None, "it is not JSON"
        if not isinstance(found, dict):
            return None, "it is JSON, but not an object"
        row: list[Any] = []
        for field, convert in zip(self._fields, self._converts, strict=True):
            each = found.get(field.name)
            if each is None:
                if field.is_required:
                    return None, f"field {field.name} is missing"
                row.append(None)
                continue
            try:
                row.append(convert(each))
            except (ValueError, TypeError, ArithmeticError):
                return None, f"field {field.name} is not of type {field.node.type}"
        return row, None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _arrow(node: TypeNode) -> pyarrow.DataType:
    match node.type:
        case Scalar(name="decimal", precision=precision, scale=scale):
            return pyarrow.decimal128(precision, scale)
        case Scalar(name=name):
            return _ARROW[name]
        case Array(element):
            return pyarrow.list_(_arrow(element))
        case Map(value):
            return pyarrow.map_(pyarrow.string(), _arrow(value))
        case Struct(fields) if fields:
            return pyarrow.struct([(field.name, _arrow(field.node)) for field in fields])
    # Any JSON, as text.
    return pyarrow.string()


def _convert(node: TypeNode) -> _Convert:
    match node.type:
        case Scalar(name="decimal", precision=precision, scale=scale):
            return _decimal(precision, scale)
        case Scalar(name=name):
            return _SCALARS[name]
        case Array(element):
            return _array(_nullable(element))
        case Map(value):
            return _map(_nullable(value))
        case Struct(fields) if fields:
            return _struct([(field.name, _nullable(field.node), field.is_required) for field in fields])
    return lambda value: _ENCODE(value).decode()


def _nullable(node: TypeNode) -> _Convert:
    convert = _convert(node)
    return lambda value: None if value is None else convert(value)


def _array(convert: _Convert) -> _Convert:
    def array(value: Any) -> list[Any]:
        return [convert(each) for each in _of(value, list)]

    return array


def _map(convert: _Convert) -> _Convert:
    def entries(value: Any) -> list[tuple[str, Any]]:
        return [(name, convert(each)) for name, each in _of(value, dict).items()]

    return entries


def _struct(fields: Sequence[tuple[str, _Convert, bool]]) -> _Convert:
    def struct(value: Any) -> dict[str, Any]:
        found = _of(value, dict)
        made = {}
        for name, convert, is_required in fields:
            each = found.get(name)
            if each is None and is_required:
                raise ValueError(name)
            made[name] = convert(each)
        return made

    return struct


def _of(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(value)
    return value


def _text(value: Any) -> str:
    text: str = _of(value, str)
    # Half of a surrogate pair is JSON, but not text.
    text.encode()
    return text


def _whole(least: int, most: int) -> _Convert:
    def whole(value: Any) -> int:
        if type(value) in (float, Decimal):
            # A number such as 1e999999999 must not be written out.
            if isinstance(value, Decimal) and value.adjusted() >= _DIGITS_MAX:
                raise ValueError(value)
            if value != int(value):
                raise ValueError(value)
            value = int(value)
        if not least <= _of(value, int) <= most:
            raise ValueError(value)
        return int(value)

    return whole


def _number(value: Any) -> float:
    if type(value) not in (int, float, Decimal):
        raise TypeError(value)
    found = float(value)
    if found in (float("inf"), float("-inf")):
        raise OverflowError(value)
    return found


def _single(value: Any) -> float:
    found = _number(value)
    if abs(found) > _FLOAT_MAX:
        raise OverflowError(value)
    return found


def _decimal(precision: int, scale: int) -> _Convert:
    def decimal(value: Any) -> Decimal:
        if type(value) not in (int, Decimal):
            raise TypeError(value)
        found = Decimal(value)
        _, digits, exponent = found.normalize(_EXACT).as_tuple()
        assert isinstance(exponent, int)
        if -exponent > scale or len(digits) + exponent > precision - scale:
            raise ValueError(value)
        return found

    return decimal


def _day(value: Any) -> date:
    if len(_of(value, str)) != _DATE_LENGTH:
        raise ValueError(value)
    return date.fromisoformat(value)


def _moment(value: Any) -> datetime:
    """Return a time. Without a zone it is UTC."""
    found = _time(value)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _local(value: Any) -> datetime:
    found = _time(value)
    if found.tzinfo is not None:
        raise ValueError(value)
    return found


def _time(value: Any) -> datetime:
    if len(_of(value, str)) <= _DATE_LENGTH:
        raise ValueError(value)
    return datetime.fromisoformat(value)


def _bytes(value: Any) -> bytes:
    try:
        return b64decode(_of(value, str), validate=True)
    except binascii.Error as error:
        raise ValueError(value) from error


_SCALARS: Final[dict[str, _Convert]] = {
    "boolean": lambda value: _of(value, bool),
    **{name: _whole(*bounds) for name, bounds in INTEGERS.items()},
    "integer": _whole(*INTEGERS["bigint"]),
    "float": _single,
    "double": _number,
    "string": _text,
    "date": _day,
    "timestamp": _moment,
    "timestamp_ntz": _local,
    "binary": _bytes,
}


def _has_decimal(node: TypeNode) -> bool:
    match node.type:
        case Scalar(name=name):
            return name == "decimal"
        case Array(inner) | Map(inner):
            return _has_decimal(inner)
        case Struct(fields):
            return any(_has_decimal(field.node) for field in fields)
        case Anything():
            # Its text keeps the digits of its numbers.
            return True
    return False
