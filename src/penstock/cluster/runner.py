"""Runs a node on a shared log, in an event loop.

The node decides, `SharedLog` executes in worker threads, and a `Replica` applies. All calls of the node and the replica
are made in the loop, one after the other, so actions take effect in the order in which they were returned.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from penstock.cluster.actions import (
    Action,
    Answer,
    Append,
    Commit,
    Delete,
    Deposed,
    Lead,
    Read,
    Restore,
    StoreMark,
    Survey,
    Unknown,
)
from penstock.cluster.node import Node, Role
from penstock.cluster.record import Kind, Record, decode
from penstock.cluster.shared_log import SharedLog
from penstock.errors import Closed, ReadFailed
from penstock.health import Health

_T = TypeVar("_T")

# Requests of one node that are executed at once. Others wait.
_WORKERS: Final = 16
# What failed is repeated after this, twice as long each time.
_BACKOFF_S: Final = 0.05
_BACKOFF_MAX_S: Final = 2.0


class Replica(Protocol):
    """The local store of a node, and who serves it. It keeps the place of the last commit with its content."""

    def commit(self, commit: Commit) -> None:
        """Apply a record. If this node leads, acknowledge it."""
        ...

    async def restore(self, checkpoint: Record) -> None:
        """Fetch everything in a checkpoint that the local store does not have."""
        ...

    def lead(self, epoch: int) -> None:
        """Begin to serve: the local store has everything that was ever acknowledged."""
        ...

    def deposed(self, epoch: int) -> None:
        """Stop serving, and tell nobody that what is not committed was stored."""
        ...


class Runner:
    def __init__(self, node: Node, log: SharedLog, replica: Replica, health: Health, *, poll_s: float) -> None:
        """`poll_s`: how often a follower that hears nothing looks for new records."""
        self.node = node
        self._log = log
        self._replica = replica
        self._health = health
        self._poll_s = poll_s
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="penstock-cluster")
        self._tasks: asyncio.TaskGroup | None = None
        # Requests that failed since the last one that succeeded.
        self._failures = 0

    async def run(self) -> None:
        """Run the node until this is cancelled. Requests that are under way may be executed later."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    self._perform(self.node.poll())
                    await asyncio.sleep(self._poll_s)
        finally:
            self._tasks = None
            self._workers.shutdown(wait=False, cancel_futures=True)

    def take_over(self) -> None:
        """Try to lead."""
        self._perform(self.node.take_over(secrets.randbits(64)))

    def append(self, kind: Kind, body: bytes) -> int:
        """Append a record; return its number. `Replica.commit` with it follows, or `Replica.deposed`."""
        if self.node.role is not Role.LEADING:
            raise Closed(f"{self.node.member.node} does not lead the cluster: publish to {self.node.place.leader!r}")
        number, actions = self.node.append(kind, body)
        self._perform(actions)
        return number

    def pushed(self, position: int, data: bytes) -> None:
        """Take a committed record from the leader's connection."""
        self._perform(self.node.pushed(data, position))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Commit():
                    self._replica.commit(action)
                case Lead(epoch):
                    self._replica.lead(epoch)
                case Deposed(epoch):
                    self._replica.deposed(epoch)
                case _:
                    if self._tasks is None:
                        raise Closed(f"{self.node.member.node} has stopped")
                    self._tasks.create_task(self._request(action))

    async def _request(self, action: Append | Read | Survey | Restore | StoreMark | Delete) -> None:
        """Execute a request, and what follows from its answer."""
        log, node = self._log, self.node
        match action:
            case Append(position, data):
                self._perform(node.answered(action, await self._create(lambda: log.append(position, data))))
            case StoreMark(mark):
                self._perform(node.mark_answered(action, await self._create(lambda: log.store_mark(mark))))
            case Read(position, limit):
                self._perform(node.read(await self._repeat(lambda: log.read(position, limit))))
            case Survey(position):
                self._perform(node.surveyed(await self._repeat(lambda: log.survey(position))))
            case Delete(ranges):
                await self._repeat(lambda: log.delete(ranges))
                self._perform(node.deleted(action))
            case Restore(position):
                data = await self._repeat(lambda: log.record(position))
                await self._replica.restore(decode(data, position))
                self._perform(node.restored(data, position))

    async def _create(self, create: Callable[[], Answer]) -> Answer:
        """Return the outcome of a create. If it is unknown, wait: the node will repeat it."""
        answer = await self._in_worker(create)
        if isinstance(answer, Unknown):
            await self._failed(answer.reason)
        else:
            self._succeeded()
        return answer

    async def _repeat(self, request: Callable[[], _T]) -> _T:
        """Repeat a request that may be executed any number of times, until it succeeds."""
        while True:
            try:
                found = await self._in_worker(request)
            except ReadFailed as error:
                await self._failed(str(error))
            else:
                self._succeeded()
                return found

    async def _in_worker(self, request: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, request)

    async def _failed(self, reason: str) -> None:
        """Report that the store failed, and wait."""
        self._health.report("shared log", reason)
        self._failures += 1
        await asyncio.sleep(min(_BACKOFF_S * 2 ** min(self._failures, 10), _BACKOFF_MAX_S))

    def _succeeded(self) -> None:
        if self._failures:
            self._failures = 0
            self._health.clear("shared log")
