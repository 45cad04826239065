"""The protocol in a simulated cluster: every seed is a life with all faults at once."""

from __future__ import annotations

import pytest

from tests.cluster.mutations import FOUND_BY, MUTATIONS, RARE, mutated
from tests.cluster.play import play
from tests.support.sampling import covered, examples

SEEDS = 400


def test_no_fault_loses_or_doubles_what_was_acknowledged() -> None:
    worlds = [play(seed) for seed in range(examples(SEEDS))]

    # It was about something: leaders that were deposed, trimmed logs, and void records.
    assert sum(len(world.oracle.acknowledged) for world in worlds) > 5 * len(worlds)
    assert sum(world.oracle.epoch for world in worlds) > 2 * len(worlds)
    assert sum(world.newest.number for world in worlds) > len(worlds)
    assert covered(any(world.oracle.end > len(world.oracle.truth) for world in worlds))
    assert covered(any(world.refilled for world in worlds))


def test_a_leader_that_is_deposed_may_still_acknowledge_what_its_successors_have() -> None:
    """It was stored before the next epoch began, and its answer came late. The judge checks that it is valid."""
    assert covered(any(play(seed).oracle.late for seed in range(examples(100))))


def test_every_broken_rule_has_a_seed() -> None:
    assert {*FOUND_BY, RARE} == {*MUTATIONS}


@pytest.mark.parametrize("rule", FOUND_BY)
def test_a_broken_rule_is_found(rule: str) -> None:
    with mutated(rule), pytest.raises((AssertionError, KeyError)):
        play(FOUND_BY[rule])
