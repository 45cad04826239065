"""Every history of a small cluster: all orders of a few events, and all faults at every step.

A state is a whole world, pickled. Two histories that lead to the same state are continued once.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from operator import attrgetter
from random import Random
from typing import Any, Final

from penstock.cluster.actions import Append, Read, Reading, StoreMark, Survey, Surveyed, Taken
from penstock.cluster.place import Lineage, Place, Trimmable
from penstock.cluster.record import Record
from tests.cluster.world import Request, World


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each event may happen in one history."""

    take_overs: int = 0
    rounds: int = 0
    polls: int = 0
    checkpoints: int = 0
    # Requests with an unknown outcome: executed before, never, or at any time later.
    unknowns: int = 0
    crashes: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One event: of a request, by its index, or of a machine."""

    name: str
    index: int


class _First(Random):
    """Chooses the first of everything, and has no state to compare."""

    def __reduce__(self) -> str:
        return "_FIRST"

    def random(self) -> float:
        return 0.0

    def getrandbits(self, k: int, /) -> int:
        return 0


_FIRST: Final = _First()


def choices(world: World, budget: Budget) -> Iterator[Choice]:
    for index, request in enumerate(world.requests):
        yield Choice("execute", index)
        if budget.unknowns and not request.is_ghost and isinstance(request.action, Append | StoreMark):
            yield Choice("lose", index)
            if request.answer is None:
                yield Choice("delay", index)
    for machine in world.machines:
        if budget.take_overs and machine.follows:
            yield Choice("take_over", machine.number)
        if budget.polls and machine.follows:
            yield Choice("poll", machine.number)
        if budget.rounds and machine.leads:
            yield Choice("publish", machine.number)
        if budget.checkpoints and machine.leads and machine.node is not None and machine.node.may_checkpoint:
            yield Choice("checkpoint", machine.number)
        if budget.crashes and machine.node is not None:
            yield Choice("crash", machine.number)


def apply(world: World, budget: Budget, choice: Choice) -> Budget:
    match choice.name:
        case "execute":
            world.execute(world.requests[choice.index])
            return budget
        case "lose" | "delay":
            world.lose(world.requests[choice.index], late=choice.name == "delay")
            return replace(budget, unknowns=budget.unknowns - 1)
    machine = world.machines[choice.index]
    match choice.name:
        case "take_over":
            world.take_over(machine)
            return replace(budget, take_overs=budget.take_overs - 1)
        case "poll":
            world.poll(machine)
            return replace(budget, polls=budget.polls - 1)
        case "publish":
            world.publish_new(machine, (0,))
            return replace(budget, rounds=budget.rounds - 1)
        case "checkpoint":
            world.store_content(machine)
            world.checkpoint(machine)
            return replace(budget, checkpoints=budget.checkpoints - 1)
        case "crash":
            world.crash(machine, cut=False)
            world.start(machine)
            return replace(budget, crashes=budget.crashes - 1)
    raise AssertionError(choice)


def explore(machines: int, budget: Budget, states_max: int) -> int:
    """Visit every state that the budget allows; return how many. A failure notes the history that led to it."""
    world = World(machines, _FIRST, is_small=True)
    seen: set[bytes] = set()
    stack: list[tuple[bytes, Budget, tuple[Choice, ...]]] = [(_packed(world), budget, ())]
    while stack:
        packed, budget, history = stack.pop()
        key = blake2b(packed + repr(budget).encode(), digest_size=16).digest()
        if key in seen:
            continue
        seen.add(key)
        assert len(seen) <= states_max, f"more than {states_max} states"
        world = pickle.loads(packed)
        for choice in list(choices(world, budget)):
            following = pickle.loads(packed)
            try:
                left = apply(following, budget, choice)
            except Exception as error:
                error.add_note(f"after {[*history, choice]}")
                raise
            stack.append((_packed(following), left, (*history, choice)))
    return len(seen)


# Dataclasses with slots pickle themselves field by field in Python. This takes a third of the time.
_VALUES: Final = (
    *(Append, Read, Reading, StoreMark, Survey, Surveyed, Taken),
    *(Place, Lineage, Trimmable, Record, Request),
)


def _reduced(kind: type) -> Callable[[Any], tuple[type, tuple[object, ...]]]:
    names = [field.name for field in fields(kind)]
    values = attrgetter(*names)
    return (lambda value: (kind, values(value))) if len(names) > 1 else (lambda value: (kind, (values(value),)))


_REDUCED: Final = copyreg.dispatch_table | {kind: _reduced(kind) for kind in _VALUES}


def _packed(world: World) -> bytes:
    """Pickle a world in the same way, in whatever order its requests were made."""
    world.requests.sort(key=_order)
    packed = io.BytesIO()
    pickler = pickle.Pickler(packed, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCED
    pickler.dump(world)
    return packed.getvalue()


def _order(request: Request) -> tuple[object, ...]:
    action = request.action
    position = action.position if isinstance(action, Append | Read) else -1
    return (
        request.machine,
        request.is_ghost,
        request.life,
        type(action).__name__,
        position,
        type(request.answer).__name__,
    )
