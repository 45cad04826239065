"""Filters that Spark passes to the source, since PySpark 4.1."""

# Method names are Spark's.
# ruff: noqa: N802

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from penstock.spark.offsets import OffsetRange
from penstock.spark.options import ReadOptions
from penstock.spark.source import BatchReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class FilteringReader(BatchReader):
    """The reader for filter pushdown. Elsewhere Spark refuses readers with `pushFilters`."""

    def __init__(self, options: ReadOptions, wanted: StructType) -> None:
        super().__init__(options, wanted)
        self._wanted = _RangeFilters()

    def _narrow(self, whole: OffsetRange) -> OffsetRange:
        return self._wanted.narrow(whole)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that can be applied exactly, and return the others to Spark."""
        for each in filters:
            if not self._take(each):
                yield each

    def _take(self, given: Filter) -> bool:
        match given:
            case IsNotNull(attribute=("topic" | "partition" | "offset" | "timestamp" | "subject",)):
                return True
            case EqualTo(attribute=("subject",), value=str(subject)):
                return self._take_subjects([subject])
            case In(attribute=("subject",), value=subjects) if all(isinstance(each, str) for each in subjects):
                return self._take_subjects(subjects)
            case In(attribute=("topic" | "partition" as name,), value=values):
                return self._wanted.take(name, _is_in, frozenset(values))
            case EqualTo() | GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual():
                return self._compare(given)
        return False

    def _take_subjects(self, subjects: Iterable[str]) -> bool:
        chosen = frozenset(subject.encode() for subject in subjects)
        known = self._shape.condition.subjects
        return self._set_condition(subjects=chosen if known is None else known & chosen)

    def _compare(self, given: Any) -> bool:
        match given.attribute, given.value:
            case (("topic",), str(value)) if isinstance(given, EqualTo):
                return self._wanted.take("topic", operator.eq, value)
            case ("partition",), int(value):
                return self._wanted.take("partition", _COMPARISONS[type(given)], value)
            case ("offset",), int(value):
                return self._wanted.take_offset(type(given), value)
            # The producer sets the time of a message, so it does not bound offsets: only the rows can be filtered.
            case ("timestamp",), datetime(tzinfo=zone) as moment if zone is not None:
                times = (*self._shape.condition.times, (_ARROW_COMPARISONS[type(given)], _instant(moment)))
                return self._set_condition(times=times)
        return False

    def _set_condition(self, **changes: Any) -> bool:
        self._shape = replace(self._shape, condition=replace(self._shape.condition, **changes))
        return True


class _RangeFilters:
    """The filters on topics, partitions and offsets."""

    def __init__(self) -> None:
        self._tests: list[tuple[str, Callable[[Any, Any], bool], Any]] = []
        self._start = 0
        self._end: int | None = None

    def take(self, name: str, test: Callable[[Any, Any], bool], value: Any) -> bool:
        self._tests.append((name, test, value))
        return True

    def take_offset(self, kind: type[Filter], value: int) -> bool:
        if kind in (EqualTo, GreaterThan, GreaterThanOrEqual):
            self._start = max(self._start, value + 1 if kind is GreaterThan else value)
        if kind in (EqualTo, LessThan, LessThanOrEqual):
            end = value if kind is LessThan else value + 1
            self._end = end if self._end is None else min(self._end, end)
        return True

    def narrow(self, whole: OffsetRange) -> OffsetRange:
        for name, test, value in self._tests:
            if not test(getattr(whole.place, name), value):
                return OffsetRange(whole.place, whole.start, whole.start)
        end = whole.end if self._end is None else min(whole.end, self._end)
        return OffsetRange(whole.place, max(whole.start, self._start), end)


def _is_in(value: object, values: frozenset[object]) -> bool:
    return value in values


_COMPARISONS: Final[dict[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}
_ARROW_COMPARISONS: Final[dict[type[Filter], str]] = {
    EqualTo: "equal",
    GreaterThan: "greater",
    GreaterThanOrEqual: "greater_equal",
    LessThan: "less",
    LessThanOrEqual: "less_equal",
}


def _instant(moment: datetime) -> pyarrow.Scalar:
    return pyarrow.scalar(moment, pyarrow.timestamp("us", tz="UTC"))
