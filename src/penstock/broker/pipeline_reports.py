"""What pipelines report about themselves, so that the broker can show all of them in one place.

A pipeline runs in another process and reports every few seconds. Its reports are kept in memory only: after a restart
of the broker, the next report brings them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from penstock.clock import Clock
from penstock.health import Usage
from penstock.schema import NonNegative, about

PIPELINES_MAX: Final = 1000
# States in which a pipeline goes on reporting. One that does not is shown as silent.
ACTIVE: Final = frozenset({"starting", "running", "retrying"})
SILENT: Final = "silent"
_SILENT_US: Final = 30_000_000

Word = Annotated[str, Meta(min_length=1, max_length=256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    name: Annotated[Word, about("its name")]
    kind: Annotated[Word, about("its kind")]
    state: Annotated[Word, about("starting, running, retrying, done, stopped, failed or invalid")]
    file: Annotated[str, Meta(max_length=4096), about("the path of its file")]
    runner: Annotated[Word, about("the host and the process that run it")]
    started_us: Annotated[NonNegative, about("when it was started, in µs since 1970")]
    updated_us: Annotated[NonNegative, about("when its last batch ended, in µs since 1970")]
    batches: Annotated[NonNegative, about("batches since it was started")] = 0
    batch: Annotated[NonNegative | None, about("the number of its last batch")] = None
    rows: Annotated[NonNegative, about("offsets of the source that it covered since it was started")] = 0
    rows_in: Annotated[NonNegative | None, about("messages that it read there")] = None
    rows_out: Annotated[NonNegative | None, about("rows written to the sink")] = None
    dead_letters: Annotated[NonNegative | None, about("messages that became dead letters")] = None
    rows_per_second: Annotated[Annotated[float, Meta(ge=0)], about("in the last batch")] = 0.0
    late_rows: Annotated[NonNegative, about("rows dropped because they came after the watermark")] = 0
    lag: Annotated[NonNegative | None, about("messages that are not processed yet")] = None
    watermark: Annotated[Annotated[str, Meta(max_length=64)] | None, about("its event time watermark")] = None
    failures: Annotated[NonNegative, about("failures in a row")] = 0
    reason: Annotated[Annotated[str, Meta(max_length=2000)] | None, about("why it failed, or its file is invalid")] = (
        None
    )


class Heard(NamedTuple):
    report: PipelineReport
    time_us: int


class PipelineReports:
    """The last report of each pipeline. If there are too many, the one that was silent the longest is dropped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[str, Heard] = {}

    def add(self, report: PipelineReport) -> None:
        self._heard.pop(report.name, None)
        self._heard[report.name] = Heard(report, self._clock.now_us())
        if len(self._heard) > PIPELINES_MAX:
            del self._heard[next(iter(self._heard))]

    def __iter__(self) -> Iterator[Heard]:
        """Sorted by name."""
        return iter([self._heard[name] for name in sorted(self._heard)])

    def __len__(self) -> int:
        return len(self._heard)

    def state(self, heard: Heard) -> str:
        is_silent = heard.report.state in ACTIVE and self._clock.now_us() - heard.time_us > _SILENT_US
        return SILENT if is_silent else heard.report.state

    @property
    def usage(self) -> Usage:
        return Usage(len(self._heard), PIPELINES_MAX)
