"""One declaration for everything that can be set, asked or sent.

A declaration is a dataclass. The type of a field says what is allowed, in msgspec's terms; `about` says what the field
means, and `Form` what its type cannot say. Everything else is derived from that: reading a value strictly (JSON) or
leniently (files, environment, command line, query), the text of an error, and the JSON Schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from fractions import Fraction
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, inspect

T = TypeVar("T")

INTEGER_MAX: Final = (1 << 63) - 1

Text = Annotated[str, Meta(min_length=1)]
NonNegative = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
Port = Annotated[int, Meta(ge=0, le=65535)]

REQUIRED: Final = MISSING

# The longest value that an error shows.
_SHOWN_CHARACTERS: Final = 100
_NUMBER: Final = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")

Unit = Literal["", "ms", "s", "bytes"]
# Case matters: 5M is not a duration, and Mb are not bytes.
DURATIONS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZES: Final = {"B": 1, "kB": 1000} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
# A number without a unit has the unit that the name of the field ends with.
_UNITS: Final[Mapping[Unit, Mapping[str, Fraction | int]]] = {
    "": {"": 1},
    "ms": {"": 1} | DURATIONS_MS,
    "s": {"": 1} | {unit: Fraction(ms, 1000) for unit, ms in DURATIONS_MS.items()},
    "bytes": {"": 1} | _SIZES,
}
_DEFAULT_UNITS: Final[Mapping[Unit, list[str]]] = {
    "ms": ["d", "h", "m", "s", "ms"],
    "s": ["s"],
    "bytes": ["MiB", "KiB", "B"],
}
_UNIT_FORMS: Final[Mapping[Unit, str]] = {
    "ms": 'a number of milliseconds or a duration such as "500ms", "5s", "5m", "24h" or "7d"',
    "s": 'a number of seconds or a duration such as "5s", "5m", "24h" or "7d"',
    "bytes": 'a number of bytes or a size such as "64MiB" or "1GB"',
}


class Invalid(ValueError):
    """A value that is not allowed. The text follows the name of the field: "is 7: it must be text"."""

    def __init__(self, text: str, path: str = "") -> None:
        """`path` is where the value is within the field, such as "[1]"."""
        super().__init__(text)
        self.path = path

    def of(self, name: str) -> str:
        """Return the whole sentence, with the name of the field."""
        return f"{name}{self.path} {self}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the type of a field cannot say about its values."""

    # The name outside, if it cannot be the name of the field; the environment variable, and the option.
    name: str = ""
    variable: str = ""
    option: str = ""
    # What is allowed, in words; derived from the type if it is empty.
    allowed: str = ""
    # Added to the derived words.
    note: str = ""
    # Makes the value of what is written. ValueError if it is not allowed; Invalid if it has its own words for that.
    read: Callable[[Any], Any] | None = None
    # A declaration for the JSON Schema, where the field has a value that is read elsewhere.
    json_type: Any = None


def about(text: str) -> Meta:
    """Return the annotation that says what a field means."""
    return Meta(description=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a declaration, with everything that is derived from it."""

    # The name outside; inside it may be another.
    name: str
    # With its annotations.
    type: Any
    about: str = ""
    # REQUIRED if there is none.
    default: Any = REQUIRED
    is_secret: bool = False
    form: Form = Form()
    # The type without None, as msgspec sees it.
    base: inspect.Type
    is_optional: bool
    choices: tuple[Any, ...] = ()
    unit: Unit = ""

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def low(self) -> float | None:
        return self.base.ge if isinstance(self.base, inspect.IntType | inspect.FloatType) else None

    @property
    def high(self) -> float | None:
        """Return the upper bound, if it is one that people need to know."""
        high = self.base.le if isinstance(self.base, inspect.IntType | inspect.FloatType) else None
        return None if high == INTEGER_MAX else high

    @property
    def written_default(self) -> str:
        """Return the default as it would be written in a file."""
        if self.default is None or isinstance(self.default, bool):
            return str(self.default).lower()
        units = [] if not self.default else _DEFAULT_UNITS.get(self.unit, [])
        unit = next((each for each in units if self.default % _UNITS[self.unit][each] == 0), None)
        return str(self.default) if unit is None else f"{self.default // _UNITS[self.unit][unit]}{unit}"

    @property
    def metavar(self) -> str:
        """Return an example of a value, for the help of an option."""
        examples: dict[Unit, str] = {"ms": "7d", "s": "30s", "bytes": "5GB", "": "N"}
        return examples[self.unit] if self.default in (None, REQUIRED) else self.written_default

    @property
    def allowed(self) -> str:
        """Say what may be written where values are read leniently."""
        return self._allowed(_UNIT_FORMS.get(self.unit, ""))

    def parse(self, value: Any) -> Any:
        """Read a value leniently: numbers as text or with a unit, choices in capitals, "none". Raise Invalid."""
        return self._read(value, is_lenient=True)

    def read(self, value: Any) -> Any:
        """Read a value as JSON has it. Raise Invalid."""
        return self._read(value, is_lenient=False)

    def show(self, value: Any) -> str:
        if self.is_secret:
            return "***"
        return shown(value)

    def _read(self, value: Any, *, is_lenient: bool) -> Any:
        if value is None and self.is_optional:
            return None
        try:
            given = value if self.form.read is None else self.form.read(value)
            if is_lenient:
                given = self._lenient(given)
            return msgspec.convert(given, self.type)
        except Invalid:
            raise
        except ValueError:
            allowed = self.allowed if is_lenient else self._allowed("")
            words = [choice for choice in self.choices if isinstance(choice, str)]
            hint = did_you_mean(value, words) if isinstance(value, str) else ""
            raise Invalid(f"is {self.show(value)}{hint}: it must be {allowed}") from None

    def _lenient(self, value: Any) -> Any:
        # TOML, the environment and queries have no null. Text is taken as it is: a password may be "none".
        is_text = isinstance(self.base, inspect.StrType)
        if self.is_optional and value == "none" and not is_text:
            return None
        match self.base:
            case inspect.IntType():
                return _integer(value, _UNITS[self.unit])
            case inspect.FloatType():
                return _number(value)
            case inspect.BoolType():
                return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
            case inspect.EnumType() | inspect.LiteralType():
                return self._choice(value)
            case inspect.ListType() if isinstance(value, str):
                return [int(each) if each.isdecimal() else each for each in value.split(",")]
        return value

    def _choice(self, value: Any) -> Any:
        # YAML reads `off` without quotes as false.
        text = "off" if value is False else value
        if not isinstance(text, str):
            raise ValueError(value)
        return next((choice for choice in self.choices if str(choice).lower() == text.lower()), text)

    def _allowed(self, unit: str) -> str:
        if self.form.allowed:
            return self.form.allowed
        text = _either(self.choices) if self.choices else _allowed(self.base, unit)
        text += ", or none" if self.is_optional else ""
        return f"{text}: {self.form.note}" if self.form.note else text


def declared(cls: Any) -> Mapping[str, Field]:
    """Return the fields of a declaration, by name. The fields of a declaration within it stand beside its own."""
    return _declared(cls)


@cache
def _declared(cls: Any) -> Mapping[str, Field]:
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Field] = {}
    for each in fields(cls):
        if is_dataclass(hints[each.name]):
            found |= declared(hints[each.name])
            continue
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found[each.name] = field(each.name, hints[each.name], default=default, is_secret=not each.repr)
    return found


def make(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make an instance of a declaration from values that were read, by the names of its fields."""
    made: dict[str, Any] = {}
    kind: Any = cls
    for name, part in _parts(kind):
        if part is not None:
            made[name] = make(part, values)
        elif name in values:
            made[name] = values[name]
    return cls(**made)


@cache
def _parts(cls: Any) -> list[tuple[str, Any]]:
    """Return the names of the fields, with the type of those that are declarations themselves."""
    hints = get_type_hints(cls)
    return [(each.name, hints[each.name] if is_dataclass(hints[each.name]) else None) for each in fields(cls)]


def field(name: str, hint: Any, *, default: Any = REQUIRED, is_secret: bool = False) -> Field:
    info = inspect.type_info(hint)
    form = _form(hint)
    described = info.extra_json_schema or {} if isinstance(info, inspect.Metadata) else {}
    base, is_optional = _without_none(info)
    return Field(
        name=form.name or name,
        type=hint,
        about=described.get("description", ""),
        default=default,
        is_secret=is_secret,
        form=form,
        base=base,
        is_optional=is_optional,
        choices=_choices(hint),
        unit=_unit(name) if isinstance(base, inspect.IntType) else "",
    )


def build(cls: type[T], values: Mapping[str, Any], *, parse: Collection[str] = (), ignores_unknown: bool = False) -> T:
    """Make an instance of a declaration. Values are read as JSON has them, those in `parse` leniently. Raise ValueError
    with the first problem."""
    known = declared(cls)
    if not ignores_unknown:
        refuse_unknown(values, [each.name for each in known.values()])
    read: dict[str, Any] = {}
    for attribute, each in known.items():
        if each.name in values:
            value = values[each.name]
            try:
                read[attribute] = each.parse(value) if each.name in parse else each.read(value)
            except Invalid as problem:
                raise ValueError(problem.of(each.name)) from None
        elif each.is_required:
            raise ValueError(f"{each.name} is missing: it must be {each.allowed}")
    return make(cls, read)


def refuse_unknown(values: Iterable[str], known: Collection[str]) -> None:
    for name in values:
        if name not in known:
            there_are = f"there are {', '.join(known)}" if known else "nothing is expected here"
            raise ValueError(f"{shown(name)} is unknown{did_you_mean(name, known)}: {there_are}")


def check(instance: Any) -> None:
    """Raise ValueError unless every field of an instance is allowed, and has its type."""
    kind: Any = type(instance)
    known, checker = _checker(kind)
    values = {name: getattr(instance, name) for name in known}
    try:
        # All at once takes a tenth of the time, and there may be thousands of policies.
        checked = msgspec.structs.astuple(msgspec.convert(values, checker))
        if list(map(type, checked)) == list(map(type, values.values())):
            return
    except msgspec.ValidationError:
        pass
    for name, each in known.items():
        value = getattr(instance, name)
        try:
            # A text that reads like an enum is not one.
            if type(each.read(value)) is not type(value):
                raise Invalid(f"is {each.show(value)}: it must be {each.allowed}")
        except Invalid as problem:
            raise ValueError(problem.of(name)) from None


@cache
def _checker(cls: Any) -> tuple[Mapping[str, Field], type[msgspec.Struct]]:
    known = declared(cls)
    return known, msgspec.defstruct(cls.__name__, [(name, each.type) for name, each in known.items()])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" if a known word is close, else nothing."""
    near = get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def shown(value: Any) -> str:
    """Return a value as an error shows it: about as it was written, and not too long."""
    text = (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    )
    text = without_credentials(text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def without_credentials(text: str) -> str:
    """Return a text with a URL, or several, without what stands before an @: there may be a password in it."""
    before, scheme, rest = text.partition("://")
    _, at, after = rest.rpartition("@")
    return f"{before}{scheme}***@{after}" if at else text


def _without_none(info: inspect.Type) -> tuple[inspect.Type, bool]:
    if isinstance(info, inspect.Metadata):
        return _without_none(info.type)
    if not isinstance(info, inspect.UnionType):
        return info, False
    rest = [each for each in info.types if not isinstance(each, inspect.NoneType)]
    base = rest[0] if len(rest) == 1 else inspect.UnionType(tuple(rest))
    return (base.type if isinstance(base, inspect.Metadata) else base), len(rest) < len(info.types)


def _form(hint: Any) -> Form:
    """Return what all forms in a type say together. The outermost counts."""
    known: dict[str, Any] = {}
    for form in _forms(hint):
        said = {each.name: getattr(form, each.name) for each in fields(Form) if getattr(form, each.name)}
        known = said | known
    return Form(**known)


def _forms(hint: Any) -> Iterator[Form]:
    if get_origin(hint) is Annotated:
        yield from (each for each in hint.__metadata__ if isinstance(each, Form))
        yield from _forms(hint.__origin__)
    elif get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            if each is not NoneType:
                yield from _forms(each)


def _choices(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        # In their order, which msgspec does not keep.
        return get_args(hint)
    if get_origin(hint) is Annotated:
        return _choices(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return tuple(choice for each in get_args(hint) for choice in _choices(each))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(each.value for each in hint)
    return (True, False) if hint is bool else ()


def _unit(name: str) -> Unit:
    units: dict[str, Unit] = {"ms": "ms", "s": "s", "bytes": "bytes"}
    return units.get(name.removesuffix("_max").rpartition("_")[2], "")


def _allowed(base: inspect.Type, unit: str) -> str:
    match base:
        case inspect.IntType(ge=low, le=high):
            return _bounded("an integer", low, high) if not unit else f"{unit}{_bounds(low, high)}"
        case inspect.FloatType(ge=low, le=high):
            return f"a number{_bounds(low, high)}"
        case inspect.StrType(min_length=length):
            return "non-empty text (a number needs quotes)" if length else "text"
        case inspect.ListType(item) | inspect.VarTupleType(item):
            return f"a list, each of it {_allowed(item.type if isinstance(item, inspect.Metadata) else item, '')}"
        case inspect.DictType():
            return "an object"
    return "another value"


def _bounded(noun: str, low: float | None, high: float | None) -> str:
    if high in (None, INTEGER_MAX) and low in (0, 1):
        return "a positive integer" if low else "a non-negative integer"
    return f"{noun}{_bounds(low, high)}"


def _bounds(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f", at least {low}" if high in (None, INTEGER_MAX) else f", {low} to {high}"


def _either(values: Iterable[Any]) -> str:
    *most, last = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return f"{', '.join(most)} or {last}" if most else last


def _integer(value: Any, units: Mapping[str, Fraction | int]) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2] not in units:
        raise ValueError(value)
    number = Fraction(found[1]) * units[found[2]]
    if number.denominator != 1:
        raise ValueError(value)
    return int(number)


def _number(value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(value)
    return float(value)
