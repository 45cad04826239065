"""How far a pipeline is: added up from what Spark tells of each batch."""

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
# It says that it runs, and nobody does: its process was killed.
KILLED: Final = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Of one run; times are µs since 1970."""

    name: str
    kind: str
    # Where its file is, so that it can be run again.
    file: str
    state: str = RUNNING
    started_us: int
    updated_us: int
    batches: int = 0
    # Since this run began.
    rows: int = 0
    # Came too late for the watermark, and were left out.
    late_rows: int = 0
    # Of the last batch.
    rows_per_second: float = 0.0
    # The number of the last batch: it goes on from run to run. None: there was none yet.
    batch: int | None = None
    # What is there and not done; None if that is not known.
    lag: int | None = None
    watermark: str | None = None
    # Why it failed.
    reason: str | None = None

    @property
    def seconds(self) -> float:
        return (self.updated_us - self.started_us) / 1e6

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 3)}


def begin(name: str, kind: str, file: Path, before: Progress | None) -> Progress:
    """A run; what the one before it knew is still so."""
    now_us = SystemClock().now_us()
    return Progress(
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
    """The batches of all queries of a run, added up. Spark tells the last hundred again and again."""

    # When the last one that was added began, of each query. The number of a batch stays the same while there is none.
    _last: dict[str, str] = field(default_factory=dict)
    _lags: dict[str, int | None] = field(default_factory=dict)
    _watermarks: dict[str, str] = field(default_factory=dict)

    def add(self, progress: Progress, report: Mapping[str, Any]) -> Progress | None:
        """With a `StreamingQueryProgress`, oldest first; None if it was added before."""
        from penstock.pipelines.frames import late_rows

        query = str(report["id"])
        if report["timestamp"] <= self._last.get(query, ""):
            return None
        self._last[query] = report["timestamp"]
        self._lags[query] = lag_of(report)
        if watermark := (report.get("eventTime") or {}).get("watermark"):
            self._watermarks[query] = watermark
        rows = rows_of(report)
        is_batch = "addBatch" in (report.get("durationMs") or {})
        lags = list(self._lags.values())
        return replace(
            progress,
            updated_us=SystemClock().now_us(),
            batches=progress.batches + is_batch,
            batch=report["batchId"] if is_batch else progress.batch,
            rows=progress.rows + rows,
            late_rows=progress.late_rows + late_rows(report),
            rows_per_second=1000 * rows / max(report["batchDuration"], 1) if is_batch else progress.rows_per_second,
            lag=None if None in lags else sum(lag for lag in lags if lag is not None),
            watermark=min(self._watermarks.values(), default=progress.watermark),
        )


def lag_of(report: Mapping[str, Any]) -> int | None:
    """How many offsets are there behind the end of a batch; None if a source does not tell."""
    return _between(report, "endOffset", "latestOffset")


def rows_of(report: Mapping[str, Any]) -> int:
    """How many offsets a batch covers. Spark's own count has a row as often as the query looks at it."""
    return _between(report, "startOffset", "endOffset") or 0


def _between(report: Mapping[str, Any], first: str, last: str) -> int | None:
    """A partition counts once, also if the query has a source for each of two looks at it."""
    found: dict[TopicPartition, int] = {}
    for source in report["sources"]:
        begin, end = _offsets(source[first]), _offsets(source[last])
        if begin is None or end is None:
            return None
        # A partition that the first does not know is new, and counts from its beginning; but the very first batch
        # says only where reading begins.
        for place, offset in end.items():
            size = max(0, offset - begin.get(place, 0)) if begin else 0
            found[place] = max(found.get(place, 0), size)
    return sum(found.values())


def _offsets(text: str | None) -> Mapping[TopicPartition, int] | None:
    from penstock.spark.offsets import Offsets

    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    if found == {}:
        return {}
    # Those of another source than ours.
    if not isinstance(found, dict) or "topics" not in found:
        return None
    return Offsets.from_json(found).ends
