"""Changes of a store: topics that are created, altered, purged and deleted, one at a time.

A change is a generator of steps. It decides; its driver waits for the disk, in the calling thread (`now`) or in the
event loop (`in_turn`). Anything may happen between two steps: a crash, or other tasks. An exception of a step is raised
in the change.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.errors import Closed, Overloaded, PenstockError
from penstock.health import Health
from penstock.log.log import Log
from penstock.store.meta import Change
from penstock.store.rounds import Lanes

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StateWrite(NamedTuple):
    """Write to the state topic."""

    changes: list[Change]


class Work(NamedTuple):
    """Call a function that waits for the disk."""

    run: Callable[[], None]


class Idle(NamedTuple):
    """Wait until no worker writes to these logs, which are abandoned."""

    logs: list[Log]


Step = StateWrite | Work | Idle
Steps = Generator[Step, None, T]


class Changes:
    def __init__(
        self,
        directory: Path,
        health: Health,
        worker: Executor,
        *,
        commit_now: Callable[[list[Change]], None],
        commit: Callable[[list[Change]], Awaitable[None]],
    ) -> None:
        """`worker` runs the work of `in_turn`."""
        self._directory = directory
        self._health = health
        self._worker = worker
        self._commit_now = commit_now
        self._commit = commit
        # Changes that `run` has not begun, and whether one is running.
        self._turns: deque[_Turn] = deque()
        self._asked = asyncio.Event()
        self._is_changing = False
        self._is_closed = False

    def now(self, change: Steps[T]) -> T:
        """Make a change in the calling thread."""
        if self._is_changing:
            raise Overloaded("another topic is being changed: try again")
        raised: BaseException | None = None
        try:
            while True:
                step = change.send(None) if raised is None else change.throw(raised)
                raised = None
                try:
                    self._do_now(step)
                except BaseException as error:  # noqa: BLE001 - it is raised in the change
                    raised = error
        except StopIteration as end:
            result: T = end.value
            return result

    def _do_now(self, step: Step) -> None:
        match step:
            case StateWrite(changes):
                self._commit_now(changes)
            case Work(run):
                run()
            case Idle():
                pass  # this thread would finish the round that runs, so it cannot wait for it

    async def in_turn(self, change: Steps[T]) -> T:
        """Let `run` make a change after all earlier ones. Cancelling the caller does not interrupt a change that has
        begun."""
        if self._is_closed:
            raise Closed(f"{self._directory}: the store is closed")
        turn = _Turn(change, asyncio.get_running_loop().create_future())
        self._turns.append(turn)
        self._asked.set()
        result: T = await turn.answer
        return result

    async def run(self, lanes: Lanes) -> None:
        while True:
            while self._turns:
                turn = self._turns.popleft()
                if not turn.answer.done():
                    await self._take(turn, lanes)
            self._asked.clear()
            await self._asked.wait()

    def close(self) -> None:
        self._is_closed = True
        while self._turns:
            self._turns.popleft().refuse(Closed(f"{self._directory}: the store is closed, nothing was changed"))

    async def _take(self, turn: _Turn, lanes: Lanes) -> None:
        """Make a change to the end, even if `run` is cancelled meanwhile."""
        self._is_changing = True
        task = asyncio.create_task(self._drive(turn.change, lanes))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                if lanes.end.done():
                    task.cancel()
                    await asyncio.wait([task])
                else:
                    await asyncio.wait([task, lanes.end], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                cancelled = error
        self._is_changing = False
        turn.tell(task, self._health)
        if cancelled is not None:
            raise cancelled

    async def _drive(self, change: Steps[T], lanes: Lanes) -> T:
        raised: BaseException | None = None
        try:
            while True:
                step = change.send(None) if raised is None else change.throw(raised)
                raised = None
                try:
                    await self._do(step, lanes)
                except BaseException as error:  # noqa: BLE001 - it is raised in the change
                    raised = error
        except StopIteration as end:
            result: T = end.value
            return result

    async def _do(self, step: Step, lanes: Lanes) -> None:
        match step:
            case StateWrite(changes):
                await self._commit(changes)
            case Work(run):
                await asyncio.get_running_loop().run_in_executor(self._worker, run)
            case Idle(logs):
                while any(log.flusher.is_busy for log in logs):
                    lanes.finished.clear()
                    await lanes.finished.wait()


class _Turn(NamedTuple):
    """A change and the future that its caller awaits."""

    change: Steps[Any]
    answer: asyncio.Future[Any]

    def tell(self, task: asyncio.Task[Any], health: Health) -> None:
        """Pass the result on to the caller."""
        if task.cancelled():
            self.refuse(
                Closed("the process ends while a topic is changed: the next start finishes or undoes the change")
            )
        elif (error := task.exception()) is not None:
            if not isinstance(error, PenstockError | ValueError):
                health.fault("topics", "the next start finishes or undoes the change of a topic", error)
            elif self.answer.done():
                logger.warning("a change of a topic failed after its caller was cancelled: %s", error)
            self.refuse(error)
            if not isinstance(error, Exception):
                raise error  # it ends the process, and `run` first
        elif not self.answer.done():
            self.answer.set_result(task.result())

    def refuse(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
