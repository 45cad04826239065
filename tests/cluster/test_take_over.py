"""A take-over of a log from which someone removed a record."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from penstock.errors import CorruptRecord
from tests.cluster.machine import Machine
from tests.cluster.world import World


def drain(world: World) -> None:
    while world.requests:
        world.execute(world.requests[0])


def lead(world: World, machine: Machine) -> None:
    world.take_over(machine)
    drain(world)


def publish(world: World, machine: Machine, count: int) -> None:
    for _ in range(count):
        world.publish_new(machine, (0,))
        drain(world)


def of_one_leader(world: World) -> None:
    lead(world, world.machines[0])
    publish(world, world.machines[0], 6)


def of_two_leaders(world: World) -> None:
    of_one_leader(world)
    lead(world, world.machines[1])
    publish(world, world.machines[1], 2)


@pytest.mark.parametrize("history", [of_one_leader, of_two_leaders])
@pytest.mark.parametrize("removed", range(6))
def test_a_removed_record_is_named_and_nobody_begins_in_its_place(
    history: Callable[[World], None], removed: int
) -> None:
    world = World(3, _LastOfList(), is_small=True)
    history(world)
    before = dict(world.objects)
    del world.objects[removed]

    with pytest.raises(
        CorruptRecord, match=rf"record {removed} of the shared log is missing, and was there .* restore"
    ):
        lead(world, world.machines[2])
    assert world.objects.items() <= before.items()

    world.objects[removed] = before[removed]
    world.replace(world.machines[2])
    world.machines[2].start(0)
    world.settle()


class _LastOfList(Random):
    """Lets no list lag."""

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return seq[0]


def test_what_a_leader_could_not_commit_is_no_sign_of_a_removed_record() -> None:
    world = World(2, _LastOfList(), is_small=True)
    first, second = world.machines
    lead(world, first)
    publish(world, first, 2)
    for _ in range(4):
        world.publish_new(first, (0,))
    late = world.requests.pop(0)
    drain(world)
    lead(world, second)
    publish(world, second, 1)

    world.requests.append(late)
    world.settle()
    assert world.oracle.epoch == 2
