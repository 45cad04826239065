"""What pipelines report of themselves, and what the broker shows of it."""

from __future__ import annotations

import pytest

from penstock.broker import pipeline_reports
from penstock.broker.pipeline_reports import PipelineReport, PipelineReports
from penstock.testing import ManualClock

SECOND = 1_000_000


def report(name: str = "clean", state: str = "running", rows: int = 0) -> PipelineReport:
    return PipelineReport(
        name=name, kind="k", state=state, file="f.toml", runner="here:1", started_us=1, updated_us=2, rows=rows
    )


def states(reports: PipelineReports) -> dict[str, str]:
    return {heard.report.name: reports.state(heard) for heard in reports}


def test_the_last_report_of_each_pipeline_is_kept() -> None:
    reports = PipelineReports(ManualClock())
    for rows in (1, 2):
        reports.add(report("b", rows=rows))
        reports.add(report("a", rows=10 * rows))
    assert [(heard.report.name, heard.report.rows) for heard in reports] == [("a", 20), ("b", 2)]


@pytest.mark.parametrize("state", ["starting", "running", "retrying"])
def test_an_active_pipeline_that_does_not_report_is_silent(state: str) -> None:
    clock = ManualClock()
    reports = PipelineReports(clock)
    reports.add(report(state=state))
    clock.advance(30 * SECOND)
    assert states(reports) == {"clean": state}
    clock.advance(1)
    assert states(reports) == {"clean": "silent"}
    reports.add(report(state=state))
    assert states(reports) == {"clean": state}


@pytest.mark.parametrize("state", ["done", "stopped", "failed", "invalid"])
def test_a_pipeline_that_has_ended_need_not_report(state: str) -> None:
    clock = ManualClock()
    reports = PipelineReports(clock)
    reports.add(report(state=state))
    clock.advance(3600 * SECOND)
    assert states(reports) == {"clean": state}


def test_too_many_pipelines_push_out_the_one_that_reported_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_reports, "PIPELINES_MAX", 3)
    reports = PipelineReports(ManualClock())
    for name in ("a", "b", "c", "a", "d"):
        reports.add(report(name))
    assert list(states(reports)) == ["a", "c", "d"]
    assert reports.usage.used == 3
