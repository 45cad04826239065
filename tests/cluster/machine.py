"""A machine of the simulated cluster: a node, its local store, and what its clients wait for."""

from __future__ import annotations

from collections import defaultdict
from random import Random

from penstock.cluster.actions import Commit
from penstock.cluster.checkpoint import Member
from penstock.cluster.node import Node, Role
from penstock.cluster.place import Place
from penstock.cluster.record import Kind
from tests.cluster.oracle import Message, decode_round


class Disk:
    """A local store: logs that a power cut shortens, each by itself, and the place that belongs to the last sync."""

    def __init__(self) -> None:
        self.logs: dict[int, list[int]] = defaultdict(list)
        self.place = Place()
        self._synced: dict[int, int] = {}
        self._synced_place = self.place

    def apply(self, commit: Commit) -> None:
        """Apply a round at its offsets. What is there since before a crash stays."""
        if commit.record.kind is Kind.ROUND:
            for log, offset, value in decode_round(commit.record.body):
                self._put(log, offset, value)
        self.place = commit.place

    def restore(self, logs: dict[int, list[int]], place: Place) -> None:
        for log, values in logs.items():
            for offset, value in enumerate(values):
                self._put(log, offset, value)
        self.place = place

    def _put(self, log: int, offset: int, value: int) -> None:
        there = self.logs[log]
        assert offset <= len(there), f"offset {offset} of log {log} would leave a gap after {len(there)}"
        if offset == len(there):
            there.append(value)
        assert there[offset] == value, f"offset {offset} of log {log} would be shown with two contents"

    def sync(self) -> None:
        self._synced = {log: len(values) for log, values in self.logs.items()}
        self._synced_place = self.place

    def kill(self, random: Random) -> None:
        """A killed process loses nothing that it wrote, but its place may be an old one."""
        self.place = random.choice((self.place, self._synced_place))

    def cut(self, random: Random) -> None:
        for log, values in self.logs.items():
            del values[random.randint(self._synced.get(log, 0), len(values)) :]
        self.place = self._synced_place


class Machine:
    def __init__(self, number: int) -> None:
        self.number = number
        self.disk = Disk()
        self.node: Node | None = None
        # One more with each start: answers of earlier lives are lost.
        self.life = 0
        self.is_paused = False
        # How many valid records the node knows.
        self.index = 0
        # What is appended as the leader, by number, and where the next message goes.
        self.pending: dict[int, list[Message]] = {}
        self.ends: dict[int, int] = {}
        # A checkpoint whose content is stored, and which is not appended yet.
        self.planned: tuple[Place, str] | None = None

    @property
    def member(self) -> Member:
        return Member(f"node{self.number}")

    @property
    def leads(self) -> bool:
        return self.node is not None and not self.is_paused and self.node.role is Role.LEADING

    @property
    def follows(self) -> bool:
        return self.node is not None and not self.is_paused and self.node.role is Role.FOLLOWING

    def start(self, index: int) -> None:
        self.node = Node(self.member, self.disk.place)
        self.life += 1
        self.index = index

    def stop(self) -> None:
        self.node = None
        self.is_paused = False
        self.forget()

    def forget(self) -> None:
        """What was appended and not committed is nobody's any more."""
        self.pending = {}
        self.planned = None

    def begin_to_lead(self) -> None:
        self.pending = {}
        self.ends = {log: len(values) for log, values in self.disk.logs.items()}

    def next_messages(self, logs: tuple[int, ...], value: int) -> list[Message]:
        messages = [Message(log, self.ends.get(log, 0), value) for log in logs]
        for log in logs:
            self.ends[log] = self.ends.get(log, 0) + 1
        return messages

    def knows(self, value: int) -> bool:
        """Whether a client's repetition is a duplicate."""
        if any(value in values for values in self.disk.logs.values()):
            return True
        return any(message.value == value for messages in self.pending.values() for message in messages)
