"""A reader that is overtaken by a trim, while a paused node appends its LEAD where a round was deleted."""

from __future__ import annotations

from random import Random

import pytest

from penstock.cluster.actions import Append
from tests.cluster.mutations import mutated
from tests.cluster.world import Request, World


def finish(world: World, *held: Request) -> None:
    """Execute all requests, and what follows from them, but not these."""
    while ready := [request for request in world.requests if all(request is not other for other in held)]:
        world.execute(ready[0])


def trimmed_under_a_reader() -> World:
    world = World(3, Random(0))
    leader, paused, reader = world.machines
    world.take_over(leader)
    finish(world)
    # A node reads to the end of the log, asks for a LEAD at 1, and is paused.
    world.take_over(paused)
    while not isinstance(world.requests[-1].action, Append):
        world.execute(world.requests[-1])
    lead = world.requests[-1]
    # The leader puts a round there. A reader has read record 0, and not yet this one, when the log is trimmed.
    world.publish_new(leader, (0,))
    finish(world, lead)
    world.crash(reader, cut=True)
    world.replace(reader)
    world.start(reader)
    world.poll(reader)
    reading = world.requests[-1]
    world.execute(reading)
    for _ in range(2):
        world.checkpoint(leader)
    finish(world, lead, reading)
    assert 1 not in world.objects
    # The round is deleted, so the LEAD succeeds.
    world.execute(lead)
    assert 1 in world.objects
    finish(world, lead)
    finish(world)
    return world


def test_nobody_believes_what_is_below_the_mark_and_nobody_leads_there() -> None:
    world = trimmed_under_a_reader()
    world.settle()

    assert world.refilled == {1}
    assert world.oracle.epoch == 1


@pytest.mark.parametrize("rule", ["read the trim mark first", "lead below the trim mark"])
def test_the_scene_shows_both_rules_of_the_mark(rule: str) -> None:
    with mutated(rule), pytest.raises(AssertionError, match="1 is taken for valid, after 1 others"):
        trimmed_under_a_reader()
