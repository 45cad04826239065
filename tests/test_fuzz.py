from __future__ import annotations

from tests.fuzz import fuzz


def test_whatever_comes_only_protocol_errors_come_out() -> None:
    assert fuzz(seed=1, rounds=3000) > 100_000
