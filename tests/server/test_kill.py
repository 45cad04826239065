"""What `penstock serve` acknowledged stays, whenever it is killed: publishes of both dialects, and what groups did."""

from __future__ import annotations

from pathlib import Path

from tests.support.serve_kill import ServeJudge


def test_nothing_that_a_server_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    judge = ServeJudge(tmp_path, seed=1)
    for _ in range(3):
        judge.kill_one()
    judge.settle()
    for _ in range(2):
        judge.kill_one()
    judge.settle()
    figures = judge.figures
    assert figures.acknowledged, "nothing was acknowledged"
    assert figures.resent, "no kill left anything in doubt"
    assert figures.redelivered, "no kill found anything in flight"
    assert figures.dead_letters, "nothing became a dead letter"
