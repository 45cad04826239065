"""Nothing is lost and nothing doubled in a tree of brokers, whichever of them are killed when."""

from __future__ import annotations

from pathlib import Path

from tests.support.pipe_kill import PipeJudge


def test_messages_go_down_and_up_once_though_brokers_are_killed(tmp_path: Path) -> None:
    judge = PipeJudge(tmp_path, seed=1)
    while judge.kills < 4:
        judge.kill_one()
    judge.finish()
    figures = judge.figures
    assert figures.down, "nothing went down"
    assert figures.up, "nothing went up"
