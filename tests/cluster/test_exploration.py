"""Every history of small clusters."""

from __future__ import annotations

import pytest

from tests.cluster.explore import Budget, explore
from tests.cluster.mutations import mutated

STATES_MAX = 10_000


@pytest.mark.parametrize(
    "budget",
    [
        Budget(take_overs=2, rounds=2),
        Budget(take_overs=2, rounds=1, unknowns=1),
        Budget(take_overs=1, rounds=1, checkpoints=1, crashes=1),
    ],
    ids=repr,
)
def test_no_history_of_a_small_cluster_loses_or_doubles_what_was_acknowledged(budget: Budget) -> None:
    assert explore(2, budget, STATES_MAX) > 500


@pytest.mark.parametrize(
    ("rule", "budget"),
    [
        ("skip the reading after taken", Budget(take_overs=2)),
        ("take unknown for stored", Budget(take_overs=1, rounds=1, unknowns=1)),
        ("acknowledge out of order", Budget(take_overs=1, rounds=2)),
        ("apply before commit", Budget(take_overs=1, rounds=1)),
    ],
)
def test_a_broken_rule_is_found_in_a_small_cluster(rule: str, budget: Budget) -> None:
    with mutated(rule), pytest.raises((AssertionError, KeyError)) as raised:
        explore(2, budget, STATES_MAX)

    assert "states" not in str(raised.value)
