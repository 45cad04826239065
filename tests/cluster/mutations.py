"""The rules of the protocol, each broken: a simulation that does not notice proves nothing.

`python -m tests.cluster.mutations` looks for the first seed that finds each, after a change of the simulation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from penstock.cluster.actions import Action, Append, Delete, Read, Reading, Stored, StoreMark, Unknown
from penstock.cluster.checkpoint import Mark
from penstock.cluster.leader import Leader
from penstock.cluster.node import Node
from penstock.cluster.place import Lineage, Place
from penstock.cluster.record import Kind, Record, decode
from penstock.cluster.take_over import Phase, TakeOver
from penstock.cluster.trim import Trim
from tests.cluster.machine import Machine
from tests.cluster.play import play
from tests.cluster.world import Push, Request, World

Patch = tuple[type, str, Callable[..., Any]]


def _acknowledge_over_a_gap() -> list[Patch]:
    """A record is committed as soon as it is stored, and those before it."""

    def is_committed(leader: Leader, position: int) -> bool:
        return position < leader._unknown_from or position in leader._known

    return [(Leader, "_is_committed", is_committed)]


def _acknowledge_out_of_order() -> list[Patch]:
    """What is stored is committed, whatever is before it."""

    def take_committed(leader: Leader) -> list[Record]:
        committed = [record for record in leader._pending if record.position not in leader._sent]
        for record in committed:
            leader._pending.remove(record)
        return committed

    def commit(node: Node, record: Record) -> list[Action]:
        node._follower.place = replace(node.place, lineage=replace(node.place.lineage, number=record.number - 1))
        return commit_next(node, record)

    commit_next = Node._committed
    return [(Leader, "take_committed", take_committed), (Node, "_committed", commit)]


def _resend_only_what_was_displaced() -> list[Patch]:
    def displaced(leader: Leader, position: int) -> list[Append]:
        for index, record in enumerate(leader._pending):
            if record.position == position:
                del leader._pending[index]
                resent = leader._send(record)
                leader._pending.insert(index, leader._pending.pop())
                return [resent]
        return []

    return [(Leader, "_displaced", displaced)]


def _no_numbers() -> list[Patch]:
    """A record is valid if its epoch and leader are right."""

    def after(lineage: Lineage, record: Record) -> Lineage | None:
        if record.kind is Kind.LEAD or (record.epoch, record.incarnation) != (lineage.epoch, lineage.incarnation):
            return lineage_after(lineage, record)
        return replace(lineage, number=record.number)

    lineage_after = Lineage.after
    return [(Lineage, "after", after)]


def _count_void_records() -> list[Patch]:
    """A position that another record took counts as stored."""

    def displaced(leader: Leader, position: int) -> list[Append]:
        return []

    return [(Leader, "_displaced", displaced)]


def _delete(kinds: Callable[[World, int], bool]) -> list[Patch]:
    """Also delete what else is below the mark."""

    def perform(world: World, machine: Machine, actions: list[Action]) -> None:
        more: list[Action] = []
        for action in actions:
            if isinstance(action, Delete) and action.ranges:
                below = range(world.newest.position)
                fences = [(at, at + 1) for at in below if at in world.objects and kinds(world, at)]
                action = Delete((*action.ranges, *fences))
            more.append(action)
        perform_as_asked(world, machine, more)

    perform_as_asked = World.perform
    deletes = (
        Trim,
        "deletes",
        lambda trim, delete: delete.ranges[: len(trim._trimmable.rounds)] == trim._trimmable.rounds,
    )
    return [(World, "perform", perform), deletes]


def _delete_void_records() -> list[Patch]:
    def is_void(world: World, position: int) -> bool:
        oracle = world.oracle
        return oracle.below[position] == oracle.below[position + 1]

    return _delete(is_void)


def _delete_lead_records() -> list[Patch]:
    def is_lead(world: World, position: int) -> bool:
        return decode(world.objects[position], position).kind is Kind.LEAD

    return _delete(is_lead)


def _lead_below_the_mark() -> list[Patch]:
    return [(TakeOver, "_is_trimmed", lambda attempt, reading: False)]


def _read_the_mark_first() -> list[Patch]:
    """Look at the trim mark, and then read the records."""

    def step(world: World, request: Request) -> None:
        if not isinstance(request.action, Read):
            step_last(world, request)
            return
        first = firsts.setdefault(id(request), (request, world.newest))[1]
        step_last(world, request)
        if isinstance(request.answer, Reading):
            request.answer = replace(request.answer, mark=first)

    firsts: dict[int, tuple[Request, Mark]] = {}
    step_last = World._step
    return [(World, "_step", step)]


def _skip_the_second_reading() -> list[Patch]:
    """After another record took the position of a LEAD, try the next position at once."""

    def taken(attempt: TakeOver) -> list[Action]:
        assert attempt.lead is not None
        attempt.lead = attempt.lead.at(attempt.lead.position + 1, 0)
        attempt.phase = Phase.APPENDING
        attempt._sent = Append(attempt.lead.position, attempt.lead.encode())
        return [attempt._sent]

    return [(TakeOver, "_taken", taken)]


def _apply_before_commit() -> list[Patch]:
    """A leader applies what it has appended, and not what it has committed."""

    def append(node: Node, kind: Kind, body: bytes) -> tuple[int, list[Action]]:
        number, actions = append_only(node, kind, body)
        assert node._leader is not None
        return number, actions + node._follower.commit(node._leader._pending[-1])

    append_only = Node.append
    return [(Node, "append", append), (Node, "_committed", lambda node, record: [])]


def _push_before_commit() -> list[Patch]:
    """A leader sends what it appends to its followers at once."""

    def perform(world: World, machine: Machine, actions: list[Action]) -> None:
        perform_only(world, machine, actions)
        for action in actions:
            if isinstance(action, Append) and machine.leads:
                for other in world.machines:
                    if other is not machine and other.node is not None:
                        push = Push(action.position, action.data)
                        world.requests.append(Request(other.number, other.life, push))

    perform_only = World.perform
    return [(World, "perform", perform)]


def _trim_before_the_mark() -> list[Patch]:
    """Rounds are deleted while the mark is being stored."""
    begin = Trim.begin

    def delete_too(trim: Trim) -> list[Action]:
        actions = begin(trim)
        return [*actions, Delete(trim._trimmable.rounds)] if isinstance(actions[0], StoreMark) else actions

    return [(Trim, "begin", delete_too)]


def _trim_before_the_checkpoint() -> list[Patch]:
    """Trim as soon as the checkpoint is appended."""

    def checkpoint(node: Node, place: Place, content: str) -> tuple[int, list[Action]]:
        number, actions = append_checkpoint(node, place, content)
        assert node._leader is not None
        after = node.place.after(replace(node._leader._pending[-1], number=node.place.lineage.number + 1))
        assert after is not None
        assert after.trimmable is not None
        node._trim = Trim(after.trimmable, node.mark)
        return number, actions + node._trim.begin()

    append_checkpoint = Node.checkpoint
    return [(Node, "checkpoint", checkpoint)]


def _accept_answers_of_unknown_outcome() -> list[Patch]:
    """Take an unknown outcome for a success."""
    answered = Leader.answered

    def take(leader: Leader, append: Append, answer: Any) -> list[Append]:
        return answered(leader, append, Stored() if isinstance(answer, Unknown) else answer)

    return [(Leader, "answered", take)]


MUTATIONS: Final[dict[str, Callable[[], list[Patch]]]] = {
    "acknowledge over a gap": _acknowledge_over_a_gap,
    "acknowledge out of order": _acknowledge_out_of_order,
    "resend only what was displaced": _resend_only_what_was_displaced,
    "valid without numbers": _no_numbers,
    "count void records": _count_void_records,
    "delete void records": _delete_void_records,
    "delete LEAD records": _delete_lead_records,
    "lead below the trim mark": _lead_below_the_mark,
    "read the trim mark first": _read_the_mark_first,
    "skip the reading after taken": _skip_the_second_reading,
    "apply before commit": _apply_before_commit,
    "push before commit": _push_before_commit,
    "trim before the mark is stored": _trim_before_the_mark,
    "trim before the checkpoint is committed": _trim_before_the_checkpoint,
    "take unknown for stored": _accept_answers_of_unknown_outcome,
}


# A seed that finds each of them, except one that needs thousands: `test_trim_mark.py` plays its scene.
FOUND_BY: Final = {
    "acknowledge over a gap": 8,
    "acknowledge out of order": 0,
    "resend only what was displaced": 8,
    "valid without numbers": 11,
    "count void records": 8,
    "delete void records": 515,
    "delete LEAD records": 50,
    "lead below the trim mark": 139,
    "skip the reading after taken": 0,
    "apply before commit": 0,
    "push before commit": 0,
    "trim before the mark is stored": 0,
    "trim before the checkpoint is committed": 0,
    "take unknown for stored": 0,
}
RARE: Final = "read the trim mark first"


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, attribute, replacement in MUTATIONS[name]():
            stack.enter_context(mock.patch.object(kind, attribute, replacement))
        yield


def first_found(name: str, seeds: range) -> int | None:
    """Return the first seed that finds a broken rule."""
    with mutated(name):
        for seed in seeds:
            try:
                play(seed)
            except (AssertionError, KeyError):
                return seed
    return None


if __name__ == "__main__":
    for rule in FOUND_BY:
        print(f'    "{rule}": {first_found(rule, range(10_000))},', flush=True)
