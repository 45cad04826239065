from __future__ import annotations

from pathlib import Path

from tests.hostile.siege import Scale, besiege
from tests.support.fuzz import DOOR, fuzz
from tests.support.sampling import examples


def test_whatever_comes_only_protocol_errors_come_out() -> None:
    rounds = examples(3000)
    assert fuzz(seed=1, rounds=rounds) > 30 * rounds


def test_whatever_comes_a_server_serves_on(tmp_path: Path) -> None:
    figures = besiege(tmp_path / "fuzz", DOOR, seed=1, scale=Scale(seconds=4))
    assert figures.connections > 100
