from __future__ import annotations

import asyncio
import gc
import logging
import warnings

import pytest

from penstock import awaiting
from penstock.health import PROBLEMS_MAX, Health


def test_a_problem_lasts_until_it_is_cleared_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    health.report("disk", "5 MB are free")
    health.report("disk", "4 MB are free")
    assert health.problems == {"disk": "4 MB are free"}
    assert [record.getMessage() for record in caplog.records] == ["disk: 5 MB are free"]

    health.clear("disk")
    health.clear("disk")
    assert health.problems == {}
    assert len(caplog.records) == 2


def test_a_flood_of_problems_is_bounded() -> None:
    health = Health()
    for number in range(PROBLEMS_MAX + 10):
        health.report(f"partition {number}", "failed")
    assert len(health.problems) == PROBLEMS_MAX


def test_a_fault_is_counted_by_its_seam_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    health.fault("delivery", "orders 0", RuntimeError("a bug"))
    assert health.faults == {"delivery": 1}
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_a_task_that_is_cancelled_before_it_begins_is_no_coroutine_that_nobody_awaited() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    async def cancel() -> None:
        async with asyncio.TaskGroup() as tasks:
            awaiting.spawn(tasks, Health(), wait()).cancel()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(cancel())
        gc.collect()
    assert [str(each.message) for each in found] == []
