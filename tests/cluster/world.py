"""A simulated cluster: machines, an object store, and requests that are under way between them.

A request is executed in steps, and between any two of them anything else may happen. What a machine asked may be
executed after it got no answer, or is dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from penstock.cluster.actions import (
    Action,
    Append,
    Commit,
    Delete,
    Deposed,
    Lead,
    Read,
    Reading,
    Restore,
    Stored,
    StoreMark,
    Survey,
    Surveyed,
    Taken,
    Unknown,
)
from penstock.cluster.checkpoint import UNTRIMMED, Checkpoint, Mark
from penstock.cluster.place import Place
from penstock.cluster.record import Kind, decode
from tests.cluster.machine import Machine
from tests.cluster.oracle import Oracle, encode_round


@dataclass(frozen=True, slots=True)
class Push:
    """What a leader sends to a follower: a record that it committed."""

    position: int
    data: bytes


@dataclass(slots=True)
class Request:
    machine: int
    life: int
    action: Append | Read | Survey | Restore | StoreMark | Delete | Push
    # What was read, or is still to be deleted.
    read: list[bytes] = field(default_factory=list)
    beyond: int = 0
    left: list[int] = field(default_factory=list)
    # Whether the object was found to exist.
    exists: bool = False
    # What to tell the machine; None while it is being executed.
    answer: object = None
    # Nobody waits for the answer.
    is_ghost: bool = False
    # Nothing of it happens before it is released.
    is_held: bool = False


DONE = "done"


class World:
    def __init__(self, machines: int, random: Random, *, is_small: bool = False) -> None:
        """In a small world there are fewer states: the store executes a request at once, and leaders send nothing."""
        self.random = random
        self._is_small = is_small
        self.oracle = Oracle()
        self.machines = [Machine(number) for number in range(machines)]
        self.requests: list[Request] = []
        # The object store.
        self.objects: dict[int, bytes] = {}
        self.marks: dict[int, bytes] = {}
        self.newest = UNTRIMMED
        self.contents: dict[str, dict[int, list[int]]] = {}
        # Positions that were free again after they were trimmed, and were filled by a late append.
        self.refilled: set[int] = set()
        # What clients sent, and no leader has acknowledged.
        self.values = 0
        self.waiting: dict[int, tuple[int, ...]] = {}
        self.incarnations = 0
        for machine in self.machines:
            machine.start(0)

    # What a node asks.

    def perform(self, machine: Machine, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Commit():
                    self._commit(machine, action)
                case Lead(epoch):
                    machine.begin_to_lead()
                    self.oracle.leads(epoch, machine.index, machine.disk.logs)
                case Deposed():
                    machine.forget()
                case Delete(ranges):
                    left = [position for first, end in ranges for position in range(first, end)]
                    self.requests.append(Request(machine.number, machine.life, action, left=left))
                case _:
                    self.requests.append(Request(machine.number, machine.life, action))

    def _commit(self, machine: Machine, commit: Commit) -> None:
        record = commit.record
        data = record.encode()
        self.oracle.committed(machine.index, record.position, data)
        machine.index += 1
        machine.disk.apply(commit)
        if not machine.leads or record.kind is Kind.LEAD:
            return
        self.oracle.acknowledge(record.position, data, record.epoch)
        for message in machine.pending.pop(record.number, []):
            self.waiting.pop(message.value, None)
        for other in self.machines:
            if not self._is_small and other is not machine and other.node is not None:
                self.requests.append(Request(other.number, other.life, Push(record.position, data)))

    # What clients and operators ask.

    def publish(self, machine: Machine, value: int, logs: tuple[int, ...]) -> None:
        """Publish to a leader, or again to another one."""
        assert machine.node is not None
        if machine.knows(value):
            return
        messages = machine.next_messages(logs, value)
        number, actions = machine.node.append(Kind.ROUND, encode_round(messages))
        machine.pending[number] = messages
        self.perform(machine, actions)

    def publish_new(self, machine: Machine, logs: tuple[int, ...]) -> None:
        self.values += 1
        self.waiting[self.values] = logs
        self.publish(machine, self.values, logs)

    def take_over(self, machine: Machine) -> None:
        assert machine.node is not None
        self.incarnations += 1
        self.perform(machine, machine.node.take_over(self.incarnations))

    def poll(self, machine: Machine) -> None:
        assert machine.node is not None
        self.perform(machine, machine.node.poll())

    def store_content(self, machine: Machine) -> None:
        """Store what a checkpoint will name."""
        assert machine.node is not None
        place = machine.node.place
        name = f"{place.position}-{machine.number}"
        self.contents[name] = {log: list(values) for log, values in machine.disk.logs.items()}
        machine.planned = (place, name)

    def checkpoint(self, machine: Machine) -> None:
        """Append a planned checkpoint, or plan one."""
        assert machine.node is not None
        if not machine.node.may_checkpoint:
            return
        if machine.planned is None or machine.planned[0].trimmable != machine.node.place.trimmable:
            self.store_content(machine)
            return
        place, content = machine.planned
        machine.planned = None
        self.perform(machine, machine.node.checkpoint(place, content)[1])

    def change_members(self, machine: Machine, kind: Kind, other: Machine) -> None:
        assert machine.node is not None
        self.perform(machine, machine.node.append(kind, other.member.encode())[1])

    # Failures.

    def crash(self, machine: Machine, *, cut: bool) -> None:
        """Kill a process, or cut the power of its machine. What it asked may be executed yet."""
        machine.stop()
        if cut:
            machine.disk.cut(self.random)
        else:
            machine.disk.kill(self.random)
        kept = []
        for request in self.requests:
            if request.machine == machine.number and not request.is_ghost:
                if not isinstance(request.action, Append | StoreMark | Delete):
                    continue
                request.is_ghost = True
            kept.append(request)
        self.requests = kept

    def replace(self, machine: Machine) -> None:
        """Put a machine with an empty disk in the place of one that is down."""
        machine.disk = type(machine.disk)()

    def start(self, machine: Machine) -> None:
        machine.start(self.oracle.index_at(machine.disk.place.position))

    def lose(self, request: Request, *, late: bool) -> None:
        """Let a request fail in a way that tells nothing: it was executed, or will be if it is late, or never is."""
        if late and request.answer is None:
            self.requests.append(Request(request.machine, request.life, request.action, is_ghost=True))
        request.answer = Unknown()

    def retry(self, request: Request) -> None:
        """Let a library repeat a request whose answer was lost: it finds its own object."""
        request.answer = None
        request.exists = True

    # The store.

    def execute(self, request: Request) -> None:
        """Take one step of a request, or give its answer to the machine."""
        if request.answer is not None or request.is_ghost:
            self._finish(request)
            return
        self._step(request)
        while self._is_small and request.answer is None:
            self._step(request)

    def _finish(self, request: Request) -> None:
        while request.is_ghost and request.answer is None:
            self._step(request)
            if not self._is_small:
                break
        if request.is_ghost:
            if request.answer is not None:
                self.requests.remove(request)
            return
        machine = self.machines[request.machine]
        if machine.is_paused:
            return
        self.requests.remove(request)
        if machine.node is not None and machine.life == request.life:
            self._answer(machine, request)

    def _answer(self, machine: Machine, request: Request) -> None:
        node = machine.node
        assert node is not None
        answer = request.answer
        match request.action:
            case Append() as append:
                assert isinstance(answer, Stored | Taken | Unknown)
                actions = node.answered(append, answer)
            case Read():
                assert isinstance(answer, Reading)
                actions = node.read(answer)
            case Survey():
                assert isinstance(answer, Surveyed)
                actions = node.surveyed(answer)
            case StoreMark() as store:
                assert isinstance(answer, Stored | Taken | Unknown)
                actions = node.mark_answered(store, answer)
            case Delete() as delete:
                actions = node.deleted(delete)
            case Restore(position):
                actions = self._restored(machine, position)
            case Push(position, data):
                actions = node.pushed(data, position)
        self.perform(machine, actions)

    def _restored(self, machine: Machine, position: int) -> list[Action]:
        node = machine.node
        assert node is not None
        data = self.objects[position]
        content = self.contents[Checkpoint.decode(decode(data, position)).content]
        actions = node.restored(data, position)
        machine.disk.restore(content, node.place)
        machine.index = self.oracle.index_at(node.place.position)
        self.oracle.check_logs(machine.disk.logs)
        return actions

    def _step(self, request: Request) -> None:
        match request.action:
            case Append(position, data):
                request.answer = self._create(request, self.objects, position, data)
                if isinstance(request.answer, Stored):
                    if position < self.newest.position:
                        self.refilled.add(position)
                    self.oracle.created(position, data)
            case StoreMark(mark):
                request.answer = self._create(request, self.marks, mark.number, mark.encode())
                if isinstance(request.answer, Stored):
                    self._marked(mark)
            case Read(position, limit):
                next_ = self.objects.get(position + len(request.read))
                if next_ is not None and len(request.read) < limit:
                    request.read.append(next_)
                    return
                request.answer = Reading(position, tuple(request.read), len(request.read) < limit, self.newest)
            case Survey(position):
                request.answer = self._survey(request, position)
            case Delete():
                if request.left:
                    position = request.left.pop(self.random.randrange(len(request.left)))
                    self.oracle.deleted(position)
                    self.objects.pop(position, None)
                    return
                request.answer = DONE
            case Restore() | Push():
                request.answer = DONE

    def _survey(self, request: Request, position: int) -> Surveyed | None:
        """A list, then the record beyond, then the missing one, then the mark. The list may lag."""
        if not request.read:
            beyond = sorted(other for other in self.objects if other > position)
            shown = beyond[: self.random.choice((None, None, 0, 1, 2))]
            if not shown:
                return Surveyed(position)
            request.beyond = shown[-1]
            request.read.append(self.objects[request.beyond])
            return None
        if not request.exists:
            request.exists = True
            return Surveyed(position) if position in self.objects else None
        return Surveyed(position, request.beyond, request.read[0], self.newest)

    @staticmethod
    def _create(request: Request, objects: dict[int, bytes], key: int, data: bytes) -> object:
        there = objects.get(key)
        if request.exists:
            return Unknown() if there is None else Taken(there)
        if there is None:
            objects[key] = data
            return Stored()
        request.exists = True
        return None

    def _marked(self, mark: Mark) -> None:
        checkpoint = Checkpoint.decode(decode(self.oracle.first[mark.checkpoint], mark.checkpoint))
        self.oracle.marked(mark.number, mark.position, mark.checkpoint, checkpoint.position)
        self.newest = mark

    # The end.

    def settle(self) -> None:
        """Repair everything, and let one more message through: then all machines are equal, and so is a new one."""
        for machine in self.machines:
            machine.is_paused = False
            if machine.node is None:
                self.start(machine)
        self._drain()
        self._elect()
        leader = next(machine for machine in self.machines if machine.leads)
        self.publish_new(leader, (0, 1))
        self._drain()
        for _ in range(2):
            self.checkpoint(leader)
            self._drain()
        assert self.values not in self.waiting, "the last message is not acknowledged"
        newcomer = Machine(len(self.machines))
        newcomer.start(0)
        self.machines.append(newcomer)
        for machine in self.machines:
            if machine.follows:
                self.poll(machine)
        self._drain()
        self._check_end()

    def _elect(self) -> None:
        """Depose who only believes to lead, and let one node lead."""
        for machine in self.machines:
            if machine.leads:
                self.change_members(machine, Kind.JOIN, machine)
        self._drain()
        for _ in range(len(self.machines)):
            if any(machine.leads for machine in self.machines):
                break
            self.take_over(self.machines[0])
            self._drain()

    def _drain(self) -> None:
        for _ in range(100_000):
            if not self.requests:
                return
            self.execute(self.requests[0])
        raise AssertionError("the cluster does not come to rest")

    def _check_end(self) -> None:
        places: set[Place] = set()
        for machine in self.machines:
            assert machine.node is not None
            assert {log: values for log, values in machine.disk.logs.items() if values} == dict(self.oracle.logs)
            assert machine.index == len(self.oracle.truth)
            places.add(machine.node.place)
        assert len({(place.members, place.leader, place.lineage, place.rounds) for place in places}) == 1
        below = {valid.position for valid in self.oracle.truth if valid.kind == Kind.ROUND}
        left = {position for position in below & self.objects.keys() if position < self.newest.position}
        assert left <= self.refilled, f"{left - self.refilled} should have been deleted"
