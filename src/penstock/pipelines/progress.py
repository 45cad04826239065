"""The progress of a pipeline, added up from what Spark reports for each batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import SystemClock

if TYPE_CHECKING:
    from penstock.spark.options import TopicPartition

RUNNING: Final = "running"
DONE: Final = "done"
STOPPED: Final = "stopped"
FAILED: Final = "failed"
# Recorded as running, but no process holds the lock: it was killed.
KILLED: Final = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgress:
    """The progress of one run. Times are microseconds since 1970."""

    name: str
    kind: str
    # The path of the pipeline file.
    file: str
    state: str = RUNNING
    started_us: int
    updated_us: int
    batches: int = 0
    # Offsets of the source that this run covered.
    rows: int = 0
    # Messages that were read at these offsets: fewer, if some have another subject, have expired or were compacted.
    # Rows written to the sink, and dead letters. None if unknown.
    rows_in: int | None = None
    rows_out: int | None = None
    dead_letters: int | None = None
    # Rows that were dropped because they came after the watermark.
    late_rows: int = 0
    # In the last batch.
    rows_per_second: float = 0.0
    # The number of the last batch, which continues from run to run; None before the first.
    batch: int | None = None
    # Messages in the log that are not processed yet; None if unknown.
    lag: int | None = None
    watermark: str | None = None
    # Why the run failed.
    reason: str | None = None

    @property
    def seconds(self) -> float:
        return (self.updated_us - self.started_us) / 1e6

    def with_counts(self, counts: Mapping[str, int]) -> PipelineProgress:
        """Add what was counted in a batch, by the names `in`, `out` and `letters`."""
        return replace(
            self,
            rows_in=_plus(self.rows_in, counts.get("in")),
            rows_out=_plus(self.rows_out, counts.get("out")),
            dead_letters=_plus(self.dead_letters, counts.get("letters")),
        )

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 3)}


def begin(name: str, kind: str, file: Path, before: PipelineProgress | None) -> PipelineProgress:
    """Begin a run. The batch number and the watermark of the run `before` still hold."""
    now_us = SystemClock().now_us()
    return PipelineProgress(
        name=name,
        kind=kind,
        file=str(file.resolve()),
        started_us=now_us,
        updated_us=now_us,
        batch=before.batch if before else None,
        watermark=before.watermark if before else None,
    )


@dataclass(slots=True)
class Reports:
    """Adds up the reports of all queries in a run. Spark repeats the last hundred on every request."""

    # The start time of the last report that was added for each query. Reports of an idle query repeat the batch number.
    _last: dict[str, str] = field(default_factory=dict)
    _lags: dict[str, int | None] = field(default_factory=dict)
    _watermarks: dict[str, str] = field(default_factory=dict)

    def add(
        self, progress: PipelineProgress, report: Mapping[str, Any], *, is_first: bool = True
    ) -> PipelineProgress | None:
        """Return the progress with a `StreamingQueryProgress` added, oldest first; None if it was added before.

        `is_first`: it is of the first query of the pipeline. The others read the same offsets again.
        """
        from penstock.pipelines.frames import late_rows

        query = str(report["id"])
        if report["timestamp"] <= self._last.get(query, ""):
            return None
        self._last[query] = report["timestamp"]
        self._lags[query] = lag_of(report)
        if watermark := (report.get("eventTime") or {}).get("watermark"):
            self._watermarks[query] = watermark
        rows = rows_of(report) if is_first else 0
        is_batch = "addBatch" in (report.get("durationMs") or {})
        counts = _counts(report) if is_batch else {}
        lags = list(self._lags.values())
        return replace(
            progress.with_counts(counts),
            updated_us=SystemClock().now_us(),
            batches=progress.batches + is_batch,
            batch=report["batchId"] if is_batch else progress.batch,
            rows=progress.rows + rows,
            late_rows=progress.late_rows + late_rows(report),
            rows_per_second=1000 * rows / max(report["batchDuration"], 1) if is_batch else progress.rows_per_second,
            lag=None if None in lags else sum(lag for lag in lags if lag is not None),
            watermark=min(self._watermarks.values(), default=progress.watermark),
        )


def _counts(report: Mapping[str, Any]) -> dict[str, int]:
    """Return what the queries counted in a batch, by name: `in`, `out` and `letters`."""
    found: dict[str, int] = {}
    for counts in (report.get("observedMetrics") or {}).values():
        for name, count in (counts if isinstance(counts, Mapping) else counts.asDict()).items():
            found[name] = found.get(name, 0) + count
    return found


def _plus(total: int | None, count: int | None) -> int | None:
    return total if count is None else (total or 0) + count


def lag_of(report: Mapping[str, Any]) -> int | None:
    """Return how many offsets remain after a batch; None if a source does not report it."""
    return _between(report, "endOffset", "latestOffset")


def rows_of(report: Mapping[str, Any]) -> int:
    """Return how many offsets a batch covers. Spark's own count includes a row once for each time it is read."""
    return _between(report, "startOffset", "endOffset") or 0


def _between(report: Mapping[str, Any], first: str, last: str) -> int | None:
    """Count each partition once, even if the query reads it through two sources."""
    found: dict[TopicPartition, int] = {}
    for source in report["sources"]:
        begin, end = _offsets(source[first]), _offsets(source[last])
        if not begin:
            begin = _beginning(source[last]) or begin
        if begin is None or end is None:
            return None
        # A partition that is absent at the beginning is new and counts from offset 0. If nothing says where the query
        # begins, the batch is empty, and its end does.
        for place, offset in end.items():
            size = max(0, offset - begin.get(place, 0)) if begin else 0
            found[place] = max(found.get(place, 0), size)
    return sum(found.values())


def _beginning(text: str | None) -> Mapping[TopicPartition, int] | None:
    """Return where a query begins, if this is its first end and says so."""
    from penstock.spark.offsets import BEGIN

    found = _document(text)
    return _offsets(json.dumps(found[BEGIN])) if isinstance(found, dict) and BEGIN in found else None


def _offsets(text: str | None) -> Mapping[TopicPartition, int] | None:
    from penstock.spark.offsets import Offsets

    found = _document(text)
    if found == {}:
        return {}
    # Offsets of a source that is not Penstock's.
    if not isinstance(found, dict) or "topics" not in found:
        return None
    return Offsets.from_json(found).ends


def _document(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return None
