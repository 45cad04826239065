"""What is acknowledged stays: power cuts on a disk that loses what was not synced, and kill -9 of a real process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.kill import KillJudge
from tests.support.simulation import simulate

# Each of the four parts takes its share of the seeds: 1000 in `make test`, fewer in `make check`, as of all that is
# random. `make soak` takes 10,000, or CUTS=.
SEEDS = 10 * settings().max_examples
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_acknowledged_is_lost_in_a_power_cut(part: int) -> None:
    seeds = range(part, SEEDS, PARTS)
    cuts = sum(simulate(seed=seed).cuts for seed in seeds)
    assert cuts > len(seeds), "the power was hardly ever cut"


def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    judge = KillJudge(tmp_path / "data", seed=1)
    for _ in range(4):
        judge.kill_one()
    assert all(judge.acknowledged[topic] for topic in ("synced", "written"))
