"""What is acknowledged stays: power cuts on a disk that loses what was not synced, and kill -9 of a real process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kill import KillJudge
from tests.simulation import simulate

# Each of the four parts takes its share of the seeds: these many, then as many more as fit in its time.
SEEDS_MIN = 100
BUDGET_S = 15
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_acknowledged_is_lost_in_a_power_cut(part: int) -> None:
    stop = time.monotonic() + BUDGET_S
    cuts = seeds = 0
    while seeds < SEEDS_MIN or time.monotonic() < stop:
        cuts += simulate(seed=part + PARTS * seeds).cuts
        seeds += 1
    assert cuts > seeds, "the power was hardly ever cut"


def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    judge = KillJudge(tmp_path / "data", seed=1)
    for _ in range(4):
        judge.kill_one()
    assert all(judge.acknowledged[topic] for topic in ("synced", "written"))
