"""Tasks in the server's loop, and work in threads beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

from penstock import awaiting
from penstock.health import Health

P = ParamSpec("P")
T = TypeVar("T")

# Frames of clients that are opened in a thread at the same time.
WORKERS_MAX: Final = 2


class Tasks:
    def __init__(self, health: Health) -> None:
        self._health = health
        self._group: asyncio.TaskGroup | None = None
        # Held by those who call a function in a thread.
        self.working = asyncio.Semaphore(WORKERS_MAX)
        # Held while a large batch is opened and handed over: an open batch takes several times its size.
        self.large = asyncio.Lock()

    def open(self, group: asyncio.TaskGroup) -> None:
        """Run the tasks in this group from now on."""
        self._group = group

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. An unexpected exception ends only this task."""
        assert self._group is not None, "the server runs"
        return awaiting.spawn(self._group, self._health, coroutine)

    async def work(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long, and touches nothing of the broker, in a worker thread. Few run at a time."""
        async with self.working:
            return await asyncio.to_thread(function, *args, **kwargs)
