"""Nodes that run in an event loop, with a local store in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import ClassVar, Final

from penstock.cluster.actions import Commit
from penstock.cluster.checkpoint import Checkpoint, Member
from penstock.cluster.node import Node, Role
from penstock.cluster.place import Place
from penstock.cluster.record import Kind, Record
from penstock.cluster.runner import Runner
from penstock.cluster.shared_log import SharedLog
from penstock.health import Health
from penstock.object_store import ObjectStore

IN_FLIGHT: Final = 8

_numbers = itertools.count()


class Ledger:
    """A local store in memory: the bodies of all rounds, in order."""

    # What checkpoints name: the content of each.
    contents: ClassVar[dict[str, list[bytes]]] = {}

    def __init__(self) -> None:
        self.rounds: list[bytes] = []
        self.place = Place()
        self.acknowledged: list[bytes] = []
        self.epochs: list[int] = []
        self.deposed_by: list[int] = []
        self._leads = False
        self._changed = asyncio.Event()

    def commit(self, commit: Commit) -> None:
        if commit.record.kind is Kind.ROUND:
            self.rounds.append(commit.record.body)
            if self._leads:
                self.acknowledged.append(commit.record.body)
        self.place = commit.place
        self._changed.set()

    async def restore(self, checkpoint: Record) -> None:
        self.rounds = list(self.contents[Checkpoint.decode(checkpoint).content])

    def lead(self, epoch: int) -> None:
        self._leads = True
        self.epochs.append(epoch)
        self._changed.set()

    def deposed(self, epoch: int) -> None:
        self._leads = False
        self.deposed_by.append(epoch)
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()


class Reports(Health):
    """What was ever reported."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[str] = []

    def report(self, name: str, problem: str) -> None:
        super().report(name, problem)
        self.reports.append(problem)


class Running:
    """A node that runs until it is killed. What it had asked of the store is executed after that."""

    def __init__(self, name: str, store: ObjectStore) -> None:
        self.ledger = Ledger()
        self.health = Reports()
        node = Node(Member(name), Place())
        self.runner = Runner(node, SharedLog(store), self.ledger, self.health, poll_s=0.02)
        self.task = asyncio.create_task(self.runner.run())

    @property
    def node(self) -> Node:
        return self.runner.node

    async def lead(self) -> None:
        await asyncio.sleep(0)
        while self.node.role is not Role.LEADING:
            self.runner.take_over()
            await asyncio.sleep(0.01)

    async def publish(self, count: int) -> None:
        """Append rounds, several in flight, and wait until they are committed."""
        ledger, node = self.ledger, self.node
        for number in range(count):
            await ledger.until(lambda: node.pending < IN_FLIGHT)
            self.runner.append(Kind.ROUND, b"%s:%d" % (self.node.member.node.encode(), number))
        await ledger.until(lambda: not node.pending)

    async def checkpoint(self) -> None:
        """Write a checkpoint, and wait until what it holds is deleted from the log."""
        name = f"content{next(_numbers)}"
        Ledger.contents[name] = list(self.ledger.rounds)
        self.runner._perform(self.node.checkpoint(self.node.place, name)[1])
        while not self.node.may_checkpoint:
            await asyncio.sleep(0.01)

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
