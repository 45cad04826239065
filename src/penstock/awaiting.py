"""Outcomes and tasks in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from penstock.errors import PenstockError
from penstock.health import Health
from penstock.outcome import Outcome


async def settled(outcome: Outcome) -> None:
    """Wait until it is settled, and raise its error if it failed."""
    if not outcome.is_settled:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_error: PenstockError | None) -> None:
            if not future.done():  # the waiter may have been cancelled
                future.set_result(None)

        outcome.then(wake)
        await future
    outcome.check()


def spawn(tasks: asyncio.TaskGroup, health: Health, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin a task. An unexpected exception ends this task only."""
    task = tasks.create_task(health.supervise("task", coroutine))
    # If it is cancelled before it begins, nobody has awaited the coroutine.
    task.add_done_callback(lambda _: coroutine.close())
    return task
