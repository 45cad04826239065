"""Whether values are JSON that matches a version of their topic's schema.

A batch may have a million values, so it is checked in slices, between which others use the loop. A worker thread would
not help: the decoder and the validator hold the interpreter lock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Container, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import BadSchema, PenstockError, SchemaMismatch

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator

_SLICE_S: Final = 0.002
# A larger value is refused: one value is checked in one turn of the loop, which takes up to 30 ms for this size.
VALUE_BYTES_MAX: Final = 1 << 20
# Values of one run whose problem is explained. The others only refer to it: each text takes time and memory.
EXPLAINED_MAX: Final = 20
_TEXT_CHARACTERS: Final = 200
# A pattern is compiled to at most this size, and matched in linear time.
_PATTERN_BYTES_MAX: Final = 256 << 10

_MISSING: Final = "the package jsonschema-rs is not installed: install penstock[schema] to enforce schemas"
_decode = msgspec.json.Decoder().decode


class ValueCheck:
    """Checks values against one version of a schema."""

    __slots__ = ("_name", "_validator", "_version")

    def __init__(self, topic: str, version: int, validator: Draft202012Validator) -> None:
        self._name = topic
        self._version = version
        self._validator = validator

    async def run(self, values: Sequence[bytes], exempt: Container[int] = ()) -> dict[int, PenstockError]:
        """Return why values are refused, by index, except those at the indices in `exempt`."""
        failed: dict[int, PenstockError] = {}
        is_valid = self._validator.is_valid
        until = perf_counter() + _SLICE_S
        for index, value in enumerate(values):
            try:
                matches = index in exempt or (len(value) <= VALUE_BYTES_MAX and is_valid(_decode(value)))
            except (ValueError, RecursionError):
                matches = False
            if not matches:
                failed[index] = self._refusal(value, failed)
            if perf_counter() > until:
                await asyncio.sleep(0)
                until = perf_counter() + _SLICE_S
        return failed

    def _refusal(self, value: bytes, before: dict[int, PenstockError]) -> PenstockError:
        if len(before) > EXPLAINED_MAX:
            return next(reversed(before.values()))
        what = f"topic {self._name}: the value does not match version {self._version} of its schema: "
        if len(before) == EXPLAINED_MAX:
            return SchemaMismatch(f"{what}{EXPLAINED_MAX} values before it in its batch are explained, this one is not")
        return SchemaMismatch(what + self._problem(value))

    def _problem(self, value: bytes) -> str:
        if len(value) > VALUE_BYTES_MAX:
            return f"it has {len(value)} bytes, and a value that is checked at most {VALUE_BYTES_MAX}"
        try:
            found = next(self._validator.iter_errors(_decode(value)))
        except msgspec.DecodeError as error:
            return f"it is not JSON: {error}"
        except RecursionError:
            return "it is nested too deeply"
        except ValueError as error:
            return f"it is not JSON in UTF-8: {error}"
        path = "".join(f"/{part}" for part in found.instance_path)
        return printable(f"at {path or 'the top'}: {found.message}")


class NoSchema:
    """Refuses every value of a topic that enforces its schema and has none, or whose schema cannot be used."""

    __slots__ = ("_refusal",)

    def __init__(self, refusal: PenstockError) -> None:
        self._refusal = refusal

    async def run(self, values: Sequence[bytes], exempt: Container[int] = ()) -> dict[int, PenstockError]:
        return {index: self._refusal for index in range(len(values)) if index not in exempt}


Check = ValueCheck | NoSchema


def compiled(document: dict[str, Any]) -> Draft202012Validator:
    """Return the validator of a JSON Schema without references. Raises BadSchema if it is invalid, or if the package is
    not installed."""
    try:
        import jsonschema_rs
    except ImportError:
        raise BadSchema(_MISSING) from None
    try:
        return jsonschema_rs.Draft202012Validator(
            document,
            validate_formats=False,
            offline=True,
            pattern_options=jsonschema_rs.RegexOptions(
                size_limit=_PATTERN_BYTES_MAX, dfa_size_limit=_PATTERN_BYTES_MAX
            ),
        )
    except jsonschema_rs.ValidationError as error:
        path = "".join(f"/{part}" for part in error.instance_path)
        raise BadSchema(printable(f"invalid schema: at {path or 'the top'}: {error.message}")) from None
    except ValueError as error:
        raise BadSchema(printable(f"invalid schema: {error}")) from None


def is_installed() -> bool:
    try:
        import jsonschema_rs  # noqa: F401
    except ImportError:
        return False
    return True


def printable(text: str) -> str:
    """Return a text of limited length in one line: names and values in it come from a client."""
    shown = text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}…"
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in shown)
