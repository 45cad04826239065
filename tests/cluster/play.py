"""Random lives of a simulated cluster: `play(seed)`. Each seed has its own probabilities for what happens."""

from __future__ import annotations

from random import Random
from typing import Final

from penstock.cluster.actions import Append, StoreMark
from penstock.cluster.record import Kind
from tests.cluster.machine import Machine
from tests.cluster.world import World

# What may happen in a step, with its weights: a seed chooses one of them for each.
_WEIGHTS: Final[dict[str, tuple[int, ...]]] = {
    "execute": (20, 40, 80),
    "hold": (0, 1, 3, 8),
    "release": (0, 1, 2),
    "publish": (5, 10, 20),
    "republish": (0, 1, 3),
    "take_over": (1, 2, 5),
    "poll": (1, 3, 8),
    "checkpoint": (0, 2, 6),
    "members": (0, 1),
    "lose": (0, 2, 8),
    "retry": (0, 2),
    "pause": (0, 1, 3),
    "resume": (0, 1, 2),
    "crash": (0, 0, 1, 2),
    "start": (1, 4),
    "replace": (0, 1),
    "sync": (0, 2),
}


class Player:
    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.world = World(random.choice((2, 3, 3, 4)), random)
        self._steps = random.choice((100, 200, 400, 800))
        self._in_flight = random.choice((1, 2, 4, 8))
        # Whether requests are executed in the order in which they were made, mostly.
        self._order = random.choice((0.0, 0.5, 0.9))
        # How many requests are executed at once, while nothing else happens.
        self._burst = random.choice((1, 3, 10))
        weights = {name: random.choice(choices) for name, choices in _WEIGHTS.items()}
        self._names = list(weights)
        self._weights = list(weights.values())

    def run(self) -> World:
        for name in self.random.choices(self._names, self._weights, k=self._steps):
            getattr(self, f"_{name}")()
        self.world.settle()
        return self.world

    def _pick(self, machines: list[Machine]) -> Machine | None:
        return self.random.choice(machines) if machines else None

    def _leader(self) -> Machine | None:
        return self._pick([machine for machine in self.world.machines if machine.leads])

    def _execute(self) -> None:
        for _ in range(self.random.randint(1, self._burst)):
            requests = [request for request in self.world.requests if not request.is_held]
            if not requests:
                return
            in_order = self.random.random() < self._order
            self.world.execute(requests[0] if in_order else self.random.choice(requests))

    def _hold(self) -> None:
        """Keep a request from being executed, maybe for days."""
        if self.world.requests:
            self.random.choice(self.world.requests).is_held = True

    def _release(self) -> None:
        held = [request for request in self.world.requests if request.is_held]
        if held:
            request = self.random.choice(held)
            request.is_held = False
            self.world.execute(request)

    def _publish(self) -> None:
        leader = self._leader()
        if leader is not None and leader.node is not None and leader.node.pending < self._in_flight:
            self.world.publish_new(leader, self.random.choice(((0,), (1,), (0, 1))))

    def _republish(self) -> None:
        """A client that knows of no answer tries again, with any leader."""
        leader = self._leader()
        if leader is not None and self.world.waiting:
            value = self.random.choice(list(self.world.waiting))
            self.world.publish(leader, value, self.world.waiting[value])

    def _take_over(self) -> None:
        """Any node at any time: however wrong its clock is, it can do nothing worse."""
        machine = self._pick([machine for machine in self.world.machines if machine.follows])
        if machine is not None:
            self.world.take_over(machine)

    def _poll(self) -> None:
        machine = self._pick([machine for machine in self.world.machines if machine.follows])
        if machine is not None:
            self.world.poll(machine)

    def _checkpoint(self) -> None:
        leader = self._leader()
        if leader is not None:
            self.world.checkpoint(leader)

    def _members(self) -> None:
        leader = self._leader()
        if leader is not None:
            kind = self.random.choice((Kind.JOIN, Kind.LEAVE))
            self.world.change_members(leader, kind, self.random.choice(self.world.machines))

    def _lose(self) -> None:
        creates = [
            request
            for request in self.world.requests
            if not request.is_ghost and isinstance(request.action, Append | StoreMark)
        ]
        if creates:
            self.world.lose(self.random.choice(creates), late=self.random.random() < 0.5)

    def _retry(self) -> None:
        for request in self.world.requests:
            if request.answer is not None and isinstance(request.action, Append | StoreMark):
                self.world.retry(request)
                return

    def _pause(self) -> None:
        machine = self._pick([machine for machine in self.world.machines if machine.node is not None])
        if machine is not None:
            machine.is_paused = True

    def _resume(self) -> None:
        machine = self._pick([machine for machine in self.world.machines if machine.is_paused])
        if machine is not None:
            machine.is_paused = False

    def _crash(self) -> None:
        machine = self._pick([machine for machine in self.world.machines if machine.node is not None])
        if machine is not None:
            self.world.crash(machine, cut=self.random.random() < 0.5)

    def _start(self) -> None:
        machine = self._pick([machine for machine in self.world.machines if machine.node is None])
        if machine is not None:
            self.world.start(machine)

    def _replace(self) -> None:
        machine = self._pick([machine for machine in self.world.machines if machine.node is None])
        if machine is not None:
            self.world.replace(machine)

    def _sync(self) -> None:
        self.random.choice(self.world.machines).disk.sync()


def play(seed: int) -> World:
    try:
        return Player(seed).run()
    except AssertionError as error:
        error.add_note(f"seed {seed}: tests.cluster.play.play({seed})")
        raise
