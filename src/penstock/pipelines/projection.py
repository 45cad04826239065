"""Carrying a column through a transformation that only selects and filters rows.

A pipeline writes rows and dead letters in one query. As a union of two branches, that would read and parse the source
twice. So the dead letter of a row becomes a column, and this passes it through the query or function of the user, which
does not see it: a row with a dead letter passes each filter, and none of the user's expressions is evaluated for it.

DataFrames have no way to say that, so this changes Spark's logical plan. It declines any plan that it does not know all
of: those with more than projections and filters, such as aggregates, joins, windows and generators, and those with
Python functions, which Spark evaluates before conditions.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

_LOG: Final = logging.getLogger(__name__)

_PLANS: Final = "org.apache.spark.sql.catalyst.plans.logical"
# Nodes that only name their child.
_NAMES: Final = ("SubqueryAlias", "View")


def carry(made: DataFrame, given: DataFrame, whole: DataFrame, column: str) -> DataFrame | None:
    """Return the rows of `made` with a column of `whole`, and all rows in which that column is not null.

    `made` is the result of a transformation of `given`, which is the rows of `whole` in which the column is null,
    without the column. Return None if the transformation does more than to select and filter.
    """
    if column in made.columns or not all(hasattr(each, "_jdf") for each in (made, given, whole)):
        return None
    try:
        return _Carrier(whole, column).carry(made, given)
    except (Py4JError, PySparkException, TypeError) as error:
        # Another version of Spark has other plans.
        _LOG.debug("the plan of a transformation cannot be changed: %s", error)
        return None


class _Carrier:
    def __init__(self, whole: DataFrame, column: str) -> None:
        session: Any = whole.sparkSession
        self._session = session
        self._jvm = session._jvm
        self._plan = _analysed(whole)
        (self._column,) = [each for each in _items(self._plan.output()) if each.name() == column]
        expressions = self._jvm.org.apache.spark.sql.catalyst.expressions
        self._expressions = expressions
        self._is_user_row = expressions.IsNull(self._column)
        self._patterns = self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern

    def carry(self, made: DataFrame, given: DataFrame) -> DataFrame | None:
        steps = self._steps(_analysed(made), _analysed(given))
        if steps is None:
            return None
        plan = self._plan
        for step in reversed(steps):
            plan = self._project(step, plan) if _kind(step) == "Project" else self._filter(step, plan)
        rows = self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(self._session._jsparkSession, plan)
        return DataFrame(rows, self._session)

    def _steps(self, plan: Any, given: Any) -> list[Any] | None:
        """Return the projections and filters between the result and what was given; None if there is anything else."""
        steps: list[Any] = []
        views: dict[int, Any] = {}
        while not plan.equals(given):
            kind = _kind(plan)
            if kind == "WithCTE":
                views |= {each.id(): each.child() for each in _items(plan.cteDefs())}
                plan = plan.plan()
                continue
            if kind == "CTERelationRef":
                child = views.get(plan.cteId())
                # The columns of a second reference are others.
                if child is None or not plan.output().equals(child.output()):
                    return None
                plan = child
                continue
            if kind in ("Project", "Filter"):
                if self._calls_python_or_queries(plan):
                    return None
                steps.append(plan)
            elif kind not in _NAMES:
                return None
            plan = plan.children().head()
        return steps

    def _calls_python_or_queries(self, plan: Any) -> bool:
        patterns = (self._patterns.PYTHON_UDF(), self._patterns.PLAN_EXPRESSION())
        return any(each.containsPattern(pattern) for each in _items(plan.expressions()) for pattern in patterns)

    def _filter(self, step: Any, child: Any) -> Any:
        true = self._expressions.Literal.TrueLiteral()
        condition = self._expressions.If(self._is_user_row, step.condition(), true)
        return self._new("Filter", condition, child)

    def _project(self, step: Any, child: Any) -> Any:
        columns = [self._guarded(each) for each in _items(step.projectList())]
        return self._new("Project", self._seq([*columns, self._column]), child)

    def _guarded(self, column: Any) -> Any:
        if _kind(column) != "Alias":
            return column
        of = column.child()
        nothing = self._expressions.Literal.create(None, of.dataType())
        return column.withNewChildren(self._seq([self._expressions.If(self._is_user_row, of, nothing)]))

    def _seq(self, items: list[Any]) -> Any:
        return self._jvm.org.apache.spark.api.python.PythonUtils.toSeq(items)

    def _new(self, name: str, *arguments: Any) -> Any:
        return getattr(getattr(self._jvm, _PLANS), name)(*arguments)


def _analysed(rows: DataFrame) -> Any:
    frame: Any = rows._jdf
    return frame.queryExecution().analyzed()


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _items(sequence: Any) -> list[Any]:
    """Return the items of a sequence of Scala."""
    return [sequence.apply(index) for index in range(sequence.size())]
